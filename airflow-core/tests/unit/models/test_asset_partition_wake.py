"""The table of wake requests, and the session listener that writes one for each key log (spec 3 and 4.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete, insert, select, text
from sqlalchemy.orm import Session

from airflow import settings
from airflow._shared.timezones import timezone
from airflow.api_fastapi.app import create_app
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.execution_api.app import InProcessExecutionAPI
from airflow.assets.manager import AssetManager, resolve_asset_manager
from airflow.models.asset import (
    AssetAliasModel,
    AssetModel,
    AssetPartitionDagRun,
    PartitionedAssetKeyLog,
)
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake, WakeReason
from airflow.sdk import Asset
from airflow.utils.session import create_session_async

from tests_common.db import new_session, recorded_statements
from tests_common.factories import consumer, emit, insert_pending, make_dag, requests, running_task, write

pytestmark = pytest.mark.usefixtures("db")

PLAIN = Asset("plain", uri="test://plain")
ASKED = select(AssetPartitionDagRunWake.apdr_id).order_by(AssetPartitionDagRunWake.id)
LOCK_TIMEOUT = {
    "postgresql": "SET lock_timeout = '2s'",
    "mysql": "SET SESSION innodb_lock_wait_timeout = 2",
}


def key_log(apdr_id: int = 7, dag_id: str = "dag", **values: Any) -> PartitionedAssetKeyLog:
    return PartitionedAssetKeyLog(
        asset_id=1,
        asset_event_id=1,
        asset_partition_dag_run_id=apdr_id,
        source_partition_key="a",
        target_dag_id=dag_id,
        target_partition_key="a",
        **values,
    )


def run_id(dag_id: str) -> int:
    with new_session() as session:
        return session.scalars(
            select(AssetPartitionDagRun.id).where(AssetPartitionDagRun.target_dag_id == dag_id)
        ).one()


@contextmanager
def impatient_session() -> Iterator[Session]:
    """Open a session that gives up on a lock after 2 seconds."""
    with new_session() as session:
        session.connection().detach()  # The setting must not get into the pool.
        session.execute(text(LOCK_TIMEOUT[settings.engine.dialect.name]))
        yield session


class CustomAssetManager(AssetManager):
    """Adds key logs in a way of its own, and knows nothing of requests."""

    @classmethod
    def register_asset_change(cls, *, session: Session, partition_key: str, **kwargs: Any) -> None:  # type: ignore[override]
        session.add_all([key_log(1, partition_key), key_log(2, partition_key)])


# -- a request says what is asked -------------------------------------------------------------------------------------


def test_request_names_the_run_the_dag_and_the_reason(session):
    """A key log's request names its run, its Dag and the reason, and says when it was made."""
    before = timezone.utcnow()
    session.add(key_log(7, "dag"))
    session.commit()

    wake = session.scalars(select(AssetPartitionDagRunWake)).one()
    assert (7, "dag", "key log") == (wake.apdr_id, wake.target_dag_id, wake.reason)
    assert timedelta(0) <= wake.created_at - before < timedelta(minutes=1)


def test_reasons_are_a_closed_set_of_short_words():
    """Each reason fits its column, and reads as itself."""
    expected = {"key log", "timetable change", "asset activation", "merged"}

    assert expected == {str(reason) for reason in WakeReason}
    assert max(map(len, expected)) <= AssetPartitionDagRunWake.__table__.c.reason.type.length


def test_longest_dag_id_fits(session):
    """A Dag id of 250 characters fits the request."""
    session.add(key_log(7, "d" * 250))
    session.commit()

    assert [("d" * 250, 7, "key log")] == requests()


def test_ids_are_not_given_out_twice(session):
    """The id of a deleted request is never the id of a later one."""
    session.add(key_log())
    session.commit()
    first = session.scalar(select(AssetPartitionDagRunWake.id))
    session.execute(delete(AssetPartitionDagRunWake))
    session.commit()
    session.add(key_log())
    session.commit()

    assert first < session.scalar(select(AssetPartitionDagRunWake.id))


def test_table_has_neither_foreign_nor_unique_keys():
    """Nothing in the table can make an insert wait or conflict."""
    table = AssetPartitionDagRunWake.__table__

    assert set() == table.foreign_keys
    assert [] == [index.name for index in table.indexes if index.unique]


# -- who writes one: every process and every session --------------------------------------------------------------------


def test_event_registered_by_the_asset_manager_asks():
    """An event of a partitioned asset asks for the run that it contributes to, once."""
    consumer("plain", PLAIN)
    with new_session() as session:
        session.execute(delete(AssetPartitionDagRunWake))
    emit(PLAIN, "a")

    assert [("plain", run_id("plain"), "key log")] == requests()


def test_each_event_asks():
    """Two events for the same run write two requests."""
    consumer("plain", PLAIN)
    emit(PLAIN, "a", "a")

    run = run_id("plain")
    assert [("plain", run, "key log")] * 2 == [request for request in requests() if request[1]]


def test_custom_asset_manager_asks(monkeypatch):
    """Key logs of a custom ``[core] asset_manager_class`` ask, though nothing in it was changed."""
    monkeypatch.setenv("AIRFLOW__CORE__ASSET_MANAGER_CLASS", f"{__name__}.{CustomAssetManager.__name__}")
    manager = resolve_asset_manager()
    with new_session() as session:
        manager.register_asset_change(asset=PLAIN, partition_key="dag", session=session)

    assert "CustomAssetManager" == type(manager).__name__
    assert [("dag", 1, "key log"), ("dag", 2, "key log")] == requests()


def test_async_session_asks():
    """A key log added to an ``AsyncSession`` asks, as in the triggerer."""

    async def add() -> None:
        async with create_session_async() as session:
            session.add(key_log(1))
            session.add(key_log(2))
        await settings.async_engine.dispose()

    asyncio.run(add())

    assert [("dag", 1, "key log"), ("dag", 2, "key log")] == requests()


def test_async_session_rolls_back():
    """An ``AsyncSession`` that is rolled back leaves no request."""

    async def add() -> None:
        async with settings.AsyncSession() as session:
            session.add(key_log())
            await session.flush()
            await session.rollback()
        await settings.async_engine.dispose()

    asyncio.run(add())

    assert [] == requests()


def test_session_of_a_connection_asks_on_that_connection():
    """A session bound to a connection writes the request in the connection's transaction."""
    with settings.engine.connect() as connection, connection.begin() as transaction:
        with Session(connection) as session:
            session.add(key_log())
            session.commit()
        assert [7] == list(connection.scalars(ASKED))
        transaction.rollback()

    assert [] == requests()


def test_subclass_of_session_asks():
    """A session of a subclass asks as well."""

    class OwnSession(Session):
        pass

    with OwnSession(settings.engine) as session:
        session.add(key_log())
        session.commit()

    assert [("dag", 7, "key log")] == requests()


def test_execution_api_asks():
    """A task's success, reported to the execution API, asks for the runs that its events contribute to."""
    consumer("plain", PLAIN)
    with new_session() as session:
        write(make_dag("producer"), session=session)
        session.execute(delete(AssetPartitionDagRunWake))
    ti_id = running_task("producer")
    key = {"name": PLAIN.name, "uri": PLAIN.uri}
    transport = InProcessExecutionAPI().transport
    with httpx.Client(transport=transport, base_url="http://in-process") as client:
        response = client.patch(
            f"/task-instances/{ti_id}/state",
            json={
                "state": "success",
                "end_date": timezone.utcnow().isoformat(),
                "task_outlets": [{**key, "type": "Asset"}],
                "outlet_events": [{"dest_asset_key": key, "extra": {}, "partition_key": "a"}],
            },
        )

    assert 204 == response.status_code, response.text
    assert [("plain", run_id("plain"), "key log")] == requests()


def test_rest_api_asks():
    """An event that is posted to the REST API asks for the runs that it contributes to."""
    consumer("plain", PLAIN)
    with new_session() as session:
        asset_id = session.scalar(select(AssetModel.id))
        session.execute(delete(AssetPartitionDagRunWake))
    app = create_app(apps="core")
    token = app.state.auth_manager.generate_jwt(SimpleAuthManagerUser(username="admin", role="admin"))
    with TestClient(app, headers={"Authorization": f"Bearer {token}"}) as client:
        response = client.post("/api/v2/assets/events", json={"asset_id": asset_id, "partition_key": "a"})

    assert 200 == response.status_code, response.text
    assert [("plain", run_id("plain"), "key log")] == requests()


# -- in the transaction of the change, and only what the flush inserted -------------------------------------------------


def test_rolled_back_with_the_transaction(session):
    """No request is left of a transaction that was rolled back."""
    session.add(key_log())
    session.flush()
    session.rollback()

    assert [] == requests()


def test_rolled_back_with_the_savepoint(session):
    """Only the request of the savepoint that was rolled back is gone."""
    session.add(key_log(1))
    savepoint = session.begin_nested()
    session.add(key_log(2))
    session.flush()
    savepoint.rollback()
    session.add(key_log(3))
    session.commit()

    assert [1, 3] == [apdr_id for _, apdr_id, _ in requests()]


def test_not_visible_before_commit(session):
    """Others see the request when they see the key log: at commit."""
    session.add(key_log())
    session.flush()

    assert [7] == list(session.scalars(ASKED))
    if settings.engine.dialect.name != "sqlite":
        assert [] == requests()


def test_flush_of_many_key_logs_writes_one_statement(session):
    """The requests of one flush are one INSERT."""
    session.add_all([key_log(n) for n in range(300)])
    with recorded_statements("asset_partition_dag_run_wake") as statements:
        session.flush()
    session.commit()

    assert 1 == len(statements)
    assert list(range(300)) == [apdr_id for _, apdr_id, _ in requests()]


def test_every_flush_asks_for_its_own_key_logs(session):
    """A second flush asks for what it inserted, not again for what the first did."""
    session.add(key_log(1))
    session.flush()
    session.add(key_log(2))
    session.flush()
    session.commit()

    assert [1, 2] == [apdr_id for _, apdr_id, _ in requests()]


def test_key_log_left_out_of_a_flush_asks_when_it_is_inserted(session):
    """``session.flush(objects)`` asks only for those of the objects; the others ask once, in their own flush."""
    first, second = key_log(1), key_log(2)
    session.add_all([first, second])
    session.flush([first])
    assert [1] == list(session.scalars(ASKED))

    session.commit()
    assert [1, 2] == [apdr_id for _, apdr_id, _ in requests()]


def test_flush_of_other_objects_writes_nothing(session):
    """Objects of other kinds, and changed or deleted key logs, ask for nothing."""
    session.add(kept := key_log())
    session.add(deleted := key_log())
    session.commit()
    session.execute(delete(AssetPartitionDagRunWake))
    with recorded_statements("asset_partition_dag_run_wake") as statements:
        session.add(AssetAliasModel(name="alias"))
        kept.source_partition_key = "b"
        session.delete(deleted)
        session.commit()

    assert [] == statements
    assert [] == requests()


def test_bulk_inserts_ask_for_nothing(session):
    """Key logs that are not inserted by a flush write no request: they wait for the resync pass (spec 9)."""
    row = {c.name: 1 for c in PartitionedAssetKeyLog.__table__.columns if c.name not in ("id", "created_at")}
    row |= {"source_partition_key": "a", "target_dag_id": "dag", "target_partition_key": "a"}
    session.execute(insert(PartitionedAssetKeyLog.__table__), [row])
    session.execute(insert(PartitionedAssetKeyLog), [row])
    session.commit()

    assert [] == requests()


# -- an insert never waits ----------------------------------------------------------------------------------------------


@pytest.mark.backend("postgresql", "mysql")
def test_insert_does_not_wait_for_the_lock_of_the_run():
    """A key log is written while a scheduler holds the run that it belongs to."""
    consumer("plain", PLAIN)
    (apdr_id,) = insert_pending("plain", ["a"])
    with new_session() as scheduler, impatient_session() as producer:
        scheduler.execute(select(AssetPartitionDagRun.id).with_for_update()).all()
        producer.add(key_log(apdr_id, "plain"))
        producer.commit()

        assert ("plain", apdr_id, "key log") == requests()[-1]


@pytest.mark.backend("postgresql", "mysql")
def test_insert_does_not_wait_for_a_scheduler_that_deletes_requests():
    """A key log is written while a scheduler has deleted the requests of the same run, and not committed."""
    with new_session() as session:
        session.add_all([key_log(7), key_log(7), key_log(8)])
    with new_session() as scheduler, impatient_session() as producer:
        ids = scheduler.scalars(ASKED.with_only_columns(AssetPartitionDagRunWake.id)).all()
        scheduler.execute(delete(AssetPartitionDagRunWake).where(AssetPartitionDagRunWake.id.in_(ids)))
        producer.add_all([key_log(7), key_log(8), key_log(9)])
        producer.commit()

    assert [7, 8, 9] == [apdr_id for _, apdr_id, _ in requests()]
