"""The engine looks after the scheduler's books while it serves."""

import pytest

from zse.cache.pages import PageAllocator
from zse.cache.prefix import PrefixCache
from zse.engine import integrity
from zse.engine.integrity import EVERY_STEPS, IDLE_S, LEAST_STEPS, MAX_SHARE, IntegrityWatch
from zse.scheduler.counters import StepTotals


class Books:
    """A scheduler whose check takes 10 ms."""

    def __init__(self):
        self.now, self.checks, self.problems = 100.0, 0, []
        self.totals = StepTotals()

    def check_integrity(self):
        self.checks += 1
        self.now += 0.01
        return self.problems


def step(watch, books):
    """What the engine does after each step."""
    books.totals.steps += 1
    if books.totals.steps >= watch.due:
        watch.look()


def test_when_it_looks():
    books = Books()
    watch = IntegrityWatch(books, lambda: books.now)
    watch.idle()
    for _ in range(EVERY_STEPS - 1):
        step(watch, books)
    watch.idle()
    assert books.checks == 0
    step(watch, books)
    assert books.checks == 1 and watch.counters["integrity_check_ms"] == pytest.approx(10)
    for _ in range(2 * EVERY_STEPS):
        step(watch, books)
    assert books.checks == 1  # it would be more than its share of the time
    books.now += 0.011 / MAX_SHARE
    step(watch, books)
    assert books.checks == 2
    books.now += 0.011 / MAX_SHARE
    for _ in range(LEAST_STEPS):
        step(watch, books)
    watch.idle()
    assert books.checks == 2  # somebody's next request may be on its way
    books.now += IDLE_S
    watch.idle()
    watch.idle()
    assert books.checks == 3 == watch.counters["integrity_checks"] and watch.counters["integrity_problems"] == 0


def test_what_is_wrong_is_told_and_ends_nothing(caplog):
    books = Books()
    books.problems = [f"page {page} is lost" for page in range(8)]
    watch = IntegrityWatch(books, lambda: books.now)
    for _ in range(EVERY_STEPS):
        step(watch, books)
    assert watch.counters["integrity_problems"] == 8
    assert "page 4 is lost (and 3 more)" in caplog.text and "page 5" not in caplog.text and caplog.text.count("\n") == 1


@pytest.mark.parametrize("cached", [False, True])
def test_a_check_of_pages_still_finds_every_kind_of_damage(cached):
    def sound():
        allocator = PageAllocator(6)
        if cached:
            PrefixCache(6).attach(allocator)
        return allocator, allocator.allocate(2)

    allocator, held = sound()
    assert allocator.check_integrity([held]) == []
    assert allocator.check_integrity([]) and allocator.check_integrity([held, held[:1]])
    allocator._free.append(5)
    assert "a page stands twice in the free list" in allocator.check_integrity([held])
    allocator, held = sound()
    lost = allocator._free.pop()
    assert allocator.check_integrity([held]) == [f"page {lost}: 0 references, not in the free list"]
    allocator._free.append(held[0])  # as many as before, and one of them held
    assert len(allocator.check_integrity([held])) == 2


def test_the_engine_runs_it(monkeypatch, tmp_path):
    import tiny_model

    from zse.engine.config import EngineConfig
    from zse.engine.load import load_engine
    from zse.engine.metrics import Phases
    from zse.sampling.params import SamplingParams

    monkeypatch.setattr(integrity, "EVERY_STEPS", 4)
    monkeypatch.setattr(integrity, "LEAST_STEPS", 1)
    monkeypatch.setattr(integrity, "IDLE_S", 0.0)
    monkeypatch.setattr(integrity, "MAX_SHARE", 1e9)
    loaded = load_engine(
        EngineConfig(model=str(tiny_model.write(tmp_path / "tiny")), device="cpu", threads=1), Phases(lambda: 0.0)
    )
    engine = loaded.engine
    engine.submit(0, [5, 6, 7], SamplingParams(max_tokens=10, ignore_eos=True))
    while engine.has_work:
        engine.step()
    checks = engine.counters()["integrity_checks"]
    while engine.use_idle_time():
        pass
    assert checks >= 2 and engine.counters()["integrity_checks"] == checks + 1
    assert engine.counters()["integrity_problems"] == 0
    engine.close()
    loaded.source.close()
