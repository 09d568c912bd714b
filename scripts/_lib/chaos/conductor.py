"""A round of chaos, from the empty database to the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, text

from _lib.chaos.errors import LOCK_OF_AN_ASSET, airflows_own, is_cut
from _lib.environment import Problem
from _lib.paths import COMMON_SOURCE, SCRIPTS

READY_TIMEOUT = 120
SETTLE_TIMEOUT = 120
END_TIMEOUT = 40
YOUNG = 2.0
"""Seconds that a process has at least before it is killed: it is to get something done."""
WAKE_TABLE = "asset_partition_dag_run_wake"
TABLE_FOLLOWS = ("FROM", "INTO", "UPDATE")
LAST_WORDS = "Exception when executing SchedulerJob"
"""What a scheduler logs before the error that ends it."""
OWN_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Deadlock\w*|Interrupt|NotFound))\b:? ?(.*)$")


@dataclass
class Options:
    """What a round is to be."""

    backend: str
    seconds: float
    schedulers: int
    writers: int
    seed: int
    pace: float


@dataclass
class Child:
    """A process of the round."""

    name: str
    run: str
    arguments: dict[str, Any]
    pid: int | None = None
    lives: int = 0
    wanted: bool = True
    """Whether it is started again when it ends."""
    struck: bool = False
    """Whether we have killed it."""
    born: float = 0.0
    status: int | None = None
    """Of its last life."""
    log_from: int = 0


@dataclass
class Result:
    """What came out of a round."""

    seed: int
    backend: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.findings


class Round:
    """One round.

    :param python: of the environment with the patched Airflow
    :param folder: empty; for logs, reports and Airflow's home
    :param url: of the empty database
    :param say: prints a line of the timeline
    """

    def __init__(
        self, options: Options, python: Path, folder: Path, url: str, say: Callable[[str], None]
    ) -> None:
        self.options = options
        self.python = python
        self.folder = folder
        self.rng = random.Random(options.seed)
        self.result = Result(options.seed, options.backend, options.seconds)
        self.counts: Counter[str] = Counter()
        self.children: dict[str, Child] = {}
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.started = time.monotonic()
        self._print = say
        self.env = self._environ(url)
        self.engine: Engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        self.nursery: subprocess.Popen[str] | None = None
        for part in ("reports", "logs", "dags"):
            (folder / part).mkdir(parents=True)

    def _environ(self, url: str) -> dict[str, str]:
        options = {
            "core.dags_folder": self.folder / "dags",
            "core.load_examples": False,
            "core.dags_are_paused_at_creation": False,
            "core.executor": "_lib.chaos.scheduler.IdleExecutor",
            # Seconds at each start of a scheduler.
            "database.check_migrations": False,
            "database.sql_alchemy_conn": url,
            "logging.base_log_folder": self.folder / "logs",
            "scheduler.scheduler_idle_sleep_time": 0.1,
            # Tidying, and the scheduler's own look at which assets are in use.
            "scheduler.parsing_cleanup_interval": 2,
            "usage_data_collection.enabled": False,
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
        set_here = {
            f"AIRFLOW__{name.upper().replace('.', '__')}": str(value) for name, value in options.items()
        }
        return {
            **inherited,
            **set_here,
            "AIRFLOW_HOME": str(self.folder),
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(COMMON_SOURCE)]),
            "PYTHONUNBUFFERED": "1",
        }

    # -- the course of events ------------------------------------------------------------------------------------

    def play(self) -> Result:
        """Play the round.

        :raises Problem: if it could not be played to its end
        """
        try:
            self._command("airflow db migrate", "-m", "airflow", "db", "migrate")
            self._open_nursery()
            self._once("writing the Dags", "_lib.chaos.hands:write_dags", {})
            self.started = time.monotonic()
            self.say(
                f"seed {self.options.seed}: {self.options.schedulers} schedulers, {self.options.writers} writers"
            )
            self._start_all()
            self._rampage()
            self._calm_down()
            self._settle()
            self._end_schedulers()
            self._judge()
        finally:
            self._close()
        return self.result

    def _start_all(self) -> None:
        options, chaos = self.options, "_lib.chaos."
        for number in range(options.writers):
            arguments = {
                "number": number,
                "writers": options.writers,
                "seed": options.seed,
                "pace": options.pace,
            }
            self._add(f"writer-{number}", f"{chaos}writer:main", arguments)
        self._add("processor", f"{chaos}hands:processor", {"pace": 0.3})
        self._add("operator", f"{chaos}hands:operator", {"pace": 0.6})
        for number in range(options.schedulers):
            self._add(f"scheduler-{number}", f"{chaos}scheduler:main", {})

    def _rampage(self) -> None:
        """Kill and cut until the time is over."""
        strikes = {"kill a scheduler": 5, "kill a writer": 4, "cut a connection": 8}
        end = self.started + self.options.seconds
        next_status = self.started + 10
        while (now := time.monotonic()) < end:
            self._attend(self.rng.uniform(0.5, 2.5))
            strike = self.rng.choices(list(strikes), list(strikes.values()))[0]
            if strike == "cut a connection":
                self._cut()
            else:
                self._kill(strike.rpartition(" ")[2])
            if now > next_status:
                next_status += 10
                self.say(self._status())

    def _calm_down(self) -> None:
        """End the disturbance, stop those who change things, and let all but two Dags run."""
        (self.folder / "calm").touch()
        changing = [
            child.name for child in self.children.values() if child.wanted and child.name[:9] != "scheduler"
        ]
        for name in changing:
            self._stop(name)
        self._wait_until(lambda: all(self.children[name].pid is None for name in changing), END_TIMEOUT)
        if left := [name for name in changing if self.children[name].pid]:
            self.result.findings.append(f"did not stop: {', '.join(left)}")
        away = ("edited_mapper", "steady_or")
        self._once("the last edits", "_lib.chaos.hands:tidy_up", {"away": away})
        self.say(f"writers stopped; {away[0]} stays paused, {away[1]} stale; {self._status()}")

    def _settle(self) -> None:
        """Wait until no request is left that can be answered, and those that cannot are merged."""
        since = time.monotonic()
        quiet = 0

        def is_quiet() -> bool:
            nonlocal quiet
            quiet = 0 if self._answerable() else quiet + 1
            return quiet > 3

        if self._wait_until(is_quiet, SETTLE_TIMEOUT, tick=0.5):
            self.say(f"settled after {time.monotonic() - since:.1f} s: {self._status()}")
        else:
            self.say(f"not settled after {SETTLE_TIMEOUT} s: {self._status()}")

    def _end_schedulers(self) -> None:
        schedulers = [child for child in self.children.values() if child.name.startswith("scheduler")]
        for child in schedulers:
            self._stop(child.name)
        self._wait_until(lambda: not any(child.pid for child in schedulers), END_TIMEOUT)
        for child in schedulers:
            if child.pid:
                self.result.findings.append(f"{child.name} did not stop within {END_TIMEOUT} s")

    def _judge(self) -> None:
        """Look at the database and at what the processes reported."""
        self._once("the check", "_lib.chaos.check:main", {})
        checked = json.loads((self.folder / "checked.json").read_text())
        lost, twice = checked.pop("lost"), checked.pop("twice")
        self.result.findings += [f"lost: {line}" for line in lost] + [f"too many: {line}" for line in twice]
        errors: Counter[str] = Counter()
        writers: Counter[str] = Counter()
        done: Counter[str] = Counter()
        for path in sorted((self.folder / "reports").glob("*.jsonl")):
            for line in path.read_text().splitlines():
                self._count(json.loads(line), errors, writers, done)
        if (deadlocks := writers["deadlock"] - errors[f"writer: deadlock at {LOCK_OF_AN_ASSET}"]) > 0:
            self.result.findings.append(f"{deadlocks} deadlock errors reached a writer")
        for error, number in errors.items():
            # Retried, but no scheduler is to wait for another over what is ours.
            if WAKE_TABLE in error and not error.startswith("processor"):
                self.result.findings.append(f"{number} times {error}")
        self.result.figures = {
            **checked,
            "lost": len(lost),
            "twice": len(twice),
            **dict(sorted(self.counts.items())),
            "deaths_at_a_statement": done.pop("death", 0),
            "cuts_at_a_statement": done.pop("cut", 0),
            "database_errors": dict(errors),
            "writer_errors": dict(writers),
            "done": dict(sorted(done.items())),
        }

    @staticmethod
    def _count(line: dict[str, Any], errors: Counter[str], writers: Counter[str], done: Counter[str]) -> None:
        what = line["what"]
        if what == "database error":
            locks = f" at {_head(line['statement'])}" if line["kind"] in ("deadlock", "lock timeout") else ""
            errors[f"{line['process'].partition('-')[0]}: {line['kind']}{locks}"] += 1
        elif what == "writer error":
            writers[line["kind"]] += 1
        elif "failed" in what:
            errors[f"{what}: {line['kind']}"] += 1
        else:
            done[what] += 1

    # -- processes -----------------------------------------------------------------------------------------------

    def _command(self, what: str, *arguments: str) -> str:
        """Run Python to its end and return what it printed."""
        with open(self.folder / "logs" / "commands.log", "a") as log:
            done = subprocess.run(
                [str(self.python), *arguments],
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
        if done.returncode:
            raise Problem(f"{what} failed (see {log.name})")
        return done.stdout

    def _open_nursery(self) -> None:
        with open(self.folder / "logs" / "nursery.log", "a") as log:
            nursery = subprocess.Popen(
                [str(self.python), "-m", "_lib.chaos.nursery"],
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.nursery = nursery

        def listen() -> None:
            for line in nursery.stdout or ():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        self.events.put(event)
            self.events.put({"event": "closed"})

        threading.Thread(target=listen, daemon=True).start()
        try:
            event = self.events.get(timeout=READY_TIMEOUT)
        except queue.Empty:
            event = {"event": "nothing"}
        if event["event"] != "ready":
            raise Problem(f"the processes could not be started (see {self.folder / 'logs' / 'nursery.log'})")

    def _once(self, what: str, run: str, arguments: dict[str, Any]) -> None:
        """Run something in a fork of the nursery to its end."""
        child = Child(what.replace(" ", "-"), run, arguments, wanted=False)
        self.children[child.name] = child
        self._start(child)
        if not self._wait_until(lambda: child.status is not None, READY_TIMEOUT) or child.status:
            raise Problem(f"{what} failed (see {self._log(child)})")

    def _add(self, name: str, run: str, arguments: dict[str, Any]) -> None:
        self.children[name] = Child(name, run, arguments)
        self._start(self.children[name])

    def _start(self, child: Child) -> None:
        assert self.nursery is not None
        assert self.nursery.stdin is not None
        log = self._log(child)
        life = f"{self.options.seed} {child.name} {child.lives}"
        arguments = {"folder": str(self.folder), **child.arguments}
        if child.run.endswith("scheduler:main"):
            first = child.name == "scheduler-0" and not child.lives
            arguments |= {"name": child.name, "seed": life, "startup_pass": first}
        elif child.wanted:
            arguments |= {"life": life}
        child.lives += 1
        child.struck = False
        child.log_from = log.stat().st_size if log.exists() else 0
        command = {"name": child.name, "log": str(log), "run": child.run, "arguments": arguments}
        self.nursery.stdin.write(json.dumps(command) + "\n")
        self.nursery.stdin.flush()

    def _attend(self, seconds: float) -> None:
        """Start again what ends, for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                return
            if event["event"] == "closed":
                raise Problem(f"the nursery ended (see {self.folder / 'logs' / 'nursery.log'})")
            if event["event"] == "started":
                child = self.children[event["name"]]
                child.pid, child.born = event["pid"], time.monotonic()
            elif event["event"] == "ended":
                self._ended(self.children[event["name"]], event["status"])

    def _ended(self, child: Child, status: int) -> None:
        pid, child.pid, child.status = child.pid, None, status
        if pid:
            # Whatever it has started itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        kind = child.name.partition("-")[0]
        if status == -signal.SIGKILL:
            if not child.struck:
                self.counts[f"{kind} died at a statement"] += 1
                self.say(f"{child.name} died at a statement")
        elif child.wanted or (status and kind == "scheduler"):
            self._died(child, kind, status)
        if child.wanted:
            self._start(child)

    def _died(self, child: Child, kind: str, status: int) -> None:
        """Find out what a process died of that nobody killed."""
        log = self._log(child)
        with open(log, errors="replace") as handle:
            handle.seek(child.log_from)
            lines = handle.read().rpartition(LAST_WORDS)[2].splitlines()
        raised = [match for line in lines if (match := OWN_ERROR.match(line.strip()))]
        last = raised[-1][0] if raised else (lines[-1] if lines else "nothing in its log")
        if raised and any(is_cut(match[0]) for match in raised):
            self.counts[f"{kind} died of a cut"] += 1
            self.say(f"{child.name} died of a cut connection")
            return
        if fault := airflows_own("\n".join(lines)):
            self.counts[f"{kind} died of a fault of stock Airflow: {fault}"] += 1
            self.say(f"{child.name} died of a fault of stock Airflow: {fault}")
            return
        self.counts[f"{kind} died of an error"] += 1
        self.say(f"{child.name} died ({status}): {last[:200]}")
        self.result.findings.append(
            f"{child.name} died of an error of its own ({status}): {last[:300]} [{log}]"
        )

    def _log(self, child: Child) -> Path:
        return self.folder / "logs" / f"{child.name}.log"

    def _stop(self, name: str) -> None:
        child = self.children[name]
        child.wanted = False
        if child.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)

    def _kill(self, kind: str) -> None:
        young = time.monotonic() - YOUNG
        alive = [
            child
            for child in self.children.values()
            if child.name.startswith(kind) and child.pid and child.born < young
        ]
        if not alive:
            return
        child = self.rng.choice(alive)
        assert child.pid is not None
        child.struck = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        self.counts[f"{kind} killed"] += 1
        self.say(f"killed {child.name}")

    def _wait_until(self, done: Callable[[], bool], timeout: float, tick: float = 0.1) -> bool:
        end = time.monotonic() + timeout
        while not done():
            if time.monotonic() > end:
                return False
            self._attend(tick)
        return True

    def _close(self) -> None:
        """Leave no process behind."""
        if self.nursery is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.nursery.kill()
                self.nursery.wait(10)
        with contextlib.suppress(queue.Empty):
            while True:
                event = self.events.get_nowait()
                if event["event"] == "started":
                    self.children[event["name"]].pid = event["pid"]
        for child in self.children.values():
            if child.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        self.engine.dispose()

    # -- the database --------------------------------------------------------------------------------------------

    def _rows(self, statement: str) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(statement)))

    def _cut(self) -> None:
        """Cut a connection; rather one with a transaction under way."""
        if self.options.backend == "mysql":
            own, kill = "SELECT CONNECTION_ID()", "KILL {}"
            # Not information_schema: it shows statements, and stumbles over those with binary data.
            all_of_them = (
                "SELECT processlist_id FROM performance_schema.threads WHERE processlist_db = DATABASE()"
            )
            in_transaction = (
                "SELECT t.processlist_id FROM performance_schema.threads t "
                "JOIN performance_schema.events_transactions_current e USING (thread_id) "
                "WHERE t.processlist_db = DATABASE() AND e.state = 'ACTIVE'"
            )
        else:
            own, kill = "SELECT pg_backend_pid()", "SELECT pg_terminate_backend({})"
            all_of_them = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            in_transaction = f"{all_of_them} AND xact_start IS NOT NULL"
        with self.engine.connect() as connection:
            mine = connection.scalar(text(own))
            ids: list[int] = []
            for statement in (in_transaction, all_of_them):
                ids = sorted(row[0] for row in connection.execute(text(statement)) if row[0] != mine)
                if ids:
                    break
            if not ids:
                return
            with contextlib.suppress(Exception):  # gone meanwhile
                connection.execute(text(kill.format(self.rng.choice(ids))))
        self.counts["connections cut"] += 1
        self.say("cut a connection")

    def _answerable(self) -> int:
        """Count the requests that still have to be answered, merged or dropped."""
        statement = (
            "SELECT count(*) FROM asset_partition_dag_run_wake w LEFT JOIN dag d ON d.dag_id = w.target_dag_id "
            "WHERE d.dag_id IS NULL OR NOT (d.is_paused OR d.is_stale)"
        )
        too_many = (
            "SELECT count(*) FROM (SELECT target_dag_id FROM asset_partition_dag_run_wake "
            "GROUP BY target_dag_id HAVING count(*) > 1) x"
        )
        return self._rows(statement)[0][0] + self._rows(too_many)[0][0]

    def _status(self) -> str:
        tables = {
            "events": "asset_event",
            "fired": "asset_partition_dag_run WHERE created_dag_run_id IS NOT NULL",
            "pending": "asset_partition_dag_run WHERE created_dag_run_id IS NULL",
            "requests": "asset_partition_dag_run_wake",
        }
        return ", ".join(
            f"{self._rows(f'SELECT count(*) FROM {table}')[0][0]} {name}" for name, table in tables.items()
        )

    def say(self, line: str) -> None:
        """Add a line to the timeline."""
        self._print(f"{time.monotonic() - self.started:7.1f} s  {line}")


def _head(statement: str) -> str:
    """Return a statement's verb and table."""
    words = re.sub(r"/\*.*?\*/", " ", statement).split()
    verb = words[0] if words else "COMMIT"
    table = next((new for old, new in pairwise(words) if old in TABLE_FOLLOWS), "")
    return f"{verb} {table}".strip()
