"""What the pages offer for download fits what Airflow sends; the table of rules is checked."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib.machinery import SourceFileLoader
from typing import Any

import pytest
import yaml

from _lib.edits import tomllib
from _lib.paths import CORE, ROOT, SCRIPTS

FILES = ROOT / "docs" / "files"


def load() -> Any:
    """Import `scripts/rules`, which has no suffix."""
    loader = SourceFileLoader("scripts_rules", str(SCRIPTS / "rules"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


rules = load()


def registered() -> list[dict[str, Any]]:
    """Return our metrics as Airflow's registry gets them."""
    edits = tomllib.loads((CORE / "edits.toml").read_text())["edit"]
    (edit,) = [edit for edit in edits if edit["file"].endswith("metrics_template.yaml")]
    return yaml.safe_load(edit["lines"])


def sent() -> set[str]:
    """Return the names that plain StatsD gets, for both kinds of pass."""
    names = {f"airflow.{metric['name']}" for metric in registered()}
    legacy = [metric["legacy_name"] for metric in registered() if metric["legacy_name"] != "-"]
    return names | {
        f"airflow.{name.replace('{pass}', kind)}" for name in legacy for kind in ("startup", "periodic")
    }


def mappings() -> list[dict[str, Any]]:
    return yaml.safe_load((FILES / "statsd-mapping.yml").read_text())["mappings"]


def mapped(name: str) -> list[dict[str, Any]]:
    """Return the mappings that match a name; a star is one part of it."""
    return [
        mapping
        for mapping in mappings()
        if re.fullmatch(re.escape(mapping["match"]).replace(r"\*", "([^.]*)"), name)
    ]


def test_every_metric_is_mapped_once():
    """Each name that Airflow sends has one mapping, and each mapping a name."""
    assert 6 == len(sent())
    assert dict.fromkeys(sent(), 1) == {name: len(mapped(name)) for name in sent()}
    assert {mapping["match"] for mapping in mappings()} == {mapped(name)[0]["match"] for name in sent()}


def prometheus_names() -> set[str]:
    names = {mapping["name"] for mapping in mappings() if mapping.get("action") != "drop"}
    histograms = {mapping["name"] for mapping in mappings() if mapping.get("observer_type") == "histogram"}
    return (names - histograms) | {
        f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")
    }


@pytest.mark.parametrize("file", ["alerts.yml", "grafana-dashboard.json"])
def test_alerts_and_dashboard_use_names_of_the_mapping(file):
    """An alert or panel of a metric that nothing sends would never show anything."""
    text = (FILES / file).read_text()
    used = set(re.findall(r"airflow_asset_partitions_\w+", text))
    assert used
    assert set() == used - prometheus_names()
    assert json.loads(text) if file.endswith("json") else yaml.safe_load(text)


def test_every_metric_has_its_row_and_panel():
    """Each metric is on the page, and in the dashboard."""
    page = (ROOT / "docs" / "metrics.rst").read_text()
    dashboard = (FILES / "grafana-dashboard.json").read_text()
    for metric in registered():
        assert f"``{metric['name']}``" in page
        assert mapped(f"airflow.{metric['name']}")[0]["name"].replace("dropped", "resync_fired") in dashboard


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write a table of rules in the place of ours."""
    monkeypatch.setattr(rules, "TABLE", tmp_path / "rules.csv")
    monkeypatch.setattr(rules, "CORE", tmp_path)  # neither mutants nor edits

    def write(*lines: str) -> list[str]:
        (tmp_path / "rules.csv").write_text("\n".join(["spec,rule,function,test", *lines, ""]))
        return list(rules.problems())

    return write


GOOD = "wake/step.py::WakeStep.claim,wake/test_step.py::test_rollup_waits_for_its_window"


def test_names_that_exist(table):
    """A function, a nested one, a constant, and code of Airflow's can hold a rule."""
    test = GOOD.partition(",")[2]
    holders = (
        "wake/step.py::WakeStep.claim",
        "wake/step.py::WakeStep.claim.keep",
        "wake/step.py::REFILLS",
        "Airflow x",
    )
    assert [] == table(*(f"1,rule {number},{holder},{test}" for number, holder in enumerate(holders)))


@pytest.mark.parametrize(
    "line, said",
    [
        (GOOD.replace("claim", "claims"), "there is no wake/step.py::WakeStep.claims"),
        (GOOD.replace("window", "windows"), "there is no test wake/test_step.py"),
        (GOOD.replace("wake/step", "wake/steps"), "there is no wake/steps.py"),
        ("edit none," + GOOD.partition(",")[2], "there is no edit none"),
        (GOOD.partition(",")[0] + ",", "a rule has spec, rule, function, test"),
    ],
)
def test_names_that_do_not_exist(table, line, said):
    """A row with a name that is not there, or without a test, is said by its number."""
    (problem,) = table(f"1,a rule,{line}")
    assert problem.startswith("line 2: ")
    assert said in problem


def test_rule_of_a_mutant_is_in_the_table(table, tmp_path):
    """What a mutant breaks has a row, with the test that the mutant names."""
    mutant = '[[mutant]]\nname = "m"\nrule = "1: {}"\ntest = "{}"\n'
    test = "jobs/asset_partition_wake/test_step.py::test_rollup_waits_for_its_window"
    (tmp_path / "mutants.toml").write_text(mutant.format("a rule", test))
    assert [] == table(f"1,a rule,{GOOD}")
    (tmp_path / "mutants.toml").write_text(mutant.format("another", test))
    assert ["no row has the rule '1: another' of the mutant m"] == table(f"1,a rule,{GOOD}")
    (tmp_path / "mutants.toml").write_text(mutant.format("a rule", test + "s"))
    (problem,) = table(f"1,a rule,{GOOD}")
    assert "has the test" in problem
