"""Families of towers → their classes."""

import importlib

from zse.models.vision.tower import Tower

# VisionConfig.family → module and class.
TOWERS = {
    "gemma3": ("siglip", "Siglip"),
    "qwen2_vl": ("qwen2_vl", "Qwen2VL"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5VL"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL"),
    "qwen3_5": ("qwen3_vl", "Qwen35VL"),
    "pixtral": ("pixtral", "Pixtral"),
    "deepseek_vl2": ("deepseek_vl2", "DeepSeekVL2"),
    "gemma4_unified": ("gemma4_unified", "Gemma4Unified"),
    "gemma4": ("gemma4", "Gemma4Vision"),
}
# clip.projector_type of mmproj files that are read.
GGUF_KINDS = ["gemma3", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "pixtral", "gemma4v", "gemma4uv"]


def tower_class(family: str) -> type[Tower] | None:
    """The class of a family; None: images of its models are not taken yet."""
    if family not in TOWERS:
        return None
    module, attribute = TOWERS[family]
    return getattr(importlib.import_module(f"zse.models.vision.{module}"), attribute)
