"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2503.01743): Llama with q, k, v and gate, up joined in the
file, longrope, and in Phi-4-mini a rotation of three quarters of each head."""

from zse.models.common import gguf_values, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama
from zse.models.names import ATTN_NORM, FUSED_ATTENTION, FUSED_MLP, MLP_NORM


class Phi3(Llama):
    names = ATTN_NORM | FUSED_ATTENTION | MLP_NORM | FUSED_MLP

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation, partial=1.0)
        return _build(fields, values, fields.integer("sliding_window", 0, low=0))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors, partial=True)
        return _build(fields, values, fields.integer(".attention.sliding_window", 0, low=0))


def _build(fields: Fields, values: dict, window: int) -> ModelConfig:
    layers = (True,) * values["num_layers"] if window else ()
    return fields.build(architecture="phi3", sliding_window=window, sliding_layers=layers, **values)
