"""Tiny random models with recurrent layers: their configs, the tensors of their published folders, and GGUF files of them
as llama.cpp's converters make them (conversion/lfm2.py, qwen.py, granite.py, nemotron.py), with names of the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf
from tiny_configs import NO_HEAD_DIM, TIED, hf

SHORT = dict(
    without="rope_theta head_dim rms_norm_eps",
    hidden_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=5,
    norm_eps=1e-5,
    conv_bias=False,
    conv_L_cache=3,
    layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
    rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    **TIED,
)
# Sizes of heads that are no powers of two, and 3 heads of values for each of keys.
LINEAR = dict(
    without="rope_theta",
    head_dim=64,
    num_hidden_layers=5,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    linear_conv_kernel_dim=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
)
MROPE = dict(mrope_section=[3, 3, 2], mrope_interleaved=True)
EIGHT = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True)
SHARED = dict(shared_expert_intermediate_size=64)
QWEN35_ROPE = LINEAR["rope_parameters"] | MROPE
GRANITE = NO_HEAD_DIM | dict(
    num_hidden_layers=4,
    layer_types=["mamba", "attention", "mamba", "mamba"],
    position_embedding_type="nope",
    shared_intermediate_size=96,
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_conv_bias=True,
    mamba_proj_bias=False,
    embedding_multiplier=6.0,
    residual_multiplier=0.22,
    attention_multiplier=0.0625,
    logits_scaling=8.0,
)
NEMOTRON = dict(
    without="rope_theta rms_norm_eps hidden_act",
    head_dim=32,
    layer_norm_epsilon=1e-5,
    mlp_hidden_act="relu2",
    mamba_num_heads=6,
    mamba_head_dim=32,
    n_groups=2,
    ssm_state_size=16,
    conv_kernel=4,
    use_conv_bias=True,
)
NEMOTRON_MOE = dict(
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=64,
    routed_scaling_factor=1.5,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
)
CONFIGS = {
    "lfm2": hf("Lfm2", "lfm2", intermediate_size=150, block_multiple_of=32, block_auto_adjust_ff_dim=True, **SHORT),
    "lfm2_moe": hf(
        "Lfm2Moe", "lfm2_moe", num_dense_layers=1, use_expert_bias=True, routed_scaling_factor=1.0, **SHORT | EIGHT
    ),
    "qwen3_next": hf("Qwen3Next", "qwen3_next", mlp_only_layers=[], **LINEAR | EIGHT | SHARED),
    "qwen3_5": hf("Qwen3_5", "qwen3_5_text", **LINEAR | dict(rope_parameters=QWEN35_ROPE)),
    "qwen3_5_moe": hf(
        "Qwen3_5Moe",
        "qwen3_5_moe_text",
        **LINEAR
        | EIGHT
        | SHARED
        | dict(rope_parameters=QWEN35_ROPE, without="rope_theta intermediate_size", norm_topk_prob=None)
        | dict(linear_num_key_heads=4, linear_num_value_heads=16, linear_key_head_dim=16),
    ),
    "granite_hybrid": hf("GraniteMoeHybrid", "granitemoehybrid", num_local_experts=0, **GRANITE),
    "granite_hybrid_moe": hf(
        "GraniteMoeHybrid",
        "granitemoehybrid",
        num_local_experts=8,
        num_experts_per_tok=3,
        **GRANITE | dict(mamba_n_groups=2, time_step_limit=[0.5, 1.0]),
    ),
    "nemotron_h": hf("NemotronH", "nemotron_h", hybrid_override_pattern="M-M*-M", num_hidden_layers=6, **NEMOTRON),
    "nemotron_h_moe": hf(
        "NemotronH", "nemotron_h", hybrid_override_pattern="MEM*E", num_hidden_layers=5, **NEMOTRON | NEMOTRON_MOE
    ),
    "nemotron_h_latent": hf(
        "NemotronH",
        "nemotron_h",
        hybrid_override_pattern="ME*M-",
        num_hidden_layers=5,
        moe_latent_size=32,
        **NEMOTRON | NEMOTRON_MOE,
    ),
}
ARCHS = {"lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
ARCHS |= {
    "granite_hybrid": "granitehybrid",
    "granite_hybrid_moe": "granitehybrid",
    "nemotron_h_latent": "nemotron_h_moe",
}
# llama.cpp's converter has no dense layer beside experts, and its time steps have no limits.
IN_GGUF = tuple(family for family in CONFIGS if family not in ("nemotron_h_latent", "granite_hybrid_moe"))


def stored_shapes(config: dict, found: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of a published folder. found: those of the roles, by the first of their names."""
    shapes = {}
    for name, shape in found.items():
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            shape = shape[0], 1, shape[1]
        if name.endswith("shared_mlp.input_linear.weight"):
            shape = 2 * shape[0], shape[1]
        if config["model_type"] == "qwen3_next" and "in_proj_" in name:
            stem = name.partition("in_proj_")[0]
            keys, values = (
                config[f"linear_num_{kind}_heads"] * config[f"linear_{kind}_head_dim"] for kind in ("key", "value")
            )
            shapes[stem + "in_proj_qkvz.weight"] = 2 * keys + 2 * values, shape[1]
            name, shape = stem + "in_proj_ba.weight", (2 * config["linear_num_value_heads"], shape[1])
        shapes[name] = shape
    if config["model_type"] == "nemotron_h":
        shapes = {
            "backbone." + name.removeprefix("model.") if name != "lm_head.weight" else name: shape
            for name, shape in shapes.items()
        }
    return shapes


# -- GGUF


def tiled(values: np.ndarray, config: dict, size: int) -> np.ndarray:
    """Heads of values, of `size` rows each, from grouped by their head of keys to one of each in turn."""
    groups = config["linear_num_key_heads"]
    heads = values.reshape(groups, -1, size, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(values.shape)


def _qwen(config: dict, stem: str, member: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """What becomes of a tensor of Gated DeltaNet, by its name in Hugging Face's files."""
    value, key = config["linear_value_head_dim"], config["linear_key_head_dim"]
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * key * groups
    if member == "in_proj_qkvz.weight":
        each = heads // groups * value
        parts = np.split(values.reshape(groups, -1, values.shape[1]), [key, 2 * key, 2 * key + each], axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
        return {stem + "in_proj_qkv.weight": np.concatenate([q, k, v]), stem + "in_proj_z.weight": z}
    if config["model_type"] != "qwen3_next":
        if member in ("in_proj_qkv.weight", "conv1d.weight"):
            values = np.concatenate([values[:keys], tiled(values[keys:], config, value)])
        elif member == "in_proj_z.weight":
            values = tiled(values, config, value)
        elif member == "out_proj.weight":
            values = np.ascontiguousarray(tiled(np.ascontiguousarray(values.T), config, value).T)
        elif member in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            values = tiled(values, config, 1)
    return {stem + member: values}


def gguf_weights(config: dict, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What converters make of a folder's tensors, still under its names."""
    found: dict[str, np.ndarray] = {}
    is_qwen = config["model_type"].startswith("qwen3")
    for name, values in weights.items():
        stem, _, member = name.rpartition("linear_attn.")
        if "shared_mlp.input_linear" in name:
            kind = "_shexp" if config["num_local_experts"] else ""
            gate, up = np.split(values, 2)
            at = f"blk.{name.split('.')[2]}."
            found |= {f"{at}ffn_gate{kind}.weight": gate, f"{at}ffn_up{kind}.weight": up}
            continue
        if "shared_mlp.output_linear" in name and not config["num_local_experts"]:
            found[f"blk.{name.split('.')[2]}.ffn_down.weight"] = values
            continue
        if is_qwen and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(1)
        if name.endswith((".conv1d.weight", ".conv.conv.weight")):
            values = values[:, 0]
        parts = _qwen(config, stem + "linear_attn.", member, values) if stem else {name: values}
        for called, part in parts.items():
            if called.endswith("A_log"):
                part = -np.exp(part)
            if called.endswith((".mixer.D", ".mixer.A_log", ".mamba.D", ".mamba.A_log")):
                part = part[:, None]
            if called.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
                part = part.reshape(config.get("n_groups", config.get("mamba_n_groups")), -1)
            found[called] = part
    return found


def gguf_name(names, name: str) -> str:
    """What the file calls a tensor."""
    if name.startswith("blk."):
        return name
    for ending, called in (
        (".dt_bias", "ssm_dt.bias"),
        (".A_log", "ssm_a"),
        (".mixer.D", "ssm_d"),
        (".mamba.D", "ssm_d"),
    ):
        if name.endswith(ending):
            return f"blk.{name.split('.')[2]}.{called}"
    if "correction_bias" in name or name.endswith("expert_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    stem, _, ending = name.rpartition(".")
    if ending not in ("weight", "bias"):
        stem, ending = name, "weight"
    # Converters give single experts other names than files before they look names up.
    ways = (
        stem,
        stem.removeprefix("model."),
        stem.replace("backbone.", "model.").replace("mixer.experts", "mlp.experts"),
    )
    found = next((found for way in ways if (found := names.get_name(way))), None)
    assert found, name
    return f"{found}.{ending}"


def metadata(family: str, arch: str) -> list[tuple]:
    """What the converter writes of the config."""
    config = CONFIGS[family]
    layers, hidden, heads = (config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    dim = config.get("head_dim") or hidden // heads
    keys = [
        ("block_count", "u32", layers),
        ("context_length", "u32", 256),
        ("embedding_length", "u32", hidden),
        ("attention.head_count", "u32", heads),
    ]
    kv = config["num_key_value_heads"]
    eps = config.get("rms_norm_eps") or config.get("norm_eps") or config.get("layer_norm_epsilon")
    keys.append(("attention.layer_norm_rms_epsilon", "f32", eps))
    if family.startswith("lfm2"):
        kinds = [kv if kind == "full_attention" else 0 for kind in config["layer_types"]]
        inner = config["intermediate_size"] if family == "lfm2_moe" else 128
        keys += [("attention.head_count_kv", "i32[]", kinds), ("feed_forward_length", "u32", inner)]
        keys += [("shortconv.l_cache", "u32", config["conv_L_cache"]), ("rope.freq_base", "f32", 1000000.0)]
        if family == "lfm2_moe":
            keys += [("leading_dense_block_count", "u32", 1), ("expert_gating_func", "u32", 2)]
    elif family.startswith("qwen"):
        keys += [
            ("attention.head_count_kv", "u32", kv),
            ("feed_forward_length", "u32", config.get("intermediate_size", 32)),
        ]
        keys += [("attention.key_length", "u32", dim), ("attention.value_length", "u32", dim)]
        keys += [("rope.freq_base", "f32", 10000.0), ("rope.dimension_count", "u32", dim // 4)]
        recurs = [kind == "linear_attention" for kind in config["layer_types"]]
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        keys += [
            ("attention.recurrent_layers", "bool[]", recurs),
            ("ssm.conv_kernel", "u32", config["linear_conv_kernel_dim"]),
            ("ssm.state_size", "u32", config["linear_key_head_dim"]),
            ("ssm.group_count", "u32", config["linear_num_key_heads"]),
            ("ssm.time_step_rank", "u32", config["linear_num_value_heads"]),
            ("ssm.inner_size", "u32", inner),
        ]
    elif family.startswith("granite"):
        keys += [
            ("attention.head_count_kv", "i32[]", [kv if kind == "attention" else 0 for kind in config["layer_types"]])
        ]
        inner = config["shared_intermediate_size"]
        keys += [("feed_forward_length", "u32", inner)]
        keys += [
            ("embedding_scale", "f32", 6.0),
            ("residual_scale", "f32", 0.22),
            ("attention.scale", "f32", 0.0625),
            ("logit_scale", "f32", 8.0),
            ("ssm.conv_kernel", "u32", config["mamba_d_conv"]),
            ("ssm.state_size", "u32", config["mamba_d_state"]),
            ("ssm.group_count", "u32", config["mamba_n_groups"]),
            ("ssm.time_step_rank", "u32", config["mamba_n_heads"]),
            ("ssm.inner_size", "u32", config["mamba_n_heads"] * config["mamba_d_head"]),
        ]
    else:
        pattern = config["hybrid_override_pattern"]
        inner = config["moe_intermediate_size"] if arch == "nemotron_h_moe" else config["intermediate_size"]
        keys += [("attention.head_count_kv", "i32[]", [kv if kind == "*" else 0 for kind in pattern])]
        keys += [("feed_forward_length", "i32[]", [inner if kind in "-E" else 0 for kind in pattern])]
        keys += [("attention.key_length", "u32", dim), ("attention.value_length", "u32", dim)]
        keys += [
            ("ssm.conv_kernel", "u32", config["conv_kernel"]),
            ("ssm.state_size", "u32", config["ssm_state_size"]),
            ("ssm.group_count", "u32", config["n_groups"]),
            ("ssm.time_step_rank", "u32", config["mamba_num_heads"]),
            ("ssm.inner_size", "u32", config["mamba_num_heads"] * config["mamba_head_dim"]),
        ]
    keys += experts(config)
    return [("general.architecture", "string", arch), *((f"{arch}.{key}", *rest) for key, *rest in keys)]


def experts(config: dict) -> list[tuple]:
    """Metadata of a config's experts, behind the architecture's name."""
    count = config.get("num_experts") or config.get("n_routed_experts")
    if not count:
        return []
    keys = [("expert_count", "u32", count), ("expert_used_count", "u32", config["num_experts_per_tok"])]
    keys.append(("expert_feed_forward_length", "u32", config["moe_intermediate_size"]))
    shared = config.get("shared_expert_intermediate_size") or config.get("moe_shared_expert_intermediate_size")
    keys += [("expert_shared_feed_forward_length", "u32", shared)] if shared else []
    if "n_routed_experts" in config:
        keys += [
            ("expert_weights_norm", "bool", True),
            ("expert_weights_scale", "f32", config["routed_scaling_factor"]),
        ]
        keys += [("expert_shared_count", "u32", 1), ("expert_group_count", "u32", 1)]
    return keys


def write_gguf(family: str, folder: Path, stacked: dict[str, np.ndarray]) -> Path:
    """stacked: the folder's tensors, those of single experts as stacks."""
    config, arch = CONFIGS[family], ARCHS.get(family, family)
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors = []
    for name, values in gguf_weights(config, stacked).items():
        data = np.ascontiguousarray(values, np.float32)
        tensors.append(GGUFTensor(gguf_name(names, name), "F32", data.shape, data.tobytes()))
    path = folder / f"{family}.gguf"
    path.write_bytes(bytes(build_gguf(metadata(family, arch), tensors)))
    return path
