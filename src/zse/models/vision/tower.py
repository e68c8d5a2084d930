"""Towers: encoders that make embeddings of an image's patches, and what surrounds their layers.

A family is an Encoder (models/encoder.py): `layer` is traced and planned like any model's. It also says its weights,
each made of the file's tensors in NumPy (a head of 72 columns becomes one of 80, an inner width of 4304 becomes 4320,
with zeros), what is added to the patches (positions), and what follows the layers (`tail`: pooling or merging, a
projection into the text model). An image is one sequence; its patches stand so that those of one token are neighbours.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import msgspec

from zse.errors import FormatError, UnsupportedError
from zse.formats import matrix
from zse.formats.source import ModelSource, TensorInfo
from zse.lazy import numpy as np
from zse.models.config import WIDTH_MULTIPLE, Fields, ModelConfig, RopeConfig
from zse.models.config_parts import MAX_WIDTH
from zse.models.encoder import Encoder
from zse.models.vision.config import VisionConfig
from zse.plan.rules import JOINED
from zse.plan.trace import Value
from zse.quant.pack import NUMPY_DTYPE, widen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.typing import NDArray

# Columns of a head that attention's kernels take for encoders; what they give is quantized by 32 for products in int8.
HEAD_DIMS = {"cpu": range(16, 513, 16), "cpu int8": range(32, 513, 32), "gpu": (64, 96, 128, 256)}


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """layers: of the padded layers, an encoder's. head_dim, inner: as the file has them. out: columns of an embedding,
    the text model's hidden size. positions: rows of the table of learned positions, 0: none. deepstack: layers behind
    which what they give is projected, too, and added to the stream of the text model's first layers. tail_eps, tail_biases:
    of the projection's norm and products, where a family has them apart. windowed: layers in which patches see those of a
    square of window * window parts of the image. late_positions: rows of tables that the tail adds. theta: of the
    rotation. mixed: columns between the projection's products. bounded: products have bounds. standardized: the means
    are."""

    layers: ModelConfig
    head_dim: int
    inner: int
    out: int
    positions: int = 0
    deepstack: tuple[int, ...] = ()
    tail_eps: float = 0.0
    window: int = 0
    windowed: tuple[int, ...] = ()
    late_positions: int = 0
    theta: float = 0.0
    mixed: int = 0
    bounded: bool = False
    standardized: bool = False

    def __post_init__(self):
        if self.windowed and self.window < 1:
            raise ValueError("window_size: smaller than a part of the image")
        for name in ("deepstack", "windowed"):
            if any(not 0 <= layer < self.layers.num_layers for layer in getattr(self, name)):
                raise ValueError(f"{name}: layers {getattr(self, name)} of {self.layers.num_layers}")

    tail_biases: bool = False


Stored = tuple[str, tuple[int, ...]]  # a tensor's name in the file and its shape


class TowerWeight(NamedTuple):
    """A weight in memory: shape [rows, columns] of a matrix, [size] of a vector. stored: the tensors that it is made of;
    make: their f32 arrays → its own (default: the one as it is)."""

    name: str
    shape: tuple[int, ...]
    stored: tuple[Stored, ...]
    make: "Callable[..., NDArray] | None" = None


class TowerReader:
    """A file's tensors as f32 arrays. family: whose names are meant; a name that begins with "/" is one of the
    projection. FormatError where a Hugging Face file has no such tower."""

    def __init__(self, source: ModelSource, family: "type[Tower]"):
        self.source = source
        self.prefix, self.projection = "", ""
        if source.naming == "hf":
            self.prefix, self.projection = (self._before(anchor) for anchor in family.anchors)

    def _before(self, anchor: str) -> str:
        """What stands before the name `anchor` in the file."""
        found = [name for name in self.source.tensors if name.endswith(anchor)]
        if len(found) != 1:
            what = "the tensor of the vision tower is missing, or is there twice"
            raise FormatError(self.source.path, 0, anchor, what)
        return found[0].removesuffix(anchor)

    def find(self, stored: Stored) -> TensorInfo:
        """The tensor, of that shape but for sides of 1. FormatError, UnsupportedError."""
        name, shape = stored
        name = self.projection + name[1:] if name.startswith("/") else self.prefix + name
        info = self.source.tensors.get(name)
        if info is None:
            raise FormatError(self.source.path, 0, name, "the tensor is missing")
        if [size for size in info.shape if size != 1] != [size for size in shape if size != 1]:
            raise info.wrong(f"has shape {list(info.shape)}, expected {list(shape)}")
        if not info.is_dense and len(info.shape) != 2:
            raise UnsupportedError(f"{self.source.path}: type of {name}", info.type, ["F32", "F16", "BF16"])
        return info

    def read(self, weight: TowerWeight) -> "NDArray":
        """The weight's numbers, f32 of its shape."""
        arrays = []
        for name, shape in weight.stored:
            info = self.find((name, shape))
            if info.is_dense:
                kind = matrix.FLOATS[info.type]
                values = widen(np.frombuffer(self.source.read(info), NUMPY_DTYPE[kind]), kind)
            else:
                values = matrix.Rows(self.source, info, 0, info.shape[0]).f32()
            arrays.append(np.asarray(values, np.float32).reshape(shape))
        made = arrays[0] if weight.make is None else weight.make(*arrays)
        return np.ascontiguousarray(made, np.float32).reshape(weight.shape)


class Tower(Encoder):
    """A family. hf_layer, gguf_layer: what stands before a layer's names, with its number as {}; parts: our name of a
    layer's product or norm → what a GGUF and a Hugging Face file call it. anchors: names by which the tower and its projection are
    found in a Hugging Face file. hf_product: what a Hugging Face file has behind a product's
    name. norms: of a layer. has_biases: products have biases; is_gated: the MLP is. swaps: ffn_up and ffn_down
    have each other's names in this file, as old converters wrote them."""

    anchors: ClassVar[tuple[str, str]] = ("", "")
    hf_layer: ClassVar[str] = ""
    gguf_layer: ClassVar[str] = "v.blk.{}."
    parts: ClassVar[dict[str, tuple[str, str]]] = {}
    hf_product: ClassVar[str] = ""
    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "mlp_norm")
    has_biases: ClassVar[bool] = True
    is_gated: ClassVar[bool] = False
    on_host: ClassVar[tuple[str, ...]] = ("position_table",)  # weights that only the host reads

    def __init__(self, tower: TowerConfig, vision: VisionConfig):
        super().__init__(tower.layers)
        self.tower, self.vision, self.swaps = tower, vision, False

    # -- the files

    @classmethod
    def tower_from_hf(cls, fields: Fields, vision: Fields, kernels: str) -> TowerConfig:
        """Of config.json and its vision_config, padded for the kernels, a key of HEAD_DIMS."""
        raise NotImplementedError

    @classmethod
    def tower_from_gguf(cls, fields: Fields, out: int, kernels: str, tensors: dict[str, TensorInfo]) -> TowerConfig:
        """Of the metadata and tensors of an mmproj file (prefix clip.vision), likewise. out: the text model's hidden
        size."""
        raise NotImplementedError

    def weights(self, naming: str) -> Iterator[TowerWeight]:
        """Every weight, those outside of the layers first. naming: "hf" or "gguf"."""
        yield from self.outer_weights(naming)
        for layer in range(self.config.num_layers):
            mine = self.layer_weights(naming, layer)
            yield from mine if self.tower.bounded else _joined(mine, f"layers.{layer}.")

    def outer_weights(self, naming: str) -> Iterator[TowerWeight]:
        raise NotImplementedError

    def layer_weights(self, naming: str, layer: int) -> Iterator[TowerWeight]:
        """Norms, q, k, v, o and the MLP of one layer."""
        config, dim, inner = self.config, self.tower.head_dim, self.tower.inner
        hidden, heads, wide, padded = config.hidden_size, config.num_heads, config.head_dim, config.intermediate_size
        before = (self.gguf_layer if naming == "gguf" else self.hf_layer).format(layer)
        names = {name: before + both[naming == "hf"] for name, both in self.parts.items() if both[naming == "hf"]}
        if self.swaps:
            names["up"], names["down"] = names["down"], names["up"]
        mine = f"layers.{layer}."
        for name in self.norms:
            for suffix, part in (("", "weight"), ("_bias", "bias"))[: 1 + (self.norm_kind == "layer")]:
                yield TowerWeight(f"{mine}{name}{suffix}", (hidden,), ((f"{names[name]}.{part}", (hidden,)),))

        def product(name: str, called: str, rows: int, stored: int, make_rows, columns: int, narrow: int, make_columns):
            """A matrix [rows, columns] of a stored one, and its bias."""

            def both(values):
                return make_columns(make_rows(values).T).T

            shape, called = (stored, narrow), called + (self.hf_product if naming == "hf" else "")
            yield TowerWeight(mine + name, (rows, columns), ((f"{called}.weight", shape),), both)
            if self.has_biases:
                yield TowerWeight(f"{mine}{name}_bias", (rows,), ((f"{called}.bias", (stored,)),), make_rows)

        def same(values):
            return values

        def of_heads(values, name="v"):
            return pad_heads(self.stored_rows(name, naming, values), heads, wide)

        def of_inner(values):
            return pad_rows(values, padded)

        q = heads * dim
        for number, name in enumerate("qkv"):
            if "qkv" in names:
                take = partial(_third, number=number, of=of_heads)
                yield from product(name, names["qkv"], heads * wide, 3 * q, take, hidden, hidden, same)
            else:
                take = partial(of_heads, name=name)
                yield from product(name, names[name], heads * wide, q, take, hidden, hidden, same)
        yield from product("o", names["o"], hidden, hidden, same, heads * wide, q, of_heads)
        for name in ("gate", "up") if self.is_gated else ("up",):
            yield from product(name, names[name], padded, inner, of_inner, hidden, hidden, same)
        yield from product("down", names["down"], hidden, hidden, same, padded, inner, of_inner)

    def frames_weight(self, naming: str) -> TowerWeight:
        """The product with patches of towers that see two frames: an image's are the same, so that the weights are
        added."""
        hidden, p = self.config.hidden_size, self.vision.patch
        shape = hidden, 3 * p * p
        if naming == "hf":
            whole = "patch_embed.proj.weight", (hidden, 3, 2, p, p)
            return TowerWeight("patch", shape, (whole,), lambda values: values.sum(2))
        stored = tuple((f"v.patch_embd.weight{frame}", (hidden, 3, p, p)) for frame in ("", ".1"))
        return TowerWeight("patch", shape, stored, lambda first, second: first + second)

    def stored_rows(self, name: str, naming: str, values: "NDArray") -> "NDArray":
        """The rows of q, k or v as heads turn in halves, of those that a file stores."""
        return values

    # -- the input

    def patches(self, pixels: bytes, height: int, width: int, host: "dict[str, NDArray]") -> "NDArray":
        """The normalized image as f32 [patches, 3 * patch * patch], channel by channel as convolutions have it; the
        merge * merge patches of a token one behind the other, tokens row by row. host: the weights of `on_host`."""
        vision, p, m = self.vision, self.vision.patch, self.vision.merge
        image = np.frombuffer(pixels, np.uint8)
        mean, std = (np.array(values, np.float32)[:, None] for values in (vision.mean, vision.std))
        levels = (np.arange(256, dtype=np.float32) * np.float32(1 / 255) - mean) / std  # of each channel
        rows, columns = height // (p * m), width // (p * m)
        blocks = image.reshape(rows, m, p, columns, m, p, 3).transpose(6, 0, 3, 1, 4, 2, 5).reshape(3, -1, p * p)
        found = np.empty((blocks.shape[1], 3, p * p), np.float32)
        for channel in range(3):
            found[:, channel] = levels[channel][blocks[channel]]
        return found.reshape(-1, 3 * p * p)

    def places(self, height: int, width: int) -> "tuple[NDArray, NDArray]":
        """(row, column) of each patch, in the order of patches(), i64 [patches] both."""
        m, p = self.vision.merge, self.vision.patch
        rows, columns = np.indices((height // p, width // p))
        shape = height // (p * m), m, width // (p * m), m
        row, column = (each.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for each in (rows, columns))
        return row, column

    def num_parts(self, patches: int) -> int:
        """Embeddings that the tail makes of so many patches."""
        return patches // self.vision.merge**2

    def window_room(self, patches: int) -> tuple[int, int]:
        """(windows at most of images of so many patches, patches of a window at most)."""
        side, merged = self.tower.window, self.vision.merge**2
        # Of r × c parts (r / side + 1) * (c / side + 1) at most, of an image one part high every `side` parts.
        return patches // merged // min(side, 3) + 8, side * side * merged

    def windows(self, height: int, width: int) -> "tuple[NDArray, NDArray]":
        """(the patches of the image window by window, i64 [patches], those of a part together; how many each window has),
        windows and their parts row by row."""
        rows, columns = self.vision.grid(height, width)
        side = self.tower.window
        row, column = (each.reshape(-1) for each in np.indices((rows, columns)))
        window = row // side * -(-columns // side) + column // side
        merged = self.vision.merge**2
        order = np.argsort(window, kind="stable")[:, None] * merged + np.arange(merged)
        return order.reshape(-1), np.bincount(window) * merged

    def assembled(
        self, found: "NDArray", order: "NDArray | None", height: int, width: int, host: "dict[str, NDArray]"
    ) -> "NDArray":
        """The embeddings of an image's tokens, f32 [1 + deepstack layers, VisionConfig.parts, out], of what the tail made of
        its patches in the `order` of windows()."""
        if order is None:
            return found
        in_order, merged = np.empty_like(found), self.vision.merge**2
        in_order[:, order[::merged] // merged] = found
        return in_order

    def positions(self, table: "NDArray | None", height: int, width: int) -> "NDArray | None":
        """What is added to the patches, f32 [patches, hidden], of the learned positions f32 [positions, hidden]."""
        return None

    def rotations(self, height: int, width: int) -> "NDArray | None":
        """Cosines, then sines of each patch's rotation, f32 [patches, head_dim]; None: nothing turns."""
        return None

    def axial(self, height: int, width: int, frequencies: "NDArray", by_row: "NDArray") -> "NDArray":
        """rotations() of pairs that turn by the patch's row or column. frequencies f64, by_row bool [half a stored
        head]."""
        row, column = self.places(height, width)
        half = self.config.head_dim // 2
        angles = np.zeros((len(row), half))
        angles[:, : len(frequencies)] = np.where(by_row, row[:, None], column[:, None]) * frequencies
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    # -- the forward

    def begin(self) -> Value:
        """The stream is there already: patches and positions."""
        return Value(self.trace, self.config.hidden_size, True)

    def norm(self, x: Value, name: str, i: int | None = None, eps: float | None = None) -> Value:
        bias = {"bias": f"{name}_bias"} if f"{name}_bias" in self.trace.shapes else {}
        options: dict[str, Any] = dict(eps=eps or self.config.norm_eps, kind=self.norm_kind)
        return self.trace.add("norm", (x,), x.width, {"weight": name} | bias, **options)

    def layer(self, x: Value, i: int) -> Value:
        q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        x_in = self.norm(x, "mlp_norm", i)
        if self.is_gated:
            return x + self.mlp(x_in, i)
        return x + self.linear(self.activate(self.linear(x_in, "up", i)), "down", i)

    @staticmethod
    def sections(sizes: tuple[int, ...], half: int) -> tuple[int, ...]:
        """For each pair of a head of the text model which part of a position it turns by (0 time, 1 height, 2 width).
        sizes: how many belong to each, `mrope_section`; () where positions have one part."""
        return ()

    def tail(self, work: Any, hidden: Any, number: int) -> Any:
        """Record what makes embeddings f32 [parts, out] of the layers' f32 [patches, hidden] (engine/image_encoder.py: TailWork). number: 0, or n for the n-th layer of `deepstack`."""
        raise NotImplementedError


def layers_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    inner: int,
    eps: float,
    activation: str,
    turns: bool,
    kernels: str,
    scale: float | None = None,
) -> tuple[ModelConfig, int]:
    """The ModelConfig of a tower's layers, padded for the kernels (a key of HEAD_DIMS), and the file's head_dim. scale: of
    the scores (default: head_dim ** -0.5). Raises ValueError."""
    if hidden % heads or hidden // heads % 2:
        raise ValueError(f"num_attention_heads: {heads} heads of a hidden size of {hidden}")
    dim = hidden // heads
    wide = next((size for size in HEAD_DIMS[kernels] if size >= dim), 0)
    if not wide:
        raise ValueError(f"head size: {dim}, at most {HEAD_DIMS[kernels][-1]} are supported")
    config = ModelConfig(
        architecture="tower",
        causal=False,
        vocab_size=1,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=wide,
        intermediate_size=-(-inner // WIDTH_MULTIPLE) * WIDTH_MULTIPLE,
        norm_eps=eps,
        max_context=1 << 20,
        rope=RopeConfig(),
        nope_layers=() if turns else (True,) * layers,
        query_scale=dim**-0.5 if scale is None else scale,
        activation=activation,
    )
    return config, dim


def _joined(weights: Iterator[TowerWeight], prefix: str) -> Iterator[TowerWeight]:
    """A layer's weights, those that read the same input as one: fewer and larger products."""
    named = {weight.name: weight for weight in weights}
    for whole, members in JOINED.items():
        for suffix in ("", "_bias"):
            names = [f"{prefix}{member}{suffix}" for member in members]
            if all(name in named for name in names):
                together = _together(f"{prefix}{whole}{suffix}", [named.pop(name) for name in names])
                named[together.name] = together
    yield from named.values()


def _together(name: str, parts: list[TowerWeight]) -> TowerWeight:
    """The rows of all, one part behind the other."""

    def make(*arrays):
        rest = list(arrays)
        made = []
        for part in parts:
            mine, rest = rest[: len(part.stored)], rest[len(part.stored) :]
            made.append((mine[0] if part.make is None else part.make(*mine)).reshape(part.shape))
        return np.concatenate(made)

    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    return TowerWeight(name, shape, tuple(stored for part in parts for stored in part.stored), make)


def _third(values: "NDArray", number: int, of) -> "NDArray":
    return of(values.reshape(3, len(values) // 3, *values.shape[1:])[number])


def width(fields: Fields, name: str, default: Any = None) -> int:
    """A checked size of a tower."""
    return fields.integer(name, high=MAX_WIDTH) if default is None else fields.integer(name, default, high=MAX_WIDTH)


def pad_rows(values: "NDArray", rows: int) -> "NDArray":
    """With rows of zeros behind, `rows` in all."""
    return np.pad(values, [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1))


def pad_heads(values: "NDArray", heads: int, wide: int) -> "NDArray":
    """Rows of heads as rows of heads of `wide`: zeros behind each half of a head, so that row i still turns with the
    row half a head further."""
    dim = len(values) // heads
    halves = values.reshape(heads, 2, dim // 2, *values.shape[1:])
    padding = [(0, 0), (0, 0), (0, (wide - dim) // 2)] + [(0, 0)] * (values.ndim - 1)
    return np.pad(halves, padding).reshape(heads * wide, *values.shape[1:])


def resampled(table: "NDArray", rows: int, columns: int) -> "NDArray":
    """A square table of positions f32 [side * side, hidden] brought to rows × columns bilinearly, corners upon corners:
    f32 [rows, columns, hidden]."""
    side = math.isqrt(len(table))
    grid = table.reshape(side, side, -1)

    def places(count: int):
        at = np.linspace(0, side - 1, count, dtype=np.float32)
        low = at.astype(np.int64)
        return low, np.minimum(low + 1, side - 1), (at - low)[:, None]

    (top, bottom, down), (left, right, across) = places(rows), places(columns)
    down = down[:, :, None]
    upper = grid[top][:, left] * (1 - across) + grid[top][:, right] * across
    lower = grid[bottom][:, left] * (1 - across) + grid[bottom][:, right] * across
    return upper * (1 - down) + lower * down
