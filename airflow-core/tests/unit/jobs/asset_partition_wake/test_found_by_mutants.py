"""Rules that no other test had noticed broken (`scripts/mutants`)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from sqlalchemy import event, select

from airflow.jobs.asset_partition_wake import step, waiting
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.jobs.asset_partition_wake.waiting import Horizon
from airflow.models.asset import AssetPartitionDagRun
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake

from tests_common.db import new_session
from tests_common.factories import Scheduler, ask, asked, insert_dags, insert_runs

pytestmark = pytest.mark.usefixtures("db")


def claim(wake: WakeStep, budget: int) -> list[int]:
    """Claim and commit, without an evaluation."""
    with new_session() as session:
        return [run.id for run in wake.claim(budget, session=session)]


def test_whoever_has_the_models_has_the_listener():
    """A process that imports nothing but the models of assets has the listener, too (spec 4.1)."""
    code = (
        "import sys, airflow.models.asset; sys.exit('airflow.models.asset_partition_wake' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr


@pytest.mark.usefixtures("no_passes")
def test_refilled_loop_keeps_the_budget():
    """A loop that asks again, because a run was gone, asks for as many as it lacks (spec 5)."""
    insert_dags("dag")
    runs = insert_runs("dag", 8)
    ask("dag", [runs[-1] + 1, *runs])
    wake = WakeStep()

    assert [runs[:4], runs[4:]] == [claim(wake, 4), claim(wake, 4)]


@pytest.mark.backend("postgresql", "mysql")
def test_pass_comes_back_to_a_run_that_a_peer_had_locked():
    """A pass leaves a locked run to a later loop, and does not end before that (spec 5)."""
    insert_dags("dag")
    runs = insert_runs("dag", 3)
    wake = WakeStep()
    with new_session() as peer:
        peer.scalars(
            select(AssetPartitionDagRun).where(AssetPartitionDagRun.id == runs[1]).with_for_update()
        ).all()
        assert [runs[0], runs[2]] == claim(wake, 10)
        assert wake._agenda.resync is not None

    assert runs[1:2] == claim(wake, 10)
    assert wake._agenda.resync is None


@pytest.mark.usefixtures("no_passes")
@pytest.mark.backend("postgresql", "mysql")
def test_smaller_id_committed_just_before_the_delete():
    """A request with a smaller id than those answered, committed after the read, is not deleted with them (spec 7)."""
    insert_dags("dag")
    late, early = insert_runs("dag", 2)
    wake = WakeStep()
    with new_session() as writer, new_session() as session:
        writer.add(AssetPartitionDagRunWake(apdr_id=late, target_dag_id="dag", reason="key log"))
        writer.flush()
        ask("dag", [early])

        def commit_first(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
            if "DELETE FROM asset_partition_dag_run_wake" in statement:
                writer.commit()

        event.listen(session.connection(), "before_cursor_execute", commit_first)
        assert [early] == [run.id for run in wake.claim(4, session=session)]

    assert [late] == claim(wake, 4)
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
def test_horizon_of_a_loop_that_fails_is_forgotten(monkeypatch):
    """An id that was drawn in a transaction that was rolled back may be given out again: it is no horizon (spec 7)."""
    monkeypatch.setattr(waiting, "SLOW", -1.0)
    wake = WakeStep()
    wake._horizon = before = Horizon(was_slow=True)
    with new_session() as session:
        assert [] == wake.claim(4, session=session)
        session.rollback()
    assert before == wake._horizon

    assert [] == claim(wake, 4)
    assert 0 < wake._horizon.drawn


def test_idle_loop_sends_nothing_before_its_commit(monkeypatch):
    """Even that nothing waits is told only once the loop has committed (spec 8)."""
    sent: list[Any] = []
    scheduler = Scheduler()
    scheduler.settle()
    monkeypatch.setattr(step.stats, "gauge", lambda name, value, **kwargs: sent.append((name, value)))
    with new_session() as session:
        scheduler.runner._create_dagruns_for_partitioned_asset_dags(session)
        assert [] == sent

    assert [("scheduler.asset_partitions.wake_lag", 0)] == sent
