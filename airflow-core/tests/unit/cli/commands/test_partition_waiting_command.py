"""`airflow partitions waiting`: what waits, and why (issue 6)."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from airflow.assets.manager import AssetManager
from airflow.cli.cli_parser import get_parser
from airflow.models.asset import AssetActive
from airflow.models.log import Log
from airflow.models.serialized_dag import SerializedDagModel
from airflow.partition_mappers.base import RollupMapper
from airflow.partition_mappers.wait_policy import MinimumCount
from airflow.sdk import Asset, AssetAlias

from tests_common.db import new_session, recorded_statements
from tests_common.factories import (
    Scheduler,
    ask,
    change_dag,
    consumer,
    day_rollup,
    days,
    emit,
    fired,
    hours,
    insert_dags,
    insert_pending,
    insert_runs,
    make_dag,
    write,
)

pytestmark = pytest.mark.usefixtures("db")

HOURLY = Asset("hourly", uri="test://hourly")
PLAIN = Asset("plain", uri="test://plain")
DAY = "2024-03-01"


def run_cli(*arguments: str) -> None:
    """Run the command as the `airflow` executable does."""
    args = get_parser().parse_args(["partitions", "waiting", *arguments])
    args.func(args)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command and return what its JSON holds."""

    def show(*arguments: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        run_cli(*arguments, "--output", "json")
        return json.loads(capsys.readouterr().out)

    return show


def rollup(dag_id: str = "rollup", received: int = 1, **kwargs: Any) -> None:
    """Write a Dag that waits for a day of hours, some of which have come, and evaluate it."""
    consumer(dag_id, HOURLY, day_rollup(**kwargs))
    emit(HOURLY, *hours(DAY)[:received])
    Scheduler().settle()


def test_counts_of_each_dag(show, clock):
    """Each Dag has a line: pending runs, requests, age of the oldest request, the oldest run and what holds it."""
    rollup()
    insert_pending("rollup", days(2), asset=HOURLY)
    consumer("plain", PLAIN)
    Scheduler().settle()
    emit(PLAIN, "a")
    clock.shift(90)
    emit(PLAIN, "b")

    assert [
        {
            "dag_id": "plain",
            "pending": 2,
            "requests": 2,
            "oldest_request_age": 90.0,
            "oldest_run": "a",
            "held_by": "complete: a request asks for it, the scheduler's next loop evaluates it",
        },
        {
            "dag_id": "rollup",
            "pending": 3,
            "requests": 0,
            "oldest_request_age": None,
            "oldest_run": DAY,
            "held_by": "waiting for 23 of 24 upstream keys of asset hourly",
        },
    ] == show()
    assert ["rollup"] == [row["dag_id"] for row in show("--dag-id", "rollup")]


def held_by(show: Any, dag_id: str) -> str:
    (row,) = show("--dag-id", dag_id)
    return row["held_by"]


def test_paused_and_stale(show):
    """A Dag that is paused or stale says so, before what its run waits for."""
    rollup()
    change_dag("rollup", is_paused=True)
    assert "paused; waiting for 23 of 24 upstream keys of asset hourly" == held_by(show, "rollup")
    change_dag("rollup", is_stale=True)
    assert held_by(show, "rollup").startswith("paused; stale; waiting")


def test_nothing_asked(show):
    """A complete run that no request names waits for the next request or pass."""
    consumer("plain", PLAIN)
    Scheduler().settle()
    insert_pending("plain", ["a"], asset=PLAIN, upstream="{}")
    assert "complete, but nothing asked: waits for the next request or resync pass" == held_by(show, "plain")
    ask("plain")
    assert "complete: a request asks" in held_by(show, "plain")


def test_inactive_asset(show):
    """Key logs of an inactive asset do not count, and the asset is named."""
    rollup(received=23)
    emit(HOURLY, hours(DAY)[23])
    with new_session() as session:
        session.execute(delete(AssetActive).where(AssetActive.name == "hourly"))
    assert "asset hourly is inactive" == held_by(show, "rollup")


def test_mapper_error(show):
    """A mapper that raises is named, as in the UI, and the other Dags are shown."""
    rollup()
    consumer("plain", PLAIN)
    emit(PLAIN, "a")
    with patch.object(RollupMapper, "to_upstream", side_effect=RuntimeError("broken")):
        plain, broken = show()
    assert "the partition mapper of asset hourly raises an error" == broken["held_by"]
    assert plain["held_by"].startswith("complete")


def test_condition_of_several_assets(show):
    """AND names each asset that is missing; OR is complete with one of them."""
    consumer("both", HOURLY & PLAIN)
    consumer("either", HOURLY | PLAIN)
    emit(PLAIN, "a")
    assert "waiting for an event of asset hourly" == held_by(show, "both")
    assert held_by(show, "either").startswith("complete")


def test_wait_policy(show):
    """A wait policy decides as it does in the scheduler; one that can never be met says so."""
    consumer("enough", HOURLY, day_rollup(wait_policy=MinimumCount(2)))
    consumer("never", HOURLY, day_rollup(wait_policy=MinimumCount(25)))
    emit(HOURLY, *hours(DAY)[:2])
    assert held_by(show, "enough").startswith("complete")
    assert "can never be satisfied" in held_by(show, "never")


@pytest.mark.parametrize(
    "reference",
    [Asset.ref(name="hourly"), Asset.ref(uri=HOURLY.uri), AssetAlias("some")],
    ids=["name", "uri", "alias"],
)
def test_reference(show, reference):
    """A rollup of an asset referenced by name, by URI or through an alias counts its keys too."""
    consumer("owner", HOURLY)
    consumer("rollup", reference, day_rollup())
    for key in hours(DAY)[:3]:
        with new_session() as session:
            AssetManager().register_asset_change(
                asset=HOURLY, partition_key=key, source_alias_names=["some"], session=session
            )
    assert "waiting for 21 of 24 upstream keys of asset hourly" == held_by(show, "rollup")
    (run,) = show("--dag-id", "rollup", "--partition-key", DAY)
    assert ["3 of 24"] == [asset["received"] for asset in run["assets"]]
    with patch.object(RollupMapper, "to_upstream", side_effect=RuntimeError("broken")):
        assert "the partition mapper of asset hourly raises an error" == held_by(show, "rollup")


def test_alias_without_assets(show):
    """A condition without any asset yet does not hold."""
    consumer("aliased", AssetAlias("some"))
    insert_pending("aliased", ["a"])
    assert "the asset condition does not hold" == held_by(show, "aliased")


def test_definitions_that_cannot_be_evaluated(show):
    """A broken, missing or replaced definition is said, and no other Dag is hidden."""
    for dag_id in ("broken", "changed", "undefined"):
        consumer(dag_id, PLAIN)
    emit(PLAIN, "a")
    consumer("changed", PLAIN, day_rollup())
    insert_dags("no_definition")
    insert_runs("no_definition")
    insert_runs("gone")
    with new_session() as session:
        session.execute(
            update(SerializedDagModel).where(SerializedDagModel.dag_id == "broken").values(_data={"dag": 1})
        )
    lines = {row["dag_id"]: row["held_by"] for row in show()}
    assert lines["broken"].startswith("cannot be evaluated: ")
    assert "made for another timetable: the next evaluation drops it" == lines["changed"]
    assert lines["undefined"].startswith("complete")
    assert "the Dag has no serialized definition" == lines["no_definition"]
    assert "the Dag does not exist any more" == lines["gone"]


@pytest.mark.parametrize("schedule", [PLAIN, AssetAlias("some")], ids=["asset", "alias"])
def test_no_longer_partitioned(show, schedule):
    """A run of a Dag that is scheduled otherwise now will be dropped, also where the fingerprints are equal."""
    consumer("plain", schedule)
    insert_pending("plain", ["a"])
    with new_session() as session:
        write(make_dag("plain", [schedule]), session=session)
    assert "made for another timetable: the next evaluation drops it" == held_by(show, "plain")


def test_nothing_pending(show):
    """A Dag without pending runs has a line if it is asked for, or if requests are left."""
    consumer("plain", PLAIN)
    Scheduler().settle()
    assert [] == show()
    assert "nothing is pending" == held_by(show, "plain")
    ask("plain")
    assert [("plain", 0, 1)] == [(row["dag_id"], row["pending"], row["requests"]) for row in show()]


def test_one_run_in_full(show, clock):
    """With a key: since when, each asset's keys, and the requests for the run and for its Dag."""
    consumer("rollup", HOURLY, day_rollup())
    Scheduler().settle()
    keys = hours(DAY)
    emit(HOURLY, *keys[:22])
    Scheduler().settle()
    emit(HOURLY, keys[22], hours("2024-03-02")[0])
    ask("rollup")
    clock.shift(5)

    assert [
        {
            "dag_id": "rollup",
            "dag_state": "can run",
            "partition_key": DAY,
            "partition_date": None,
            "pending_since": "2030-01-01T00:00:00+00:00",
            "held_by": "waiting for 1 of 24 upstream keys of asset hourly",
            "requests": 2,
            "assets": [
                {
                    "asset": "hourly",
                    "uri": HOURLY.uri,
                    "state": "active",
                    "received": "23 of 24",
                    "received_keys": keys[:23],
                    "missing_keys": keys[23:],
                }
            ],
            "oldest_requests": [
                {"request_for": "the run", "reason": "key log", "age": 5.0},
                {"request_for": "the Dag", "reason": "key log", "age": 5.0},
            ],
        }
    ] == show("--dag-id", "rollup", "--partition-key", DAY)


def test_states_of_one_run(show):
    """An inactive asset and a mapper that raises show on the asset, a paused Dag on the run."""
    rollup()
    change_dag("rollup", is_paused=True)
    with patch.object(RollupMapper, "to_upstream", side_effect=RuntimeError("broken")):
        (run,) = show("--dag-id", "rollup", "--partition-key", DAY)
    assert ("paused", "mapper error") == (run["dag_state"], run["assets"][0]["state"])
    with new_session() as session:
        session.execute(delete(AssetActive))
    (run,) = show("--dag-id", "rollup", "--partition-key", DAY)
    assert "inactive" == run["assets"][0]["state"]


def test_requests_of_one_run_are_bounded(show):
    """A flood of requests for a run is counted, and the oldest are listed."""
    consumer("plain", PLAIN)
    Scheduler().settle()
    (apdr_id,) = insert_pending("plain", ["a"])
    ask("plain", [apdr_id] * 150)
    (run,) = show("--dag-id", "plain", "--partition-key", "a")
    assert (150, 100) == (run["requests"], len(run["oldest_requests"]))


def test_outputs(capsys):
    """Table, plain and YAML say the same; a key with brackets is not taken for markup."""
    consumer("plain", HOURLY & PLAIN)
    emit(PLAIN, "[red]/ä 1e3")
    for output in ("table", "plain", "yaml"):
        for more in ((), ("--dag-id", "plain", "--partition-key", "[red]/ä 1e3")):
            capsys.readouterr()
            run_cli(*more, "--output", output)
            printed = capsys.readouterr().out
            if output == "yaml":
                assert "[red]/ä 1e3" in str(yaml.safe_load(printed))
            else:
                assert "[red]/ä 1e3" in printed
            assert "waiting for an event of asset hourly" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--dag-id", "nope"), "Dag 'nope' does not exist."),
        (("--dag-id", "nope", "--partition-key", "a"), "Dag 'nope' does not exist."),
        (("--partition-key", "a"), "--partition-key needs --dag-id"),
        (("--dag-id", "plain", "--partition-key", "b"), "no pending run with partition key 'b': no event"),
        (("--dag-id", "plain", "--partition-key", "a"), "'a': it fired as asset_triggered__"),
    ],
)
def test_errors(arguments, message):
    """What cannot be shown is said in one line, with an exit code."""
    consumer("plain", PLAIN)
    emit(PLAIN, "a")
    Scheduler().settle()
    with pytest.raises(SystemExit) as error:
        run_cli(*arguments)
    assert message in str(error.value)


def test_missing_table():
    """Without the table, the command says what to run."""
    with (
        patch(
            "airflow.cli.commands.partition_waiting_command.Wake.__tablename__",
            "asset_partition_not_migrated",
        ),
        pytest.raises(
            SystemExit, match=r"asset_partition_not_migrated is missing: run `airflow db migrate` first"
        ),
    ):
        run_cli()


def test_it_reads_only():
    """Neither rows nor locks: every statement is a plain SELECT, and no audit log entry is written."""
    rollup()
    with recorded_statements() as statements:
        run_cli()
        run_cli("--dag-id", "rollup", "--partition-key", DAY)
    read = ("SELECT", "PRAGMA", "SHOW", "DESCRIBE", "WITH")
    assert [] == [text for text in statements if not text.lstrip().upper().startswith(read)]
    assert [] == [text for text in statements if "FOR UPDATE" in text or "FOR SHARE" in text]
    with new_session() as session:
        assert 0 == session.scalar(select(func.count()).select_from(Log))


def test_work_is_bounded():
    """The number of statements and of rows read depends on the Dags, not on how many runs or requests wait."""
    consumer("rollup", HOURLY, day_rollup())
    (apdr_id, *_) = insert_pending("rollup", days(5), asset=HOURLY)

    def count() -> int:
        with recorded_statements() as statements:
            run_cli()
        return len(statements)

    few = count()
    insert_pending("rollup", days(500, "2021-01-01"), asset=HOURLY)
    ask("rollup", [apdr_id] * 500)
    assert few == count()


def test_fired_while_it_is_shown(show):
    """A run that fires between the count and the look at it is not shown as pending."""
    consumer("plain", PLAIN)
    emit(PLAIN, "a")

    execute = Session.execute

    def execute_then_fire(self: Session, statement: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, statement, *args, **kwargs)
        if "min(asset_partition_dag_run_wake" in str(statement):
            with patch.object(Session, "execute", execute):
                Scheduler().settle()
        return result

    with patch.object(Session, "execute", execute_then_fire):
        (row,) = show()
    assert ("a", "nothing is pending") == (fired("plain")[0], row["held_by"])


def test_help(capsys):
    """The command is in the group's help, and its own says what it shows."""
    with pytest.raises(SystemExit):
        get_parser().parse_args(["partitions", "--help"])
    assert "waiting" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        get_parser().parse_args(["partitions", "waiting", "--help"])
    printed = capsys.readouterr().out
    assert "--partition-key" in printed
    assert "reads only" in printed
