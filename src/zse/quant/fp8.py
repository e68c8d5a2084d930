"""8-bit floating-point weights with f32 scales, and their content in NumPy."""

from collections import namedtuple
from collections.abc import Mapping

from zse.errors import UnsupportedError
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.dense import DenseScheme
from zse.quant.plane import ROWS, TILE_ROWS, Plane, StoredScheme, cached, plane

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

FP8_SCALINGS = ("row", "tensor", "block")
FP8_BLOCK = 128  # rows and columns that share a scale in block scaling (DeepSeek-V3 report, section 3.3.2)
E4M3_MAX = 448.0


class Fp8Scheme(namedtuple("Fp8Scheme", "scaling"), StoredScheme):
    """w = scale * q with q in e4m3 (OCP 8-bit floating point, largest value 448) and f32 scales, layout rows.

    scaling: "row" (one scale per output), "tensor" (one in all) or "block" (one per 128 x 128). Planes: w e4m3 [N, K],
    scale f32 [N], [1] or [ceil(N/128), ceil(K/128)].
    """

    __slots__ = ()
    kind = "fp8"
    layouts = (ROWS,)
    in_memory = {"gpu": ROWS}
    numbers = "w"
    element = "e4m3"
    step = 16  # columns: 16-byte loads and tensor maps

    def __new__(cls, scaling: str):
        if scaling not in FP8_SCALINGS:
            raise UnsupportedError("fp8 scaling", scaling, FP8_SCALINGS)
        return super().__new__(cls, scaling)

    @property
    def name(self) -> str:
        return f"fp8-{self.scaling}"

    @property
    def row_unit(self) -> int:
        return FP8_BLOCK if self.scaling == "block" else TILE_ROWS

    @property
    def column_unit(self) -> int:
        return FP8_BLOCK if self.scaling == "block" else self.step

    @property
    def scale_code(self) -> int:
        return FP8_SCALINGS.index(self.scaling)

    def loaded(self, family: str) -> "DenseScheme | Fp8Scheme":
        if family not in self.in_memory:
            return DenseScheme("bf16")  # 2**-9 of rounding beside the 2**-4 that the numbers have already
        # The same numbers, and matrices of different scales can be joined.
        return Fp8Scheme("row") if self.scaling == "tensor" else self

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        if self.scaling == "block":
            return -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
        return (n if self.scaling == "row" else 1,)

    @cached
    def planes(self, n: int, k: int, layout: str = ROWS) -> tuple[Plane, ...]:
        """w and scale."""
        self.check_layout(layout)
        self.check_columns(k)
        return plane("w", "e4m3", n, k), plane("scale", "f32", *self.scale_shape(n, k))

    def quantize(self, w: "NDArray", layout: str = ROWS, **options) -> "dict[str, NDArray]":
        """The largest magnitude of a scale's range becomes 448. ValueError for NaN and infinities. options: other
        schemes have some."""
        n, k = w.shape
        w = np.ascontiguousarray(w, np.float32)
        peak = np.abs(w).max(axis=1, initial=0)
        if not np.isfinite(peak).all():
            raise ValueError("a value is NaN or infinite")
        if self.scaling == "block":
            rows, columns = self.scale_shape(n, k)
            padded = np.zeros((rows * FP8_BLOCK, columns * FP8_BLOCK), np.float32)
            padded[:n, :k] = np.abs(w)
            peak = padded.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK).max(axis=(1, 3))
        elif self.scaling == "tensor":
            peak = peak.max(initial=0, keepdims=True)
        # A range of zeros takes any scale; the smallest normal one keeps the division finite.
        scale = np.maximum(peak / np.float32(E4M3_MAX), np.float32(2**-126)).astype(np.float32)
        return {"w": pack.f32_to_e4m3(w / self._wide(scale, n, k)), "scale": scale}

    def _wide(self, scale: "NDArray", n: int, k: int) -> "NDArray":
        """The scale of each element: [n, k], or [n, 1] or [1, 1], which mean the same."""
        if self.scaling != "block":
            return scale[:, None]
        return np.repeat(np.repeat(scale, FP8_BLOCK, axis=0)[:n], FP8_BLOCK, axis=1)[:, :k]

    def dequantize(self, planes: "Mapping[str, NDArray]", n: int, k: int, layout: str = ROWS) -> "NDArray":
        """scale * q, rounded once."""
        given = pack.check_planes(self, planes, n, k, layout)
        return pack.e4m3_to_f32(given["w"]) * self._wide(given["scale"], n, k)

    def take(self, planes, rows: "NDArray", n: int, k: int, layout: str, start: int) -> "dict[str, NDArray]":
        """Of block scaling the rows are of the blocks that would stand from `start` on. ValueError where they are
        not."""
        scale = planes["scale"]
        if self.scaling == "row":
            scale = scale[rows]
        if self.scaling == "block":
            blocks = rows // FP8_BLOCK
            if not np.array_equal(blocks, np.arange(start, start + len(rows)) // FP8_BLOCK):
                raise ValueError("rows of a head that lie in several blocks with a scale each cannot be put in order")
            scale = scale[start // FP8_BLOCK : -(-(start + len(rows)) // FP8_BLOCK)]
        return {"w": planes["w"][rows], "scale": scale}

    def random(self, rng: "Generator", n: int, k: int, layout: str = ROWS) -> "dict[str, NDArray]":
        w = pack.f32_to_e4m3(rng.standard_normal((n, k)).astype(np.float32) * 32)
        return {"w": w, "scale": ((0.5 + rng.random(self.scale_shape(n, k))) / 32).astype(np.float32)}
