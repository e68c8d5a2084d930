"""SmolLM3 (Hugging Face, 2025): Llama whose every fourth layer knows no positions (NoPE, arXiv 2501.18795)."""

from zse.models.common import gguf_values, hf_values, hf_windows, pattern_layers
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama

INTERVAL = 4  # GGUF metadata does not say


class SmolLM3(Llama):
    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation, tied_default=True, default_theta=2000000.0)
        layers = values["num_layers"]
        rotate = fields.numbers("no_rope_layers") or pattern_layers(
            fields.integer("no_rope_layer_interval", INTERVAL), layers
        )
        nope = tuple(not turns for turns in rotate)
        window = fields.integer("sliding_window", 0, low=0) if fields.boolean("use_sliding_window", False) else 0
        sliding = (hf_windows(fields, layers) or nope) if window else ()
        values |= dict(sliding_window=window, sliding_layers=sliding, nope_layers=nope)
        return fields.build(architecture="smollm3", **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors)
        nope = tuple(not turns for turns in pattern_layers(INTERVAL, values["num_layers"]))
        return fields.build(architecture="smollm3", nope_layers=nope, **values)
