"""`scripts/chaos`: its arguments, what it makes of errors, and the disturbance inside a process. CI plays rounds beside this."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from _lib.chaos.conductor import Child, Options, Round
from _lib.chaos.errors import airflows_own, is_cut, kind_of
from _lib.paths import SCRIPTS

ACTIVATED_TWICE = """
  File "airflow/utils/event_scheduler.py", line 60, in repeat
sqlalchemy.exc.IntegrityError: duplicate key value violates unique constraint "asset_active_pkey"
[SQL: INSERT INTO asset_active (name, uri) VALUES (%(name)s, %(uri)s)]
"""


@pytest.mark.parametrize(
    "arguments", [["--backend", "sqlite"], ["--seconds", "0"], ["--schedulers", "0"], ["--pace", "-1"]]
)
def test_wrong_arguments(arguments):
    """Arguments that make no round are refused at once."""
    command = [sys.executable, str(SCRIPTS / "chaos"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 2 == done.returncode
    assert "chaos: error: " in done.stderr


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("server closed the connection unexpectedly", "cut"),
        ("(2013, 'Lost connection to MySQL server during query')", "cut"),
        ("(1317, 'Query execution was interrupted')", "cut"),
        ("deadlock detected", "deadlock"),
        ("(1213, 'Deadlock found when trying to get lock')", "deadlock"),
        ("(1205, 'Lock wait timeout exceeded')", "lock timeout"),
        ("(3572, 'Statement aborted because lock(s) could not be acquired immediately')", "lock not free"),
        ("no such table", "ValueError: no such table"),
    ],
)
def test_kind_of_error(text, kind):
    """Errors are counted by what they are."""
    assert kind == kind_of(ValueError(text))


def test_known_faults_of_airflow():
    """What stock Airflow does by itself is told from other errors, by more than its last line."""
    assert "two activated one asset" == airflows_own(ACTIVATED_TWICE)
    assert airflows_own(ACTIVATED_TWICE.replace("event_scheduler.py", "step.py")) is None
    assert not is_cut(ACTIVATED_TWICE)


@pytest.fixture
def round_(tmp_path: Path) -> Round:
    options = Options("postgresql", 1, 1, 1, seed=1, pace=1)
    return Round(options, Path(sys.executable), tmp_path / "round", "sqlite://", lambda line: None)


@pytest.mark.parametrize(
    ("log", "status", "found"),
    [
        ("psycopg2.OperationalError: server closed the connection unexpectedly\n", 1, []),
        (ACTIVATED_TWICE, 1, []),
        ("ValueError: 42\n", 1, ["scheduler-0 died of an error of its own (1): ValueError: 42"]),
        ("", 0, ["scheduler-0 died of an error of its own (0): nothing in its log"]),
        ("ValueError: 42\n", -signal.SIGKILL, []),
    ],
)
def test_death_of_a_scheduler(round_, monkeypatch, log, status, found):
    """A scheduler that ends by itself is a finding, unless it was killed, cut off, or met a known fault of Airflow."""
    monkeypatch.setattr(round_, "_start", lambda child: None)
    child = Child("scheduler-0", "", {})
    round_.children = {child.name: child}
    (round_.folder / "logs" / "scheduler-0.log").write_text(log)
    round_._ended(child, status)
    assert found == [finding.partition(" [")[0] for finding in round_.result.findings]


@pytest.mark.parametrize(
    ("statement", "findings"),
    [
        (
            "INSERT INTO asset_partition_dag_run_wake VALUES (1)",
            [
                "1 deadlock errors reached a writer",
                "1 times writer: deadlock at INSERT asset_partition_dag_run_wake",
            ],
        ),
        ("SELECT asset_active.name \nFROM asset_active FOR UPDATE", ["1 deadlock errors reached a writer"]),
        ("SELECT asset.id \nFROM asset \nWHERE asset.id = %s FOR UPDATE", []),
    ],
)
def test_deadlock_of_a_writer(round_, monkeypatch, statement, findings):
    """A deadlock error that reached a writer fails the round, unless it is Airflow's own; a cut connection does not."""
    monkeypatch.setattr(round_, "_once", lambda *_: None)
    (round_.folder / "checked.json").write_text('{"lost": [], "twice": []}')
    lines: list[dict[str, str]] = [{"what": "writer error", "kind": "cut"}]
    lines += [{"what": "database error", "kind": "deadlock", "statement": statement}]
    lines += [{"what": "writer error", "kind": "deadlock"}]
    reports = round_.folder / "reports" / "writer-0.jsonl"
    reports.write_text("\n".join(json.dumps({**line, "process": "writer-0"}) for line in lines))
    round_._judge()
    assert findings == round_.result.findings
    assert {"cut": 1, "deadlock": 1} == round_.result.figures["writer_errors"]


def test_strikes_fall_on_every_statement_of_a_block():
    """Blocks are struck at early and late statements, by the seed; an idle loop rarely."""
    from _lib.chaos.disturb import FURTHEST, IDLE, Chances, Disturbance

    def strikes(seed: str) -> list[tuple[int, str] | None]:
        disturbance = Disturbance(Path(), "scheduler-0", seed, Chances(cut=0.3, death=0.2))
        return [disturbance._choose() for _ in range(5000)]

    struck = strikes("1")
    assert struck == strikes("1")
    assert struck != strikes("2")
    statements = {strike[0] for strike in struck if strike}
    assert set(range(1, 40)) <= statements
    assert FURTHEST // 2 < max(statements) <= FURTHEST
    early = [strike for strike in struck if strike and strike[0] <= IDLE]
    assert 0 < len(early) < 200
    assert {"cut", "death"} == {strike[1] for strike in struck if strike}


@pytest.mark.parametrize(
    ("process", "statement", "found"),
    [
        ("scheduler-1", "DELETE /*+ x */ FROM asset_partition_dag_run_wake WHERE id = 1", 1),
        ("scheduler-1", "UPDATE dag_run SET state = 1", 0),
    ],
)
def test_deadlock_of_a_scheduler(round_, monkeypatch, process, statement, found):
    """A deadlock of schedulers over the requests is a finding, although it is retried."""
    monkeypatch.setattr(round_, "_once", lambda *_: None)
    (round_.folder / "checked.json").write_text('{"lost": [], "twice": []}')
    line = {"what": "database error", "process": process, "kind": "deadlock", "statement": statement}
    (round_.folder / "reports" / "scheduler-1.jsonl").write_text(json.dumps(line))
    round_._judge()
    assert found == len(round_.result.findings)
