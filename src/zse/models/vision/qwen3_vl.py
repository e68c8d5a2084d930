"""Qwen3-VL's tower (arXiv 2511.21631), and Qwen3.5's, which is that without deepstack: learned positions resampled to any size and a rotation by row and column, LayerNorm
before each part, 2 × 2 patches merged by an MLP; what some layers give is merged, too, and added to the stream of
the text model's first layers (deepstack, arXiv 2406.04334)."""

from typing import ClassVar

from zse.lazy import numpy as np
from zse.models.encoder import ACTIVATIONS
from zse.models.vision.tower import Tower, TowerConfig, TowerWeight, layers_config, resampled, width

EPS = 1e-6
THETA = 10000.0


class Qwen3VL(Tower):
    hf_layer = "blocks.{}."
    anchors = ("patch_embed.proj.weight", "merger.linear_fc1.weight")
    marked: ClassVar[tuple[int, ...]] = (8, 16, 24)  # layers of deepstack where config.json does not say
    parts = {
        "attn_norm": ("ln1", "norm1"),
        "qkv": ("attn_qkv", "attn.qkv"),
        "o": ("attn_out", "attn.proj"),
        "mlp_norm": ("ln2", "norm2"),
        "up": ("ffn_up", "mlp.linear_fc1"),
        "down": ("ffn_down", "mlp.linear_fc2"),
    }

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        inner = width(vision, "intermediate_size", 4304)
        config, dim = layers_config(
            hidden=width(vision, "hidden_size", 1152),
            layers=vision.integer("depth", 27, high=4096),
            heads=width(vision, "num_heads", 16),
            inner=inner,
            eps=EPS,
            activation=vision.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
            turns=True,
            kernels=kernels,
        )
        marked = vision.get("deepstack_visual_indexes", cls.marked)
        deepstack = tuple(sorted(int(layer) for layer in marked))
        positions = vision.integer("num_position_embeddings", 2304)
        sizes = dict(out=width(vision, "out_hidden_size", 3584), positions=positions, deepstack=deepstack)
        return TowerConfig(layers=config, head_dim=dim, inner=inner, **sizes)

    @classmethod
    def tower_from_gguf(cls, fields, out, kernels, tensors):
        inner = width(fields, ".feed_forward_length")
        config, dim = layers_config(
            hidden=width(fields, ".embedding_length"),
            layers=fields.integer(".block_count", high=4096),
            heads=width(fields, ".attention.head_count"),
            inner=inner,
            eps=fields.number(".attention.layer_norm_epsilon", EPS, high=1.0),
            activation="gelu_tanh",
            turns=True,
            kernels=kernels,
        )
        side = fields.integer(".image_size") // fields.integer(".patch_size")
        marked = fields.get(".is_deepstack_layers")
        deepstack = tuple(layer for layer, is_one in enumerate(marked if marked is not None else ()) if is_one)
        return TowerConfig(layers=config, head_dim=dim, inner=inner, out=out, positions=side**2, deepstack=deepstack)

    def outer_weights(self, naming):
        hidden, is_hf = self.config.hidden_size, naming == "hf"
        yield self.frames_weight(naming)
        bias = "patch_embed.proj.bias" if is_hf else "v.patch_embd.bias"
        yield TowerWeight("patch_bias", (hidden,), ((bias, (hidden,)),))
        position = "pos_embed.weight" if is_hf else "v.position_embd.weight"
        shape = self.tower.positions, hidden
        yield TowerWeight("position_table", shape, ((position, shape),))
        merger = ("merger.norm", "merger.linear_fc1", "merger.linear_fc2")
        yield from self._merger(0, merger if is_hf else ("v.post_ln", "mm.0", "mm.2"), hidden)
        for number, layer in enumerate(self.tower.deepstack):
            before = f"deepstack_merger_list.{number}." if is_hf else f"v.deepstack.{layer}."
            names = ["norm", "linear_fc1", "linear_fc2"] if is_hf else ["norm", "fc1", "fc2"]
            yield from self._merger(number + 1, tuple(before + name for name in names), hidden * self.vision.merge**2)

    def _merger(self, number, names, normed):
        """Norm (of `normed` columns) and two products of a merger; 0: the last one."""
        whole = self.config.hidden_size * self.vision.merge**2
        shapes = ((normed,), (whole, whole), (self.tower.out, whole))
        for name, shape, stored in zip(("norm", "fc1", "fc2"), shapes, names, strict=True):
            yield TowerWeight(f"merger{number}.{name}", shape, ((f"{stored}.weight", shape),))
            yield TowerWeight(f"merger{number}.{name}_bias", shape[:1], ((f"{stored}.bias", shape[:1]),))

    def positions(self, table, height, width):
        row, column = self.places(height, width)
        return resampled(table, height // self.vision.patch, width // self.vision.patch)[row, column]

    def rotations(self, height, width):
        quarter = self.tower.head_dim // 4
        frequencies = THETA ** -(np.arange(quarter) / quarter)
        half = np.arange(self.tower.head_dim // 2)
        return self.axial(height, width, np.concatenate([frequencies, frequencies]), half < quarter)

    def tail(self, work, hidden, number):
        name, merged = f"merger{number}", self.vision.merge**2
        if number:
            x = work.norm(work.together(hidden, merged), f"{name}.norm", "layer", EPS)
        else:
            x = work.together(work.norm(hidden, f"{name}.norm", "layer", EPS), merged)
        return work.product(work.act(work.product(x, f"{name}.fc1"), "gelu"), f"{name}.fc2")

    @staticmethod
    def sections(sizes, half):
        """Which part of a position each pair turns by: time, height, width in turn, as far as each goes."""
        return tuple(part if 0 < part and pair < 3 * sizes[part] else 0 for pair in range(half) for part in [pair % 3])


class Qwen35VL(Qwen3VL):
    marked = ()
