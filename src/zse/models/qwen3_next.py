"""Qwen3-Next (80B-A3B), and Qwen3.5 to 3.8 dense and with experts: Gated DeltaNet (arXiv 2412.06464) in three of four
layers, in the others attention whose result a gate of each head multiplies and of whose heads a quarter turns; a shared
expert that a sigmoid weights."""

from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import MAX_WIDTH, Fields, ModelConfig
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP, QK_NORM, SHARED, SHARED_ROUTER, Names
from zse.models.recurrent import DELTA, Mixers, every, gguf_recurrent, hf_delta, hf_mixers

KINDS = {"linear_attention": "delta", "full_attention": "attention"}
_NORM: Names = {"mlp_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight")}
INTERVAL = 4  # every fourth layer attends where a file does not say


class Qwen3Next(Mixers):
    names = ATTN_NORM | ATTENTION | QK_NORM | DELTA | _NORM | MLP | EXPERTS | SHARED | SHARED_ROUTER
    hf_norm_plus_one = True
    gated_attention = True

    def layer(self, x, i):
        h = self.norm(x, "attn_norm", i)
        mixed = self.attend(h, i) if self.config.mixer(i) == "attention" else self.recur(h, i)
        x = x + mixed
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    def attend(self, h, i):
        q, gate = self.head_halves(self.linear(h, "q", i, exact=True), self.config.num_heads)
        k, v = (self.linear(h, name, i, exact=True) for name in "kv")
        q, k = self.head_norm(q, "q_norm", i), self.head_norm(k, "k_norm", i)
        attended = self.attention(self.rotate(q, i, "q"), self.rotate(k, i, "k"), v, i)
        return self.linear(self.gate_output(attended, gate, i), "o", i)

    def recur(self, h, i):
        found = self.sizes
        qkv, z = (self.linear(h, name, i, exact=True) for name in ("mix_qkv", "mix_z"))
        b, a = (self.linear(h, name, i, exact=True) for name in ("mix_b", "mix_a"))
        heads: dict = dict(k_heads=found.groups, v_heads=found.heads, k_size=found.key_size, tiled=found.tiled)
        y = self.delta(self.conv(qkv, "conv", i), b, a, i, **heads)
        return self.linear(self.gated_norm(y, z, "mix_norm", i, groups=found.heads), "mix_out", i)

    @classmethod
    def from_hf(cls, fields: Fields, generation: Fields | None) -> ModelConfig:
        inner = fields.get("intermediate_size", fields.get("moe_intermediate_size"))
        fields = fields.changed(intermediate_size=inner)
        values = hf_values(fields, generation, partial=0.25, default_theta=10000000.0)
        layers, moe = values["num_layers"], None
        if fields.integer("num_experts", 0, low=0):
            shared = fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH)
            normalize = fields.boolean("norm_topk_prob", True)
            moe = hf_moe(fields, layers, normalize=normalize, shared_size=shared, shared_gate=True)
        default = every(
            fields.integer("full_attention_interval", INTERVAL), layers, ("linear_attention", "full_attention")
        )
        mixers = hf_mixers(fields, KINDS, layers, default)
        recurrent = hf_delta(fields, values["norm_eps"])
        return cls._build(fields, values, mixers=mixers, recurrent=recurrent, moe=moe)

    @classmethod
    def from_gguf(cls, fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors, partial=True, experts=True)
        # The blocks behind the last layer, which predict further tokens, are not used.
        values["num_layers"] -= fields.integer(".nextn_predict_layers", 0, low=0, high=values["num_layers"] - 1)
        layers, moe = values["num_layers"], None
        if fields.integer(".expert_count", 0, low=0):
            moe = gguf_moe(fields, layers, shared_gate=True)
        recurrent = gguf_recurrent(fields, norm_eps=values["norm_eps"], tiled=cls.gguf_tiled)
        return cls._build(fields, values, mixers=_gguf_mixers(fields, layers), recurrent=recurrent, moe=moe)

    gguf_tiled = False  # whether llama.cpp's converter reorders the heads of values

    @classmethod
    def _build(cls, fields: Fields, values: dict, **found) -> ModelConfig:
        return fields.build(architecture="qwen3_next", qk_norm=True, **found, **values)


class Qwen35(Qwen3Next):
    gguf_tiled = True

    @classmethod
    def _build(cls, fields: Fields, values: dict, **found) -> ModelConfig:
        return fields.build(architecture="qwen3_5", qk_norm=True, **found, **values)


def _gguf_mixers(fields: Fields, layers: int) -> tuple[str, ...]:
    if fields.get(".attention.recurrent_layers") is not None:
        listed = list(fields.get(".attention.recurrent_layers"))
        name = fields.key(".attention.recurrent_layers")
        recurs = fields.changed(**{name: listed[:layers]}).each_layer(name, layers, low=0, high=1)
        return tuple("delta" if each else "attention" for each in recurs)
    return tuple(every(fields.integer(".full_attention_interval", INTERVAL), layers, ("delta", "attention")))
