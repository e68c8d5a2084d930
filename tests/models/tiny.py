"""Tiny random models of each family as Hugging Face directories, made without transformers.

Weights come from raw PCG64 bits, whose stream NumPy guarantees, so that the committed reference logits of
references.npz (made by make_references.py with transformers) stay valid.
"""

import json
import struct
import zlib
from pathlib import Path

import numpy as np

_BASE = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
    rope_theta=10000.0,
)
_LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
_GEMMA = {name: value for name, value in _BASE.items() if name not in ("hidden_act", "rope_theta")} | dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    num_hidden_layers=7,
    sliding_window=8,
    head_dim=64,
    query_pre_attn_scalar=48,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    num_key_value_heads=1,
)

# Both spellings of RoPE appear: transformers 4 (rope_theta, rope_scaling, ...) and 5 (rope_parameters).
CONFIGS = {
    "llama": _BASE | dict(architectures=["LlamaForCausalLM"], model_type="llama", head_dim=64),
    "llama3": _BASE
    | dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=_LLAMA3,
        rope_theta=500000.0,
    ),
    "llama_yarn": _BASE
    | dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0),
    ),
    "mistral": _BASE
    | dict(
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=None,
        head_dim=128,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    "mistral_window": _BASE | dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=9),
    "qwen2": {name: value for name, value in _BASE.items() if name != "head_dim"}
    | dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "qwen2_window": _BASE
    | dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_size=128,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3": _BASE
    | dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        head_dim=128,
        rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1000000.0),
    ),
    "gemma3": _GEMMA | dict(rope_theta=1000000.0, rope_local_base_freq=10000.0, sliding_window_pattern=6),
    "gemma3_linear": _GEMMA
    | dict(
        head_dim=32,
        num_hidden_layers=3,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
}
FAMILIES = tuple(CONFIGS)
# Large enough to be quantized; has no committed reference.
CONFIGS["wide"] = _BASE | dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=256,
    intermediate_size=320,
    num_attention_heads=4,
    head_dim=64,
)
TOKENS = 40  # of the reference sequence: longer than every window, more than two KV pages


def config(family: str) -> dict:
    return CONFIGS[family]


def uniform(name: str, shape, spread: float) -> np.ndarray:
    """f32 in [-spread, spread), from raw bits seeded by the name."""
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
    return unit.astype(np.float32).reshape(shape) * np.float32(spread)


def tokens(family: str) -> np.ndarray:
    raw = np.random.PCG64(zlib.crc32(b"tokens" + family.encode())).random_raw(TOKENS)
    return (raw % np.uint64(157)).astype(np.int32) + 3


def shapes(family: str) -> dict[str, tuple[int, ...]]:
    """Tensor names of a Hugging Face file and their shapes. make_references.py loads them strictly into
    transformers."""
    return shapes_of(config(family))


def shapes_of(c: dict) -> dict[str, tuple[int, ...]]:
    """The same for a config.json."""
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    dim = c.get("head_dim") or hidden // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    kind = c["model_type"]
    found = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            found[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
            if c.get("attention_bias") or (kind == "qwen2" and name != "o"):
                found[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        if kind in ("qwen3", "gemma3_text"):
            found |= {f"{at}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        found |= {f"{at}{name}.weight": (hidden,) for name in norms}
        found |= {
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    return found


def weights(family: str) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name, large enough that every part of the model shows in the logits."""
    plus_one = CONFIGS[family]["model_type"] == "gemma3_text"
    found = {}
    for name, shape in shapes(family).items():
        found[name] = uniform(name, shape, 0.5 if len(shape) == 1 else 0.25)
        if "norm" in name and not plus_one:
            found[name] += np.float32(1)
    return found


def to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 whose value is exact in bf16 → u16 bit patterns; others are cut."""
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def write(family: str, folder: Path, dtype: str = "F32", prefix: str = "model.") -> Path:
    """A model directory: config.json and model.safetensors. dtype: F32, F16 or BF16."""
    (folder / "config.json").write_text(json.dumps(config(family)))
    header, blobs, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in weights(family).items():
        data = {"F32": lambda v: v, "F16": lambda v: v.astype(np.float16), "BF16": to_bf16}[dtype](values).tobytes()
        header[name.replace("model.", prefix, 1)] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [at, at + len(data)],
        }
        blobs.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return folder


def by_role(family: str, config) -> dict[str, np.ndarray]:
    """The weights by role name, as the oracle wants them. config: their ModelConfig."""
    from zse.models import registry

    model = registry.architecture(config.architecture)
    found, plus_one = weights(family), model.hf_norm_plus_one
    result = {}
    for role in model.roles(config):
        values = found[model.hf_name(role.name)]
        result[role.name] = values + np.float32(1) if plus_one and role.kind == "norm" else values
    return result
