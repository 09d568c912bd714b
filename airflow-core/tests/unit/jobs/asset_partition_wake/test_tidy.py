"""Tidying (spec 7): requests that no loop may answer do not pile up."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import OperationalError

from airflow._shared.timezones import timezone
from airflow.api.common.delete_dag import delete_dag
from airflow.jobs.asset_partition_wake import queue
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake
from airflow.sdk import Asset

from tests_common.db import new_session, recorded_statements
from tests_common.factories import (
    Scheduler,
    ask,
    asked,
    change_dag,
    consumer,
    day_rollup,
    emit,
    fired,
    hours,
    insert_dags,
    pending,
    requests,
)

pytestmark = pytest.mark.usefixtures("db")

PLAIN = Asset("plain", uri="test://plain")
HOURLY = Asset("hourly", uri="test://hourly")
START = timezone.datetime(2024, 1, 1)


def tidy() -> tuple[int, int]:
    with new_session() as session:
        return queue.tidy(session=session)


def ask_one_by_one(dag_id: str, count: int) -> None:
    for n in range(count):
        ask(dag_id, [n], created_at=START + timedelta(hours=n))


def test_requests_of_missing_dags_are_dropped():
    """The requests of Dags that are no longer in the table of Dags go, in as many batches as it takes."""
    ask("gone", [*range(5), None])
    ask("also gone", [1])
    assert (7, 0) == tidy()
    assert [] == asked()


@pytest.mark.parametrize("state", [{"is_paused": True}, {"is_stale": True}])
def test_requests_of_resting_dags_are_merged(state):
    """The requests of a paused or stale Dag become one request for the whole Dag."""
    insert_dags("dag", **state)
    ask("dag", [1, 2, 2, None])
    assert (0, 3) == tidy()
    assert [("dag", None, "merged")] == requests()


@pytest.mark.parametrize("count", [2, 3, 4, 7, 9, 10])
def test_merged_request_is_as_old_as_the_oldest(count, monkeypatch):
    """In however many batches they are merged, the age of the oldest request is kept."""
    monkeypatch.setattr(queue, "BATCH", 3)
    insert_dags("dag", is_paused=True)
    ask_one_by_one("dag", count)
    tidy()
    with new_session() as session:
        assert [START] == list(session.scalars(select(Wake.created_at)))


@pytest.mark.parametrize("apdr_id", [None, 7])
def test_one_request_is_left_alone(apdr_id):
    """A resting Dag with one request keeps it as it is: tidying again and again writes nothing."""
    insert_dags("dag", is_paused=True)
    ids = ask("dag", [apdr_id])
    with recorded_statements() as statements:
        assert (0, 0) == tidy()
    assert ids == asked()
    assert [] == [text for text in statements if text.startswith(("INSERT", "UPDATE", "DELETE"))]


def test_runnable_dags_are_left_alone():
    """The requests of a Dag that can run are the loop's."""
    insert_dags("dag")
    ids = ask("dag", [1, 1, None])
    ask("gone")
    assert (1, 0) == tidy()
    assert ids == asked()


def test_batches_are_committed_on_their_own(monkeypatch):
    """No transaction of tidying is longer than a batch."""
    monkeypatch.setattr(queue, "BATCH", 4)
    insert_dags("resting", is_paused=True)
    ask("gone", range(10))
    ask("resting", range(10))
    deleted: list[int] = []
    since_commit = 0

    with new_session() as session:

        def count(statement) -> None:
            nonlocal since_commit
            if statement.is_delete:
                since_commit += 1

        def committed(_) -> None:
            nonlocal since_commit
            deleted.append(since_commit)
            since_commit = 0

        event.listen(session, "do_orm_execute", count)
        event.listen(session, "after_commit", committed)
        assert (10, 9) == queue.tidy(session=session)
    # Ten requests in batches of four; then four into one, four into one, and the two that are left with those two.
    assert 3 + 3 == sum(deleted)
    assert 1 == max(deleted)


def test_many_dags_in_pages(monkeypatch):
    """With more Dags than a page, all are tidied."""
    monkeypatch.setattr(queue, "BATCH", 3)
    resting = [f"r{n}" for n in range(8)]
    insert_dags(*resting, is_paused=True)
    for n in range(8):
        ask(f"gone{n}")
        ask(f"r{n}", [1, 2])
    assert (8, 8) == tidy()
    assert [(dag_id, None, "merged") for dag_id in resting] == sorted(requests())


def test_failing_database_does_not_stop_the_scheduler(monkeypatch):
    """Tidying logs a failing database and returns; the next cycle does what was left."""
    ask("gone")
    step = Scheduler().runner._asset_partition_wake
    with monkeypatch.context() as patched:

        def fail(*args, **kwargs):
            raise OperationalError("DELETE", {}, Exception("the server has gone away"))

        patched.setattr(queue, "_delete", fail)
        step.tidy()
    assert 1 == len(asked())
    step.tidy()
    assert [] == asked()


def test_deleted_dag_leaves_no_request():
    """After ``airflow dags delete`` and the next tidying, no request of the Dag is left."""
    consumer("dag", HOURLY, day_rollup())
    emit(HOURLY, *hours("2024-01-01")[:3])
    assert asked()
    delete_dag("dag")
    scheduler = Scheduler()
    scheduler.step()
    scheduler.runner._asset_partition_wake.tidy()
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize(
    ("rest", "wake"),
    [({"is_paused": True}, {"is_paused": False}), ({"is_stale": True}, {"is_stale": False})],
    ids=["paused", "stale"],
)
@pytest.mark.parametrize("tidied", [False, True])
def test_event_fires_after_the_rest(rest, wake, tidied):
    """An event just before a Dag rests fires after it, without another event and without a pass."""
    consumer("plain", PLAIN)
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler()
    emit(PLAIN, "a", "b")
    emit(HOURLY, *hours("2024-01-01"), *hours("2024-01-02")[1:])
    for dag_id in ("plain", "rollup"):
        change_dag(dag_id, **rest)
    scheduler.settle()
    if tidied:
        scheduler.runner._asset_partition_wake.tidy()
        assert [("plain", None, "merged"), ("rollup", None, "merged")] == requests()
    assert ["a", "b"] == pending("plain")

    for dag_id in ("plain", "rollup"):
        change_dag(dag_id, **wake)
    assert {"plain", "rollup"} == scheduler.settle()
    assert ["a", "b"] == fired("plain")
    assert ["2024-01-01"] == fired("rollup")
    assert ["2024-01-02"] == pending("rollup")
    assert [] == requests()


@pytest.mark.usefixtures("no_passes")
def test_event_while_a_dag_is_stale():
    """An event that arrives while its Dag is stale fires once it no longer is."""
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    change_dag("plain", is_stale=True)
    emit(PLAIN, "a")
    assert set() == scheduler.settle()
    scheduler.runner._asset_partition_wake.tidy()
    change_dag("plain", is_stale=False)
    assert {"plain"} == scheduler.settle()
    assert ["a"] == fired("plain")
