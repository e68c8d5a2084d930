"""Granite 3 and 4 dense (IBM): Llama with factors on the embedding, on what joins the residual stream, on the scores
and on the logits."""

from zse.models.common import gguf_values, hf_values, scaled_residual
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama


class Granite(Llama):
    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        return fields.build(architecture="granite", **hf_factors(fields, hf_values(fields, generation)))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        return fields.build(architecture="granite", **gguf_factors(fields, gguf_values(fields, tensors)))


def hf_factors(fields: Fields, values: dict) -> dict:
    """`values` with the factors of a config.json."""
    values |= dict(
        embed_scale=fields.number("embedding_multiplier", 1.0),
        query_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0, low=1e-9),
    )
    return scaled_residual(values, fields.number("residual_multiplier", 1.0, low=1e-6))


def gguf_factors(fields: Fields, values: dict) -> dict:
    """`values` with the factors of GGUF metadata."""
    values |= dict(
        embed_scale=fields.number(".embedding_scale", 1.0),
        query_scale=fields.number(".attention.scale", values["query_scale"]),
        logit_scale=1 / fields.number(".logit_scale", 1.0, low=1e-9),
    )
    return scaled_residual(values, fields.number(".residual_scale", 1.0, low=1e-6))
