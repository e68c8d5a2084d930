"""What all products of a CPU share: a block computes one tile of 16 rows for up to TOKENS_PER_BLOCK tokens.

A weight may be a stack of experts, [experts * rows, K]: then a block's place is a task (see kernels/route.py), which
names an expert and a range of the pairs of tokens and experts, sorted by expert. Every token's sum is the same as
without."""

from zse import kernel as zl

TILE = 16  # rows of a tile, the r16 layout's
TOKENS_PER_BLOCK = 64  # 64 tokens * 2,048 bytes of int8 activations stay in a 256 KiB L2 while a column of tiles passes
# What a token alone brings near, one line for each that it reads. Hardware brings what follows within a page of 4 KiB, and a core
# whose 256 operations reach 600 bytes ahead waits for the first lines of every page: one token of q4 took the sum of its time
# from cache and of reading, 73 % of what reading alone gives, and 93 to 99 with this (Zen 3). 1 to 3 KiB are alike; 256 bytes
# come too late (56 % with both cores), and so do lines that the compiler gathers at a loop's start (54 to 58 %).
NEAR_WORDS = 384
# Values of the parameter `experts`: no stack; activations [pairs, K]; activations [tokens, K], pair i's row is
# source[i].
DENSE, PAIRS, GATHERED = 0, 1, 2


@zl.inline
def adds_i16():
    """Whether products are added up as i16: x86 without VNNI."""
    return not (zl.target.has("vnni") or zl.target.has("dotprod"))


@zl.inline
def asks_ahead():
    """Whether a token alone asks for lines NEAR_WORDS before it reads them: where that was measured, on AVX2 alone."""
    return adds_i16()


@zl.inline
def token_range(tokens, dimension=1):
    """(first, behind the last) token of this block. dimension: of the grid."""
    first = zl.block_index(dimension) * TOKENS_PER_BLOCK
    return first, min(first + TOKENS_PER_BLOCK, tokens)


@zl.inline
def block_tokens(p, dimension=1):
    """(expert, first token, behind the last) of this block. p: tokens, experts, tasks i32 [tasks, 3]. dimension: of the
    grid."""
    expert = zl.i64(0)
    first, last = token_range(p.tokens, dimension)
    if p.experts != 0:
        task = p.tasks + zl.block_index(dimension) * 3
        expert = zl.i64(task[0])
        first = zl.i64(task[1])
        last = zl.i64(task[2])
    return expert, first, last


@zl.inline
def source_row(p, token):
    """The row of the activations that a token (of a stack of experts: a pair) reads."""
    row = token + 0
    if p.experts == GATHERED:
        row = zl.i64(p.source[token])
    return row


@zl.inline
def stacked_tile(p, expert, tile):
    """A tile of an expert's rows among the tiles of the stack."""
    return expert * ((p.rows + (TILE - 1)) // TILE) + tile


@zl.inline
def store_tile(p, token, acc, tile, part, expert):
    """Write one part of a tile's rows for one token; the last tile may be partial. p: bias [experts, rows], out
    [tokens, rows], rows, has_bias."""
    lanes = zl.target.lanes
    out = p.out + token * p.rows
    bias = p.bias + expert * p.rows
    row = tile * TILE + part * lanes
    total = acc
    if p.has_bias != 0:
        if row + lanes <= p.rows:
            total = total + zl.load(bias + row, lanes)
    if row + lanes <= p.rows:
        zl.store(out + row, total)
    else:
        spill = zl.local_array(zl.f32, 16)
        zl.store(spill, total)
        for r in range(row, p.rows):
            if p.has_bias != 0:
                out[r] = spill[r - row] + bias[r]
            else:
                out[r] = spill[r - row]


def tile_for(tokens: int, tiles) -> int:
    """How many tokens share a pass over the weights: the smallest of `tiles` that covers them, or the largest."""
    return next((tile for tile in tiles if tile >= tokens), max(tiles))
