"""Command R (Cohere, 2024) and Command R7B, A (Cohere 2; arXiv 2504.00698): attention and MLP side by side behind one
LayerNorm, RoPE on neighbouring pairs, a factor on the logits. Cohere 2: three of four layers slide, the others know no
positions."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_values, hf_values, hf_windows, pattern_layers
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.names import ATTENTION, ATTN_NORM, MLP

PATTERN = 4  # every fourth layer of Cohere 2 is global


class Cohere(Decoder):
    names = ATTN_NORM | ATTENTION | MLP
    norm_kind = "layer"

    def layer(self, x, i):
        h = self.norm(x, "attn_norm", i)
        q, k, v = self.qkv(h, i)
        return x + self.linear(self.attention(q, k, v, i), "o", i) + self.mlp(h, i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        return fields.build(architecture="cohere", **_hf_values(fields, generation))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        return fields.build(architecture="cohere", **_gguf_values(fields, tensors))


class Cohere2(Cohere):
    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = _hf_values(fields, generation)
        pattern = fields.integer("sliding_window_pattern", PATTERN)
        layers = hf_windows(fields, values["num_layers"]) or pattern_layers(pattern, values["num_layers"])
        return _build2(fields, values, fields.integer("sliding_window"), layers)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = _gguf_values(fields, tensors)
        layers = pattern_layers(PATTERN, values["num_layers"])
        return _build2(fields, values, fields.integer(".attention.sliding_window"), layers)


def _build2(fields: Fields, values: dict, window: int, layers: tuple[bool, ...]) -> ModelConfig:
    nope = tuple(not slides for slides in layers)
    values |= dict(sliding_window=window, sliding_layers=layers, nope_layers=nope)
    return fields.build(architecture="cohere2", **values)


def _hf_values(fields: Fields, generation: Fields | None) -> dict:
    if fields.boolean("use_qk_norm", False):
        raise UnsupportedError(f"{fields.path}: use_qk_norm", True, [False])
    values = hf_values(fields, generation, tied_default=True, default_theta=500000.0, norm="layer")
    return values | dict(logit_scale=fields.number("logit_scale", 0.0625))


def _gguf_values(fields: Fields, tensors) -> dict:
    if "blk.0.attn_q_norm.weight" in tensors:
        raise UnsupportedError(f"{fields.path}: norms of q and k", "blk.0.attn_q_norm.weight", ["none"])
    return gguf_values(fields, tensors, norm="layer") | dict(logit_scale=fields.number(".logit_scale", 0.0625))
