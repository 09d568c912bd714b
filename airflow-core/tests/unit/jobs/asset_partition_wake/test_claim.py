"""SQL over the pending runs (spec 6)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sqlalchemy import Boolean, Column, MetaData, Table, delete, update

from airflow.jobs.asset_partition_wake import claim
from airflow.models.asset import AssetPartitionDagRun
from airflow.models.base import StringID

from tests_common.db import new_session, recorded_statements
from tests_common.factories import change_dag, insert_dags, insert_runs

pytestmark = pytest.mark.usefixtures("db")

CANNOT_RUN = [{"is_paused": True}, {"is_stale": True}, {"is_paused": True, "is_stale": True}]


def fire(*apdr_ids: int) -> None:
    """Have runs look fired."""
    from airflow.models.dagrun import DagRun
    from airflow.utils.types import DagRunType

    with new_session() as session:
        dag_run = DagRun(dag_id="fired", run_id=f"r{apdr_ids[0]}", run_type=DagRunType.MANUAL)
        session.add(dag_run)
        session.flush()
        session.execute(
            update(AssetPartitionDagRun)
            .where(AssetPartitionDagRun.id.in_(apdr_ids))
            .values(created_dag_run_id=dag_run.id)
        )


def delete_runs(*apdr_ids: int) -> None:
    with new_session() as session:
        session.execute(delete(AssetPartitionDagRun).where(AssetPartitionDagRun.id.in_(apdr_ids)))


def test_lock_takes_what_was_asked_for(session):
    """Only runs that are named are locked, not those beside them."""
    insert_dags("dag")
    first, _, third = insert_runs("dag", 3)
    assert {first, third} == {run.id for run in claim.lock([third, first], session=session)}


def test_lock_asks_nothing_for_nothing(session):
    """Without runs to lock there is no statement."""
    with recorded_statements() as statements:
        assert [] == claim.lock([], session=session)
        assert {} == claim.still_pending([], session=session)
    assert [] == statements


def test_lock_leaves_what_fired_or_was_deleted(session):
    """A run that fired or was deleted meanwhile is not evaluated again."""
    insert_dags("dag")
    fired, deleted, pending = insert_runs("dag", 3)
    fire(fired)
    delete_runs(deleted)
    asked = [fired, deleted, pending]
    assert [pending] == [run.id for run in claim.lock(asked, session=session)]
    assert {pending: ("dag", True)} == claim.still_pending(asked, session=session)


@pytest.mark.parametrize("state", CANNOT_RUN)
def test_lock_leaves_dags_that_cannot_run(state, session):
    """The claim checks itself that the Dag is neither paused nor stale: it may have been paused a moment ago."""
    insert_dags("runs")
    insert_dags("rests", **state)
    (run,), (rests,) = insert_runs("runs"), insert_runs("rests")
    assert [run] == [apdr.id for apdr in claim.lock([run, rests], session=session)]
    assert {run: ("runs", True), rests: ("rests", False)} == claim.still_pending(
        [run, rests], session=session
    )


def test_lock_leaves_dags_that_are_gone(session):
    """The run of a Dag that is not in the table of Dags is not evaluated, and its request is not answered."""
    (run,) = insert_runs("gone")
    assert [] == claim.lock([run], session=session)
    assert {run: ("gone", False)} == claim.still_pending([run], session=session)


def test_draining_dags_cannot_run(session, monkeypatch):
    """Where the base has ``is_draining``, the runs of draining Dags are left alone too."""
    # This base has none: a column that is not used otherwise stands in for it.
    table = Table(
        "dag",
        MetaData(),
        Column("dag_id", StringID()),
        Column("is_paused", Boolean()),
        Column("is_stale", Boolean()),
        Column("fail_fast", Boolean(), key="is_draining"),
    )
    monkeypatch.setattr(claim, "DagModel", SimpleNamespace(__table__=table, dag_id=table.c.dag_id))
    monkeypatch.setattr(claim, "_pending_runs", claim._pending_runs.__wrapped__)  # built anew
    insert_dags("runs", fail_fast=False)
    insert_dags("drains", fail_fast=True)
    (run,), (drains,) = insert_runs("runs"), insert_runs("drains")
    assert [run] == [apdr.id for apdr in claim.lock([run, drains], session=session)]
    assert {run: ("runs", True), drains: ("drains", False)} == claim.still_pending(
        [run, drains], session=session
    )


def test_lock_loads_runs_again(session):
    """A run that the session holds already is read as it is now, not as it was."""
    insert_dags("dag")
    (run,) = insert_runs("dag")
    held = session.get(AssetPartitionDagRun, run)
    assert "0" == held.partition_key
    session.execute(
        update(AssetPartitionDagRun)
        .where(AssetPartitionDagRun.id == run)
        .values(partition_key="changed")
        .execution_options(synchronize_session=False)
    )
    assert "0" == held.partition_key
    assert [held] == claim.lock([run], session=session)
    assert "changed" == held.partition_key


def test_newest_run(session):
    """The newest run is the one with the highest id; 0 where there is none."""
    assert 0 == claim.newest_run(session=session)
    insert_dags("dag")
    assert insert_runs("dag", 3)[-1] == claim.newest_run(session=session)


def test_pending_of_dag(session):
    """The pending runs of one Dag come by id, from behind the cursor to the end that was set."""
    insert_dags("a", "b")
    runs = insert_runs("a", 3)
    others = insert_runs("b", 2)
    runs += insert_runs("a", 3)
    fire(runs[1])

    def read(after: int, upto: int, limit: int) -> list[int]:
        return claim.pending_of_dag("a", after=after, upto=upto, limit=limit, session=session)

    assert [runs[0], *runs[2:]] == read(0, runs[-1], 10)
    assert [runs[0], runs[2]] == read(0, runs[-1], 2)
    assert [runs[3], runs[4]] == read(runs[2], runs[4], 10)
    assert [] == read(runs[2], others[-1], 10)


def test_pending_of_later_dags(session):
    """The pending runs of the Dags behind one come Dag by Dag, each told whether its Dag can run."""
    insert_dags("a", "c", "d")
    insert_dags("b", is_paused=True)
    c1, a1, b1, d1, c2 = (insert_runs(dag_id)[0] for dag_id in "cabdc")
    after = insert_runs("c")[0]
    (gone,) = insert_runs("e")
    fire(d1)

    def read(dag_id: str, upto: int, limit: int) -> list[tuple]:
        rows = claim.pending_of_later_dags(dag_id, upto=upto, limit=limit, session=session)
        return [(dag_id, apdr_id, bool(can_run)) for dag_id, apdr_id, can_run in rows]

    expected = [("a", a1, True), ("b", b1, False), ("c", c1, True), ("c", c2, True)]
    assert expected == read("", c2, 10)
    assert expected[:3] == read("", c2, 3)
    assert expected[2:] == read("b", c2, 10)
    assert [("c", c1, True), ("c", c2, True), ("c", after, True), ("e", gone, False)] == read("b", gone, 10)


def test_state_is_read_anew(session):
    """A Dag that is unpaused can run at once."""
    insert_dags("dag", is_paused=True)
    (run,) = insert_runs("dag")
    assert [] == claim.lock([run], session=session)
    session.commit()
    change_dag("dag", is_paused=False)
    assert [run] == [apdr.id for apdr in claim.lock([run], session=session)]
