"""Experts in host memory with places on the device by turns (`--expert-memory`): the same bits as with all of them there, whatever was
resident, in the emulator. zse.kernels.gpu.expert_slots by itself: tests/kernels/test_expert_slots.py."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import test_gpt_oss
import tiny
import tiny_families
from session import Session
from test_emulated_model import load_emulated

from zse.bench import profile
from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.expert_counters import ExpertCounters
from zse.engine.memory import plan_memory
from zse.engine.runner import Runner
from zse.errors import ConfigError, MemoryPlanError
from zse.formats.opening import open_model
from zse.kernel import cache
from zse.models import expert_places, weight_plan
from zse.models.load import plan_model
from zse.runtime.cpu import CPUDevice
from zse.sampling.params import SamplingParams
from zse.scheduler.scheduler import Scheduler
from zse.server.engine_counters import COUNTERS
from zse_emulator import EmulateDevice

pytestmark = pytest.mark.long

SIZES = [1, 1, 12, 1, 1, 1, 1]  # of the steps


@pytest.fixture(autouse=True)
def loads_as_for_a_gpu(monkeypatch):
    """NumPy quantizes: the kernels that do are of a device with a driver."""
    monkeypatch.setattr(CPUDevice, "repacks", False)


def path_of(family, folder, monkeypatch):
    if family.endswith(" wide"):  # a group of int4 fits their matrices' lines
        sizes = dict(hidden_size=128, moe_intermediate_size=128, intermediate_size=128 * (1 + (family[:2] == "qw")))
        sizes |= dict(num_hidden_layers=4) if "deep" in family else {}
        monkeypatch.setitem(tiny_families.CONFIGS, family, tiny_families.CONFIGS[family.split()[0]] | sizes)
    if family == "gpt_oss":
        monkeypatch.setattr(test_gpt_oss, "DIM", 64)  # a size of heads that a GPU has
        return test_gpt_oss.write(folder, "MXFP4")
    return str(tiny_families.write(family, folder, "BF16"))


def gpu_plan(path, quantize=None):
    with open_model(path) as source:
        return plan_model(source, family="gpu", quantize=quantize)


def sizes_of(plan):
    """(the least --expert-memory, one that keeps about half, that of all experts)."""
    whole = expert_places.host_bytes(plan._replace(expert_slots=1))
    groups = expert_places.groups_of(plan)
    least = expert_places.places_bytes(plan, groups, 1)
    return least, (least + whole) // 2, whole


def logits_of(path, like, quantize, expert_memory, ids, sizes, max_tokens=16):
    """(logits, the HostExperts or None, the ModelPlan)."""
    device = EmulateDevice(like, cache.package_variants(like), initialised=False)
    model, plan = load_emulated(device, path, quantize, expert_memory=expert_memory)
    assert sum(plan.memory_bytes.values()) == model.buffer.nbytes
    session = Session(device, model, rows=1, max_tokens=max_tokens, context=64)
    return session.run(ids, sizes), model.host_experts, plan


@pytest.mark.each("like", "quantize")
@pytest.mark.parametrize(
    "family, like, quantize",
    [
        ("qwen3_moe", "sm_90a", None),
        pytest.param("qwen3_moe wide", "sm_90a", "int4", marks=pytest.mark.exhaustive),
        pytest.param("qwen2_moe", "sm_80", None, marks=pytest.mark.exhaustive),  # a shared expert beside
        ("mixtral wide", "sm_90a", "int4"),
        ("gpt_oss", "sm_90a", None),  # MXFP4, and a bias of each expert
        pytest.param("gpt_oss", "sm_80", None, marks=pytest.mark.exhaustive),
        ("qwen3_moe_dense", "gfx90a", None),  # a layer without experts between
        ("gemma4_moe", "sm_90a", None),  # beside a dense MLP, with a factor of each expert
    ],
)
def test_tokens_are_the_same_bits(family, like, quantize, kept_kernels, monkeypatch, tmp_path):
    path = path_of(family, tmp_path, monkeypatch)
    ids = np.resize(tiny.random_tokens(family), sum(SIZES))
    expected, nothing, whole = logits_of(path, like, quantize, None, ids, SIZES)
    assert nothing is None and np.isfinite(expected).all()
    kinds = {matrix.scheme.element for matrix in filter(expert_places.is_of_experts, whole.matrices)}
    assert kinds == {"lut4" if family == "gpt_oss" else quantize or "bf16"}
    least, half, every = sizes_of(gpu_plan(path, quantize))
    for nbytes in (least, half):
        logits, experts, plan = logits_of(path, like, quantize, nbytes, ids, SIZES)
        np.testing.assert_array_equal(logits, expected)
        assert plan.memory_bytes[expert_places.LABEL] <= nbytes and plan.expert_slots >= 1
        assert plan.memory_bytes["layers"] + every == whole.memory_bytes["layers"]
        totals = np.array(list(experts.counts().values()))
        moe = plan.config.moe
        assert len(totals) == sum(map(moe.is_sparse, range(plan.config.num_layers)))
        # Each step of one token uses so many; the others use each at most once.
        assert (totals.sum(1) >= 7 * moe.experts_per_token).all()
        assert totals[:, 1].min() >= plan.expert_slots, "no slot stays empty"
        assert totals[:, 0].sum() > 0 or nbytes == least
        if nbytes == least:
            assert totals[:, 2].min() > 0, "one slot is too few for a step"


@pytest.mark.parametrize("quantize", [None, "int4", "fp8"])
def test_a_prompt_whose_experts_have_many_pairs(quantize, kept_kernels, monkeypatch, tmp_path):
    """On Hopper those are another product, whose tensor maps are of all places."""
    path = path_of("qwen3_moe wide", tmp_path, monkeypatch)
    ids = np.resize(tiny.random_tokens("qwen3_moe"), 49)
    expected, _, _ = logits_of(path, "sm_90a", quantize, None, ids, [48, 1], 48)
    _, half, _ = sizes_of(gpu_plan(path, quantize))
    logits, experts, plan = logits_of(path, "sm_90a", quantize, half, ids, [48, 1], 48)
    np.testing.assert_array_equal(logits, expected)
    spilled = plan.config.moe.num_experts - plan.expert_slots
    assert all(passed >= spilled - 1 for _, _, passed in experts.counts().values()), "a prompt uses nearly all"


def test_an_engine_counts_them(kept_kernels, monkeypatch, tmp_path):
    """A prompt in parts and tokens drawn ahead give the same replies; heartbeat and profile say what came from the host."""
    path, replies = path_of("qwen3_moe", tmp_path, monkeypatch), []
    whole = gpu_plan(path)
    _, half, _ = sizes_of(whole)
    ids = tiny.tokens("qwen3_moe").tolist()
    for nbytes in (None, half):
        device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"), initialised=False)
        wanted = EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=16, expert_memory=nbytes)
        memory = plan_memory(wanted, whole, device)
        model, plan = load_emulated(device, path, expert_memory=nbytes)
        assert memory.model.expert_slots == plan.expert_slots
        runner = Runner(device, model, memory.config)
        scheduler = Scheduler(
            num_pages=memory.config.num_pages,
            max_rows=2,
            max_tokens=16,
            max_context=64,
            vocab_size=plan.config.vocab_size,
        )
        engine = Engine(scheduler, runner)
        if nbytes:
            engine.use("experts", ExpertCounters(model.host_experts))
        for id, prompt in ((0, ids[:20]), (1, ids[7:9])):
            engine.submit(id, prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        said = {0: [], 1: []}
        while engine.has_work:
            for output in engine.step():
                said[output.id] += output.tokens
        replies.append(said)
    assert replies[0] == replies[1]
    counters, slot_bytes = engine.counters(), expert_places.expert_bytes(plan)
    assert counters["expert_hits"] > 0 and counters["expert_misses"] * slot_bytes == counters["expert_read_bytes"]
    assert 0 < counters["expert_moved_bytes"] < counters["expert_read_bytes"]
    assert {name for name in counters if name.startswith("expert_")} <= set(COUNTERS)
    loaded = SimpleNamespace(engine=engine, config=memory.config, model_config=plan.config)
    decode = profile.profile(loaded, prompt_tokens=8, steps=2, repeats=1)[1]
    found, missed = decode.experts["expert_hits"], decode.experts["expert_misses"]
    assert found + missed == plan.config.num_layers * plan.config.moe.experts_per_token
    assert f"  experts  {found:.0f} on the device, {missed:.0f} copied from host memory: " in profile.describe(decode)


def test_layers_with_other_matrices_have_places_of_their_own(monkeypatch, tmp_path):
    """As in files of several types: no place, on either side, is of two experts."""
    path = path_of("qwen3_moe deep wide", tmp_path, monkeypatch)
    plan, int4 = gpu_plan(path), gpu_plan(path, "int4")
    mixed = [matrix for matrix in plan.matrices if not matrix.name.startswith("layers.1.")]
    mixed += [matrix for matrix in int4.matrices if matrix.name.startswith("layers.1.")]
    memory = weight_plan.memory_bytes_of(mixed, plan.vectors, plan.orders, weight_plan.ALIGN["gpu"])
    plan = plan._replace(matrices=tuple(mixed), memory_bytes=memory)
    groups = expert_places.groups_of(plan)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(plan.config.num_layers))
    assert [1] in [list(group.layers) for group in groups] and len(groups) == 2
    whole = expert_places.host_bytes(plan._replace(expert_slots=1))
    fewer = expert_places.with_expert_memory(plan, whole - 1)
    places, stored = expert_places.place_experts(fewer, None), expert_places.place_host_experts(fewer, None)
    slots, experts, copied = fewer.expert_slots, plan.config.moe.num_experts, [[], []]
    for group, layer, segments in expert_places.segments_of(fewer, places, stored):
        first, spill = group.layers.index(layer) * slots, len(group.layers) * slots
        for source, to, nbytes in np.reshape(segments, (-1, 3)).tolist():
            copied[0] += [(source + e * nbytes, nbytes) for e in range(experts)]
            copied[1] += [(to + (first + slot) * nbytes, nbytes) for slot in range(slots)]
            if layer == group.layers[0]:
                copied[1] += [(to + (spill + e) * nbytes, nbytes) for e in range(experts - slots)]
    begin = sum(fewer.memory_bytes.values()) - fewer.memory_bytes[expert_places.LABEL]
    for ranges, low, high in (
        (copied[0], 0, expert_places.host_bytes(fewer)),
        (copied[1], begin, sum(fewer.memory_bytes.values())),
    ):
        ranges.sort()
        assert low == ranges[0][0] and ranges[-1][0] + ranges[-1][1] <= high
        assert all(at + nbytes <= following for (at, nbytes), (following, _) in itertools.pairwise(ranges))


def test_sizes(monkeypatch, tmp_path):
    path = path_of("qwen3_moe", tmp_path, monkeypatch)
    plan = gpu_plan(path)
    least, half, every = sizes_of(plan)
    assert expert_places.with_expert_memory(plan, every) is plan, "all are on the device"
    for nbytes in (least, half, every - 1):
        fewer = expert_places.with_expert_memory(plan, nbytes)
        groups = expert_places.groups_of(fewer)
        assert [len(group.layers) for group in groups] == [plan.config.num_layers]
        assert expert_places.places_bytes(plan, groups, fewer.expert_slots) <= nbytes
        assert expert_places.places_bytes(plan, groups, fewer.expert_slots + 1) > nbytes or nbytes == every - 1
    with pytest.raises(MemoryPlanError, match="may need all 8 experts of a layer, so the least for this model is"):
        expert_places.with_expert_memory(plan, least - 1)
    dense = plan_model(open_model(str(tiny.write("llama", tmp_path, "BF16"))), family="gpu")
    with pytest.raises(ConfigError, match="has no experts: leave --expert-memory out"):
        expert_places.with_expert_memory(dense, 1 << 30)
