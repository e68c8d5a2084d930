"""Qwen3 dense (arXiv 2505.09388): Llama with RMSNorm on each head of q and k; no biases unless attention_bias."""

from zse.models.common import gguf_windowed_values, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.names import ATTENTION, ATTN_NORM, MLP, MLP_NORM, QK_NORM
from zse.models.qwen2 import windows


class Qwen3(Decoder):
    names = ATTN_NORM | ATTENTION | QK_NORM | MLP_NORM | MLP

    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i, qk_norm=True)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation)
        return fields.build(architecture="qwen3", qk_norm=True, **windows(fields, values["num_layers"]), **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        return fields.build(architecture="qwen3", qk_norm=True, **gguf_windowed_values(fields, tensors))
