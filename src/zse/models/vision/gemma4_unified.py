"""What Gemma 4's 12B sees with (Google, 2026): no attention. Patches of 48 × 48 pixels, normalized, a product, normalized
(the one layer), with rows of tables for their row and column added, normalized twice, a projection."""

from zse.errors import FormatError
from zse.lazy import numpy as np
from zse.models.vision.tower import Tower, TowerConfig, TowerWeight, layers_config, width

EPS = 1e-5  # of the LayerNorms
ROWS = 1120  # of the tables of positions
HEAD = 64  # of a layer that attends to nothing


class Gemma4Unified(Tower):
    anchors = ("vision_embedder.patch_dense.weight", "embed_vision.embedding_projection.weight")
    has_biases = False
    on_gpu = False
    on_host = ("position_table", "patch_norm", "patch_norm_bias")

    def __init__(self, tower, vision):
        super().__init__(tower, vision)
        if tower.late_positions < vision.max_patches:
            what = f"{tower.late_positions} rows and columns, an image may have {vision.max_patches} patches in one"
            raise FormatError("vision tower", 0, "mm_posemb_size", what)

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        hidden, text = width(vision, "mm_embed_dim", 3840), fields.section("text_config") or fields
        if vision.get("output_proj_dims", hidden) != hidden:
            raise ValueError(f"output_proj_dims: {vision.get('output_proj_dims')!r}, mm_embed_dim is {hidden}")
        config, dim = layers_config(
            hidden=hidden,
            layers=1,
            heads=max(1, hidden // HEAD),
            inner=1,
            eps=EPS,
            activation="silu",
            turns=False,
            kernels=kernels,
        )
        rows = vision.integer("mm_posemb_size", ROWS, high=1 << 20)
        sizes = dict(out=width(text, "hidden_size", 3840), late_positions=rows)
        sizes |= dict(tail_eps=vision.number("rms_norm_eps", 1e-6, high=1.0))
        return TowerConfig(layers=config, head_dim=dim, inner=1, **sizes)

    def outer_weights(self, naming):
        hidden, out, columns = self.config.hidden_size, self.tower.out, 3 * self.vision.patch**2
        rows = self.tower.late_positions
        before = "vision_embedder."
        yield TowerWeight("patch", (hidden, columns), ((f"{before}patch_dense.weight", (hidden, columns)),))
        yield TowerWeight("patch_bias", (hidden,), ((f"{before}patch_dense.bias", (hidden,)),))
        yield TowerWeight("position_table", (2 * rows, hidden), ((f"{before}pos_embedding", (rows, 2, hidden)),))
        yield from _norm("patch_norm", f"{before}patch_ln1", columns)
        yield from _norm("position_norm", f"{before}pos_norm", hidden)
        yield TowerWeight("soft_norm", (hidden,), (), lambda: np.ones(hidden, np.float32))
        yield TowerWeight("projection", (out, hidden), (("/embed_vision.embedding_projection.weight", (out, hidden)),))

    def layer_weights(self, naming, layer):
        yield from _norm(f"layers.{layer}.product_norm", "vision_embedder.patch_ln2", self.config.hidden_size)

    def patches(self, pixels, height, width, host):
        """Normalized each for itself, numbers pixel by pixel."""
        p = self.vision.patch
        turned = super().patches(pixels, height, width, host).reshape(-1, 3, p, p).transpose(0, 2, 3, 1)
        found = turned.reshape(len(turned), -1)
        found = found - found.mean(1, keepdims=True)
        found /= np.sqrt((found * found).mean(1, keepdims=True) + np.float32(EPS))
        return found * host["patch_norm"] + host["patch_norm_bias"]

    def positions(self, table, height, width):
        row, column = self.places(height, width)
        return table[2 * column] + table[2 * row + 1]

    def layer(self, x, i):
        return self.normalize(x, "product_norm")

    def tail(self, work, hidden, number):
        x = work.add_positions(work.together(hidden, 1))
        x = work.norm(work.norm(x, "position_norm", "layer", EPS), "soft_norm", "rms", self.tower.tail_eps)
        return work.product(x, "projection")


def _norm(name, stored, size):
    for suffix, part in (("", "weight"), ("_bias", "bias")):
        yield TowerWeight(f"{name}{suffix}", (size,), ((f"{stored}.{part}", (size,)),))
