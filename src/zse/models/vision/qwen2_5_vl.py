"""Qwen2.5-VL's tower (arXiv 2502.13923): a rotation by row and column, RMSNorm before each part, gated MLP with biases; most
layers see a window of 8 × 8 patches; 2 × 2 patches merged by an MLP."""

from zse.lazy import numpy as np
from zse.models.encoder import ACTIVATIONS
from zse.models.vision.qwen3_vl import THETA
from zse.models.vision.tower import Tower, TowerConfig, TowerWeight, layers_config, width

EPS = 1e-6


class Qwen2_5VL(Tower):
    hf_layer = "blocks.{}."
    anchors = ("patch_embed.proj.weight", "merger.mlp.0.weight")
    norm_kind = "rms"
    is_gated = True
    parts = {
        "attn_norm": ("ln1", "norm1"),
        "qkv": ("", "attn.qkv"),
        "q": ("attn_q", ""),
        "k": ("attn_k", ""),
        "v": ("attn_v", ""),
        "o": ("attn_out", "attn.proj"),
        "mlp_norm": ("ln2", "norm2"),
        "gate": ("ffn_gate", "mlp.gate_proj"),
        "up": ("ffn_up", "mlp.up_proj"),
        "down": ("ffn_down", "mlp.down_proj"),
    }

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        inner, layers = width(vision, "intermediate_size", 3420), vision.integer("depth", 32, high=4096)
        config, dim = layers_config(
            hidden=width(vision, "hidden_size", 1280),
            layers=layers,
            heads=width(vision, "num_heads", 16),
            inner=inner,
            eps=EPS,
            activation=vision.choice("hidden_act", ACTIVATIONS, "silu"),
            turns=True,
            kernels=kernels,
        )
        whole = {int(layer) for layer in vision.get("fullatt_block_indexes", [7, 15, 23, 31])}
        unit = vision.integer("patch_size", 14) * vision.integer("spatial_merge_size", 2)
        window = vision.integer("window_size", 112) // unit
        windowed = tuple(layer for layer in range(layers) if layer not in whole)
        sizes = dict(out=width(vision, "out_hidden_size", 3584), window=window, windowed=windowed)
        return TowerConfig(layers=config, head_dim=dim, inner=inner, **sizes)

    @classmethod
    def tower_from_gguf(cls, fields, out, kernels, tensors):
        inner, layers = width(fields, ".feed_forward_length"), fields.integer(".block_count", high=4096)
        config, dim = layers_config(
            hidden=width(fields, ".embedding_length"),
            layers=layers,
            heads=width(fields, ".attention.head_count"),
            inner=inner,
            eps=fields.number(".attention.layer_norm_epsilon", EPS, high=1.0),
            activation="silu",
            turns=True,
            kernels=kernels,
        )
        every = fields.integer(".n_wa_pattern", 8)
        unit = fields.integer(".patch_size") * fields.integer(".spatial_merge_size", 2)
        window = fields.integer(".window_size", 112) // unit
        windowed = tuple(layer for layer in range(layers) if (layer + 1) % every)
        return TowerConfig(layers=config, head_dim=dim, inner=inner, out=out, window=window, windowed=windowed)

    def outer_weights(self, naming):
        hidden, out, is_hf = self.config.hidden_size, self.tower.out, naming == "hf"
        yield self.frames_weight(naming)
        norm = "merger.ln_q" if is_hf else "v.post_ln"
        for suffix, part in (("", "weight"), ("_bias", "bias"))[: 1 + (self.norm_kind == "layer")]:
            yield TowerWeight(f"merger.norm{suffix}", (hidden,), ((f"{norm}.{part}", (hidden,)),))
        whole = hidden * self.vision.merge**2
        stored = ("merger.mlp.0", "merger.mlp.2") if is_hf else ("mm.0", "mm.2")
        for name, found, rows in zip(("merger.fc1", "merger.fc2"), stored, (whole, out), strict=True):
            yield TowerWeight(name, (rows, whole), ((f"{found}.weight", (rows, whole)),))
            yield TowerWeight(f"{name}_bias", (rows,), ((f"{found}.bias", (rows,)),))

    def rotations(self, height, width):
        quarter = self.tower.head_dim // 4
        frequencies = THETA ** -(np.arange(quarter) / quarter)
        by_row = np.arange(self.tower.head_dim // 2) < quarter
        return self.axial(height, width, np.concatenate([frequencies, frequencies]), by_row)

    def tail(self, work, hidden, number):
        x = work.together(work.norm(hidden, "merger.norm", self.norm_kind, EPS), self.vision.merge**2)
        return work.product(work.act(work.product(x, "merger.fc1"), "gelu"), "merger.fc2")

    @staticmethod
    def sections(sizes, half):
        """Time, height and width one behind the other."""
        return tuple(part for part, size in enumerate(sizes) for _ in range(size))
