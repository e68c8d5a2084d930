"""Mixtral (arXiv 2401.04088): Mistral with experts. Its GGUF files call themselves llama."""

from zse.models.common import gguf_moe, gguf_windowed_values, hf_moe, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP_NORM, Names

# gate, up and down as Mixtral's and MiniMax's files call them.
SPARSE_BLOCK: Names = {
    "router": (EXPERTS["router"][0], "block_sparse_moe.gate.weight"),
    "gate_exps": (EXPERTS["gate_exps"][0], "block_sparse_moe.experts.{e}.w1.weight"),
    "up_exps": (EXPERTS["up_exps"][0], "block_sparse_moe.experts.{e}.w3.weight"),
    "down_exps": (EXPERTS["down_exps"][0], "block_sparse_moe.experts.{e}.w2.weight"),
}


# GGUF files of the first months (2023) have a tensor for each expert.
APART: Names = {
    name: (f"{gguf}|{gguf.replace('_exps', '.{e}')}", hf)
    for name, (gguf, hf) in SPARSE_BLOCK.items()
    if name != "router"
}


class Mixtral(Llama):
    names = ATTN_NORM | ATTENTION | MLP_NORM | SPARSE_BLOCK | APART

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation, default_theta=1000000.0)
        layers, window = values["num_layers"], fields.integer("sliding_window", 0, low=0)
        if window:
            values |= dict(sliding_window=window, sliding_layers=(True,) * layers)
        moe = hf_moe(fields, layers, intermediate_size=values["intermediate_size"], normalize=True)
        return fields.build(architecture="mixtral", moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_windowed_values(fields, tensors, experts=True)
        moe = gguf_moe(fields, values["num_layers"], intermediate_size=values["intermediate_size"])
        return fields.build(architecture="mixtral", moe=moe, **values)
