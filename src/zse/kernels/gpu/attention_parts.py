"""What the attention kernels with matrix instructions share: constants, pages as operands, products."""

from zse import kernel as zl
from zse.kernels.gpu.kv8 import is_packed, two_f16
from zse.kernels.kv_pages import PACKED

LOG2E = 1.4426950408889634
MASKED = -3.0e38  # the score of a key that must not be seen
FLOOR = -1.0e30  # the running maximum before any key
KV_TYPES = {"bf16": zl.bf16, "f16": zl.f16, **PACKED}


@zl.inline
def pack_pair(a, b, F):
    """Two f32 as one u32 of two F, the first in the low half."""
    return zl.bitcast(zl.convert(zl.make_vector(a, b), F), zl.u32)


@zl.inline
def key_fragments(slot, kd, STRIDE, KV):
    """16 keys x 16 dimensions as an A operand. 8-bit keys: f16 as two_f16() has them; k is
    permuted, lane j has dimensions 4j … 4j + 3."""
    lane = zl.lane_index()
    if not is_packed(KV):
        words = zl.ldmatrix(zl.cast_ptr(slot + lane % 16 * STRIDE + lane // 16 * 16 + kd * 32, zl.u16), 4)
        frags = [words[0], words[1], words[2], words[3]]
    else:
        words = zl.ldmatrix(zl.cast_ptr(slot + lane % 16 * STRIDE + kd * 16, zl.u16), 2)
        low0, high0 = two_f16(words[0], KV, (0, 1), (2, 3))
        low1, high1 = two_f16(words[1], KV, (0, 1), (2, 3))
        frags = [low0, low1, high0, high1]
    return frags


@zl.inline
def value_fragments(slot, d, STRIDE, KV):
    """16 dimensions x 16 keys as an A operand. 8-bit values: f16 as two_f16() has them; rows g and g + 8 are
    dimensions 2g and 2g + 1."""
    lane = zl.lane_index()
    if not is_packed(KV):
        words = zl.ldmatrix(
            zl.cast_ptr(slot + (lane % 8 + lane // 16 * 8) * STRIDE + lane // 8 % 2 * 16 + d * 32, zl.u16), 4, True
        )
        frags = [words[0], words[1], words[2], words[3]]
    else:
        words = zl.ldmatrix(zl.cast_ptr(slot + lane % 16 * STRIDE + d * 16, zl.u16), 2, True)
        even0, odd0 = two_f16(words[0], KV, (0, 2), (1, 3))
        even1, odd1 = two_f16(words[1], KV, (0, 2), (1, 3))
        frags = [even0, odd0, even1, odd1]
    return frags


@zl.inline
def with_sink(total, high, head, p):
    """A finished row's sum of weights with that of its query head's sink. high: the maximum that weights are relative
    to."""
    whole = total + 0.0
    if p.has_sinks > 0:
        whole += zl.exp2(p.sinks[head] * LOG2E - high)
    return whole


@zl.inline
def as_f16(words):
    """Pairs of bf16 become pairs of f16, in place: nested lists of u32."""
    for row in zl.static(words):
        for part in zl.static(row):
            for u in zl.static(range(2)):
                part[u] = zl.bitcast(zl.convert(zl.convert(zl.bitcast(part[u], zl.bf16.x(2)), zl.f32), zl.f16), zl.u32)


@zl.inline
def multiply(acc, a, b, F):
    if F is zl.bf16:
        zl.mma_bf16(acc, a, b)
    else:
        zl.mma_f16(acc, a, b)
