"""Models with recurrent layers as they are published, quantized, and wrong. Their logits are in test_model_families.py."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import tiny_families
import tiny_hybrids
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf
from formats_build import random_blocks, safetensors
from session import Session, load

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.config import ModelConfig
from zse.models.load import plan_model, read_config
from zse.models.registry import config_from_hf
from zse.quant.pack import e4m3_to_f32

REFERENCES = np.load(Path(__file__).with_name("references.npz"))
FAR = dict(rtol=2e-5, atol=1e-4)  # as in test_model_families.py
ONE_OF_EACH = ("lfm2", "qwen3_next", "qwen3_5_moe", "granite_hybrid", "nemotron_h_moe")
CONFIGS = tiny_hybrids.CONFIGS


def logits_of(device, path, family, **options) -> np.ndarray:
    return Session(device, load(device, str(path)), **options).run(tiny.tokens(family))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_text_part_of_a_model_that_sees(family, device, tmp_path):
    """As Qwen3.5 is published: a wrapper, tensors of what it sees with, and the block that predicts a further token."""
    name = "Qwen3_5ForConditionalGeneration" if family == "qwen3_5" else "Qwen3_5MoeForConditionalGeneration"
    text = {key: value for key, value in CONFIGS[family].items() if key != "architectures"}
    outer = dict(architectures=[name], model_type="qwen3_5", vision_config={}, text_config=text)
    named = {each.replace("model.", "model.language_model.", 1): v for each, v in tiny_families.weights(family).items()}
    if family == "qwen3_5_moe":  # experts as transformers fuses them
        for layer in range(5):
            at = f"model.language_model.layers.{layer}.mlp.experts."
            parts = {
                kind: np.stack([named.pop(f"{at}{e}.{kind}_proj.weight") for e in range(8)])
                for kind in ("gate", "up", "down")
            }
            named[at + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            named[at + "down_proj"] = parts["down"]
    extra = {
        "model.visual.pos_embed.weight": np.zeros((4, 4), np.float32),
        "mtp.fc.weight": np.ones((4, 4), np.float32),
    }
    path = tiny.save(tmp_path, outer, named | extra, "F32")
    np.testing.assert_allclose(logits_of(device, path, family), REFERENCES[family], **FAR)


def test_layers_of_nemotron_as_transformers_5_lists_them(device, tmp_path):
    family = "nemotron_h_moe"
    names = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    config = dict(CONFIGS[family])
    config["layers_block_type"] = [names[kind] for kind in config.pop("hybrid_override_pattern")]
    named = {name.replace("backbone.", "model."): values for name, values in tiny_families.weights(family).items()}
    path = tiny.save(tmp_path, config, named, "F32")
    # Python writes an unlimited time step as JSON does not have it.
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text[:-1] + ', "time_step_limit": [0.0, Infinity]}')
    np.testing.assert_allclose(logits_of(device, path, family), REFERENCES[family], **FAR)
    convert(str(path), str(tmp_path / "model.zse"))
    np.testing.assert_allclose(logits_of(device, tmp_path / "model.zse", family), REFERENCES[family], **FAR)


def test_granite_4_without_recurrent_layers():
    """micro and 350M: the same class, all layers attend and turn."""
    changes = dict(layer_types=["attention"] * 4, position_embedding_type="rope")
    config = config_from_hf("config.json", CONFIGS["granite_hybrid"] | changes)
    assert not config.has_state and config.recurrent is None and config.rope_of(0) is not None
    assert config_from_hf("config.json", CONFIGS["granite_hybrid"]).rope_of(1) is None


def test_gguf_with_q_k_v_and_z_in_one(device, tmp_path):
    """qwen3next files of 2025: ssm_in has the rows of a head of keys, its values and gates behind one another."""
    family = "qwen3_next"
    weights = tiny_families._stacked(tiny_families.weights(family))
    made = tiny_hybrids.gguf_weights(CONFIGS[family], weights)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3NEXT, 5)
    tensors = []
    for name, values in (made | {name: v for name, v in weights.items() if "in_proj_qkvz" in name}).items():
        if not name.endswith(("in_proj_qkv.weight", "in_proj_z.weight")):
            called = (
                f"blk.{name.split('.')[2]}.ssm_in.weight" if "qkvz" in name else tiny_hybrids.gguf_name(names, name)
            )
            tensors.append(GGUFTensor(called, "F32", values.shape, np.ascontiguousarray(values, np.float32).tobytes()))
    path = tmp_path / "old.gguf"
    path.write_bytes(bytes(build_gguf(tiny_hybrids.metadata(family, "qwen3next"), tensors)))
    np.testing.assert_allclose(logits_of(device, path, family), REFERENCES[family], **FAR)


def test_blocks_behind_the_last_layer_are_not_read(tmp_path):
    """The block that predicts a further token counts among GGUF's."""
    family = "qwen3_5"
    keys = [
        key
        for key in tiny_hybrids.metadata(family, "qwen35")
        if not key[0].endswith(("block_count", "recurrent_layers"))
    ]
    keys += [("qwen35.block_count", "u32", 6), ("qwen35.nextn_predict_layers", "u32", 1)]
    keys += [("qwen35.attention.recurrent_layers", "bool[]", [True, True, False, True, False, False])]
    plain = open_model(str(tiny_families.write_gguf(family, tmp_path)))
    path = tmp_path / "mtp.gguf"
    path.write_bytes(bytes(build_gguf(keys, [GGUFTensor("token_embd.weight", "F32", (160, 64), bytes(4 * 160 * 64))])))
    with plain, open_model(str(path)) as source:
        wanted = read_config(plain)
        assert read_config(source) == ModelConfig.from_json(
            wanted.to_json().replace(b'"tied_head":false', b'"tied_head":true')
        )


# -- quantized


def quantized_gguf(family: str, folder: Path, exact: bool) -> Path:
    """A file whose matrices are blocks, or the same in f32: what llama.cpp leaves as it is stays so here."""
    config, arch = CONFIGS[family], tiny_hybrids.ARCHS.get(family, family)
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stacked, tensors, rng = tiny_families._stacked(tiny_families.weights(family)), [], np.random.default_rng(3)
    for name, values in tiny_hybrids.gguf_weights(config, stacked).items():
        called = tiny_hybrids.gguf_name(names, name)
        data, type = np.ascontiguousarray(values, np.float32), "F32"
        plain = (
            "conv" in called
            or "norm" in called
            or "ssm_a" in called
            and "alpha" not in called
            or "ffn_gate_inp" in called
        )
        if data.ndim >= 2 and data.shape[-1] % 32 == 0 and not plain:
            type = "Q4_K" if data.shape[-1] % 256 == 0 else "Q8_0"
            block = dict(Q4_K=256, Q8_0=32)[type]
            raw = random_blocks(rng, type, data.size // block, 0.02)
            wide = gguf.dequantize(
                np.frombuffer(raw, np.uint8).reshape(data.size // block, -1), gguf.GGMLQuantizationType[type]
            )
            data, type = (wide.reshape(data.shape), "F32") if exact else (data, type)
        raw = data.tobytes() if type == "F32" else raw
        tensors.append(GGUFTensor(called, type, data.shape, raw))
    path = folder / f"{family}{exact}.gguf"
    path.write_bytes(bytes(build_gguf(tiny_hybrids.metadata(family, arch), tensors)))
    return path


@pytest.mark.parametrize("family", [family for family in ONE_OF_EACH if family in tiny_hybrids.IN_GGUF])
def test_gguf_blocks_compute_what_they_mean(family, device, tmp_path, monkeypatch):
    """Q8_0, and Q4_K where rows have 256 columns: b and a of Qwen3-Next, which lie together in blocks, are rounded; all else is exact."""
    found, wanted = (logits_of(device, quantized_gguf(family, tmp_path, exact), family) for exact in (False, True))
    assert np.abs(found - wanted).mean() < 0.02 * np.abs(wanted).mean()


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.parametrize(("quant", "most"), [("int4", 0.75), ("fp8", 0.5)])
def test_quantized_files(quant, most, family, device, tmp_path):
    """What is small and steers a state stays as it is; the rest of random weights bears 4 bits badly: rows in a wrong order give
    logits that have nothing to do with the right ones (1.4 of their size)."""
    path = tmp_path / "model.zse"
    convert(str(tiny_families.write(family, tmp_path)), str(path), quant=quant)
    with open_model(str(path)) as source:
        plan = plan_model(source)
        kinds = {matrix.name.partition(".")[2].partition(".")[2]: matrix.scheme for matrix in plan.matrices}
        for name, scheme in kinds.items():
            if name.startswith(("mix_b", "mix_a")):
                assert str(scheme) in ("f32", "bf16", "f16"), (name, scheme)
            elif name in ("mix_in", "mix_qkvz"):
                assert str(scheme).startswith("int4" if quant == "int4" else "bf16"), (name, scheme)
        vectors = {vector.name for vector in plan.vectors}
        assert "layers.0.conv" in vectors
    found = logits_of(device, path, family)
    assert np.abs(found - REFERENCES[family]).mean() < most * np.abs(REFERENCES[family]).mean()


def test_fp8_of_several_matrices_in_one(device, tmp_path, monkeypatch):
    """Qwen3-Next's official files: blocks of 128 x 128 with a scale, in which heads of q, k, v and z begin. 8 bits become bf16 on a
    CPU, which rounds the product of a number and its scale."""
    family = "qwen3_next"
    sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128)
    config = CONFIGS[family] | dict(hidden_size=128) | sizes
    monkeypatch.setitem(tiny_families.CONFIGS, family, config)
    weights, stored = tiny_families.weights(family), {}
    for name, values in weights.items():
        stored[name] = ("F32", values.shape, values.tobytes())
        if "qkvz" in name:
            rows, columns = values.shape
            codes = np.random.default_rng(5).integers(0x20, 0x38, values.shape).astype(np.uint8)
            codes |= np.random.default_rng(6).integers(0, 2, values.shape).astype(np.uint8) << 7
            scales = np.random.default_rng(7).uniform(0.2, 0.5, (rows // 128, columns // 128)).astype(np.float32)
            weights[name] = e4m3_to_f32(codes) * scales.repeat(128, 0).repeat(128, 1)
            stored[name] = ("F8_E4M3", values.shape, codes.tobytes())
            stored[name + "_scale_inv"] = ("F32", scales.shape, scales.tobytes())
    quantized = dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config | quantized))
    (tmp_path / "fp8" / "model.safetensors").write_bytes(safetensors(stored, {"format": "pt"}))
    (tmp_path / "f32").mkdir()
    wanted = logits_of(device, tiny.save(tmp_path / "f32", config, weights, "F32"), family)
    convert(str(tmp_path / "fp8"), str(tmp_path / "model.zse"))
    for path in (tmp_path / "fp8", tmp_path / "model.zse"):
        found = logits_of(device, path, family)
        assert np.abs(found - wanted).mean() < 0.05 * np.abs(wanted).mean()


# -- wrong


WRONG = [
    ("lfm2", dict(layer_types=["conv"] * 4), FormatError, "layer_types: is not a list of 5 names"),
    ("lfm2", dict(layer_types=["conv"] * 4 + ["sliding"]), UnsupportedError, "sliding"),
    ("lfm2", dict(layer_types=["conv"] * 5), FormatError, "no layer has attention"),
    ("lfm2", dict(conv_L_cache=9), FormatError, "9 is outside 2..4"),
    ("lfm2", dict(conv_bias=True), UnsupportedError, "conv_bias"),
    ("qwen3_5", dict(linear_num_value_heads=5), FormatError, "recurrent heads"),
    ("qwen3_5", dict(linear_value_head_dim=48), FormatError, "value_size: 48"),
    ("qwen3_5", dict(linear_key_head_dim=None), FormatError, "linear_key_head_dim: is missing"),
    ("granite_hybrid", dict(mamba_proj_bias=True), UnsupportedError, "mamba_proj_bias"),
    ("granite_hybrid", dict(time_step_limit=[0.0]), FormatError, "time_step_limit: is not two numbers"),
    ("nemotron_h", dict(hybrid_override_pattern="MXM*-M"), UnsupportedError, "layer type 'X'"),
    ("nemotron_h", dict(mlp_hidden_act="gelu"), UnsupportedError, "gelu"),
]


@pytest.mark.parametrize(("family", "changes", "kind", "text"), WRONG, ids=[f"{c[0]}-{c[3]}" for c in WRONG])
def test_configurations_that_are_refused(family, changes, kind, text):
    with pytest.raises(kind) as raised:
        config_from_hf("config.json", CONFIGS[family] | changes)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("family", "tensor", "changed", "text"),
    [
        ("lfm2", "model.layers.0.conv.conv.weight", np.zeros((128, 1, 4), np.float32), "expected [128, 3]"),
        ("qwen3_5", "model.layers.0.linear_attn.A_log", np.full(6, 1e4, np.float32), "logarithm of a decay"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight", np.zeros((10, 64), np.float32), "12 rows"),
        ("granite_hybrid", "model.layers.0.mamba.in_proj.weight", np.zeros((8, 128), np.float32), "has shape [8, 128]"),
    ],
)
def test_tensors_that_are_refused(family, tensor, changed, text, device, tmp_path):
    weights = tiny_families.weights(family)
    assert tensor in weights
    path = tiny.save(tmp_path, CONFIGS[family], weights | {tensor: changed}, "F32")
    with pytest.raises(FormatError) as raised:
        load(device, str(path))
    assert text in str(raised.value) and tensor.split(".")[-2] in str(raised.value)
