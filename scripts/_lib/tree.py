"""The change as a series of patches against a checkout of Airflow's repository, to be reviewed and sent upstream.

Each patch is one step that works without the ones after it, in the form of `git format-patch`: `git apply` and `git am` take
it. The checkout is only read.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formataddr
from pathlib import Path

from _lib.builder import SUPPORTED, Builder, check_python, edited, unified
from _lib.edits import BuildError, Edit

SOURCE = "airflow-core/src"
VERSIONS = f"{SOURCE}/airflow/migrations/versions"
# The fixtures of the suite. Airflow has a plugin of its own in that place, so they go beside it.
PLUGIN = "devel-common/src/tests_common/pytest_plugin.py"
FIXTURES = "devel-common/src/tests_common/asset_partition_fixtures.py"
# What Airflow's own tests do not have; tests that need it stay here.
NOT_UPSTREAM = {"_lib", "hypothesis"}


@dataclass(frozen=True)
class Part:
    """One patch of the series, and what it takes: names of edits, or files that are new or edited (as globs)."""

    title: str
    body: str
    takes: tuple[str, ...]


# The first part that takes a file or an edit has it.
PARTS = (
    Part(
        "Add wake requests for pending asset partitions",
        "A table of requests to evaluate pending runs. Whoever changes something that can change the result of\n"
        "a pending run inserts one in the transaction of the change; a session listener does so for every key\n"
        "log. An insert never waits: the table has neither a foreign key nor a unique key. Nothing reads the\n"
        "requests yet.",
        (
            "airflow/models/asset_partition_wake.py",
            "airflow/migrations/*",
            "airflow/models/asset.py",
        ),
    ),
    Part(
        "Ask for evaluation when a timetable is stored differently",
        "A new asset condition or partition mapper can satisfy pending runs. A definition that is decoded again\n"
        "after its instance expired is the one that is stored now.",
        ("airflow/models/serialized_dag.py",),
    ),
    Part(
        "Ask for evaluation when an asset is activated",
        "Key logs of an inactive asset do not count, so that its activation can satisfy pending runs.",
        ("airflow/dag_processing/collection.py", "scheduler-activation-asks"),
    ),
    Part(
        "Add the option and the metrics of asset partition evaluation",
        "They come before the scheduler's step, which reads the option and sends the metrics.",
        ("airflow/config_templates/config.yml", "airflow/_shared/observability/metrics/*"),
    ),
    Part(
        "Evaluate pending asset partitions on request",
        "A scheduler loop reads requests, locks the runs that they name, evaluates those only, and deletes\n"
        "exactly the requests that it had read before. Until now each loop evaluated the 500 oldest pending\n"
        "runs: those that wait by design starved the others. A slow pass over every pending run is the safety\n"
        "net for changes that no request reports.",
        ("airflow/jobs/*", "airflow-core/newsfragments/*"),
    ),
    Part(
        "Add `airflow partitions waiting`",
        "It says why a partition has not run. It reads only.",
        ("airflow/cli/*",),
    ),
    Part(
        "Test the evaluation of asset partitions on request",
        "The fixtures stand in a module of their own, which each test module imports.",
        ("airflow-core/tests/*", "devel-common/*"),
    ),
)


class Checkout:
    """Airflow's repository, or what is laid out like it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not (self.root / VERSIONS).is_dir():
            raise BuildError(f"{root} is not a checkout of Airflow: it has no {VERSIONS}")
        self.head, self.number = _head(self.root / VERSIONS)

    def path(self, name: str) -> str:
        """Where a file of the package stands; `_shared` modules are links to `shared/`."""
        path = (self.root / SOURCE / name).resolve()
        try:
            return path.relative_to(self.root).as_posix()
        except ValueError:
            raise BuildError(f"{name} is a link out of the checkout") from None

    def read(self, path: str) -> str | None:
        file = self.root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def author(self) -> str | None:
        """The name and address that git would commit with here, as a mail header has them."""
        command = ["git", "-C", str(self.root), "var", "GIT_AUTHOR_IDENT"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
        name, _, address = said.rpartition(">")[0].rpartition(" <")
        return formataddr((name, address)) if address.isascii() else None


def _head(folder: Path) -> tuple[str, int]:
    """Return the revision that no migration stands on, and the highest number of a migration."""
    below: dict[str, set[str]] = {}
    numbers = [0]
    for path in sorted(folder.glob("*.py")):
        values = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id in ("revision", "down_revision"):
                values[target.id] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
        if "revision" in values:
            down = values.get("down_revision") or ()
            below[values["revision"]] = {down} if isinstance(down, str) else set(down)
            numbers += [int(match[0]) for match in [re.match(r"\d{4}", path.name)] if match]
    heads = sorted(below.keys() - set().union(*below.values()))
    if len(heads) != 1:
        raise BuildError(f"{folder}: expected migrations with one head, found {', '.join(heads) or 'none'}")
    return heads[0], max(numbers)


@dataclass(frozen=True)
class Piece:
    """What one part does to one file of the checkout: text before (None where it is new) and after."""

    path: str
    before: str | None
    after: str


class Series:
    """The patch set of a repo as a series against a checkout."""

    def __init__(self, root: Path, tree: Path, cache: Path) -> None:
        self.root = root
        self.edits = [
            edit
            for edit in Builder(root, cache).edits()
            if not edit.versions or SUPPORTED[-1] in edit.versions
        ]
        self.checkout = Checkout(tree)
        self.left_out: list[str] = []
        """Tests that need what Airflow's own do not have."""
        self._renamed = self._rename_migration()
        self.parts = self._parts()

    def write(self, out: Path) -> list[Path]:
        """Write the patches to a folder, in place of an earlier series, and return their paths."""
        author = self.checkout.author()
        texts = []
        for number, (part, pieces) in enumerate(self.parts, 1):
            slug = re.sub(r"[^\w]+", "-", part.title).strip("-")
            subject = f"[PATCH {number}/{len(self.parts)}] {part.title}"
            texts.append((f"{number:04}-{slug}.patch", self._mail(subject, part.body, pieces, author)))
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("[0-9][0-9][0-9][0-9]-*.patch"):
            old.unlink()
        for name, text in texts:
            (out / name).write_text(text, encoding="utf-8")
        return [out / name for name, _ in texts]

    @staticmethod
    def _mail(subject: str, body: str, pieces: list[Piece], author: str | None) -> str:
        lines = [f"From {'0' * 40} Mon Sep 17 00:00:00 2001"]
        lines += [f"From: {author}"] if author else []
        lines += [f"Subject: {subject}", "", body, "---"]
        lines += [f" {piece.path}" for piece in pieces]
        diff = "".join(unified(piece.path, piece.before, piece.after) for piece in pieces)
        return "\n".join(lines) + "\n\n" + diff + "-- \nscripts/build --diff --tree\n\n"

    # -- what belongs where --------------------------------------------------------------------------------------

    def _parts(self) -> list[tuple[Part, list[Piece]]]:
        pieces: dict[Part, list[Piece]] = {part: [] for part in PARTS}
        for name, path, text in self._new_files():
            if self.checkout.read(path) is not None:
                raise BuildError(f"{path}: expected a new file, found it in the checkout")
            check_python(path, text.encode())
            pieces[_part(name, name)].append(Piece(path, None, text))
        by_file: dict[str, list[Edit]] = {}
        for edit in self.edits:
            by_file.setdefault(edit.file, []).append(edit)
        for file, edits in by_file.items():
            for part, piece in self._edited(file, edits):
                pieces[part].append(piece)
        return [
            (part, sorted(found, key=lambda piece: piece.path)) for part, found in pieces.items() if found
        ]

    def _edited(self, file: str, edits: list[Edit]) -> Iterator[tuple[Part, Piece]]:
        path = self.checkout.path(file)
        source = self.checkout.read(path)
        if source is None:
            edits[0].fail(f"expected this file in the checkout, at {path}; it is not there")
        before = source
        for part in PARTS:
            # All edits so far are found in the file as it is, as the builder does it.
            upto = PARTS[: PARTS.index(part) + 1]
            if not any(_part(edit.name, file) is part for edit in edits):
                continue
            after = edited(file, source, [edit for edit in edits if _part(edit.name, file) in upto])
            check_python(path, after.encode())
            yield part, Piece(path, before, after)
            before = after

    def _new_files(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, path in the checkout and text of each new file."""
        core = self.root / "airflow-core"
        source = core / "src"
        for file in _files(source / "airflow", "**/*"):
            name = file.relative_to(source).as_posix()
            yield name, f"{SOURCE}/{self._moved(name)}", self._text(file)
        for file in _files(core / "newsfragments", "*.rst"):
            name = file.relative_to(self.root).as_posix()
            yield name, name, file.read_text(encoding="utf-8")
        for file in _files(self.root / "devel-common/src/tests_common", "*.py"):
            name = file.relative_to(self.root).as_posix()
            text = self._text(file)
            if name == PLUGIN:
                yield name, FIXTURES, f"{text}\n\n__all__ = {json.dumps(_fixtures(text))}\n"
            else:
                yield name, name, text
        yield from self._tests()

    def _tests(self) -> Iterator[tuple[str, str, str]]:
        tests, helpers = {}, {}
        for file in _files(self.root / "airflow-core/tests", "unit/**/*.py"):
            name = file.relative_to(self.root).as_posix()
            text = self._text(file)
            if not file.name.startswith("test_"):
                helpers[name] = text
            elif _imported(text) & NOT_UPSTREAM:
                self.left_out.append(name)
            else:
                tests[name] = _with_fixtures(text)
        # A script that only tests run which stay here stays too.
        used = {name for name in helpers if any(Path(name).stem in text for text in tests.values())}
        self.left_out += sorted(helpers.keys() - used)
        for name, text in {**tests, **{name: helpers[name] for name in used}}.items():
            yield name, self._moved(name), text

    # -- what differs there --------------------------------------------------------------------------------------

    def _rename_migration(self) -> Callable[[str], str]:
        """Return what puts our migration on the checkout's head, in names and texts."""
        ours = _files(self.root / "airflow-core/src/airflow/migrations/versions", "*.py")
        if not ours:
            return lambda text: text
        if len(ours) != 1:
            raise BuildError(f"expected one migration of ours, found {len(ours)}")
        text = ours[0].read_text(encoding="utf-8")
        values = dict(re.findall(r'^(revision|down_revision) = "(\w+)"$', text, re.MULTILINE))
        if values["revision"] == self.checkout.head:
            raise BuildError(f"the checkout's newest migration is ours ({self.checkout.head}) already")
        old = ours[0].name[:4]
        number = f"{max(int(old), self.checkout.number + 1):04}"

        def renamed(text: str) -> str:
            text = text.replace(values["down_revision"], self.checkout.head)
            return re.sub(rf"(?<!\d){old}(?=_|\b)", number, text)

        return renamed

    def _moved(self, name: str) -> str:
        return self._renamed(name) if "migrations/" in name else name

    def _text(self, file: Path) -> str:
        """A file's text, with the licence that Airflow's files have, and migrations renamed."""
        text = file.read_text(encoding="utf-8")
        if "migrations/" in file.as_posix():
            text = self._renamed(text)
        if file.suffix == ".py" and "Licensed to the Apache Software Foundation" not in text:
            text = LICENCE + text
        return text


def _files(folder: Path, pattern: str) -> list[Path]:
    """The files below a folder, without those that tools left behind."""
    return [
        path
        for path in sorted(folder.glob(pattern))
        if path.is_file()
        and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    ]


def _part(name: str, file: str) -> Part:
    for part in PARTS:
        if any(name == pattern or fnmatch.fnmatch(file, pattern) for pattern in part.takes):
            return part
    raise BuildError(f"{name}: no patch of the series takes it; see PARTS in scripts/_lib/tree.py")


def _imported(source: str) -> set[str]:
    """The packages that a module imports when it is loaded."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def _fixtures(source: str) -> list[str]:
    return sorted(
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("pytest.fixture") for decorator in node.decorator_list)
    )


def _with_fixtures(source: str) -> str:
    """Import our fixtures where Airflow imports its test helpers: after all others, sorted."""
    line = f"from tests_common.{Path(FIXTURES).stem} import *  # noqa: F403\n"
    block = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = source.splitlines(keepends=True)
    for node in block:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests_common"):
            lines.insert(node.lineno - 1, line)
            break
    else:
        lines.insert(block[-1].end_lineno or 0, f"\n{line}")
    return "".join(lines)


LICENCE = """\
# Licensed to the Apache Software Foundation (ASF) under one
# or more contributor license agreements.  See the NOTICE file
# distributed with this work for additional information
# regarding copyright ownership.  The ASF licenses this file
# to you under the Apache License, Version 2.0 (the
# "License"); you may not use this file except in compliance
# with the License.  You may obtain a copy of the License at
#
#   http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing,
# software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY
# KIND, either express or implied.  See the License for the
# specific language governing permissions and limitations
# under the License.
"""
