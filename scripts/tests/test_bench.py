"""Measurements: the population, the verdicts, and a run of tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from _lib.bench.report import Row, Times, from_dict, read, seconds, table
from _lib.bench.sizes import Sizes
from _lib.environment import Problem
from _lib.paths import ROOT

SCRIPT = ROOT / "scripts" / "bench"
SIZES = [Sizes(), Sizes(dags=23_000), Sizes(600, 120, 12), Sizes(10, 1, 1)]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_population_has_the_sizes_asked_for(sizes: Sizes):
    """Each Dag has a pending run, and the totals are what was asked for."""
    assert (sizes.dags, sizes.pending) == (len(sizes.pending_by_dag()), sum(sizes.pending_by_dag()))
    assert (sizes.dags, sizes.runs) == (len(sizes.fired_by_dag()), sum(sizes.fired_by_dag()) + sizes.pending)
    assert min(sizes.pending_by_dag()) >= 1


def test_population_is_skewed():
    """The two largest Dags have the pending runs that the cases name, and about a tenth of all are in Dags that cannot run."""
    pending = Sizes().pending_by_dag()
    assert [4_270, 528] == pending[:2]
    cannot_run = Sizes().cannot_run()
    assert 5_500 <= sum(pending[number] for number in cannot_run) < 5_600
    assert min(cannot_run) >= Sizes().first


def test_too_few_pending_runs_are_refused():
    """Fewer pending runs than Dags end the script with one line that says so."""
    run = bench("--pending", "10", "--dags", "20")
    assert 2 == run.returncode
    assert "10 pending runs are too few for 20 Dags" in run.stderr


def test_unknown_case_is_refused():
    """A case that there is none of ends the script with the names of those that there are."""
    run = bench("clam")
    assert 2 == run.returncode
    assert "unknown case 'clam' (there are: claim, " in run.stderr


@pytest.mark.parametrize(
    ("value", "target", "at_least", "verdict"),
    [
        (30, 30, True, "reached"),
        (29, 30, True, "missed, 1.03 times off"),
        (3, 3, False, "reached"),
        (6, 3, False, "missed, 2.00 times off"),
        (1, None, False, ""),
        (None, 3, False, ""),
    ],
)
def test_verdict(value: float | None, target: float | None, at_least: bool, verdict: str):
    """A row says whether its target is reached, and by how much it is missed."""
    assert verdict == Row("case", "sqlite", "what", value=value, target=target, at_least=at_least).verdict


def test_row_survives_json():
    """What --json writes gives the same table again."""
    row = Row("claim", "mysql", "50 requests", 31.5, 30, True, stock=Times([0.3, 0.4]), ours=Times([0.01]))
    assert table([row]) == table([from_dict(json.loads(json.dumps(row.as_dict())))])
    assert "350 ms (300 ms to 400 ms)" in table([row])


@pytest.mark.parametrize(
    ("value", "shown"), [(2.5e-5, "25.0 us"), (0.0012, "1.20 ms"), (0.35, "350 ms"), (6.123, "6.12 s")]
)
def test_times_have_three_digits(value: float, shown: str):
    """A time is shown in the unit that suits it."""
    assert shown == seconds(value)


def test_later_files_replace_cases(tmp_path: Path):
    """Cases that were measured again are those of the last file, in their old places; others stay."""
    for name, kinds in (("first", ["claim", "write"]), ("second", ["claim"])):
        rows = [Row(kind, backend, name) for backend in ("postgresql", "mysql") for kind in kinds]
        (tmp_path / name).write_text(json.dumps([row.as_dict() for row in rows]))
    assert [
        Row("claim", "postgresql", "second"),
        Row("write", "postgresql", "first"),
        Row("claim", "mysql", "second"),
        Row("write", "mysql", "first"),
    ] == read([tmp_path / "first", tmp_path / "second"])


def test_what_is_no_file_of_measurements(tmp_path: Path):
    """A file of something else is named."""
    (tmp_path / "other").write_text('[{"what": "else"}]')
    with pytest.raises(Problem, match="other is no file of measurements"):
        read([tmp_path / "other"])


@pytest.mark.timeout(600)
def test_tiny_run(tmp_path: Path):
    """A run of tiny sizes measures stock and ours, and its measurements give a table and charts' input."""
    written, plans = tmp_path / "rows.json", tmp_path / "plans.txt"
    sizes = [
        "--runs",
        "600",
        "--pending",
        "120",
        "--dags",
        "12",
        "--queue",
        "300",
        "--times",
        "2",
        "--keys",
        "5",
    ]
    files = ["--json", str(written), "--plans", str(plans)]
    cases = ["claim", "pass", "fan-out", "write", "step", "fire", "upgrade"]
    run = bench(*cases, "--backend", "sqlite", *sizes, *files)
    assert run.returncode in (0, 1), run.stderr  # 1: so small a population reaches little
    rows = [from_dict(row) for row in json.loads(written.read_text())]
    assert set(cases) <= {row.case for row in rows}
    assert run.stdout.strip() == table(rows)
    [claimed] = [row for row in rows if row.what == "50 requests"]
    assert claimed.stock is not None
    assert claimed.ours is not None
    assert claimed.note.startswith("50 of 50 runs")
    [fired] = [row for row in rows if row.case == "fire"]
    assert "fired in 4 Dags" == fired.note
    [idle] = [row for row in rows if row.what == "statements of a step"]
    assert 1 == idle.value
    assert "FROM asset_partition_dag_run_wake" in plans.read_text()
