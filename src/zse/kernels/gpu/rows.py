"""What row-wise GPU kernels share: reductions over a block, and the fp8 form of a row.

A reduction costs one barrier: every warp leaves its value in shared memory and every thread adds all of them in the
same order, so that the result does not depend on anything but the row. `scratch` is one place per warp
(`shared_array(f32, WARPS)`), not reused by the next reduction without a barrier in between.
"""

from zse import kernel as zl
from zse.tensor import SUM_COLUMNS

E4M3_LARGEST = 448.0


@zl.inline
def gathered(mine, scratch):
    """The warps' values of each of `mine` (alike in a warp), as a list in every thread."""
    warps = zl.target.threads // zl.target.warp
    if zl.lane_index() == 0:
        for i in zl.static(range(len(mine))):
            place = scratch if i == 0 else scratch + i * warps
            place[zl.warp_index()] = mine[i]
    zl.barrier()
    count = warps * len(mine)
    values = []
    for w in zl.static(range(0, count, 4)):
        if count % 4 == 0:
            four = zl.load(scratch + w, 4)
            values += [four[0], four[1], four[2], four[3]]
        else:
            values += [scratch[i] for i in zl.static(range(w, min(w + 4, count)))]
    return values


@zl.inline
def tree_sum(values):
    """Sum of a list as a tree."""
    parts = [value + 0.0 for value in values]
    for step in zl.static((16, 8, 4, 2, 1)):
        for i in zl.static(range(step)):
            if i + step < len(parts):
                parts[i] = parts[i] + parts[i + step]
    return parts[0]


@zl.inline
def square_sum(xs):
    """The sum of the squares of a thread's vectors of four f32."""
    sums = zl.f32.x(4)(0)
    for v in zl.static(range(len(xs))):
        sums += xs[v] * xs[v]
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@zl.inline
def value_sum(xs):
    """The sum of a thread's vectors of four f32."""
    sums = zl.f32.x(4)(0)
    for v in zl.static(range(len(xs))):
        sums += xs[v]
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@zl.inline
def inverse_rms(total, width, eps):
    """1 / sqrt(mean of the squares + eps) from their sum."""
    return 1.0 / zl.sqrt(total / zl.f32(width) + eps)


@zl.inline
def block_sum(value, scratch):
    """Sum of an f32 over the block, in every thread."""
    return tree_sum(gathered([zl.warp_sum(value)], scratch))


@zl.inline
def block_max(value, scratch):
    """Largest i32 or f32 of the block, in every thread."""
    values = gathered([zl.warp_max(value)], scratch)
    best = values[0]
    for other in zl.static(values[1:]):
        best = max(best, other)
    return best


@zl.inline
def magnitude_bits(v):
    """Bit pattern of |v|, which orders as the numbers do, infinity and then NaN above all."""
    return zl.bitcast(v, zl.i32) & 0x7FFFFFFF


@zl.inline
def largest_bits(bits):
    """The largest lane of an i32 vector of 4 or 8."""
    best = max(max(bits[0], bits[1]), max(bits[2], bits[3]))
    return max(best, max(max(bits[4], bits[5]), max(bits[6], bits[7]))) if len_of(bits) == 8 else best


def len_of(value):
    """Lanes of a vector, at compile time."""
    return value.type.lanes


@zl.inline
def store_fp8(values, q, sums, has_sums, row, k, width):
    """Some f32 of a row from column k on, already times its factor, as e4m3, if has_sums with the sum of each SUM_COLUMNS (see
    Fp8Activation). All threads of a warp take part, with neighbouring columns; those with k >= width store nothing, and
    their values are zeros."""
    rounded = zl.convert(values, zl.e4m3)
    if k < width:
        zl.store(q + (row * width + k), rounded)
    if has_sums != 0:
        kept = zl.convert(rounded, zl.f32)
        lanes = len_of(values)
        total = (kept[0] + kept[1]) + (kept[2] + kept[3])
        if lanes == 8:
            total = total + ((kept[4] + kept[5]) + (kept[6] + kept[7]))
        for mask in zl.static((1, 2, 4, 8, 16)):
            if mask * lanes < SUM_COLUMNS:
                total = total + zl.shuffle_xor(total, mask)
        if k < width:
            if k % SUM_COLUMNS == 0:
                stride = (width + (SUM_COLUMNS * 8 - 1)) // (SUM_COLUMNS * 8) * 8
                sums[row * stride + k // SUM_COLUMNS] = zl.convert(total, zl.f16)


@zl.inline
def fp8_scales(peak):
    """(scale, factor) of a row whose largest magnitude is `peak`: q = round(v * factor), v is about scale * q.

    A row of zeros, or one so small that the factor would overflow, becomes zeros; NaN and infinity reach the scale."""
    factor = zl.where(peak > 1e-30, E4M3_LARGEST / peak, zl.f32(0))
    return peak * (1.0 / E4M3_LARGEST), factor
