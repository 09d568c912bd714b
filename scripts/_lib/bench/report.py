"""What was measured, what was to be reached, and the table that says so."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from _lib.environment import Problem


@dataclass
class Times:
    """Measurements of one thing, in seconds."""

    values: list[float]

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        low, middle, high = (seconds(value) for value in (min(self.values), self.median, max(self.values)))
        return f"{middle} ({low} to {high})"


@dataclass
class Row:
    """
    One line of the table.

    :param value: what is compared with *target*
    :param at_least: whether *target* is the least, rather than the most
    """

    case: str
    backend: str
    what: str
    value: float | None = None
    target: float | None = None
    at_least: bool = False
    unit: str = " x"
    stock: Times | None = None
    ours: Times | None = None
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def verdict(self) -> str:
        """Say whether the target is reached, and by how much it is not."""
        if self.reached is None or self.value is None or self.target is None:
            return ""
        if self.reached:
            return "reached"
        low, high = sorted((self.value, self.target))
        return f"missed, {high / low:.2f} times off" if low else "missed"

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "stock": self.stock.values if self.stock else None,
            "ours": self.ours.values if self.ours else None,
            "reached": self.reached,
        }


def from_dict(data: dict[str, Any]) -> Row:
    """Return the row that `as_dict` gave."""
    data = {key: value for key, value in data.items() if key != "reached"}
    for key in ("stock", "ours"):
        data[key] = Times(data[key]) if data[key] else None
    return Row(**data)


def read(files: Iterable[Path]) -> list[Row]:
    """
    Return the rows of files, each database's in the order of the first file; a later one replaces the cases that it has.

    :raises Problem: if one is no file of measurements
    """
    by_case: dict[tuple[str, str], list[Row]] = {}
    for path in files:
        try:
            rows = [from_dict(row) for row in json.loads(path.read_text())]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Problem(f"{path} is no file of measurements: {error}") from error
        for case in dict.fromkeys((row.backend, row.case) for row in rows):
            by_case[case] = [row for row in rows if (row.backend, row.case) == case]
    return [row for rows in by_case.values() for row in rows]


def seconds(value: float) -> str:
    """Return a time with three digits."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
        if value < limit:
            return f"{_three(value * factor)} {unit}"
    return f"{_three(value)} s"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(rows: list[Row]) -> str:
    """Return the rows as a table."""
    head = ("case", "database", "measured", "stock", "ours", "ratio", "to reach", "verdict")
    lines = [head] + [
        (
            row.case,
            row.backend,
            row.what,
            str(row.stock or ""),
            str(row.ours or ""),
            "" if row.value is None else f"{_three(row.value)}{row.unit}",
            "" if row.target is None else f"{'>=' if row.at_least else '<='} {row.target:g}{row.unit}",
            "; ".join(part for part in (row.verdict, row.note) if part),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (lines[0], rule, *lines[1:])
    )
