"""OLMo 2 and 3 (arXiv 2501.00656, 2512.13961): no norm before attention and MLP, one after each; q and k are normalized
over all heads together. OLMo 3: three of four layers slide, and only the others' RoPE is scaled."""

from zse.models.common import gguf_values, hf_rope, hf_values, hf_windows, pattern_layers
from zse.models.config import Fields, ModelConfig, RopeConfig
from zse.models.decoder import Decoder
from zse.models.names import ATTENTION, MLP, POST_NORMS, QK_NORM

PATTERN = 4  # every fourth layer of OLMo 3 is global


class Olmo2(Decoder):
    names = ATTENTION | QK_NORM | MLP | POST_NORMS
    whole_qk_norm = True

    def layer(self, x, i):
        q, k, v = self.qkv(x, i, qk_norm=True)
        x = x + self.norm(self.linear(self.attention(q, k, v, i), "o", i), "post_attn_norm", i)
        return x + self.norm(self.mlp(x, i), "post_mlp_norm", i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation)
        window = fields.integer("sliding_window", 0, low=0)
        theta = 500000.0 if window else 10000.0
        values["rope"] = hf_rope(fields, layer_type="full_attention", default_theta=theta)
        layers = hf_windows(fields, values["num_layers"])
        return _build(fields, values, window, layers)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors)
        return _build(fields, values, fields.integer(".attention.sliding_window", 0, low=0), ())


def _build(fields: Fields, values: dict, window: int, layers: tuple[bool, ...]) -> ModelConfig:
    layers = (layers or pattern_layers(PATTERN, values["num_layers"])) if window else ()
    local = RopeConfig(theta=values["rope"].theta) if any(layers) else None
    values |= dict(qk_norm=True, post_norms=True, sliding_window=window, sliding_layers=layers, local_rope=local)
    return fields.build(architecture="olmo2", **values)
