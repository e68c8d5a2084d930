"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): half of each head turns, DeepSeek-V3's routing, a shared expert, first
layers dense."""

import msgspec

from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP, QK_NORM, SELECT, Names

_NORM: Names = {"mlp_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight")}
_SHARED: Names = {
    "shared_gate": ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    "shared_up": ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
}
_ROUTING: dict = dict(gating="sigmoid", normalize_eps=1e-20, selection_bias=True)


class Glm4Moe(Decoder):
    names = ATTN_NORM | ATTENTION | QK_NORM | _NORM | MLP | EXPERTS | SELECT | _SHARED

    @classmethod
    def layer_names(cls, config: ModelConfig, layer: int) -> Names:
        names = super().layer_names(config, layer)
        return {name: found for name, found in names.items() if config.qk_norm or name not in QK_NORM}

    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i, qk_norm=self.config.qk_norm)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation, partial=0.5) | dict(o_bias=False)
        norm = fields.boolean("use_qk_norm", False)
        moe = hf_moe(fields, values["num_layers"], normalize=fields.boolean("norm_topk_prob", True), **_ROUTING)
        return fields.build(architecture="glm4_moe", qk_norm=norm, moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors, partial=True, experts=True)
        # The blocks behind the last layer, which predict further tokens, are not used.
        values["num_layers"] -= fields.integer(".nextn_predict_layers", 0, low=0, high=values["num_layers"] - 1)
        moe = gguf_moe(fields, values["num_layers"], **_ROUTING)
        shared = fields.integer(".expert_shared_count", 0, low=0, high=moe.num_experts)
        moe = msgspec.structs.replace(moe, shared_size=shared * moe.intermediate_size)
        norm = "blk.0.attn_q_norm.weight" in tensors
        return fields.build(architecture="glm4_moe", qk_norm=norm, moe=moe, **values)
