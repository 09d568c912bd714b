"""Bad input: for each kind, what happens is stated here, and nothing is lost."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import time_machine
from sqlalchemy import delete, func, select
from sqlalchemy.exc import DBAPIError

from _lib.deployment import Deployment
from airflow import settings
from airflow.exceptions import InvalidPartitionKeyError
from airflow.jobs.asset_partition_wake import step
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.models.asset import AssetEvent, AssetPartitionDagRun, PartitionedAssetKeyLog
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.sdk import Asset

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
    hours,
    insert_dags,
    insert_pending,
    insert_runs,
    pending,
    requests,
)

pytestmark = pytest.mark.usefixtures("db")

BACKEND = os.environ.get("WAKE_BACKEND", "sqlite")
PLAIN = Asset("plain", uri="test://plain")
HOURLY = Asset("hourly", uri="test://hourly")
OPTION = "AIRFLOW__SCHEDULER__ASSET_PARTITION_RESYNC_INTERVAL"
NO_DAG_IDS = ["gone", "'; DROP TABLE dag; --", "%", "%s", "{}", "\\", 'a"b', "ü", "d" * 250]


def request(dag_id: str, apdr_id: int | None, reason: str = "key log") -> None:
    with new_session() as session:
        session.add(AssetPartitionDagRunWake(target_dag_id=dag_id, apdr_id=apdr_id, reason=reason))


# -- the option ---------------------------------------------------------------------------------------------------------
# What is refused is in config/test_asset_partition_resync_interval.py.


@pytest.mark.parametrize("value", ["1e300", "1e-300", "99999999999999999999"])
@pytest.mark.usefixtures("clock")
def test_interval_of_any_size_is_taken(value, monkeypatch):
    """However long or short the interval, the startup pass runs, and what is asked for fires."""
    monkeypatch.setenv(OPTION, value)
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    insert_pending("plain", ["startup"], asset=PLAIN)
    scheduler.step()
    emit(PLAIN, "asked")
    scheduler.step()

    assert ["startup", "asked"] == fired("plain")


def test_interval_of_almost_nothing_never_hides_requests(monkeypatch):
    """With passes without an end, requests keep their share of each loop."""
    monkeypatch.setenv(OPTION, "1e-300")
    consumer("rollup", HOURLY, day_rollup())
    consumer("plain", PLAIN)
    insert_pending("rollup", days(30), asset=HOURLY)
    scheduler = Scheduler(budget=4)
    for key in ("a", "b", "c"):
        emit(PLAIN, key)
        scheduler.step()

    assert ["a", "b", "c"] == fired("plain")


# -- requests -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize("reason", ["no such reason", "", "KEY LOG", "%s'\"\\"])
def test_unknown_reason(reason):
    """A reason is for people: a request with one that nobody knows, of a later version say, is answered like any other."""
    consumer("plain", PLAIN)
    (asked_for,) = insert_pending("plain", ["a"], asset=PLAIN)
    insert_pending("plain", ["b"], asset=PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    insert_pending("plain", ["c"], asset=PLAIN)
    request("plain", asked_for, reason)
    request("plain", None, reason)
    scheduler.settle()

    assert {"a", "b", "c"} == set(fired("plain"))
    assert [] == requests()


@pytest.mark.usefixtures("no_passes")
def test_unknown_reason_is_merged():
    """The tidying of a resting Dag takes requests of any reason."""
    insert_dags("dag", is_paused=True)
    request("dag", 1, "no such reason")
    request("dag", None, "another")
    Scheduler().runner._asset_partition_wake.tidy()

    assert [("dag", None, "merged")] == requests()


@pytest.mark.usefixtures("no_passes")
def test_dag_that_does_not_exist():
    """Requests of Dags that there are not cost a loop its one statement, no lag, and are dropped by the next tidying."""
    insert_dags("dag")
    (run,) = insert_runs("dag")
    for dag_id in NO_DAG_IDS:
        ask(dag_id, [run + 1, None])
    ids = asked()
    wake = WakeStep()
    for _ in range(2):
        with new_session() as session:
            assert [] == wake.claim(500, session=session)
    with new_session() as session:
        session.connection()
        with recorded_statements() as statements:
            assert [] == wake.claim(500, session=session)
    assert 1 == len(statements)
    assert ids == asked()

    wake.tidy()
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
def test_dags_that_do_not_exist_hide_nothing():
    """However many of them there are, a Dag that is there is served in the next loop."""
    insert_dags("dag")
    (run,) = insert_runs("dag")
    for dag_id in NO_DAG_IDS:
        ask(dag_id, range(run + 1, run + 300))
    ask("dag", [run])
    with new_session() as session:
        assert [run] == [apdr.id for apdr in WakeStep().claim(20, session=session)]


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize("number", [0, -1, 2**31 - 1, -(2**31)])
def test_run_that_never_was(number):
    """A request for a run that there is not is dropped by the loop that looks for it; others of the loop fire."""
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    ask("plain", [number])
    emit(PLAIN, "a")
    scheduler.step()

    assert ["a"] == fired("plain")
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
def test_run_of_another_dag():
    """A request that names a run of another Dag has that run evaluated, as it would be if it had the right name."""
    consumer("plain", PLAIN)
    consumer("another", HOURLY)
    scheduler = Scheduler()
    scheduler.settle()
    ask("another", insert_pending("plain", ["a"], asset=PLAIN))

    assert {"plain"} == scheduler.step()
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
def test_run_of_another_dag_that_rests():
    """Where that other Dag rests, nothing fires; the request waits, beside others that are answered, until it can."""
    consumer("resting", PLAIN)
    consumer("another", HOURLY)
    scheduler = Scheduler()
    scheduler.settle()
    change_dag("resting", is_paused=True)
    (request_id,) = ask("another", insert_pending("resting", ["a"], asset=PLAIN))
    emit(HOURLY, "h")
    assert {"another"} == scheduler.step()
    for _ in range(3):
        assert [] == scheduler.evaluate()
    assert [request_id] == asked()

    change_dag("resting", is_paused=False)
    assert {"resting"} == scheduler.step()
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
def test_run_without_a_dag():
    """A run whose Dag is gone, asked for in the name of another Dag, is never evaluated and holds up nothing."""
    consumer("plain", PLAIN)
    scheduler = Scheduler(budget=4)
    scheduler.settle()
    ask("plain", insert_runs("gone", 6))
    emit(PLAIN, "a", "b")
    for _ in range(4):
        scheduler.step()

    assert ["a", "b"] == fired("plain")
    assert 6 == len(pending("gone"))


# -- the schema ---------------------------------------------------------------------------------------------------------


class Airflow:
    """Runs real `airflow` commands on a copy of the test's database."""

    def __init__(self, home: Path) -> None:
        self.deployment = Deployment(Path(sys.executable), home)
        self.database = home / "airflow.db"
        original = str(settings.engine.url.database)
        with closing(sqlite3.connect(original)) as source, closing(sqlite3.connect(self.database)) as copy:
            source.backup(copy)

    def change(self, sql: str) -> None:
        with closing(sqlite3.connect(self.database)) as connection:
            connection.executescript(sql)

    def query(self, sql: str) -> list[tuple]:
        with closing(sqlite3.connect(self.database)) as connection:
            return connection.execute(sql).fetchall()

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; what it printed is all in ``stdout``."""
        return subprocess.run(
            [sys.executable, "-m", "airflow", *arguments],
            cwd=self.deployment.home,
            env=self.deployment.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture
def airflow(tmp_path) -> Airflow:
    """An Airflow of its own."""
    return Airflow(tmp_path / "home")


MISSING = """
DROP TABLE asset_partition_dag_run_wake;
DROP INDEX idx_apdr_pending;
DROP INDEX idx_apdr_target_dag_id_partition_key;
UPDATE alembic_version SET version_num = 'd2f4e1b3c5a7';
"""
NEWER = "UPDATE alembic_version SET version_num = 'ffffffffffff';"
SCHEDULER = ("scheduler", "--skip-serve-logs")


@pytest.mark.backend("sqlite")
def test_scheduler_without_the_migration(airflow):
    """A scheduler that is started before `airflow db migrate` ends at once, and says so in one line."""
    airflow.change(MISSING)
    done = airflow.run(*SCHEDULER)

    assert 1 == done.returncode, done.stdout
    assert 1 == done.stdout.count("Please run `airflow db migrate`"), done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.backend("sqlite")
def test_scheduler_without_the_migration_and_without_the_check(airflow):
    """Where Airflow is told not to check, its first loop says what is missing and what to run, and ends the process."""
    airflow.change(MISSING)
    done = airflow.run(*SCHEDULER, AIRFLOW__DATABASE__CHECK_MIGRATIONS="False")

    assert 1 == done.returncode, done.stdout
    said = "AirflowException: The table asset_partition_dag_run_wake is missing: run `airflow db migrate` of "
    assert said + "apache-airflow-core" in done.stdout, done.stdout
    assert 1 == done.stdout.count("Exception when executing SchedulerJob._run_scheduler_loop"), done.stdout
    assert "OperationalError" not in done.stdout, done.stdout


@pytest.mark.backend("sqlite")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(
            SCHEDULER, "Database migration required. Please run `airflow db migrate`", id="scheduler"
        ),
        pytest.param(("db", "migrate"), "Can't locate revision identified by 'ffffffffffff'", id="migrate"),
        pytest.param(
            ("db", "downgrade", "--to-version", "3.3.2", "--yes"),
            "Can't locate revision identified by 'ffffffffffff'",
            id="downgrade",
        ),
    ],
)
def test_schema_of_a_later_airflow(command, said, airflow):
    """A database of a later version is refused by each command, and left as it is: the later version has to downgrade it."""
    airflow.change(NEWER)
    done = airflow.run(*command)

    assert 0 < done.returncode, done.stdout
    assert said in done.stdout, done.stdout
    assert [("ffffffffffff",)] == airflow.query("SELECT version_num FROM alembic_version")


# -- partition keys -----------------------------------------------------------------------------------------------------

KEYS = [
    "k" * 250,
    "'",
    '"',
    "''; DROP TABLE dag_run; --",
    "%",
    "%s",
    "%(a)s",
    ":a",
    "{}",
    "{0}",
    "\\",
    "\\'",
    "/",
    "a b",
    "a\tb",
    "a\nb",
    "a,b|c;d",
    "?",
    "#",
    "ü",
    "日本",
    "ﷺ" * 80,
    "a\u200bb",
    "a\x7fb",
    "a\x01b",
]
FOUR_BYTES = "\U0001f600"


@pytest.mark.usefixtures("no_passes")
def test_every_character():
    """A key of 250 characters, and of any character that the database takes, fires like any other."""
    keys = KEYS if BACKEND == "mysql" else [*KEYS, FOUR_BYTES]
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, *keys)
    scheduler.settle()

    assert sorted(keys) == sorted(fired("plain"))
    assert [] == requests()


REFUSED = {"postgresql": ["k" * 251, "a\x00b"], "mysql": ["k" * 251, FOUR_BYTES]}


@pytest.mark.backend("postgresql", "mysql")
@pytest.mark.parametrize("key", REFUSED.get(BACKEND, ["k"]), ids=ascii)
def test_keys_that_the_database_refuses(key):
    """The event of a key that the database has no room for fails as a whole: nothing of it is left, no request either."""
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    with pytest.raises((DBAPIError, ValueError)):
        emit(PLAIN, "good", key)
    with new_session() as session:
        left = [
            session.scalar(select(func.count()).select_from(model))
            for model in (AssetEvent, AssetPartitionDagRun, PartitionedAssetKeyLog, AssetPartitionDagRunWake)
        ]
    assert [0, 0, 0, 0] == left

    emit(PLAIN, "good")
    scheduler.step()
    assert ["good"] == fired("plain")


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize(
    "key", [" ", "\t", pytest.param("k" * 251, marks=pytest.mark.backend("sqlite"))], ids=ascii
)
def test_keys_that_airflow_refuses(key):
    """
    Airflow creates no run for a blank key, nor, where SQLite took it, for one that is too long.

    Its APIs refuse such keys, but a mapper or a manager of one's own can make them. As in stock Airflow, the loop then
    fails, and its error names the fault. Nothing is lost: what was to fire with it does so once the run is deleted.
    """
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, key, "good")
    for _ in range(2):
        with pytest.raises(InvalidPartitionKeyError):
            scheduler.step()
    assert 2 == len(requests("plain"))

    with new_session() as session:
        session.execute(delete(AssetPartitionDagRun).where(AssetPartitionDagRun.partition_key == key))
    scheduler.step()
    assert ["good"] == fired("plain")
    assert [] == requests()


# -- the clock ----------------------------------------------------------------------------------------------------------


class Clock:
    """The seconds that passes go by, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(step, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))


@pytest.fixture
def sent(monkeypatch) -> list[tuple[str, Any]]:
    """The gauges and durations that were sent."""
    sent: list[tuple[str, Any]] = []
    for kind in ("gauge", "timing"):
        monkeypatch.setattr(
            step.stats, kind, lambda name, value, **kwargs: sent.append((name.rpartition(".")[2], value))
        )
    return sent


@pytest.mark.parametrize("hours_off", [-1, 1])
def test_time_of_day_jumps(hours_off, monkeypatch, sent):
    """When the time of day jumps, requests are answered as ever, no lag is negative, and no pass comes early or late."""
    clock = Clock(monkeypatch)
    start = datetime(2030, 1, 1, tzinfo=timezone.utc)
    with time_machine.travel(start, tick=False) as today:
        consumer("plain", PLAIN)
        scheduler = Scheduler()
        scheduler.settle()
        emit(PLAIN, "before")
        today.move_to(start + timedelta(hours=hours_off))
        scheduler.step()
        emit(PLAIN, "after")
        scheduler.step()
        assert ["before", "after"] == fired("plain")

        insert_pending("plain", ["in bulk"], asset=PLAIN)
        scheduler.step()
        clock.now += 3599
        scheduler.step()
        assert ["in bulk"] == pending("plain")
        clock.now += 1
        scheduler.step()
        assert [] == pending("plain")
    lags = [value for name, value in sent if name == "wake_lag"]
    assert (0, max(0, hours_off) * 3600) == (min(lags), max(lags))
    assert [0, 0] == [value.total_seconds() for name, value in sent if name == "resync_pass_duration"]


@pytest.mark.usefixtures("no_passes")
def test_requests_of_a_writer_whose_clock_is_behind():
    """The order of a Dag's requests is that of their ids: a clock that goes back changes neither turn nor answer."""
    insert_dags("dag")
    runs = insert_runs("dag", 6)
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    for n, run in enumerate(runs):
        ask("dag", [run], created_at=now - timedelta(hours=n))
    wake = WakeStep()
    claimed = []
    for _ in range(3):
        with new_session() as session:
            claimed.append({run.id for run in wake.claim(2, session=session)})

    assert [set(runs[:2]), set(runs[2:4]), set(runs[4:])] == claimed
    assert [] == asked()


@pytest.mark.usefixtures("no_passes")
def test_rollup_over_a_jump():
    """A day whose hours arrive before and after the clock goes back fires with the last of them."""
    start = datetime(2030, 1, 1, tzinfo=timezone.utc)
    with time_machine.travel(start, tick=False) as today:
        consumer("rollup", HOURLY, day_rollup())
        scheduler = Scheduler()
        keys = hours("2024-03-01")
        emit(HOURLY, *keys[:12])
        scheduler.settle()
        today.move_to(start - timedelta(hours=1))
        emit(HOURLY, *keys[12:23])
        scheduler.settle()
        assert [] == fired("rollup")
        emit(HOURLY, keys[23])
        scheduler.settle()

    assert ["2024-03-01"] == fired("rollup")
