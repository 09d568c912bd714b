"""
The statements of a loop touch what the budget asks for, whatever waits (issue "Cost: nothing grows with the backlog").

Each statement that a loop sends is counted on a population many times its budget, with fresh statistics, with missing ones, and
with those of a queue that was empty but not cleaned up yet: then PostgreSQL expects one row, however many requests follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from sqlalchemy import delete, event, insert, select, text

from airflow import settings
from airflow._shared.timezones import timezone
from airflow.jobs.asset_partition_wake import claim, queue
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.models.asset import AssetPartitionDagRun
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake
from airflow.models.dagrun import DagRun
from airflow.utils.types import DagRunType

from tests_common.db import clear_db_apdr, new_session
from tests_common.factories import insert_dags

pytestmark = pytest.mark.backend("postgresql", "mysql")

BUDGET = 10
DAGS = 300
PENDING = 2_000
RUNS = 20_000
REQUESTS = 80_000
RUN, WAKE = AssetPartitionDagRun.__tablename__, Wake.__tablename__

TOUCHED = 30 * BUDGET
"""
Rows of both tables that one statement may look at; a scan of either, or a sort of what waits, is far above.

The tables are so much larger than the budget that no sensible plan scans them: below some 400 rows for each one asked for,
PostgreSQL is right to.
"""


LEADING = {"idx_apdr_wake_target_dag_id": "target_dag_id", "idx_apdr_pending": "created_dag_run_id"}
"""The first columns of indexes: without a condition on them, an index is read from end to end."""


class Sent(NamedTuple):
    """A statement that went to the database."""

    sql: str
    parameters: Any

    def __str__(self) -> str:
        return re.sub(r"\s+", " ", re.sub(r"(, %(\(\w+\))?s)+", ", ...", self.sql))


def dag_id(number: int) -> str:
    return f"dag_{number:04}"


@pytest.fixture(scope="module", params=["fresh", "missing", "of an empty queue"])
def statistics(request: pytest.FixtureRequest) -> Iterator[str]:
    """
    What the planner knows of 300 Dags with 20,000 runs and the queue.

    2,000 of the runs are pending, most of them in few Dags; one Dag is paused.
    """
    clear_db_apdr()
    _statistics_are_kept(True)
    try:
        _forget_statistics()
        _populate()
        if request.param != "missing":
            _analyze(RUN)
        if request.param == "of an empty queue":
            _ask([(1, "a_paused")] * (REQUESTS // 4))
            _forget_requests()
            _analyze(WAKE)
        yield request.param
    finally:
        _statistics_are_kept(False)
        clear_db_apdr()


@pytest.fixture
def ask(statistics: str) -> Iterator[Callable[[str], None]]:
    """Return what writes requests of some kind: see :func:`_requests`. They are gone after the test."""

    def write(kind: str) -> None:
        if kind != "idle":
            _ask(_requests(kind))
        if statistics == "fresh":
            _analyze(WAKE, clean_up=True)

    yield write
    _forget_requests()


def _populate() -> None:
    insert_dags(*map(dag_id, range(DAGS)))
    insert_dags("a_paused", is_paused=True)
    now = timezone.utcnow()
    with new_session() as session:
        fired_by = []
        for number in range(DAGS):
            run = DagRun(
                dag_id=dag_id(number), run_id="r", run_type=DagRunType.MANUAL, run_after=now, state="success"
            )
            session.add(run)
            fired_by.append(run)
        session.flush()
        rows = []
        for number in range(RUNS):
            is_pending = number % (RUNS // PENDING) == 0
            # A square has many more Dags of small numbers than of large ones.
            dag = int((number * 7919 % RUNS / RUNS) ** 2 * DAGS)
            rows.append(
                {
                    "target_dag_id": dag_id(dag),
                    "created_dag_run_id": None if is_pending else fired_by[dag].id,
                    "partition_key": str(number),
                    "rollup_fingerprint": {},
                    "created_at": now,
                    "updated_at": now,
                }
            )
        session.execute(insert(AssetPartitionDagRun.__table__), rows)


def _requests(kind: str) -> list[tuple[int | None, str]]:
    """Return requests for most of the pending runs, several each; all of one Dag; few; or for a whole Dag: a quarter of them."""
    runs = select(AssetPartitionDagRun.id, AssetPartitionDagRun.target_dag_id).where(
        AssetPartitionDagRun.created_dag_run_id.is_(None)
    )
    if kind == "one Dag":
        runs = runs.where(AssetPartitionDagRun.target_dag_id == dag_id(0))
    with new_session() as session:
        pending = [tuple(run) for run in session.execute(runs.order_by(AssetPartitionDagRun.id))]
    count = BUDGET - 5 if kind == "few" else REQUESTS // 4
    asked = [pending[number % len(pending)] for number in range(count)]
    if kind == "whole Dag":
        return [(None, dag_id(0))]
    if kind == "paused before":
        return [(1, "a_paused")] * (count // 2) + asked[: count // 2]
    return asked


def _ask(requests: list[tuple[int | None, str]]) -> None:
    rows = [
        {"apdr_id": run, "target_dag_id": dag, "reason": "key log", "created_at": timezone.utcnow()}
        for run, dag in requests
    ]
    with new_session() as session:
        session.execute(insert(Wake.__table__), rows)
        wake = Wake.__table__.c
        columns = [wake.apdr_id, wake.target_dag_id, wake.reason, wake.created_at]
        for _ in range(2 if len(rows) > BUDGET else 0):  # doubles them, which is quicker
            session.execute(insert(Wake.__table__).from_select(columns, select(*columns)))


def _forget_requests() -> None:
    with new_session() as session:
        session.execute(delete(Wake), execution_options={"synchronize_session": False})


def _mysql() -> bool:
    return settings.engine.dialect.name == "mysql"


def _statistics_are_kept(kept: bool) -> None:
    """Have the server take statistics only when it is told to."""
    with settings.engine.begin() as connection:
        for table in (RUN, WAKE):
            if _mysql():
                connection.execute(
                    text(f"ALTER TABLE {table} STATS_AUTO_RECALC = {0 if kept else 'DEFAULT'}")
                )
            else:
                option = "SET (autovacuum_enabled = false)" if kept else "RESET (autovacuum_enabled)"
                connection.execute(text(f"ALTER TABLE {table} {option}"))


def _forget_statistics() -> None:
    """Have both tables as if they had never been looked at."""
    with settings.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in (RUN, WAKE):
            connection.execute(text(f"TRUNCATE TABLE {table}"))
            if not _mysql():
                connection.execute(text(f"DELETE FROM pg_statistic WHERE starelid = '{table}'::regclass"))
            else:
                connection.execute(text(f"ANALYZE TABLE {table}"))


def _analyze(table: str, clean_up: bool = False) -> None:
    """Take statistics; on PostgreSQL perhaps together with a vacuum, as autovacuum does."""
    analyze = "ANALYZE TABLE" if _mysql() else "VACUUM ANALYZE" if clean_up else "ANALYZE"
    with settings.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"{analyze} {table}"))


@contextmanager
def recorded() -> Iterator[list[Sent]]:
    """Record the statements on either table."""
    sent: list[Sent] = []

    def record(connection: Any, cursor: Any, statement: str, parameters: Any, *args: Any) -> None:
        if RUN in statement:
            sent.append(Sent(statement, parameters))

    event.listen(settings.engine, "before_cursor_execute", record)
    try:
        yield sent
    finally:
        event.remove(settings.engine, "before_cursor_execute", record)


def statements_of_loop(step: WakeStep) -> list[Sent]:
    """Return what a claim sends; all is rolled back."""
    with new_session() as session:
        _end_early(session)
        with recorded() as sent:
            step.claim(BUDGET, session=session)
        session.rollback()
    return sent


def _end_early(connection: Any) -> None:
    """Have a statement with a bad plan fail, rather than take minutes."""
    if _mysql():
        connection.execute(text("SET SESSION max_execution_time = 20000"))
    else:
        connection.execute(text("SET LOCAL statement_timeout = '20s'"))


def step_between_passes() -> WakeStep:
    """Return a scheduler's step after its startup pass."""
    step = WakeStep()
    step._agenda.next_pass_at = float("inf")
    step._table_checked = True
    return step


def touched(sent: Sent) -> int:
    """Return how many rows of the two tables a statement looks at."""
    with settings.engine.connect() as connection:
        _end_early(connection)
        if _mysql():
            before = _handler_reads(connection)
            connection.exec_driver_sql(sent.sql, sent.parameters)
            rows = _handler_reads(connection) - before
        else:
            plan = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {sent.sql}", sent.parameters
            ).scalar()
            rows = sum(_rows(node) for node in _nodes(_parsed(plan)))
        connection.rollback()
    return rows


def _handler_reads(connection: Any) -> int:
    """Count rows read by this session, in whatever way; reading the counter adds none."""
    return sum(
        int(value)
        for _, value in connection.exec_driver_sql(
            "SELECT variable_name, variable_value FROM performance_schema.session_status "
            "WHERE variable_name IN ('Handler_read_first', 'Handler_read_key', 'Handler_read_last', "
            "'Handler_read_next', 'Handler_read_prev', 'Handler_read_rnd', 'Handler_read_rnd_next')"
        )
    )


def _parsed(plan: Any) -> dict[str, Any]:
    plan = json.loads(plan) if isinstance(plan, str) else plan
    return plan[0]["Plan"]


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for part in node.get("Plans", ()):
        yield from _nodes(part)


def _rows(node: dict[str, Any]) -> int:
    # What only fills a bitmap names an index, and no table.
    of_bitmap = node["Node Type"] == "Bitmap Index Scan" and node["Index Name"].startswith(
        (RUN, WAKE, *LEADING)
    )
    if not of_bitmap and (node.get("Relation Name") not in (RUN, WAKE) or node["Node Type"] == "ModifyTable"):
        return 0
    first = LEADING.get(node.get("Index Name", ""))
    if first and "Index Cond" in node and first not in node["Index Cond"]:
        return RUNS  # It goes through the whole index, whatever it finds.
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return round((node["Actual Rows"] + removed) * node["Actual Loops"])


def beyond_budget(sent: list[Sent], statistics: str) -> dict[str, int]:
    """
    Return the statements that look at more rows than a few budgets, and how many.

    Known limits are left out, which last until the database takes statistics the next time. PostgreSQL may look for ids along the
    index that has them second, if it believes the queue to be empty: that reads the queue's index once, some 5 ms for 20,000
    requests. MySQL may walk from Dag to Dag along the whole index, if the queue was empty when it opened the table; by itself it
    takes statistics within seconds of a flood.
    """
    known = {
        ("of an empty queue", "postgresql"): f"WHERE {WAKE}.id IN",
        ("of an empty queue", "mysql"): "GROUP BY",
        ("missing", "mysql"): "GROUP BY",
    }.get((statistics, settings.engine.dialect.name))
    return {
        str(one): rows
        for one in sent
        if (rows := touched(one)) > TOUCHED and not (known and known in one.sql and rows < 2 * REQUESTS)
    }


Ask = Callable[[str], None]
LOOPS = ["idle", "few", "most", "one Dag", "whole Dag", "paused before"]


@pytest.mark.parametrize("kind", LOOPS)
def test_loop_touches_what_its_budget_asks_for(kind: str, ask: Ask, statistics: str):
    """No statement of a loop looks at more rows than a few budgets, whatever waits and whatever the statistics say."""
    ask(kind)
    sent = statements_of_loop(step_between_passes())
    assert sent
    assert {} == beyond_budget(sent, statistics)


@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
def test_pass_touches_what_its_budget_asks_for(begun: bool, ask: Ask, statistics: str):
    """The first loop of a pass, and one of the middle, look at no more rows than a few budgets."""
    ask("idle")
    step = WakeStep()
    step._table_checked = True
    if begun:
        step._agenda.start_pass(0, upto=2**31 - 1)
        step._agenda.resync.after = (dag_id(100), 0)
    sent = statements_of_loop(step)
    assert len(sent) > 2
    assert {} == beyond_budget(sent, statistics)


def test_loop_that_misses_runs_touches_what_its_budget_asks_for(ask: Ask, statistics: str):
    """So do a loop's refills, where a peer holds what it asks for first."""
    ask("most")
    with new_session() as peer:
        held = peer.scalars(
            select(AssetPartitionDagRun.id)
            .order_by(AssetPartitionDagRun.id)
            .limit(RUNS // 2)
            .with_for_update()
        ).all()
        assert held
        sent = statements_of_loop(step_between_passes())
        assert len(sent) > 8
        assert {} == beyond_budget(sent, statistics)
        peer.rollback()


def test_locking_touches_what_it_locks(statistics: str):
    """As many runs as a loop may have are looked up by primary key, and not among all that are pending."""
    pending = select(AssetPartitionDagRun.id).where(AssetPartitionDagRun.created_dag_run_id.is_(None))
    with new_session() as session:
        asked = session.scalars(
            pending.order_by(AssetPartitionDagRun.partition_key).limit(PENDING // 4)
        ).all()
        _end_early(session)
        with recorded() as sent:
            assert set(asked) == {run.id for run in claim.lock(asked, session=session)}
        session.rollback()
    assert [True] == [touched(one) <= 3 * len(asked) for one in sent]


def test_tidying_touches_its_batches(ask: Ask, statistics: str, monkeypatch: pytest.MonkeyPatch):
    """No statement of a tidying looks at more than a few batches of requests."""
    monkeypatch.setattr(queue, "BATCH", BUDGET)
    ask("paused before")
    batches = [1, 2, 3]
    with recorded() as sent, new_session() as session, monkeypatch.context() as patch:
        patch.setattr(session, "commit", batches.pop)
        with pytest.raises(IndexError):
            queue.tidy(session=session)
        session.rollback()
    assert len(sent) > 5
    assert {} == beyond_budget(sent, statistics)


@pytest.mark.backend("mysql")
@pytest.mark.parametrize("kind", LOOPS)
def test_mysql_sorts_nothing_that_it_locks(kind: str, ask: Ask):
    """No statement that locks rows has a filesort: it would lock rows before it knows which ones it returns."""
    ask(kind)
    locking = [one for one in statements_of_loop(step_between_passes()) if "FOR UPDATE" in one.sql]
    with settings.engine.connect() as connection:
        for one in locking:
            plan = connection.exec_driver_sql(f"EXPLAIN FORMAT=TRADITIONAL {one.sql}", one.parameters)
            locked = [table for table in plan.mappings() if table["table"] in (RUN, WAKE)]
            assert ["PRIMARY"] == [table["key"] for table in locked]
            assert "filesort" not in locked[0]["Extra"]
            connection.rollback()
    assert bool(locking) == (kind != "idle")


def test_a_statement_that_grows_is_seen(ask: Ask):
    """The measure above counts: a read that orders all requests of a Dag is far above what a loop may touch."""
    ask("one Dag")
    grows = f"SELECT id FROM {WAKE} WHERE target_dag_id = '{dag_id(0)}' ORDER BY created_at, id LIMIT 10"
    assert touched(Sent(grows, {} if not _mysql() else ())) > TOUCHED
