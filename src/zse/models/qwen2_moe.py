"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B: Qwen2 with experts and a shared one that a sigmoid weights."""

from zse.models.common import gguf_moe, gguf_windowed_values, hf_moe, hf_values
from zse.models.config import MAX_WIDTH, Fields, ModelConfig
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP, MLP_NORM, SHARED, SHARED_ROUTER
from zse.models.qwen2 import Qwen2, windows


class Qwen2Moe(Qwen2):
    names = ATTN_NORM | ATTENTION | MLP_NORM | MLP | EXPERTS | SHARED | SHARED_ROUTER

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation)
        values |= dict(qkv_bias=fields.boolean("qkv_bias", True), o_bias=False)
        layers = values["num_layers"]
        shared = fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH)
        moe = hf_moe(fields, layers, shared_size=shared, shared_gate=True)
        return fields.build(architecture="qwen2_moe", moe=moe, **windows(fields, layers), **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_windowed_values(fields, tensors, experts=True)
        moe = gguf_moe(fields, values["num_layers"], normalize=False, shared_gate=True)
        return fields.build(architecture="qwen2_moe", moe=moe, **values)
