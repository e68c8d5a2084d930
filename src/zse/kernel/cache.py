"""Compiled GPU kernels on disk: a cache of single cubins by content, and packs that a start reads instead of compiling.

Both lie in ZSE_HOME/kernels; zse.trust says when a file there, or a pack in the installation, may be loaded. What is
damaged, of another key or of another architecture is compiled again, never loaded; where nothing can be written, it is
kept in memory.

cubins/<key>.cubin   magic, the key, u64 length and SHA-256 of the rest, the rest: u32 length of a JSON entry, the entry, the cubin.
                     key = SHA-256 of the text without comments, the options, the compiler's version, the architecture and zse's
                     version. AMD: a code object, likewise.
symbols/<key>.cubin  the same without a cubin: the entry has the key of the one that a symbol stood for. key = SHA-256 of the symbol, the
                     architecture, the fingerprint and zse's version. A start makes no text then (30 ms a kernel).
compared/<key>.cubin likewise: what came of comparing cubins with the NumPy references (`zse kernels check`), by their
SHA-256. key =
                     SHA-256 of the architecture and zse's version.
<arch>-<fingerprint>.pack   magic, the key, u64 length and SHA-256 of a JSON head, the head, the cubins. key = SHA-256 of the
                     architecture, the fingerprint (a hash of the package's kernel sources) and zse's version. The head has these,
                     and per symbol its manifest entry with "place": [offset, length, SHA-256].
"""

import hashlib
import importlib
import json
import mmap
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from zse import __version__, env, trust
from zse.errors import CompileError, ConfigError
from zse.kernel import amd, archs, emit, nvrtc
from zse.lazy import logging, subprocess

CUBIN_MAGIC = b"ZSECUBN2"
PACK_MAGIC = b"ZSEPACK2"
_HEAD = struct.Struct("<8s32sQ32s")  # magic, key, length of what is covered, its SHA-256
MOST_BYTES = 1 << 30  # of ZSE_HOME/kernels
_PRUNE_EVERY = 64  # files that a process writes there
PACKAGE = Path(__file__).resolve().parents[1]
TABLE = "zse.kernels.table"  # the list of operations stands above this package: it is named, not imported
BUILD_HINT = "run `zse kernels build`"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.kernel.language import Variant
    from zse.kernel.nvrtc import Compiled


def folder() -> Path:
    """ZSE_HOME/kernels. It need not exist."""
    return Path(os.path.abspath(os.path.expanduser(env.get("ZSE_HOME")))) / "kernels"


_written = 0


def _keep(path: Path, data: bytes) -> None:
    """Write a file of ZSE_HOME/kernels and hold the folder to its size. OSError where that cannot be."""
    global _written
    trust.write_kept(str(path), data, str(folder()))
    if _written % _PRUNE_EVERY == 0:
        trust.prune(str(folder()), MOST_BYTES, time.time())
    _written += 1


def _sealed(magic: bytes, key: str, covered: bytes) -> bytes:
    """A file's beginning and what its hash covers."""
    return _HEAD.pack(magic, bytes.fromhex(key), len(covered), hashlib.sha256(covered).digest()) + covered


def fingerprint() -> str:
    """Hash of everything that the kernels' text depends on: trust.kernel_sources()."""
    total = hashlib.sha256()
    for path in map(Path, trust.kernel_sources()):
        data = path.read_bytes()
        total.update(f"{path.relative_to(PACKAGE).as_posix()} {len(data)}\n".encode() + data)
    return total.hexdigest()[:16]


def resolve_arch(arch: str) -> str:
    """The architecture to compile for on a device such as "sm_87" or "sm_103a": its own, else the nearest earlier one
    of its generation, whose cubins run there. ConfigError when there is none."""
    if arch in archs.ARCHS:
        return arch
    number = re.fullmatch(r"sm_(\d+)a?", arch)
    if number:
        wanted = int(number.group(1))
        found = [
            (value, name)
            for name, (value, *_) in archs.ARCHS.items()
            if value // 10 == wanted // 10 and value <= wanted
        ]
        if found:
            return max(found)[1]
    raise ConfigError(f"there are no kernels for GPU architecture {arch}; there are {', '.join(archs.ARCHS)}")


def key_of(text: str, options: Iterable[str], version: tuple[int, ...], arch: str) -> str:
    """The name of a cubin in the cache. Comments do not count: they hold line numbers."""
    bare = re.sub(r"[ ]*//[^\n]*", "", text)
    return _key("cubin", bare, tuple(options), tuple(version), arch)


def _key(*parts: object) -> str:
    return hashlib.sha256(repr((*parts, __version__)).encode()).hexdigest()


# one cubin -----------------------------------------------------------------------------------------------------------


def cubin_path(key: str, kind: str = "cubins") -> Path:
    """Where the cubin with this key stands. kind: "cubins" or "symbols"."""
    return folder() / kind / f"{key}.cubin"


def read_cubin(key: str, kind: str = "cubins") -> tuple[dict, bytes] | None:
    """(entry, cubin), or None if the file is not there, not whole, not of this key, or perhaps another user's work."""
    try:
        with trust.open_kept(str(cubin_path(key, kind)), str(folder())) as file:
            data = file.read()
    except PermissionError as error:
        trust.warn_once("compiled kernels are not read from %s: %s", error.filename, error.strerror)
        return None
    except OSError:
        return None
    covered = data[_HEAD.size :]
    if len(covered) < 4 or data != _sealed(CUBIN_MAGIC, key, covered):
        return None
    (size,) = struct.unpack_from("<I", covered)
    return json.loads(covered[4 : 4 + size]), covered[4 + size :]


def write_cubin(key: str, entry: dict, cubin: bytes, kind: str = "cubins") -> None:
    """Put a cubin and its manifest entry into the cache, where that can be written."""
    head = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    try:
        _keep(cubin_path(key, kind), _sealed(CUBIN_MAGIC, key, struct.pack("<I", len(head)) + head + cubin))
    except OSError as error:
        trust.warn_once("compiled kernels are kept in memory only: %s: %s", error.filename or folder(), error.strerror)


def read_named(symbol: str, arch: str, sources: str) -> "Compiled | None":
    """The kernel that compile_cached() made of these sources (fingerprint()), if the cache has it."""
    name = read_cubin(_key("symbol", symbol, arch, sources), "symbols")
    found = read_cubin(name[0]["key"]) if name is not None else None
    if found is None:
        return None
    entry, cubin = found
    return nvrtc.Compiled(symbol, arch, cubin, text="", **entry)


def compile_cached(variant: "Variant", arch: str, force: bool = False, sources: str | None = None) -> "Compiled":
    """compile_variant() unless the cache has it. For Metal the "cubin" is the text itself: the system compiles it.
    sources: fingerprint(), for read_named() to find it."""
    text, entry = emit.emit_gpu(variant, arch)
    maker = archs.maker_of(arch)
    if maker == "metal":
        return nvrtc.Compiled(variant.symbol, arch, text.encode(), 0, 0, text, **entry)
    if maker == "hip":
        key = key_of(text, amd.OPTIONS, amd.version(amd.find_compiler(arch)), arch)
        compile_text = amd.compile_text
    else:
        key = key_of(text, nvrtc.OPTIONS, nvrtc.nvrtc().version, arch)
        compile_text = nvrtc.compile_text
    found = None if force else read_cubin(key)
    if found is None:
        compiled = compile_text(text, entry, variant.symbol, arch)
        write_cubin(key, compiled.manifest(), compiled.cubin)
    if sources is not None:
        write_cubin(_key("symbol", variant.symbol, arch, sources), {"key": key}, b"", "symbols")
    if found is None:
        return compiled
    stored, cubin = found
    return nvrtc.Compiled(variant.symbol, arch, cubin, stored["registers"], stored["spills"], text, **entry)


def compared(arch: str) -> dict[str, str]:
    """SHA-256 of each cubin whose results were compared with its NumPy reference on a GPU → what was wrong, "" for
    nothing."""
    found = read_cubin(_key("compared", arch), "compared")
    return found[0] if found is not None else {}


def remember(arch: str, found: Mapping[str, str]) -> None:
    """Add to what compared() gives."""
    write_cubin(_key("compared", arch), {**compared(arch), **found}, b"", "compared")


# packs ---------------------------------------------------------------------------------------------------------------


def pack_path(arch: str) -> Path:
    """Where the pack of this version's kernels stands."""
    return folder() / f"{arch}-{fingerprint()}.pack"


def pack_key(arch: str, sources: str | None = None) -> str:
    """What a pack for the architecture must have been made for. sources: fingerprint(), if the caller has it."""
    return _key("pack", arch, sources or fingerprint())


def write_pack(path: Path, arch: str, compiled: "Iterable[Compiled]") -> int:
    """Write a pack; returns its size in bytes. ConfigError where it cannot be written."""
    blobs: list[bytes] = []
    kernels: dict[str, dict] = {}
    offset = 0
    for one in sorted(compiled, key=lambda item: item.symbol):
        kernels[one.symbol] = {
            **one.manifest(),
            "image": one.symbol,
            "place": [offset, len(one.cubin), hashlib.sha256(one.cubin).hexdigest()],
        }
        padded = one.cubin + bytes(-len(one.cubin) % 64)
        blobs.append(padded)
        offset += len(padded)
    sources = fingerprint()
    head = json.dumps(
        {"arch": arch, "fingerprint": sources, "kernels": kernels}, separators=(",", ":"), sort_keys=True
    ).encode()
    head += b" " * (-(_HEAD.size + len(head)) % 64)
    data = b"".join([_sealed(PACK_MAGIC, pack_key(arch, sources), head), *blobs])
    try:
        if path.parent == folder():
            _keep(path, data)
        else:
            trust.write_whole(str(path), data, 0o644)
    except OSError as error:
        where = error.filename or path
        raise ConfigError(f"{where} cannot be written: {error.strerror}; set ZSE_HOME to a folder you own") from None
    return len(data)


class Pack:
    """An open pack: `manifest` by symbol, `image()` gives the bytes. CompileError for a file that is not whole or not
    made for `key` (pack_key(); default: any). PermissionError where others could have written it: a file below `root`
    is held to what is kept, another one to what is installed."""

    def __init__(self, path: Path, key: str | None = None, root: Path | None = None):
        self.path = path
        if root is None:
            trust.check_installed(str(path))
        with trust.open_kept(str(path), str(root)) if root is not None else open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < _HEAD.size:
                raise CompileError(f"{path}: not a pack of kernels; {BUILD_HINT}")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, made_for, size, digest = _HEAD.unpack_from(self._data)
        self._start = _HEAD.size + size
        head = self._data[_HEAD.size : self._start]
        if magic != PACK_MAGIC or len(head) != size or hashlib.sha256(head).digest() != digest:
            raise CompileError(f"{path}: damaged; {BUILD_HINT}")
        described = json.loads(head)
        self.arch: str = described["arch"]
        self.fingerprint: str = described["fingerprint"]
        self.manifest: dict[str, dict] = described["kernels"]
        if made_for.hex() != pack_key(self.arch, self.fingerprint) or key not in (None, made_for.hex()):
            raise CompileError(f"{path}: made for other kernels or another architecture; {BUILD_HINT}")

    def image(self, symbol: str) -> bytes:
        """A kernel's cubin. CompileError if it is damaged."""
        offset, size, digest = self.manifest[symbol]["place"]
        cubin = self._data[self._start + offset : self._start + offset + size]
        if hashlib.sha256(cubin).hexdigest() != digest:
            raise CompileError(f"{self.path}: damaged; {BUILD_HINT}")
        return cubin


class Kernels(Mapping):
    """Where a device finds its compiled kernels: symbol → manifest entry, {"params": [[name, type], ...], "threads",
    "cluster", "shared_bytes", "registers", "spills", "origin", "image"}; `image(entry["image"])` → cubin; calling it
    with a symbol gives both. What the pack lacks comes out of the cache, or is compiled when it is asked for.

    sources: fingerprint(), if the caller has it. ahead: gives symbols that are going to be asked for; without a pack
    the first one that the cache lacks has all of them compiled, by other processes side by side. comparing: while
    kernels are compared with NumPy, none is compiled, and one that was wrong is given; else it is refused."""

    comparing = False

    def __init__(
        self,
        arch: str,
        pack: Pack | None,
        variants: "Callable[[str], Mapping[str, Variant]]",
        sources: str | None = None,
    ):
        self.arch, self.pack, self._variants = arch, pack, variants
        self._sources = sources or fingerprint()
        self.ahead: Callable[[], Iterable[str]] | None = None
        self._compiled: dict[str, Compiled] = {}
        self.manifest: Mapping[str, dict] = self

    def _known(self) -> "Mapping[str, object]":
        return self.pack.manifest if self.pack else self._variants(self.arch)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known()))

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, symbol: object) -> bool:
        return (
            symbol in self._compiled
            or (self.pack is None and read_named(str(symbol), self.arch, self._sources) is not None)
            or symbol in self._known()
        )

    def __getitem__(self, symbol: str) -> dict:
        """KeyError for an unknown symbol. CompileError or ConfigError where the kernel must be compiled and cannot."""
        if self.pack is not None:
            return self.pack.manifest[symbol]
        known = self._compiled.get(symbol) or self._made(symbol)
        return {**known.manifest(), "image": symbol}

    def _made(self, symbol: str) -> "Compiled":
        """From the cache, else compiled."""
        compiled = read_named(symbol, self.arch, self._sources)
        if compiled is None and self.comparing:
            raise CompileError(f"{symbol} is not compiled")
        if compiled is None and self.ahead is not None:
            ahead, self.ahead = self.ahead, None
            self._make_ahead(ahead())
            compiled = read_named(symbol, self.arch, self._sources)
        if compiled is None:
            try:
                compiled = compile_cached(self._variants(self.arch)[symbol], self.arch, sources=self._sources)
            except ConfigError as error:
                raise ConfigError(
                    f"no kernels for {self.arch} are built: run `zse kernels build --arch {self.arch}` ({error})"
                ) from None
        self._compiled[symbol] = compiled
        return compiled

    def _make_ahead(self, symbols: Iterable[str]) -> None:
        """Into the cache, what it lacks of `symbols`, by `zse kernels build`. What cannot be compiled is told when it
        is asked for."""
        known = self._variants(self.arch)
        missing = [name for name in symbols if name in known and not read_named(name, self.arch, self._sources)]
        logging.getLogger("zse.kernels").warning(
            "compiling %d kernels for %s, once; `zse kernels build` compiles all", len(missing), self.arch
        )
        command = [sys.executable, "-m", "zse", "kernels", "build", "--arch", self.arch]
        command += [word for name in missing for word in ("--op", name)]
        nothing = subprocess.DEVNULL
        subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing)

    def image(self, symbol: str) -> bytes:
        """The cubin of an entry's "image". CompileError for one that computed wrong numbers on a GPU of this
        machine."""
        cubin = self._cubin(symbol)
        if not self.comparing and (reason := self._compared.get(self.digest(symbol))):
            raise CompileError(
                f"{symbol} is not loaded: it computed wrong numbers on this machine's GPU ({reason}). Build it with another NVRTC "
                "(`zse kernels build --force`), or compare it again (`zse kernels check`)"
            )
        return cubin

    @cached_property
    def _compared(self) -> dict[str, str]:
        found = compared(self.arch)
        if not found:
            log = logging.getLogger("zse.kernels")
            log.info(
                "the kernels for %s were not compared with NumPy here; `zse kernels check` does it, once", self.arch
            )
        return found

    def digest(self, symbol: str) -> str:
        """SHA-256 of a kernel's cubin."""
        if self.pack is not None and symbol not in self._compiled:
            return self.pack.manifest[symbol]["place"][2]
        return hashlib.sha256(self._cubin(symbol)).hexdigest()

    def _cubin(self, symbol: str) -> bytes:
        if self.pack is not None and symbol not in self._compiled:
            try:
                return self.pack.image(symbol)
            except CompileError:
                return self._made(symbol).cubin
        return (self._compiled.get(symbol) or self._made(symbol)).cubin

    def __call__(self, symbol: str) -> tuple[bytes, dict]:
        """(cubin, manifest entry). KeyError for an unknown symbol."""
        entry = self.manifest[symbol]
        return self.image(entry["image"]), entry


def package_variants(arch: str) -> "dict[str, Variant]":
    """Every GPU variant of this package, by symbol."""
    table = importlib.import_module(TABLE)
    return {variant.symbol: variant for variant in table.all_variants(emit.gpu_target(arch))}


def open_pack(arch: str) -> Kernels:
    """The kernels for an architecture: the pack of this version in ZSE_HOME/kernels or beside the native libraries;
    without one (or with a damaged one), kernels compiled one by one where NVRTC is there."""
    arch = resolve_arch(arch)
    sources = fingerprint()
    key, name = pack_key(arch, sources), f"{arch}-{sources}.pack"
    pack = None
    for place, root in ((folder(), folder()), (PACKAGE / "_native", None)):
        try:
            pack = Pack(place / name, key, root)
            break
        except PermissionError as error:
            trust.warn_once("compiled kernels are not read from %s: %s", error.filename, error.strerror)
        except (OSError, CompileError):
            continue
    return Kernels(arch, pack, package_variants, sources)


def build(
    arch: str,
    path: Path | None = None,
    names: Iterable[str] = (),
    *,
    jobs: int = 1,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> "tuple[Path | None, list[Compiled]]":
    """Compile the variants for an architecture, `jobs` at once, through the cache; then write the pack to `path`
    (default: its place).

    names: only variants of ops or symbols that start with one of them; then no pack is written unless `path` is given.
    Returns (the pack's file or None, what was compiled). force: do not read the cache."""
    arch = resolve_arch(arch)
    variants = package_variants(arch)
    wanted = tuple(names)
    symbols = [symbol for symbol in variants if not wanted or symbol.startswith(wanted)]
    if wanted and not symbols:
        raise ConfigError(f"no kernel's name starts with {' or '.join(wanted)}; `zse kernels list` shows them")
    compiled: list[Compiled] = []
    for one in _compile_all(arch, symbols, jobs, force, fingerprint()):
        compiled.append(one)
        say(f"{one.symbol}: {one.registers} registers, {one.spills} bytes spilled, {one.shared_bytes:,} bytes shared")
    if wanted and path is None:
        return None, compiled
    target = path or pack_path(arch)
    write_pack(target, arch, compiled)
    if target.parent == folder():
        for stale in target.parent.glob(f"{arch}-*.pack"):
            if stale != target:
                stale.unlink()
    return target, compiled


def _compile_all(arch: str, symbols: list[str], jobs: int, force: bool, sources: str) -> "Iterator[Compiled]":
    if jobs <= 1 or len(symbols) <= 2:
        yield from (_compile_one(arch, symbol, force, sources) for symbol in symbols)
        return
    import multiprocessing  # a start reads packs and compiles nothing: with the next line 9 ms
    from concurrent.futures import ProcessPoolExecutor

    # Spawned: NVRTC and a forked process that has threads do not go together.
    with ProcessPoolExecutor(min(jobs, len(symbols)), mp_context=multiprocessing.get_context("spawn")) as pool:
        count = len(symbols)
        yield from pool.map(_compile_one, [arch] * count, symbols, [force] * count, [sources] * count, chunksize=1)


_variants_here: dict[str, "dict[str, Variant]"] = {}


def _compile_one(arch: str, symbol: str, force: bool, sources: str) -> "Compiled":
    if arch not in _variants_here:
        _variants_here[arch] = package_variants(arch)
    return compile_cached(_variants_here[arch][symbol], arch, force, sources)
