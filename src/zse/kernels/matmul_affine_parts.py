"""What the products of int8 and int16 activations with affine weights share: planes of a tile, unpacking, dots of 32
columns, scales."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.matmul_tile import NEAR_WORDS, TILE, source_row

LOW = 0x0F0F0F0F
LUT = "lut4"  # as BITS: indices of 4 bits, looked up in a table (zse.kernels.matmul_lut4); then as 8 bits
HIGH_WORDS = {4: 0, 5: TILE, 6: 2 * TILE, 8: 0, LUT: 0}  # i32 of `high` in a block of a tile, by bits
STEPS_I16 = {4: 8, 5: 4, 6: 2}  # by bits, steps whose i16 sums cannot overflow: steps * 2 * (2**bits - 1) * 127 < 32768
IN_PAIRS = (0, 4, 1, 5, 2, 6, 3, 7)  # the steps of a block of 4 bits in the order of the words that hold two of them
MIDDLE = {4: 8.0, 5: 16.0, 6: 32.0, 8: 128.0, LUT: 128.0}  # what a symmetric scheme subtracts
FP4_CODES = ("e8m0", "e4m3")  # of scales of LUT whose table has numbers up to FP4_MIDDLE (zse.quant.lut4)
FP4_MIDDLE = 12.0
# Blocks of 32 columns that share a factor where scales are integers: CODE "i6" (q4, q5) and "i8" (q6) of affine weights
# (zse.quant.superblock). Their scales and offsets are widened together, into WIDE_ROWS rows of 16.
SUPER, WIDE_ROWS = 8, 16
BLOCK_TILES = 4  # of matmul_int8_many: what is read of the activations stays in the first cache for so many tiles


class Planes(NamedTuple):
    """Pointers at a tile's part of a weight's planes; table: its bytes plus 128, as lookup_s8 takes them, of LUT; wide: where
    widen_scales() writes."""

    q: Any
    high: Any
    scale: Any
    offset: Any
    factor: Any = None
    table: Any = None
    wide: Any = None


class Int8Product(zl.Record):
    """Parameters of matmul_int8. a_low: the second byte of int16 activations, which WIDE says they are. blocks: K / 32.
    GROUP: 16, 32, or 0 for any multiple of 32 (group_blocks * 32). PARTS: register parts of a tile computed in one pass
    over k. TOKENS: of a pass. CODE: of scales: "f16", or of those that factors multiply, which offset points to then."""

    q: zl.Ptr[zl.i32, "const"]
    high: zl.Ptr[zl.i32, "const"]
    scale: zl.Ptr[zl.f16, "const"]
    offset: zl.Ptr[zl.f16, "const"]
    aq: zl.Ptr[zl.i8, "const"]
    a_low: zl.Ptr[zl.i8, "const"]
    a_scale: zl.Ptr[zl.f32, "const"]
    a_sum: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    tokens: zl.i64
    rows: zl.i64
    blocks: zl.i64
    group_blocks: zl.i64
    has_bias: zl.i64
    tasks: zl.Ptr[zl.i32, "const"]
    source: zl.Ptr[zl.i32, "const"]
    experts: zl.i64
    BITS: zl.static
    SYMMETRIC: zl.static
    GROUP: zl.static
    PARTS: zl.static
    TOKENS: zl.static
    WIDE: zl.static
    CODE: zl.static


@zl.inline
def tile_planes(p, tile, groups):
    if p.BITS == LUT:
        q, scale = p.q + tile * p.blocks * 64, p.scale + tile * groups * (TILE * (2 if p.CODE == "f16" else 1))
        return Planes(q, None, scale, None, tile_factor(p, tile), lookup_table(p))
    if is_coded(p):
        scale = zl.cast_ptr(p.scale, zl.u8) + tile * p.blocks * scale_bytes(p)
        factor = p.offset + tile * (p.blocks // SUPER) * (TILE if p.SYMMETRIC else 2 * TILE)
        wide = zl.local_array(zl.f32, WIDE_ROWS * TILE)
        high = p.high + tile * p.blocks * HIGH_WORDS[p.BITS]
        return Planes(p.q + tile * p.blocks * 64, high, scale, None, factor, None, wide)
    return Planes(
        p.q + tile * p.blocks * (128 if p.BITS == 8 else 64),
        p.high + tile * p.blocks * HIGH_WORDS[p.BITS],
        p.scale + tile * groups * TILE,
        p.offset + tile * groups * TILE,
    )


def is_coded(p) -> bool:
    """Whether scales are integers and offsets too."""
    return p.BITS != LUT and p.CODE != "f16"


def scale_bytes(p) -> int:
    """Of the coded scales of a block of 32 columns of a tile: 6 bits for sc and m, or two bytes."""
    return 2 * TILE if p.CODE == "i8" else TILE * 12 // SUPER


class SuperBlock(NamedTuple):
    """Of a register of rows. codes: of i6 the three words of fields, of i8 a pointer; d and low: the factors, f32, of
    scales and of minima (None of i8)."""

    codes: Any
    d: Any
    low: Any


@zl.inline
def super_block(p, planes, block, part):
    """The SuperBlock that begins at `block`."""
    lanes = zl.target.lanes
    row = part * lanes
    factor = planes.factor + block // SUPER * (TILE if p.SYMMETRIC else 2 * TILE) + row
    d = zl.convert(zl.load(factor, lanes), zl.f32)
    if p.CODE == "i8":
        return SuperBlock(zl.cast_ptr(planes.scale, zl.i8) + block * (2 * TILE) + row, d, None)
    first = zl.cast_ptr(planes.scale, zl.i32) + block // SUPER * (3 * TILE) + row
    words = [zl.load(first + j * TILE, lanes) for j in zl.static(range(3))]
    return SuperBlock(words, d, zl.convert(zl.load(factor + TILE, lanes), zl.f32) * -1.0)


@zl.inline
def code_of(words, field):
    """A field of 6 bits (its number at compile time) of three words, i32."""
    if field == 15:
        code = ((words[0] >> 30) & 3) | ((words[1] >> 28) & 12) | ((words[2] >> 26) & 48)
    else:
        code = (words[field // 5] >> (6 * (field % 5))) & 63
    return code


@zl.inline
def coded(p, of, group):
    """(d sc, -dmin m or None) of a group of a SuperBlock (its number there at compile time), f32."""
    if p.CODE == "i8":
        codes = zl.convert(zl.load(of.codes + group * TILE, zl.target.lanes), zl.i32)
        return zl.convert(codes, zl.f32) * of.d, None
    return zl.convert(code_of(of.codes, group), zl.f32) * of.d, zl.convert(
        code_of(of.codes, SUPER + group), zl.f32
    ) * of.low


@zl.inline
def widen_scales(p, planes, block, part):
    """coded() of all groups of the super-block that begins at `block` to planes.wide: d sc, of i6 then -dmin m."""
    of = super_block(p, planes, block, part)
    for group in zl.static(range(WIDE_ROWS if p.SYMMETRIC else SUPER)):
        place, (scale, offset) = planes.wide + group * TILE + part * zl.target.lanes, coded(p, of, group)
        zl.store(place, scale)
        if offset is not None:
            zl.store(place + SUPER * TILE, offset)


@zl.inline
def widen_if_first(p, planes, block, parts):
    """widen_scales() where a super-block begins."""
    if is_coded(p):
        if block & (SUPER - 1) == 0:
            for part in zl.static(parts):
                widen_scales(p, planes, block, part)


@zl.inline
def group_scales(p, planes, group, part):
    """(scale, offset or None of symmetric schemes) of a group, f32; its super-block is widened where there is such."""
    lanes = zl.target.lanes
    if is_coded(p):
        place = planes.wide + (group & (WIDE_ROWS - 1 if p.SYMMETRIC else SUPER - 1)) * TILE + part * lanes
        return zl.load(place, lanes), None if p.SYMMETRIC else zl.load(place + SUPER * TILE, lanes)
    if p.BITS == LUT:
        s = table_step(p, planes, group, part)
    else:
        s = zl.convert(zl.load(planes.scale + group * TILE + part * lanes, lanes), zl.f32)
    return s, None if p.SYMMETRIC else zl.convert(zl.load(planes.offset + group * TILE + part * lanes, lanes), zl.f32)


@zl.inline
def dot_bits(p):
    """Of the bytes that are multiplied, as BITS: FP4's numbers plus 12 are 5 bits, whose products add up in i16. VNNI and
    dotprod take 8 bits as they are."""
    if p.BITS == LUT and p.CODE in FP4_CODES and not (zl.target.has("vnni") or zl.target.has("dotprod")):
        return 5
    return p.BITS


@zl.inline
def middle(p):
    """What a symmetric scheme subtracts."""
    return MIDDLE[p.BITS] if dot_bits(p) == p.BITS else FP4_MIDDLE


@zl.inline
def tile_factor(p, tile):
    """A tile's part of the plane `factor`, or None."""
    if p.CODE == "i8":
        return zl.cast_ptr(p.factor, zl.f16) + tile * (p.blocks // 8) * TILE
    return zl.cast_ptr(p.factor, zl.f32) + tile * TILE if p.CODE == "e4m3" else None


@zl.inline
def lookup_table(p):
    """The 16 numbers, each plus middle(), as often as a register holds them."""
    lanes = zl.target.lanes
    words = [word ^ -2139062144 for word in (p.table0, p.table1, p.table2, p.table3)]  # 0x80808080
    table = zl.make_vector(*words * (lanes // 4))
    if dot_bits(p) != p.BITS:
        table = zl.add_i16(table, zl.i32.x(lanes)(-1953723508))  # 116 less: 0x8B8C8B8C, no byte borrows
    return table


@zl.inline
def table_step(p, planes, group, part):
    """What multiplies a group's numbers of the table, f32 (zse.quant.lut4)."""
    lanes = zl.target.lanes
    at = group * TILE + part * lanes
    if p.CODE == "f16":
        return zl.convert(zl.load(zl.cast_ptr(planes.scale, zl.f16) + at, lanes), zl.f32)
    if p.CODE == "i8":
        values = zl.convert(zl.load(zl.cast_ptr(planes.scale, zl.i8) + at, lanes), zl.i32)
        place = planes.factor + group // (256 // p.GROUP) * TILE + part * lanes
        return zl.convert(values, zl.f32) * (zl.convert(zl.load(place, lanes), zl.f32) * p.unit)
    code = zl.convert(zl.load(planes.scale + at, lanes), zl.i32)
    if p.CODE == "e8m0":
        return zl.bitcast(code << 23, zl.f32.x(lanes)) * p.unit
    # Three bits of fraction where f32 has them, the exponent 120 too small: subnormal numbers stay exact, too.
    value = zl.bitcast((code & 127) << 20, zl.f32.x(lanes)) * 2.0**120
    return value * (zl.load(planes.factor + part * lanes, lanes) * p.unit)


@zl.inline
def unpack(planes, block, part, BITS):
    """The 8 steps of one 32-wide block as byte vectors (values 0 .. 2**BITS - 1, of LUT 0 .. 255) for a register of
    rows, the tile's `part`th. Where signed bytes are multiplied (dotprod) 8 bits and LUT are 128 less."""
    lanes = zl.target.lanes
    row = part * lanes
    if BITS == 8:
        if zl.target.has("dotprod"):
            return [
                signed_bytes(zl.load(planes.q + block * 128 + (s * TILE + row), lanes)) for s in zl.static(range(8))
            ]
        return [zl.load(planes.q + block * 128 + (s * TILE + row), lanes) for s in zl.static(range(8))]
    packed = [zl.load(planes.q + block * 64 + (j * TILE + row), lanes) for j in zl.static(range(4))]
    w = [nibbles(packed[s % 4], s) for s in zl.static(range(8))]
    if BITS == 5:
        bits = zl.load(planes.high + block * TILE + row, lanes)
        w = [w[s] | ((bits << (4 - s) if s <= 4 else bits >> (s - 4)) & 0x10101010) for s in zl.static(range(8))]
    if BITS == 6:
        pairs = [zl.load(planes.high + block * (2 * TILE) + (half * TILE + row), lanes) for half in zl.static(range(2))]
        w = [
            w[s] | ((pairs[s // 4] << (4 - 2 * (s % 4)) if s % 4 <= 2 else pairs[s // 4] >> 2) & 0x30303030)
            for s in zl.static(range(8))
        ]
    if BITS == LUT and zl.target.has("dotprod"):
        table = signed_bytes(planes.table)
        w = [zl.lookup_s8(table, index) for index in w]
    elif BITS == LUT:
        w = [zl.lookup_s8(planes.table, index) for index in w]
    return w


@zl.inline
def nibbles(packed, s):
    """The s-th of a block's 8 steps of 4 bits, of the word that holds it."""
    return packed & LOW if s < 4 else high_halves(packed)


@zl.inline
def high_halves(bytes_):
    """The upper four bits of each byte."""
    lanes = zl.target.lanes
    if zl.target.has("neon"):  # which shifts bytes, x86 i16 at least
        return zl.bitcast(zl.bitcast(bytes_, zl.u8.x(4 * lanes)) >> 4, zl.i32.x(lanes))
    return (bytes_ >> 4) & LOW


@zl.inline
def prefetch_block(p, planes, block):
    """The lines of 64 bytes of a tile's block of 32 columns, into the second cache: the first has too few places for what it
    waits for (8 tokens of int8 from memory: 63 µs for 122)."""
    words = 8 * TILE if p.BITS == 8 else 4 * TILE
    for line in zl.static(range(0, words, 16)):
        zl.prefetch_l2(planes.q + block * words + line)
    prefetch_scales(p, planes, block, zl.prefetch_l2)


@zl.inline
def prefetch_line(p, planes, block, line):
    """A token alone: the lines NEAR_WORDS behind the line-th of a tile's block of 32 columns, of q and `high`."""
    words = 8 * TILE if p.BITS == 8 else 4 * TILE
    zl.prefetch_here(planes.q + block * words + (NEAR_WORDS + line * TILE))
    if line * TILE < HIGH_WORDS[p.BITS]:
        zl.prefetch_here(planes.high + block * HIGH_WORDS[p.BITS] + (NEAR_WORDS + line * TILE))


@zl.inline
def prefetch_lines(p, planes, block):
    """All of the block."""
    for line in zl.static(range(8 if p.BITS == 8 else 4)):
        prefetch_line(p, planes, block, line)


@zl.inline
def prefetch_scales(p, planes, block, prefetch):
    """What belongs to a tile's block of 32 columns in other planes than q. prefetch: into which cache."""
    for line in zl.static(range(0, HIGH_WORDS[p.BITS], 16)):
        prefetch(planes.high + block * HIGH_WORDS[p.BITS] + line)
    if is_coded(p):
        prefetch(planes.scale + block * scale_bytes(p))
        prefetch(planes.factor + block * (TILE // SUPER if p.SYMMETRIC else 2 * TILE // SUPER))
    elif p.GROUP != 0:
        group = block * 2 if p.GROUP == 16 else block
        prefetch(planes.scale + group * (TILE * 2 if p.BITS == LUT and p.CODE == "f16" else TILE))
        if not p.SYMMETRIC:
            prefetch(planes.offset + group * TILE)


@zl.inline
def signed_bytes(w):
    """q - 128 as signed bytes."""
    return w ^ zl.i32.x(zl.target.lanes)(-2139062144)  # 0x80808080


@zl.inline
def dots(w, a, first, count, BITS):
    """For every token's activations in `a` (i32 pointers): i32 lanes, the sum over steps first .. first + count - 1 of
    weights times the broadcast activations. Steps outside, tokens inside: the tokens' sums are independent chains that
    hide the latency of a multiply-add."""
    lanes = zl.target.lanes
    totals = [zl.i32.x(lanes)(0) for _ in a]
    if zl.target.has("dotprod"):
        for start in zl.static(range(first, first + count, 4)):
            values = [zl.load(at + start, 4) for at in a]
            for s in zl.static(range(4)):
                for t in zl.static(range(len(a))):
                    totals[t] = zl.dot4_s8(totals[t], w[start + s], values[t], s)
    elif zl.target.has("vnni"):
        for s in zl.static(range(first, first + count)):
            for t, at in enumerate(a):
                totals[t] = zl.dot4_u8s8(totals[t], w[s], zl.splat(at[s], lanes))
    elif BITS in (8, LUT):
        for s in zl.static(range(first, first + count)):
            weights = signed_bytes(w[s])
            size = zl.abs_s8(weights)
            for t, at in enumerate(a):
                totals[t] += zl.pairs_i16(zl.pairs_u8s8(size, zl.sign_s8(zl.splat(at[s], lanes), weights)))
    else:
        run = STEPS_I16[BITS]
        for start in zl.static(range(first, first + count, run)):
            sums = [zl.pairs_u8s8(w[start], zl.splat(at[start], lanes)) for at in a]
            for s in zl.static(range(start + 1, min(start + run, first + count))):
                for t, at in enumerate(a):
                    sums[t] = zl.add_i16(sums[t], zl.pairs_u8s8(w[s], zl.splat(at[s], lanes)))
            for t in zl.static(range(len(a))):
                totals[t] += zl.pairs_i16(sums[t])
    return totals


@zl.inline
def load_scales(p, planes, group, part):
    """(scale, what multiplies scale_a * sum(q_a)) of a group, f32."""
    s, o = group_scales(p, planes, group, part)
    return in_units(p, s, o)


@zl.inline
def in_units(p, s, o):
    """A scale, and an offset or None, as the dot products want them: these are of q, or of q - 128 for BITS 8 and LUT
    without VNNI; of int16 activations they are 256 times as large, and the scale as much smaller."""
    unit = s * (1 / 256) if p.WIDE else s
    centered = dot_bits(p) in (8, LUT) and not zl.target.has("vnni")
    if p.SYMMETRIC:
        return unit, None if centered else s * -middle(p)
    return unit, zl.fma(s, 128.0, o) if centered else o


@zl.inline
def sum16(a):
    """The sum of 16 int8 values at a (i32 pointer), as i32: products with ones, then across four lanes."""
    ones, bytes_ = zl.i32.x(4)(0x01010101), zl.load(a, 4)
    if zl.target.has("dotprod"):
        return zl.reduce_add(zl.dot4_s8(zl.i32.x(4)(0), ones, bytes_))
    return zl.reduce_add(
        zl.dot4_u8s8(zl.i32.x(4)(0), ones, bytes_)
        if zl.target.has("vnni")
        else zl.pairs_i16(zl.pairs_u8s8(ones, bytes_))
    )


@zl.inline
def half_sum(a, t, block):
    """What multiplies the offset of the first 16 values of a block, of token t of the Activations a."""
    q = zl.cast_ptr(a.q[t] + block * 32, zl.i32)
    if not a.low:
        return zl.f32(sum16(q)) * a.scale[t][block]
    low = zl.cast_ptr(a.low[t] + block * 32, zl.i32)
    return zl.f32((sum16(q) << 8) + sum16(low)) * (1 / 256) * a.scale[t][block]


@zl.inline
def num_groups(p):
    """Groups of a row."""
    return p.blocks * 2 if p.GROUP == 16 else p.blocks if p.GROUP == 32 else p.blocks // p.group_blocks


@zl.inline
def joined_dots(w, a, low, first, count, BITS):
    """dots() of int8 activations, or 256 * dots() of a + dots() of low: at most 2**28, which i32 holds."""
    totals = dots(w, a + low, first, count, BITS)
    tokens = len(a)
    return [(totals[t] << 8) + totals[tokens + t] for t in range(tokens)] if low else totals


@zl.inline
def token_dots(p, w, a, block, first, count):
    """joined_dots() of one token for the steps w of several registers of rows: a broadcast serves all."""
    lanes, run = zl.target.lanes, STEPS_I16[dot_bits(p)]
    rows = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.q + a.low]
    totals = [[zl.i32.x(lanes)(0) for _ in rows] for _ in w]
    for start in zl.static(range(first, first + count, run)):
        sums = [[None for _ in rows] for _ in w]
        for s in zl.static(IN_PAIRS if run == count == 8 else range(start, min(start + run, first + count))):
            for t, at in enumerate(rows):
                value = zl.splat(at[s], lanes)
                for n in zl.static(range(len(w))):
                    pairs = zl.pairs_u8s8(w[n][s], value)
                    sums[n][t] = pairs if sums[n][t] is None else zl.add_i16(sums[n][t], pairs)
        for n in zl.static(range(len(w))):
            for t in zl.static(range(len(rows))):
                totals[n][t] += zl.pairs_i16(sums[n][t])
    return [(each[0] << 8) + each[1] if a.low else each[0] for each in totals]


class Activations(NamedTuple):
    """Pointers at each token's row of activations; low: [] of int8."""

    q: Any
    low: Any
    scale: Any
    sum: Any


@zl.inline
def activations_at(p, tokens):
    """Of these tokens."""
    rows = [source_row(p, token) for token in tokens]
    return Activations(
        [p.aq + row * (p.blocks * 32) for row in rows],
        [p.a_low + row * (p.blocks * 32) for row in rows] if p.WIDE else [],
        [p.a_scale + row * p.blocks for row in rows],
        [p.a_sum + row * p.blocks for row in rows],
    )


@zl.inline
def has_offset(p):
    """Whether load_scales() gives an offset."""
    return not (p.SYMMETRIC and dot_bits(p) in (8, LUT) and not zl.target.has("vnni"))
