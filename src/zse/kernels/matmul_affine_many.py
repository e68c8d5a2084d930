"""Products of a CPU with affine weights for several tokens: weights are unpacked once for all tokens of a block.

A grid block is BLOCK_TILES tiles of 16 rows for up to TOKENS_PER_BLOCK tokens. It walks the columns in pieces of PIECE
blocks of 32: of a tile's piece the bytes and scales are unpacked into memory that the first cache holds (4 + 1 KiB of
48), then TOKENS tokens at a time are multiplied with them, whose activations (16 KiB a piece) stay there for the next
tile. Where i16 is multiplied (widens()) both are twice as large. Every token's sum goes through the operations of matmul_int8 in its order: alone or in a batch its bits are the
same."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.matmul_affine_parts import (
    BLOCK_TILES,
    LUT,
    STEPS_I16,
    Activations,
    Int8Product,
    dot_bits,
    half_sum,
    load_scales,
    num_groups,
    prefetch_block,
    tile_planes,
    unpack,
    widen_if_first,
)
from zse.kernels.matmul_tile import TILE, TOKENS_PER_BLOCK, block_tokens, source_row, stacked_tile, store_tile

PIECE = 8  # blocks of 32 columns
PAIR = 2  # tiles that are multiplied side by side
# Blocks of a row from which on the next tokens' activations are brought near: of rows that are so far apart, by a power
# of two, the first cache keeps no piece for the next tiles. 8,192 columns: 11 % faster; 4,096: 2 %.
LONG = 128
WORDS_I16 = 16  # of a block of 32 activations as i16
EVEN, LESS_128 = 0x00FF00FF, -8323200  # 0xFF80FF80


class Coming(NamedTuple):
    """What is staged next: planes of PAIR tiles, from block `first` on; wanted: which of them are to be brought near
    now."""

    planes: Any
    first: Any
    wanted: Any


class Around(NamedTuple):
    """What a block has beside its weights. halves f32 [TOKENS_PER_BLOCK, PIECE]: half_sum() of groups of 16. wide i32
    [TOKENS_PER_BLOCK, PIECE, WORDS_I16]: as widen_activations() writes it; at: the tokens' places there."""

    halves: Any
    wide: Any
    at: Any


class Staged(NamedTuple):
    """A piece of PAIR tiles. words i32 [PAIR, PIECE, parts, steps_of(), lanes]; scale and offset f32 [PAIR, PIECE, 2 halves,
    16], as load_scales gives them."""

    words: Any
    scale: Any
    offset: Any


@zl.inline
def stage(p, planes, staged, first, count):
    """Unpack blocks first .. first + count - 1 of a tile."""
    lanes = zl.target.lanes
    for i in range(count):
        block = first + i
        widen_if_first(p, planes, block, list(range(TILE // lanes)))
        for part in zl.static(range(TILE // lanes)):
            w = unpack(planes, block, part, p.BITS)
            if widens(p):
                w = widened_weights(p, w)
            for s in zl.static(range(len(w))):
                zl.store(staged.words + (i * TILE + part * lanes) * len(w) + s * lanes, w[s])
            for half in zl.static(range(2 if p.GROUP == 16 else 1)):
                group = block * 2 + half if p.GROUP == 16 else block if p.GROUP == 32 else block // p.group_blocks
                unit, offset = load_scales(p, planes, group, part)
                zl.store(staged.scale + (i * 2 + half) * TILE + part * lanes, unit)
                if offset is not None:
                    zl.store(staged.offset + (i * 2 + half) * TILE + part * lanes, offset)


@zl.inline
def multiply_staged(p, staged, coming, around, a, token, acc, first, count, part):
    """acc f32 [PAIR, TOKENS_PER_BLOCK, 16] += the piece, of a part of the rows, for the tokens of the Activations a
    from `token` of the block on. A broadcast activation serves PAIR registers of weights: loads are half as many as one
    alone would need. around: Around."""
    lanes, TOKENS = zl.target.lanes, len(a.q)
    HALVES = 2 if p.GROUP == 16 else 1
    STEPS = 8 // HALVES
    places = [
        [acc + (r * TOKENS_PER_BLOCK + token + t) * TILE + part * lanes for t in range(TOKENS)] for r in range(PAIR)
    ]
    sums = [[zl.load(places[r][t], lanes) for t in zl.static(range(TOKENS))] for r in zl.static(range(PAIR))]
    for i in range(count):
        block = first + i
        for r in zl.static(range(PAIR)):
            if coming.wanted[r]:
                prefetch_block(p, coming.planes[r], min(coming.first + i, p.blocks - 1))
        words = [staged.words + ((r * PIECE + i) * TILE + part * lanes) * steps_of(p) for r in zl.static(range(PAIR))]
        units = [staged.scale + (r * PIECE + i) * (2 * TILE) + part * lanes for r in zl.static(range(PAIR))]
        offsets = [staged.offset + (r * PIECE + i) * (2 * TILE) + part * lanes for r in zl.static(range(PAIR))]
        q = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.q]
        low = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.low]
        for half in zl.static(range(HALVES)):
            if widens(p):
                rows = [around.wide + (around.at[t] * PIECE + i) * WORDS_I16 for t in zl.static(range(TOKENS))]
                totals = pair_dots_i16(words, rows, half * STEPS, STEPS)
            else:
                totals = pair_dots(p, words, q, low, half * STEPS, STEPS)
            for r in zl.static(range(PAIR)):
                scale = zl.load(units[r] + half * TILE, lanes)
                for t in zl.static(range(TOKENS)):
                    sums[r][t] = zl.fma(zl.convert(totals[r][t], zl.f32), scale * a.scale[t][block], sums[r][t])
        if has_offset(p):
            for r in zl.static(range(PAIR)):
                for half in zl.static(range(HALVES)):
                    offset = zl.load(offsets[r] + half * TILE, lanes)
                    for t in zl.static(range(TOKENS)):
                        total = a.sum[t][block]
                        if HALVES == 2:
                            mine = around.halves[(token + t) * PIECE + i]
                            total = total - mine if half == 1 else mine
                        sums[r][t] = zl.fma(offset, total, sums[r][t])
    for r in zl.static(range(PAIR)):
        for t in zl.static(range(TOKENS)):
            zl.store(places[r][t], sums[r][t])


@zl.inline
def pair_dots(p, words, q, low, first, count):
    """[PAIR][tokens] i32 lanes: joined_dots of both registers, which share an activation's broadcast. One byte of int16
    activations after the other, in one sum: registers for twice the tokens, which share the loads."""
    lanes = zl.target.lanes
    if not (zl.target.has("vnni") or zl.target.has("dotprod")):
        return pair_dots_i8(p, words, q, first, count)
    totals = [[zl.i32.x(lanes)(0) for _ in q] for _ in words]
    for place, rows in enumerate([q, low] if low else [q]):
        if place == 1:
            totals = [[total << 8 for total in mine] for mine in totals]
        for s in zl.static(range(first, first + count)):
            if s % 4 == 0 and zl.target.has("dotprod"):
                values = [zl.load(at + s, 4) for at in rows]
            w = [zl.load(at + s * lanes, lanes) for at in words]
            for t, at in enumerate(rows):
                if zl.target.has("dotprod"):
                    for r in zl.static(range(len(words))):
                        totals[r][t] = zl.dot4_s8(totals[r][t], w[r], values[t], s % 4)
                else:
                    value = zl.splat(at[s], lanes)
                    for r in zl.static(range(len(words))):
                        totals[r][t] = zl.dot4_u8s8(totals[r][t], w[r], value)
    return totals


@zl.inline
def pair_dots_i8(p, words, q, first, count):
    """The same by sums of i16, for weights of 4 to 6 bits. Where these are widened more than once, two tokens at a time: sums
    and totals of four do not fit 16 registers."""
    lanes, run = zl.target.lanes, STEPS_I16[dot_bits(p)]
    together = len(q) if run >= count else 2
    totals = [[zl.i32.x(lanes)(0) for _ in q] for _ in words]
    for start in zl.static(range(first, first + count, run)):
        for begin in zl.static(range(0, len(q), together)):
            sums = [[zl.i32.x(lanes)(0) for _ in zl.static(range(together))] for _ in words]
            for s in zl.static(range(start, min(start + run, first + count))):
                w = [zl.load(at + s * lanes, lanes) for at in words]
                for t in zl.static(range(together)):
                    value = zl.splat(q[begin + t][s], lanes)
                    for r in zl.static(range(len(words))):
                        pairs = zl.pairs_u8s8(w[r], value)
                        sums[r][t] = pairs if s == start else zl.add_i16(sums[r][t], pairs)
            for t in zl.static(range(together)):
                for r in zl.static(range(len(words))):
                    totals[r][begin + t] += zl.pairs_i16(sums[r][t])
    return totals


@zl.inline
def widens(p):
    """Whether i16 values are multiplied: without VNNI and dotprod, where bytes take more steps (weights of 8 bits a sign,
    int16 activations two products, each then a sum of pairs)."""
    return not (zl.target.has("vnni") or zl.target.has("dotprod")) and (p.WIDE or dot_bits(p) in (8, LUT))


@zl.inline
def steps_of(p):
    """Registers of weights that a block of 32 columns has for a register of rows."""
    return 16 if widens(p) else 8


@zl.inline
def widened_weights(p, w):
    """unpack()'s bytes as pairs of i16: of each step columns 0 and 2, then 1 and 3; less 128 of 8 bits."""
    lanes = zl.target.lanes
    parts = [[(step >> shift) & zl.i32.x(lanes)(EVEN) for shift in zl.static((0, 8))] for step in w]
    if dot_bits(p) in (8, LUT):
        parts = [[zl.add_i16(part, zl.i32.x(lanes)(LESS_128)) for part in step] for step in parts]
    return [part for step in parts for part in step]


@zl.inline
def widen_activations(p, a, block, place):
    """Write a block of one token's activations as i16 [2, 16]: columns 0 and 2 of each step, then 1 and 3. int16 ones are q *
    256 + low."""
    lanes = zl.target.lanes
    even = zl.i32.x(lanes)(EVEN)
    for at in zl.static(range(0, 8, lanes)):
        q = zl.load(zl.cast_ptr(a.q[0] + block * 32, zl.i32) + at, lanes)
        bytes_ = zl.load(zl.cast_ptr(a.low[0] + block * 32, zl.i32) + at, lanes) if p.WIDE else q
        positive = bytes_ ^ zl.i32.x(lanes)(-2139062144)  # 0x80808080: plus 128
        parts = [zl.add_i16((positive >> shift) & even, zl.i32.x(lanes)(LESS_128)) for shift in zl.static((0, 8))]
        if p.WIDE:
            parts = [zl.add_i16(parts[0], (q & even) << 8), zl.add_i16(parts[1], q & (even << 8))]
        zl.store(place + at, parts[0])
        zl.store(place + 8 + at, parts[1])


@zl.inline
def pair_dots_i16(words, rows, first, count):
    """As pair_dots, of what stage() and widen_activations() wrote. Products and sums fit i32: at most 32 * 128 * 32,767."""
    lanes = zl.target.lanes
    totals = [[zl.i32.x(lanes)(0) for _ in rows] for _ in words]
    for s in zl.static(range(2 * first, 2 * (first + count))):
        w = [zl.load(at + s * lanes, lanes) for at in words]
        for t, at in enumerate(rows):
            value = zl.splat(at[s % 2 * 8 + s // 2], lanes)
            for r in zl.static(range(len(words))):
                totals[r][t] += zl.dot2_i16(w[r], value)
    return totals


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
    """Whether load_scales gives an offset."""
    return not (p.SYMMETRIC and dot_bits(p) in (8, LUT) and not zl.target.has("vnni"))


@zl.inline
def store_sums(p, acc, token, token_first, token_last, pair, tile_last, expert):
    """Write what PAIR tiles have of the TOKENS tokens from `token` on. A token's rows lie far apart in out: written
    between the products of the last piece, not all at the end, these lines come from memory beside them."""
    lanes = zl.target.lanes
    for at in range(token, min(token + p.TOKENS, token_last)):
        for tile in range(pair, min(pair + PAIR, tile_last)):
            place = acc + ((tile - pair) * TOKENS_PER_BLOCK + at - token_first) * TILE
            for part in zl.static(range(TILE // lanes)):
                store_tile(p, at, zl.load(place + part * lanes, lanes), tile, part, expert)


@zl.inline
def prefetch_activations(p, token, token_last, first):
    """Bring near the piece from block `first` on of the TOKENS tokens from `token` on."""
    for t in zl.static(range(p.TOKENS)):
        at = source_row(p, min(token + t, token_last - 1)) * (p.blocks * 32) + first * 32
        for plane in zl.static([p.aq, p.a_low] if p.WIDE else [p.aq]):
            for line in zl.static(range(0, PIECE * 32, 64)):
                zl.prefetch(plane + at + line)


@zl.kernel
def matmul_int8_many(p: Int8Product):
    """Grid (groups of TOKENS_PER_BLOCK tokens, groups of BLOCK_TILES tiles): neighbours share weights, which are read
    from memory once. PARTS is not read."""
    multiply_many(p)


@zl.inline
def multiply_many(p):
    """The body of a kernel: what a block computes."""
    lanes = zl.target.lanes
    tile_first = zl.block_index(1) * BLOCK_TILES
    tile_last = min(tile_first + BLOCK_TILES, (p.rows + TILE - 1) // TILE)
    expert, token_first, token_last = block_tokens(p, 0)
    groups = num_groups(p)
    staged = Staged(
        zl.local_array(zl.i32, PAIR * PIECE * steps_of(p) * TILE),
        zl.local_array(zl.f32, PAIR * PIECE * 2 * TILE),
        zl.local_array(zl.f32, PAIR * PIECE * 2 * TILE),
    )
    halves = zl.local_array(zl.f32, TOKENS_PER_BLOCK * PIECE)
    wide = zl.local_array(zl.i32, TOKENS_PER_BLOCK * PIECE * WORDS_I16) if widens(p) else None
    acc = zl.local_array(zl.f32, BLOCK_TILES * TOKENS_PER_BLOCK * TILE)
    zero = zl.f32.x(lanes)(0)
    for at in range(0, BLOCK_TILES * TOKENS_PER_BLOCK * TILE, lanes):
        zl.store(acc + at, zero)
    num_blocks = zl.i64(0)
    if token_first < token_last:  # a task may be empty
        num_blocks = p.blocks
    for first in range(0, num_blocks, PIECE):
        count = min(p.blocks - first, PIECE)
        if p.GROUP == 16 and has_offset(p):
            for token in range(token_first, token_last):
                a = activations_at(p, [token])
                for i in range(count):
                    halves[(token - token_first) * PIECE + i] = half_sum(a, 0, first + i)
        if widens(p):
            for token in range(token_first, token_last):
                a = activations_at(p, [token])
                for i in range(count):
                    widen_activations(p, a, first + i, wide + ((token - token_first) * PIECE + i) * WORDS_I16)
        for pair in range(tile_first, tile_last, PAIR):
            last = pair + PAIR >= tile_last
            for r in zl.static(range(PAIR)):
                part = Staged(
                    staged.words + r * (PIECE * steps_of(p) * TILE),
                    staged.scale + r * (PIECE * 2 * TILE),
                    staged.offset + r * (PIECE * 2 * TILE),
                )
                stage(
                    p, tile_planes(p, stacked_tile(p, expert, min(pair + r, tile_last - 1)), groups), part, first, count
                )
            after = tile_first if last else pair + PAIR
            planes = [
                tile_planes(p, stacked_tile(p, expert, min(after + r, tile_last - 1)), groups)
                for r in zl.static(range(PAIR))
            ]
            next_first = first + PIECE if last else first
            mine = acc + (pair - tile_first) * (TOKENS_PER_BLOCK * TILE)
            for token in range(token_first, token_last, p.TOKENS):
                # The first tokens bring one tile near, the next ones the other.
                begin, alone = token == token_first, token_last - token_first <= p.TOKENS
                coming = Coming(planes, next_first, [begin, alone or token == token_first + p.TOKENS])
                # Those behind the last are computed as the last one and dropped.
                at = [min(token + t, token_last - 1) for t in zl.static(range(p.TOKENS))]
                a = activations_at(p, at)
                if p.blocks >= LONG:
                    prefetch_activations(p, token + p.TOKENS, token_last, first)
                around = Around(halves, wide, [here - token_first for here in at])
                for part in zl.static(range(TILE // lanes)):
                    multiply_staged(p, staged, coming, around, a, token - token_first, mine, first, count, part)
                if first + PIECE >= p.blocks:
                    store_sums(p, mine, token, token_first, token_last, pair, tile_last, expert)
