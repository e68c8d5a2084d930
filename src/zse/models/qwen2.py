"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on q, k and v."""

from zse.models.common import gguf_values, hf_values, hf_windows
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama

GGUF_QK_PERMUTED = False
HF_NORM_PLUS_ONE = False


def from_gguf(fields: Fields, tensors) -> ModelConfig:
    return fields.build(architecture="qwen2", qkv_bias="blk.0.attn_q.bias" in tensors, **gguf_values(fields, tensors))


def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
    values = hf_values(fields, generation)
    return fields.build(architecture="qwen2", qkv_bias=True, **windows(fields, values["num_layers"]), **values)


def windows(fields: Fields, num_layers: int) -> dict:
    """Sliding layers of Qwen: none unless use_sliding_window, then those from max_window_layers on."""
    window = fields.integer("sliding_window", 0, low=0)
    if not window or not fields.boolean("use_sliding_window", False):
        return {}
    first = fields.integer("max_window_layers", num_layers, low=0)
    layers = hf_windows(fields, num_layers) or tuple(layer >= first for layer in range(num_layers))
    return dict(sliding_window=window, sliding_layers=layers) if any(layers) else {}


class Qwen2(Llama):
    pass
