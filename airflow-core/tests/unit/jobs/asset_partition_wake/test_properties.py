"""Properties that hold whatever happens, in whatever order: of what a loop claims, and of the step as a whole."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import delete, select

from airflow.jobs.asset_partition_wake.agenda import Agenda
from airflow.jobs.asset_partition_wake.step import WakeStep
from airflow.models.asset import AssetActive, AssetPartitionDagRun as APDR
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake as Wake
from airflow.models.dag import DagModel
from airflow.sdk import Asset

from tests_common.db import clear_db_apdr, new_session
from tests_common.factories import (
    Scheduler,
    ask,
    asked,
    change_dag,
    consumer,
    day_rollup,
    emit,
    fired,
    hours,
    insert_dags,
    insert_runs,
    pending,
)

pytestmark = pytest.mark.backend("sqlite")

SETTINGS = settings(
    max_examples=12,
    stateful_step_count=14,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # to shrink a failure takes minutes: a step is a transaction
    suppress_health_check=list(HealthCheck),
)


class Claims(RuleBasedStateMachine):
    """Requests, fan-outs and passes over runs that never fire: shares, order, completeness, and loops that fail."""

    @initialize(budget=st.integers(3, 25))
    def start(self, budget):
        clear_db_apdr()
        self.budget = budget
        self.step = WakeStep()
        self.dags = ["a", "b", "c"]
        insert_dags(*self.dags)
        self.runs = {dag_id: insert_runs(dag_id, 2) for dag_id in self.dags}
        self.unanswered: dict[int, set[int]] = {}
        """Of each request that waits, the runs that have to be evaluated since."""
        self.passed = {run for runs in self.runs.values() for run in runs}
        """What the pass has left."""

    @rule(dag_id=st.sampled_from("abc"), count=st.integers(1, 12))
    def new_runs(self, dag_id, count):
        runs = insert_runs(dag_id, count)
        self.runs[dag_id] += runs
        for request, run in zip(ask(dag_id, runs), runs, strict=True):
            self.unanswered[request] = {run}

    @rule(dag_id=st.sampled_from("abc"), data=st.data())
    def ask_for_run(self, dag_id, data):
        run = data.draw(st.sampled_from(self.runs[dag_id]))
        for request in ask(dag_id, [run] * data.draw(st.integers(1, 3))):
            self.unanswered[request] = {run}

    @rule(dag_id=st.sampled_from("abc"))
    def ask_for_dag(self, dag_id):
        (request,) = ask(dag_id)
        self.unanswered[request] = set(self.runs[dag_id])

    @rule()
    def loop_fails(self):
        """A loop that is rolled back leaves no trace."""
        before = self.step._agenda
        with new_session() as session:
            self.step.claim(self.budget, session=session)
            session.rollback()
        assert before is self.step._agenda

    @rule()
    def loop(self):
        agenda = self.step._agenda
        left = {dag_id: fan_out for dag_id, fan_out in agenda.fan_outs.items() if not fan_out.exhausted}
        resync = agenda.resync
        with new_session() as session:
            got = self.step.claim(self.budget, session=session)
            claimed = {run.id for run in got}
        assert len(claimed) == len(got) <= self.budget
        assert sorted(got, key=lambda run: (run.created_at, run.id)) == got
        tenth = max(1, self.budget // 10)
        if resync:
            to_come = {
                run
                for dag_id, runs in self.runs.items()
                for run in runs
                if resync.after < (dag_id, run) and run <= resync.upto
            }
            assert min(tenth, len(to_come)) <= len(claimed & to_come)
        for dag_id, fan_out in left.items():
            to_come = {run for run in self.runs[dag_id] if fan_out.after < run <= fan_out.upto}
            if len(left) == 1:
                assert min(tenth, len(to_come)) <= len(claimed & to_come)
        self.passed -= claimed
        for runs in self.unanswered.values():
            runs -= claimed
        deleted = self.unanswered.keys() - set(asked())
        assert not any(self.unanswered.pop(request) for request in deleted)

    @invariant()
    def only_what_was_evaluated_is_answered(self):
        if hasattr(self, "unanswered"):
            assert set(self.unanswered) == set(asked())

    def teardown(self):
        if not hasattr(self, "step"):
            return
        for _ in range(200):
            self.loop()
            if not self.unanswered and self.step._agenda.is_idle(0) and not self.passed:
                break
        assert {} == self.unanswered
        assert set() == self.passed


class Universe:
    """A Dag over assets of its own, so that two of them can live through the same."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hourly = Asset(f"{name}_hourly", uri=f"test://{name}/hourly")
        self.plain = Asset(f"{name}_plain", uri=f"test://{name}/plain")
        self.dags = [f"{name}_rollup", f"{name}_both"]
        consumer(self.dags[0], self.hourly, day_rollup())
        self.edit(any_of=False)

    def edit(self, *, any_of: bool) -> None:
        condition = (self.hourly | self.plain) if any_of else (self.hourly & self.plain)
        mappers = {self.hourly: day_rollup()}
        with new_session() as session:
            dag = session.get(DagModel, self.dags[1])
            paused, stale = (dag.is_paused, dag.is_stale) if dag else (False, False)
        consumer(self.dags[1], condition, paused=paused, partition_mapper_config=mappers)
        change_dag(self.dags[1], is_stale=stale)

    def fired(self) -> list[list[str]]:
        return [sorted(fired(dag_id)) for dag_id in self.dags]


class Naive(Scheduler):
    """Evaluates every pending run of its Dags in every loop, as the rule of the whole thing says it."""

    def __init__(self, universe: Universe) -> None:
        super().__init__()
        self.runner._asset_partition_wake.claim = self.claim
        self.dags = universe.dags

    def claim(self, budget, *, session):
        session.execute(delete(Wake).where(Wake.target_dag_id.in_(self.dags)))
        can_run = select(DagModel.dag_id).where(DagModel.is_paused.is_(False), DagModel.is_stale.is_(False))
        runs = select(APDR).where(
            APDR.created_dag_run_id.is_(None),
            APDR.target_dag_id.in_(self.dags),
            APDR.target_dag_id.in_(can_run),
        )
        return session.scalars(runs.order_by(APDR.created_at, APDR.id)).all()


DAY = "2024-03-0{}"


class Steps(RuleBasedStateMachine):
    """Ours and a scheduler that evaluates everything live through the same: what has fired is the same."""

    @initialize(budget=st.integers(1, 6))
    def start(self, budget):
        clear_db_apdr()
        self.ours = Universe("ours")
        self.naive = Universe("naive")
        self.reference = Naive(self.naive)
        self.scheduler = Scheduler(budget)
        # Requests alone have to do: no pass hides a lost one.
        self.no_passes = patch.object(Agenda, "pass_is_due", lambda self, now: False)
        self.no_passes.start()

    def both(self):
        return self.ours, self.naive

    @rule(day=st.integers(1, 3), first=st.integers(0, 23), count=st.integers(1, 24))
    def hours_arrive(self, day, first, count):
        for universe in self.both():
            emit(universe.hourly, *hours(DAY.format(day))[first : first + count])

    @rule(day=st.integers(1, 3))
    def plain_arrives(self, day):
        for universe in self.both():
            emit(universe.plain, DAY.format(day))

    @rule(index=st.integers(0, 1), values=st.sampled_from(["is_paused", "is_stale"]), on=st.booleans())
    def dag_stops_or_goes_on(self, index, values, on):
        for universe in self.both():
            change_dag(universe.dags[index], **{values: on})

    @rule(any_of=st.booleans())
    def timetable_is_edited(self, any_of):
        for universe in self.both():
            universe.edit(any_of=any_of)

    @rule(which=st.sampled_from(["hourly", "plain"]))
    def asset_is_deactivated(self, which):
        with new_session() as session:
            for universe in self.both():
                session.execute(delete(AssetActive).where(AssetActive.name == getattr(universe, which).name))

    @rule()
    def assets_are_activated(self):
        self.scheduler.runner._update_asset_orphanage()

    @rule()
    def requests_are_tidied(self):
        self.scheduler.runner._asset_partition_wake.tidy()

    @rule(fail=st.sampled_from(["create_dagrun", "rollback"]))
    def loop_fails(self, fail):
        if fail == "create_dagrun":
            target = "airflow.serialization.definitions.dag.SerializedDAG.create_dagrun"
            with patch(target, side_effect=RuntimeError("no")), contextlib.suppress(RuntimeError):
                self.scheduler.step()
        else:
            with new_session() as session:
                self.scheduler.runner._create_dagruns_for_partitioned_asset_dags(session)
                session.rollback()

    @rule()
    def they_evaluate(self):
        self.reference.step()
        self.scheduler.settle()
        assert self.naive.fired() == self.ours.fired()

    def teardown(self):
        if not hasattr(self, "no_passes"):
            return
        try:
            for universe in self.both():
                for dag_id in universe.dags:
                    change_dag(dag_id, is_paused=False, is_stale=False)
            self.assets_are_activated()
            self.they_evaluate()
            assert [pending(dag_id) for dag_id in self.naive.dags] == [
                pending(dag_id) for dag_id in self.ours.dags
            ]
        finally:
            self.no_passes.stop()
            clear_db_apdr()


TestClaims = Claims.TestCase
TestClaims.settings = SETTINGS
TestSteps = Steps.TestCase
TestSteps.settings = SETTINGS
