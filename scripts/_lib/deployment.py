"""A deployment of Airflow of one's own: a home, a database, and real `airflow` processes on them.

    with stopping_on_signals(), Deployment(python, home, dags=folder) as deployment:
        deployment.migrate()
        for component in ("api-server", "dag-processor", "scheduler"):
            deployment.start(component)
        deployment.wait_until_healthy()
        deployment.trigger("a_dag")

Each process is the leader of a session, and all that it starts is stopped with it: a task's process has a process group of
its own, but stays in the session. Needs the repo's environment. Threads may share a deployment.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]

from _lib.environment import Problem
from _lib.services import free_port

COMPONENTS = ("api-server", "dag-processor", "scheduler", "triggerer")
START_TIMEOUT = 180
STOP_TIMEOUT = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOWN_LINES = 15
# The API server is on this machine, whatever proxy the user has.
_urlopen = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Closed(Problem):
    """The deployment has been closed meanwhile, most likely by Ctrl-C."""


class Deployment:
    """A home, a database and the processes on them; closing it leaves none behind.

    :param python: of the environment with Airflow, as `environment.ensure()` returns it.
    :param home: AIRFLOW_HOME; may be missing or empty. It is not removed.
    :param database: SQLAlchemy URL; unless given, an SQLite file in the home.
    :param dags: folder of the Dags.
    :param env: further environment variables, which win over those set here.
    """

    def __init__(
        self,
        python: Path,
        home: Path,
        *,
        database: str | None = None,
        dags: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.python = python
        self.home = home
        self.logs = home / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        # SQLite has one writer: others wait for it.
        self.database = database or f"sqlite:///{home / 'airflow.db'}?timeout=60"
        self.port = free_port()
        self.env = {**self._environ(dags or home / "dags"), **(env or {})}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._token: str | None = None

    def _environ(self, dags: Path) -> dict[str, str]:
        """Return the user's environment without their Airflow, and what a deployment on one machine needs."""
        dropped = ("AIRFLOW", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        local = "127.0.0.1,localhost"
        no_proxy = ",".join(filter(None, [inherited.get("no_proxy") or inherited.get("NO_PROXY"), local]))
        address = f"http://127.0.0.1:{self.port}"
        options = {
            "core.auth_manager": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
            "core.simple_auth_manager_all_admins": "True",
            "core.dags_are_paused_at_creation": "False",
            "core.dags_folder": str(dags),
            "core.execution_api_server_url": f"{address}/execution/",
            "core.executor": "LocalExecutor",
            "core.fernet_key": "",
            "core.load_examples": "False",
            "core.parallelism": "2",
            "api.base_url": address,
            # Given, as processes that start at the same time would each make their own.
            "api.secret_key": secrets.token_hex(16),
            "api_auth.jwt_secret": secrets.token_hex(32),
            "dag_processor.parsing_processes": "1",
            "database.sql_alchemy_conn": self.database,
            "logging.base_log_folder": str(self.logs),
            "usage_data_collection.enabled": "False",
            # A slow machine is not what is being looked at.
            "workers.execution_api_timeout": "60",
        }
        variables = {f"AIRFLOW__{name.upper().replace('.', '__')}": value for name, value in options.items()}
        path = f"{self.python.parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        here = {"AIRFLOW_HOME": str(self.home), "PATH": path, "no_proxy": no_proxy, "NO_PROXY": no_proxy}
        return {**inherited, **variables, **here}

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *arguments: str) -> str:
        """Run an `airflow` command to its end and return its standard output."""
        name = "-".join(word for word in arguments if not word.startswith("-")) or "airflow"
        process = self._spawn(name, arguments, subprocess.PIPE)
        output, _ = process.communicate()
        with self._lock:
            self._processes.pop(name, None)
            if self._closed:
                raise Closed("the deployment has been closed")
        if process.returncode:
            raise Problem(
                f"`airflow {' '.join(arguments)}` ended with {_ended(process)}{self._tail(name, output)}"
            )
        return output

    def migrate(self) -> None:
        """Make the database, or bring it up to date."""
        self.run("db", "migrate")

    def start(self, component: str, *arguments: str, name: str | None = None) -> subprocess.Popen[str]:
        """Start a component and return at once.

        :param component: one of `COMPONENTS`.
        :param arguments: further arguments of its command.
        :param name: what it is called here, and its log file; the component's unless given.
        """
        name = name or component
        command = [component]
        if component == "api-server":
            command += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        elif component in ("scheduler", "triggerer"):
            command += ["--skip-serve-logs"]  # On a fixed port, for the UI of another machine.
        with self._lock:
            if self.is_running(name):
                raise Problem(f"{name} is running already")
            return self._spawn(name, [*command, *arguments])

    def _spawn(self, name: str, arguments: Sequence[str], output: int | None = None) -> subprocess.Popen[str]:
        # The lock: what `close` does not find yet is not started after it.
        with self._lock, open(self.log(name), "a") as log:
            if self._closed:
                raise Closed("the deployment has been closed")
            self._processes[name] = subprocess.Popen(
                [str(self.python), "-m", "airflow", *arguments],
                cwd=self.home,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log if output is None else output,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            return self._processes[name]

    def is_running(self, name: str) -> bool:
        """Tell whether a process has been started and has not ended."""
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def check(self) -> None:
        """Raise if a process has ended without having been stopped."""
        with self._lock:
            if self._closed:
                raise Closed("the deployment has been closed")
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise Problem(f"`airflow {name}` ended with {_ended(process)}{self._tail(name)}")

    def log(self, name: str) -> Path:
        """Return the file that a process's output goes to."""
        return self.logs / f"{name}.log"

    def _tail(self, name: str, output: str = "") -> str:
        lines = [*self.log(name).read_text(errors="replace").splitlines(), *output.splitlines()]
        return "; its last lines:\n" + "\n".join(lines[-SHOWN_LINES:]) if lines else ""

    def stop(self, *names: str) -> None:
        """Have processes, or all of them, end in their own way; after a while, kill them."""
        self._end(names, signal.SIGTERM)

    def kill(self, *names: str) -> None:
        """Kill processes, or all of them, and what they have started."""
        self._end(names, signal.SIGKILL)

    def close(self) -> None:
        """Kill all processes and start none any more. Not to be interrupted."""
        with _undisturbed():
            with self._lock:
                self._closed = True
            self.kill()

    def _end(self, names: tuple[str, ...], number: signal.Signals) -> None:
        with self._lock:
            ended = [self._processes.pop(name) for name in names or list(self._processes)]
        for process in ended:
            process.send_signal(number)
        # The API server takes seconds to end.
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))
        # What it has started: it had the time to end that itself.
        while left := _members({process.pid for process in ended}):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for process in ended:
            process.wait()

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """Call the REST API as an admin.

        :param path: below /api/v2/.
        :raises OSError: urllib's, where there is no answer or an error.
        """
        if self._token is None:
            self._token = self._http("GET", "/auth/token")["access_token"]
        return self._http(method, f"/api/v2/{path}", body, {"Authorization": f"Bearer {self._token}"})

    def _http(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        with _urlopen(request, timeout=30) as response:
            return json.load(response)

    def wait_until_healthy(self, *components: str, timeout: float = START_TIMEOUT) -> None:
        """Wait until the API server answers, and components by its account have a fresh heartbeat.

        :param components: of those that have one; all that have been started here unless given.
        """
        beating = components or tuple(name for name in COMPONENTS[1:] if name in self._processes)
        deadline = time.monotonic() + timeout
        health: dict[str, Any] = {}
        while True:
            self.check()
            with contextlib.suppress(OSError):
                health = self._http("GET", "/api/v2/monitor/health")
                waited_for = [name for name in beating if not _is_healthy(health, name)]
                if not waited_for:
                    return
            if time.monotonic() > deadline:
                missing = ", ".join(waited_for) if health else "the API server"
                raise Problem(f"not ready after {timeout:.0f} s: {missing} (logs: {self.logs})")
            time.sleep(0.2)

    def trigger(self, dag_id: str, timeout: float = START_TIMEOUT, **conf: Any) -> str:
        """Trigger a Dag, once it has been parsed, and return the run's id."""
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            try:
                run = self.api("POST", f"dags/{dag_id}/dagRuns", {"logical_date": None, "conf": conf})
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")
                if error.code != 404:
                    raise Problem(f"triggering {dag_id} failed: {error} {said}") from error
            else:
                return run["dag_run_id"]
            if time.monotonic() > deadline:
                raise Problem(f"no Dag {dag_id} after {timeout:.0f} s (logs: {self.logs})")
            time.sleep(0.2)


def _is_healthy(health: dict[str, Any], component: str) -> bool:
    return (health.get(component.replace("-", "_")) or {}).get("status") == "healthy"


def _ended(process: subprocess.Popen[str]) -> str:
    code = process.returncode
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _members(sessions: set[int]) -> list[int]:
    """Return the processes of sessions that have not ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) in sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and SIGHUP all raise KeyboardInterrupt, with the signal's number, once.

    Further signals are ignored, so that the first one's tidying up is not cut short; it takes some seconds at most.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    # Under nohup, SIGHUP stays ignored.
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        # The script is ending anyway, and whoever presses Ctrl-C once more sees it do so in peace.
        if not interrupted:
            _restore(before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore signals until the end of the block. Python handles them in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
