"""SQL over the request table (spec 5 and 7), and every statement of the step on each dialect."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import mysql, postgresql, sqlite

from airflow._shared.timezones import timezone
from airflow.jobs.asset_partition_wake import claim, queue
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake

from tests_common.db import recorded_statements
from tests_common.factories import ask, asked, insert_dags

pytestmark = pytest.mark.usefixtures("db")


class NoRows(list):
    """An empty result."""

    def all(self) -> NoRows:
        return self

    def one(self) -> tuple[str, ...]:
        return ("on", "on", "on")  # PostgreSQL's settings


class Compiling:
    """Stands in for a session of a dialect: notes what each statement would be there."""

    def __init__(self, dialect: Any) -> None:
        self.bind = self
        self.dialect = dialect
        self.statements: list[str] = []

    def get_bind(self) -> Compiling:
        return self

    def execute(self, statement: Any, *args: Any, **kwargs: Any) -> NoRows:
        self.statements.append(" ".join(str(statement.compile(dialect=self.dialect)).split()))
        return NoRows()

    scalars = execute

    def scalar(self, statement: Any) -> None:
        self.execute(statement)


DIALECTS = {"sqlite": sqlite.dialect(), "postgresql": postgresql.dialect(), "mysql": mysql.dialect()}
# The dialect knows only once its engine has connected.
DIALECTS["mysql"].supports_for_update_of = True

STATEMENTS = {
    "oldest": lambda session: queue.oldest(5, session=session),
    "dags_waiting": lambda session: queue.dags_waiting("", 5, session=session),
    "oldest_of_dags": lambda session: queue.oldest_of_dags(["dag"], 5, session=session),
    "delete": lambda session: queue._delete([1], session=session),
    "settle": lambda session: queue.settle([1], session=session),
    "batch": lambda session: queue._batch("dag", session=session),
    "merge": lambda session: queue._merge("dag", dict.fromkeys((1, 2), timezone.utcnow()), session=session),
    "newest_run": lambda session: claim.newest_run(session=session),
    "pending_of_dag": lambda session: claim.pending_of_dag("dag", after=1, upto=2, limit=3, session=session),
    "pending_of_later_dags": lambda session: claim.pending_of_later_dags(
        "dag", upto=2, limit=3, session=session
    ),
    "lock": lambda session: claim.lock([1], session=session),
    "still_pending": lambda session: claim.still_pending([1], session=session),
}


def compiled(statement: str, dialect: str) -> list[str]:
    session = Compiling(DIALECTS[dialect])
    STATEMENTS[statement](session)
    return session.statements


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_statements_compile(statement, dialect):
    """Each statement of the step can be said on each database."""
    assert compiled(statement, dialect)


@pytest.mark.parametrize(
    ("dialect", "locks"),
    [
        ("sqlite", ""),
        ("postgresql", " FOR UPDATE OF asset_partition_dag_run SKIP LOCKED"),
        ("mysql", " FOR UPDATE OF asset_partition_dag_run SKIP LOCKED"),
    ],
)
def test_runs_are_locked(dialect, locks):
    """Runs are locked by primary key without waiting for a peer, and never sorted by the database."""
    (statement,) = compiled("lock", dialect)
    assert locks == statement[len(statement.partition(" FOR UPDATE")[0]) :]
    assert "asset_partition_dag_run.id IN" in statement
    assert "ORDER BY" not in statement
    assert "LIMIT" not in statement


@pytest.mark.parametrize("dialect", DIALECTS)
def test_requests_are_deleted_by_primary_key(dialect):
    """Requests are deleted by id alone, never by range: a smaller id can be committed later."""
    (statement,) = compiled("delete", dialect)
    assert "FROM asset_partition_dag_run_wake WHERE asset_partition_dag_run_wake.id IN" in statement
    assert (dialect == "mysql") == ("INDEX(asset_partition_dag_run_wake PRIMARY)" in statement)
    for sent in [statement, *compiled("settle", dialect)]:
        assert "<" not in sent
        assert "BETWEEN" not in sent


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_settling_waits_for_nobody(dialect):
    """Requests that a peer is deleting are skipped, not waited for."""
    assert "FOR UPDATE SKIP LOCKED" in compiled("settle", dialect)[0]


def test_oldest(session):
    """The oldest requests come by id, each told whether its Dag can run."""
    insert_dags("runs")
    insert_dags("paused", is_paused=True)
    insert_dags("stale", is_stale=True)
    ids = [ask(dag_id, [7])[0] for dag_id in ("paused", "runs", "stale", "gone", "runs")]
    ids += ask("runs")

    rows = queue.oldest(10, session=session)
    assert ids == [request.id for request, _ in rows]
    assert [7, 7, 7, 7, 7, None] == [request.apdr_id for request, _ in rows]
    assert [False, True, False, False, True, True] == [can_run for _, can_run in rows]
    assert ids[:2] == [request.id for request, _ in queue.oldest(2, session=session)]


def test_dags_waiting(session):
    """Each Dag with requests comes once, by its id, from behind the cursor."""
    insert_dags("b", "d")
    insert_dags("c", is_paused=True)
    insert_dags("e", is_stale=True)
    oldest: dict[str, int] = {}
    for dag_id in "dbcbae":
        oldest.setdefault(dag_id, ask(dag_id, [1, 2, None])[0])

    waiting = queue.dags_waiting("", 10, session=session)
    assert list("abcde") == [dag.dag_id for dag in waiting]
    assert oldest == {dag.dag_id: dag.oldest.id for dag in waiting}
    assert {1} == {dag.oldest.apdr_id for dag in waiting}
    assert ["a"] == [dag.dag_id for dag in waiting if not dag.known]
    assert ["b", "d"] == [dag.dag_id for dag in waiting if dag.can_run]
    assert waiting[1].oldest.created_at == session.get_one(Wake, oldest["b"]).created_at
    assert ["c", "d"] == [dag.dag_id for dag in queue.dags_waiting("b", 2, session=session)]
    assert ["c"] == [dag.dag_id for dag in queue.dags_waiting("bb", 1, session=session)]
    assert [] == queue.dags_waiting("e", 10, session=session)


def test_dags_waiting_costs_one_statement(session):
    """A page of Dags is one statement, and none has to read a Dag's flood."""
    insert_dags("a", "b")
    ask("a", range(500))
    ask("b", range(500))
    session.connection()
    with recorded_statements("asset_partition_dag_run_wake") as statements:
        assert 2 == len(queue.dags_waiting("", 10, session=session))
    assert 1 == len(statements)


@pytest.mark.backend("postgresql")
def test_dags_waiting_leaves_the_settings_as_they_were(session):
    """What the planner is told for the walk does not hold for the rest of the transaction."""
    names = ("enable_bitmapscan", "enable_seqscan", "enable_sort")
    session.execute(text("SET LOCAL enable_sort = off"))
    before = [session.scalar(text(f"SHOW {name}")) for name in names]
    queue.dags_waiting("", 10, session=session)
    assert ["on", "on", "off"] == before == [session.scalar(text(f"SHOW {name}")) for name in names]


def test_oldest_of_dags(session):
    """So many of the oldest requests of each Dag come, in the order of their ids."""
    insert_dags("a", "b", "c")
    first = ask("a", [1, 2])
    second = ask("b", [3, 4, 5])
    third = ask("a", [6])
    ask("c", [7])

    def read(dag_ids: list[str], per_dag: int) -> list[int]:
        return [request.id for request in queue.oldest_of_dags(dag_ids, per_dag, session=session)]

    assert [*first, *second[:2]] == read(["b", "a"], 2)
    assert [*first, *second, *third] == read(["b", "a"], 10)
    assert [second[0]] == read(["b"], 1)
    assert [] == read(["no such Dag"], 1)


def test_settle_deletes_what_it_is_told(session, monkeypatch):
    """Exactly the named requests are deleted: not the older, the newer or the one between."""
    monkeypatch.setattr(queue, "BATCH", 2)
    ids = ask("dag", range(9))
    named = {ids[1], ids[2], ids[4], ids[5], ids[7]}
    with recorded_statements("DELETE") as deletes:
        queue.settle(named, session=session)
    session.commit()
    assert 3 == len(deletes)
    assert [apdr_id for apdr_id in ids if apdr_id not in named] == asked()


def test_settle_is_not_surprised_by_what_is_gone(session):
    """A request that a peer deleted is no error."""
    ids = ask("dag", range(2))
    queue.settle([*ids, ids[-1] + 1000], session=session)
    session.commit()
    assert [] == asked()
