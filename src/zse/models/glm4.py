"""GLM-4 dense of 2025 (arXiv 2406.12793): norms before and after attention and MLP, biases on q, k, v, gate and up
joined in the file, RoPE on neighbouring pairs of the first half of each head."""

from zse.models.common import gguf_values, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.names import ATTENTION, ATTN_NORM, FUSED_MLP, MLP_NORM


class Glm4(Decoder):
    names = (
        ATTN_NORM
        | ATTENTION
        | {"post_attn_norm": ("post_attention_norm.weight", "post_self_attn_layernorm.weight")}
        | MLP_NORM
        | FUSED_MLP
        | {"post_mlp_norm": ("post_ffw_norm.weight", "post_mlp_layernorm.weight")}
    )

    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
        attended = self.linear(self.attention(q, k, v, i), "o", i)
        x = x + self.norm(attended, "post_attn_norm", i)
        return x + self.norm(self.mlp(self.norm(x, "mlp_norm", i), i), "post_mlp_norm", i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation, partial=0.5)
        values |= dict(post_norms=True, qkv_bias=fields.boolean("attention_bias", True), o_bias=False)
        return fields.build(architecture="glm4", **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        return fields.build(architecture="glm4", post_norms=True, **gguf_values(fields, tensors, partial=True))
