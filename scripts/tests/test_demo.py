"""The demo without Airflow: what it reads and says, and that a deployment leaves no process behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))

from _lib import deployment  # noqa: E402
from _lib.deployment import Closed, Deployment  # noqa: E402
from _lib.environment import Problem  # noqa: E402

NOON = datetime(2026, 1, 1, 12)

# In place of the environment's Python, which is called with `-m airflow COMMAND`.
FAKE = """\
#!{python}
import os, signal, subprocess, sys, time
command = sys.argv[3]
if command == "fails":
    sys.exit("no such table")
if command == "version":
    print(os.environ["AIRFLOW_HOME"])
    sys.exit()
if command == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# As a task's process: in a group of its own.
subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(600)"])
open(command, "w").close()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """Return `scripts/demo`, which has no suffix."""
    loader = SourceFileLoader("demo", str(SCRIPTS / "demo"))
    spec = spec_from_loader("demo", loader)
    assert spec
    module = sys.modules["demo"] = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """Return a Python whose `airflow` only waits."""
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def airflow(tmp_path: Path, fake_python: Path) -> Iterator[Deployment]:
    """Return a deployment without Airflow."""
    with Deployment(fake_python, tmp_path / "home") as made:
        yield made


def start(airflow: Deployment, command: str) -> None:
    """Start a process and wait until it has one of its own."""
    airflow.start(command)
    until(lambda: (airflow.home / command).exists())


def until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running_in(home: Path) -> list[int]:
    """Return the processes whose working directory is a home, whatever session they are in."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.readlink(f"/proc/{pid}/cwd") == str(home):
                found.append(pid)
        except OSError:
            pass
    return found


class TestDeployment:
    """Starting and ending processes."""

    def test_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The user's own Airflow has no influence; what the caller gives has the last word."""
        monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
        monkeypatch.setenv("AIRFLOW_CONFIG", "/etc/airflow.cfg")
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_ON", "True")
        given = {"AIRFLOW__CORE__PARALLELISM": "7"}
        env = Deployment(Path("bin/python"), tmp_path, dags=Path("dags"), env=given).env
        assert str(tmp_path) == env["AIRFLOW_HOME"]
        assert env["AIRFLOW__CORE__EXECUTOR"] == "LocalExecutor"
        assert env["AIRFLOW__CORE__PARALLELISM"] == "7"
        assert env["AIRFLOW__CORE__DAGS_FOLDER"] == "dags"
        assert not {"AIRFLOW_CONFIG", "AIRFLOW__METRICS__STATSD_ON"} & env.keys()

    def test_two_deployments_share_nothing(self, tmp_path: Path) -> None:
        """Each has its port, database and secrets."""
        first, second = (Deployment(Path("bin/python"), tmp_path / name) for name in "ab")
        assert first.port != second.port
        assert first.database != second.database
        assert first.env["AIRFLOW__API_AUTH__JWT_SECRET"] != second.env["AIRFLOW__API_AUTH__JWT_SECRET"]

    @pytest.mark.parametrize("command", ["obliging", "stubborn"])
    @pytest.mark.parametrize("end", [Deployment.stop, Deployment.kill, Deployment.close])
    def test_ending(
        self, airflow: Deployment, command: str, end: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is left, neither of a process that ignores SIGTERM nor of what it has started."""
        monkeypatch.setattr(deployment, "STOP_TIMEOUT", 0.5)
        start(airflow, command)
        assert len(running_in(airflow.home)) == 2
        end(airflow)
        assert not running_in(airflow.home)

    def test_stopping_one(self, airflow: Deployment) -> None:
        """The others go on, and it can be started again."""
        start(airflow, "one")
        start(airflow, "other")
        airflow.stop("one")
        assert not airflow.is_running("one")
        assert airflow.is_running("other")
        airflow.start("one")
        assert airflow.is_running("one")

    def test_running_twice(self, airflow: Deployment) -> None:
        """A name is given to one process at a time."""
        airflow.start("one")
        with pytest.raises(Problem, match="one is running already"):
            airflow.start("one")

    def test_closed(self, airflow: Deployment) -> None:
        """A closed deployment starts nothing."""
        airflow.close()
        for attempt in (airflow.migrate, airflow.check, lambda: airflow.start("scheduler")):
            with pytest.raises(Closed):
                attempt()

    def test_closing_during_a_command(self, airflow: Deployment) -> None:
        """Whoever waits for a command, in another thread, sees that it has been closed."""
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(airflow.run, "endless")
            until((airflow.home / "endless").exists)
            airflow.close()
            with pytest.raises(Closed):
                waiting.result()

    def test_command(self, airflow: Deployment) -> None:
        """A command's standard output is returned."""
        assert f"{airflow.home}\n" == airflow.run("version")

    def test_failing_command(self, airflow: Deployment) -> None:
        """The error has the exit code and what was printed last."""
        with pytest.raises(Problem, match=r"`airflow fails` ended with exit code 1.*\n.*no such table"):
            airflow.run("fails")

    def test_crash(self, airflow: Deployment) -> None:
        """A process that ends by itself is noticed, with what it printed last."""
        airflow.start("fails").wait()
        with pytest.raises(Problem, match=r"`airflow fails` ended with exit code 1.*\n.*no such table"):
            airflow.check()

    @pytest.mark.parametrize("number", deployment.SIGNALS)
    def test_signals(self, number: signal.Signals, tmp_path: Path, fake_python: Path) -> None:
        """A script that is interrupted, and again while it tidies up, leaves no process behind."""
        script = textwrap.dedent(f"""
            import sys, time
            sys.path.insert(0, {str(SCRIPTS)!r})
            from pathlib import Path
            from _lib.deployment import Deployment, stopping_on_signals

            class Slow(Deployment):
                def close(self):
                    (self.home / "closing").touch()
                    time.sleep(1)
                    super().close()

            with stopping_on_signals(), Slow(Path({str(fake_python)!r}), Path("home").absolute()) as airflow:
                airflow.start("stubborn")
                time.sleep(600)
        """)
        process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.DEVNULL)
        home = tmp_path / "home"
        until((home / "stubborn").exists)
        assert len(running_in(home)) == 2
        process.send_signal(number)
        until((home / "closing").exists)
        process.send_signal(number)
        process.wait(20)
        assert not running_in(home)


@pytest.fixture
def database(demo: ModuleType, tmp_path: Path) -> Any:
    """Return a database with one pending run, of two events, and one that has fired."""
    path = tmp_path / "airflow.db"
    with sqlite3.connect(path) as connection:
        connection.executescript("""
            CREATE TABLE asset_event (id, timestamp);
            CREATE TABLE dag_run (id, dag_id, state, created_at);
            CREATE TABLE asset_partition_dag_run (id, target_dag_id, partition_key, created_dag_run_id);
            CREATE TABLE partitioned_asset_key_log (asset_event_id, asset_partition_dag_run_id);
            INSERT INTO asset_event VALUES (1, '2026-01-01 12:00:00'), (2, '2026-01-01 12:00:01.500000');
            INSERT INTO dag_run VALUES (7, 'days', 'success', '2026-01-01 12:00:02');
            INSERT INTO asset_partition_dag_run VALUES (1, 'days', 'a', NULL), (2, 'days', 'b', 7), (3, 'x', 'c', 7);
            INSERT INTO partitioned_asset_key_log VALUES (1, 1), (2, 1), (2, 2), (2, 3);
        """)
    return demo.Database(path)


class TestDemo:
    """What is seen and said."""

    def test_runs(self, demo: ModuleType, database: Any) -> None:
        """A run fires some seconds after the last event that contributed."""
        later = NOON + timedelta(seconds=1.5)
        pending, fired = database.runs("days")
        assert demo.Run(1, "a", None, later) == pending
        assert demo.Run(2, "b", NOON + timedelta(seconds=2), later) == fired
        assert pending.seconds is None
        assert fired.seconds == 0.5

    def test_database_is_only_read(self, database: Any) -> None:
        """The demo cannot help along what it watches."""
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            database._read("DELETE FROM dag_run")

    def test_failed_dag(self, database: Any) -> None:
        """A Dag with a failed run is found."""
        assert database.failed_dag() is None
        with sqlite3.connect(database.path) as connection:
            connection.execute("UPDATE dag_run SET state = 'failed'")
        assert database.failed_dag() == "days"

    def test_verdict(self, demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        """The last line has the figures of both."""
        patched = demo.Story("patched", True, Mock(), plain_seconds=0.9, plain="fired 0.9 s after its event")
        assert demo.verdict([patched], 45) == 0
        line = "complete partition fired 0.9 s after its event, with 520 runs waiting"
        assert f"{line}\n" == capsys.readouterr().out
        stock = demo.Story("stock", False, Mock())
        assert demo.verdict([stock, patched], 45) == 0
        assert f"{line} (stock: still pending after 45 s)\n" == capsys.readouterr().out

    def test_bad_ends(self, demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        """An error, or a stock Airflow without the fault, is exit code 1 and the reason."""
        broken = demo.Story("patched", True, Mock(), error=Problem("still pending after 60 s"))
        fine = demo.Story("patched", True, Mock(), plain="fired 0.9 s after its event", plain_seconds=0.9)
        stock = demo.Story("stock", False, Mock(), plain="fired 2.0 s after its event", plain_seconds=2.0)
        for stories, reason in (
            ([broken], "patched: still pending after 60 s"),
            ([stock, fine], "stock fired 2.0 s after its event as well: the fault did not show"),
        ):
            with pytest.raises(SystemExit) as exit_info:
                demo.verdict(stories, 45)
            assert exit_info.value.code == 1
            assert f"error: {reason}\n" == capsys.readouterr().err
