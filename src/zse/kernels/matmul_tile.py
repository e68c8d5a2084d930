"""What all products of a CPU share: a block computes one tile of 16 rows for up to TOKENS_PER_BLOCK tokens."""

from zse import kernel as zl

TILE = 16  # rows of a tile, the r16 layout's
TOKENS_PER_BLOCK = 64  # 64 tokens * 2,048 bytes of int8 activations stay in a 256 KiB L2 while a column of tiles passes


@zl.inline
def block_tokens(tokens):
    """(first, behind the last) token of this block."""
    first = zl.block_index(1) * TOKENS_PER_BLOCK
    return first, min(first + TOKENS_PER_BLOCK, tokens)


@zl.inline
def store_tile(p, token, acc, tile, part):
    """Write one part of a tile's rows for one token; the last tile may be partial. p: bias, out [tokens, rows], rows, has_bias."""
    lanes = zl.target.lanes
    out = p.out + token * p.rows
    row = tile * TILE + part * lanes
    total = acc
    if p.has_bias != 0:
        if row + lanes <= p.rows:
            total = total + zl.load(p.bias + row, lanes)
    if row + lanes <= p.rows:
        zl.store(out + row, total)
    else:
        spill = zl.local_array(zl.f32, 16)
        zl.store(spill, total)
        for r in range(row, p.rows):
            if p.has_bias != 0:
                out[r] = spill[r - row] + p.bias[r]
            else:
                out[r] = spill[r - row]


def tile_for(tokens: int, tiles) -> int:
    """How many tokens share a pass over the weights: the smallest of `tiles` that covers them, or the largest."""
    return next((tile for tile in tiles if tile >= tokens), max(tiles))
