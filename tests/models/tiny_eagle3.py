"""Tiny models of seven layers and EAGLE-3 heads for them, as their folders have them (arXiv 2503.01840). What a head reads are
states of the model between layers; its forward is test_eagle3.py's."""

import json
from pathlib import Path

import numpy as np
import tiny
from formats_build import safetensors

LAYERS = 7  # of which a head reads the inputs of 2, 3 and 4
VOCAB = 160
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "intermediate_size": 128,
    "max_position_embeddings": 64,  # fewer than the model has: only distances count
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def target_config(family: str) -> dict:
    return tiny.config(family) | {"num_hidden_layers": LAYERS}


def target_weights(family: str, agrees: bool = False) -> dict[str, np.ndarray]:
    """agrees: layers add little."""
    found = {}
    for name, shape in tiny.shapes_of(target_config(family)).items():
        found[name] = tiny.uniform(name, shape, 0.5 if len(shape) == 1 else 0.25)
        if "norm" in name:
            found[name] += np.float32(1)
        if agrees and name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] *= np.float32(0.0003)
    return {name: exact(values) for name, values in found.items()}


def exact(values: np.ndarray) -> np.ndarray:
    """What bf16 has of it."""
    return (tiny.to_bf16(values).astype(np.uint32) << 16).view(np.float32).reshape(values.shape)


def head_config(family: str, **changes) -> dict:
    hidden = target_config(family)["hidden_size"]
    found = CONFIG | dict(
        hidden_size=hidden, num_attention_heads=hidden // 16, num_key_value_heads=hidden // 32, draft_vocab_size=120
    )
    return {key: value for key, value in (found | dict(head_dim=16) | changes).items() if value is not None}


def tokens_of(config: dict, absent=()) -> np.ndarray:
    """The model's tokens that the head knows, ascending."""
    count = config.get("draft_vocab_size", VOCAB)
    some = np.random.default_rng(5).permutation([id for id in range(VOCAB) if id not in absent])
    return np.sort(some[:count])


def head_weights(config: dict, width: int, own_embedding: bool = False) -> dict[str, np.ndarray]:
    """In the names of EAGLE's authors. width: of the model's states."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    at = "midlayer."
    shapes = {
        "fc.weight": (hidden, 3 * width),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.get("draft_vocab_size", VOCAB), hidden),
        **{f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"{at}self_attn.{name}_proj.weight": (rows, 2 * hidden) for name, rows in (("q", q), ("k", kv), ("v", kv))},
        f"{at}self_attn.o_proj.weight": (hidden, q),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
    }
    if config.get("attention_bias"):
        shapes |= {
            f"{at}self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkvo", (q, kv, kv, hidden), strict=True)
        }
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
    if (config.get("eagle_config") or config).get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * width,)
    found = {}
    for name, shape in shapes.items():
        values = tiny.uniform("eagle " + name, shape, 0.5 if len(shape) == 1 else 0.25)
        found[name] = exact(values + np.float32("norm" in name))
    return found


def agreeing(family: str, config: dict, target: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A head that says what the model says of its last token: each head of attention sees its own token alone (biases of q and k,
    whose products are largest at distance 0) and hands its embedding on; the state that it adds to is small."""
    found, hidden = head_weights(config, config["hidden_size"]), config["hidden_size"]
    one, at = np.eye(hidden, dtype=np.float32), "midlayer."
    for name in found:
        if name.endswith(("q_proj.weight", "k_proj.weight", ".bias")):
            found[name] *= 0
        elif name.endswith(("hidden_norm.weight", "down_proj.weight")):
            found[name] *= np.float32(0.003)
    for name in "qk":
        found[f"{at}self_attn.{name}_proj.bias"] += np.float32(8)
    found[f"{at}self_attn.v_proj.weight"] = np.concatenate([one, 0 * one], axis=1)
    found[f"{at}self_attn.o_proj.weight"] = one
    found[f"{at}input_layernorm.weight"] = np.ones(hidden, np.float32)
    found["norm.weight"] = target["model.norm.weight"]
    head = target["lm_head.weight" if "lm_head.weight" in target else "model.embed_tokens.weight"]
    found["lm_head.weight"] = head[tokens_of(config)]
    return found


def save_head(
    folder: Path, config: dict, weights: dict[str, np.ndarray], dtype: str = "F32", ids=None, extra=None
) -> Path:
    """ids: the model's tokens that it knows; None: no d2t and no t2d."""
    convert = (lambda values: values.astype(np.float32)) if dtype == "F32" else tiny.to_bf16
    tensors = {name: (dtype, values.shape, convert(values).tobytes()) for name, values in weights.items()}
    if ids is not None:
        known = np.zeros(VOCAB, np.bool_)
        known[ids] = True
        tensors["d2t"] = ("I64", ids.shape, (ids - np.arange(len(ids))).astype(np.int64).tobytes())
        tensors["t2d"] = ("BOOL", known.shape, known.tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors | (extra or {}), {"format": "pt"}))
    return folder


def write(
    folder: Path, family: str, dtype: str = "F32", agrees: bool = False, absent=(), **changes
) -> tuple[Path, Path]:
    """(a model, a head for it). absent: tokens that the head does not know."""
    target = target_weights(family, agrees)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    model = tiny.save(folder / "model", target_config(family), target, dtype)
    if agrees:
        heads = target_config(family)["hidden_size"] // 16
        config = head_config(family, attention_bias=True, norm_before_residual=True, num_key_value_heads=heads)
        weights = agreeing(family, config, target)
    else:
        config = head_config(family, **changes)
        weights = head_weights(config, target_config(family)["hidden_size"])
    ids = tokens_of(config, absent) if "draft_vocab_size" in config else None
    return model, save_head(folder / "head", config, weights, dtype, ids)
