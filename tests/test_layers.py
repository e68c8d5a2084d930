"""The order of the packages: each imports only what stands before it, and the start path imports nothing slow."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zse.syntax import parse

SOURCE = Path(__file__).parents[1] / "src" / "zse"
# docs/design/0001-cpu-engine.md, "Layers and ownership". `bench` stands before `cli`, whose command runs it.
ORDER = (
    "errors",
    "dtypes",
    "env",
    "lazy",
    "log",
    "trust",
    "syntax",
    "kernel",
    "runtime",
    "tensor",
    "quant",
    "kernels",
    "parallel",
    "formats",
    "tokenizer",
    "plan",
    "models",
    "lora",
    "cache",
    "sampling",
    "structured",
    "scheduler",
    "speculative",
    "engine",
    "rag",
    "images",
    "http",
    "server",
    "bench",
    "cli",
)
TOP = ("__init__", "__main__", "build")  # may import all; nothing below imports them
TOLERATED = {
    # zse/__init__.py imports nothing at its top: reading these two loads no layer.
    "zse.__version__": "a constant of the package itself",
    "zse": "its folder: `import zse` for __file__ or __version__",
}
HEAVY = (
    "numpy",
    "tokenizers",
    "uvicorn",
    "starlette",
    "asyncio",
    "huggingface_hub",
    "jinja2",
    "torch",
    "transformers",
    "triton",
    "llguidance",
    "multiprocessing",
)


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in `source`, wherever it stands: inside functions and under `if` as well.

    import_module with a literal or an f-string counts, up to the first run-time part."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module == "zse":
                yield from ((node.lineno, f"zse.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield node.lineno, first.value.rstrip(".")


def wrong_imports(package: str, source: str) -> list[str]:
    """What of `source`, a file of `package` (a name of ORDER or TOP), points the wrong way: "line: name"."""
    wrong = []
    for line, name in imports_of(source):
        if name.startswith("."):
            wrong.append(f"{line}: relative import {name}")
        elif name.partition(".")[0] == "zse" and name not in TOLERATED and package not in TOP:
            target = name.split(".")[1]
            if target not in ORDER or ORDER.index(target) > ORDER.index(package):
                wrong.append(f"{line}: {name}")
    return wrong


def test_every_package_has_its_place():
    found = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert found == {*ORDER, *TOP}


def test_a_package_imports_only_what_stands_before_it():
    wrong, files = [], sorted(SOURCE.rglob("*.py"))
    for path in files:
        relative = path.relative_to(SOURCE)
        package = relative.parts[0].removesuffix(".py")
        wrong += [f"zse/{relative}:{line}" for line in wrong_imports(package, path.read_text(encoding="utf-8"))]
    assert files and not wrong, "imports that point the wrong way:\n" + "\n".join(wrong)


# Import statements inside functions: each costs a reader the list at the top. The aim is below 60, each with its reason
# (docs/design/0004-the-house.md); `zse.lazy` is what defers an import. Lower the number with every change.
MAX_INNER_IMPORTS = 7


def inner_imports(source: str) -> list[int]:
    """Lines of the import statements inside functions."""
    if not re.search(
        r"^[ \t]+(import|from)\s", source, re.MULTILINE
    ):  # spares parsing: one in a function stands on a line of its own
        return []
    functions = [n for n in ast.walk(parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted({n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)})


def test_imports_stand_at_the_top():
    found = [
        f"zse/{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in inner_imports(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_INNER_IMPORTS, "imports inside functions:\n" + "\n".join(found)


def module_graph() -> dict[str, set[str]]:
    """Module → the modules of this package that it imports: at its top, lazily, inside functions, not for types only."""
    files = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("zse", *path.relative_to(SOURCE).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        nodes = list(ast.walk(parse(path.read_text(encoding="utf-8"))))
        for_types = {
            child
            for node in nodes
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for part in node.body
            for child in ast.walk(part)
        }
        graph[module] = found = set()
        for node in nodes:
            if node in for_types:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in files else node.module)
        graph[module] = (found & set(files)) - {module}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for other in graph[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        reach[start] = seen
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [list(group) for group in sorted(groups)]


# Groups that are left of those found when this test was written; none may come, all are to go.
MAX_CYCLES = 0


def test_no_modules_import_each_other():
    found = cycles(module_graph())
    assert len(found) <= MAX_CYCLES, "modules that import each other:\n" + "\n".join(map(str, found))


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not cycles({"a": {"b"}, "b": {"c"}, "c": set()})


def test_the_package_itself_imports_nothing_at_its_top():
    tree = parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    assert not [node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("runtime", "import zse.tensor"),
        ("runtime", "from zse import tensor"),
        ("kernel", "def f():\n    from zse.runtime.device import Device"),
        ("kernels", "from importlib import import_module\nimport_module(f'zse.models.{name}')"),
        ("engine", "if x:\n    from zse.server import app"),
        ("server", "from zse import build"),
        ("server", "from zse import LLM"),
        ("errors", "from .env import flag"),
    ],
)
def test_a_wrong_import_is_found(package, source):
    assert wrong_imports(package, source)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("engine", "from zse.sampling.params import SamplingParams"),
        ("server", "from zse import __version__\nimport zse"),
        ("kernels", "from importlib import import_module\nimport_module(f'zse.kernels.{name}')"),
        ("build", "import zse.kernels.table"),
        ("cli", "import numpy\nfrom zse.bench import speed"),
    ],
)
def test_a_right_import_passes(package, source):
    assert not wrong_imports(package, source)


@pytest.mark.parametrize("modules", ["zse.engine.llm, zse.cli.run, zse.engine.worker", "zse, zse.cli.main"])
def test_the_start_path_imports_nothing_slow(modules):
    script = f"import sys\nimport {modules}\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
