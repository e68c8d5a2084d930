"""The fake driver (fake_driver.c): compiled once, one private copy for each test, so that no state is shared."""

import ctypes
import shutil
import subprocess
from pathlib import Path

from zse.runtime.gpu import CompiledKernels

MANIFEST = {
    name: {"params": params, "threads": 64, "image": "all"}
    for name, params in {
        "scale_rows": [["x", "ptr"], ["out", "ptr"], ["width", "i32"], ["factor", "f32"], ["add", "f32"]],
        "append": [["out", "ptr"], ["value", "i64"]],
        "describe_map": [["map", "tensormap"], ["out", "ptr"]],
        "next_bytes": [["src", "ptr"], ["out", "ptr"], ["count", "i64"]],
        "poke": [["out", "ptr"], ["at", "u64"]],
    }.items()
}


def kernels(**changes: dict) -> CompiledKernels:
    """The fake driver's kernels; `changes`: symbol → entries that differ."""
    manifest = {name: entry | changes.get(name, {}) for name, entry in MANIFEST.items()}
    return CompiledKernels(manifest, lambda image: b"FAKEIMG" if image == "all" else b"damaged")


def compile_driver(folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """The library, in `folder`."""
    target = folder / f"libfake{''.join(flags)}.so"
    subprocess.run(
        [
            "gcc",
            "-std=gnu11",
            "-O1",
            "-g",
            "-shared",
            "-fPIC",
            "-pthread",
            *flags,
            str(Path(__file__).with_name("fake_driver.c")),
            "-o",
            str(target),
            "-ldl",
        ],
        check=True,
    )
    return target


class Fake:
    """A private copy of the library. path: for a Driver; set, fail, count, log: fake_set and its kin."""

    def __init__(self, library: Path, folder: Path):
        self.path = str(folder / library.name)
        shutil.copy(library, self.path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_count.restype = ctypes.c_long
        self._library.fake_memory_used.restype = ctypes.c_size_t

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._library.fake_set(name.encode(), ctypes.c_longlong(value))

    def fail(self, role: str, code: int, after: int = 0, times: int = 1) -> None:
        self._library.fake_fail(role.encode(), code, after, times)

    def count(self, role: str) -> int:
        return self._library.fake_count(role.encode())

    @property
    def memory_used(self) -> int:
        return self._library.fake_memory_used()

    @property
    def contexts(self) -> int:
        return self._library.fake_contexts()

    def log(self) -> list[list[str]]:
        """The kernels that ran since the last call: [name, grid, threads, shared, cluster, overlaps]."""
        lines = [line.split() for line in self._library.fake_log().decode().splitlines()]
        self._library.fake_log_clear()
        return lines
