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
Wake requests: who asks for pending asset partitions to be evaluated.

Whoever changes something that can change the result of a pending
:class:`~airflow.models.asset.AssetPartitionDagRun` inserts a request here in the transaction of the change. The
scheduler (:mod:`airflow.jobs.asset_partition_wake`) evaluates the runs that requests name and deletes the requests that
it had read before the evaluation. An insert never waits: the table has neither a foreign key nor a unique key, and rows
are never updated.
"""

from __future__ import annotations

import json
import zlib
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Index,
    Integer,
    String,
    event,
    insert,
    literal,
    null,
    or_,
    select,
    tuple_,
    union,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from airflow._shared.timezones import timezone
from airflow.models.asset import (
    AssetActive,
    AssetModel,
    AssetPartitionDagRun,
    DagScheduleAssetAliasReference,
    DagScheduleAssetNameReference,
    DagScheduleAssetReference,
    DagScheduleAssetUriReference,
    PartitionedAssetKeyLog,
    alias_association_table,
)
from airflow.models.base import Base, StringID
from airflow.utils.sqlalchemy import UtcDateTime, with_row_locks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sqlalchemy import Insert, Select, SQLColumnExpression
    from sqlalchemy.sql.selectable import CompoundSelect

    from airflow.models.dag_version import DagVersion
    from airflow.serialization.serialized_objects import LazyDeserializedDAG


class WakeReason(str, Enum):
    """Why an evaluation was asked for. For people: the scheduler treats all reasons alike."""

    KEY_LOG = "key log"
    TIMETABLE_CHANGE = "timetable change"
    ASSET_ACTIVATION = "asset activation"
    MERGED = "merged"

    def __str__(self) -> str:
        return self.value


class AssetPartitionDagRunWake(Base):
    """
    A request to evaluate one pending asset partition, or every one of a Dag.

    Ids are never given out twice, so that a scheduler that remembers one cannot delete a later request by it.
    """

    __tablename__ = "asset_partition_dag_run_wake"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    apdr_id: Mapped[int | None] = mapped_column(Integer, nullable=True)
    """The pending run asked about; NULL for every pending run of the Dag."""
    target_dag_id: Mapped[str] = mapped_column(StringID(), nullable=False)
    reason: Mapped[str] = mapped_column(String(20), nullable=False)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=timezone.utcnow, nullable=False)

    __table_args__ = (
        # The oldest requests of one Dag, and the step from one Dag to the next, without reading a long queue.
        Index("idx_apdr_wake_target_dag_id", target_dag_id, id),
        {"sqlite_autoincrement": True},
    )

    def __repr__(self) -> str:
        asked = "every pending run" if self.apdr_id is None else f"run {self.apdr_id}"
        return f"<AssetPartitionDagRunWake {self.id}: {asked} of {self.target_dag_id}, {self.reason}>"


@event.listens_for(Session, "after_flush")
def request_for_key_logs(session: Session, flush_context: Any) -> None:
    """
    Ask for the run of every key log that the flush inserted, in one INSERT (spec 4.1).

    Listens to every session of the process, also to those inside an ``AsyncSession``.
    """
    requests = [
        {
            "apdr_id": key_log.asset_partition_dag_run_id,
            "target_dag_id": key_log.target_dag_id,
            "reason": WakeReason.KEY_LOG.value,
        }
        for key_log in session.new
        # An object left out of this flush (``session.flush(objects)``) has no id yet.
        if isinstance(key_log, PartitionedAssetKeyLog) and key_log.id is not None
    ]
    if requests:
        connection = session.connection(bind_arguments={"mapper": AssetPartitionDagRunWake.__mapper__})
        connection.execute(insert(AssetPartitionDagRunWake.__table__), requests)


def request_for_dags(dag_ids: Select | CompoundSelect, *, reason: WakeReason, session: Session) -> None:
    """
    Ask for every pending run of those of the Dags that are partitioned or that still have pending runs.

    :param dag_ids: a query for Dag ids
    :param reason: what changed
    :param session: the session of the change
    """
    # ``airflow.models.dag`` imports ``airflow.models.asset``, which imports this module.
    from airflow.models.dag import DagModel

    still_pending = (
        select(AssetPartitionDagRun.id)
        .where(
            AssetPartitionDagRun.target_dag_id == DagModel.dag_id,
            AssetPartitionDagRun.created_dag_run_id.is_(None),
        )
        .exists()
    )
    columns: dict[str, SQLColumnExpression] = {
        "apdr_id": null(),
        "target_dag_id": DagModel.dag_id,
        "reason": literal(reason.value),
        "created_at": literal(timezone.utcnow(), UtcDateTime),
    }
    session.execute(
        insert(AssetPartitionDagRunWake).from_select(
            list(columns),
            select(*columns.values()).where(
                DagModel.dag_id.in_(dag_ids), or_(DagModel.timetable_partitioned, still_pending)
            ),
        )
    )


def request_for_timetable_change(
    dag: LazyDeserializedDAG, stored_version: DagVersion | None, *, session: Session
) -> None:
    """
    Ask for every pending run of a Dag whose timetable is about to be stored differently (spec 4.2).

    The timetable holds the asset condition and the partition mappers; nothing else in a definition changes an
    evaluation. Call it before the new definition is written.

    :param dag: the definition that is about to be written
    :param stored_version: the version whose definition is the stored one; None for a Dag without any
    :param session: the session that writes the definition
    """
    from airflow.models.dag import DagModel
    from airflow.models.serialized_dag import SerializedDagModel

    stored = (
        session.execute(
            select(SerializedDagModel._data, SerializedDagModel._data_compressed).where(
                SerializedDagModel.dag_version_id == stored_version.id
            )
        ).one_or_none()
        if stored_version
        else None
    )
    if stored and _timetable(*stored) == _timetable(dag.data, None):
        return
    request_for_dags(
        select(DagModel.dag_id).where(DagModel.dag_id == dag.dag_id),
        reason=WakeReason.TIMETABLE_CHANGE,
        session=session,
    )


def _timetable(data: dict | str | None, compressed: bytes | None) -> str:
    """Return the timetable section of a serialized Dag as text that is equal where the sections are."""
    if compressed:
        data = json.loads(zlib.decompress(compressed))
    elif isinstance(data, str):
        data = json.loads(data)
    definition = data.get("dag", {}) if isinstance(data, dict) else {}
    return json.dumps(definition.get("timetable"), sort_keys=True)


def request_for_activated_assets(assets: Collection[AssetModel], *, session: Session) -> None:
    """
    Ask for the pending runs of the Dags scheduled on assets that have just become active (spec 4.3).

    Key logs of an inactive asset do not count, so a run may be complete the moment its asset is activated.

    :param assets: the newly active assets
    :param session: the session that activated them
    """
    if not assets:
        return
    asset_ids = [asset.id for asset in assets]
    request_for_dags(
        union(
            select(DagScheduleAssetReference.dag_id).where(DagScheduleAssetReference.asset_id.in_(asset_ids)),
            select(DagScheduleAssetNameReference.dag_id).where(
                DagScheduleAssetNameReference.name.in_([asset.name for asset in assets])
            ),
            select(DagScheduleAssetUriReference.dag_id).where(
                DagScheduleAssetUriReference.uri.in_([asset.uri for asset in assets])
            ),
            select(DagScheduleAssetAliasReference.dag_id)
            .join(
                alias_association_table,
                alias_association_table.c.alias_id == DagScheduleAssetAliasReference.alias_id,
            )
            .where(alias_association_table.c.asset_id.in_(asset_ids)),
        ),
        reason=WakeReason.ASSET_ACTIVATION,
        session=session,
    )


def activate_and_request(
    insert_active: Insert, values: list[dict[str, str]], assets: Iterable[AssetModel], *, session: Session
) -> None:
    """
    Activate assets, and ask for those that this really made active (spec 4.3).

    Where all of them were active before, this writes nothing and costs one small query at the most.

    :param insert_active: inserts a row of :class:`AssetActive`, unless it is there already or conflicts with another
    :param values: what it inserts, a name and a URI a row
    :param assets: the assets of these names and URIs
    :param session: the session of the activation
    """
    if session.get_bind().dialect.insert_executemany_returning:
        returned = session.execute(insert_active.returning(AssetActive.name, AssetActive.uri), values)
        activated = {(name, uri) for name, uri in returned}
    else:
        # MySQL does not tell what it inserted. A row that a peer is about to delete does not count as active: the insert
        # waits for the peer, and then makes it active again. The others stay as they are, for we have locked them.
        before = _active(values, session=session, locked=True)
        session.execute(insert_active, values)
        candidates = [value for value in values if (value["name"], value["uri"]) not in before]
        activated = _active(candidates, session=session) if candidates else set()
    request_for_activated_assets(
        [asset for asset in assets if (asset.name, asset.uri) in activated], session=session
    )


def _active(
    values: Iterable[dict[str, str]], *, session: Session, locked: bool = False
) -> set[tuple[str, str]]:
    active = select(AssetActive.name, AssetActive.uri).where(
        tuple_(AssetActive.name, AssetActive.uri).in_((value["name"], value["uri"]) for value in values)
    )
    if locked:
        active = with_row_locks(active, session=session, skip_locked=True, key_share=False)
    return {(name, uri) for name, uri in session.execute(active)}
