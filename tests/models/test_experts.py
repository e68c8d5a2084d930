"""Mixtures of experts: how files store them, conversion, quantization, and files that contradict themselves."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_families
from formats_build import safetensors
from session import Session, load

from zse.bench import roofline
from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.matrix import Rows
from zse.formats.opening import open_model
from zse.models.weight_plan import plan_model
from zse.quant.scheme import DenseScheme, parse_scheme

FAMILIES = ("qwen3_moe", "granitemoe", "glm4_moe")
REFERENCES = np.load(Path(__file__).with_name("references.npz"))
NEAR = dict(rtol=2e-5, atol=5e-5)


def fused(weights: dict) -> dict:
    """gate and up of all experts in one tensor, as Qwen3.5-MoE's files have them."""
    found = {name: values for name, values in weights.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        parts = {part: [weights[f"{at}{e}.{part}_proj.weight"] for e in range(8)] for part in ("gate", "up", "down")}
        found[f"{at}gate_up_proj"] = np.concatenate([np.stack(parts["gate"]), np.stack(parts["up"])], axis=1)
        found[f"{at}down_proj"] = np.stack(parts["down"])
    return found


def test_experts_in_one_tensor(device, tmp_path):
    path = tiny.save(tmp_path, tiny_families.CONFIGS["qwen3_moe"], fused(tiny_families.weights("qwen3_moe")), "F32")
    logits = Session(device, load(device, str(path))).run(tiny.tokens("qwen3_moe"))
    np.testing.assert_allclose(logits, REFERENCES["qwen3_moe"], **NEAR)


def test_stacks_of_4_bit_floats(device, tmp_path):
    """NAME_blocks and NAME_scales, as gpt-oss stores its experts: the logits are those of the numbers that they mean."""
    weights, rng = fused(tiny_families.weights("qwen3_moe")), np.random.default_rng()
    stored, plain = {}, dict(weights)
    for name, values in weights.items():
        if ".experts." not in name:
            stored[name] = ("F32", values.shape, np.ascontiguousarray(values, np.float32).tobytes())
            continue
        experts, rows, columns = values.shape
        nibbles = rng.integers(0, 16, values.shape).astype(np.uint8)
        scales = rng.integers(120, 124, (experts, rows, columns // 32)).astype(np.uint8)
        packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        stored[name + "_blocks"] = ("U8", (experts, rows, columns // 32, 16), packed.tobytes())
        stored[name + "_scales"] = ("U8", scales.shape, scales.tobytes())
        levels = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        plain[name] = levels[nibbles] * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=2)
    config = tiny_families.CONFIGS["qwen3_moe"]
    folders = tmp_path / "fp4", tmp_path / "plain"
    for folder in folders:
        folder.mkdir()
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    (folders[0] / "model.safetensors").write_bytes(safetensors(stored, {"format": "pt"}))
    tiny.save(folders[1], config, plain, "F32")
    ids = tiny.tokens("qwen3_moe")
    model = load(device, str(folders[0]))
    assert any(weight.scheme.name == "lut4-fp4-g32-e8m0" for weight in model.weights.values())
    got, expected = (Session(device, load(device, str(folder))).run(ids) for folder in folders)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("write", [tiny_families.write, tiny_families.write_gguf], ids=["hf", "gguf"])
def test_a_converted_file_gives_the_same(family, write, device, tmp_path):
    convert(str(write(family, tmp_path)), str(tmp_path / "model.zse"))
    logits = Session(device, load(device, str(tmp_path / "model.zse"))).run(tiny.tokens(family))
    np.testing.assert_allclose(logits, REFERENCES[family], **NEAR)


WIDE = dict(hidden_size=256, moe_intermediate_size=128, num_experts=8, vocab_size=160)


def wide(folder, write=tiny_families.write):
    """A model whose matrices are large enough to be quantized."""
    tiny_families.CONFIGS["wide_moe"] = tiny_families.CONFIGS["qwen3_moe"] | WIDE
    tiny_families.GGUF_ARCH["wide_moe"] = "qwen3moe"
    try:
        return str(write("wide_moe", folder))
    finally:
        del tiny_families.CONFIGS["wide_moe"], tiny_families.GGUF_ARCH["wide_moe"]


def meant(path: str, folder) -> str:
    """A directory of the numbers, f32, that the tensors of a `.zse` of a Hugging Face model stand for."""
    folder.mkdir()
    with open_model(path) as source:
        numbers = {name: Rows(source, info, 0, info.shape[0]).f32() for name, info in source.tensors.items()}
        return str(tiny.save(folder, source.hf_config, numbers, "F32"))


@pytest.mark.parametrize("quant", ["int4", "int8", "fp8"])
def test_experts_are_quantized_and_routers_are_not(quant, device, tmp_path):
    """A converted file gives the logits of the numbers that it stands for. fp8 is bf16 on a CPU, which has all e4m3 numbers,
    but not their products with a scale: 2^-9 of each, which are 2 % of a logit where a router then chooses others."""
    out = str(tmp_path / "model.zse")
    convert(wide(tmp_path), out, quant)
    with open_model(out) as source:
        schemes = {matrix.name: matrix.scheme for matrix in plan_model(source).matrices}
    stored = {"int4": "int4-g32", "int8": "int8-g32-sym", "fp8": "bf16"}[quant]
    assert schemes["layers.0.router"] == DenseScheme("f32")
    assert schemes["layers.0.gate_up_exps"] == schemes["layers.1.down_exps"] == parse_scheme(stored)
    logits = Session(device, load(device, out), activations="f32").run(tiny.tokens("qwen3_moe"))
    expected = Session(device, load(device, meant(out, tmp_path / "meant"))).run(tiny.tokens("qwen3_moe"))
    if quant == "fp8":
        assert np.abs(logits - expected).mean() < 0.02 * np.abs(expected).mean()
    else:
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=2e-4)  # logits up to 10, sums of 256 products


@pytest.mark.parametrize("quant", ["int4", "int8"])
def test_quantized_on_load_as_when_converted(quant, device, tmp_path):
    """From a folder and from a GGUF file, whose experts lie in one tensor, the kernels make the same numbers."""
    logits = []
    for write in (tiny_families.write, tiny_families.write_gguf):
        model = load(device, wide(tmp_path, write), quantize=quant)
        logits.append(Session(device, model, activations="int8").run(tiny.tokens("qwen3_moe")))
    np.testing.assert_array_equal(*logits)


def broken(family, folder, change) -> str:
    """A directory whose tensors `change` was applied to."""
    weights = tiny_families.weights(family)
    change(weights)
    return str(tiny.save(folder, tiny_families.CONFIGS[family], weights, "F32"))


EXPERT = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(f"{EXPERT}7.up_proj.weight"), r"experts\.7\.up_proj\.weight: the tensor is missing"),
        (
            lambda w: w.update({f"{EXPERT}8.gate_proj.weight": w[f"{EXPERT}0.gate_proj.weight"]}),
            r"experts\.8\.gate_proj\.weight: there are more than the 8 experts",
        ),
        (
            lambda w: w.update({f"{EXPERT}3.down_proj.weight": w[f"{EXPERT}3.down_proj.weight"][:, :16]}),
            r"experts\.3\.down_proj\.weight: has shape \[64, 16\], expected \[64, 32\]",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.gate.weight": w["model.layers.0.mlp.gate.weight"][:6]}),
            r"mlp\.gate\.weight: has shape \[6, 64\], expected \[8, 64\]",
        ),
    ],
    ids=["missing", "too many", "another width", "a router of other experts"],
)
def test_tensors_that_contradict_the_configuration(change, message, tmp_path):
    with open_model(broken("qwen3_moe", tmp_path, change)) as source, pytest.raises(FormatError, match=message):
        plan_model(source)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 16, r"ffn_gate_inp.weight: has shape \[8, 64\], expected \[16, 64\]"),
        ("expert_used_count", 9, "expert_used_count: 9 is outside 1..8"),
        ("expert_gating_func", 7, "expert_gating_func"),
        ("expert_feed_forward_length", 40, "40 is not a multiple of 32"),
        ("expert_group_count", 3, "3 do not divide 8 experts"),
    ],
)
def test_metadata_that_contradict_themselves(key, value, message, tmp_path, monkeypatch):
    metadata = tiny_families._metadata

    def changed(family, arch):
        keys = [entry for entry in metadata(family, arch) if entry[0] != f"{arch}.{key}"]
        return [*keys, (f"{arch}.{key}", "u32", value)]

    monkeypatch.setattr(tiny_families, "_metadata", changed)
    with open_model(str(tiny_families.write_gguf("qwen3_moe", tmp_path))) as source:
        with pytest.raises((FormatError, UnsupportedError), match=message):
            plan_model(source)


def test_a_stack_of_other_experts(tmp_path):
    """One tensor for all: fewer experts than the configuration says."""
    weights = fused(tiny_families.weights("qwen3_moe"))
    name = "model.layers.0.mlp.experts.down_proj"
    weights[name] = weights[name][:5]
    path = tiny.save(tmp_path, tiny_families.CONFIGS["qwen3_moe"], weights, "F32")
    with open_model(str(path)) as source, pytest.raises(FormatError, match="5 experts, the configuration says 8"):
        plan_model(source)


def test_too_many_experts(tmp_path):
    config = tiny_families.CONFIGS["qwen3_moe"] | dict(num_experts=1 << 19)
    path = tiny.save(tmp_path, config, tiny_families.weights("qwen3_moe"), "F32")
    (path / "config.json").write_text(json.dumps(config))
    with open_model(str(path)) as source, pytest.raises(FormatError, match="num_experts: 524288 is outside 1..1024"):
        plan_model(source)


def test_a_step_reads_the_experts_that_it_uses(device, tmp_path):
    """One token 3 of 8, many tokens all; each multiplies with 3 (zse bench and zse profile hold figures against that)."""
    model = load(device, str(tiny_families.write("qwen3_moe", tmp_path)))
    planner, kv = SimpleNamespace(activations="f32"), SimpleNamespace(dtype="f32")
    runner = SimpleNamespace(model=model, planner=planner, kv=kv, states=None)
    stacks = [weight for name, weight in model.weights.items() if name.endswith("_exps")]
    stored = sum(weight.scheme.nbytes(*weight.shape, weight.layout) for weight in stacks)
    products = sum(weight.shape[0] * weight.shape[1] for weight in stacks)
    others = sum(w.shape[0] * w.shape[1] for name, w in model.weights.items() if w not in stacks and name != "embed")
    one, many = (roofline.step_work(runner, tokens, tokens, 0) for tokens in (1, 1000))
    assert one.bytes == pytest.approx(roofline.weights_bytes(model) - stored * 5 / 8, abs=1)
    assert many.bytes == roofline.weights_bytes(model)
    assert one.f32 == others + products * 3 // 8 and many.f32 == 1000 * one.f32
    weight = stacks[0]
    work = roofline._weight_work("matmul_f32_t1", weight, {"experts": 2, "rows": weight.shape[0] // 8}, 3, {})
    assert work.f32 == weight.shape[0] * weight.shape[1] * 3 // 8
    assert work.bytes == pytest.approx(weight.scheme.nbytes(*weight.shape, weight.layout) * (1 - (7 / 8) ** 3), abs=1)
