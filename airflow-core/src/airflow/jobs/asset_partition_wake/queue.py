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

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import Integer, bindparam, delete, func, insert, literal, select, true
from sqlalchemy.orm import aliased

from airflow.jobs.asset_partition_wake.agenda import Request
from airflow.jobs.asset_partition_wake.claim import dag_state
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake, WakeReason
from airflow.models.dag import DagModel
from airflow.utils.helpers import chunks
from airflow.utils.sqlalchemy import get_dialect_name, with_row_locks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from sqlalchemy import ColumnElement, ScalarSelect, Select
    from sqlalchemy.orm import Session

Wake = AssetPartitionDagRunWake

BATCH = 1000
"""Rows of one DELETE, and of one transaction of :func:`tidy`."""


class WaitingDag(NamedTuple):
    """A Dag with requests. *known*: it is in the ``dag`` table; *can_run*: its pending runs may fire."""

    dag_id: str
    known: bool
    can_run: bool


def oldest(limit: int, *, session: Session) -> list[tuple[Request, bool]]:
    """
    Return the oldest requests, each with whether its Dag can run. All there is to do on an idle scheduler.

    The Dag is looked up by its primary key for each row read, so that an empty queue costs nothing, however many Dags
    there are.
    """
    rows = session.execute(_oldest(), {"most": limit})
    return [(Request(*row[:4]), row[4] == 1) for row in rows]


@cache
def _oldest() -> Select:
    """Build the statement once, of columns rather than attributes: that took longer than to send it."""
    wake = Wake.__table__.c
    return (
        select(wake.id, wake.apdr_id, wake.target_dag_id, wake.created_at, dag_state(wake.target_dag_id))
        .order_by(wake.id)
        .limit(bindparam("most", type_=Integer))
    )


def dags_waiting(after: str, limit: int, *, session: Session) -> list[WaitingDag]:
    """
    Return the next Dags with requests behind *after*: one probe of the index a Dag, however many requests it has.

    MySQL steps from group to group by itself ("Using index for group-by"); the others do so by a recursive query.
    """
    if get_dialect_name(session) == "mysql":
        walk = (
            select(Wake.target_dag_id.label("dag_id"))
            .where(Wake.target_dag_id > after)
            .group_by(Wake.target_dag_id)
            .order_by(Wake.target_dag_id)
            .limit(limit)
            .subquery("walk")
        )
    else:
        walk = select(_next_dag(literal(after)).label("dag_id")).cte("walk", recursive=True)
        walk = walk.union_all(select(_next_dag(walk.c.dag_id)).where(walk.c.dag_id.is_not(None)))
    rows = session.execute(
        select(walk.c.dag_id, dag_state(walk.c.dag_id)).where(walk.c.dag_id.is_not(None)).limit(limit)
    )
    return [WaitingDag(dag_id, state is not None, state == 1) for dag_id, state in rows]


def oldest_of_dags(dag_ids: Collection[str], per_dag: int, *, session: Session) -> list[Request]:
    """Return the *per_dag* oldest requests of each Dag: one range of the index a Dag."""
    first = aliased(Wake)
    first_ids = (
        select(first.id).where(first.target_dag_id == DagModel.dag_id).order_by(first.id).limit(per_dag)
    )
    rows = select(Wake.id, Wake.apdr_id, Wake.target_dag_id, Wake.created_at).select_from(DagModel)
    if get_dialect_name(session) == "sqlite":  # has no LATERAL
        rows = rows.join(Wake, Wake.id.in_(first_ids.correlate(DagModel)))
    else:
        lateral = first_ids.lateral("first")
        rows = rows.join(lateral, true()).join(Wake, Wake.id == lateral.c.id)
    return [
        Request(*row) for row in session.execute(rows.where(DagModel.dag_id.in_(dag_ids)).order_by(Wake.id))
    ]


def settle(request_ids: Collection[int], *, session: Session) -> None:
    """
    Delete requests by primary key, never by range: a smaller id can be committed after a larger one (spec 7).

    One that a peer is deleting at this moment is left to the peer: no scheduler waits for another.
    """
    for ids in chunks(sorted(request_ids), BATCH):
        _delete(_lock(ids, session=session), session=session)


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
            while ids := _batch(dag.dag_id, session=session):
                _delete(ids, session=session)
                session.commit()
                dropped += len(ids)
        elif not dag.can_run:
            while len(ids := _batch(dag.dag_id, session=session)) > 1:
                _merge(dag.dag_id, ids, session=session)
                session.commit()
                merged += len(ids) - 1
        session.commit()
    return dropped, merged


def _all_dags_waiting(*, session: Session) -> Iterator[WaitingDag]:
    after = ""
    while page := dags_waiting(after, BATCH, session=session):
        yield from page
        after = page[-1].dag_id


def _batch(dag_id: str, *, session: Session) -> list[int]:
    """Lock and return the oldest requests of a Dag that no peer has locked."""
    return list(
        session.scalars(
            with_row_locks(
                select(Wake.id).where(Wake.target_dag_id == dag_id).order_by(Wake.id).limit(BATCH),
                session=session,
                skip_locked=True,
                key_share=False,
            )
        )
    )


def _merge(dag_id: str, ids: list[int], *, session: Session) -> None:
    """Put one request for the whole Dag, as old as the oldest, in the place of many."""
    since = session.scalar(select(func.min(Wake.created_at)).where(Wake.id.in_(ids)))
    session.execute(
        insert(Wake).values(
            apdr_id=None, target_dag_id=dag_id, reason=WakeReason.MERGED.value, created_at=since
        )
    )
    _delete(ids, session=session)


def _lock(ids: list[int], *, session: Session) -> list[int]:
    if get_dialect_name(session) == "sqlite":  # one writer: nothing to lock, and nobody to wait for
        return ids
    return list(
        session.scalars(
            with_row_locks(
                select(Wake.id).where(Wake.id.in_(ids)), session=session, skip_locked=True, key_share=False
            )
        )
    )


def _delete(ids: list[int], *, session: Session) -> None:
    if ids:
        session.execute(
            delete(Wake).where(Wake.id.in_(ids)), execution_options={"synchronize_session": False}
        )


def _next_dag(after: ColumnElement[str]) -> ScalarSelect[str]:
    behind = aliased(Wake)
    return (
        select(behind.target_dag_id)
        .where(behind.target_dag_id > after)
        .order_by(behind.target_dag_id)
        .limit(1)
        .scalar_subquery()
    )
