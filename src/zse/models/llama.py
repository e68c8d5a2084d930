"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783): pre-norm, RMSNorm, GQA, SwiGLU, RoPE; the base of the others here."""

from zse.models.common import gguf_windowed_values, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder


class Llama(Decoder):
    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        return fields.build(architecture="llama", **hf_values(fields, generation))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        return fields.build(architecture="llama", **gguf_windowed_values(fields, tensors))
