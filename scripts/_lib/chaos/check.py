"""What is left at the end of a round, and what should be.

The reference is naive: every pending run of a Dag that can run is evaluated by Airflow's own code, and rolled back. For
steady Dags, what must have fired is worked out from the key logs a second time, without Airflow's evaluation.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from _lib.chaos import cast
from airflow.jobs.asset_partition_wake.claim import dag_can_run
from airflow.jobs.job import Job
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
from airflow.models.asset import AssetEvent, AssetModel, AssetPartitionDagRun, PartitionedAssetKeyLog
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun

from tests_common.db import new_session

APDR = AssetPartitionDagRun


class Everything:
    """Stands in for the wake step: claims every pending run of the Dags that can run."""

    def claim(self, budget: int, *, session: Session) -> list[AssetPartitionDagRun]:
        return list(
            session.scalars(
                select(APDR)
                .join(DagModel, DagModel.dag_id == APDR.target_dag_id)
                .where(APDR.created_dag_run_id.is_(None), dag_can_run())
                .order_by(APDR.id)
            )
        )


def evaluate_everything(session: Session) -> tuple[list[AssetPartitionDagRun], list[AssetPartitionDagRun]]:
    """Return the pending runs that Airflow's evaluation would fire, and those that it would drop."""
    runner = SchedulerJobRunner(job=Job())
    everything = Everything()
    pending = everything.claim(0, session=session)
    runner._asset_partition_wake = everything  # type: ignore[assignment]
    runner._create_dagruns_for_partitioned_asset_dags(session)
    left = set(session.scalars(select(APDR.id).where(APDR.id.in_([run.id for run in pending]))))
    fires = [run for run in pending if run.id in left and run.created_dag_run_id is not None]
    return fires, [run for run in pending if run.id not in left]


class Check:
    """Gathers what was found in one look at the database."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lost: list[str] = []
        self.twice: list[str] = []
        self.reasons: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        session = self.session
        runs = session.execute(
            select(APDR.id, APDR.target_dag_id, APDR.partition_key, APDR.created_dag_run_id)
        ).all()
        can_run = set(session.scalars(select(DagModel.dag_id).where(dag_can_run())))
        known = set(session.scalars(select(DagModel.dag_id)))
        self._requests(can_run, known)
        self._dag_runs(run.created_dag_run_id for run in runs)
        self._steady(runs, can_run)
        fires, drops = evaluate_everything(session)
        for pending in fires:
            self.lost.append(
                f"{pending.target_dag_id} {pending.partition_key} (run {pending.id}) is complete and pending"
            )
        for pending in drops:
            self.lost.append(
                f"{pending.target_dag_id} {pending.partition_key} (run {pending.id}) should have been dropped"
            )
        session.rollback()
        for run in runs:
            if run.created_dag_run_id is None:
                self.reasons[self._reason(run.target_dag_id, can_run, known)] += 1
        return {
            "events": session.scalar(select(func.count(AssetEvent.id))),
            "key_logs": session.scalar(select(func.count(PartitionedAssetKeyLog.id))),
            "fired": sum(run.created_dag_run_id is not None for run in runs),
            "pending": dict(self.reasons),
            "lost": self.lost,
            "twice": self.twice,
        }

    @staticmethod
    def _reason(dag_id: str, can_run: set[str], known: set[str]) -> str:
        if dag_id in can_run:
            return "not complete"
        return "paused or stale" if dag_id in known else "Dag deleted"

    def _requests(self, can_run: set[str], known: set[str]) -> None:
        wake = AssetPartitionDagRunWake
        for dag_id, count in self.session.execute(
            select(wake.target_dag_id, func.count(wake.id)).group_by(wake.target_dag_id)
        ):
            if dag_id in can_run:
                self.lost.append(f"{count} requests are left for {dag_id}, which can run")
            elif dag_id not in known:
                self.lost.append(f"{count} requests are left for {dag_id}, which is deleted")
            elif count > 1:
                self.lost.append(f"{count} requests for {dag_id}, which cannot run, were not merged")

    def _dag_runs(self, created: Iterable[int | None]) -> None:
        """Every Dag run of a partition has one pending row that it was made from: two would be a run too many."""
        of = Counter(dag_run_id for dag_run_id in created if dag_run_id is not None)
        for dag_run_id, dag_id, key in self.session.execute(
            select(DagRun.id, DagRun.dag_id, DagRun.partition_key).where(DagRun.partition_key.is_not(None))
        ):
            if of[dag_run_id] != 1:
                self.twice.append(
                    f"Dag run {dag_run_id} of {dag_id} {key} belongs to {of[dag_run_id]} partitions"
                )

    def _steady(self, runs: Any, can_run: set[str]) -> None:
        """Compare what fired of the steady Dags with their key logs."""
        ids: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for run in runs:
            ids[run.target_dag_id, run.partition_key].append(run)
        exists = {run.id for run in runs}
        got: dict[tuple[str, str], cast.Sources] = defaultdict(set)
        for dag_id, key, apdr_id, source, asset in self.session.execute(
            select(
                PartitionedAssetKeyLog.target_dag_id,
                PartitionedAssetKeyLog.target_partition_key,
                PartitionedAssetKeyLog.asset_partition_dag_run_id,
                PartitionedAssetKeyLog.source_partition_key,
                AssetModel.name,
            ).join(AssetModel, AssetModel.id == PartitionedAssetKeyLog.asset_id)
        ):
            if dag_id in cast.STEADY:
                got[dag_id, key].add((asset, source))
            if apdr_id not in exists:
                if dag_id in cast.STEADY:
                    self.lost.append(f"{dag_id} {key}: a key log without its run, and nothing was edited")
                else:
                    self.reasons["key logs whose run was dropped"] += 1
        for (dag_id, key), sources in got.items():
            partition = ids[dag_id, key]
            fired = sum(run.created_dag_run_id is not None for run in partition)
            if fired > cast.MOST_RUNS.get(dag_id, 1):
                self.twice.append(f"{dag_id} {key} fired {fired} times")
            complete = cast.COMPLETE[dag_id](sources)
            if complete and not fired and dag_id in can_run:
                if len(partition) > 1:
                    # Two writers of different assets made a row each: `AssetManager` locks the asset, not the key.
                    self.reasons["complete, but Airflow itself split it over two rows"] += 1
                else:
                    self.lost.append(f"{dag_id} {key} is complete by its key logs and did not fire")
            if fired and not complete:
                self.twice.append(f"{dag_id} {key} fired, but is not complete by its key logs")


def main(folder: Path) -> None:
    """Check, and write what was found to a file."""
    with new_session() as session:
        (folder / "checked.json").write_text(json.dumps(Check(session).run()))
