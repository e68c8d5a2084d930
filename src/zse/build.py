"""Compiles the CPU libraries in place: `python -m zse.build`. The package's installation runs the same.

`python -m zse.build` also compiles the package's Python modules, as pip does with what it installs: a start imports 250 of
them, and each that has no bytecode costs it 1 to 8 ms.

Into `zse/_native` (or --dir): libzse_runtime.so, libzse_tokenizer.so, and per ISA level libzse_kernels_<isa>.so with its
manifest <isa>.json. What did not change is not compiled again: the manifest keeps a hash of the sources, the flags and the
compiler, and object files are kept by content. Needs the standard library and a C compiler only.
"""

import argparse
import compileall
import fcntl
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from zse.errors import CompileError, ConfigError
from zse.kernel import cache, emit
from zse.kernel.targets.cpu import ISAS
from zse.runtime import isa as levels
from zse.runtime import native, probe
from zse.runtime.compiler import KERNEL_FLAGS, find_compiler, link, run

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

    def compile_all(self, units: "list[tuple[str, Path, tuple[str, ...]]]") -> list[Path]:
        """Objects of (name, C file, flags), in order; those that are there already are kept."""

        def one(unit: "tuple[str, Path, tuple[str, ...]]") -> Path:
            name, source, flags = unit
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

        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(one, units))

    def host_library(self, name: str, sources: list[Path]) -> None:
        """A library of hand-written C."""
        target = self.folder / f"{name}.so"
        objects = self.compile_all([(f"{name}-{path.stem}", path, HOST_FLAGS) for path in sources])
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
        start = time.perf_counter()
        texts, manifest = emit_kernels(level)
        emitted = time.perf_counter() - start
        with tempfile.TemporaryDirectory(prefix="zse-build-") as folder:
            where = Path(folder)
            if self.keep_c is not None:
                where = self.keep_c / level
                where.mkdir(parents=True, exist_ok=True)
            units = []
            for name, text in texts.items():
                source = where / f"{name}.c"
                source.write_text(text, encoding="utf-8")
                units.append((f"{level}/{name}", source, flags))
            link(self.compiler, self.compile_all(units), target)
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
        self.say(
            f"{target.name}: {len(manifest)} kernels, {emitted:.1f} s to generate C, "
            f"{time.perf_counter() - start - emitted:.1f} s to compile with {self.version}"
        )


def _manifest_key(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, KeyError):
        return None


def emit_kernels(level: str) -> tuple[dict[str, str], dict[str, dict]]:
    """({unit name: C text}, {symbol: {"params", "origin"}}) of every variant for an ISA level. Deterministic."""
    table = importlib.import_module("zse.kernels.table")
    by_module: dict[str, list] = {}
    for variant in table.all_variants(ISAS[level]):
        module = getattr(getattr(variant.kernel, "function", variant.kernel), "__module__", "kernels").rpartition(".")[
            2
        ]
        by_module.setdefault(module, []).append(variant)
    texts: dict[str, str] = {}
    manifest: dict[str, dict] = {}
    for module, variants in by_module.items():
        for number, start in enumerate(range(0, len(variants), UNIT_VARIANTS)):
            text, entries = emit.emit_unit(variants[start : start + UNIT_VARIANTS], level)
            texts[f"{module}_{number}" if len(variants) > UNIT_VARIANTS else module] = text
            manifest.update(entries)
    return texts, manifest


def build(
    folder: Path | None = None,
    isas: Iterable[str] | None = None,
    *,
    force: bool = False,
    keep_c: Path | None = None,
    jobs: int | None = None,
    quiet: bool = False,
) -> Path:
    """Compile what is missing or changed, for `isas` (default: every level of this machine's architecture).

    Returns the folder. CompileError when there is no compiler or it fails, ConfigError for an unknown level.
    """
    folder = Path(folder or native.native_dir())
    here = levels.levels_of_machine()
    wanted = here if isas is None else list(isas)
    for level in wanted:
        if level not in here:
            raise ConfigError(f"ISA level {level!r} is not one of this machine's: {', '.join(here) or 'none'}")
    if not here:
        raise CompileError(
            f"no kernels for {levels.machine()}; supported: "
            f"{', '.join(sorted({family for family, _ in levels.LEVELS.values()}))}"
        )
    builder = Builder(folder, jobs or len(probe.allowed_cpus()), force, keep_c, quiet)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for part in ("runtime", "formats", "tokenizer"):
            sources = sorted((PACKAGE / part / "csrc").glob("*.c"))
            if sources:
                builder.host_library(f"libzse_{part}", sources)
        for level in wanted:
            builder.kernel_library(level)
    return folder


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
        help="only this level (may be repeated); default: all of this "
        f"machine's: {', '.join(levels.levels_of_machine())}",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where the libraries go (default: the package's _native)"
    )
    parser.add_argument("--force", action="store_true", help="compile everything again")
    parser.add_argument("--keep-c", type=Path, metavar="DIR", help="keep the generated C files in DIR")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: CPUs)")
    options = parser.parse_args(arguments)
    try:
        print(build(options.dir, options.isa, force=options.force, keep_c=options.keep_c, jobs=options.jobs))
        compile_modules()
    except (CompileError, ConfigError) as error:
        print(f"zse: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
