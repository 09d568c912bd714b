"""Edits: what one may say in `airflow-core/edits.toml`, and reading that file."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import libcst as cst
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHON = ".py"
YAML = (".yml", ".yaml")
PLACES = {PYTHON: ("before", "after", "instead", "end", "around"), YAML: ("before", "after")}


class BuildError(Exception):
    """Why there is no wheel, in one line."""


@dataclass(frozen=True)
class Edit:
    """One hook in a file that Airflow owns."""

    name: str
    why: str
    file: str
    scope: str = ""  # spelled "in" in the file: the definition, or the path of keys, that holds the anchor
    anchor: str = ""
    place: str = ""
    lines: str | None = None
    element: bool = False
    expression: bool = False
    imports: tuple[str, ...] = ()
    unused_imports: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    @property
    def is_yaml(self) -> bool:
        return self.file.endswith(YAML)

    def fail(self, message: str) -> NoReturn:
        raise BuildError(f'edit "{self.name}": {self.file}: {message}')

    def indented(self, column: int) -> str:
        """The lines, indented to a column; no line gets trailing spaces."""
        return textwrap.indent(self.lines or "", " " * column)


_REQUIRED = ("name", "why", "file")
_TYPES: dict[str, type] = {
    **dict.fromkeys(("name", "why", "file", "in", "anchor", "place", "lines"), str),
    **dict.fromkeys(("element", "expression"), bool),
    **dict.fromkeys(("imports", "unused_imports", "versions"), list),
}


def load(sources: list[Path]) -> list[Edit]:
    """All edits of the files, in order; raises `BuildError` for the first thing that is wrong in one."""
    edits: list[Edit] = []
    for source in sources:
        where = source.name
        try:
            document = tomllib.loads(source.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BuildError(f"{where}: not TOML: {error}") from None
        if unknown := sorted(document.keys() - {"edit"}):
            raise BuildError(f"{where}: unknown table {unknown[0]!r}; only [[edit]] is known")
        tables = document.get("edit", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise BuildError(f"{where}: an edit is written as [[edit]]")
        for number, table in enumerate(tables, 1):
            edit = _edit(table, f"{where}: edit {table.get('name', number)!r}")
            if any(edit.name == other.name for other in edits):
                raise BuildError(f"{where}: two edits are named {edit.name!r}")
            edits.append(edit)
    return edits


def _edit(table: dict[str, Any], where: str) -> Edit:
    for key, value in table.items():
        if key not in _TYPES:
            raise BuildError(f"{where}: unknown key {key!r}; known are {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[key]):
            raise BuildError(f"{where}: {key!r} has to be a {_TYPES[key].__name__}, not {value!r}")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise BuildError(f"{where}: {key!r} has to be a list of strings, not {value!r}")
    for key in _REQUIRED:
        if not table.get(key, "").strip():
            raise BuildError(f"{where}: key {key!r} is missing")

    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    values["scope"] = values.pop("in", "")
    if "lines" in values:
        lines = textwrap.dedent(values["lines"])
        values["lines"] = lines if not lines or lines.endswith("\n") else lines + "\n"
    edit = Edit(**values)
    if problem := _problem(edit):
        raise BuildError(f"{where}: {problem}")
    return edit


def _problem(edit: Edit) -> str | None:
    """What is wrong with an edit whose keys have the right types."""
    if not edit.file.endswith((PYTHON, *YAML)):
        return f"cannot edit {edit.file!r}: only {', '.join((PYTHON, *YAML))} files"
    if edit.lines is None:
        if edit.anchor or edit.place or not (edit.imports or edit.unused_imports):
            return "key 'lines' is missing"
        return _import_problem(edit)
    places = PLACES[YAML if edit.is_yaml else PYTHON]
    if edit.place not in places:
        return f"place {edit.place!r} is none of {', '.join(places)}"
    if edit.element and edit.place != "end":
        return 'an element has place = "end"'
    if edit.expression and edit.place != "instead":
        return 'an expression has place = "instead"'
    needs_anchor = edit.place != "end" or edit.element
    if needs_anchor != bool(edit.anchor.strip()):
        return "key 'anchor' is missing" if needs_anchor else 'place = "end" takes no anchor'
    if not edit.lines.strip() and (edit.place != "instead" or edit.expression):
        return "'lines' are empty"
    return _lines_problem(edit) or _import_problem(edit)


def _lines_problem(edit: Edit) -> str | None:
    assert edit.lines is not None
    try:
        if edit.is_yaml:
            yaml.safe_load(edit.lines)
        elif edit.element:
            _parse_elements(edit.lines)
        elif edit.expression:
            cst.parse_expression(f"({edit.lines.strip()})")  # it may stand on several lines
        elif edit.place == "around":
            body = cst.parse_module(edit.lines.rstrip() + "\n    pass\n").body
            if len(body) != 1 or not isinstance(body[0], cst.With):
                return "'lines' have to be the header of one with statement"
        else:
            cst.parse_module(edit.lines)
    except (cst.ParserSyntaxError, yaml.YAMLError) as error:
        return f"'lines' do not parse: {' '.join(str(error).split())}"
    return None


def _import_problem(edit: Edit) -> str | None:
    if edit.is_yaml and (edit.imports or edit.unused_imports):
        return "a YAML file has no imports"
    for line in edit.imports:
        try:
            statement = cst.parse_statement(line)
        except cst.ParserSyntaxError:
            statement = None
        body = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        if len(body) != 1 or not isinstance(body[0], (cst.Import, cst.ImportFrom)):
            return f"{line!r} is not an import"
    for target in edit.unused_imports:
        if target.count(":") != 1:
            return f"unused import {target!r} is not written module:name"
    return None


def _parse_elements(lines: str) -> None:
    """Check that lines are elements of a tuple or list, or else of a dict."""
    try:
        cst.parse_expression(f"[\n{lines}]")
    except cst.ParserSyntaxError:
        cst.parse_expression(f"{{\n{lines}}}")
