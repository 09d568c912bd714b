"""Draining Dags rest, where the base has ``is_draining`` (spec 5); a column of that name stands in where it has not.

The column has to be there before the first statement is built and the tables are made, so a process of its own plays it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from sqlalchemy import Boolean, Column, false, update


def play() -> dict[str, object]:
    """Have a Dag drain, be tidied and run again, beside one that runs all the time."""
    from airflow import settings
    from airflow.models import import_all_models
    from airflow.models.base import Base
    from airflow.models.dag import DagModel
    from airflow.sdk import Asset
    from airflow.utils.db import synchronize_log_template

    from tests_common.db import new_session
    from tests_common.factories import Scheduler, consumer, emit, fired, requests

    import_all_models()
    if "is_draining" not in DagModel.__table__.c:
        DagModel.__table__.append_column(
            Column("is_draining", Boolean, nullable=False, server_default=false())
        )
    Base.metadata.create_all(settings.engine)
    synchronize_log_template()

    def drain(value: bool) -> None:
        table = DagModel.__table__
        with new_session() as session:
            session.execute(update(table).where(table.c.dag_id == "drains").values(is_draining=value))

    assets = {name: Asset(name) for name in ("runs", "drains")}
    for name, asset in assets.items():
        consumer(name, asset)
    drain(True)
    for asset in assets.values():
        emit(asset, "key")
    scheduler = Scheduler()
    for _ in range(5):
        scheduler.step()
    seen: dict[str, object] = {"while draining": [fired("runs"), fired("drains")]}
    scheduler.runner._asset_partition_wake.tidy()
    seen["tidied"] = requests()
    drain(False)
    for _ in range(5):
        scheduler.step()
    seen["after"] = [fired("runs"), fired("drains")]
    seen["left"] = requests()
    return seen


def test_draining_dag_rests(tmp_path):
    """It is neither asked about nor found by a pass; its requests are merged, and answered once it runs again."""
    variables = {
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/draining.db",
    }
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    assert {
        "while draining": [["key"], []],
        "tidied": [["drains", None, "merged"]],
        "after": [["key"], ["key"]],
        "left": [],
    } == json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(play()))
