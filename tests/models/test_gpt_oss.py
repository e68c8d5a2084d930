"""gpt-oss from GGUF files against transformers on tiny random weights: sinks, windows, yarn whose ramp is not rounded, biases of
router and experts, the clamped activation, experts as MXFP4."""

import gguf
import numpy as np
import pytest
import tiny
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf
from session import Session, load

from zse.errors import UnsupportedError
from zse.models import registry

HIDDEN, INNER, LAYERS, EXPERTS, CHOSEN, HEADS, KV_HEADS, DIM, VOCAB = 64, 96, 4, 5, 3, 6, 2, 32, 160
WINDOW, CONTEXT, ORIGINAL, FACTOR, EPS, THETA = 8, 256, 16, 4.0, 1e-5, 150.0
NEAR = dict(rtol=2e-5, atol=5e-5)  # as of other families


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
    return found


def expected(ids: np.ndarray) -> np.ndarray:
    """transformers' logits of the weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = dict(rope_type="yarn", factor=FACTOR, original_max_position_embeddings=ORIGINAL, rope_theta=THETA)
    config = transformers.GptOssConfig(
        **dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, head_dim=DIM),
        **dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_local_experts=EXPERTS),
        **dict(num_experts_per_tok=CHOSEN, sliding_window=WINDOW, max_position_embeddings=CONTEXT, rms_norm_eps=EPS),
        rope_parameters=rope | dict(beta_fast=32.0, beta_slow=1.0, truncate=False),
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.GptOssForCausalLM(config).eval()
    w = {name: torch.from_numpy(values.astype(np.float32)) for name, values in weights().items()}
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
        gate, up = (w[f"{ours}ffn_{name}_exps.weight"] for name in ("gate", "up"))
        both = torch.stack([gate, up], dim=2).reshape(EXPERTS, 2 * INNER, HIDDEN)  # rows of gate and up in turn
        state[f"{theirs}mlp.experts.gate_up_proj"] = both.transpose(1, 2)
        biases = [w[f"{ours}ffn_{name}_exps.bias"] for name in ("gate", "up")]
        state[f"{theirs}mlp.experts.gate_up_proj_bias"] = torch.stack(biases, dim=2).reshape(EXPERTS, 2 * INNER)
        state[f"{theirs}mlp.experts.down_proj"] = w[f"{ours}ffn_down_exps.weight"].transpose(1, 2)
        state[f"{theirs}mlp.experts.down_proj_bias"] = w[f"{ours}ffn_down_exps.bias"]
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


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


@pytest.mark.parametrize("experts", ["F32", "MXFP4"])
def test_logits_equal_transformers(experts, device, tmp_path):
    """MXFP4 holds these experts exactly."""
    ids = tiny.tokens("gpt-oss")
    session = Session(device, load(device, write(tmp_path, experts)))
    logits = session.run(ids)
    np.testing.assert_allclose(logits, expected(ids), **NEAR)
    session.reset()
    np.testing.assert_allclose(session.run(ids, [7, 17, 2, 14]), logits, rtol=1e-5, atol=3e-5)
    session.reset()
    np.testing.assert_allclose(session.run(ids, [1] * len(ids)), logits, rtol=1e-5, atol=3e-5)


def test_a_folder_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="GptOssForCausalLM.*GGUF"):
        registry.config_from_hf("config.json", {"architectures": ["GptOssForCausalLM"]})
