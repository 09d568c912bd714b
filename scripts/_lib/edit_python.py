"""Edits in a Python file: LibCST finds the place, the text changes there only."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from _lib.edits import BuildError, Edit
from _lib.splice import Splice, closest, nearest

INDENT = 4
STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


def squeezed(code: str) -> str:
    """Code without the differences that formatting makes: white space and trailing commas."""
    code = re.sub(r"([(\[{])\s+", r"\1", re.sub(r"\s+", " ", code.strip()))
    return re.sub(r",?\s*([)\]}])", r"\1", code)


class PythonFile:
    """A file's definitions, statements and expressions, and where each of them stands."""

    def __init__(self, source: str, file: str):
        self.source = source
        try:
            self.tree = cst.parse_module(source)
        except cst.ParserSyntaxError as error:
            raise BuildError(f"{file}: not Python: {error.message} (line {error.raw_line})") from None
        wrapper = MetadataWrapper(self.tree, unsafe_skip_copy=True)
        self._positions = wrapper.resolve(PositionProvider)
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", source))]
        parts = _Parts()
        self.tree.visit(parts)
        self.definitions = parts.definitions
        self.statements = parts.statements
        self.expressions = parts.expressions

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """First offset of a node's code, decorators included, and the offset after its last."""
        decorators = node.decorators if isinstance(node, (cst.FunctionDef, cst.ClassDef)) else ()
        first = self._positions[decorators[0] if decorators else node].start
        last = self._positions[node].end
        return self.line_start(first.line) + first.column, self.line_start(last.line) + last.column

    def lines(self, node: cst.CSTNode) -> tuple[int, int]:
        """Offsets of the lines that a statement stands on, its last newline included."""
        start, end = self.span(node)
        return self.line_start(self.line_number(start)), self.line_start(self.line_number(end) + 1)

    def code(self, node: cst.CSTNode) -> str:
        """A node's code, without decorators."""
        first = self._positions[node].start
        return self.source[self.line_start(first.line) + first.column : self.span(node)[1]]

    def line_number(self, offset: int) -> int:
        return bisect.bisect_right(self._line_starts, offset)

    def line_start(self, number: int) -> int:
        return self._line_starts[number - 1] if number <= len(self._line_starts) else len(self.source)

    def column(self, offset: int) -> int:
        """How far the line of an offset is indented."""
        line = self.source[self.line_start(self.line_number(offset)) :]
        return len(line) - len(line.lstrip(" "))


class _Parts(cst.CSTVisitor):
    """Collects the parts of a module that an edit can name, each with the definition that holds it."""

    def __init__(self) -> None:
        self.definitions: dict[str, list[cst.FunctionDef | cst.ClassDef]] = defaultdict(list)
        self.statements: list[tuple[str, cst.CSTNode]] = []
        self.expressions: list[tuple[str, cst.CSTNode]] = []
        self._path: list[str] = []
        self._elifs: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        scope = ".".join(self._path)
        if isinstance(node, cst.BaseExpression):
            self.expressions.append((scope, node))
        elif isinstance(node, STATEMENTS) and node not in self._elifs:
            self.statements.append((scope, node))
        if isinstance(node, cst.If) and isinstance(node.orelse, cst.If):
            self._elifs.add(node.orelse)
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._path.append(node.name.value)
            self.definitions[".".join(self._path)].append(node)
        return True

    def on_leave(self, node: cst.CSTNode) -> None:
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._path.pop()


def splices(file: PythonFile, edit: Edit) -> Iterator[Splice]:
    """What an edit does to a file, but for its imports."""
    if edit.scope and edit.scope not in file.definitions:
        near = nearest(edit.scope, file.definitions)
        where = _lines_of(file, file.definitions.get(near, []))
        edit.fail(f"expected a definition {edit.scope}, found none; closest is {near} at {where}")
    if edit.lines is None:
        return
    if edit.expression:
        yield _expression(file, edit)
    elif edit.element:
        yield from _element(file, edit)
    elif edit.place == "end":
        yield _end(file, edit)
    else:
        yield _statement(file, edit)


def _statement(file: PythonFile, edit: Edit) -> Splice:
    node = _find(file, edit)
    start, end = file.lines(node)
    if edit.place == "after":
        return _insertion(file, edit, end, file.column(start))
    lines = edit.indented(file.column(start))
    if edit.place == "around":
        return Splice(start, end, lines + _deeper(file, node), edit.name)
    first_comment = file.line_start(file.line_number(start) - _own_comments(node))
    if edit.place == "before":
        return Splice(first_comment, first_comment, lines, edit.name, order=1)
    return Splice(first_comment, end, lines, edit.name)


def _expression(file: PythonFile, edit: Edit) -> Splice:
    start, end = file.span(_find(file, edit))
    lines = edit.indented(file.column(start)).strip()
    return Splice(start, end, lines, edit.name)


def _end(file: PythonFile, edit: Edit) -> Splice:
    if not edit.scope:
        return _insertion(file, edit, len(file.source), 0)
    nodes = file.definitions[edit.scope]
    if len(nodes) > 1:
        edit.fail(f"expected one definition {edit.scope}, found {len(nodes)}: {_lines_of(file, nodes)}")
    if not isinstance(nodes[0].body, cst.IndentedBlock):
        edit.fail(f"expected a body of its own lines in {edit.scope}, found it at {_lines_of(file, nodes)}")
    start, end = file.lines(nodes[0].body.body[-1])
    return _insertion(file, edit, end, file.column(start))


def _insertion(file: PythonFile, edit: Edit, offset: int, column: int) -> Splice:
    """The lines after what ends at an offset. Where blocks end at one place, the inner one goes on first."""
    newline = "" if file.source[:offset].endswith("\n") else "\n"
    return Splice(offset, offset, newline + edit.indented(column), edit.name, order=-column)


def _element(file: PythonFile, edit: Edit) -> Iterator[Splice]:
    node = _find(file, edit)
    statement = node.body[0] if isinstance(node, cst.SimpleStatementLine) else None
    value = statement.value if isinstance(statement, (cst.Assign, cst.AnnAssign)) else None
    opening: cst.CSTNode
    closing: cst.CSTNode
    if isinstance(value, cst.Tuple) and value.lpar:
        opening, closing = value.lpar[-1], value.rpar[0]
    elif isinstance(value, cst.List):
        opening, closing = value.lbracket, value.rbracket
    elif isinstance(value, (cst.Dict, cst.Set)):
        opening, closing = value.lbrace, value.rbrace
    else:
        edit.fail(f"expected a tuple, list, dict or set in brackets at line {_line(file, node)}, found none")
    items = list(value.elements)
    column = file.column(file.span(node)[0])
    added = edit.indented(column + INDENT).rstrip()
    added = f"{added}\n" if added.endswith(",") else f"{added},\n"
    close = file.span(closing)[1] - 1
    close_line = file.line_start(file.line_number(close))
    if items and not file.source[close_line:close].strip():
        last_end = file.span(items[-1])[1]
        if not isinstance(items[-1].comma, cst.Comma):
            yield Splice(last_end, last_end, ",", edit.name)
        yield Splice(close_line, close_line, added, edit.name)
        return
    # Brackets on one line: the elements get one line each.
    open_end = file.span(opening)[0] + 1
    if "\n" in file.source[open_end:close]:
        edit.fail(f"expected the closing bracket of line {_line(file, node)} on a line of its own")
    text = "".join(f"{' ' * (column + INDENT)}{file.code(item)},\n" for item in items)
    yield Splice(open_end, close, f"\n{text}{added}{' ' * column}", edit.name)


def _find(file: PythonFile, edit: Edit) -> cst.CSTNode:
    """The one statement that begins with the anchor, or the one expression that is it."""
    anchor = squeezed(edit.anchor).rstrip(",")
    candidates = file.expressions if edit.expression else file.statements
    here = [(node, squeezed(file.code(node))) for scope, node in candidates if scope == edit.scope]
    if edit.expression:
        found = [node for node, code in here if code == anchor]
    else:
        found = [node for node, code in here if code.startswith(anchor)]
    if len(found) == 1:
        return found[0]

    where = edit.scope or "the module itself"
    kind = "expression" if edit.expression else "statement that begins with"
    expected = f"expected one {kind} {edit.anchor!r} in {where}, found"
    if found:
        edit.fail(f"{expected} {len(found)}: {_lines_of(file, found)}")
    # Close in the definition is best; then the same elsewhere (it was moved); then whatever is there.
    everywhere = ((_line(file, node), squeezed(file.code(node))) for _, node in candidates)
    in_scope = [(_line(file, node), code) for node, code in here]
    near = closest(anchor, in_scope, 0.6) or closest(anchor, everywhere, 0.6) or closest(anchor, in_scope)
    edit.fail(f"{expected} none; closest is {near or 'nothing'}")


def _own_comments(node: cst.CSTNode) -> int:
    """How many lines of comment stand directly above a statement."""
    count = 0
    for line in reversed(getattr(node, "leading_lines", ())):
        if line.comment is None:
            break
        count += 1
    return count


def _deeper(file: PythonFile, node: cst.CSTNode) -> str:
    """A statement's lines one level deeper, but for those that are inside of a string."""
    strings: list[tuple[int, int]] = []

    class Strings(cst.CSTVisitor):
        def on_visit(self, node: cst.CSTNode) -> bool:
            if isinstance(node, (cst.SimpleString, cst.FormattedString)):
                strings.append(file.span(node))
            return True

    node.visit(Strings())
    start, end = file.lines(node)
    text, offset = "", start
    for line in file.source[start:end].splitlines(keepends=True):
        inside = any(first < offset < last for first, last in strings)
        text += line if inside or not line.strip() else " " * INDENT + line
        offset += len(line)
    return text


def _line(file: PythonFile, node: cst.CSTNode) -> int:
    return file.line_number(file.span(node)[0])


def _lines_of(file: PythonFile, nodes: Iterable[cst.CSTNode]) -> str:
    numbers = [str(_line(file, node)) for node in nodes]
    return f"line{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
