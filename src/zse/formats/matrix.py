"""Rows of a model's matrices in NumPy, whatever the file stores: as f32, as affine groups, or as dense values.

Reads only the rows that are asked for, so that a conversion's memory does not depend on the size of a tensor.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zse.errors import UnsupportedError
from zse.formats.gguf import BLOCKS
from zse.formats.gguf_blocks import dequantize, to_affine
from zse.formats.source import ModelSource, TensorInfo
from zse.quant.pack import (
    NUMPY_DTYPE,
    AffineArrays,
    bf16_to_f32,
    f32_to_bf16,
    unpack,
    unpack_dense,
)
from zse.quant.scheme import TILE_ROWS, AffineScheme, DenseScheme, placed_planes, tiles

FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def row_bytes(info: TensorInfo) -> int:
    """Bytes of one row (layouts "rows" and "ggml")."""
    return info.nbytes // info.shape[0]


def read_raw_rows(source: ModelSource, info: TensorInfo, start: int, stop: int,
                  order: Sequence[int] | None = None, order_span: int = 1) -> bytes:
    """The stored bytes of rows [start, stop). With `order`, row i is the stored row order[i]; order maps every
    aligned run of `order_span` rows onto itself (a head of attn_q), which bounds what is read."""
    if order is None:
        return source.read(info, start * row_bytes(info), (stop - start) * row_bytes(info))
    low, high = start // order_span * order_span, min(-(-stop // order_span) * order_span, info.shape[0])
    rows = np.frombuffer(read_raw_rows(source, info, low, high), np.uint8).reshape(high - low, -1)
    return rows[np.asarray(order[start:stop]) - low].tobytes()


def read_planes(source: ModelSource, info: TensorInfo, start: int, stop: int) -> dict[str, NDArray]:
    """The planes of tiles [start, stop) of an r16 tensor."""
    n, k = info.shape
    planes = {}
    for plane, offset in placed_planes(info.scheme, n, k)[0]:
        tile_bytes = plane.nbytes // plane.shape[0]
        data = source.read(info, offset + start * tile_bytes, (stop - start) * tile_bytes)
        planes[plane.name] = np.frombuffer(data, NUMPY_DTYPE[plane.dtype]).reshape(stop - start, *plane.shape[1:])
    return planes


def rows_affine(source: ModelSource, info: TensorInfo, start: int, stop: int, order: Sequence[int] | None = None,
                order_span: int = 1) -> AffineArrays:
    """Rows [start, stop) as the affine groups that the tensor has or maps onto. r16: start is a multiple of 16."""
    if info.layout == "r16":
        scheme = info.scheme
        assert isinstance(scheme, AffineScheme)
        planes = read_planes(source, info, start // TILE_ROWS, tiles(stop))
        return unpack(scheme, planes, stop - start, info.shape[1])
    raw = read_raw_rows(source, info, start, stop, order, order_span)
    return to_affine(info.type, raw, (stop - start, info.shape[1]))


def rows_f32(source: ModelSource, info: TensorInfo, start: int, stop: int, order: Sequence[int] | None = None,
             order_span: int = 1) -> NDArray:
    """Rows [start, stop) as f32, exactly what the file means. UnsupportedError for types that are no weights."""
    if info.layout == "r16":
        if isinstance(info.scheme, AffineScheme):
            return rows_affine(source, info, start, stop).dequantize()
        planes = read_planes(source, info, start // TILE_ROWS, tiles(stop))
        return widen(unpack_dense(info.scheme, planes, stop - start, info.shape[1]), info.scheme.dtype)
    if info.type not in FLOATS and info.type not in BLOCKS:
        raise UnsupportedError(f"tensor {info.name}: type", info.type, BLOCKS)
    shape = (stop - start, *info.shape[1:])
    return dequantize(info.type, read_raw_rows(source, info, start, stop, order, order_span), shape)


def rows_dense(source: ModelSource, info: TensorInfo, start: int, stop: int, order: Sequence[int] | None = None,
               order_span: int = 1) -> NDArray:
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
