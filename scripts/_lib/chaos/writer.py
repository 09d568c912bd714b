"""Registers events through the real `AssetManager`, as a task's success does, and tries again where that fails.

It notes what it is about to write. Killed and started again, it looks whether that was committed, so that no event
is registered twice and none is left out.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from _lib.chaos import cast
from _lib.chaos.disturb import Chances, Disturbance
from _lib.chaos.errors import kind_of
from airflow.assets.manager import AssetManager
from airflow.models.asset import AssetEvent, AssetModel
from airflow.serialization.definitions.assets import SerializedAssetUniqueKey

from tests_common.db import new_session

CHANCES = Chances(delay=0.03, longest=0.15, cut=0.05, death=0.03)
WEIGHTS = {"plain": 3, "hourly": 6, "weekly": 1, "left": 4, "right": 4}
MOST_KEYS = 4
HOLD_OPEN = 0.05
"""How likely a transaction stays open for a while before it commits."""
ROLL_BACK = 0.05


class Journal:
    """How many events of each asset are done, and those of the transaction under way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[str, int] = dict.fromkeys(cast.ASSETS, 0)
        self.trying: tuple[str, int] | None = None
        if path.exists():
            state = json.loads(path.read_text())
            self.done, self.trying = state["done"], state["trying"]

    def write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"done": self.done, "trying": self.trying}))
        new.replace(self._path)


class Writer:
    """One writer process."""

    def __init__(self, folder: Path, number: int, writers: int, seed: int, life: str, pace: float) -> None:
        self._disturbance = Disturbance(folder, f"writer-{number}", life, CHANCES)
        self._disturbance.install()
        self._rng = random.Random(life)
        self._pace = pace
        self._stop = threading.Event()
        self._journal = Journal(folder / f"writer-{number}.json")
        self._keys = {
            asset: islice(cast.keys(asset, number, writers, seed), done, None)
            for asset, done in self._journal.done.items()
        }
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())

    def run(self) -> None:
        """Register events until SIGTERM."""
        if self._journal.trying:
            self._settle(*self._journal.trying)
        while not self._stop.is_set():
            asset = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self._settle(asset, self._rng.randint(1, 1 if asset == "weekly" else MOST_KEYS))
            self._stop.wait(self._rng.uniform(0, 2 * self._pace))

    def _settle(self, asset: str, count: int) -> None:
        """Register the next events of an asset in one transaction, however often it takes."""
        journal = self._journal
        again = journal.trying is not None
        journal.trying = (asset, count)
        journal.write()
        keys = list(islice(self._keys[asset], count))
        while not (again and self._is_there(asset, keys[0])):
            again = True
            try:
                with self._disturbance.watched():
                    self._register(asset, keys)
                break
            except Exception as error:
                kind = kind_of(error.orig) if isinstance(error, DBAPIError) and error.orig else kind_of(error)
                self._disturbance.report("writer error", kind=kind)
                time.sleep(0.2)
        journal.done[asset] += count
        journal.trying = None
        journal.write()

    def _register(self, asset: str, keys: list[str]) -> None:
        which = SerializedAssetUniqueKey(cast.ASSETS[asset].name, cast.ASSETS[asset].uri)
        while True:
            with new_session() as session:
                for key in keys:
                    AssetManager().register_asset_change(asset=which, partition_key=key, session=session)
                session.flush()
                if self._rng.random() < HOLD_OPEN:
                    time.sleep(self._rng.uniform(0, 1.5))
                if self._rng.random() >= ROLL_BACK:
                    return
                session.rollback()

    def _is_there(self, asset: str, key: str) -> bool:
        """Tell whether an event is committed already; asks until there is an answer."""
        while True:
            try:
                with new_session() as session:
                    asset_id = select(AssetModel.id).where(AssetModel.name == asset).scalar_subquery()
                    found: Any = session.scalar(
                        select(AssetEvent.id).where(
                            AssetEvent.asset_id == asset_id, AssetEvent.partition_key == key
                        )
                    )
                    return found is not None
            except DBAPIError:
                time.sleep(0.2)


def main(folder: Path, number: int, writers: int, seed: int, life: str, pace: float) -> None:
    """Run a writer until it is stopped.

    :param life: seed of this life of the process
    :param pace: seconds between two transactions, on average
    """
    Writer(folder, number, writers, seed, life, pace).run()
