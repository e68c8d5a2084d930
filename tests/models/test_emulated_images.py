"""Engines that see, through the GPU's kernels in the emulator: embeddings placed in the stream, tokens of an image that see each other,
positions in three parts, deepstack, steps that run ahead. Each token is among the likeliest of the CPU's in f32."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_vision as tiny
from test_emulated_model import load_emulated

from zse.cache.groups import PageGeometry, geometry
from zse.cache.pages import HostPool
from zse.cache.prefix import PrefixCache
from zse.cache.states import StateSlots
from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.load import load_engine
from zse.engine.memory import plan_memory
from zse.engine.metrics import Phases
from zse.engine.runner import Runner
from zse.formats.opening import open_model
from zse.kernel import cache
from zse.models.vision.load import find_tower
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions
from zse.scheduler.scheduler import Scheduler
from zse_emulator import EmulateDevice

pytestmark = pytest.mark.long

ROWS, TOKENS, CONTEXT = 3, 48, 192
# bf16 through recurrent layers, of which text alone differs by 0.10; and through Gemma 4's sums of unlike numbers, of
# which transformers in bf16 loses 3 to 8 % of the largest logit as well.
WIDE = ("qwen3_5", "gemma4", "gemma4_moe")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logprobs=20, ignore_eos=True)


def run(engine, requests) -> list[tuple[list[int], list]]:
    """(tokens, log-probabilities) of (prompt, images, params) that run together."""
    found = {id: ([], []) for id in range(len(requests))}
    for id, (prompt, images, params) in enumerate(requests):
        engine.submit(id, prompt, params, RequestOptions(images=tuple(images)))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id][0].extend(output.tokens)
            found[output.id][1].extend(output.logprobs or [])
        assert not engine.scheduler.check_integrity()
    return list(found.values())


def emulated(path: str, like: str, quantize: str | None, **options) -> SimpleNamespace:
    """An engine of an emulated GPU, and its memory's plan."""
    device = EmulateDevice(like, cache.package_variants(like))
    model, plan = load_emulated(device, path, quantize)
    source = open_model(path)
    tower = find_tower(source, None, plan.config, quantize, "gpu")
    wanted = (
        dict(model="m", max_rows=ROWS, max_context=CONTEXT, max_tokens_per_step=TOKENS, speculation="none") | options
    )
    planned = plan_memory(EngineConfig(**wanted), plan, device, tower=tower)
    config, states = planned.config, None
    if config.state_slots:
        states = StateSlots(
            config.state_slots,
            config.state_interval,
            HostPool(0),
            page_size=config.page_size,
            slot_nbytes=config.state_bytes // config.state_slots,
        )
    pages = PageGeometry(page_size=config.page_size)
    if plan.config.global_head_dim:  # heads of two sizes have no page table in common
        pages = geometry(plan.config, TOKENS, device.steps_in_flight, config.page_size)
    scheduler = Scheduler(
        num_pages=config.num_pages,
        max_rows=ROWS,
        max_tokens=TOKENS,
        max_context=CONTEXT,
        vocab_size=plan.config.vocab_size,
        geometry=pages,
        prefix_cache=PrefixCache(config.num_pages, page_size=config.page_size),
        states=states,
    )
    grouped = pages.num_groups > 1
    engine = Engine(scheduler, Runner(device, model, config, tower=tower, grouped=grouped), tower=tower)
    return SimpleNamespace(engine=engine, plan=planned)


def apart(found, logprobs) -> float:
    """How far the likeliest tokens of a line are from what the CPU has, at most."""
    wanted = dict(logprobs.top)
    common = [abs(value - wanted[token]) for token, value in found.top if token in wanted]
    assert len(common) >= 10
    return max(common)


def near(found, logprobs, spread: float) -> None:
    """The likeliest tokens of a line, as the CPU has them."""
    assert apart(found, logprobs) < spread


# Of every family test_vision.py has the text beside transformers, and test_emulated_towers.py the images through a GPU's kernels.
# Pages of each type are in test_emulated_model.py.
@pytest.mark.each("quantize")
@pytest.mark.parametrize(
    ("family", "like", "quantize", "kv"),
    [("gemma3", "sm_80", None, "int8"), ("qwen3_vl", "sm_90a", "int4", "fp8")]
    + [
        ("qwen2_5_vl", "sm_90a", "int4", "bf16"),
        ("qwen3_vl", "sm_90a", None, "fp8"),
        ("gemma3", "gfx90a", None, "bf16"),
        ("gemma3", "sm_90a", None, "bf16"),
        ("mistral3", "sm_80", None, "bf16"),
        ("qwen3_5", "sm_90a", None, "bf16"),
        ("gemma4", "sm_90a", None, "bf16"),
        ("gemma4_moe", "sm_80", None, "bf16"),
        ("gemma4_unified", "sm_90a", None, "bf16"),
        ("deepseek_vl2_plain", "sm_90a", None, "bf16"),
        ("deepseek_vl2", "sm_90a", None, "bf16"),
    ],
)
def test_a_gpu_says_what_a_cpu_says(family, like, quantize, kv, kept_kernels, tmp_path):
    path = str(tiny.write(family, tmp_path, wide_heads=not family.startswith("gemma4")))  # whose heads are wide enough
    prompts = [tiny.prompt(family, number) for number in (0, 3, 4)]
    made = emulated(path, like, quantize, kv_dtype=kv)
    replies = run(made.engine, [(*prompt, GREEDY) for prompt in prompts])
    again = run(made.engine, [(*prompts[1], GREEDY)])  # of pages that are found, mostly
    assert made.engine.counters()["images_encoded"] == 2
    made.engine.close()
    cpu = dict(device="cpu", threads=2, kv_dtype="f32", activations="f32", quantize=quantize)
    loaded = load_engine(EngineConfig(model=path, **cpu), Phases(lambda: 0.0))
    found = []
    spread = 0.1 if (quantize, kv) == (None, "bf16") and family not in WIDE else 0.3
    for (ids, images), (tokens, logprobs) in zip([*prompts, prompts[1]], replies + again, strict=True):
        assert len(tokens) == 4
        one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        for number in range(4):
            ((_, (wanted,)),) = run(loaded.engine, [(ids + tokens[:number], images, one)])
            found.append(apart(logprobs[number], wanted))
    # Where bf16 chooses an expert otherwise a line is another one's (one of 16 differs by 0.47): the median tells.
    assert sorted(found)[len(found) // 2] < 0.1 if family == "gemma4_moe" else max(found) < spread
    loaded.engine.close()
    loaded.source.close()
    assert np.isfinite(logprobs[0].logprob)
