"""Every ZSE_* environment switch, in one table with its help text. Read through get(); nothing else reads os.environ
for them."""

import os
import sys

from zse.errors import ConfigError

SWITCHES = {
    "ZSE_HOME": ("~/.cache/zse", "where models, converted files, the server's database and the chat history are kept"),
    "ZSE_CONFIG": (
        "",
        "the configuration file of serve, run and chat (default: zse.toml under ZSE_HOME, if it is there); none: no file",
    ),
    "ZSE_ISA": (
        "",
        "force a CPU kernel library (x86-64-v3, x86-64-v3-vnni, x86-64-v4-vnni, arm64-dotprod) instead of the best one",
    ),
    "ZSE_BUILD_ISA": (
        "",
        "the CPU kernels that an installation compiles: none, all, or levels with commas (default: this CPU's best)",
    ),
    "ZSE_BUILD_MACHINE": (
        "",
        "the architecture that a wheel is compiled for, all its levels, by the compiler that CC names: x86_64, arm64",
    ),
    "ZSE_NATIVE_DIR": ("", "load the compiled CPU libraries from this folder instead of the installed one"),
    "ZSE_THREADS": ("", "number of CPU threads (default: physical cores); --threads wins"),
    "ZSE_API_KEY": (
        "",
        "the key that clients of `zse serve` must send; needed to listen on other than loopback addresses",
    ),
    "ZSE_MPS": ("", "1: start although CUDA MPS is on; nobody else may compute on the GPU"),
    "ZSE_GPU_CHECK": ("", "1: wait after every GPU kernel, so that an error names the kernel (slow)"),
    "ZSE_ALL_REDUCE": (
        "",
        "as what GPUs of --tensor-parallel-size send each other their parts of sums that are too large to go one way (of two GPUs "
        "1 MiB, 51 rows of 5,120): bf16, half of the bytes, each part rounded once (default); f32 (default with --deterministic); int8 with a scale for 32 "
        "numbers, a quarter of the bytes, each number within 1/254 of its group's largest",
    ),
    "ZSE_JOINED_SUMS": (
        "",
        "1: of two GPUs of --tensor-parallel-size, the launch of a norm makes the sum before it, and products of 17 to 64 rows of bf16 "
        "weights write their parts to both GPUs while they run; right on one GPU and in the emulator, not run on two GPUs yet",
    ),
    "ZSE_GROUP_TIMEOUT_S": (
        "60",
        "seconds without progress after which a rank of --tensor-parallel-size gives the others up, and the engine starts anew",
    ),
    "ZSE_HIP_CLANG": (
        "",
        "the clang that compiles kernels for AMD GPUs (default: ROCm's, or one of PATH that knows the GPU)",
    ),
    "ZSE_LOG_FORMAT": ("text", "lines of the log: text, or json with one object each"),
    "ZSE_LOG": ("info", "log level: debug, info, warning, error"),
}


def get(name: str) -> str:
    """The switch's value, or its default. An unknown name is a programming error."""
    return os.environ.get(name) or SWITCHES[name][0]


def chosen(name: str, values: tuple[str, ...]) -> str:
    """The switch's value, one of these in whatever case. Raises ConfigError for another."""
    value = get(name)
    if value.lower() not in values:
        raise ConfigError(f"{name}={value}: not one of {', '.join(values)}")
    return value.lower()


def python_path() -> str:
    """PYTHONPATH of an interpreter that looks nowhere by itself (-P -S): where this one found the package and everything else."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
