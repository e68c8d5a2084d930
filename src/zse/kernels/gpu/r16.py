"""Layout r16 in registers: integer weights of 4, 5, 6 or 8 bits become bf16 (zse.quant.scheme draws the planes).

Step s of a 32-block is columns 4s .. 4s + 3; a row's word of steps s and s + 4 (4 to 6 bits) or of one step (8 bits) is
one u32.

4 to 6 bits stay in pairs of 16 bits: the bits of 128.0 with q in the lowest ones are 128 + q, from which 128 + the
middle is subtracted exactly, and one multiply-add on both applies scale and offset. Scale and offset + middle * scale
are rounded to bf16 first: 2**-9 of each, the same as the result's own rounding, and a hundredth of what the integers
have lost.

8 bits become f32: a byte is placed into the mantissa of 2**15, which gives 2**15 + q, and one multiply-add takes that
away together with applying scale and offset: w = scale * (2**15 + q) + (offset - 2**15 * scale). The rounding of the
last term is below 2**-9 of a step.
"""

from typing import Any

from zse import kernel as zl

NIBBLES = 0x000F000F  # of two halves of a u32
BF16_128 = 0x43004300  # two bf16 128.0
LUT4 = "lut4"  # as a kind of weights: indices of 4 bits, which a table makes 8-bit numbers of
FP4 = "fp4"  # the same whose table is that of E2M1, so that an index is a number's own bits
FP4_BITS, FP4_SIGN = 0x01C001C0, 0x80008000  # where exponent and mantissa, and the sign of E2M1 stand in two bf16
FP4_UNIT = (
    0x7E807E80  # two bf16 2**126: times the number that these bits are, it is the E2M1 number, 0.5 (subnormal) too
)
WIDE = (8, LUT4)  # kinds that become bf16 by way of f32
HIGH_BYTES = {4: 0, 5: 64, 6: 128, 8: 0, LUT4: 0, FP4: 0}  # of the `high` plane, per 16 rows and 32 columns
MAGIC = 32768.0  # of 8 bits
DEEP_TOKENS = 128  # tiles of more tokens have stages of two blocks, for there to be enough stages


def is_integer(kind: object) -> bool:
    """Whether weights are in this layout: their kind is a number of bits, LUT4 or FP4."""
    return isinstance(kind, int) or kind in (LUT4, FP4)


def q_bytes(bits: object) -> int:
    """Bytes of the `q` plane per 16 rows and 32 columns."""
    return 512 if bits == 8 else 256


def stage_blocks(bits: object, bt: int) -> int:
    """Blocks of 32 columns in a stage of a tile of `bt` tokens. A row of a copy's box has 1,024 bytes at most."""
    return 2 if bits == 8 or bt > DEEP_TOKENS else 4


def center(scheme) -> float:
    """What multiplies the scale so that it can be added to the offset (0 if the scheme is symmetric)."""
    bits = 8 if scheme.kind == "lut4" else scheme.bits  # once looked up
    middle = 2.0 ** (bits - 1)
    if bits == 8:
        return -MAGIC - (middle if scheme.symmetric else 0.0)
    return 0.0 if scheme.symmetric else middle


def arguments(weight) -> dict[str, Any]:
    """What the kernels of integer weights are given of one beside its numbers. Groups of 16 columns have two scales a
    block."""
    scheme, planes, width = weight.scheme, weight.planes, weight.shape[1]
    group = scheme.group or width
    return dict(
        scale=planes["scale"],
        offset=planes.get("offset"),
        blocks=width // 32,
        groups=scheme.groups(width),
        group_blocks=max(1, group // 32),
        half_step=16 if group == 16 else 0,
        has_offset=int(not scheme.symmetric),
        center=center(scheme),
    )


@zl.inline
def table_of(p):
    """The four words of a lut4 table, each byte plus 128. p: table0 .. 3."""
    return [word ^ 0x80808080 for word in (p.table0, p.table1, p.table2, p.table3)]


@zl.inline
def looked_up(word, second, table):
    """The bytes of the table (table_of) that a row's word has indices of: four columns of a step, or of step + 4 if
    `second`."""
    first, last = four_of(word, table), four_of(word >> 16, table)
    return zl.prmt(first, last, zl.u32(0x7531 if second else 0x6420))


@zl.inline
def four_of(index, table):
    """The bytes for the four lowest indices. prmt takes three bits of each, once from either half of the table; the
    fourth bit chooses between the two."""
    places = index & 0x7777
    low, high = zl.prmt(table[0], table[1], places), zl.prmt(table[2], table[3], places)
    return zl.prmt(low, high, ((index & 0x8888) >> 1) | 0x3210)


@zl.inline
def fp4_bits(word, n):
    """Nibble n (0 .. 3) of each half of a word, E2M1, as two bf16 of 2**-126 times the number."""
    sign = word << (12 - 4 * n) if n < 3 else word
    rest = word << (6 - 4 * n) if n < 2 else word >> (4 * n - 6)
    return zl.lop3(rest, zl.u32(FP4_BITS), sign & FP4_SIGN, 0xEA)


@zl.inline
def selector(byte, BITS):
    """How prmt takes byte `byte` (u32) of a word and the next one: 4 to 6 bits: both, into the halves of a u32, as one
    selector; 8 bits: into the magic number, two selectors. Indices of a table: by how many bits to shift the word."""
    if BITS == LUT4:
        return byte * 8
    if BITS == 8:
        return byte * 16 + 0x7404, byte * 16 + 0x7414
    return byte * 0x0101 + 0x4140, byte


@zl.inline
def pair_bf16(word, high, step, second, pick, scale, shift, BITS):
    """Two weights of a row as two bf16 in a register: the bytes given by `pick` (selector()), of step `step` (0 .. 3,
    run time), or of step + 4 if `second`. word: of that step (8 bits) or of both; high: the row's word of the `high`
    plane (6 bits: the half of it that has this step). scale, shift: from factors()."""
    if BITS in WIDE:
        magic = zl.u32(0x47000000)
        a = zl.fma(zl.bitcast(zl.prmt(word, magic, pick[0]), zl.f32), scale, shift)
        b = zl.fma(zl.bitcast(zl.prmt(word, magic, pick[1]), zl.f32), scale, shift)
        return zl.bitcast(zl.convert(zl.make_vector(a, b), zl.bf16), zl.u32)
    both = zl.prmt(word, zl.u32(0), pick[0])
    if BITS == FP4:
        return zl.mul_bf16x2(zl.mul_bf16x2(fp4_bits(both, 1 if second else 0), zl.u32(FP4_UNIT)), scale)
    # One instruction: of two constants in a row the compiler makes two.
    q = zl.lop3(both >> 4 if second else both, zl.u32(NIBBLES), zl.u32(BF16_128), 0xEA)
    if BITS == 5:
        more = zl.prmt(high, zl.u32(0), pick[0])
        q = q | (more >> step if second else more << (4 - step)) & 0x00100010
    if BITS == 6:
        q = q | ((zl.prmt(high, zl.u32(0), pick[0]) >> (step * 2)) & 0x00030003) << 4
    # -136.0, -144.0 or -160.0, twice
    return zl.fma_bf16x2(zl.add_bf16x2(q, zl.u32({4: 0xC308C308, 5: 0xC310C310, 6: 0xC320C320}[BITS])), scale, shift)


@zl.inline
def read_scales(scale, offset, scale_at, has_offset, half_step, HALVES):
    """f16 scales and offsets of some rows of a block: HALVES of each row, half_step apart; the rows of a half
    together."""
    rows = len(scale_at)
    scales = [scale[scale_at[y] + h * half_step] for h in zl.static(range(HALVES)) for y in zl.static(range(rows))]
    offsets = [zl.f16(0) for _ in zl.static(range(HALVES * rows))]
    if has_offset != 0:
        for h in zl.static(range(HALVES)):
            for y in zl.static(range(rows)):
                offsets[h * rows + y] = offset[scale_at[y] + h * half_step]
    return scales, offsets


@zl.inline
def twice_bf16(value):
    """An f32 as two equal bf16 in a register."""
    return zl.bitcast(zl.convert(zl.make_vector(value, value), zl.bf16), zl.u32)


@zl.inline
def factors(scales, offsets, center, BITS):
    """What read_scales() gave, as the (scale, shift) of pair_bf16, for each."""
    scale = [zl.convert(v, zl.f32) for v in scales]
    if BITS == FP4:  # the table's numbers are twice E2M1's
        scale = [v + v for v in scale]
    shift = [zl.fma(scale[i], center, zl.convert(offsets[i], zl.f32)) for i in zl.static(range(len(scales)))]
    if BITS not in WIDE:
        return [twice_bf16(v) for v in scale], [twice_bf16(v) for v in shift]
    return scale, shift
