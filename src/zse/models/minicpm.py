"""MiniCPM 1, 2 and 4 (arXiv 2404.06395, 2506.07900): Llama with factors on the embedding, on what joins the residual
stream and on the logits; longrope in 4."""

import math

from zse.errors import UnsupportedError
from zse.models.common import gguf_values, hf_values, scaled_residual
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama


class MiniCPM(Llama):
    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        if fields.integer("num_experts", 0, low=0):
            raise UnsupportedError(f"{fields.path}: num_experts", fields.get("num_experts"), [0])
        values = hf_values(fields, generation, tied_default=True)
        values |= dict(
            embed_scale=fields.number("scale_emb", 1.0),
            logit_scale=fields.number("dim_model_base", values["hidden_size"], low=1) / values["hidden_size"],
        )
        depth = fields.number("scale_depth", 1.0, low=1e-6) / math.sqrt(values["num_layers"])
        return fields.build(architecture="minicpm", **scaled_residual(values, depth))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors)
        # What the first files leave out is MiniCPM 2B's.
        values |= dict(
            embed_scale=fields.number(".embedding_scale", 12.0),
            logit_scale=1 / fields.number(".logit_scale", values["hidden_size"] / 256, low=1e-9),
        )
        depth = fields.number(".residual_scale", 1.4 / math.sqrt(values["num_layers"]), low=1e-6)
        return fields.build(architecture="minicpm", **scaled_residual(values, depth))
