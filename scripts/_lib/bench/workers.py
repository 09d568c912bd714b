"""Measuring processes, one for each environment and database (:mod:`.worker`), and how they are asked."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _lib.environment import Problem
from _lib.paths import CACHE, COMMON_SOURCE, SCRIPTS


def environ(home: Path, url: str) -> dict[str, str]:
    """Return the environment variables of an Airflow of its own."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "PYTHON"))}
    return inherited | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url,
        # What is logged costs both sides the same, and is not what is compared.
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(COMMON_SOURCE)]),
        "PYTHONUNBUFFERED": "1",
    }


class Worker:
    """A measuring process. Call its methods as those of :class:`_lib.bench.worker.Bench`."""

    def __init__(self, name: str, python: Path, url: str, home: Path, say: Callable[[str], None]) -> None:
        self.name = name
        self.say = say
        self.log = home / "log"
        (home / "dags").mkdir(parents=True)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", "_lib.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ(home, url),
                cwd=home,
                start_new_session=True,
            )

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def ask(**arguments: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"call": call, "with": arguments}) + "\n")
            self.process.stdin.flush()
            return self.answer()

        return ask

    def answer(self) -> Any:
        """Wait for what the process has to say; the first time, that it is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if "progress" in message:
                self.say(f"{self.name}: {message['progress']}")
                continue
            if "error" in message:
                raise Problem(f"{self.name}: {message['error']} (all of it: {self._keep_log()})")
            return message["result"]
        raise Problem(f"{self.name} ended with exit code {self.process.wait()} (why: {self._keep_log()})")

    def _keep_log(self) -> Path:
        kept = CACHE / "bench" / f"{self.name.replace(' ', '-')}.log"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(self.log.read_text())
        return kept

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def worker(name: str, python: Path, url: str, say: Callable[[str], None]) -> Iterator[Worker]:
    """Have a measuring process run during the block."""
    with tempfile.TemporaryDirectory(prefix="wake-bench-") as home:
        started = Worker(name, python, url, Path(home), say)
        try:
            started.answer()
            yield started
        finally:
            started.stop()
