"""What emulated kernels are compiled from and to: the C++ of kernels and the emulator's files, kept below
ZSE_HOME/kernels/emulate, libraries by their text, texts by their sources."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

from zse import trust
from zse.errors import CompileError
from zse.kernel import cache
from zse.kernel.emit import emit_for
from zse_emulator.target import EmulateTarget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from zse.kernel.language import Variant

CSRC = Path(__file__).with_name("csrc")
CORE = ("emulate_core.cpp", "emulate_sync.cpp", "emulate_async.cpp", "emulate_matrix.cpp")
# Signed integers wrap, as on a GPU.
# Kernels run for milliseconds, most of them in the emulator's functions, which are -O3: -O1 takes three times as long to compile
# (28 s for 45 cases of products, experts and attention, 10 s with -O0) and saves a sixth of their run (13 s of 15). One that has run
# for SOON seconds of a process is compiled once more, for all: its threads' frames, 8 KB each with -O0, are what the caches miss.
KERNEL_OPTIMIZATION, MORE_OPTIMIZATION = "-O0", "-O1"
SOON = 0.5
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-w")
CORE_FLAGS = ("-fno-semantic-interposition",)
# Tables by which a debugger or an exception finds its way back take an eighth of a kernel's compilation; nothing is thrown in one.
KERNEL_FLAGS = ("-fno-exceptions", "-fno-asynchronous-unwind-tables")


def find_compiler() -> str:
    """CXX, g++ or clang++. CompileError names them."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        found = name and shutil.which(name)
        if found:
            return found
    raise CompileError("no C++ compiler: the emulated GPU needs g++ or clang++ (or set CXX)")


def library_path(sources: "list[Path]", text: str, name: str, optimize: str) -> Path:
    """Where the shared library of these files (or of `text`) is kept."""
    total = hashlib.sha256(repr((find_compiler(), FLAGS, CORE_FLAGS, KERNEL_FLAGS, optimize, text)).encode())
    headers = CSRC.glob("emulate*.h") if sources else [CSRC / "emulate.h"]
    for path in (*sources, *sorted(headers)):
        total.update(path.read_bytes())
    return cache.folder() / "emulate" / f"{name}-{total.hexdigest()[:32]}.so"


def compiled(sources: "list[Path]", text: str, name: str, optimize: str) -> Path:
    """The shared library of these files (or of `text`), from the cache if it is there."""
    target = library_path(sources, text, name, optimize)
    if sources:
        return _kept(target, lambda half: _compile_files(sources, half, optimize))
    return _kept(target, lambda half: _compile_text(text, name, half, optimize))


def _kept(target: Path, make: "Callable[[Path], None]") -> Path:
    """A file of the cache, made by `make` where it is not there or not ours."""
    folder = target.parent
    if not _is_ours(target):
        # What stood here, or in a folder that others can write, is compiled anew whatever it looks like afterwards.
        is_new = not os.path.lexists(target) and not (folder.exists() and folder.stat().st_mode & 0o022)
        try:
            trust.make_private(str(folder), str(cache.folder()))
        except OSError as error:
            raise CompileError(
                f"{error.filename or folder}: {error.strerror}; set ZSE_HOME to a folder you own"
            ) from None
        # Of several processes that ask for it one compiles: tests of a kernel are dealt to all of them, and begin at once.
        with open(folder / f"lock-{target.stem[-1]}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (is_new and _is_ours(target)):
                half = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
                make(half)
                half.chmod(0o700)
                half.replace(target)
                trust.put_sum(str(target))
    return target


def _run(name: str, *arguments: str, text: "str | None" = None) -> None:
    """Run the compiler. CompileError with its first lines."""
    command = [find_compiler(), *FLAGS, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{name}: {command[0]} failed: {'; '.join(done.stderr.splitlines()[:3])}")


def _compile_files(sources: "list[Path]", library: Path, optimize: str) -> None:
    """A shared library of the emulator's files, with all cores."""
    objects = [str(library.with_suffix(f".{source.stem}.o")) for source in sources]
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda source, to: _run(source.stem, *CORE_FLAGS, optimize, "-c", "-o", to, str(source)),
                    sources,
                    objects,
                )
            )
        _run("core", "-shared", "-o", str(library), *objects)
    finally:
        for path in objects:
            Path(path).unlink(missing_ok=True)


def _compile_text(text: str, name: str, library: Path, optimize: str) -> None:
    """A shared library of a kernel's text."""
    flags = *KERNEL_FLAGS, optimize, f"-I{_header(optimize)}", f"-I{CSRC}"
    _run(name, *flags, "-shared", "-o", str(library), "-x", "c++", "-", text=text)


_headers: "dict[Path, Path]" = {}  # that this process has found whole


def _header(optimize: str) -> Path:
    """The folder of emulate.h as g++ has read it already, a third of the time of most kernels (clang++ reads it again)."""
    total = hashlib.sha256(repr((find_compiler(), FLAGS, KERNEL_FLAGS, optimize, str(CSRC))).encode())
    total.update((CSRC / "emulate.h").read_bytes())
    folder = cache.folder() / "emulate" / f"header-{total.hexdigest()[:32]}"
    if folder not in _headers:
        _headers[folder] = _kept(
            folder / "emulate.h.gch",
            lambda half: _run(
                "emulate.h", *KERNEL_FLAGS, optimize, "-x", "c++-header", "-o", str(half), str(CSRC / "emulate.h")
            ),
        )
    return folder


def _is_ours(library: Path) -> bool:
    """Whether it is there, whole, and nobody else can have written it."""
    try:
        trust.open_kept(str(library), str(cache.folder())).close()
    except OSError:
        return False
    return trust.is_whole(str(library))


# Of kernels that other devices of this process have printed: a tenth of a second each, 30 for a step of a small model.
_emitted: "dict[tuple, tuple[str, dict]]" = {}
_STARTED_NS = time.time_ns()


def emitted(variant: "Variant", like: str) -> tuple[str, dict]:
    """The text of a variant and its manifest entry. Of the package's kernels they are kept beside the libraries, by the sources they
    come from: an eighth of what tests of the emulator took was to print again what another process had printed."""
    sizes = variant.threads, variant.min_blocks, variant.cluster
    # repr tells 1 from True, and functions of one name apart.
    key = like, variant.symbol, variant.kernel, *sizes, *((name, repr(it)) for name, it in variant.statics.items())
    if key not in _emitted:
        file = _text_file(variant, like, sizes)
        if file is None:
            _emitted[key] = emit_for(variant, EmulateTarget(like, *sizes))
        else:
            make = partial(_write_text, variant, EmulateTarget(like, *sizes))
            text, entry = json.loads(_kept(file, make).read_bytes())
            _emitted[key] = text, entry
    text, entry = _emitted[key]
    return text, dict(entry)


def _text_file(variant: "Variant", like: str, sizes: tuple[int, int, int]) -> Path | None:
    """Where a kernel's text is kept; None for what other processes cannot know by name: kernels of other packages, or of sources that
    were written since this process began."""
    function, statics = variant.kernel.function, repr(sorted(variant.statics.items()))
    sources = [*trust.kernel_sources(), *map(str, Path(__file__).parent.glob("*.py"))]
    if not function.__module__.startswith("zse.kernels.") or function.__closure__ or " at 0x" in statics:
        return None
    if any(os.stat(source).st_mtime_ns > _STARTED_NS for source in sources):
        return None
    key = like, variant.symbol, function.__module__, function.__qualname__, sizes, statics, _fingerprint()
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    return cache.folder() / "emulate" / f"{variant.symbol}-{name}.json"


def _write_text(variant: "Variant", target: EmulateTarget, path: Path) -> None:
    path.write_text(json.dumps(emit_for(variant, target)))


@lru_cache(maxsize=1)
def _fingerprint() -> str:
    """Of all that a kernel's text depends on: the package's sources, how this package prints them, and Python's grammar."""
    total = hashlib.sha256(f"{cache.fingerprint()} {sys.version}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
