"""The builder: what an edit does to a file, what stops a build, and that a wheel is whole or absent."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
from wheel.wheelfile import WheelFile

from _lib.builder import SUPPORTED, WAKE, Builder
from _lib.edits import BuildError
from _lib.paths import CACHE, ROOT, SCRIPTS

VERSION = "3.3.2"
JOB = "airflow/jobs/job.py"
CONFIG = "airflow/config.yml"
METRICS = "airflow/metrics.yaml"

# Ruff's options, as far as they matter here, of Airflow's pyproject.toml.
STYLE = ["--isolated", "--no-cache", "--config", "line-length=110", "--config", 'target-version="py310"']
STYLE += ["--config", 'lint.isort={combine-as-imports=true, known-first-party=["airflow"]}']

SOURCE = """\
# A licence.
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    Column,
    select,
)

from airflow.models.dag import DagModel
from airflow.utils.state import State

if TYPE_CHECKING:
    from airflow.models.trigger import Trigger

LIMIT = 500


def first(session):
    rows = session.scalars(
        select(DagModel),  # oldest
    )
    return rows


class Job:
    # A job.
    columns = (
        Column("a"),
        # the second
        Column("b")
    )
    names = ["x", "y"]
    empty = {}

    @property
    def second(self):
        # Why the rows
        # are read.
        rows = session.scalars(select(DagModel))

        # A loop.
        for row in rows:
            row.state = State.A
            row.sql = '''
            select
              1'''
        else:
            pass

        def nested(row):
            rows = session.scalars(row)
            return rows

        if not rows:
            return None
        elif len(rows) > LIMIT:
            rows = rows[:LIMIT]
        return nested(rows)

    def third(self): return 3
"""

CONFIG_SOURCE = """\
# A licence.
---
core:
  description: ~
  options:
    first:
      default: "1"   # kept
scheduler:
  options:
    interval:
      description: |
        How often.

        # not a comment
      default:   '5'
      # Of the interval.
    # About the last.
    last:
      default: "20"

    # A trailing comment.

dag_processor:
  options:
    last: {default: 1}
"""

METRICS_SOURCE = """\
metrics:
  # Counters
  - name: "asset.created"
    type: "counter"

  - name: "asset.orphaned"
    description: "Two
    lines"
    type: "gauge"

  - {name: last, type: timer}
"""


def make_wheel(folder: Path, files: dict[str, str], version: str = VERSION) -> Path:
    """Make a wheel as small as one can be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"apache_airflow_core-{version}-py3-none-any.whl"
    info = f"apache_airflow_core-{version}.dist-info"
    with WheelFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.4\nName: x\nVersion: {version}\n\nVersion: 1\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: other\n")
        archive.writestr(f"{info}/licenses/LICENSE", "licence\n")
    return path


def toml(edit: dict) -> str:
    """Write an edit as TOML, whose strings and lists of strings are JSON's too."""
    return "[[edit]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in edit.items()) + "\n"


class Repo:
    """A repo of its own, with a small released wheel in its cache."""

    def __init__(self, root: Path):
        self.root = root
        self.core = root / "airflow-core"
        (self.core / "src/airflow").mkdir(parents=True)
        self.files = {JOB: SOURCE, CONFIG: CONFIG_SOURCE, METRICS: METRICS_SOURCE, "airflow/data.bin": "\0"}
        self.released = make_wheel(root / ".cache/wheels", self.files)
        self.out = root / "dist"
        self.builder = Builder(root, root / ".cache")

    def edit(
        self,
        place: str | None = "after",
        anchor: str | None = "LIMIT = 500",
        lines: str | None = "MORE = 1",
        **keys: Any,
    ) -> None:
        """Add an edit to the list."""
        edits = self.core / "edits.toml"
        text = edits.read_text() if edits.exists() else ""
        values = {"name": f"edit-{text.count('[[edit]]')}", "why": "because", "file": JOB}
        values |= {"place": place, "anchor": anchor, "lines": lines} | keys
        edits.write_text(text + toml({key: value for key, value in values.items() if value is not None}))

    def add(self, name: str, content: str) -> None:
        """Add a new file."""
        path = self.core / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def build(self) -> Path:
        return self.builder.patch(VERSION).write(self.out)

    def built(self, name: str = JOB) -> str:
        """Build, and return a file of the wheel, whose RECORD is checked by the library."""
        with WheelFile(self.build()) as archive:
            return archive.read(name).decode()

    def error(self) -> str:
        """Build, and return why that failed: one line, and no wheel or temporary file."""
        with pytest.raises(BuildError) as caught:
            self.build()
        assert not self.out.exists() or [] == list(self.out.iterdir())
        message = str(caught.value)
        assert "\n" not in message
        return message


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path)


class TestStatements:
    def test_neighbours_have_the_same_statement(self, repo: Repo) -> None:
        """An anchor counts in its own definition only, not in its neighbours or in what is nested in it."""
        repo.edit("after", "rows = session.scalars(", "seen(rows)", **{"in": "Job.second"})
        expected = SOURCE.replace(
            "        rows = session.scalars(select(DagModel))\n",
            "        rows = session.scalars(select(DagModel))\n        seen(rows)\n",
        )
        assert expected == repo.built()

    def test_nested_definition(self, repo: Repo) -> None:
        """A definition in a function is named as the function's own."""
        repo.edit("before", "rows = session.scalars(", "seen(row)", **{"in": "Job.second.nested"})
        line = "            rows = session.scalars(row)\n"
        assert SOURCE.replace(line, f"            seen(row)\n{line}") == repo.built()

    @pytest.mark.parametrize(
        "anchor",
        ["rows = session.scalars(select(DagModel),", "rows =\n  session.scalars( select( DagModel,\n) "],
    )
    def test_layout_of_an_anchor(self, repo: Repo, anchor: str) -> None:
        """How an anchor is laid out does not matter, trailing commas included."""
        repo.edit("instead", anchor, "rows = []", **{"in": "first"})
        old = "    rows = session.scalars(\n        select(DagModel),  # oldest\n    )\n"
        assert SOURCE.replace(old, "    rows = []\n") == repo.built()

    def test_trailing_comma_of_an_anchor(self, repo: Repo) -> None:
        """An anchor that was exploded by the formatter is found where it is on one line."""
        repo.edit("instead", 'names = [\n    "x",\n    "y",', "names = []", **{"in": "Job"})
        assert SOURCE.replace('names = ["x", "y"]', "names = []") == repo.built()

    def test_before_stands_above_the_comment(self, repo: Repo) -> None:
        """Lines before a statement stand above the comment that belongs to it."""
        repo.edit("before", "rows = session", "# Ours.\nseen()", **{"in": "Job.second"})
        comment = "        # Why the rows\n"
        assert SOURCE.replace(comment, f"        # Ours.\n        seen()\n{comment}") == repo.built()

    def test_instead_takes_the_comment_along(self, repo: Repo) -> None:
        """A replaced statement goes with its comment; what is above a blank line stays."""
        repo.edit("instead", "for row in rows:", "walk(\n    rows,\n)\n", **{"in": "Job.second"})
        start, end = SOURCE.index("        # A loop."), SOURCE.index("        def nested")
        lines = "        walk(\n            rows,\n        )\n\n"
        assert SOURCE[:start] + lines + SOURCE[end:] == repo.built()

    def test_instead_with_nothing_removes(self, repo: Repo) -> None:
        """A removed statement does not leave two blank lines."""
        repo.edit("instead", "for row in rows:", "", **{"in": "Job.second"})
        start, end = SOURCE.index("\n        # A loop."), SOURCE.index("\n        def nested")
        assert SOURCE[:start] + SOURCE[end:] == repo.built()

    def test_neighbours_are_removed(self, repo: Repo) -> None:
        """Two removed neighbours do not leave two blank lines either."""
        repo.edit("instead", "rows = session", "", **{"in": "Job.second"})
        repo.edit("instead", "for row in rows:", "", **{"in": "Job.second"})
        start, end = SOURCE.index("        # Why the rows"), SOURCE.index("\n        def nested")
        assert SOURCE[:start] + SOURCE[end:] == repo.built()

    def test_decorated_definition(self, repo: Repo) -> None:
        """A definition's decorators belong to it."""
        repo.edit("before", "def second(", "@other\ndef more(self):\n    pass\n\n", **{"in": "Job"})
        added = "    @other\n    def more(self):\n        pass\n\n"
        assert SOURCE.replace("    @property\n", f"{added}    @property\n") == repo.built()

    def test_end_of_a_definition_and_of_the_module(self, repo: Repo) -> None:
        """Lines can end a function, a class and a module, in whatever order they are listed."""
        repo.edit("end", None, "\n\ndef last():\n    pass\n")
        repo.edit("end", None, "\nMORE = 2", **{"in": "Job"})
        repo.edit("end", None, "seen()", **{"in": "Job.second.nested"})
        nested = "            return rows\n"
        expected = SOURCE.replace(nested, f"{nested}            seen()\n")
        assert f"{expected}\n    MORE = 2\n\n\ndef last():\n    pass\n" == repo.built()

    def test_around(self, repo: Repo) -> None:
        """A statement becomes the body of a with; the lines of its strings stay."""
        repo.edit("around", "for row in rows:", 'with timer(\n    "x",\n):', **{"in": "Job.second"})
        old = """\
        for row in rows:
            row.state = State.A
            row.sql = '''
            select
              1'''
        else:
            pass
"""
        new = """\
        with timer(
            "x",
        ):
            for row in rows:
                row.state = State.A
                row.sql = '''
            select
              1'''
            else:
                pass
"""
        assert SOURCE.replace(old, new) == repo.built()

    def test_expression(self, repo: Repo) -> None:
        """One expression is replaced, whole, where it is exactly what the anchor says."""
        repo.edit("instead", "rows[:LIMIT]", "cut(\n    rows,\n)", expression=True, **{"in": "Job.second"})
        expected = "            rows = cut(\n                rows,\n            )\n"
        assert SOURCE.replace("            rows = rows[:LIMIT]\n", expected) == repo.built()

    def test_edits_do_not_see_each_other(self, repo: Repo) -> None:
        """An edit is found in the file as released, whatever others insert."""
        repo.edit("before", lines="LIMIT = 500")
        repo.edit("after", lines="MORE = LIMIT")
        assert SOURCE.replace("LIMIT = 500\n", "LIMIT = 500\nLIMIT = 500\nMORE = LIMIT\n") == repo.built()

    def test_overlap(self, repo: Repo) -> None:
        """Two edits that change the same lines are refused."""
        repo.edit("instead", name="one")
        repo.edit("instead", name="two")
        assert f'Airflow {VERSION}: {JOB}: edits "one" and "two" overlap' == repo.error()


class TestElements:
    def test_elements_on_lines_of_their_own(self, repo: Repo) -> None:
        """An element follows the last, which gets its comma."""
        lines = 'Column(\n    "c",\n)'
        repo.edit("end", "columns = (", lines, element=True, **{"in": "Job"})
        old = '        Column("b")\n'
        new = '        Column("b"),\n        Column(\n            "c",\n        ),\n'
        assert SOURCE.replace(old, new) == repo.built()

    @pytest.mark.parametrize(
        ("anchor", "lines", "expected"),
        [
            ('names = ["x", "y"]', '"z",', 'names = [\n        "x",\n        "y",\n        "z",\n    ]\n'),
            ("empty =", '"a": 1', 'empty = {\n        "a": 1,\n    }\n'),
        ],
    )
    def test_elements_on_one_line(self, repo: Repo, anchor: str, lines: str, expected: str) -> None:
        """A literal on one line is taken apart."""
        repo.edit("end", anchor, lines, element=True, **{"in": "Job"})
        assert f"    {expected}" in repo.built()

    def test_not_a_literal(self, repo: Repo) -> None:
        """Elements are added to a literal only."""
        repo.edit("end", "rows =", "x", element=True, **{"in": "first"})
        assert "expected a tuple, list, dict or set in brackets at line 22, found none" in repo.error()


class TestImports:
    @pytest.mark.parametrize(
        ("imports", "expected"),
        [
            (["from sqlalchemy import JSON"], "import (\n    JSON,\n    Column,\n    select,\n)"),
            (["from sqlalchemy import delete"], "    Column,\n    delete,\n    select,\n)"),
            (["from sqlalchemy import Text, text"], "    Column,\n    Text,\n    select,\n    text,\n)"),
            (["from sqlalchemy import select, text"], "    Column,\n    select,\n    text,\n)"),
            (["from typing import cast"], "import os\nfrom typing import TYPE_CHECKING, Any, cast\n\n"),
            (["import json"], "import json\nimport os\nfrom typing"),
            (["from collections import abc"], "import os\nfrom collections import abc\nfrom typing"),
            (
                ["from airflow.models.asset import X"],
                "\n\nfrom airflow.models.asset import X\nfrom airflow.models.dag",
            ),
            (
                ["from airflow.utils.x import y", "from airflow.models.trigger import Trigger as T"],
                "as T\nfrom airflow.utils.state import State\nfrom airflow.utils.x import y\n\nif",
            ),
            (
                ["from airflow.utils.state import State"],
                "dag import DagModel\nfrom airflow.utils.state import State\n\n",
            ),
        ],
    )
    def test_import(self, repo: Repo, imports: list[str], expected: str) -> None:
        """An import is added where isort has it, to the statement of its module if there is one."""
        repo.edit(None, None, None, imports=imports)
        built = repo.built()
        assert expected in built
        assert isorted(built) == built

    def test_first_import_of_a_section(self, repo: Repo) -> None:
        """Imports can begin a section."""
        source = "from __future__ import annotations\n\nfrom airflow import x\n\nx()\n"
        repo.released = make_wheel(repo.released.parent, {JOB: source})
        repo.edit(None, None, None, imports=["import sqlalchemy as sa", "from re import match", "import sys"])
        imports = "import sys\nfrom re import match\n\nimport sqlalchemy as sa\n\nfrom airflow"
        assert source.replace("from airflow", imports) == repo.built()

    def test_two_edits_share_a_statement(self, repo: Repo) -> None:
        """Two edits can need names of one module, or the same name."""
        repo.edit(lines="A = 1", imports=["from airflow.z import b", "from sqlalchemy import or_"])
        repo.edit(lines="B = 1", imports=["from airflow.z import a, b", "from sqlalchemy import and_"])
        built = repo.built()
        assert "from airflow.utils.state import State\nfrom airflow.z import a, b\n\n" in built
        assert "    Column,\n    and_,\n    or_,\n    select,\n)" in built
        assert "LIMIT = 500\nA = 1\nB = 1\n" in built

    @pytest.mark.parametrize(
        ("unused", "old", "new"),
        [
            ("airflow.utils.state:State", "from airflow.utils.state import State\n", ""),
            ("sqlalchemy:select", "    select,\n", ""),
            ("typing:Any", "TYPE_CHECKING, Any\n", "TYPE_CHECKING\n"),
        ],
    )
    def test_unused_import(self, repo: Repo, unused: str, old: str, new: str) -> None:
        """An import that an edit makes unused goes."""
        repo.edit(None, None, None, unused_imports=[unused])
        assert SOURCE.replace(old, new, 1) == repo.built()

    def test_unused_import_that_is_not_there(self, repo: Repo) -> None:
        """An unused import has to be there."""
        repo.edit(None, None, None, unused_imports=["typing:cast"])
        assert "expected an import typing:cast, found none" in repo.error()


def isorted(source: str) -> str:
    """Sort imports as Airflow has them."""
    command = [sys.executable, "-m", "ruff", "check", *STYLE, "--select", "I", "--fix-only", "--quiet", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


class TestYaml:
    @pytest.mark.parametrize(
        ("place", "anchor", "before"),
        [
            ("before", "interval", "    interval:\n      description"),
            ("after", "interval", "    # About the last.\n"),
            ("before", "last", "    # About the last.\n"),
            ("after", "last", "\n    # A trailing comment.\n"),
        ],
    )
    def test_key(self, repo: Repo, place: str, anchor: str, before: str) -> None:
        """A key is added beside another of its mapping; all else stays byte for byte."""
        repo.edit(place, anchor, "new:\n  default: ~", file=CONFIG, **{"in": "scheduler.options"})
        expected = CONFIG_SOURCE.replace(before, f"    new:\n      default: ~\n{before}")
        assert expected == repo.built(CONFIG)

    @pytest.mark.parametrize(
        ("place", "anchor", "before"),
        [
            ("before", "name: asset.orphaned", '  - name: "asset.orphaned"'),
            ("after", "name: asset.created", '\n  - name: "asset.orphaned"'),
            ("after", "name: asset.orphaned", "\n  - {name: last"),
            ("before", "type: timer", "  - {name: last"),
        ],
    )
    def test_item(self, repo: Repo, place: str, anchor: str, before: str) -> None:
        """An item is added beside another of its list."""
        repo.edit(place, anchor, '- name: "new"\n  type: "gauge"', file=METRICS, **{"in": "metrics"})
        item = '  - name: "new"\n    type: "gauge"\n'
        assert METRICS_SOURCE.replace(before, item + before) == repo.built(METRICS)

    def test_last_item_of_a_file(self, repo: Repo) -> None:
        """An item can end a file."""
        repo.edit("after", "name: last", "- name: new", file=METRICS, **{"in": "metrics"})
        assert METRICS_SOURCE + "  - name: new\n" == repo.built(METRICS)

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"anchor": "intervall"}, "expected one key 'intervall' in scheduler.options, found none"),
            ({"anchor": "intervall"}, "closest is 'interval' at line 10"),
            ({"in": "schedular.options"}, "found none; closest is scheduler at line 8"),
            ({"in": "dag_processor.options.last"}, "expected a mapping or list at dag_processor"),
            ({"lines": "last:\n  default: 1"}, "expected no key 'last' in scheduler.options, found one"),
            ({"lines": "- name: x"}, "expected lines that are a dict, found a list"),
            ({"file": METRICS, "in": "metrics", "anchor": "name: asset"}, "closest is 'name: asset"),
        ],
    )  # fmt: skip
    def test_errors(self, repo: Repo, keys: dict, expected: str) -> None:
        """What cannot be done to a YAML file is said in one line."""
        repo.edit(**{"anchor": "interval", "lines": "x: 1", "file": CONFIG, "in": "scheduler.options"} | keys)
        assert expected in repo.error()

    def test_key_that_changes_its_neighbours(self, repo: Repo) -> None:
        """An edit is refused where YAML reads more than its keys, such as blank lines."""
        repo.edit("after", "name: asset.created", "- name: |+\n    x", file=METRICS, **{"in": "metrics"})
        assert "the edits change more than the keys that they add: edit-0" in repo.error()

    def test_double_item(self, repo: Repo) -> None:
        """An anchor that two items have is refused."""
        repo.released = make_wheel(
            repo.released.parent, {METRICS: METRICS_SOURCE.replace("orphaned", "created")}
        )
        repo.edit("before", "name: asset.created", "- name: x", file=METRICS, **{"in": "metrics"})
        assert "in metrics, found 2: lines 3, 6" in repo.error()


class TestWhatStopsABuild:
    def test_missing_anchor(self, repo: Repo) -> None:
        """A missing anchor is named, with the version, what was expected, and the closest thing there."""
        repo.edit("after", "rows = session.execute(", name="read-rows", **{"in": "Job.second"})
        assert (
            f'Airflow {VERSION}: edit "read-rows": {JOB}: expected one statement that begins with '
            "'rows = session.execute(' in Job.second, found none; "
            "closest is 'rows = session.scalars(' at line 42"
        ) == repo.error()

    def test_anchor_that_moved(self, repo: Repo) -> None:
        """Where another definition has the anchor, that is the closest thing."""
        repo.edit("after", "row.state = State.A", **{"in": "first"})
        assert "in first, found none; closest is 'row.state = State.A' at line 46" in repo.error()

    def test_double_anchor(self, repo: Repo) -> None:
        """An anchor that is there twice is refused, with both lines."""
        repo.edit("after", "rows = ", **{"in": "Job.second"})
        assert "in Job.second, found 2: lines 42, 60" in repo.error()

    def test_double_expression(self, repo: Repo) -> None:
        """An expression that is there twice is refused, with both lines."""
        repo.edit("instead", "len(rows)", "1", expression=True, **{"in": "Job.second"})
        repo.build()
        (repo.core / "edits.toml").unlink()
        shutil.rmtree(repo.out)
        repo.edit("instead", "LIMIT", "1", expression=True, **{"in": "Job.second"})
        assert "expected one expression 'LIMIT' in Job.second, found 2: lines 59, 60" in repo.error()

    def test_missing_definition(self, repo: Repo) -> None:
        """A missing definition is named, with the closest one."""
        repo.edit("end", None, "x()", **{"in": "Job.secnd"})
        assert "expected a definition Job.secnd, found none; closest is Job.second at line 38" in repo.error()

    def test_double_definition(self, repo: Repo) -> None:
        """A definition has one end, so there may be only one of its name."""
        repo.released = make_wheel(repo.released.parent, {JOB: SOURCE + SOURCE})
        repo.edit("end", None, "x()", **{"in": "first"})
        assert "expected one definition first, found 2: lines 21, 84" in repo.error()

    def test_elif_is_no_statement(self, repo: Repo) -> None:
        """Nothing can stand before an elif, so that no anchor finds it."""
        repo.edit("before", "elif len(rows) > LIMIT", "x()", **{"in": "Job.second"})
        assert "in Job.second, found none" in repo.error()

    def test_body_on_one_line(self, repo: Repo) -> None:
        """A body that has no lines of its own cannot be added to."""
        repo.edit("end", None, "x()", **{"in": "Job.third"})
        assert "expected a body of its own lines in Job.third" in repo.error()

    def test_missing_file(self, repo: Repo) -> None:
        """A file that the wheel does not have is named, with the closest one."""
        repo.edit(file="airflow/jobs/jobs.py")
        assert f"expected this file in the wheel, found none; closest is {JOB}" in repo.error()

    def test_unknown_version(self, repo: Repo) -> None:
        """An unsupported version is answered with the supported ones."""
        with pytest.raises(BuildError) as caught:
            repo.builder.patch("3.2.0")
        assert "Airflow 3.2.0 is not supported; supported are 3.3.0, 3.3.1, 3.3.2" == str(caught.value)

    def test_hash(self, repo: Repo) -> None:
        """A target whose content is not the one of RECORD is refused."""
        tampered = repo.released.with_suffix(".new")
        with zipfile.ZipFile(repo.released) as old, zipfile.ZipFile(tampered, "w") as new:
            for entry in old.infolist():
                content = old.read(entry)
                new.writestr(entry, content + b"# tampered\n" if entry.filename == JOB else content)
        tampered.replace(repo.released)
        repo.edit(name="more")
        digest = base64.urlsafe_b64encode(hashlib.sha256(SOURCE.encode()).digest()).rstrip(b"=").decode()
        message = repo.error()
        assert f'edit "more": {JOB}: expected the sha256 of RECORD, {digest}, found ' in message
        (repo.core / "edits.toml").unlink()
        assert JOB in repo.error()  # a file that no edit touches

    def test_truncated_wheel(self, repo: Repo) -> None:
        """A cached wheel that is not whole is named."""
        repo.released.write_bytes(repo.released.read_bytes()[:-100])
        assert "remove it to fetch it again" in repo.error()

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("[[edit]\n", "edits.toml: not TOML: "),
            ("[edits]\n", "unknown table 'edits'"),
            ("edit = 1\n", "an edit is written as [[edit]]"),
            (toml({"name": "a", "why": "b"}), "edit 'a': key 'file' is missing"),
            (
                toml({"name": "a", "file": JOB, "place": "end", "lines": "x"}),
                "edit 'a': key 'why' is missing",
            ),
            (toml({"why": "b", "file": JOB}), "edit 1: key 'name' is missing"),
        ],
    )
    def test_broken_edits_file(self, repo: Repo, text: str, expected: str) -> None:
        """A file that does not list edits is refused."""
        (repo.core / "edits.toml").write_text(text)
        assert expected in repo.error()

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"nam": "x"}, "unknown key 'nam'; known are name, why"),
            ({"name": 1}, "'name' has to be a str, not 1"),
            ({"versions": [1]}, "'versions' has to be a list of strings"),
            ({"versions": ["3.3"]}, "version 3.3 is not supported; supported are 3.3.0"),
            ({"place": "inside"}, "place 'inside' is none of before, after, instead, end, around"),
            ({"place": "instead", "file": CONFIG}, "place 'instead' is none of before, after"),
            ({"file": "airflow/data.bin"}, "cannot edit 'airflow/data.bin'"),
            ({"lines": None}, "key 'lines' is missing"),
            ({"lines": "\n"}, "'lines' are empty"),
            ({"lines": "x = ("}, "'lines' do not parse"),
            ({"anchor": None}, "key 'anchor' is missing"),
            ({"place": "end"}, 'place = "end" takes no anchor'),
            ({"element": True}, 'an element has place = "end"'),
            ({"place": "end", "element": True, "lines": "if x:"}, "'lines' do not parse"),
            ({"expression": True}, 'an expression has place = "instead"'),
            ({"place": "instead", "expression": True, "lines": "x = 1"}, "'lines' do not parse"),
            ({"place": "around", "lines": "x = 1"}, "'lines' do not parse"),
            ({"place": "around", "lines": "if x:"}, "have to be the header of one with statement"),
            ({"imports": ["x = 1"]}, "'x = 1' is not an import"),
            ({"unused_imports": ["x"]}, "unused import 'x' is not written module:name"),
            ({"file": CONFIG, "imports": ["import x"]}, "a YAML file has no imports"),
            ({"file": CONFIG, "lines": "x: ["}, "'lines' do not parse"),
            ({"lines": "return 1"}, f"{JOB}: not Python with our change: 'return' outside function at line"),
        ],
    )
    def test_broken_edit(self, repo: Repo, keys: dict, expected: str) -> None:
        """An edit that says something unknown, too little or what cannot be is refused."""
        repo.edit(**keys)
        assert expected in repo.error()

    def test_same_name(self, repo: Repo) -> None:
        """Two edits of one name are refused, also in two files."""
        repo.edit(name="twice")
        (repo.core / "edits").mkdir()
        (repo.core / "edits.toml").rename(repo.core / "edits/a.toml")
        repo.edit(name="twice", lines="OTHER = 1")
        (repo.core / "edits.toml").rename(repo.core / "edits/b.toml")
        assert "b.toml: two edits are named 'twice'" == repo.error()

    def test_new_file_that_is_there(self, repo: Repo) -> None:
        """A new file does not take the place of a released one."""
        repo.add(JOB, "")
        assert f"{JOB}: expected a new file, found it in the wheel" in repo.error()

    def test_new_file_that_is_no_text(self, repo: Repo) -> None:
        """A new file has to be text, or the diff would lack it."""
        repo.add("airflow/new.bin", "\0")
        assert "airflow/new.bin: expected text" in repo.error()

    def test_new_file_that_does_not_compile(self, repo: Repo) -> None:
        """A new file has to be Python."""
        repo.add("airflow/new.py", "x = (\n")
        assert (
            "airflow/new.py: not Python with our change: '(' was never closed at line 1: 'x = ('"
            in repo.error()
        )

    def test_download_fails(self, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
        """A failing download says what pip said, and leaves nothing in the cache."""
        repo.released.unlink()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        message = repo.error()
        assert f"cannot download apache-airflow-core=={VERSION}: ERROR: " in message
        assert [] == list(repo.released.parent.iterdir())


class TestWheel:
    def test_contents(self, repo: Repo) -> None:
        """The wheel has what was released, what is new, and another version; RECORD lists all of it."""
        repo.edit()
        repo.add("airflow/new/__init__.py", "")
        repo.add("airflow/new/x.txt", "text")
        repo.add("airflow/new/__pycache__/x.pyc", "")
        repo.add("airflow/.cache/x", "")
        repo.add("airflow/new/.x.py.swp", "")
        path = repo.build()
        version = f"{VERSION}+wake.{WAKE}"
        info = f"apache_airflow_core-{version}.dist-info"
        assert repo.out / f"apache_airflow_core-{version}-py3-none-any.whl" == path
        assert [path] == list(repo.out.iterdir())
        with WheelFile(path) as archive:
            names = archive.namelist()
            assert {
                *repo.files, "airflow/new/__init__.py", "airflow/new/x.txt",
                *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")),
            } == set(names)  # fmt: skip
            assert [*sorted(names[:-4]), *sorted(names[-4:-1]), f"{info}/RECORD"] == names
            for name in names:  # reading checks the hash
                archive.read(name)
            assert CONFIG_SOURCE == archive.read(CONFIG).decode()
            metadata = archive.read(f"{info}/METADATA").decode()
        assert f"Metadata-Version: 2.4\nName: x\nVersion: {version}\n\nVersion: 1\n" == metadata

    def test_two_runs_are_identical(self, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two runs give the same bytes, whatever the time, the umask and the files' own dates."""
        repo.edit()
        repo.add("airflow/new.py", "x = 1\n")
        first = repo.build().read_bytes()
        os.utime(repo.core / "src/airflow/new.py", (1, 1))
        (repo.core / "src/airflow/new.py").chmod(0o700)
        monkeypatch.setattr("time.time", lambda: 2_000_000_000)
        assert first == repo.build().read_bytes()
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        assert first != repo.build().read_bytes()

    def test_versions_of_an_edit(self, repo: Repo) -> None:
        """An edit for other versions of Airflow is left out."""
        repo.edit(versions=["3.3.0"], anchor="not there")
        assert SOURCE == repo.built()
        make_wheel(repo.released.parent, {JOB: SOURCE}, "3.3.0")
        with pytest.raises(BuildError, match=r'Airflow 3\.3\.0: edit "edit-0"'):
            repo.builder.patch("3.3.0")

    def test_failing_build_keeps_the_last_wheel(self, repo: Repo) -> None:
        """A wheel of an earlier run stays as it is where a later run fails."""
        before = repo.build().read_bytes()
        repo.edit(anchor="not there")
        with pytest.raises(BuildError):
            repo.build()
        assert [before] == [path.read_bytes() for path in repo.out.iterdir()]


class TestCommand:
    """`scripts/build` itself, in a copy of the repo's scripts that needs no environment of its own."""

    @pytest.fixture
    def command(self, repo: Repo) -> list[str]:
        shutil.copytree(
            SCRIPTS / "_lib", repo.root / "scripts/_lib", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(SCRIPTS / "build", repo.root / "scripts/build")
        self.environment(repo, "pass")
        return [sys.executable, str(repo.root / "scripts/build"), "--out", str(repo.out)]

    @staticmethod
    def environment(repo: Repo, body: str) -> None:
        code = f"def enter():\n{textwrap.indent(body, '    ')}\n"
        (repo.root / "scripts/_lib/environment.py").write_text(code)

    def test_last_line_is_the_wheel(self, repo: Repo, command: list[str]) -> None:
        """The last line on standard output is the wheel's path."""
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert list(repo.out.iterdir()) == [Path(done.stdout.splitlines()[-1])]

    def test_check_writes_nothing(self, repo: Repo, command: list[str]) -> None:
        """--check says what a build would do, and writes nothing."""
        repo.edit()
        repo.add("airflow/new.py", "")
        done = subprocess.run([*command, "--check"], capture_output=True, text=True, check=True)
        assert f"{VERSION}: 1 new files, 1 edited\n" == done.stdout
        assert not repo.out.exists()

    def test_error_is_one_line(self, repo: Repo, command: list[str]) -> None:
        """An error is one line on standard error, and exit code 1."""
        repo.edit(anchor="LIMIT = 600")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (1, "", 1) == (done.returncode, done.stdout, done.stderr.count("\n"))
        assert "closest is 'LIMIT = 500' at line 18" in done.stderr

    @pytest.mark.parametrize("stage", ["wheel.wheelfile.WheelFile.writestr", "shutil.copyfile", "os.replace"])
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_interrupted(
        self, repo: Repo, command: list[str], stage: str, number: signal.Signals, tmp_path: Path
    ) -> None:
        """A run stopped at any stage of packing leaves no wheel, and unless killed no temporary file."""
        module, _, name = stage.rpartition(".")
        self.environment(
            repo,
            textwrap.dedent(f"""\
                import os, shutil, time, wheel.wheelfile
                original = {stage}
                def slow(*args, **keys):
                    {module}.{name} = original
                    if {stage!r} != "os.replace":
                        original(*args, **keys)
                    print("there", flush=True)
                    time.sleep(600)
                {module}.{name} = slow"""),
        )
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        env = {**os.environ, "TMPDIR": str(temporary)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        ) as run:
            assert run.stdout is not None
            assert "there\n" == run.stdout.readline()
            run.send_signal(number)
            _, error = run.communicate(timeout=60)
        assert [] == list(repo.out.glob("*.whl"))
        if number == signal.SIGKILL:
            return
        assert (128 + number, "build: stopped, no wheel was written\n") == (run.returncode, error)
        assert [] == [*repo.out.iterdir(), *temporary.iterdir()]


def patch(diff: str, folder: Path) -> None:
    subprocess.run(["patch", "-p1", "--quiet", "--fuzz=0"], input=diff, text=True, cwd=folder, check=True)


def contents(path: Path) -> dict[str, bytes]:
    """Return a wheel's files, but for its metadata."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def unpacked(files: dict[str, bytes], folder: Path) -> Path:
    """Lay a wheel's files out as Airflow's repo has them."""
    for name, content in files.items():
        path = folder / "airflow-core/src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def read_back(folder: Path) -> dict[str, bytes]:
    source = folder / "airflow-core/src"
    return {
        path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()
    }


class TestDiff:
    def test_applies(self, repo: Repo, tmp_path: Path) -> None:
        """`patch -p1` makes the wheel's files: edited, new, empty, without a last newline."""
        make_wheel(repo.released.parent, {**repo.files, "airflow/short.py": "x = 1"})
        repo.edit("instead", "for row in rows:", "pass", **{"in": "Job.second"}, imports=["import json"])
        repo.edit("end", None, "y = 2", file="airflow/short.py")
        repo.edit("before", "last", "new: 1", file=CONFIG, **{"in": "scheduler.options"})
        repo.add("airflow/new/__init__.py", "")
        repo.add("airflow/new/x.py", "x = 1")
        diff = repo.builder.patch(VERSION).diff()
        assert f"--- a/airflow-core/src/{JOB}\n+++ b/airflow-core/src/{JOB}\n@@ -1,6 +1,7 @@\n" in diff
        assert "--- /dev/null\n+++ b/airflow-core/src/airflow/new/x.py\n" in diff
        assert not repo.out.exists()
        folder = unpacked(contents(repo.released), tmp_path / "tree")
        patch(diff, folder)
        assert contents(repo.build()) == read_back(folder)


class Patched:
    """What this repo makes of a released wheel."""

    def __init__(self, version: str, folder: Path):
        patch = Builder(ROOT, CACHE).patch(version)
        self.released = contents(patch.released.path)
        self.built = contents(patch.write(folder))
        self.diff = patch.diff()
        touched = {name: code for name, code in self.built.items() if code != self.released.get(name)}
        before = {name: self.released[name] for name in touched if name in self.released}
        self.before = unpacked(before, folder / "before")
        self.after = unpacked(touched, folder / "after")


@pytest.fixture(scope="module", params=SUPPORTED)
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Patched:
    return Patched(request.param, tmp_path_factory.mktemp("patched"))


class TestThisPatchSet:
    """The edits and new files of this repo, on the released wheels."""

    def test_style(self, patched: Patched) -> None:
        """Ruff, as Airflow configures it, has nothing to say about what we changed."""
        assert set() == complaints(patched.after) - complaints(patched.before)

    def test_diff_is_the_wheel(self, patched: Patched) -> None:
        """The diff, applied to the released files, gives the wheel's; none of the released is missing."""
        assert patched.released.keys() <= patched.built.keys()
        patch(patched.diff, patched.before)
        assert read_back(patched.after) == read_back(patched.before)


def complaints(folder: Path) -> set[str]:
    """Return what ruff says about a tree, without line numbers."""
    ruff = [sys.executable, "-m", "ruff"]
    command = [*ruff, "check", *STYLE, "--select", "I,F,W", "--output-format", "json", "."]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    found = {f"{Path(item['filename']).name}: {item['message']}" for item in json.loads(checked)}
    command = [*ruff, "format", *STYLE, "--diff", "."]
    name = ""
    for line in subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    ).stdout.splitlines():
        if line.startswith(("---", "+++")):
            name = Path(line[4:]).name
        elif line.startswith(("-", "+")):
            found.add(f"{name}: formatted as {line}")
    return found
