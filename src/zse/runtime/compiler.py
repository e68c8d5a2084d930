"""The C compiler: which one there is, and what the CPU's kernels are compiled with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from zse import trust
from zse.errors import CompileError
from zse.runtime import native, probe

# -ffp-contract=off: an ISA level computes what the kernel says, a fused multiply-add only where it is written.
KERNEL_FLAGS = """-std=gnu11 -O2 -fPIC -ffp-contract=off -fno-math-errno -Wall -Wno-psabi -Wno-unused-variable -Wno-unused-function
    -Wno-unused-but-set-variable -Wno-unknown-warning-option""".split()


def find_compiler() -> tuple[str, str]:
    """(path, version line) of CC, gcc, clang or cc. CompileError names the package to install, or a CC that is none."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]) is None:
        raise CompileError(f"CC={named[0]} is no program: unset CC, or set it to a C compiler")
    found = probe.compiler()
    if found is None:
        raise CompileError(
            f"no C compiler: zse compiles its CPU kernels when it is installed; install {native.compiler_hint()}, "
            "or set CC"
        )
    return found


def knows(compiler: str, flags: tuple[str, ...]) -> bool:
    """Whether it takes these flags: gcc has AVX-VNNI from 11 on, clang from 12."""
    return not subprocess.run([compiler, *flags, "-fsyntax-only", "-xc", os.devnull], capture_output=True).returncode


def run(command: list[str], what: str) -> None:
    """Run a compiler. CompileError with its first messages when it fails; warnings go to standard error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        told = "; ".join(errors[:3]) or "no message"
        if ".h: No such file" in told or "file not found" in told:
            told += f"; the C library's headers are missing: install {native.compiler_hint()}"
        elif "No space left" in told:
            told += "; free some space, there or where TMPDIR points"
        raise CompileError(f"{what}: {command[0]} failed with {done.returncode}: {told}")
    if done.stderr.strip():
        print(done.stderr.rstrip(), file=sys.stderr)


def link(compiler: str, parts: list[Path], target: Path, flags: tuple[str, ...] = ()) -> None:
    """A shared library of objects or C files, put in place whole: a process that has the old one open keeps it."""
    half = target.with_suffix(f".{os.getpid()}.tmp")
    run([compiler, *flags, "-shared", "-pthread", *map(str, parts), "-o", str(half), "-lm", "-ldl"], target.name)
    trust.sync(str(half))
    half.replace(target)
