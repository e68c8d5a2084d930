"""Where staged code comes from and which names it sees: a function's AST with its text, and the scopes of the
interpreter."""

import ast
import inspect
import textwrap
from dataclasses import dataclass


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


_sources: dict[object, Source] = {}

_AROUND = __file__.replace("\\", "/").removesuffix("zse/kernel/source.py")  # the folder that the package lies in


def source_of(function) -> Source:
    """The function's source, read once."""
    if function not in _sources:
        lines, first = inspect.getsourcelines(function)
        text = "".join(lines)
        tree = ast.parse(textwrap.dedent(text)).body[0]
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
