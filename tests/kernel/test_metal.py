"""The Metal target: every kernel's text checked by clang against a shim of Metal's library (metal_shim/metal_stdlib), with address spaces
as distinct types, and run in the emulator's fibers through that shim.

Needs clang 15 or later; ZSE_REQUIRE_CLANG=1 makes its absence a failure. No test here runs on a Mac or an Apple GPU."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gpu.harness import check_without_matrices, gpu_ops, ops_of, parts_of

from zse.errors import CompileError
from zse.kernel import cache
from zse.kernel.archs import SHARED_LIMIT
from zse.kernel.emit import emit_gpu, gpu_target
from zse.kernel.targets.metal import PRELUDE
from zse.kernels.gpu import all_reduce, peer_messages, peer_rows, sum_norm
from zse_emulator.compiling import CSRC
from zse_emulator.device import EmulateDevice, EmulatedProgram

ARCH = "metal3.1"
SHIM = Path(__file__).with_name("metal_shim")
CTYPES = {"f32": "float", "i32": "int", "u32": "uint", "i64": "long", "u64": "ulong"}


def clang() -> str:
    found = next(
        (
            path
            for name in ("clang++", "clang", *(f"clang-{n}" for n in range(22, 14, -1)))
            if (path := shutil.which(name))
        ),
        None,
    )
    if found is None:
        if os.environ.get("ZSE_REQUIRE_CLANG") == "1":
            pytest.fail("no clang, and ZSE_REQUIRE_CLANG=1")
        pytest.skip("no clang: Metal text is checked with clang 15 or later (Debian: clang-15)")
    return found


def for_shim(text: str) -> str:
    """`threadgroup` is a macro of the shim, and an attribute's name as well."""
    return text.replace("[[threadgroup(0)]]", "")


def test_every_kernel_passes_clang(tmp_path):
    """All variants in one translation unit: each in a namespace of its own."""
    compiler = clang()
    units = []
    for symbol, variant in cache.package_variants(ARCH).items():
        text, entry = emit_gpu(variant, ARCH)
        assert entry["shared_bytes"] <= SHARED_LIMIT[ARCH] and "double" not in text
        units.append(f"namespace {symbol}_space {{\n{text.removeprefix(PRELUDE)}\n}}")
    assert len(units) > 90
    text = PRELUDE + "\n".join(units)
    done = subprocess.run(
        [compiler, "-x", "c++", "-std=c++17", "-fsyntax-only", f"-I{SHIM}", "-"],
        input=for_shim(text),
        text=True,
        capture_output=True,
    )
    assert not done.returncode, [line for line in done.stderr.splitlines() if "error:" in line][:5]


def test_check_finds_mixed_address_spaces():
    """A pointer to threadgroup memory that loses its address space does not pass."""
    text, _ = emit_gpu(cache.package_variants(ARCH)["add_rmsnorm_none_bf16_v2"], ARCH)
    assert "threadgroup f32 *" in text
    broken = re.sub(r"const threadgroup void \*p", "const device void *p", text)
    assert broken != text
    done = subprocess.run(
        [clang(), "-x", "c++", "-std=c++17", "-fsyntax-only", f"-I{SHIM}", "-"],
        input=for_shim(broken),
        text=True,
        capture_output=True,
    )
    assert done.returncode and "no matching function for call to 'zse_load_shared" in done.stderr


def test_every_operation_has_kernels():
    """But latent attention, which is refused by name, and what kernels do with other GPUs or with matrix instructions alone."""
    assert {op.name for op in gpu_ops()} - {op.name for op in ops_of(ARCH)} == {
        "latent_attention",
        "head_product",
        "one_token",
        "begin_token",
        "chain",
        "mixture_chain",
        "heads_attention",
    }
    target = gpu_target("gfx90a")
    others = {
        variant.symbol
        for module in (all_reduce, peer_messages, peer_rows, sum_norm)
        for variant in module.variants(target)
    }
    assert set(cache.package_variants("gfx90a")) == set(cache.package_variants(ARCH)) | others and others


def test_missing_forms_are_named():
    """A kernel of another GPU asks for what this target does not have."""
    from zse.kernel import cache as packs

    variant = packs.package_variants("sm_80")["matmul_small_bf16"]
    with pytest.raises(CompileError, match=f"which target {ARCH} does not have|has no body for target {ARCH}"):
        emit_gpu(variant, ARCH)


class MetalInEmulator(EmulateDevice):
    """The emulator with Metal text as its kernels' code: plain memory accesses are not checked, results and progress are."""

    def _load_program(self, symbol, variant):
        text, entry = emit_gpu(variant, ARCH)
        return EmulatedProgram(symbol, ctypes.CDLL(str(self._build_library(symbol, text, entry))), entry)

    def _build_library(self, symbol, text, entry):
        args = [
            f"*({CTYPES[kind]} *)(args + {place})" if kind != "ptr" else f"({pointer})args[{place}]"
            for place, ((_, kind), pointer) in enumerate(
                zip(entry["params"], self._pointers(text, symbol), strict=True)
            )
        ]
        if entry["shared_bytes"]:
            args.append("shared")
        wrapper = (
            f'extern "C" void metal_entry(const ulong *args, uchar *shared, uint thread_at, const uint *block, const uint *grid) {{\n'
            f"  {symbol}({', '.join(args)}, uint3{{thread_at, 0, 0}}, uint3{{block[0], block[1], block[2]}}, "
            "uint3{grid[0], grid[1], grid[2]});\n}\n"
        )
        code = for_shim(text) + wrapper
        defines = [
            f'-DSYMBOL="{symbol}"',
            f"-DTHREADS={entry['threads']}",
            f"-DSHARED_BYTES={entry['shared_bytes']}",
            f"-DNUM_PARAMS={len(entry['params'])}",
            f"-DPARAMS={','.join('2' if kind == 'ptr' else '0' for _, kind in entry['params'])}",
        ]
        sources = code + "".join(path.read_text() for path in (*SHIM.iterdir(), CSRC / "emulate.h"))
        target = (
            cache.folder()
            / "emulate"
            / f"metal-{symbol}-{hashlib.sha256(repr((sources, defines)).encode()).hexdigest()[:24]}.so"
        )
        if not target.exists():
            part = target.with_suffix(".cpp")
            part.write_text(code)
            flags = ["-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing"]
            objects = []
            for source, extra in ((part, ["-DZSE_RUN", f"-I{SHIM}"]), (SHIM / "bridge.cpp", [f"-I{CSRC}", *defines])):
                objects.append(str(target.with_suffix(f".{source.stem}.o")))
                done = subprocess.run(
                    [clang(), *flags, *extra, "-x", "c++", "-c", str(source), "-o", objects[-1]],
                    capture_output=True,
                    text=True,
                )
                assert not done.returncode, done.stderr[:2000]
            done = subprocess.run([clang(), "-shared", *objects, "-o", str(target)], capture_output=True, text=True)
            assert not done.returncode, done.stderr[:2000]
        return target

    @staticmethod
    def _pointers(text, symbol):
        """The pointer types of the signature, address spaces left out."""
        inside = re.search(rf"void {symbol}\((.*)\) \{{", text).group(1)
        params = re.split(r" \[\[buffer\(\d+\)\]\],? ?", inside)[:-1]
        return [re.sub(r"\bdevice ", "", param).rpartition("*")[0] + "*" for param in params]


@pytest.mark.parametrize(("op", "most", "part"), list(parts_of(ARCH, others=False)))
def test_reference(op, most, part, kept_kernels):
    """Every operation's Metal text against its float64 reference."""
    clang()
    seed = int(np.random.default_rng().integers(2**32))
    with MetalInEmulator(ARCH, seed=seed, dependent=False, initialised=False) as device:  # plain stores are not seen
        (cache.folder() / "emulate").mkdir(parents=True, exist_ok=True)
        check_without_matrices(op, device, seed, most, part)
