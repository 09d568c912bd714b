"""The cases: what is done, what is measured, and what is to be reached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from _lib.bench.databases import OURS, Databases
from _lib.bench.report import Row, Times, seconds
from _lib.bench.sizes import Sizes
from _lib.bench.workers import Worker
from _lib.environment import Problem

IN_A_ROW = 5
"""Claims of one side before it is the other's turn: right after stock has read all runs, every cache is cold for ours."""


@dataclass
class Options:
    """What the user chose."""

    sizes: Sizes
    times: int
    few: int
    queue: int
    keys: int
    plans: list[str] | None = None


@dataclass
class Bench:
    """One database's run of the cases."""

    databases: Databases
    options: Options
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    @property
    def backend(self) -> str:
        return self.databases.backend

    def row(self, case: str, what: str, **values: Any) -> Row:
        """Note a result."""
        row = Row(case, self.backend, what, **values)
        self.rows.append(row)
        self.say(
            f"{self.backend}: {case}, {what}: {row.stock or '-'} stock, {row.ours or '-'} ours; {row.verdict or row.note}"
        )
        return row

    def in_turn(
        self, stock: Callable[..., list[float]], ours: Callable[..., list[float]], times: int, each: int = 1
    ) -> tuple[Times, Times]:
        """Measure both in turn, *each* so often in a row, after a first time that does not count."""
        stock(times=1), ours(times=1)
        each = min(each, times)
        of_stock, of_ours = [], []
        for _ in range(max(1, times // each)):
            of_stock += stock(times=each)
            of_ours += ours(times=each)
        return Times(of_stock), Times(of_ours)

    def note_plans(self, title: str, ours: Worker) -> None:
        """Add the plans of a claim's statements to the report."""
        if self.options.plans is None:
            return
        self.options.plans.append(f"\n==== {self.backend}: {title} ====\n")
        for plan in ours.plans():
            self.options.plans.append(f"{plan['statement']}\n-- {plan['parameters']}\n{plan['plan']}\n")


def claim(bench: Bench) -> None:
    """Measure a loop's claim with more and more requests waiting."""
    options, times = bench.options, bench.options.times
    stock, ours = bench.databases.pair(options.sizes)
    ours.clear()
    one, idle = bench.in_turn(ours.select_one, ours.step, times * 20, 10)
    bench.row(
        "idle",
        "step: ours to SELECT 1",
        stock=one,
        ours=idle,
        value=idle.median / one.median,
        target=3,
        note="SELECT 1 as stock",
    )
    count = ours.count(what="step")
    bench.row("idle", "statements of a step", value=count["statements"], target=1, unit="")
    bench.note_plans("idle", ours)
    whole = Times(stock.step(times=1) and stock.step(times=3))
    bench.row(
        "idle",
        "step: stock to ours",
        stock=whole,
        ours=idle,
        value=whole.median / idle.median,
        target=300,
        at_least=True,
    )

    costs: dict[int, Times] = {}
    of_stock: dict[int, Times] = {}
    for requests, target in (
        (50, 30),
        (500, 12),
        (5_000, None),
        (50_000, 10),
        (options.queue, None),
    ):
        runs = ours.fill(count=requests)
        of_stock[requests], costs[requests] = bench.in_turn(stock.claim, ours.claim, times, IN_A_ROW)
        got = ours.count(what="claim")
        bench.row(
            "claim",
            f"{requests:,} requests",
            stock=of_stock[requests],
            ours=costs[requests],
            value=of_stock[requests].median / costs[requests].median,
            target=target,
            at_least=True,
            note=f"{got['result']} of {runs:,} runs in {got['statements']} statements",
            more={"requests": requests},
        )
        bench.note_plans(f"{requests:,} requests", ours)
    ours.turn()
    first = Times(ours.claim(times=times))
    bench.row(
        "claim",
        f"{options.queue:,} requests, the first loop to a later one",
        ours=first,
        value=first.median / costs[options.queue].median,
    )
    for larger, smaller, most in ((50_000, 500, 2.5), (options.queue, 50_000, 1.5)):
        bench.row(
            "claim",
            f"{larger:,} to {smaller:,} requests",
            ours=costs[larger],
            value=costs[larger].median / costs[smaller].median,
            target=most,
        )
    runs = ours.fill(count=50_000, kind="one Dag")
    stock_times, ours_times = bench.in_turn(stock.claim, ours.claim, times, IN_A_ROW)
    got = ours.count(what="claim")
    bench.row(
        "claim",
        "50,000 requests of one Dag",
        stock=stock_times,
        ours=ours_times,
        value=stock_times.median / ours_times.median,
        target=10,
        at_least=True,
        note=f"{got['result']} of {runs:,} runs in {got['statements']} statements",
    )
    bench.note_plans("50,000 requests of one Dag", ours)
    ours.clear()


def step(bench: Bench) -> None:
    """Measure the whole step of a loop: 500 runs in 500 Dags, none of them complete."""
    stock, ours = bench.databases.pair(bench.options.sizes)
    runs = ours.fill(count=min(500, bench.options.sizes.first), kind="oldest")
    of_stock, of_ours = bench.in_turn(stock.step, ours.step, bench.options.few)
    bench.row(
        "step",
        f"{runs} runs in as many Dags: ours to stock",
        stock=of_stock,
        ours=of_ours,
        value=of_ours.median / of_stock.median,
        target=0.6,
        note=_fired(stock, ours),
    )
    ours.clear()


def fire(bench: Bench) -> None:
    """Measure a step in which 500 runs are complete and fire."""
    stock, ours = bench.databases.pair(bench.options.sizes)
    count = min(500, bench.options.sizes.first)
    for worker in (stock, ours):
        worker.satisfy(count=count)
    try:
        runs = ours.fill(count=count, kind="oldest")
        of_stock, of_ours = bench.in_turn(stock.step, ours.step, bench.options.few)
        bench.row(
            "fire",
            f"{runs} runs: ours to stock",
            stock=of_stock,
            ours=of_ours,
            value=of_ours.median / of_stock.median,
            target=1,
            note=_fired(stock, ours),
        )
        ours.clear()
    finally:
        for worker in (stock, ours):
            worker.unsatisfy()


def _fired(stock: Worker, ours: Worker) -> str:
    """Say in how many Dags runs fired, and check that it is the same on both sides."""
    of_stock, of_ours = stock.count(what="step")["result"], ours.count(what="step")["result"]
    if of_stock != of_ours:
        raise Problem(f"stock fires in {of_stock} Dags and ours in {of_ours}: the two do not do the same")
    return f"fired in {of_ours} Dags"


def resync(bench: Bench) -> None:
    """Measure what a pass adds to a loop."""
    times = bench.options.times
    stock, ours = bench.databases.pair(bench.options.sizes)
    ours.clear()
    for first, what in ((True, "first loop"), (False, "later loop")):
        read = functools.partial(ours.pass_reads, first=first)
        of_stock, of_ours = bench.in_turn(stock.claim, read, times, IN_A_ROW)
        bench.row(
            "pass",
            f"share of a {what}, to stock's claim",
            stock=of_stock,
            ours=of_ours,
            value=100 * of_ours.median / of_stock.median,
            target=5,
            unit=" %",
        )

    def loop(begun: bool, times: int) -> list[float]:
        ours.due_pass(begun=begun)
        return ours.claim(times=times)

    later, first_loop = bench.in_turn(
        functools.partial(loop, True), functools.partial(loop, False), times * 2, 2
    )
    bench.row(
        "pass",
        "claim of the first loop to a later one",
        ours=first_loop,
        value=first_loop.median / later.median,
        target=1.1,
        note=f"a later one: {later}",
    )
    done = ours.whole_pass()
    bench.row(
        "pass",
        "memory kept between loops, a pending run",
        value=done["kept"] / bench.options.sizes.pending,
        target=1,
        unit=" B",
        note=f"{done['kept']} bytes; {done['runs']:,} runs in {done['loops']} loops, peak {done['peak'] / 1e6:.1f} MB",
    )


def fan_out(bench: Bench) -> None:
    """Measure starting the fan-outs of the two largest Dags."""
    pending = bench.options.sizes.pending_by_dag()
    stock, ours = bench.databases.pair(bench.options.sizes)
    ours.clear()
    for number, target in ((1, None), (0, 3)):
        start = functools.partial(ours.fan_out_start, number=number)
        of_stock, of_ours = bench.in_turn(stock.claim, start, bench.options.times, IN_A_ROW)
        bench.row(
            "fan-out",
            f"start with {pending[number]:,} runs, to stock's claim",
            stock=of_stock,
            ours=of_ours,
            value=100 * of_ours.median / of_stock.median,
            target=target,
            unit=" %",
        )


def write(bench: Bench) -> None:
    """Measure registering events through Airflow's asset manager."""
    few, keys = bench.options.few, bench.options.keys
    stock, ours = bench.databases.pair(None)
    of_stock, of_ours = bench.in_turn(
        functools.partial(stock.write, count=keys), functools.partial(ours.write, count=keys), few
    )
    bench.row(
        "write",
        f"{keys} keys, empty tables: ours to stock",
        stock=of_stock,
        ours=of_ours,
        value=of_ours.median / of_stock.median,
        target=1.05,
    )
    count_stock, count_ours = stock.count_write(count=keys), ours.count_write(count=keys)
    bench.row(
        "write",
        "further statements a flush",
        value=(count_ours["statements"] - count_stock["statements"]) / count_ours["flushes"],
        target=1,
        unit="",
        note=f"{count_stock['statements']} and {count_ours['statements']} in {count_ours['flushes']} flushes",
    )
    stock, ours = bench.databases.pair(bench.options.sizes)
    of_stock, of_ours = bench.in_turn(
        functools.partial(stock.write, count=20), functools.partial(ours.write, count=20), few
    )
    bench.row(
        "write",
        "20 keys, the big population: stock to ours",
        stock=of_stock,
        ours=of_ours,
        value=of_stock.median / of_ours.median,
        target=20,
        at_least=True,
    )


def churn(bench: Bench) -> None:
    """Measure the idle step while an old snapshot keeps the database from forgetting deleted requests."""
    if bench.backend == "sqlite":
        bench.say(
            "sqlite: churn: left out, as a reader there has no snapshot that outlives what a writer deletes"
        )
        return
    times = bench.options.times * 20
    ours = bench.databases.worker(OURS, bench.options.sizes)
    ours.clear()
    ours.step(times=20)
    fresh = Times(ours.step(times=times, commit=True))
    ours.open_snapshot()
    ours.churn(count=bench.options.queue)
    # A scheduler with nothing to do sleeps for a second between loops: what it does now and then must be seen.
    churned = Times(ours.step(times=max(3, times // 8), pause=1, commit=True))
    bench.row(
        "churn",
        f"idle after {bench.options.queue:,} requests, to fresh",
        ours=churned,
        value=churned.median / fresh.median,
        target=5,
        note=f"fresh: {fresh}; on average {seconds(sum(churned.values) / len(churned.values))}",
    )
    cleaned = ours.close_snapshot()
    after = Times(ours.step(times=times, commit=True))
    bench.row(
        "churn",
        "idle after the snapshot's end, to fresh",
        ours=after,
        value=after.median / fresh.median,
        target=1.5,
        note=f"{cleaned:.0f} s after it",
    )


def dags(bench: Bench) -> None:
    """Measure with ten times as many Dags."""
    sizes = bench.options.sizes
    _larger(bench, "dags", f"{sizes.dags * 10:,} Dags", replace(sizes, dags=sizes.dags * 10))


def fired(bench: Bench) -> None:
    """Measure with ten times as many runs that have fired."""
    sizes = bench.options.sizes
    runs = sizes.pending + (sizes.runs - sizes.pending) * 10
    _larger(bench, "fired", f"{runs - sizes.pending:,} fired runs", replace(sizes, runs=runs))


def _larger(bench: Bench, case: str, what: str, sizes: Sizes) -> None:
    times = bench.options.times
    small = bench.databases.worker(OURS, bench.options.sizes)
    large = bench.databases.worker(OURS, sizes)
    small.clear()
    large.clear()
    of_small, of_large = bench.in_turn(small.step, large.step, times * 20, 10)
    bench.row(
        case,
        f"{what}: idle",
        ours=of_large,
        value=of_large.median / of_small.median,
        target=1.5,
        note=f"small: {of_small}",
    )
    small.fill(count=500)
    large.fill(count=500)
    of_small, of_large = bench.in_turn(small.claim, large.claim, times)
    bench.row(
        case,
        f"{what}: 500 requests",
        ours=of_large,
        value=of_large.median / of_small.median,
        target=1.5,
        note=f"small: {of_small}",
    )


def growth(bench: Bench) -> None:
    """Measure a loop in smaller populations, for the chart."""
    for part in (100, 10, 1):
        sizes = bench.options.sizes.part(part)
        stock, ours = bench.databases.pair(sizes)
        ours.clear()
        of_stock, idle = bench.in_turn(stock.claim, ours.claim, bench.options.times, IN_A_ROW)
        ours.fill(count=min(500, sizes.pending // 2))
        busy = Times(ours.claim(times=bench.options.times))
        ours.clear()
        for what, times in (("idle", idle), ("busy", busy)):
            bench.row(
                "growth",
                f"{sizes.pending:,} pending runs, {what}",
                stock=of_stock,
                ours=times,
                value=of_stock.median / times.median,
                more={"pending": sizes.pending, "state": what},
            )


def upgrade(bench: Bench) -> None:
    """Say how long the migration took."""
    bench.databases.worker(OURS, bench.options.sizes)
    for what, taken in bench.databases.seconds.items():
        if what.startswith("upgrade") and not what.endswith("empty"):
            bench.row("upgrade", f"migration {what.rpartition('ours_')[2]}", ours=Times([taken]))


CASES: dict[str, Callable[[Bench], None]] = {
    "claim": claim,
    "dags": dags,
    "fired": fired,
    "pass": resync,
    "fan-out": fan_out,
    "write": write,
    "fire": fire,
    "step": step,
    "churn": churn,
    "upgrade": upgrade,
    "growth": growth,
}
