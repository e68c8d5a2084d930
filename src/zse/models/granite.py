"""Granite 3 and 4 dense (IBM): Llama with factors on the embedding, on what joins the residual stream, on the scores and on
the logits."""

from zse.models.common import gguf_values, hf_values, scaled_residual
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama


class Granite(Llama):
    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation)
        values |= dict(
            embed_scale=fields.number("embedding_multiplier", 1.0),
            query_scale=fields.number("attention_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0, low=1e-9),
        )
        residual = fields.number("residual_multiplier", 1.0, low=1e-6)
        return fields.build(architecture="granite", **scaled_residual(values, residual))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors)
        values |= dict(
            embed_scale=fields.number(".embedding_scale", 1.0),
            query_scale=fields.number(".attention.scale", values["query_scale"]),
            logit_scale=1 / fields.number(".logit_scale", 1.0, low=1e-9),
        )
        residual = fields.number(".residual_scale", 1.0, low=1e-6)
        return fields.build(architecture="granite", **scaled_residual(values, residual))
