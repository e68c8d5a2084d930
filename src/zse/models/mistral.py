"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window on every layer (absent from version 0.2 on)."""

from zse.models.common import hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama

GGUF_QK_PERMUTED = True  # GGUF files of Mistral say "llama"
HF_NORM_PLUS_ONE = False


def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
    values = hf_values(fields, generation)
    window = fields.integer("sliding_window", 0, low=0)
    return fields.build(
        architecture="mistral",
        sliding_window=window,
        sliding_layers=(True,) * values["num_layers"] if window else (),
        **values,
    )


class Mistral(Llama):
    pass
