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
What one loop reads of the requests (spec 5): oldest first within a Dag, and Dags in turn.

A short queue is read whole, by one statement. Of a long one the loop looks at the Dags whose turn it is and reads the
oldest requests of each: more of them where they name few runs or where runs could not be had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from airflow.jobs.asset_partition_wake import queue
from airflow.jobs.asset_partition_wake.agenda import Request, in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from sqlalchemy.orm import Session

LOOKS = 3
"""How often a loop looks on, for Dags that can run and for further requests of theirs, before the next loop does."""

DEEPER = 4
"""How many times as many requests of a Dag the next look reads: enough to get past 24 hourly keys of one day."""

FEW = 50
"""So many requests show that a queue is still long, where the last loop found it so."""

SLOW = 0.01
"""Seconds from which on a read that finds nothing must have come past the remains of deleted requests."""

MOST_DELAY = 30.0
"""Seconds after which a whole read comes in any case."""


@dataclass(frozen=True)
class Horizon:
    """
    From which id on a loop reads: from the first, as long as that is quick.

    While some old snapshot is open (a dump, a long query), databases keep deleted requests and every read comes past them:
    a million of them cost 50 ms and more. Then most loops read only what was written since the last whole read that found
    nothing. A smaller id may still be committed, so whole reads go on, for about a hundredth of the time.
    """

    drawn: int = 0
    whole_read_at: float = float("-inf")
    was_slow: bool = False

    def after(self, now: float) -> int:
        """Return the id behind which to read at *now*, in seconds; 0 for a whole read."""
        return 0 if now >= self.whole_read_at else self.drawn

    def found_nothing(self, now: float, seconds: float, *, session: Session) -> Horizon:
        """Return the horizon after a whole read that found nothing: when it ended, how long it took."""
        slow = seconds > SLOW
        if slow and self.was_slow:  # The first time, the machine may just have been busy.
            return Horizon(
                queue.draw_id(session=session), now + min(100 * seconds, MOST_DELAY), was_slow=True
            )
        return self if slow == self.was_slow else replace(self, was_slow=slow)


class Waiting:
    """
    The requests that a loop has read, and the runs to try for them.

    :param budget: how many runs the loop may evaluate
    :param turn: the Dag behind which a long queue is read on
    :param after: the id behind which to read
    :param session: the loop's session
    """

    def __init__(self, budget: int, turn: str, *, after: int = 0, session: Session) -> None:
        self.of_run: dict[int, set[int]] = {}
        """The requests that name a run, by its id."""
        self.of_dag: dict[str, set[int]] = {}
        """The requests for a whole Dag."""
        self.since: datetime | None = None
        """When the oldest request of a Dag that can run was made."""
        self._session = session
        self._budget = budget
        self._turn = turn
        self._looked_at: dict[str, queue.WaitingDag] = {}
        self._served: set[str] = set()
        self._untried: dict[str, dict[int, None]] = {}
        self._tried: set[int] = set()
        self._per_dag = 0
        self._looks = 0

        # Where the last loop met a long queue, more of these rows would be read for nothing.
        most = min(FEW, budget + 1) if turn else budget + 1
        rows = queue.oldest(most, after=after, session=session)
        if len(rows) == most <= budget and not any(can_run for _, can_run in rows):
            # Dags that cannot run may keep so many requests for ever: they do not make the queue a long one.
            most = budget + 1
            rows = queue.oldest(most, after=after, session=session)
        self._read_whole = len(rows) < most
        self.since = min((request.created_at for request, can_run in rows if can_run), default=None)
        if self._read_whole:
            self._add(request for request, can_run in rows if can_run)
        else:
            self._look_at_dags()
            self._look_deeper()

    @property
    def is_nothing(self) -> bool:
        """Whether no request of a Dag that can run waits."""
        return self._read_whole and not self.of_run and not self.of_dag

    def take(self, count: int) -> list[int]:
        """Return up to *count* runs asked for that this loop has not tried yet, Dags in turn."""
        taken: list[int] = []
        while len(taken) < count:
            for dag_id, apdr_id in in_turn({dag_id: list(runs) for dag_id, runs in self._untried.items()}):
                if len(taken) == count:
                    break
                taken.append(apdr_id)
                self._tried.add(apdr_id)
                self._served.add(dag_id)
                del self._untried[dag_id][apdr_id]
            if len(taken) < count and not self._look_deeper():
                break
        return taken

    @property
    def turn(self) -> str:
        """
        The Dag behind which the next loop goes on: the last one before the first whose runs got nothing.

        Empty after a queue that was read whole: it had all that waits.
        """
        turn = "" if self._read_whole else self._turn
        for dag_id in self._looked_at:
            if self._untried.get(dag_id) and dag_id not in self._served:
                break
            turn = dag_id
        return turn

    def _look_at_dags(self) -> None:
        """Look at Dags in turn until the budget has enough of them; past those that cannot run, which may be many."""
        after, from_the_start = self._turn, False
        for _ in range(LOOKS):
            page = queue.dags_waiting(after, self._budget, session=self._session)
            new = {dag.dag_id: dag for dag in page if dag.dag_id not in self._looked_at}
            self._looked_at.update(new)
            if sum(dag.can_run for dag in self._looked_at.values()) >= self._budget:
                break
            if len(page) == self._budget and len(new) == len(page):
                after = page[-1].dag_id
            elif from_the_start or not self._turn:
                break
            else:
                after, from_the_start = "", True

    def _look_deeper(self) -> bool:
        """Read the oldest requests of those Dags, the next time more of each. Whether there was something new."""
        dags = [dag for dag in self._looked_at.values() if dag.can_run]
        while not self._read_whole and dags and self._looks < LOOKS:
            self._looks += 1
            self._per_dag = self._per_dag * DEEPER or ceil(self._budget / len(dags))
            dag_ids = [dag.dag_id for dag in dags]
            # Keep the turn: the first Dag looked at comes first.
            self._untried = {dag_id: self._untried.get(dag_id, {}) for dag_id in dag_ids}
            if self._per_dag == 1:
                requests = sorted(dag.oldest for dag in dags)
            else:
                requests = queue.oldest_of_dags(dag_ids, self._per_dag, session=self._session)
            if self._add(requests):
                return True
        return False

    def _add(self, requests: Iterable[Request]) -> bool:
        """Note requests, the oldest first; whether they name a run that was not named yet."""
        new = False
        for request in requests:
            if self.since is None or request.created_at < self.since:
                self.since = request.created_at
            if request.apdr_id is None:
                self.of_dag.setdefault(request.dag_id, set()).add(request.id)
                continue
            self.of_run.setdefault(request.apdr_id, set()).add(request.id)
            runs = self._untried.setdefault(request.dag_id, {})
            if request.apdr_id not in self._tried and request.apdr_id not in runs:
                runs[request.apdr_id] = None
                new = True
        return new
