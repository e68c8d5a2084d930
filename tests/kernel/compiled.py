"""Compile kernels with the system compiler and call them: the language's own tests need no runtime."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np

from zse.kernel.emit import emit_unit
from zse.kernel.language import Variant
from zse.kernel.targets.cpu import ISAS


def host_isas() -> list[str]:
    """The ISA levels that this machine can run."""
    flags = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
    needs = {
        "x86-64-v3": {"avx2", "fma", "f16c"},
        "x86-64-v3-vnni": {"avx2", "fma", "f16c", "avx_vnni"},
        "x86-64-v4-vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
        "arm64-dotprod": {"asimddp"},
    }
    return [name for name in ISAS if needs[name] <= flags]


class Compiled:
    """call(symbol, *args, grid=(1,)): arrays become pointers."""

    def __init__(self, variants: list[Variant], isa: str, folder: Path):
        self.text, self.manifest = emit_unit(variants, isa)
        source, library = folder / f"{isa}.c", folder / f"{isa}.so"
        source.write_text(self.text)
        subprocess.run(
            [
                "gcc",
                "-O2",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-Wall",
                "-Wno-psabi",
                "-Werror",
                "-shared",
                "-fPIC",
                *ISAS[isa].flags,
                str(source),
                "-o",
                str(library),
                "-lm",
            ],
            check=True,
        )
        self.library = ctypes.CDLL(str(library))

    def call(self, symbol: str, *args, grid=(1,)) -> None:
        params = self.manifest[symbol]["params"]
        assert len(args) == len(params)
        slots = (ctypes.c_uint64 * len(args))()
        for index, (value, (_, kind)) in enumerate(zip(args, params, strict=True)):
            if kind == "ptr":
                slots[index] = value.ctypes.data
            elif kind == "f32":
                slots[index] = int(np.float32(value).view(np.uint32))
            else:
                slots[index] = int(value) & (2**64 - 1)
        sizes = (ctypes.c_int64 * 3)(*grid, *[1] * (3 - len(grid)))
        function = getattr(self.library, symbol)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        function(slots, sizes, 0, sizes[0] * sizes[1] * sizes[2])
