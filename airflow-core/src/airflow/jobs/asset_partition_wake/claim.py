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
SQL over the pending runs: read their ids in bounded steps, lock them by primary key (spec 6).

``idx_apdr_pending`` (``created_dag_run_id``, ``target_dag_id``, ``id``) serves the reads on every database. They name all of
its columns in ORDER BY, so that the order is the index's own also where a database does not count ``IS NULL`` as a constant.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, Integer, and_, bindparam, case, func, literal, select, true
from sqlalchemy.types import UserDefinedType

from airflow.models.asset import AssetPartitionDagRun
from airflow.models.dag import DagModel
from airflow.utils.sqlalchemy import with_row_locks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from sqlalchemy import Dialect, ScalarSelect, Select, SQLColumnExpression
    from sqlalchemy.orm import Session

APDR = AssetPartitionDagRun
PENDING_ORDER = (APDR.created_dag_run_id, APDR.target_dag_id, APDR.id)


def dag_can_run() -> ColumnElement[bool]:
    """Whether a Dag's pending runs may fire: not paused, not stale and, where the base has it, not draining (spec 5)."""
    dag = DagModel.__table__.c
    never = [dag[name] for name in ("is_paused", "is_stale", "is_draining") if name in dag]
    return and_(true(), *(column.is_(False) for column in never))


def dag_state(dag_id: SQLColumnExpression[str]) -> ScalarSelect[int]:
    """
    Return 1 for a Dag that can run, 0 for one that cannot, NULL for one that is gone.

    A scalar subquery costs one look at the primary key for each row read; unlike a join or EXISTS, it leaves no plan that starts
    from the table of Dags, and MySQL unlocks at once a row that fails it.
    """
    return (
        select(case((dag_can_run(), literal(1, Integer)), else_=literal(0, Integer)))
        .where(DagModel.__table__.c.dag_id == dag_id)
        .scalar_subquery()
    )


class _Ids(UserDefinedType):
    """Ids that are written into the statement as one text: a parameter each costs the client as much as the rows."""

    cache_ok = True

    def literal_processor(self, dialect: Dialect) -> Callable[[Collection[int]], str]:
        return lambda ids: f"({', '.join(map(str, ids))})"


def in_ids(column: SQLColumnExpression[int]) -> ColumnElement[bool]:
    """Return ``column IN (ids)``, for a statement that is executed with :func:`these`."""
    return column.bool_op("IN")(bindparam("ids", type_=_Ids, literal_execute=True))


def these(ids: Collection[int]) -> dict[str, list[int]]:
    """Return the parameter for :func:`in_ids`; there must be some."""
    return {"ids": sorted(ids)}


def newest_run(*, session: Session) -> int:
    """Return the highest id of all runs, 0 where there is none. One look at the end of the primary key."""
    return session.scalar(select(func.max(APDR.id))) or 0


def pending_of_dag(dag_id: str, *, after: int, upto: int, limit: int, session: Session) -> list[int]:
    """Return the next ids of a Dag's pending runs, from behind *after* to *upto*. One range of the index."""
    return list(
        session.scalars(
            select(APDR.id)
            .where(
                APDR.created_dag_run_id.is_(None),
                APDR.target_dag_id == dag_id,
                APDR.id > after,
                APDR.id <= upto,
            )
            .order_by(*PENDING_ORDER)
            .limit(limit)
        )
    )


def pending_of_later_dags(
    dag_id: str, *, upto: int, limit: int, session: Session
) -> list[tuple[str, int, bool]]:
    """Return ``(dag_id, id, can_run)`` of the first pending runs of the Dags behind *dag_id*. One range of the index."""
    rows = session.execute(
        select(APDR.target_dag_id, APDR.id, dag_state(APDR.target_dag_id))
        .where(APDR.created_dag_run_id.is_(None), APDR.target_dag_id > dag_id, APDR.id <= upto)
        .order_by(*PENDING_ORDER)
        .limit(limit)
    )
    return [(dag_id, apdr_id, state == 1) for dag_id, apdr_id, state in rows]


def lock(apdr_ids: Collection[int], *, session: Session) -> list[AssetPartitionDagRun]:
    """
    Lock those of the runs that are still pending, whose Dag can run and that no peer has locked.

    No ORDER BY: the caller sorts, since a filesort would make MySQL lock rows before it knows which ones it returns.
    MySQL is held to the primary key, so that it never locks its way through another index. PostgreSQL is given nothing else to
    look up: from a bare ``IS NULL`` it would gather all pending runs in a bitmap first (2 ms for 55,000, and growing).
    Objects that the session holds already are loaded again: a peer may have changed the row.
    """
    if not apdr_ids:
        return []
    runs = with_row_locks(_pending_runs(), session=session, of=APDR, skip_locked=True, key_share=False)
    return list(session.scalars(runs, these(apdr_ids)))


@cache
def _pending_runs() -> Select:
    """Build the statement once: for a few runs, that takes as long as to send it."""
    return (
        select(APDR)
        .where(in_ids(APDR.id), case((APDR.created_dag_run_id.is_(None), dag_state(APDR.target_dag_id))) == 1)
        .with_hint(APDR, "FORCE INDEX (PRIMARY)", "mysql")
        .execution_options(populate_existing=True)
    )


def still_pending(apdr_ids: Collection[int], *, session: Session) -> dict[int, tuple[str, bool]]:
    """
    Return ``{id: (dag_id, can_run)}`` of those of the runs that are pending. The others fired or were deleted.

    Asked about runs that :func:`lock` did not get; one that is pending and can run is locked by a peer.
    """
    if not apdr_ids:
        return {}
    # Whether a run is pending is looked at here: in the statement, it could lead a plan through all pending runs.
    rows = session.execute(
        select(APDR.id, APDR.created_dag_run_id, APDR.target_dag_id, dag_state(APDR.target_dag_id))
        .where(in_ids(APDR.id))
        .with_hint(APDR, "FORCE INDEX (PRIMARY)", "mysql"),
        these(apdr_ids),
    )
    return {apdr_id: (dag_id, state == 1) for apdr_id, fired, dag_id, state in rows if fired is None}
