"""Those who change things meanwhile: a Dag processor that parses and edits, and an operator. Both use Airflow's functions."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import delete, select, update
from sqlalchemy.exc import DBAPIError

from _lib.chaos import cast
from _lib.chaos.disturb import Chances, Disturbance
from _lib.chaos.errors import kind_of
from airflow.api.common.delete_dag import delete_dag
from airflow.dag_processing.collection import AssetModelOperation
from airflow.models.asset import AssetActive, AssetModel
from airflow.models.dag import DagModel

from tests_common.db import new_session
from tests_common.factories import write

CHANCES = Chances(delay=0.04, longest=0.4)
TRIES = 100


class Hands:
    """A process that does one thing after the other until SIGTERM; what fails is tried at its next turn."""

    def __init__(self, folder: Path, name: str, life: str, pace: float) -> None:
        self.disturbance = Disturbance(folder, name, life, CHANCES)
        self.disturbance.install()
        self.rng = random.Random(life)
        self.pace = pace
        self.stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())

    def act(self, what: str, act: Callable[..., None], *args: object) -> None:
        """Do one thing and report it."""
        try:
            with self.disturbance.watched():
                act(*args)
        except Exception as error:
            self.disturbance.report(f"{what} failed", kind=kind_of(error))
        else:
            self.disturbance.report(what, about=" ".join(map(str, args)))


def parse(dag_id: str, variant: int = 0, note: str = "") -> None:
    """Write a Dag as the Dag processor does when it has parsed the file."""
    dag = cast.dag(dag_id, variant, note)
    with new_session() as session:
        write(dag, session=session)


def set_dag(dag_id: str, column: str, value: bool) -> None:
    with new_session() as session:
        session.execute(update(DagModel).where(DagModel.dag_id == dag_id).values({column: value}))


def deactivate(asset: str) -> None:
    """Take an asset out of use, as the scheduler does with one that no Dag refers to."""
    with new_session() as session:
        session.execute(delete(AssetActive).where(AssetActive.name == asset))


def activate(*assets: str) -> None:
    with new_session() as session:
        models = session.scalars(select(AssetModel).where(AssetModel.name.in_(assets))).all()
        AssetModelOperation.collect({}).activate_assets_if_possible(models, session=session)


def remove(dag_id: str) -> None:
    """Delete a Dag; the Dag processor, which still has its file, brings it back."""
    with new_session() as session:
        delete_dag(dag_id, session=session)


def processor(folder: Path, life: str, pace: float) -> None:
    """Parse Dags, at random, and edit some of them."""
    hands = Hands(folder, "processor", life, pace)
    variants = dict.fromkeys(cast.EDITED, 0)
    note = ""
    while not hands.stop.is_set():
        dag_id = hands.rng.choice(cast.DAG_IDS)
        what = "parse"
        if dag_id in variants and hands.rng.random() < 0.3:
            what = "edit"
            variants[dag_id] = hands.rng.randrange(len(cast.EDITED[dag_id]))
        elif hands.rng.random() < 0.2:
            note = f"note {hands.rng.random()}"
        hands.act(what, parse, dag_id, variants.get(dag_id, 0), note)
        hands.stop.wait(hands.rng.uniform(0, 2 * pace))


def operator(folder: Path, life: str, pace: float) -> None:
    """Pause and unpause, make stale and live, deactivate and activate, delete."""
    hands = Hands(folder, "operator", life, pace)
    rng = hands.rng

    def away(column: str) -> None:
        """Keep a Dag from running for a while."""
        dag_id = rng.choice(cast.DAG_IDS)
        hands.act(column, set_dag, dag_id, column, True)
        hands.stop.wait(rng.uniform(0, 3))
        hands.act(column, set_dag, dag_id, column, False)

    def inactive() -> None:
        asset = rng.choice(list(cast.ASSETS))
        hands.act("deactivate", deactivate, asset)
        hands.stop.wait(rng.uniform(0, 1.5))
        hands.act("activate", activate, asset)

    def deleted() -> None:
        # As told to do: a Dag is paused first, so that no scheduler creates a run of it at this moment.
        hands.act("is_paused", set_dag, cast.DELETED, "is_paused", True)
        hands.stop.wait(2)
        hands.act("delete", remove, cast.DELETED)
        hands.stop.wait(1)
        hands.act("is_paused", set_dag, cast.DELETED, "is_paused", False)

    choices: list[tuple[Callable[[], None], int]] = [
        (lambda: away("is_paused"), 4),
        (lambda: away("is_stale"), 3),
        (inactive, 4),
        (deleted, 1),
    ]
    while not hands.stop.is_set():
        rng.choices([do for do, _ in choices], [weight for _, weight in choices])[0]()
        hands.stop.wait(rng.uniform(0, 2 * pace))


def write_dags(folder: Path) -> None:
    """Write every Dag for the first time."""
    for dag_id in cast.DAG_IDS:
        parse(dag_id)


def tidy_up(folder: Path, away: tuple[str, str]) -> None:
    """Let everything run but two Dags.

    :param away: the one that stays paused, and the one that stays stale
    """
    for dag_id in cast.DAG_IDS:
        insist(parse, dag_id)
        insist(set_dag, dag_id, "is_paused", dag_id == away[0])
        insist(set_dag, dag_id, "is_stale", dag_id == away[1])
    insist(activate, *cast.ASSETS)


def insist(act: Callable[..., None], *args: object) -> None:
    """Do something until it succeeds: `write_dag` gives up where the Dag's version is locked by a scheduler."""
    for _ in range(TRIES - 1):
        try:
            return act(*args)
        except DBAPIError:
            time.sleep(0.2)
    act(*args)
