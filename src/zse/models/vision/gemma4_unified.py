"""What Gemma 4's 12B sees with (Google, 2026): no attention. Patches of 48 × 48 pixels, normalized, a product, normalized
(the one layer), with rows of tables for their row and column added, normalized twice, a projection."""

from zse.errors import FormatError
from zse.lazy import numpy as np
from zse.models.vision.tower import Tower, TowerConfig, TowerWeight, layers_config, width

EPS = 1e-5  # of the LayerNorms
ROWS = 1120  # of the tables of positions
HEAD = 64  # of a layer that attends to nothing
TABLE = "v.position_embd.weight"
# What a GGUF and a Hugging Face file call the LayerNorms.
NORMS = {
    "patch_norm": ("v.patch_norm.1", "vision_embedder.patch_ln1"),
    "product_norm": ("v.patch_norm.2", "vision_embedder.patch_ln2"),
    "position_norm": ("v.patch_norm.3", "vision_embedder.pos_norm"),
}


class Gemma4Unified(Tower):
    anchors = ("vision_embedder.patch_dense.weight", "embed_vision.embedding_projection.weight")
    has_biases = False
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
        rows, eps = vision.integer("mm_posemb_size", ROWS, high=1 << 20), vision.number("rms_norm_eps", 1e-6, high=1.0)
        return _tower(hidden, width(text, "hidden_size", 3840), rows, eps, kernels)

    @classmethod
    def tower_from_gguf(cls, fields, out, kernels, tensors):
        table = tensors.get("v.position_embd.weight")
        rows = table.shape[-2] if table is not None and len(table.shape) > 1 else 0
        eps = fields.number(".attention.layer_norm_epsilon", 1e-6, high=1.0)
        return _tower(width(fields, ".embedding_length"), out, rows, eps, kernels)

    def outer_weights(self, naming):
        hidden, out, p = self.config.hidden_size, self.tower.out, self.vision.patch
        columns, rows, is_hf = 3 * p * p, self.tower.late_positions, naming == "hf"
        patch = "vision_embedder.patch_dense" if is_hf else "v.patch_embd"

        def by_channel(values):  # a patch's numbers stand pixel by pixel in such files, in a GGUF as here
            return values.reshape(-1, p * p, 3).swapaxes(1, 2) if is_hf else values

        yield TowerWeight("patch", (hidden, columns), ((f"{patch}.weight", (hidden, columns)),), by_channel)
        yield TowerWeight("patch_bias", (hidden,), ((f"{patch}.bias", (hidden,)),))
        table = ("vision_embedder.pos_embedding", (rows, 2, hidden)) if is_hf else (TABLE, (2, rows, hidden))
        turned = (lambda values: values.swapaxes(0, 1)) if is_hf else None
        yield TowerWeight("position_table", (2 * rows, hidden), (table,), turned)
        yield from _norm("patch_norm", NORMS["patch_norm"][is_hf], columns, by_channel)
        yield from _norm("position_norm", NORMS["position_norm"][is_hf], hidden)
        yield TowerWeight("soft_norm", (hidden,), (), lambda: np.ones(hidden, np.float32))
        projection = "/embed_vision.embedding_projection.weight" if is_hf else "mm.input_projection.weight"
        yield TowerWeight("projection", (out, hidden), ((projection, (out, hidden)),))

    def layer_weights(self, naming, layer):
        stored = NORMS["product_norm"][naming == "hf"]
        yield from _norm(f"layers.{layer}.product_norm", stored, self.config.hidden_size)

    def patches(self, pixels, height, width, host):
        """Normalized each for itself."""
        found = super().patches(pixels, height, width, host)
        found = found - found.mean(1, keepdims=True)
        found /= np.sqrt((found * found).mean(1, keepdims=True) + np.float32(EPS))
        return found * host["patch_norm"] + host["patch_norm_bias"]

    def positions(self, table, height, width):
        row, column = self.places(height, width)
        return table[column] + table[self.tower.late_positions + row]

    def layer(self, x, i):
        return self.normalize(x, "product_norm")

    def tail(self, work, hidden, number):
        x = work.add_positions(work.together(hidden, 1))
        x = work.norm(work.norm(x, "position_norm", "layer", EPS), "soft_norm", "rms", self.tower.tail_eps)
        return work.product(x, "projection")


def _tower(hidden, out, rows, eps, kernels) -> TowerConfig:
    """eps: of the last norm."""
    heads = max(1, hidden // HEAD)
    sizes = dict(hidden=hidden, layers=1, heads=heads, inner=1, eps=EPS, activation="silu")
    config, dim = layers_config(**sizes, turns=False, kernels=kernels)
    return TowerConfig(layers=config, head_dim=dim, inner=1, out=out, late_positions=rows, tail_eps=eps)


def _norm(name, stored, size, make=None):
    for suffix, part in (("", "weight"), ("_bias", "bias")):
        yield TowerWeight(f"{name}{suffix}", (size,), ((f"{stored}.{part}", (size,)),), make)
