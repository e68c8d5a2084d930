"""MiniCPM 3 (OpenBMB, 2024): MiniCPM with multi-head latent attention whose halves turn, dense, longrope."""

import math

from zse.models.common import scaled_residual
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.latent import gguf_latent_values, hf_latent_values
from zse.models.names import ATTN_NORM, LATENT_ATTENTION, MLP, MLP_NORM


class MiniCPM3(Decoder):
    names = ATTN_NORM | LATENT_ATTENTION | MLP_NORM | MLP

    def layer(self, x, i):
        x = x + self.linear(self.latent_attention(self.norm(x, "attn_norm", i), i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_latent_values(fields, generation, pairs=False, tied_default=True)
        return _build(fields, values, *(fields.number(name, size, low=1e-6) for name, size in FACTORS.items()))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        # llama.cpp's files have no factors: they are those of the one model there is.
        return _build(fields, gguf_latent_values(fields, tensors, pairs=False), *FACTORS.values())


FACTORS = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256.0}


def _build(fields: Fields, values: dict, embed: float, depth: float, base: float) -> ModelConfig:
    values |= dict(embed_scale=embed, logit_scale=base / values["hidden_size"])
    return fields.build(architecture="minicpm3", **scaled_residual(values, depth / math.sqrt(values["num_layers"])))
