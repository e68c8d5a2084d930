"""The ISA levels that CPU kernels are compiled for, best first, and what a CPU must have to run each.

The start path reads this table; compiler flags and kernel features of the same names are in zse.kernel.targets.cpu.
"""

import os

# One bit each in zse_cpu_features() (csrc/cpu_features.c): x86's from the lowest, arm64's from the 17th.
_X86 = "avx2 fma bmi2 avx512f avx512bw avx512dq avx512vl avx512cd avx512vnni f16c avxvnni".split()
FEATURES = {name: bit for bit, name in enumerate(_X86)} | {"dotprod": 16, "fp16": 17}

_V3 = ("avx2", "fma", "bmi2", "f16c")

# name → (machine as in platform.machine(), lower case; features), best first within a machine.
LEVELS = {
    "x86-64-v4-vnni": ("x86_64", (*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512vnni")),
    "x86-64-v3-vnni": ("x86_64", (*_V3, "avxvnni")),
    "x86-64-v3": ("x86_64", _V3),
    "arm64-dotprod": ("arm64", ("dotprod", "fp16")),
}


def machine() -> str:
    """This machine's architecture under one name per family: x86_64, arm64, or what the system says."""
    return family_of(os.uname().machine.lower())


def family_of(name: str) -> str:
    """An architecture as machine() names it."""
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(name, name)


def levels_of_machine(family: str | None = None) -> list[str]:
    """The levels that belong to an architecture (default: this machine's), best first, whether or not this CPU can run
    them."""
    here = family or machine()
    return [name for name, (family, _) in LEVELS.items() if family == here]


def feature_names(bits: int) -> list[str]:
    """The names of the bits of zse_cpu_features()."""
    return [name for name, bit in FEATURES.items() if bits >> bit & 1]


def missing_features(level: str, bits: int) -> list[str]:
    """Which of the level's features this CPU lacks (`bits` from zse_cpu_features())."""
    return [name for name in LEVELS[level][1] if not bits >> FEATURES[name] & 1]


def runnable_levels(bits: int) -> list[str]:
    """The levels that a CPU with these features can run, best first."""
    return [name for name in levels_of_machine() if not missing_features(name, bits)]
