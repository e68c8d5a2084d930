"""Products of a CPU with affine weights for many tokens: weights are unpacked once for all tokens of a block. With VNNI or
dotprod; without it is matmul_affine_i16.

A grid block is BLOCK_TILES tiles of 16 rows for up to TOKENS_PER_BLOCK tokens. It walks the columns in pieces of PIECE
blocks of 32: of a tile's piece the bytes and scales are unpacked into memory that the first cache holds (4 + 1 KiB of
48), then TOKENS tokens at a time are multiplied with them, whose activations (16 KiB a piece) stay there for the next
tile. Every token's sum goes through the operations of matmul_int8 in its order: alone or in a batch its bits are the
same."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.matmul_affine_i16 import multiply_many_i16
from zse.kernels.matmul_affine_parts import (
    BLOCK_TILES,
    Int8Product,
    activations_at,
    half_sum,
    has_offset,
    load_scales,
    num_groups,
    prefetch_block,
    tile_planes,
    unpack,
    widen_if_first,
)
from zse.kernels.matmul_tile import TILE, TOKENS_PER_BLOCK, adds_i16, block_tokens, source_row, stacked_tile, store_tile

PIECE = 8  # blocks of 32 columns
PAIR = 2  # tiles that are multiplied side by side
# Blocks of a row from which on the next tokens' activations are brought near: of rows that are so far apart, by a power
# of two, the first cache keeps no piece for the next tiles. 8,192 columns: 11 % faster; 4,096: 2 %.
LONG = 128


class Coming(NamedTuple):
    """What is staged next: planes of PAIR tiles, from block `first` on; wanted: which of them are to be brought near
    now."""

    planes: Any
    first: Any
    wanted: Any


class Staged(NamedTuple):
    """A piece of PAIR tiles. words i32 [PAIR, PIECE, parts, 8, lanes]; scale and offset f32 [PAIR, PIECE, 2 halves,
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
            for s in zl.static(range(8)):
                zl.store(staged.words + (i * TILE + part * lanes) * 8 + s * lanes, w[s])
            for half in zl.static(range(2 if p.GROUP == 16 else 1)):
                group = block * 2 + half if p.GROUP == 16 else block if p.GROUP == 32 else block // p.group_blocks
                unit, offset = load_scales(p, planes, group, part)
                zl.store(staged.scale + (i * 2 + half) * TILE + part * lanes, unit)
                if offset is not None:
                    zl.store(staged.offset + (i * 2 + half) * TILE + part * lanes, offset)


@zl.inline
def multiply_staged(p, staged, coming, halves, a, token, acc, first, count, part):
    """acc f32 [PAIR, TOKENS_PER_BLOCK, 16] += the piece, of a part of the rows, for the tokens of the Activations a
    from `token` of the block on. A broadcast activation serves PAIR registers of weights: loads are half as many as one
    alone would need. halves f32 [TOKENS_PER_BLOCK, PIECE]: half_sum() of groups of 16."""
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
        words = [staged.words + ((r * PIECE + i) * TILE + part * lanes) * 8 for r in zl.static(range(PAIR))]
        units = [staged.scale + (r * PIECE + i) * (2 * TILE) + part * lanes for r in zl.static(range(PAIR))]
        offsets = [staged.offset + (r * PIECE + i) * (2 * TILE) + part * lanes for r in zl.static(range(PAIR))]
        q = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.q]
        low = [zl.cast_ptr(row + block * 32, zl.i32) for row in a.low]
        for half in zl.static(range(HALVES)):
            totals = pair_dots(words, q, low, half * STEPS, STEPS)
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
                            mine = halves[(token + t) * PIECE + i]
                            total = total - mine if half == 1 else mine
                        sums[r][t] = zl.fma(offset, total, sums[r][t])
    for r in zl.static(range(PAIR)):
        for t in zl.static(range(TOKENS)):
            zl.store(places[r][t], sums[r][t])


@zl.inline
def pair_dots(words, q, low, first, count):
    """[PAIR][tokens] i32 lanes: joined_dots of both registers, which share an activation's broadcast. One byte of int16
    activations after the other, in one sum: registers for twice the tokens, which share the loads."""
    lanes = zl.target.lanes
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
    if adds_i16():
        multiply_many_i16(p)
    else:
        multiply_pieces(p)


@zl.inline
def multiply_pieces(p):
    """The same with VNNI or dotprod."""
    lanes = zl.target.lanes
    tile_first = zl.block_index(1) * BLOCK_TILES
    tile_last = min(tile_first + BLOCK_TILES, (p.rows + TILE - 1) // TILE)
    expert, token_first, token_last = block_tokens(p, 0)
    groups = num_groups(p)
    staged = Staged(
        zl.local_array(zl.i32, PAIR * PIECE * 8 * TILE),
        zl.local_array(zl.f32, PAIR * PIECE * 2 * TILE),
        zl.local_array(zl.f32, PAIR * PIECE * 2 * TILE),
    )
    halves = zl.local_array(zl.f32, TOKENS_PER_BLOCK * PIECE)
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
        for pair in range(tile_first, tile_last, PAIR):
            last = pair + PAIR >= tile_last
            for r in zl.static(range(PAIR)):
                part = Staged(
                    staged.words + r * (PIECE * 8 * TILE),
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
                for part in zl.static(range(TILE // lanes)):
                    multiply_staged(p, staged, coming, halves, a, token - token_first, mine, first, count, part)
                if first + PIECE >= p.blocks:
                    store_sums(p, mine, token, token_first, token_last, pair, tile_last, expert)
