"""Fixtures of the suite. What makes Dags, events and runs is in :mod:`tests_common.factories`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.orm import Session


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backend(*names): runs on these databases only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.environ.get("WAKE_BACKEND", "sqlite")
    for item in items:
        if (marker := item.get_closest_marker("backend")) and here not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"for {', '.join(marker.args)}, not {here}"))


@pytest.fixture
def db() -> Iterator[None]:
    """An Airflow database without Dags, before and after."""
    from tests_common.db import clear_db_apdr

    clear_db_apdr()
    yield
    clear_db_apdr()


@pytest.fixture
def session(db: None) -> Iterator[Session]:
    """A session with a connection of its own."""
    from tests_common.db import new_session

    with new_session() as session:
        yield session


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """
    A clock that stands still until a test moves it (``clock.shift(seconds)``), for the scheduler's step too.

    time-machine leaves ``time.monotonic`` alone, so the step reads the time of day in its place.
    """
    import time_machine

    from airflow.jobs.asset_partition_wake import step

    with time_machine.travel(datetime(2030, 1, 1, tzinfo=timezone.utc), tick=False) as traveller:
        monkeypatch.setattr(step, "time", SimpleNamespace(monotonic=lambda: time.time()))
        yield traveller


@pytest.fixture
def no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resync passes switched off, the startup pass too."""
    from airflow.jobs.asset_partition_wake.agenda import Agenda

    monkeypatch.setattr(Agenda, "pass_is_due", lambda self, now: False)


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every whole read of the requests counts as one that took a second."""
    from airflow.jobs.asset_partition_wake.waiting import Horizon

    found_nothing = Horizon.found_nothing

    def after_a_second(self: Horizon, now: float, seconds: float, *, session: Session) -> Horizon:
        return found_nothing(self, now, 1.0, session=session)

    monkeypatch.setattr(Horizon, "found_nothing", after_a_second)
