"""Pages that left the device come back, from host slots and from files, also in the next engine; bad files do no harm."""

import os
import random

import pytest
from tiny_engines import prompt

from zse.cache.files import PageFiles, key_of
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import ConfigError
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions


@pytest.fixture
def loaded_of(model):
    made = []

    def make(**options):
        config = EngineConfig(
            **dict(model=str(model), threads=1, activations="f32", device="cpu", max_rows=4) | options
        )
        made.append(load_engine(config, Phases(lambda: 0.0)))
        return made[-1]

    yield make
    for loaded in made:
        close(loaded)


def close(loaded):
    if loaded.engine is not None:
        loaded.engine.close()
        loaded.source.close()
        loaded.engine = None


PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def reply(engine, ids, tenant=""):
    """(tokens, cached_tokens)"""
    engine.submit(1, ids, PARAMS, RequestOptions(tenant=tenant))
    tokens, cached = [], 0
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            cached += output.cached_tokens
        assert engine.scheduler.check_integrity() == []
    return tokens, cached


def fill(engine, seed, count=6):
    """Other prompts, so many that all pages are used."""
    for number in range(count):
        reply(engine, prompt(120, 1000 * seed + number))


def test_what_was_evicted_to_the_host_comes_back(loaded_of):
    engine = loaded_of(num_pages=16, cache_host_memory=64 << 20).engine
    ids = prompt(100, 1)
    first, _ = reply(engine, ids)
    fill(engine, 1)
    assert engine.scheduler.snapshot()["prefix_host_pages"] > 20
    again, cached = reply(engine, ids)
    assert (again, cached) == (first, 96)  # the last page was not full: it was dropped
    assert engine.scheduler.snapshot()["prefix_onloaded_pages"] == 6
    longer = [*ids[:50], *prompt(30, 2)]
    fill(engine, 2)
    said, cached = reply(engine, longer)
    assert cached == 50  # 48 tokens in pages, two of a page that is filled from the host
    assert said == reply(loaded_of(prefix_cache=False).engine, longer)[0]


def test_the_next_engine_finds_the_files(loaded_of, tmp_path):
    options = dict(num_pages=16, cache_disk=str(tmp_path / "kv"))
    first = loaded_of(**options)
    ids = prompt(100, 3)
    expected, _ = reply(first.engine, ids, "me")
    while first.engine.use_idle_time():
        pass
    fill(first.engine, 3)
    close(first)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))
    second = loaded_of(**options).engine
    assert reply(second, ids, "other") == (expected, 0)
    assert reply(second, ids, "me") == (expected, 96)
    totals = second.counters()
    assert totals["prefix_disk_read_pages"] == 6 and totals["prefix_disk_pages"] > 6
    # Another element type is another cache.
    assert reply(loaded_of(**options, kv_dtype="f32").engine, ids, "me")[1] == 0


def test_damaged_and_foreign_files_are_removed(loaded_of, tmp_path):
    options = dict(cache_disk=str(tmp_path / "kv"))
    first = loaded_of(**options)
    ids = prompt(70, 4)
    expected, _ = reply(first.engine, ids)
    close(first)
    rng, files = random.Random(4), sorted(tmp_path.rglob("*.kv"))
    assert len(files) == 5
    pages = [path.read_bytes() for path in files]
    folder = files[0].parent
    for number in range(12):
        for path, page in zip(files, pages, strict=True):
            path.write_bytes(page)
        bad, kind = rng.choice(files), number % 4
        data = bytearray(bad.read_bytes())
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = data[: rng.randrange(len(data))]
        elif kind == 2:
            data = bytearray(rng.choice([page for page in pages if page != bytes(data)]))
        else:
            data += b"x"
        bad.write_bytes(data)
        (folder / "stray.txt").write_text("x")
        (folder / f".{'0' * 40}.kv.77.tmp").write_text("half")
        later = loaded_of(**options)
        assert not (folder / "stray.txt").exists() and not list(folder.glob("*.tmp"))
        said, cached = reply(later.engine, ids)
        assert said == expected and cached in (0, 16, 32, 48, 64)
        damaged = later.engine.counters()["prefix_disk_damaged_files"]
        assert damaged <= 1 and (damaged == 1) == (cached < 64)
        close(later)


def test_a_folder_that_others_may_enter_is_refused(loaded_of, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="may be entered by others"):
        loaded_of(cache_disk=str(tmp_path))
    os.symlink(tmp_path / "kv", tmp_path / "link")
    with pytest.raises(ConfigError, match="--cache-disk"):
        loaded_of(cache_disk=str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="switched off"):
        loaded_of(cache_disk=str(tmp_path), prefix_cache=False)


def test_files_stay_within_their_size(tmp_path):
    files = PageFiles(tmp_path / "kv", b"f" * 16, 5000)
    keys = [key_of(files.root(("a",)), bytes([number]) * 64) for number in range(8)]
    for number, key in enumerate(keys):
        files.write(key, bytes([number]) * 64, bytes(1000))
        assert files.read(keys[0], bytes(64), 1000) is not None  # used: it stays
    assert len(files) == 4 and files.num_bytes <= 5000 and keys[0] in files and keys[1] not in files
    again = PageFiles(tmp_path / "kv", b"f" * 16, 2500)
    assert len(again) == 2 and keys[7] in again
    assert again.root(("a",)) == files.root(("a",)) != again.root(("a", ""))
    assert again.read(keys[7], bytes(64), 1000) is None and keys[7] not in again  # other tokens than were asked for


def test_a_full_disk_ends_writing_and_nothing_else(loaded_of, tmp_path, monkeypatch, caplog):
    loaded = loaded_of(cache_disk=str(tmp_path / "kv"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PageFiles, "write", full)
    expected, _ = reply(loaded.engine, prompt(70, 5))
    while loaded.engine.use_idle_time():
        pass
    close(loaded)
    assert "no longer writes to disk" in caplog.text and not list(tmp_path.rglob("*.kv"))
