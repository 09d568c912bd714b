"""The scheduler's step as a whole (spec 5 to 7)."""

from __future__ import annotations

import pytest
from tests_common.factories import (
    Scheduler,
    consumer,
    day_rollup,
    days,
    emit,
    fired,
    hours,
    insert_pending,
    pending,
    requests,
)

from airflow.sdk import Asset

pytestmark = pytest.mark.usefixtures("db")

HOURLY = Asset("hourly", uri="test://hourly")
PLAIN = Asset("plain", uri="test://plain")


def test_event_fires_its_run_in_the_next_step():
    """A complete partition fires in the step after its event, and its request is gone."""
    consumer("plain", PLAIN)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, "a")

    assert [("plain", None, "key log")] == [(d, None, r) for d, _, r in requests()]
    assert {"plain"} == scheduler.step()
    assert ["a"] == fired("plain")
    assert [] == requests()


def test_newest_complete_run_is_not_starved():
    """With 600 rollups waiting, a complete run that is the newest fires in the next step."""
    consumer("rollup", HOURLY, day_rollup())
    consumer("plain", PLAIN)
    insert_pending("rollup", days(600), asset=HOURLY)
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, "a")

    assert {"plain"} == scheduler.step()
    assert ["a"] == fired("plain")
    assert 600 == len(pending("rollup"))


def test_rollup_waits_for_its_window():
    """A rollup fires with the last hour of its day, not before."""
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler()
    keys = hours("2024-03-01")
    emit(HOURLY, *keys[:23])
    scheduler.settle()
    assert [] == fired("rollup")

    emit(HOURLY, keys[23])
    scheduler.step()
    assert ["2024-03-01"] == fired("rollup")
