"""Fill a database with asset partitions by set-based SQL. Runs inside an environment with Airflow.

One Dag goes through Airflow's own serialization, and its rows are copied for the others. Runs come from two helper tables:
a row a Dag, and a row a number, with the keys and times that go with it, so that one INSERT serves every database.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    and_,
    event,
    insert,
    literal,
    select,
    text,
)

from _lib.bench.sizes import Sizes
from airflow import settings
from airflow._shared.timezones import timezone
from airflow.models.asset import (
    AssetActive,
    AssetModel,
    AssetPartitionDagRun,
    DagScheduleAssetReference,
    PartitionedAssetKeyLog,
)
from airflow.models.base import StringID
from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk import Asset
from airflow.timetables.base import compute_rollup_fingerprint
from airflow.utils.sqlalchemy import UtcDateTime

from tests_common.db import new_session
from tests_common.factories import consumer, day_rollup

CHUNKS = 20
"""So many times fired and pending runs take turns in the table."""

FIRED_BY = 1_000_000_000
"""Ids of Dag runs that are not there: nothing that is measured reads them."""

APDR = AssetPartitionDagRun.__table__
KEY_LOG = PartitionedAssetKeyLog.__table__

helpers = MetaData()
DAGS = Table(
    "bench_dag",
    helpers,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("dag_id", StringID(), unique=True),
    Column("asset_id", Integer),
    Column("pending", Integer),
    Column("fired", Integer),
    Column("fingerprint", JSON),
)
NUMBERS = Table(
    "bench_number",
    helpers,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("pending_key", StringID()),
    Column("fired_key", StringID()),
    Column("pending_at", UtcDateTime),
    Column("fired_at", UtcDateTime),
)


def engine() -> Engine:
    """Return Airflow's engine."""
    assert settings.engine is not None
    return settings.engine


def name(number: int) -> str:
    """Return the id of a Dag, and the name of its asset. All are of one length, so that one replaces another in text."""
    return f"bench_{number:06}"


def asset(number: int = 0) -> Asset:
    """Return the asset that a Dag is scheduled on."""
    return Asset(name(number), uri=f"bench://{name(number)}")


def create(sizes: Sizes, progress: Callable[[str], None]) -> None:
    """Fill an empty database."""
    if engine().dialect.name == "sqlite":
        # Not inside a transaction: SQLite ignores it there.
        event.listen(
            engine(), "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = OFF")
        )
        engine().dispose()
    dags(sizes)
    progress(f"{sizes.dags:,} Dags")
    for done in runs(sizes):
        progress(f"{done:,} of {sizes.runs:,} runs")
    key_logs()
    analyze()


def dags(sizes: Sizes) -> None:
    """Write Dags, and the helper tables."""
    consumer(name(0), asset(), day_rollup())
    with engine().begin() as connection:
        helpers.drop_all(connection)
        helpers.create_all(connection)
        asset_id = connection.scalars(select(AssetModel.id).where(AssetModel.name == name(0))).one()
        for batch in _batches(range(1, sizes.dags)):
            for model in (
                DagModel,
                AssetModel,
                AssetActive,
                DagVersion,
                SerializedDagModel,
                DagScheduleAssetReference,
            ):
                table = model.__table__
                [row] = [dict(row) for row in connection.execute(select(table)).mappings() if _is_first(row)]
                connection.execute(insert(table), [_copy(row, number) for number in batch])
        _stop(connection, sizes)

        fingerprint = _fingerprint()
        pending, fired = sizes.pending_by_dag(), sizes.fired_by_dag()
        for batch in _batches(range(sizes.dags)):
            rows = [
                {
                    "number": number,
                    "dag_id": name(number),
                    "asset_id": asset_id + number,
                    "pending": pending[number],
                    "fired": fired[number],
                    "fingerprint": _replace(fingerprint, number),
                }
                for number in batch
            ]
            connection.execute(insert(DAGS), rows)
        now = timezone.utcnow()
        first = timezone.datetime(2020, 1, 1)
        for batch in _batches(range(max(*pending, *fired))):
            rows = [
                {
                    "number": number,
                    "pending_key": f"{first + timedelta(days=number):%Y-%m-%d}",
                    "fired_key": f"{first - timedelta(days=number + 1):%Y-%m-%d}",
                    "pending_at": now - timedelta(days=200) + timedelta(minutes=number),
                    "fired_at": now - timedelta(days=300) + timedelta(minutes=number),
                }
                for number in batch
            ]
            connection.execute(insert(NUMBERS), rows)


def runs(sizes: Sizes) -> Iterator[int]:
    """Write runs, the oldest pending one of each Dag first; yield how many are there."""
    columns = [
        APDR.c.target_dag_id,
        APDR.c.created_dag_run_id,
        APDR.c.partition_key,
        APDR.c.rollup_fingerprint,
        APDR.c.created_at,
        APDR.c.updated_at,
    ]
    pending = select(
        DAGS.c.dag_id,
        literal(None, Integer).label("created_dag_run_id"),
        NUMBERS.c.pending_key,
        DAGS.c.fingerprint,
        NUMBERS.c.pending_at,
        NUMBERS.c.pending_at,
    )
    fired = select(
        DAGS.c.dag_id,
        FIRED_BY + NUMBERS.c.number * sizes.dags + DAGS.c.number,
        NUMBERS.c.fired_key,
        DAGS.c.fingerprint,
        NUMBERS.c.fired_at,
        NUMBERS.c.fired_at,
    )
    oldest = pending.where(NUMBERS.c.number == 0).order_by(DAGS.c.number)
    done = 0
    parts: list[Any] = [oldest]
    for part in range(CHUNKS):
        # Fired runs of all Dags, then pending ones of all Dags, each Dag's in order.
        parts += [
            query.where(
                and_(
                    NUMBERS.c.number * CHUNKS >= of_dag * part,
                    NUMBERS.c.number * CHUNKS < of_dag * (part + 1),
                    NUMBERS.c.number >= first,
                )
            )
            for query, of_dag, first in ((fired, DAGS.c.fired, 0), (pending, DAGS.c.pending, 1))
        ]
    for number, query in enumerate(parts):
        with engine().begin() as connection:
            without_foreign_keys(connection)
            written = connection.execute(insert(APDR).from_select(columns, query, include_defaults=False))
            done += written.rowcount
        if number % 10 == 0:
            yield done


def key_logs(hours: tuple[int, ...] = (0,), count: int | None = None) -> None:
    """Write a key log for each of some hours of the day of each pending run, or of the *count* oldest."""
    oldest = (
        select(APDR.c.id, APDR.c.target_dag_id, APDR.c.partition_key, APDR.c.created_at)
        .where(APDR.c.created_dag_run_id.is_(None))
        .order_by(APDR.c.created_at, APDR.c.id)
    )
    if count is not None:
        oldest = oldest.limit(count)
    run = oldest.subquery("run")
    with engine().begin() as connection:
        for hour in hours:
            logs = select(
                DAGS.c.asset_id,
                literal(0, Integer),
                run.c.id,
                run.c.partition_key.concat(literal(f"T{hour:02}:00:00")),
                run.c.target_dag_id,
                run.c.partition_key,
                run.c.created_at,
            ).join(DAGS, DAGS.c.dag_id == run.c.target_dag_id)
            columns = [
                KEY_LOG.c.asset_id,
                KEY_LOG.c.asset_event_id,
                KEY_LOG.c.asset_partition_dag_run_id,
                KEY_LOG.c.source_partition_key,
                KEY_LOG.c.target_dag_id,
                KEY_LOG.c.target_partition_key,
                KEY_LOG.c.created_at,
            ]
            connection.execute(insert(KEY_LOG).from_select(columns, logs, include_defaults=False))


def analyze(*tables: str) -> None:
    """Bring the statistics of the planner up to date, as the database's own upkeep does in time."""
    tables = tables or (
        *(
            model.__tablename__
            for model in (AssetPartitionDagRun, PartitionedAssetKeyLog, DagModel, SerializedDagModel)
        ),
        *(model.__tablename__ for model in (AssetModel, AssetActive, DagScheduleAssetReference, DagVersion)),
    )
    mysql = engine().dialect.name == "mysql"
    vacuum = "VACUUM ANALYZE" if engine().dialect.name == "postgresql" else "ANALYZE"
    with engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in tables:
            connection.execute(text(f"ANALYZE TABLE {table}" if mysql else f"{vacuum} {table}"))


def without_foreign_keys(connection: Connection) -> None:
    """Have this transaction, or connection, not look for the Dag runs of the runs that fired."""
    statement = {
        "postgresql": "SET LOCAL session_replication_role = replica",
        "mysql": "SET foreign_key_checks = 0",
    }.get(connection.dialect.name)
    if statement:
        connection.execute(text(statement))


def _is_first(row: Any) -> bool:
    return name(0) in (row.get("dag_id"), row.get("name"))


def _copy(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the row of another Dag, with ids of its own."""
    copied = {key: _replace(value, number) for key, value in row.items()}
    for key, value in row.items():
        if isinstance(value, uuid.UUID):
            copied[key] = uuid.UUID(int=(value.int + number) % 2**128)
        elif key in ("id", "asset_id"):
            copied[key] = value + number
    return copied


def _replace(value: Any, number: int) -> Any:
    if isinstance(value, str):
        return value.replace(name(0), name(number))
    if isinstance(value, (dict, list)):
        return json.loads(json.dumps(value).replace(name(0), name(number)))
    return value


def _fingerprint() -> dict[str, Any]:
    with new_session() as session:
        serialized = SerializedDagModel.get(name(0), session=session)
        assert serialized is not None
        return compute_rollup_fingerprint(serialized.dag.timetable)


def _stop(connection: Connection, sizes: Sizes) -> None:
    """Pause every other one of the Dags that cannot run; the others are stale."""
    numbers = sizes.cannot_run()
    for column, chosen in ((DagModel.is_paused, numbers[::2]), (DagModel.is_stale, numbers[1::2])):
        ids = [name(number) for number in chosen]
        connection.execute(
            DagModel.__table__.update().where(DagModel.dag_id.in_(ids)).values({column.name: True})
        )


def _batches(numbers: range) -> Iterator[range]:
    for start in range(numbers.start, numbers.stop, 1000):
        yield range(start, min(start + 1000, numbers.stop))
