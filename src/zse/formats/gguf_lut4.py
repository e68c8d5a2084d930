"""GGUF's blocks that are indices into a table: what they become as lut4 weights (zse.quant.lut4), in NumPy, bit for
bit.

Layouts after ggml's block structures (ggml-common.h), formulas after ggml-quants.c. s: the integer scale of a group in
the block.

| type | weight | becomes |
|------|--------|---------|
| IQ4_NL | d T[n] | lut4-iq4-g32: scale = d |
| IQ4_XS | d (s - 32) T[n] | lut4-iq4-g32-i8: s - 32, factor = d |
| MXFP4 | 2**(e - 127) F[n] | lut4-fp4-g32-e8m0: e |
| NVFP4 | e4m3 F[n] | lut4-fp4-g16-e4m3; factor = the tensor's `.scale`, or 1 |
| Q3_K | d (s - 32) (q - 4) | lut4-int-g16-i8: s - 32, factor = d |
| IQ3_S | d (2 s + 1) (± 1, 3 ... 15) | lut4-iq3s-g32-i8: 2 s + 1, factor = d |
| IQ3_XXS | d (s + 1/2) / 2 (± 4, 12 ... 62) | lut4-iq3xxs-g32-i8: 2 s + 1, factor = d |
| IQ2_XXS | d (s + 1/2) / 4 (± 8, 25, 43) | lut4-iq2-g32-i8: 2 s + 1, factor = d |
| IQ2_XS, IQ2_S | the same by groups of 16 | lut4-iq2-g16-i8 |
| IQ1_S, IQ1_M | d (2 s + 1) (-1, 0, 1 ± 1/8) | lut4-iq1-g32-i8, lut4-iq1-g16-i8: 2 s + 1, factor = d |
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zse.formats.ggml import BLOCKS, SCHEMES
from zse.formats.iq_grids import grid
from zse.quant.lut4 import Lut4Arrays, Lut4Scheme

Unpacked = tuple[NDArray, NDArray, NDArray | None]

_LOW = np.uint8(15)
# A sign index of 7 bits is 8 signs: the last one makes their number even.
_SIGNS = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)


def _bits(packed: NDArray, width: int, count: int) -> NDArray:
    """[..., bytes] → u8 [..., bytes * count]: `count` fields of `width` bits of each byte, lowest first."""
    fields = packed[..., None] >> np.arange(0, width * count, width, dtype=np.uint8) & np.uint8((1 << width) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _halves(packed: NDArray) -> NDArray:
    """[..., 16] → [..., 32]: low nibbles, then high nibbles."""
    return np.concatenate([packed & _LOW, packed >> 4], axis=-1)


def _factor(b: NDArray, start: int) -> NDArray:
    """The f16 at byte `start` of every block, [blocks, 1]."""
    return np.ascontiguousarray(b[:, start : start + 2]).view(np.float16)


def _words(b: NDArray, start: int, stop: int, dtype: type) -> NDArray:
    return np.ascontiguousarray(b[:, start:stop]).view(dtype)


def _signed(levels: NDArray, signs: NDArray) -> NDArray:
    """Levels [blocks, points, coordinates] with bits of signs u8 [blocks, bytes] → indices of a table of signed
    magnitudes."""
    negative = np.unpackbits(signs, axis=1, bitorder="little").reshape(levels.shape)
    return (levels | negative << np.uint8(3)).reshape(len(levels), -1)


def _odd(scales: NDArray) -> NDArray:
    """2 s + 1, which the formulas have as s + 1/2 or so."""
    return (scales.astype(np.uint8) << 1) + np.uint8(1)


def _iq4_nl(b: NDArray) -> Unpacked:
    return _halves(b[:, 2:]), _factor(b, 0), None


def _iq4_xs(b: NDArray) -> Unpacked:
    low = _bits(b[:, 4:8], 4, 2)
    scale = (low | _bits(b[:, 2:4], 2, 4) << 4) - np.uint8(32)
    return _halves(b[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256), scale, _factor(b, 0)


def _mxfp4(b: NDArray) -> Unpacked:
    return _halves(b[:, 1:]), b[:, :1], None


def _nvfp4(b: NDArray) -> Unpacked:
    scale = b[:, :4] & np.uint8(127)
    scale = np.where(scale == 127, np.uint8(0), scale)  # ggml takes it as 0
    return _halves(b[:, 4:].reshape(-1, 4, 8)).reshape(-1, 64), scale, None


def _q3_k(b: NDArray) -> Unpacked:
    low, middle = _bits(b[:, 96:104], 4, 2), b[:, 104:108]
    low = np.concatenate([low[:, 0::2], low[:, 1::2]], axis=1)
    top = np.concatenate([middle >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).astype(np.uint8)
    quarters = b[:, 32:96].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & np.uint8(3)
    high = b[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & np.uint8(1)
    # A bit of the mask that is clear takes 4 away; the table's numbers begin at -8.
    index = quarters.reshape(-1, 256) + np.uint8(4) + (high.reshape(-1, 256) << np.uint8(2))
    return index, (low | top << 4) - np.uint8(32), _factor(b, 108)


def _iq3_s(b: NDArray) -> Unpacked:
    points = b[:, 2:66].astype(np.uint16) | _bits(b[:, 66:74], 1, 8).astype(np.uint16) << np.uint16(8)
    return _signed(grid("IQ3_S")[points], b[:, 74:106]), _odd(_bits(b[:, 106:110], 4, 2)), _factor(b, 0)


def _xxs_signs(words: NDArray) -> NDArray:
    """u32 [blocks, 8] with four sign indices each → [blocks, 32] bytes of signs."""
    fields = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return _SIGNS[fields].reshape(len(words), -1)


def _iq3_xxs(b: NDArray) -> Unpacked:
    words = _words(b, 66, 98, np.uint32)
    return _signed(grid("IQ3_XXS")[b[:, 2:66]], _xxs_signs(words)), _odd(words >> 28), _factor(b, 0)


def _iq2_xxs(b: NDArray) -> Unpacked:
    words = _words(b, 2, 66, np.uint32).reshape(-1, 8, 2)
    points = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    return _signed(grid("IQ2_XXS")[points], _xxs_signs(words[:, :, 1])), _odd(words[:, :, 1] >> 28), _factor(b, 0)


def _iq2_xs(b: NDArray) -> Unpacked:
    words = _words(b, 2, 66, np.uint16)
    index = _signed(grid("IQ2_XS")[words & np.uint16(511)], _SIGNS[words >> np.uint16(9)])
    return index, _odd(_bits(b[:, 66:74], 4, 2)), _factor(b, 0)


def _iq2_s(b: NDArray) -> Unpacked:
    points = b[:, 2:34].astype(np.uint16) | _bits(b[:, 66:74], 2, 4).astype(np.uint16) << np.uint16(8)
    return _signed(grid("IQ2_S")[points], b[:, 34:66]), _odd(_bits(b[:, 74:82], 4, 2)), _factor(b, 0)


def _iq1(type: str, low: NDArray, high: NDArray, minus: NDArray) -> NDArray:
    """Points by their low 8 and high 3 bits [blocks, points]; minus: where 1/8 is taken away instead of added. The
    table has -7, 1, 9 for levels 0, 1, 2, and the same negative: level l with minus is the negative of level 2 - l."""
    levels = grid(type)[low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)]
    mirrored = np.uint8(10) - levels
    return np.where(minus[:, :, None] != 0, mirrored, levels).reshape(len(low), -1)


def _iq1_s(b: NDArray) -> Unpacked:
    words = _words(b, 34, 50, np.uint16)
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(len(b), -1)
    index = _iq1("IQ1_S", b[:, 2:34], high, np.repeat(words >> np.uint16(15), 4, axis=1))
    return index, _odd(words >> np.uint16(12) & np.uint16(7)), _factor(b, 0)


def _iq1_m(b: NDArray) -> Unpacked:
    nibbles, words = _bits(b[:, 32:48], 4, 2), _words(b, 48, 56, np.uint16)
    index = _iq1("IQ1_M", b[:, :32], nibbles & np.uint8(7), nibbles >> 3)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(len(b), -1)
    top = words & np.uint16(0xF000)  # a quarter of the factor in each word
    factor = top[:, 0] >> 12 | top[:, 1] >> 8 | top[:, 2] >> 4 | top[:, 3]
    return index, _odd(scales), factor.astype(np.uint16).view(np.float16)[:, None]


_UNPACK: dict[str, Callable[[NDArray], Unpacked]] = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q3_K": _q3_k,
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def to_lut4(type: str, raw, shape: tuple[int, int], factor: NDArray | float = 1.0) -> Lut4Arrays:
    """A matrix of GGUF blocks, exactly. shape: (rows, columns); factor: of NVFP4, for all rows or for as many in a row
    each."""
    scheme, (rows, _) = SCHEMES[type], shape
    assert isinstance(scheme, Lut4Scheme)
    index, scale, factors = _UNPACK[type](np.frombuffer(raw, np.uint8).reshape(-1, BLOCKS[type][1]))
    if scheme.code == "e4m3":
        factors = np.repeat(np.float32(factor), rows // np.size(factor))[:, None]
    elif factors is not None:
        factors = factors.reshape(rows, -1)
    scale = np.ascontiguousarray(scale.astype(np.float16 if scheme.code == "f16" else np.uint8, copy=False))
    return Lut4Arrays(scheme, np.ascontiguousarray(index).reshape(shape), scale.reshape(rows, -1), factors)
