"""The order of the packages: each imports only what stands before it, and the start path imports nothing slow."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "zse"
# docs/design/0001-cpu-engine.md, "Layers and ownership". `bench` stands before `cli`, whose command runs it.
ORDER = (
    "errors",
    "dtypes",
    "env",
    "log",
    "imports",
    "kernel",
    "runtime",
    "tensor",
    "quant",
    "kernels",
    "formats",
    "tokenizer",
    "models",
    "cache",
    "sampling",
    "structured",
    "scheduler",
    "speculative",
    "engine",
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
    for node in ast.walk(ast.parse(source)):
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


def test_the_package_itself_imports_nothing_at_its_top():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
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
