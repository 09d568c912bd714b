"""Reading past the remains of deleted requests: rarely, and without losing a request that is committed late."""

from __future__ import annotations

import pytest

from airflow.jobs.asset_partition_wake import queue
from airflow.jobs.asset_partition_wake.waiting import Horizon

from tests_common.db import new_session
from tests_common.factories import Scheduler, ask, asked, insert_dags, insert_runs

pytestmark = pytest.mark.usefixtures("db", "no_passes")


def test_quick_reads_are_whole():
    """A read that is quick, or slow only once, is followed by whole ones, and draws no id."""
    horizon = Horizon()
    with new_session() as session:
        for seconds in (0.0, 1.0, 0.0, 1.0, 0.005):
            horizon = horizon.found_nothing(10, seconds, session=session)
            assert 0 == horizon.after(10)
    (first,) = _requests_of_one_run()
    assert [first] == asked()


def test_slow_reads_are_rare():
    """Reads that stay slow are whole for a hundredth of the time, and at least twice a minute."""
    horizon = Horizon()
    for seconds, again in ((0.1, 10), (5.0, 30)):
        with new_session() as session:
            for _ in range(2):
                horizon = horizon.found_nothing(10, seconds, session=session)
        assert 0 < horizon.after(10 + again - 0.01)
        assert 0 == horizon.after(10 + again)


def _requests_of_one_run() -> list[int]:
    insert_dags("a")
    return ask("a", insert_runs("a"))


def test_drawn_id_leaves_nothing_behind():
    """A drawn id is above all given out before, below all after, and no request stays for it."""
    (before,) = _requests_of_one_run()
    with new_session() as session:
        drawn = queue.draw_id(session=session)
    (after,) = ask("a", [None])
    assert before < drawn < after
    assert [before, after] == asked()


@pytest.mark.backend("postgresql", "mysql")
@pytest.mark.usefixtures("slow_reads")
def test_requests_behind_and_before_the_horizon(clock):
    """A new request is answered at once; one below the horizon, committed late, with the next whole read."""
    insert_dags("a")
    early, late = insert_runs("a", 2)
    scheduler = Scheduler()
    with new_session() as writer:
        writer.add(queue.Wake(apdr_id=early, target_dag_id="a", reason="key log"))
        writer.flush()
        for _ in range(2):
            assert [] == scheduler.evaluate()
    assert [] == scheduler.evaluate()
    ask("a", [late])
    assert [late] == scheduler.evaluate()
    clock.shift(30)
    assert [early] == scheduler.evaluate()
