"""Evaluations that fail (spec 6): the other runs of the loop fire, the failing one waits, and nothing runs hot."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from sqlalchemy import delete, select, update

from airflow.jobs import scheduler_job_runner
from airflow.models.asset import AssetPartitionDagRun
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake, WakeReason, request_for_dags
from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.serialized_dag import SerializedDagModel
from airflow.partition_mappers.base import RollupMapper
from airflow.sdk import Asset
from airflow.serialization.definitions.dag import SerializedDAG

from tests_common.db import new_session, recorded_statements
from tests_common.factories import (
    Scheduler,
    ask,
    consumer,
    day_rollup,
    emit,
    fired,
    hours,
    insert_pending,
    pending,
    requests,
)

pytestmark = pytest.mark.usefixtures("db", "no_passes")

FINE = Asset("fine", uri="test://fine")
BROKEN = Asset("broken", uri="test://broken")
DAY = "2024-03-01"


def stored() -> dict:
    with new_session() as session:
        return session.scalars(
            select(SerializedDagModel._data).where(SerializedDagModel.dag_id == "broken")
        ).one()


def store(data: dict) -> None:
    with new_session() as session:
        session.execute(
            update(SerializedDagModel)
            .where(SerializedDagModel.dag_id == "broken")
            .values({SerializedDagModel._data: data})
        )


@contextmanager
def no_row(monkeypatch):
    with new_session() as session:
        session.execute(delete(DagVersion).where(DagVersion.dag_id == "broken"))
    yield
    consumer("broken", BROKEN, day_rollup())


@contextmanager
def bad_row(monkeypatch):
    good = stored()
    store(
        {"__version": good["__version"], "dag": {"dag_id": "broken", "timetable": {"__type": "no such type"}}}
    )
    yield
    store(good)


@contextmanager
def bad_fingerprint(monkeypatch):
    fingerprint = scheduler_job_runner.compute_rollup_fingerprint

    def fail(timetable):
        if any(key.name == "broken" for key, _ in timetable.asset_condition.iter_assets()):
            raise RuntimeError("no fingerprint")
        return fingerprint(timetable)

    with monkeypatch.context() as patched:
        patched.setattr(scheduler_job_runner, "compute_rollup_fingerprint", fail)
        yield


@contextmanager
def bad_mapper(monkeypatch):
    def fail(self, downstream_key):
        raise RuntimeError("no upstream")

    with monkeypatch.context() as patched:
        patched.setattr(RollupMapper, "to_upstream", fail)
        yield


def by_key_log() -> None:
    emit(BROKEN, hours(DAY)[0])


def by_definition() -> None:
    with new_session() as session:
        request_for_dags(
            select(DagModel.dag_id).where(DagModel.dag_id == "broken"),
            reason=WakeReason.TIMETABLE_CHANGE,
            session=session,
        )


@pytest.mark.parametrize("ask_again", [by_key_log, by_definition])
@pytest.mark.parametrize("fault", [no_row, bad_row, bad_fingerprint, bad_mapper])
def test_failing_dag(fault, ask_again, monkeypatch, clock):
    """The others fire beside a Dag that fails; its run waits without a hot loop, and fires once repaired and asked for."""
    consumer("broken", BROKEN, day_rollup())
    consumer("fine", FINE)
    scheduler = Scheduler()
    scheduler.settle()
    emit(BROKEN, *hours(DAY))
    emit(FINE, "a")

    with fault(monkeypatch):
        assert {"fine"} == scheduler.step()
        assert ["a"] == fired("fine")
        assert [DAY] == pending("broken")
        assert [] == requests()
        with recorded_statements() as statements:
            assert set() == scheduler.step()
        assert 1 == len(statements)

    ask_again()
    scheduler.settle()
    assert [DAY] == fired("broken")
    assert [] == requests()


def test_definition_that_is_stored_again_repairs():
    """A Dag whose definition was missing fires what waits as soon as the Dag processor writes it."""
    consumer("broken", BROKEN)
    scheduler = Scheduler()
    scheduler.settle()
    with new_session() as session:
        session.execute(delete(DagVersion))
    ask("broken", insert_bare(["a"]))
    scheduler.settle()
    assert ["a"] == pending("broken")
    consumer("broken", BROKEN)
    assert {"broken"} == scheduler.settle()


def insert_bare(keys: list[str]) -> list[int]:
    """Insert complete runs while the Dag has no definition to take the fingerprint from."""
    consumer("template", BROKEN)
    ids = insert_pending("template", keys, asset=BROKEN)
    with new_session() as session:
        session.execute(update(AssetPartitionDagRun).values(target_dag_id="broken"))
        session.execute(delete(AssetPartitionDagRunWake))
    return ids


@pytest.mark.parametrize("failing", ["a", "z"])
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_failing_create_dagrun(failing, error, monkeypatch):
    """A Dag run that cannot be created fails the loop: nothing of it is kept, and no request is lost."""
    consumer("a", FINE)
    consumer("z", FINE)
    scheduler = Scheduler()
    scheduler.settle()
    emit(FINE, "1", "2")
    before, agenda = requests(), scheduler.runner._asset_partition_wake._agenda
    create = SerializedDAG.create_dagrun

    def fail(dag, **kwargs):
        if dag.dag_id == failing:
            raise error("no run")
        return create(dag, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(SerializedDAG, "create_dagrun", fail)
        for _ in range(2):
            with pytest.raises(error, match="no run"):
                scheduler.step()
            assert ([], []) == (fired("a"), fired("z"))
            assert before == requests()
            assert agenda is scheduler.runner._asset_partition_wake._agenda

    assert {"a", "z"} == scheduler.step()
    assert (["1", "2"], ["1", "2"]) == (fired("a"), fired("z"))
    assert [] == requests()


@pytest.mark.parametrize("loops", [1, 2])
def test_failing_create_dagrun_in_a_fan_out(loops, monkeypatch):
    """A fan-out whose loop fails goes on from where it was, and leaves out nothing."""
    consumer("dag", FINE)
    scheduler = Scheduler(budget=3)
    scheduler.settle()
    insert_pending("dag", [str(n) for n in range(7)], asset=FINE)
    ask("dag")
    for _ in range(loops - 1):
        scheduler.step()

    def fail(dag, **kwargs):
        raise RuntimeError("no run")

    with monkeypatch.context() as patched:
        patched.setattr(SerializedDAG, "create_dagrun", fail)
        with pytest.raises(RuntimeError, match="no run"):
            scheduler.step()
    scheduler.settle()
    assert [str(n) for n in range(7)] == fired("dag")
    assert [] == requests()
