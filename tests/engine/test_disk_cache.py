"""Pages that left the device come back, from host slots and from files, also in the next engine; bad files do no harm."""

import errno
import os
import random
import threading
import time

import pytest
from tiny_engines import prompt

from zse.cache import segments
from zse.cache.files import PageFiles, key_of, remove_session, state_key
from zse.cache.layout import PageMover
from zse.cache.prefix import MAX_COMPARED
from zse.engine.client import STOP_S
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.engine.offload import CLOSE_S, DiskTier
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
    assert reply(second, ids, "me") == (expected, 96)  # its last page was not full: it is in no file
    totals = second.counters()
    assert totals["prefix_disk_read_pages"] == 6 and totals["prefix_disk_pages"] > 6
    # Another element type is another cache.
    assert reply(loaded_of(**options, kv_dtype="f32").engine, ids, "me")[1] == 0


def test_damaged_and_foreign_files_are_removed(loaded_of, tmp_path):
    options = dict(cache_disk=str(tmp_path / "kv"))
    ids, other = prompt(70, 4), prompt(70, 14)
    first = loaded_of(**options)
    expected, _ = reply(first.engine, ids)
    close(first)
    (path,) = tmp_path.rglob("*.kv")
    whole, folder = path.read_bytes(), path.parent
    first = loaded_of(**options)
    reply(first.engine, other)
    close(first)
    (foreign,) = set(tmp_path.rglob("*.kv")) - {path}
    strange = foreign.read_bytes()
    rng = random.Random(4)
    for number in range(12):
        data, kind = bytearray(whole), number % 4
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = data[: rng.randrange(1, len(data))]
        elif kind == 2:
            data = bytearray(strange)
        else:
            data += b"x"
        for old in folder.glob("*.kv"):
            old.unlink()
        path.write_bytes(data)
        (folder / "stray.txt").write_text("x")
        (folder / f".{'0' * 32}.kv.tmp").write_text("half")
        later = loaded_of(**options)
        assert not (folder / "stray.txt").exists() and not list(folder.glob("*.tmp"))
        said, cached = reply(later.engine, ids)
        assert said == expected and cached in (0, 16, 32, 48, 64, *[69] * (kind == 3))  # all that there is, and more
        assert later.engine.counters()["prefix_disk_damaged_files"] == 1
        while later.engine.use_idle_time():
            pass
        close(later)
        again = loaded_of(**options)  # what was damaged is gone, and was written again
        assert reply(again.engine, ids) == (expected, 69)
        assert again.engine.counters()["prefix_disk_damaged_files"] == 0
        close(again)


def test_a_prompt_that_is_read_does_not_hold_up_others(loaded_of, tmp_path, monkeypatch):
    options = dict(cache_disk=str(tmp_path / "kv"))
    ids = prompt(100, 6)
    first = loaded_of(**options)
    expected, _ = reply(first.engine, ids)
    close(first)
    for fill in (True, False):  # into pages, and by slots of the host
        monkeypatch.setattr(PageMover, "can_fill_pages", fill)
        loaded = loaded_of(**options)
        engine = loaded.engine
        gate, real = threading.Event(), PageFiles.read
        monkeypatch.setattr(PageFiles, "read", lambda self, wanted, gate=gate: gate.wait(30) and real(self, wanted))
        for id in (1, 2, 3):  # one that reads, one that waits for the same, one whose client leaves
            engine.submit(id, ids, PARAMS, RequestOptions())
        engine.submit(4, prompt(40, 70 + fill), PARAMS, RequestOptions())
        told = {id: [] for id in range(1, 5)}

        def step(engine=engine, told=told):
            for output in engine.step():
                told[output.id] += output.tokens
            assert engine.scheduler.check_integrity() == []

        while len(told[4]) < 12:
            step()
        assert told[1] == told[2] == [] and engine.num_computed(1) == 0
        assert engine.cancel(3)
        gate.set()
        while engine.has_work:
            step()
        assert told[1] == told[2] == expected and told[3] == []
        counters = engine.counters()
        assert (counters["prefix_disk_hits"], counters["prefix_disk_hit_tokens"]) == (1, 96)
        assert counters["cancelled"] == 1
        monkeypatch.undo()
        close(loaded)


def test_a_session_has_a_file_and_loses_what_it_has_alone(loaded_of, tmp_path):
    options = dict(cache_disk=str(tmp_path / "kv"))
    loaded = loaded_of(**options)
    engine, common = loaded.engine, prompt(64, 8)
    asked = {name: common + prompt(40, 8 + number) for number, name in enumerate(("aa" * 16, "bb" * 16))}

    def ask(engine, name):
        engine.submit(1, asked[name], PARAMS, RequestOptions(session=name, session_ttl=100.0))
        told, cached = [], 0
        while engine.has_work:
            for output in engine.step():
                told, cached = told + output.tokens, cached + output.cached_tokens
        while engine.use_idle_time():
            pass
        return told, cached

    expected = {name: ask(engine, name)[0] for name in asked}
    close(loaded)
    assert {path.stem for path in tmp_path.rglob("*.kv")} == set(asked)
    loaded = loaded_of(**options)
    engine = loaded.engine
    assert engine.counters()["session_files"] == 2
    assert ask(engine, "bb" * 16) == (expected["bb" * 16], 103)
    pages = engine.counters()["prefix_disk_pages"]
    engine.drop_session("aa" * 16)  # what both begin with stays
    while engine.feature("disk")._writer.pending or engine.use_idle_time():
        pass
    close(loaded)
    loaded = loaded_of(**options)
    counters = loaded.engine.counters()
    assert counters["session_files"] == 1 and counters["prefix_disk_pages"] == pages - 3
    assert ask(loaded.engine, "bb" * 16) == (expected["bb" * 16], 103)
    assert reply(loaded.engine, asked["aa" * 16])[1] == 64
    close(loaded)


def ask_session(engine, ids, name="cc" * 16):
    """(tokens, cached_tokens) of a reply within a session."""
    engine.submit(1, ids, PARAMS, RequestOptions(session=name, session_ttl=100.0))
    told, cached = [], 0
    while engine.has_work:
        for output in engine.step():
            told, cached = told + output.tokens, cached + output.cached_tokens
        assert engine.scheduler.check_integrity() == []
    return told, cached


@pytest.mark.parametrize("fill_pages", (True, False))  # into pages, or slots of the host
def test_a_session_goes_on_behind_its_last_token_of_a_page(loaded_of, tmp_path, monkeypatch, fill_pages):
    if not fill_pages:
        monkeypatch.setattr(PageMover, "can_fill_pages", False)
    options = dict(cache_disk=str(tmp_path / "kv"))
    loaded, ids = loaded_of(**options), prompt(90, 21)
    told, _ = ask_session(loaded.engine, ids)
    assert reply(loaded.engine, prompt(90, 22))[1] == 0  # of no session: its last page is not kept
    close(loaded)
    loaded = loaded_of(**options)
    whole = [*ids, *told]  # 102 tokens, of the last of which there is no key yet
    longer = [*whole, *prompt(30, 23)]
    again, cached = ask_session(loaded.engine, longer)
    assert cached == 101 and loaded.engine.counters()["prefix_disk_hit_tokens"] == 101
    assert again == reply(loaded_of(prefix_cache=False).engine, longer)[0]
    assert reply(loaded.engine, [*prompt(90, 22), 5, 6])[1] == 90  # the reply filled the page
    close(loaded)
    loaded = loaded_of(**options)  # what was written then stands behind another page
    assert ask_session(loaded.engine, [*longer, *again, 7, 8, 9])[1] == len(longer) + len(again) - 1
    other = [*whole[:85], *prompt(20, 24)]  # goes another way within the page
    assert ask_session(loaded.engine, other, "dd" * 16)[1] == 85
    close(loaded)


@pytest.mark.parametrize("fill_pages", (True, False))
def test_a_prompt_that_leaves_a_page_in_files_within_it(loaded_of, tmp_path, monkeypatch, fill_pages):
    """As a chat does, whose text is tokenized again: replies end otherwise than they were sampled, and reasoning is left out."""
    monkeypatch.setattr(PageMover, "can_fill_pages", fill_pages)
    # Beside pages that are in memory a page is read for eight tokens or more only.
    monkeypatch.setattr(DiskTier, "read_ahead", lambda self: None)
    options, plain = dict(cache_disk=str(tmp_path / "kv")), loaded_of(prefix_cache=False).engine
    loaded, ids = loaded_of(**options), prompt(90, 21)
    told, _ = ask_session(loaded.engine, ids)  # pages up to 96, and 5 tokens of the next
    forked = [*ids, *told[:8], *prompt(5, 26)]
    ask_session(loaded.engine, forked, "ee" * 16)  # behind the same page: another end, in another session
    close(loaded)
    for start in (98, 100, 93, 5 * 16):  # within an end, longer within it, within a full page, at its end
        loaded = loaded_of(**options)
        longer = [*ids, *told][:start] + prompt(30, 27)
        assert ask_session(loaded.engine, longer, "ff" * 16) == (reply(plain, longer)[0], start)
        assert loaded.engine.counters()["prefix_disk_hit_tokens"] == start
        close(loaded)
        (tmp_path.glob(f"kv/*/{'ff' * 16}.kv").__next__()).unlink()
    loaded = loaded_of(**options)
    assert reply(loaded.engine, longer, "other") == (reply(plain, longer)[0], 0)
    assert reply(loaded.engine, [*forked[:100], 7])[1] == 100  # of two ends that which has more
    begins = [*ids[:7], *prompt(20, 28)]  # fewer than are worth a wait
    assert reply(loaded_of(**options).engine, begins)[1] == 0
    close(loaded)


def test_what_only_begins_alike_goes_with_its_session(loaded_of, tmp_path):
    options = dict(cache_disk=str(tmp_path / "kv"))
    loaded, ids = loaded_of(**options), prompt(90, 21)
    ask_session(loaded.engine, ids, "aa" * 16)
    close(loaded)
    loaded = loaded_of(**options)
    engine = loaded.engine
    assert ask_session(engine, [*ids, *prompt(9, 22)], "bb" * 16)[1] == 90  # the page has 6 tokens of the other's reply
    shared = [node for node in engine.scheduler.cache.prefix.nodes() if node.depth == 6]
    assert sorted(node.session for node in shared) == ["aa" * 16, "bb" * 16]
    engine.cancel(1)
    engine.drop_session("aa" * 16)
    assert [node.session for node in engine.scheduler.cache.prefix.nodes() if node.depth == 6] == ["bb" * 16]
    assert ask_session(engine, [*ids, *prompt(9, 22), 5], "bb" * 16)[1] == 99


def test_pages_are_found_by_their_beginnings(tmp_path):
    files = PageFiles(tmp_path / "kv", b"f" * 16, 1 << 20)
    rng, root = random.Random(5), files.root(("a",))
    full = rng.randbytes(64)
    parent = key_of(root, full)
    files.write(parent, root, bytes(100), tokens=full)
    ends = [full[:count] + rng.randbytes(12) for count in (8, 24, 16)]
    for tail in ends:
        files.write(state_key(parent, tail), parent, bytes(100), tokens=tail)
    files.write(key_of(parent, full), parent, bytes(100), tokens=full)

    def check(files):
        assert files.nearest_behind(root, full[:40] + bytes(24)) == (parent, full, 10)
        assert files.nearest_behind(parent, ends[1]) == (state_key(parent, ends[1]), ends[1], 9)
        assert files.nearest_behind(parent, ends[0][:12] + bytes(52))[1:] == (ends[0], 3)
        assert files.nearest_behind(parent, full) == (key_of(parent, full), full, 16)
        assert files.nearest_behind(parent, bytes([full[0] ^ 1]) + full[1:])[2] == 0
        assert files.nearest_behind(files.root(("b",)), full)[2] == 0 == files.nearest_behind(parent, b"")[2]

    check(files)
    files.close()
    check(again := PageFiles(tmp_path / "kv", b"f" * 16, 1 << 20))
    again.close()
    (path,) = tmp_path.rglob("*.kv")  # one bit of the tokens of the last record: it is none
    whole = path.read_bytes()
    at = whole.rindex(full)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    again = PageFiles(tmp_path / "kv", b"f" * 16, 1 << 20)
    assert (len(again), again.num_damaged) == (4, 1)
    assert again.nearest_behind(parent, full)[1:] == (ends[1], 6)
    for number in range(MAX_COMPARED):  # the newest are looked at
        tail = full[:4] + bytes([number]) * 8
        again.write(state_key(parent, tail), parent, b"", tokens=tail)
    assert again.nearest_behind(parent, full)[2] == 1
    again.close()


def test_what_sessions_go_on_from_is_written_first(loaded_of, tmp_path):
    engine = loaded_of(cache_disk=str(tmp_path / "kv")).engine
    common = prompt(64, 31)
    reply(engine, prompt(100, 32))
    reply(engine, [*common, *prompt(40, 33)])
    ask_session(engine, [*common, *prompt(40, 34)])
    reply(engine, prompt(100, 35))
    disk = engine.feature("disk")
    kept = disk._kept()
    sessions = [bool(node.session) for node in kept]
    assert len(kept) > 20 and sum(sessions) == 3 and not any(sessions[7:])
    assert [node.depth for node in kept[:7]] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(node.tokens) for node in disk._kept(ends=True) if node not in kept] == [12]  # bytes of 3 tokens


def test_a_writer_that_is_behind_is_waited_for(loaded_of, tmp_path, monkeypatch):
    """Idle time goes on until all is written: the engine does not sleep meanwhile."""
    monkeypatch.setattr("zse.engine.offload.MAX_PENDING_BYTES", 4000)  # less than a page
    engine = loaded_of(cache_disk=str(tmp_path / "kv")).engine
    reply(engine, prompt(100, 41))
    while engine.use_idle_time():
        pass
    disk = engine.feature("disk")
    assert all(node.is_filed for node in disk._kept())
    while disk.pending_bytes:
        time.sleep(0.001)
    assert engine.counters()["prefix_disk_written_pages"] == len(disk._kept()) > 5


def test_a_page_that_cannot_wait_is_not_copied_either(loaded_of, tmp_path, monkeypatch):
    """What goes to the host is copied for the writer within a step: not where it would be dropped."""
    engine = loaded_of(num_pages=16, cache_host_memory=64 << 20, cache_disk=str(tmp_path / "kv")).engine
    read, disk, copied = PageMover.read_slot, engine.feature("disk"), []
    monkeypatch.setattr(PageMover, "read_slot", lambda mover, slot: copied.append(slot) or read(mover, slot))
    disk._writer.pending_bytes += 1 << 40
    fill(engine, 1)
    assert engine.scheduler.snapshot()["prefix_host_pages"] > 20 and not copied
    disk._writer.pending_bytes -= 1 << 40
    fill(engine, 2)
    assert copied


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
    root, found = files.root(("a",)), bytearray(1000)
    keys = [key_of(root, bytes([number]) * 64) for number in range(8)]
    for number, key in enumerate(keys):
        files.write(key, root, bytes([number]) * 1000)
        assert files.read([(keys[0], (memoryview(found),))]) == 1 and found == bytes(1000)
        files.used(keys[0])  # it stays
    assert (
        len(files) == 4 and files.counters()["prefix_disk_bytes"] <= 5000 and keys[0] in files and keys[1] not in files
    )
    beside = PageFiles(tmp_path / "kv", b"f" * 16, 5000)  # an engine of the same model, at the same time
    assert len(beside) == 0
    beside.close()
    files.close()
    again = PageFiles(tmp_path / "kv", b"f" * 16, 2500)
    assert len(again) == 2 and again.root(("a",)) == root != again.root(("a", ""))
    again.close()


def test_no_session_goes_for_one_that_was_used_before_it(tmp_path):
    """At a stop what each session has in memory is written, in any order."""
    files = PageFiles(tmp_path / "kv", b"f" * 16, 5000)
    names = [bytes([number] * 16).hex() for number in range(5)]
    keys = [key_of(files.root(("a",)), name.encode()) for name in names]
    for number in (0, 1, 2, 3):
        files.write(keys[number], files.root(("a",)), bytes(1000), names[number], 100.0 + number)
    ends = [key_of(key, b"end") for key in keys]
    for number in (2, 1):  # the latter would take the place of the next
        files.write(ends[number], keys[number], bytes(1000), names[number], 100.0 + number)
    assert keys[0] not in files and ends[2] in files and keys[3] in files and ends[1] not in files
    files.write(ends[3], keys[3], bytes(1000), names[3], 103.0)
    assert keys[1] not in files and all(key in files for key in (keys[2], ends[2], keys[3], ends[3]))
    files.close()


def test_sessions_end_and_make_room(tmp_path):
    files = PageFiles(tmp_path / "kv", b"f" * 16, 12_000)
    names = [bytes([number] * 16).hex() for number in range(1, 4)]
    common = key_of(files.root(("a",)), bytes(64))
    files.write(common, files.root(("a",)), bytes(1000), names[0], 100.0)
    chains = []
    for name in names:
        chains.append([common])
        for number in range(3):
            key = key_of(chains[-1][-1], name.encode() + bytes([number]))
            files.write(key, chains[-1][-1], bytes(1000), name, 100.0)
            chains[-1].append(key)
    # The first had to go, but for what the others go on from.
    assert common in files and chains[0][1] in files and len(files) == 10
    other, root = key_of(files.root(("b",)), bytes(64)), files.root(("b",))
    files.write(other, root, bytes(1000))  # no session goes for a page of nobody
    assert other not in files and len(files) == 10
    files.write(other, root, bytes(1000), names[2], 100.0)
    assert (
        other in files and common in files and not any(key in files for key in chains[0][1:]) and chains[1][1] in files
    )
    files.tidy(99.0)
    assert files.counters()["session_files"] == 2
    remove_session(tmp_path / "kv", names[1])  # an engine has the folder
    assert chains[1][1] in files and len(list(tmp_path.rglob(f"{names[1]}.kv"))) == 1
    files.tidy(101.0)
    assert files.counters()["session_files"] == 0 and not list(tmp_path.rglob(f"{names[1]}.kv"))
    files.close()
    remove_session(tmp_path / "kv", names[0])
    assert not list(tmp_path.rglob(f"{names[0]}.kv"))


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


def test_a_disk_that_is_full_between_two_records(tmp_path, monkeypatch):
    """A session's first page brings two: what says when it ends, then the page. The file has what the index says."""
    files, write = PageFiles(tmp_path / "kv", b"f" * 16, 5000), segments.write
    root = files.root(b"")

    def full(descriptor, head, content, offset):
        if content:
            raise OSError(errno.ENOSPC, "full")
        write(descriptor, head, content, offset)

    monkeypatch.setattr(segments, "write", full)
    with pytest.raises(OSError, match="full"):
        files.write(key_of(root, b"page"), root, bytes(100), "0" * 32, time.time() + 1000)
    monkeypatch.setattr(segments, "write", write)
    files.write(key_of(root, b"page"), root, bytes(100), "0" * 32, time.time() + 1000)
    files.close()
    again = PageFiles(tmp_path / "kv", b"f" * 16, 5000)
    assert (len(again), again.num_damaged) == (1, 0)
    again.close()


def test_a_server_waits_for_what_is_written_at_the_end():
    """It kills an engine that does not end: not before that has had its time to write."""
    assert STOP_S > CLOSE_S
