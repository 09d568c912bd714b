"""A process that measures inside one environment, on one database, what the parent asks for. See :mod:`.workers`.

One JSON object a line comes in and one goes out. Times are in seconds.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Integer, delete, event, func, insert, literal, select, text
from sqlalchemy.orm import Session

from _lib.bench import population
from _lib.bench.population import engine
from _lib.bench.sizes import Sizes
from airflow import settings
from airflow._shared.timezones import timezone
from airflow.jobs.job import Job
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
from airflow.models.asset import AssetPartitionDagRun, PartitionedAssetKeyLog
from airflow.models.dag import DagModel

from tests_common.factories import emit

APDR = AssetPartitionDagRun
BUDGET = 500
NEVER = float("inf")


class Claimed(Exception):
    """Stock's claim is over: what is evaluated after it is not measured."""


class Bench:
    """What the parent can ask for: each public method."""

    def __init__(self) -> None:
        self.runner: Any = SchedulerJobRunner(job=Job())
        self.ours = hasattr(self.runner, "_asset_partition_wake")
        self.snapshot: Any = None
        self.no_pass()

    # -- the population ------------------------------------------------------------------------------------------

    def create(self, sizes: dict[str, int]) -> float:
        """Fill an empty database; return how long it took."""
        started = time.perf_counter()
        population.create(Sizes(**sizes), progress)
        return time.perf_counter() - started

    def create_dag(self) -> float:
        """Have one Dag and nothing else."""
        started = time.perf_counter()
        population.consumer(population.name(0), population.asset(), population.day_rollup())
        return time.perf_counter() - started

    def analyze(self) -> None:
        """Bring the planner's statistics up to date."""
        population.analyze()

    def migrate(self) -> float:
        """Migrate to the newest schema; return how long it took."""
        from airflow.utils.db import upgradedb

        started = time.perf_counter()
        upgradedb()
        return time.perf_counter() - started

    def satisfy(self, count: int) -> None:
        """Complete the oldest pending runs."""
        population.key_logs(hours=tuple(range(1, 24)), count=count)
        population.analyze(PartitionedAssetKeyLog.__tablename__)

    def unsatisfy(self) -> None:
        """Undo `satisfy`."""
        with engine().begin() as connection:
            connection.execute(
                delete(population.KEY_LOG).where(
                    ~population.KEY_LOG.c.source_partition_key.endswith("T00:00:00")
                )
            )
        population.analyze(PartitionedAssetKeyLog.__tablename__)

    # -- requests ------------------------------------------------------------------------------------------------

    def fill(self, count: int, kind: str = "spread", analyze: bool = True) -> int:
        """
        Write requests in place of those that are there; return for how many runs they are.

        Of more than a loop can evaluate, some loops have had their turn.

        :param kind: ``spread``: over pending runs that can fire; ``oldest``: for the oldest of them, in as many Dags; ``one
            Dag``: all of the largest; ``whole Dag``: for all of its runs
        """
        self.clear()
        wake = self.wake
        if kind == "whole Dag":
            with engine().begin() as connection:
                connection.execute(insert(wake), [self._request_for_dag() for _ in range(count)])
            return 0
        can_run = (
            select(APDR.id, APDR.target_dag_id, APDR.created_at)
            .join(DagModel, DagModel.dag_id == APDR.target_dag_id)
            .where(APDR.created_dag_run_id.is_(None), ~DagModel.is_paused, ~DagModel.is_stale)
        )
        if kind == "one Dag":
            can_run = can_run.where(APDR.target_dag_id == population.name(0))
        run = can_run.subquery("run")
        with engine().begin() as connection:
            available = connection.scalar(select(func.count()).select_from(run)) or 1
            number = population.NUMBERS.c.number
            # Several requests for each run, as for hour after hour of a day.
            mixed = (run.c.created_at, run.c.id) if kind == "oldest" else (run.c.id % 997, run.c.id)
            requests = (
                select(
                    run.c.id,
                    run.c.target_dag_id,
                    literal("key log"),
                    literal(timezone.utcnow(), wake.c.created_at.type),
                )
                .join(population.NUMBERS, number < -(-count // available))
                .order_by(number, *mixed)
                .limit(count)
            )
            columns = [wake.c.apdr_id, wake.c.target_dag_id, wake.c.reason, wake.c.created_at]
            connection.execute(insert(wake).from_select(columns, requests, include_defaults=False))
        if analyze:
            population.analyze(wake.name)
        self.turn(population.name(0) if count > BUDGET else "")
        return min(count, available)

    def turn(self, dag_id: str = "") -> None:
        """Have the next loop go on behind a Dag; empty: nothing is known of a long queue."""
        self.runner._asset_partition_wake._agenda.turn = dag_id

    def clear(self) -> None:
        """Remove all requests."""
        sqlite = engine().dialect.name == "sqlite"
        with engine().begin() as connection:
            connection.execute(text(f"{'DELETE FROM' if sqlite else 'TRUNCATE TABLE'} {self.wake.name}"))
        population.analyze(self.wake.name)

    @property
    def wake(self) -> Any:
        from airflow.models.asset_partition_wake import AssetPartitionDagRunWake

        return AssetPartitionDagRunWake.__table__

    @staticmethod
    def _request_for_dag() -> dict[str, Any]:
        return {"apdr_id": None, "target_dag_id": population.name(0), "reason": "timetable change"}

    # -- a loop --------------------------------------------------------------------------------------------------

    def select_one(self, times: int) -> list[float]:
        """Measure the least that a session can ask the database."""
        return self._measure(lambda session: session.execute(text("SELECT 1")).scalar(), times)

    def claim(self, times: int) -> list[float]:
        """Measure a loop's claim."""
        return self._measure(self._claim, times)

    def step(self, times: int, pause: float = 0, commit: bool = False) -> list[float]:
        """Measure a loop's whole step, with a pause before each; perhaps commit it, so that it keeps what it learned."""
        return self._measure(self._step, times, pause, commit)

    def count(self, what: str) -> dict[str, int]:
        """Return what a `claim` or `step` does: its statements, the runs it claims, the Dags that get a run."""
        with self._statements() as statements, new_session() as session:
            result = self._claim(session) if what == "claim" else self._step(session)
            session.rollback()
        return {"statements": len(statements), "result": len(result)}

    def no_pass(self) -> None:
        """Have neither pass nor fan-out under way."""
        if self.ours:
            step = self.runner._asset_partition_wake
            step._agenda = type(step._agenda)(step._agenda.resync_interval, next_pass_at=NEVER)

    def due_pass(self, begun: bool = False) -> None:
        """Have a pass due, or in its middle, in each loop that is measured: what is rolled back is not kept."""
        step = self.runner._asset_partition_wake
        step._agenda = type(step._agenda)(step._agenda.resync_interval)
        if begun:
            step._agenda.start_pass(time.monotonic(), upto=2**31 - 1)
            step._agenda.resync.after = (population.name(20), 0)

    def whole_pass(self) -> dict[str, int]:
        """Go through a whole pass, loop by loop; return its loops and runs, and the memory kept between its loops."""
        self.due_pass()
        loops = runs = kept = 0
        tracemalloc.start()
        try:
            while True:
                with new_session() as session:
                    runs += len(self._claim(session))
                    session.commit()
                loops += 1
                agenda = self.runner._asset_partition_wake._agenda
                if agenda.resync is None:
                    break
                kept = max(kept, len(pickle.dumps(agenda)))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.no_pass()
        return {"loops": loops, "runs": runs, "kept": kept, "peak": peak}

    def pass_reads(self, times: int, first: bool) -> list[float]:
        """
        Measure what a pass adds to a loop: reading its tenth of the budget, in the first loop or in one of the middle.

        Each of the runs read is locked and evaluated as any other; that is no cost of the pass.
        """
        from airflow.jobs.asset_partition_wake import claim, sources

        def read(session: Session) -> None:
            agenda = self.runner._asset_partition_wake._agenda.draft()
            started.append(time.perf_counter())
            agenda.start_pass(0, upto=claim.newest_run(session=session))
            if not first:
                agenda.resync.after = (population.name(20), 0)
                started[-1] = time.perf_counter()
            sources.next_of_pass(agenda.resync, BUDGET // 10, session=session)
            ended.append(time.perf_counter())

        started: list[float] = []
        ended: list[float] = []
        self._measure(read, times)
        return [end - start for start, end in zip(started, ended, strict=True)]

    def fan_out_start(self, times: int, number: int) -> list[float]:
        """Measure what starting a fan-out adds to a loop: noting it, and reading a whole loop's runs of the Dag."""
        from airflow.jobs.asset_partition_wake import claim, sources

        def read(session: Session) -> None:
            agenda = self.runner._asset_partition_wake._agenda.draft()
            agenda.start_fan_out(population.name(number), [1], upto=claim.newest_run(session=session))
            sources.next_of_fan_outs(agenda.fan_outs.values(), BUDGET, session=session)

        return self._measure(read, times)

    # -- writers -------------------------------------------------------------------------------------------------

    def write(self, times: int, count: int, number: int = 0) -> list[float]:
        """Measure registering events of new keys of a Dag's asset, as a task's success does; all is rolled back."""
        keys = [
            f"2090-{month:02}-{day:02}T{hour:02}:00:00"
            for month in range(1, 13)
            for day in range(1, 29)
            for hour in (0, 1)
        ]
        chosen = keys[:count]
        return self._measure(lambda session: emit(population.asset(number), *chosen, session=session), times)

    def count_write(self, count: int) -> dict[str, int]:
        """Return the number of statements of `write`, and of its flushes."""
        flushes = []

        def flushed(*args: Any) -> None:
            flushes.append(1)

        event.listen(Session, "after_flush", flushed)
        try:
            with self._statements() as statements:
                self.write(times=1, count=count)
        finally:
            event.remove(Session, "after_flush", flushed)
        return {"statements": len(statements) - 1, "flushes": len(flushes)}

    def churn(self, count: int, each: int = 50_000) -> None:
        """Write requests and delete them, by primary key and in many transactions, as schedulers do."""
        wake = self.wake
        for _ in range(0, count, each):
            with engine().begin() as connection:
                numbers = population.NUMBERS
                other = numbers.alias()
                requests = (
                    select(
                        literal(1, Integer),
                        literal(population.name(0)),
                        literal("key log"),
                        numbers.c.pending_at,
                    )
                    .join(other, literal(True))
                    .limit(each)
                )
                columns = [wake.c.apdr_id, wake.c.target_dag_id, wake.c.reason, wake.c.created_at]
                connection.execute(insert(wake).from_select(columns, requests, include_defaults=False))
            ids = []
            with engine().connect() as connection:
                ids = list(connection.scalars(select(wake.c.id)))
            for start in range(0, len(ids), 1000):
                with engine().begin() as connection:
                    connection.execute(delete(wake).where(wake.c.id.in_(ids[start : start + 1000])))

    def open_snapshot(self) -> None:
        """Have another session see the database as it is now."""
        self.snapshot = engine().connect().execution_options(isolation_level="REPEATABLE READ")
        self.snapshot.scalar(select(func.count()).select_from(self.wake))

    def close_snapshot(self) -> float:
        """End `open_snapshot`, and let the database clean up as it does by itself; return how many seconds it took."""
        self.snapshot.close()
        self.snapshot = None
        started = time.monotonic()
        population.analyze(self.wake.name)
        if engine().dialect.name == "mysql":
            left = text(
                "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"
            )
            with engine().connect() as connection:
                before, now = None, connection.scalar(left)
                while now != before and time.monotonic() - started < 120:
                    time.sleep(2)
                    before, now = now, connection.scalar(left)
        return time.monotonic() - started

    def plans(self, analyze: bool = True) -> list[dict[str, str]]:
        """Return the statements of a claim, each with its plan."""
        with self._statements() as statements, new_session() as session:
            self._claim(session)
            session.rollback()
        plans = []
        for statement, parameters in statements:
            with engine().connect() as connection:
                plan = _explain(connection, statement, parameters, analyze)
                connection.rollback()
            plans.append({"statement": statement, "parameters": str(parameters)[:300], "plan": plan})
        return plans

    def _claim(self, session: Session) -> Any:
        if self.ours:
            return self.runner._asset_partition_wake.claim(BUDGET, session=session)
        scalars = session.scalars

        def claimed(*args: Any, **kwargs: Any) -> Any:
            raise Claimed(scalars(*args, **kwargs).all())

        session.scalars = claimed  # type: ignore[method-assign]
        try:
            return self._step(session)
        except Claimed as end:
            return end.args[0]

    def _step(self, session: Session) -> set[str]:
        return self.runner._create_dagruns_for_partitioned_asset_dags(session)

    def _measure(
        self, act: Callable[[Session], Any], times: int, pause: float = 0, commit: bool = False
    ) -> list[float]:
        """Run something, each time in a session of its own that has a transaction already; then end that."""
        measured = []
        for _ in range(times):
            time.sleep(pause)
            with new_session() as session:
                session.execute(text("SELECT 1"))
                started = time.perf_counter()
                act(session)
                measured.append(time.perf_counter() - started)
                session.commit() if commit else session.rollback()
        return measured

    @contextmanager
    def _statements(self) -> Iterator[list[tuple[str, Any]]]:
        statements: list[tuple[str, Any]] = []

        def record(connection: Any, cursor: Any, statement: str, parameters: Any, *args: Any) -> None:
            statements.append((statement, parameters))

        event.listen(engine(), "before_cursor_execute", record)
        try:
            yield statements
        finally:
            event.remove(engine(), "before_cursor_execute", record)


def new_session() -> Session:
    """Return a session as Airflow makes them, with a connection of its own."""
    assert settings.NonScopedSession is not None
    return settings.NonScopedSession()


def _explain(connection: Any, statement: str, parameters: Any, analyze: bool) -> str:
    dialect = connection.dialect.name
    words = {
        "postgresql": "EXPLAIN (ANALYZE, BUFFERS)",
        "mysql": "EXPLAIN ANALYZE",
        "sqlite": "EXPLAIN QUERY PLAN",
    }
    explain = words[dialect]
    if dialect == "mysql" and not statement.lstrip().upper().startswith(("SELECT", "WITH")):
        explain = "EXPLAIN FORMAT=TREE"
    elif not analyze and dialect != "sqlite":
        explain = "EXPLAIN" if dialect == "postgresql" else "EXPLAIN FORMAT=TREE"
    rows = connection.exec_driver_sql(f"{explain} {statement}", parameters)
    return "\n".join(" ".join(map(str, row)) for row in rows)


def progress(message: str) -> None:
    """Tell the parent how far we are."""
    answer({"progress": message})


def answer(message: dict[str, Any]) -> None:
    """Send one line to the parent."""
    OUT.write(json.dumps(message) + "\n")
    OUT.flush()


def main() -> None:
    bench = Bench()
    gc.collect()
    gc.freeze()
    answer({"result": None})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = getattr(bench, request["call"])(**request["with"])
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        else:
            answer({"result": result})


if __name__ == "__main__":
    # The parent reads what was standard output; what others print goes to the log.
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
