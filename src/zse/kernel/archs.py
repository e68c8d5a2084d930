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
}

# Shared memory that one block can have, in bytes (CUDA C++ Programming Guide, "Compute Capabilities").
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}


def features_of(arch: str) -> tuple[int, frozenset[str]]:
    """(number, features). ConfigError lists the architectures there are."""
    if arch not in ARCHS:
        raise ConfigError(f"unknown GPU architecture {arch}; there are {', '.join(ARCHS)}")
    return ARCHS[arch]
