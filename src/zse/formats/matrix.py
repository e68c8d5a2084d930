"""Rows of a model's matrices in NumPy, whatever the file stores: as f32, as affine groups, as dense values, or as the
planes of any scheme.

Reads only the rows that are asked for, so that a conversion's memory does not depend on the size of a tensor.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zse.errors import UnsupportedError
from zse.formats.ggml import BLOCKS
from zse.formats.gguf_blocks import dequantize, to_affine
from zse.formats.quantized_rows import LAYOUTS as CHECKPOINTS
from zse.formats.quantized_rows import CheckpointRows
from zse.formats.source import ModelSource, TensorInfo
from zse.quant.pack import (
    NUMPY_DTYPE,
    AffineArrays,
    bf16_to_f32,
    dequantize_fp8,
    f32_to_bf16,
    pack,
    pack_dense,
    unpack,
    unpack_dense,
)
from zse.quant.quantize import MANY_THREADS_ELEMENTS, quantize, quantize_fp8
from zse.quant.scheme import (
    FP8_BLOCK,
    FP8_SCALINGS,
    LAYOUT,
    AffineScheme,
    DenseScheme,
    Fp8Scheme,
    Plane,
    Scheme,
    rows_per_line,
)

ROW_UNIT = 128  # whole tiles, and whole blocks of fp8
FP8_TYPES = tuple(Fp8Scheme(scaling).name for scaling in FP8_SCALINGS)
STORED_AS = {"e4m3": "F8_E4M3", "f32": "F32"}  # safetensors' names of the types of fp8 planes
FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def row_bytes(info: TensorInfo) -> int:
    """Bytes of one row (layouts "rows" and "ggml")."""
    return info.nbytes // info.shape[0]


def read_raw_rows(
    source: ModelSource,
    info: TensorInfo,
    start: int,
    stop: int,
    order: Sequence[int] | None = None,
    order_span: int = 1,
) -> bytes:
    """The stored bytes of rows [start, stop). With `order`, row i is the stored row order[i]; order maps every
    aligned run of `order_span` rows onto itself (a head of attn_q), which bounds what is read."""
    if order is None:
        return source.read(info, start * row_bytes(info), (stop - start) * row_bytes(info))
    low, high = start // order_span * order_span, min(-(-stop // order_span) * order_span, info.shape[0])
    rows = np.frombuffer(read_raw_rows(source, info, low, high), np.uint8).reshape(high - low, -1)
    return rows[np.asarray(order[start:stop]) - low].tobytes()


def read_planes(source: ModelSource, info: TensorInfo, start: int, stop: int) -> dict[str, NDArray]:
    """The parts of a tensor's planes that hold rows [start, stop). start is a multiple of 16 (r16) or 128 (fp8)."""
    planes = {}
    for plane, file, offset in info.placed():
        rows = rows_per_line(plane, info.layout, info.shape[0])
        line_bytes = plane.nbytes // plane.shape[0]
        first, last = start // rows, -(-stop // rows)
        dtype = np.dtype(NUMPY_DTYPE[plane.dtype])
        if info.parts is not None and info.parts[plane.name].type != STORED_AS.get(plane.dtype):
            planes[plane.name] = _narrow_scale(source, info.parts[plane.name], plane)[first:last]
            continue
        data = file.read(offset + first * line_bytes, (last - first) * line_bytes, info.name)
        planes[plane.name] = np.frombuffer(data, dtype).reshape(last - first, *plane.shape[1:])
    return planes


def _narrow_scale(source: ModelSource, part: TensorInfo, plane: Plane) -> NDArray:
    """The f32 plane of scales that a checkpoint stores in another type."""
    values = np.frombuffer(source.read(part), NUMPY_DTYPE[FLOATS[part.type]])
    return widen(values, FLOATS[part.type]).reshape(plane.shape)


def rows_affine(
    source: ModelSource,
    info: TensorInfo,
    start: int,
    stop: int,
    order: Sequence[int] | None = None,
    order_span: int = 1,
) -> AffineArrays:
    """Rows [start, stop) as the affine groups that the tensor has or maps onto. r16: start is a multiple of 16."""
    if info.layout in CHECKPOINTS:
        return CheckpointRows(source, info).affine(start, stop)
    if info.layout == "r16":
        scheme = info.scheme
        assert isinstance(scheme, AffineScheme)
        planes = read_planes(source, info, start, stop)
        return unpack(scheme, planes, stop - start, info.shape[1])
    raw = read_raw_rows(source, info, start, stop, order, order_span)
    return to_affine(info.type, raw, (stop - start, info.shape[1]))


def rows_f32(
    source: ModelSource,
    info: TensorInfo,
    start: int,
    stop: int,
    order: Sequence[int] | None = None,
    order_span: int = 1,
) -> NDArray:
    """Rows [start, stop) as f32, exactly what the file means. UnsupportedError for types that are no weights."""
    if info.layout in CHECKPOINTS:
        return rows_affine(source, info, start, stop).dequantize()
    if info.layout == "rows" and not info.is_dense and info.type in FP8_TYPES:
        planes = read_planes(source, info, start, stop)
        scheme = info.scheme
        assert isinstance(scheme, Fp8Scheme)
        return dequantize_fp8(scheme, planes, stop - start, info.shape[1])
    if info.layout == "r16":
        stored = info.scheme
        if not isinstance(stored, DenseScheme):
            return rows_affine(source, info, start, stop).dequantize()
        planes = read_planes(source, info, start, stop)
        return widen(unpack_dense(stored, planes, stop - start, info.shape[1]), stored.dtype)
    if info.type not in FLOATS and info.type not in BLOCKS:
        raise UnsupportedError(f"tensor {info.name}: type", info.type, BLOCKS)
    shape = (stop - start, *info.shape[1:])
    return dequantize(info.type, read_raw_rows(source, info, start, stop, order, order_span), shape)


def rows_dense(
    source: ModelSource,
    info: TensorInfo,
    start: int,
    stop: int,
    order: Sequence[int] | None = None,
    order_span: int = 1,
) -> NDArray:
    """Rows [start, stop) of an F32, F16 or BF16 tensor in its own dtype (bf16 as u16), bit for bit."""
    raw = read_raw_rows(source, info, start, stop, order, order_span)
    return np.frombuffer(raw, NUMPY_DTYPE[FLOATS[info.type]]).reshape(stop - start, *info.shape[1:])


def widen(values: NDArray, dtype: str) -> NDArray:
    """Values of a dense dtype (bf16 as u16 bit patterns) -> f32."""
    return bf16_to_f32(values) if dtype == "bf16" else values.astype(np.float32)


def narrow(values: NDArray, scheme: DenseScheme) -> NDArray:
    """f32 -> values of the scheme's dtype, rounded to nearest; ValueError where a finite value overflows f16."""
    if scheme.dtype == "bf16":
        return f32_to_bf16(values)
    if scheme.dtype == "f16" and np.abs(values).max(initial=0) > 65504:
        raise ValueError("a value does not fit in f16; use bf16")
    return values.astype(NUMPY_DTYPE[scheme.dtype])


def take_rows(
    planes: dict[str, NDArray], scheme: Scheme, layout: str, rows: NDArray, shape: tuple[int, int], start: int
) -> dict[str, NDArray]:
    """The planes of `rows` of a matrix of `shape` that `planes` are. start: where they would stand in it; for fp8 in blocks
    they are of the same blocks. ValueError where they are not."""
    if isinstance(scheme, AffineScheme):
        arrays = unpack(scheme, planes, *shape)
        offset = None if arrays.offset is None else arrays.offset[rows]
        return pack(AffineArrays(scheme, arrays.q[rows], arrays.scale[rows], offset))
    if isinstance(scheme, DenseScheme):
        return pack_dense(scheme, unpack_dense(scheme, planes, *shape, layout)[rows], layout)
    scale = planes["scale"]
    if scheme.scaling == "row":
        scale = scale[rows]
    if scheme.scaling == "block":
        blocks = rows // FP8_BLOCK
        if not np.array_equal(blocks, np.arange(start, start + len(rows)) // FP8_BLOCK):
            raise ValueError("rows of a head that lie in several blocks with a scale each cannot be put in order")
        scale = scale[start // FP8_BLOCK : -(-(start + len(rows)) // FP8_BLOCK)]
    return {"w": planes["w"][rows], "scale": scale}


def prepare(source: ModelSource, info: TensorInfo) -> "CheckpointRows | None":
    """What planes_of_rows() wants to have been read once, or None."""
    return CheckpointRows(source, info) if info.layout in CHECKPOINTS else None


def planes_of_rows(
    source: ModelSource,
    info: TensorInfo,
    scheme: Scheme,
    layout: str,
    start: int,
    stop: int,
    *,
    order: Sequence[int] | None = None,
    order_span: int = 1,
    search: bool = True,
    prepared: CheckpointRows | None = None,
    threads: int = 1,
) -> dict[str, NDArray]:
    """The planes of rows [start, stop) in `scheme` and `layout`, whatever the file stores: copied where it has them,
    packed where it has the numbers, rounded or quantized where it has others.

    start: a multiple of 16, of 128 for fp8. search: for the best clipping (zse.quant.quantize). prepared: prepare() of
    the tensor. threads: how many call this at once. ValueError for values that the scheme cannot hold.
    """
    if order is not None and (prepared is not None or info.layout == LAYOUT or info.type in FP8_TYPES):
        # Their rows do not lie apart: whole heads are made, and put in order in memory.
        unit = math.lcm(order_span, ROW_UNIT)
        low, high = start // unit * unit, min(-(-stop // unit) * unit, info.shape[0])
        options: dict = dict(search=search, prepared=prepared, threads=threads)
        planes = planes_of_rows(source, info, scheme, layout, low, high, **options)
        rows = np.asarray(order[start:stop]) - low
        return take_rows(planes, scheme, layout, rows, (high - low, info.shape[1]), start - low)
    where = (source, info, start, stop, order, order_span)
    if info.layout == layout and order is None and not info.is_dense and info.scheme == scheme:
        return read_planes(source, info, start, stop)
    if prepared is not None and info.scheme == scheme:
        return pack(prepared.affine(start, stop))
    if info.layout == "ggml" and info.scheme == scheme:
        return pack(rows_affine(*where))
    if isinstance(scheme, DenseScheme) and info.is_dense and info.type == scheme.dtype.upper():
        return pack_dense(scheme, rows_dense(*where), layout)
    if isinstance(scheme, DenseScheme) and info.layout == LAYOUT and info.scheme == scheme:
        stored = unpack_dense(scheme, read_planes(source, info, start, stop), stop - start, info.shape[1])
        return pack_dense(scheme, stored, layout)
    if isinstance(scheme, Fp8Scheme) and scheme.scaling == "row" and info.type == "fp8-tensor":
        # Every row has the scale of all: the numbers are the same.
        planes = read_planes(source, info, start, stop)
        return {"w": planes["w"], "scale": np.full(stop - start, planes["scale"][0], np.float32)}
    values = rows_f32(*where) if prepared is None else prepared.affine(start, stop).dequantize()
    if isinstance(scheme, DenseScheme):
        return pack_dense(scheme, narrow(values, scheme), layout)
    if isinstance(scheme, Fp8Scheme):
        return quantize_fp8(values, scheme)
    pieces = {"at_once": MANY_THREADS_ELEMENTS} if threads > 4 else {}
    return pack(quantize(values, scheme, search=search, **pieces))
