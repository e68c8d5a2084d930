"""Rows of a model's matrices in NumPy, whatever the file stores: as f32, as affine groups, as dense values, or as the
planes of any scheme.

Reads only the rows that are asked for, so that a conversion's memory does not depend on the size of a tensor.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zse.errors import UnsupportedError
from zse.formats import bitsandbytes, column_order, quantized_fp4
from zse.formats.ggml import BLOCKS
from zse.formats.gguf_blocks import dequantize, to_scheme
from zse.formats.latent import LATENT
from zse.formats.quantized import INTEGERS
from zse.formats.quantized_rows import CheckpointRows
from zse.formats.source import BNB4_LAYOUT, IN_TURN, ModelSource, TensorInfo
from zse.quant.affine import AffineArrays, AffineScheme
from zse.quant.lut4 import Lut4Arrays, Lut4Scheme
from zse.quant.pack import NUMPY_DTYPE, e4m3_to_f32, widen
from zse.quant.quantize import MANY_THREADS_ELEMENTS
from zse.quant.scheme import (
    FP8_SCALINGS,
    LAYOUT,
    DenseScheme,
    Fp8Scheme,
    Plane,
    Scheme,
    SuperblockScheme,
    rows_per_line,
)
from zse.quant.superblock import SuperblockArrays

ROW_UNIT = 128  # whole tiles, and whole blocks of fp8
FP8_TYPES = tuple(Fp8Scheme(scaling).name for scaling in FP8_SCALINGS)
STORED_AS = {"e4m3": "F8_E4M3", "f32": "F32"}  # safetensors' names of the types of fp8 planes
FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class Rows(NamedTuple):
    """Rows [start, stop) of a matrix. order: row i is the stored row order[i]; it maps every aligned run of
    `order_span` rows onto itself (a head of attn_q), which bounds what is read."""

    source: ModelSource
    info: TensorInfo
    start: int
    stop: int
    order: Sequence[int] | None = None
    order_span: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.info.shape[1:])

    def raw(self) -> bytes:
        """The bytes of the rows (layouts "rows", "ggml" and IN_TURN)."""
        info, span = self.info, self.order_span
        if info.layout == IN_TURN:
            return self._in_turn()
        row_bytes = info.nbytes // info.shape[0]
        if self.order is None:
            return self.source.read(info, self.start * row_bytes, (self.stop - self.start) * row_bytes)
        low, high = self.start // span * span, min(-(-self.stop // span) * span, info.shape[0])
        rows = np.frombuffer(Rows(self.source, info, low, high).raw(), np.uint8).reshape(high - low, -1)
        return rows[np.asarray(self.order[self.start : self.stop]) - low].tobytes()

    def _in_turn(self) -> bytes:
        """The rows that lie in turn with others', taken out of all of them; of turned matrices whole ones are read."""
        info, turn = self.info, self.info.turn
        line, unit = info.nbytes // info.shape[0], turn.matrix or 1
        low, high = self.start // unit * unit, min(-(-self.stop // unit) * unit, info.shape[0])
        raw = self.source.read(info, low * line, (high - low) * line)
        if not turn.matrix:
            return np.frombuffer(raw, np.uint8).reshape(high - low, turn.step, -1)[:, turn.first].tobytes()
        values = np.frombuffer(raw, NUMPY_DTYPE[FLOATS[info.type]])
        if turn.in_blocks:
            values = values.reshape(-1, info.shape[1], turn.step, unit)[:, :, turn.first]
        else:
            values = values.reshape(-1, info.shape[1], unit, turn.step)[..., turn.first]
        rows = values.swapaxes(1, 2).reshape(-1, info.shape[1])
        return rows[self.start - low : self.stop - low].tobytes()

    def planes(self) -> dict[str, NDArray]:
        """The parts of the planes that hold the rows. start is a multiple of 16 (r16) or 128 (fp8)."""
        info, planes = self.info, {}
        for plane, file, offset in info.placed():
            rows = rows_per_line(plane, info.layout, info.shape[0])
            line_bytes = plane.nbytes // plane.shape[0]
            first, last = self.start // rows, -(-self.stop // rows)
            if info.parts is not None and info.parts[plane.name].type != STORED_AS.get(plane.dtype):
                planes[plane.name] = _narrow_scale(self.source, info.parts[plane.name], plane)[first:last]
                continue
            data = file.read(offset + first * line_bytes, (last - first) * line_bytes, info.name)
            values = np.frombuffer(data, np.dtype(NUMPY_DTYPE[plane.dtype]))
            planes[plane.name] = values.reshape(last - first, *plane.shape[1:])
        return planes

    def arrays(self) -> AffineArrays | Lut4Arrays | SuperblockArrays:
        """As the groups that the tensor has or maps onto. r16: start is a multiple of 16."""
        info = self.info
        if info.layout in INTEGERS:
            return CheckpointRows(self.source, info).arrays(self.start, self.stop)
        if info.layout in quantized_fp4.LAYOUTS:
            q, scale = (self._replace(info=info.parts[role]).raw() for role in ("q", "scale"))
            factor = self.source.read(info.parts["factor"]) if "factor" in info.parts else b""
            return quantized_fp4.to_lut4(info, q, scale, factor)
        if info.layout == BNB4_LAYOUT:
            return bitsandbytes.arrays_of(self.source, info, self.start, self.stop)
        if info.layout == "r16":
            assert isinstance(info.scheme, AffineScheme | Lut4Scheme | SuperblockScheme)
            return info.scheme.unpack(self.planes(), self.stop - self.start, info.shape[1])
        return to_scheme(info.type, self.raw(), (self.stop - self.start, info.shape[1]), self._factor())

    def _factor(self) -> NDArray:
        """f32 [rows]: what multiplies them beside the blocks' own scales."""
        factor, count = self.info.factor, self.stop - self.start
        if factor is None:
            return np.ones(count, np.float32)
        values = np.frombuffer(self.source.read(factor), np.float32)
        return values[np.arange(self.start, self.stop) * len(values) // self.info.shape[0]]

    def f32(self) -> NDArray:
        """As f32, exactly what the file means. UnsupportedError for types that are no weights."""
        info = self.info
        if info.layout == LATENT:
            return self._latent()
        if info.layout in INTEGERS:
            return inputs_of(info, self.arrays().dequantize())
        if info.layout in quantized_fp4.LAYOUTS:
            return self.arrays().dequantize()
        if info.layout == LAYOUT or info.type in FP8_TYPES:
            values = info.scheme.dequantize(self.planes(), self.stop - self.start, info.shape[1], info.layout)
            return inputs_of(info, values)
        if info.layout == "mxfp8":
            return self._powers_of_two()
        if info.layout == BNB4_LAYOUT:
            return self._tables()
        if info.type not in FLOATS and info.type not in BLOCKS:
            raise UnsupportedError(f"tensor {info.name}: type", info.type, BLOCKS)
        return dequantize(info.type, self.raw(), self.shape, self._factor())

    def _powers_of_two(self) -> NDArray:
        """mxfp8: e4m3 numbers with a factor 2**(byte - 127) for some columns."""
        parts, (_, k) = self.info.parts, self.info.shape
        codes, factors = (
            np.frombuffer(
                Rows(self.source, parts[role], self.start, self.stop, self.order, self.order_span).raw(), np.uint8
            )
            for role in ("w", "scale")
        )
        wide = e4m3_to_f32(codes).reshape(len(factors), -1)
        return np.ldexp(wide, factors.astype(np.int32)[:, None] - 127).reshape(-1, k)

    def _tables(self) -> NDArray:
        """bitsandbytes: whole heads are made, and put in order in memory."""
        if self.order is None:
            return bitsandbytes.rows_of(self.source, self.info, self.start, self.stop)
        span = self.order_span
        low, high = self.start // span * span, min(-(-self.stop // span) * span, self.info.shape[0])
        places = np.asarray(self.order[self.start : self.stop]) - low
        return bitsandbytes.rows_of(self.source, self.info, low, high)[places]

    def _latent(self) -> NDArray:
        """f32 rows of a matrix that latent.py takes out of a stored one, made of whole heads of that."""
        cut = self.info.planes
        first, last = self.start // cut.rows, -(-self.stop // cut.rows)
        stored = self.info.parts["stored"]
        low = first * cut.stored // ROW_UNIT * ROW_UNIT
        high = min(-(-last * cut.stored // ROW_UNIT) * ROW_UNIT, stored.shape[0])
        rows = Rows(self.source, stored, low, high).f32()[first * cut.stored - low :][: (last - first) * cut.stored]
        heads = rows.reshape(last - first, cut.stored, -1)[:, cut.begin : cut.end]
        matrix = (heads.swapaxes(1, 2) if cut.turned else heads).reshape(-1, self.info.shape[1])
        return np.ascontiguousarray(matrix[self.start - first * cut.rows :][: self.stop - self.start])

    def dense(self) -> NDArray:
        """Of a tensor of floating-point numbers in its own dtype (bf16 as u16), bit for bit."""
        info = self.info
        if info.layout == "r16":
            assert isinstance(info.scheme, DenseScheme)
            return info.scheme.unpack(self.planes(), self.stop - self.start, info.shape[1])
        return np.frombuffer(self.raw(), NUMPY_DTYPE[FLOATS[info.type]]).reshape(self.shape)


def inputs_of(info: TensorInfo, values: NDArray) -> NDArray:
    """[R, K] with its columns as they are stored → in the order of the layer's inputs."""
    if info.order is None:
        return values
    found = np.empty_like(values)
    found[:, column_order.order_of(info.order)] = values
    return found


def _narrow_scale(source: ModelSource, part: TensorInfo, plane: Plane) -> NDArray:
    """The f32 plane of scales that a checkpoint stores in another type."""
    values = np.frombuffer(source.read(part), NUMPY_DTYPE[FLOATS[part.type]])
    return widen(values, FLOATS[part.type]).reshape(plane.shape)


def rows_at_once(info: TensorInfo, elements: int) -> int:
    """How many rows of a tensor are made at once, of about so many elements: a multiple of ROW_UNIT, and of matrices
    that are stored turned whole ones, which each piece reads."""
    per_row = max(1, info.num_elements // info.shape[0])
    rows = max(ROW_UNIT, elements // per_row // ROW_UNIT * ROW_UNIT)
    if info.turn is None or not info.turn.matrix:
        return rows
    whole = math.lcm(info.turn.matrix, ROW_UNIT)
    return -(-rows // whole) * whole


def prepare(source: ModelSource, info: TensorInfo) -> "CheckpointRows | None":
    """What planes_of_rows() wants to have been read once, or None."""
    return CheckpointRows(source, info) if info.layout in INTEGERS else None


def planes_of_rows(
    rows: Rows,
    scheme: Scheme,
    layout: str,
    *,
    search: bool = True,
    prepared: CheckpointRows | None = None,
    threads: int = 1,
    **options,
) -> dict[str, NDArray]:
    """The planes of the rows in `scheme` and `layout`, whatever the file stores: copied where it has them, packed where
    it has the numbers, rounded or quantized where it has others.

    start: a multiple of 16, of 128 for fp8. search: for the best clipping (zse.quant.quantize). prepared: prepare() of
    the tensor. threads: how many call this at once. options: more of the scheme's quantize(). ValueError for values
    that the scheme cannot hold."""
    info, start, stop, order = rows.info, rows.start, rows.stop, rows.order
    if order is not None and (prepared is not None or info.layout in (LAYOUT, BNB4_LAYOUT) or info.type in FP8_TYPES):
        # Their rows do not lie apart: whole heads are made, and put in order in memory.
        unit = math.lcm(rows.order_span, ROW_UNIT)
        low, high = start // unit * unit, min(-(-stop // unit) * unit, info.shape[0])
        heads = Rows(rows.source, info, low, high)
        planes = planes_of_rows(heads, scheme, layout, search=search, prepared=prepared, threads=threads, **options)
        places = np.asarray(order[start:stop]) - low
        return scheme.take(planes, places, high - low, info.shape[1], layout, start - low)
    if info.layout == layout and order is None and not info.is_dense and info.scheme == scheme:
        return rows.planes()
    if prepared is not None and info.scheme == scheme:
        return prepared.arrays(start, stop).pack()
    if info.layout == "ggml" and info.scheme == scheme:
        return rows.arrays().pack()
    is_k_type = info.layout in ("ggml", LAYOUT) and isinstance(info.scheme, SuperblockScheme)
    if (is_k_type or isinstance(scheme, Lut4Scheme)) and scheme in (info.scheme, info.scheme.loaded("gpu")):
        arrays = rows.arrays() if prepared is None else prepared.arrays(start, stop)
        assert isinstance(arrays, Lut4Arrays | SuperblockArrays)
        return (arrays if arrays.scheme == scheme else arrays.narrowed()).pack()
    if isinstance(scheme, DenseScheme) and (info.is_dense or info.layout == LAYOUT) and info.scheme == scheme:
        return scheme.pack(rows.dense(), layout)
    if isinstance(scheme, Fp8Scheme) and scheme.scaling == "row" and info.type == "fp8-tensor":
        # Every row has the scale of all: the numbers are the same.
        planes = rows.planes()
        return {"w": planes["w"], "scale": np.full(stop - start, planes["scale"][0], np.float32)}
    values = rows.f32() if prepared is None else inputs_of(info, prepared.arrays(start, stop).dequantize())
    pieces = {"at_once": MANY_THREADS_ELEMENTS} if threads > 4 else {}
    return scheme.quantize(values, layout, search=search, **pieces, **options)
