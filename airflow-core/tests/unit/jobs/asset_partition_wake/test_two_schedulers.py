"""Several schedulers and writers at once, on real connections (spec 6 and 7): none waits for another, nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.orm import Session

from airflow.jobs.asset_partition_wake import claim, queue
from airflow.models.asset import AssetPartitionDagRun as APDR
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake, WakeReason, request_for_dags
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.sdk import Asset

from tests_common.db import new_session
from tests_common.factories import (
    Scheduler,
    change_dag,
    consumer,
    day_rollup,
    days,
    emit,
    fired,
    hours,
    insert_pending,
    pending,
    requests,
)

pytestmark = [pytest.mark.backend("postgresql", "mysql"), pytest.mark.usefixtures("db")]

PLAIN = Asset("plain", uri="test://plain")
HOURLY = Asset("hourly", uri="test://hourly")


@contextmanager
def impatient_session() -> Iterator[Session]:
    """Open a session in which waiting for a lock is an error."""
    with new_session() as session:
        if os.environ["WAKE_BACKEND"] == "mysql":
            session.execute(text("SET innodb_lock_wait_timeout = 1"))
        else:
            session.execute(text("SET lock_timeout = '200ms'"))
        yield session


@contextmanager
def before_statement(session: Session, words: str, action: Callable[[], None]) -> Iterator[None]:
    """Run *action* once, before the session sends the first statement that contains *words*."""
    connection = session.connection()
    done = False

    def look(conn, cursor, statement, parameters, context, executemany):
        nonlocal done
        if not done and words in statement:
            done = True
            action()

    event.listen(connection, "before_cursor_execute", look)
    yield
    event.remove(connection, "before_cursor_execute", look)
    assert done, f"no statement with {words!r}"


LOCK_RUNS = "FOR UPDATE OF asset_partition_dag_run "
DELETE_REQUESTS = "DELETE "
READ_KEY_LOGS = "FROM partitioned_asset_key_log"


def step(scheduler: Scheduler, session: Session) -> set[str]:
    """Run a step and leave its transaction open."""
    return scheduler.runner._create_dagruns_for_partitioned_asset_dags(session)


def dag_run_keys(dag_id: str) -> list[str]:
    with new_session() as session:
        keys = select(DagRun.partition_key).where(DagRun.dag_id == dag_id).order_by(DagRun.partition_key)
        return list(session.scalars(keys))


def test_run_that_a_peer_has_locked_keeps_its_request():
    """A locked run is passed over without waiting, keeps its request, and fires once the peer lets go."""
    consumer("a", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, "locked", "free")
    with new_session() as peer:
        peer.scalars(select(APDR).where(APDR.partition_key == "locked").with_for_update()).all()
        with impatient_session() as session:
            scheduler.step(session)
        assert ["free"] == fired("a")
        assert 1 == len(requests("a"))
    scheduler.step()
    assert ["free", "locked"] == fired("a")
    assert [] == requests()


def test_two_open_steps_share_the_runs():
    """A second scheduler steps while the first one's transaction is open: no wait, and no run fires twice."""
    consumer("a", PLAIN)
    first, second = Scheduler(budget=3), Scheduler(budget=3)
    first.settle()
    second.settle()
    emit(PLAIN, *"abcdef")
    with impatient_session() as one, impatient_session() as other:
        step(first, one)
        step(second, other)
        other.commit()
        one.commit()
    assert list("abcdef") == sorted(fired("a"))
    assert list("abcdef") == dag_run_keys("a")
    assert [] == requests()


def test_run_that_a_peer_fires_before_our_lock():
    """A run that fires between our read and our lock is not fired again, and its request is dropped."""
    consumer("a", PLAIN)
    first, second = Scheduler(), Scheduler()
    first.settle()
    second.settle()
    emit(PLAIN, "a")
    with impatient_session() as session, before_statement(session, LOCK_RUNS, lambda: second.step()):
        step(first, session)
    assert ["a"] == dag_run_keys("a")
    assert [] == requests()


@pytest.mark.parametrize("moment", [LOCK_RUNS, DELETE_REQUESTS, READ_KEY_LOGS])
def test_request_written_during_the_step_survives(moment):
    """A request committed after our read, up to our evaluation, is not deleted with those that we read."""
    consumer("day", HOURLY, day_rollup())
    scheduler = Scheduler()
    scheduler.settle()
    keys = hours("2024-03-01")
    emit(HOURLY, *keys[:22])
    late = keys[22]
    with impatient_session() as session, before_statement(session, moment, lambda: emit(HOURLY, late)):
        step(scheduler, session)
    assert 1 == len(requests("day"))
    emit(HOURLY, keys[23])
    scheduler.step()
    assert ["2024-03-01"] == fired("day")


def test_smaller_id_committed_after_a_larger_was_answered():
    """Ids are given out before commit: a request below those already answered is found all the same."""
    consumer("a", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    with new_session() as slow:
        emit(PLAIN, "slow", session=slow)
        smaller = slow.scalar(select(func.max(Wake.id)))
        other = Asset("other", uri="test://other")
        consumer("b", other)
        emit(other, "quick")
        with new_session() as session:
            assert smaller < session.scalar(select(func.max(Wake.id)))
        scheduler.settle()
        assert ["quick"] == fired("b")
    assert [("a", "key log")] == [(dag_id, reason) for dag_id, _, reason in requests()]
    scheduler.step()
    assert ["slow"] == fired("a")


def test_writer_that_stays_uncommitted_for_many_loops():
    """Loops neither wait for an open writer nor lose what it commits in the end."""
    consumer("a", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    with new_session() as slow:
        emit(PLAIN, "a", session=slow)
        for _ in range(20):
            with impatient_session() as session:
                scheduler.step(session)
        assert [] == fired("a")
    scheduler.step()
    assert ["a"] == fired("a")


def ask_for_dag(dag_id: str) -> None:
    with new_session() as session:
        request_for_dags(
            select(DagModel.dag_id).where(DagModel.dag_id == dag_id),
            reason=WakeReason.TIMETABLE_CHANGE,
            session=session,
        )


def test_two_schedulers_fan_out_the_same_dag():
    """Both fan out, step by step in each other's open transactions: every run fires once, no request is left."""
    consumer("a", PLAIN)
    first, second = Scheduler(budget=10), Scheduler(budget=10)
    first.settle()
    second.settle()
    keys = days(35)
    insert_pending("a", keys, asset=PLAIN)
    ask_for_dag("a")
    for _ in range(10):
        with impatient_session() as one, impatient_session() as other:
            step(first, one)
            step(second, other)
    first.settle()
    second.settle()
    assert keys == sorted(fired("a"))
    assert keys == dag_run_keys("a")
    assert [] == requests()


def test_fan_out_waits_for_a_run_that_a_peer_evaluates_with_the_old_definition():
    """A run that a peer had locked while we fanned out may have been evaluated before the change: it comes again."""
    both = Asset("x", uri="test://x") & PLAIN
    consumer("a", both)
    first, second = Scheduler(), Scheduler()
    first.settle()
    second.settle()
    emit(PLAIN, "a")
    with new_session() as peer:
        assert set() == step(second, peer)  # evaluated: x is missing
        consumer("a", Asset("x", uri="test://x") | PLAIN)
        first.step()
        assert [] == fired("a")
        assert ("a", None, "timetable change") in requests("a")
    first.step()
    assert ["a"] == fired("a")
    assert [] == requests()


def test_fan_out_resumes_where_another_source_tried_a_locked_run_first():
    """A run found locked in the first round of a loop and passed by a fan-out in a later round is not passed for good."""
    consumer("a", PLAIN)
    scheduler = Scheduler(budget=4)
    scheduler.settle()
    emit(PLAIN, *"abcdefgh")
    ask_for_dag("a")
    with new_session() as peer:
        peer.scalars(select(APDR).where(APDR.partition_key.in_(("a", "b"))).with_for_update()).all()
        for _ in range(10):
            with impatient_session() as session:
                scheduler.step(session)
        assert ["a", "b"] == pending("a")
        assert ("a", None, "timetable change") in requests("a")
    scheduler.settle()
    assert [] == pending("a")
    assert [] == requests()


def test_killed_scheduler_loses_nothing():
    """A step whose connection breaks before its commit leaves requests and runs as they were; a peer fires them."""
    consumer("a", PLAIN)
    first, second = Scheduler(), Scheduler()
    first.settle()
    second.settle()
    emit(PLAIN, "a")
    session = new_session()
    with session as killed:
        assert {"a"} == step(first, killed)
        killed.connection().invalidate()
        killed.rollback()
    assert 1 == len(requests("a"))
    second.step()
    assert ["a"] == fired("a")
    assert ["a"] == dag_run_keys("a")


def test_two_tidy_at_the_same_moment(monkeypatch):
    """Both merge what they can lock, neither waits; one request is left in the end, as old as the oldest."""
    monkeypatch.setattr(queue, "BATCH", 5)
    consumer("a", PLAIN)
    emit(PLAIN, *(str(n) for n in range(20)))
    change_dag("a", is_paused=True)
    with new_session() as session:
        since = session.scalar(select(func.min(Wake.created_at)))
    with impatient_session() as one:
        before_commit = []

        def tidy_too(session):
            if not before_commit:
                before_commit.append(True)
                with impatient_session() as other:
                    queue.tidy(session=other)

        event.listen(one, "before_commit", tidy_too)
        queue.tidy(session=one)
    with new_session() as session:
        queue.tidy(session=session)
        left = session.scalars(select(Wake)).all()
        assert [("a", None, "merged", since)] == [
            (wake.target_dag_id, wake.apdr_id, wake.reason, wake.created_at) for wake in left
        ]


def test_settling_does_not_wait_for_a_peer_that_deletes():
    """A request that a peer is deleting is left to the peer."""
    consumer("a", PLAIN)
    emit(PLAIN, "a", "b")
    with new_session() as session:
        ids = list(session.scalars(select(Wake.id).order_by(Wake.id)))
    with new_session() as peer:
        queue.settle(ids[:1], session=peer)
        with impatient_session() as session:
            queue.settle(ids, session=session)
    assert [] == requests()


@pytest.mark.backend("mysql")
def test_mysql_locks_only_the_runs_it_returns():
    """The claim locks the runs that it returns, by primary key, and no others; its plan sorts nothing."""
    consumer("a", HOURLY, day_rollup())
    consumer("b", HOURLY, day_rollup(), paused=True)
    ids = insert_pending("a", days(50), asset=HOURLY) + insert_pending("b", days(50), asset=HOURLY)
    with new_session() as session:
        statements = []
        event.listen(
            session.connection(),
            "before_cursor_execute",
            lambda conn, cursor, statement, parameters, context, many: statements.append(
                (statement, parameters)
            ),
        )
        runs = claim.lock(ids[30:70], session=session)
        assert ids[30:50] == sorted(run.id for run in runs)
        with new_session() as observer:
            locks = observer.execute(
                text(
                    "SELECT index_name, lock_mode, COUNT(*) FROM performance_schema.data_locks "
                    "WHERE object_schema = DATABASE() AND object_name = 'asset_partition_dag_run' "
                    "AND lock_type = 'RECORD' GROUP BY 1, 2"
                )
            ).all()
        assert [("PRIMARY", "X,REC_NOT_GAP", 20)] == [tuple(row) for row in locks]
        statement, parameters = next(found for found in statements if LOCK_RUNS in found[0])
        plan = session.connection().exec_driver_sql(f"EXPLAIN FORMAT=JSON {statement}", parameters).scalar()
        assert "filesort" not in plan
