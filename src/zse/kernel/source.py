"""Where staged code comes from and which names it sees: a function's AST with its text, and the scopes of the
interpreter."""

import ast
import inspect
import linecache
import textwrap
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from zse.errors import CompileError
from zse.syntax import parse


@dataclass
class Source:
    """A function's AST and where its text stands, for error excerpts."""

    tree: ast.FunctionDef
    path: str
    first_line: int
    lines: list[str]
    indent: int
    assigned: frozenset[str]
    signature: inspect.Signature
    name: str  # the path as error reports of generated code show it

    def error(self, node: ast.AST, what: str) -> CompileError:
        """What is wrong with a part of the function: its line with a caret below it."""
        index = node.lineno - 1  # type: ignore[attr-defined]
        text = self.lines[index].rstrip("\n") if index < len(self.lines) else ""
        caret = " " * (node.col_offset + self.indent) + "^" * max(1, _width(node))  # type: ignore[attr-defined]
        return CompileError(f"{self.path}:{self.first_line + index}: {what}\n{text}\n{caret}")

    def arguments(self, args: list, kwargs: dict) -> dict[str, object]:
        """Name → value of a call's arguments, defaults included. TypeError where they do not fit."""
        if not kwargs and len(args) == len(self.positional):  # as most are; inspect takes five times as long
            return dict(zip(self.positional, args, strict=True))
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """The parameters' names, if a value for each is all that a call needs."""
        parameters = self.signature.parameters.values()
        return (
            tuple(self.signature.parameters)
            if all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
            else ()
        )


def _width(node: Any) -> int:
    return node.end_col_offset - node.col_offset if node.end_lineno == node.lineno else 1


def innermost(stager: object, node: ast.stmt, error: Exception) -> ast.AST:
    """The part of a statement that `stager` was at when it raised the error, from the traceback: of 2 million expressions none has
    to note where it stands."""
    found: ast.AST = node
    trace = error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        if names.get("self") is stager and isinstance(names.get("node"), ast.expr):
            found = names["node"]
        trace = trace.tb_next
    return found


_sources: dict[object, Source] = {}

_AROUND = __file__.replace("\\", "/").removesuffix("zse/kernel/source.py")  # the folder that the package lies in


def _lines_of(function) -> tuple[list[str], int]:
    """The function's lines and the number of the first. Compiled code knows where its last statement ends, nested functions' code
    included; inspect reads the text token by token, ten times as long."""
    code = function.__code__
    first, todo, last = code.co_firstlineno, [code], code.co_firstlineno
    while todo:
        each = todo.pop()
        last = max([last, *(place[1] for place in each.co_positions() if place[1])])
        todo += [const for const in each.co_consts if isinstance(const, CodeType)]
    return linecache.getlines(code.co_filename)[first - 1 : last], first


def source_of(function) -> Source:
    """The function's source, read once."""
    if function not in _sources:
        lines, first = _lines_of(function)
        text = "".join(lines)
        tree = parse(textwrap.dedent(text)).body[0]
        assert isinstance(tree, ast.FunctionDef)
        indent = len(lines[0]) - len(lines[0].lstrip())
        assigned = frozenset(
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        path = (inspect.getsourcefile(function) or "?").replace("\\", "/")
        # A checkout may lie in a folder of the package's name, too.
        short = path.removeprefix(_AROUND) if path.startswith(f"{_AROUND}zse/") else path.rsplit("/", 1)[-1]
        _sources[function] = Source(tree, path, first, lines, indent, assigned, inspect.signature(function), short)
    return _sources[function]


def closure_of(function) -> dict[str, object]:
    """The function's free variables and their values."""
    if not function.__closure__:
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


class Scope:
    """Names visible in one block. run_time: entering it may happen any number of times when the kernel runs."""

    def __init__(self, parent: "Scope | None", run_time: bool):
        self.names: dict[str, object] = {}
        self.parent, self.run_time = parent, run_time

    def find(self, name: str) -> tuple["Scope | None", bool]:
        """The scope that binds the name, and whether a run-time block lies between here and there."""
        scope: Scope | None = self
        crossed = False
        while scope is not None:
            if name in scope.names:
                return scope, crossed
            crossed = crossed or scope.run_time
            scope = scope.parent
        return None, False
