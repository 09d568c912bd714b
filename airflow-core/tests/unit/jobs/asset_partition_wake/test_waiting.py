"""What one loop reads of the requests (spec 5): oldest first within a Dag, and Dags in turn."""

from __future__ import annotations

from datetime import timedelta
from math import ceil

import pytest

from airflow._shared.timezones import timezone
from airflow.jobs.asset_partition_wake import agenda, waiting
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.jobs.asset_partition_wake.waiting import Waiting

from tests_common.db import new_session, recorded_statements
from tests_common.factories import ask, asked, change_dag, insert_dags, insert_runs

pytestmark = pytest.mark.usefixtures("db", "no_passes")


def claim(step: WakeStep, budget: int) -> list[int]:
    """Claim and commit, without an evaluation: what is claimed counts as evaluated, and stays pending."""
    with new_session() as session:
        return [run.id for run in step.claim(budget, session=session)]


def dags_with_runs(names: list[str], runs: int = 1, **state: bool) -> dict[str, list[int]]:
    insert_dags(*names, **state)
    return {name: insert_runs(name, runs) for name in names}


def resting_dags(prefix: str, count: int) -> list[str]:
    """Have paused Dags, each with a request."""
    dag_ids = [f"{prefix}{n:03}" for n in range(count)]
    insert_dags(*dag_ids, is_paused=True)
    for dag_id in dag_ids:
        ask(dag_id)
    return dag_ids


def test_several_requests_are_one_evaluation():
    """A run that is asked for many times is evaluated once, and all of the requests are answered."""
    (run,) = dags_with_runs(["dag"])["dag"]
    ask("dag", [run] * 5)
    assert [run] == claim(WakeStep(), 3)
    assert [] == asked()


@pytest.mark.parametrize("budget", [4, 100])
def test_oldest_request_first_within_a_dag(budget):
    """The runs of a Dag come in the order of their oldest request, whatever their own ids."""
    runs = dags_with_runs(["dag"], 6)["dag"]
    order = [runs[n] for n in (3, 0, 5, 2, 4, 1)]
    ask("dag", [*order, *order])
    with new_session() as session:
        assert order[:budget] == Waiting(budget, "", session=session).take(budget)


@pytest.mark.parametrize("budget", [8, 100])
def test_dags_in_turn(budget):
    """The Dags' oldest runs come first, then their second ones."""
    runs = dags_with_runs(["a", "b", "c"], 4)
    for dag_id in ("a", "b", "c"):
        ask(dag_id, runs[dag_id])
    with new_session() as session:
        taken = Waiting(budget, "", session=session).take(7)
    assert [runs[dag_id][n] for n in (0, 1) for dag_id in "abc"] + [runs["a"][2]] == taken


def test_flood_does_not_delay_others():
    """Beside 10,000 requests of one Dag, ten Dags with one each are all served in the next loop."""
    flood = dags_with_runs(["f"], 10_000)["f"]
    ask("f", flood)
    others = dags_with_runs(["a0", "a1", "a2", "a3", "a4", "z0", "z1", "z2", "z3", "z4"])
    for dag_id, runs in others.items():
        ask(dag_id, runs)

    claimed = claim(WakeStep(), 500)
    assert {run for runs in others.values() for run in runs} <= set(claimed)
    assert flood[:490] == [run for run in claimed if run in set(flood)]
    assert 9_510 == len(asked())


def test_flood_for_one_run_does_not_hide_the_dags_others():
    """A Dag's requests are read on where the oldest of them name few runs."""
    runs = dags_with_runs(["dag"], 4)["dag"]
    ask("dag", runs[:1] * 60)
    ask("dag", runs[1:])
    assert runs == claim(WakeStep(), 10)
    assert [] == asked()


def test_more_dags_than_the_budget():
    """With more Dags than a loop can serve, all get their turn before one gets a second."""
    runs = dags_with_runs([f"d{n:02}" for n in range(23)], 3)
    for dag_id in runs:
        ask(dag_id, runs[dag_id])
    step = WakeStep()
    claimed = [run for _ in range(5) for run in claim(step, 5)]
    assert {runs[dag_id][0] for dag_id in runs} | {runs["d00"][1], runs["d01"][1]} == set(claimed)
    claimed += [run for _ in range(20) for run in claim(step, 5)]
    assert sorted(run for dag in runs.values() for run in dag) == sorted(claimed)
    assert [] == asked()


def test_turn_starts_with_who_got_nothing():
    """Dags that were looked at, but for which a fan-out left no room, are the first of the next loop."""
    runs = dags_with_runs([f"d{n:02}" for n in range(25)], 3)
    dags_with_runs(["a"], 100)
    ask("a")
    step = WakeStep()
    claim(step, 10)
    for dag_id in runs:
        ask(dag_id, runs[dag_id])
    claimed = [run for _ in range(3) for run in claim(step, 10)]
    assert {runs[dag_id][0] for dag_id in runs} <= set(claimed)


def test_turn_goes_round_while_requests_keep_coming():
    """Dags whose requests never end cannot keep the turn from the Dags behind them."""
    runs = dags_with_runs([f"d{n:02}" for n in range(12)], 40)
    step = WakeStep()
    first: dict[int, int] = {}
    for dag_id in runs:
        ask(dag_id, runs[dag_id])
    for loop in range(4):
        for run in claim(step, 4):
            first.setdefault(run, loop)
        ask("d00", runs["d00"])
    assert {0, 1, 2} == {first[runs[dag_id][0]] for dag_id in runs}


@pytest.mark.parametrize("state", [{"is_paused": True}, {"is_stale": True}])
@pytest.mark.parametrize("requests", [3, 2_000])
def test_dags_that_cannot_run_hide_nothing(state, requests):
    """However many requests wait of Dags that cannot run, a runnable Dag behind them is served in the next loop."""
    resting = dags_with_runs(["a", "b"], **state)
    for dag_id, runs in resting.items():
        ask(dag_id, runs * requests)
    (run,) = dags_with_runs(["z"])["z"]
    ask("z", [run])
    assert [run] == claim(WakeStep(), 10)
    assert 2 * requests == len(asked())


def test_many_dags_that_cannot_run_delay_by_a_bounded_number_of_loops():
    """Past more resting Dags than a loop looks at, the next loops look on from there."""
    resting = resting_dags("a", 200)
    (run,) = dags_with_runs(["z"])["z"]
    ask("z", [run])
    step = WakeStep()
    loops = -(-len(resting) // (10 * waiting.LOOKS))
    assert [run] == [run for _ in range(loops) for run in claim(step, 10)]


def test_flood_does_not_hold_up_the_turn_beside_dags_that_cannot_run():
    """A Dag with more requests than the loop had room for is no reason to look at the same resting Dags again."""
    runs = dags_with_runs(["a", "fan-out"], 200)
    ask("fan-out")
    step = WakeStep()
    claim(step, 10)
    ask("a", runs["a"])
    resting = resting_dags("b", 60)
    (run,) = dags_with_runs(["z"])["z"]
    ask("z", [run])
    loops = 1 + ceil(len(resting) / (10 * waiting.LOOKS))
    assert run in [run for _ in range(loops) for run in claim(step, 10)]


def test_requests_for_whole_dags_do_not_hold_up_the_turn(monkeypatch):
    """Dags that wait for a fan-out do not keep the turn from a Dag behind them that asks for a run."""
    monkeypatch.setattr(agenda, "MAX_FAN_OUTS", 1)
    for dag_id in dags_with_runs([f"a{n}" for n in range(9)], 50):
        ask(dag_id)
    (run,) = dags_with_runs(["z"])["z"]
    ask("z", [run])
    step = WakeStep()
    assert run in [run for _ in range(2) for run in claim(step, 5)]


def test_request_of_an_unpaused_dag_is_answered(clock):
    """Requests of a paused Dag wait, cost a loop one statement, and are answered once it is unpaused."""
    (run,) = dags_with_runs(["dag"], is_paused=True)["dag"]
    ask("dag", [run])
    step = WakeStep()
    assert [] == claim(step, 10)
    with recorded_statements() as statements:
        assert [] == claim(step, 10)
    assert 1 == len(statements)

    change_dag("dag", is_paused=False)
    assert [run] == claim(step, 10)


def test_short_queue_is_one_statement(session):
    """A queue that fits into the loop is read by one statement, one that does not by a bounded number."""
    runs = dags_with_runs(["dag"], 50)["dag"]
    ask("dag", runs[:10])
    session.connection()
    with recorded_statements() as statements:
        Waiting(10, "", session=session).take(10)
    assert 1 == len(statements)
    ask("dag", runs[10:] * 20)
    with recorded_statements("asset_partition_dag_run_wake") as statements:
        Waiting(10, "x", session=session).take(10)
    assert 1 + waiting.LOOKS + waiting.LOOKS >= len(statements)


@pytest.mark.parametrize(
    "requests",
    [2 * waiting.FEW + 1, 4 * waiting.FEW],
    ids=["a short one comes next", "none comes next"],
)
def test_queue_is_read_whole_again_after_a_long_one(requests):
    """Once a long queue has ended, a queue that fits into the loop is one statement, as it was before."""
    budget = 2 * waiting.FEW
    runs = dags_with_runs(["dag"], requests)["dag"]
    step = WakeStep()
    ask("dag", runs)
    assert runs == claim(step, budget) + claim(step, budget) + claim(step, budget)
    ask("dag", runs[:budget])
    with recorded_statements("LIMIT") as reads:
        assert runs[:budget] == claim(step, budget)
    assert 1 == len(reads)


def test_requests_of_dags_that_cannot_run_are_no_long_queue():
    """What waits for Dags that cannot run makes no loop take the queue for a long one, once that has ended."""
    budget = 4 * waiting.FEW
    resting = resting_dags("a", waiting.FEW + 1)
    runs = dags_with_runs(["dag"], budget)["dag"]
    ask("dag", runs)
    step = WakeStep()
    while len(asked()) > len(resting):
        assert claim(step, budget)
    claim(step, budget)
    with recorded_statements() as statements:
        assert [] == claim(step, budget)
    assert 1 == len(statements)


def test_since(session):
    """The age of the queue is that of the oldest request of a Dag that can run."""
    insert_dags("resting", is_paused=True)
    insert_dags("dag")
    ask("resting", [1])
    assert Waiting(10, "", session=session).since is None
    ask("dag", [2])
    with new_session() as other:
        waited = Waiting(10, "", session=other)
    assert waited.since is not None
    assert {2} == waited.of_run.keys()


def test_since_of_a_long_queue(session):
    """Of more requests than a loop can answer, too, those of Dags that cannot run do not count."""
    insert_dags("resting", is_paused=True)
    insert_dags("dag")
    now = timezone.utcnow()
    ask("dag", [1, 2, 3], created_at=now)
    ask("resting", [4, 5, 6], created_at=now - timedelta(hours=1))
    assert now == Waiting(2, "", session=session).since
