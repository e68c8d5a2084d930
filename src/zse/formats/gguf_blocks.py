"""GGUF's quantized blocks in NumPy: the numbers they stand for, and the affine groups they become (gguf_lut4: those
with a table).

Layouts after ggml's block structures (ggml-common.h) and the formulas of ggml-quants.c. d, dmin, scale, offset below
are f16 in the file. Sub-blocks of the K types have 32 (Q4_K, Q5_K) or 16 (Q6_K) elements with integer scales of 6
(8 in Q6_K) bits.

| type | weight                                 | becomes (zse.formats.ggml.SCHEMES)| exact |
|------|----------------------------------------|-----------------------------------|-------|
| Q4_0 | d (q - 8)                              | int4-g32-sym: scale = d           | yes   |
| Q4_1 | d q + m                                | int4-g32: scale = d, offset = m   | yes   |
| Q5_0 | d (q - 16)                             | int5-g32-sym: scale = d           | yes   |
| Q5_1 | d q + m                                | int5-g32: scale = d, offset = m   | yes   |
| Q8_0 | d q, q signed                          | int8-g32-sym: q + 128, scale = d  | yes   |
| Q4_K | d sc q - dmin m                        | int4-g32-i6: d, sc, dmin, m       | yes   |
| Q5_K | d sc q - dmin m                        | int5-g32-i6: d, sc, dmin, m       | yes   |
| Q6_K | d sc (q - 32)                          | int6-g16-sym-i8: d, sc            | yes   |
| Q2_K | d sc q - dmin m                        | int4-g16: f16(d sc), f16(-dmin m) | rounded |
| TQ1_0, TQ2_0 | d (q - 1)                      | int4-g256-sym: scale = d          | yes   |
| Q1_0 | d or -d                                | int4-g128-sym: scale = d          | yes   |
| Q2_0 | d (q - 1)                              | int4-g64-sym: scale = d           | yes   |

"Rounded": the product has up to 15 significant bits and f16 keeps 11, so a scale or offset moves by at most
2**-11 of itself (to nearest, ties to even). On a GPU that happens to Q4_K, Q5_K and Q6_K as well (zse.quant.superblock).
"""

import math

import numpy as np
from numpy.typing import NDArray

from zse.errors import UnsupportedError
from zse.formats.ggml import BLOCKS, SCHEMES
from zse.formats.gguf_lut4 import to_lut4
from zse.quant.affine import AffineArrays, AffineScheme
from zse.quant.lut4 import Lut4Arrays
from zse.quant.pack import bf16_to_f32
from zse.quant.superblock import SuperblockArrays, SuperblockScheme

_LOW = np.uint8(15)


def _f16(blocks: NDArray, start: int) -> NDArray:
    """The f16 at byte `start` of every block, as f32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(bytes_: NDArray) -> NDArray:
    """[blocks, 16] -> [blocks, 32]: low nibbles, then high nibbles."""
    return np.concatenate([bytes_ & _LOW, bytes_ >> 4], axis=1)


def _bits32(bytes_: NDArray) -> NDArray:
    """[blocks, 4] -> [blocks, 32]: bit i of a little-endian u32."""
    return np.unpackbits(bytes_, axis=1, bitorder="little")


def _q4_0(b):
    return _nibbles(b[:, 2:]), _f16(b, 0), None


def _q4_1(b):
    return _nibbles(b[:, 4:]), _f16(b, 0), _f16(b, 2)


def _q5_0(b):
    return _nibbles(b[:, 6:]) | _bits32(b[:, 2:6]) << 4, _f16(b, 0), None


def _q5_1(b):
    return _nibbles(b[:, 8:]) | _bits32(b[:, 4:8]) << 4, _f16(b, 0), _f16(b, 2)


def _q8_0(b):
    return b[:, 2:] ^ np.uint8(128), _f16(b, 0), None


def _k_scales(packed: NDArray) -> tuple[NDArray, NDArray]:
    """The 12 bytes of eight 6-bit scales and eight 6-bit minima -> two u8 [blocks, 8]."""
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (last & _LOW) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6) << 4], axis=1)
    return scales, minima


def _k_head(b: NDArray) -> tuple[NDArray, NDArray]:
    scales, minima = _k_scales(b[:, 4:16])
    return _f16(b, 0) * scales.astype(np.float32), -(_f16(b, 2) * minima.astype(np.float32))


def _k_nibbles(bytes_: NDArray) -> NDArray:
    """[blocks, 128] -> [blocks, 8, 32]: each 32 bytes hold two sub-blocks, low nibbles first."""
    quads = bytes_.reshape(-1, 4, 1, 32)
    return np.concatenate([quads & _LOW, quads >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b):
    return _k_nibbles(b[:, 16:144]).reshape(-1, 256), *_k_head(b)


def _q5_k(b):
    top = np.stack([b[:, 16:48] >> bit & 1 for bit in range(8)], axis=1)
    return (_k_nibbles(b[:, 48:176]) | top << 4).reshape(-1, 256), *_k_head(b)


def _q6_k(b):
    low = b[:, 0:128].reshape(-1, 2, 1, 64)  # per half of 128 elements: 64 bytes, low nibbles first
    low = np.concatenate([low & _LOW, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    top = b[:, 128:192].reshape(-1, 2, 1, 32)
    top = np.concatenate([top >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return (low | top << 4).reshape(-1, 256), _f16(b, 208) * scales, None


def _q2_k(b):
    scales = b[:, :16]
    q = b[:, 16:80].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & np.uint8(3)
    scale = _f16(b, 80) * (scales & _LOW).astype(np.float32)
    return q.reshape(-1, 256), scale, -(_f16(b, 82) * (scales >> 4).astype(np.float32))


def _trits(bytes_: NDArray, count: int) -> NDArray:
    """[blocks, n] -> [blocks, count * n]: digits 0 to 2 of bytes that are fractions of 256, the first digits first."""
    places = (bytes_[:, None] * np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]).astype(np.uint16)
    return (places * 3 >> 8).astype(np.uint8).reshape(len(bytes_), -1)


def _tq1_0(b):
    digits = [_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)]
    return np.concatenate(digits, axis=1) + np.uint8(7), _f16(b, 52), None


def _tq2_0(b):
    q = b[:, :64].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & np.uint8(3)
    return q.reshape(-1, 256) + np.uint8(7), _f16(b, 64), None


def _q1_0(b):
    return np.unpackbits(b[:, 2:], axis=1, bitorder="little") * np.uint8(2) + np.uint8(7), _f16(b, 0), None


def _q2_0(b):
    q = b[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    return q.reshape(-1, 64) + np.uint8(7), _f16(b, 0), None


_UNPACK = {
    "Q2_K": _q2_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def unpack_blocks(type: str, raw) -> tuple[NDArray, NDArray, NDArray | None]:
    """Blocks of a type with affine groups -> q u8 [blocks, elements] (unsigned), scale f32 [blocks, groups] and offset
    f32 [blocks, groups] or None, all exact: w = scale * q + offset, or scale * (q - 2**(bits-1)) without offset."""
    if type not in _UNPACK:
        raise UnsupportedError("quantized GGUF type", type, _UNPACK)
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, BLOCKS[type][1])
    return _UNPACK[type](blocks)


def scales_of(type: str, raw) -> NDArray:
    """Every scale and offset of the blocks of any quantized type, f32: what may be NaN or infinite."""
    scheme = SCHEMES[type]
    if isinstance(scheme, AffineScheme | SuperblockScheme):
        return np.concatenate([part.ravel() for part in unpack_blocks(type, raw)[1:] if part is not None])
    return to_lut4(type, raw, (len(raw) // BLOCKS[type][1], BLOCKS[type][0])).steps()


def dequantize(type: str, raw, shape: tuple[int, ...], factor: NDArray | float = 1.0) -> NDArray:
    """f32 of `shape`: the values of a tensor of any supported GGUF type, equal bit for bit to ggml's. factor: of NVFP4,
    for all rows or for as many in a row each."""
    if type == "F32":
        return np.frombuffer(raw, np.float32).reshape(shape)
    if type == "F16":
        return np.frombuffer(raw, np.float16).reshape(shape).astype(np.float32)
    if type == "BF16":
        return bf16_to_f32(np.frombuffer(raw, np.uint16)).reshape(shape)
    scheme = SCHEMES[type]
    if not isinstance(scheme, AffineScheme | SuperblockScheme):
        return to_lut4(type, raw, (math.prod(shape[:-1]), shape[-1]), factor).dequantize().reshape(shape)
    q, scale, offset = unpack_blocks(type, raw)
    groups = q.reshape(*scale.shape, -1).astype(np.float32)
    if offset is None:
        return ((groups - np.float32(1 << (scheme.bits - 1))) * scale[:, :, None]).reshape(shape)
    return (scale[:, :, None] * groups + offset[:, :, None]).reshape(shape)


def to_affine(type: str, raw, shape: tuple[int, int]) -> AffineArrays:
    """A matrix of GGUF blocks as affine groups (the table above). shape: (rows, columns)."""
    q, scale, offset = unpack_blocks(type, raw)
    n, k = shape
    scheme = SCHEMES[type]
    assert isinstance(scheme, AffineScheme)
    with np.errstate(over="ignore"):  # a product above 65504 becomes inf; `zse verify` finds it
        narrow_scale = scale.astype(np.float16).reshape(n, -1)
        narrow_offset = None if offset is None else offset.astype(np.float16).reshape(n, -1)
    return AffineArrays(scheme, q.reshape(n, k), narrow_scale, narrow_offset)


def to_superblocks(type: str, raw, shape: tuple[int, int]) -> SuperblockArrays:
    """A matrix of blocks of Q4_K, Q5_K or Q6_K, bit for bit."""
    blocks, scheme, n = np.frombuffer(raw, np.uint8).reshape(-1, BLOCKS[type][1]), SCHEMES[type], shape[0]
    assert isinstance(scheme, SuperblockScheme)
    q = _UNPACK[type](blocks)[0].reshape(shape)
    d, dmin = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).reshape(n, -1) for at in _FACTORS[type])
    if scheme.symmetric:
        return SuperblockArrays(scheme, q, np.ascontiguousarray(blocks[:, 192:208]).reshape(n, -1), d)
    sc, m = (part.reshape(n, -1) for part in _k_scales(blocks[:, 4:16]))
    return SuperblockArrays(scheme, q, sc, d, m, dmin)


_FACTORS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 208)}  # where d and dmin stand in a block


def to_scheme(
    type: str, raw, shape: tuple[int, int], factor: NDArray | float = 1.0
) -> AffineArrays | Lut4Arrays | SuperblockArrays:
    """A matrix of blocks as what its type becomes."""
    if isinstance(SCHEMES[type], SuperblockScheme):
        return to_superblocks(type, raw, shape)
    if isinstance(SCHEMES[type], AffineScheme):
        return to_affine(type, raw, shape)
    return to_lut4(type, raw, shape, factor)
