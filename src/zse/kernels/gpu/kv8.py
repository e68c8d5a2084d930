"""Keys and values in 8 bits on a GPU (pages as kv_pages.py has them): bytes as operands of products, and the scales of
a page.

Scores are multiplied with their key's scale, weights with their value's scale before they are rounded. In bf16 stored
numbers are exact (two_pairs()). f16 takes half the instructions or fewer (two_f16()); there weights are multiplied with
UNITS times the scale, about the largest number of the token, so that they are subnormal only below 2^-14 of that (and
no number above 65,504 is read)."""

from zse import kernel as zl
from zse.kernels.kv_pages import SCALE_BYTES, head_nbytes

UNITS = {"i8": 128.0, "e4m3": 256.0}
BIAS = 9.0  # of two_f16()'s i8
MINUS_BIAS = 0xC880C880  # two f16


def is_packed(dtype) -> bool:
    """Whether pages of a kernel's type have scales in them."""
    return dtype is zl.i8 or dtype is zl.e4m3


def item_nbytes(dtype) -> int:
    """Bytes of a stored number: of bf16, f16, i8 or e4m3."""
    return 1 if is_packed(dtype) else 2


def page_nbytes(head_dim: int, item: int) -> int:
    """Bytes of one head's keys, or values, in a page of numbers of `item` bytes."""
    return head_nbytes(head_dim, "i8" if item == 1 else "bf16")


def scales_nbytes(item: int) -> int:
    """Bytes of the scales of a page's keys and values."""
    return 2 * SCALE_BYTES if item == 1 else 0


@zl.inline
def dequantize_e4m3(word):
    """Four e4m3 → two words of two bf16, exact: the bits move to where they mean value / 2**120, subnormals too."""
    low, high = zl.prmt(word, zl.u32(0), 0x1404), zl.prmt(word, zl.u32(0), 0x3424)
    low = (low & 0x80008000) | ((low >> 4) & 0x07F007F0)
    high = (high & 0x80008000) | ((high >> 4) & 0x07F007F0)
    return zl.mul_bf16x2(low, zl.u32(0x7B807B80)), zl.mul_bf16x2(high, zl.u32(0x7B807B80))


@zl.inline
def dequantize_s8(word):
    """Four i8 → two words of two bf16, exact: 128 + the low seven bits, less 128, or 256 where the sign is set."""
    halves = [zl.prmt(word, zl.u32(0), 0x4140), zl.prmt(word, zl.u32(0), 0x4342)]
    low, high = [
        zl.fma_bf16x2((half & 0x00800080) | 0x43004300, zl.u32(0xBF80BF80), (half & 0x007F007F) | 0x43004300)
        for half in zl.static(halves)
    ]
    return low, high


@zl.inline
def two_pairs(word, KV):
    """Four stored numbers as two u32 of two bf16."""
    low, high = dequantize_e4m3(word) if KV is zl.e4m3 else dequantize_s8(word)
    return low, high


def in_f16(KV, target) -> float:
    """What two_f16() divides stored numbers by."""
    return 1.0 if KV is zl.e4m3 and target.has("fp8") else UNITS[KV.name]


@zl.inline
def split(pairs):
    """Four f16 as two u32."""
    words = zl.bitcast(pairs, zl.u32.x(2))
    return words[0], words[1]


@zl.inline
def two_f16(word, KV, first, second):
    """Four stored numbers as two u32 of two f16, each an in_f16()-th of itself, in i8 with BIAS added: the byte as the
    last bits of an f16 from 8 on, whose steps are 1 / 128. e4m3: one instruction for two, or the bits where an f16 has
    them. first, second: (index of the low half's byte, of the high half's)."""
    if KV is zl.e4m3 and zl.target.has("fp8"):
        order = first[0] | first[1] << 4 | second[0] << 8 | second[1] << 12
        low, high = split(
            zl.convert(zl.bitcast(word if order == 0x3210 else zl.prmt(word, word, order), zl.e4m3.x(4)), zl.f16)
        )
    elif KV is zl.e4m3:
        low, high = [
            zl.prmt(word, zl.u32(0), 0x0404 | pair[0] << 4 | pair[1] << 12) for pair in zl.static((first, second))
        ]
        low = (low & 0x80008000) | ((low >> 1) & 0x3F803F80)
        high = (high & 0x80008000) | ((high >> 1) & 0x3F803F80)
    else:
        plain = word ^ 0x80808080
        low, high = [
            zl.prmt(plain, zl.u32(0x48484848), 0x4040 | pair[0] | pair[1] << 8) for pair in zl.static((first, second))
        ]
    return low, high


@zl.inline
def scales_of(place, unit):
    """f32 scales of this lane's two of 16 keys in a fragment that has keys as rows, g and g + 8, times `unit`."""
    g = zl.lane_index() // 4
    scales = zl.cast_ptr(place, zl.f32)
    return scales[g] * unit, scales[g + 8] * unit


@zl.inline
def scales_of_columns(place, first):
    """f32 scales of this lane's two of 8 keys in a fragment that has keys as columns."""
    both = zl.load(zl.cast_ptr(place, zl.f32) + (first + zl.lane_index() % 4 * 2), 2)
    return both[0], both[1]


@zl.inline
def sum_of(found, d, nt, u, KV):
    """A warp's sum of weights times values (Sums of attention_decode.py), of 8-bit values less what two_f16() made of
    them."""
    if KV is zl.i8:
        return found.acc[d][nt][u] + found.bias[nt][u]
    if KV is zl.e4m3:
        return found.acc[d][nt][u] * (in_f16(KV, zl.target) / UNITS[KV.name])
    return found.acc[d][nt][u]
