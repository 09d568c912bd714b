"""Mutants: one-line changes that break a rule, each named in `airflow-core/mutants.toml` with the test that must catch it.

A mutant is put into an installed Airflow and taken out again. That must be an environment of its own, made of copies:
files that are hard links would change wherever they are linked to.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _lib import environment, services
from _lib.paths import CACHE, COMMON_SOURCE, CORE, CORE_TESTS, ROOT, SCRIPTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIST = CORE / "mutants.toml"
TESTS = CORE_TESTS / "unit"
TEST_TIMEOUT = 120
"""Seconds of a test after which it counts as failed: a mutant may make it run for ever."""
RUN_TIMEOUT = 900
LIBRARIES = (
    *("_pytest.assertion.rewrite", "alembic.command", "fastapi", "httpx", "hypothesis", "jinja2", "pendulum"),
    *("pydantic", "pytest", "sqlalchemy.ext.asyncio", "sqlalchemy.orm", "structlog", "time_machine"),
)
"""Imported once for all mutants."""
BELOW_MODELS = (
    *("airflow.settings", "airflow.models.base", "airflow.providers.standard.operators.empty", "airflow.sdk"),
    *("airflow.sdk.execution_time.task_runner", "airflow.executors.workloads", "airflow.timetables.base"),
    *("airflow.serialization.definitions.assets", "airflow.partition_mappers.base"),
)
"""Imported once for those in modules: it imports none of them."""
BELOW_SCHEDULER = (
    *("airflow.models.serialized_dag", "airflow.dag_processing.collection", "airflow.assets.manager"),
    *("airflow.executors.local_executor", "airflow.jobs.job", "airflow.utils.db", "airflow.utils.db_cleanup"),
)
"""Imported once for those in the scheduler."""
SCHEDULER = (
    "airflow/jobs/asset_partition_wake/",
    "airflow/jobs/scheduler_job_runner.py",
    "airflow/migrations/",
)
NOT_A_RULE = re.compile(r"\b(NameError|SyntaxError|ImportError|ModuleNotFoundError|IndentationError)\b")
"""What a mistake in the mutant fails with, rather than the rule that it breaks."""


PASSED, FAILED = "PASSED", "FAILED"


@dataclass(frozen=True)
class Mutant:
    """A one-line change of an installed file, and the test that must fail with it."""

    name: str
    rule: str
    """The section of the specification, and in short what it asks for."""
    file: str
    """Path in the installed tree."""
    old: str
    """Text that is there exactly once; of several lines where one alone is there more often."""
    new: str
    test: str
    """Node id, from the folder of the unit tests on; all of its parameters unless it names one."""
    backend: str = "sqlite"
    fresh: bool = False
    """Whether the database is to be made by the mutant, too."""

    def applied(self, text: str) -> str:
        """Return the text of the file with the change."""
        if (found := text.count(self.old)) != 1:
            raise environment.Problem(f"mutant {self.name}: `old` is found {found} times in {self.file}")
        changed = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            try:
                compile(changed, self.file, "exec")
            except SyntaxError as error:
                raise environment.Problem(f"mutant {self.name}: {error}") from error
        return changed

    @property
    def node(self) -> str:
        """The test's node id as pytest reports it."""
        return f"{TESTS.relative_to(ROOT)}/{self.test}"

    def problem(self, packages: Path) -> str | None:
        """Return what is wrong with the entry, seen without running anything."""
        path = packages / self.file
        if not path.is_file():
            return f"mutant {self.name}: there is no {self.file}"
        try:
            self.applied(path.read_text())
        except environment.Problem as problem:
            return str(problem)
        module, _, function = self.test.partition("::")
        function = function.partition("[")[0]
        source = TESTS / module
        if not source.is_file() or not re.search(rf"^(async )?def {function}\(", source.read_text(), re.M):
            return f"mutant {self.name}: there is no test {self.test}"
        return None


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: caught, or why not."""

    mutant: Mutant
    caught: bool
    said: str
    seconds: float


def read(path: Path = LIST) -> list[Mutant]:
    """Return the mutants of the list."""
    try:
        found = [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise environment.Problem(f"{path.name}: {error}") from error
    names = [mutant.name for mutant in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise environment.Problem(f"{path.name}: there is more than one mutant {', '.join(twice)}")
    if strange := sorted({mutant.backend for mutant in found} - set(services.BACKENDS)):
        raise environment.Problem(f"{path.name}: unknown backend {', '.join(strange)}")
    return found


class Laboratory:
    """An installed Airflow that mutants are put into, and a database on each backend that their tests run on.

    :param python: of the environment
    """

    def __init__(self, python: Path) -> None:
        self.python = python
        self.packages = environment.site_packages(python)

    @contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """Have the mutant in the tree during the block. The file keeps its time, for the sake of what is compiled of it."""
        path = self.packages / mutant.file
        before, times = path.read_bytes(), path.stat()
        changed = mutant.applied(before.decode())
        try:
            path.write_text(changed)
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    @contextmanager
    def database(self, backend: str) -> Iterator[dict[str, str]]:
        """Have a database of the backend, made by `airflow db migrate`; yields the environment variables to use it."""
        CACHE.mkdir(exist_ok=True)
        name = f"wake_mutants_{os.getpid()}_{time.monotonic_ns() % 10**6}"
        with tempfile.TemporaryDirectory(prefix="mutants-", dir=CACHE) as home, services.using(backend):
            environ = self._environ(Path(home), backend) | {
                "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": services.fresh_database(backend, name)
            }
            try:
                migrate = [str(self.python), "-m", "airflow", "db", "migrate"]
                environment.run(migrate, "airflow db migrate", environ)
                yield environ
            finally:
                services.drop_database(backend, name)

    @staticmethod
    def _environ(home: Path, backend: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")}
        (home / "dags").mkdir()
        return inherited | {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
            "PYTHONPATH": os.pathsep.join([str(COMMON_SOURCE), str(SCRIPTS)]),
            # What is compiled of a mutant must not outlive it.
            "PYTHONDONTWRITEBYTECODE": "1",
            "WAKE_BACKEND": backend,
        }

    def check(self, mutants: Iterable[Mutant], run: Pytest) -> dict[str, str]:
        """Run the tests of mutants without any: return what is wrong, by test."""
        nodes = {mutant.test: mutant.node for mutant in mutants}
        outcomes, output = run(sorted(nodes.values()))
        if not outcomes:
            raise environment.Problem(f"pytest ran nothing: {' / '.join(output.splitlines()[-5:])}")
        wrong = {}
        for test, node in sorted(nodes.items()):
            of_test = [said for ran, said in outcomes.items() if ran == node or ran.startswith(f"{node}[")]
            if not of_test:
                wrong[test] = "it did not run"
            elif failed := [said for said in of_test if said != PASSED]:
                wrong[test] = failed[0]
        return wrong

    def catch(self, mutant: Mutant, run: Pytest) -> Outcome:
        """Put a mutant in, run its test, and take it out."""
        started = time.monotonic()
        try:
            with self.with_mutant(mutant):
                if mutant.fresh:
                    with self.database(mutant.backend) as its_own, Pytest(self.python, its_own) as another:
                        outcomes, output = another([mutant.node], "--exitfirst", mutated=mutant)
                else:
                    outcomes, output = run([mutant.node], "--exitfirst", mutated=mutant)
        except environment.Problem as problem:
            caught, said = False, f"could not be tried: {problem}"
        else:
            caught, said = judge(outcomes, output)
        return Outcome(mutant, caught, said, time.monotonic() - started)


def judge(outcomes: Mapping[str, str], output: str) -> tuple[bool, str]:
    """Tell whether a mutant was caught, and what pytest said: its test fails, for what the mutant does, not is."""
    failed = [said for said in outcomes.values() if said.startswith(FAILED)]
    if failed:
        said = failed[0].removeprefix(FAILED).strip() or "failed"
        return (False, f"is no working code: {said}") if NOT_A_RULE.search(said) else (True, said)
    if outcomes and all(said == PASSED for said in outcomes.values()):
        return False, "survived"
    return False, f"could not be tried: {next(iter(outcomes.values()), output[-300:])}"


class Pytest:
    """Runs pytest on a database, in forks of processes that have imported what is not mutated."""

    def __init__(self, python: Path, environ: Mapping[str, str]) -> None:
        self._python = python
        self._environ = {**environ, "COLUMNS": "1000"}
        self._home = Path(environ["AIRFLOW_HOME"])
        self._processes: dict[tuple[str, ...], subprocess.Popen[str]] = {}

    def __enter__(self) -> Pytest:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
            process.communicate()

    def __call__(
        self, nodes: list[str], *options: str, mutated: Mutant | None = None
    ) -> tuple[dict[str, str], str]:
        """Run tests; return what pytest says of each (PASSED, or FAILED, ERROR and why), and all it printed."""
        log = self._home / "pytest.log"
        arguments = [
            *("-p", "tests_common.pytest_plugin", "-p", "no:cacheprovider", "-q", "-rA", "--no-header"),
            *("--tb=no", "--color=no", f"--timeout={TEST_TIMEOUT}", f"--basetemp={self._home / 'tmp'}"),
            *(*options, *nodes),
        ]
        file = mutated.file if mutated else ""
        modules: tuple[str, ...] = LIBRARIES
        fresh = "airflow"
        if file.endswith(".py"):
            fresh = file.removesuffix(".py").replace("/", ".")
            modules = (*modules, *BELOW_MODELS)
        if file.startswith(SCHEDULER):
            modules = (*modules, *BELOW_SCHEDULER)
        request = {"arguments": arguments, "log": str(log), "timeout": RUN_TIMEOUT, "fresh": fresh}
        answer = self._ask(modules, request)
        if "problem" in answer:
            raise environment.Problem(answer["problem"])
        output = log.read_text(errors="replace")
        outcomes = {}
        for word, rest in re.findall(r"^(PASSED|FAILED|ERROR) (.*)$", output, re.MULTILINE):
            node, _, why = rest.partition(" - ")
            outcomes[node] = word if word == PASSED else f"{word} {why}"
        return outcomes, output

    def _ask(self, modules: tuple[str, ...], request: Mapping[str, Any]) -> dict[str, Any]:
        if modules not in self._processes:
            self._processes[modules] = subprocess.Popen(
                [str(self._python), "-m", "_lib.prefork", *modules],
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        process = self._processes[modules]
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise environment.Problem("the process that runs pytest has ended")
        return json.loads(answer)
