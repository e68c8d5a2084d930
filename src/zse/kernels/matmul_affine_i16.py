"""Products for several tokens of a CPU without VNNI, where i16 are added: 4 to 6 bits as products of bytes (STEPS_I16), 8 bits and
int16 activations as i16.

A grid block walks the columns in pieces of SUPER blocks of 32. A piece's activations are copied side by side (x86 has registers
for three or four rows' addresses), the next piece's are brought near meanwhile; of one tile after the other the piece is unpacked into memory that the first cache holds
(4 bits for few tokens stay packed), then PASS tokens at a time are multiplied with both registers of its rows: a broadcast
activation serves two. Every token's sum goes through the operations of matmul_int8 in its order: alone or in a batch its bits are
the same."""

from zse import kernel as zl
from zse.kernels.matmul_affine_parts import (
    BLOCK_TILES,
    LUT,
    STEPS_I16,
    SUPER,
    activations_at,
    dot_bits,
    half_sum,
    has_offset,
    load_scales,
    num_groups,
    prefetch_block,
    tile_planes,
    unpack,
    widen_if_first,
)
from zse.kernels.matmul_affine_super import (
    IN_PAIRS,
    PASS,
    PLUS_128,
    Ahead,
    PassTokens,
    StagedTile,
    bring_near,
    in_integers,
    multiply_super,
    stage_scales,
    stage_super,
    step_words,
)
from zse.kernels.matmul_tile import TILE, TOKENS_PER_BLOCK, block_tokens, source_row, stacked_tile, store_tile

# Tokens up to which 4 bits are unpacked where they are multiplied, for every PASS again: 8 tokens 5 % faster than of staged
# ones, 9 from memory; 16 as fast as these or 3 % slower.
LATE = 12
# Tiles that share a copied piece of activations, those of TOGETHER // BLOCK_TILES grid blocks: the first computes them, the others
# nothing (3 % of 64 tokens). Of weights with at least TOGETHER_FROM tiles (1,024 rows); others have few blocks as it is.
TOGETHER, TOGETHER_FROM = 8, 64
WORDS_I16 = 16  # of a block of 32 activations as i16
EVEN, LESS_128 = 0x00FF00FF, -8323200  # 0xFF80FF80


@zl.inline
def widens(p):
    """Whether i16 values are multiplied: where bytes take more steps (weights of 8 bits a sign, int16 activations two products,
    each then a sum of pairs)."""
    return p.WIDE or dot_bits(p) in (8, LUT)


@zl.inline
def unpacks_late(p):
    """Whether weights of few tokens are not staged: two steps of 4 bits are three operations away from the word that holds them."""
    return p.BITS == 4 and p.GROUP != 16 and not p.WIDE


@zl.inline
def steps_of(p):
    """Registers of weights that a block of 32 columns has for a register of rows, and words of its activations."""
    return WORDS_I16 if widens(p) else 8


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
def stage(p, planes, staged, first, count, packed):
    """Unpack blocks first .. first + count - 1 of a tile: of packed weights, which are not staged, their scales."""
    lanes = zl.target.lanes
    for i in range(count):
        block = first + i
        widen_if_first(p, planes, block, list(range(TILE // lanes)))
        for part in zl.static(range(TILE // lanes)):
            row, w = part * lanes, unpack(planes, block, part, p.BITS) if packed is None else []
            if widens(p):
                w = widened_weights(p, w)
            for s in zl.static(range(len(w))):
                zl.store(staged.words + (i * len(w) + s) * TILE + row, w[s])
            for half in zl.static(range(2 if p.GROUP == 16 else 1)):
                group = block * 2 + half if p.GROUP == 16 else block if p.GROUP == 32 else block // p.group_blocks
                unit, offset = load_scales(p, planes, group, part)
                zl.store(staged.scale + (i * 2 + half) * TILE + row, unit)
                if offset is not None:
                    zl.store(staged.offset + (i * 2 + half) * TILE + row, offset)


@zl.inline
def multiply_staged(p, staged, tokens, acc, count, packed, ahead):
    """acc f32 [tokens, 16] += the piece. packed: its weights, of 4 bits, where they are not staged."""
    lanes, HALVES, TOKENS = zl.target.lanes, 2 if p.GROUP == 16 else 1, len(tokens.q)
    parts = [part * lanes for part in zl.static(range(TILE // lanes))]
    sums = [[zl.load(acc + t * TILE + at, lanes) for t in zl.static(range(TOKENS))] for at in parts]
    for i in range(count):
        bring_near(p, ahead, i)
        rows = [row + i * steps_of(p) for row in tokens.q]
        for half in zl.static(range(HALVES)):
            steps = range(half * 8 // HALVES, (half + 1) * 8 // HALVES)
            if widens(p):
                totals = dots_i16([staged.words + i * steps_of(p) * TILE + at for at in parts], rows, steps)
            else:
                totals = dots_i8(p, staged, packed, i * 8, rows, steps)
            for part, at in enumerate(parts):
                scale = zl.load(staged.scale + (2 * i + half) * TILE + at, lanes)
                for t in zl.static(range(TOKENS)):
                    unit = scale * tokens.scale[t][i]
                    sums[part][t] = zl.fma(zl.convert(totals[part][t], zl.f32), unit, sums[part][t])
        if has_offset(p):
            for part, at in enumerate(parts):
                for half in zl.static(range(HALVES)):
                    offset = zl.load(staged.offset + (2 * i + half) * TILE + at, lanes)
                    for t in zl.static(range(TOKENS)):
                        total = tokens.sum[t][i]
                        if HALVES == 2:
                            total = total - tokens.half[t][i] if half == 1 else tokens.half[t][i]
                        sums[part][t] = zl.fma(offset, total, sums[part][t])
    for part, at in enumerate(parts):
        for t in zl.static(range(TOKENS)):
            zl.store(acc + t * TILE + at, sums[part][t])


@zl.inline
def dots_i8(p, staged, packed, first, q, steps):
    """[parts][tokens] i32 lanes of the sums of these steps of the 8 that begin at `first`, by sums of i16, for weights of 4 to 6
    bits. Where these are widened more than once, two tokens at a time: sums and totals of four do not fit 16 registers."""
    lanes, run = zl.target.lanes, STEPS_I16[dot_bits(p)]
    parts = [part * lanes for part in zl.static(range(TILE // lanes))]
    together = len(q) if run >= len(steps) else 2
    totals = [[zl.i32.x(lanes)(0) for _ in q] for _ in parts]
    for start in zl.static(range(steps.start, steps.stop, run)):
        for begin in zl.static(range(0, len(q), together)):
            sums = [[zl.i32.x(lanes)(0) for _ in zl.static(range(together))] for _ in parts]
            for s in zl.static(range(start, min(start + run, steps.stop)) if packed is None else IN_PAIRS):
                w = [step_words(staged, packed, first, s, at) for at in parts]
                for t in zl.static(range(together)):
                    value = zl.splat(q[begin + t][s], lanes)
                    for r in zl.static(range(len(parts))):
                        pairs = zl.pairs_u8s8(w[r], value)
                        sums[r][t] = pairs if s == start else zl.add_i16(sums[r][t], pairs)
            for t in zl.static(range(together)):
                for r in zl.static(range(len(parts))):
                    totals[r][begin + t] += zl.pairs_i16(sums[r][t])
    return totals


@zl.inline
def dots_i16(words, q, steps):
    """The same of what widened_weights() and widen_activations() wrote. Products and sums fit i32: at most 32 * 128 * 32,767."""
    lanes = zl.target.lanes
    totals = [[zl.i32.x(lanes)(0) for _ in q] for _ in words]
    for s in zl.static(range(2 * steps.start, 2 * steps.stop)):
        w = [zl.load(at + s * TILE, lanes) for at in words]
        for t, at in enumerate(q):
            value = zl.splat(at[s % 2 * 8 + s // 2], lanes)
            for r in zl.static(range(len(words))):
                totals[r][t] += zl.dot2_i16(w[r], value)
    return totals


@zl.inline
def pack(p, q, factors, token_first, token_last, first, count):
    """Write a piece of all tokens side by side: q i32 [TOKENS_PER_BLOCK, SUPER, steps_of()], of q6 with integer scales 128 more;
    factors f32 [TOKENS_PER_BLOCK, 3, SUPER]: scales, sums, half_sum() of groups of 16. Those behind the last as the last one."""
    lanes = zl.target.lanes
    for token in range(token_first, token_last + ((token_first - token_last) & (PASS - 1))):
        a = activations_at(p, [min(token, token_last - 1)])
        mine = factors + (token - token_first) * (3 * SUPER)
        if in_integers(p):  # whole super-blocks
            for at in zl.static(range(0, SUPER, lanes)):
                zl.store(mine + at, zl.load(a.scale[0] + first + at, lanes))
                zl.store(mine + SUPER + at, zl.load(a.sum[0] + first + at, lanes))
        for i in range(count):
            block, place = first + i, q + ((token - token_first) * SUPER + i) * steps_of(p)
            if widens(p):
                widen_activations(p, a, block, place)
            else:
                words = zl.cast_ptr(a.q[0] + block * 32, zl.i32)
                for at in zl.static(range(0, 8, lanes)):
                    word = zl.load(words + at, lanes)
                    if in_integers(p) and p.SYMMETRIC:
                        word = word ^ zl.i32.x(lanes)(PLUS_128)
                    zl.store(place + at, word)
            if not in_integers(p):
                mine[i] = a.scale[0][block]
                mine[SUPER + i] = a.sum[0][block]
            if p.GROUP == 16 and has_offset(p) and not in_integers(p):
                mine[2 * SUPER + i] = half_sum(a, 0, block)


@zl.inline
def prefetch_piece(p, token, token_last, first, line):
    """Bring a part of what pack() copies next, from block `first` on, near for the PASS tokens from `token` on: lines 0 .. 3 of
    activations, then scales, then sums; from 6 on nothing."""
    for t in zl.static(range(PASS)):
        row = source_row(p, min(token + t, token_last - 1))
        if line < 4:
            for plane in zl.static([p.aq, p.a_low] if p.WIDE else [p.aq]):
                zl.prefetch_l2(plane + (row * p.blocks + first) * 32 + line * 64)
        elif line == 4:
            zl.prefetch_l2(p.a_scale + row * p.blocks + first)
        elif line == 5:
            zl.prefetch_l2(p.a_sum + row * p.blocks + first)


@zl.inline
def packed_tokens(p, q, factors, place, TOKENS):
    """Those from the place-th on of what pack() wrote."""
    places = [place + t for t in zl.static(range(TOKENS))]
    mine = [factors + at * (3 * SUPER) for at in places]
    words = [q + at * (SUPER * steps_of(p)) for at in places]
    return PassTokens(words, mine, [at + SUPER for at in mine], [at + 2 * SUPER for at in mine])


@zl.inline
def tokens_at(p, blocks):
    """Those whose activations begin at these blocks."""
    words = [zl.cast_ptr(p.aq + block * 32, zl.i32) for block in blocks]
    return PassTokens(words, [p.a_scale + block for block in blocks], [p.a_sum + block for block in blocks], None)


@zl.inline
def multiply_few_i16(p):
    """The body of a kernel: a tile for several tokens, of weights whose products are of bytes. Grid as matmul_int8's. Passes of
    one or two tokens are half as large: 116 us for 224 of Q4_K."""
    tile = zl.block_index(0)
    first, last = block_tokens(p)[1:]
    if last - first <= PASS // 2:
        multiply_tiles(p, tile, tile + 1, 1, PASS // 2, False, unpacks_late(p))
    elif not unpacks_late(p):
        multiply_tiles(p, tile, tile + 1, 1, PASS, False)
    elif last - first <= LATE:
        multiply_tiles(p, tile, tile + 1, 1, PASS, False, True)
    else:
        multiply_tiles(p, tile, tile + 1, 1, PASS, False)


@zl.inline
def multiply_many_i16(p):
    """The same for many tokens. Grid as matmul_int8_many's."""
    tile, tiles = zl.block_index(1) * BLOCK_TILES, (p.rows + TILE - 1) // TILE
    last_tile = min(tile + BLOCK_TILES, tiles)
    if tiles >= TOGETHER_FROM:
        last_tile = tile + 0
        if zl.block_index(1) % (TOGETHER // BLOCK_TILES) == 0:
            last_tile = min(tile + TOGETHER, tiles)
    if p.GROUP == 16 or p.WIDE:  # which have no kernel for few
        first, last = block_tokens(p, 0)[1:]
        if last - first <= PASS // 2:
            multiply_tiles(p, tile, last_tile, 0, PASS // 2, True)
        else:
            multiply_tiles(p, tile, last_tile, 0, PASS, True)
    else:
        multiply_tiles(p, tile, last_tile, 0, PASS, True)


@zl.inline
def multiply_tiles(p, tile_first, tile_last, dimension, TOKENS, PACKED, IN_PLACE=False):
    """The body of a kernel: these tiles, for the tokens of this block (dimension: of the grid). PACKED: activations are copied
    side by side first; tiles share a super-block of them. IN_PLACE: weights are not staged."""
    lanes = zl.target.lanes
    expert, token_first, token_last = block_tokens(p, dimension)
    groups = num_groups(p)
    staged = StagedTile(
        zl.local_array(zl.i32, SUPER * steps_of(p) * TILE),
        zl.local_array(zl.f32, SUPER * 2 * TILE),
        zl.local_array(zl.f32, SUPER * 2 * TILE),
        zl.local_array(zl.f32, TILE),
    )
    q = zl.local_array(zl.i32, TOKENS_PER_BLOCK * SUPER * steps_of(p)) if PACKED else None
    factors = zl.local_array(zl.f32, TOKENS_PER_BLOCK * 3 * SUPER) if PACKED else None
    TILES = TOGETHER if PACKED else 1
    acc = zl.local_array(zl.f32, TILES * TOKENS_PER_BLOCK * TILE)  # [TILES, padded, 16]
    num_blocks = zl.i64(0)
    padded = (token_last - token_first + (TOKENS - 1)) // TOKENS * TOKENS
    if token_first < token_last and tile_first < tile_last:  # a task may be empty, a block's tiles another's
        num_blocks = p.blocks
        for at in range(0, padded * (TILES * TILE), lanes):
            zl.store(acc + at, zl.f32.x(lanes)(0))
    for first in range(0, num_blocks, SUPER):
        count = min(num_blocks - first, SUPER)
        if PACKED:
            pack(p, q, factors, token_first, token_last, first, count)
        for tile in range(tile_first, tile_last):
            now = tile_planes(p, stacked_tile(p, expert, tile), groups)
            packed = now.q + first * 64 if IN_PLACE else None
            if not in_integers(p):
                stage(p, now, staged, first, count, packed)
            elif packed is None:
                stage_super(p, now, staged, first)
            else:
                stage_scales(p, now, staged, first)
            after, after_first, planes = tile + 1, first + 0, now
            if PACKED:
                if after == tile_last:
                    after = tile_first
                    after_first = first + count
                planes = tile_planes(p, stacked_tile(p, expert, after), groups)
            # The first passes bring as many blocks near each as the last of them needs.
            share, done = (SUPER * TOKENS - 1) // (token_last - token_first) + 1, zl.i64(0)
            for token in range(token_first, token_last, TOKENS):
                ahead = None
                if PACKED and TOKENS == PASS:
                    prefetch_piece(p, token, token_last, first + SUPER, tile - tile_first)
                    until = min(done + share, SUPER)
                    for i in range(done, until):
                        prefetch_block(p, planes, after_first + i)
                    done = until
                else:
                    ahead = Ahead(planes, after_first if PACKED else first + 2 * SUPER, token == token_first)
                mine = acc + ((tile - tile_first) * padded + token - token_first) * TILE
                if PACKED:
                    tokens = packed_tokens(p, q, factors, token - token_first, TOKENS)
                else:
                    rows = [source_row(p, min(token + t, token_last - 1)) for t in range(TOKENS)]
                    tokens = tokens_at(p, [row * p.blocks + first for row in rows])
                if in_integers(p):
                    multiply_super(p, staged, tokens, mine, packed, ahead)
                else:
                    multiply_staged(p, staged, tokens, mine, count, packed, ahead)
                if first + SUPER >= num_blocks:
                    for at in range(token, min(token + TOKENS, token_last)):
                        for part in zl.static(range(TILE // lanes)):
                            total = zl.load(mine + (at - token) * TILE + part * lanes, lanes)
                            store_tile(p, at, total, tile, part, expert)
