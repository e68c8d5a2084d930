"""Compiles the CPU libraries in place: `python -m zse.build`. The package's installation runs the same.

Of the kernels, the level that this CPU runs best; `--isa all` is for a package that other machines get.

`python -m zse.build` also compiles the package's Python modules, as pip does with what it installs: a start imports 250 of
them, and each that has no bytecode costs it 1 to 8 ms.

Into `zse/_native` (or --dir): libzse_runtime.so, libzse_formats.so, libzse_tokenizer.so, and per ISA level libzse_kernels_<isa>.so with its
manifest <isa>.json. What did not change is not compiled again: the manifest keeps a hash of the sources, the flags and the
compiler, and object files are kept by content. Needs the standard library and a C compiler only.
"""

import argparse
import compileall
import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from zse import env
from zse.errors import CompileError, ConfigError
from zse.kernel import cache, emit
from zse.kernel.targets.cpu import ISAS
from zse.runtime import isa as levels
from zse.runtime import native, probe
from zse.runtime.compiler import KERNEL_FLAGS, find_compiler, link, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.kernel.language import Variant

PACKAGE = Path(__file__).resolve().parent

HOST_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra")
# Lines of the kernels' sources in comments of the C: an object is kept when only they have moved.
_SOURCE_LINES = re.compile(rb"(\.py:)\d+| *// (?:\w+\.py:)?\d+$", re.MULTILINE)
# Variants per compilation unit: small enough that the last unit does not run alone for long.
UNIT_VARIANTS = 8


def _digest(*parts: "str | bytes") -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


class Progress:
    """How far a build is: one line that is written over on a terminal, elsewhere one every 5 seconds. total: steps."""

    def __init__(self, what: str, quiet: bool):
        self.what, self.quiet, self.total, self.done = what, quiet, 0, 0
        self._is_terminal = sys.stderr.isatty()
        self._start = time.perf_counter()
        self._next, self._lock = self._start, threading.Lock()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def step(self) -> None:
        """One more is done; any thread."""
        with self._lock:
            self.done += 1
            now = time.perf_counter()
            if self.quiet or now < self._next or self.done == self.total:
                return
            self._next = now + (0.2 if self._is_terminal else 5)
            left = self.seconds * (self.total - self.done) / self.done
            text = f"{self.what}: compiled {self.done} of {self.total}, about {left:.0f} s left"
            sys.stderr.write(f"\r\x1b[K{text}" if self._is_terminal else text + "\n")
            sys.stderr.flush()

    def end(self, line: str) -> None:
        if not self.quiet:
            sys.stderr.write(("\r\x1b[K" if self._is_terminal else "") + line + "\n")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One build at a time in a folder."""
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Builder:
    """One run of the build. folder: where the libraries go; jobs: compilers at once; keep_c: folder for the kernels' C."""

    def __init__(self, folder: Path, jobs: int, force: bool = False, keep_c: Path | None = None, quiet: bool = False):
        self.folder, self.jobs, self.force, self.keep_c, self.quiet = folder, jobs, force, keep_c, quiet
        self.objects = folder / "objects"
        self.compiler, self.version = find_compiler()

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def compiled(self, name: str, source: Path, flags: tuple[str, ...]) -> Path:
        """The object of a C file; one that is there already is kept."""
        headers = b"".join(path.read_bytes() for path in sorted(source.parent.glob("*.h")))
        text = _SOURCE_LINES.sub(b"", source.read_bytes())
        key = _digest(text, headers, " ".join(flags), self.compiler, self.version)
        target = self.objects / f"{name}-{key}.o"
        if self.force or not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            half = target.with_suffix(f".{os.getpid()}.tmp")
            run([self.compiler, *flags, "-c", str(source), "-o", str(half)], name)
            half.replace(target)
            for stale in target.parent.glob(f"{target.name[: -len(key) - 3]}-{'[0-9a-f]' * len(key)}.o"):
                if stale != target:
                    stale.unlink()
        return target

    def host_library(self, name: str, sources: list[Path]) -> None:
        """A library of hand-written C."""
        target = self.folder / f"{name}.so"
        with ThreadPoolExecutor(self.jobs) as pool:
            objects = list(pool.map(lambda path: self.compiled(f"{name}-{path.stem}", path, HOST_FLAGS), sources))
        stamp, linked = self.objects / f"{name}.linked", "\n".join(path.name for path in objects)
        if self.force or not target.exists() or not stamp.exists() or stamp.read_text(encoding="utf-8") != linked:
            link(self.compiler, objects, target)
            stamp.write_text(linked, encoding="utf-8")
            self.say(f"{target.name}: {len(sources)} files")

    def kernel_library(self, level: str) -> None:
        """The kernels of an ISA level and their manifest."""
        flags = (*KERNEL_FLAGS, *ISAS[level].flags)
        target, manifest_path = self.folder / f"libzse_kernels_{level}.so", self.folder / f"{level}.json"
        sources = cache.fingerprint()
        key = _digest(sources, level, " ".join(flags), self.compiler, self.version)
        if not self.force and self.keep_c is None and target.exists() and _manifest_key(manifest_path) == key:
            return
        manifest: dict[str, dict] = {}
        progress = Progress(f"kernels for {level}", self.quiet)
        with tempfile.TemporaryDirectory(prefix="zse-build-") as folder, ThreadPoolExecutor(self.jobs) as pool:
            where = Path(folder) if self.keep_c is None else self.keep_c / level
            where.mkdir(parents=True, exist_ok=True)
            units, objects = kernel_units(level), []
            progress.total = len(units)
            try:
                for name, variants in units:  # the compilers work while the next unit's text is made
                    text, entries = emit.emit_unit(variants, level)
                    manifest.update(entries)
                    source = where / f"{name}.c"
                    source.write_text(text, encoding="utf-8")
                    objects.append(pool.submit(self.compiled, f"{level}/{name}", source, flags))
                    objects[-1].add_done_callback(lambda _: progress.step())
                link(self.compiler, [each.result() for each in objects], target)
            finally:
                pool.shutdown(cancel_futures=True)  # after an error nothing more is begun
        half = manifest_path.with_suffix(f".{os.getpid()}.tmp")
        half.write_text(
            json.dumps(
                {"isa": level, "key": key, "sources": sources, "compiler": self.version, "kernels": manifest},
                separators=(",", ":"),
                sort_keys=True,
            ),
            encoding="utf-8",
        )
        half.replace(manifest_path)
        progress.end(f"{target.name}: {len(manifest)} kernels in {progress.seconds:.1f} s, by {self.version}")


def _manifest_key(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, KeyError):
        return None


def kernel_units(level: str) -> "list[tuple[str, list[Variant]]]":
    """(name, variants) of each C file for an ISA level, in a fixed order."""
    table = importlib.import_module("zse.kernels.table")
    by_module: dict[str, list] = {}
    for variant in table.all_variants(ISAS[level]):
        module = getattr(getattr(variant.kernel, "function", variant.kernel), "__module__", "kernels").rpartition(".")[
            2
        ]
        by_module.setdefault(module, []).append(variant)
    return [
        (f"{module}_{number}" if len(variants) > UNIT_VARIANTS else module, variants[start : start + UNIT_VARIANTS])
        for module, variants in by_module.items()
        for number, start in enumerate(range(0, len(variants), UNIT_VARIANTS))
    ]


def build(
    folder: Path | None = None,
    isas: Iterable[str] | None = None,
    *,
    force: bool = False,
    machine: str | None = None,
    keep_c: Path | None = None,
    jobs: int | None = None,
    quiet: bool = False,
) -> Path:
    """Compile what is missing or changed. isas: levels; default: the one that this CPU runs best. machine: another architecture
    than this one's, for all levels of which CC has to be a compiler.

    Returns the folder. CompileError when there is no compiler or it fails, ConfigError for an unknown level.
    """
    folder = Path(folder or native.native_dir())
    here = levels.levels_of_machine(machine)
    isas = here if isas is None and machine not in (None, levels.machine()) else isas
    for level in isas or ():
        if level not in here:
            raise ConfigError(f"ISA level {level!r} is not one of this machine's: {', '.join(here) or 'none'}")
    if not here:
        raise CompileError(
            f"no kernels for {machine or levels.machine()}; supported: "
            f"{', '.join(sorted({family for family, _ in levels.LEVELS.values()}))}"
        )
    builder = Builder(folder, jobs or len(probe.allowed_cpus()), force, keep_c, quiet)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for part in ("runtime", "formats", "tokenizer"):
            sources = sorted((PACKAGE / part / "csrc").glob("*.c"))
            if sources:
                builder.host_library(f"libzse_{part}", sources)
        for level in _best_level(folder) if isas is None else isas:
            builder.kernel_library(level)
    return folder


def _best_level(folder: Path) -> list[str]:
    """The level that this CPU runs best; every level of its architecture where it can run none, as in a build for others."""
    features = native.open_library(str(folder / "libzse_runtime.so")).zse_cpu_features
    features.restype = ctypes.c_uint64
    bits = features()
    return levels.runnable_levels(bits)[:1] or levels.levels_of_machine()


def isas_to_install() -> list[str] | None:
    """The levels that ZSE_BUILD_ISA names, for build(); None: this CPU's best."""
    wanted = env.get("ZSE_BUILD_ISA")
    if wanted in ("none", "all"):
        return levels.levels_of_machine() if wanted == "all" else []
    return wanted.split(",") if wanted else None


def compile_modules(folder: Path = PACKAGE) -> bool:
    """Bytecode beside every module whose own is missing or old, also where PYTHONDONTWRITEBYTECODE is set. Whether all have
    it now: a folder may be read-only."""
    return bool(compileall.compile_dir(folder, quiet=2))


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zse.build", description="Compile the CPU libraries in place.")
    parser.add_argument(
        "--isa",
        action="append",
        metavar="LEVEL",
        help="kernels for this level (may be repeated; all: for every CPU of this architecture); default: the best that "
        f"this CPU runs, of {', '.join(levels.levels_of_machine())}",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where the libraries go (default: the package's _native)"
    )
    parser.add_argument("--force", action="store_true", help="compile everything again")
    parser.add_argument("--keep-c", type=Path, metavar="DIR", help="keep the generated C files in DIR")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: CPUs)")
    options = parser.parse_args(arguments)
    try:
        isas = levels.levels_of_machine() if options.isa == ["all"] else options.isa
        print(build(options.dir, isas, force=options.force, keep_c=options.keep_c, jobs=options.jobs))
        compile_modules()
    except (CompileError, ConfigError) as error:
        print(f"zse: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
