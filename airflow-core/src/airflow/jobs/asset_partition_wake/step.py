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
One loop's step, from top to bottom: read, lock, settle; keep on commit (spec 5 to 7).

Between "lock" and the commit, the scheduler evaluates the runs with Airflow's own code. Requests are read before it, and
deleted in its transaction: one that is written meanwhile survives and asks again, and a loop that fails deletes none.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

import structlog
from sqlalchemy import event, inspect
from sqlalchemy.orm import Session

from airflow._shared.observability.metrics import stats
from airflow._shared.timezones import timezone
from airflow.configuration import conf
from airflow.exceptions import AirflowConfigException, AirflowException
from airflow.jobs.asset_partition_wake import claim, queue, sources
from airflow.jobs.asset_partition_wake.agenda import Agenda, ResyncPass, Shares
from airflow.jobs.asset_partition_wake.waiting import Horizon, Waiting
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.utils.session import create_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import SessionTransaction

    from airflow.models.asset import AssetPartitionDagRun

log = structlog.get_logger(__name__)

REFILLS = 3
"""How often a loop asks again where runs could not be had (spec 6)."""


def resync_interval() -> float:
    """
    Return ``[scheduler] asset_partition_resync_interval``, in seconds (spec 5).

    :raises AirflowConfigException: if it is not a positive number
    """
    section, key = "scheduler", "asset_partition_resync_interval"
    try:
        interval = conf.getfloat(section, key)
    except (AirflowConfigException, ValueError):
        interval = math.nan
    if not 0 < interval < math.inf:
        raise AirflowConfigException(
            f"[{section}] {key} must be a positive number of seconds, not {conf.get(section, key)!r}"
        )
    return interval


class WakeStep:
    """
    Decides which pending asset partitions each loop of one scheduler evaluates.

    :raises AirflowConfigException: if ``[scheduler] asset_partition_resync_interval`` is not a positive number
    """

    def __init__(self) -> None:
        self._agenda = Agenda(resync_interval())
        self._horizon = Horizon()
        self._table_checked = False

    def claim(self, budget: int, *, session: Session) -> list[AssetPartitionDagRun]:
        """
        Lock and return the pending runs that this loop evaluates, oldest first.

        The requests that the evaluation answers are deleted in the session's transaction. What is under way between loops
        moves on, and metrics are sent, only once that transaction has committed.

        :param budget: how many runs at the most
        :param session: the loop's session
        :raises AirflowException: if ``airflow db migrate`` has not been run
        """
        self._check_table(session)
        now = time.monotonic()
        horizon = self._horizon
        after = horizon.after(now)
        waiting = Waiting(budget, self._agenda.turn, after=after, session=session)
        if waiting.is_nothing and not after:
            read_at = time.monotonic()
            horizon = horizon.found_nothing(read_at, read_at - now, session=session)
        if waiting.is_nothing and self._agenda.is_idle(now):

            def keep_idle() -> None:
                self._agenda.turn, self._horizon = waiting.turn, horizon
                stats.gauge("scheduler.asset_partitions.wake_lag", 0)

            _on_commit(session, keep_idle)
            return []

        agenda = self._agenda.draft()
        newest = cache(lambda: claim.newest_run(session=session))
        if agenda.pass_is_due(now):
            started = agenda.start_pass(now, upto=newest())
            log.info("Asset partition resync pass started", kind=started.kind)
        for dag_id, request_ids in waiting.of_dag.items():
            if agenda.wants_fan_out(dag_id):
                agenda.start_fan_out(dag_id, request_ids, upto=newest())

        loop = _Loop(budget, agenda, waiting, session=session)
        loop.fill()

        now = time.monotonic()
        ended = agenda.finish_pass(now)
        for fan_out in agenda.finish_fan_outs():
            loop.answered |= fan_out.request_ids
        agenda.turn = waiting.turn
        queue.settle(loop.answered, session=session)

        def keep() -> None:
            self._agenda, self._horizon = agenda, horizon
            loop.send_metrics(ended, now)

        _on_commit(session, keep)
        return sorted(loop.runs.values(), key=lambda run: (run.created_at, run.id))

    def tidy(self) -> None:
        """Drop and merge requests that no loop may answer (spec 7). Never fails its caller: the next cycle tries again."""
        try:
            with create_session() as session:
                dropped, merged = queue.tidy(session=session)
        except Exception:
            log.exception("Could not tidy the requests for asset partitions; trying again in the next cycle")
            return
        if dropped or merged:
            log.info("Tidied the requests for asset partitions", dropped=dropped, merged=merged)

    def _check_table(self, session: Session) -> None:
        """Say at start what to do, rather than fail in each loop on a table that is not there."""
        if self._table_checked:
            return
        table = AssetPartitionDagRunWake.__tablename__
        version = metadata.version("apache-airflow-core")
        if not inspect(session.connection()).has_table(table):
            raise AirflowException(
                f"The table {table} is missing: run `airflow db migrate` of apache-airflow-core {version} "
                f"before its scheduler is started"
            )
        self._table_checked = True
        log.info(
            "Pending asset partitions are evaluated on request",
            version=version,
            resync_interval=self._agenda.resync_interval,
        )


class _Loop:
    """The runs that one loop has got, and the requests that their evaluation answers."""

    def __init__(self, budget: int, agenda: Agenda, waiting: Waiting, *, session: Session) -> None:
        self.runs: dict[int, AssetPartitionDagRun] = {}
        self.answered: set[int] = set()
        self._budget = budget
        self._agenda = agenda
        self._waiting = waiting
        self._session = session
        self._lag = (timezone.utcnow() - waiting.since).total_seconds() if waiting.since else 0.0
        self._kind = agenda.resync.kind if agenda.resync else ""
        self._of_fan_outs: dict[int, str] = {}
        self._of_pass: set[int] = set()
        self._tried: set[int] = set()
        self._gone: set[int] = set()
        """Fired or deleted: nothing is left to ask."""
        self._left: dict[int, tuple[str, bool]] = {}
        """Pending, but locked by a peer, or of a Dag that cannot run."""

    def fill(self) -> None:
        """Ask for runs, source by source, and lock them; ask for others where some could not be had."""
        shares = self._agenda.shares(self._budget)
        for _ in range(1 + REFILLS):
            if not self._lock(self._ask(shares)):
                break
        for apdr_id in self.runs.keys() | self._gone:
            self.answered |= self._waiting.of_run.get(apdr_id, set())
        self._put_back()

    def _ask(self, shares: Shares) -> set[int]:
        """Take runs not tried yet: each source its share, and what one leaves for the others."""
        room = self._budget - len(self.runs)
        for_fan_outs = max(0, shares.fan_outs - len(self._of_fan_outs))
        for_pass = max(0, shares.resync - len(self._of_pass))

        asked = set(self._waiting.take(room - for_fan_outs - for_pass)) - self._tried
        asked |= self._ask_fan_outs(room - len(asked) - for_pass)
        if self._agenda.resync:
            of_pass = sources.next_of_pass(self._agenda.resync, room - len(asked), session=self._session)
            self._of_pass |= set(of_pass)
            asked |= set(of_pass) - self._tried
        asked |= set(self._waiting.take(room - len(asked))) - self._tried
        asked |= self._ask_fan_outs(room - len(asked))
        self._tried |= asked
        return asked

    def _ask_fan_outs(self, count: int) -> set[int]:
        runs = sources.next_of_fan_outs(self._agenda.fan_outs.values(), count, session=self._session)
        self._of_fan_outs |= runs
        return runs.keys() - self._tried

    def _lock(self, asked: set[int]) -> bool:
        """Lock runs, and see what became of those that could not be had; whether there are any."""
        self.runs.update((run.id, run) for run in claim.lock(asked, session=self._session))
        missing = asked - self.runs.keys()
        pending = claim.still_pending(missing, session=self._session)
        self._left |= pending
        self._gone |= missing - pending.keys()
        return bool(missing)

    def _put_back(self) -> None:
        """Leave runs that could not be had to later: their requests stay, and cursors have not passed them."""
        fan_outs, resync = self._agenda.fan_outs, self._agenda.resync
        for apdr_id, (dag_id, can_run) in self._left.items():
            if apdr_id in self._of_fan_outs and dag_id in fan_outs:
                if can_run:
                    fan_outs[dag_id].held |= {apdr_id}
                else:  # The request for the Dag stays, and asks again once the Dag can run.
                    del fan_outs[dag_id]
            if apdr_id in self._of_pass and resync:
                if can_run:
                    resync.held |= {apdr_id}
                elif resync.after[0] == dag_id:
                    resync.after = (dag_id, resync.upto)

    def send_metrics(self, ended: ResyncPass | None, now: float) -> None:
        """Send what the loop did (spec 8); called once it has committed."""
        stats.gauge("scheduler.asset_partitions.wake_lag", max(0.0, self._lag))
        if self.runs:
            stats.incr("scheduler.asset_partitions.evaluated", len(self.runs))
        resync_fired = [
            run
            for apdr_id, run in self.runs.items()
            if run.created_dag_run_id is not None
            and apdr_id in self._of_pass
            and apdr_id not in self._of_fan_outs
            and apdr_id not in self._waiting.of_run
        ]
        if resync_fired:
            stats.incr(
                "scheduler.asset_partitions.resync_fired", len(resync_fired), tags={"pass": self._kind}
            )
        if ended:
            duration = timedelta(seconds=now - ended.started_at)
            stats.timing("scheduler.asset_partitions.resync_pass_duration", duration)
            log.info("Asset partition resync pass ended", kind=ended.kind, seconds=duration.total_seconds())


def _on_commit(session: Session, callback: Callable[[], None]) -> None:
    """Call back once the session's transaction has committed; never, where it ends in any other way."""
    session.info[_on_commit] = callback


# For every session of the process: to listen to each anew takes longer than an idle loop's statement.
@event.listens_for(Session, "after_commit")
def _committed(session: Session) -> None:
    # Savepoints are announced too.
    if not session.in_nested_transaction() and (callback := session.info.pop(_on_commit, None)):
        callback()


@event.listens_for(Session, "after_transaction_end")
def _ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info.pop(_on_commit, None)
