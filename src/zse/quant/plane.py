"""What schemes of weights are made of: planes and their layouts. Nothing heavy is imported: the start path uses it.

In layout `r16` rows come in tiles of 16 (N is padded with zero rows), so that the lanes of a vector register, or the
rows of a matrix fragment, are rows; docs/zse-format.md draws the planes. Layout `rows` is the matrix as it stands, row
after row."""

from collections import namedtuple
from functools import lru_cache
from typing import Any, ClassVar

from zse.dtypes import ITEM_BYTES

LAYOUT = "r16"
ROWS = "rows"
LAYOUTS = (LAYOUT, ROWS)
TILE_ROWS = 16  # rows of a tile: the f32 lanes of one AVX-512 register, two of AVX2
BLOCK_COLUMNS = 32  # K of an affine weight is a multiple of this
PLANE_ALIGN = 256  # bytes; the alignment that GPU copies and tensor maps want

# The layers of a model ask for the same planes again and again, on the start path.
cached = lru_cache(maxsize=256)


class Plane(namedtuple("Plane", "name dtype shape nbytes")):
    """One contiguous, row-major array of a weight. name: q, high, scale, offset or w; nbytes: its size."""

    __slots__ = ()


def plane(name: str, dtype: str, *shape: int) -> Plane:
    nbytes = ITEM_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return Plane(name, dtype, shape, nbytes)


def tiles(n: int) -> int:
    """Tiles of 16 rows that hold `n` rows."""
    return -(-n // TILE_ROWS)


class StoredScheme:
    """What all schemes have in common. A scheme is a class of values that are named and hashed:

    kind          what tables of kernels are keyed by
    layouts       of its planes, the first one for files
    in_memory     which of them the kernels of a kind of device read; a device that is missing has no kernels for it
    forms         the activations that the CPU's products of it take; products: the module of their kernels
    numbers       the plane of its numbers: "q" or "w"
    element       the type of these in the names of GPU kernels: int4, e4m3, bf16
    group, symmetric, scale_code    as kernels take them: columns of a scale (0: the row), no offsets, which weights share a scale
    row_unit      rows that share nothing with those before are multiples of this
    name          that parse_scheme() reads back
    fits(k), step   whether rows of k columns can be stored; what k is a multiple of
    column_unit     where a matrix can be cut between columns: those of a scale, a block
    planes(n, k, layout), groups(k), nbytes(n, k)

    In NumPy, which is imported when one of these is called (bf16 arrays are u16 bit patterns there, e4m3 arrays u8):

    quantize(w, layout)                     f32 [n, k] → its planes, as near as they can be; ValueError for what they cannot hold
    dequantize(planes, n, k, layout)        → f32 [n, k], what they mean: every other implementation is tested against this one
    take(planes, rows, n, k, layout, start) the planes of some rows; start: where these would stand in the matrix
    random(rng, n, k, layout)               planes of a weight near a unit normal's to try kernels with, scales of mixed size
    """

    __slots__ = ()
    kind: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]
    in_memory: ClassVar[dict[str, str]]
    forms: ClassVar[tuple[str, ...]] = ()
    products: ClassVar[str]
    numbers: ClassVar[str]
    group: Any = 0
    symmetric: Any = False
    scale_code: Any = 0
    row_unit: Any = TILE_ROWS
    name: Any
    planes: Any
    step: Any

    def __str__(self) -> str:
        return self.name

    def loaded(self, family: str) -> Any:
        """The scheme that such a weight gets in the memory of a kind of device."""
        return self

    def type_name(self, layout: str) -> str:
        """What a `.zse` file calls a tensor of this scheme."""
        return self.name

    @property
    def column_unit(self) -> int:
        """Columns that share nothing with those before begin at multiples of this."""
        return self.step

    def fits(self, k: int) -> bool:
        """Whether rows of `k` columns can be stored."""
        return k > 0 and k % self.step == 0

    def check_columns(self, k: int) -> None:
        """ValueError where rows of `k` columns cannot be stored."""
        if not self.fits(k):
            raise ValueError(f"{self.name} needs a multiple of {self.step} columns, got {k}")

    def groups(self, k: int) -> int:
        """Groups of one row of `k` columns. ValueError if the group does not divide k."""
        return 0

    def nbytes(self, n: int, k: int, layout: str | None = None) -> int:
        """Bytes of all planes together, without alignment."""
        return sum(plane.nbytes for plane in self.planes(n, k, layout or self.layouts[0]))

    def cut(self, planes: "dict[str, Any]", k: int, start: int, stop: int) -> "dict[str, Any]":
        """The planes (NumPy) of columns [start, stop) of rows of k. What rows have one of, these have too. ValueError for a
        cut between columns that belong together."""
        if start % self.column_unit or (stop % self.column_unit and stop != k):
            raise ValueError(
                f"{self.name}: a cut at columns {start} and {stop}, which are no multiples of {self.column_unit}"
            )
        found = {}
        for name, plane in planes.items():
            lines = plane.shape[1] if plane.ndim > 1 else 1
            per = -(-k // lines)
            found[name] = plane if lines == 1 else plane[:, start // per : -(-stop // per)]
        return found

    def check_layout(self, layout: str) -> None:
        if layout not in self.layouts:
            raise ValueError(f"{self.name} has no layout {layout}, only {', '.join(self.layouts)}")
