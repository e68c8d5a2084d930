"""LFM2 and LFM2.5 (Liquid AI, arXiv 2511.23404): short convolutions between gates in most layers, attention with norms
on the heads of q and k in some; with experts (8B-A1B) behind first dense layers."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import MAX_WIDTH, Fields, ModelConfig
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP, MODEL, QK_NORM, SELECT, Names
from zse.models.recurrent import SHORT_CONV, Mixers, gguf_kv_heads, hf_mixers

KINDS = {"conv": "conv", "full_attention": "attention"}
_NAMES: Names = {
    "attn_norm": (ATTN_NORM["attn_norm"][0], "operator_norm.weight"),
    "o": (ATTENTION["o"][0], "self_attn.out_proj.weight"),
    "q_norm": (QK_NORM["q_norm"][0], "self_attn.q_layernorm.weight"),
    "k_norm": (QK_NORM["k_norm"][0], "self_attn.k_layernorm.weight"),
    "mlp_norm": ("ffn_norm.weight", "ffn_norm.weight"),
    "gate": (MLP["gate"][0], "feed_forward.w1.weight"),
    "up": (MLP["up"][0], "feed_forward.w3.weight"),
    "down": (MLP["down"][0], "feed_forward.w2.weight"),
    "router": (EXPERTS["router"][0], "feed_forward.gate.weight"),
    "gate_exps": (EXPERTS["gate_exps"][0], "feed_forward.experts.{e}.w1.weight|feed_forward.experts.gate_up_proj#0/2"),
    "up_exps": (EXPERTS["up_exps"][0], "feed_forward.experts.{e}.w3.weight|feed_forward.experts.gate_up_proj#1/2"),
    "down_exps": (EXPERTS["down_exps"][0], "feed_forward.experts.{e}.w2.weight|feed_forward.experts.down_proj"),
    "router_select": (SELECT["router_select"][0], "feed_forward.expert_bias"),
}
_ROUTING: dict = dict(gating="sigmoid", normalize_eps=1e-6)


class Lfm2(Mixers):
    names = ATTN_NORM | ATTENTION | QK_NORM | SHORT_CONV | _NAMES
    model_names = MODEL | {"final_norm": ("token_embd_norm.weight|output_norm.weight", "embedding_norm.weight")}

    def layer(self, x, i):
        h = self.norm(x, "attn_norm", i)
        if self.config.mixer(i) == "attention":
            q, k, v = self.qkv(h, i, qk_norm=True)
            x = x + self.linear(self.attention(q, k, v, i), "o", i)
        else:
            x = x + self.linear(self.gated_conv(self.linear(h, "mix_in", i), "conv", i), "mix_out", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        layers = fields.integer("num_hidden_layers")
        fields = fields.changed(
            rms_norm_eps=fields.get("norm_eps", 1e-5),
            intermediate_size=_inner(fields),
            tie_word_embeddings=fields.get("tie_embedding", fields.get("tie_word_embeddings", True)),
        )
        if fields.boolean("conv_bias", False):
            raise UnsupportedError(f"{fields.path}: conv_bias", True, [False])
        values = hf_values(fields, generation, default_theta=1000000.0)
        attend = fields.get("full_attn_idxs")
        listed = attend if isinstance(attend, list) else range(layers)
        default = ["full_attention" if layer in listed else "conv" for layer in range(layers)]
        moe = None
        if fields.get("num_experts") is not None:
            first = fields.integer("num_dense_layers", 2, low=0, high=layers)
            moe = hf_moe(
                fields.changed(first_k_dense_replace=first),
                layers,
                normalize=fields.boolean("norm_topk_prob", True),
                selection_bias=fields.boolean("use_expert_bias", True),
                **_ROUTING,
            )
        recurrent = fields.build_recurrent(kernel=fields.integer("conv_L_cache", 3))
        mixers = hf_mixers(fields, KINDS, layers, default)
        return fields.build(architecture="lfm2", qk_norm=True, mixers=mixers, recurrent=recurrent, moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        heads, fields = gguf_kv_heads(fields, fields.integer(".block_count"))
        values = gguf_values(fields, tensors, experts=True)
        moe = None
        if fields.integer(".expert_count", 0, low=0):
            biased = any(name.endswith("exp_probs_b.bias") for name in tensors)
            moe = gguf_moe(fields, values["num_layers"], selection_bias=biased, **_ROUTING)
        recurrent = fields.build_recurrent(kernel=fields.integer(".shortconv.l_cache"))
        mixers = tuple("attention" if count else "conv" for count in heads)
        return fields.build(architecture="lfm2", qk_norm=True, mixers=mixers, recurrent=recurrent, moe=moe, **values)


def _inner(fields: Fields) -> int:
    """The width of the MLP, which config.json says before it is adjusted."""
    width = fields.integer("block_ff_dim", fields.integer("intermediate_size", high=MAX_WIDTH), high=MAX_WIDTH)
    if fields.get("num_experts") is not None or not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    unit = fields.integer("block_multiple_of", 256)
    return -(-width // unit) * unit
