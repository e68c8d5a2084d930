"""gpt-oss from GGUF files and Hugging Face folders against transformers on tiny random weights: sinks, windows, yarn whose ramp is not rounded, biases of
router and experts, the clamped activation, experts as MXFP4."""

import json
import sys

import gguf
import msgspec
import numpy as np
import pytest
import tiny
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf
from formats_build import safetensors
from session import Session, load
from test_emulated_model import load_emulated

from zse.errors import ZSEError
from zse.formats.convert import convert
from zse.formats.matrix import Rows
from zse.formats.opening import open_model
from zse.kernel import cache
from zse_emulator import EmulateDevice

HIDDEN, INNER, LAYERS, EXPERTS, CHOSEN, HEADS, KV_HEADS, DIM, VOCAB = 64, 96, 4, 5, 3, 6, 2, 32, 160
WINDOW, CONTEXT, ORIGINAL, FACTOR, EPS, THETA = 8, 256, 16, 4.0, 1e-5, 150.0
NEAR = dict(rtol=2e-5, atol=5e-5)  # as of other families
WIDE = 64
REFERENCES = np.load(tiny.REFERENCES)


def weights() -> dict[str, np.ndarray]:
    """By GGUF name. Experts are multiples of a sixteenth, and of numbers that MXFP4 has."""
    q, kv = HEADS * DIM, KV_HEADS * DIM
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for name, rows, columns in (("q", q, HIDDEN), ("k", kv, HIDDEN), ("v", kv, HIDDEN), ("output", HIDDEN, q)):
            shapes |= {f"{at}attn_{name}.weight": (rows, columns), f"{at}attn_{name}.bias": (rows,)}
        shapes |= {f"{at}attn_norm.weight": (HIDDEN,), f"{at}post_attention_norm.weight": (HIDDEN,)}
        shapes |= {f"{at}attn_sinks.weight": (HEADS,)}
        shapes |= {f"{at}ffn_gate_inp.weight": (EXPERTS, HIDDEN), f"{at}ffn_gate_inp.bias": (EXPERTS,)}
        for name, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            shapes |= {
                f"{at}ffn_{name}_exps.weight": (EXPERTS, rows, columns),
                f"{at}ffn_{name}_exps.bias": (EXPERTS, rows),
            }
    found = {}
    for name, shape in shapes.items():
        wide = 3.0 if "sinks" in name else 0.5 if len(shape) == 1 or "gate_inp" in name or "bias" in name else 0.25
        found[name] = tiny.uniform("gpt-oss" + name, shape, wide)
        if "norm" in name:
            found[name] += np.float32(1)
        if "exps.weight" in name:
            found[name] = np.round(found[name] * 12) / np.float32(16)  # 0, 1, 2, 3 sixteenths
        if "exps.bias" in name:
            found[name] = np.round(found[name] * 64) / np.float32(64)  # exact in 16 bits
    return found


def widened(monkeypatch) -> np.ndarray:
    """The model with heads of a size that a GPU has; its reference sequence, of tokens that bf16 sends to no other expert."""
    monkeypatch.setattr(sys.modules[__name__], "DIM", WIDE)
    return REFERENCES["gpt_oss wide tokens"]


def folder_weights() -> dict[str, np.ndarray]:
    """By Hugging Face name: rows of gate and up in turn, experts' matrices turned."""
    w = weights()
    state = {"model.embed_tokens.weight": w["token_embd.weight"], "model.norm.weight": w["output_norm.weight"]}
    state["lm_head.weight"] = w["output.weight"]
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        for name, called in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
            for part in ("weight", "bias"):
                state[f"{theirs}self_attn.{called}.{part}"] = w[f"{ours}attn_{name}.{part}"]
        state[f"{theirs}self_attn.sinks"] = w[f"{ours}attn_sinks.weight"]
        state[f"{theirs}input_layernorm.weight"] = w[f"{ours}attn_norm.weight"]
        state[f"{theirs}post_attention_layernorm.weight"] = w[f"{ours}post_attention_norm.weight"]
        for part in ("weight", "bias"):
            state[f"{theirs}mlp.router.{part}"] = w[f"{ours}ffn_gate_inp.{part}"]
            gate, up = (w[f"{ours}ffn_{name}_exps.{part}"] for name in ("gate", "up"))
            both = np.stack([gate, up], 2).reshape(EXPERTS, 2 * INNER, *gate.shape[2:])
            suffix = "_bias" if part == "bias" else ""
            for name, values in (("gate_up", both), ("down", w[f"{ours}ffn_down_exps.{part}"])):
                turned = values.swapaxes(1, 2) if part == "weight" else values
                state[f"{theirs}mlp.experts.{name}_proj{suffix}"] = np.ascontiguousarray(turned)
    return state


def config_json() -> dict:
    """As the published models have it."""
    yarn = dict(
        rope_type="yarn", factor=FACTOR, original_max_position_embeddings=ORIGINAL, beta_fast=32.0, beta_slow=1.0
    )
    return dict(
        **dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, hidden_act="silu"),
        **dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, head_dim=DIM),
        **dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_local_experts=EXPERTS),
        **dict(num_experts_per_tok=CHOSEN, experts_per_token=CHOSEN, rms_norm_eps=EPS, rope_theta=THETA),
        **dict(sliding_window=WINDOW, max_position_embeddings=CONTEXT, swiglu_limit=7.0, tie_word_embeddings=False),
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        rope_scaling=yarn | dict(truncate=False),
    )


def blocks_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., K] → blocks u8 [..., K / 32, 16] and scales u8 [..., K / 32] as transformers packs MXFP4: the low nibble of a byte is
    the even column; GGUF's is of the first half."""
    raw = gguf.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType.MXFP4)
    raw = raw.reshape(*values.shape[:-1], values.shape[-1] // 32, 17)
    index = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], axis=-1)
    return index[..., 0::2] | index[..., 1::2] << 4, raw[..., 0]


def write_folder(folder, experts: str, **config):
    """A folder of it. experts: their type, but their biases are never blocks."""
    entries = {}
    config = config_json() | config
    for name, values in folder_weights().items():
        if experts == "MXFP4" and name.endswith(("gate_up_proj", "down_proj")):
            for part, data in zip(("blocks", "scales"), blocks_of(values.swapaxes(1, 2)), strict=True):
                entries[f"{name}_{part}"] = ("U8", data.shape, np.ascontiguousarray(data).tobytes())
        else:
            dtype = experts if ".experts." in name and experts != "MXFP4" else "F32"
            entries[name] = (dtype, values.shape, (values if dtype == "F32" else tiny.to_bf16(values)).tobytes())
    if experts == "MXFP4":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(entries, {"format": "pt"}))
    return str(folder)


def write(folder, experts: str = "F32"):
    """A GGUF file of it. experts: their type."""
    keys = [
        ("block_count", "u32", LAYERS),
        ("context_length", "u32", CONTEXT),
        ("embedding_length", "u32", HIDDEN),
        ("feed_forward_length", "u32", INNER),
        ("expert_feed_forward_length", "u32", INNER),
        ("expert_count", "u32", EXPERTS),
        ("expert_used_count", "u32", CHOSEN),
        ("attention.head_count", "u32", HEADS),
        ("attention.head_count_kv", "u32", KV_HEADS),
        ("attention.key_length", "u32", DIM),
        ("attention.value_length", "u32", DIM),
        ("attention.layer_norm_rms_epsilon", "f32", EPS),
        ("attention.sliding_window", "u32", WINDOW),
        ("rope.freq_base", "f32", THETA),
        ("rope.scaling.type", "string", "yarn"),
        ("rope.scaling.factor", "f32", FACTOR),
        ("rope.scaling.original_context_length", "u32", ORIGINAL),
    ]
    metadata = [("general.architecture", "string", "gpt-oss"), *((f"gpt-oss.{key}", *rest) for key, *rest in keys)]
    tensors = []
    for name, values in weights().items():
        kind = experts if name.endswith("exps.weight") else "F32"
        data = np.ascontiguousarray(values, np.float32)
        if kind != "F32":
            data = gguf.quantize(data, gguf.GGMLQuantizationType[kind])
        tensors.append(GGUFTensor(name, kind, values.shape, data.tobytes()))
    path = folder / "gpt-oss.gguf"
    path.write_bytes(bytes(build_gguf(metadata, tensors)))
    return str(path)


@pytest.mark.exhaustive("beside PyTorch")
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss wide"])
def test_references_are_those_of_transformers(name, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import make_references

    found = make_references.gpt_oss(name, REFERENCES.get(f"{name} tokens"))
    np.testing.assert_allclose(found, REFERENCES[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", ["F32", "MXFP4"])
def test_logits_equal_transformers(experts, device, tmp_path):
    """MXFP4 holds these experts exactly."""
    ids = tiny.tokens("gpt-oss")
    session = Session(device, load(device, write(tmp_path, experts)))
    logits = session.run(ids)
    np.testing.assert_allclose(logits, REFERENCES["gpt_oss"], **NEAR)
    session.reset()
    np.testing.assert_allclose(session.run(ids, [7, 17, 2, 14]), logits, rtol=1e-5, atol=3e-5)
    session.reset()
    np.testing.assert_allclose(session.run(ids, [1] * len(ids)), logits, rtol=1e-5, atol=3e-5)


def planes(model) -> dict[str, bytes]:
    """Everything that was loaded, as it lies in memory."""
    found = {name: bytes(vector.view()) for name, vector in model.vectors.items()}
    for name, weight in model.weights.items():
        found |= {f"{name}.{plane}": bytes(tensor.view()) for plane, tensor in weight.planes.items()}
    return found


@pytest.mark.parametrize("experts", ["F32", "BF16", "MXFP4"])
def test_a_folder_is_the_gguf_file(experts, device, tmp_path):
    """Bit for bit: rows out of turn, turned matrices, MXFP4's other order of nibbles; and so are what is converted of it, and read
    from that."""
    files = write_folder(tmp_path, experts), write(tmp_path, experts)
    folder, file = (load(device, path) for path in files)
    near = msgspec.structs.replace(file.config, norm_eps=EPS)  # GGUF has it in f32
    assert folder.config == near
    assert {name: weight.scheme for name, weight in folder.weights.items()} == {
        name: weight.scheme for name, weight in file.weights.items()
    }
    found, expected = planes(folder), planes(file)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    convert(files[0], tmp_path / "m.zse")
    again = planes(load(device, str(tmp_path / "m.zse")))
    assert [name for name in found if found[name] != again[name]] == []


@pytest.mark.parametrize("experts", ["F32", "MXFP4"])
def test_a_folder_gives_the_logits_of_transformers(experts, device, tmp_path):
    session = Session(device, load(device, write_folder(tmp_path, experts)))
    np.testing.assert_allclose(session.run(tiny.tokens("gpt-oss")), REFERENCES["gpt_oss"], **NEAR)


@pytest.mark.exhaustive("beside PyTorch")
def test_mxfp4_means_what_transformers_reads_in_it(tmp_path):
    """Random bytes: every index with every exponent that is a number of f32."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(5)
    path = write_folder(tmp_path, "MXFP4")
    header = (tmp_path / "model.safetensors").read_bytes()
    with open_model(path) as source:
        for name in ("gate", "up"):
            q = source.tensors[f"model.layers.0.mlp.experts.{name}_proj"].parts["q"]
        blocks = rng.integers(0, 256, (EXPERTS, 2 * INNER, HIDDEN // 32, 16)).astype(np.uint8)
        scale_at = source.tensors["model.layers.0.mlp.experts.up_proj"].parts["scale"].offset
    scales = rng.integers(1, 253, (EXPERTS, 2 * INNER, HIDDEN // 32)).astype(np.uint8)
    data = bytearray(header)
    data[q.offset : q.offset + blocks.nbytes] = blocks.tobytes()
    data[scale_at : scale_at + scales.nbytes] = scales.tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    meant = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    meant = meant.numpy().swapaxes(1, 2)  # [experts, rows, columns]
    with open_model(path) as source:
        for first, name in enumerate(("gate", "up")):
            info = source.tensors[f"model.layers.0.mlp.experts.{name}_proj"]
            rows = Rows(source, info, 0, info.shape[0]).f32().reshape(EXPERTS, INNER, HIDDEN)
            np.testing.assert_array_equal(rows, meant[:, first::2])
            part = Rows(source, info, 48, 112).f32()
            np.testing.assert_array_equal(part, rows.reshape(-1, HIDDEN)[48:112])


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_a_folder_is_quantized_as_its_gguf_file(quantize, device, tmp_path):
    """Turned matrices too, while they are loaded and when they are converted."""
    folder, file = write_folder(tmp_path, "F32"), write(tmp_path)
    found, expected = (planes(load(device, path, quantize=quantize)) for path in (folder, file))
    assert [name for name in found if found[name] != expected[name]] == []
    convert(folder, tmp_path / "folder.zse", quant=quantize)
    convert(file, tmp_path / "file.zse", quant=quantize)
    found, expected = (planes(load(device, str(tmp_path / name))) for name in ("folder.zse", "file.zse"))
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("swiglu_limit", 6.0, "swiglu_limit"), ("num_local_experts", 4, "router"), ("intermediate_size", 64, "gate_proj")],
)
def test_a_folder_that_says_otherwise_is_refused(name, value, message, device, tmp_path):
    with pytest.raises(ZSEError, match=message):
        load(device, write_folder(tmp_path, "MXFP4", **{name: value}))


@pytest.mark.each("like")
@pytest.mark.parametrize(
    "like, sizes, experts",
    [
        ("sm_90a", [17, 1], "MXFP4"),
        ("sm_80", [5, 8, 4, 1], "F32"),
        ("sm_80", [17, 1], "BF16"),
        ("gfx90a", [17, 1], "MXFP4"),
        ("metal3.1", [5, 12, 1], "BF16"),
    ],
)
def test_on_a_gpu(like, sizes, experts, kept_kernels, monkeypatch, tmp_path):
    """In the emulator, with heads of a size that a GPU has: a prompt longer than the window, then a token."""
    ids = widened(monkeypatch)[:18]
    emulated = EmulateDevice(like, cache.package_variants(like))
    model, _ = load_emulated(emulated, write(tmp_path, experts))
    logits = Session(emulated, model, rows=1, max_tokens=32, context=32).run(ids, sizes)
    reference = REFERENCES["gpt_oss wide"][:18]
    # bf16 between the operations, as in test_emulated_model.py.
    assert np.abs(logits - reference).max() < 0.05 * np.abs(reference).max()
