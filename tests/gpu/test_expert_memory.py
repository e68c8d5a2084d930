"""Experts in host memory on the CUDA device: the same tokens as with all of them there, whatever was resident, and the time that copies
take."""

import time

import numpy as np
import pytest
from test_runner import greedy, prompt, run, sampled

from gpu.test_models import random_model
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.models import expert_places
from zse.plan import chains

LAYERS = 4
ASKED = {
    "a": (prompt(40, 1), greedy(12, logprobs=2)),
    "b": (prompt(300, 2), sampled(3, 20, logprobs=1)),
    "c": (prompt(3, 3), sampled(4, 16, logprobs=1, frequency_penalty=0.3)),
}


@pytest.fixture(scope="module", params=["bf16", "int4", "fp8"])
def path(request, tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("models"), request.param, LAYERS, "qwen3-30b-a3b")


@pytest.fixture
def load(path):
    made = []

    def loaded(**options):
        config = EngineConfig(
            **dict(model=path, device="cuda", max_rows=4, max_context=1024, max_tokens_per_step=256, speculation="none")
            | options
        )
        made.append(load_engine(config, Phases(lambda: 0.0)))
        print(f"\n{options}: {made[-1].plan.expectation}")
        return made[-1]

    yield loaded
    for item in made:
        item.engine.close()
        item.source.close()


def test_tokens_are_the_same_bits(load, monkeypatch):
    """Prompts in parts, replies side by side and alone, graphs captured and not, from few places to nearly all. (What stands between two
    attentions is one launch of other kernels where all experts are on the device.)"""
    monkeypatch.setattr(chains, "LEAST_MIXED", 1 << 60)
    whole = load(prefix_cache=False)
    expected = [run(whole.engine, **ASKED), run(whole.engine, a=ASKED["a"])]
    experts = expert_places.host_bytes(whole.plan.model._replace(expert_slots=1))
    whole.engine.close()
    for options in (
        dict(expert_memory=experts * 2 // 5),
        dict(expert_memory=experts * 4 // 5),
        dict(expert_memory=experts * 3 // 5, graphs=False),
    ):
        fewer = load(prefix_cache=False, **options)
        assert fewer.plan.model.expert_slots > 0
        for _ in range(2):  # the second time from captured graphs
            assert [run(fewer.engine, **ASKED), run(fewer.engine, a=ASKED["a"])] == expected, options
        counters = fewer.engine.counters()
        assert counters["expert_hits"] > 0 < counters["expert_misses"]
        fewer.engine.close()


@pytest.mark.timed
def test_a_miss_costs_what_was_told(load):
    """Steps of one reply: each byte more that a step copies takes it what the link takes for it, within 25 %. What no byte explains, the
    launches that find misses and places, is a step's constant."""
    plan = load().plan
    loaded = load(expert_memory=expert_places.host_bytes(plan.model._replace(expert_slots=1)) * 2 // 5)
    engine, times, read = loaded.engine, [], []
    engine.submit(1, prompt(20, 1), greedy(400))
    while engine.has_work:
        tokens = sum(len(output.tokens) for output in engine.step())
        times += [time.perf_counter()] * tokens
        read += [engine.counters()["expert_read_bytes"]] * tokens
    seconds, nbytes = np.diff(times[20:]), np.diff(read[20:])
    by_bytes: dict[float, list[float]] = {}
    for took, copied in zip(seconds, nbytes, strict=True):
        by_bytes.setdefault(copied, []).append(took)
    # The median of the steps that copied as much, each as heavy as there are steps: the host is late at times.
    sizes = sorted(size for size, found in by_bytes.items() if len(found) >= 5)
    medians, heavy = [np.median(by_bytes[size]) for size in sizes], [len(by_bytes[size]) ** 0.5 for size in sizes]
    slope, constant = np.polyfit(sizes, medians, 1, w=heavy)
    table = ", ".join(
        f"{size / 1e6:.1f} MB {1e3 * took:.3f} ms ({len(by_bytes[size])})"
        for size, took in zip(sizes, medians, strict=True)
    )
    print(f"\n{table}: {1e-9 / slope:.1f} GB/s of {loaded.plan.link / 1e9:.1f}, {1e3 * constant:.3f} ms without a miss")
    assert 0.75 < slope * loaded.plan.link < 1.25
