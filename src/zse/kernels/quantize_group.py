"""Numbers onto affine groups as zse.quant.quantize does it, bit for bit: what the kernels of the CPU and of a GPU
share.

Values are f32, or vectors of f32 with a group in each lane. `READ(source, k, LANES)`, an inline function, gives a list
of STEP values: columns k to k + STEP - 1 of the groups."""

from zse import kernel as zl

SHRINK = (1.0, 0.93, 0.86, 0.78)  # of zse.quant.quantize
REFITS = 2
F16_MAX = 65504.0
F16_MAX_BITS = 0x477FE000
INPUTS = {"bf16": zl.bf16, "f16": zl.f16, "f32": zl.f32}
BAD_SCALE, BAD_OFFSET = 2, 1  # what a number of a checkpoint cannot be; the larger one is told


@zl.inline
def spread(bits):
    """The four nibbles of the low 16 bits of each u32, one to a byte."""
    x = (bits | (bits << 8)) & 0x00FF00FF
    return (x | (x << 4)) & 0x0F0F0F0F


@zl.inline
def as_f16(value):
    """Rounded to f16, as f32."""
    return zl.convert(zl.convert(value, zl.f16), zl.f32)


@zl.inline
def limited(offset):
    """An offset as f16 can hold it."""
    return as_f16(min(max(offset, -F16_MAX), F16_MAX))


@zl.inline
def quotient(a, b):
    """a / b, 0 where b is 0."""
    return zl.where(b != 0.0, a / b, b - b)


@zl.inline
def quantized(value, base, inverse, BITS):
    """The nearest integers, as f32."""
    return min(max(zl.round_even((value - base) * inverse), 0.0), float((1 << BITS) - 1))


@zl.inline
def symmetric_range(high, low):
    """(scale, base) of 8-bit groups without offsets, of their largest and smallest values."""
    scale = as_f16(abs(zl.where(-low >= high, low, high)) / 127.0)
    return scale, scale * -128.0


@zl.inline
def searched_range(READ, source, size, high, low, STEP, LANES):
    """(scale, offset) of 4-bit groups of `size` columns: the best of the shrunk ranges, refitted."""
    middle, reach, none = (high + low) / 2.0, (high - low) / 2.0, high - high
    scales = [as_f16(2 * shrink * reach / 15.0) for shrink in zl.static(SHRINK)]
    offsets = [limited(middle - shrink * reach) for shrink in zl.static(SHRINK)]
    inverses = [quotient(1.0, scale) for scale in scales]
    errors = [none + 0.0 for _ in zl.static(SHRINK)]
    for k in range(0, size, STEP):
        for v in READ(source, k, LANES):
            for i in zl.static(range(len(SHRINK))):
                error = v - scales[i] * quantized(v, offsets[i], inverses[i], 4) - offsets[i]
                errors[i] = errors[i] + error * error
    scale, offset, least = scales[0], offsets[0], errors[0]
    for i in zl.static(range(1, len(SHRINK))):
        is_better = errors[i] < least
        scale = zl.where(is_better, scales[i], scale)
        offset = zl.where(is_better, offsets[i], offset)
        least = zl.where(is_better, errors[i], least)
    count = zl.f32(zl.i32(size))
    for _ in zl.static(range(REFITS)):
        inverse, sum_q, sum_v = quotient(1.0, scale), none + 0.0, none + 0.0
        for k in range(0, size, STEP):
            for v in READ(source, k, LANES):
                sum_q = sum_q + quantized(v, offset, inverse, 4)
                sum_v = sum_v + v
        mean_q, mean_v, square, product = sum_q / count, sum_v / count, none + 0.0, none + 0.0
        for k in range(0, size, STEP):
            for v in READ(source, k, LANES):
                centred = quantized(v, offset, inverse, 4) - mean_q
                square = square + centred * centred
                product = product + v * centred
        fitted = quotient(product, square)
        scale_new, offset_new, total = as_f16(fitted), limited(mean_v - fitted * mean_q), none + 0.0
        inverse_new = quotient(1.0, scale_new)
        for k in range(0, size, STEP):
            for v in READ(source, k, LANES):
                error = v - scale_new * quantized(v, offset_new, inverse_new, 4) - offset_new
                total = total + error * error
        is_better = total < least
        scale = zl.where(is_better, scale_new, scale)
        offset = zl.where(is_better, offset_new, offset)
        least = zl.where(is_better, total, least)
    return scale, offset
