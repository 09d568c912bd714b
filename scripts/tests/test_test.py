from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader

import pytest

from _lib import environment, services
from _lib.paths import CORE_TESTS, ROOT, SCRIPTS


def load():
    """Import `scripts/test`, which has no suffix."""
    loader = SourceFileLoader("scripts_test", str(SCRIPTS / "test"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


script = load()


def options(backend=None, airflow=None):
    return argparse.Namespace(backend=backend, airflow=airflow)


class TestPlan:
    def test_everything(self):
        """Airflow's tests run on each backend, those of the scripts once."""
        names = [name for name, _ in script.plan(options(), [], [])]
        assert ["mysql", "postgresql", "sqlite", "scripts"] == names

    def test_chosen_backend(self):
        """--backend narrows."""
        assert [("mysql", ["a"])] == script.plan(options(backend=["mysql"]), ["a"], [])

    def test_path_of_a_script_test(self):
        """A test of the scripts runs on no backend."""
        assert [("scripts", ["a"])] == script.plan(options(), [], ["a"])

    def test_other_release(self):
        """The scripts are not tested again for another Airflow."""
        names = [name for name, _ in script.plan(options(airflow="3.3.0"), [], [])]
        assert ["mysql", "postgresql", "sqlite"] == names

    def test_arguments(self):
        """Paths are told from what else is pytest's."""
        core = f"{CORE_TESTS.parent}::test_x"
        arguments = ["-k", "a or b", core, str(SCRIPTS / "tests"), "--pdb", str(ROOT.parent)]
        expected = ([core], [str(SCRIPTS / "tests")], ["-k", "a or b", "--pdb", str(ROOT.parent)])
        assert expected == script.split(arguments)


class TestSummary:
    @pytest.mark.parametrize(
        ("counts", "code", "last"),
        [
            ([(3, 0, 0), (2, 0, 0)], 0, "5 passed, 0 failed"),
            ([(3, 0, 1), (2, 0, 2)], 0, "5 passed, 0 failed, 3 skipped"),
            ([(3, 0, 0), (2, 1, 0)], 1, "5 passed, 1 failed"),
            ([(0, 0, 0)], 1, "0 passed, 0 failed"),
            ([(0, 0, 4)], 1, "0 passed, 0 failed, 4 skipped"),
            ([], 1, "0 passed, 0 failed"),
        ],
    )
    def test_last_line_and_exit_code(self, capsys, counts, code, last):
        """The last line sums up; a failure, or no test at all, is no success."""
        results = [script.Result("x", *each) for each in counts]
        assert code == script.summary(results, interrupted=False)
        assert last == capsys.readouterr().out.splitlines()[-1]

    def test_interrupted(self, capsys):
        """An interrupted run is no success, whatever has passed."""
        assert 130 == script.summary([script.Result("x", 3)], interrupted=True)
        assert "3 passed, 0 failed" == capsys.readouterr().out.splitlines()[-1]


class TestRun:
    @pytest.fixture
    def runs(self, tmp_path, monkeypatch):
        """Runs of pytest that keep to a folder of the test's own."""
        monkeypatch.setattr(script, "CACHE", tmp_path)
        return script.Runs(sys.executable, ["-p", "no:cacheprovider"], alone=False)

    @pytest.mark.parametrize(("ci", "failed"), [("true", 1), ("", 0)])
    def test_missing_backend(self, runs, monkeypatch, ci, failed):
        """A backend that cannot be had fails in CI; elsewhere it is not run, and the reason is said."""

        @contextlib.contextmanager
        def using(_backend):
            raise environment.Problem("install it")
            yield

        monkeypatch.setattr(services, "using", using)
        monkeypatch.setenv("CI", ci)
        result = runs.run("postgresql", [])
        assert (0, failed) == (result.passed, result.failed)
        assert str(result).endswith("install it")

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("def test_a(): pass\ndef test_b(): assert 0\n", (1, 1, 0)),
            ("import pytest\n@pytest.mark.skip\ndef test_a(): pass\n", (0, 0, 1)),
            ("import os\ndef test_a(): os._exit(7)\n", (0, 1, 0)),
            ("syntax error\n", (0, 1, 0)),
            ("x = 1\n", (0, 0, 0)),
        ],
    )
    def test_counts(self, runs, tmp_path, source, expected):
        """Each test counts once, and a pytest that dies is a failure."""
        path = tmp_path / "test_of_test.py"
        path.write_text(source)
        result = runs.run("scripts", [str(path)])
        assert expected == (result.passed, result.failed, result.skipped)

    def test_clean_environment(self, runs, tmp_path, monkeypatch):
        """The user's Airflow settings do not reach the tests, and nothing is left of their home."""
        monkeypatch.setenv("AIRFLOW__CORE__PARALLELISM", "1")
        path = tmp_path / "test_of_test.py"
        path.write_text(
            "import os\n"
            "def test_a():\n"
            "    assert 'AIRFLOW__CORE__PARALLELISM' not in os.environ\n"
            f"    assert os.environ['AIRFLOW_HOME'].startswith({str(tmp_path / 'test')!r})\n"
        )
        assert 1 == runs.run("scripts", [str(path)]).passed
        assert [] == os.listdir(tmp_path / "test")

    def test_after_an_interrupt(self, runs):
        """Nothing is started after an interrupt."""
        runs.interrupt(2)
        assert (0, 0) == ((result := runs.run("sqlite", [])).passed, result.failed)
