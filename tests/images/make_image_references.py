"""What transformers' image processors make of a few images: `python tests/images/make_image_references.py` writes references.npz.

The processors' own code by Pillow, without torchvision. Their normalization is undone: a difference of 1 is one grey level."""

import sys
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[2] / "src"))
from zse.models.vision.config import VisionConfig  # noqa: E402
from zse.models.vision.read import vision_from_hf  # noqa: E402

PLACE = Path(__file__).parent / "references.npz"
SIZES = ((37, 90), (200, 9))  # height, width
CONFIGS = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {"image_size": 112, "patch_size": 14},
        "mm_tokens_per_image": 16,
    },
    "qwen2_5": {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"patch_size": 14}},
    "qwen3": {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"patch_size": 16}},
    "gemma4": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vision_config": {"patch_size": 4, "pooling_kernel_size": 3},
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "vision_config": {"patch_size": 14, "image_size": 112},
        "spatial_merge_size": 2,
    },
}
PROCESSORS = {
    "gemma3": {"size": {"height": 112, "width": 112}},
    "qwen2_5": {"size": {"shortest_edge": 3136, "longest_edge": 12544}},
    "qwen3": {"size": {"shortest_edge": 4096, "longest_edge": 16384}},
    "gemma4": {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3},
    "mistral3": {"size": {"longest_edge": 112}, "patch_size": 28},
}


def vision(name: str) -> VisionConfig:
    found = vision_from_hf("config.json", CONFIGS[name], PROCESSORS[name])
    assert found is not None
    return found


def picture(height: int, width: int) -> Image.Image:
    """Gradients and edges."""
    rows, columns = np.mgrid[0:height, 0:width]
    edges = 255 * ((rows // 5 + columns // 7) % 2)
    planes = rows * 255 // height, np.where(edges, columns * 255 // width, 128), edges
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def processed(name: str, image: Image.Image) -> np.ndarray:
    """u8 [height, width, 3], as transformers' processor gives the image to the tower."""
    warnings.simplefilter("ignore")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if name == "gemma4":  # patches pixel by pixel, not normalized, with their columns and rows
        result = Gemma4ImageProcessorPil(**PROCESSORS[name])(images=[image], return_tensors="np")
        places, side = np.asarray(result["image_position_ids"][0]), PROCESSORS[name]["patch_size"]
        columns, rows = places.max(0) + 1
        grid = np.asarray(result["pixel_values"][0])[: rows * columns].reshape(rows, columns, side, side, 3)
        plain = grid.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, 3)
        return np.rint(255 * plain).astype(np.uint8)
    kind = {"gemma3": Gemma3ImageProcessorPil, "mistral3": PixtralImageProcessorPil}.get(name, Qwen2VLImageProcessorPil)
    config = vision(name)
    means = {"image_mean": list(config.mean), "image_std": list(config.std)}
    patch = {} if name == "gemma3" or name == "mistral3" else {"patch_size": config.patch, "merge_size": config.merge}
    result = kind(**PROCESSORS[name], **patch, **means)(images=[image], return_tensors="np")
    values = np.asarray(result["pixel_values"])
    if kind is Qwen2VLImageProcessorPil:
        _, rows, columns = result["image_grid_thw"][0]
        side, merge = config.patch, config.merge
        grid = values.reshape(rows // merge, columns // merge, merge, merge, 3, 2, side, side)[:, :, :, :, :, 0]
        values = grid.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * side, columns * side)
    plain = values.reshape(values.shape[-3:]).transpose(1, 2, 0) * np.array(config.std) + np.array(config.mean)
    return np.rint(255 * plain).astype(np.uint8)


def main() -> None:
    made = {
        f"{name} {height} {width}": processed(name, picture(height, width))
        for name in CONFIGS
        for height, width in SIZES
    }
    np.savez_compressed(PLACE, **made)
    print(f"{len(made)} images, {PLACE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
