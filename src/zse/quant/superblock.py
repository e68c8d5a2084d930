"""GGUF's K types as they are: groups whose scales are small integers, with f16 factors for a super-block of 256 columns.

| bits | weight | groups | bits a weight |
|------|--------|--------|---------------|
| 4, 5 | d sc q - dmin m, sc and m of 6 bits | 32 | 4.5, 5.5 |
| 6    | d sc (q - 32), sc a signed byte | 16 | 6.5625 |

Layout `r16`: q and high as affine weights have them (zse.quant.affine), and with S = K / 256 super-blocks

    scale, bits 4 5   u8  [T, S, 3, 16, 4]   three little-endian words a row, of 16 fields (sc of 8 groups, then m): bits
                                             6 i .. 6 i + 5 of word j are field 5 j + i, its last two bits those of field
                                             15 from 2 j on
    scale, bits 6     u8  [T, K / 16, 16]    sc
    factor            f16 [T, S, F, 16]      d; bits 4 and 5: d, dmin
"""

from collections import namedtuple
from collections.abc import Mapping

from zse.errors import UnsupportedError
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.affine import AffineArrays, AffineScheme, pack_numbers, unpack_numbers
from zse.quant.plane import LAYOUT, TILE_ROWS, Plane, StoredScheme, cached, plane, tiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

SUPERBLOCK = 256  # columns
GROUPS = {4: 32, 5: 32, 6: 16}  # columns of a scale, by bits
MOST = 63  # of 6 bits


class SuperblockScheme(namedtuple("SuperblockScheme", "bits"), StoredScheme):
    """bits: 4 and 5 of Q4_K and Q5_K, 6 of Q6_K. UnsupportedError for others."""

    __slots__ = ()
    kind = "superblock"
    layouts = (LAYOUT,)
    in_memory = {"cpu": LAYOUT}
    forms = ("int8", "int16", "f32")
    products = "zse.kernels.matmul_affine"
    numbers = "q"
    step = SUPERBLOCK

    def __new__(cls, bits: int):
        if bits not in GROUPS:
            raise UnsupportedError("bits of super-blocks", bits, GROUPS)
        return super().__new__(cls, bits)

    @property
    def group(self) -> int:
        return GROUPS[self.bits]

    @property
    def symmetric(self) -> bool:
        return self.bits == 6

    @property
    def code(self) -> str:
        """What holds a scale."""
        return "i8" if self.symmetric else "i6"

    @property
    def name(self) -> str:
        """`int4-g32-i6`, `int5-g32-i6`, `int6-g16-sym-i8`; parse_scheme() reads it back."""
        return f"{self.narrow}-{self.code}"

    @property
    def element(self) -> str:
        return f"int{self.bits}"

    @property
    def narrow(self) -> AffineScheme:
        """The groups with scales rounded to f16, which fit any device and any multiple of 32 columns."""
        return AffineScheme(self.bits, self.group, self.symmetric)

    def loaded(self, family: str) -> "SuperblockScheme | AffineScheme":
        """A GPU's kernels read f16 scales."""
        return self.narrow if family == "gpu" else self

    def groups(self, k: int) -> int:
        self.check_columns(k)
        return k // self.group

    @cached
    def planes(self, n: int, k: int, layout: str = LAYOUT) -> tuple[Plane, ...]:
        """q, high (bits 5 and 6), scale, factor."""
        self.check_layout(layout)
        groups, t, count = self.groups(k), tiles(n), k // SUPERBLOCK
        scale = (groups, TILE_ROWS) if self.symmetric else (count, 3, TILE_ROWS, 4)
        factor = plane("factor", "f16", t, count, 1 if self.symmetric else 2, TILE_ROWS)
        return *self.narrow.planes(n, k)[: 1 + (self.bits > 4)], plane("scale", "u8", t, *scale), factor

    def unpack(self, planes: "Mapping[str, NDArray]", n: int, k: int) -> "SuperblockArrays":
        """The inverse of SuperblockArrays.pack(). ValueError if a plane is missing or has another shape."""
        given, count = pack.check_planes(self, planes, n, k), k // SUPERBLOCK
        q, factor = unpack_numbers(given, self.bits, n, k), pack.untile(given["factor"].reshape(tiles(n), -1, 16), n)
        if self.symmetric:
            return SuperblockArrays(self, q, pack.untile(given["scale"], n), factor)
        words = pack.untile(given["scale"].view("<u4").reshape(tiles(n), 3 * count, TILE_ROWS), n).reshape(n, count, 3)
        fields = (words[..., None] >> np.arange(0, 30, 6, dtype=np.uint32) & np.uint32(MOST)).reshape(n, count, 15)
        last = words >> np.uint32(30) << np.array([0, 2, 4], np.uint32)
        fields = np.concatenate([fields, last.sum(axis=2, keepdims=True)], axis=2).astype(np.uint8)
        sc, m = (np.ascontiguousarray(half).reshape(n, -1) for half in np.split(fields, 2, axis=2))
        d, dmin = (np.ascontiguousarray(factor[:, i::2]) for i in range(2))
        return SuperblockArrays(self, q, sc, d, m, dmin)

    def dequantize(self, planes: "Mapping[str, NDArray]", n: int, k: int, layout: str = LAYOUT) -> "NDArray":
        return self.unpack(planes, n, k).dequantize()

    def take(self, planes, rows: "NDArray", n: int, k: int, layout: str, start: int) -> "dict[str, NDArray]":
        arrays = self.unpack(planes, n, k)
        return SuperblockArrays(self, *(None if part is None else part[rows] for part in arrays.parts())).pack()

    def quantize(self, w: "NDArray", layout: str = LAYOUT, **options) -> "dict[str, NDArray]":
        """Every group from its least to its largest number and 0, which a minimum cannot lie above. ValueError for what
        f16 factors cannot hold. options: other schemes have some."""
        (n, k), most, m, dmin = w.shape, (1 << self.bits) - 1, None, None
        wide = np.asarray(w, np.float32).reshape(n, self.groups(k), self.group)
        if not np.isfinite(wide).all():
            raise ValueError("a value is NaN or infinite")
        low, high = wide.min(axis=2).clip(max=0), wide.max(axis=2).clip(min=0)
        if self.symmetric:
            sc, d = _coded(np.maximum(-low / 32, high / 31), self.group, 127)
        else:
            sc, d = _coded((high - low) / most, self.group, MOST)
            m, dmin = _coded(-low, self.group, MOST)
        made = SuperblockArrays(self, np.zeros((n, k), np.uint8), sc, d, m, dmin)
        steps, base = (part[:, :, None] for part in made.steps())
        ratio = np.divide(wide - base, steps, out=np.zeros_like(wide), where=steps != 0)
        made.q[:] = np.rint(ratio).clip(0, most).reshape(n, k)
        return made.pack()

    def random(self, rng: "Generator", n: int, k: int, layout: str = LAYOUT) -> "dict[str, NDArray]":
        """Every number and every scale, of both signs where there are such."""
        groups, count, size = self.groups(k), k // SUPERBLOCK, 2 / (1 << self.bits) / MOST
        q = rng.integers(0, 1 << self.bits, (n, k)).astype(np.uint8)
        d, dmin = ((0.5 + rng.random((n, count))) * factor for factor in (size, 1 / MOST))
        if self.symmetric:
            sc = rng.integers(-128, 128, (n, groups)).astype(np.int8).view(np.uint8)
            return SuperblockArrays(self, q, sc, d.astype(np.float16)).pack()
        sc, m = (rng.integers(0, MOST + 1, (n, groups)).astype(np.uint8) for _ in range(2))
        return SuperblockArrays(self, q, sc, d.astype(np.float16), m, dmin.astype(np.float16)).pack()


def _coded(wide: "NDArray", group: int, most: int) -> "tuple[NDArray, NDArray]":
    """Positive scales f32 [N, G] as integers u8 [N, G] up to `most` and factors f16 [N, S]."""
    by_factor = wide.reshape(len(wide), -1, SUPERBLOCK // group)
    factor = (by_factor.max(axis=2) / np.float32(most)).astype(np.float16)
    if not np.isfinite(factor).all():
        raise ValueError("a factor does not fit in f16")
    known = factor.astype(np.float32)[:, :, None]
    code = np.divide(by_factor, known, out=np.zeros_like(by_factor), where=known != 0)
    return np.rint(code).clip(0, most).astype(np.uint8).reshape(wide.shape), factor


class SuperblockArrays:
    """A matrix in row order: q u8 [N, K], sc u8 [N, G] (of 6 bits i8's bits), d f16 [N, S]; m and dmin likewise, or
    None of 6 bits."""

    __slots__ = ("scheme", "q", "sc", "d", "m", "dmin")

    def __init__(self, scheme: SuperblockScheme, q, sc, d, m=None, dmin=None):
        n, k = q.shape
        if (m is None) != scheme.symmetric or (dmin is None) != scheme.symmetric:
            raise ValueError(f"{scheme.name}: minima must be {'absent' if scheme.symmetric else 'given'}")
        pairs = [("sc", sc, "uint8", scheme.groups(k)), ("d", d, "float16", k // SUPERBLOCK)]
        pairs += [("m", m, "uint8", scheme.groups(k)), ("dmin", dmin, "float16", k // SUPERBLOCK)]
        for name, array, dtype, count in pairs:
            if array is not None and (array.dtype != dtype or array.shape != (n, count)):
                raise ValueError(f"{name}: {array.dtype} {array.shape}, expected {dtype} {(n, count)}")
        self.scheme, self.q, self.sc, self.d, self.m, self.dmin = scheme, q, sc, d, m, dmin

    def parts(self) -> tuple:
        return self.q, self.sc, self.d, self.m, self.dmin

    def steps(self) -> "tuple[NDArray, NDArray]":
        """(d sc, what is added: -dmin m, or -32 d sc), f32 [N, G], exact."""
        per = SUPERBLOCK // self.scheme.group
        codes = self.sc.view(np.int8) if self.scheme.symmetric else self.sc
        steps = np.repeat(self.d.astype(np.float32), per, 1) * codes.astype(np.float32)
        if self.m is None:
            return steps, steps * np.float32(-32)
        return steps, -(np.repeat(self.dmin.astype(np.float32), per, 1) * self.m.astype(np.float32))

    def dequantize(self) -> "NDArray":
        """f32 [N, K]: rounded once, as ggml's."""
        (n, k), (steps, base) = self.q.shape, self.steps()
        q = self.q.reshape(n, -1, self.scheme.group).astype(np.float32)
        if self.m is None:
            return ((q - np.float32(32)) * steps[:, :, None]).reshape(n, k)
        return (steps[:, :, None] * q + base[:, :, None]).reshape(n, k)

    def narrowed(self) -> AffineArrays:
        """With scales and offsets rounded to f16; what it cannot hold becomes infinite, which `zse verify` finds."""
        steps, base = self.steps()
        with np.errstate(over="ignore"):
            offset = None if self.m is None else base.astype(np.float16)
            return AffineArrays(self.scheme.narrow, self.q, steps.astype(np.float16), offset)

    def pack(self) -> "dict[str, NDArray]":
        """The planes by name, in the shapes of `scheme.planes(N, K)`. Padding rows are zero."""
        n, t, count = len(self.q), tiles(len(self.q)), self.q.shape[1] // SUPERBLOCK
        planes = pack_numbers(self.q, self.scheme.bits)
        if self.m is None:
            planes["scale"] = pack.tile(self.sc)
            factor = self.d[:, :, None]
        else:
            both = [part.reshape(n, count, 8).astype(np.uint32) for part in (self.sc, self.m)]
            fields = np.concatenate(both, axis=2)
            words = (fields[:, :, :15].reshape(n, count, 3, 5) << np.arange(0, 30, 6, dtype=np.uint32)).sum(
                axis=3, dtype=np.uint32
            )
            words |= (fields[:, :, 15:] >> np.array([0, 2, 4], np.uint32) & np.uint32(3)) << np.uint32(30)
            tiled = pack.tile(words.reshape(n, 3 * count).astype("<u4"))
            planes["scale"] = tiled.view(np.uint8).reshape(t, count, 3, TILE_ROWS, 4)
            factor = np.stack([self.d, self.dmin], axis=2)
        tiled = pack.tile(np.ascontiguousarray(factor).reshape(n, -1))
        planes["factor"] = tiled.reshape(t, count, -1, TILE_ROWS)
        return planes


SUPERBLOCK_SCHEMES = tuple(SuperblockScheme(bits) for bits in GROUPS)
