"""Our hooks in the scheduler: what its loop does with them (spec 5 to 7)."""

from __future__ import annotations

from importlib import metadata

import pytest
from structlog.testing import capture_logs

from airflow.configuration import conf
from airflow.executors.base_executor import BaseExecutor
from airflow.jobs.asset_partition_wake import step
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.jobs.job import Job
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
from airflow.sdk import Asset
from airflow.serialization.serialized_objects import DagSerialization
from airflow.utils.event_scheduler import EventScheduler

from tests_common.db import new_session
from tests_common.factories import (
    Scheduler,
    ask,
    asked,
    change_dag,
    consumer,
    emit,
    fired,
    forget_requests,
    insert_pending,
    make_dag,
    pending,
    requests,
    write,
)

pytestmark = pytest.mark.usefixtures("db")

A = Asset("a", uri="test://a")


@pytest.fixture
def runner() -> SchedulerJobRunner:
    """A scheduler that ends after one loop, with an executor that runs nothing."""
    return SchedulerJobRunner(job=Job(), num_runs=1, executors=[BaseExecutor(parallelism=1)])


def test_loop_of_the_scheduler_fires_and_commits(runner):
    """The scheduler's own loop creates the run, deletes the request and keeps what is under way."""
    consumer("dag", A)
    emit(A, "k")
    agenda = runner._asset_partition_wake._agenda
    runner._run_scheduler_loop()
    assert ["k"] == fired("dag")
    assert [] == requests()
    assert agenda is not runner._asset_partition_wake._agenda


def test_startup_pass_is_the_first_loops(runner):
    """What was pending when the scheduler starts is evaluated by its first loop, without a request."""
    consumer("dag", A)
    insert_pending("dag", ["k"], asset=A)
    forget_requests()
    runner._run_scheduler_loop()
    assert ["k"] == fired("dag")


def test_requests_are_tidied_on_a_timer(runner, monkeypatch):
    """The loop has a timer, of the interval of the other clean-ups, that tidies the requests."""
    ask("gone")
    timers: list[tuple[float, object]] = []
    register = EventScheduler.call_regular_interval

    def spy(self, delay, action, *args, **kwargs):
        timers.append((delay, action))
        return register(self, delay, action, *args, **kwargs)

    monkeypatch.setattr(EventScheduler, "call_regular_interval", spy)
    runner._run_scheduler_loop()
    interval = conf.getfloat("scheduler", "parsing_cleanup_interval")
    ours = [(delay, action) for delay, action in timers if action == runner._asset_partition_wake.tidy]
    assert [interval] == [delay for delay, _ in ours]
    assert 1 == len(asked())
    ours[0][1]()
    assert [] == asked()


def test_loop_says_at_start_what_it_is(runner):
    """The scheduler's log has a line with the version and the interval, once."""
    with capture_logs() as logs:
        for _ in range(2):
            with new_session() as session:
                runner._create_dagruns_for_partitioned_asset_dags(session)
    version = metadata.version("apache-airflow-core")
    said = [entry for entry in logs if entry["event"] == "Pending asset partitions are evaluated on request"]
    assert [(version, 3600.0)] == [(entry["version"], entry["resync_interval"]) for entry in said]


def test_each_scheduler_has_an_agenda_of_its_own():
    """What is under way in one scheduler of a process is nothing to another."""
    first, second = (SchedulerJobRunner(job=Job())._asset_partition_wake for _ in range(2))
    assert isinstance(first, WakeStep)
    assert first is not second
    assert first._agenda is not second._agenda


def test_each_dag_is_decoded_once(monkeypatch):
    """However many runs of a Dag a loop evaluates, it decodes the definition once."""
    consumer("dag", A)
    consumer("other", A)
    scheduler = Scheduler()
    scheduler.settle()
    emit(A, "1", "2", "3")
    decoded: list[str] = []
    decode = DagSerialization.from_dict.__func__

    def spy(cls, serialized):
        decoded.append(serialized["dag"]["dag_id"])
        return decode(cls, serialized)

    monkeypatch.setattr(DagSerialization, "from_dict", classmethod(spy))
    scheduler.step()
    assert ["dag", "other"] == sorted(decoded)
    assert ["1", "2", "3"] == fired("other")


def test_step_without_requests_decodes_nothing(monkeypatch):
    """An idle loop reads no definition, however much is pending."""
    consumer("dag", A)
    insert_pending("dag", ["k"])
    scheduler = Scheduler()
    scheduler.settle()
    monkeypatch.setattr(DagSerialization, "from_dict", None)
    assert set() == scheduler.step()
    assert ["k"] == pending("dag")


def test_a_loop_that_drops_all_its_runs_goes_on():
    """A loop whose runs are all dropped creates none, and its requests are gone."""
    consumer("dag", A)
    scheduler = Scheduler()
    scheduler.settle()
    insert_pending("dag", ["k"], asset=A)
    with new_session() as session:
        write(make_dag("dag", [A]), session=session)
        change_dag("dag", is_paused=False, is_stale=False, session=session)
    assert set() == scheduler.step()
    assert ([], [], []) == (pending("dag"), fired("dag"), requests())


def test_claim_gets_the_limit_of_the_runner(monkeypatch):
    """The step is told how many runs a loop may evaluate by the scheduler's own limit."""
    told: list[int] = []
    scheduler = Scheduler(budget=7)
    claim = step.WakeStep.claim

    def spy(self, budget, *, session):
        told.append(budget)
        return claim(self, budget, session=session)

    monkeypatch.setattr(step.WakeStep, "claim", spy)
    scheduler.step()
    assert [7] == told
