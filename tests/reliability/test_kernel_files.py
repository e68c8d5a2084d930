"""Compiled kernels on disk: what is damaged, stale, of another place or perhaps of another user is compiled again, never loaded.

Files are mutated at random (ZSE_SEED); the compilers are stubs where the file is what is tested."""

import errno
import itertools
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zse import build, trust
from zse.errors import CompileError, ConfigError, DeviceError
from zse.kernel import cache, emit, nvrtc
from zse.runtime import native, on_demand
from zse.runtime.cpu import CPUDevice

SEED = int(os.environ.get("ZSE_SEED", "20261122"))
SYMBOLS = [f"kernel_{number}" for number in range(8)]
LEVEL = native.choose_level()
linux = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")


def compiled_of(text: str, entry: dict, symbol: str, arch: str) -> nvrtc.Compiled:
    """A stub's answer: its bytes say what they are for."""
    image = b"\x7fELF" + f"{symbol} {arch}".encode() + random.Random(symbol + arch).randbytes(500)
    return nvrtc.Compiled(symbol, arch, image, 32, 0, text, **entry)


class Variant:
    def __init__(self, symbol: str):
        self.symbol = symbol


@pytest.fixture
def compilers(monkeypatch):
    return stubs(monkeypatch)


def stubs(monkeypatch):
    """Stubs of NVRTC and of the printer. The symbols that were compiled, in order."""
    done: list[str] = []

    class Version:
        version = (13, 0)

    def compile_text(text, entry, symbol, arch):
        done.append(symbol)
        return compiled_of(text, entry, symbol, arch)

    entry = {"params": [["x", "ptr"]], "threads": 64, "shared_bytes": 0, "cluster": 1, "origin": "here"}
    monkeypatch.setattr(nvrtc, "nvrtc", Version)
    monkeypatch.setattr(nvrtc, "compile_text", compile_text)
    monkeypatch.setattr(emit, "emit_gpu", lambda variant, arch: (f"void {variant.symbol}();", dict(entry)))
    monkeypatch.setattr(cache, "package_variants", lambda arch: {symbol: Variant(symbol) for symbol in SYMBOLS})
    monkeypatch.setattr(cache, "_variants_here", {})
    monkeypatch.setattr(trust, "_warned", set())
    return done


@pytest.fixture
def home(tmp_path, monkeypatch, compilers) -> Path:
    monkeypatch.setenv("ZSE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def images(arch: str = "sm_80") -> dict[str, bytes]:
    """What a device would load."""
    kernels = cache.open_pack(arch)
    return {symbol: kernels(symbol)[0] for symbol in SYMBOLS}


def right(arch: str = "sm_80") -> dict[str, bytes]:
    empty = dict(params=[], threads=1, shared_bytes=0, cluster=1, origin="")
    return {symbol: compiled_of("", empty, symbol, arch).cubin for symbol in SYMBOLS}


def mutants(data: bytes, other: bytes, seed: int):
    """(what, bytes) without end: one bit, a cut, zeros, another file's bytes, bytes more."""
    chance = random.Random(seed)
    for number in itertools.count():
        at = chance.randrange(len(data))
        changed = bytearray(data)
        if number % 7 == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif number % 7 == 1:
            changed = changed[:at]
        elif number % 7 == 2:
            changed[at : at + 64] = bytes(len(changed[at : at + 64]))
        elif number % 7 == 3:
            changed = bytearray(chance.choice([b"", bytes(len(data)), other]))
        elif number % 7 == 4:
            changed[at:] = other[at:]
        elif number % 7 == 5:
            changed += chance.randbytes(8)
        else:
            changed[at] = chance.randrange(256)
        yield f"seed {seed}, mutant {number} at {at}", bytes(changed)


# GPU kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_mutants_of_cubins_and_packs_are_compiled_again(home, compilers, share):
    """1,300 of them, or a share. Whatever stands on the disk, a device gets the right bytes."""
    build_all = cache.build("sm_80")
    pack, expected = build_all[0], right()
    assert images() == expected and not (compilers.clear() or images() != expected or compilers)
    data, other = pack.read_bytes(), b"".join(expected.values()) * 4
    for what, changed in itertools.islice(mutants(data, other, SEED), 300 // share):
        pack.write_bytes(changed)
        assert images() == expected, what
        del compilers[:]
    pack.unlink()
    cubins = sorted((home / "kernels" / "cubins").iterdir())
    whole = {path: path.read_bytes() for path in cubins}
    for number, path in zip(range(700 // share), itertools.cycle(cubins)):
        swapped = whole[cubins[(number + 3) % len(cubins)]]
        what, changed = next(mutants(whole[path], swapped, SEED + number))
        if number % 2:
            what, changed = f"swapped {number}", swapped
        path.write_bytes(changed)
        assert images() == expected, what
        assert len(compilers) == (changed != whole[path]) and path.read_bytes() == whole[path], what
        del compilers[:]
    symbols = sorted((home / "kernels" / "symbols").iterdir())
    whole = {path: path.read_bytes() for path in symbols}
    assert len(symbols) == len(SYMBOLS)
    for number, path in zip(range(300 // share), itertools.cycle(symbols)):
        swapped = whole[symbols[(number + 3) % len(symbols)]]
        what, changed = next(mutants(whole[path], swapped, SEED + number))
        path.write_bytes(swapped if number % 2 else changed)
        assert images() == expected and not compilers and path.read_bytes() == whole[path], what


def test_a_pack_of_another_architecture_version_or_source_is_not_read(home, compilers, monkeypatch):
    """Under the name of the one that is looked for: names can be changed."""
    path, _ = cache.build("sm_90a")
    path.rename(cache.pack_path("sm_80"))
    assert cache.open_pack("sm_80").pack is None
    path, _ = cache.build("sm_80")
    assert cache.open_pack("sm_80").pack is not None
    with monkeypatch.context() as patch:
        patch.setattr(cache, "__version__", "99")
        assert cache.open_pack("sm_80").pack is None
    monkeypatch.setattr(cache, "fingerprint", lambda: "0123456789abcdef")
    path.rename(cache.pack_path("sm_80"))
    assert cache.open_pack("sm_80").pack is None


def test_a_cubin_does_not_answer_for_another_name(home, compilers):
    """Nor for another architecture, another compiler or another version of zse."""
    first, second = (cache.compile_cached(Variant(symbol), "sm_80") for symbol in SYMBOLS[:2])
    keys = [cache.key_of(each.text, nvrtc.OPTIONS, (13, 0), "sm_80") for each in (first, second)]
    shutil.copy(cache.cubin_path(keys[0]), cache.cubin_path(keys[1]))
    assert cache.read_cubin(keys[1]) is None and cache.read_cubin(keys[0])[1] == first.cubin
    assert cache.compile_cached(Variant(SYMBOLS[1]), "sm_80").cubin == second.cubin
    assert len({*keys, cache.key_of(first.text, nvrtc.OPTIONS, (13, 1), "sm_80")}) == 3


def make_foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("giving a file away takes root")
    os.chown(path, 65534, 65534, follow_symlinks=False)


def make_link(path: Path) -> None:
    away = path.with_name(path.name + ".away")
    path.rename(away)
    path.symlink_to(away)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


SPOILERS = {
    "group": lambda path: path.chmod(path.stat().st_mode | 0o020),
    "everybody": lambda path: path.chmod(path.stat().st_mode | 0o002),
    "foreign": make_foreign,
    "link": make_link,
    "fifo": make_fifo,
}


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("place", ["cubin", "cubins", "kernels"])
def test_a_cubin_that_others_could_have_written_is_not_read(home, compilers, place, spoiler, caplog):
    cache.compile_cached(Variant("kernel_0"), "sm_80")
    (file,) = (home / "kernels" / "cubins").iterdir()
    path = {"cubin": file, "cubins": file.parent, "kernels": file.parent.parent}[place]
    if spoiler == "fifo" and place != "cubin":
        pytest.skip("a folder is no FIFO")
    SPOILERS[spoiler](path)
    del compilers[:]
    with caplog.at_level(logging.WARNING, "zse"):
        found = cache.compile_cached(Variant("kernel_0"), "sm_80")
    assert found.cubin == right()["kernel_0"] and compilers == ["kernel_0"]
    assert "not read from" in caplog.text


@pytest.mark.parametrize("spoiler", ["group", "everybody", "foreign", "link"])
def test_a_pack_that_others_could_have_written_is_not_read(home, compilers, spoiler):
    path, _ = cache.build("sm_80")
    SPOILERS[spoiler](path)
    assert cache.open_pack("sm_80").pack is None and images() == right()


def test_a_pack_in_the_installation(home, compilers, tmp_path, monkeypatch):
    """Read where root installed it for everybody, not where everybody may write."""
    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    folder = tmp_path / "_native"
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(cache, "fingerprint", lambda: "0123456789abcdef")
    path, _ = cache.build("sm_80", folder / cache.pack_path("sm_80").name)
    path.chmod(0o444)
    folder.chmod(0o555)
    real = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: real if real else 1000)
        assert cache.open_pack("sm_80").pack is not None
    folder.chmod(0o777)
    assert cache.open_pack("sm_80").pack is None
    folder.chmod(0o755), path.chmod(0o666)
    assert cache.open_pack("sm_80").pack is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_costs_one_warning(home, compilers, monkeypatch, caplog, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(trust, "write_whole", refuse)
    with caplog.at_level(logging.WARNING, "zse"):
        assert images() == right()
    assert [record.message for record in caplog.records] == [
        f"compiled kernels are kept in memory only: {home}/kernels: {os.strerror(code)}"
    ]
    assert len(compilers) == 8 and not [path for path in home.rglob("*") if path.is_file()]


def test_a_pack_that_cannot_be_written_is_one_line(home, compilers):
    cache.compile_cached(Variant("kernel_0"), "sm_80")
    make_link(home / "kernels")
    with pytest.raises(ConfigError, match="kernels cannot be written: is a link .*set ZSE_HOME to a folder you own"):
        cache.build("sm_80")


def test_a_write_that_is_cut_short_leaves_nothing(home, compilers, monkeypatch):
    """The file is flushed to the disk before it gets its name."""
    order = []
    monkeypatch.setattr(os, "fsync", lambda handle: order.append("fsync"))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: order.append("rename") or replace(*names))
    cache.compile_cached(Variant("kernel_0"), "sm_80")
    assert order == ["fsync", "rename"]

    def cut(*_):
        raise OSError(errno.EIO, "cut")

    monkeypatch.setattr(os, "fsync", cut)
    cache.compile_cached(Variant("kernel_1"), "sm_80")
    assert len(list((home / "kernels" / "cubins").iterdir())) == 1


def test_what_was_not_used_for_longest_makes_room(home, compilers, monkeypatch):
    for symbol in SYMBOLS:
        cache.compile_cached(Variant(symbol), "sm_80")
    files = sorted((home / "kernels" / "cubins").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for age, path in enumerate(reversed(files)):
        os.utime(path, (0, time.time() - 1000 * (age + 1)))
    with trust.open_kept(str(files[0]), str(home / "kernels")):  # used: now the youngest
        pass
    left_over = files[0].with_name("killed.tmp")
    left_over.write_bytes(b"x")
    os.utime(left_over, (0, 0))
    monkeypatch.setattr(cache, "MOST_BYTES", 3 * files[0].stat().st_size + 10)
    monkeypatch.setattr(cache, "_written", 0)
    new, _ = cache.build("sm_90a", names=["kernel_0"])
    left = set((home / "kernels" / "cubins").iterdir())
    assert len(left) == 3 and {files[0], files[-1]} <= left


RACE = """
import os, sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
import pytest
import test_kernel_files as here
from zse.kernel import cache
patch = pytest.MonkeyPatch()
here.stubs(patch)
for number in range({rounds}):
    home = Path({home!r}, str(number))
    home.mkdir(parents=True, exist_ok=True)
    os.environ["ZSE_HOME"] = str(home)
    (home / f"ready-{{os.getpid()}}").touch()
    while len(list(home.glob("ready-*"))) < 8:
        time.sleep(0.001)
    for symbol in here.SYMBOLS:
        assert cache.compile_cached(here.Variant(symbol), "sm_80", sources="").cubin == here.right()[symbol]
assert here.images() == here.right()
"""


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_eight_processes_fill_the_cache_at_once(home, rounds):
    """Eight kernels each, so many times: no error, one file for each kernel, nothing half-written."""
    script = RACE.format(here=str(Path(__file__).parent), home=str(home), rounds=rounds)
    racers = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(8)]
    assert [racer.communicate(timeout=300)[1] for racer in racers] == [b""] * 8
    for number in range(rounds):
        kept = home / str(number) / "kernels"
        assert not list(kept.rglob("*.tmp"))
        assert len(list((kept / "cubins").iterdir())) == 8
        assert len(list((kept / "symbols").iterdir())) == (16 if number == rounds - 1 else 8)


# kernels of a CPU, compiled on demand ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_parts(tmp_path_factory) -> Path:
    """A native folder with one kernel as the part for a first model, and another one as its own part."""
    folder = tmp_path_factory.mktemp("native")
    native.runtime()
    for name, part in (("rope_table", native.FIRST), ("gather_rows", "gather_rows")):
        build.Builder(folder, 1, quiet=True).kernel_library(LEVEL, [name], part)
    return folder


@pytest.fixture
def native_folder(two_parts, tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "native"
    shutil.copytree(two_parts, folder)
    monkeypatch.setenv("ZSE_NATIVE_DIR", str(folder))
    monkeypatch.setenv("ZSE_ISA", LEVEL)
    monkeypatch.setattr(trust, "_warned", set())
    return folder


def test_mutants_of_parts_are_not_loaded(native_folder, two_parts):
    """300 of the library, its manifest and the manifest's hash, and every file of one part as another's."""
    names = sorted(path.name for path in (native_folder / "objects" / LEVEL).glob("gather_rows.[sj]*"))
    assert names == ["gather_rows.json", "gather_rows.json.sha256", "gather_rows.so"]
    good = on_demand._part(str(two_parts), LEVEL, "gather_rows")[0]
    assert list(good["kernels"]) == ["gather_rows"]
    folder = native_folder / "objects" / LEVEL
    for name in names:
        path, other = folder / name, (folder / name.replace("gather_rows", native.FIRST)).read_bytes()
        data = path.read_bytes()
        for what, changed in itertools.islice(mutants(data, other, SEED), 100):
            path.write_bytes(changed)
            found = on_demand._part(str(native_folder), LEVEL, "gather_rows")[0]
            assert found == ({} if changed != data else good), f"{name}: {what}"
        path.write_bytes(data)
    for name in names:
        shutil.copy(folder / name.replace("gather_rows", native.FIRST), folder / name)
    assert on_demand._part(str(native_folder), LEVEL, "gather_rows")[0] == {}


@pytest.mark.parametrize("name", ["gather_rows.so", "gather_rows.json", f"{native.FIRST}.so", f"{native.FIRST}.json"])
def test_a_damaged_part_is_compiled_again(native_folder, name):
    path = native_folder / "objects" / LEVEL / name
    path.write_bytes(b"\0" * path.stat().st_size)
    with CPUDevice(threads=1) as device:
        assert device.program("rope_table").address and device.program("gather_rows").address
    symbol = "gather_rows" if name.startswith("gather") else "rope_table"
    part = on_demand._part(str(native_folder), LEVEL, symbol)[0]
    assert list(part["kernels"]) == [symbol]


def test_a_damaged_object_is_compiled_again(native_folder):
    """What is linked into a library is held to its hash like the library."""
    folder = native_folder / "objects" / LEVEL
    (thing,) = folder.glob("gather_rows_0-*.o")
    data = bytearray(thing.read_bytes())
    data[len(data) // 2] ^= 1
    thing.write_bytes(data)
    (folder / "gather_rows.so").write_bytes(b"")
    before = native.kernel_files(str(native_folder), LEVEL, "gather_rows")
    build.Builder(native_folder, 1, quiet=True).kernel_library(LEVEL, ["gather_rows"], "gather_rows")
    assert trust.is_whole(str(thing)) and on_demand._part(str(native_folder), LEVEL, "gather_rows")[1] == before[0]
    assert json.loads(Path(before[1]).read_text())["library"] == trust.sum_of(before[0])


@linux
def test_a_disk_that_takes_no_kernel_of_a_cpu_costs_one_warning(native_folder, caplog):
    """They are compiled into memory, for the one process."""
    folder = native_folder / "objects" / LEVEL
    for symbol in ("scale_logits", "argmax_rows", "gather_rows"):
        (folder / f"{symbol}.lock").unlink(missing_ok=True)
        (folder / f"{symbol}.lock").mkdir()
    shutil.rmtree(folder / "gather_rows.json", ignore_errors=True)
    (folder / "gather_rows.json").unlink()
    with caplog.at_level(logging.WARNING, "zse"), CPUDevice(threads=1) as device:
        assert device.program("gather_rows").address and device.program("scale_logits").address
        memory = Path(device._manifest._memory.name)
        assert memory.parent == Path(on_demand.MEMORY) and list(memory.rglob("*.so"))
    assert len(caplog.records) == 1 and "compiled into memory" in caplog.text
    device._manifest._memory.cleanup()
    assert not (folder / "gather_rows.json").exists()


def test_eight_processes_ask_for_the_same_kernels_of_a_cpu(native_folder):
    from zse.kernel.targets.cpu import ISAS
    from zse.kernels import table

    shutil.copy(Path(native.__file__).parents[1] / "_native" / "libzse_runtime.so", native_folder)
    symbols = sorted(variant.symbol for variant in table.all_variants(ISAS[LEVEL]))[:3]
    script = (
        "import sys; from zse.runtime.cpu import CPUDevice\nwith CPUDevice(threads=1) as device:\n"
        "    for symbol in sys.argv[1:]: assert device.program(symbol).address"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", script, *symbols[at % 3 :], *symbols[: at % 3]], stderr=subprocess.PIPE)
        for at in range(8)
    ]
    assert [racer.communicate()[1] for racer in racers] == [b""] * 8
    assert all(on_demand._part(str(native_folder), LEVEL, symbol)[0] for symbol in symbols)


# libraries of the installation ----------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path) -> Path:
    folder = tmp_path / "installed"
    folder.mkdir(mode=0o755)
    for name in ("libzse_runtime.so", "libzse_tokenizer.so", "libzse_formats.so"):
        shutil.copy(Path(native.native_dir()) / name, folder / name)
    return folder


@pytest.mark.parametrize("spoiler", ["everybody", "foreign"])
@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_library_that_others_could_have_written_is_not_loaded(installed, place, spoiler):
    library = installed / "libzse_runtime.so"
    native.open_library(str(library))
    SPOILERS[spoiler](installed if place == "folder" else library)
    with pytest.raises(DeviceError, match="is not loaded"):
        native.open_library(str(library))
    with pytest.raises(PermissionError):
        trust.installed_library(str(library))


def test_every_library_is_opened_by_one_function():
    """No other place of the package calls dlopen for a library of ours."""
    source = Path(trust.__file__).parent
    callers = [
        path
        for path in source.rglob("*.py")
        if re.search(r"ctypes\.CDLL\((?!None\b)", path.read_text(encoding="utf-8"))
    ]
    names = {str(path.relative_to(source)) for path in callers}
    system = ("kernel/nvrtc", "runtime/bindings/driver", "runtime/bindings/objc")
    assert names - {f"{name}.py" for name in system} == {"trust.py"}  # those open drivers and the GPU's compiler


def test_an_installation_of_root_s_serves_everybody(installed, monkeypatch):
    for path in (installed / "libzse_runtime.so", installed):
        path.chmod(0o555)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if real == 0 else real)
    assert native.open_library(str(installed / "libzse_runtime.so"))


def test_a_library_may_be_as_writable_as_the_package(installed, monkeypatch):
    """Umask 002, or a disk that knows no modes: who can write the Python beside needs no library."""
    package = installed / "package"
    package.mkdir()
    package.chmod(0o777)
    monkeypatch.setattr(trust, "PACKAGE", str(package))
    (installed / "libzse_runtime.so").chmod(0o777)
    assert native.open_library(str(installed / "libzse_runtime.so"))
    package.chmod(0o755)
    with pytest.raises(DeviceError, match="chmod go-w"):
        native.open_library(str(installed / "libzse_runtime.so"))


# the emulator ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("harm", ["flip", "everybody", "link", "foreign"])
def test_the_emulator_loads_what_it_compiled(home, harm, monkeypatch):
    emulator = pytest.importorskip("zse_emulator.compiling")
    emulator.compiled([], "", "header", "-O0")  # reads emulate.h, for this process
    made = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **named: made.append(1) or run(*args, **named))
    text = 'extern "C" int zse_kernel = 1;'
    library = emulator.compiled([], text, "probe", "-O0")
    assert emulator.compiled([], text, "probe", "-O0") == library and len(made) == 1
    if harm == "flip":
        data = bytearray(library.read_bytes())
        data[len(data) // 2] ^= 1
        library.write_bytes(data)
    else:
        SPOILERS[harm](library)
    assert emulator.compiled([], text, "probe", "-O0") == library and len(made) == 2
    library.parent.chmod(0o777)
    assert emulator.compiled([], text, "probe", "-O0") == library and len(made) == 3
    if harm == "link":
        make_link(library.parent)
        with pytest.raises(CompileError, match="ZSE_HOME"):
            emulator.compiled([], text, "probe", "-O0")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("harm", ["flip", "everybody"])
def test_a_header_that_was_read_before_is_whole(home, harm, monkeypatch):
    """Another process compiles with it, and makes it anew where it is not what was written."""
    emulator = pytest.importorskip("zse_emulator.compiling")
    text = '#include "emulate.h"\nextern "C" int zse_kernel = {};'
    emulator.compiled([], text.format(1), "probe", "-O0")
    (header,) = (home / "kernels" / "emulate").glob("header-*/emulate.h.gch")
    made = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **named: made.append(command[-1]) or run(command, **named))
    for number, compiled in ((2, ["-"]), (3, [str(emulator.CSRC / "emulate.h"), "-"])):
        monkeypatch.setattr(emulator, "_headers", {})
        if number == 3 and harm == "flip":
            header.write_bytes(header.read_bytes()[:-1] + b"?")
        elif number == 3:
            SPOILERS[harm](header)
        emulator.compiled([], text.format(number), "probe", "-O0")
        assert made == compiled
        made.clear()
