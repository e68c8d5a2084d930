"""Tiny random models of each family as Hugging Face directories, made without transformers.

Weights come from raw PCG64 bits, whose stream NumPy guarantees, so that the committed reference logits of
references.npz (made by make_references.py with transformers) stay valid.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import tiny_configs

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))

from formats_build import safetensors  # noqa: E402

FAMILIES = tuple(tiny_configs.LLAMA_LIKE)
CONFIGS = tiny_configs.LLAMA_LIKE | dict(wide=tiny_configs.WIDE)
REFERENCES = Path(__file__).with_name("references.npz")
TOKENS = 40  # of the reference sequence: longer than every window, more than two KV pages


def config(family: str) -> dict:
    return CONFIGS[family]


def uniform(name: str, shape, spread: float) -> np.ndarray:
    """f32 in [-spread, spread), from raw bits seeded by the name."""
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
    return unit.astype(np.float32).reshape(shape) * np.float32(spread)


def tokens(family: str) -> np.ndarray:
    """The reference sequence: random, or of a family with experts the one that make_references.py chose."""
    chosen = np.load(REFERENCES).get(f"{family} tokens")
    return random_tokens(family) if chosen is None else chosen


def random_tokens(family: str) -> np.ndarray:
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


def write(family: str, folder: Path, dtype: str = "F32", prefix: str = "model.", outer: dict | None = None) -> Path:
    """A model directory. dtype: F32, F16 or BF16. prefix: what the tensors' names begin with. outer: the config.json instead."""
    named = {name.replace("model.", prefix, 1): values for name, values in weights(family).items()}
    return save(folder, outer or config(family), named, dtype)


def save(folder: Path, config: dict, weights: dict[str, np.ndarray], dtype: str) -> Path:
    """A directory with config.json and model.safetensors."""
    convert = {"F32": np.float32, "F16": np.float16}.get(dtype)
    tensors = {
        name: (dtype, values.shape, (values.astype(convert) if convert else to_bf16(values)).tobytes())
        for name, values in weights.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors, {"format": "pt"}))
    return folder


def by_role(family: str, config, found: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The weights by role name, as the oracle wants them. config: their ModelConfig. found: others than the family's."""
    from zse.models import registry

    model = registry.architecture(config.architecture)
    found, plus_one = found or weights(family), model.hf_norm_plus_one
    result = {}
    for role in model.roles(config):
        values = found[model.hf_name(role.name)]
        result[role.name] = values + np.float32(1) if plus_one and role.kind == "norm" else values
    return result
