"""Metrics (spec 8), as a StatsD server receives them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
from statsd import StatsClient

from airflow._shared.observability.metrics import stats
from airflow._shared.observability.metrics.metrics_registry import MetricsRegistry
from airflow._shared.observability.metrics.statsd_logger import SafeStatsdLogger
from airflow.models.asset import AssetPartitionDagRun
from airflow.sdk import Asset
from airflow.serialization.definitions.dag import SerializedDAG

from tests_common.db import new_session
from tests_common.factories import (
    Scheduler,
    ask,
    change_dag,
    consumer,
    day_rollup,
    days,
    emit,
    forget_requests,
    hours,
    insert_dags,
    insert_pending,
)

pytestmark = pytest.mark.usefixtures("db")

PLAIN = Asset("plain", uri="test://plain")
HOURLY = Asset("hourly", uri="test://hourly")
PREFIX = "scheduler.asset_partitions."


class Server:
    """A StatsD server: what reached it since it was last asked."""

    def __init__(self, receiver: socket.socket) -> None:
        self._receiver = receiver

    def lag(self) -> float:
        """Return the lag that reached it, and forget the rest."""
        value, _, kind = self.received()["wake_lag"].partition("|")
        assert "g" == kind
        return float(value)

    def received(self) -> dict[str, str]:
        lines: dict[str, str] = {}
        while True:
            try:
                packet = self._receiver.recv(65536).decode()
            except BlockingIOError:
                return lines
            for line in packet.splitlines():
                name, value = line.split(":")
                if name.startswith("airflow." + PREFIX):
                    name = name.removeprefix("airflow." + PREFIX)
                    assert name not in lines, f"{name} was sent twice"
                    lines[name] = value


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """Airflow's metrics, sent to a plain StatsD server."""
    yield from serve(monkeypatch, legacy=True)


def serve(monkeypatch: pytest.MonkeyPatch, *, legacy: bool, influx: bool = False) -> Iterator[Server]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        host, port = receiver.getsockname()
        for name in ("_factory", "_backend", "_export_legacy_names"):
            monkeypatch.setattr(stats, name, getattr(stats, name))
        stats.initialize(
            factory=lambda: SafeStatsdLogger(
                StatsClient(host, port, prefix="airflow"),
                influxdb_tags_enabled=influx,
                statsd_influxdb_enabled=influx,
            ),
            export_legacy_names=legacy,
        )
        # Every executor that is made sets up what the configuration says.
        monkeypatch.setattr(stats, "initialize", lambda **kwargs: None)
        yield Server(receiver)


def test_idle_loop(server):
    """A loop with nothing to do tells a lag of 0 and counts nothing."""
    scheduler = Scheduler()
    scheduler.settle()
    server.received()
    scheduler.step()
    received = server.received()
    assert {"wake_lag"} == received.keys()
    assert 0 == float(received["wake_lag"].removesuffix("|g"))


def test_evaluated(server):
    """Each run that a loop evaluates is counted, whether or not it fires; several requests for it are one."""
    consumer("plain", PLAIN)
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler()
    scheduler.settle()
    emit(PLAIN, "a")
    emit(HOURLY, *hours("2024-03-01")[:5])
    server.received()
    scheduler.step()
    received = server.received()
    assert "2|c" == received["evaluated"]
    assert {"wake_lag", "evaluated"} == received.keys()


def test_lag_is_the_age_of_the_oldest_request(server, clock):
    """The lag is the age of the oldest request that waits for a loop."""
    insert_dags("dag")
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    scheduler = Scheduler()
    scheduler.settle()
    ask("dag", [1], created_at=now - timedelta(seconds=30))
    ask("dag", [2], created_at=now - timedelta(seconds=90))
    server.received()
    scheduler.step()
    assert 90 == server.lag()
    scheduler.step()
    assert 0 == server.lag()


def test_lag_is_never_negative(server, clock):
    """A request from a machine whose clock is ahead is no negative lag."""
    insert_dags("dag")
    scheduler = Scheduler()
    scheduler.settle()
    ask("dag", [1], created_at=datetime(2030, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=30))
    server.received()
    scheduler.step()
    assert 0 == server.lag()


@pytest.mark.parametrize("state", ["is_paused", "is_stale"])
def test_lag_ignores_dags_that_cannot_run(state, server, clock):
    """The requests of a resting Dag are no lag; once it can run, they are."""
    insert_dags("dag", **{state: True})
    scheduler = Scheduler()
    scheduler.settle()
    ask("dag", [1], created_at=datetime(2030, 1, 1, tzinfo=timezone.utc) - timedelta(seconds=90))
    server.received()
    scheduler.step()
    assert 0 == server.lag()
    change_dag("dag", **{state: False})
    scheduler.step()
    assert 90 == server.lag()


def test_lag_grows_during_a_fan_out(server, clock):
    """The request for a Dag waits until its fan-out is through, and the lag says so."""
    consumer("rollup", HOURLY, day_rollup())
    scheduler = Scheduler(budget=4)
    scheduler.settle()
    insert_pending("rollup", days(7), asset=HOURLY)
    ask("rollup")
    lags = []
    for _ in range(3):
        server.received()
        scheduler.step()
        lags.append(server.lag())
        clock.shift(10)
    assert [0, 10, 0] == lags


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"legacy": True}, {"resync_fired", "resync_fired.{}"}),
        ({"legacy": False, "influx": True}, {"resync_fired,pass={}"}),
    ],
    ids=["plain", "tags"],
)
def test_resync_fired(options, names, monkeypatch, clock):
    """Runs that only a pass found are counted by the pass's kind, which plain StatsD has in the name."""
    consumer("plain", PLAIN)
    insert_pending("plain", ["a", "b"], asset=PLAIN)
    with_server = serve(monkeypatch, **options)
    server = next(with_server)
    forget_requests()
    scheduler = Scheduler()

    def counted() -> dict[str, str]:
        return {name: value for name, value in server.received().items() if "fired" in name}

    scheduler.step()
    assert {name.format("startup"): "2|c" for name in names} == counted()
    insert_pending("plain", ["c"], asset=PLAIN)
    clock.shift(3600)
    scheduler.step()
    assert {name.format("periodic"): "1|c" for name in names} == counted()
    with_server.close()


def test_resync_fired_counts_only_what_a_pass_alone_found(server):
    """A run that was asked for, or whose Dag was, is not the pass's; nor is one that waits or was dropped."""
    consumer("asked", PLAIN)
    consumer("fanned", PLAIN)
    consumer("waits", HOURLY, day_rollup())
    forget_requests()
    ask("asked", insert_pending("asked", ["a"], asset=PLAIN))
    insert_pending("fanned", ["b"], asset=PLAIN)
    ask("fanned")
    dropped, _ = insert_pending("waits", days(2), asset=HOURLY)
    with new_session() as session:
        session.get(AssetPartitionDagRun, dropped).rollup_fingerprint = {"old": "mapper"}
    scheduler = Scheduler()
    server.received()
    assert {"asked", "fanned"} == scheduler.step()
    received = server.received()
    assert "4|c" == received["evaluated"]
    assert not [name for name in received if "fired" in name]


def test_duration_of_a_pass(server, clock):
    """A pass tells how long it took, once, in the loop that ends it."""
    consumer("rollup", HOURLY, day_rollup())
    insert_pending("rollup", days(7))
    forget_requests()
    scheduler = Scheduler(budget=4)
    ended = []
    for _ in range(4):
        scheduler.step()
        ended.append(server.received().get("resync_pass_duration"))
        clock.shift(10)
    assert [None, "10000.000000|ms", None, None] == ended


def test_nothing_is_sent_for_a_loop_that_fails(server, monkeypatch):
    """What is rolled back is not counted, and once it succeeds it is counted once."""
    consumer("plain", PLAIN)
    insert_pending("plain", ["a"], asset=PLAIN)
    scheduler = Scheduler()

    def fail(*args, **kwargs):
        raise RuntimeError("no run")

    with monkeypatch.context() as patched:
        patched.setattr(SerializedDAG, "create_dagrun", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                scheduler.step()
    assert {} == server.received()
    scheduler.step()
    assert "1|c" == server.received()["evaluated"]


def test_nothing_is_sent_before_the_commit(server):
    """Metrics wait for the end of the transaction."""
    scheduler = Scheduler()
    with new_session() as session:
        scheduler.runner._create_dagruns_for_partitioned_asset_dags(session)
        assert {} == server.received()
    assert "wake_lag" in server.received()


@pytest.mark.parametrize(
    ("name", "kind", "legacy_name", "variables"),
    [
        ("wake_lag", "gauge", "-", []),
        ("evaluated", "counter", "-", []),
        ("resync_fired", "counter", PREFIX + "resync_fired.{pass}", ["pass"]),
        ("resync_pass_duration", "timer", "-", []),
    ],
)
def test_registry_lists_the_metrics(name, kind, legacy_name, variables):
    """Airflow's registry of metrics knows each of ours as it is sent."""
    metric = MetricsRegistry().get(PREFIX + name)
    assert (kind, legacy_name, variables) == (metric["type"], metric["legacy_name"], metric["name_variables"])
    assert metric["description"]
