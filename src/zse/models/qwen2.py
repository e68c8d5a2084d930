"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on q, k and v."""

from zse.models.common import gguf_windowed_values, hf_values, hf_windows
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama


class Qwen2(Llama):
    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation) | dict(qkv_bias=True, o_bias=False)
        return fields.build(architecture="qwen2", **windows(fields, values["num_layers"]), **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        return fields.build(architecture="qwen2", **gguf_windowed_values(fields, tensors))


def windows(fields: Fields, num_layers: int) -> dict:
    """Sliding layers of Qwen: none unless use_sliding_window, then those from max_window_layers on."""
    window = fields.integer("sliding_window", 0, low=0)
    if not window or not fields.boolean("use_sliding_window", False):
        return {}
    first = fields.integer("max_window_layers", num_layers, low=0)
    layers = hf_windows(fields, num_layers) or tuple(layer >= first for layer in range(num_layers))
    return dict(sliding_window=window, sliding_layers=layers) if any(layers) else {}
