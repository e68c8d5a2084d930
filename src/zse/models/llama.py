"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783): pre-norm, RMSNorm, GQA, SwiGLU, RoPE; the base of the others here."""

from zse.models.common import gguf_values, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder

# The GGUF converter reorders the rows of q and k so that RoPE turns neighbours; see names.unpermute_rows.
GGUF_QK_PERMUTED = True
HF_NORM_PLUS_ONE = False


def from_gguf(fields: Fields, tensors) -> ModelConfig:
    return fields.build(
        architecture="llama",
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        **gguf_values(fields, tensors),
    )


def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return fields.build(architecture="llama", qkv_bias=bias, o_bias=bias, **hf_values(fields, generation))


class Llama(Decoder):
    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)
