"""What compilers make and what they are given: a miscompiled kernel is not installed, no word of a request reaches a compiler."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_model

from zse import build
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import CompileError
from zse.kernel import cache, emit, nvrtc
from zse.kernel.targets.cpu import ISAS
from zse.kernels import table
from zse.runtime import native, on_demand
from zse.runtime.cpu import CPUDevice
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions

LEVEL = native.choose_level()
SOURCE = Path(build.__file__).parent
# Who may give text to a compiler. What they compile comes from the table of kernels, or from a file that a user names (`zse kernels`).
COMPILING = {
    "build.py",
    "bench/own_kernels.py",
    "cli/kernels.py",
    "kernel/cache.py",
    "kernel/nvrtc.py",
    "kernel/amd.py",
}
COMPILERS = {"compile_text", "compile_variant", "compile_cached", "emit_unit", "emit_gpu", "emit_metal"}


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_miscompiled_kernel_is_not_installed(is_wrong, is_part, tmp_path, monkeypatch):
    """The compiler's fault here: a sum in place of a product, in one kernel; of the whole library, or compiled on demand."""
    op = next(op for op in table.all_ops() if op.name == "scale_rows")
    symbol = op.variants(ISAS[LEVEL])[0].symbol
    part = ([symbol], symbol) if is_part else ()
    monkeypatch.setattr(build, "kernel_units", lambda level: [("scale_rows", op.variants(ISAS[level]))])
    real = emit.emit_unit

    def miscompiled(variants, level):
        text, manifest = real(variants, level)
        head, mark, body = text.partition("void " + next(iter(manifest)))
        return head + mark + body.replace(") * zse_splat", ") + zse_splat") if is_wrong else text, manifest

    monkeypatch.setattr(build.emit, "emit_unit", miscompiled)
    builder = build.Builder(tmp_path, jobs=1, quiet=True)
    shutil.copy(Path(native.native_dir()) / "libzse_runtime.so", tmp_path)
    library, manifest = map(Path, native.kernel_files(str(tmp_path), LEVEL, *part[1:]))
    if is_wrong:
        with pytest.raises(CompileError, match=r"computes wrong numbers \(scale_rows, .*nothing was installed"):
            builder.kernel_library(LEVEL, *part)
    else:
        builder.kernel_library(LEVEL, *part)
    assert library.exists() == manifest.exists() == (not is_wrong)
    assert not list(tmp_path.glob("check-*"))


def test_only_builders_call_compilers():
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in COMPILERS):
            continue  # a module that names none calls none: to parse all took 7 s
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call)
        }
        assert name in COMPILING or not called & COMPILERS, f"{name} calls {called & COMPILERS}"


def test_no_word_of_a_request_reaches_a_compiler(tmp_path, monkeypatch):
    """Kernels are asked for by names of the table. Those of two engines that answered different requests are the same, and no name, file
    or command holds a word of either."""
    folder = tiny_model.write(tmp_path / "tiny")
    known = {variant.symbol for variant in table.all_variants(ISAS[LEVEL])}
    asked: list[set[str]] = []
    given: list[str] = []
    for target, name in ((nvrtc, "compile_text"), (emit, "emit_gpu"), (emit, "emit_unit"), (cache, "write_cubin")):
        monkeypatch.setattr(target, name, lambda *arguments, name=name: given.append(f"{name}{arguments}"))
    real_run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **o: (given.append(repr(a)), real_run(*a, **o))[1])

    load, program = on_demand.KernelsOnDemand.__missing__, CPUDevice._load_program

    def missing(self, symbol: str) -> dict:
        asked[-1].add(symbol)
        return load(self, symbol)

    def loaded_program(self, symbol: str, entry: dict):
        asked[-1].add(symbol)
        return program(self, symbol, entry)

    monkeypatch.setattr(on_demand.KernelsOnDemand, "__missing__", missing)
    monkeypatch.setattr(CPUDevice, "_load_program", loaded_program)
    for canary, prompt in (("canary-7f3a", [5, 6, 7]), ("canary-91bc", [9, 8, 30])):
        asked.append(set())
        config = EngineConfig(
            model=str(folder), threads=1, activations="f32", device="cpu", num_pages=8, max_context=64
        )
        loaded = load_engine(config, Phases(lambda: 0.0))
        params = SamplingParams(max_tokens=4, temperature=0.7, seed=1, stop=(canary,), ignore_eos=True)
        options = RequestOptions(tenant=canary, cache_salt=canary)
        loaded.engine.submit(1, prompt, params, options)
        while loaded.engine.has_work:
            loaded.engine.step()
        loaded.engine.close()
        loaded.source.close()
    assert asked[0] == asked[1] and asked[0] and asked[0] <= known
    assert not any("canary" in text for text in [*given, *asked[0]])
