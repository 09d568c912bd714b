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
SQL over the request table: read, settle, tidy (spec 5 and 7).

Each read returns a number of rows that depends on its limit, not on how many requests wait. Which read a loop needs is
decided in :mod:`.waiting`.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import Integer, any_, bindparam, delete, func, insert, select, true

from airflow.jobs.asset_partition_wake.agenda import Request
from airflow.jobs.asset_partition_wake.claim import dag_state, in_ids, these
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake, WakeReason
from airflow.models.dag import DagModel
from airflow.utils.helpers import chunks
from airflow.utils.sqlalchemy import get_dialect_name, with_row_locks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from datetime import datetime

    from sqlalchemy import ColumnElement, Delete, FromClause, Select
    from sqlalchemy.orm import Session

Wake = AssetPartitionDagRunWake

_MOST = bindparam("most", type_=Integer)

BATCH = 1000
"""Rows of one DELETE, and of one transaction of :func:`tidy`."""


class WaitingDag(NamedTuple):
    """A Dag with requests. *known*: it is in the ``dag`` table; *can_run*: its pending runs may fire."""

    oldest: Request
    known: bool
    can_run: bool

    @property
    def dag_id(self) -> str:
        return self.oldest.dag_id


def oldest(limit: int, *, after: int = 0, session: Session) -> list[tuple[Request, bool]]:
    """
    Return the oldest requests behind *after*, each with whether its Dag can run. All that an idle scheduler does.

    The Dag is looked up by its primary key for each row read, so that an empty queue costs nothing, however many Dags
    there are.
    """
    rows = session.execute(_oldest(), {"most": limit, "after": after})
    return [(Request(*row[:4]), row[4] == 1) for row in rows]


@cache
def _oldest() -> Select:
    """Build the statement once, of columns rather than attributes: that took longer than to send it."""
    wake = Wake.__table__
    return (
        select(*_columns(wake), dag_state(wake.c.target_dag_id))
        .where(wake.c.id > bindparam("after"))
        .order_by(wake.c.id)
        .limit(_MOST)
    )


def draw_id(*, session: Session) -> int:
    """
    Draw an id as a writer does, and leave nothing behind.

    A request that appears with a smaller id from now on is one whose transaction is open at this moment.
    """
    marker = Wake(target_dag_id="", reason="")
    session.add(marker)
    session.flush()
    _delete([marker.id], session=session)
    session.expunge(marker)
    return marker.id


def dags_waiting(after: str, limit: int, *, session: Session) -> list[WaitingDag]:
    """Return the next Dags with requests behind *after*: one probe of the index a Dag, however many it has."""
    dialect = get_dialect_name(session)
    oldest = _loose_scan() if dialect == "mysql" else _skip_scan(dialect)
    with _in_order_of_indexes(session) if dialect == "postgresql" else nullcontext():
        rows = session.execute(oldest, {"after": after, "most": limit}).all()
    return [WaitingDag(Request(*row), state is not None, state == 1) for *row, state in rows]


@contextmanager
def _in_order_of_indexes(session: Session) -> Iterator[None]:
    """
    Have PostgreSQL walk along indexes, whatever it believes about the size of the queue.

    Where its statistics were taken when the queue had just been drained, it expects one row, and sorts all that wait
    for each Dag: minutes for 300,000 requests.
    """
    names = ("enable_bitmapscan", "enable_seqscan", "enable_sort")
    was = [func.current_setting(name) for name in names]
    # Evaluated from left to right: what was, before it is set.
    before = session.execute(select(*was, *(func.set_config(name, "off", true()) for name in names))).one()
    yield
    session.execute(
        select(*(func.set_config(name, value, true()) for name, value in zip(names, before, strict=False)))
    )


@cache
def _loose_scan() -> Select:
    """
    MySQL steps from group to group by itself ("Using index for group-by"); the requests come by primary key.

    A queue that was empty a moment ago it may read to its end, until it takes statistics: by itself, within seconds.
    """
    wake = Wake.__table__
    walk = (
        select(func.min(wake.c.id).label("id"))
        .where(wake.c.target_dag_id > bindparam("after"))
        .group_by(wake.c.target_dag_id)
        .order_by(wake.c.target_dag_id)
        .limit(_MOST)
        .subquery("walk")
    )
    oldest = wake.alias("oldest")
    return (
        select(*_columns(oldest), dag_state(oldest.c.target_dag_id))
        .select_from(walk.join(oldest, oldest.c.id == walk.c.id))
        .with_hint(oldest, "FORCE INDEX (PRIMARY)", "mysql")
        .prefix_with("STRAIGHT_JOIN", dialect="mysql")
    )


@cache
def _skip_scan(dialect: str) -> Select:
    """PostgreSQL and SQLite do so by a recursive query, which goes on for as long as rows are taken from it."""
    first = _first_behind(bindparam("after")).subquery("first")
    walk = select(*_columns(first)).cte("walk", recursive=True)
    behind = _first_behind(walk.c.target_dag_id)
    if dialect == "sqlite":  # has no LATERAL
        wake = Wake.__table__
        id_behind = behind.with_only_columns(behind.selected_columns.id).scalar_subquery()
        step = select(*_columns(wake)).join(walk, wake.c.id == id_behind)
    else:
        following = behind.lateral("following")
        step = select(*_columns(following)).join_from(walk, following, true())
    walk = walk.union_all(step)
    return select(walk, dag_state(walk.c.target_dag_id)).limit(_MOST)


def oldest_of_dags(dag_ids: Collection[str], per_dag: int, *, session: Session) -> list[Request]:
    """
    Return the *per_dag* oldest requests of each Dag: one range of ``idx_apdr_wake_target_dag_id`` a Dag.

    That index has to be the one: along the primary key, the search for a quiet Dag reads the whole queue. On PostgreSQL a
    range in place of ``=`` leaves no other in the order asked for; on MySQL it is named (27 ms in place of 552 for 500
    of 2,300 Dags with 1,000,000 requests), and only ids are read in the lateral, which it covers.
    """
    dag = DagModel.__table__
    wake = Wake.__table__
    first = wake.alias("first")
    in_order = select(*_columns(first)).order_by(first.c.target_dag_id, first.c.id).limit(per_dag)
    of_dag = in_order.where(first.c.target_dag_id >= dag.c.dag_id, first.c.target_dag_id <= dag.c.dag_id)
    match get_dialect_name(session):
        case "mysql":
            ids = (
                in_order.where(first.c.target_dag_id == dag.c.dag_id)
                .with_only_columns(first.c.id)
                .with_hint(first, "FORCE INDEX (idx_apdr_wake_target_dag_id)", "mysql")
                .lateral("ids")
            )
            source, found = dag.join(ids, true()).join(wake, wake.c.id == ids.c.id), wake
        case "sqlite":  # has no LATERAL
            ids_of_dag = of_dag.with_only_columns(first.c.id).correlate(dag)
            source, found = dag.join(wake, wake.c.id.in_(ids_of_dag)), wake
        case _:
            oldest = of_dag.lateral("oldest")
            source, found = dag.join(oldest, true()), oldest
    rows = session.execute(
        select(*_columns(found)).select_from(source).where(dag.c.dag_id.in_(dag_ids)).order_by(found.c.id)
    )
    return [Request(*row) for row in rows]


def settle(request_ids: Collection[int], *, session: Session) -> None:
    """
    Delete requests by primary key, never by range: a smaller id can be committed after a larger one (spec 7).

    One that a peer is deleting at this moment is left to the peer: no scheduler waits for another.
    """
    for ids in chunks(sorted(request_ids), BATCH):
        free = with_row_locks(_ids(), session=session, skip_locked=True, key_share=False)
        match get_dialect_name(session):
            case "sqlite":  # one writer: nobody to wait for
                _delete(ids, session=session)
            case "postgresql":
                # An array, since from IN it may look through the whole queue for what it has locked.
                locked = func.array(free.scalar_subquery())
                session.execute(delete(Wake.__table__).where(Wake.id == any_(locked)), these(ids))
            case _:  # MySQL deletes from no table that a subquery reads.
                _delete(session.scalars(free, these(ids)).all(), session=session)


def tidy(*, session: Session) -> tuple[int, int]:
    """
    Drop the requests of Dags that are gone; merge those of each Dag that cannot run into one for the Dag (spec 7).

    Commits each batch on its own. Safe beside other schedulers that do the same: each takes the requests that it can lock.

    :param session: a session of its own
    :return: the numbers of requests dropped and merged away
    """
    dropped = merged = 0
    for dag in _all_dags_waiting(session=session):
        if not dag.known:
            while batch := _batch(dag.dag_id, session=session):
                # Asked again once the requests are locked: one that came with the return of its Dag stays.
                if _is_known(dag.dag_id, session=session):
                    break
                _delete(batch, session=session)
                session.commit()
                dropped += len(batch)
        elif not dag.can_run:
            while len(batch := _batch(dag.dag_id, session=session)) > 1:
                _merge(dag.dag_id, batch, session=session)
                session.commit()
                merged += len(batch) - 1
        session.commit()
    return dropped, merged


def _all_dags_waiting(*, session: Session) -> Iterator[WaitingDag]:
    after = ""
    while page := dags_waiting(after, BATCH, session=session):
        yield from page
        after = page[-1].dag_id


def _is_known(dag_id: str, *, session: Session) -> bool:
    return session.scalar(select(DagModel.dag_id).where(DagModel.dag_id == dag_id)) is not None


def _batch(dag_id: str, *, session: Session) -> dict[int, datetime]:
    """Lock the oldest requests of a Dag that no peer has locked; return when each was made, by id."""
    oldest = with_row_locks(
        select(Wake.id, Wake.created_at).where(Wake.target_dag_id == dag_id).order_by(Wake.id).limit(BATCH),
        session=session,
        skip_locked=True,
        key_share=False,
    )
    return {request_id: created_at for request_id, created_at in session.execute(oldest)}  # noqa: C416


def _merge(dag_id: str, batch: dict[int, datetime], *, session: Session) -> None:
    """Put one request for the whole Dag, as old as the oldest, in the place of many."""
    merged = {"target_dag_id": dag_id, "reason": WakeReason.MERGED.value, "created_at": min(batch.values())}
    session.execute(insert(Wake).values(merged))
    _delete(batch, session=session)


@cache
def _ids() -> Select:
    return select(Wake.id).where(in_ids(Wake.id)).with_hint(Wake, "FORCE INDEX (PRIMARY)", "mysql")


def _delete(ids: Collection[int], *, session: Session) -> None:
    if ids:
        session.execute(_deletion(), these(ids))


@cache
def _deletion() -> Delete:
    # MySQL scans a short table, and waits for the rows that peers have locked: hold it to the primary key.
    hint = f"/*+ INDEX({Wake.__tablename__} PRIMARY) */"
    return delete(Wake.__table__).where(in_ids(Wake.id)).prefix_with(hint, dialect="mysql")


def _first_behind(dag_id: ColumnElement[str]) -> Select:
    """
    Select the oldest request of the next Dag: the first one in the index behind *dag_id*.

    The order is spelled out, so that no plan can go along the primary key.
    """
    wake = Wake.__table__.alias()
    return (
        select(*_columns(wake))
        .where(wake.c.target_dag_id > dag_id)
        .order_by(wake.c.target_dag_id, wake.c.id)
        .limit(1)
    )


def _columns(requests: FromClause) -> list[ColumnElement]:
    """Return the columns of a :class:`Request`."""
    return [requests.c[name] for name in ("id", "apdr_id", "target_dag_id", "created_at")]
