"""Qwen3 dense (arXiv 2505.09388): Llama with RMSNorm on each head of q and k; no biases unless attention_bias."""

from zse.models.common import gguf_values, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.qwen2 import windows

GGUF_QK_PERMUTED = False
HF_NORM_PLUS_ONE = False


def from_gguf(fields: Fields, tensors) -> ModelConfig:
    return fields.build(
        architecture="qwen3",
        qk_norm=True,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        **gguf_values(fields, tensors),
    )


def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
    values = hf_values(fields, generation)
    bias = fields.boolean("attention_bias", False)
    return fields.build(
        architecture="qwen3",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        **windows(fields, values["num_layers"]),
        **values,
    )


class Qwen3(Decoder):
    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i, qk_norm=True)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)
