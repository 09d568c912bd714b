"""``SerializedDagModel.write_dag`` asks where the timetable changed (spec 4.2), and forgets what it decoded (spec 7)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select

from airflow._shared.timezones import timezone
from airflow.models import serialized_dag
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.models.dag_version import DagVersion
from airflow.models.dagbundle import DagBundleModel
from airflow.models.deadline_alert import DeadlineAlert as DeadlineAlertModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk import DAG, Asset, AsyncCallback, DeadlineAlert, DeadlineReference, PartitionedAssetTimetable
from airflow.serialization.definitions.dag import SerializedDAG
from airflow.serialization.serialized_objects import LazyDeserializedDAG

from tests_common.db import new_session, recorded_statements
from tests_common.factories import (
    BUNDLE,
    consumer,
    day_rollup,
    insert_pending,
    make_dag,
    requests,
    running_task,
)

pytestmark = pytest.mark.usefixtures("db")

A = Asset("a", uri="test://a")
B = Asset("b", uri="test://b")
ONE = [("dag", None, "timetable change")]


@pytest.fixture(params=["plain", "compressed"])
def compressed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store definitions as they are, and compressed."""
    monkeypatch.setattr(serialized_dag, "_COMPRESS_SERIALIZED_DAGS", request.param == "compressed")


@pytest.fixture(params=["in place", "new version"])
def path(request: pytest.FixtureRequest, compressed: None) -> str:
    """Take both paths of ``write_dag``: a version without task instances is updated in place."""
    return request.param


def partitioned(assets: Any = A, mapper: Any = None, **kwargs: Any) -> DAG:
    config = {} if mapper is None else {"default_partition_mapper": mapper}
    return make_dag("dag", PartitionedAssetTimetable(assets=assets, **config), **kwargs)


def deadline(minutes: int) -> DeadlineAlert:
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(minutes=minutes),
        callback=AsyncCallback("callbacks.notify"),
    )


def store(dag: DAG, *, bundle: str = BUNDLE, **kwargs: Any) -> list[tuple[str, int | None, str]]:
    """Write a definition, and return what that asked for; nothing else is asked for before."""
    lazy = LazyDeserializedDAG.from_dag(dag)
    with new_session() as session:
        session.merge(DagBundleModel(name=bundle))
        session.flush()
        SerializedDAG.bulk_write_to_db(bundle, None, [lazy], session=session)
        session.execute(delete(AssetPartitionDagRunWake))  # Activation asks too.
        SerializedDagModel.write_dag(lazy, bundle, session=session, **kwargs)
    return requests()


def store_first(dag: DAG, path: str = "in place") -> None:
    store(dag)
    if path == "new version":
        running_task("dag")


def versions() -> int:
    with new_session() as session:
        return session.scalar(select(func.count()).select_from(DagVersion))


# -- a timetable that changed asks, once, for the whole Dag -------------------------------------------------------------


def test_new_dag_asks(compressed):
    """The first definition of a partitioned Dag asks: pending runs may be left of a Dag that was deleted."""
    assert ONE == store(partitioned())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(lambda: partitioned(A & B), lambda: partitioned(A | B), id="condition"),
        pytest.param(lambda: partitioned(A & B), lambda: partitioned(A), id="asset"),
        pytest.param(lambda: partitioned(A), lambda: partitioned(A, day_rollup()), id="mapper"),
        pytest.param(lambda: make_dag("dag", [A]), lambda: partitioned(A), id="is partitioned now"),
    ],
)
def test_changed_timetable_asks(before, after, path):
    """Another asset condition or another mapper asks for every pending run of the Dag, on each path."""
    store_first(before(), path)

    assert ONE == store(after())
    assert (1 if path == "in place" else 2) == versions()


def test_request_says_when_it_was_made(session):
    """A request for a whole Dag is as old as the change."""
    before = timezone.utcnow()
    store(partitioned())

    (made,) = session.scalars(select(AssetPartitionDagRunWake.created_at))
    assert timedelta(0) <= made - before < timedelta(minutes=1)


def test_other_dags_are_not_asked_for(path):
    """Only the Dag whose timetable changed is asked for."""
    consumer("another", A)
    store_first(partitioned(A & B), path)

    assert ONE == store(partitioned(A | B))


def test_change_back_asks_again(path):
    """The stored definition counts, not the first one."""
    store_first(partitioned(A & B), path)
    store(partitioned(A | B))

    assert ONE == store(partitioned(A & B))


def test_dag_that_stops_being_partitioned_asks_for_what_is_pending(path):
    """A Dag that is not partitioned any more asks, for its pending runs are to be dropped."""
    store_first(partitioned(), path)
    insert_pending("dag", ["k"])

    assert ONE == store(make_dag("dag", [A]))


def test_dag_that_stops_being_partitioned_without_pending_runs_asks_for_nothing(path):
    """Nobody asks for runs that are not there."""
    store_first(partitioned(), path)

    assert [] == store(make_dag("dag", [A]))


def test_changed_timetable_of_other_dags_asks_for_nothing(path):
    """The schedule of a Dag that is not partitioned may change."""
    store_first(make_dag("dag", [A]), path)

    assert [] == store(make_dag("dag", "@daily"))


def test_switching_compression_on_and_off_asks_for_nothing(monkeypatch):
    """The sections are compared, however each is stored."""
    asked = []
    for n, compress in enumerate((False, True, False)):
        monkeypatch.setattr(serialized_dag, "_COMPRESS_SERIALIZED_DAGS", compress)
        asked.append(store(partitioned(description=str(n))))
        running_task("dag", f"run_{n}")

    assert [ONE, [], []] == asked
    assert 3 == versions()


def test_definition_that_is_missing_counts_as_changed():
    """A version of which no definition is stored is written like a new one."""
    store_first(partitioned(), "new version")
    with new_session() as session:
        session.execute(delete(SerializedDagModel))

    assert ONE == store(partitioned())


def test_request_is_rolled_back_with_the_definition():
    """No request is left of a definition that was not kept."""
    store_first(partitioned(A & B))
    lazy = LazyDeserializedDAG.from_dag(partitioned(A | B))
    with new_session() as session:
        session.execute(delete(AssetPartitionDagRunWake))
    with new_session() as session:
        SerializedDagModel.write_dag(lazy, BUNDLE, session=session)
        assert 1 == session.scalar(select(func.count()).select_from(AssetPartitionDagRunWake))
        session.rollback()

    assert [] == requests()


# -- nothing else does --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tasks": ("task", "another")}, id="task"),
        pytest.param({"description": "another"}, id="description"),
        pytest.param({"deadline": deadline(9)}, id="deadline alert"),
        pytest.param({"tags": {"another"}}, id="tags"),
        pytest.param({"max_active_runs": 3}, id="option"),
    ],
)
def test_other_changes_ask_for_nothing(change, path):
    """A change of anything but the timetable is written, and asks for nothing."""
    first = {"deadline": deadline(5)} if "deadline" in change else {}
    store_first(partitioned(A & B, day_rollup(), **first), path)
    insert_pending("dag", ["2024-03-01"])
    with new_session() as session:
        hash_before = SerializedDagModel.get("dag", session=session).dag_hash

    assert [] == store(partitioned(A & B, day_rollup(), **change))
    with new_session() as session:
        assert hash_before != SerializedDagModel.get("dag", session=session).dag_hash


def test_new_name_of_a_deadline_alert_asks_for_nothing(path):
    """An alert whose name alone changed is updated without a new definition."""
    named = deadline(5)
    named.name = "before"
    store_first(partitioned(deadline=named), path)
    named.name = "after"

    assert [] == store(partitioned(deadline=named))
    with new_session() as session:
        assert ["after"] == list(session.scalars(select(DeadlineAlertModel.name)))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"bundle_version": "2"}, id="bundle version"),
        pytest.param({"bundle_version": "2", "version_data": {"a": 1}}, id="version data"),
        pytest.param({"bundle": "another"}, id="bundle name"),
    ],
)
def test_same_definition_asks_for_nothing(change, path):
    """A definition that is the stored one asks for nothing, from whatever bundle and version it comes."""
    store_first(partitioned(), path)

    assert [] == store(partitioned(), **change)


def test_same_definition_is_not_read_again():
    """Most parses find what is stored: for those the section is not even looked at."""
    store_first(partitioned())
    with recorded_statements("serialized_dag.data") as statements:
        store(partitioned())

    assert [] == statements


def test_definition_that_is_not_written_yet_asks_for_nothing():
    """Within ``min_update_interval`` nothing is written; the write that comes after it asks."""
    store_first(partitioned(A & B))

    assert [] == store(partitioned(A | B), min_update_interval=60)
    assert ONE == store(partitioned(A | B))


# -- decoded data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expire",
    [
        pytest.param(lambda session, stored: session.rollback(), id="rollback"),
        pytest.param(lambda session, stored: session.expire_all(), id="expire_all"),
        pytest.param(
            lambda session, stored: session.expire(stored, ["_data", "_data_compressed"]), id="expire"
        ),
        pytest.param(lambda session, stored: session.refresh(stored), id="refresh"),
    ],
)
def test_expired_definition_is_decoded_again(expire: Callable, compressed, session):
    """An instance that was expired has the definition that is stored now, also if it was written in place."""
    store_first(partitioned(description="before"))
    stored = SerializedDagModel.get("dag", session=session)
    assert "before" == stored.dag.description
    session.commit()
    session.execute(select(1))
    store(partitioned(description="after"))
    assert "before" == stored.dag.description
    expire(session, stored)

    assert "after" == stored.dag.description
    assert 1 == versions()


def test_definition_is_decoded_once(session, compressed):
    """An instance that was not expired keeps what it decoded."""
    store_first(partitioned())
    stored = SerializedDagModel.get("dag", session=session)

    assert stored.data is stored.data
