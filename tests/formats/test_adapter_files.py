"""LoRA folders as PEFT writes them: what is read, and what is refused by its name."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import tiny_adapters  # noqa: E402

from zse.errors import FormatError, UnsupportedError  # noqa: E402
from zse.formats.adapter import numbers_of, open_adapter  # noqa: E402
from zse.lora.targets import Targets, read_image  # noqa: E402
from zse.models import registry  # noqa: E402


def targets(family="llama"):
    return Targets(registry.config_from_hf("config.json", tiny_adapters.config_of(family)))


def parts_of(image):
    """What a slot would hold, f64 [numbers]."""
    whole = np.zeros(targets().size * image.rank)
    for at, data in image.parts:
        numbers = np.frombuffer(data, np.float16)
        whole[at : at + len(numbers)] = numbers
    return whole


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_what_is_read(dtype, tmp_path):
    found = tiny_adapters.adapter("llama", 1, rank=4)
    file = open_adapter(str(tiny_adapters.write(found, tmp_path, dtype=dtype)))
    assert file.pairs.keys() == found.keys()
    for module, (down, up, scale) in found.items():
        pair = file.pairs[module]
        assert pair.scale == scale and pair.rank == 4
        near = 2.0**-7 if dtype == "BF16" else 0  # the writer cuts
        np.testing.assert_allclose(numbers_of(pair.down), down, rtol=near)
        np.testing.assert_allclose(numbers_of(pair.up), up, rtol=near)
    file.close()


def test_scales_and_ranks_of_modules(tmp_path):
    """alpha / r, alpha / sqrt(r), and patterns, by hand."""
    found = tiny_adapters.adapter("llama", 1, rank=4, only=("q_proj", "v_proj"))
    first, second = next(name for name in found if "q_proj" in name), next(name for name in found if "v_proj" in name)
    path = tiny_adapters.write(found, tmp_path, 4, 6.0, alpha_pattern={"v_proj": 10, "layers.0.self_attn.q_proj": 2})
    file = open_adapter(str(path))
    assert file.pairs[first].scale == 0.5 and file.pairs[second].scale == 2.5
    file.close()
    file = open_adapter(str(tiny_adapters.write(found, tmp_path, 4, 6.0, use_rslora=True)))
    assert {pair.scale for pair in file.pairs.values()} == {3.0}
    file.close()
    other = tiny_adapters.adapter("llama", 2, rank=8, only=("v_proj",))
    path = tiny_adapters.write(found | other, tmp_path, 4, 6.0, rank_pattern={"v_proj": 8})
    assert read_image(str(path), targets(), 16).own_rank == 8


def test_what_f16_loses(tmp_path):
    """Numbers far from 1 in A and B: 2^-11 of each, or 2^-25 of the largest."""
    rng = np.random.default_rng(3)
    found = {
        module: (down * np.float32(3e-7), (up * np.float32(2e5)).astype(np.float32), scale)
        for module, (down, up, scale) in tiny_adapters.adapter("llama", 1).items()
    }
    module = "model.layers.1.mlp.down_proj"
    down, up, scale = found[module]
    found[module] = down * rng.standard_normal(down.shape).astype(np.float32), up, scale
    image = read_image(str(tiny_adapters.write(found, tmp_path)), targets(), 16)
    target = targets().by_name[1, "down"]
    whole, rank = parts_of(image), image.rank
    a = whole[target.down * rank : (target.down + target.columns) * rank].reshape(rank, -1)
    b = whole[target.up * rank : (target.up + target.rows) * rank].reshape(rank, -1)
    got = np.frombuffer(image.scales, np.float32)[target.product] * (b.T @ a)
    down, up, scale = (np.asarray(each, np.float64) for each in found[module])
    bound = scale * (np.abs(up) @ np.abs(down)) * 2.0**-10 + scale * np.abs(up).max() * np.abs(down).max() * 2.0**-21
    assert (np.abs(got - scale * (up @ down)) <= bound).all()


CONFIGS = [
    (dict(peft_type="IA3"), UnsupportedError, "peft_type 'IA3' is not supported; supported: LORA"),
    (dict(use_dora=True), UnsupportedError, "use_dora"),
    (dict(modules_to_save=["lm_head"]), UnsupportedError, "modules_to_save"),
    (dict(bias="all"), UnsupportedError, "bias 'all' is not supported; supported: none"),
    (dict(lora_bias=True), UnsupportedError, "lora_bias"),
    (dict(fan_in_fan_out=True), UnsupportedError, "fan_in_fan_out"),
    (dict(layer_replication=[[0, 1]]), UnsupportedError, "layer_replication"),
    (dict(target_parameters=["x"]), UnsupportedError, "target_parameters"),
    (dict(trainable_token_indices=[1]), UnsupportedError, "trainable_token_indices"),
    (dict(rank_pattern={"(a+)+$": 8}), UnsupportedError, "rank_pattern"),
    (dict(rank_pattern=[1]), FormatError, "rank_pattern: is not an object"),
    (dict(alpha_pattern={"q_proj": "x"}), FormatError, "alpha_pattern: x is not a number"),
    (dict(r=0), FormatError, "r: 0 is not a whole number from 1 to 1024"),
    (dict(r=True), FormatError, "r: True is not"),
    (dict(r=5), FormatError, "adapter_config.json says rank 5"),
    (dict(lora_alpha=None), FormatError, "lora_alpha: None is not a number"),
    (dict(lora_alpha="16"), FormatError, "lora_alpha: 16 is not a number"),
    (dict(lora_alpha=1e300), FormatError, "lora_alpha: 1e"),
]


@pytest.mark.parametrize(
    ("fields", "kind", "message"), CONFIGS, ids=[str(next(iter(each[0].items()))) for each in CONFIGS]
)
def test_configurations_that_are_refused(fields, kind, message, tmp_path):
    path = tiny_adapters.write(tiny_adapters.adapter("llama", 1), tmp_path, **fields)
    with pytest.raises(kind) as refused:
        read_image(str(path), targets(), 16)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def tensor(shape, dtype="F32"):
    return dtype, shape, np.zeros(shape, np.float32).tobytes()


NAMES = [
    ("model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "an adapter of an expert"),
    ("model.embed_tokens.lora_embedding_A", "an adapter of an embedding"),
    ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
    ("model.layers.0.self_attn.q_proj.lora_B.bias", "lora_bias"),
    ("lm_head.weight", "modules_to_save"),
    ("model.layers.0.self_attn.q_proj.lora_C.weight", "another kind of adapter"),
    ("lm_head.lora_A.weight", "an adapter of 'lm_head' is not supported; supported: down_proj, gate_proj"),
    ("model.layers.9999.self_attn.q_proj.lora_A.weight", "an adapter of 'model.layers.9999"),
    ("model.layers.0.self_attn.rotary.lora_A.weight", "an adapter of 'model.layers.0.self_attn.rotary'"),
    ("vision.layers.0.self_attn.q_proj.lora_A.weight", "an adapter of 'vision.layers.0"),
]


@pytest.mark.parametrize(("name", "message"), NAMES, ids=[name for name, _ in NAMES])
def test_modules_that_are_refused(name, message, tmp_path):
    tensors = {f"base_model.model.{name}": tensor((4, 64))}
    if name.endswith("lora_A.weight"):
        tensors[f"base_model.model.{name.replace('lora_A', 'lora_B')}"] = tensor((64, 4))
    path = tiny_adapters.write(tiny_adapters.adapter("llama", 1, only=("v_proj",)), tmp_path, tensors=tensors)
    with pytest.raises(UnsupportedError) as refused:
        read_image(str(path), targets(), 16)
    assert message in str(refused.value)


def test_files_that_are_refused(tmp_path):
    found = tiny_adapters.adapter("llama", 1, only=("q_proj",))
    module = next(iter(found))
    path = tiny_adapters.write(found, tmp_path / "a")
    with pytest.raises(UnsupportedError, match=r"rank 4 is not supported; supported: up to 3 \(--adapter-rank\)"):
        read_image(str(path), targets(), 3)
    down, up, scale = found[module]
    for wrong, message in (
        ((down[:, :8], up), r"has lora_A \[4, 8\] and lora_B \[\d+, 4\]; the model's weight is"),
        ((down, up[:8]), r"has lora_A \[4, 64\] and lora_B \[8, 4\]"),
        ((down, up[:, :3]), "adapter_config.json says rank 4"),
        ((down * np.float32("nan"), up), "lora_A.weight: holds values that are not finite"),
    ):
        tiny_adapters.write({**found, module: (*wrong, scale)}, path)
        with pytest.raises(FormatError, match=message):
            read_image(str(path), targets(), 16)
    alone = {f"base_model.model.{module}x.lora_A.weight": tensor((4, 64))}
    with pytest.raises(FormatError, match="stands alone: a module has lora_A and lora_B"):
        read_image(str(tiny_adapters.write(found, path, tensors=alone)), targets(), 16)
    whole = {f"base_model.model.{module}.lora_A.weight": ("I32", (4, 64), bytes(4 * 4 * 64))}
    with pytest.raises(UnsupportedError, match="dtype 'I32'"):
        read_image(str(tiny_adapters.write(found, path, tensors=whole)), targets(), 16)
    with pytest.raises(FormatError, match="has no lora_A"):
        read_image(str(tiny_adapters.write({}, path)), targets(), 16)
    twice = found | {module.removeprefix("model."): found[module]}
    with pytest.raises(FormatError, match="is the second module for one weight"):
        read_image(str(tiny_adapters.write(twice, path)), targets(), 16)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(FormatError, match="cannot be opened"):
        read_image(str(path), targets(), 16)
    (path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(FormatError, match="is a pickle"):
        read_image(str(path), targets(), 16)
    (path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(FormatError, match="is not a JSON object"):
        read_image(str(path), targets(), 16)
    with pytest.raises(FormatError, match="adapter_config.json: is missing"):
        read_image(str(tmp_path), targets(), 16)


def test_an_adapter_that_changes_nothing_takes_no_slot_space(tmp_path):
    found = {
        module: (down, np.zeros_like(up), scale)
        for module, (down, up, scale) in tiny_adapters.adapter("llama", 1).items()
    }
    image = read_image(str(tiny_adapters.write(found, tmp_path)), targets(), 16)
    assert not image.parts and not image.members and not any(np.frombuffer(image.scales, np.float32))
