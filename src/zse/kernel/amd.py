"""HIP text → code object with clang, without a driver, a GPU, ROCm's headers or its device library.

Any clang with the AMDGPU backend and its lld will do: ROCm's own, or a distribution's (Debian: clang-15 and lld-15;
gfx942 is known from clang 17 on). ZSE_HIP_CLANG names one."""

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from zse import env
from zse.errors import CompileError, ConfigError
from zse.kernel.nvrtc import Compiled

# What the kernel says is what is computed; -mcode-object-version=4 is read by ROCm 5 and 6. The rest is about reports.
OPTIONS = """-x hip --cuda-device-only --no-gpu-bundle-output -nogpuinc -nogpulib -std=c++17 -O3 -ffp-contract=off
    -fno-strict-aliasing -fwrapv -mcode-object-version=4 -Rpass-analysis=kernel-resource-usage""".split()
NAMES = ("amdclang++", "clang++", "clang", *(f"clang-{version}" for version in range(22, 14, -1)))
FOLDERS = ("/opt/rocm/llvm/bin", "/opt/rocm/lib/llvm/bin")
HINT = "install ROCm's compiler or clang 15 or later with its lld (Debian: clang-19 lld-19), or set ZSE_HIP_CLANG"


@cache
def knows(compiler: str, arch: str) -> bool:
    """Whether this clang compiles and links for the architecture."""
    with tempfile.TemporaryDirectory() as folder:
        text = 'extern "C" __attribute__((global)) void probe(int *p) { *p = 1; }\n'
        done = subprocess.run(
            [compiler, *OPTIONS, f"--offload-arch={arch}", "-", "-o", f"{folder}/probe.co"],
            input=text,
            capture_output=True,
            text=True,
        )
        return done.returncode == 0


@cache
def find_compiler(arch: str) -> str:
    """The path of a clang that compiles for `arch`. ConfigError when there is none."""
    named = env.get("ZSE_HIP_CLANG")
    if named:
        found = shutil.which(named)
        if not found or not knows(found, arch):
            raise ConfigError(f"ZSE_HIP_CLANG={named} does not compile for {arch}")
        return found
    path = os.pathsep.join([*FOLDERS, os.environ.get("PATH", "")])
    tried = list(dict.fromkeys(found for name in NAMES if (found := shutil.which(name, path=path))))
    for compiler in tried:
        if knows(compiler, arch):
            return compiler
    raise ConfigError(f"no clang here compiles for {arch}{f' (tried {chr(44).join(tried)})' if tried else ''}; {HINT}")


@cache
def version(compiler: str) -> tuple[int, ...]:
    """(major, minor, patch) of a clang."""
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0,)


def compile_text(text: str, entry: dict, symbol: str, arch: str) -> Compiled:
    """Compile what emit_gpu() gave for a variant. registers: vector registers of a lane; spills: bytes of scratch
    memory of a lane."""
    compiler = find_compiler(arch)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "kernel.co"
        done = subprocess.run(
            [compiler, *OPTIONS, f"--offload-arch={arch}", "-", "-o", str(output)],
            input=text,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()
            raise CompileError(f"{symbol} for {arch}: {'; '.join(errors[:3])}")
        code = output.read_bytes()
    figures = {
        name: int(number)
        for name, number in re.findall(r"remark:\s+(VGPRs|ScratchSize \[bytes/lane\]): (\d+)", done.stderr)
    }
    if len(figures) != 2 or not code.startswith(b"\x7fELF"):
        raise CompileError(f"{symbol} for {arch}: {compiler} gave no code object with a report of resources")
    return Compiled(symbol, arch, code, figures["VGPRs"], figures["ScratchSize [bytes/lane]"], text, **entry)
