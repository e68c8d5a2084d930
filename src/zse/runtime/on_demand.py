"""The kernels of a CPU before all are compiled: those that a first model needs are there, another one is compiled when
it is asked for. Each part is a library and its manifest, in `_native/objects/LEVEL`: the manifest names the part and
the library's SHA-256, and its own hash stands beside it. A part that is damaged, of another name or of other sources is
compiled again, never loaded."""

import os
import sys

from zse import trust
from zse.errors import DeviceError
from zse.kernel import cache
from zse.lazy import json, subprocess, tempfile
from zse.runtime import native

PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MEMORY = "/dev/shm"  # files in memory, on Linux


class KernelsOnDemand(dict):
    """symbol → manifest entry, of an ISA level; with "library", the path of its library. Another process compiles,
    once: a second one that asks for the same kernel waits for the first."""

    def __init__(self, level: str):
        """With the kernels for a first model, where they are whole."""
        self.level, self.sources = level, ""
        self._memory: tempfile.TemporaryDirectory | None = None  # of what can be kept nowhere
        built, library = _part(native.native_dir(), level, native.FIRST)
        super().__init__(_entries(built, library))
        if not built:
            trust.warn_once("%s is damaged: its kernels are compiled again; run `python -m zse.build`", library)
        self.sources = built.get("sources", "") if built else cache.fingerprint()

    def __missing__(self, symbol: str) -> dict:
        """From the whole library if that is compiled by now, else compiled here and now, in about a second.

        KeyError for a name that no kernel has. DeviceError when it cannot be compiled."""
        folder = native.native_dir()
        found = self._read(folder, "") or self._read(folder, symbol) or self._compile(symbol)
        self.update({name: entry for name, entry in found.items() if name not in self})
        if symbol not in self:
            raise KeyError(symbol)
        return self[symbol]

    def _read(self, folder: str, part: str) -> dict:
        """The kernels of a library that is there, of these sources."""
        built, library = _part(folder, self.level, part)
        return _entries(built, library) if built.get("sources") == self.sources else {}

    def _compile(self, symbol: str) -> dict:
        """Into the installation, or where that cannot be (a full or read-only disk) into memory, for this process."""
        folder = native.native_dir()
        reason = self._run(symbol, folder, {})
        if reason and os.access(MEMORY, os.W_OK):
            if self._memory is None:
                self._memory = tempfile.TemporaryDirectory(prefix="zse-kernels-", dir=MEMORY)
            if not self._run(symbol, self._memory.name, {"TMPDIR": self._memory.name}):
                told = "kernels are compiled into memory, and again by the next start: %s"
                trust.warn_once(told, reason)
                folder, reason = self._memory.name, ""
        found = {} if reason else self._read(folder, symbol)
        if not found:
            reason = reason or "what was compiled is damaged"
            raise DeviceError(f"{symbol} is not compiled yet and cannot be now: {reason}; run `python -m zse.build`")
        return found

    def _run(self, symbol: str, folder: str, environment: dict[str, str]) -> str:
        """Why the kernel could not be compiled there; "" when it is. KeyError for a name that no kernel has."""
        path = PACKAGES + os.pathsep + os.environ.get("PYTHONPATH", "")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "zse.build", "--isa", self.level, "--kernel", symbol, "--dir", folder],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode == UNKNOWN_KERNEL:
            raise KeyError(symbol)
        if not done.returncode:
            return ""
        return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"


def _part(folder: str, level: str, part: str) -> tuple[dict, str]:
    """What the manifest of a part (or, as "", of the whole library) says, {} where it is not there or damaged; the
    library."""
    library, manifest = native.kernel_files(folder, level, part)
    try:
        if part and not trust.is_whole(manifest):
            return {}, library
        with open(manifest, encoding="utf-8") as file:
            built = json.load(file)
        if part and (built["part"] != part or built["isa"] != level or built["library"] != trust.sum_of(library)):
            return {}, library
    except (OSError, ValueError, KeyError):
        return {}, library
    return built, library


def _entries(built: dict, library: str) -> dict:
    return {name: {**entry, "library": library} for name, entry in built["kernels"].items()} if built else {}


UNKNOWN_KERNEL = 3  # the exit code of `python -m zse.build --kernel` for a name that no kernel has
