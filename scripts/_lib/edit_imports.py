"""Imports that an edit needs, or no longer needs, sorted as Airflow's isort rules (ruff's) have it."""

from __future__ import annotations

import bisect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.helpers import get_full_name_for_node

from _lib.edit_python import INDENT, PythonFile
from _lib.edits import Edit
from _lib.splice import Splice

LINE_LENGTH = 110


@dataclass(frozen=True)
class Import:
    """`import module`, or where there are names `from module import names`."""

    module: str
    names: tuple[str, ...] = ()  # with "as", where they have it

    @property
    def is_from(self) -> bool:
        return bool(self.names)

    @property
    def section(self) -> int:
        """0 to 3: future, standard library, third party, first party."""
        top = self.module.partition(".")[0]
        if top == "__future__":
            return 0
        if top in sys.stdlib_module_names:
            return 1
        return 3 if top in ("airflow", "tests_common") else 2

    @property
    def order(self) -> tuple:
        return self.section, self.is_from, _natural(self.module), self.module

    @property
    def code(self) -> str:
        if not self.is_from:
            return f"import {self.module}"
        line = f"from {self.module} import {', '.join(self.names)}"
        if len(line) <= LINE_LENGTH:
            return line
        names = "".join(f"{' ' * INDENT}{name},\n" for name in self.names)
        return f"from {self.module} import (\n{names})"


def name_order(name: str) -> tuple:
    """Constants come first, then classes, then the rest."""
    plain = name.partition(" as ")[0]
    kind = 0 if len(plain) > 1 and plain.isupper() else 1 if plain[:1].isupper() else 2
    return kind, _natural(plain), name


def _natural(text: str) -> list[tuple[bool, int, str]]:
    """Numbers in a name count as numbers, and come before letters."""
    parts = re.split(r"(\d+)", text.lower())
    return [(False, int(part), "") if part.isdigit() else (True, 0, part) for part in parts]


def parsed(code: str) -> list[Import]:
    """The imports of a line of code."""
    statement = cst.parse_statement(code)
    assert isinstance(statement, cst.SimpleStatementLine)
    return _imports_of(statement)


def _imports_of(statement: cst.SimpleStatementLine) -> list[Import]:
    found = []
    for part in statement.body:
        if isinstance(part, cst.Import):
            found += [Import(_alias(alias)) for alias in part.names]
        elif isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
            module = get_full_name_for_node(part.module) if part.module else None
            if module and not part.relative:
                found.append(Import(module, tuple(_alias(alias) for alias in part.names)))
    return found


def _alias(alias: cst.ImportAlias) -> str:
    return f"{alias.evaluated_name} as {alias.evaluated_alias}" if alias.asname else alias.evaluated_name


def splices(file: PythonFile, edits: Iterable[Edit]) -> Iterator[Splice]:
    """What the edits of a file do to its imports."""
    added: dict[tuple[str, bool], tuple[set[str], Edit]] = {}
    removed: dict[str, dict[str, Edit]] = {}
    for edit in edits:
        for item in (item for code in edit.imports for item in parsed(code)):
            names, _ = added.setdefault((item.module, item.is_from), (set(), edit))
            names.update(item.names)
        for target in edit.unused_imports:
            module, _, name = target.partition(":")
            removed.setdefault(module, {})[name] = edit

    existing = [(node, item) for node in _top_level(file) for item in _imports_of(node)]
    new: list[tuple[Import, Edit]] = []
    for (module, is_from), (names, edit) in added.items():
        if unused := names & removed.get(module, {}).keys():
            edit.fail(f"expected nothing to import {module}:{min(unused)}, which another edit calls unused")
        same = [(node, item) for node, item in existing if (item.module, item.is_from) == (module, is_from)]
        missing = names - {name for _, item in same for name in item.names}
        if not same:
            new.append((Import(module, tuple(sorted(names, key=name_order))), edit))
        elif missing:
            yield from _merged(file, same[0][0], missing, edit)
    new.sort(key=lambda pair: pair[0].order)
    for section, group in itertools.groupby(new, key=lambda pair: pair[0].section):
        yield from _inserted(file, existing, section, list(group))
    for module, unused_here in removed.items():
        yield from _removed(file, module, unused_here)


def _inserted(
    file: PythonFile,
    existing: list[tuple[cst.SimpleStatementLine, Import]],
    section: int,
    new: list[tuple[Import, Edit]],
) -> Iterator[Splice]:
    """New statements of one section, which may have to be begun."""
    if not existing:
        new[0][1].fail("expected an import to put another beside, found none")
    siblings = [(node, item) for node, item in existing if item.section == section]
    if not siblings:
        text = "".join(f"{item.code}\n" for item, _ in new)
        earlier = [node for node, item in existing if item.section < section]
        place = file.lines(earlier[-1])[1] if earlier else file.lines(existing[0][0])[0]
        yield Splice(place, place, f"\n{text}" if earlier else f"{text}\n", new[0][1].name)
        return
    for item, edit in new:
        smaller = [node for node, sibling in siblings if sibling.order < item.order]
        place = file.lines(smaller[-1])[1] if smaller else file.lines(siblings[0][0])[0]
        yield Splice(place, place, f"{item.code}\n", edit.name)


def _merged(file: PythonFile, node: cst.SimpleStatementLine, names: set[str], edit: Edit) -> Iterator[Splice]:
    """Add names to an existing statement: a line each where it has a line for each of its own."""
    aliases = _aliases(node)
    if not _one_per_line(file, aliases):
        yield _rewritten(file, node, {*map(_alias, aliases), *names}, edit)
        return
    orders = [name_order(_alias(alias)) for alias in aliases]
    for name in sorted(names, key=name_order):
        index = bisect.bisect(orders, name_order(name))
        place = file.lines(aliases[index])[0] if index < len(aliases) else file.lines(aliases[-1])[1]
        yield Splice(place, place, f"{' ' * INDENT}{name},\n", edit.name)


def _removed(file: PythonFile, module: str, unused: dict[str, Edit]) -> Iterator[Splice]:
    left = dict(unused)
    for _, node in file.statements:
        if not isinstance(node, cst.SimpleStatementLine):
            continue
        for item in _imports_of(node):
            here = [name for name in item.names if name in left] if item.module == module else []
            if not here:
                continue
            edit = left[here[0]]
            for name in here:
                del left[name]
            aliases = _aliases(node)
            kept = set(item.names) - set(here)
            if not kept:
                yield Splice(*file.lines(node), "", edit.name)
            elif _one_per_line(file, aliases):
                for alias in aliases:
                    if _alias(alias) in here:
                        yield Splice(*file.lines(alias), "", edit.name)
            else:
                yield _rewritten(file, node, kept, edit)
    for name, edit in left.items():
        edit.fail(f"expected an import {module}:{name}, found none")


def _rewritten(file: PythonFile, node: cst.SimpleStatementLine, names: set[str], edit: Edit) -> Splice:
    start, end = file.span(node)
    (item,) = _imports_of(node)
    code = Import(item.module, tuple(sorted(names, key=name_order))).code
    column = file.column(start)
    return Splice(start, end, code.replace("\n", "\n" + " " * column), edit.name)


def _top_level(file: PythonFile) -> list[cst.SimpleStatementLine]:
    """The import statements at the top of the file, up to the first statement of another kind after them."""
    found: list[cst.SimpleStatementLine] = []
    for node in file.tree.body:
        first = node.body[0] if isinstance(node, cst.SimpleStatementLine) else None
        if isinstance(node, cst.SimpleStatementLine) and isinstance(first, (cst.Import, cst.ImportFrom)):
            found.append(node)
        elif found:
            break
    return found


def _aliases(node: cst.SimpleStatementLine) -> list[cst.ImportAlias]:
    statement = node.body[0]
    assert isinstance(statement, cst.ImportFrom)
    assert not isinstance(statement.names, cst.ImportStar)
    return list(statement.names)


def _one_per_line(file: PythonFile, aliases: list[cst.ImportAlias]) -> bool:
    lines = [file.source[slice(*file.lines(alias))].strip() for alias in aliases]
    return all(re.fullmatch(r"\w+( as \w+)?,(\s*#.*)?", line) for line in lines)
