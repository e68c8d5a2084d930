"""Experts in host memory on the CUDA device: the same tokens as with all of them there, whatever was resident, and the time that copies
take."""

import time

import pytest
from test_runner import greedy, prompt, run, sampled

from gpu.test_models import random_model
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.models import expert_places

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


def test_tokens_are_the_same_bits(load):
    """Prompts in parts, replies side by side and alone, graphs captured and not, from few places to nearly all."""
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
    """Of a reply alone: what steps with copies take longer than those of the whole model, by the bytes they copy, within 25 %."""
    rates, options = [], {}
    for _ in range(2):
        loaded = load(**options)
        engine, times, read = loaded.engine, [], []
        engine.submit(1, prompt(20, 1), greedy(80))
        while engine.has_work:
            tokens = sum(len(output.tokens) for output in engine.step())
            times += [time.perf_counter()] * tokens
            read += [engine.counters().get("expert_read_bytes", 0.0)] * tokens
        steps = len(times) - 21
        rates.append(((times[-1] - times[20]) / steps, (read[-1] - read[20]) / steps))
        options = dict(expert_memory=expert_places.host_bytes(loaded.plan.model._replace(expert_slots=1)) * 2 // 5)
        link = loaded.plan.link
        engine.close()
    (plain, _), (slower, nbytes) = rates
    print(f"\n{nbytes / 1e6:.1f} MB a step: {1e3 * (slower - plain):.3f} ms, {1e3 * nbytes / link:.3f} ms by the link")
    assert 0.75 < nbytes / link / (slower - plain) < 1.25
