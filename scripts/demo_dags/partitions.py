"""The Dags of `scripts/demo`: runs that wait by design, and one that need not."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import (
    DAG,
    Asset,
    DayWindow,
    PartitionedAssetTimetable,
    PartitionedAtRuntime,
    RollupMapper,
    StartOfDayMapper,
    task,
)

hours = Asset("hours")
orders = Asset("orders")

# By default one hour of each of many days, so that each day waits for its other 23.
with DAG(
    "produce_hours",
    schedule=PartitionedAtRuntime(),
    params={"first_day": "2025-01-01", "days": 520, "hours": [0]},
):

    @task(outlets=[hours])
    def emit_hours(*, params: Any = None, outlet_events: Any = None) -> None:
        first_day = date.fromisoformat(params["first_day"])
        days = [first_day + timedelta(days=number) for number in range(params["days"])]
        keys = [f"{day}T{hour:02}:00:00" for day in days for hour in params["hours"]]
        outlet_events[hours].add_partitions(keys)

    emit_hours()

# One run for each day, as soon as all of its 24 hours are there.
with DAG(
    "roll_up_days",
    schedule=PartitionedAssetTimetable(
        assets=hours,
        default_partition_mapper=RollupMapper(upstream_mapper=StartOfDayMapper(), window=DayWindow()),
    ),
):
    EmptyOperator(task_id="roll_up")

with DAG("produce_order", schedule=PartitionedAtRuntime(), params={"key": "order-1"}):

    @task(outlets=[orders])
    def emit_order(*, params: Any = None, outlet_events: Any = None) -> None:
        outlet_events[orders].add_partitions(params["key"])

    emit_order()

# One run for each key, complete with a single event.
with DAG("ship_orders", schedule=PartitionedAssetTimetable(assets=orders)):
    EmptyOperator(task_id="ship")
