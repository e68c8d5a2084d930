"""Tiny random models that see: their configs, weights by Hugging Face name, folders, images and prompts, and what transformers
computes of them (vision.npz).

    PYTHONPATH=src:tests/formats python tests/models/tiny_vision.py

makes vision.npz anew, with transformers and torch installed.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import tiny
from formats_build import Tensor as GGUFTensor
from formats_build import gguf as build_gguf
from formats_build import safetensors

from zse.engine.messages import ImageInput, image_key
from zse.models.vision.config import VisionConfig, vision_from_hf

PATH = Path(__file__).with_name("vision.npz")
_GEMMA3 = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    model_type="gemma3",
    text_config=dict(
        model_type="gemma3_text",
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        vocab_size=160,
        max_position_embeddings=256,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=32,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    vision_config=dict(
        model_type="siglip_vision_model",
        hidden_size=96,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=112,
        patch_size=14,
        vision_use_head=False,
    ),
    mm_tokens_per_image=16,
    boi_token_index=148,
    eoi_token_index=149,
    image_token_index=150,
    eos_token_id=1,
    bos_token_id=2,
    pad_token_id=0,
)
_QWEN3_TEXT = dict(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=128,
    vocab_size=160,
    max_position_embeddings=256,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
_QWEN3_VL = dict(
    architectures=["Qwen3VLForConditionalGeneration"],
    model_type="qwen3_vl",
    text_config=_QWEN3_TEXT
    | dict(
        model_type="qwen3_vl_text",
        rope_parameters=dict(
            rope_type="default", rope_theta=5000000.0, mrope_section=[6, 5, 5], mrope_interleaved=True
        ),
    ),
    vision_config=dict(
        model_type="qwen3_vl_vision",
        depth=4,
        hidden_size=96,
        intermediate_size=104,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=64,
        num_position_embeddings=36,
        deepstack_visual_indexes=[0, 2],
    ),
    image_token_id=150,
    video_token_id=151,
    vision_start_token_id=148,
    vision_end_token_id=149,
    tie_word_embeddings=True,
    eos_token_id=1,
    bos_token_id=2,
)
_MISTRAL3 = dict(
    architectures=["Mistral3ForConditionalGeneration"],
    model_type="mistral3",
    text_config=_QWEN3_TEXT
    | dict(model_type="mistral", rope_theta=10000.0, rms_norm_eps=1e-5, sliding_window=None, tie_word_embeddings=False),
    vision_config=dict(
        model_type="pixtral",
        hidden_size=64,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=64,
        patch_size=4,
        hidden_act="silu",
        rope_theta=10000.0,
    ),
    image_token_index=150,
    spatial_merge_size=2,
    multimodal_projector_bias=False,
    vision_feature_layer=-1,
    tie_word_embeddings=False,
    eos_token_id=1,
    bos_token_id=2,
)
_QWEN2_5_VL = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    model_type="qwen2_5_vl",
    text_config=_QWEN3_TEXT
    | dict(
        model_type="qwen2_5_vl_text",
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[4, 6, 6]),
    ),
    vision_config=dict(
        model_type="qwen2_5_vl_vision",
        depth=4,
        hidden_size=96,
        intermediate_size=104,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=24,
        out_hidden_size=64,
        fullatt_block_indexes=[1, 3],
    ),
    image_token_id=150,
    video_token_id=151,
    vision_start_token_id=148,
    vision_end_token_id=149,
    tie_word_embeddings=True,
    eos_token_id=1,
    bos_token_id=2,
)
CONFIGS = {"gemma3": _GEMMA3, "qwen2_5_vl": _QWEN2_5_VL, "qwen3_vl": _QWEN3_VL, "mistral3": _MISTRAL3}
_NORMALIZED = {"image_mean": [0.5, 0.4, 0.45], "image_std": [0.5, 0.45, 0.55]}
PROCESSORS = {
    "gemma3": _NORMALIZED,
    "qwen2_5_vl": _NORMALIZED | {"size": {"shortest_edge": 64, "longest_edge": 4096}},
    "qwen3_vl": _NORMALIZED | {"size": {"shortest_edge": 64, "longest_edge": 4096}},
    "mistral3": _NORMALIZED | {"size": {"longest_edge": 64}},
}
SIZES = {
    "qwen2_5_vl": ((40, 56), (56, 16)),
    "gemma3": ((112, 112), (112, 112)),
    "qwen3_vl": ((24, 40), (56, 16)),
    "mistral3": ((24, 40), (56, 16)),
}
# Tokens of text before, between and behind two images; -1: no second image.
PROMPTS = ((5, -1, 9), (0, -1, 4), (7, 3, 6), (18, 1, 3), (3, 40, 11))


def vision(family: str) -> VisionConfig:
    found = vision_from_hf("config.json", CONFIGS[family], PROCESSORS[family])
    assert found is not None
    return found


def image(family: str, number: int) -> tuple[int, int, bytes]:
    """(height, width, pixels) of an image."""
    height, width = SIZES[family][number % 2]
    numbers = tiny.uniform(f"{family} image {number}", (height, width, 3), 127.5) + 127.5
    return height, width, numbers.astype(np.uint8).tobytes()


def placeholder(family: str) -> int:
    config = CONFIGS[family]
    return config.get("image_token_index", config.get("image_token_id"))


def prompt(family: str, number: int) -> tuple[list[int], list[ImageInput]]:
    """Token ids and images of PROMPTS[number]."""
    before, between, behind = PROMPTS[number]
    ids: list[int] = []
    images: list[ImageInput] = []
    for text, has_image in ((before, True), (between, between >= 0), (behind, False)):
        if text > 0:
            ids += (tiny.uniform(f"{family} text {number} {len(ids)}", (text,), 60.0) + 75).astype(int).tolist()
        if has_image:
            height, width, pixels = image(family, len(images))
            count = vision(family).num_tokens(height, width)
            images.append(ImageInput(len(ids), count, height, width, pixels, image_key(height, width, pixels)))
            ids += [placeholder(family) if part >= 0 else 12 for part in vision(family).parts(height, width)]
    return ids, images


def shapes(family: str) -> dict[str, list[int]]:
    """Tensor names and shapes, as transformers has them."""
    return json.loads(bytes(np.load(PATH)[f"{family} shapes"]))


def weights(family: str, named: dict[str, list[int]] | None = None) -> dict[str, np.ndarray]:
    found = {}
    for name, shape in (named or shapes(family)).items():
        spread = 0.3 if len(shape) == 1 else (3.0 / np.prod(shape[1:])) ** 0.5
        values = tiny.uniform(f"{family} {name}", shape, spread)
        is_norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
        found[name] = values + np.float32(1) if is_norm and not _plus_one(family, name) else values
    return found


def _plus_one(family: str, name: str) -> bool:
    return family == "gemma3" and "vision_tower" not in name


def write(family: str, folder: Path) -> Path:
    """A Hugging Face folder."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    tensors = {name: ("F32", values.shape, values.tobytes()) for name, values in weights(family).items()}
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


# -- GGUF files, as llama.cpp's converter makes them

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
_KINDS = {"qwen2_5_vl": "qwen2.5vl_merger", "gemma3": "gemma3", "qwen3_vl": "qwen3vl_merger", "mistral3": "pixtral"}
_TEXT = {"gemma3": ("gemma3", "GEMMA3"), "qwen3_vl": ("qwen3vl", "QWEN3VL")}


def write_gguf(
    folder: Path, family: str = "gemma3", swapped: bool = False, kind: str = "F32", **changes
) -> tuple[Path, Path]:
    """(text model, mmproj file); of Mistral 3 the latter alone. swapped: ffn_up and ffn_down have each other's names; kind: of the mmproj's matrices;
    changes: of its metadata."""
    config = CONFIGS[family]
    layers = config["text_config"]["num_hidden_layers"]
    text, tower = [], []
    for name, values in weights(family).items():
        if name.startswith("model.language_model.") and family in _TEXT:
            names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[_TEXT[family][1]], layers)
            stem, _, ending = ("model." + name.removeprefix("model.language_model.")).rpartition(".")
            values = values + np.float32(family == "gemma3" and "norm" in stem)
            text.append(GGUFTensor(f"{names.get_name(stem)}.{ending}", "F32", values.shape, values.tobytes()))
            continue
        if name.startswith("model.language_model.") or name == "lm_head.weight":
            continue
        for found, part in _in_mmproj(family, name.removeprefix("model."), values, swapped):
            is_matrix = part.ndim > 1 and "position" not in found
            data = part.astype(np.float16 if kind == "F16" and is_matrix else np.float32)
            tower.append(GGUFTensor(found, kind if is_matrix else "F32", part.shape, data.tobytes()))
    if text:
        (folder / "model.gguf").write_bytes(build_gguf(_text_metadata(family, _TEXT[family][0]), text))
    (folder / "mmproj-model.gguf").write_bytes(build_gguf(_clip_metadata(family, changes), tower))
    return folder / "model.gguf", folder / "mmproj-model.gguf"


def _in_mmproj(family: str, name: str, values: np.ndarray, swapped: bool) -> list[tuple[str, np.ndarray]]:
    """What a tensor of the tower is called there, in two where both frames of an image have their own."""
    known = _NAMES[family]
    if name.endswith("mm_input_projection_weight"):
        return [("mm.input_projection.weight", values)]
    values = values + np.float32("soft_emb_norm" in name)
    if "deepstack_merger_list" in name:
        _, _, number, part, ending = name.split(".")
        layer = CONFIGS[family]["vision_config"]["deepstack_visual_indexes"][int(number)]
        return [(f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{ending}", values)]
    for mark in (".layers.", ".blocks."):
        if mark in name:
            layer, _, rest = name.rpartition(mark)[2].partition(".")
            stem, _, ending = rest.rpartition(".")
            if stem == "attn.qkv" and family == "qwen2_5_vl":
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


def _text_metadata(family: str, arch: str) -> list[tuple]:
    text = CONFIGS[family]["text_config"]
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
    tokens = [("tokenizer.ggml.tokens", "string[]", [f"t{id}" for id in range(text["vocab_size"])])]
    ids = [("tokenizer.ggml.eos_token_id", "u32", 1), ("tokenizer.ggml.bos_token_id", "u32", 2)]
    named = [(f"{arch}.{key}", kind, value) for key, kind, value in keys]
    return [("general.architecture", "string", arch), *named, *tokens, *ids]


def _clip_metadata(family: str, changes: dict) -> list[tuple]:
    vision, processor = CONFIGS[family]["vision_config"], PROCESSORS[family]
    is_gemma, side = family == "gemma3", vision.get("image_size", 6 * vision["patch_size"])
    layers = vision.get("num_hidden_layers", vision.get("depth"))
    keys = {
        "general.architecture": ("string", "clip"),
        "clip.projector_type": ("string", _KINDS[family]),
        "clip.has_vision_encoder": ("bool", True),
        "clip.vision.image_size": ("u32", side),
        "clip.vision.patch_size": ("u32", vision["patch_size"]),
        "clip.vision.embedding_length": ("u32", vision["hidden_size"]),
        "clip.vision.feed_forward_length": ("u32", vision["intermediate_size"]),
        "clip.vision.block_count": ("u32", layers),
        "clip.vision.attention.head_count": ("u32", vision.get("num_attention_heads", vision.get("num_heads"))),
        "clip.vision.attention.layer_norm_epsilon": ("f32", 1e-5 if family == "mistral3" else 1e-6),
        "clip.vision.image_mean": ("f32[]", processor["image_mean"]),
        "clip.vision.image_std": ("f32[]", processor["image_std"]),
    }
    if is_gemma:
        keys["clip.vision.projector.scale_factor"] = ("u32", 2)
    elif family == "mistral3":
        keys |= {"clip.vision.spatial_merge_size": ("u32", 2), "clip.use_silu": ("bool", True)}
    else:
        keys["clip.vision.spatial_merge_size"] = ("u32", 2)
        if family == "qwen3_vl":
            marked = [layer in vision["deepstack_visual_indexes"] for layer in range(layers)]
            keys["clip.vision.is_deepstack_layers"] = ("bool[]", marked)
        else:
            keys |= {"clip.vision.n_wa_pattern": ("u32", 2), "clip.vision.window_size": ("u32", vision["window_size"])}
        keys["clip.vision.image_min_pixels"] = ("u32", 64)
        keys["clip.vision.image_max_pixels"] = ("u32", 4096)
    return [(key, *value) for key, value in (keys | changes).items()]


# -- what transformers makes of them


def pixel_values(family: str, images: list[ImageInput]) -> list[np.ndarray]:
    """Normalized f32 [3, height, width]."""
    found, config = [], vision(family)
    for each in images:
        numbers = np.frombuffer(each.pixels, np.uint8).reshape(each.height, each.width, 3) / 255
        found.append(((numbers - config.mean) / config.std).transpose(2, 0, 1).astype(np.float32))
    return found


def oracle(family: str):
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(CONFIGS[family])))
    config._attn_implementation = "eager"
    model = getattr(transformers, CONFIGS[family]["architectures"][0])(config).eval()
    is_tied = CONFIGS[family]["text_config"].get("tie_word_embeddings", True)
    named = {
        name: list(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight" or not is_tied
    }
    state = {name: torch.from_numpy(values.copy()) for name, values in weights(family, named).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, missing
    if is_tied:
        model.tie_weights()
    return model, named


def inputs(family: str, number: int) -> dict:
    import torch

    ids, images = prompt(family, number)
    pixels = [torch.from_numpy(values) for values in pixel_values(family, images)]
    given = {"input_ids": torch.tensor([ids])}
    if family == "gemma3":
        is_image = torch.tensor([[int(id == placeholder(family)) for id in ids]])
        return given | {"pixel_values": torch.stack(pixels), "token_type_ids": is_image}
    if family == "mistral3":
        return given | _padded(pixels)
    if family in ("qwen2_5_vl", "qwen3_vl"):
        is_image = torch.tensor([[int(id == placeholder(family)) for id in ids]])
        return given | {"mm_token_type_ids": is_image} | _flat(family, images)
    raise ValueError(family)


def _padded(pixels: list) -> dict:
    """Images of several sizes, as Pixtral's processor has them."""
    import torch

    height, width = (max(each.shape[side] for each in pixels) for side in (1, 2))
    whole = [torch.nn.functional.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in pixels]
    return {"pixel_values": torch.stack(whole), "image_sizes": torch.tensor([each.shape[1:] for each in pixels])}


def _flat(family: str, images: list[ImageInput]) -> dict:
    """Patches of two equal frames, as Qwen's processor has them."""
    import torch

    sizes = CONFIGS[family]["vision_config"]
    p, m = sizes["patch_size"], sizes["spatial_merge_size"]
    found, grids = [], []
    for values in pixel_values(family, images):
        _, height, width = values.shape
        rows, columns = height // p, width // p
        frames = np.stack([values, values]).reshape(1, 2, 3, rows // m, m, p, columns // m, m, p)
        found.append(frames.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.from_numpy(np.concatenate(found)), "image_grid_thw": torch.tensor(grids)}


def references(family: str) -> dict[str, np.ndarray]:
    """Tower outputs of two images, and logits of every prompt."""
    import torch

    model, named = oracle(family)
    found = {f"{family} shapes": np.frombuffer(json.dumps(named).encode(), np.uint8)}
    with torch.no_grad():
        for number in range(len(PROMPTS)):
            found[f"{family} logits {number}"] = model(**inputs(family, number)).logits[0].float().numpy()
        for number in range(2):
            height, width, pixels = image(family, number)
            one = [ImageInput(0, 0, height, width, pixels, b"")]
            if family == "gemma3":
                made = model.model.get_image_features(torch.from_numpy(pixel_values(family, one)[0])[None])
            elif family == "mistral3":
                made = model.model.get_image_features(**_padded([torch.from_numpy(pixel_values(family, one)[0])]))
            else:
                made = model.model.get_image_features(**_flat(family, one))
            stacked = [made.pooler_output, *(getattr(made, "deepstack_features", None) or [])]
            found[f"{family} image {number}"] = np.stack([each[0].float().numpy() for each in stacked])
    return found


if __name__ == "__main__":
    import sys

    old = dict(np.load(PATH)) if PATH.exists() else {}
    for family in sys.argv[1:] or CONFIGS:
        old |= references(family)
    np.savez_compressed(PATH, **old)
