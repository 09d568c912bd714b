"""What `scripts/watch-metrics` lets happen to a deployment's database: Dags, events, and key logs written in bulk.

Each line on standard input is a function's name; each gets one line back, once it is committed.
"""

from __future__ import annotations

import os
import sys

from airflow.sdk import Asset

from tests_common.factories import consumer, day_rollup, days, emit, forget_requests, insert_pending

HOURS, ORDERS = Asset("hours", uri="watched://hours"), Asset("orders", uri="watched://orders")


def prepare() -> None:
    """Write two Dags; in bulk, so that no request tells of them, two complete runs and three that wait for 23 hours."""
    consumer("roll_up_days", HOURS, day_rollup())
    consumer("ship_orders", ORDERS)
    insert_pending("ship_orders", ["bulk-1", "bulk-2"], asset=ORDERS)
    insert_pending("roll_up_days", days(3), asset=HOURS)
    forget_requests()


def event_before_the_start() -> None:
    """Register an event that completes a run, and one that does not."""
    emit(ORDERS, "event-1")
    emit(HOURS, "2020-01-01T01:00:00")


def event() -> None:
    """Register an event that completes a run."""
    emit(ORDERS, "event-2")


def bulk() -> None:
    """Write a complete run in bulk."""
    insert_pending("ship_orders", ["bulk-3"], asset=ORDERS)


FUNCTIONS = {function.__name__: function for function in (prepare, event_before_the_start, event, bulk)}


def main() -> None:
    # Logs go to standard output too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        FUNCTIONS[line.strip()]()
        print("done", file=answers)


if __name__ == "__main__":
    main()
