"""Gemma 3 text (arXiv 2503.19786): norms before and after attention and MLP, QK-norm, GELU gates, a scaled embedding,
and five sliding-window layers (their own RoPE base, no scaling) for each global one."""

import math

from zse.errors import UnsupportedError
from zse.models.common import gguf_rope, gguf_values, hf_rope, hf_values, hf_windows, rope_from_section
from zse.models.config import Fields, ModelConfig, RopeConfig
from zse.models.decoder import Decoder

GGUF_QK_PERMUTED = False
# A Hugging Face file stores norm weights as their distance from 1; the GGUF converter adds the 1.
HF_NORM_PLUS_ONE = True

PATTERN = 6  # every sixth layer is global; GGUF metadata does not say
LOCAL_THETA = 10000.0  # RoPE base of the sliding layers; GGUF metadata does not say
GLOBAL_THETA = 1000000.0
LAYERS_27B = 62  # the only size whose query scale is not head_dim ** -0.5


def from_gguf(fields: Fields, tensors) -> ModelConfig:
    values = gguf_values(fields, tensors)
    values["rope"] = gguf_rope(fields, GLOBAL_THETA)
    if values["num_layers"] == LAYERS_27B:
        values["query_scale"] = (values["hidden_size"] / values["num_heads"]) ** -0.5
    window = fields.integer(".attention.sliding_window", 0, low=0)
    pattern = fields.integer(".attention.sliding_window_pattern", PATTERN) if window else 0
    local = RopeConfig(theta=fields.number(".rope.local.freq_base", LOCAL_THETA, low=1.0))
    return _build(
        fields,
        values,
        window,
        _pattern_layers(pattern, values["num_layers"]),
        local,
        logit_softcap=fields.number(".final_logit_softcapping", 0.0),
        attn_softcap=fields.number(".attn_logit_softcapping", 0.0),
    )


def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
    if fields.get("use_bidirectional_attention"):
        raise UnsupportedError(f"{fields.path}: use_bidirectional_attention", True, [False])
    values = hf_values(fields, generation, tied_default=True)
    values["rope"] = hf_rope(fields, layer_type="full_attention", default_theta=GLOBAL_THETA)
    values["query_scale"] = fields.number("query_pre_attn_scalar", float(values["head_dim"]), low=1e-6) ** -0.5
    if fields.get("hidden_activation") is None and fields.get("hidden_act") is None:
        values["activation"] = "gelu_tanh"
    bias = fields.boolean("attention_bias", False)
    window = fields.integer("sliding_window", 0, low=0)
    layers: tuple[bool, ...] = ()
    if window:
        layers = hf_windows(fields, values["num_layers"]) or _pattern_layers(
            fields.integer("sliding_window_pattern", PATTERN), values["num_layers"]
        )
    parameters = fields.section("rope_parameters")
    section = parameters.section("sliding_attention") if parameters else None
    theta = fields.number("rope_local_base_freq", LOCAL_THETA, low=1.0)
    local = (
        rope_from_section(fields, section, section.number("rope_theta", theta, low=1.0))
        if section
        else RopeConfig(theta=theta)
    )
    return _build(
        fields,
        values,
        window,
        layers,
        local,
        qkv_bias=bias,
        o_bias=bias,
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        attn_softcap=fields.number("attn_logit_softcapping", 0.0),
    )


def _build(
    fields: Fields, values: dict, window: int, layers: tuple[bool, ...], local: RopeConfig, **more
) -> ModelConfig:
    values = {"activation": "gelu_tanh"} | values
    return fields.build(
        architecture="gemma3",
        qk_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(values["hidden_size"]),
        sliding_window=window,
        sliding_layers=layers,
        local_rope=local if any(layers) else None,
        **more,
        **values,
    )


def _pattern_layers(pattern: int, num_layers: int) -> tuple[bool, ...]:
    return tuple(bool((layer + 1) % pattern) for layer in range(num_layers)) if pattern else ()


class Gemma3(Decoder):
    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i, qk_norm=True)
        attended = self.linear(self.attention(q, k, v, i), "o", i)
        x = x + self.norm(attended, "post_attn_norm", i)
        return x + self.norm(self.mlp(self.norm(x, "mlp_norm", i), i), "post_mlp_norm", i)
