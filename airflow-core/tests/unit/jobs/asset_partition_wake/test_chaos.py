"""The check at the end of scripts/chaos: it passes what is right, and finds each kind of fault when there is one."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from _lib.chaos import cast, hands
from _lib.chaos.check import Check
from airflow.models.asset import AssetActive, AssetPartitionDagRun as APDR, PartitionedAssetKeyLog
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake

from tests_common.db import new_session
from tests_common.factories import Scheduler, emit, fired

# The check has no SQL of its own that a database could take differently; a round on each server does the rest.
pytestmark = [pytest.mark.usefixtures("db"), pytest.mark.backend("sqlite")]


@pytest.fixture
def scheduler() -> Scheduler:
    """A scheduler beside all Dags of a round; its startup pass is done."""
    for dag_id in cast.DAG_IDS:
        hands.parse(dag_id)
    scheduler = Scheduler()
    scheduler.settle()
    return scheduler


def check() -> dict[str, Any]:
    with new_session() as session:
        return Check(session).run()


def execute(statement: Any) -> None:
    with new_session() as session:
        session.execute(statement)


def register_some() -> None:
    """Register events of every asset: some partitions get complete, some do not."""
    hours = islice(cast.keys("hourly", 0, 1, seed=1), 30)
    emit(cast.PLAIN, "a", "b")
    emit(cast.HOURLY, *hours)
    emit(cast.WEEKLY, "2001-01-01T00:00:00")
    emit(cast.LEFT, "1", "2")
    emit(cast.RIGHT, "2")


def test_nothing_to_find(scheduler):
    """After events of every asset have been answered, there is nothing to find, and what waits has its reason."""
    register_some()
    scheduler.settle()
    checked = check()
    assert ([], []) == (checked["lost"], checked["twice"])
    assert ["2"] == fired("steady_and")
    assert 7 == len(fired("steady_fan_out"))
    assert {"not complete"} == set(checked["pending"])


@pytest.mark.parametrize(
    ("dag_id", "asset", "key"),
    [("steady_identity", cast.PLAIN, "a"), ("steady_or", cast.LEFT, "1")],
)
def test_lost_request(scheduler, dag_id, asset, key):
    """A complete partition whose request is gone is found, by Airflow's evaluation and by the key logs."""
    emit(asset, key)
    execute(delete(Wake))
    found = "\n".join(check()["lost"])
    assert f"{dag_id} {key} is complete by its key logs and did not fire" in found
    assert f"{dag_id} {key} (run " in found


def test_lost_activation(scheduler):
    """A partition that an activation has completed is found where nobody asks."""
    execute(delete(AssetActive))
    emit(cast.PLAIN, "a")
    scheduler.settle()
    assert fired("steady_identity") == []
    hands.activate(*cast.ASSETS)
    execute(delete(Wake))
    assert any("steady_identity a" in line for line in check()["lost"])


def test_lost_edit(scheduler):
    """A pending run that another mapper has made void, and one that another condition has made complete, are found."""
    emit(cast.HOURLY, "2001-01-01T00:00:00")
    emit(cast.LEFT, "1")
    scheduler.settle()
    hands.parse("edited_mapper", 2)
    hands.parse("edited_condition", 1)
    execute(delete(Wake))
    lost = check()["lost"]
    assert any("edited_mapper 2001-01-01" in line and "should have been dropped" in line for line in lost)
    assert any("edited_condition 1" in line and "is complete and pending" in line for line in lost)


def test_request_left(scheduler):
    """Requests that nobody has answered, merged or dropped are found."""
    emit(cast.PLAIN, "a")
    execute(update(Wake).where(Wake.target_dag_id == "steady_identity").values(target_dag_id="unknown"))
    hands.set_dag("steady_by_name", "is_paused", True)
    with new_session() as session:
        session.add(Wake(apdr_id=1, target_dag_id="steady_by_name", reason="key log"))
    lost = check()["lost"]
    assert "1 requests are left for unknown, which is deleted" in lost
    assert "2 requests for steady_by_name, which cannot run, were not merged" in lost
    assert any(line.endswith("for edited_deleted, which can run") for line in lost)


def test_fired_twice(scheduler):
    """A Dag run that no partition has, and one that was made too early, are found."""
    emit(cast.PLAIN, "a")
    emit(cast.LEFT, "1")
    emit(cast.RIGHT, "1")
    scheduler.settle()
    execute(update(APDR).where(APDR.target_dag_id == "steady_identity").values(created_dag_run_id=None))
    one_side = select(PartitionedAssetKeyLog.id).where(PartitionedAssetKeyLog.target_dag_id == "steady_and")
    with new_session() as session:
        session.delete(session.get(PartitionedAssetKeyLog, session.scalars(one_side).first()))
    twice = check()["twice"]
    assert any("of steady_identity a belongs to 0 partitions" in line for line in twice)
    assert "steady_and 1 fired, but is not complete by its key logs" in twice


def test_key_log_without_its_run(scheduler):
    """A run of a steady Dag that was deleted is found by the key log that it leaves."""
    emit(cast.HOURLY, "2001-01-01T00:00:00")
    scheduler.settle()
    execute(delete(APDR).where(APDR.target_dag_id.in_(["steady_rollup", "edited_mapper"])))
    checked = check()
    assert ["steady_rollup 2001-01-01: a key log without its run, and nothing was edited"] == checked["lost"]
    assert 1 == checked["pending"]["key logs whose run was dropped"]


@pytest.mark.parametrize("asset", cast.ASSETS)
def test_each_event_has_one_writer(asset):
    """Together the writers register each event of an asset once."""
    writers = 3
    keys = [
        key for writer in range(writers) for key in islice(cast.keys(asset, writer, writers, seed=7), 240)
    ]
    assert len(keys) == len(set(keys))
    if asset == "hourly":
        days = {key[:10] for key in keys}
        assert all(24 == sum(key.startswith(day) for key in keys) for day in days)


def test_writers_have_both_sides_of_a_key():
    """What one writer registers of one asset, some writer registers of the other."""
    writers, count = 3, cast.PAIRS * 2
    sides = [
        {key for writer in range(writers) for key in islice(cast.keys(side, writer, writers, seed=7), count)}
        for side in ("left", "right")
    ]
    assert sides[0] == sides[1]
