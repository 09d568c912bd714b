"""Changing a text at given places, and only there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from _lib.edits import BuildError


@dataclass(frozen=True)
class Splice:
    """New text for `source[start:end]`; an insertion where both are the same."""

    start: int
    end: int
    text: str
    by: str  # the edit, for errors
    order: int = 0  # among insertions at one place


def splice(source: str, splices: Iterable[Splice]) -> str:
    """Apply splices whose offsets all are those of `source`."""
    result = ""
    done, last = 0, None
    for item in sorted(splices, key=lambda item: (item.start, item.end, item.order)):
        if last and item.start < done:
            raise BuildError(f'edits "{last.by}" and "{item.by}" overlap')
        result += source[done : item.start] + item.text
        if not item.text and source[item.end : item.end + 1] == "\n":
            # What is removed does not leave the blank lines of both its sides.
            result = result.rstrip("\n") + "\n"
        done, last = item.end, item
    return result + source[done:]


def nearest(name: str, names: Iterable[str]) -> str:
    """The name most like one that is not there."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0)), "nothing")


def closest(wanted: str, candidates: Iterable[tuple[int, str]], cutoff: float = 0.0) -> str | None:
    """The code most like what was wanted among (line, code) candidates, and its line."""
    lines = {code[: len(wanted)]: line for line, code in reversed(list(candidates))}
    for match in difflib.get_close_matches(wanted, lines, n=1, cutoff=cutoff):
        return f"{match!r} at line {lines[match]}"
    return None
