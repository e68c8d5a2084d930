"""What another tenant has cached does not show in the time to a first token.

On a scheduler whose steps take what a formula says, and, in the long form, on a real model. ZSE_TEST_TIMINGS: prompts of each kind
on the real one (default 0: left out; 1,000 is the bar)."""

import math
import os
import random
import time

import pytest

from zse.cache.prefix import PrefixCache
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions, SchedulingPolicy
from zse.scheduler.scheduler import Scheduler

COUNT = 1000
TIMINGS = int(os.environ.get("ZSE_TEST_TIMINGS", "0"))
VOCAB = 1000
VICTIM, PROBE, OTHER = (
    RequestOptions(tenant=name, cache_salt=f"salt of {name}") for name in ("victim", "probe", "other")
)


def ks_p(first: list[float], second: list[float]) -> float:
    """The p value of the two-sample Kolmogorov-Smirnov test, by its limit (Smirnov 1948) with Stephens' correction for size."""
    first, second = sorted(first), sorted(second)
    a = b = 0
    distance = 0.0
    while a < len(first) and b < len(second):
        value = min(first[a], second[b])
        while a < len(first) and first[a] == value:
            a += 1
        while b < len(second) and second[b] == value:
            b += 1
        distance = max(distance, abs(a / len(first) - b / len(second)))
    root = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:
        return 1.0
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)))


def test_the_statistic_tells_what_differs():
    draw = random.Random(1)
    same, other, shifted = ([draw.gauss(mean, 1) for _ in range(1000)] for mean in (0, 0, 0.2))
    assert ks_p(same, other) > 0.01 > 1e-3 > ks_p(same, shifted) and ks_p(same, same) == 1.0


class Virtual:
    """A scheduler with a prefix cache on a machine that is a formula; now and then a third tenant's replies run beside."""

    def __init__(self, seed: int):
        self.draw, self.now, self.next_id = random.Random(seed), 0.0, 0
        self.scheduler = Scheduler(
            num_pages=300,  # about ten prompts: they evict each other
            max_rows=8,
            max_tokens=128,
            max_context=1024,
            vocab_size=VOCAB,
            prefix_cache=PrefixCache(300, "lru"),
            policy=SchedulingPolicy(mixed_ratio=3.0),
        )

    def prompt(self, length: int = 0) -> list[int]:
        return [self.draw.randrange(VOCAB) for _ in range(length or self.draw.randint(100, 400))]

    def submit(self, prompt: list[int], options: RequestOptions, max_tokens: int) -> int:
        self.next_id += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.submit(self.next_id, prompt, params, seed=0, now=self.now, options=options)
        return self.next_id

    def ttft(self, prompt: list[int], options: RequestOptions) -> float:
        id, start = self.submit(prompt, options, 2), self.now
        first = 0.0
        while id in self.scheduler.requests:
            first = self.step(id) or first
        return first - start

    def step(self, id: int) -> float:
        """The time when the request got a token, or 0.0."""
        batch = self.scheduler.schedule(self.now)
        assert batch is not None
        num_prompt = batch.num_tokens - batch.num_decode
        seconds = (0.007 + 0.0009 * batch.num_decode + 0.0008 * num_prompt) * self.draw.uniform(0.98, 1.02)
        self.now += seconds
        outputs = self.scheduler.commit(batch, [(1, None)] * batch.num_samples, seconds)
        return self.now if any(output.id == id for output in outputs) else 0.0

    def between(self) -> None:
        self.now += 0.5
        while self.scheduler.requests:
            self.step(0)
        for _ in range(self.draw.choice((0, 0, 1))):
            self.submit(self.prompt(), OTHER, 10)


def timings(machine, count: int) -> dict[str, list[float]]:
    """Times of the probe's prompts that the victim asked before, that nobody did, and that the probe itself did; in a random
    order. Each time somebody asks something as long before, so that the machine has done as much."""
    found: dict[str, list[float]] = {"victim's": [], "nobody's": [], "own": []}
    kinds = [kind for kind in found for _ in range(count)]
    machine.draw.shuffle(kinds)
    for kind in kinds:
        prompt = machine.prompt()
        before = machine.prompt(len(prompt)) if kind == "nobody's" else prompt
        machine.ttft(before, PROBE if kind == "own" else VICTIM)
        machine.between()
        found[kind].append(machine.ttft(prompt, PROBE))
    return found


def test_a_prompt_that_another_tenant_has_cached_takes_as_long_as_one_that_nobody_has():
    found = timings(Virtual(seed=3), COUNT)
    p, own = ks_p(found["victim's"], found["nobody's"]), ks_p(found["own"], found["nobody's"])
    print(f"p of the victim's {p:.3f}, of one's own {own:.1e}")
    assert p > 0.01 and own < 1e-9  # what is one's own does show, so the test would see it


class Real:
    """A model, in this process."""

    def __init__(self, path):
        from zse.engine.llm import LLM

        self.draw, self.next_id = random.Random(5), 0
        self.llm = LLM(str(path), max_context=1024)

    def prompt(self, length: int = 96) -> list[int]:
        return [self.draw.randrange(10, self.llm.vocab_size) for _ in range(length)]

    def ttft(self, prompt: list[int], options: RequestOptions) -> float:
        engine, start = self.llm._engine, time.perf_counter()
        self.next_id += 1
        engine.submit(self.next_id, prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), options)
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start

    def between(self) -> None:
        pass


@pytest.mark.skipif(not TIMINGS, reason="ZSE_TEST_TIMINGS is not set (make soak sets it)")
def test_the_same_on_a_real_model(real_models):
    machine = Real(real_models["smollm2"])
    timings(machine, 10)
    found = timings(machine, TIMINGS)
    p, own = ks_p(found["victim's"], found["nobody's"]), ks_p(found["own"], found["nobody's"])
    medians = {kind: 1000 * sorted(times)[len(times) // 2] for kind, times in found.items()}
    print(f"p of the victim's {p:.3f}, of one's own {own:.1e}; medians, ms: {medians}")
    assert p > 0.01 and own < 1e-9
