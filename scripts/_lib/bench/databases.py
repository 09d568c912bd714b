"""The populated databases of a server: one as stock Airflow has it, one migrated to ours."""

from __future__ import annotations

import ast
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from _lib import services
from _lib.bench.sizes import Sizes
from _lib.bench.workers import Worker, worker
from _lib.paths import CORE_SOURCE

STOCK, OURS = "stock", "ours"


@dataclass
class Pythons:
    """The interpreters of the two environments."""

    stock: Path
    ours: Path


class Databases:
    """
    Makes populated databases on demand, and remembers those that are there.

    :param keep: leave them for the next run
    """

    def __init__(self, backend: str, pythons: Pythons, say: Callable[[str], None], keep: bool) -> None:
        self.backend = backend
        self.pythons = pythons
        self.say = lambda message: say(f"{backend}: {message}")
        self.keep = keep
        self.made: list[str] = []
        self.workers: dict[str, Worker] = {}
        self.stack = ExitStack()
        self.seconds: dict[str, float] = {}
        """How long loading and migrating took, by database."""

    def pair(self, sizes: Sizes | None) -> tuple[Worker, Worker]:
        """Return a stock and a patched worker, each on its own database of these sizes; None: with one Dag and no run."""
        # Both are there before anybody connects: one may be a copy of the other.
        self._database(STOCK, sizes)
        self._database(OURS, sizes)
        return self.worker(STOCK, sizes), self.worker(OURS, sizes)

    def worker(self, kind: str, sizes: Sizes | None) -> Worker:
        """Return a worker on a database of these sizes. It runs until `close`."""
        name = self._database(kind, sizes)
        if name not in self.workers:
            self.workers[name] = self.stack.enter_context(
                self._worker(kind, kind, services.url(self.backend, name))
            )
        return self.workers[name]

    def close(self) -> None:
        """Stop the workers, and drop what was made unless it is kept."""
        self.stack.close()
        if not self.keep:
            for name in self.made:
                services.drop_database(self.backend, name)

    def _database(self, kind: str, sizes: Sizes | None) -> str:
        name = _name(kind, sizes)
        note = self._note(name)
        if note is None:
            self.made.append(name)
            (self._migrated if kind == OURS else self._loaded)(name, sizes)
        elif name not in self.made:
            self.made.append(name)
            self.say(f"{name} is there already")
            self.seconds.update({f"{key} {name}": value for key, value in note["seconds"].items()})
        return name

    def _loaded(self, name: str, sizes: Sizes | None) -> None:
        """Make a database with stock Airflow's schema, and fill it."""
        self.say(f"making {name}")
        url = services.fresh_database(self.backend, name)
        with self._worker("stock", STOCK, url) as stock:
            stock.migrate()
            seconds = stock.create(sizes=sizes.as_dict()) if sizes else stock.create_dag()
        self._done(name, load=seconds)

    def _migrated(self, name: str, sizes: Sizes | None) -> None:
        """Make a copy of the stock database, and migrate it as an upgrade does."""
        base = _name(STOCK, sizes)
        if self.backend == "postgresql" and base in self.made:
            self.say(f"copying {base} to {name}")
            services.drop_database(self.backend, name)
            self._administer(f"CREATE DATABASE {name} TEMPLATE {base}")
        else:
            self._loaded(name, sizes)
        self.say(f"migrating {name}")
        with self._worker("ours", OURS, services.url(self.backend, name)) as ours:
            seconds = ours.migrate()
            ours.analyze()
        self._done(name, upgrade=seconds)

    def _worker(self, name: str, kind: str, url: str) -> Any:
        return worker(f"{self.backend} {name}", getattr(self.pythons, kind), url, self.say)

    # -- what is there -------------------------------------------------------------------------------------------

    def _note(self, name: str) -> dict[str, Any] | None:
        """Return what was noted of a database that is ready and made by the present code."""
        if (
            self.backend == "sqlite"
            and not Path(services.url("sqlite", name).removeprefix("sqlite:///")).exists()
        ):
            return None
        try:
            [(written,)] = self._execute(name, "SELECT note FROM bench_note")
        except (DBAPIError, ValueError):
            return None
        note = json.loads(written)
        return note if note["made_by"] == _made_by(name) else None

    def _done(self, name: str, **seconds: float) -> None:
        for key, value in seconds.items():
            self.say(f"{name}: {key} took {value:.1f} s")
            self.seconds[f"{key} {name}"] = value
        note = json.dumps({"made_by": _made_by(name), "seconds": seconds, "at": time.time()})
        self._execute(name, "DROP TABLE IF EXISTS bench_note")
        self._execute(name, "CREATE TABLE bench_note (note VARCHAR(1000))")
        self._execute(name, f"INSERT INTO bench_note VALUES ('{note}')")

    def _administer(self, statement: str) -> None:
        self._execute(None, statement)

    def _execute(self, name: str | None, statement: str) -> list[Any]:
        url = services.url(self.backend, name)
        engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            result = connection.execute(text(statement))
            return list(result) if result.returns_rows else []


def _name(kind: str, sizes: Sizes | None) -> str:
    return f"bench_{kind}_" + ("empty" if sizes is None else f"{sizes.runs}_{sizes.pending}_{sizes.dags}")


def _made_by(name: str) -> str:
    """Return a hash of the code that makes a database."""
    here = Path(__file__).parent
    paths = [here / "population.py", here / "sizes.py"]
    if name.startswith(f"bench_{OURS}"):
        paths += sorted((CORE_SOURCE / "airflow" / "migrations" / "versions").glob("*.py"))
    meaning = "".join(ast.dump(ast.parse(path.read_text())) for path in paths)
    return hashlib.sha256(meaning.encode()).hexdigest()[:16]
