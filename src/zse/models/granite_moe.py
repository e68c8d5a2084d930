"""Granite 3 with experts (IBM: 1B-A400M, 3B-A800M): Granite's factors, and experts stored together."""

from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.granite import gguf_factors, hf_factors
from zse.models.llama import Llama
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP_NORM, Names

STACKS: Names = {
    "router": (EXPERTS["router"][0], "block_sparse_moe.router.layer.weight"),
    "gate_exps": (EXPERTS["gate_exps"][0], "block_sparse_moe.input_linear.weight#0/2"),
    "up_exps": (EXPERTS["up_exps"][0], "block_sparse_moe.input_linear.weight#1/2"),
    "down_exps": (EXPERTS["down_exps"][0], "block_sparse_moe.output_linear.weight"),
}


class GraniteMoe(Llama):
    names = ATTN_NORM | ATTENTION | MLP_NORM | STACKS

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_factors(fields, hf_values(fields, generation))
        inner = values["intermediate_size"]
        moe = hf_moe(fields, values["num_layers"], intermediate_size=inner, gating="softmax_chosen")
        return fields.build(architecture="granite_moe", moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_factors(fields, gguf_values(fields, tensors, experts=True))
        moe = gguf_moe(fields, values["num_layers"], intermediate_size=values["intermediate_size"])
        return fields.build(architecture="granite_moe", moe=moe, **values)
