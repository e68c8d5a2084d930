"""What the source must not contain: ways to run data as code, checks that are switched off, frameworks."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "zse"
FORBIDDEN_PACKAGES = {"torch", "triton", "transformers"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_ATTRIBUTES = {
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("torch", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("ssl", "_create_unverified_context"),
}
UNSAFE_KEYWORDS = {"shell": True, "trust_remote_code": True, "allow_pickle": True, "verify": False}
# A text without any of these words has no unsafe part: to parse all modules took 9 s.
UNSAFE_WORDS = {
    *FORBIDDEN_PACKAGES,
    *UNSAFE_MODULES,
    *UNSAFE_CALLS,
    *(attribute for _, attribute in UNSAFE_ATTRIBUTES),
    *UNSAFE_KEYWORDS,
} - {"load"} | {"yaml"}  # torch is one of the packages


def unsafe_parts(source: str) -> list[str]:
    """ "line: what" of everything in `source` that runs data as code, skips a check, or imports a framework."""
    found: list[str] = []
    if not any(word in source for word in UNSAFE_WORDS):
        return found
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            found += [
                f"{node.lineno}: {node.module}.{alias.name}"
                for alias in node.names
                if (node.module, alias.name) in UNSAFE_ATTRIBUTES
            ]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in UNSAFE_ATTRIBUTES:
                found.append(f"{node.lineno}: {node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if isinstance(node.func, ast.Name) and name in UNSAFE_CALLS:
                found.append(f"{node.lineno}: {name}()")
            if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                modules = [str(node.args[0].value)]
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg in UNSAFE_KEYWORDS and not (
                    isinstance(value, ast.Constant) and bool(value.value) is not UNSAFE_KEYWORDS[keyword.arg]
                ):
                    found.append(f"{node.lineno}: {keyword.arg}=")
        found += [
            f"{getattr(node, 'lineno', 0)}: {module}"
            for module in modules
            if module.partition(".")[0] in UNSAFE_MODULES | FORBIDDEN_PACKAGES
        ]
    return found


def test_the_source_runs_no_data_as_code():
    files = sorted(SOURCE.rglob("*.py"))
    found = [
        f"{path.relative_to(SOURCE)}:{part}"
        for path in files
        for part in unsafe_parts(path.read_text(encoding="utf-8"))
    ]
    assert files and not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "import shelve as s",
        "from marshal import loads",
        "eval('1')",
        "exec(data)",
        "import builtins\nbuiltins.eval('1')",
        "yaml.load(text)",
        "from yaml import load",
        "torch.load(path)",
        "import torch",
        "from transformers import AutoModel",
        "import triton.language as tl",
        "from importlib import import_module\nimport_module('torch')",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=flag)",
        "subprocess.run(line, shell=1)",
        "load(name, trust_remote_code=True)",
        "get(url, verify=False)",
        "numpy.load(path, allow_pickle=True)",
        "os.system(line)",
    ],
)
def test_an_unsafe_source_is_found(source):
    assert unsafe_parts(source)


@pytest.mark.parametrize(
    "source",
    [
        "'''Without pickle, eval( or torch.load.'''",
        "retrieval(1)",
        "model.eval()",
        "get(url, verify=True)",
        "subprocess.run(line, shell=False)",
        "TRUST = 'trust_remote_code'",
    ],
)
def test_a_safe_source_passes(source):
    assert not unsafe_parts(source)
