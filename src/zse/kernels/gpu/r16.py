"""Layout r16 in registers: integer weights of 4, 5, 6 or 8 bits become f32 or bf16 (zse.quant.scheme draws the planes).

Step s of a 32-block is columns 4s .. 4s + 3; a row's word of steps s and s + 4 (4 to 6 bits) or of one step (8 bits) is one u32. A byte
becomes f32 without a conversion instruction: it is placed into the mantissa of 128.0 (2**15 for 8 bits), which gives MAGIC + q, and
one multiply-add takes MAGIC away together with applying scale and offset: w = scale * (MAGIC + q) + (offset - MAGIC * scale). The
rounding of the last term is below 2**-9 of a quantization step.
"""

from zse.kernel import bf16, bitcast, convert, f16, f32, fma, inline, make_vector, prmt, static, u32

LOW = 0x0F0F0F0F
HIGH_BYTES = {4: 0, 5: 64, 6: 128, 8: 0}        # of the `high` plane, per 16 rows and 32 columns
MAGIC = {4: 128.0, 5: 128.0, 6: 128.0, 8: 32768.0}


def q_bytes(bits: int) -> int:
    """Bytes of the `q` plane per 16 rows and 32 columns."""
    return 512 if bits == 8 else 256


def center(scheme) -> float:
    """What multiplies the scale so that it can be added to the offset (0 if the scheme is symmetric)."""
    return -MAGIC[scheme.bits] - (2 ** (scheme.bits - 1) if scheme.symmetric else 0)


@inline
def step_bytes(word, high, step, second, BITS):
    """Four weights as bytes of a u32: of step `step` (0 .. 3, run time), or of step + 4 if `second`. word: of that step (8 bits) or of
    both; high: the row's word of the `high` plane (6 bits: the half of it that has this step)."""
    if BITS == 8:
        return word
    q = (word >> 4) & LOW if second else word & LOW
    if BITS == 5:
        q = q | ((high >> step if second else high << (4 - step)) & 0x10101010)
    if BITS == 6:
        q = q | (((high >> (step * 2)) & 0x03030303) << 4)
    return q


@inline
def selector(byte, BITS):
    """How prmt places byte `byte` (u32, run time or not) of a word into the magic number."""
    return byte * (16 if BITS == 8 else 256) + (0x7404 if BITS == 8 else 0x7044)


@inline
def pair_bf16(q, first, second, scale, shift, BITS):
    """Two bytes of q, given by their selectors, as two bf16 in a register. shift: offset - MAGIC * scale."""
    magic = u32(0x47000000 if BITS == 8 else 0x43000000)
    a = fma(bitcast(prmt(q, magic, first), f32), scale, shift)
    b = fma(bitcast(prmt(q, magic, second), f32), scale, shift)
    return bitcast(convert(make_vector(a, b), bf16), u32)


@inline
def read_scales(scale, offset, scale_at, has_offset, half_step, HALVES):
    """f16 scales and offsets of some rows of a block: HALVES of each row, half_step apart; the rows of a half together."""
    rows = len(scale_at)
    scales = [scale[scale_at[y] + h * half_step] for h in static(range(HALVES)) for y in static(range(rows))]
    offsets = [f16(0) for _ in static(range(HALVES * rows))]
    if has_offset != 0:
        for h in static(range(HALVES)):
            for y in static(range(rows)):
                offsets[h * rows + y] = offset[scale_at[y] + h * half_step]
    return scales, offsets


@inline
def factors(scales, offsets, center):
    """What read_scales() gave, as f32 (scale, shift) for pair_bf16."""
    scale = [convert(v, f32) for v in scales]
    return scale, [fma(scale[i], center, convert(offsets[i], f32)) for i in static(range(len(scales)))]
