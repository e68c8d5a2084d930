"""The launches of a step as text, for a reader and for a diff: `launches/CASE.txt` has one line a launch, with its grid
and its numbers (* is memory, 0 none, ~ "may overlap with the launch before").

A change of the planner shows here what it does to every family; `pytest tests/models/test_launches.py --update-golden`
rewrites the files, and the diff is reviewed."""

from pathlib import Path

import pytest
import tiny
import tiny_families
from null_source import signatures, source_of

from zse.cache.layout import KVCache
from zse.cache.states import state_cache
from zse.models.load import load_model, plan_model
from zse.models.registry import forward_of
from zse.plan.record import Planner, StepBuffers
from zse.runtime.device import Launch
from zse.runtime.null import NullDevice, NullGPU
from zse.runtime.symbol import Sym

FOLDER = Path(__file__).with_name("launches")
WIDE = dict(hidden_size=256, intermediate_size=512, vocab_size=512, num_hidden_layers=2, head_dim=64)


def like(family: str, **changes) -> dict:
    return tiny.config(family) | WIDE | changes


WINDOWS = dict(num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
CONFIGS = {
    "llama": like("llama"),
    "llama-bias": like("llama", attention_bias=True, tie_word_embeddings=True),
    "mistral": like("mistral_window"),
    "qwen2": like("qwen2"),
    "qwen3": like("qwen3"),
    "gemma3": like("gemma3", **WINDOWS),
    **{family: config | {**WIDE, "num_hidden_layers": 3} for family, config in tiny_families.CONFIGS.items()},
}
# Their heads are as wide as the hidden size says, which their longrope and windows fit.
for family in ("phi4_mini", "minicpm"):
    CONFIGS[family] = tiny_families.CONFIGS[family] | dict(intermediate_size=512, num_hidden_layers=3)
for family in ("qwen3_moe", "glm4_moe"):
    CONFIGS[family] |= dict(moe_intermediate_size=128)
# Heads of the sizes that real models have.
LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 64}
LINEAR |= dict(linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=8, linear_num_value_heads=16)
CONFIGS["qwen3_5"] |= LINEAR
CONFIGS["granite_hybrid"] |= dict(
    mamba_n_heads=8, mamba_d_head=64, mamba_d_state=128, layer_types=["mamba", "attention", "mamba"]
)
# Scheme of the weights by a part of their name. Mixed as GGUF files mix them: v and down, and in part gate, differ.
INT4 = {"embed": "int8-g32-sym", "lm_head": "int8-g32-sym", "": "int4-g32"}
LATENT = {"k_b_proj": "f16", "v_b_proj": "f16", **INT4}
MIXED = {"v_proj": "int6-g16", "1.mlp.gate": "int8-g32-sym", "down": "int6-g16", **INT4}
MOE = {"mlp.gate.weight": "f32", "shared_expert_gate": "f32", **INT4}
PARTLY_DENSE = {"o_proj": "f16", "gate": "bf16", "up": "bf16", **INT4}
GPU_INT4 = {"embed": "int8-g32-sym", "lm_head": "int8-g32-sym", "": "int4-g128"}
GPU_MIXED = {
    "v_proj": "int8-g32-sym",
    "1.mlp.gate": "int8-g32-sym",
    "embed": "bf16",
    "lm_head": "bf16",
    "": "int4-g128",
}
FP8 = {"embed": "bf16", "lm_head": "bf16", "": "fp8-row"}
FP8_MIXED = {"v_proj": "bf16", "1.mlp.gate": "bf16", "embed": "bf16", "lm_head": "bf16", "": "fp8-row"}
BF16 = {"": "bf16"}
# name → (config, schemes, options of the Planner)
CPU = {
    "llama-int4": ("llama", INT4, {}),
    "llama-mixed": ("llama", MIXED, {}),
    "llama-partly-dense": ("llama", PARTLY_DENSE, {}),
    "llama-int4-f32": ("llama", INT4, dict(activations="f32")),
    "llama-bf16": ("llama", BF16, {}),
    "llama-bias-mixed": ("llama-bias", MIXED, {}),
    "mistral-int4": ("mistral", INT4, {}),
    "qwen2-int4": ("qwen2", INT4, {}),
    "qwen2-mixed": ("qwen2", MIXED, {}),
    "qwen3-int4": ("qwen3", INT4, {}),
    "gemma3-int4": ("gemma3", INT4, {}),
    "gemma3-mixed": ("gemma3", MIXED, {}),
    **{f"{family}-int4": (family, INT4, {}) for family in ("olmo2", "granite", "cohere2")},
    "minicpm3-int4": ("minicpm3", LATENT, {}),
    **{f"{family}-int4": (family, MOE, {}) for family in ("qwen3_moe", "qwen2_moe", "glm4_moe")},
    "qwen3_moe-bf16": ("qwen3_moe", BF16, {}),
}
GPU = {
    "llama-int4": ("llama", GPU_INT4, {}),
    "llama-int4-bf16": ("llama", GPU_INT4, dict(activations="bf16")),
    "llama-mixed": ("llama", GPU_MIXED, {}),
    "llama-bf16": ("llama", BF16, {}),
    "llama-fp8": ("llama", FP8, {}),
    "llama-fp8-mixed": ("llama", FP8_MIXED, {}),
    "llama-fp8-deterministic": ("llama", FP8, dict(deterministic=True)),
    "llama-int4-deterministic": ("llama", GPU_INT4, dict(deterministic=True)),
    "llama-bias-fp8": ("llama-bias", FP8, {}),
    "mistral-int4": ("mistral", GPU_INT4, {}),
    "qwen2-int4": ("qwen2", GPU_INT4, {}),
    "qwen2-mixed": ("qwen2", GPU_MIXED, {}),
    "qwen3-fp8": ("qwen3", FP8, {}),
    "gemma3-int4": ("gemma3", GPU_INT4, {}),
    "gemma3-fp8": ("gemma3", FP8, {}),
    "gemma3-fp8-mixed": ("gemma3", FP8_MIXED, {}),
    **{
        f"{family}-int4": (family, GPU_INT4, {})
        for family in ("gemma2", "phi4_mini", "olmo3", "smollm3", "ministral3", "glm4", "cohere2")
    },
    **{f"{family}-fp8": (family, FP8, {}) for family in ("olmo2", "cohere")},
    "qwen3_moe-int4": ("qwen3_moe", {"mlp.gate.weight": "f32", **GPU_INT4}, {}),
    "glm4_moe-fp8": ("glm4_moe", {"mlp.gate.weight": "f32", **FP8}, {}),
}
RECURRENT = {"in_proj_b": "bf16", "in_proj_a": "bf16", "conv1d": "f32"}
CPU["qwen3_5-int4"] = ("qwen3_5", RECURRENT | INT4, {})
GPU["qwen3_5-int4"] = ("qwen3_5", RECURRENT | GPU_INT4, {})
GPU["granite_hybrid-bf16"] = ("granite_hybrid", BF16, {})
# The inner width is no multiple of 16: gate and up are not joined, and the products do not gate.
ODD = {"cpu": ("odd", BF16, {}), "gpu": ("odd", BF16, {})}
CONFIGS["odd"] = like("llama", intermediate_size=32 * 15)
CASES = [("cpu", name) for name in CPU] + [("gpu", name) for name in GPU] + [("cpu", "odd"), ("gpu", "odd")]

MAX_TOKENS, MAX_ROWS, CONTEXT = 512, 16, 1024
DECODE = dict(every_token=True, longest_run=1)
STEPS = {
    "decode 1": dict(max_tokens=1, **DECODE),
    "decode 16": dict(max_tokens=16, **DECODE),
    "verify 16": dict(max_tokens=16, every_token=True),
    "mixed 64": dict(max_tokens=64),
    "prompt": dict(max_tokens=MAX_TOKENS),
}


def decoder_of(family: str, name: str) -> Planner:
    config, schemes, options = (CPU if family == "cpu" else GPU).get(name) or ODD[family]
    manifest = signatures(family)
    device = NullDevice(2, manifest) if family == "cpu" else NullGPU("sm_90a", manifest)
    plan = plan_model(source_of(CONFIGS[config], schemes), family=family)
    model = load_model(device, plan, start=False)
    kv = KVCache(device, plan.config, 64, "f16" if family == "cpu" else "bf16")
    buffers = StepBuffers.allocate(
        device, plan.config, max_tokens=MAX_TOKENS, max_rows=MAX_ROWS, max_pages=CONTEXT // 16
    )
    forward = forward_of(plan.config)
    states = state_cache(device, forward, MAX_ROWS) if plan.config.has_state else None
    return Planner(device, forward, model, kv, buffers, states=states, **options)


def number(value) -> str:
    """A launch's argument or grid dimension: memory is *, a null pointer 0."""
    if isinstance(value, Sym):
        return value.name + (f"/{value.divisor}" if value.divisor > 1 else "") + "*" * (value.factor > 1)
    if value is None:
        return "0"
    if isinstance(value, bool | int | float):
        return format(value, "g") if isinstance(value, float) else str(int(value))
    return "*"


def text_of(launch) -> str:
    grid = " ".join(map(number, launch.grid))
    overlaps = "~ " if launch.independent else ""
    values = [launch.args[name] for name, _ in launch.params] if isinstance(launch, Launch) else launch.args.values()
    return f"{overlaps}{launch.symbol} [{grid}] {' '.join(map(number, values))}"


def launches(decoder) -> str:
    """The recordings of all kinds of steps."""
    parts = []
    for title, options in STEPS.items():
        recorder = decoder.device.record()
        decoder.record(recorder, **options)
        parts.append((title, recorder.finish()))
    recorder = decoder.device.record()
    decoder.record_hidden(recorder, max_tokens=MAX_TOKENS)
    parts.append(("hidden", recorder.finish()))
    recorder = decoder.device.record()
    decoder.record_head(recorder, decoder.buffers.logit_rows, decoder.buffers.logits)
    parts.append(("head", recorder.finish()))
    return "".join(
        f"# {title}: {len(graph.launches)} launches, symbols {' '.join(graph.symbols)}\n"
        + "".join(f"{text_of(launch)}\n" for launch in graph.launches)
        for title, graph in parts
    )


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda value: value)
def test_launches_are_those_of_the_golden_files(family, name, request):
    found = launches(decoder_of(family, name))
    path = FOLDER / f"{family}-{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(found)
    assert found == path.read_text()
