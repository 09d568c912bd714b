"""The scheduler's step as a whole (spec 5 to 7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from _lib import environment
from airflow._shared.timezones import timezone
from airflow.exceptions import AirflowConfigException, AirflowException
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.jobs.job import Job
from airflow.jobs.scheduler_job_runner import MAX_PARTITION_DAG_RUNS_PER_LOOP, SchedulerJobRunner
from airflow.models.asset import AssetPartitionDagRun, PartitionedAssetKeyLog
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.models.dagrun import DagRun
from airflow.sdk import Asset, AssetAlias, StartOfDayMapper

from tests_common.db import new_session, recorded_statements
from tests_common.factories import (
    Scheduler,
    ask,
    asked,
    change_dag,
    consumer,
    day_rollup,
    days,
    emit,
    fired,
    forget_requests,
    hours,
    insert_dags,
    insert_pending,
    insert_runs,
    make_dag,
    pending,
    requests,
    write,
)

pytestmark = pytest.mark.usefixtures("db")

HOURLY = Asset("hourly", uri="test://hourly")
PLAIN = Asset("plain", uri="test://plain")


def test_event_fires_its_run_in_the_next_step():
    """A complete partition fires in the step after its event, and its request is gone."""
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, "a")

    assert [("plain", None, "key log")] == [(d, None, r) for d, _, r in requests()]
    assert {"plain"} == scheduler.step()
    assert ["a"] == fired("plain")
    assert [] == requests()


def test_newest_complete_run_is_not_starved():
    """With 600 rollups waiting, a complete run that is the newest fires in the next step."""
    consumer("rollup", HOURLY, day_rollup())
    consumer("plain", PLAIN)
    insert_pending("rollup", days(600), asset=HOURLY)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, "a")

    assert {"plain"} == scheduler.step()
    assert ["a"] == fired("plain")
    assert 600 == len(pending("rollup"))


def test_rollup_waits_for_its_window():
    """A rollup fires with the last hour of its day, not before."""
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler()
    keys = hours("2024-03-01")
    emit(HOURLY, *keys[:23])
    scheduler.settle()
    assert [] == fired("rollup")

    emit(HOURLY, keys[23])
    scheduler.step()
    assert ["2024-03-01"] == fired("rollup")


def start_starved(python: str, home: Path) -> subprocess.Popen[str]:
    """Start the same case in a process of its own, with the Airflow of that Python and an empty database."""
    home.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "WAKE_"))} | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/starved.db",
    }
    command = [python, str(Path(__file__).with_name("starved.py")), "3"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.backend("sqlite")
def test_stock_starves_the_newest_complete_run(tmp_path):
    """The case that stock Airflow never gets to, in stock Airflow itself and in ours."""
    try:
        stock = environment.ensure(patched=False)
    except environment.Problem as problem:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no stock Airflow: {problem}")
    started = {
        name: start_starved(python, tmp_path / name)
        for name, python in (("stock", str(stock)), ("ours", sys.executable))
    }
    outcomes = {}
    for name, process in started.items():
        out, err = process.communicate()
        assert 0 == process.returncode, out + err
        outcomes[name] = json.loads(out.splitlines()[-1])
    assert {
        "stock": {"fired": [], "pending": ["a"], "waiting": 600},
        "ours": {"fired": ["a"], "pending": [], "waiting": 600},
    } == outcomes


def test_idle_step_is_one_statement(clock):
    """Once the startup pass has ended, a step with nothing to do sends exactly one statement, whatever is pending."""
    consumer("rollup", HOURLY, day_rollup())
    consumer("resting", PLAIN, paused=True)
    insert_pending("rollup", days(30), asset=HOURLY)
    (run,) = insert_pending("resting", ["a"], asset=PLAIN)
    ask("resting", [run, None])
    scheduler = Scheduler()
    scheduler.settle()
    for _ in range(2):
        with recorded_statements() as statements:
            assert set() == scheduler.step()
        assert 1 == len(statements), statements
        assert "FROM asset_partition_dag_run_wake" in statements[0]


def test_budget_is_airflows():
    """A loop evaluates as many runs as Airflow's own limit says."""
    consumer("rollup", HOURLY, day_rollup())
    insert_pending("rollup", days(MAX_PARTITION_DAG_RUNS_PER_LOOP + 20))
    forget_requests()
    scheduler = Scheduler()
    assert MAX_PARTITION_DAG_RUNS_PER_LOOP == len(scheduler.evaluate())
    assert 20 == len(scheduler.evaluate())


def test_several_events_are_one_evaluation():
    """The 24 events of a day, each with a request of its own, have their run evaluated once."""
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler()
    scheduler.settle()
    emit(HOURLY, *hours("2024-03-01"))
    assert 24 == len(requests("rollup"))
    assert 1 == len(scheduler.evaluate())
    assert ["2024-03-01"] == fired("rollup")
    assert [] == requests()


def test_oldest_run_fires_first_within_a_loop():
    """The satisfied runs of a loop fire by their age, then by id, whatever the order of their requests."""
    consumer("a", PLAIN)
    consumer("b", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    first, second, third = insert_pending("b", ["b1", "b2", "b3"], asset=PLAIN)
    fourth, fifth = insert_pending("a", ["a1", "a2"], asset=PLAIN)
    start = timezone.datetime(2024, 1, 1)
    with new_session() as session:
        for apdr_id, hour in ((first, 2), (second, 1), (third, 2), (fourth, 2), (fifth, 0)):
            session.execute(
                update(AssetPartitionDagRun)
                .where(AssetPartitionDagRun.id == apdr_id)
                .values(created_at=start + timedelta(hours=hour))
            )
    ask("a", [fourth, fifth])
    ask("b", [third, first, second])
    scheduler.step()
    with new_session() as session:
        created = session.scalars(select(DagRun.partition_key).order_by(DagRun.id)).all()
    assert ["a2", "b2", "b1", "b3", "a1"] == created


def test_asked_for_runs_come_before_a_pass():
    """Across loops, what something happened to comes before what a pass only looks through."""
    consumer("rollup", HOURLY, day_rollup())
    consumer("plain", PLAIN)
    insert_pending("rollup", days(30), asset=HOURLY)
    scheduler = Scheduler(budget=5)
    scheduler.step()
    emit(PLAIN, "a")
    assert {"plain"} == scheduler.step()


def test_all_that_fire_in_a_loop_are_told():
    """The step returns the Dags that got a run, as the rest of the scheduler's loop expects."""
    for dag_id in ("a", "b", "c"):
        consumer(dag_id, PLAIN if dag_id != "c" else HOURLY)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, "1", "2")
    assert {"a", "b"} == scheduler.step()


def rows(model: type, *, of: str) -> int:
    with new_session() as session:
        return session.scalar(select(func.count()).select_from(model).where(model.target_dag_id == of))


@pytest.mark.usefixtures("no_passes")
def test_changed_mapper_drops_what_was_collected():
    """After a change of its mapper, a Dag's pending runs, their key logs and their requests are gone."""
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler()
    emit(HOURLY, *hours("2024-03-01")[:5])
    scheduler.settle()
    emit(HOURLY, *hours("2024-03-01")[5:7])

    consumer("rollup", HOURLY, StartOfDayMapper())
    assert set() == scheduler.settle()
    assert (0, 0) == (rows(AssetPartitionDagRun, of="rollup"), rows(PartitionedAssetKeyLog, of="rollup"))
    assert [] == requests()


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize("condition", [PLAIN, AssetAlias("alias")], ids=["asset", "alias"])
@pytest.mark.parametrize("reason", ["definition", "key log"])
def test_dag_that_is_no_longer_partitioned(condition, reason):
    """A Dag that stopped being partitioned loses its pending runs; so does one on aliases, whose fingerprint is equal."""
    consumer("dag", condition)
    (run,) = insert_pending("dag", ["a"])
    insert_pending("dag", ["b"])
    with new_session() as session:
        write(make_dag("dag", [condition]), session=session)
        change_dag("dag", is_paused=False, is_stale=False, session=session)
    if reason == "key log":
        forget_requests()
        ask("dag", [run])
    assert set() == Scheduler().settle()
    assert [] == fired("dag")
    assert ([] if reason == "definition" else ["b"]) == pending("dag")
    assert [] == requests()


@pytest.mark.usefixtures("no_passes")
def test_requests_of_fired_and_deleted_runs_are_dropped():
    """The claim that finds a request's run fired or deleted drops the request, and evaluates nothing."""
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    emit(PLAIN, "a")
    scheduler.settle()
    with new_session() as session:
        (run,) = session.scalars(select(AssetPartitionDagRun.id))
    ask("plain", [run, run, run + 1000])
    assert [] == scheduler.evaluate()
    assert [] == asked()
    assert ["a"] == fired("plain")


@pytest.mark.usefixtures("no_passes")
def test_loop_refills_where_runs_are_gone():
    """A loop whose first choice turns out to be gone asks for others, and is filled."""
    insert_dags("dag")
    runs = insert_runs("dag", 4)
    ask("dag", [*range(max(runs) + 1, max(runs) + 9), *runs])
    assert runs == Scheduler(budget=4).evaluate()
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
def test_refills_are_bounded():
    """A loop asks three times more, not for ever; what is behind comes in the next loop."""
    insert_dags("dag")
    (run,) = insert_runs("dag")
    ask("dag", range(run + 1, run + 18))
    ask("dag", [run])
    scheduler = Scheduler(budget=4)
    assert [] == scheduler.evaluate()
    assert 2 == len(asked())
    assert [run] == scheduler.evaluate()


@pytest.mark.usefixtures("no_passes")
def test_request_made_during_the_evaluation_survives(monkeypatch):
    """A request that is written while its run is evaluated was not read before, so it asks again."""
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler()
    scheduler.settle()
    emit(HOURLY, *hours("2024-03-01")[:23])
    evaluate = SchedulerJobRunner._resolve_asset_partition_status

    def late(runner, *, session, **kwargs):
        complete = evaluate(runner, session=session, **kwargs)
        emit(HOURLY, hours("2024-03-01")[23], session=session)
        monkeypatch.undo()
        return complete

    monkeypatch.setattr(SchedulerJobRunner, "_resolve_asset_partition_status", late)
    assert set() == scheduler.step()
    assert 1 == len(requests("rollup"))
    assert {"rollup"} == scheduler.step()
    assert [] == requests("rollup")


def test_missing_table_is_said_at_the_first_step(monkeypatch):
    """Without the migration, the scheduler says what to run, rather than fail on a statement."""
    monkeypatch.setattr(AssetPartitionDagRunWake, "__tablename__", "no_such_table")
    with pytest.raises(AirflowException, match="no_such_table is missing: run `airflow db migrate`"):
        Scheduler().step()


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "nan", "inf", "-inf", "an hour", "3600s"])
def test_interval_that_is_not_a_positive_number_is_refused(value, monkeypatch):
    """A scheduler with a senseless interval does not start, and its error names the option."""
    monkeypatch.setenv("AIRFLOW__SCHEDULER__ASSET_PARTITION_RESYNC_INTERVAL", value)
    with pytest.raises(AirflowConfigException, match=r"\[scheduler\] asset_partition_resync_interval"):
        SchedulerJobRunner(job=Job())


@pytest.mark.parametrize(("value", "interval"), [(None, 3600.0), ("0.5", 0.5), ("60", 60.0)])
def test_interval(value, interval, monkeypatch):
    """The interval is an hour unless the option says otherwise."""
    if value is not None:
        monkeypatch.setenv("AIRFLOW__SCHEDULER__ASSET_PARTITION_RESYNC_INTERVAL", value)
    assert interval == WakeStep()._agenda.resync_interval
