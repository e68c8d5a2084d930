"""Granite 4 H (IBM: 350M to 32B-A9B): Mamba-2 (arXiv 2405.21060) in most layers, attention that turns nothing in the
others, Granite's factors, and behind both an MLP or experts beside one."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import MAX_WIDTH, Fields, ModelConfig
from zse.models.granite import gguf_factors, hf_factors
from zse.models.granite_moe import STACKS
from zse.models.names import ATTENTION, ATTN_NORM, MLP_NORM, Names
from zse.models.recurrent import Mixers, gguf_kv_heads, gguf_recurrent, hf_mixers, hf_scan, mamba

KINDS = {"mamba": "ssm", "linear_attention": "ssm", "attention": "attention", "full_attention": "attention"}
_MLP: Names = {
    "gate": ("ffn_gate.weight", "shared_mlp.input_linear.weight"),
    "up": ("ffn_up.weight", "shared_mlp.input_linear.weight"),
    "down": ("ffn_down.weight", "shared_mlp.output_linear.weight"),
}
_SHARED: Names = {
    "shared_gate": ("ffn_gate_shexp.weight", _MLP["gate"][1]),
    "shared_up": ("ffn_up_shexp.weight", _MLP["up"][1]),
    "shared_down": ("ffn_down_shexp.weight", _MLP["down"][1]),
}
# What a config.json calls the numbers of Mamba-2.
_SIZES = dict(heads="mamba_n_heads", groups="mamba_n_groups", key_size="mamba_d_state", value_size="mamba_d_head")
_SIZES |= dict(kernel="mamba_d_conv", conv_bias="mamba_conv_bias")


class GraniteHybrid(Mixers):
    names = ATTN_NORM | ATTENTION | mamba("mamba.") | MLP_NORM | _MLP | STACKS | _SHARED
    joined_mlp = True

    def layer(self, x, i):
        h = self.norm(x, "attn_norm", i)
        if self.config.mixer(i) == "attention":
            q, k, v = self.qkv(h, i)
            x = x + self.linear(self.attention(q, k, v, i), "o", i)
        else:
            x = x + self.mamba(h, i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        shared = fields.integer("shared_intermediate_size", high=MAX_WIDTH)
        experts = fields.integer("num_local_experts", 0, low=0)
        if fields.boolean("mamba_proj_bias", False):
            raise UnsupportedError(f"{fields.path}: mamba_proj_bias", True, [False])
        values = hf_values(fields, generation)
        layers, eps, moe = values["num_layers"], values["norm_eps"], None
        if experts:
            inner = values["intermediate_size"]
            moe = hf_moe(fields, layers, intermediate_size=inner, gating="softmax_chosen", shared_size=shared)
        mixers = hf_mixers(fields, KINDS, layers)
        if fields.get("mamba_d_head", "auto") == "auto":
            inner = fields.integer("mamba_expand", 2) * values["hidden_size"]
            fields = fields.changed(mamba_d_head=inner // fields.integer("mamba_n_heads", high=inner))
        recurrent = hf_scan(fields, _SIZES, eps) if "ssm" in mixers else None
        turns = fields.choice("position_embedding_type", {"rope": True, "nope": False}, "nope")
        values["nope_layers"] = () if turns else (True,) * layers
        values["intermediate_size"] = shared
        values = hf_factors(fields, values)
        return fields.build(architecture="granite_hybrid", mixers=mixers, recurrent=recurrent, moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        heads, fields = gguf_kv_heads(fields, fields.integer(".block_count"))
        values = gguf_values(fields, tensors, experts=True)
        layers, eps, moe = values["num_layers"], values["norm_eps"], None
        if fields.integer(".expert_count", 0, low=0):
            moe = gguf_moe(fields, layers, intermediate_size=values["intermediate_size"], gating="softmax_chosen")
        mixers = tuple("attention" if count else "ssm" for count in heads)
        biased = any(name.endswith("ssm_conv1d.bias") for name in tensors)
        groups = fields.integer(".ssm.group_count", high=MAX_WIDTH)
        recurrent = gguf_recurrent(fields, norm_eps=eps, norm_groups=groups, conv_bias=biased)
        values["nope_layers"] = (True,) * layers
        values = gguf_factors(fields, values)
        return fields.build(architecture="granite_hybrid", mixers=mixers, recurrent=recurrent, moe=moe, **values)
