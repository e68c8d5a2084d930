"""Gemma 2 (arXiv 2408.00118): norms before and after attention and MLP, GELU gates, a scaled embedding, soft caps on
the scores and the logits; every other layer slides."""

import math

from zse.errors import UnsupportedError
from zse.models.common import gguf_values, hf_values, hf_windows, pattern_layers
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.names import ATTENTION, ATTN_NORM, MLP, POST_NORMS

MLP_NORM = {"mlp_norm": ("ffn_norm.weight", "pre_feedforward_layernorm.weight")}
WINDOW = 4096  # where GGUF metadata does not say
LAYERS_27B = 46  # the only size whose query scale is not head_dim ** -0.5


class Gemma2(Decoder):
    names = ATTN_NORM | ATTENTION | MLP_NORM | MLP | POST_NORMS
    # A Hugging Face file stores norm weights as their distance from 1; the GGUF converter adds the 1.
    hf_norm_plus_one = True

    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
        attended = self.linear(self.attention(q, k, v, i), "o", i)
        x = x + self.norm(attended, "post_attn_norm", i)
        return x + self.norm(self.mlp(self.norm(x, "mlp_norm", i), i), "post_mlp_norm", i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = gemma_values(fields, generation)
        layers = hf_windows(fields, values["num_layers"]) or pattern_layers(2, values["num_layers"])
        window = fields.integer("sliding_window", 0, low=0)
        values |= dict(sliding_window=window, sliding_layers=layers if window else ())
        return fields.build(architecture="gemma2", **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_gemma_values(fields, tensors, LAYERS_27B)
        window = fields.integer(".attention.sliding_window", WINDOW)
        layers = pattern_layers(2, values["num_layers"])
        return fields.build(architecture="gemma2", sliding_window=window, sliding_layers=layers, **values)


def gemma_values(fields: Fields, generation: Fields | None) -> dict:
    """What config.json says of Gemma 2 and 3 alike."""
    if fields.get("use_bidirectional_attention"):
        raise UnsupportedError(f"{fields.path}: use_bidirectional_attention", True, [False])
    values = hf_values(fields, generation, tied_default=True)
    if fields.get("hidden_activation") is None and fields.get("hidden_act") is None:
        values["activation"] = "gelu_tanh"
    return values | dict(
        post_norms=True,
        query_scale=fields.number("query_pre_attn_scalar", float(values["head_dim"]), low=1e-6) ** -0.5,
        embed_scale=math.sqrt(values["hidden_size"]),
        attn_softcap=fields.number("attn_logit_softcapping", 0.0),
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
    )


def gguf_gemma_values(fields: Fields, tensors, layers_27b: int) -> dict:
    """What GGUF metadata say of Gemma 2 and 3 alike. layers_27b: of the size whose query scale differs."""
    values = gguf_values(fields, tensors)
    if values["num_layers"] == layers_27b:
        values["query_scale"] = (values["hidden_size"] / values["num_heads"]) ** -0.5
    return values | dict(
        post_norms=True,
        activation="gelu_tanh",
        embed_scale=math.sqrt(values["hidden_size"]),
        attn_softcap=fields.number(".attn_logit_softcapping", 0.0),
        logit_softcap=fields.number(".final_logit_softcapping", 0.0),
    )
