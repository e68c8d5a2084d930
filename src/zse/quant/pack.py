"""What schemes pack planes with, in NumPy: tiles of rows, checks, and conversions of bf16 and e4m3.

bf16 arrays are u16 bit patterns here, e4m3 arrays u8.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zse.quant.plane import TILE_ROWS, tiles

NUMPY_DTYPE = {"u8": np.uint8, "e4m3": np.uint8, "f16": np.float16, "f32": np.float32, "bf16": np.uint16}


def pad_rows(array: NDArray, rows: int) -> NDArray:
    if array.shape[0] == rows:
        return array
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: array.shape[0]] = array
    return padded


def tile(array: NDArray) -> NDArray:
    """[N, G] -> [T, G, 16]."""
    t = tiles(len(array))
    padded = pad_rows(array, t * TILE_ROWS)
    return np.ascontiguousarray(padded.reshape(t, TILE_ROWS, -1).transpose(0, 2, 1))


def untile(plane: NDArray, n: int) -> NDArray:
    """[T, G, 16] -> [N, G]."""
    return np.ascontiguousarray(plane.transpose(0, 2, 1).reshape(-1, plane.shape[1])[:n])


def check_planes(
    scheme: Any, planes: Mapping[str, NDArray], n: int, k: int, layout: str | None = None
) -> dict[str, NDArray]:
    """The planes of N x K by name, after checking that all are there with their dtype and shape. ValueError if not."""
    checked = {}
    for plane in scheme.planes(n, k, layout or scheme.layouts[0]):
        array = planes.get(plane.name)
        if array is None:
            raise ValueError(f"{scheme.name}: plane {plane.name} is missing")
        if array.dtype != NUMPY_DTYPE[plane.dtype] or array.shape != plane.shape:
            raise ValueError(f"{plane.name}: {array.dtype} {array.shape}, expected {plane.dtype} {plane.shape}")
        checked[plane.name] = array
    return checked


def widen(values: NDArray, dtype: str) -> NDArray:
    """Values of a dense dtype (bf16 as u16 bit patterns) -> f32."""
    return bf16_to_f32(values) if dtype == "bf16" else values.astype(np.float32)


def narrow(values: NDArray, dtype: str) -> NDArray:
    """f32 -> values of a dense dtype, rounded to nearest."""
    return f32_to_bf16(values) if dtype == "bf16" else values.astype(NUMPY_DTYPE[dtype])


def f32_to_bf16(values: NDArray) -> NDArray:
    """f32 -> bf16 bit patterns (u16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16), rounded)


def bf16_to_f32(bits: NDArray) -> NDArray:
    """bf16 bit patterns (u16) -> f32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def e4m3_to_f32(values: NDArray) -> NDArray:
    """e4m3 (u8) -> f32, exact. 0x7f and 0xff are NaN; there are no infinities (OCP 8-bit floating point, e4m3fn)."""
    return _E4M3_VALUES[values]


def f32_to_e4m3(values: NDArray) -> NDArray:
    """f32 -> e4m3 (u8), rounded to nearest, ties to even; beyond 448 it saturates, NaN stays NaN."""
    wide = np.ascontiguousarray(values, np.float32)
    bits = wide.view(np.uint32)
    magnitude = np.minimum(np.nan_to_num(np.abs(wide), nan=0), np.float32(448))
    # Normal numbers (2**-6 and up): keep 3 of the 23 fraction bits; the exponent's bias goes from 127 to 7.
    pattern = magnitude.view(np.uint32)
    normal = (pattern + np.uint32(0x7FFFF) + ((pattern >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    small = np.rint(magnitude * np.float32(512)).astype(np.uint32)  # multiples of 2**-9
    coded = np.where(magnitude < np.float32(2**-6), small, normal - np.uint32(120 << 3)).astype(np.uint8)
    coded = np.where(np.isnan(wide), np.uint8(0x7F), coded)
    return coded | (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)


def _e4m3_values() -> NDArray:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
