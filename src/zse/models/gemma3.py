"""Gemma 3 text (arXiv 2503.19786): Gemma 2 with QK-norm in place of the soft cap on the scores, and five sliding-window
layers (their own RoPE base, no scaling) for each global one."""

from zse.models.common import gguf_rope, hf_rope, hf_windows, pattern_layers, rope_from_section
from zse.models.config import Fields, ModelConfig, RopeConfig
from zse.models.gemma2 import MLP_NORM, Gemma2, gemma_values, gguf_gemma_values
from zse.models.names import ATTENTION, ATTN_NORM, MLP, POST_NORMS, QK_NORM

PATTERN = 6  # every sixth layer is global; GGUF metadata does not say
LOCAL_THETA = 10000.0  # RoPE base of the sliding layers; GGUF metadata does not say
GLOBAL_THETA = 1000000.0
LAYERS_27B = 62  # the only size whose query scale is not head_dim ** -0.5
# What a text_config leaves out where it is so (transformers' Gemma3TextConfig).
DEFAULTS = dict(
    vocab_size=262208,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    query_pre_attn_scalar=256,
)


class Gemma3(Gemma2):
    names = ATTN_NORM | ATTENTION | QK_NORM | MLP_NORM | MLP | POST_NORMS

    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i, qk_norm=True)
        attended = self.linear(self.attention(q, k, v, i), "o", i)
        x = x + self.norm(attended, "post_attn_norm", i)
        return x + self.norm(self.mlp(self.norm(x, "mlp_norm", i), i), "post_mlp_norm", i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        if fields.get("model_type") == "gemma3_text" and fields.get("architectures") is None:
            fields = Fields(fields.path, DEFAULTS | fields.values)
        values = gemma_values(fields, generation)
        values["rope"] = hf_rope(fields, layer_type="full_attention", default_theta=GLOBAL_THETA)
        window = fields.integer("sliding_window", 0, low=0)
        pattern = fields.integer("sliding_window_pattern", PATTERN) if window else 0
        layers = hf_windows(fields, values["num_layers"]) if window else ()
        parameters = fields.section("rope_parameters")
        section = parameters.section("sliding_attention") if parameters else None
        theta = fields.number("rope_local_base_freq", LOCAL_THETA, low=1.0)
        local = RopeConfig(theta=theta)
        if section:
            local = rope_from_section(fields, section, section.number("rope_theta", theta, low=1.0))
        return _build(fields, values, window, layers or pattern_layers(pattern, values["num_layers"]), local)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_gemma_values(fields, tensors, LAYERS_27B)
        values["rope"] = gguf_rope(fields, GLOBAL_THETA)
        window = fields.integer(".attention.sliding_window", 0, low=0)
        pattern = fields.integer(".attention.sliding_window_pattern", PATTERN) if window else 0
        local = RopeConfig(theta=fields.number(".rope.local.freq_base", LOCAL_THETA, low=1.0))
        return _build(fields, values, window, pattern_layers(pattern, values["num_layers"]), local)


def _build(fields: Fields, values: dict, window: int, layers: tuple[bool, ...], local: RopeConfig) -> ModelConfig:
    return fields.build(
        architecture="gemma3",
        qk_norm=True,
        sliding_window=window,
        sliding_layers=layers,
        local_rope=local if any(layers) else None,
        **values,
    )
