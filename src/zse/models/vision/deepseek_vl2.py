"""DeepSeek-VL2's tower (arXiv 2412.10302): SigLIP over each tile by itself and over an overview of the image, 2 × 2 patches
merged by an MLP of two products, a learned row behind each row of parts and one behind the overview.

Read of the authors' code (deepseek-ai/DeepSeek-VL2 at ef9f91e2; transformers has no such model): a tile of 27 × 27 patches
becomes 28 × 28 with zeros before it is merged, and its attention pooling is not used."""

from zse.lazy import numpy as np
from zse.models.config import Fields
from zse.models.vision.config import TiledVision
from zse.models.vision.siglip import Siglip
from zse.models.vision.tower import TowerConfig, TowerWeight, layers_config, width

EPS = 1e-6


class DeepSeekVL2(Siglip):
    vision: TiledVision

    hf_layer = "vision.blocks.{}."
    parts = {
        "attn_norm": ("", "norm1"),
        "qkv": ("", "attn.qkv"),
        "o": ("", "attn.proj"),
        "mlp_norm": ("", "norm2"),
        "up": ("", "mlp.fc1"),
        "down": ("", "mlp.fc2"),
    }
    anchors = ("vision.patch_embed.proj.weight", "projector.layers.0.weight")
    on_host = ("position_table", "row_end", "overview_end")

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        projector = fields.section("projector_config") or Fields(fields.path, {})
        for given, name, wanted in (
            (projector, "projector_type", "downsample_mlp_gelu"),
            (projector, "depth", 2),
            (projector, "token_pooling", False),
            (vision, "class_token", False),
            (vision, "ignore_head", True),
        ):
            if given.get(name, wanted) != wanted:
                raise ValueError(f"{name}: {given.get(name)!r}, {wanted!r} is supported")
        hidden, heads = width(vision, "width", 1024), width(vision, "heads", 16)
        layers, inner = (
            vision.integer("layers", 24, high=4096),
            int(hidden * vision.number("mlp_ratio", 4.0, high=64.0)),
        )
        config, dim = layers_config(
            hidden=hidden,
            layers=layers,
            heads=heads,
            inner=inner,
            eps=EPS,
            activation="gelu_tanh",
            turns=False,
            kernels=kernels,
        )
        side = vision.integer("image_size", 384) // vision.integer("patch_size", 16)
        if projector.integer("input_dim", 1152) != hidden:
            raise ValueError(f"input_dim: {projector.get('input_dim')}, the tower has {hidden}")
        return TowerConfig(
            layers=config,
            head_dim=dim,
            inner=inner,
            out=width(projector, "n_embed", 2048),
            positions=side**2,
            windowed=tuple(range(layers)),
            window=side,
            mixed=width(projector, "n_embed", 2048) * projector.integer("mlp_ratio", 1, high=64),
        )

    def outer_weights(self, naming):
        hidden, out, p, m = self.config.hidden_size, self.tower.out, self.vision.patch, self.vision.merge
        positions, mixed = self.tower.positions, self.tower.mixed
        patch = "vision.patch_embed.proj"
        yield TowerWeight("patch", (hidden, 3 * p * p), ((f"{patch}.weight", (hidden, 3, p, p)),))
        yield TowerWeight("patch_bias", (hidden,), ((f"{patch}.bias", (hidden,)),))
        table = "vision.pos_embed", (1, positions, hidden)
        yield TowerWeight("position_table", (positions, hidden), (table,), lambda values: values[0])
        for suffix, part in (("", "weight"), ("_bias", "bias")):
            yield TowerWeight(f"post_norm{suffix}", (hidden,), ((f"vision.norm.{part}", (hidden,)),))

        def patch_by_patch(values):
            """Its columns stand channel by channel; rows of patches are put together patch by patch."""
            return values.reshape(mixed, hidden, m * m).swapaxes(1, 2).reshape(mixed, -1)

        for name, layer, shape, make in (
            ("fc1", 0, (mixed, hidden * m * m), patch_by_patch),
            ("fc2", 2, (out, mixed), None),
        ):
            before = f"/projector.layers.{layer}"
            yield TowerWeight(name, shape, ((f"{before}.weight", shape),), make)
            yield TowerWeight(f"{name}_bias", shape[:1], ((f"{before}.bias", shape[:1]),))
        for name, stored in (("row_end", "/image_newline"), ("overview_end", "/view_seperator")):
            yield TowerWeight(name, (out,), ((stored, (out,)),))

    def patches(self, pixels, height, width, host):
        """Tile by tile, the overview first where there are several, row by row in each."""
        size, p, side = self.vision.size, self.vision.patch, self.tower.window
        image, overview = np.frombuffer(pixels, np.uint8), 3 * self.vision.overview(height, width) ** 2
        first, rest = image[:overview].reshape(-1, size, size, 3), image[overview:]
        cut = rest.reshape(height // size, size, width // size, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
        tiles = np.concatenate([first, cut])[:, : side * p, : side * p]
        blocks = tiles.reshape(-1, side, p, side, p, 3).transpose(0, 1, 3, 5, 2, 4).reshape(-1, 3, p * p)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.vision.mean, self.vision.std))
        return ((blocks * np.float32(1 / 255) - mean) / std).reshape(-1, 3 * p * p)

    def positions(self, table, height, width):
        return np.tile(table, (self.num_tiles(height, width), 1))

    def num_tiles(self, height, width):
        """With the overview."""
        return self.vision.num_pixels(height, width) // self.vision.size**2

    def windows(self, height, width):
        tiles, patches = self.num_tiles(height, width), self.tower.window**2
        return np.arange(tiles * patches), np.full(tiles, patches)

    def window_room(self, patches):
        each = self.tower.window**2
        return patches // each, each

    def num_parts(self, patches):
        return patches // self.tower.window**2 * self.vision.tile_side**2

    def cells(self, parts):
        """The patch of each of the merge * merge places of each part, part by part; -1: there is none. i32."""
        m, side, wide = self.vision.merge, self.tower.window, self.vision.tile_side
        row, column = np.indices((wide * m, wide * m))
        place = np.where((row < side) & (column < side), row * side + column, -1)
        place = place.reshape(wide, m, wide, m).swapaxes(1, 2).reshape(-1)
        tiles = np.arange(parts // wide**2)[:, None] * side**2
        return np.where(place >= 0, place + tiles, -1).reshape(-1).astype(np.int32)

    def tail(self, work, hidden, number):
        x = work.together(work.spread(hidden, self.cells(work.most)), self.vision.merge**2)
        return work.product(work.act(work.product(x, "fc1"), "gelu"), "fc2")

    def assembled(self, found, order, height, width, host):
        side, size, out = self.vision.tile_side, self.vision.size, self.tower.out
        rows, columns = height // size, width // size
        tiles = found[0].reshape(-1, side, side, out)
        whole = (
            tiles[-rows * columns :]
            .reshape(rows, columns, side, side, out)
            .swapaxes(1, 2)
            .reshape(rows * side, -1, out)
        )

        def ended(parts):
            ends = np.broadcast_to(host["row_end"], (len(parts), 1, out))
            return np.concatenate([parts, ends], axis=1).reshape(-1, out)

        return np.concatenate([ended(tiles[0]), host["overview_end"][None], ended(whole)])[None]
