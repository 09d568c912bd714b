"""How big the measured population is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LARGE = (4_270, 528)
"""The pending runs of the two largest Dags, where the population is large enough for them."""

FIRST = 600
"""At most so many of the first Dags can all run: what stock claims first, and what the requests of one loop ask for."""


@dataclass(frozen=True)
class Sizes:
    """A population of asset partitions: most of the runs have fired."""

    runs: int = 1_055_000
    pending: int = 55_000
    dags: int = 2_300

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def part(self, of: int) -> Sizes:
        """Return a population of which this one is *of* times as large."""
        return Sizes(self.runs // of, self.pending // of, max(1, self.dags // of))

    @property
    def first(self) -> int:
        """Return how many Dags of the smallest numbers can all run: their oldest runs are the oldest of all."""
        return min(FIRST, max(1, self.dags // 3))

    def pending_by_dag(self) -> list[int]:
        """Return the pending runs of each Dag: at least one, two large ones, and the rest skewed."""
        large = [count for count in LARGE if count * 4 < self.pending]
        others = self.dags - len(large)
        left = self.pending - sum(large) - others
        if others < 1 or left < 0:
            raise ValueError(f"{self.pending} pending runs are too few for {self.dags} Dags")
        weights = [(number + 5) ** -0.7 for number in range(others)]
        most = LARGE[-1] - 1 if large else self.pending
        share = left / sum(weights)
        counts = [1 + min(most, int(weight * share)) for weight in weights]
        # What rounding left over goes round.
        number = 0
        while sum(counts) < self.pending - sum(large):
            counts[-1 - number % others] += 1
            number += 1
        return large + counts

    def fired_by_dag(self) -> list[int]:
        """Return the fired runs of each Dag: all alike."""
        fired, more = divmod(self.runs - self.pending, self.dags)
        return [fired + (number < more) for number in range(self.dags)]

    def cannot_run(self) -> list[int]:
        """Return the numbers of Dags with about a tenth of the pending runs; every other one of them is paused, or stale."""
        pending = self.pending_by_dag()
        numbers: list[int] = []
        held = 0
        for number in [*range(self.first, self.dags, 2), *range(self.first + 1, self.dags, 2)]:
            if held >= self.pending // 10:
                break
            held += pending[number]
            numbers.append(number)
        return numbers
