"""Dags, events and runs of asset partitions, made with Airflow's own code: nothing here imitates it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from sqlalchemy import delete, func, insert, select, update

from airflow._shared.timezones import timezone
from airflow.assets.manager import AssetManager
from airflow.jobs.job import Job
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
from airflow.models.asset import AssetModel, AssetPartitionDagRun, PartitionedAssetKeyLog
from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import (
    DAG,
    Asset,
    DayWindow,
    PartitionedAssetTimetable,
    RollupMapper,
    StartOfDayMapper,
)
from airflow.serialization.definitions.assets import SerializedAssetUniqueKey
from airflow.serialization.definitions.dag import SerializedDAG
from airflow.serialization.serialized_objects import LazyDeserializedDAG
from airflow.timetables.base import compute_rollup_fingerprint
from airflow.utils.state import DagRunState, TaskInstanceState
from airflow.utils.types import DagRunTriggeredByType, DagRunType

from tests_common.db import new_session

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy.orm import Session

BUNDLE = "testing"


def day_rollup(**kwargs: Any) -> RollupMapper:
    """Return a mapper that waits for the 24 hours of a day."""
    return RollupMapper(upstream_mapper=StartOfDayMapper(), window=DayWindow(), **kwargs)


def hours(day: str) -> list[str]:
    """Return the 24 hourly keys that :func:`day_rollup` waits for."""
    return [f"{day}T{hour:02}:00:00" for hour in range(24)]


def days(count: int, first: str = "2020-01-01") -> list[str]:
    """Return the keys of *count* days."""
    start = timezone.parse(first)
    return [(start + timedelta(days=n)).strftime("%Y-%m-%d") for n in range(count)]


def write(dag: DAG, *, session: Session) -> LazyDeserializedDAG:
    """Write a Dag as the Dag processor does: references, activation, definition."""
    if session.get(DagBundleModel, BUNDLE) is None:
        session.add(DagBundleModel(name=BUNDLE))
        session.flush()
    lazy = LazyDeserializedDAG.from_dag(dag)
    SerializedDAG.bulk_write_to_db(BUNDLE, None, [lazy], session=session)
    SerializedDagModel.write_dag(lazy, BUNDLE, session=session)
    session.flush()
    return lazy


def make_dag(dag_id: str, schedule: Any = None, *, tasks: Iterable[str] = ("task",), **kwargs: Any) -> DAG:
    """Return a Dag of empty tasks."""
    with DAG(dag_id, schedule=schedule, start_date=timezone.datetime(2020, 1, 1), **kwargs) as dag:
        for task_id in tasks:
            EmptyOperator(task_id=task_id)
    return dag


def consumer(dag_id: str, assets: Any, mapper: Any = None, *, paused: bool = False, **kwargs: Any) -> DAG:
    """
    Write a Dag scheduled on partitioned assets, ready to run.

    :param dag_id: its id
    :param assets: an asset, or a condition of several
    :param mapper: the partition mapper of all of them; Airflow's default where it is None
    :param paused: whether it is paused
    :param kwargs: of :func:`make_dag`, or ``partition_mapper_config``
    """
    config = {"partition_mapper_config": kwargs.pop("partition_mapper_config", {})}
    if mapper is not None:
        config["default_partition_mapper"] = mapper
    dag = make_dag(dag_id, PartitionedAssetTimetable(assets=assets, **config), **kwargs)
    with new_session() as session:
        write(dag, session=session)
        change_dag(dag_id, is_paused=paused, is_stale=False, session=session)
    return dag


def change_dag(dag_id: str, *, session: Session | None = None, **values: Any) -> None:
    """Set columns of a Dag: ``is_paused``, ``is_stale``."""
    if session is None:
        with new_session() as session:
            change_dag(dag_id, session=session, **values)
        return
    session.execute(update(DagModel).where(DagModel.dag_id == dag_id).values(**values))


def emit(asset: Asset, *keys: str, session: Session | None = None) -> None:
    """Register one event of an asset for each key, as a task's success or the REST API does."""
    if session is None:
        with new_session() as session:
            emit(asset, *keys, session=session)
        return
    for key in keys:
        AssetManager().register_asset_change(
            asset=SerializedAssetUniqueKey(asset.name, asset.uri), partition_key=key, session=session
        )
    session.flush()


def stored(dag_id: str, *, session: Session) -> SerializedDAG:
    """Return the definition of a Dag as it is stored."""
    serialized = SerializedDagModel.get(dag_id, session=session)
    assert serialized is not None, f"{dag_id} is not stored"
    return serialized.dag


def insert_pending(
    dag_id: str, keys: Iterable[str], *, asset: Asset | None = None, upstream: str = "{}T00:00:00"
) -> list[int]:
    """
    Insert pending runs in bulk, so that no request is written for them.

    :param dag_id: the Dag
    :param keys: a run for each
    :param asset: the asset that each run gets one key log of; none for None
    :param upstream: that key log's source key, ``{}`` standing for the run's key
    :return: the ids of the runs
    """
    with new_session() as session:
        fingerprint = compute_rollup_fingerprint(stored(dag_id, session=session).timetable)
        before = session.scalar(select(func.max(AssetPartitionDagRun.id))) or 0
        now = timezone.utcnow()
        rows = [
            {
                "target_dag_id": dag_id,
                "partition_key": key,
                "rollup_fingerprint": fingerprint,
                "created_at": now,
                "updated_at": now,
            }
            for key in keys
        ]
        session.execute(insert(AssetPartitionDagRun.__table__), rows)
        runs = session.execute(
            select(AssetPartitionDagRun.id, AssetPartitionDagRun.partition_key)
            .where(AssetPartitionDagRun.id > before)
            .order_by(AssetPartitionDagRun.id)
        ).all()
        if asset is not None:
            asset_id = session.scalar(select(AssetModel.id).where(AssetModel.name == asset.name))
            session.execute(
                insert(PartitionedAssetKeyLog.__table__),
                [
                    {
                        "asset_id": asset_id,
                        "asset_event_id": 0,
                        "asset_partition_dag_run_id": apdr_id,
                        "source_partition_key": upstream.format(key),
                        "target_dag_id": dag_id,
                        "target_partition_key": key,
                    }
                    for apdr_id, key in runs
                ],
            )
    return [apdr_id for apdr_id, _ in runs]


class Scheduler:
    """A scheduler of which a test runs the loop's step, each in a transaction of its own."""

    def __init__(self, budget: int | None = None) -> None:
        self.runner = SchedulerJobRunner(job=Job())
        if budget is not None:
            self.runner._max_partition_dag_runs_per_loop = budget

    def step(self, session: Session | None = None) -> set[str]:
        """Run one step and commit; return the Dags that got a run."""
        if session is not None:
            dag_ids = self.runner._create_dagruns_for_partitioned_asset_dags(session)
            session.commit()
            return dag_ids
        with new_session() as session:
            return self.runner._create_dagruns_for_partitioned_asset_dags(session)

    def evaluate(self) -> list[int]:
        """Run one step; return the ids of the runs that it evaluated, in order."""
        evaluated: list[int] = []
        wake = self.runner._asset_partition_wake
        claim = wake.claim

        def spy(budget: int, *, session: Session) -> list[AssetPartitionDagRun]:
            runs = claim(budget, session=session)
            evaluated[:] = [run.id for run in runs]
            return runs

        with patch.object(wake, "claim", spy):
            self.step()
        return evaluated

    def settle(self, most: int = 200) -> set[str]:
        """Step until there is neither a request that can be answered nor anything under way."""
        fired: set[str] = set()
        for _ in range(most):
            fired |= self.step()
            agenda = self.runner._asset_partition_wake._agenda
            if not agenda.fan_outs and agenda.resync is None and not requests(runnable=True):
                return fired
        raise AssertionError(f"not settled after {most} steps: {agenda}, {requests()}")


def requests(dag_id: str | None = None, *, runnable: bool = False) -> list[tuple[str, int | None, str]]:
    """Return ``(dag_id, apdr_id, reason)`` of the requests that wait, oldest first."""
    from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake

    query = select(Wake.target_dag_id, Wake.apdr_id, Wake.reason).order_by(Wake.id)
    if dag_id is not None:
        query = query.where(Wake.target_dag_id == dag_id)
    if runnable:
        query = query.join(DagModel, DagModel.dag_id == Wake.target_dag_id).where(
            DagModel.is_paused.is_(False), DagModel.is_stale.is_(False)
        )
    with new_session() as session:
        return [(target, apdr_id, reason) for target, apdr_id, reason in session.execute(query)]


def fired(dag_id: str) -> list[str]:
    """Return the partition keys of a Dag that fired, in the order in which they did."""
    return _keys(dag_id, AssetPartitionDagRun.created_dag_run_id.is_not(None))


def pending(dag_id: str) -> list[str]:
    """Return the partition keys of a Dag that are pending."""
    return _keys(dag_id, AssetPartitionDagRun.created_dag_run_id.is_(None))


def _keys(dag_id: str, condition: Any) -> list[str]:
    with new_session() as session:
        return list(
            session.scalars(
                select(AssetPartitionDagRun.partition_key)
                .where(AssetPartitionDagRun.target_dag_id == dag_id, condition)
                .order_by(AssetPartitionDagRun.created_dag_run_id, AssetPartitionDagRun.id)
            )
        )


def insert_dags(*dag_ids: str, **values: Any) -> None:
    """Insert rows of Dags without a definition, enough for what reads none; paused or stale by *values*."""
    columns = {
        "bundle_name": BUNDLE,
        "is_paused": False,
        "is_stale": False,
        "max_active_tasks": 16,
        "max_consecutive_failed_dag_runs": 0,
        "has_task_concurrency_limits": False,
        "timetable_partitioned": True,
        "partition_mapper_info": [],
    } | values
    with new_session() as session:
        if session.get(DagBundleModel, BUNDLE) is None:
            session.add(DagBundleModel(name=BUNDLE))
            session.flush()
        session.execute(insert(DagModel.__table__), [{"dag_id": dag_id} | columns for dag_id in dag_ids])


def insert_runs(dag_id: str, count: int = 1, *, created_at: datetime | None = None) -> list[int]:
    """Insert pending runs in bulk, without key logs, also of a Dag without a definition; return their ids."""
    now = created_at or timezone.utcnow()
    with new_session() as session:
        before = session.scalar(select(func.max(AssetPartitionDagRun.id))) or 0
        session.execute(
            insert(AssetPartitionDagRun.__table__),
            [
                {
                    "target_dag_id": dag_id,
                    "partition_key": str(n),
                    "rollup_fingerprint": {},
                    "created_at": now,
                    "updated_at": now,
                }
                for n in range(count)
            ],
        )
        return list(
            session.scalars(
                select(AssetPartitionDagRun.id)
                .where(AssetPartitionDagRun.id > before)
                .order_by(AssetPartitionDagRun.id)
            )
        )


def ask(
    dag_id: str, apdr_ids: Iterable[int | None] = (None,), *, created_at: datetime | None = None
) -> list[int]:
    """Insert requests in bulk, one for each of the runs, None for every pending run of the Dag; return their ids."""
    from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake

    with new_session() as session:
        before = session.scalar(select(func.max(Wake.id))) or 0
        session.execute(
            insert(Wake.__table__),
            [
                {
                    "apdr_id": apdr_id,
                    "target_dag_id": dag_id,
                    "reason": "key log",
                    "created_at": created_at or timezone.utcnow(),
                }
                for apdr_id in apdr_ids
            ],
        )
        return list(session.scalars(select(Wake.id).where(Wake.id > before).order_by(Wake.id)))


def asked() -> list[int]:
    """Return the ids of the requests that wait."""
    from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake

    with new_session() as session:
        return list(session.scalars(select(Wake.id).order_by(Wake.id)))


def running_task(dag_id: str, run_id: str = "run") -> UUID:
    """Make a Dag run of a Dag with one task, and return the id of its task instance, which runs."""
    now = timezone.utcnow()
    with new_session() as session:
        run = stored(dag_id, session=session).create_dagrun(
            run_id=run_id,
            run_after=now,
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state=DagRunState.RUNNING,
            session=session,
        )
        (ti,) = run.task_instances
        ti.state = TaskInstanceState.RUNNING
        ti.start_date = now
        return ti.id


def forget_requests() -> None:
    """Delete all requests, those too that writing a Dag made."""
    from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake

    with new_session() as session:
        session.execute(delete(Wake), execution_options={"synchronize_session": False})
