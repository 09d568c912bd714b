"""A component of a deployment that writes Dags and registers events: run by `scripts/upgrade` in either environment.

Each line on standard input is a JSON list, a function's name and its arguments. Each is answered by a line, a JSON string: why
it failed, or empty.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from airflow.sdk import Asset

from tests_common.factories import consumer, day_rollup, emit, hours

HOURS, ORDERS = Asset("hours", uri="upgrade://hours"), Asset("orders", uri="upgrade://orders")
ROLLUP, PLAIN = "roll_up_days", "ship_orders"


def write_dags() -> None:
    """Write a Dag whose runs wait for the 24 hours of a day, and one whose runs wait for nothing."""
    consumer(ROLLUP, HOURS, day_rollup())
    consumer(PLAIN, ORDERS)


def order(*keys: str) -> None:
    """Register an event for each key; each completes a run."""
    emit(ORDERS, *keys)


def hours_of(day: str, first: int, last: int) -> None:
    """Register some hours of a day."""
    emit(HOURS, *hours(day)[first : last + 1])


FUNCTIONS = {function.__name__: function for function in (write_dags, order, hours_of)}


def main() -> None:
    # Logs go to standard output too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print('""', file=answers)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            FUNCTIONS[name](*arguments)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps(str(error).strip().partition("\n")[0] or repr(error)), file=answers)
        else:
            print('""', file=answers)


if __name__ == "__main__":
    main()
