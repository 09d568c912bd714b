"""The database of a test: sessions of its own, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import delete, event
from sqlalchemy.orm import Session

from airflow import settings
from airflow.models import asset
from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.dagrun import DagRun
from airflow.models.dagwarning import DagWarning
from airflow.models.log import Log
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session


def new_session() -> AbstractContextManager[Session]:
    """Open a session with a connection of its own, as another process would have; commits at the end of the block."""
    return create_session(scoped=False)


def clear_db_apdr() -> None:
    """Delete all that tests of asset partitions write."""
    models = [
        asset.AssetPartitionDagRun,
        asset.PartitionedAssetKeyLog,
        TaskInstance,
        DagRun,
        asset.AssetDagRunQueue,
        asset.AssetEvent,
        asset.AssetActive,
        asset.DagScheduleAssetReference,
        asset.DagScheduleAssetNameReference,
        asset.DagScheduleAssetUriReference,
        asset.DagScheduleAssetAliasReference,
        asset.TaskOutletAssetReference,
        asset.TaskInletAssetReference,
        asset.AssetAliasModel,
        asset.AssetModel,
        DagWarning,
        SerializedDagModel,
        DagVersion,
        DagModel,
        Log,
    ]
    try:
        from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
    except ImportError:  # stock Airflow, measured beside ours
        pass
    else:
        models.insert(0, AssetPartitionDagRunWake)
    with new_session() as session:
        for model in models:
            session.execute(delete(model), execution_options={"synchronize_session": False})


@contextmanager
def recorded_statements(containing: str = "") -> Iterator[list[str]]:
    """
    Record the SQL that this process sends in the block, one entry for each time the driver is called.

    :param containing: only statements with this text in them
    """
    statements: list[str] = []

    def record(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        if containing in statement:
            statements.append(statement)

    event.listen(settings.engine, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(settings.engine, "before_cursor_execute", record)
