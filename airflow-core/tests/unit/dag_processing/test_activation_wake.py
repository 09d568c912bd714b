"""Assets that become active ask for the pending runs of the Dags scheduled on them (spec 4.3)."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from sqlalchemy import delete, insert, select

from airflow.dag_processing.collection import AssetModelOperation
from airflow.models.asset import (
    AssetActive,
    AssetAliasModel,
    AssetModel,
    alias_association_table,
)
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, AssetAlias

from tests_common.db import new_session, recorded_statements
from tests_common.factories import (
    Scheduler,
    consumer,
    emit,
    fired,
    insert_runs,
    make_dag,
    requests,
    write,
)

pytestmark = pytest.mark.usefixtures("db")

PLAIN = Asset("plain", uri="test://plain")
SAME_NAME = Asset("plain", uri="test://other")
SAME_URI = Asset("other", uri="test://plain")
UNRELATED = Asset("unrelated", uri="test://unrelated")


def produce(*assets: Asset) -> None:
    """Have the Dag processor sync a file with a Dag that produces assets: it activates them."""
    with DAG("producer", schedule=None) as dag:
        EmptyOperator(task_id="task", outlets=list(assets))
    with new_session() as session:
        write(dag, session=session)


def processor(*assets: Asset) -> None:
    produce(*assets)


def scheduler(*assets: Asset) -> None:
    Scheduler().runner._update_asset_orphanage()


@pytest.fixture(params=[processor, scheduler], ids=["processor", "scheduler"])
def activate(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Activate what can be activated, on both paths."""
    return request.param


def deactivate(*assets: Asset) -> None:
    """Make assets inactive, and forget all that was asked for until now."""
    with new_session() as session:
        session.execute(delete(AssetActive).where(AssetActive.name.in_([asset.name for asset in assets])))
        session.execute(delete(AssetPartitionDagRunWake))


def active() -> list[tuple[str, str]]:
    with new_session() as session:
        return [
            tuple(row)
            for row in session.execute(
                select(AssetActive.name, AssetActive.uri).order_by(AssetActive.name, AssetActive.uri)
            )
        ]


def link(alias: str, asset: Asset) -> None:
    """Link an alias to an asset, as the first event that a task emits through it does."""
    with new_session() as session:
        session.execute(
            insert(alias_association_table).values(
                alias_id=session.scalar(select(AssetAliasModel.id).where(AssetAliasModel.name == alias)),
                asset_id=session.scalar(
                    select(AssetModel.id).where(AssetModel.name == asset.name, AssetModel.uri == asset.uri)
                ),
            )
        )


# -- what is newly active -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(PLAIN, id="asset"),
        pytest.param(Asset.ref(name=PLAIN.name), id="name"),
        pytest.param(Asset.ref(uri=PLAIN.uri), id="uri"),
        pytest.param(AssetAlias("alias"), id="alias"),
        pytest.param(UNRELATED & Asset.ref(name=PLAIN.name), id="condition"),
    ],
)
def test_newly_active_asset_asks(schedule, activate):
    """An asset that becomes active asks for the Dags scheduled on it, once, however they refer to it."""
    consumer("consumer", schedule)
    consumer("unrelated", UNRELATED)
    produce(PLAIN)
    if isinstance(schedule, AssetAlias):
        link("alias", PLAIN)
    deactivate(PLAIN)

    activate(PLAIN)
    assert [("consumer", None, "asset activation")] == requests()

    activate(PLAIN)
    assert [("consumer", None, "asset activation")] == requests()


def test_asset_that_is_new_asks():
    """A file that brings an asset asks for the Dags that waited for it by its name."""
    consumer("consumer", Asset.ref(name=PLAIN.name))
    deactivate()
    produce(PLAIN)

    assert [("consumer", None, "asset activation")] == requests()


def test_each_dag_is_asked_for_once_by_the_processor():
    """Assets that become active in one sync ask for a Dag that is scheduled on all of them once."""
    consumer("consumer", PLAIN & UNRELATED & Asset.ref(name=PLAIN.name))
    consumer("another", UNRELATED)
    deactivate(PLAIN, UNRELATED)
    produce(PLAIN, UNRELATED)

    assert {("another", None, "asset activation"), ("consumer", None, "asset activation")} == set(requests())
    assert 2 == len(requests())


def test_only_newly_active_assets_ask(activate):
    """An asset that was active before asks for nothing, also beside one that was not."""
    consumer("consumer", PLAIN)
    consumer("another", UNRELATED)
    produce(PLAIN, UNRELATED)
    deactivate(PLAIN)
    activate(PLAIN, UNRELATED)

    assert [("consumer", None, "asset activation")] == requests()


@pytest.mark.parametrize("conflicting", [SAME_NAME, SAME_URI], ids=["name", "uri"])
def test_refused_activation_asks_for_nothing(conflicting, activate):
    """An asset that stays inactive, because another has its name or URI, asks for nothing."""
    produce(PLAIN)
    consumer("consumer", conflicting)
    consumer("by_name", Asset.ref(name=conflicting.name))
    deactivate()
    activate(PLAIN, conflicting)

    assert [] == requests()
    assert [(PLAIN.name, PLAIN.uri)] == active()


def test_asset_that_takes_over_asks(activate):
    """Once the other asset of its name is gone, an asset can become active, and asks."""
    consumer("another", PLAIN)
    consumer("consumer", SAME_NAME)
    consumer("another", UNRELATED)
    deactivate(PLAIN)
    activate(SAME_NAME)

    assert [("consumer", None, "asset activation")] == requests()


def test_two_new_assets_of_one_name(activate):
    """Of two inactive assets of one name only the one that becomes active asks."""
    consumer("one", PLAIN)
    consumer("other", SAME_NAME)
    produce(PLAIN, SAME_NAME)
    deactivate(PLAIN)
    activate(PLAIN, SAME_NAME)

    (winner,) = active()
    assert [("one" if PLAIN.uri == winner[1] else "other", None, "asset activation")] == requests()


# -- which Dags ---------------------------------------------------------------------------------------------------------


def test_dag_that_is_not_partitioned_asks_for_nothing(activate):
    """A Dag without partitions has nothing to evaluate."""
    with new_session() as session:
        write(make_dag("consumer", [PLAIN]), session=session)
    produce(PLAIN)
    deactivate(PLAIN)
    activate(PLAIN)

    assert [] == requests()


def test_dag_that_is_not_partitioned_any_more_asks_for_what_is_pending(activate):
    """A pending run that is left of a partitioned Dag is asked for."""
    with new_session() as session:
        write(make_dag("consumer", [PLAIN]), session=session)
    produce(PLAIN)
    insert_runs("consumer")
    deactivate(PLAIN)
    activate(PLAIN)

    assert [("consumer", None, "asset activation")] == requests()


def test_runs_that_fired_are_not_pending(activate):
    """A Dag that is not partitioned any more, and whose runs all fired, asks for nothing."""
    consumer("consumer", PLAIN)
    produce(PLAIN)
    emit(PLAIN, "a")
    Scheduler().settle()
    with new_session() as session:
        write(make_dag("consumer", [PLAIN]), session=session)
    deactivate(PLAIN)
    activate(PLAIN)

    assert ["a"] == fired("consumer")
    assert [] == requests()


# -- in the transaction of the activation -------------------------------------------------------------------------------


def test_rolled_back_with_the_activation_by_the_scheduler():
    """No request is left of an activation that was rolled back."""
    consumer("consumer", PLAIN)
    deactivate(PLAIN)
    with new_session() as session:
        Scheduler().runner._update_asset_orphanage(session=session)
        session.flush()
        assert 1 == len(session.scalars(select(AssetPartitionDagRunWake.id)).all())
        session.rollback()

    assert [] == requests()
    assert [] == active()


def test_rolled_back_with_the_activation_by_the_processor():
    """No request is left of a sync that was rolled back."""
    dag = consumer("consumer", PLAIN)
    deactivate(PLAIN)
    with new_session() as session:
        write(dag, session=session)
        assert 1 == len(session.scalars(select(AssetPartitionDagRunWake.id)).all())
        session.rollback()

    assert [] == requests()


# -- what it is for -----------------------------------------------------------------------------------------------------


def test_run_that_waited_for_its_asset_fires(activate):
    """Key logs of an inactive asset do not count; once it is active the run fires in the next step."""
    consumer("consumer", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    deactivate(PLAIN)
    emit(PLAIN, "a")
    scheduler.settle()
    assert [] == fired("consumer")

    produce(PLAIN) if activate is processor else activate()
    scheduler.step()
    assert ["a"] == fired("consumer")


# -- what it costs ------------------------------------------------------------------------------------------------------


# MySQL does not return what an INSERT inserted; the others do, and need no query.
QUERIES = 1 if os.environ.get("WAKE_BACKEND") == "mysql" else 0


def test_repeated_sync_costs_one_query():
    """The sync of a file that did not change asks at most once which assets are active, and writes no request."""
    dag = consumer("consumer", PLAIN & UNRELATED & Asset.ref(name="another"))
    with new_session() as session, recorded_statements() as statements:
        write(dag, session=session)

    sent = [s for s in statements if "asset_active" in s and s.startswith("SELECT asset_active.name")]
    assert QUERIES == len(sent)
    assert [] == [s for s in statements if "asset_partition_dag_run_wake" in s]


def test_activation_sends_its_insert_and_one_query(session):
    """Beside Airflow's own INSERT, assets that are active cost one SELECT at most."""
    produce(PLAIN, UNRELATED)
    with recorded_statements() as statements:
        AssetModelOperation.collect({}).activate_assets_if_possible(
            session.scalars(select(AssetModel)).all(), session=session
        )

    assert ["SELECT"] * (1 + QUERIES) + ["INSERT"] == [statement.split()[0] for statement in statements]


def test_nothing_to_activate_sends_nothing(session):
    """Without assets there is no query at all."""
    with recorded_statements() as statements:
        AssetModelOperation.collect({}).activate_assets_if_possible([], session=session)

    assert [] == statements


def test_loop_without_new_assets_asks_for_nothing():
    """The scheduler's pass over all assets does not touch requests where it activates none."""
    consumer("consumer", PLAIN)
    runner = Scheduler().runner
    with recorded_statements("asset_partition_dag_run_wake") as statements:
        runner._update_asset_orphanage()

    assert [] == statements
