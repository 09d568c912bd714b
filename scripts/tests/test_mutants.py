from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from _lib import environment, mutants
from _lib.mutants import Laboratory, Mutant, Pytest, judge
from _lib.paths import SCRIPTS


def load():
    """Import `scripts/mutants`, which has no suffix."""
    loader = SourceFileLoader("scripts_mutants", str(SCRIPTS / "mutants"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


script = load()


def mutant(old="a = 1", new="a = 2", **values):
    entry = {"name": "one", "rule": "3: a rule", "file": "module.py", "test": "test_module.py::test_it"}
    return Mutant(**{**entry, **values, "old": old, "new": new})


@pytest.fixture
def laboratory(tmp_path):
    """A tree of one module."""
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "module.py").write_text("a = 1\nb = 1\nb = 1\n")
    return Laboratory(tmp_path / "bin" / "python")


class TestList:
    def test_each_can_be_applied_and_has_its_test(self):
        """Each change is found once in the patched Airflow, compiles, and names a test that there is."""
        packages = environment.site_packages(Path(sys.executable))
        assert [] == [problem for each in mutants.read() if (problem := each.problem(packages))]

    def test_each_rule_is_broken(self):
        """There are enough of them, for each section of the specification that has rules to break."""
        rules = [each.rule for each in mutants.read()]
        assert len(rules) >= 60
        assert {"3", "4", "5", "6", "7", "8"} == {rule[0] for rule in rules}

    def test_each_changes_one_line(self):
        """A mutant is small: it takes away or changes one line, the lines around it only say where."""
        for each in mutants.read():
            opcodes = difflib.SequenceMatcher(
                None, each.old.splitlines(), each.new.splitlines(), autojunk=False
            ).get_opcodes()
            changed = sum(end - start for tag, start, end, *_ in opcodes if tag != "equal")
            assert changed <= 2, each.name

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[[mutant]]\nname = 'a'", "missing 5 required"),
            ("[[mutant", "mutants.toml"),
            ("", "mutant"),
        ],
    )
    def test_broken_list(self, text, said, tmp_path):
        """A list with an error is refused in one line."""
        (tmp_path / "mutants.toml").write_text(text)
        with pytest.raises(environment.Problem, match=said):
            mutants.read(tmp_path / "mutants.toml")


class TestApply:
    def test_in_and_out(self, laboratory):
        """A mutant is in the tree during the block, and the file is as before after it, time included."""
        path = laboratory.packages / "module.py"
        before, times = path.read_text(), path.stat().st_mtime_ns
        with laboratory.with_mutant(mutant()):
            assert path.read_text().startswith("a = 2\n")
            assert times != path.stat().st_mtime_ns
        assert (before, times) == (path.read_text(), path.stat().st_mtime_ns)
        with pytest.raises(KeyboardInterrupt), laboratory.with_mutant(mutant()):
            raise KeyboardInterrupt
        assert (before, times) == (path.read_text(), path.stat().st_mtime_ns)

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"old": "c = 1"}, "`old` is found 0 times in module.py"),
            ({"old": "b = 1"}, "`old` is found 2 times in module.py"),
            ({"new": "a ="}, "invalid syntax"),
        ],
    )
    def test_refused(self, values, said, laboratory):
        """What is not found exactly once, or is no Python, is an error, and the tree is left alone."""
        with pytest.raises(environment.Problem, match=said), laboratory.with_mutant(mutant(**values)):
            pass
        assert (laboratory.packages / "module.py").read_text().startswith("a = 1\n")


class TestJudge:
    @pytest.mark.parametrize(
        ("outcomes", "verdict"),
        [
            ({"t": "FAILED assert 1 == 2"}, (True, "assert 1 == 2")),
            ({"t[a]": "PASSED", "t[b]": "FAILED assert 1 == 2"}, (True, "assert 1 == 2")),
            ({"t": "PASSED"}, (False, "survived")),
            ({"t": "FAILED NameError: name 'x'"}, (False, "is no working code: NameError: name 'x'")),
            ({"t": "ERROR no fixture"}, (False, "could not be tried: ERROR no fixture")),
            ({}, (False, "could not be tried: no tests ran")),
        ],
    )
    def test_only_a_failing_test_catches(self, outcomes, verdict):
        """A mutant is caught by a test that fails, not by one that cannot run or that trips over a typing error."""
        assert verdict == judge(outcomes, "no tests ran")


def test_parts_are_the_whole():
    """The parts have each mutant once; another one is due each day."""
    every = [mutant(name=str(n)) for n in range(23)]
    found = []
    for number in range(1, 11):
        options = argparse.Namespace(only=None, backend=None, part=script.part(f"{number}/10"))
        found += [each.name for each in script.chosen(options, every)]
    assert sorted(each.name for each in every) == sorted(found)
    assert 1 <= script.part("day/10")[0] <= 10


@pytest.mark.parametrize("text", ["0/10", "11/10", "1/0", "1", "a/b", "1/-1", ""])
def test_senseless_part(text):
    """A part that there is not is refused."""
    with pytest.raises(argparse.ArgumentTypeError):
        script.part(text)


def test_pytest_in_a_fork(tmp_path, monkeypatch):
    """Tests run in a process that has imported the libraries; what they change is seen by the next run."""
    monkeypatch.setattr(mutants, "LIBRARIES", ("json",))
    test = tmp_path / "test_it.py"
    environ = {"AIRFLOW_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": f"{tmp_path}:{SCRIPTS}"}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    (tmp_path / "tests_common").mkdir()
    (tmp_path / "tests_common" / "pytest_plugin.py").write_text("")
    (tmp_path / "value.py").write_text("value = 1")
    test.write_text("import value\n\ndef test_it():\n    assert 1 == value.value\n")
    with Pytest(Path(sys.executable), environ) as run:
        outcomes, _ = run([str(test)])
        assert ["PASSED"] == list(outcomes.values())
        (tmp_path / "value.py").write_text("value = 2")
        outcomes, _ = run([str(test)])
        assert ["FAILED assert 1 == 2"] == list(outcomes.values())
        monkeypatch.setattr(mutants, "BELOW_MODELS", ("value",))
        with pytest.raises(environment.Problem, match="value is imported already"):
            run([str(test)], mutated=mutant(file="value.py"))
