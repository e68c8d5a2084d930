"""How weights are stored in memory: schemes, layouts, and the planes that these make of a matrix, with their sizes.

A weight of N rows (outputs) and K columns (inputs) becomes a few *planes*. In layout `r16` rows come in tiles of 16 (N
is padded with zero rows), so that the lanes of a vector register, or the rows of a matrix fragment, are rows;
docs/zse-format.md draws the planes. Layout `rows` is the matrix as it stands, row after row. Integers are always r16,
fp8 always rows; floating-point weights are r16 for the CPU's kernels and rows for a GPU's. `quant/pack.py` is the NumPy
truth of the content; this module only counts, and imports nothing heavy: the start path uses it.

A scheme is a class of values that are named and hashed; what others look up are its attributes, the same for each class:

    kind          what the tables of kernels and packing are keyed by
    layouts       of its planes, the first one for files
    in_memory     which of them the kernels of a kind of device read; a device that is missing has no kernels for it
    forms         the activations that the CPU's products of it take; products: the module of their kernels
    numbers       the plane of its numbers: "q" or "w"
    element       the type of these in the names of GPU kernels: int4, e4m3, bf16
    group, symmetric, scale_code    as kernels take them: columns of a scale (0: the row), no offsets, which weights share a scale
    fits(k), step   whether rows of k columns can be stored; what k is a multiple of
    loaded(family)  the scheme that a weight of this one gets in the memory of a kind of device
    planes(n, k, layout), groups(k), nbytes(n, k)
"""

from collections import namedtuple
from functools import lru_cache

from zse.dtypes import ITEM_BYTES
from zse.errors import UnsupportedError

LAYOUT = "r16"
ROWS = "rows"
LAYOUTS = (LAYOUT, ROWS)
TILE_ROWS = 16  # rows of a tile: the f32 lanes of one AVX-512 register, two of AVX2
BLOCK_COLUMNS = 32  # K of an affine weight is a multiple of this
PLANE_ALIGN = 256  # bytes; the alignment that GPU copies and tensor maps want
BITS = (4, 5, 6, 8)
GROUPS = (16, 32, 64, 128, 256, 0)  # 0: one group is the whole row
DENSE_DTYPES = ("f32", "f16", "bf16")
FP8_SCALINGS = ("row", "tensor", "block")
FP8_BLOCK = 128  # rows and columns that share a scale in block scaling (DeepSeek-V3 report, section 3.3.2)


# The layers of a model ask for the same planes again and again, on the start path.
_cached = lru_cache(maxsize=256)


class Plane(namedtuple("Plane", "name dtype shape nbytes")):
    """One contiguous, row-major array of a weight. name: q, high, scale, offset or w; nbytes: its size."""

    __slots__ = ()


def _plane(name: str, dtype: str, *shape: int) -> Plane:
    nbytes = ITEM_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return Plane(name, dtype, shape, nbytes)


def tiles(n: int) -> int:
    """Tiles of 16 rows that hold `n` rows."""
    return -(-n // TILE_ROWS)


class AffineScheme(namedtuple("AffineScheme", "bits group symmetric")):
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
    scale_code = 0

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

    def __str__(self) -> str:
        return self.name

    @property
    def element(self) -> str:
        return f"int{self.bits}"

    @property
    def step(self) -> int:
        return max(self.group, BLOCK_COLUMNS)

    def fits(self, k: int) -> bool:
        """Whether rows of `k` columns can be stored: k is a positive multiple of 32 and of the group."""
        return k > 0 and k % BLOCK_COLUMNS == 0 and (self.group == 0 or k % self.group == 0)

    def loaded(self, family: str) -> "Scheme":
        return self

    def groups(self, k: int) -> int:
        """Groups of one row of `k` columns. ValueError if the group does not divide k."""
        if not self.fits(k):
            raise ValueError(f"{self.name} needs a multiple of {self.step} columns, got {k}")
        return k // self.group if self.group else 1

    @_cached
    def planes(self, n: int, k: int, layout: str = LAYOUT) -> tuple[Plane, ...]:
        """The planes of N x K in the order of files: q, high (bits 5 and 6), scale, offset (unless symmetric)."""
        _check_layout(self, layout)
        groups = self.groups(k)
        t, b = tiles(n), k // BLOCK_COLUMNS
        planes = [_plane("q", "u8", t, b, 8 if self.bits == 8 else 4, TILE_ROWS, 4)]
        if self.bits == 5:
            planes.append(_plane("high", "u8", t, b, TILE_ROWS, 4))
        elif self.bits == 6:
            planes.append(_plane("high", "u8", t, b, 2, TILE_ROWS, 4))
        planes.append(_plane("scale", "f16", t, groups, TILE_ROWS))
        if not self.symmetric:
            planes.append(_plane("offset", "f16", t, groups, TILE_ROWS))
        return tuple(planes)

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of all planes together, without alignment."""
        return sum(plane.nbytes for plane in self.planes(n, k))


class DenseScheme(namedtuple("DenseScheme", "dtype")):
    """Weights as floating-point numbers: one plane `w`, [T, K, 16] in layout r16, [N, K] in layout rows.

    dtype: f32, f16 or bf16.
    """

    __slots__ = ()
    kind = "dense"
    layouts = LAYOUTS
    in_memory = {"cpu": LAYOUT, "gpu": ROWS}
    forms = ("f32",)
    products = "zse.kernels.matmul_dense"
    numbers = "w"
    group, symmetric, scale_code, step = 0, False, 0, 1

    def __new__(cls, dtype: str):
        if dtype not in DENSE_DTYPES:
            raise UnsupportedError("dense weight dtype", dtype, DENSE_DTYPES)
        return super().__new__(cls, dtype)

    @property
    def name(self) -> str:
        return self.dtype

    element = name

    def __str__(self) -> str:
        return self.name

    def fits(self, k: int) -> bool:
        return k > 0

    def loaded(self, family: str) -> "Scheme":
        return self

    def groups(self, k: int) -> int:
        return 0

    @_cached
    def planes(self, n: int, k: int, layout: str = LAYOUT) -> tuple[Plane, ...]:
        """The one plane `w` of N x K."""
        _check_layout(self, layout)
        if not self.fits(k):
            raise ValueError(f"{self.name} needs at least one column, got {k}")
        if layout == ROWS:
            return (_plane("w", self.dtype, n, k),)
        return (_plane("w", self.dtype, tiles(n), k, TILE_ROWS),)

    def nbytes(self, n: int, k: int, layout: str = LAYOUT) -> int:
        return self.planes(n, k, layout)[0].nbytes


class Fp8Scheme(namedtuple("Fp8Scheme", "scaling")):
    """w = scale * q with q in e4m3 (OCP 8-bit floating point, largest value 448) and f32 scales, layout rows.

    scaling: "row" (one scale per output), "tensor" (one in all) or "block" (one per 128 x 128). Planes: w e4m3 [N, K],
    scale f32 [N], [1] or [ceil(N/128), ceil(K/128)].
    """

    __slots__ = ()
    kind = "fp8"
    layouts = (ROWS,)
    in_memory = {"gpu": ROWS}
    forms = ()
    numbers = "w"
    element = "e4m3"
    group, symmetric, step = 0, False, 16

    def __new__(cls, scaling: str):
        if scaling not in FP8_SCALINGS:
            raise UnsupportedError("fp8 scaling", scaling, FP8_SCALINGS)
        return super().__new__(cls, scaling)

    @property
    def name(self) -> str:
        return f"fp8-{self.scaling}"

    def __str__(self) -> str:
        return self.name

    @property
    def scale_code(self) -> int:
        return FP8_SCALINGS.index(self.scaling)

    def fits(self, k: int) -> bool:
        """Whether rows of `k` columns can be stored: 16-byte loads and tensor maps want multiples of 16."""
        return k > 0 and k % self.step == 0

    def groups(self, k: int) -> int:
        return 0

    def loaded(self, family: str) -> "Scheme":
        if family not in self.in_memory:
            return DenseScheme("bf16")  # 2**-9 of rounding beside the 2**-4 that the numbers have already
        # The same numbers, and matrices of different scales can be joined.
        return Fp8Scheme("row") if self.scaling == "tensor" else self

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        if self.scaling == "block":
            return -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
        return (n if self.scaling == "row" else 1,)

    @_cached
    def planes(self, n: int, k: int, layout: str = ROWS) -> tuple[Plane, ...]:
        """w and scale."""
        _check_layout(self, layout)
        if not self.fits(k):
            raise ValueError(f"{self.name} needs a multiple of 16 columns, got {k}")
        return _plane("w", "e4m3", n, k), _plane("scale", "f32", *self.scale_shape(n, k))

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of both planes together, without alignment."""
        return sum(plane.nbytes for plane in self.planes(n, k))


Scheme = AffineScheme | DenseScheme | Fp8Scheme


def _check_layout(scheme: Scheme, layout: str) -> None:
    if layout not in scheme.layouts:
        raise ValueError(f"{scheme.name} has no layout {layout}, only {', '.join(scheme.layouts)}")


def memory_layout(scheme: Scheme, family: str) -> str:
    """The layout that the kernels of a device family ("cpu", "gpu") read a scheme in. ValueError: they do not."""
    if family not in scheme.in_memory:
        raise ValueError(f"the {family.upper()} has no kernels for {scheme.name}")
    return scheme.in_memory[family]


def rows_per_line(plane: Plane, layout: str, n: int) -> int:
    """Rows of an N-row matrix that one entry of the plane's first dimension belongs to."""
    if layout == LAYOUT:
        return TILE_ROWS
    if plane.name == "scale" and plane.shape[0] != n:
        return FP8_BLOCK if len(plane.shape) == 2 else n
    return 1


def placed_planes(scheme: Scheme, n: int, k: int, layout: str | None = None) -> tuple[list[tuple[Plane, int]], int]:
    """The planes of N x K with their offsets in one piece, each at a multiple of 256, and the piece's bytes.

    layout: the scheme's first one by default.
    """
    placed, end = [], 0
    for plane in scheme.planes(n, k, layout or scheme.layouts[0]):
        start = end + -end % PLANE_ALIGN
        placed.append((plane, start))
        end = start + plane.nbytes
    return placed, end


def parse_scheme(name: str) -> Scheme:
    """The scheme of a name made by `.name`; UnsupportedError for any other text."""
    scheme = _BY_NAME.get(name)
    if scheme is None:
        raise UnsupportedError("weight scheme", name, SCHEME_NAMES)
    return scheme


SCHEMES: list[Scheme] = [DenseScheme(dtype) for dtype in DENSE_DTYPES]
SCHEMES += [AffineScheme(bits, group, symmetric) for bits in BITS for group in GROUPS for symmetric in (False, True)]
SCHEMES += [Fp8Scheme(scaling) for scaling in FP8_SCALINGS]
_BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
SCHEME_NAMES = tuple(_BY_NAME)
