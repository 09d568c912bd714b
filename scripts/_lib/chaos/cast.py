"""The Dags and assets of a round, and the order in which each writer registers events.

Steady Dags keep their definition, so that what they must fire follows from their key logs alone. Edited ones get other
timetables, are deleted and come back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from airflow.sdk import (
    DAG,
    Asset,
    DayWindow,
    FanOutMapper,
    PartitionedAssetTimetable,
    RollupMapper,
    StartOfDayMapper,
    StartOfWeekMapper,
    WeekWindow,
)
from airflow.sdk.definitions.partition_mappers.wait_policy import MinimumCount

from tests_common.factories import day_rollup, make_dag

PLAIN, HOURLY, WEEKLY, LEFT, RIGHT = (
    Asset(name, uri=f"chaos://{name}") for name in ("plain", "hourly", "weekly", "left", "right")
)
ASSETS = {asset.name: asset for asset in (PLAIN, HOURLY, WEEKLY, LEFT, RIGHT)}
HOURS = 24
BLOCK_DAYS = 3
PAIRS = 10
"""Keys of LEFT and RIGHT that a writer registers in one random order."""

Schedule = tuple[Any, Any]
"""Assets, and a mapper or None."""

STEADY: dict[str, Schedule] = {
    "steady_identity": (PLAIN, None),
    "steady_by_name": (Asset.ref(name="plain"), None),
    "steady_rollup": (HOURLY, day_rollup()),
    "steady_fan_out": (WEEKLY, FanOutMapper(upstream_mapper=StartOfWeekMapper(), window=WeekWindow())),
    "steady_and": (LEFT & RIGHT, None),
    "steady_or": (LEFT | RIGHT, None),
}

EDITED: dict[str, list[Schedule | None]] = {
    # The mapper stays, so that pending runs stay, and may be complete by the new condition.
    "edited_condition": [(LEFT & RIGHT, None), (LEFT | RIGHT, None), (LEFT & RIGHT & PLAIN, None)],
    "edited_mapper": [
        (HOURLY, day_rollup()),
        (HOURLY, None),
        (HOURLY, day_rollup(wait_policy=MinimumCount(6))),
        (HOURLY, RollupMapper(upstream_mapper=StartOfDayMapper(), window=DayWindow())),
    ],
    # None: no longer partitioned.
    "edited_kind": [(LEFT & RIGHT, None), None],
    "edited_deleted": [(PLAIN & LEFT, None), (LEFT & RIGHT, None)],
}
DELETED = "edited_deleted"
DAG_IDS = (*STEADY, *EDITED)


def dag(dag_id: str, variant: int = 0, note: str = "") -> DAG:
    """Return a Dag in one of its variants. Its runs stay queued: what becomes of them is not looked at.

    :param note: a description, which no evaluation depends on
    """
    schedule = EDITED[dag_id][variant] if dag_id in EDITED else STEADY[dag_id]
    timetable: Any = None
    if schedule is not None:
        assets, mapper = schedule
        timetable = PartitionedAssetTimetable(
            assets=assets, **({"default_partition_mapper": mapper} if mapper else {})
        )
    # With a task, runs have task instances, and another definition is another version; without, it replaces the stored one.
    tasks = ("task",) if dag_id in ("steady_and", "edited_condition", "edited_kind") else ()
    return make_dag(dag_id, timetable, tasks=tasks, max_active_runs=0, description=note)


def _in_blocks(blocks: Iterator[list[str]], rng: random.Random) -> Iterator[str]:
    for block in blocks:
        rng.shuffle(block)
        yield from block


def keys(asset: str, writer: int, writers: int, seed: int) -> Iterator[str]:
    """Yield the keys that a writer registers for an asset: each event once, by one of the writers, in random order."""
    rng = random.Random(f"{seed} {asset} {writer}")
    if asset == "plain":
        return (f"{writer}-{n}" for n in count())
    if asset == "weekly":
        return (f"{_day(7 * (writers * n + writer)):%Y-%m-%dT%H:%M:%S}" for n in count())
    if asset == "hourly":
        # The hours of a day are shared out among the writers.
        hours = range(writer, HOURS, writers)
        return _in_blocks(
            (
                [
                    f"{_day(day) + timedelta(hours=hour):%Y-%m-%dT%H:%M:%S}"
                    for day in range(block * BLOCK_DAYS, (block + 1) * BLOCK_DAYS)
                    for hour in hours
                ]
                for block in count()
            ),
            rng,
        )
    # The two sides of a key come from different writers.
    offset = writer if asset == "left" else (writer + 1) % writers
    return _in_blocks(
        ([f"{offset + writers * n}" for n in range(block * PAIRS, (block + 1) * PAIRS)] for block in count()),
        rng,
    )


def _day(number: int) -> datetime:
    return datetime(2001, 1, 1) + timedelta(days=number)  # a Monday


Sources = set[tuple[str, str]]
"""The name of an asset and a source key: what a partition has got."""

COMPLETE: dict[str, Callable[[Sources], bool]] = {
    "steady_identity": bool,
    "steady_by_name": bool,
    "steady_rollup": lambda sources: len(sources) == HOURS,
    "steady_fan_out": bool,
    "steady_and": lambda sources: {"left", "right"} == {asset for asset, _ in sources},
    "steady_or": bool,
}
"""When a partition of a steady Dag is complete; said here once more, so that it is not Airflow's word alone."""

MOST_RUNS = {"steady_or": 2}
"""How often a partition may fire, where that is not once: each side of ``|`` is an event of its own."""
