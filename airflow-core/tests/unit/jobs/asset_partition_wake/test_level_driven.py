"""
Level-driven, not pass-driven: whatever is asked for needs no resync pass (spec 7 and 8).

Each scenario runs with passes and without. What only a pass can find is listed below, and asserted both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import delete, insert, select

from airflow import plugins_manager
from airflow._shared.module_loading import qualname
from airflow.assets.manager import AssetManager
from airflow.models.asset import (
    AssetActive,
    AssetAliasModel,
    AssetModel,
    alias_association_table,
)
from airflow.partition_mappers.base import PartitionMapper
from airflow.partition_mappers.wait_policy import WaitForAll
from airflow.sdk import Asset, AssetAlias, StartOfDayMapper
from airflow.serialization.definitions.dag import SerializedDAG

from tests_common.db import new_session
from tests_common.factories import (
    Scheduler,
    ask,
    change_dag,
    consumer,
    day_rollup,
    emit,
    fired,
    hours,
    insert_pending,
    pending,
    requests,
    write,
)

pytestmark = pytest.mark.usefixtures("db")

A = Asset("a", uri="test://a")
B = Asset("b", uri="test://b")
DAY = "2024-03-01"

Expected = dict[str, list[str]]


def one_event(scheduler: Scheduler) -> Expected:
    """One event of one asset."""
    consumer("dag", A)
    emit(A, "k")
    return {"dag": ["k"]}


def many_keys_of_many_dags(scheduler: Scheduler) -> Expected:
    """More keys of more Dags than a loop evaluates."""
    keys = [f"k{n}" for n in range(9)]
    for dag_id in ("d1", "d2", "d3"):
        consumer(dag_id, A)
    emit(A, *keys)
    return dict.fromkeys(("d1", "d2", "d3"), keys)


def rollup_hour_by_hour(scheduler: Scheduler) -> Expected:
    """A rollup whose hours arrive one by one, with loops between."""
    consumer("dag", A, day_rollup())
    for hour in hours(DAY):
        scheduler.settle()
        assert [] == fired("dag")
        emit(A, hour)
    return {"dag": [DAY]}


def both_assets(scheduler: Scheduler) -> Expected:
    """A condition of two assets, met by the second event."""
    consumer("dag", A & B)
    emit(A, "k", "never")
    scheduler.settle()
    assert [] == fired("dag")
    emit(B, "k")
    return {"dag": ["k"]}


def same_key_again(scheduler: Scheduler) -> Expected:
    """A key whose run has fired gets a second run from a second event."""
    consumer("dag", A)
    emit(A, "k")
    scheduler.settle()
    emit(A, "k")
    return {"dag": ["k", "k"]}


def alias(scheduler: Scheduler) -> Expected:
    """An event that arrives through an alias."""
    consumer("producer", A)
    consumer("dag", AssetAlias("alias"))
    with new_session() as session:
        AssetManager().register_asset_change(
            asset=A, partition_key="k", source_alias_names=["alias"], session=session
        )
    return {"dag": ["k"]}


def easier_condition(scheduler: Scheduler) -> Expected:
    """A new definition whose condition what has arrived satisfies."""
    consumer("dag", A & B)
    emit(A, "k1", "k2")
    scheduler.settle()
    assert [] == fired("dag")
    consumer("dag", A | B)
    return {"dag": ["k1", "k2"]}


def asset_activated(scheduler: Scheduler) -> Expected:
    """An asset that the scheduler activates after its events arrived."""
    consumer("dag", A)
    with new_session() as session:
        session.execute(delete(AssetActive))
    emit(A, "k")
    scheduler.settle()
    assert [] == fired("dag")
    scheduler.runner._update_asset_orphanage()
    return {"dag": ["k"]}


def asset_activated_by_the_processor(scheduler: Scheduler) -> Expected:
    """An asset that the Dag processor activates after its events arrived."""
    dag = consumer("dag", A)
    with new_session() as session:
        session.execute(delete(AssetActive))
    emit(A, "k")
    scheduler.settle()
    assert [] == fired("dag")
    with new_session() as session:
        write(dag, session=session)
        change_dag("dag", is_paused=False, is_stale=False, session=session)
    return {"dag": ["k"]}


def paused_with_an_event(scheduler: Scheduler) -> Expected:
    """A Dag that is paused with an event waiting, through loops and tidying, and unpaused."""
    return rested(scheduler, "is_paused")


def stale_with_an_event(scheduler: Scheduler) -> Expected:
    """A Dag that is stale with events waiting, through loops and tidying, and found again."""
    return rested(scheduler, "is_stale")


def rested(scheduler: Scheduler, state: str) -> Expected:
    consumer("dag", A)
    emit(A, "k1", "k2")
    change_dag("dag", **{state: True})
    scheduler.settle()
    scheduler.runner._asset_partition_wake.tidy()
    scheduler.settle()
    assert [] == fired("dag")
    change_dag("dag", **{state: False})
    return {"dag": ["k1", "k2"]}


def paused_half_way(scheduler: Scheduler) -> Expected:
    """A Dag that is paused in the middle of a fan-out."""
    consumer("dag", A & B)
    keys = [f"k{n}" for n in range(9)]
    emit(A, *keys)
    scheduler.settle()
    consumer("dag", A | B)
    scheduler.step()
    assert 0 < len(fired("dag")) < 9
    change_dag("dag", is_paused=True)
    scheduler.settle()
    change_dag("dag", is_paused=False)
    return {"dag": keys}


def failed_loop(scheduler: Scheduler) -> Expected:
    """A loop that fails, once."""
    consumer("dag", A)
    emit(A, "k")
    create = SerializedDAG.create_dagrun

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no run")

    SerializedDAG.create_dagrun = fail
    try:
        with pytest.raises(RuntimeError, match="no run"):
            scheduler.step()
    finally:
        SerializedDAG.create_dagrun = create
    return {"dag": ["k"]}


def another_scheduler(scheduler: Scheduler) -> Expected:
    """A scheduler that is gone in the middle of a fan-out, and one that starts after it."""
    consumer("dag", A & B)
    keys = [f"k{n}" for n in range(9)]
    emit(A, *keys)
    scheduler.settle()
    consumer("dag", A | B)
    scheduler.step()
    assert 0 < len(fired("dag")) < 9
    scheduler.__init__(budget=4)  # type: ignore[misc]
    return {"dag": keys}


def changed_mapper(scheduler: Scheduler) -> Expected:
    """A new mapper: what was collected is dropped, and a new event fires by the new mapper."""
    consumer("dag", A, day_rollup())
    emit(A, *hours(DAY)[:3])
    scheduler.settle()
    consumer("dag", A, StartOfDayMapper())
    scheduler.settle()
    assert [] == pending("dag")
    emit(A, hours(DAY)[3])
    return {"dag": [DAY]}


SCENARIOS: list[Callable[[Scheduler], Expected]] = [
    one_event,
    many_keys_of_many_dags,
    rollup_hour_by_hour,
    both_assets,
    same_key_again,
    alias,
    easier_condition,
    asset_activated,
    asset_activated_by_the_processor,
    paused_with_an_event,
    stale_with_an_event,
    paused_half_way,
    failed_loop,
    another_scheduler,
    changed_mapper,
]


@pytest.fixture(params=["passes", "no passes"])
def passes(request) -> bool:
    if request.param == "no passes":
        request.getfixturevalue("no_passes")
    return request.param == "passes"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_needs_no_pass(scenario, passes):
    """Everything that is asked for fires alike with resync passes and without, and no request is left."""
    scheduler = Scheduler(budget=4)
    expected = scenario(scheduler)
    scheduler.settle()
    assert {dag_id: sorted(keys) for dag_id, keys in expected.items()} == {
        dag_id: sorted(fired(dag_id)) for dag_id in expected
    }
    assert [] == requests()


# What only a pass can find


def bulk_key_logs(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Expected:
    """Key logs that were inserted in bulk, not through a session."""
    consumer("dag", A)
    scheduler.settle()
    insert_pending("dag", ["k"], asset=A)
    return {"dag": ["k"]}


def activated_by_something_else(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Expected:
    """An ``AssetActive`` row that neither the scheduler nor the Dag processor inserted."""
    consumer("dag", A)
    with new_session() as session:
        session.execute(delete(AssetActive))
    emit(A, "k")
    scheduler.settle()
    with new_session() as session:
        session.add(AssetActive.for_asset(session.scalars(select(AssetModel)).one()))
    return {"dag": ["k"]}


def alias_linked_later(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Expected:
    """An alias that is newly linked to an asset that was active already."""
    consumer("producer", A)
    consumer("dag", AssetAlias("alias"))
    ask("dag", insert_pending("dag", ["k"], asset=A))
    scheduler.settle()
    with new_session() as session:
        session.execute(
            insert(alias_association_table).values(
                alias_id=session.scalar(select(AssetAliasModel.id)),
                asset_id=session.scalar(select(AssetModel.id).where(AssetModel.name == "a")),
            )
        )
    return {"dag": ["k"]}


class ToldByTheClock(PartitionMapper):
    """A mapper that waits for a second key until a certain time."""

    is_rollup = True
    wait_policy = WaitForAll()

    def to_downstream(self, key: str) -> str:
        return key

    def to_upstream(self, downstream_key: str) -> frozenset[str]:
        late = datetime.now(timezone.utc) >= datetime(2030, 1, 1, 1, tzinfo=timezone.utc)
        return frozenset({"k"} if late else {"k", "another"})


def mapper_that_reads_the_clock(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Expected:
    """A custom mapper whose result changes with the clock."""
    mappers = {qualname(ToldByTheClock): ToldByTheClock}
    monkeypatch.setattr(plugins_manager, "get_partition_mapper_plugins", lambda: mappers)
    consumer("dag", A, ToldByTheClock())
    emit(A, "k")
    return {"dag": ["k"]}


ONLY_A_PASS: list[Callable[[Scheduler, pytest.MonkeyPatch], Expected]] = [
    bulk_key_logs,
    activated_by_something_else,
    alias_linked_later,
    mapper_that_reads_the_clock,
]


@pytest.mark.parametrize("scenario", ONLY_A_PASS, ids=lambda scenario: scenario.__name__)
def test_needs_a_pass(scenario, passes, clock, monkeypatch):
    """What no request reports waits for the next periodic pass, and without passes for ever."""
    scheduler = Scheduler(budget=4)
    scheduler.settle()
    expected = scenario(scheduler, monkeypatch)
    scheduler.settle()
    assert {dag_id: [] for dag_id in expected} == {dag_id: fired(dag_id) for dag_id in expected}

    clock.shift(3600)
    scheduler.settle()
    found = expected if passes else {dag_id: [] for dag_id in expected}
    assert found == {dag_id: fired(dag_id) for dag_id in expected}
    assert [] == requests()
