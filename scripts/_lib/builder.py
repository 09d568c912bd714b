"""From a released wheel to a patched one: what changes in it, as a wheel or as a diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _lib import edit_imports, edit_python, edit_yaml, wheel
from _lib.edits import BuildError, Edit, load
from _lib.splice import nearest, splice

PACKAGE = "apache-airflow-core"
SUPPORTED = ("3.3.0", "3.3.1", "3.3.2")
# Counts the releases of the patch set: the N of a local version such as 3.3.2+wake.N.
WAKE = 1


@dataclass(frozen=True)
class Change:
    """A file of the wheel, before (None where it is new) and after."""

    name: str
    before: bytes | None
    after: bytes


@dataclass(frozen=True)
class Patch:
    """What the patch set makes of one released wheel."""

    released: wheel.Wheel
    changes: list[Change]

    def write(self, out: Path) -> Path:
        """Pack the patched wheel; return its path."""
        contents = {change.name: change.after for change in self.changes}
        return wheel.pack(self.released, f"{self.released.version}+wake.{WAKE}", contents, out)

    def diff(self) -> str:
        """The change as a unified diff, against the paths of Airflow's repo."""
        return "".join(
            unified(
                f"airflow-core/src/{change.name}",
                None if change.before is None else change.before.decode(),
                change.after.decode(),
            )
            for change in self.changes
        )

    def summary(self) -> str:
        new = sum(change.before is None for change in self.changes)
        return f"{self.released.version}: {new} new files, {len(self.changes) - new} edited"


class Builder:
    """The patch set of a repo, and a cache for released wheels."""

    def __init__(self, root: Path, cache: Path):
        self.core = root / "airflow-core"
        self.cache = cache / "wheels"

    def patch(self, version: str) -> Patch:
        """Work out every change, and check all that can be checked; writes nothing but the cache."""
        if version not in SUPPORTED:
            raise BuildError(f"Airflow {version} is not supported; supported are {', '.join(SUPPORTED)}")
        edits = self.edits()
        try:
            released = wheel.Wheel(wheel.fetch(PACKAGE, version, self.cache))
            changes = [*self._new_files(released), *_edited_files(released, edits, version)]
        except BuildError as error:
            raise BuildError(f"Airflow {version}: {error}") from None
        return Patch(released, sorted(changes, key=lambda change: change.name))

    def edits(self) -> list[Edit]:
        """Every edit of the repo."""
        sources = [self.core / "edits.toml", *sorted(self.core.glob("edits/*.toml"))]
        edits = load([source for source in sources if source.exists()])
        for edit in edits:
            if unknown := sorted(set(edit.versions) - set(SUPPORTED)):
                edit.fail(f"version {unknown[0]} is not supported; supported are {', '.join(SUPPORTED)}")
        return edits

    def _new_files(self, released: wheel.Wheel) -> Iterator[Change]:
        source = self.core / "src"
        for path in sorted(source.glob("airflow/**/*")):
            name = path.relative_to(source).as_posix()
            # Hidden files and __pycache__ are what tools left behind.
            if not path.is_file() or "/." in name or "/__pycache__/" in name:
                continue
            if name in released:
                raise BuildError(f"{name}: expected a new file, found it in the wheel; write an edit instead")
            content = path.read_bytes()
            if b"\0" in content:
                raise BuildError(f"{name}: expected text, which a diff can show, found binary content")
            check_python(name, content)
            yield Change(name, None, content)


def _edited_files(released: wheel.Wheel, edits: list[Edit], version: str) -> Iterator[Change]:
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        if not edit.versions or version in edit.versions:
            by_file.setdefault(edit.file, []).append(edit)
    for name, group in by_file.items():
        if name not in released:
            group[0].fail(
                f"expected this file in the wheel, found none; closest is {nearest(name, released)}"
            )
        try:
            before = released.read(name)
        except BuildError as error:
            raise BuildError(f'edit "{group[0].name}": {error}') from None
        after = edited(name, before.decode(), group).encode()
        check_python(name, after)
        yield Change(name, before, after)


def edited(name: str, source: str, edits: list[Edit]) -> str:
    """Apply edits to the text of their file."""
    if edits[0].is_yaml:
        return edit_yaml.edited(source, edits, name)
    file = edit_python.PythonFile(source, name)
    # Each edit is found in the file as released, so that none depends on another.
    splices = [item for edit in edits for item in edit_python.splices(file, edit)]
    try:
        return splice(source, [*splices, *edit_imports.splices(file, edits)])
    except BuildError as error:
        raise BuildError(f"{name}: {error}") from None


def check_python(name: str, content: bytes) -> None:
    """Raise where a file should be Python and is not."""
    if not name.endswith(".py"):
        return
    try:
        compile(content, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        found = f"{error.msg} at line {error.lineno}: {(error.text or '').strip()!r}"
        raise BuildError(f"{name}: not Python with our change: {found}") from None


def unified(path: str, old: str | None, new: str) -> str:
    """A file's change as git writes it; it is new where there is no old text."""
    header = f"diff --git a/{path} b/{path}\n"
    if old is None:
        header += "new file mode 100644\n"
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        new.splitlines(keepends=True),
        "/dev/null" if old is None else f"a/{path}",
        f"b/{path}",
    )
    unended = "\n\\ No newline at end of file\n"
    return header + "".join(line if line.endswith("\n") else line + unended for line in lines)
