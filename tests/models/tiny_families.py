"""Tiny random models of the families whose forward is not Llama's: their configs, their weights by the roles of
zse.models, and GGUF files of them whose tensor names come from the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np
import tiny
import tiny_configs
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf

from zse.models import registry

CONFIGS = tiny_configs.OTHERS
FAMILIES = tuple(CONFIGS)
# What GGUF metadata have no word for: another query scale of Gemma 2, other patterns of SmolLM3.
IN_GGUF = tuple(family for family in FAMILIES if family not in ("gemma2_scale", "smollm3_window"))
# What GGUF metadata call these, where it is not the model_type.
GGUF_ARCH = {"phi4_mini": "phi3", "olmo3": "olmo2", "ministral3": "mistral3", "cohere": "command-r"}
# Converters that make neighbours of the rows that turn together (LlamaModel.permute).
PERMUTED = ("smollm3", "granite", "ministral3", "minicpm")


def oracle(family: str) -> dict:
    """The config that transformers computes the reference with: MiniCPM is Granite with other names for its factors."""
    config = CONFIGS[family]
    if family != "minicpm":
        return config
    names = ("scale_emb", "scale_depth", "dim_model_base", "model_type", "architectures")
    return {name: value for name, value in config.items() if name not in names} | dict(
        architectures=["GraniteForCausalLM"],
        model_type="granite",
        embedding_multiplier=config["scale_emb"],
        residual_multiplier=config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        attention_multiplier=(config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
        logits_scaling=config["hidden_size"] / config["dim_model_base"],
    )


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Tensor names of a Hugging Face file with this config.json, and their shapes."""
    parsed = registry.config_from_hf("config.json", config)
    model = registry.architecture(parsed.architecture)
    return {model.hf_name(role.name): role.shape for role in model.roles(parsed)}


def weights(family: str) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name, exact in bf16. make_references.py loads them strictly into transformers, which shows that the names
    and shapes are right."""
    found = {}
    for name, shape in shapes_of(CONFIGS[family]).items():
        found[name] = tiny.uniform(family + name, shape, 0.5 if len(shape) == 1 else 0.25)
        if "norm" in name and not family.startswith("gemma2"):
            found[name] += np.float32(1)
        found[name] = (tiny.to_bf16(found[name]).astype(np.uint32) << 16).view(np.float32)
    return found


def write(
    family: str, folder: Path, dtype: str = "F32", *, prefix: str = "model.", wrapper: dict | None = None
) -> Path:
    """A model directory. dtype: F32 or BF16. prefix: what the tensors' names begin with; wrapper: the outer config.json."""
    config = CONFIGS[family] if wrapper is None else wrapper | {"text_config": CONFIGS[family]}
    head = prefix.removesuffix("model.") + "lm_head.weight" if prefix.endswith(".model.") else "lm_head.weight"
    named = {
        head if name == "lm_head.weight" else name.replace("model.", prefix, 1): values
        for name, values in weights(family).items()
    }
    return tiny.save(folder, config, named, dtype)


def _metadata(family: str, arch: str) -> list[tuple]:
    """What llama.cpp's converter writes of the config."""
    config = CONFIGS[family]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = rope.get("full_attention", rope)
    part = config.get("partial_rotary_factor", 0.5 if family == "glm4" else 1.0)
    norm = "layer_norm_epsilon" if "layer_norm_eps" in config else "layer_norm_rms_epsilon"
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    keys = [
        ("block_count", "u32", layers),
        ("context_length", "u32", config["max_position_embeddings"]),
        ("embedding_length", "u32", hidden),
        ("feed_forward_length", "u32", config["intermediate_size"]),
        ("attention.head_count", "u32", config["num_attention_heads"]),
        ("attention.head_count_kv", "u32", config["num_key_value_heads"]),
        ("attention.key_length", "u32", dim),
        ("attention.value_length", "u32", dim),
        ("attention." + norm, "f32", config.get("layer_norm_eps", config.get("rms_norm_eps"))),
        ("rope.freq_base", "f32", config.get("rope_theta", 10000.0)),
        ("rope.dimension_count", "u32", int(dim * part)),
    ]
    if config.get("sliding_window"):
        keys.append(("attention.sliding_window", "u32", config["sliding_window"]))
    if full.get("rope_type") == "yarn":
        keys += [
            ("rope.scaling.type", "string", "yarn"),
            ("rope.scaling.factor", "f32", full["factor"]),
            ("rope.scaling.original_context_length", "u32", full["original_max_position_embeddings"]),
        ]
    if "long_factor" in rope:
        keys.append(("rope.scaling.original_context_length", "u32", 16))
    keys += {
        "gemma2": [("attn_logit_softcapping", "f32", 2.0), ("final_logit_softcapping", "f32", 5.0)],
        "granite": [
            ("embedding_scale", "f32", 6.0),
            ("residual_scale", "f32", 0.22),
            ("attention.scale", "f32", 0.0625),
            ("logit_scale", "f32", 8.0),
        ],
        "ministral3": [("attention.temperature_scale", "f32", 0.5), ("rope.scaling.yarn_log_multiplier", "f32", 1.0)],
        "minicpm": [
            ("embedding_scale", "f32", 12.0),
            ("residual_scale", "f32", 1.4 / layers**0.5),
            ("logit_scale", "f32", hidden / 32),
        ],
    }.get(family, [])
    if "logit_scale" in config:
        keys.append(("logit_scale", "f32", config["logit_scale"]))
    return [("general.architecture", "string", arch), *((f"{arch}.{key}", *rest) for key, *rest in keys)]


def write_gguf(family: str, folder: Path) -> Path:
    """A GGUF file of f32 tensors as llama.cpp's converter makes it: names, row orders, Gemma's +1, joined tensors."""
    config = CONFIGS[family]
    arch = GGUF_ARCH.get(family, config["model_type"])
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    plus_one = config["model_type"] == "gemma2"
    tensors = []
    for name, values in weights(family).items():
        stem, _, ending = name.rpartition(".")
        member = stem.rpartition(".")[2]
        if plus_one and "norm" in member:
            values = values + np.float32(1)
        if family in PERMUTED and member in heads:
            count = heads[member]
            values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        found = names.get_name(stem)
        assert found, stem
        data = np.ascontiguousarray(values, np.float32)
        tensors.append(GGUFTensor(f"{found}.{ending}", "F32", data.shape, data.tobytes()))
    scaling = config.get("rope_scaling") or {}
    for which in ("short", "long"):
        if f"{which}_factor" in scaling:
            data = np.array(scaling[f"{which}_factor"], np.float32)
            tensors.append(GGUFTensor(f"rope_factors_{which}.weight", "F32", data.shape, data.tobytes()))
    path = folder / f"{family}.gguf"
    path.write_bytes(bytes(build_gguf(_metadata(family, arch), tensors)))
    return path
