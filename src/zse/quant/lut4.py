"""4-bit indices into a table of 16 integers, scaled by groups of columns; and their content in NumPy.

w = table[index] * scale * unit. The numbers of a table are integers from -127 to 127, so that products with int8
activations take them as they are; `unit` is a power of two. What holds the scale of a group:

    f16    the scale itself
    i8     a signed byte, times an f16 `factor` for 256 columns (GGUF's blocks of 256)
    e8m0   an exponent, 2**(e - 127) (OCP microscaling formats 1.0)
    e4m3   an 8-bit float without a sign, times an f32 `factor` for the row (NVFP4)

Layout r16 (zse.quant.affine draws q): q u8 [T, B, 4, 16, 4]; scale f16 or u8 [T, G, 16]; factor f16 [T, K/256, 16] or
f32 [T, 1, 16]. In the last two dimensions of 16 rows, as everywhere, a row's tile is apart from all others: an expert
of a stack is an offset."""

from collections import namedtuple
from collections.abc import Mapping

from zse.errors import UnsupportedError
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.plane import BLOCK_COLUMNS, LAYOUT, TILE_ROWS, Plane, StoredScheme, cached, plane, tiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

FACTOR_COLUMNS = 256  # of i8 scales


def _signed(*magnitudes: int) -> tuple[int, ...]:
    """Magnitudes, then the same negative; what is left of 16 repeats 0."""
    half = (*magnitudes, *(0,) * (8 - len(magnitudes)))
    return (*half, *(-value for value in half))


# Name → the numbers, and what multiplies them. iq4: llama.cpp's non-linear levels; fp4: E2M1, doubled; int: plain
# integers; nf4: the floats below, rounded; the others: the distinct levels of llama.cpp's grids, a sign in bit 3 of the
# index (ggml-common.h; iq1: (-1, 0, 1) ± 1/8, times 8).
TABLES: dict[str, tuple[tuple[int, ...], float]] = {
    "iq4": ((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), 1.0),
    "fp4": (_signed(0, 1, 2, 3, 4, 6, 8, 12), 0.5),
    "int": (tuple(range(-8, 8)), 1.0),
    "iq3s": (_signed(1, 3, 5, 7, 9, 11, 13, 15), 1.0),
    "iq3xxs": (_signed(4, 12, 20, 28, 36, 44, 52, 62), 0.25),
    "iq2": (_signed(8, 25, 43), 0.125),
    "iq1": (_signed(-7, 1, 9), 0.125),
}
# QLoRA (arXiv 2305.14314), appendix E: quantiles of a normal distribution. In 8 bits, times 123.25, they are at most
# 0.0028 off, the least that a factor up to 127 leaves, where the middle of two neighbours is 0.04 to 0.15 from both.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_UNIT = 123.25
TABLES["nf4"] = tuple(round(value * NF4_UNIT) for value in NF4), 1.0
CODES = ("f16", "i8", "e8m0", "e4m3")
# (table, code, group) of what files have. Every pair of table and group exists with f16 scales as well, which a GPU
# reads; nf4 with these alone.
FORMATS = (
    ("iq4", "i8", 32),
    ("fp4", "e8m0", 32),
    ("fp4", "e4m3", 16),
    ("int", "i8", 16),
    ("iq3s", "i8", 32),
    ("iq3xxs", "i8", 32),
    ("iq2", "i8", 32),
    ("iq2", "i8", 16),
    ("iq1", "i8", 32),
    ("iq1", "i8", 16),
)


class Lut4Scheme(namedtuple("Lut4Scheme", "table code group"), StoredScheme):
    """table: of TABLES; code: of CODES, what holds a scale; group: columns of a scale, 16 or 32."""

    __slots__ = ()
    kind = "lut4"
    layouts = (LAYOUT,)
    in_memory = {"cpu": LAYOUT, "gpu": LAYOUT}
    forms = ("int8", "int16", "f32")
    products = "zse.kernels.matmul_lut4"
    numbers = "q"
    element = "lut4"
    bits = 4
    symmetric = True

    def __new__(cls, table: str, code: str, group: int):
        if (table, code, group) not in FORMATS and (code != "f16" or (table, group) not in _NARROW):
            raise UnsupportedError("lut4 format", (table, code, group), FORMATS)
        return super().__new__(cls, table, code, group)

    @property
    def name(self) -> str:
        """For example `lut4-iq4-g32`, `lut4-fp4-g32-e8m0`; parse_scheme() reads it back."""
        return f"lut4-{self.table}-g{self.group}" + ("" if self.code == "f16" else f"-{self.code}")

    @property
    def levels(self) -> tuple[int, ...]:
        return TABLES[self.table][0]

    @property
    def lookup(self) -> str:
        """Which kernels a GPU has for it: "fp4" where the bits of an index say the number, else "lut4"."""
        return "fp4" if self.table == "fp4" else "lut4"

    @property
    def unit(self) -> float:
        return 1.0 if self.code == "f16" else TABLES[self.table][1]

    def table_args(self, signed: bool = False) -> dict[str, int]:
        """The table as kernels take it, 16 bytes: table0 .. table3, i32 or u32."""
        data = bytes(value & 255 for value in self.levels)
        return {f"table{i}": int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=signed) for i in range(4)}

    @property
    def step(self) -> int:
        return FACTOR_COLUMNS if self.code == "i8" else BLOCK_COLUMNS

    def loaded(self, family: str) -> "Lut4Scheme":
        """A GPU's kernels read f16 scales: the others are rounded to 2**-11 of themselves."""
        return Lut4Scheme(self.table, "f16", self.group) if family == "gpu" else self

    def groups(self, k: int) -> int:
        self.check_columns(k)
        return k // self.group

    def factors(self, k: int) -> int:
        """Factors of a row."""
        return {"i8": k // FACTOR_COLUMNS, "e4m3": 1}.get(self.code, 0)

    @cached
    def planes(self, n: int, k: int, layout: str = LAYOUT) -> tuple[Plane, ...]:
        """q, scale, factor (i8 and e4m3)."""
        self.check_layout(layout)
        t, groups = tiles(n), self.groups(k)
        planes = [plane("q", "u8", t, k // BLOCK_COLUMNS, 4, TILE_ROWS, 4)]
        planes.append(plane("scale", "f16" if self.code == "f16" else "u8", t, groups, TILE_ROWS))
        if self.factors(k):
            planes.append(plane("factor", "f16" if self.code == "i8" else "f32", t, self.factors(k), TILE_ROWS))
        return tuple(planes)

    def unpack(self, planes: "Mapping[str, NDArray]", n: int, k: int) -> "Lut4Arrays":
        """The inverse of Lut4Arrays.pack(). ValueError if a plane is missing or has another shape."""
        given = pack.check_planes(self, planes, n, k)
        nibbles = np.concatenate([given["q"] & 15, given["q"] >> 4], axis=2)
        index = nibbles.transpose(0, 3, 1, 2, 4).reshape(tiles(n) * TILE_ROWS, k)[:n]
        factor = pack.untile(given["factor"], n) if "factor" in given else None
        return Lut4Arrays(self, np.ascontiguousarray(index), pack.untile(given["scale"], n), factor)

    def dequantize(self, planes: "Mapping[str, NDArray]", n: int, k: int, layout: str = LAYOUT) -> "NDArray":
        return self.unpack(planes, n, k).dequantize()

    def take(self, planes, rows: "NDArray", n: int, k: int, layout: str, start: int) -> "dict[str, NDArray]":
        arrays = self.unpack(planes, n, k)
        factor = None if arrays.factor is None else arrays.factor[rows]
        return Lut4Arrays(self, arrays.index[rows], arrays.scale[rows], factor).pack()

    def quantize(self, w: "NDArray", layout: str = LAYOUT, **options) -> "dict[str, NDArray]":
        """The largest magnitude of a group becomes the table's largest. ValueError for what f16 factors or scales
        cannot hold. options: other schemes have some."""
        n, k = w.shape
        levels = np.array(self.levels, np.float32)
        grouped = np.ascontiguousarray(w, np.float32).reshape(n, self.groups(k), self.group)
        wide = np.abs(grouped).max(axis=2, initial=0) / np.float32(np.abs(levels).max() * self.unit)
        if not np.isfinite(wide).all():
            raise ValueError("a value is NaN or infinite")
        scale, factor = self._coded(wide)
        made = Lut4Arrays(self, np.zeros((n, k), np.uint8), scale, factor)
        steps = made.steps()[:, :, None]
        ratio = np.divide(grouped, steps, out=np.zeros_like(grouped), where=steps != 0)
        order = np.argsort(levels, kind="stable")
        edges = (levels[order][1:] + levels[order][:-1]) / 2
        made.index[:] = order[np.searchsorted(edges, ratio)].reshape(n, k)
        return made.pack()

    def _coded(self, wide: "NDArray") -> "tuple[NDArray, NDArray | None]":
        """Scales f32 [N, G], all positive, as (scale, factor)."""
        if self.code == "e8m0":
            exponent = np.ceil(np.log2(np.maximum(wide, np.float32(2.0**-126)))) + 127
            return exponent.clip(1, 254).astype(np.uint8), None
        if self.code == "f16":
            if wide.max(initial=0) > 65504:
                raise ValueError("a scale does not fit in f16")
            return wide.astype(np.float16), None
        by_factor = wide.reshape(len(wide), self.factors(wide.shape[1] * self.group), -1)
        largest = by_factor.max(axis=2, keepdims=True)
        if self.code == "e4m3":
            factor = np.maximum(largest / np.float32(448), np.float32(2.0**-126)).astype(np.float32)
            return pack.f32_to_e4m3(by_factor / factor).reshape(wide.shape), factor[:, :, 0]
        factor = (largest / np.float32(127)).astype(np.float16)
        if not np.isfinite(factor).all():
            raise ValueError("a factor does not fit in f16")
        known = factor.astype(np.float32)
        code = np.divide(by_factor, known, out=np.zeros_like(by_factor), where=known != 0)
        return np.rint(code).clip(0, 127).astype(np.uint8).reshape(wide.shape), factor[:, :, 0]

    def random(self, rng: "Generator", n: int, k: int, layout: str = LAYOUT) -> "dict[str, NDArray]":
        """Every index and scales of both signs where there are such, of mixed size."""
        index, groups = rng.integers(0, 16, (n, k)).astype(np.uint8), self.groups(k)
        size, factor = (0.25 + rng.random((n, groups))) * 2 / (max(self.levels) * self.unit), None
        if self.code == "f16":
            scale = size.astype(np.float16)
        elif self.code == "e8m0":
            scale = (127 + np.rint(np.log2(size))).astype(np.uint8)
        elif self.code == "e4m3":
            scale = rng.integers(1, 127, (n, groups)).astype(np.uint8)
            factor = (size[:, :1] / 64).astype(np.float32)
        else:
            scale = rng.integers(-128, 128, (n, groups)).astype(np.int8).view(np.uint8)
            factor = (size[:, : self.factors(k)] / 64).astype(np.float16)
        return Lut4Arrays(self, index, scale, factor).pack()


class Lut4Arrays:
    """A matrix in row order: index u8 [N, K] below 16, scale f16 or u8 [N, G], factor f16 [N, K/256], f32 [N, 1] or
    None."""

    __slots__ = ("scheme", "index", "scale", "factor")

    def __init__(self, scheme: Lut4Scheme, index: "NDArray", scale: "NDArray", factor: "NDArray | None" = None):
        n, k = index.shape
        expected = np.float16 if scheme.code == "f16" else np.uint8
        if scale.dtype != expected or scale.shape != (n, scheme.groups(k)):
            raise ValueError(f"scale: {scale.dtype} {scale.shape}, expected {expected} {(n, scheme.groups(k))}")
        if (factor is None) != (not scheme.factors(k)):
            raise ValueError(f"{scheme.name}: factor must be {'given' if scheme.factors(k) else 'absent'}")
        self.scheme, self.index, self.scale, self.factor = scheme, index, scale, factor

    def steps(self) -> "NDArray":
        """f32 [N, G]: what multiplies the table's numbers, rounded once (i8, f16 and e8m0: exact)."""
        code, scheme = self.scheme.code, self.scheme
        if code == "f16":
            return self.scale.astype(np.float32)
        if code == "e8m0":
            return np.ldexp(np.float32(scheme.unit), self.scale.astype(np.int32) - 127)
        values = pack.e4m3_to_f32(self.scale & 127) if code == "e4m3" else self.scale.view(np.int8).astype(np.float32)
        n, groups = self.scale.shape
        assert self.factor is not None
        wide = self.factor.astype(np.float32)[:, :, None] * np.float32(scheme.unit)
        return (values.reshape(n, self.factor.shape[1], -1) * wide).reshape(n, groups)

    def dequantize(self) -> "NDArray":
        """f32 [N, K]: table[index] * step, rounded once more."""
        n, k = self.index.shape
        levels = np.array(self.scheme.levels, np.float32)
        return (levels[self.index].reshape(n, -1, self.scheme.group) * self.steps()[:, :, None]).reshape(n, k)

    def narrowed(self) -> "Lut4Arrays":
        """With f16 scales, rounded to nearest. ValueError for those that f16 cannot hold."""
        steps = self.steps()
        if np.abs(steps).max(initial=0) > 65504 or np.isnan(steps).any():
            raise ValueError("a scale does not fit in f16")
        scheme = Lut4Scheme(self.scheme.table, "f16", self.scheme.group)
        return Lut4Arrays(scheme, self.index, steps.astype(np.float16))

    def pack(self) -> "dict[str, NDArray]":
        """The planes by name, in the shapes of `scheme.planes(N, K)`. Padding rows are zero."""
        n, k = self.index.shape
        t, b = tiles(n), k // BLOCK_COLUMNS
        q = pack.pad_rows(self.index, t * TILE_ROWS).reshape(t, TILE_ROWS, b, 8, 4).transpose(0, 2, 3, 1, 4)
        planes = {"q": np.ascontiguousarray(q[:, :, :4] | q[:, :, 4:] << 4), "scale": pack.tile(self.scale)}
        if self.factor is not None:
            planes["factor"] = pack.tile(self.factor)
        return planes


_NARROW = (*dict.fromkeys((table, group) for table, _, group in FORMATS), ("nf4", 32))
LUT4_SCHEMES = tuple(Lut4Scheme(*format) for format in FORMATS)
LUT4_SCHEMES += tuple(Lut4Scheme(table, "f16", group) for table, group in _NARROW)
