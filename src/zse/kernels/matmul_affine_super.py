"""Products of int8 activations with superblock weights without VNNI: their integer scales multiply where i16 pairs are added.

The instruction that adds pairs of i16 multiplies them, by 1 elsewhere, here by the group's scale. Of a super-block of 256
columns

    out += d * sum over blocks b of a_scale[b] * (sum over b's groups g of sc[g] * dot[g])

and then, of schemes with minima, out += offset[b] * a_sum[b] block by block. The sums in brackets are integers below 2**24
(2 * 128 * 16 * 32 * 127 of q6, 63 * 32 * 31 * 127 of q5), which f32 holds: however they are computed, alone or in a batch, a
token's bits are the same. For several tokens q6's weights are signed (q - 32) and activations are 128 more. What that adds to a
lane of i16, 128 * its weights, is known when a tile is unpacked, and sums start from less so much: they wrap, but what they end
as is at most 8 * 32 * 127, so four steps are added before they are scaled, not two, and no sums of 16 activations are needed."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.matmul_affine_parts import (
    IN_PAIRS,
    STEPS_I16,
    SUPER,
    code_of,
    is_coded,
    nibbles,
    prefetch_block,
    prefetch_line,
    super_block,
    unpack,
)
from zse.kernels.matmul_tile import TILE, adds_i16

PASS = 4  # tokens that are multiplied together, or half as many
PLUS_128 = -2139062144  # 0x80808080
# Bytes: two high bits of q6 as 16 * (bits - 2), by the lower two bits of four, and by the upper two.
HIGH_LESS_32 = (0x1000F0E0,) * 4, (-0x1F1F1F20, -0x0F0F0F10, 0, 0x10101010)
# Bytes of 16, as lookup_s8 takes them: turned by two words, by one.
TURNS = (0x0B0A0908, 0x0F0E0D0C, 0x03020100, 0x07060504), (0x07060504, 0x0B0A0908, 0x0F0E0D0C, 0x03020100)


class StagedTile(NamedTuple):
    """A piece of a tile. words i32 [SUPER, steps_of(), 16]; scale f32 [SUPER, 2 halves, 16], or i32, twice an i16, where scales are
    integers; offset f32 [SUPER, 2 halves, 16], of q6 pairs of i16 that sums start from; d f32 [16]."""

    words: Any
    scale: Any
    offset: Any
    d: Any


class PassTokens(NamedTuple):
    """Pointers at the piece of some tokens' activations: i32 words, f32 scales, sums, sums of the first halves of blocks."""

    q: Any
    scale: Any
    sum: Any
    half: Any


class Ahead(NamedTuple):
    """What is brought near between products, block by block (all at once a piece makes the core wait): what begins at a block of
    a tile's planes, if it is wanted."""

    planes: Any
    block: Any
    wanted: Any


@zl.inline
def bring_near(p, ahead, i):
    """The i-th block of what is ahead."""
    if ahead is not None:
        if ahead.wanted:
            prefetch_block(p, ahead.planes, ahead.block + i)


@zl.inline
def in_integers(p):
    """Whether these products are meant. Those of int16 activations do not fit i32."""
    return is_coded(p) and not p.WIDE and adds_i16()


@zl.inline
def twice(code):
    """An i32 as two i16."""
    places = [zl.i32(0x01000100 + lane * 0x04040404) for lane in range(4)]
    return zl.lookup_s8(code, zl.make_vector(*places * (zl.target.lanes // 4)))


@zl.inline
def group_codes(p, of, block):
    """(the groups' integer scales, i32, the offset or None) of a block (its number at compile time) of a SuperBlock."""
    lanes = zl.target.lanes
    if p.CODE == "i8":
        return [zl.convert(zl.load(of.codes + (2 * block + half) * TILE, lanes), zl.i32) for half in range(2)], None
    return [code_of(of.codes, block)], zl.convert(code_of(of.codes, SUPER + block), zl.f32) * of.low


@zl.inline
def stage_super(p, planes, staged, first):
    """Unpack the super-block that begins at block `first` of a tile."""
    stage_scales(p, planes, staged, first)
    for i in range(SUPER):
        for part in zl.static(range(TILE // zl.target.lanes)):
            stage_words(p, planes, staged, first, i, part)


@zl.inline
def stage_scales(p, planes, staged, first):
    """The scales, offsets and factors."""
    lanes = zl.target.lanes
    for part in zl.static(range(TILE // lanes)):
        row, of = part * lanes, super_block(p, planes, first, part)
        zl.store(staged.d + row, of.d)
        for i in zl.static(range(SUPER)):
            scales, offset = group_codes(p, of, i)
            for half, scale in enumerate(scales):
                zl.store(zl.cast_ptr(staged.scale, zl.i32) + (2 * i + half) * TILE + row, twice(scale))
            if offset is not None:
                zl.store(staged.offset + i * TILE + row, offset)


@zl.inline
def stage_words(p, planes, staged, first, i, part):
    """The weights of the i-th block, of a part of the rows."""
    lanes = zl.target.lanes
    row = part * lanes
    w = unpack_signed(planes, first + i, part) if p.SYMMETRIC else unpack(planes, first + i, part, p.BITS)
    for s in zl.static(range(8)):
        zl.store(staged.words + (i * 8 + s) * TILE + row, w[s])
    if p.SYMMETRIC:
        for half in zl.static(range(2)):
            pairs = [zl.pairs_u8s8(zl.i32.x(lanes)(PLUS_128), w[half * 4 + s]) for s in zl.static(range(4))]
            pairs = zl.add_i16(zl.add_i16(pairs[0], pairs[1]), zl.add_i16(pairs[2], pairs[3]))
            less = zl.add_i16(pairs ^ -1, zl.i32.x(lanes)(0x00010001))
            zl.store(zl.cast_ptr(staged.offset, zl.i32) + (2 * i + half) * TILE + row, less)


@zl.inline
def unpack_signed(planes, block, part):
    """As unpack() of 6 bits, less 32."""
    lanes = zl.target.lanes
    row, low = part * lanes, unpack(planes, block, part, 4)
    tables = [zl.make_vector(*[zl.i32(word) for word in words] * (lanes // 4)) for words in zl.static(HIGH_LESS_32)]
    words = [zl.load(planes.high + block * (2 * TILE) + (half * TILE + row), lanes) for half in zl.static(range(2))]
    high = [nibbles(words[s // 2], s % 2 * 4) for s in zl.static(range(4))]  # of two steps each
    return [low[s] | zl.lookup_s8(tables[s % 2], high[s // 2]) for s in zl.static(range(8))]


@zl.inline
def multiply_super(p, staged, tokens, acc, packed, ahead):
    """acc f32 [tokens, 16] += the super-block. packed: its weights, of 4 bits, where they are not staged."""
    lanes, TOKENS = zl.target.lanes, len(tokens.q)
    PARTS = TILE // lanes
    sums = [[zl.f32.x(lanes)(0) for _ in zl.static(range(TOKENS))] for _ in zl.static(range(PARTS))]
    for i in range(SUPER):
        bring_near(p, ahead, i)
        totals = scaled_dots(p, staged, tokens, i, packed)
        for part in zl.static(range(PARTS)):
            for t in zl.static(range(TOKENS)):
                sums[part][t] = zl.fma(zl.convert(totals[part][t], zl.f32), tokens.scale[t][i], sums[part][t])
    places = [[acc + t * TILE + part * lanes for t in range(TOKENS)] for part in zl.static(range(PARTS))]
    for part in zl.static(range(PARTS)):
        d = zl.load(staged.d + part * lanes, lanes)
        for t in zl.static(range(TOKENS)):
            sums[part][t] = zl.fma(sums[part][t], d, zl.load(places[part][t], lanes))
    if not p.SYMMETRIC:
        for i in range(SUPER):
            offsets = [zl.load(staged.offset + i * TILE + part * lanes, lanes) for part in zl.static(range(PARTS))]
            for t in zl.static(range(TOKENS)):
                total = zl.f32.x(lanes)(tokens.sum[t][i])
                for part in zl.static(range(PARTS)):
                    sums[part][t] = zl.fma(offsets[part], total, sums[part][t])
    for part in zl.static(range(PARTS)):
        for t in zl.static(range(TOKENS)):
            zl.store(places[part][t], sums[part][t])


@zl.inline
def step_words(staged, packed, first, s, at):
    """The s-th of the 8 steps that begin at `first`, of a register of rows: as it was staged, or unpacked now."""
    if packed is None:
        return zl.load(staged.words + (first + s) * TILE + at, zl.target.lanes)
    return nibbles(zl.load(packed + (first // 2 + s % 4) * TILE + at, zl.target.lanes), s)


@zl.inline
def scaled_dots(p, staged, tokens, i, packed):
    """[parts][tokens] i32 lanes, of the i-th block: of each group the sum of products, times its scale, added up."""
    lanes, run = zl.target.lanes, 4 if p.SYMMETRIC else STEPS_I16[p.BITS]
    parts = [part * lanes for part in zl.static(range(TILE // lanes))]
    rows = [row + i * 8 for row in tokens.q]
    scales = zl.cast_ptr(staged.scale, zl.i32)
    totals = [[None for _ in rows] for _ in parts]
    for start in zl.static(range(0, 8, run)):
        sums = [[None for _ in rows] for _ in parts]
        if p.SYMMETRIC:
            less = zl.cast_ptr(staged.offset, zl.i32) + (2 * i + start // 4) * TILE
            sums = [[zl.load(less + at, lanes) for _ in rows] for at in parts]
        for s in zl.static(range(start, start + run) if packed is None else IN_PAIRS):
            w = [step_words(staged, packed, i * 8, s, at) for at in parts]
            for t, row in enumerate(rows):
                value = zl.splat(row[s], lanes)
                for part in zl.static(range(len(parts))):
                    pairs = zl.pairs_u8s8(value, w[part]) if p.SYMMETRIC else zl.pairs_u8s8(w[part], value)
                    sums[part][t] = pairs if sums[part][t] is None else zl.add_i16(sums[part][t], pairs)
        for part, at in enumerate(parts):
            scale = zl.load(scales + (2 * i + (start // 4 if p.GROUP == 16 else 0)) * TILE + at, lanes)
            for t in zl.static(range(len(rows))):
                scaled = zl.dot2_i16(sums[part][t], scale)
                totals[part][t] = scaled if totals[part][t] is None else totals[part][t] + scaled
    return totals


@zl.inline
def multiply_token(acc, p, planes, parts, a, first):
    """acc += the super-block that begins at block `first`, of a token alone, for these parts of a tile. Their steps take turns, so
    that one broadcast serves both: 13.3 cycles a register of rows and block of q4, 16 one part after the other."""
    lanes = zl.target.lanes
    blocks = [super_block(p, planes, first, part) for part in parts]
    sums = [zl.f32.x(lanes)(0) for _ in parts]
    less = zl.local_array(zl.i32, 8) if p.SYMMETRIC else None
    for i in zl.static(range(SUPER)):
        q = zl.cast_ptr(a.q[0] + (first + i) * 32, zl.i32)
        w = [unpack(planes, first + i, part, p.BITS) for part in parts]
        halves = [[None, None] for _ in parts]
        if p.SYMMETRIC:
            store_less(q, less)
            halves = [[zl.splat(less[4 * half], lanes) for half in range(2)] for _ in parts]
        for s in zl.static(IN_PAIRS):
            if s < 4:
                prefetch_line(p, planes, first + i, s)
            value = zl.splat(q[s], lanes)
            for n in zl.static(range(len(parts))):
                pairs, done = zl.pairs_u8s8(w[n][s], value), halves[n][s // 4]
                halves[n][s // 4] = pairs if done is None else zl.add_i16(done, pairs)
        for n in zl.static(range(len(parts))):
            total, codes = None, group_codes(p, blocks[n], i)[0]
            if STEPS_I16[p.BITS] == 8:
                total = zl.dot2_i16(zl.add_i16(halves[n][0], halves[n][1]), twice(codes[0]))
            else:
                scaled = [zl.dot2_i16(halves[n][half], twice(codes[half % len(codes)])) for half in range(2)]
                total = scaled[0] + scaled[1]
            sums[n] = zl.fma(zl.convert(total, zl.f32), a.scale[0][first + i], sums[n])
    for n in zl.static(range(len(parts))):
        acc[n] = zl.fma(sums[n], blocks[n].d, acc[n])
    if not p.SYMMETRIC:
        for i in zl.static(range(SUPER)):
            for n in zl.static(range(len(parts))):
                acc[n] = zl.fma(group_codes(p, blocks[n], i)[1], a.sum[0][first + i], acc[n])


@zl.inline
def store_less(q, less):
    """Of a block's 32 activations at q (i32 pointer): less i32 [8], of each half of them four times what its sums of i16 start from
    where weights are 32 more: -32 times the sums of columns 0 and 1, and 2 and 3, of its steps. Sums wrap; their end does not."""
    lanes = zl.target.lanes
    for at in zl.static(range(0, 8, lanes)):
        # 32 * (-1 - a), of two columns each, then of the four steps, and what is 1 too much of eight columns.
        pairs = zl.pairs_u8s8(zl.i32.x(lanes)(0x20202020), zl.load(q + at, lanes) ^ -1)
        for turn in zl.static(TURNS):
            pairs = zl.add_i16(
                pairs, zl.lookup_s8(pairs, zl.make_vector(*[zl.i32(word) for word in turn] * (lanes // 4)))
            )
        zl.store(less + at, zl.add_i16(pairs, zl.i32.x(lanes)(0x01000100)))
