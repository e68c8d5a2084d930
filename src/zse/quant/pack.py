"""The content of the planes that kernels read, in NumPy: a matrix <-> its planes, bit for bit.

Layout `r16`, with t = row // 16, r = row % 16, b = k // 32, s = (k % 32) // 4, c = k % 4:

    q, bits 4 5 6   u8  [T, B, 4, 16, 4]   (t, b, j, r, c): low nibble of q at s = j, high nibble: at s = j + 4
    high, bits 5    u8  [T, B, 16, 4]      bit s of (r, c): bit 4 of q at (s, c)
    high, bits 6    u8  [T, B, 2, 16, 4]   bits 2i, 2i + 1 of (h, r, c): bits 4, 5 of q at s = 4 h + i
    q, bits 8       u8  [T, B, 8, 16, 4]   (t, b, s, r, c): q
    scale, offset   f16 [T, G, 16]
    w (dense)       f32, f16 or bf16 [T, K, 16]

Layout `rows`: w [N, K] as it is; fp8 has w e4m3 [N, K] and its scales.

Every other implementation (C repacking, kernels) is tested against this one. bf16 arrays are u16 bit patterns here,
e4m3 arrays u8.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from zse.quant.scheme import (
    BLOCK_COLUMNS,
    FP8_BLOCK,
    LAYOUT,
    ROWS,
    TILE_ROWS,
    AffineScheme,
    DenseScheme,
    Fp8Scheme,
    Scheme,
    tiles,
)

NUMPY_DTYPE = {"u8": np.uint8, "e4m3": np.uint8, "f16": np.float16, "f32": np.float32, "bf16": np.uint16}


class AffineArrays:
    """A quantized matrix in row order: q u8 [N, K] below 2**bits, scale f16 [N, G], offset f16 [N, G] or None."""

    __slots__ = ("scheme", "q", "scale", "offset")

    def __init__(self, scheme: AffineScheme, q: NDArray, scale: NDArray, offset: NDArray | None = None):
        groups = scheme.groups(q.shape[1])
        if q.dtype != np.uint8 or q.ndim != 2:
            raise ValueError(f"q: {q.dtype} {q.shape}, expected uint8 [N, K]")
        if scheme.symmetric != (offset is None):
            raise ValueError(f"{scheme.name}: offset must be {'absent' if scheme.symmetric else 'given'}")
        for name, array in (("scale", scale), ("offset", offset)):
            if array is not None and (array.dtype != np.float16 or array.shape != (q.shape[0], groups)):
                raise ValueError(f"{name}: {array.dtype} {array.shape}, expected float16 {(q.shape[0], groups)}")
        if scheme.bits < 8 and q.size and int(q.max()) >> scheme.bits:
            raise ValueError(f"q: {int(q.max())} needs more than {scheme.bits} bits")
        self.scheme, self.q, self.scale, self.offset = scheme, q, scale, offset

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape

    def dequantize(self) -> NDArray:
        """f32 [N, K]: scale * q + offset, rounded once."""
        return dequantize(self.scheme, self.q, self.scale, self.offset)


def dequantize(scheme: AffineScheme, q: NDArray, scale: NDArray, offset: NDArray | None) -> NDArray:
    """f32 [N, K] of q u8 [N, K], scale and offset f16 [N, G] (offset None for symmetric schemes)."""
    n, k = q.shape
    groups = scheme.groups(k)
    steps = q.reshape(n, groups, k // groups).astype(np.float32)
    wide = scale.astype(np.float32)[:, :, None]
    if offset is None:
        # (q - 2**(bits-1)) * scale is exact in f32, as is its sum form scale * q - 2**(bits-1) * scale.
        return ((steps - np.float32(1 << (scheme.bits - 1))) * wide).reshape(n, k)
    return (wide * steps + offset.astype(np.float32)[:, :, None]).reshape(n, k)


def _pad_rows(array: NDArray, rows: int) -> NDArray:
    if array.shape[0] == rows:
        return array
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: array.shape[0]] = array
    return padded


def _tile_groups(array: NDArray, t: int) -> NDArray:
    """[N, G] -> [T, G, 16]."""
    padded = _pad_rows(array, t * TILE_ROWS)
    return np.ascontiguousarray(padded.reshape(t, TILE_ROWS, -1).transpose(0, 2, 1))


def _untile_groups(plane: NDArray, n: int) -> NDArray:
    """[T, G, 16] -> [N, G]."""
    return np.ascontiguousarray(plane.transpose(0, 2, 1).reshape(-1, plane.shape[1])[:n])


def pack(arrays: AffineArrays) -> dict[str, NDArray]:
    """The planes of a quantized matrix by name, in the shapes of `scheme.planes(N, K)`. Padding rows are zero."""
    scheme = arrays.scheme
    n, k = arrays.shape
    t, b = tiles(n), k // BLOCK_COLUMNS
    # [T, B, s, r, c]
    q = _pad_rows(arrays.q, t * TILE_ROWS).reshape(t, TILE_ROWS, b, 8, 4).transpose(0, 2, 3, 1, 4)
    planes: dict[str, NDArray] = {}
    if scheme.bits == 8:
        planes["q"] = q
    else:
        planes["q"] = (q[:, :, :4] & 15) | ((q[:, :, 4:] & 15) << 4)
        if scheme.bits == 5:
            planes["high"] = np.packbits(q >> 4, axis=2, bitorder="little")[:, :, 0]
        elif scheme.bits == 6:
            top = (q >> 4).reshape(t, b, 2, 4, TILE_ROWS, 4)
            planes["high"] = top[:, :, :, 0] | (top[:, :, :, 1] << 2) | (top[:, :, :, 2] << 4) | (top[:, :, :, 3] << 6)
    planes["scale"] = _tile_groups(arrays.scale, t)
    if arrays.offset is not None:
        planes["offset"] = _tile_groups(arrays.offset, t)
    return {name: np.ascontiguousarray(plane) for name, plane in planes.items()}


def unpack(scheme: AffineScheme, planes: Mapping[str, NDArray], n: int, k: int) -> AffineArrays:
    """The inverse of pack(). ValueError if a plane is missing or has another shape."""
    given = check_planes(scheme, planes, n, k)
    t, b = tiles(n), k // BLOCK_COLUMNS
    nibbles = given["q"]
    if scheme.bits == 8:
        q = nibbles
    else:
        q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
        if scheme.bits == 5:
            q |= np.unpackbits(given["high"][:, :, None], axis=2, bitorder="little") << 4
        elif scheme.bits == 6:
            high = given["high"]
            top = np.stack([(high >> (2 * i)) & 3 for i in range(4)], axis=3)
            q |= top.reshape(t, b, 8, TILE_ROWS, 4) << 4
    rows = q.transpose(0, 3, 1, 2, 4).reshape(t * TILE_ROWS, k)[:n]
    offset = None if scheme.symmetric else _untile_groups(given["offset"], n)
    return AffineArrays(scheme, np.ascontiguousarray(rows), _untile_groups(given["scale"], n), offset)


def pack_dense(scheme: DenseScheme, w: NDArray, layout: str = LAYOUT) -> dict[str, NDArray]:
    """{"w": [T, K, 16] or, in layout rows, [N, K]} of w [N, K]: f32, f16, or u16 for bf16, as the scheme says."""
    expected = NUMPY_DTYPE[scheme.dtype]
    if w.ndim != 2 or w.dtype != expected:
        raise ValueError(f"w: {w.dtype} {w.shape}, expected {np.dtype(expected).name} [N, K]")
    return {"w": np.ascontiguousarray(w) if layout == ROWS else _tile_groups(w, tiles(w.shape[0]))}


def unpack_dense(scheme: DenseScheme, planes: Mapping[str, NDArray], n: int, k: int, layout: str = LAYOUT) -> NDArray:
    """The inverse of pack_dense()."""
    w = check_planes(scheme, planes, n, k, layout)["w"]
    return w if layout == ROWS else _untile_groups(w, n)


def dequantize_fp8(scheme: Fp8Scheme, planes: Mapping[str, NDArray], n: int, k: int) -> NDArray:
    """f32 [N, K] of the planes w and scale: scale * q, rounded once."""
    given = check_planes(scheme, planes, n, k, ROWS)
    scale = given["scale"]
    if scheme.scaling == "block":
        scale = np.repeat(np.repeat(scale, FP8_BLOCK, axis=0)[:n], FP8_BLOCK, axis=1)[:, :k]
    else:
        scale = scale[:, None]
    return e4m3_to_f32(given["w"]) * scale


def _random_affine(scheme: AffineScheme, rng: np.random.Generator, n: int, k: int, layout: str) -> dict[str, NDArray]:
    groups = scheme.groups(k)
    q = rng.integers(0, 1 << scheme.bits, (n, k)).astype(np.uint8)
    scale = ((0.25 + rng.random((n, groups))) * 2 / (1 << scheme.bits)).astype(np.float16)
    offset = None if scheme.symmetric else (-rng.random((n, groups))).astype(np.float16)
    return pack(AffineArrays(scheme, q, scale, offset))


def _random_dense(scheme: DenseScheme, rng: np.random.Generator, n: int, k: int, layout: str) -> dict[str, NDArray]:
    w = rng.standard_normal((n, k)).astype(np.float32)
    return pack_dense(scheme, f32_to_bf16(w) if scheme.dtype == "bf16" else w.astype(NUMPY_DTYPE[scheme.dtype]), layout)


def _random_fp8(scheme: Fp8Scheme, rng: np.random.Generator, n: int, k: int, layout: str) -> dict[str, NDArray]:
    w = f32_to_e4m3(rng.standard_normal((n, k)).astype(np.float32) * 32)
    return {"w": w, "scale": ((0.5 + rng.random(scheme.scale_shape(n, k))) / 32).astype(np.float32)}


def _dense_to_f32(scheme: DenseScheme, planes: Mapping[str, NDArray], n: int, k: int, layout: str) -> NDArray:
    w = unpack_dense(scheme, planes, n, k, layout)
    return bf16_to_f32(w) if scheme.dtype == "bf16" else w.astype(np.float32)


# What a scheme of each kind means, and planes to try its kernels with:
# (scheme, planes, n, k, layout) → f32 [n, k]; (scheme, rng, n, k, layout) → planes of a weight near a unit normal's, with
# q uniform (e4m3: normal) and scales positive and of mixed size.
DEQUANTIZE = {
    "affine": lambda scheme, planes, n, k, layout: unpack(scheme, planes, n, k).dequantize(),
    "dense": _dense_to_f32,
    "fp8": lambda scheme, planes, n, k, layout: dequantize_fp8(scheme, planes, n, k),
}
RANDOM = {"affine": _random_affine, "dense": _random_dense, "fp8": _random_fp8}


def check_planes(
    scheme: Scheme, planes: Mapping[str, NDArray], n: int, k: int, layout: str | None = None
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


def planes_from_bytes(
    scheme: Scheme, data, n: int, k: int, align: int = 1, layout: str | None = None
) -> dict[str, NDArray]:
    """Views of the planes of N x K that lie one after another in `data`, each at a multiple of `align` bytes."""
    planes, at = {}, 0
    for plane in scheme.planes(n, k, layout or scheme.layouts[0]):
        at += -at % align
        planes[plane.name] = np.frombuffer(
            data, NUMPY_DTYPE[plane.dtype], plane.nbytes // np.dtype(NUMPY_DTYPE[plane.dtype]).itemsize, at
        ).reshape(plane.shape)
        at += plane.nbytes
    return planes


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
