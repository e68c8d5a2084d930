"""Integer weights with a scale, and perhaps an offset, for each group of columns; and their content in NumPy.

Layout `r16`, with t = row // 16, r = row % 16, b = k // 32, s = (k % 32) // 4, c = k % 4:

    q, bits 4 5 6   u8  [T, B, 4, 16, 4]   (t, b, j, r, c): low nibble of q at s = j, high nibble: at s = j + 4
    high, bits 5    u8  [T, B, 16, 4]      bit s of (r, c): bit 4 of q at (s, c)
    high, bits 6    u8  [T, B, 2, 16, 4]   bits 2i, 2i + 1 of (h, r, c): bits 4, 5 of q at s = 4 h + i
    q, bits 8       u8  [T, B, 8, 16, 4]   (t, b, s, r, c): q
    scale, offset   f16 [T, G, 16]
"""

from collections import namedtuple
from collections.abc import Mapping

from zse.errors import UnsupportedError
from zse.lazy import numpy as np
from zse.quant import gptq, pack, quantize
from zse.quant.plane import BLOCK_COLUMNS, LAYOUT, TILE_ROWS, Plane, StoredScheme, cached, plane, tiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

BITS = (4, 5, 6, 8)
GROUPS = (16, 32, 64, 128, 256, 0)  # 0: one group is the whole row


class AffineScheme(namedtuple("AffineScheme", "bits group symmetric"), StoredScheme):
    """w = scale * q + offset with q in [0, 2**bits), one f16 scale and offset per row and `group` columns (0: per row).

    symmetric: no offset is stored; it is -2**(bits-1) * scale. Both products are exact in f32, so a weight is rounded
    once, with or without a fused multiply-add. Raises UnsupportedError for bits or groups outside BITS and GROUPS.
    """

    __slots__ = ()
    kind = "affine"
    layouts = (LAYOUT,)
    in_memory = {"cpu": LAYOUT, "gpu": LAYOUT}
    forms = ("int8", "int16", "f32")
    products = "zse.kernels.matmul_affine"
    numbers = "q"

    def __new__(cls, bits: int, group: int, symmetric: bool):
        if bits not in BITS:
            raise UnsupportedError("weight bits", bits, BITS)
        if group not in GROUPS:
            raise UnsupportedError("group size", group, GROUPS)
        return super().__new__(cls, bits, group, bool(symmetric))

    @property
    def name(self) -> str:
        """For example `int4-g32`, `int8-g32-sym`, `int4-row`; parse_scheme() reads it back."""
        group = f"g{self.group}" if self.group else "row"
        return f"int{self.bits}-{group}" + ("-sym" if self.symmetric else "")

    @property
    def element(self) -> str:
        return f"int{self.bits}"

    @property
    def step(self) -> int:
        return max(self.group, BLOCK_COLUMNS)

    def groups(self, k: int) -> int:
        self.check_columns(k)
        return k // self.group if self.group else 1

    @cached
    def planes(self, n: int, k: int, layout: str = LAYOUT) -> tuple[Plane, ...]:
        """The planes of N x K in the order of files: q, high (bits 5 and 6), scale, offset (unless symmetric)."""
        self.check_layout(layout)
        groups = self.groups(k)
        t, b = tiles(n), k // BLOCK_COLUMNS
        planes = [plane("q", "u8", t, b, 8 if self.bits == 8 else 4, TILE_ROWS, 4)]
        if self.bits == 5:
            planes.append(plane("high", "u8", t, b, TILE_ROWS, 4))
        elif self.bits == 6:
            planes.append(plane("high", "u8", t, b, 2, TILE_ROWS, 4))
        planes.append(plane("scale", "f16", t, groups, TILE_ROWS))
        if not self.symmetric:
            planes.append(plane("offset", "f16", t, groups, TILE_ROWS))
        return tuple(planes)

    def unpack(self, planes: "Mapping[str, NDArray]", n: int, k: int) -> "AffineArrays":
        """The inverse of AffineArrays.pack(). ValueError if a plane is missing or has another shape."""
        given = pack.check_planes(self, planes, n, k)
        offset = None if self.symmetric else pack.untile(given["offset"], n)
        return AffineArrays(self, unpack_numbers(given, self.bits, n, k), pack.untile(given["scale"], n), offset)

    def nearest(self, w: "NDArray", **options) -> "AffineArrays":
        """f32 [N, K] as affine groups. options: of zse.quant.quantize.quantize(); inputs: a gptq.Inputs, what is known
        of the inputs of the product, which the rounding goes by."""
        inputs = options.pop("inputs", None)
        if inputs is not None:
            return AffineArrays(self, *gptq.round_rows(w, self, inputs, search=options.get("search", True)))
        return AffineArrays(self, *quantize.quantize(w, self, **options))

    def quantize(self, w: "NDArray", layout: str = LAYOUT, **options) -> "dict[str, NDArray]":
        return self.nearest(w, **options).pack()

    def dequantize(self, planes: "Mapping[str, NDArray]", n: int, k: int, layout: str = LAYOUT) -> "NDArray":
        return self.unpack(planes, n, k).dequantize()

    def take(self, planes, rows: "NDArray", n: int, k: int, layout: str, start: int) -> "dict[str, NDArray]":
        arrays = self.unpack(planes, n, k)
        offset = None if arrays.offset is None else arrays.offset[rows]
        return AffineArrays(self, arrays.q[rows], arrays.scale[rows], offset).pack()

    def random(self, rng: "Generator", n: int, k: int, layout: str = LAYOUT) -> "dict[str, NDArray]":
        groups = self.groups(k)
        q = rng.integers(0, 1 << self.bits, (n, k)).astype(np.uint8)
        scale = ((0.25 + rng.random((n, groups))) * 2 / (1 << self.bits)).astype(np.float16)
        offset = None if self.symmetric else (-rng.random((n, groups))).astype(np.float16)
        return AffineArrays(self, q, scale, offset).pack()


class AffineArrays:
    """A quantized matrix in row order: q u8 [N, K] below 2**bits, scale f16 [N, G], offset f16 [N, G] or None."""

    __slots__ = ("scheme", "q", "scale", "offset")

    def __init__(self, scheme: AffineScheme, q: "NDArray", scale: "NDArray", offset: "NDArray | None" = None):
        groups = scheme.groups(q.shape[1])
        if q.dtype != np.uint8 or q.ndim != 2:
            raise ValueError(f"q: {q.dtype} {q.shape}, expected uint8 [N, K]")
        if scheme.symmetric != (offset is None):
            raise ValueError(f"{scheme.name}: offset must be {'absent' if scheme.symmetric else 'given'}")
        for name, array in (("scale", scale), ("offset", offset)):
            if array is not None and (array.dtype != np.float16 or array.shape != (q.shape[0], groups)):
                raise ValueError(f"{name}: {array.dtype} {array.shape}, expected float16 {(q.shape[0], groups)}")
        if scheme.bits < 8 and q.size and int(q.max()) >> scheme.bits:
            raise ValueError(f"q: {int(q.max())} needs more than {scheme.bits} bits")
        self.scheme, self.q, self.scale, self.offset = scheme, q, scale, offset

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape

    def dequantize(self) -> "NDArray":
        """f32 [N, K]: scale * q + offset, rounded once."""
        n, k = self.shape
        groups = self.scheme.groups(k)
        steps = self.q.reshape(n, groups, k // groups).astype(np.float32)
        wide = self.scale.astype(np.float32)[:, :, None]
        if self.offset is None:
            # (q - 2**(bits-1)) * scale is exact in f32, as is its sum form scale * q - 2**(bits-1) * scale.
            return ((steps - np.float32(1 << (self.scheme.bits - 1))) * wide).reshape(n, k)
        return (wide * steps + self.offset.astype(np.float32)[:, :, None]).reshape(n, k)

    def pack(self) -> "dict[str, NDArray]":
        """The planes by name, in the shapes of `scheme.planes(N, K)`. Padding rows are zero."""
        planes = pack_numbers(self.q, self.scheme.bits)
        planes["scale"] = pack.tile(self.scale)
        if self.offset is not None:
            planes["offset"] = pack.tile(self.offset)
        return planes


def pack_numbers(q: "NDArray", bits: int) -> "dict[str, NDArray]":
    """u8 [N, K] below 2**bits → the planes q and, for bits 5 and 6, high. Padding rows are zero."""
    (n, k), planes = q.shape, {}
    t, b = tiles(n), k // BLOCK_COLUMNS
    # [T, B, s, r, c]
    q = pack.pad_rows(q, t * TILE_ROWS).reshape(t, TILE_ROWS, b, 8, 4).transpose(0, 2, 3, 1, 4)
    if bits == 8:
        return {"q": np.ascontiguousarray(q)}
    planes["q"] = np.ascontiguousarray((q[:, :, :4] & 15) | ((q[:, :, 4:] & 15) << 4))
    if bits == 5:
        planes["high"] = np.ascontiguousarray(np.packbits(q >> 4, axis=2, bitorder="little")[:, :, 0])
    elif bits == 6:
        top = (q >> 4).reshape(t, b, 2, 4, TILE_ROWS, 4)
        high = top[:, :, :, 0] | (top[:, :, :, 1] << 2) | (top[:, :, :, 2] << 4) | (top[:, :, :, 3] << 6)
        planes["high"] = np.ascontiguousarray(high)
    return planes


def unpack_numbers(planes: "Mapping[str, NDArray]", bits: int, n: int, k: int) -> "NDArray":
    """The inverse of pack_numbers()."""
    t, b = tiles(n), k // BLOCK_COLUMNS
    q = planes["q"]
    if bits != 8:
        q = np.concatenate([q & 15, q >> 4], axis=2)
        if bits == 5:
            q |= np.unpackbits(planes["high"][:, :, None], axis=2, bitorder="little") << 4
        elif bits == 6:
            top = np.stack([(planes["high"] >> (2 * i)) & 3 for i in range(4)], axis=3)
            q |= top.reshape(t, b, 8, TILE_ROWS, 4) << 4
    return np.ascontiguousarray(q.transpose(0, 3, 1, 2, 4).reshape(t * TILE_ROWS, k)[:n])
