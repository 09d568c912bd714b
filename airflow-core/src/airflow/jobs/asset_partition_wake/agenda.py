#
# Licensed to the Apache Software Foundation (ASF) under one
# or more contributor license agreements.  See the NOTICE file
# distributed with this work for additional information
# regarding copyright ownership.  The ASF licenses this file
# to you under the Apache License, Version 2.0 (the
# "License"); you may not use this file except in compliance
# with the License.  You may obtain a copy of the License at
#
#   http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing,
# software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY
# KIND, either express or implied.  See the License for the
# specific language governing permissions and limitations
# under the License.
"""
What a loop evaluates next: shares of the budget, Dags in turn, fan-outs and resync passes (spec 5).

Pure: no database and no clock of its own. A loop works on a :meth:`Agenda.draft`; the draft becomes the agenda once the
loop's transaction has committed (spec 7).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

MAX_FAN_OUTS = 50
"""Fan-outs that run side by side; further requests for whole Dags wait in the table for theirs."""


class Request(NamedTuple):
    """A wake request as it was read."""

    id: int
    apdr_id: int | None
    dag_id: str
    created_at: datetime


@dataclass
class FanOut:
    """The pending runs of one Dag, read once from the oldest to ``upto``; answers the requests it started with."""

    dag_id: str
    request_ids: frozenset[int]
    upto: int
    after: int = 0
    exhausted: bool = False
    held: frozenset[int] = frozenset()
    """Runs that a peer had locked: they may be evaluated there as they were before our request."""

    @property
    def finished(self) -> bool:
        return self.exhausted and not self.held


@dataclass
class ResyncPass:
    """Every pending run up to ``upto`` once, Dag by Dag."""

    kind: str
    started_at: float
    upto: int
    after: tuple[str, int] = ("", 0)
    exhausted: bool = False
    held: frozenset[int] = frozenset()

    @property
    def finished(self) -> bool:
        return self.exhausted and not self.held


class Shares(NamedTuple):
    """How many runs of a loop each source has for sure."""

    requested: int
    fan_outs: int
    resync: int


@dataclass
class Agenda:
    """
    What is under way between loops. Its size depends on the budget only, never on what waits.

    :param resync_interval: seconds from one resync pass to the next
    """

    resync_interval: float
    turn: str = ""
    """The Dag that was served last; the next loop goes on behind it."""
    fan_outs: dict[str, FanOut] = field(default_factory=dict)
    resync: ResyncPass | None = None
    next_kind: str = "startup"
    next_pass_at: float = float("-inf")

    def draft(self) -> Agenda:
        """Return a copy that a loop may change and, where it fails, forget."""
        return replace(
            self,
            fan_outs={dag_id: replace(fan_out) for dag_id, fan_out in self.fan_outs.items()},
            resync=replace(self.resync) if self.resync else None,
        )

    def is_idle(self, now: float) -> bool:
        """Whether nothing is under way and no pass is due at *now*."""
        return not self.fan_outs and self.resync is None and not self.pass_is_due(now)

    def shares(self, budget: int) -> Shares:
        """Divide *budget* runs: a tenth each for fan-outs and for a pass that have runs left (spec 5)."""
        tenth = max(1, budget // 10)
        fan_outs = tenth if self.fan_outs else 0
        resync = tenth if self.resync else 0
        return Shares(max(0, budget - fan_outs - resync), fan_outs, resync)

    def wants_fan_out(self, dag_id: str) -> bool:
        """Whether a request for the whole Dag starts a fan-out now, rather than after the one under way."""
        return dag_id not in self.fan_outs and len(self.fan_outs) < MAX_FAN_OUTS

    def start_fan_out(self, dag_id: str, request_ids: Iterable[int], *, upto: int) -> None:
        """
        Start to evaluate every pending run of a Dag.

        :param dag_id: the Dag
        :param request_ids: the requests that the fan-out answers, all read by now
        :param upto: the newest run; a later one has a request of its own
        """
        self.fan_outs[dag_id] = FanOut(dag_id, frozenset(request_ids), upto)

    def finish_fan_outs(self) -> list[FanOut]:
        """Remove and return the fan-outs that have nothing left."""
        finished = [fan_out for fan_out in self.fan_outs.values() if fan_out.finished]
        for fan_out in finished:
            del self.fan_outs[fan_out.dag_id]
        return finished

    def pass_is_due(self, now: float) -> bool:
        """Whether a pass should start at *now* (seconds of a clock that never jumps)."""
        return self.resync is None and now >= self.next_pass_at

    def start_pass(self, now: float, *, upto: int) -> ResyncPass:
        """
        Start a pass: the startup pass first, periodic ones after it.

        :param now: seconds
        :param upto: the newest run; a later one has a request of its own
        """
        self.resync = ResyncPass(self.next_kind, now, upto)
        self.next_kind = "periodic"
        return self.resync

    def finish_pass(self, now: float) -> ResyncPass | None:
        """End the pass that has nothing left, if there is one, and set the time of the next."""
        finished = self.resync
        if finished is None or not finished.finished:
            return None
        self.resync = None
        took_too_long = now - finished.started_at > self.resync_interval
        self.next_pass_at = (now if took_too_long else finished.started_at) + self.resync_interval
        return finished


def in_turn(waiting: dict[str, list[int]]) -> Iterator[tuple[str, int]]:
    """
    Yield ``(dag_id, apdr_id)``: one run of each Dag after the other, each Dag's in its own order.

    :param waiting: the runs asked for, by Dag, the Dag whose turn it is first
    """
    queues = {dag_id: iter(apdr_ids) for dag_id, apdr_ids in waiting.items()}
    while queues:
        for dag_id in list(queues):
            try:
                yield dag_id, next(queues[dag_id])
            except StopIteration:
                del queues[dag_id]
