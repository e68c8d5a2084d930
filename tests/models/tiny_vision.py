"""Tiny random models that see: their configs, weights by Hugging Face name, folders, images and prompts, and what transformers
computes of them (vision.npz).

    PYTHONPATH=src:tests/formats python tests/models/tiny_vision.py

makes vision.npz anew, with transformers and torch installed.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tiny
import tiny_deepseek_vl2
from formats_build import safetensors
from tiny_vision_configs import CONFIGS, PROCESSORS, PROMPTS, SIZES

from zse.engine.messages import ImageInput, image_key
from zse.models.vision.config import VisionConfig
from zse.models.vision.read import vision_from_hf

PATH = Path(__file__).with_name("vision.npz")


def vision(family: str) -> VisionConfig:
    found = vision_from_hf("config.json", CONFIGS[family], PROCESSORS[family])
    assert found is not None
    return found


def image(family: str, number: int) -> tuple[int, int, bytes]:
    """(height, width, pixels) of an image, behind its overview where it has one."""
    height, width = SIZES[family][number % 2]
    numbers = tiny.uniform(f"{family} image {number}", (vision(family).num_pixels(height, width), 3), 127.5) + 127.5
    return height, width, numbers.astype(np.uint8).tobytes()


def placeholder(family: str) -> int:
    config = CONFIGS[family]
    return config.get("image_token_index", config.get("image_token_id", 150))


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


def packed(named: dict[str, list[int]]) -> np.ndarray:
    """As shapes() reads them."""
    return np.frombuffer(json.dumps(named).encode(), np.uint8)


def shapes(family: str) -> dict[str, list[int]]:
    """Tensor names and shapes, as transformers has them."""
    return json.loads(bytes(np.load(PATH)[f"{family} shapes"]))


def weights(family: str, named: dict[str, list[int]] | None = None) -> dict[str, np.ndarray]:
    found = {}
    for name, shape in (named or shapes(family)).items():
        spread = 0.3 if len(shape) == 1 else (3.0 / np.prod(shape[1:])) ** 0.5
        spread = 0.5 if name.endswith(("position_embedding_table", "pos_embedding")) else spread
        values = tiny.uniform(f"{family} {name}", shape, spread)
        if name.endswith(("_min", "_max")):  # bounds of products, which cut some of what they get
            values = np.float32(1 if name.endswith("_max") else -1) * (np.abs(values) / 4 + np.float32(0.4))
        if name.endswith("layer_scalar"):
            values += np.float32(1)
        is_norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
        found[name] = np.asarray(values + np.float32(1) if is_norm and not _plus_one(family, name) else values)
        if family.startswith("gemma4") and "q_norm" in name:  # scores are not divided by anything
            found[name] = found[name] * np.float32(0.25)
    return found


def _plus_one(family: str, name: str) -> bool:
    """Whether a norm's weight is kept as its distance from 1."""
    if family.startswith("qwen3_5"):
        return "visual" not in name and "linear_attn" not in name
    return family == "gemma3" and "vision_tower" not in name


def with_wide_heads(family: str) -> tuple[dict, dict[str, list[int]]]:
    """The config and the shapes with heads of 64 instead of 32 in the text model, which kernels of GPUs take."""
    config, named = json.loads(json.dumps(CONFIGS[family])), shapes(family)
    text = config.get("text_config") or config["language_config"]
    if text.get("kv_lora_rank"):  # heads are of latents
        return config, named
    text["head_dim"] = 2 * text.get("head_dim", 32)
    if "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"]["mrope_section"] = [2 * size for size in text["rope_parameters"]["mrope_section"]]
    for name, shape in named.items():
        part = name.split(".")[-2:][0]
        if "vision" in name or "visual" in name:
            continue
        if part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
            shape[0] *= 2
        elif part == "o_proj":
            shape[1] *= 2
    return config, named


def write(family: str, folder: Path, turned: bool = True, wide_heads: bool = False) -> Path:
    """A Hugging Face folder. turned: Qwen3-VL's experts are, as they are published; transformers turns them while it
    loads. wide_heads: see with_wide_heads()."""
    config, named = with_wide_heads(family) if wide_heads else (CONFIGS[family], None)
    if family.startswith("deepseek"):  # as they are published
        config = {name: value for name, value in config.items() if name != "architectures"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    tensors = {}
    for name, values in weights(family, named).items():
        is_turned = turned and family == "qwen3_vl_moe" and ".mlp.experts." in name
        stored = np.ascontiguousarray(values.swapaxes(1, 2)) if is_turned else values
        if family == "gemma4_unified":  # whose embedder transformers calls otherwise than the published files
            name = (
                name.replace("multimodal_embedder.", "")
                if "multimodal" in name
                else name.replace("embed_vision.", "vision_embedder.")
            )
        tensors[name] = "F32", stored.shape, stored.tobytes()
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


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
    is_tied = CONFIGS[family]["tie_word_embeddings"]
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
    if family.startswith("gemma4"):
        is_image = torch.tensor([[int(id == placeholder(family)) for id in ids]])
        return given | {"mm_token_type_ids": is_image} | _placed(family, images)
    if family.startswith("qwen"):
        is_image = torch.tensor([[int(id == placeholder(family)) for id in ids]])
        return given | {"mm_token_type_ids": is_image} | _flat(family, images)
    raise ValueError(family)


def _padded(pixels: list) -> dict:
    """Images of several sizes, as Pixtral's processor has them."""
    import torch

    height, width = (max(each.shape[side] for each in pixels) for side in (1, 2))
    whole = [torch.nn.functional.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in pixels]
    return {"pixel_values": torch.stack(whole), "image_sizes": torch.tensor([each.shape[1:] for each in pixels])}


def _placed(family: str, images: list[ImageInput]) -> dict:
    """Patches of Gemma 4, numbers pixel by pixel, with their columns and rows; -1 behind the shorter image's."""
    import torch

    p, found, places = vision(family).patch, [], []
    for values in pixel_values(family, images):
        _, height, width = values.shape
        rows, columns = height // p, width // p
        plain = values if family == "gemma4_unified" else (values + 1) / 2
        patches = plain.reshape(3, rows, p, columns, p).transpose(1, 3, 2, 4, 0)
        found.append(patches.reshape(rows * columns, -1))
        row, column = np.indices((rows, columns))
        places.append(np.stack([column.reshape(-1), row.reshape(-1)], axis=1))
    most = max(map(len, found))
    found = [np.pad(each, ((0, most - len(each)), (0, 0))) for each in found]
    places = [np.pad(each, ((0, most - len(each)), (0, 0)), constant_values=-1) for each in places]
    return {"pixel_values": torch.from_numpy(np.stack(found)), "image_position_ids": torch.tensor(np.stack(places))}


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
    """Tower outputs of two images, and logits of every prompt from the last token of its last image on."""
    import torch

    if family.startswith("deepseek"):
        return tiny_deepseek_vl2.references(family, sys.modules[__name__])
    model, named = oracle(family)
    found = {f"{family} shapes": packed(named)}
    with torch.no_grad():
        for number in range(len(PROMPTS)):
            last, given = prompt(family, number)[1][-1], inputs(family, number)
            if family == "gemma4_unified":
                # As generate() makes them for a static cache, and Gemma 4's own forward does; with another cache this
                # model's forward lets images see each other in layers without a window, too.
                embedded = model.get_input_embeddings()(given["input_ids"])
                given["attention_mask"] = model.create_masks_for_generate(
                    model.config, embedded, None, None, None, given["mm_token_type_ids"]
                )
            behind = slice(last.start + last.count - 1, None)
            found[f"{family} logits {number}"] = model(**given).logits[0, behind].float().numpy()
        for number in range(2):
            height, width, pixels = image(family, number)
            one = [ImageInput(0, 0, height, width, pixels, b"")]
            if family == "gemma3":
                made = model.model.get_image_features(torch.from_numpy(pixel_values(family, one)[0])[None])
            elif family.startswith("gemma4"):
                made = model.model.get_image_features(**_placed(family, one))
            elif family == "mistral3":
                made = model.model.get_image_features(**_padded([torch.from_numpy(pixel_values(family, one)[0])]))
            else:
                made = model.model.get_image_features(**_flat(family, one))
            stacked = [made.pooler_output, *(getattr(made, "deepstack_features", None) or [])]
            found[f"{family} image {number}"] = np.stack([each[0].float().numpy() for each in stacked])
    return found


if __name__ == "__main__":
    old = dict(np.load(PATH)) if PATH.exists() else {}
    for family in sys.argv[1:] or CONFIGS:
        old |= references(family)
    np.savez_compressed(PATH, **old)
