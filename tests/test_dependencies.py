"""What an installation brings: few, small packages, and no machine-learning framework, neither installed nor imported."""


import os
import pkgutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import zse

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
FRAMEWORKS = ("torch", "triton", "transformers", "tensorflow", "jax", "gguf", "llama_cpp", "safetensors", "pydantic", "fastapi")
MAX_BYTES, MAX_PACKAGES = 110_000_000, 30     # as the packages ship: without the bytecode that pip may write beside it


def core_requirements() -> list[Requirement]:
    return [Requirement(line) for line in tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]]


def closure() -> dict[str, metadata.Distribution]:
    """Every distribution that `pip install zse` brings on this machine: name → what is installed."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(requirement, "") for requirement in core_requirements()]
    seen = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            found[name] = metadata.distribution(name)
            waiting += [(Requirement(line), wanted) for line in found[name].requires or ()]
    return found


def installed_bytes(distribution: metadata.Distribution) -> int:
    return sum(os.path.getsize(path) for file in distribution.files or ()
               if file.suffix != ".pyc" and os.path.exists(path := distribution.locate_file(file)))


def test_core_dependencies_are_few_and_small():
    sizes = {name: installed_bytes(distribution) for name, distribution in closure().items()}
    listing = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
    assert min(sizes.values()) > 0, listing
    assert len(sizes) <= MAX_PACKAGES, f"{len(sizes)} packages (MB): {listing}"
    assert sum(sizes.values()) <= MAX_BYTES, f"{sum(sizes.values()) / 1e6:.1f} MB: {listing}"


def test_no_framework_is_a_dependency():
    assert not set(closure()) & {canonicalize_name(name) for name in FRAMEWORKS}


def test_the_package_itself_is_small():
    """Without compiled kernels: 5 MiB."""
    root = Path(zse.__file__).parent
    files = [path for path in root.rglob("*") if path.is_file() and "_native" not in path.parts and path.suffix != ".pyc"]
    assert 0 < sum(path.stat().st_size for path in files) <= 5 << 20


def all_modules() -> list[str]:
    # __main__ modules run when imported.
    return [module.name for module in pkgutil.walk_packages(zse.__path__, "zse.") if not module.name.endswith("__main__")]


@pytest.fixture(scope="module")
def imported_everything() -> set[str]:
    """Top-level modules in a process that has imported every module of the package."""
    script = (f"import importlib, sys\nfor name in {all_modules()!r}: importlib.import_module(name)\n"
              "print(*sorted({name.partition('.')[0] for name in sys.modules}))")
    return set(run_python(script).split())


def run_python(script: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_framework_is_imported_by_any_module(imported_everything):
    assert "zse" in imported_everything and "msgspec" in imported_everything
    assert not imported_everything & set(FRAMEWORKS)


def test_every_import_is_a_core_dependency(imported_everything):
    """What is imported beside the standard library comes with an installation."""
    bare = set(run_python("import sys\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))").split())
    packages = metadata.packages_distributions()
    allowed = set(closure()) | {"zse"}
    foreign = {name: packages.get(name, []) for name in imported_everything - bare - set(sys.stdlib_module_names)
               if name in packages and not any(canonicalize_name(owner) in allowed for owner in packages[name])}
    assert not foreign


def test_generating_imports_no_framework(real_models):
    script = (f"import sys\nfrom zse import LLM, SamplingParams\nllm = LLM({str(real_models['smollm2'])!r}, threads=2)\n"
              "out = llm.generate(['The capital of France is'], SamplingParams(max_tokens=4, temperature=0))\n"
              "assert out\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))")
    loaded = set(run_python(script).split())
    assert "zse" in loaded and not loaded & set(FRAMEWORKS)


