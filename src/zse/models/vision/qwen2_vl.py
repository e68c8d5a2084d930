"""Qwen2-VL's tower (arXiv 2409.12191): a rotation by row and column, LayerNorm before each part, an MLP of two products with
the sigmoid form of GELU; no windows; 2 × 2 patches merged by an MLP."""

from zse.models.encoder import ACTIVATIONS
from zse.models.vision.qwen2_5_vl import EPS, Qwen2_5VL
from zse.models.vision.tower import TowerConfig, layers_config, width

RATIO = 4  # of the MLP's width to the stream's; what mmproj files say of it is the text model's hidden size


class Qwen2VL(Qwen2_5VL):
    norm_kind = "layer"
    is_gated = False
    parts = {name: both for name, both in Qwen2_5VL.parts.items() if name != "gate"} | {
        "up": ("ffn_up", "mlp.fc1"),
        "down": ("ffn_down", "mlp.fc2"),
    }

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        hidden = width(vision, "embed_dim", 1280)
        return _tower(
            hidden=hidden,
            inner=int(hidden * vision.number("mlp_ratio", RATIO)),
            layers=vision.integer("depth", 32, high=4096),
            heads=width(vision, "num_heads", 16),
            activation=vision.choice("hidden_act", ACTIVATIONS, "quick_gelu"),
            out=width(vision, "hidden_size", 3584),
            kernels=kernels,
        )

    @classmethod
    def tower_from_gguf(cls, fields, out, kernels, tensors):
        hidden = width(fields, ".embedding_length")
        return _tower(
            hidden=hidden,
            inner=RATIO * hidden,
            layers=fields.integer(".block_count", high=4096),
            heads=width(fields, ".attention.head_count"),
            eps=fields.number(".attention.layer_norm_epsilon", EPS, high=1.0),
            activation="quick_gelu",
            out=out,
            kernels=kernels,
        )


def _tower(*, inner, out, eps=EPS, **sizes) -> TowerConfig:
    config, dim = layers_config(inner=inner, eps=eps, turns=True, **sizes)
    return TowerConfig(layers=config, head_dim=dim, inner=inner, out=out)
