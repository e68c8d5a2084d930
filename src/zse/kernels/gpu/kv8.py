"""Keys and values in 8 bits on a GPU (pages as kv_pages.py has them): bytes as operands of bf16 products, and the scales of a page.

Stored numbers are exact in bf16. Scores are multiplied with their key's scale, weights with their value's scale before they
are rounded to bf16 (f16 would not do: the weight of one key in a long context times a small scale is below what it has).
"""

from zse import kernel as zl
from zse.kernels.gpu.matmul_small import dequantize_e4m3
from zse.kernels.kv_pages import SCALE_BYTES, head_nbytes


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


@zl.inline
def scales_of(place):
    """f32 scales of this lane's two of 16 keys in a fragment that has keys as rows: g and g + 8."""
    g = zl.lane_index() // 4
    scales = zl.cast_ptr(place, zl.f32)
    return scales[g], scales[g + 8]


@zl.inline
def scales_of_columns(place, first):
    """f32 scales of this lane's two of 8 keys in a fragment that has keys as columns."""
    both = zl.load(zl.cast_ptr(place, zl.f32) + (first + zl.lane_index() % 4 * 2), 2)
    return both[0], both[1]
