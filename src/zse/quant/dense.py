"""Weights as floating-point numbers, and their content in NumPy."""

from collections import namedtuple
from collections.abc import Mapping

from zse.errors import UnsupportedError
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.plane import LAYOUT, LAYOUTS, ROWS, TILE_ROWS, Plane, StoredScheme, cached, plane, tiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

DENSE_DTYPES = ("f32", "f16", "bf16")
F16_MAX = 65504


class DenseScheme(namedtuple("DenseScheme", "dtype"), StoredScheme):
    """One plane `w`, [T, K, 16] in layout r16 for the CPU's kernels, [N, K] in layout rows for a GPU's.

    dtype: f32, f16 or bf16.
    """

    __slots__ = ()
    kind = "dense"
    layouts = LAYOUTS
    in_memory = {"cpu": LAYOUT, "gpu": ROWS}
    forms = ("f32",)
    products = "zse.kernels.matmul_dense"
    numbers = "w"
    step = 1

    def __new__(cls, dtype: str):
        if dtype not in DENSE_DTYPES:
            raise UnsupportedError("dense weight dtype", dtype, DENSE_DTYPES)
        return super().__new__(cls, dtype)

    @property
    def name(self) -> str:
        return self.dtype

    element = name

    def type_name(self, layout: str) -> str:
        return self.name.upper() if layout == ROWS else self.name  # plain numbers, under their usual name

    @cached
    def planes(self, n: int, k: int, layout: str = LAYOUT) -> tuple[Plane, ...]:
        """The one plane `w` of N x K."""
        self.check_layout(layout)
        self.check_columns(k)
        if layout == ROWS:
            return (plane("w", self.dtype, n, k),)
        return (plane("w", self.dtype, tiles(n), k, TILE_ROWS),)

    def pack(self, w: "NDArray", layout: str = LAYOUT) -> "dict[str, NDArray]":
        """{"w": [T, K, 16] or, in layout rows, [N, K]} of w [N, K]: f32, f16, or u16 for bf16, as the dtype says."""
        expected = pack.NUMPY_DTYPE[self.dtype]
        if w.ndim != 2 or w.dtype != expected:
            raise ValueError(f"w: {w.dtype} {w.shape}, expected {np.dtype(expected).name} [N, K]")
        return {"w": np.ascontiguousarray(w) if layout == ROWS else pack.tile(w)}

    def unpack(self, planes: "Mapping[str, NDArray]", n: int, k: int, layout: str = LAYOUT) -> "NDArray":
        """The inverse of pack()."""
        w = pack.check_planes(self, planes, n, k, layout)["w"]
        return w if layout == ROWS else pack.untile(w, n)

    def quantize(self, w: "NDArray", layout: str = LAYOUT, **options) -> "dict[str, NDArray]":
        """Rounded to nearest. options: other schemes have some."""
        if self.dtype == "f16" and np.abs(w).max(initial=0) > F16_MAX:
            raise ValueError("a value does not fit in f16; use bf16")
        return self.pack(pack.narrow(w, self.dtype), layout)

    def dequantize(self, planes: "Mapping[str, NDArray]", n: int, k: int, layout: str = LAYOUT) -> "NDArray":
        return pack.widen(self.unpack(planes, n, k, layout), self.dtype)

    def take(self, planes, rows: "NDArray", n: int, k: int, layout: str, start: int) -> "dict[str, NDArray]":
        return self.pack(self.unpack(planes, n, k, layout)[rows], layout)

    def random(self, rng: "Generator", n: int, k: int, layout: str = LAYOUT) -> "dict[str, NDArray]":
        return self.pack(pack.narrow(rng.standard_normal((n, k)).astype(np.float32), self.dtype), layout)
