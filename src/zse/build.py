"""Compiles the CPU libraries in place: `python -m zse.build`. The package's installation runs the same.

Of the kernels, the level that this CPU runs best; `--isa all` is for a package that other machines get.

`python -m zse.build` also compiles the package's Python modules, as pip does with what it installs: a start imports 250
of them, and each that has no bytecode costs it 1 to 8 ms.

Into `zse/_native` (or --dir): libzse_runtime.so, libzse_formats.so, libzse_tokenizer.so, and per ISA level
libzse_kernels_<isa>.so with its manifest <isa>.json. What did not change is not compiled again: the manifest keeps a
hash of the sources, the flags and the compiler, and object files are kept by content. Needs the standard library and a
C compiler only.

`--model MODEL` compiles only the kernels that serving MODEL needs, a tenth of them, where not all are there already; a
build with `--idle` makes the rest beside, and a kernel that is asked for before is compiled on demand (`--kernel`,
which zse.runtime.on_demand runs). These parts of a level stand in `_native/objects/<isa>`; the whole library replaces
them."""

import argparse
import compileall
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from zse import env, trust
from zse.errors import CompileError, ConfigError, ZSEError
from zse.kernel import cache, emit
from zse.kernel.targets.cpu import ISAS
from zse.runtime import isa as levels
from zse.runtime import native, on_demand, probe
from zse.runtime.compiler import KERNEL_FLAGS, find_compiler, knows, link, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.kernel.language import Variant

PACKAGE = Path(__file__).resolve().parent

HOST_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra")
# Lines of the kernels' sources in comments of the C: an object is kept when only they have moved.
_SOURCE_LINES = re.compile(rb"(\.py:)\d+| *// (?:\w+\.py:)?\d+$", re.MULTILINE)
# Variants per compilation unit: small enough that the last unit does not run alone for long.
UNIT_VARIANTS = 8
# Files that a build compiles before it keeps their headers as read, which takes as long as reading them twice.
FEW = 4


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
def _locked(path: Path) -> Iterator[None]:
    """One build at a time of what this file stands for."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Builder:
    """One run of the build. folder: where the libraries go; jobs: compilers at once; keep_c: folder for the kernels'
    C."""

    def __init__(self, folder: Path, jobs: int, force: bool = False, keep_c: Path | None = None, quiet: bool = False):
        self.folder, self.jobs, self.force, self.keep_c, self.quiet = folder, jobs, force, keep_c, quiet
        self.objects = folder / "objects"
        self.compiler, self.version = find_compiler()
        self._num_compiled, self._lock = 0, threading.Lock()

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def compiled(self, name: str, source: Path, flags: tuple[str, ...], place: Path | None = None) -> Path:
        """The object of a C file; one that is there already, and whole, is kept. place: an empty folder, for files that
        all include the same."""
        headers = b"".join(path.read_bytes() for path in sorted(source.parent.glob("*.h")))
        text = _SOURCE_LINES.sub(b"", source.read_bytes())
        key = _digest(text, headers, " ".join(flags), self.compiler, self.version)
        target = self.objects / f"{name}-{key}.o"
        if self.force or not trust.is_whole(str(target)):
            target.parent.mkdir(parents=True, exist_ok=True)
            half = target.with_suffix(f".{os.getpid()}.tmp")
            more = self._read_headers(source, flags, place) if place else ()
            run([self.compiler, *flags, *more, "-c", str(source), "-o", str(half)], name)
            half.replace(target)
            trust.put_sum(str(target))
            for stale in target.parent.glob(f"{target.name[: -len(key) - 3]}-{'[0-9a-f]' * len(key)}.o"):
                if stale != target:
                    trust.remove(str(stale), str(stale) + trust.SUM)
        return target

    def _read_headers(self, source: Path, flags: tuple[str, ...], place: Path) -> tuple[str, ...]:
        """Flags for what a file begins to include, as gcc keeps it once read: 0.45 s of the 0.5 to 7 that a file of
        kernels takes. Nothing for the first few files of a build, which would not make up for it, and where the
        compiler is clang, which keeps another form."""
        header = place / "headers.h"
        with self._lock:
            self._num_compiled += 1
            if self._num_compiled <= FEW or "clang" in self.version:
                return ()
            if not header.exists():
                lines = source.read_text(encoding="utf-8").splitlines()
                header.write_text("\n".join(takewhile(lambda line: line.startswith("#include"), lines)) + "\n")
                with suppress(
                    CompileError
                ):  # no room for 26 MB: the lines are read each time; other errors each file has, too
                    run([self.compiler, *flags, "-x", "c-header", str(header), "-o", f"{header}.gch"], header.name)
        return "-include", str(header)

    def host_library(self, name: str, sources: list[Path]) -> None:
        """A library of hand-written C."""
        target = self.folder / f"{name}.so"
        with ThreadPoolExecutor(self.jobs) as pool:
            objects = list(pool.map(lambda path: self.compiled(f"{name}-{path.stem}", path, HOST_FLAGS), sources))
        stamp, linked = self.objects / f"{name}.linked", "\n".join(path.name for path in objects)

        def done() -> str:
            return f"{linked}\n{trust.sum_of(str(target))}"

        if self.force or not target.exists() or not stamp.exists() or stamp.read_text(encoding="utf-8") != done():
            link(self.compiler, objects, target)
            stamp.write_text(done(), encoding="utf-8")
            self.say(f"{target.name}: {len(sources)} files")

    def first_kernels(self, level: str, model: str) -> None:
        """The kernels of a level that serving `model` needs, a name or a path; all, where its needs cannot be told.
        Nothing is done where all are there; a whole library that is older than the sources goes, for a start takes the
        part then."""
        library, manifest = map(Path, native.kernel_files(str(self.folder), level))
        key = self._key(level, cache.fingerprint())
        if _is_made(key, manifest, library):
            return
        try:
            path = str(importlib.import_module("zse.formats.store").resolve(model))
            threads = probe.default_threads()
            needed = importlib.import_module("zse.engine.load").kernels_of(path, level, threads)
        except ZSEError as error:
            self.say(f"{error}; all kernels are compiled")
            self.kernel_library(level)
            return
        self.kernel_library(level, needed, native.FIRST)
        if _made_for(manifest, library) != key:
            trust.remove(str(manifest), str(library))

    def _key(self, level: str, sources: str, symbols: Iterable[str] = ()) -> str:
        """What a level's kernels depend on. sources: cache.fingerprint()."""
        return _digest(sources, level, " ".join(_flags(level)), self.compiler, self.version, *sorted(symbols))

    def kernel_library(self, level: str, symbols: Iterable[str] = (), part: str = "") -> None:
        """The kernels of an ISA level and their manifest; with `symbols` these of them, as the level's part of that
        name. One process at a time: who waited for it finds what it made."""
        folder = self.objects / level
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{part}.lock"):
            self._make_kernels(level, symbols, part)

    def _make_kernels(self, level: str, symbols: Iterable[str], part: str) -> None:
        target, manifest_path = map(Path, native.kernel_files(str(self.folder), level, part))
        sources = cache.fingerprint()
        key = self._key(level, sources, symbols)
        if not self.force and self.keep_c is None and _is_made(key, manifest_path, target, part):
            return
        manifest: dict[str, dict] = {}
        progress = Progress(f"kernels for {level}", self.quiet)
        with tempfile.TemporaryDirectory(prefix="zse-build-") as folder, ThreadPoolExecutor(self.jobs) as pool:
            where = Path(folder) if self.keep_c is None else self.keep_c / level
            headers = Path(folder) / "headers"
            for each in (where, headers):
                each.mkdir(parents=True, exist_ok=True)
            units, objects = _part_units(level, set(symbols), part, self.jobs) if part else kernel_units(level), []
            progress.total = len(units)
            try:
                for name, variants in units:  # the compilers work while the next unit's text is made
                    text, entries = emit.emit_unit(variants, level)
                    manifest.update(entries)
                    source = where / f"{name}.c"
                    source.write_text(text, encoding="utf-8")
                    objects.append(pool.submit(self.compiled, f"{level}/{name}", source, _flags(level), headers))
                    objects[-1].add_done_callback(lambda _: progress.step())
                compiled = [each.result() for each in objects]
            finally:
                pool.shutdown(cancel_futures=True)  # after an error nothing more is begun
        self._check(level, compiled, manifest)
        link(self.compiler, compiled, target)
        described = {"isa": level, "key": key, "sources": sources, "compiler": self.version, "kernels": manifest}
        described["library"] = trust.sum_of(str(target))
        if part:
            described["part"] = part
        text = json.dumps(described, separators=(",", ":"), sort_keys=True)
        trust.write_whole(str(manifest_path), text.encode(), 0o644)
        if part:
            trust.put_sum(str(manifest_path))
        which = " that are needed first" if part else ""
        progress.end(f"{target.name}: {len(manifest)} kernels{which} in {progress.seconds:.1f} s, by {self.version}")

    def _check(self, level: str, objects: list[Path], manifest: dict[str, dict]) -> None:
        """Compare the kernels with their references (bench/self_check.py) before they are put in place, where there is
        NumPy and a CPU of the level. CompileError that names what a compiler got wrong."""
        # Parts that are kept in memory only have no runtime of their own.
        folders = [
            folder for folder in (self.folder, Path(native.native_dir())) if (folder / "libzse_runtime.so").exists()
        ]
        here = level in levels.levels_of_machine() and folders
        if not here or find_spec("numpy") is None or level not in levels.runnable_levels(_cpu_bits(folders[0])):
            return
        with tempfile.TemporaryDirectory(prefix="check-", dir=self.folder) as place:
            library, described = native.kernel_files(place, level)
            link(self.compiler, objects, Path(library))
            Path(described).write_text(json.dumps({"kernels": manifest}), encoding="utf-8")
            shutil.copy2(folders[0] / "libzse_runtime.so", place)
            path = str(PACKAGE.parent) + os.pathsep + os.environ.get("PYTHONPATH", "")
            done = subprocess.run(
                [sys.executable, "-P", "-m", "zse.bench.self_check"],
                env={**os.environ, "PYTHONPATH": path, "ZSE_NATIVE_DIR": place, "ZSE_ISA": level},
                capture_output=True,
                text=True,
            )
        if done.returncode:
            lines = [*done.stdout.splitlines()[:1], *done.stderr.splitlines()[-1:], f"exit code {done.returncode}"]
            raise CompileError(
                f"{level}: what {self.version} made of a kernel computes wrong numbers ({lines[0]}); nothing was installed: use "
                "another C compiler (CC=clang, or another version), or run `python -m zse.build --force` if the disk may be at fault"
            )


def _flags(level: str) -> tuple[str, ...]:
    return (*KERNEL_FLAGS, *ISAS[level].flags)


def _is_made(key: str, manifest: Path, library: Path, part: str = "") -> bool:
    """Whether they are there and of this key. The manifest is as new as its sources then (trust.has_newer_sources)."""
    if _made_for(manifest, library, part) != key:
        return False
    os.utime(manifest)
    return True


def _made_for(manifest: Path, library: Path, part: str = "") -> str | None:
    """The key in the manifest; None where the two do not belong together, are not there, or are damaged."""
    try:
        described = json.loads(manifest.read_bytes())
        is_whole = described["library"] == trust.sum_of(str(library)) and (not part or trust.is_whole(str(manifest)))
        return described["key"] if is_whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _part_units(level: str, symbols: set[str], part: str, jobs: int) -> "list[tuple[str, list[Variant]]]":
    """As kernel_units(), of a part: of as many variants as give each compiler two. ConfigError for a name of no
    kernel."""
    table = importlib.import_module("zse.kernels.table")
    variants = [variant for variant in table.all_variants(ISAS[level]) if variant.symbol in symbols]
    unknown = symbols - {variant.symbol for variant in variants}
    if unknown:
        raise ConfigError(f"no kernel is called {', '.join(sorted(unknown))}")
    size = min(UNIT_VARIANTS, -(-len(variants) // (2 * jobs)))
    return [(f"{part}_{at // size}", variants[at : at + size]) for at in range(0, len(variants), size)]


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
    model: str | None = None,
) -> Path:
    """Compile what is missing or changed. isas: levels; default: the one that this CPU runs best. machine: another
    architecture than this one's (default: that of the first of isas), all its levels; CC has to be a compiler for it,
    and folder another than the package's. model: of the kernels only what serving it needs.

    Returns the folder. CompileError when there is no compiler, or for another machine, or it fails, ConfigError for an
    unknown level.
    """
    folder = Path(folder or native.native_dir())
    isas = isas if isas is None else list(isas)
    machine = machine or levels.LEVELS.get(isas[0] if isas else "", (None,))[0]
    here = levels.levels_of_machine(machine)
    isas = here if isas is None and machine not in (None, levels.machine()) else isas
    for level in isas or ():
        if level not in here:
            whose = "this machine" if machine in (None, levels.machine()) else machine
            raise ConfigError(f"ISA level {level!r} is not one of {whose}'s: {', '.join(here) or 'none'}")
    if not here:
        raise CompileError(
            f"no kernels for {machine or levels.machine()}; supported: "
            f"{', '.join(sorted({family for family, _ in levels.LEVELS.values()}))}"
        )
    builder = Builder(folder, jobs or len(probe.allowed_cpus()), force, keep_c, quiet)
    if machine not in (None, levels.machine()):
        _check_cross(builder.compiler, machine, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        for part in ("runtime", "formats", "tokenizer"):
            sources = sorted((PACKAGE / part / "csrc").glob("*.c"))
            if sources:
                builder.host_library(f"libzse_{part}", sources)
    for level in _best_level(folder, for_others=model is None) if isas is None else isas:
        builder.kernel_library(level) if model is None else builder.first_kernels(level, model)
    return folder


def _check_cross(compiler: str, machine: str, folder: Path) -> None:
    """CompileError where the compiler makes nothing for another machine, ConfigError where what it makes would stand in
    for this machine's libraries."""
    done = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True)
    made = levels.family_of(done.stdout.strip().partition("-")[0])
    if made != machine:
        raise CompileError(
            f"{compiler} compiles for {made or 'no known machine'}, not {machine}: set CC to a cross compiler, such as "
            "aarch64-linux-gnu-gcc"
        )
    if folder.resolve() == Path(native.native_dir()).resolve():
        raise ConfigError(f"libraries for {machine} need a folder of their own: add --dir DIR")


def _cpu_bits(folder: Path) -> int:
    """What this CPU can do, as zse_cpu_features() says."""
    features = native.open_library(str(folder / "libzse_runtime.so")).zse_cpu_features
    features.restype = ctypes.c_uint64
    return features()


def _best_level(folder: Path, for_others: bool = True) -> list[str]:
    """The level that this CPU runs best, of those that the compiler knows. Where there is none, every level of its
    architecture, as in a build for others, or a DeviceError."""
    bits = _cpu_bits(folder)
    compiler, _ = find_compiler()
    best = [level for level in levels.runnable_levels(bits) if knows(compiler, ISAS[level].flags)][:1]
    if not best and not for_others:
        raise native.unsupported_cpu(bits)
    return best or levels.levels_of_machine()


def isas_to_install() -> list[str] | None:
    """The levels that ZSE_BUILD_ISA names, for build(); None: this CPU's best."""
    wanted = env.get("ZSE_BUILD_ISA")
    if wanted in ("none", "all"):
        return levels.levels_of_machine() if wanted == "all" else []
    return wanted.split(",") if wanted else None


def compile_modules(folder: Path = PACKAGE) -> bool:
    """Bytecode beside every module whose own is missing or old, also where PYTHONDONTWRITEBYTECODE is set. Whether all
    have it now: a folder may be read-only."""
    return bool(compileall.compile_dir(folder, quiet=2))


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zse.build", description="Compile the CPU libraries in place.")
    parser.add_argument(
        "--isa",
        action="append",
        metavar="LEVEL",
        help="kernels for this level (may be repeated; all: for every CPU of this architecture); default: the best that "
        f"this CPU runs, of {', '.join(levels.levels_of_machine())}. One of another architecture needs a compiler in CC that "
        "compiles for it, and --dir",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where the libraries go (default: the package's _native)"
    )
    parser.add_argument("--force", action="store_true", help="compile everything again")
    parser.add_argument("--keep-c", type=Path, metavar="DIR", help="keep the generated C files in DIR")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: CPUs)")
    parser.add_argument(
        "--model", metavar="MODEL", help="only the kernels that serving this model needs, a name or a path"
    )
    parser.add_argument("--kernel", metavar="SYMBOL", help="only this kernel, of the level that --isa names")
    parser.add_argument("--idle", action="store_true", help="in time that nothing else wants; say nothing but errors")
    options = parser.parse_args(arguments)
    try:
        if options.kernel is not None:
            one = Builder(options.dir or Path(native.native_dir()), 1, quiet=True)
            for level in options.isa or ():
                one.kernel_library(level, [options.kernel], options.kernel)
            return 0
        if options.idle:
            _yield_to_others()
        isas = levels.levels_of_machine() if options.isa == ["all"] else options.isa
        folder = build(
            options.dir, isas, force=options.force, keep_c=options.keep_c, jobs=options.jobs, quiet=options.idle,
            model=options.model,
        )  # fmt: skip
        if not options.idle:
            print(folder)
        if options.model is None:
            compile_modules()
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        print(
            f"zse: {error.strerror}{place}; the build needs about 20 MB here and in TMPDIR, or --dir DIR",
            file=sys.stderr,
        )
        return 1
    except ZSEError as error:
        print(f"zse: {error}", file=sys.stderr)
        unknown = options.kernel is not None and isinstance(error, ConfigError)
        return on_demand.UNKNOWN_KERNEL if unknown else error.exit_code
    return 0


def _yield_to_others() -> None:
    """The lowest priority for this process and the compilers that it starts."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    gc.disable()  # 5 % of generating the text; 120 MB at most without
    sys.exit(main())
