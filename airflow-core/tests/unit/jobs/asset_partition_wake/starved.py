"""
Run by `test_step.py` with stock Airflow and with ours: does a complete run fire that is newer than 600 waiting rollups?

Makes the tables of the database that it is told to use, and prints what became of the run after so many steps.
"""

from __future__ import annotations

import argparse
import json

from airflow import settings
from airflow.models import import_all_models
from airflow.models.base import Base
from airflow.sdk import Asset
from airflow.utils.db import synchronize_log_template

from tests_common.factories import Scheduler, consumer, day_rollup, days, emit, fired, insert_pending, pending

HOURLY = Asset("hourly", uri="test://hourly")
PLAIN = Asset("plain", uri="test://plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int)
    options = parser.parse_args()
    import_all_models()
    Base.metadata.create_all(settings.engine)
    synchronize_log_template()

    consumer("rollup", HOURLY, day_rollup())
    consumer("plain", PLAIN)
    insert_pending("rollup", days(600), asset=HOURLY)
    scheduler = Scheduler()
    for _ in range(2):  # Ours: the startup pass.
        scheduler.step()
    emit(PLAIN, "a")
    for _ in range(options.steps):
        scheduler.step()
    print(
        json.dumps({"fired": fired("plain"), "pending": pending("plain"), "waiting": len(pending("rollup"))})
    )


if __name__ == "__main__":
    main()
