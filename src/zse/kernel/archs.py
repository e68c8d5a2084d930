"""GPU architectures that kernels are compiled for, and what each can do. Imported at start: keep it light."""

from zse.errors import ConfigError

_SM80 = frozenset({"mma_sync", "cp_async"})
_SM90 = _SM80 | {"fp8", "pdl", "tma"}
_SIMT = frozenset(
    {"simt"}
)  # threads, warps of 32 lanes, shared memory, atomics; no matrix or copy instruction of the language

# arch → (number, what kernels may ask for, KiB of shared memory that one block can have). The letter a: instructions
# that only this generation has (wgmma, setmaxnreg). Sizes: CUDA C++ Programming Guide, "Compute Capabilities"; LDS of a
# workgroup in AMD's instruction set manuals; Metal Feature Set Tables, "Maximum total threadgroup memory".
ARCHS: dict[str, tuple[int, frozenset[str], int]] = {
    "sm_80": (80, _SM80, 163),
    "sm_86": (86, _SM80, 99),
    "sm_89": (89, _SM80 | {"fp8"}, 99),
    "sm_90a": (90, _SM90 | {"wgmma"}, 227),
    "sm_100": (100, _SM90, 227),
    "sm_120": (120, _SM90, 99),
    "gfx90a": (9, _SIMT, 64),
    "gfx942": (9, _SIMT, 64),
    "gfx1030": (10, _SIMT, 64),
    "gfx1100": (11, _SIMT, 64),
    "metal3.1": (3, _SIMT, 32),
}
SHARED_LIMIT = {arch: kib << 10 for arch, (_, _, kib) in ARCHS.items()}


def features_of(arch: str) -> tuple[int, frozenset[str]]:
    """(number, features). ConfigError lists the architectures there are."""
    if arch not in ARCHS:
        raise ConfigError(f"unknown GPU architecture {arch}; there are {', '.join(ARCHS)}")
    return ARCHS[arch][:2]


def maker_of(arch: str) -> str:
    """ "cuda", "hip" or "metal": whose architecture it is."""
    return "hip" if arch.startswith("gfx") else "metal" if arch.startswith("metal") else "cuda"
