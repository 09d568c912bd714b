"""What a loop evaluates next (spec 5): pure decisions, without a database."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from airflow.jobs.asset_partition_wake.agenda import MAX_FAN_OUTS, Agenda, Shares, in_turn

HOUR = 3600.0


def agenda(fan_outs: bool = False, resync: bool = False) -> Agenda:
    agenda = Agenda(HOUR)
    if fan_outs:
        agenda.start_fan_out("dag", [1], upto=10)
    if resync:
        agenda.start_pass(0, upto=10)
    return agenda


@pytest.mark.parametrize(
    ("budget", "fan_outs", "resync", "shares"),
    [
        (500, False, False, Shares(500, 0, 0)),
        (500, True, False, Shares(450, 50, 0)),
        (500, False, True, Shares(450, 0, 50)),
        (500, True, True, Shares(400, 50, 50)),
        (25, True, True, Shares(21, 2, 2)),
        (10, True, True, Shares(8, 1, 1)),
        (3, True, True, Shares(1, 1, 1)),
        (2, True, True, Shares(0, 1, 1)),
        (2, True, False, Shares(1, 1, 0)),
        (1, True, False, Shares(0, 1, 0)),
        (1, False, False, Shares(1, 0, 0)),
    ],
)
def test_shares(budget, fan_outs, resync, shares):
    """Fan-outs and a pass keep a tenth of the loop each, at least one run, while they have runs left."""
    assert shares == agenda(fan_outs, resync).shares(budget)


@settings(deadline=None)
@given(st.integers(2, 1000), st.booleans(), st.booleans())
def test_shares_are_the_whole_budget(budget, fan_outs, resync):
    """The shares add up to the budget: none of it is lost, and none given out twice."""
    assert budget == sum(agenda(fan_outs, resync).shares(budget))


def test_draft_is_a_copy():
    """What a loop does to its draft is forgotten with it."""
    kept = agenda(fan_outs=True, resync=True)
    before = repr(kept)
    draft = kept.draft()
    assert kept == draft

    draft.start_fan_out("other", [2], upto=10)
    draft.fan_outs["dag"].after = 5
    draft.fan_outs["dag"].held |= {3}
    draft.fan_outs["dag"].exhausted = True
    draft.resync.after = ("dag", 5)
    draft.resync.held |= {3}
    draft.resync.exhausted = True
    draft.turn = "dag"
    draft.finish_fan_outs()

    assert before == repr(kept)


def test_one_fan_out_for_a_dag():
    """A request for a Dag whose fan-out is under way waits for its end."""
    kept = agenda(fan_outs=True)
    assert not kept.wants_fan_out("dag")
    assert kept.wants_fan_out("other")

    kept.fan_outs["dag"].exhausted = True
    kept.finish_fan_outs()
    assert kept.wants_fan_out("dag")


def test_so_many_fan_outs_side_by_side():
    """Requests for further Dags wait for one of the fan-outs to finish."""
    kept = agenda()
    for n in range(MAX_FAN_OUTS):
        assert kept.wants_fan_out(f"dag{n}")
        kept.start_fan_out(f"dag{n}", [n], upto=10)
    assert not kept.wants_fan_out("one more")


def test_finished_fan_outs():
    """A fan-out is finished once it has read all and no peer holds one of its runs; it tells what it answered."""
    kept = agenda(fan_outs=True)
    kept.start_fan_out("other", [2, 3], upto=10)
    assert [] == kept.finish_fan_outs()

    kept.fan_outs["other"].exhausted = True
    kept.fan_outs["other"].held = frozenset({7})
    assert [] == kept.finish_fan_outs()

    kept.fan_outs["other"].held = frozenset()
    assert [{2, 3}] == [fan_out.request_ids for fan_out in kept.finish_fan_outs()]
    assert ["dag"] == list(kept.fan_outs)


def finish(kept: Agenda, now: float) -> None:
    kept.resync.exhausted = True
    assert kept.finish_pass(now)


def test_startup_pass_is_due_at_once_periodic_ones_after_it():
    """The first pass is the startup pass, whatever the clock says; all others are periodic."""
    kept = Agenda(HOUR)
    assert kept.pass_is_due(-1e9)
    kept.start_pass(0, upto=10)
    assert "startup" == kept.resync.kind
    finish(kept, 1)
    for _ in range(2):
        kept.start_pass(HOUR, upto=10)
        assert "periodic" == kept.resync.kind
        finish(kept, HOUR)


def test_no_pass_beside_another():
    """While a pass runs, no other one starts, however long it takes."""
    assert not agenda(resync=True).pass_is_due(100 * HOUR)


@pytest.mark.parametrize(
    ("ended", "next_at"),
    [(1, HOUR), (HOUR - 1, HOUR), (HOUR, HOUR), (HOUR + 1, 2 * HOUR + 1), (5 * HOUR, 6 * HOUR)],
)
def test_interval(ended, next_at):
    """The interval counts from a pass's start, or from its end where it took longer than the interval."""
    kept = agenda(resync=True)
    finish(kept, ended)
    assert not kept.pass_is_due(next_at - 0.001)
    assert kept.pass_is_due(next_at)


def test_pass_waits_for_what_a_peer_holds():
    """A pass ends once it has read all and no peer holds one of its runs."""
    kept = agenda(resync=True)
    assert kept.finish_pass(1) is None
    kept.resync.exhausted = True
    kept.resync.held = frozenset({7})
    assert kept.finish_pass(1) is None
    kept.resync.held = frozenset()
    assert "startup" == kept.finish_pass(1).kind
    assert kept.finish_pass(1) is None


def test_dags_in_turn():
    """One run of each Dag after the other, the oldest of each first."""
    waiting = {"b": [4, 5, 6], "a": [1], "c": [7, 8]}
    assert [("b", 4), ("a", 1), ("c", 7), ("b", 5), ("c", 8), ("b", 6)] == list(in_turn(waiting))


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.lists(st.integers(), max_size=8, unique=True)))
def test_in_turn_leaves_nothing_out(waiting):
    """Each run comes once, each Dag's in its own order, and none a round later than it could."""
    served = list(in_turn(waiting))
    for dag_id, runs in waiting.items():
        assert runs == [run for served_id, run in served if served_id == dag_id]
    rounds = [
        sum(1 for earlier, _ in served[:n] if earlier == dag_id) for n, (dag_id, _) in enumerate(served)
    ]
    assert sorted(rounds) == rounds
