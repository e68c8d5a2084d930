"""A process that dies, or a disk that fails, at every point of what ZSE writes: what was acknowledged stays, the rest is whole or not
there, and the same command succeeds afterwards (faults.py)."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import mutate as files
import pytest
from faults import attempt, each_point
from formats_build import small_gguf

from zse import build, trust
from zse.cache.files import PageFiles, key_of
from zse.errors import FormatError, ZSEError
from zse.formats import converted, hub_client, huggingface, store
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.kernel import cache, nvrtc
from zse.kernel.targets.cpu import ISAS
from zse.kernels import table
from zse.runtime import native, on_demand
from zse.server import auth

OLD, NEW = b"the model as it was " * 50, b"the model as it is now " * 60
TOKENS, CONTENT = bytes(64), b"k" * 256
ALLOWED = (ZSEError, OSError)


class Work(NamedTuple):
    """prepare(folder): what is there and acknowledged before. run(folder): what is killed. check(folder, acknowledged)."""

    prepare: Callable[[Path], object]
    run: Callable[[Path], object]
    check: Callable[[Path, bool], None]


def pull(content: bytes) -> None:
    with store.PartialFolder("a-model") as partial:
        path = os.path.join(partial.path, "model.gguf")
        with open(path, "wb") as file:
            file.write(content)
        record = {"name": "model.gguf", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        partial.commit([record], source="here", licence=None, revision=None)


def stored() -> bytes | None:
    """The content of the stored model, which is whole; None where there is none."""
    found = store.describe("a-model")
    if found is None:
        return None
    content = Path(store.locate("a-model")).read_bytes()
    (record,) = found["files"]
    assert record["size"] == len(content) and record["sha256"] == hashlib.sha256(content).hexdigest(), "half a model"
    return content


def new_model(folder: Path, acknowledged: bool) -> None:
    assert stored() in ((NEW,) if acknowledged else (NEW, None))


def replaced_model(folder: Path, acknowledged: bool) -> None:
    assert stored() in ((NEW,) if acknowledged else (NEW, OLD)), "a model that was there is gone"


def removed_model(folder: Path, acknowledged: bool) -> None:
    assert stored() in ((None,) if acknowledged else (None, OLD))


def remove() -> None:
    if store.describe("a-model") is not None:
        store.remove("a-model")


def seeded(folder: Path) -> None:
    (folder / "a.gguf").write_bytes(bytes(small_gguf()))


def overwritten(folder: Path) -> None:
    seeded(folder)
    convert(folder / "a.gguf", folder / "a.zse")


def zse_is_whole(path: Path) -> None:
    with open_model(path) as source:
        files.independent_check(source, path.stat().st_size)


def converted_file(folder: Path, acknowledged: bool) -> None:
    path = folder / "a.zse"
    assert path.exists() or not acknowledged
    if path.exists():
        zse_is_whole(path)


def overwritten_file(folder: Path, acknowledged: bool) -> None:
    zse_is_whole(folder / "a.zse")


def kept_copy(folder: Path, acknowledged: bool) -> None:
    found = converted.find(str(folder / "a.gguf"), None, "cpu")
    assert found is not None or not acknowledged
    if found is not None:
        zse_is_whole(Path(found))


def page_files(folder: Path) -> PageFiles:
    (folder / "pages").mkdir(mode=0o700, exist_ok=True)
    return PageFiles(folder / "pages", b"fingerprint-of-it", 1 << 20)


def write_page(folder: Path) -> None:
    pages = page_files(folder)
    root = pages.root(("a", ""))
    pages.write(key_of(root, TOKENS), root, CONTENT, "ab" * 16, 4e9)


def page_is_whole(folder: Path, acknowledged: bool) -> None:
    if acknowledged:
        pages = page_files(folder)
        content = bytearray(len(CONTENT))
        pages.read([(key_of(pages.root(("a", "")), TOKENS), (memoryview(content),))])
        assert content == CONTENT, "a page that was written is not there"


def secret(folder: Path, acknowledged: bool) -> None:
    if acknowledged:
        assert len(auth.kept_secret(str(folder / "kept"))) == auth.SECRET_BYTES


def same_secret(folder: Path) -> None:
    found = auth.kept_secret(str(folder / "kept"))
    note = folder / "told"
    if note.exists():
        assert note.read_bytes() == found, "another secret than was used"


HUB = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": bytes(range(256)) * 12}
BLOCK = 1000  # bytes that come at once


class FileAnswer:
    """As the hub's answer for a file from byte `start` on, in blocks."""

    status, is_page = 206, False

    def __init__(self, name: str, start: int):
        self._data = HUB[name][start:]

    def blocks(self):
        for at in range(0, len(self._data), BLOCK):
            yield self._data[at : at + BLOCK]


def hub_model(repo: str, revision: str | None) -> dict:
    siblings = [
        {"rfilename": name, "size": len(data), "lfs": {"sha256": hashlib.sha256(data).hexdigest()}}
        for name, data in HUB.items()
    ]
    return {"siblings": siblings, "sha": "c0ffee" * 6 + "abcd"}


def pull_from_hub(folder: Path) -> None:
    """Each block is in the file before the next one is asked for, so that a death leaves some of them."""
    with store.PartialFolder("hf:org/name") as partial:
        huggingface.pull("hf:org/name", partial, lambda *told: None, lambda line: None)


def model_of_the_hub(folder: Path, acknowledged: bool) -> None:
    found = store.describe("hf:org/name")
    assert found is not None or not acknowledged
    if found is not None:
        place = Path(store.locate("hf:org/name"))
        assert {name: (place / name).read_bytes() for name in HUB} == HUB, "half a model"
    for partial in Path(store.models_dir(), ".partial").glob("*/*.download"):
        name = partial.name.partition(".json." if "config" in partial.name else ".safetensors.")[0]
        whole = next(data for known, data in HUB.items() if known.startswith(name))
        assert whole.startswith(partial.read_bytes()), "what is resumed is no beginning of the file"


CUBIN_KEY, CUBIN_ENTRY, CUBIN = "ab" * 32, {"params": [["x", "ptr"]], "threads": 64}, b"\x7fELF" + bytes(range(200))
LEVEL = native.choose_level()
PART = min(variant.symbol for variant in table.all_variants(ISAS[LEVEL]))


def keep_cubin(folder: Path) -> None:
    """A disk that fails is told as a warning: the kernel stays in memory."""
    cache.write_cubin(CUBIN_KEY, CUBIN_ENTRY, CUBIN)


def cubin_is_whole(folder: Path, acknowledged: bool) -> None:
    assert cache.read_cubin(CUBIN_KEY) in (None, (CUBIN_ENTRY, CUBIN)), "half a kernel"


def keep_pack(folder: Path) -> None:
    entry = {"params": [["x", "ptr"]], "threads": 64, "shared_bytes": 0}
    compiled = [nvrtc.Compiled(name, "sm_90a", CUBIN + name.encode(), 32, 0, "", **entry) for name in "abc"]
    cache.write_pack(cache.folder() / "sm_90a.pack", "sm_90a", compiled)


def pack_is_whole(folder: Path, acknowledged: bool) -> None:
    path = cache.folder() / "sm_90a.pack"
    assert path.exists() or not acknowledged
    if path.exists():
        pack = cache.Pack(path, None, cache.folder())
        assert [pack.image(name) for name in "abc"] == [CUBIN + name.encode() for name in "abc"]


def run_compiler(command, **options):
    """In the place of subprocess.run: what a compiler writes, by this process. What such a file computes is not compared."""
    if command[0] == sys.executable:
        return subprocess.CompletedProcess(command, 0, "", "")
    with open(command[command.index("-o") + 1], "wb") as file:
        file.write(b"\x7fELF")
        file.write(repr([word for word in command if not word.startswith("/")]).encode())
    return subprocess.CompletedProcess(command, 0, "", "")


def keep_part(folder: Path) -> None:
    builder = build.Builder(folder / "native", jobs=1, quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run_compiler)
        builder.kernel_library(LEVEL, (PART,), PART)


def part_is_whole(folder: Path, acknowledged: bool) -> None:
    built, library = on_demand._part(str(folder / "native"), LEVEL, PART)
    assert built or not acknowledged
    if built:
        assert Path(library).read_bytes().startswith(b"\x7fELF") and trust.sum_of(library) == built["library"]


WORKS = {
    "pull": Work(lambda folder: None, lambda folder: pull(NEW), new_model),
    "pull over": Work(lambda folder: pull(OLD), lambda folder: pull(NEW), replaced_model),
    "rm": Work(lambda folder: pull(OLD), lambda folder: remove(), removed_model),
    "convert": Work(seeded, lambda folder: convert(folder / "a.gguf", folder / "a.zse"), converted_file),
    "convert over": Work(overwritten, lambda folder: convert(folder / "a.gguf", folder / "a.zse"), overwritten_file),
    "keep converted": Work(
        seeded,
        lambda folder: converted.write(str(folder / "a.gguf"), None, "cpu", lambda path, out: convert(path, out)),
        kept_copy,
    ),
    "page": Work(lambda folder: None, write_page, page_is_whole),
    "secret": Work(lambda folder: None, same_secret, secret),
    "pull from a hub": Work(lambda folder: None, pull_from_hub, model_of_the_hub),
    "cubin": Work(lambda folder: None, keep_cubin, cubin_is_whole),
    "pack": Work(lambda folder: None, keep_pack, pack_is_whole),
    "part on demand": Work(lambda folder: None, keep_part, part_is_whole),
}


LONG = pytest.mark.exhaustive
SLOW = ("keep converted", "convert over", "part on demand", "pull from a hub")
RUNS = [
    pytest.param(name, ("die",), id=f"{name}-die", marks=[LONG] * (name in SLOW and name != SLOW[1])) for name in WORKS
]
RUNS += [pytest.param(name, (errno.ENOSPC,), id=f"{name}-full", marks=[LONG] * (name in SLOW)) for name in WORKS]
RUNS += [
    pytest.param(name, ("kill", errno.EIO, errno.EACCES, errno.EMFILE), id=f"{name}-broken", marks=LONG)
    for name in WORKS
]


def every_write_point(name: str, hows: tuple[str | int, ...], tmp_path: Path) -> int:
    """How many runs each_point() made of the work of this name."""
    work, numbers = WORKS[name], iter(range(1 << 30))
    real_pid = os.getpid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: real_pid)  # as in a container, where each start has the same
        patch.setattr(hub_client, "model", hub_model)
        patch.setattr(hub_client, "file", lambda repo, commit, name, start: nullcontext(FileAnswer(name, start)))

        def prepare() -> Path:
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            patch.setenv("ZSE_HOME", str(folder / "home"))
            work.prepare(folder)
            return folder

        return each_point(prepare, work.run, work.check, hows, ALLOWED)


@pytest.fixture(scope="module")
def small_process():
    """Runs calls in a process of its own: a fork of one that has run tests for a while copies the tables of a gigabyte, 50 ms a time."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda *call: pool.submit(*call).result()


@pytest.mark.each()
@pytest.mark.parametrize(("name", "hows"), RUNS)
def test_every_write_point(name, hows, tmp_path, small_process):
    runs = small_process(every_write_point, name, hows, tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)
    assert runs >= 4


def test_a_torn_write_is_found(tmp_path):
    """The points see what they should: a file written in place is caught in the middle."""
    path = tmp_path / "file"

    def in_place(folder: Path) -> None:
        with open(path, "wb") as file:
            file.write(NEW)

    def whole(folder: Path, acknowledged: bool) -> None:
        assert path.read_bytes() in (OLD, NEW), "half a file"

    def prepare() -> Path:
        path.write_bytes(OLD)
        return tmp_path

    with pytest.raises(AssertionError, match="half a file"):
        each_point(prepare, in_place, whole, ("die",), ALLOWED)


def test_a_bug_is_no_error_of_the_disk():
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        attempt(lambda: 1 // 0)
    assert attempt(lambda: (_ for _ in ()).throw(FormatError("a", 0, "b", "c")), allowed=ALLOWED).error
