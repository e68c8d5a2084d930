"""GPU architectures that kernels are compiled for, and what each can do. Imported at start: keep it light."""

from zse.errors import ConfigError

# arch → (number, what kernels may ask for). The letter a: instructions that only this generation has (wgmma, setmaxnreg).
ARCHS: dict[str, tuple[int, frozenset[str]]] = {
    "sm_80": (80, frozenset({"mma_sync", "cp_async"})),
    "sm_86": (86, frozenset({"mma_sync", "cp_async"})),
    "sm_89": (89, frozenset({"mma_sync", "cp_async", "fp8"})),
    "sm_90a": (90, frozenset({"mma_sync", "cp_async", "fp8", "pdl", "tma", "wgmma"})),
    "sm_100": (100, frozenset({"mma_sync", "cp_async", "fp8", "pdl", "tma"})),
    "sm_120": (120, frozenset({"mma_sync", "cp_async", "fp8", "pdl", "tma"})),
    # simt: threads, warps of 32 lanes, shared memory, atomics; no matrix or copy instruction of the language.
    "gfx90a": (9, frozenset({"simt"})),
    "gfx942": (9, frozenset({"simt"})),
    "gfx1030": (10, frozenset({"simt"})),
    "gfx1100": (11, frozenset({"simt"})),
    "metal3.1": (3, frozenset({"simt"})),
}

# Shared memory that one block can have, in bytes (CUDA C++ Programming Guide, "Compute Capabilities"; LDS of a workgroup in AMD's
# instruction set manuals; Metal Feature Set Tables, "Maximum total threadgroup memory").
SHARED_LIMIT = {
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx1030": 64 << 10,
    "gfx1100": 64 << 10,
    "metal3.1": 32 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}


def features_of(arch: str) -> tuple[int, frozenset[str]]:
    """(number, features). ConfigError lists the architectures there are."""
    if arch not in ARCHS:
        raise ConfigError(f"unknown GPU architecture {arch}; there are {', '.join(ARCHS)}")
    return ARCHS[arch]


def maker_of(arch: str) -> str:
    """ "cuda", "hip" or "metal": whose architecture it is."""
    return "hip" if arch.startswith("gfx") else "metal" if arch.startswith("metal") else "cuda"
