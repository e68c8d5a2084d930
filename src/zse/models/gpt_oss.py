"""gpt-oss (OpenAI, arXiv 2508.10925): sinks in attention, every other layer with a window, biases everywhere, experts
with a clamped activation chosen by the softmax of the chosen logits."""

import msgspec

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values, hf_windows, pattern_layers
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama
from zse.models.names import ATTENTION, ATTN_NORM, EXPERT_BIASES, EXPERTS, SINKS

YARN = dict(
    beta_fast=32.0, beta_slow=1.0, truncate=False
)  # GGUF metadata do not say that the ramp's ends are not rounded


CLAMPED = dict(swiglu_alpha=1.702, swiglu_limit=7.0)  # what the activation "clamped" is made of


class GptOss(Llama):
    names = ATTN_NORM | ATTENTION | SINKS | EXPERTS | EXPERT_BIASES
    names |= {"mlp_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight")}
    # The experts of a folder, as zse.formats.in_turn gives them.
    names |= {"router": (EXPERTS["router"][0], "mlp.router.weight")}
    names |= {
        f"{name}_exps": (EXPERTS[f"{name}_exps"][0], f"mlp.experts.{name}_proj") for name in ("gate", "up", "down")
    }

    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mixture(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        for name, known in CLAMPED.items():
            if fields.number(name, known) != known:
                raise UnsupportedError(f"{fields.path}: {name}", fields.get(name), [known])
        values = hf_values(fields, generation, default_theta=150000.0)
        layers, inner = values["num_layers"], values["intermediate_size"]
        moe = hf_moe(fields, layers, intermediate_size=inner, gating="softmax_chosen", normalize=False)
        return fields.build(
            architecture="gpt_oss",
            moe=moe,
            sliding_window=fields.integer("sliding_window"),
            sliding_layers=hf_windows(fields, layers) or pattern_layers(2, layers),
            **values | dict(activation="clamped", sinks=True),
        )

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors, experts=True)
        layers = values["num_layers"]
        if values["rope"].scaling == "yarn":
            values["rope"] = fields.change_rope(values["rope"], **YARN)
        moe = gguf_moe(fields, layers, intermediate_size=values["intermediate_size"], normalize=False)
        return fields.build(
            architecture="gpt_oss",
            moe=msgspec.structs.replace(moe, gating="softmax_chosen"),
            sliding_window=fields.integer(".attention.sliding_window"),
            sliding_layers=tuple(layer % 2 == 0 for layer in range(layers)),
            **values | dict(activation="clamped", sinks=True),
        )
