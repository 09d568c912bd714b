"""Losses that chaos runs, or looking for what they could meet, have found: each in its smallest form."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import delete, select, text

from airflow.api.common.delete_dag import delete_dag
from airflow.dag_processing.collection import AssetModelOperation
from airflow.jobs.asset_partition_wake import queue
from airflow.models import asset_partition_wake
from airflow.models.asset import AssetActive, AssetModel
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.sdk import Asset
from airflow.utils.sqlalchemy import get_dialect_name

from tests_common.db import new_session
from tests_common.factories import Scheduler, ask, consumer, emit, fired, insert_pending, requests

pytestmark = pytest.mark.usefixtures("db")

PLAIN = Asset("plain", uri="test://plain")


@contextmanager
def activating_in_another_process() -> Iterator[threading.Event]:
    """Activate PLAIN in a transaction of its own, which commits at the end of the block. The event: it is activated."""
    activated, may_commit = threading.Event(), threading.Event()

    def activate() -> None:
        with new_session() as session:
            models = session.scalars(select(AssetModel)).all()
            AssetModelOperation.collect({}).activate_assets_if_possible(models, session=session)
            activated.set()
            may_commit.wait(30)

    with ThreadPoolExecutor(1) as pool:
        activation = pool.submit(activate)
        try:
            yield activated
        finally:
            may_commit.set()
        activation.result(30)


@pytest.mark.backend("postgresql", "mysql")
def test_activation_that_waited_for_a_deactivation_asks():
    """An activation whose insert had to wait until a peer's deactivation was committed has made the asset active."""
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    with new_session() as deactivating:
        deactivating.execute(delete(AssetActive))
        with activating_in_another_process() as activated:
            # It has seen the asset as active still, and waits now.
            assert not activated.wait(0.5)
            deactivating.commit()
            assert activated.wait(10)
            # For others, the asset is inactive: the event is looked at, and does not count yet.
            emit(PLAIN, "a")
            scheduler.settle()
            assert [] == fired("plain")

    scheduler.settle()
    assert ["a"] == fired("plain")


def test_dag_that_comes_back_while_its_old_requests_are_dropped(no_passes, monkeypatch):
    """Tidying that has found a Dag gone does not drop the requests that come with its return."""
    consumer("plain", PLAIN)
    insert_pending("plain", ["a"], asset=PLAIN, upstream="a")
    emit(PLAIN, "b")
    with new_session() as session:
        delete_dag("plain", session=session)
    batch = queue._batch

    def comes_back_before(*args, **kwargs):
        monkeypatch.setattr(queue, "_batch", batch)
        consumer("plain", PLAIN)
        return batch(*args, **kwargs)

    monkeypatch.setattr(queue, "_batch", comes_back_before)
    with new_session() as session:
        queue.tidy(session=session)

    Scheduler().settle()
    assert ["a", "b"] == sorted(fired("plain"))


@pytest.mark.backend("postgresql", "mysql")
def test_settling_waits_for_no_peer_that_settles():
    """Two schedulers settle their own requests at once. MySQL scans a short table, so that each waits for the other's rows."""
    ask("dag", range(40))
    with new_session() as session:
        ids = list(session.scalars(select(AssetPartitionDagRunWake.id)))
    with new_session() as one, new_session() as other:
        for session in (one, other):
            postgresql = get_dialect_name(session) == "postgresql"
            timeout = "lock_timeout = '2s'" if postgresql else "SESSION innodb_lock_wait_timeout = 2"
            session.execute(text(f"SET {timeout}"))
        queue.settle(ids[::2], session=one)
        queue.settle(ids[1::2], session=other)
    assert [] == requests()


@pytest.mark.backend("postgresql", "mysql")
def test_two_activations_do_not_deadlock(monkeypatch):
    """Two Dag processors that parse Dags of the same asset at once: one waits for the other, and none is a deadlock's victim."""
    consumer("plain", PLAIN)
    look = asset_partition_wake._active
    both_have_looked = threading.Barrier(2)

    def look_as_the_other_does(*args, **kwargs):
        found = look(*args, **kwargs)
        # The second may have to wait for the first to commit before it can look.
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_looked.wait(1)
        return found

    def parse() -> None:
        with new_session() as session:
            models = session.scalars(select(AssetModel)).all()
            AssetModelOperation.collect({}).activate_assets_if_possible(models, session=session)

    monkeypatch.setattr(asset_partition_wake, "_active", look_as_the_other_does)
    with ThreadPoolExecutor(2) as pool:
        parsings = [pool.submit(parse) for _ in range(2)]
    assert [None, None] == [parsing.result() for parsing in parsings]
