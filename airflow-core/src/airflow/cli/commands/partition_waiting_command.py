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
"""Show what waits for its partition, and why."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rich.markup import escape
from sqlalchemy import and_, func, inspect, or_, select

from airflow._shared.timezones import timezone
from airflow.assets.evaluation import AssetEvaluator
from airflow.cli.simple_table import AirflowConsole
from airflow.models.asset import AssetModel, AssetPartitionDagRun, PartitionedAssetKeyLog
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.serialized_dag import SerializedDagModel
from airflow.partition_mappers.base import is_rollup
from airflow.serialization.definitions.assets import SerializedAssetUniqueKey
from airflow.timetables.base import compute_rollup_fingerprint
from airflow.utils.cli import suppress_logs_and_warning
from airflow.utils.providers_configuration_loader import providers_configuration_loaded
from airflow.utils.session import NEW_SESSION, provide_session

if TYPE_CHECKING:
    from argparse import Namespace

    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import Session

    from airflow.api_fastapi.core_api.datamodels.ui.partitioned_dag_runs import PartitionedDagRunAssetResponse
    from airflow.partition_mappers.base import RollupMapper
    from airflow.timetables.base import Timetable

Wake = AssetPartitionDagRunWake

MAX_REQUESTS = 100
"""Requests of one run that are listed; of more, the oldest."""


class Reading(NamedTuple):
    """A pending run: what holds it, and its assets as the UI shows them."""

    held_by: list[str]
    assets: list[PartitionedDagRunAssetResponse]


# No `action_cli`: it writes an audit log entry, and may migrate the database.
@suppress_logs_and_warning
@providers_configuration_loaded
@provide_session
def waiting(args: Namespace, *, session: Session = NEW_SESSION) -> None:
    """Show the pending runs of partitioned Dags, the requests for them, and what holds them."""
    if args.partition_key is not None and args.dag_id is None:
        raise SystemExit("--partition-key needs --dag-id: several Dags may have a run with that key.")
    table = Wake.__tablename__
    if not inspect(session.connection()).has_table(table):
        raise SystemExit(f"The table {table} is missing: run `airflow db migrate` first.")
    if args.partition_key is not None:
        _show_run(args.dag_id, args.partition_key, args.output, session=session)
    else:
        _show_dags(args.dag_id, args.output, session=session)


def _show_dags(dag_id: str | None, output: str, *, session: Session) -> None:
    """Show a line for each Dag. The counts are SQL's; of its runs, only the oldest one is looked at."""
    now = timezone.utcnow()
    pending_query = (
        select(AssetPartitionDagRun.target_dag_id, func.count(), func.min(AssetPartitionDagRun.id))
        .where(AssetPartitionDagRun.created_dag_run_id.is_(None))
        .group_by(AssetPartitionDagRun.target_dag_id)
    )
    requests_query = select(Wake.target_dag_id, func.count(), func.min(Wake.created_at)).group_by(
        Wake.target_dag_id
    )
    if dag_id is not None:
        pending_query = pending_query.where(AssetPartitionDagRun.target_dag_id == dag_id)
        requests_query = requests_query.where(Wake.target_dag_id == dag_id)
    pending = {row[0]: (row[1], row[2]) for row in session.execute(pending_query)}
    requests = {row[0]: (row[1], row[2]) for row in session.execute(requests_query)}
    dag_ids = pending.keys() | requests.keys()
    if dag_id is not None and not dag_ids:
        if session.get(DagModel, dag_id) is None:
            raise SystemExit(f"Dag {dag_id!r} does not exist.")
        dag_ids = {dag_id}

    rows = []
    for each in sorted(dag_ids):
        pending_count, oldest_id = pending.get(each, (0, None))
        request_count, oldest_request = requests.get(each, (0, None))
        run = session.get(AssetPartitionDagRun, oldest_id) if oldest_id is not None else None
        if run is not None and run.created_dag_run_id is not None:  # It fired since it was counted.
            run = None
        held_by = _read(run, session=session).held_by if run else ["nothing is pending"]
        rows.append(
            {
                "dag_id": each,
                "pending": pending_count,
                "requests": request_count,
                "oldest_request_age": _age(oldest_request, now),
                "oldest_run": run.partition_key if run else None,
                "held_by": "; ".join(held_by),
            }
        )
        # A definition may be large, and there may be thousands of Dags.
        session.expunge_all()
    _print(rows, output)


def _show_run(dag_id: str, partition_key: str, output: str, *, session: Session) -> None:
    """Show one pending run in full."""
    now = timezone.utcnow()
    run = _pending_run(dag_id, partition_key, session=session)
    reading = _read(run, session=session)
    asked = _asks_for(run)
    properties = {
        "dag_id": dag_id,
        "dag_state": ", ".join(_dag_state(session.get(DagModel, dag_id))) or "can run",
        "partition_key": partition_key,
        "partition_date": run.partition_date.isoformat() if run.partition_date else None,
        "pending_since": run.created_at.isoformat(),
        "held_by": "; ".join(reading.held_by),
        "requests": session.scalar(select(func.count()).select_from(Wake).where(asked)),
    }
    assets = [
        {
            "asset": asset.asset_name,
            "uri": asset.asset_uri,
            "state": _asset_state(asset),
            "received": f"{asset.received_count} of {asset.required_count}",
            "received_keys": asset.received_keys,
            "missing_keys": _missing(asset),
        }
        for asset in reading.assets
    ]
    requests = [
        {
            "request_for": "the Dag" if wake.apdr_id is None else "the run",
            "reason": wake.reason,
            "age": _age(wake.created_at, now),
        }
        for wake in session.scalars(select(Wake).where(asked).order_by(Wake.id).limit(MAX_REQUESTS))
    ]
    if output in ("json", "yaml"):
        _print([{**properties, "assets": assets, "oldest_requests": requests}], output)
        return
    _print([{"property_name": name, "property_value": value} for name, value in properties.items()], output)
    for rows in (assets, requests):
        if rows:
            print()
            _print(rows, output)


def _pending_run(dag_id: str, partition_key: str, *, session: Session) -> AssetPartitionDagRun:
    """Return the run; where there is none, say what there is instead."""
    newest_first = (
        select(AssetPartitionDagRun)
        .where(
            AssetPartitionDagRun.target_dag_id == dag_id, AssetPartitionDagRun.partition_key == partition_key
        )
        .order_by(AssetPartitionDagRun.id.desc())
        .limit(1)
    )
    run = session.scalar(newest_first.where(AssetPartitionDagRun.created_dag_run_id.is_(None)))
    if run is not None:
        return run
    nothing = f"Dag {dag_id!r} has no pending run with partition key {partition_key!r}"
    if fired := session.scalar(newest_first):
        created = session.get(DagRun, fired.created_dag_run_id)
        raise SystemExit(f"{nothing}: it fired as {created.run_id}." if created else f"{nothing}: it fired.")
    if session.get(DagModel, dag_id) is None:
        raise SystemExit(f"Dag {dag_id!r} does not exist.")
    raise SystemExit(f"{nothing}: no event of its assets has been mapped to that key.")


def _read(run: AssetPartitionDagRun, *, session: Session) -> Reading:
    """Tell what holds a pending run, as the scheduler would find it now."""
    dag = session.get(DagModel, run.target_dag_id)
    if dag is None:
        return Reading(["the Dag does not exist any more"], [])
    held_by = _dag_state(dag)
    try:
        found, assets = _evaluate(run, session=session)
    except Exception as error:  # of the Dag's own code; the other Dags are to be seen nevertheless
        found, assets = [f"cannot be evaluated: {type(error).__name__}: {error}"], []
    return Reading([*held_by, *found], assets)


def _evaluate(run: AssetPartitionDagRun, *, session: Session) -> Reading:
    """Evaluate a pending run by the functions of the UI and of the scheduler."""
    # The UI's routes take a second to import: other commands do without them.
    from airflow.api_fastapi.core_api.routes.ui.partitioned_dag_runs import get_pending_partitioned_dag_run

    serialized = SerializedDagModel.get(run.target_dag_id, session=session)
    if serialized is None:
        return Reading(["the Dag has no serialized definition"], [])
    timetable = serialized.dag.timetable
    if not timetable.partitioned or run.rollup_fingerprint != compute_rollup_fingerprint(timetable):
        return Reading(["made for another timetable: the next evaluation drops it"], [])

    assets = get_pending_partitioned_dag_run(run.target_dag_id, run.partition_key, session).assets
    known = {asset.asset_id for asset in assets}
    assets += _referenced_otherwise(run, timetable, known=known, session=session)
    held_by = []
    statuses = {}
    for asset in assets:
        if not asset.received_keys or asset.asset_inactive:
            continue
        key = SerializedAssetUniqueKey(name=asset.asset_name, uri=asset.asset_uri)
        statuses[key] = True
        if asset.is_rollup:
            mapper = cast("RollupMapper", timetable.get_partition_mapper(name=key.name, uri=key.uri))
            result = mapper.wait_policy.is_satisfied_by_keys(
                matched=set(asset.received_keys), expected=set(asset.required_keys)
            )
            statuses[key] = result.satisfied
            if result.unreachable:
                held_by.append(f"asset {asset.asset_name}: {result.unreachable_reason}")

    if not AssetEvaluator(session).run(timetable.asset_condition, statuses=statuses):
        satisfied = {key.name for key, status in statuses.items() if status}
        held_by += [_wait(asset) for asset in assets if asset.asset_name not in satisfied]
        return Reading(held_by or ["the asset condition does not hold"], assets)
    if session.scalar(select(Wake.id).where(_asks_for(run)).limit(1)) is not None:
        return Reading(["complete: a request asks for it, the scheduler's next loop evaluates it"], assets)
    return Reading(["complete, but nothing asked: waits for the next request or resync pass"], assets)


def _referenced_otherwise(
    run: AssetPartitionDagRun, timetable: Timetable, *, known: set[int], session: Session
) -> list[PartitionedDagRunAssetResponse]:
    """Return assets with key logs that the UI leaves out: those referenced by name, by URI or through an alias."""
    from airflow.api_fastapi.core_api.datamodels.ui.partitioned_dag_runs import PartitionedDagRunAssetResponse

    received: dict[AssetModel, set[str]] = {}
    for asset, source_key in session.execute(
        select(AssetModel, PartitionedAssetKeyLog.source_partition_key)
        .join(PartitionedAssetKeyLog, PartitionedAssetKeyLog.asset_id == AssetModel.id)
        .where(PartitionedAssetKeyLog.asset_partition_dag_run_id == run.id, AssetModel.id.not_in(known))
    ):
        received.setdefault(asset, set()).add(source_key)
    responses = []
    for asset, keys in received.items():
        required, rollup, failed = {run.partition_key}, True, False
        try:
            mapper = timetable.get_partition_mapper(name=asset.name, uri=asset.uri)
            if rollup := is_rollup(mapper):
                required = set(mapper.to_upstream(run.partition_key))
        except Exception:
            failed, keys, required = True, set(), set()
        received_count = len(keys & required) if rollup else 1
        responses.append(
            PartitionedDagRunAssetResponse(
                asset_id=asset.id,
                asset_name=asset.name,
                asset_uri=asset.uri,
                received=received_count >= len(required) and not failed,
                received_count=received_count,
                required_count=len(required) or 1,
                received_keys=sorted(keys),
                required_keys=sorted(required),
                is_rollup=rollup,
                mapper_error=failed,
                asset_inactive=asset.active is None,
            )
        )
    return responses


def _asset_state(asset: PartitionedDagRunAssetResponse) -> str:
    if asset.asset_inactive:
        return "inactive"
    return "mapper error" if asset.mapper_error else "active"


def _wait(asset: PartitionedDagRunAssetResponse) -> str:
    """Say in words why an asset does not count."""
    if asset.asset_inactive:
        return f"asset {asset.asset_name} is inactive"
    if asset.mapper_error:
        return f"the partition mapper of asset {asset.asset_name} raises an error"
    if asset.is_rollup:
        missing = len(_missing(asset))
        return f"waiting for {missing} of {asset.required_count} upstream keys of asset {asset.asset_name}"
    return f"waiting for an event of asset {asset.asset_name}"


def _missing(asset: PartitionedDagRunAssetResponse) -> list[str]:
    """Return the upstream keys that an asset lacks. Any event satisfies an asset without a rollup."""
    if not asset.is_rollup:
        return [] if asset.received_keys else asset.required_keys
    return sorted(set(asset.required_keys) - set(asset.received_keys))


def _dag_state(dag: DagModel | None) -> list[str]:
    """Return what keeps the runs of a Dag from being evaluated."""
    if dag is None:
        return ["gone"]
    states = {"paused": dag.is_paused, "stale": dag.is_stale, "draining": getattr(dag, "is_draining", False)}
    return [name for name, applies in states.items() if applies]


def _asks_for(run: AssetPartitionDagRun) -> ColumnElement[bool]:
    return and_(Wake.target_dag_id == run.target_dag_id, or_(Wake.apdr_id == run.id, Wake.apdr_id.is_(None)))


def _age(since: datetime | None, now: datetime) -> float | None:
    return None if since is None else max(0.0, round((now - since).total_seconds(), 1))


def _print(rows: list[dict[str, Any]], output: str) -> None:
    """Print rows; JSON and YAML keep numbers and lists as such, the others show ages for people."""
    console = AirflowConsole()
    if output == "json":
        console.print_as_json(rows)  # type: ignore[arg-type]  # prints anything
    elif output == "yaml":
        console.print_as_yaml(rows)  # type: ignore[arg-type]
    else:
        console.print_as([{name: _cell(name, row[name], output) for name in row} for row in rows], output)


def _cell(name: str, value: Any, output: str) -> str:
    if value is None:
        return ""
    if name.endswith("age"):
        return str(timedelta(seconds=round(value)))
    text = ", ".join(value) if isinstance(value, list) else str(value)
    # A partition key may have brackets, which rich takes for markup.
    return escape(text) if output == "table" else text
