"""After a start the session that was used last comes into memory, before anybody asks for it: nobody else finds it,
it gives way to everything else, and what is not sound of it is not used."""

import threading
import time

import pytest
from tiny_engines import TinyEngines, prompt

from zse.cache.files import PageFiles, key_of, state_key
from zse.engine.idle_memory import IDLE_S
from zse.engine.offload import DiskTier
from zse.engine.read_ahead import UNCLAIMED
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LAST, EARLIER = "cc" * 16, "aa" * 16
IDS, TURN = prompt(90, 21), prompt(9, 22)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def engine_of(model, tmp_path):
    """Engines over one folder, one after the other."""
    with TinyEngines(model, threads=1, max_rows=4) as engines:

        def make(**options):
            engine = engines(**{"cache_disk": str(tmp_path / "kv"), "num_pages": 64} | options)
            engine.clock = Clock()
            return engine

        yield make


@pytest.fixture
def talk(engine_of):
    """(the last session's tokens so far, what comes behind TURN): two sessions of tenant "me" are in files. Of the last are six full pages
    and five tokens."""
    engine = engine_of()
    ask(engine, prompt(70, 31), EARLIER)
    told = ask(engine, IDS, LAST)[0]
    engine.close()
    return [*IDS, *told], ask(engine_of(cache_disk=None), [*IDS, *told, *TURN])[0]


def ask(engine, ids, session="", tenant="me", id=1):
    """(tokens, cached_tokens)"""
    engine.submit(id, ids, PARAMS, RequestOptions(session=session, session_ttl=100.0, tenant=tenant))
    return finish(engine)[id]


def finish(engine):
    """(tokens, cached_tokens) by request."""
    found = {}
    while engine.has_work:
        for output in engine.step():
            tokens, cached = found.get(output.id, ([], 0))
            found[output.id] = tokens + output.tokens, cached + output.cached_tokens
        assert engine.scheduler.check_integrity() == []
    return found


def rest(engine, num_read=0):
    """Idle time until so many pages have been read, at least, and nothing is left to do."""
    deadline = time.monotonic() + 30
    while engine.use_idle_time() or engine.counters()["prefix_disk_read_pages"] < num_read:
        assert time.monotonic() < deadline
        assert engine.scheduler.check_integrity() == []


@pytest.fixture
def no_files(monkeypatch):
    """From its call on nothing can be read."""
    return lambda: monkeypatch.setattr(PageFiles, "read", lambda self, wanted: 0)


def test_the_last_session_is_in_memory_before_it_is_asked_for(engine_of, talk, no_files):
    whole, expected = talk
    engine = engine_of()
    rest(engine, num_read=7)
    no_files()
    longer = [*whole, *TURN]
    assert ask(engine, longer, tenant="other") == (expected, 0), "nobody else finds it"
    assert engine.counters()["prefix_disk_hits"] == 0
    assert ask(engine, longer, LAST) == (expected, len(whole) - 1)
    counters = engine.counters()
    assert counters["prefix_disk_hits"] == 1 and counters["prefix_disk_hit_tokens"] == len(whole) - 1
    assert counters["prefix_disk_read_pages"] == 7
    assert UNCLAIMED not in engine.scheduler.cache.prefix.roots, "it is the tenant's like anything of his"
    owners = {account.name for account in engine.scheduler.cache.prefix._owner_of if account is not None}
    assert owners == {"me", "other"}


@pytest.mark.parametrize("start", (93, 40, 3))
def test_who_goes_another_way_has_what_is_common(engine_of, talk, no_files, start):
    whole, _ = talk
    ids = [*whole[:start], *prompt(20, 23)]
    expected = ask(engine_of(cache_disk=None), ids)[0]
    engine = engine_of()
    rest(engine, num_read=7)
    no_files()
    assert ask(engine, ids, "dd" * 16) == (expected, start)
    assert engine.counters()["prefix_disk_hit_tokens"] == start
    engine.drop_session(LAST)  # what it has alone goes
    depths = [node.depth for node in engine.scheduler.cache.prefix.nodes() if node.session != "dd" * 16]
    assert max(depths, default=0) == start // 16


def test_nothing_is_read_ahead_while_a_request_runs(engine_of, talk, monkeypatch):
    real, reads = PageFiles.read, []
    monkeypatch.setattr(DiskTier, "read_ahead", lambda self: None)
    engine = engine_of()
    monkeypatch.setattr(PageFiles, "read", lambda self, wanted: reads.append(wanted) or real(self, wanted))
    engine.submit(1, prompt(40, 24), PARAMS, RequestOptions(tenant="other"))
    engine.step()
    disk = engine.feature("disk")
    disk._reader.pause(True)  # as the step would have, had there been something
    disk._ahead.begin()
    engine.step()
    time.sleep(0.1)
    assert engine.scheduler.requests and reads == []
    finish(engine)
    rest(engine, num_read=7)
    assert len(reads) == 1


def test_a_request_that_needs_its_pages_has_them(engine_of, talk, monkeypatch):
    """Nothing is read while requests run or wait: one that waits for pages would do so for good."""
    wanted = prompt(150, 29)
    expected = ask(engine_of(cache_disk=None), wanted)
    monkeypatch.setattr(DiskTier, "read_ahead", lambda self: None)
    engine = engine_of(num_pages=16)
    engine.submit(1, wanted, PARAMS, RequestOptions(tenant="other"))
    disk = engine.feature("disk")
    disk._reader.pause(True)
    disk._ahead.begin()
    assert engine.scheduler.cache.allocator.num_free == 9, "it needs 11"
    deadline, found = time.monotonic() + 30, ([], 0)
    while engine.has_work:
        assert time.monotonic() < deadline
        for output in engine.step():
            found = found[0] + output.tokens, found[1] + output.cached_tokens
    assert found == expected and engine.scheduler.cache.allocator.num_free == 16
    whole, expected = talk
    assert ask(engine, [*whole, *TURN], LAST) == (expected, len(whole) - 1), "it is read when it is asked for"


def test_a_request_waits_for_what_is_on_its_way(engine_of, talk, monkeypatch):
    whole, expected = talk
    alone = ask(engine_of(cache_disk=None), prompt(40, 24))
    gate, real = threading.Event(), PageFiles.read
    monkeypatch.setattr(PageFiles, "read", lambda self, wanted: gate.wait(60) and real(self, wanted))
    engine = engine_of()
    rest(engine)
    for tenant in ("other", "me"):
        assert ask(engine, prompt(40, 24), tenant=tenant) == alone, "others run meanwhile"
    engine.submit(1, [*whole, *TURN], PARAMS, RequestOptions(session=LAST, session_ttl=100.0, tenant="me"))
    for _ in range(3):
        assert engine.step() == [] and engine.has_work
    gate.set()
    assert finish(engine)[1] == (expected, len(whole) - 1)
    counters = engine.counters()
    assert counters["prefix_disk_hits"] == 1 and counters["prefix_disk_read_pages"] == 7


def test_it_goes_first_when_others_need_pages(engine_of, talk):
    engine = engine_of(num_pages=16)  # half of them are read ahead at most
    rest(engine, num_read=7)
    mine = prompt(60, 25)
    told = ask(engine, mine, tenant="other")[0]
    for seed in range(26, 29):
        ask(engine, prompt(60, seed), tenant="third")
    unclaimed = engine.scheduler.cache.prefix.roots.get(UNCLAIMED)
    assert unclaimed is None or not unclaimed.resident, "on the host, perhaps"
    assert ask(engine, mine, tenant="other") == (told, 59)
    whole, expected = talk
    assert ask(engine, [*whole, *TURN], LAST) == (expected, len(whole) - 1), "it is read again"


def test_more_than_half_of_the_pages_is_not_read_ahead(engine_of, talk):
    whole, expected = talk
    engine = engine_of(num_pages=10)
    rest(engine, num_read=5)
    assert ask(engine, [*whole, *TURN], LAST) == (expected, len(whole) - 1)
    assert engine.counters()["prefix_disk_read_pages"] == 7


def test_it_goes_back_when_nobody_comes(engine_of, talk):
    whole, expected = talk
    page = engine_of(cache_disk=None).runner.kv.page_nbytes
    engine = engine_of(cache_idle_memory=3 * page)
    rest(engine, num_read=7)
    assert engine.counters()["prefix_pages"] == 7
    engine.clock.now += 2 * IDLE_S
    rest(engine)
    assert engine.counters()["prefix_pages"] - engine.counters()["prefix_host_pages"] == 3
    assert ask(engine, [*whole, *TURN], LAST) == (expected, len(whole) - 1), "the rest is read"


def test_what_is_damaged_is_not_used(engine_of, talk, tmp_path):
    whole, expected = talk
    (path,) = tmp_path.rglob(f"{LAST}.kv")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16  # within the fourth page
    path.write_bytes(data)
    engine = engine_of()
    rest(engine, num_read=3)
    assert engine.counters()["prefix_disk_damaged_files"] == 1
    assert ask(engine, [*whole, *TURN], LAST) == (expected, 48)


@pytest.mark.parametrize("when", ("before it is read", "behind"))
def test_a_session_that_is_removed(engine_of, talk, monkeypatch, when):
    whole, expected = talk
    gate, real = threading.Event(), PageFiles.read
    monkeypatch.setattr(PageFiles, "read", lambda self, wanted: gate.wait(60) and real(self, wanted))
    engine = engine_of()
    if when == "behind":
        gate.set()
        rest(engine, num_read=7)
        engine.drop_session(LAST)
    else:
        rest(engine)
        engine.drop_session(LAST)
        gate.set()
    disk = engine.feature("disk")
    deadline = time.monotonic() + 30
    while disk._writer.pending or disk._ahead._held is not None:
        engine.use_idle_time()
        assert time.monotonic() < deadline
    assert engine.counters()["prefix_pages"] == 0 and engine.scheduler.cache.allocator.num_free == 64
    assert ask(engine, [*whole, *TURN], "ee" * 16) == (expected, 0)


def test_what_is_of_no_session_is_not_read_ahead(engine_of, monkeypatch):
    engine = engine_of()
    ask(engine, IDS)
    engine.close()
    monkeypatch.setattr(PageFiles, "read", lambda self, wanted: pytest.fail("something is read"))
    engine = engine_of()
    rest(engine)
    assert engine.counters()["prefix_disk_pages"] == 6 and engine.scheduler.cache.allocator.num_empty == 64


def test_an_engine_that_ends_while_it_reads(engine_of, talk, monkeypatch):
    whole, expected = talk
    entered, real = threading.Event(), PageFiles.read

    def slow(self, wanted):
        entered.set()
        time.sleep(0.05)
        return real(self, wanted)

    monkeypatch.setattr(PageFiles, "read", slow)
    engine = engine_of()
    rest(engine)
    assert entered.wait(60)
    engine.close()
    monkeypatch.undo()
    assert ask(engine_of(), [*whole, *TURN], LAST) == (expected, len(whole) - 1)


def test_the_session_that_was_used_last(tmp_path):
    files = PageFiles(tmp_path / "kv", b"f" * 16, 1 << 20)
    assert files.last_session() == (b"", [])
    root = files.root(("a",))
    first, second, tail = (bytes([number]) * 64 for number in range(3))
    keys = [key_of(root, first), key_of(key_of(root, first), second)]
    ends = time.time() + 100
    files.write(keys[0], root, b"1", EARLIER, ends, first)
    files.write(keys[1], keys[0], b"2", LAST, ends + 1, second)  # goes on behind the other's page
    files.write(end := state_key(keys[1], tail[:20]), keys[1], b"3", LAST, ends, tail[:20])
    files.write(key_of(root, tail), root, b"4", tokens=tail)  # of no session
    whole = root, [(keys[0], first), (keys[1], second), (end, tail[:20])]
    assert files.last_session() == whole
    files.extend(EARLIER, ends + 100)
    assert files.last_session() == (root, whole[1][:1])
    files.drop_session(EARLIER)  # what the other goes on behind stays
    assert files.last_session() == whole
    files.close()
