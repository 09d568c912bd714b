"""Fan-outs and resync passes (spec 5): every run once, spread over loops."""

from __future__ import annotations

import pytest

from airflow.jobs.asset_partition_wake import agenda, sources
from airflow.jobs.asset_partition_wake.agenda import FanOut, ResyncPass
from airflow.jobs.asset_partition_wake.step import WakeStep

from tests_common.db import new_session
from tests_common.factories import ask, asked, change_dag, insert_dags, insert_runs

pytestmark = pytest.mark.usefixtures("db")

NO_PASSES = pytest.mark.usefixtures("no_passes")


def claim(step: WakeStep, budget: int) -> list[int]:
    """Claim and commit, without an evaluation: what is claimed counts as evaluated, and stays pending."""
    with new_session() as session:
        return [run.id for run in step.claim(budget, session=session)]


def claim_until_idle(step: WakeStep, budget: int) -> list[list[int]]:
    """Return what each loop claims, until one finds nothing to do and nothing is under way."""
    loops = []
    while (loop := claim(step, budget)) or step._agenda.fan_outs or step._agenda.resync:
        assert len(loop) <= budget
        loops.append(loop)
        assert len(loops) < 200
    # The last loop of a source that ended just with the one before finds out that it has.
    return [loop for loop in loops if loop]


# Fan-outs


@NO_PASSES
def test_fan_out_reads_every_run_once():
    """A request for a Dag evaluates each of its pending runs once, the oldest first, spread over the loops."""
    insert_dags("dag", "other")
    runs = insert_runs("dag", 10)
    insert_runs("other", 3)
    runs += insert_runs("dag", 3)
    ask("dag")
    assert [runs[:5], runs[5:10], runs[10:]] == claim_until_idle(WakeStep(), 5)


@NO_PASSES
def test_fan_out_keeps_its_request_to_the_end():
    """The request for the Dag is deleted in the loop that finishes the fan-out, not before."""
    insert_dags("dag")
    insert_runs("dag", 9)
    ids = ask("dag")
    step = WakeStep()
    for _ in range(2):
        assert 4 == len(claim(step, 4))
        assert ids == asked()
    assert 1 == len(claim(step, 4))
    assert [] == asked()


@NO_PASSES
def test_fan_out_of_a_dag_without_runs():
    """A request for a Dag that has nothing pending is answered by the loop that reads it."""
    insert_dags("dag")
    ask("dag", [None, None])
    assert [] == claim(WakeStep(), 5)
    assert [] == asked()


@NO_PASSES
def test_requests_read_together_are_one_fan_out():
    """Several requests for a Dag that a fan-out starts with are all answered by it."""
    insert_dags("dag")
    runs = insert_runs("dag", 3)
    ask("dag", [None, None, None])
    assert [runs] == claim_until_idle(WakeStep(), 5)
    assert [] == asked()


@NO_PASSES
def test_request_during_a_fan_out_is_answered_by_another():
    """A request for a Dag whose fan-out is under way outlives it, and has every run evaluated again after it."""
    insert_dags("dag")
    runs = insert_runs("dag", 6)
    ask("dag")
    step = WakeStep()
    loops = [claim(step, 4)]
    later = ask("dag")
    loops.append(claim(step, 4))
    assert later == asked()
    loops += claim_until_idle(step, 4)
    assert [runs[:4], runs[4:], runs[:4], runs[4:]] == loops
    assert [] == asked()


@NO_PASSES
def test_runs_made_after_the_start_are_no_part_of_a_fan_out():
    """A run that is created while its Dag's fan-out is under way has a request of its own, and waits for it."""
    insert_dags("dag")
    runs = insert_runs("dag", 6)
    ask("dag")
    step = WakeStep()
    first = claim(step, 4)
    insert_runs("dag", 4)
    assert [runs[:4], runs[4:]] == [first, *claim_until_idle(step, 4)]


@NO_PASSES
@pytest.mark.parametrize("state", ["is_paused", "is_stale"])
def test_dag_rests_half_way(state):
    """A Dag that is paused during its fan-out keeps the request, and has every run evaluated once it can run."""
    insert_dags("dag")
    runs = insert_runs("dag", 10)
    ids = ask("dag")
    step = WakeStep()
    assert runs[:4] == claim(step, 4)
    change_dag("dag", **{state: True})
    assert [] == claim_until_idle(step, 4)
    assert ids == asked()
    assert {} == step._agenda.fan_outs

    change_dag("dag", **{state: False})
    evaluated = [run for loop in claim_until_idle(step, 4) for run in loop]
    assert set(runs[4:]) <= set(evaluated)
    assert [] == asked()


@NO_PASSES
def test_more_requests_for_dags_than_fan_outs(monkeypatch):
    """Requests for more Dags than fan out side by side wait for their turn, and all are answered."""
    monkeypatch.setattr(agenda, "MAX_FAN_OUTS", 3)
    dag_ids = [f"d{n:02}" for n in range(10)]
    insert_dags(*dag_ids)
    runs = {dag_id: insert_runs(dag_id, 4) for dag_id in dag_ids}
    for dag_id in dag_ids:
        ask(dag_id)
    step = WakeStep()
    loops = []
    while asked():
        loops.append(claim(step, 6))
        assert len(step._agenda.fan_outs) <= 3
        assert len(loops) < 20
    assert sorted(run for dag in runs.values() for run in dag) == sorted(
        run for loop in loops for run in loop
    )
    assert [] == asked()


@NO_PASSES
def test_fan_outs_share_evenly():
    """Fan-outs under way side by side get on alike, a short one leaving its share to the long one."""
    insert_dags("a", "b", "c")
    a, b, c = insert_runs("a", 50), insert_runs("b", 1), insert_runs("c", 50)
    for dag_id in "abc":
        ask(dag_id)
    assert a[:4] + b + c[:5] == claim(WakeStep(), 10)


def test_held_runs_come_again_first(session):
    """Runs that a peer had locked are tried again before a fan-out or a pass reads on."""
    insert_dags("dag")
    runs = insert_runs("dag", 6)
    fan_out = FanOut("dag", frozenset(), upto=runs[-1], after=runs[2], held=frozenset(runs[:2]))
    resync = ResyncPass("periodic", 0, upto=runs[-1], after=("dag", runs[2]), held=frozenset(runs[:2]))

    assert [*runs[:2], runs[3]] == list(sources.next_of_fan_outs([fan_out], 3, session=session))
    assert [*runs[:2], runs[3]] == sources.next_of_pass(resync, 3, session=session)
    assert frozenset() == fan_out.held | resync.held
    assert (runs[3], ("dag", runs[3])) == (fan_out.after, resync.after)


# Passes


def test_pass_leaves_resting_dags_out(session):
    """The runs of a resting Dag are not even tried, and its end is skipped to."""
    insert_dags("a", is_paused=True)
    insert_dags("b")
    insert_runs("a", 9)
    runs = insert_runs("b", 2)
    resync = ResyncPass("startup", 0, upto=runs[-1])
    assert runs == sources.next_of_pass(resync, 4, session=session)
    assert resync.exhausted


def test_startup_pass_reads_every_run_once():
    """The first step starts a pass over all pending runs, also where there are more than a loop evaluates."""
    insert_dags("a", "b", "c", "d")
    insert_dags("b2", is_paused=True)
    insert_dags("b3", is_stale=True)
    runs = [
        run
        for dag_id, count in [("c", 7), ("a", 1), ("d", 3), ("b", 12)]
        for run in insert_runs(dag_id, count)
    ]
    insert_runs("b2", 9)
    insert_runs("b3", 9)
    insert_runs("gone", 2)
    step = WakeStep()
    loops = claim_until_idle(step, 5)
    assert sorted(runs) == sorted(run for loop in loops for run in loop)
    assert [5, 5, 5, 5, 3] == [len(loop) for loop in loops]
    assert step._agenda.resync is None


@pytest.mark.parametrize("budget", [1, 4, 5, 30])
@pytest.mark.parametrize("resting", ["a", "b", "c", "ac", "abc"])
def test_pass_skips_resting_dags(budget, resting):
    """Wherever a resting Dag stands among others, a pass of any budget evaluates exactly the others' runs."""
    runs = []
    for dag_id, count in (("a", 4), ("b", 11), ("c", 5)):
        insert_dags(dag_id, is_paused=dag_id in resting)
        inserted = insert_runs(dag_id, count)
        runs += [] if dag_id in resting else inserted
    step = WakeStep()
    evaluated = []
    for _ in range(60):
        loop = claim(step, budget)
        assert len(loop) <= budget
        evaluated += loop
        if step._agenda.resync is None:
            break
    assert sorted(runs) == sorted(evaluated)
    assert step._agenda.resync is None


def test_dag_rests_while_a_pass_is_in_it():
    """A Dag that is paused while the pass reads its runs is left behind at once, not tried run by run."""
    insert_dags("a", "b")
    insert_runs("a", 100)
    b = insert_runs("b", 2)
    step = WakeStep()
    claim(step, 5)
    change_dag("a", is_paused=True)
    loops = claim(step, 5) + claim(step, 5)
    assert b == loops
    assert step._agenda.resync is None


def test_many_resting_dags_end_a_pass_in_a_bounded_number_of_loops():
    """Past resting Dags a pass looks at so many pages a loop, and no run behind them is left out."""
    dag_ids = [f"d{n:02}" for n in range(60)]
    insert_dags(*dag_ids, is_paused=True)
    for dag_id in dag_ids:
        insert_runs(dag_id, 2)
    insert_dags("z")
    runs = insert_runs("z", 3)
    step = WakeStep()
    evaluated = []
    for _ in range(1 + 60 // sources.PAGES):
        evaluated += claim(step, 4)
    assert runs == evaluated
    assert step._agenda.resync is None


def test_runs_made_after_the_start_are_no_part_of_a_pass():
    """A run that is created while a pass is under way has a request of its own, and the pass ends without it."""
    insert_dags("dag")
    runs = insert_runs("dag", 6)
    step = WakeStep()
    loops = [claim(step, 4)]
    insert_runs("dag", 4)
    assert [runs[:4], runs[4:]] == loops + claim_until_idle(step, 4)


def test_periodic_pass_counts_from_the_start(clock):
    """A pass starts each interval after the start of the one before."""
    insert_dags("dag")
    runs = insert_runs("dag", 6)
    step = WakeStep()
    assert runs[:4] == claim(step, 4)
    clock.shift(3000)
    assert runs[4:] == claim(step, 4)
    clock.shift(599)
    assert [] == claim(step, 4)
    clock.shift(1)
    assert [runs[:4], runs[4:]] == claim_until_idle(step, 4)
    clock.shift(3599)
    assert [] == claim(step, 4)
    clock.shift(1)
    assert runs[:4] == claim(step, 4)


def test_periodic_pass_counts_from_the_end_of_a_long_one(clock):
    """After a pass that took longer than the interval, the next one starts an interval after its end."""
    insert_dags("dag")
    runs = insert_runs("dag", 6)
    step = WakeStep()
    assert runs[:4] == claim(step, 4)
    clock.shift(5000)
    assert runs[4:] == claim(step, 4)
    clock.shift(3599)
    assert [] == claim(step, 4)
    clock.shift(1)
    assert runs[:4] == claim(step, 4)


# Shares


def under_way(budget: int, *, flood: int, fan_out: int, resync: int) -> tuple[WakeStep, dict[str, set[int]]]:
    """Return a step with so many runs asked for, in a fan-out that has started, and in a pass that has."""
    insert_dags("f", "o", "p")
    runs = {"p": set(insert_runs("p", resync)) if resync else set()}
    step = WakeStep()
    if resync:
        step._agenda.start_pass(0, upto=max(runs["p"]))
    step._agenda.next_pass_at = float("inf")
    runs["f"] = set(insert_runs("f", flood)) if flood else set()
    runs["o"] = set(insert_runs("o", fan_out)) if fan_out else set()
    if fan_out:
        ask("o")
    if flood:
        ask("f", sorted(runs["f"]))
    return step, runs


@pytest.mark.parametrize(
    ("budget", "flood", "fan_out", "resync", "expected"),
    [
        # Each keeps its share.
        (500, 1000, 600, 600, (400, 50, 50)),
        (500, 1000, 600, 0, (450, 50, 0)),
        (500, 1000, 0, 600, (450, 0, 50)),
        (500, 1000, 0, 0, (500, 0, 0)),
        (10, 50, 50, 50, (8, 1, 1)),
        (3, 50, 50, 50, (1, 1, 1)),
        (2, 50, 50, 50, (0, 1, 1)),
        # What the asked-for runs leave goes to the fan-outs, and what these leave to the pass.
        (500, 10, 600, 600, (10, 440, 50)),
        (500, 0, 600, 600, (0, 450, 50)),
        (500, 10, 0, 600, (10, 0, 490)),
        (500, 10, 20, 600, (10, 20, 470)),
        (500, 1000, 20, 600, (400, 20, 80)),
        # What the pass leaves goes to the others.
        (500, 1000, 600, 5, (445, 50, 5)),
        (500, 1000, 20, 5, (475, 20, 5)),
        (500, 10, 600, 5, (10, 485, 5)),
    ],
)
def test_shares_of_the_budget(budget, flood, fan_out, resync, expected):
    """Asked-for runs, fan-outs and a pass share a loop; what one does not use goes to the others."""
    step, runs = under_way(budget, flood=flood, fan_out=fan_out, resync=resync)
    loop = claim(step, budget)
    assert expected == tuple(len(runs[dag_id] & set(loop)) for dag_id in "fop")
    assert min(budget, flood + fan_out + resync) == len(loop)


@pytest.mark.parametrize("budget", range(1, 11))
def test_nothing_starves(budget):
    """With any budget, however small, no loop evaluates more, and all three sources come to their end."""
    step, runs = under_way(budget, flood=30, fan_out=20, resync=10)
    loops = claim_until_idle(step, budget)
    assert set().union(*runs.values()) == {run for loop in loops for run in loop}
    assert -(-60 // budget) <= len(loops) <= 60 // budget + 3
    assert [] == asked()


def test_run_that_two_sources_name_is_evaluated_once():
    """A run that is asked for, in a fan-out and in the pass is one of the loop's runs, once."""
    insert_dags("dag")
    runs = insert_runs("dag", 8)
    ask("dag", [*runs[:3], None])
    loop = claim(WakeStep(), 20)
    assert runs == loop
    assert [] == asked()


def test_overlap_does_not_waste_the_loop():
    """Where sources name the same runs, the loop is filled with further ones."""
    insert_dags("dag")
    runs = insert_runs("dag", 40)
    ask("dag", [*runs, None])
    assert 20 == len(claim(WakeStep(), 20))
