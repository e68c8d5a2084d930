"""States of recurrent layers on a GPU that runs ahead, in the emulator: a prompt that continues from a kept state says what the
whole one does, also by way of the host."""

import random

import pytest
import tiny_families
from test_emulated_model import Knowing, load_emulated

from zse.cache.groups import PageGeometry
from zse.cache.pages import HostPool
from zse.cache.prefix import PrefixCache
from zse.cache.states import StateSlots
from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.memory import plan_memory
from zse.engine.runner import Runner
from zse.kernel import cache
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions
from zse.scheduler.scheduler import Scheduler
from zse_emulator import EmulateDevice

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.mark.long
@pytest.mark.exhaustive  # half a minute of emulation
def test_states_on_a_device_that_runs_ahead(kept_kernels, tmp_path):
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, plan = load_emulated(device, str(tiny_families.write("lfm2", tmp_path, "BF16")))
    wanted = EngineConfig(
        model="m",
        max_rows=2,
        max_context=64,
        max_tokens_per_step=32,
        page_size=16,
        state_memory=6144,
        deterministic=True,
        cache_host_memory=1 << 20,
        speculation="none",
    )
    config = plan_memory(wanted, plan, device).config
    runner = Runner(device, model, config)
    assert runner.runs_ahead and config.state_slots == 4 and config.host_states > 2

    def engine_of(caches: bool) -> Engine:
        slots = StateSlots(4, 512, HostPool(config.host_states), page_size=16 if caches else 0)
        slots.least_gain = 1
        scheduler = Scheduler(
            num_pages=config.num_pages,
            max_rows=2,
            max_tokens=32,
            max_context=64,
            vocab_size=plan.config.vocab_size,
            prefix_cache=PrefixCache(config.num_pages) if caches else None,
            host=HostPool(config.host_slots),
            geometry=PageGeometry(page_size=16),
            states=slots,
        )
        return Engine(scheduler, runner)

    def say(engine, prompts, points=()) -> tuple[list[list[int]], list[int]]:
        replies, cached = [[] for _ in prompts], [0] * len(prompts)
        for id, prompt in enumerate(prompts):
            engine.submit(id, prompt, GREEDY, RequestOptions(state_points=points))
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                replies[output.id] += output.tokens
                cached[output.id] += output.cached_tokens
            assert engine.scheduler.check_integrity() == []
        return replies, cached

    draw = random.Random(1)
    prompts = [draw.choices(range(3, 150), k=length) for length in (37, 21, 30)]
    expected = say(engine_of(False), prompts)[0]
    longer = [prompt + reply + [9, 8, 7] for prompt, reply in zip(prompts, expected, strict=True)]
    other = [prompt[:18] + [5, 6] for prompt in prompts]
    # Before the next scheduler has the runner's pages and states.
    told = [say(engine_of(False), some)[0] for some in (longer, other)]
    engine = engine_of(True)
    assert say(engine, prompts, (17,))[0] == expected
    assert say(engine, longer) == (told[0], [len(prompt) - 4 for prompt in longer])
    assert say(engine, other) == (told[1], [17, 17, 17])
    counters = engine.scheduler.snapshot()
    assert counters["state_host_hits"] > 1 and counters["state_hits"] == 6


@pytest.mark.long
@pytest.mark.exhaustive  # a minute of emulation each
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "granite_hybrid"])
def test_wrong_drafts_are_taken_back(kept_kernels, tmp_path, family):
    """Runs of drafts, beside one another and steps that are given ahead."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, plan = load_emulated(device, str(tiny_families.write(family, tmp_path, "BF16")))
    wanted = EngineConfig(
        model="m", max_rows=2, max_context=64, max_tokens_per_step=32, page_size=16, deterministic=True, draft_tokens=3
    )
    config = plan_memory(wanted, plan, device).config
    assert config.max_drafts == 6 and config.state_slots >= 4
    runner, draw = Runner(device, model, config), random.Random(2)
    prompts = [draw.choices(range(3, 150), k=length) for length in (11, 3)]

    def say(known):
        scheduler = Scheduler(
            num_pages=config.num_pages,
            max_rows=2,
            max_tokens=32,
            max_context=64,
            vocab_size=plan.config.vocab_size,
            geometry=PageGeometry(page_size=16),
            max_drafts=config.max_drafts,
            states=StateSlots(config.state_slots, 512),
        )
        engine = Engine(scheduler, runner)
        if known is not None:
            speculator = Knowing(scheduler, 3, "gpu", runs_ahead=True)
            speculator.replies = dict(enumerate(known))
            engine.use("speculation", speculator)
        replies = [[] for _ in prompts]
        for id, prompt in enumerate(prompts):
            engine.submit(id, prompt, SamplingParams(max_tokens=9, temperature=0.6 * id, seed=id, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                replies[output.id] += output.tokens
            assert scheduler.check_integrity() == []
        return replies, scheduler.counters

    told, _ = say(None)
    again, counters = say(told)
    assert again == told and 0 < counters.accepted_tokens < counters.drafted_tokens
