"""DeepSeek V2 and V2-Lite (arXiv 2405.04434), V3, R1 and V3.1 (2412.19437), Kimi K2 (2507.20534), GLM-4.7-Flash,
Mistral Small 4, the text part of DeepSeek-VL2 (2412.10302): multi-head latent attention whose neighbours turn, yarn that scales scores too, experts in groups with
shared ones, first layers dense."""

import msgspec

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, hf_moe, hf_values
from zse.models.config import Fields, ModelConfig, MoeConfig
from zse.models.decoder import Decoder
from zse.models.latent import gguf_latent_values, hf_latent_values
from zse.models.llama import Llama
from zse.models.names import ATTN_NORM, EXPERTS, LATENT_ATTENTION, LLAMA, MLP, MLP_NORM, SELECT, Names

SHARED: Names = {
    "shared_gate": ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    "shared_up": ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
}
# topk_method → what counts of a group of experts: its best scores together; 0: groups do not count.
METHODS = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}
# model_type → method, gating and whether a bias helps to choose, of files that do not say; V3's and all others' are the
# last.
ROUTING = {"deepseek_v2": ("greedy", "softmax", False), "mistral4": ("noaux_tc", "softmax", False)}
V3 = ("noaux_tc", "sigmoid", True)


class DeepSeek(Decoder):
    names = ATTN_NORM | LATENT_ATTENTION | MLP_NORM | MLP | EXPERTS | SELECT | SHARED

    def layer(self, x, i):
        x = x + self.linear(self.latent_attention(self.norm(x, "attn_norm", i), i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        if not fields.boolean("use_mla", True):  # the smallest DeepSeek-VL2
            values, name = hf_values(fields, generation), "deepseek_plain"
        else:
            values, name = hf_latent_values(fields, generation, pairs=True), "deepseek"
        if fields.integer("moe_layer_freq", 1) != 1:
            raise UnsupportedError(f"{fields.path}: moe_layer_freq", fields.get("moe_layer_freq"), [1])
        if fields.get("n_routed_experts") is None:
            return fields.build(architecture=name, **values)
        return fields.build(architecture=name, moe=_hf_moe(fields, values["num_layers"]), **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_latent_values(fields, tensors, pairs=True, experts=True)
        # The blocks behind the last layer, which predict further tokens, are not used.
        values["num_layers"] -= fields.integer(".nextn_predict_layers", 0, low=0, high=values["num_layers"] - 1)
        if not fields.integer(".expert_count", 0, low=0):
            return fields.build(architecture="deepseek", **values)
        biased = any(name.endswith("exp_probs_b.bias") for name in tensors)
        # The first files name no gating: they are V2's.
        moe = gguf_moe(fields, values["num_layers"], normalize=False, normalize_eps=1e-20, selection_bias=biased)
        shared = fields.integer(".expert_shared_count", 0, low=0, high=moe.num_experts)
        changes: dict = dict(shared_size=shared * moe.intermediate_size)
        if moe.gating == "softmax" and not biased:
            changes["group_best"] = METHODS["group_limited_greedy"]
        return fields.build(architecture="deepseek", moe=msgspec.structs.replace(moe, **changes), **values)


class DeepSeekPlain(Llama):
    """With the attention of Llama."""

    names = LLAMA | EXPERTS | SELECT | SHARED


def _hf_moe(fields: Fields, num_layers: int) -> MoeConfig:
    """V3's files name their method, GLM-4.7-Flash's and what transformers writes do not. With "noaux_tc" a V2 (the text part of
    DeepSeek-VL2) chooses with V3's bias; Mistral's, whose only method it is, has none."""
    usual, gatings, biased = ROUTING.get(str(fields.get("model_type")), V3)
    method = fields.choice("topk_method", {name: name for name in METHODS}, usual)
    gating = fields.choice("scoring_func", {"softmax": "softmax", "sigmoid": "sigmoid"}, gatings)
    fixed: dict = dict(
        gating=gating, normalize_eps=1e-20, selection_bias=method == "noaux_tc" and (biased or usual != method)
    )
    fixed |= dict(group_best=METHODS[method]) if METHODS[method] else dict(groups=1, groups_used=1)
    fixed["normalize"] = fields.boolean("norm_topk_prob", usual != "greedy")
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
            raise fields.fail("mlp_layer_types", f"is not a list of {num_layers} times 'dense' or 'sparse'")
        fixed["dense_layers"] = tuple(kind == "dense" for kind in kinds)
    elif fields.get("first_k_dense_replace") is None and fields.get("model_type") == "glm4_moe_lite":
        fixed["dense_layers"] = (True, *[False] * (num_layers - 1))
    return hf_moe(fields, num_layers, **fixed)
