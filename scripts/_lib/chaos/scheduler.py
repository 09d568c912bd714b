"""A real `airflow scheduler`, without resync passes and disturbed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _lib.chaos.disturb import Chances, Disturbance
from airflow.__main__ import main as airflow_main
from airflow.executors.base_executor import BaseExecutor
from airflow.jobs.asset_partition_wake.agenda import Agenda
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner

CHANCES = Chances(delay=0.02, longest=0.15, cut=0.15, death=0.1)


class IdleExecutor(BaseExecutor):
    """Runs nothing: there is nothing to run, as the round's Dags have no run that starts."""

    def start(self) -> None:
        pass

    def sync(self) -> None:
        pass

    def end(self) -> None:
        pass

    def terminate(self) -> None:
        pass


def main(folder: Path, name: str, seed: str, startup_pass: bool) -> None:
    """Run the scheduler until it is stopped.

    :param startup_pass: whether it may do its startup pass; no other pass is ever done
    """
    due = Agenda.pass_is_due

    def pass_is_due(self: Agenda, now: float) -> bool:
        return startup_pass and self.next_kind == "startup" and due(self, now)

    disturbance = Disturbance(folder, name, seed, CHANCES)
    disturbance.install()
    replace: list[tuple[Any, str, Any]] = [
        (Agenda, "pass_is_due", pass_is_due),
        # With its retries and its commit.
        *(
            (owner, function, disturbance.watching(getattr(owner, function)))
            for owner, function in (
                (SchedulerJobRunner, "_create_dagruns_for_dags"),
                (SchedulerJobRunner, "_update_asset_orphanage"),
                (WakeStep, "tidy"),
            )
        ),
    ]
    for owner, function, new in replace:
        setattr(owner, function, new)
    sys.argv = ["airflow", "scheduler", "--skip-serve-logs"]
    airflow_main()
