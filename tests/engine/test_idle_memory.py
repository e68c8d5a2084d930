"""An engine that has been idle gives memory back: cached pages beyond a bound, and what pages that nobody has take."""

import re
import sys

import pytest
from tiny_engines import TinyEngines, prompt

from zse.engine.config import EngineConfig, settle
from zse.engine.idle_memory import IDLE_S
from zse.sampling.params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def engine_of(model):
    with TinyEngines(model, threads=1, max_rows=4) as engines:

        def make(**options):
            engine = engines(**options)
            engine.clock = Clock()
            return engine

        yield make


def reply(engine, ids):
    """(tokens, cached_tokens)"""
    engine.submit(1, ids, PARAMS)
    tokens, cached = [], 0
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            cached += output.cached_tokens
    return tokens, cached


def rest(engine, seconds=2 * IDLE_S):
    """Nothing comes for so long."""
    while engine.use_idle_time():
        pass
    engine.clock.now += seconds
    while engine.use_idle_time():
        assert engine.scheduler.check_integrity() == []


def resident_bytes(buffer):
    """Of the mapping that a buffer lies in."""
    with open("/proc/self/smaps", encoding="ascii") as file:
        blocks = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", file.read())
    total = 0
    for block in filter(None, blocks):
        first, last = (int(end, 16) for end in block.split(" ", 1)[0].split("-"))
        if first < buffer.address + buffer.nbytes and last > buffer.address:
            total += 1024 * int(re.search(r"(?m)^Rss: +(\d+)", block).group(1))
    return total


def test_an_idle_engine_keeps_only_the_warmest_pages(engine_of):
    engine = engine_of(num_pages=64, cache_idle_memory=1)
    page = engine.runner.kv.page_nbytes
    engine = engine_of(num_pages=64, cache_idle_memory=16 * page)
    first, last = prompt(100, 1), prompt(100, 2)
    told = reply(engine, first)[0], [reply(engine, prompt(100, seed)) for seed in range(3, 8)], reply(engine, last)[0]
    before = engine.counters()
    assert before["prefix_pages"] > 40 and before["idle_evicted_pages"] == 0
    rest(engine, IDLE_S / 2)
    assert engine.counters()["prefix_pages"] == before["prefix_pages"], "not yet"
    rest(engine)
    after = engine.counters()
    assert after["prefix_pages"] == 16 and after["idle_evicted_pages"] == before["prefix_pages"] - 16
    assert reply(engine, last) == (told[2], 99), "the warmest stayed, and are what they were"
    assert reply(engine, first) == (told[0], 0), "the coldest went, and are computed again"


# Resident memory by part is told by /proc alone; what the engine gives back it gives back everywhere.
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"kv_layout": "contiguous"}])
def test_memory_goes_back_to_the_system(engine_of, options):
    engine = engine_of(**{"num_pages": 2048, "cache_idle_memory": 0, "page_size": 128} | options)
    buffer = engine.runner.kv.buffer
    told = [reply(engine, prompt(230, seed))[0] for seed in range(12)]
    busy = resident_bytes(buffer)
    rest(engine)
    assert resident_bytes(buffer) < busy / 4
    assert [reply(engine, prompt(230, seed))[0] for seed in range(12)] == told


def test_pages_that_go_to_the_host_arrive_there(engine_of):
    engine = engine_of(num_pages=64, cache_idle_memory=0, cache_host_memory=64 << 20)
    ids = prompt(100, 1)
    told = reply(engine, ids)[0]
    rest(engine)
    assert engine.counters()["prefix_host_pages"] >= 6 and engine.scheduler.cache.allocator.num_empty == 64
    again, cached = reply(engine, ids)
    assert again == told and cached == 96


def test_pages_in_use_stay(engine_of):
    engine = engine_of(num_pages=64, cache_idle_memory=0)
    alone = reply(engine, prompt(100, 1))[0]
    rest(engine)
    engine.submit(1, prompt(100, 1), PARAMS)
    tokens = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.tokens]
        rest(engine)  # a server does not do this while there is work
    assert tokens == alone


def test_the_bound():
    mib = 1 << 20
    assert settle(EngineConfig(model="m"), "cpu", weight_bytes=98 * mib).cache_idle_memory == 256 * mib
    assert settle(EngineConfig(model="m"), "cpu", weight_bytes=1000 * mib).cache_idle_memory == 2000 * mib
    assert settle(EngineConfig(model="m", cache_idle_memory=5), "cpu", weight_bytes=mib).cache_idle_memory == 5
