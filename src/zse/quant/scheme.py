"""How weights are stored in memory: the list of all schemes, and the planes of one in files and memory.

A scheme is a class with the attributes of zse.quant.plane.StoredScheme, in a file of its own, and its values in
SCHEMES."""

from zse.errors import UnsupportedError
from zse.quant.affine import BITS, GROUPS, AffineScheme
from zse.quant.dense import DENSE_DTYPES, DenseScheme
from zse.quant.fp8 import FP8_BLOCK, FP8_SCALINGS, Fp8Scheme
from zse.quant.lut4 import LUT4_SCHEMES, Lut4Scheme
from zse.quant.plane import BLOCK_COLUMNS, LAYOUT, LAYOUTS, PLANE_ALIGN, ROWS, TILE_ROWS, Plane, tiles
from zse.quant.superblock import SUPERBLOCK_SCHEMES, SuperblockScheme

__all__ = ["BLOCK_COLUMNS", "LAYOUT", "LAYOUTS", "PLANE_ALIGN", "ROWS", "TILE_ROWS", "Plane", "tiles"]

Scheme = AffineScheme | DenseScheme | Fp8Scheme | Lut4Scheme | SuperblockScheme


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
SCHEMES += LUT4_SCHEMES
SCHEMES += SUPERBLOCK_SCHEMES
_BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
SCHEME_NAMES = tuple(_BY_NAME)
