"""MiniMax M2 (230B-A10B): q and k normalized over all heads together, half of each head turns, sigmoid routing with a
bias."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.mixtral import SPARSE_BLOCK
from zse.models.names import ATTENTION, ATTN_NORM, MLP_NORM, QK_NORM, SELECT
from zse.models.qwen3 import Qwen3

_ROUTING: dict = dict(gating="sigmoid", selection_bias=True, normalize=True)


class MiniMaxM2(Qwen3):
    names = ATTN_NORM | ATTENTION | QK_NORM | MLP_NORM | SPARSE_BLOCK
    names |= {"router_select": (SELECT["router_select"][0], "block_sparse_moe.e_score_correction_bias")}
    whole_qk_norm = True

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        fields.choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
        dim = fields.integer("head_dim", None)
        turned = fields.integer("rotary_dim", dim)
        part = turned / dim if dim and turned else 1.0
        values = hf_values(fields, generation, default_theta=5000000.0, partial=part)
        kinds = fields.get("attn_type_list", [])
        if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
            raise UnsupportedError(
                f"{fields.path}: attn_type_list", str(kinds)[:60], ["1 (full attention) for all layers"]
            )
        moe = hf_moe(fields, values["num_layers"], intermediate_size=values["intermediate_size"], **_ROUTING)
        return fields.build(architecture="minimax_m2", qk_norm=True, moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors, partial=True, experts=True)
        moe = gguf_moe(fields, values["num_layers"], intermediate_size=values["intermediate_size"], **_ROUTING)
        return fields.build(architecture="minimax_m2", qk_norm=True, moe=moe, **values)
