"""Tiny random models of the families whose forward is not Llama's: their configs, their weights by the roles of
zse.models, and GGUF files of them whose tensor names come from the `gguf` package."""

import re
from pathlib import Path

import gguf
import numpy as np
import tiny
import tiny_configs
import tiny_hybrids
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf

from zse.models import registry

CONFIGS = tiny_configs.OTHERS | tiny_hybrids.CONFIGS
FAMILIES = tuple(CONFIGS)
# What GGUF metadata have no word for: another query scale of Gemma 2, other patterns of SmolLM3.
IN_GGUF = tuple(
    family
    for family in FAMILIES
    if family not in ("gemma2_scale", "smollm3_window", "qwen3_moe_dense", "mistral4")
    and (family not in tiny_hybrids.CONFIGS or family in tiny_hybrids.IN_GGUF)
)
# What GGUF metadata call these, where it is not the model_type.
GGUF_ARCH = {
    **dict.fromkeys(("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
}
GGUF_ARCH |= {
    "phi4_mini": "phi3",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "cohere": "command-r",
    "gemma4": "gemma4",
    "gemma4_large": "gemma4",
    "gemma4_moe": "gemma4",
}
# Converters that make neighbours of the rows that turn together (LlamaModel.permute).
PERMUTED = ("smollm3", "granite", "granitemoe", "mixtral", "ministral3", "minicpm")


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
    found = {}
    for role in model.roles(parsed):
        name, _, part = model.hf_name(role.name).split("|")[0].partition("#")
        rows = role.shape[0] // (role.experts or 1)
        if "{e}" in name:
            found |= {name.format(e=e): (rows, role.shape[1]) for e in range(role.experts)}
        elif role.experts:
            found[name] = role.experts, rows * int((part or "0/1").split("/")[1]), role.shape[1]
        else:
            found[name] = role.shape
    return found


def stored_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """shapes_of() as files have them: what latents are multiplied with is one matrix."""
    found = shapes_of(config)
    if parsed_mixers(config):
        return tiny_hybrids.stored_shapes(config, found)
    if config["model_type"] == "mistral4":  # whose experts transformers leaves as they are in memory
        stacked = [name for name in found if ".mlp.experts." in name]
        for name in stacked:
            stem, _, member = name.removesuffix(".weight").partition(".experts.")
            rows, columns = found.pop(name)
            if "down" in member:
                found[f"{stem}.experts.down_proj"] = config["n_routed_experts"], rows, columns
            else:
                found[f"{stem}.experts.gate_up_proj"] = config["n_routed_experts"], 2 * rows, columns
    for name in [name for name in found if name.endswith("k_b_proj.weight")]:
        heads, nope, value = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
        _, rank = found.pop(name.replace("k_b_proj", "v_b_proj"))
        found[name.replace("k_b_proj", "kv_b_proj")] = (heads * (nope + value), rank)
        del found[name]
    return found


def parsed_mixers(config: dict) -> tuple[str, ...]:
    """ModelConfig.mixers of a config.json."""
    return registry.config_from_hf("config.json", config).mixers


def is_centered(family: str) -> bool:
    """Whether norm weights are stored as their distance from 1."""
    parsed = registry.config_from_hf("config.json", CONFIGS[family])
    return registry.architecture(parsed.architecture).hf_norm_plus_one


def weights(family: str) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name, exact in bf16. make_references.py loads them strictly into transformers, which shows that the names
    and shapes are right."""
    found = {}
    for name, shape in stored_shapes(CONFIGS[family]).items():
        spread = (
            0.5 if len(shape) == 1 or "mlp.gate.weight" in name or "_moe.gate" in name or "router" in name else 0.25
        )
        found[name] = tiny.uniform(family + name, shape, spread)
        centered = family.startswith("gemma2") or (family.startswith("qwen3_") and is_centered(family))
        if ("norm" in name or "scalar" in name) and (not centered or "linear_attn" in name):
            found[name] += np.float32(1)
        if "q_norm" in name and family.startswith("gemma4"):
            found[name] /= np.float32(8)  # scores are not divided by anything: as large as those of others
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


GEMMA4_KEYS = ("feed_forward_length", "attention.head_count_kv", "attention.key_length", "attention.value_length") + (
    "rope.freq_base",
    "rope.dimension_count",
)


def _gemma4_keys(config: dict) -> list[tuple]:
    """What Gemma4Model of llama.cpp's converter writes."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, inner = config.get("num_kv_shared_layers", 0), config["intermediate_size"]
    full = config.get("num_global_key_value_heads")
    kv_heads: tuple = ("attention.head_count_kv", "u32", config["num_key_value_heads"])
    if full:
        values = [config["num_key_value_heads"] if slide else full for slide in slides]
        kv_heads = ("attention.head_count_kv", "i32[]", values)
    ff: tuple = ("feed_forward_length", "u32", inner)
    if config.get("use_double_wide_mlp"):
        values = [inner * (1 + (i >= len(slides) - shared)) for i in range(len(slides))]
        ff = ("feed_forward_length", "i32[]", values)
    return [
        kv_heads,
        ff,
        ("attention.key_length", "u32", config["global_head_dim"]),
        ("attention.value_length", "u32", config["global_head_dim"]),
        ("attention.key_length_swa", "u32", config["head_dim"]),
        ("attention.value_length_swa", "u32", config["head_dim"]),
        ("rope.dimension_count", "u32", config["global_head_dim"]),
        ("rope.dimension_count_swa", "u32", config["head_dim"]),
        ("rope.freq_base", "f32", config["rope_parameters"]["full_attention"]["rope_theta"]),
        ("rope.freq_base_swa", "f32", config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        ("attention.shared_kv_layers", "u32", shared),
        ("embedding_length_per_layer_input", "u32", config["hidden_size_per_layer_input"]),
        ("attention.sliding_window_pattern", "bool[]", slides),
        ("final_logit_softcapping", "f32", config["final_logit_softcapping"]),
    ]


def _metadata(family: str, arch: str) -> list[tuple]:
    """What llama.cpp's converter writes of the config."""
    config = CONFIGS[family]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    latent = "kv_lora_rank" in config
    if latent:
        dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = rope.get("full_attention", rope)
    part = config.get("partial_rotary_factor", 0.5 if family in ("glm4", "glm4_moe") else 1.0)
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
        ("attention.value_length", "u32", config["v_head_dim"] if latent else dim),
        ("attention." + norm, "f32", config.get("layer_norm_eps", config.get("rms_norm_eps"))),
        ("rope.freq_base", "f32", config.get("rope_theta", 10000.0)),
        (
            "rope.dimension_count",
            "u32",
            config["qk_rope_head_dim"] if latent else config.get("rotary_dim") or int(dim * part),
        ),
    ]
    if latent and arch == "deepseek2":
        # With two matrices llama.cpp says what its cache holds, and of the heads' own apart.
        sizes = dict(
            key_length=config["kv_lora_rank"] + config["qk_rope_head_dim"], value_length=config["kv_lora_rank"]
        )
        sizes |= dict(key_length_mla=dim, value_length_mla=config["v_head_dim"], head_count_kv=1)
        keys = [key for key in keys if key[0].removeprefix("attention.") not in sizes]
        keys += [(f"attention.{name}", "u32", size) for name, size in sizes.items()]
        if full.get("mscale_all_dim"):
            keys.append(("rope.scaling.yarn_log_multiplier", "f32", 0.1 * full["mscale_all_dim"]))
    if latent:
        keys += [(f"attention.{name}", "u32", config[name]) for name in ("q_lora_rank", "kv_lora_rank") if config[name]]
    keys += _experts_metadata(config)
    if config.get("sliding_window"):
        keys.append(("attention.sliding_window", "u32", config["sliding_window"]))
    if "yarn" in (full.get("rope_type"), full.get("type")):
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
    }.get(family.removesuffix("moe"), [])
    if family.startswith("gemma4"):
        keys = [key for key in keys if key[0] not in GEMMA4_KEYS] + _gemma4_keys(config)
    if "logit_scale" in config:
        keys.append(("logit_scale", "f32", config["logit_scale"]))
    return [("general.architecture", "string", arch), *((f"{arch}.{key}", *rest) for key, *rest in keys)]


def split_latents(config: dict, kv_b: np.ndarray) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of kv_b_proj: [heads, rank, nope] and [heads, value, rank]."""
    heads = kv_b.reshape(config["num_attention_heads"], -1, kv_b.shape[1])
    k_b, v_b = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    return {"attn_k_b": np.ascontiguousarray(k_b.swapaxes(1, 2)), "attn_v_b": np.ascontiguousarray(v_b)}


def _experts_metadata(config: dict) -> list[tuple]:
    """The keys of the experts, those that llama.cpp's converter writes for the family."""
    count = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not count:
        return []
    inner = config.get("moe_intermediate_size")
    chosen = config.get("num_experts_per_tok") or config["top_k_experts"]
    keys = [("expert_count", "u32", count), ("expert_used_count", "u32", chosen)]
    keys += [("expert_feed_forward_length", "u32", inner)] if inner else []
    if config.get("shared_expert_intermediate_size"):
        keys.append(("expert_shared_feed_forward_length", "u32", config["shared_expert_intermediate_size"]))
    if config["model_type"] in ("glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite"):
        keys.append(("expert_gating_func", "u32", 2))
    if "n_shared_experts" in config:
        keys += [
            ("expert_weights_norm", "bool", config["model_type"] != "deepseek_v2"),
            ("expert_weights_scale", "f32", config["routed_scaling_factor"]),
            ("expert_shared_count", "u32", config["n_shared_experts"]),
            ("expert_group_count", "u32", config["n_group"]),
            ("expert_group_used_count", "u32", config["topk_group"]),
            ("leading_dense_block_count", "u32", config.get("first_k_dense_replace", 1)),
        ]
    return keys


def _stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of single experts as one stack, gate and up of a fused tensor apart, under the names that the gguf package
    knows (mlp.experts.gate_proj)."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[2]}.weight", []).append(values)
        elif "moe.input_linear" in name:
            gate, up = np.split(values, 2, axis=1)
            stem = name.removesuffix("input_linear.weight")
            found |= {f"{stem}experts.w1.weight": gate, f"{stem}experts.w3.weight": up}
        else:
            found[name] = values
    return found | {name: np.stack(parts) for name, parts in stacks.items()}


def write_gguf(
    family: str, folder: Path, split: str = "", apart: bool = False, named: dict | None = None, more: tuple = ()
) -> Path:
    """A GGUF file of f32 tensors as llama.cpp's converter makes it: names, row orders, Gemma's +1, joined tensors. split: type of
    the two tensors that kv_b is; "": it is one. apart: stacks of experts are a tensor for each. named:
    the folder's tensors (default: weights()); more: metadata."""
    config = CONFIGS[family]
    if family in tiny_hybrids.CONFIGS:
        return tiny_hybrids.write_gguf(family, folder, _stacked(weights(family)))
    arch = GGUF_ARCH.get(family, config["model_type"])
    split = split or ("F32" if arch == "deepseek2" else "")
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    plus_one = config["model_type"] == "gemma2"
    tensors = []
    for name, values in _stacked(named or weights(family)).items():
        name += ".weight" if name.endswith("layer_scalar") else ""
        stem, _, ending = name.rpartition(".")
        member = stem.rpartition(".")[2]
        if plus_one and "norm" in member:
            values = values + np.float32(1)
        if family in PERMUTED and member in heads:
            count = heads[member]
            values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if member == "kv_b_proj" and split:
            for called, part in split_latents(config, values).items():
                data = (
                    part.astype(np.float32) if split == "F32" else gguf.quantize(part, gguf.GGMLQuantizationType[split])
                )
                layer = stem.split(".")[2]
                tensors.append(GGUFTensor(f"blk.{layer}.{called}.weight", split, part.shape, data.tobytes()))
            continue
        if ".router." in name and family == "gemma4_moe":  # tensors that end in scale
            found = {"router": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps", "scale": "ffn_gate_inp"}
            member, ending = ("router", ending) if ending == "weight" else (ending, "scale")
            stem = f"blk.{stem.split('.')[2]}.{found[member]}"
            tensors.append(GGUFTensor(f"{stem}.{ending}", "F32", values.shape, values.astype(np.float32).tobytes()))
            continue
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            stem, ending = name, "weight"
        found = names.get_name(stem)
        if "correction_bias" in name:
            found, ending = f"blk.{name.split('.')[2]}.exp_probs_b", "bias"
        assert found, stem
        data = np.ascontiguousarray(values, np.float32)
        if apart and found.endswith("_exps"):
            for e, one in enumerate(data):
                name = f"{found.removesuffix('_exps')}.{e}.{ending}"
                tensors.append(GGUFTensor(name, "F32", one.shape, one.tobytes()))
            continue
        tensors.append(GGUFTensor(f"{found}.{ending}", "F32", data.shape, data.tobytes()))
    scaling = config.get("rope_scaling") or {}
    for which in ("short", "long"):
        if f"{which}_factor" in scaling:
            data = np.array(scaling[f"{which}_factor"], np.float32)
            tensors.append(GGUFTensor(f"rope_factors_{which}.weight", "F32", data.shape, data.tobytes()))
    if family.startswith("gemma4"):
        pairs, part = (
            config["global_head_dim"] // 2,
            config["rope_parameters"]["full_attention"]["partial_rotary_factor"],
        )
        data = np.where(np.arange(pairs) < int(pairs * part), 1, 1e30).astype(np.float32)
        tensors.append(GGUFTensor("rope_freqs.weight", "F32", data.shape, data.tobytes()))
    path = folder / f"{family}.gguf"
    path.write_bytes(bytes(build_gguf([*_metadata(family, arch), *more], tensors)))
    return path
