"""GGUF files of the tiny models that see, text and mmproj, as llama.cpp's converter makes them."""

from pathlib import Path

import gguf
import numpy as np
import tiny_families
import tiny_hybrids
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf
from tiny_vision import weights
from tiny_vision_configs import CONFIGS, PROCESSORS

_IDS = [("tokenizer.ggml.eos_token_id", "u32", 1), ("tokenizer.ggml.bos_token_id", "u32", 2)]
_NAMES = {
    "gemma3": {
        "vision_tower.embeddings.patch_embedding": "v.patch_embd",
        "vision_tower.embeddings.position_embedding": "v.position_embd",
        "vision_tower.post_layernorm": "v.post_ln",
        "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    "qwen3_vl": {
        "visual.patch_embed.proj": "v.patch_embd",
        "visual.pos_embed": "v.position_embd",
        "visual.merger.norm": "v.post_ln",
        "visual.merger.linear_fc1": "mm.0",
        "visual.merger.linear_fc2": "mm.2",
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    },
    "mistral3": {
        "vision_tower.patch_conv": "v.patch_embd",
        "vision_tower.ln_pre": "v.pre_ln",
        "multi_modal_projector.norm": "mm.input_norm",
        "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
        "attention_norm": "ln1",
        "ffn_norm": "ln2",
        "attention.q_proj": "attn_q",
        "attention.k_proj": "attn_k",
        "attention.v_proj": "attn_v",
        "attention.o_proj": "attn_out",
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
    },
}
_NAMES["qwen2_5_vl"] = {
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = {"qwen2_5_vl": "qwen2.5vl_merger", "gemma3": "gemma3", "qwen3_vl": "qwen3vl_merger", "mistral3": "pixtral"}
TEXT = {"gemma3": "gemma3", "qwen3_vl": "qwen3vl", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
TEXT |= {"qwen3_vl_moe": "qwen3vlmoe"}
_NAMES["qwen2_vl"] = _NAMES["qwen2_5_vl"] | {"mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
KINDS["qwen2_vl"] = "qwen2vl_merger"
_NAMES["gemma4"] = _NAMES["gemma4_moe"] = {
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder": "v.position_embd",
    "vision_tower": "v",
    "embed_vision.embedding_projection": "mm.input_projection",
    "input_layernorm": "ln1",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "ffn_post_norm",
}
KINDS["gemma4"] = KINDS["gemma4_moe"] = "gemma4v"
_NAMES["gemma4_unified"] = {
    "patch_dense": "v.patch_embd",
    "pos_embedding": "v.position_embd",
    "patch_ln1": "v.patch_norm.1",
    "patch_ln2": "v.patch_norm.2",
    "pos_norm": "v.patch_norm.3",
    "embedding_projection": "mm.input_projection",
}
KINDS["gemma4_unified"] = "gemma4uv"
TEXT |= dict.fromkeys(("gemma4", "gemma4_moe", "gemma4_unified"), "gemma4")
for _family in ("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"):
    _NAMES[_family], KINDS[_family] = _NAMES["qwen3_vl"], "qwen3vl_merger"


def write_gguf(
    folder: Path, family: str = "gemma3", swapped: bool = False, kind: str = "F32", **changes
) -> tuple[Path, Path]:
    """(text model, mmproj file); of Mistral 3 the latter alone. swapped: ffn_up and ffn_down have each other's names; kind: of the mmproj's matrices;
    changes: of its metadata."""
    text, tower = [], []
    if family.startswith("gemma4"):
        _gemma4_text(folder, family)
    elif family in TEXT:
        for name, values in _text_tensors(family).items():
            text.append(GGUFTensor(name, "F32", values.shape, np.ascontiguousarray(values, np.float32).tobytes()))
    for name, values in weights(family).items():
        if name.startswith("model.language_model.") or name == "lm_head.weight":
            continue
        for found, part in _in_mmproj(family, name.removeprefix("model."), values, swapped):
            is_matrix = part.ndim > 1 and "position" not in found
            data = part.astype(np.float16 if kind == "F16" and is_matrix else np.float32)
            tower.append(GGUFTensor(found, kind if is_matrix else "F32", part.shape, data.tobytes()))
    if text:
        (folder / "model.gguf").write_bytes(build_gguf(_text_metadata(family, TEXT[family]), text))
    (folder / "mmproj-model.gguf").write_bytes(build_gguf(_clip_metadata(family, changes), tower))
    return folder / "model.gguf", folder / "mmproj-model.gguf"


def _gemma4_text(folder: Path, family: str) -> None:
    """As tests/models/tiny_families.py writes it, with the weights of this one."""
    named = {
        name.replace("language_model.", ""): values
        for name, values in weights(family).items()
        if "language_model." in name
    }
    tokens = ("tokenizer.ggml.tokens", "string[]", [f"t{id}" for id in range(160)])
    text = "gemma4_large" if family == "gemma4_unified" else family
    path = tiny_families.write_gguf(text, folder, named=named, more=(tokens, *_IDS))
    path.rename(folder / "model.gguf")


def _text_tensors(family: str) -> dict[str, np.ndarray]:
    """The text model's, by the names that the file has for them."""
    config, arch = CONFIGS[family]["text_config"], TEXT[family]
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found = {
        name.replace("language_model.", ""): values
        for name, values in weights(family).items()
        if "language_model." in name or name == "lm_head.weight"
    }
    if family.startswith("qwen3_5"):
        found = tiny_hybrids.gguf_weights(config, found)
    elif family == "qwen3_vl_moe":  # the converter stores gate and up apart
        for name in [name for name in found if name.endswith("gate_up_proj")]:
            for part, values in zip(("gate_proj", "up_proj"), np.split(found.pop(name), 2, axis=1), strict=True):
                found[name.replace("gate_up_proj", part)] = values
    elif family == "gemma3":
        found = {name: values + np.float32("norm" in name) for name, values in found.items()}
    return {tiny_hybrids.gguf_name(names, name): values for name, values in found.items()}


def _in_mmproj(family: str, name: str, values: np.ndarray, swapped: bool) -> list[tuple[str, np.ndarray]]:
    """What a tensor of the tower is called there, in two where both frames of an image have their own."""
    known = _NAMES[family]
    if name.endswith("mm_input_projection_weight"):
        return [("mm.input_projection.weight", values)]
    if family == "gemma4_unified":
        return [_of_unified(name, values)]
    values = values + np.float32("soft_emb_norm" in name)
    name = name.replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name = name.removesuffix("_embedding_table").removesuffix(".position") + ".weight"
    if name.endswith("patch_embedder.input_proj.weight"):
        patch = CONFIGS[family]["vision_config"]["patch_size"]
        values = np.ascontiguousarray(values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2))
    values = np.atleast_1d(values)
    if "deepstack_merger_list" in name:
        _, _, number, part, ending = name.split(".")
        layer = CONFIGS[family]["vision_config"]["deepstack_visual_indexes"][int(number)]
        return [(f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{ending}", values)]
    for mark in (".layers.", ".blocks."):
        if mark in name:
            layer, _, rest = name.rpartition(mark)[2].partition(".")
            stem, _, ending = rest.rpartition(".")
            if stem == "attn.qkv" and family.startswith("qwen2"):
                thirds = zip("qkv", np.split(values, 3), strict=True)
                return [(f"v.blk.{layer}.attn_{part}.{ending}", np.ascontiguousarray(rows)) for part, rows in thirds]
            called = known[stem]
            if called in ("attn_q", "attn_k") and family == "mistral3":  # so that neighbours turn
                heads = CONFIGS[family]["vision_config"]["num_attention_heads"]
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
                values = np.ascontiguousarray(values)
            if swapped:
                called = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(called, called)
            return [(f"v.blk.{layer}.{called}.{ending}", values)]
    stem, _, ending = name.rpartition(".")
    if values.ndim == 5:
        return [(f"v.patch_embd.weight{'.1' * frame}", np.ascontiguousarray(values[:, :, frame])) for frame in (0, 1)]
    return [(f"{known[stem]}.{ending}", values)]


def _of_unified(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Gemma 4 12B's: numbers of a patch channel by channel, a table for columns before one for rows."""
    stem, _, ending = name.rpartition(".")
    if ending == "pos_embedding":
        stem, ending, values = ending, "weight", values.swapaxes(0, 1)
    stem = stem.rpartition(".")[2]
    if f"{stem}.{ending}" == "patch_dense.weight" or stem == "patch_ln1":
        sizes = CONFIGS["gemma4_unified"]["vision_config"]
        pixels = (3 * sizes["patch_size"]) ** 2
        values = values.reshape(*values.shape[:-1], pixels, 3).swapaxes(-1, -2).reshape(values.shape)
    return f"{_NAMES['gemma4_unified'][stem]}.{ending}", np.ascontiguousarray(values)


def _text_metadata(family: str, arch: str) -> list[tuple]:
    text = CONFIGS[family]["text_config"]
    tokens = [("tokenizer.ggml.tokens", "string[]", [f"t{id}" for id in range(text["vocab_size"])])]
    if family.startswith("qwen3_5"):
        sections = [*text["rope_parameters"]["mrope_section"], 0]
        turns = (f"{arch}.rope.dimension_sections", "u32[]", sections)
        return [*tiny_hybrids.metadata(family, arch), turns, *tokens, *_IDS]
    keys = [
        ("block_count", "u32", text["num_hidden_layers"]),
        ("context_length", "u32", text["max_position_embeddings"]),
        ("embedding_length", "u32", text["hidden_size"]),
        ("feed_forward_length", "u32", text["intermediate_size"]),
        ("attention.head_count", "u32", text["num_attention_heads"]),
        ("attention.head_count_kv", "u32", text["num_key_value_heads"]),
        ("attention.key_length", "u32", text["head_dim"]),
        ("attention.value_length", "u32", text["head_dim"]),
        ("attention.layer_norm_rms_epsilon", "f32", text["rms_norm_eps"]),
    ]
    if family == "gemma3":
        keys += [
            ("attention.sliding_window", "u32", text["sliding_window"]),
            ("attention.sliding_window_pattern", "u32", 3),
            ("rope.freq_base", "f32", 1000000.0),
        ]
    else:
        sections = [*text["rope_parameters"]["mrope_section"], 0]
        keys += [("rope.freq_base", "f32", 5000000.0), ("rope.dimension_sections", "u32[]", sections)]
    keys += tiny_hybrids.experts(text)
    named = [(f"{arch}.{key}", kind, value) for key, kind, value in keys]
    return [("general.architecture", "string", arch), *named, *tokens, *_IDS]


def _clip_metadata(family: str, changes: dict) -> list[tuple]:
    vision, processor = CONFIGS[family]["vision_config"], PROCESSORS[family]
    if family == "gemma4_unified":  # the converter writes 0 for what the tower does not have
        zeros = dict.fromkeys(("intermediate_size", "num_hidden_layers", "num_attention_heads"), 0)
        vision = vision | zeros | {"hidden_size": vision["mm_embed_dim"]}
    is_gemma, side = family == "gemma3", vision.get("image_size", 6 * vision["patch_size"])
    layers = vision.get("num_hidden_layers", vision.get("depth"))
    keys = {
        "general.architecture": ("string", "clip"),
        "clip.projector_type": ("string", KINDS[family]),
        "clip.has_vision_encoder": ("bool", True),
        "clip.vision.image_size": ("u32", side),
        "clip.vision.patch_size": ("u32", vision["patch_size"]),
        "clip.vision.embedding_length": ("u32", vision.get("embed_dim", vision["hidden_size"])),
        # Of Qwen2-VL it is the text model's hidden size, whatever its name says.
        "clip.vision.feed_forward_length": ("u32", vision.get("intermediate_size", vision["hidden_size"])),
        "clip.vision.block_count": ("u32", layers),
        "clip.vision.attention.head_count": ("u32", vision.get("num_attention_heads", vision.get("num_heads"))),
        "clip.vision.attention.layer_norm_epsilon": ("f32", 1e-5 if family == "mistral3" else 1e-6),
        "clip.vision.image_mean": ("f32[]", processor.get("image_mean", [0.0] * 3)),
        "clip.vision.image_std": ("f32[]", processor.get("image_std", [1.0] * 3)),
    }
    if family.startswith("gemma4"):
        keys.pop("clip.projector_type")
        keys |= {"clip.vision.projector_type": ("string", KINDS[family])}
    elif is_gemma:
        keys["clip.vision.projector.scale_factor"] = ("u32", 2)
    elif family == "mistral3":
        keys |= {"clip.vision.spatial_merge_size": ("u32", 2), "clip.use_silu": ("bool", True)}
    else:
        keys["clip.vision.spatial_merge_size"] = ("u32", 2)
        if family.startswith("qwen3"):
            marked = [layer in vision.get("deepstack_visual_indexes", ()) for layer in range(layers)]
            keys["clip.vision.is_deepstack_layers"] = ("bool[]", marked)
        elif family == "qwen2_5_vl":
            keys |= {"clip.vision.n_wa_pattern": ("u32", 2), "clip.vision.window_size": ("u32", vision["window_size"])}
        keys["clip.vision.image_min_pixels"] = ("u32", 64)
        keys["clip.vision.image_max_pixels"] = ("u32", 4096)
    return [(key, *value) for key, value in (keys | changes).items()]
