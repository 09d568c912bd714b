"""Retries (spec 7): a loop that fails at any statement, and is tried again, ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import delete, event, select
from sqlalchemy.exc import OperationalError

from airflow import settings
from airflow.jobs.asset_partition_wake import claim, step
from airflow.models.asset import AssetPartitionDagRun, PartitionedAssetKeyLog
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.sdk import Asset
from airflow.utils.retries import MAX_DB_RETRIES
from airflow.utils.sqlalchemy import prohibit_commit

from tests_common.db import new_session
from tests_common.factories import (
    Scheduler,
    ask,
    consumer,
    day_rollup,
    emit,
    fired,
    hours,
    insert_dags,
    insert_pending,
    insert_runs,
)

pytestmark = pytest.mark.usefixtures("db", "at_once")

A, B, C = (Asset(name, uri=f"test://{name}") for name in "abc")


@pytest.fixture
def at_once(monkeypatch):
    """Retries without their pause."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


@pytest.fixture
def sent(monkeypatch) -> list[tuple]:
    """The metrics that were sent."""
    sent: list[tuple] = []

    class Stats:
        def __getattr__(self, kind: str) -> Callable:
            # The gauge and the timer tell seconds that differ from run to run.
            return lambda name, value, **kwargs: sent.append(
                (kind, name, value if kind == "incr" else None, kwargs)
            )

    monkeypatch.setattr(step, "stats", Stats())
    return sent


def loop(scheduler: Scheduler) -> None:
    """Do what the scheduler's loop does: create Dag runs where commits are prohibited, then commit."""
    with new_session() as session, prohibit_commit(session) as guard:
        scheduler.runner._create_dagruns_for_dags(guard, session)
        guard.commit()


def failure(*args: Any) -> None:
    raise OperationalError("statement", {}, Exception("the server has gone away"))


@contextmanager
def failing_at(*numbers: int) -> Iterator[list[int]]:
    """Fail the statements with these numbers, counted from 1 over all tries; yields the count so far."""
    count = [0]

    def fail(*args: Any) -> None:
        count[0] += 1
        if count[0] in numbers:
            failure()

    event.listen(settings.engine, "before_cursor_execute", fail)
    try:
        yield count
    finally:
        event.remove(settings.engine, "before_cursor_execute", fail)


def write_dags() -> None:
    consumer("a", A)
    consumer("b", B)
    consumer("c", C, day_rollup())


def prepare() -> Scheduler:
    """
    Put a loop before the scheduler that does all a loop can do.

    A pass is under way and finds complete runs; one run is asked for and complete, one waits, one is to be dropped, one
    is gone; a fan-out starts that two loops finish.
    """
    with new_session() as session:
        for model in (
            AssetPartitionDagRun,
            PartitionedAssetKeyLog,
            AssetPartitionDagRunWake,
            TaskInstance,
            DagRun,
        ):
            session.execute(delete(model), execution_options={"synchronize_session": False})
    insert_pending("a", ["pass 1", "pass 2"], asset=A)
    insert_pending("c", ["2024-03-01", "2024-03-02"])
    scheduler = Scheduler(budget=5)
    wake = scheduler.runner._asset_partition_wake
    with new_session() as session:
        wake._agenda.start_pass(0, upto=claim.newest_run(session=session))
    wake._agenda.next_pass_at = float("inf")
    wake._table_checked = False

    insert_pending("b", ["out 1", "out 2", "out 3"], asset=B)
    ask("b")
    emit(A, "asked")
    emit(C, hours("2024-03-03")[0])
    (stale,) = insert_pending("c", ["stale"])
    with new_session() as session:
        session.get(AssetPartitionDagRun, stale).rollup_fingerprint = {"old": "mapper"}
    ask("c", [stale, stale + 1000])
    return scheduler


def outcome(scheduler: Scheduler) -> dict[str, Any]:
    """Return all that a loop leaves behind, without the ids, which differ from run to run."""
    with new_session() as session:
        keys = dict(
            session.execute(select(AssetPartitionDagRun.id, AssetPartitionDagRun.partition_key)).all()
        )
        created = session.execute(select(DagRun.dag_id, DagRun.partition_key).order_by(DagRun.id)).all()
        requests = session.execute(
            select(AssetPartitionDagRunWake.target_dag_id, AssetPartitionDagRunWake.apdr_id).order_by(
                AssetPartitionDagRunWake.id
            )
        ).all()
        key_logs = session.scalars(
            select(PartitionedAssetKeyLog.target_partition_key).order_by(
                PartitionedAssetKeyLog.target_partition_key
            )
        ).all()
    agenda = scheduler.runner._asset_partition_wake._agenda
    return {
        "keys": sorted(keys.values()),
        "created": [tuple(row) for row in created],
        "fired": {dag_id: fired(dag_id) for dag_id in "abc"},
        "requests": [(dag_id, keys.get(apdr_id)) for dag_id, apdr_id in requests],
        "key logs": list(key_logs),
        "fan-outs": [
            (out.dag_id, len(out.request_ids), keys.get(out.after), out.exhausted, len(out.held))
            for out in agenda.fan_outs.values()
        ],
        "pass": agenda.resync
        and (
            agenda.resync.kind,
            agenda.resync.after[0],
            keys.get(agenda.resync.after[1]),
            agenda.resync.exhausted,
        ),
        "turn": agenda.turn,
        "next": agenda.next_kind,
    }


def expected(sent: list[tuple]) -> tuple[dict[str, Any], list[tuple], int]:
    """Run the loop without a failure: what it leaves, what it sends, and of how many statements it is."""
    scheduler = prepare()
    with failing_at() as count:
        loop(scheduler)
    result = outcome(scheduler), list(sent), count[0]
    sent.clear()
    return result


def test_the_loop_does_all_a_loop_can_do(sent):
    """What the tests below retry is a loop in which every part of the step has something to do."""
    write_dags()
    left, metrics, _ = expected(sent)
    assert "asked" in left["fired"]["a"]
    assert left["fired"]["b"]
    assert "stale" not in left["keys"]
    assert [("b", None)] == [request for request in left["requests"] if request[0] == "b"]
    assert left["fan-outs"]
    assert left["pass"]
    assert {"gauge", "incr"} == {kind for kind, *_ in metrics}


def test_failure_at_each_statement(sent):
    """Wherever a loop fails and is tried again, it leaves and sends the same as without."""
    write_dags()
    left, metrics, statements = expected(sent)
    assert statements > 20
    for number in range(1, statements + 1):
        scheduler = prepare()
        with failing_at(number):
            loop(scheduler)
        assert left == outcome(scheduler), f"failed at statement {number}"
        assert metrics == sent, f"failed at statement {number}"
        sent.clear()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 1])
def test_several_failures_in_a_row(part, sent):
    """A loop that fails on every try but the last one leaves the same as without."""
    write_dags()
    left, metrics, statements = expected(sent)
    assert MAX_DB_RETRIES == 3
    first = max(1, int(statements * part))
    scheduler = prepare()
    with failing_at(first, first + first):
        loop(scheduler)
    assert left == outcome(scheduler)
    assert metrics == sent


def test_failure_on_every_try(sent):
    """A loop that fails for good keeps nothing and sends nothing; a later one does it all."""
    write_dags()
    left, metrics, _ = expected(sent)
    scheduler = prepare()
    before = outcome(scheduler)
    with failing_at(*range(10, 1000)), pytest.raises(OperationalError):
        loop(scheduler)
    assert before == outcome(scheduler)
    assert [] == sent
    loop(scheduler)
    assert left == outcome(scheduler)
    assert metrics == sent


def test_failing_commit(sent):
    """A loop whose commit fails keeps nothing and sends nothing; a later one does it all."""
    write_dags()
    left, metrics, _ = expected(sent)
    scheduler = prepare()
    before = outcome(scheduler)
    event.listen(settings.engine, "commit", failure)
    try:
        with pytest.raises(OperationalError):
            loop(scheduler)
    finally:
        event.remove(settings.engine, "commit", failure)
    assert before == outcome(scheduler)
    assert [] == sent
    loop(scheduler)
    assert left == outcome(scheduler)
    assert metrics == sent


def test_rollback_then_commit_of_the_same_session(sent):
    """What a session does after it rolled a loop back does not count for the loop."""
    write_dags()
    scheduler = prepare()
    before = outcome(scheduler)
    with new_session() as session:
        scheduler.runner._create_dagruns_for_partitioned_asset_dags(session)
        session.rollback()
        session.execute(select(DagModel.dag_id))
        session.commit()
    assert before == outcome(scheduler)
    assert [] == sent


def test_savepoint_is_no_commit(sent):
    """A savepoint that is released within the loop keeps nothing yet."""
    write_dags()
    scheduler = prepare()
    with new_session() as session:
        agenda = scheduler.runner._asset_partition_wake._agenda
        scheduler.runner._create_dagruns_for_partitioned_asset_dags(session)
        with session.begin_nested():
            session.execute(select(DagModel.dag_id))
        assert agenda is scheduler.runner._asset_partition_wake._agenda
        assert [] == sent
    assert agenda is not scheduler.runner._asset_partition_wake._agenda
    assert sent


@pytest.mark.usefixtures("no_passes")
def test_retry_evaluates_the_definition_that_is_stored_now(monkeypatch):
    """A definition that is changed in place between a failed try and the next one is what the next one evaluates."""
    consumer("dag", A & B)
    scheduler = Scheduler()
    scheduler.settle()
    emit(A, "a")
    find = DagModel.dags_needing_dagruns
    written: list[float] = []

    def fail_once(session):
        if not written:
            failure()
        return find(session)

    def write(seconds: float) -> None:
        consumer("dag", A | B)
        written.append(seconds)

    monkeypatch.setattr(DagModel, "dags_needing_dagruns", fail_once)
    monkeypatch.setattr("tenacity.nap.time.sleep", write)
    with new_session() as session, prohibit_commit(session) as guard:
        # As the loop's session does it: rows that were read stay in it.
        held = session.scalars(select(SerializedDagModel)).all()
        assert held[0].dag
        scheduler.runner._create_dagruns_for_dags(guard, session)
        guard.commit()
        assert 1 == len(held)
    assert 1 == len(written)
    with new_session() as session:
        assert 1 == len(session.scalars(select(SerializedDagModel)).all())
    assert ["a"] == fired("dag")


@pytest.mark.usefixtures("no_passes", "clock", "slow_reads")
def test_id_that_a_failed_loop_drew():
    """A loop that is rolled back does not move the id from which the next ones read: SQLite gives that id out again."""
    insert_dags("dag")
    (run,) = insert_runs("dag")
    scheduler = Scheduler()
    scheduler.step()
    with new_session() as session:
        scheduler.runner._create_dagruns_for_partitioned_asset_dags(session)
        session.rollback()
    ask("dag", [run])
    assert [run] == scheduler.evaluate()
