"""Qwen3 with experts (arXiv 2505.09388): 30B-A3B, Coder, 235B-A22B, and the text part of Qwen3-VL's. Attention is Qwen3's."""

from zse.models.common import gguf_moe, gguf_windowed_values, hf_moe, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.names import ATTENTION, ATTN_NORM, EXPERTS, MLP, MLP_NORM, QK_NORM
from zse.models.qwen2 import windows
from zse.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    names = ATTN_NORM | ATTENTION | QK_NORM | MLP_NORM | MLP | EXPERTS

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = hf_values(fields, generation)
        layers = values["num_layers"]
        values |= windows(fields, layers)
        # Qwen3-VL's divides by the sum of the chosen weights, whatever its config.json says.
        fixed = {"normalize": True} if fields.get("model_type") == "qwen3_vl_moe_text" else {}
        return fields.build(architecture="qwen3_moe", qk_norm=True, moe=hf_moe(fields, layers, **fixed), **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_windowed_values(fields, tensors, experts=True)
        moe = gguf_moe(fields, values["num_layers"])
        return fields.build(architecture="qwen3_moe", qk_norm=True, moe=moe, **values)
