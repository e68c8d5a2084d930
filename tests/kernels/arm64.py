"""Runs Ops on arm64 in an emulator: qemu-aarch64 is given a program of C that opens the level's library and runs launches of this
process in memory that both have at one address.

Needs a cross compiler and the emulator (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user); ZSE_REQUIRE_ARM64=1 makes their
absence a failure."""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prepare import cache_folder

from kernels.harness import join_fields, output_tensors, poisoned_outputs, to_tensor
from zse import build
from zse.runtime import isa, native
from zse.runtime.args import Args, slots_of
from zse.runtime.buffer import Buffer
from zse.runtime.cpu import CPUDevice

COMPILER, EMULATOR, LEVEL = "aarch64-linux-gnu-gcc", "qemu-aarch64", "arm64-dotprod"
# The first core with all of the level and nothing behind it: what needs more is an illegal instruction.
CORE = "neoverse-n1"
SYSTEM = "/usr/aarch64-linux-gnu"
ADDRESS, BYTES = 1 << 44, 1 << 28
DEVICE = SimpleNamespace(kernels="cpu", threads=2)  # what launchers ask of one
GUARD, GUARDED = 0xA5, 64  # bytes around each array


def has_tools() -> bool:
    return all(map(shutil.which, (COMPILER, EMULATOR)))


def need_tools() -> None:
    """Skip, or fail where they were asked for."""
    if has_tools():
        return
    if os.environ.get("ZSE_REQUIRE_ARM64") == "1":
        pytest.fail(f"no {COMPILER} or {EMULATOR}, and ZSE_REQUIRE_ARM64=1")
    pytest.skip(f"no {COMPILER} or {EMULATOR}")


def cross_compiler() -> Path:
    """One whose warnings are errors."""
    path = cache_folder() / "arm64-gcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(f'#!/bin/sh\nexec {COMPILER} -Werror "$@"\n')
    half.chmod(0o755)
    return half.replace(path)


def build_level(folder: Path | None = None, symbols=(), part: str = "") -> Path:
    """Compile the C runtime and the level's kernels, or with `symbols` these of them, as build.Builder does. Returns the folder."""
    folder = folder or cache_folder() / "arm64"
    before = os.environ.get("CC")
    os.environ["CC"] = str(cross_compiler())
    try:
        build.build(folder, () if part else [LEVEL], machine="arm64", quiet=True)
        if part:
            build.Builder(folder, len(os.sched_getaffinity(0)), quiet=True).kernel_library(LEVEL, symbols, part)
    finally:
        os.environ.pop("CC") if before is None else os.environ.update(CC=before)
    return folder


class Memory:
    """Memory at ADDRESS, of a file. place(): a copy of an array in it, with bytes around that nobody may change."""

    def __init__(self) -> None:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._file = tempfile.NamedTemporaryFile(prefix="zse-arm64-", dir=folder)
        os.truncate(self._file.name, BYTES)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_uint64
        libc.mmap.argtypes = [ctypes.c_uint64, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        found = libc.mmap(ADDRESS, BYTES, 3, mmap.MAP_SHARED, self._file.fileno(), 0)
        assert found == ADDRESS, f"the memory of tests is at {found:#x}"
        self.path, self.used = self._file.name, 0
        self.bytes = np.frombuffer((ctypes.c_uint8 * BYTES).from_address(ADDRESS), np.uint8)
        self.places: list[tuple[int, int]] = []

    def clear(self) -> None:
        self.used, self.places = 0, []

    def place(self, array: np.ndarray) -> np.ndarray:
        if ADDRESS <= array.ctypes.data < ADDRESS + BYTES:
            return array
        first = self.used + GUARDED + 16  # vectors need no more than 16 to be aligned to
        self.used = -(-(first + array.nbytes + GUARDED) // GUARDED) * GUARDED
        assert self.used <= BYTES, "BYTES are too few for a case"
        self.bytes[first - GUARDED - 16 : self.used] = GUARD
        self.places.append((first, first + array.nbytes))
        copy = self.bytes[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def check(self) -> None:
        for first, last in self.places:
            around = (self.bytes[first - GUARDED : first], self.bytes[last : last + GUARDED])
            assert all((part == GUARD).all() for part in around), f"written beside an array of {last - first} bytes"


@cache
def memory() -> Memory:
    """The one of this process: an address can be had once."""
    return Memory()


class Machine:
    """The emulator with one library of kernels, which waits for launches."""

    def __init__(self, folder: Path, library: Path, manifest: Path, core: str = CORE):
        self.manifest = json.loads(manifest.read_text())["kernels"]
        self.memory = memory()
        program = folder / "runner"
        source = Path(__file__).with_name("arm64_runner.c")
        flags = ["-O2", "-Wall", "-Wextra", f"-I{build.PACKAGE / 'runtime' / 'csrc'}"]
        subprocess.run([str(cross_compiler()), *flags, str(source), "-o", str(program), "-ldl"], check=True)
        parts = [program, library, folder / "libzse_runtime.so", self.memory.path, ADDRESS, BYTES]
        command = [EMULATOR, "-cpu", core, "-L", SYSTEM, *map(str, parts)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.features = isa.feature_names(int(self._answer("start")))

    def _answer(self, what: str) -> str:
        line = self._process.stdout.readline()
        assert line, f"{what}: the emulator ended with {self._process.wait()}"
        return line

    def launch(self, symbol: str, slots, grid, order) -> None:
        numbers = (*grid, len(slots), *slots, len(order), *order)
        self._process.stdin.write(f"{symbol} {' '.join(map(str, numbers))}\n")
        self._process.stdin.flush()
        self._answer(symbol)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def whole_level() -> Iterator[Machine]:
    """The emulator with all kernels of the level; tests/prepare.py compiles them before, with all cores."""
    need_tools()
    folder = build_level()
    machine = Machine(folder, *map(Path, native.kernel_files(str(folder), LEVEL)))
    yield machine
    machine.close()


class Recorder:
    """Stands for a Recorder: launches run at once, in the emulator; every second by the pool's threads, the others' blocks in random
    order."""

    device = DEVICE

    def __init__(self, machine: Machine, rng):
        self.machine, self.rng, self.pooled = machine, rng, False

    def launch(self, symbol, args, grid, independent=False):
        slots = slots_of(symbol, self.machine.manifest[symbol]["params"], args)[0]
        dims = (list(grid) + [1, 1])[:3]
        self.pooled = not self.pooled
        order = () if self.pooled else self.rng.permutation(int(np.prod(dims)))
        self.machine.launch(symbol, [slot % 2**64 for slot in slots], dims, order)


class Loads:
    """Stands for a BackgroundLoad: jobs run in the emulator, one after another. sums: as its."""

    finished, sums = True, ()

    def __init__(self, machine: Machine, jobs, sums: bool):
        self.recorder, found = Recorder(machine, np.random.default_rng(1)), []
        for job in jobs:
            data = self._read(job.fd, job.offset, job.nbytes, job.runs)
            found.append((job, zlib.crc32(data)))
            if job.symbol:
                self._run(job, data)
            elif job.args:
                job.args["destination"].view().cast("B")[:] = data
        self.sums = found if sums else ()
        machine.memory.check()

    def _read(self, fd, offset, nbytes, runs=(1, 0)) -> bytes:
        count, stride = runs
        return b"".join(os.pread(fd, nbytes // count, offset + number * stride) for number in range(count))

    def _run(self, job, data: bytes) -> None:
        place = self.recorder.machine.memory.place
        parts = [
            place(np.frombuffer(part, np.uint8)) for part in (data, *([self._read(*job.more)] if job.more else ()))
        ]
        names = [name for name, _ in self.recorder.machine.manifest[job.symbol]["params"]]
        sources = {name: part.ctypes.data for name, part in zip(names, parts, strict=False)}
        self.recorder.launch(job.symbol, Args(job.args | sources), job.grid)

    def wait(self) -> None:
        pass

    cancel = wait


class LoadingDevice(CPUDevice):
    """This machine's CPU, but what loads weights runs in the emulator. Where buffers_in() has put its buffers."""

    def __init__(self, machine: Machine):
        super().__init__(threads=2)
        self._machine = machine

    def load(self, jobs, threads=None, sums=False):
        return Loads(self._machine, jobs, sums)


def buffers_in(memory: Memory, monkeypatch) -> None:
    """Buffers of the host lie in the memory that the emulator has, too."""

    def allocate(buffer) -> int:
        array = memory.place(np.zeros(buffer.nbytes, np.uint8))
        buffer._map, buffer._start = memoryview(array), 0
        return array.ctypes.data

    memory.clear()
    monkeypatch.setattr(Buffer, "_allocate", allocate)
    for name in ("_release", "use_small_pages", "discard"):
        monkeypatch.setattr(Buffer, name, lambda *args: None)


def run_case(op, case, machine: Machine, rng) -> dict:
    """As harness.run_case."""
    memory = machine.memory
    memory.clear()
    results = poisoned_outputs(case, memory.place)
    tensors = {name: to_tensor(value, memory.place) for name, value in case.inputs.items()}
    tensors |= output_tensors(case, results, memory.place)
    op.launch(Recorder(machine, rng), **join_fields(tensors), **case.options)
    memory.check()
    return results
