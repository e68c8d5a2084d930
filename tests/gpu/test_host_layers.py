"""Layers in host memory on the CUDA device: the same tokens as with all of them on the device, at the rate of the link."""

import time

import pytest
from test_runner import greedy, prompt, run, sampled

from gpu.test_models import random_model
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.plan import chains

LAYERS = 8
ASKED = {
    "a": (prompt(40, 1), greedy(12, logprobs=2)),
    "b": (prompt(300, 2), sampled(3, 20, logprobs=1)),
    "c": (prompt(3, 3), sampled(4, 16, logprobs=1, frequency_penalty=0.3)),
}


@pytest.fixture(scope="module", params=["bf16", "int4"])
def path(request, tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("models"), request.param, LAYERS)


@pytest.fixture
def load(path):
    made = []

    def loaded(**options):
        clock = time.perf_counter()
        config = EngineConfig(
            **dict(model=path, device="cuda", max_rows=4, max_context=1024, max_tokens_per_step=256, speculation="none")
            | options
        )
        phases = Phases(lambda: time.perf_counter() - clock)
        made.append(load_engine(config, phases))
        steps = {name: phases.ms[name] for name in ("device open", "engine built", "weights loaded")}
        print(f"\n{options}: {steps}, {made[-1].plan.expectation}")
        return made[-1]

    yield loaded
    for item in made:
        item.engine.close()
        item.source.close()


def test_tokens_are_the_same_bits(load, monkeypatch):
    """Prompts in parts, replies side by side and alone, with graphs captured and without. (A cached prefix would be computed by other
    kernels, and so is what stands between two attentions where all layers are on the device: in one launch.)"""
    monkeypatch.setattr(chains, "LEAST_NUMBERS", 1 << 60)
    whole = load(prefix_cache=False)
    assert not whole.plan.model.host_layers
    expected = [run(whole.engine, **ASKED), run(whole.engine, a=ASKED["a"])]
    again = [run(whole.engine, **ASKED), run(whole.engine, a=ASKED["a"])]
    assert again == expected, "all layers on the device, from captured graphs"
    some = whole.plan.total - whole.plan.parts["layers"] * 4 // LAYERS
    for options in (
        dict(resident_layers=0),
        dict(resident_layers=5),
        dict(resident_layers=-1, max_memory=some),
        dict(resident_layers=1, graphs=False),
    ):
        fewer = load(prefix_cache=False, **options)
        assert len(fewer.plan.model.host_layers) >= 3
        for _ in range(2):  # the second time from captured graphs
            assert [run(fewer.engine, **ASKED), run(fewer.engine, a=ASKED["a"])] == expected, options
        fewer.engine.close()


@pytest.mark.timed
def test_the_rate_is_the_links(load):
    """Of a reply alone: bytes of the layers ÷ what the link was measured at, within 15 %."""
    for kept in (0, LAYERS // 2):
        loaded = load(resident_layers=kept)
        engine, times = loaded.engine, []
        engine.submit(1, prompt(20, 1), greedy(60))
        while engine.has_work:
            times += [time.perf_counter()] * sum(len(output.tokens) for output in engine.step())
        rate = (len(times) - 21) / (times[-1] - times[20])
        told = loaded.plan.link / loaded.plan.model.host_bytes
        link = f"{rate * loaded.plan.model.host_bytes / 1e9:.1f} GB/s of {loaded.plan.link / 1e9:.1f}"
        print(f"\n{kept} of {LAYERS} layers resident: {rate:.2f} tokens/s, told {told:.2f} ({link})")
        assert 0.85 < rate / told < 1.15
        engine.close()
