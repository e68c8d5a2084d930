"""Columns of a wider array as an operation's input: a product often gives what several operations read."""

from typing import Any, NamedTuple

from zse.kernels.op import check, require
from zse.lazy import numpy as np
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy


class Columns(NamedTuple):
    """`width` columns from number `first` on of `whole`, f32 [M, W]: a Tensor, on the host an array."""

    whole: Any
    first: int
    width: int


def source(name: str, value: "Tensor | Columns", rows: Any, width: int) -> tuple[Tensor, int]:
    """(where row 0 begins, numbers from row to row) of an f32 [rows, width] Tensor or Columns. Raises TypeError or
    ValueError for others."""
    if not isinstance(value, Columns):
        check(name, value, "f32", rows, width)
        return value, width
    whole = value.whole
    check(name, whole, "f32", rows, None)
    stride = whole.shape[1]
    fits = value.width == width and 0 <= value.first <= stride - width
    require(fits, f"{name}: columns {value.first} to {value.first + value.width} of {stride}, expected {width}")
    return whole._replace(offset=whole.offset + 4 * value.first), stride


def wide(value: Any) -> "numpy.ndarray":
    """The numbers of a case's input, float64 [M, width]."""
    if isinstance(value, Columns):
        value = value.whole[:, value.first : value.first + value.width]
    return np.asarray(value, np.float64)


def embed(rng: Any, array: "numpy.ndarray", before: int, after: int) -> Columns:
    """A case's input as columns of a wider array, with NaN beside it."""
    rows, width = array.shape
    whole = np.full((rows, before + width + after), np.nan, np.float32)
    whole[:, before : before + width] = array
    return Columns(whole, before, width)
