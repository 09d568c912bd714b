"""Edits in a YAML file: a parser's marks find the place, so that comments and layout stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import yaml

from _lib.edits import BuildError, Edit
from _lib.splice import Splice, closest, nearest, splice

# The C parser is ten times as fast, where PyYAML has it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def edited(source: str, edits: Iterable[Edit], file: str) -> str:
    """The source with the edits' keys and items, and nothing else that is new to a YAML parser."""
    edits = list(edits)
    try:
        root = yaml.compose(source, Loader=LOADER)
        expected = yaml.load(source, Loader=LOADER)
    except yaml.YAMLError as error:
        raise BuildError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    lines = source.splitlines(keepends=True)
    result = splice(source, [_splice(root, lines, edit) for edit in edits])

    for edit in edits:
        expected = _with(expected, edit)
    try:
        found = yaml.load(result, Loader=LOADER)
    except yaml.YAMLError as error:
        raise BuildError(f"{file}: no longer YAML: {' '.join(str(error).split())}") from None
    if found != expected:
        names = ", ".join(edit.name for edit in edits)
        raise BuildError(f"{file}: the edits change more than the keys that they add: {names}")
    return result


def _splice(root: yaml.Node | None, lines: list[str], edit: Edit) -> Splice:
    container = _container(root, edit)
    entries = _entries(container)
    found = [index for index, (names, _, _) in enumerate(entries) if edit.anchor in names]
    where = edit.scope or "the top level"
    kind = "key" if isinstance(container, yaml.MappingNode) else "item"
    expected = f"expected one {kind} {edit.anchor!r} in {where}, found"
    if len(found) > 1:
        numbers = ", ".join(str(entries[index][1].start_mark.line + 1) for index in found)
        edit.fail(f"{expected} {len(found)}: lines {numbers}")
    if not found:
        there = [(first.start_mark.line + 1, name) for names, first, _ in entries for name in names]
        edit.fail(f"{expected} none; closest is {closest(edit.anchor, there) or 'nothing'}")

    _, first, last = entries[found[0]]
    column = container.start_mark.column
    number = first.start_mark.line
    if edit.place == "before":
        while number and _is_comment(lines[number - 1], column):
            number -= 1
    else:
        number = max(last.end_mark.line + (last.end_mark.column > column), number + 1)
        while not lines[number - 1].strip() or _is_comment(lines[number - 1], column):
            number -= 1
    offset = sum(map(len, lines[:number]))
    newline = "" if not offset or lines[number - 1].endswith("\n") else "\n"
    return Splice(offset, offset, newline + edit.indented(column), edit.name)


def _container(root: yaml.Node | None, edit: Edit) -> yaml.CollectionNode:
    """The mapping or list that the edit's path of keys leads to."""
    node, keys = root, edit.scope.split(".") if edit.scope else []
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        by_name = {name.value: (name.start_mark.line + 1, value) for name, value in pairs}
        if key not in by_name:
            near = nearest(key, by_name)
            line = by_name[near][0] if by_name else 1
            edit.fail(f"expected a key {key!r} of {edit.scope}, found none; closest is {near} at line {line}")
        node = by_name[key][1]
    if not isinstance(node, yaml.CollectionNode) or node.flow_style:
        edit.fail(f"expected a mapping or list at {edit.scope or 'the top level'}, one entry a line")
    return node


def _entries(container: yaml.CollectionNode) -> list[tuple[list[str], yaml.Node, yaml.Node]]:
    """Each entry's names as an anchor spells them, its first node and its last."""
    if isinstance(container, yaml.MappingNode):
        return [([key.value], key, value) for key, value in container.value]
    entries = []
    for item in container.value:
        pairs = item.value if isinstance(item, yaml.MappingNode) else []
        names = [f"{key.value}: {value.value}" for key, value in pairs if isinstance(value, yaml.ScalarNode)]
        entries.append((names, item, item))
    return entries


def _is_comment(line: str, column: int) -> bool:
    """Whether a line is a comment between entries, rather than part of one."""
    return line.lstrip().startswith("#") and len(line) - len(line.lstrip()) <= column


def _with(data: Any, edit: Edit) -> Any:
    """What a parser should see after an edit."""
    data = copy.deepcopy(data)
    added = yaml.load(edit.lines or "", Loader=LOADER)
    container = data
    for key in edit.scope.split(".") if edit.scope else []:
        container = container[key]
    if isinstance(container, dict) and isinstance(added, dict):
        if present := sorted(added.keys() & container.keys()):
            edit.fail(f"expected no key {present[0]!r} in {edit.scope or 'the top level'}, found one")
        container.update(added)
    elif isinstance(container, list) and isinstance(added, list):
        key, _, value = edit.anchor.partition(": ")
        index = next(i for i, item in enumerate(container) if str(item.get(key)) == value)
        place = index + (edit.place == "after")
        container[place:place] = added
    else:
        edit.fail(f"expected lines that are a {type(container).__name__}, found a {type(added).__name__}")
    return data
