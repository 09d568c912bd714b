"""Disturbance from inside a process: delays that make races wide, connections that are cut, and sudden death.

It strikes before a random statement, or before the COMMIT, of what is wrapped in `watched()`. What the process does is
chosen by the seed; how the processes interleave is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from sqlalchemy import event

from _lib.chaos.errors import kind_of
from airflow import settings

FURTHEST = 400
"""Of a block's statements, the last one that may be struck. The first ones are struck most: a long block has an end, too."""

IDLE = 5
"""An idle scheduler's loop has no more statements than this, and there are many such loops: few of them are struck."""


@dataclass(frozen=True)
class Chances:
    """How likely what is watched is struck."""

    delay: float = 0.0
    """Of each statement."""
    longest: float = 0.0
    """Seconds."""
    cut: float = 0.0
    """Of each block."""
    death: float = 0.0
    """Of each block."""


class Disturbance:
    """What happens to one process.

    :param folder: of the round: it holds the file that ends all disturbance, and what is reported
    """

    def __init__(self, folder: Path, name: str, seed: str, chances: Chances) -> None:
        self._calm = folder / "calm"
        self._report = folder / "reports" / f"{name}.jsonl"
        self._name = name
        self._rng = random.Random(seed)
        self._chances = chances
        self._depth = 0
        self._statements = 0
        self._strike_at: tuple[int, str] | None = None

    def install(self) -> None:
        """Listen to the process's engine."""
        event.listen(settings.engine, "before_cursor_execute", lambda conn, *_: self._strike(conn))
        event.listen(settings.engine, "commit", self._strike)
        event.listen(settings.engine, "handle_error", self._note_error)

    def report(self, what: str, **details: Any) -> None:
        """Add a line to what the process reports."""
        line = {"at": time.time(), "process": self._name, "what": what, **details}
        with open(self._report, "a") as handle:
            handle.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Strike at statements of the block."""
        if not self._depth:
            self._statements = 0
            self._strike_at = self._choose()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def watching(self, function: Callable) -> Callable:
        """Return the function, watched."""

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.watched():
                return function(*args, **kwargs)

        return watched

    def _strike(self, connection: Any) -> None:
        if not self._depth or self._calm.exists():
            return
        self._statements += 1
        if self._rng.random() < self._chances.delay:
            time.sleep(self._rng.uniform(0, self._chances.longest))
        if self._strike_at and self._strike_at[0] == self._statements:
            what = self._strike_at[1]
            self.report(what, statement=self._statements)
            if what == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            self._cut(connection)

    def _choose(self) -> tuple[int, str] | None:
        """Choose whether a block is struck, at which statement, and how."""
        at = round(FURTHEST ** self._rng.random())
        drawn = self._rng.random()
        if at <= IDLE and self._rng.random() > 0.1:
            return None
        if drawn < self._chances.death:
            return at, "death"
        return (at, "cut") if drawn < self._chances.death + self._chances.cut else None

    @staticmethod
    def _cut(connection: Any) -> None:
        """Have the server end the connection: the statement that follows fails as it does when the network does."""
        mysql = connection.dialect.name == "mysql"
        cursor = connection.connection.cursor()
        with contextlib.suppress(Exception):
            cursor.execute(
                "KILL CONNECTION_ID()" if mysql else "SELECT pg_terminate_backend(pg_backend_pid())"
            )

    def _note_error(self, context: Any) -> None:
        error = context.original_exception
        if isinstance(error, Exception):
            self.report("database error", kind=kind_of(error), statement=(context.statement or "")[:200])
