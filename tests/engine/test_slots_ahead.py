"""Memory for host slots is had ahead where a device locks it: so much and no more, and without it everything works as before."""

import time
from types import SimpleNamespace

import pytest
from test_disk_cache import close, fill, reply
from tiny_engines import prompt

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import DeviceError
from zse.runtime import probe
from zse.runtime.cpu import CPUDevice

NOTHING = {"total": 1 << 40, "available": 1 << 30, "limit": None}


class Locking:
    """A CPU that locks memory for copies. num_locked: chunks for which it can; fails: for the next there is no memory."""

    def __init__(self, monkeypatch):
        self.num_locked, self.fails, self.taken = 1 << 30, False, []
        monkeypatch.setattr(CPUDevice, "locks_memory", True)
        self._taken = CPUDevice.host_memory
        monkeypatch.setattr(CPUDevice, "host_memory", lambda device, *args, **how: self.take(device, *args))
        monkeypatch.setattr("zse.cache.layout.CHUNK_BYTES", 1 << 16)

    def take(self, device, nbytes, label):
        is_locked = len(self.taken) < self.num_locked
        if not is_locked and self.fails:
            raise DeviceError("no memory")
        memory = self._taken(device, nbytes, label)
        self.taken.append(nbytes)
        return SimpleNamespace(address=memory.address, nbytes=nbytes, is_locked=is_locked, free=memory.free)


@pytest.fixture
def locking(monkeypatch):
    return Locking(monkeypatch)


@pytest.fixture
def engine_of(model, monkeypatch):  # engines end before what tests changed is as it was
    made = []

    def make(**options):
        config = EngineConfig(
            **dict(model=str(model), threads=1, activations="f32", device="cpu", max_rows=4, num_pages=16) | options
        )
        made.append(load_engine(config, Phases(lambda: 0.0)))
        return made[-1].engine

    yield make
    for loaded in made:
        close(loaded)


def taken_after(engine, seconds=5.0) -> int:
    """Bytes of host memory once the thread is done."""
    thread = engine._features["host memory"]._thread
    thread.join(seconds)
    assert not thread.is_alive()
    return engine.counters()["host_cache_bytes"]


def test_all_slots_have_memory_before_a_page_leaves_the_device(engine_of, locking):
    engine = engine_of(cache_host_memory=3 << 20)
    config = engine.runner.config
    budget = config.host_slots * engine.runner.pages.page_nbytes
    assert taken_after(engine) == sum(locking.taken) == budget <= 3 << 20
    ids = prompt(100, 1)
    first, _ = reply(engine, ids)
    fill(engine, 1)
    assert engine.scheduler.snapshot()["prefix_host_pages"] > 20
    assert reply(engine, ids) == (first, 96)
    assert engine.counters()["host_cache_bytes"] == sum(locking.taken) == budget


def test_a_container_has_its_own_memory(engine_of, locking, monkeypatch):
    """An eighth of its limit stays available, not one of the machine, which is more than it has."""
    monkeypatch.setattr(probe, "memory_bytes", lambda: {"total": 1 << 40, "limit": 4 << 30, "available": 3 << 30})
    engine = engine_of(cache_host_memory=3 << 20)
    assert taken_after(engine) == sum(locking.taken) > 0


def test_without_host_slots_nothing_is_taken(engine_of, locking):
    engine = engine_of()
    reply(engine, prompt(100, 1))
    assert "host memory" not in engine._features
    assert engine.counters()["host_cache_bytes"] == 0 and not locking.taken


@pytest.mark.parametrize("why", ("not locked", "no memory", "machine is full"))
def test_what_cannot_be_had_ahead_is_taken_with_its_use(engine_of, locking, monkeypatch, why):
    if why == "machine is full":
        monkeypatch.setattr(probe, "memory_bytes", lambda: NOTHING)
    else:
        locking.num_locked, locking.fails = 2, why == "no memory"
    engine = engine_of(cache_host_memory=3 << 20)
    taken_after(engine)
    assert len(locking.taken) == {"not locked": 3, "no memory": 2, "machine is full": 0}[why]
    locking.fails = False
    ids = prompt(100, 1)
    first, _ = reply(engine, ids)
    fill(engine, 1)
    assert reply(engine, ids) == (first, 96)
    assert len(locking.taken) > 3


def test_a_page_without_memory_is_computed(engine_of, tmp_path, monkeypatch):
    options = dict(cache_disk=str(tmp_path / "kv"))
    ids = prompt(100, 3)
    first = engine_of(**options)
    expected, _ = reply(first, ids)
    first.close()
    engine = engine_of(**options)

    def none(page):
        raise DeviceError("no memory")

    monkeypatch.setattr(engine.runner.pages, "page_view", none)
    assert reply(engine, ids) == (expected, 0)
    monkeypatch.undo()
    totals = engine.counters()
    assert totals["prefix_disk_damaged_files"] == 0 and totals["prefix_disk_pages"] >= 6


def test_a_slot_that_there_is_not_has_no_address(engine_of, locking):
    slots = engine_of(cache_host_memory=1 << 20).runner.pages.slots
    assert slots.address(slots.count - 1)
    with pytest.raises(IndexError):
        slots.address(slots.count)


def test_an_engine_that_is_closed_waits_for_no_more_than_a_chunk(engine_of, locking, monkeypatch):
    take = locking.take

    def slow(device, nbytes, label):
        time.sleep(0.01)
        return take(device, nbytes, label)

    locking.take = slow
    engine = engine_of(cache_host_memory=64 << 20)
    engine._features["host memory"].close()
    assert len(locking.taken) < 500
