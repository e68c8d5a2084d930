"""The memory plan is what is allocated, byte for byte; what does not fit is refused before anything is."""

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny  # noqa: E402
import tiny_families  # noqa: E402
import tiny_mtp  # noqa: E402

from zse.engine import memory as memory_plans  # noqa: E402
from zse.engine.config import AUTO_LAYERS, EngineConfig  # noqa: E402
from zse.engine.load import load_engine  # noqa: E402
from zse.engine.memory import plan_memory  # noqa: E402
from zse.engine.metrics import Phases  # noqa: E402
from zse.engine.runner import Runner  # noqa: E402
from zse.errors import ConfigError  # noqa: E402
from zse.formats.opening import open_model  # noqa: E402
from zse.models import expert_places  # noqa: E402
from zse.models.load import load_model, plan_model  # noqa: E402
from zse.runtime import probe  # noqa: E402
from zse.runtime.null import NullGPU  # noqa: E402

WEIGHTS = ("embedding", "layers", "layer slots", "expert places", "head", "draft model", "next-token block")


class SmallGPU(NullGPU):
    memory_total = 24 << 30
    memory_free = 20 << 30


def counted(parts: dict[str, int]) -> dict[str, int]:
    """The parts by the labels of allocations."""
    found = {label: nbytes for label, nbytes in parts.items() if label not in (*WEIGHTS, "context")}
    return found | {"weights": sum(parts.get(label, 0) for label in WEIGHTS)}


def record_everything(runner):
    while runner.record_ahead():
        pass
    runner.masking.reserve(range(len(runner._sets)))
    runner.forwards.reserve()
    runner.pages.reserve()
    runner.forwards.run([])  # what jobs record first
    runner.forwards.logprobs([])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "minicpm3", "lfm2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(kv_dtype="int8", max_rows=3, max_tokens_per_step=24, page_size=32),
        dict(activations="f32", speculation="none", cache_host_memory=1 << 22),
        dict(kv_layout="contiguous", max_rows=2, quantize=None),
        dict(adapter_slots=3, adapter_rank=12),
        dict(state_memory=1 << 20, state_interval=64, cache_host_memory=1 << 22, max_rows=2),
    ],
)
def test_a_cpu_allocates_what_was_planned(family, options, tmp_path):
    write = tiny.write if family in tiny.FAMILIES else tiny_families.write
    config = EngineConfig(model=str(write(family, tmp_path)), device="cpu", threads=2, **options)
    loaded = load_engine(config, Phases(lambda: 0.0))
    try:
        runner = loaded.engine.runner
        assert sum(loaded.device.memory().values()) <= loaded.plan.first_bytes + loaded.config.kv_bytes
        record_everything(runner)
        assert loaded.device.memory() == counted(loaded.plan.parts)
    finally:
        loaded.engine.close()
        loaded.source.close()


def test_a_draft_model_is_planned(tmp_path):
    folders = [tmp_path / "model", tmp_path / "draft"]
    for folder in folders:
        folder.mkdir()
    model, draft = (str(tiny.write("llama", folder)) for folder in folders)
    config = EngineConfig(model=model, device="cpu", threads=2, draft_model=draft, max_rows=2)
    loaded = load_engine(config, Phases(lambda: 0.0))
    try:
        record_everything(loaded.engine.runner)
        assert loaded.plan.parts["draft model"] > 0
        assert loaded.device.memory() == counted(loaded.plan.parts)
    finally:
        loaded.engine.close()
        loaded.source.close()


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_a_next_token_block_is_planned(family, tmp_path):
    config = EngineConfig(
        model=str(tiny_mtp.write(family, tmp_path)), device="cpu", threads=2, speculation="mtp", max_rows=2
    )
    loaded = load_engine(config, Phases(lambda: 0.0))
    try:
        record_everything(loaded.engine.runner)
        assert loaded.plan.parts["next-token block"] > 0
        assert loaded.device.memory() == counted(loaded.plan.parts)
    finally:
        loaded.engine.close()
        loaded.source.close()


@pytest.mark.parametrize("like", ["sm_80", "sm_90a", "gfx90a"])
@pytest.mark.parametrize(
    "family, kv_dtype, context, size",
    [
        ("llama", "int8", None, 16),
        ("gemma3", "bf16", None, 16),
        ("llama", "bf16", None, 128),
        ("gemma3", "bf16", None, 32),
        ("llama", "bf16", 65001, 64),
        ("lfm2", "bf16", None, 16),
    ],
)
def test_a_gpu_allocates_what_was_planned(like, family, kv_dtype, context, size, tmp_path):
    """context: a longer one than the model's, for which pages of `size` tokens are what auto takes."""
    gpu = SmallGPU(like)
    write = tiny.write if family in tiny.FAMILIES else tiny_families.write
    plan = plan_model(open_model(str(write(family, tmp_path, "BF16"))), family="gpu")
    if context:
        plan = plan._replace(config=msgspec.structs.replace(plan.config, max_context=context))
    page_size = 0 if context or size == 16 else size
    memory = plan_memory(EngineConfig(model="m", max_rows=4, kv_dtype=kv_dtype, page_size=page_size), plan, gpu)
    assert gpu.memory() == {}
    assert memory.config.page_size == size and f"pages of {size} tokens" in memory.describe()
    runner = Runner(gpu, load_model(gpu, plan), memory.config)
    assert runner.runs_ahead
    assert sum(gpu.memory().values()) <= memory.first_bytes + memory.config.kv_bytes
    record_everything(runner)
    assert gpu.memory() == counted(memory.parts)
    assert memory.total == sum(gpu.memory().values()) + memory.parts["context"]


@pytest.mark.parametrize("like", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("options", [dict(resident_layers=2), dict(max_rows=2, kv_dtype="int8", resident_layers=0), {}])
def test_layers_in_host_memory_are_planned(like, options, tmp_path, monkeypatch):
    """As many as are asked for, or (the last) as few as must be: what is allocated is what was planned, byte for byte."""
    gpu, fewest = SmallGPU(like), dict(model="m", max_rows=2, max_context=64, max_tokens_per_step=16)
    whole = plan_model(open_model(str(tiny.write("gemma3", tmp_path, "BF16"))), family="gpu")
    layers = whole.config.num_layers
    assert layers == 7
    if not options:  # all but one byte of what four layers take that are in host memory, two of them in slots
        sizes = whole.layer_bytes
        total = plan_memory(EngineConfig(**fewest), whole, gpu).total
        options = dict(
            resident_layers=AUTO_LAYERS, max_memory=total - sum(sizes[layer] for layer in (0, 2, 4, 6)) + 2 * max(sizes)
        )
    memory = plan_memory(EngineConfig(**fewest | options), whole, gpu)
    plan, kept = memory.model, 3 if "max_memory" in options else options["resident_layers"]
    assert gpu.memory() == {} and len(plan.host_layers) == layers - kept and whole.host_layers == ()
    assert plan.host_bytes + memory.parts["layers"] == whole.memory_bytes["layers"]
    assert f"{layers - kept} of 7 layers stay in host memory (" in memory.describe() and memory.link > 1e6
    runner = Runner(gpu, load_model(gpu, plan), memory.config)
    record_everything(runner)
    assert gpu.memory() == counted(memory.parts)
    if "max_memory" in options:
        assert memory.total <= memory.limit == options["max_memory"]
        with pytest.raises(ConfigError, match="over the .* of --max-memory"):  # not even all of them there
            plan_memory(EngineConfig(**fewest | dict(max_memory=memory.limit - plan.host_bytes)), whole, gpu)
    monkeypatch.setattr(probe, "memory_bytes", lambda: {"available": plan.host_bytes - 1})
    with pytest.raises(ConfigError, match="layers would stay in host memory, .* are available there: use --quantize"):
        plan_memory(EngineConfig(**fewest | options), whole, gpu)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_dense", "mixtral"])
def test_experts_in_host_memory_are_planned(family, tmp_path, monkeypatch):
    """Byte for byte; refused where they cannot be."""
    gpu, wanted = SmallGPU(), dict(model="m", max_rows=2, max_context=64, max_tokens_per_step=16)
    whole = plan_model(open_model(str(tiny_families.write(family, tmp_path, "BF16"))), family="gpu")
    experts = expert_places.host_bytes(whole._replace(expert_slots=1))
    size = experts * 7 // 8
    memory = plan_memory(EngineConfig(**wanted, expert_memory=size), whole, gpu)
    plan, kept = memory.model, memory.model.expert_slots
    assert gpu.memory() == {} and whole.expert_slots == 0 < kept and memory.parts["expert places"] <= size
    assert plan.memory_bytes["layers"] + experts == whole.memory_bytes["layers"]
    assert expert_places.host_bytes(plan) == experts and memory.link > 1e6
    told = memory.describe()
    assert f"  all experts are in host memory (0 MiB), {kept} of each layer's {whole.config.moe.num_experts} on" in told
    runner = Runner(gpu, load_model(gpu, plan), memory.config)
    record_everything(runner)
    assert gpu.memory() == counted(memory.parts) and memory.parts["expert tables"] > 0
    every = plan_memory(EngineConfig(**wanted, expert_memory=experts), whole, gpu)
    assert every.expectation == "" and every.model.expert_slots == 0 and "expert tables" not in every.parts
    for options, message in (
        (dict(expert_memory=size, resident_layers=1), "a model's experts or its layers stay in host memory, take one"),
        (
            dict(expert_memory=1),
            "--expert-memory 0 MiB: a step may need all . experts of a layer, so the least .* is 1 MiB",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_memory(EngineConfig(**wanted, **options), whole, gpu)
    monkeypatch.setattr(probe, "memory_bytes", lambda: {"available": experts - 1})
    with pytest.raises(
        ConfigError, match="all experts would stay in host memory, .* are available there: use --quantize"
    ):
        plan_memory(EngineConfig(**wanted, expert_memory=size), whole, gpu)


def test_a_short_context_sends_layers_to_host_memory(tmp_path, monkeypatch):
    """Where nobody asked for it; none without --resident-layers."""
    plan = plan_model(open_model(str(tiny.write("llama", tmp_path, "BF16"))), family="gpu")
    plan, wanted = (
        plan._replace(config=msgspec.structs.replace(plan.config, max_context=1 << 23)),
        dict(max_memory=1 << 30, resident_layers=AUTO_LAYERS),
    )
    monkeypatch.setattr(memory_plans, "LEAST_CONTEXT", 0)
    whole = plan_memory(EngineConfig(model="m", max_rows=2, **wanted), plan, SmallGPU())
    context = whole.config.max_context
    monkeypatch.setattr(memory_plans, "LEAST_CONTEXT", context + 1)
    fewer = plan_memory(EngineConfig(model="m", max_rows=2, **wanted), plan, SmallGPU())
    assert not whole.model.host_layers and fewer.model.host_layers and fewer.total <= 1 << 30
    asked = plan_memory(EngineConfig(model="m", max_rows=2, max_context=context // 2, **wanted), plan, SmallGPU())
    assert not asked.model.host_layers and asked.expectation == ""
    plain = plan_memory(EngineConfig(model="m", max_rows=2, max_memory=1 << 30), plan, SmallGPU())
    assert not plain.model.host_layers and plain.config.max_context == context


class PackingGPU(SmallGPU):
    repacks = True

    def read(self, tensor):
        return bytes(tensor.view().cast("B"))


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_what_a_load_needs_is_planned_and_given_back(quantize, tmp_path):
    gpu = PackingGPU()
    plan = plan_model(open_model(str(tiny.write("wide", tmp_path, "BF16"))), family="gpu", quantize=quantize)
    memory = plan_memory(EngineConfig(model="m", max_rows=4), plan, gpu)
    model = load_model(gpu, plan, start=False)
    runner = Runner(gpu, model, memory.config)
    assert sum(gpu.memory().values()) <= memory.first_bytes + memory.config.kv_bytes + memory.parts["load staging"]
    record_everything(runner)
    assert gpu.memory() == counted(memory.parts)
    model.wait()
    assert {job.step.symbol for job in gpu.loads[0] if job.step} >= {
        {"int4": "quantize_int4_bf16", "int8": "quantize_int8_bf16", "fp8": "quantize_e4m3_bf16"}[quantize]
    }
    assert gpu.memory() == counted({label: size for label, size in memory.parts.items() if label != "load staging"})


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_memory=600 << 20, num_pages=10_000), "over the 600 MiB of --max-memory: .* tokens fits, or raise"),
        (dict(max_memory=530 << 20), "of memory .*over the 530 MiB of --max-memory: use --quantize int4"),
        (
            dict(max_memory=535 << 20),
            "over the 535 MiB of --max-memory: lower --max-tokens-per-step or --max-concurrency",
        ),
        (dict(num_pages=1_300_000, max_context=256), "free on this GPU: --max-context x --max-concurrency of at most"),
        (dict(num_pages=600_000, max_context=256, gpu_memory_utilization=0.4), "over the 8722 MiB free on this GPU"),
    ],
)
def test_what_does_not_fit_is_counted_before_anything_is_allocated(tmp_path, options, message):
    gpu = SmallGPU()
    source = open_model(str(tiny.write("llama", tmp_path, "BF16")))
    with pytest.raises(ConfigError, match=message):
        plan_memory(EngineConfig(**dict(model="m", max_rows=4) | options), plan_model(source, family="gpu"), gpu)
    assert gpu.memory() == {}


def test_limits_are_kept(tmp_path):
    """The pages are as many as fit beside all else, and one more would not."""
    plan = plan_model(open_model(str(tiny.write("llama", tmp_path, "BF16"))), family="gpu")
    plan = plan._replace(config=msgspec.structs.replace(plan.config, max_context=1 << 20))
    for options in (dict(max_memory=1 << 30), dict(gpu_memory_utilization=0.1), dict(gpu_memory_utilization=0.05)):
        memory = plan_memory(EngineConfig(model="m", max_rows=16, **options), plan, SmallGPU())
        page_bytes = memory.config.kv_bytes // memory.config.num_pages
        assert (
            memory.limit is not None and memory.limit - 0.02 * memory.limit - page_bytes < memory.total <= memory.limit
        )
    with pytest.raises(ConfigError, match="gpu_memory_utilization 1.5 is not a number from 0.01 to 1"):
        EngineConfig(model="m", gpu_memory_utilization=1.5)


def test_a_cpu_has_no_gpu_memory_to_share(tmp_path):
    config = EngineConfig(model=str(tiny.write("llama", tmp_path)), device="cpu", gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="on a CPU use --max-memory"):
        load_engine(config, Phases(lambda: 0.0))
    config = EngineConfig(model=config.model, device="cpu", resident_layers=1)
    with pytest.raises(ConfigError, match="a CPU computes in host memory .leave --resident-layers out"):
        load_engine(config, Phases(lambda: 0.0))
    config = EngineConfig(model=config.model, device="cpu", expert_memory=1 << 30)
    with pytest.raises(
        ConfigError, match="expert_memory is for GPUs: a CPU computes in host memory .--lazy-experts reads"
    ):
        load_engine(config, Phases(lambda: 0.0))


def test_the_table_names_every_part(tmp_path):
    plan = plan_model(open_model(str(tiny.write("llama", tmp_path, "BF16"))), family="gpu")
    memory = plan_memory(EngineConfig(model="m", max_memory=1 << 30), plan, SmallGPU())
    lines = memory.describe().splitlines()
    assert "of 1024 MiB (--max-memory)" in lines[0]
    assert [line.split("  ")[1] for line in lines[1:-1]] == list(memory.parts)
