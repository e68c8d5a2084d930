"""OLMoE (arXiv 2409.02060): Llama with q and k normalized over all heads together, and experts."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP_NORM, QK_NORM
from zse.models.qwen3 import Qwen3


class Olmoe(Qwen3):
    names = ATTN_NORM | ATTENTION | QK_NORM | MLP_NORM | EXPERTS
    whole_qk_norm = True

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        if fields.get("clip_qkv") is not None:
            raise UnsupportedError(f"{fields.path}: clip_qkv", fields.get("clip_qkv"), ["null"])
        values = hf_values(fields, generation)
        moe = hf_moe(fields, values["num_layers"], intermediate_size=values["intermediate_size"])
        return fields.build(architecture="olmoe", qk_norm=True, moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        if fields.number(".attention.clamp_kqv", 0.0):
            raise UnsupportedError(f"{fields.path}: {fields.key('.attention.clamp_kqv')}", "a limit", ["none"])
        values = gguf_values(fields, tensors, experts=True)
        inner = values["intermediate_size"]
        moe = gguf_moe(fields, values["num_layers"], intermediate_size=inner, normalize=False)
        return fields.build(architecture="olmoe", qk_norm=True, moe=moe, **values)
