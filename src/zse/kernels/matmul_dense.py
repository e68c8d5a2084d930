"""Products of a CPU with f32, f16 or bf16 weights and f32 activations."""

from zse import kernel as zl
from zse.kernels.matmul_tile import (
    NEAR_WORDS,
    TILE,
    asks_ahead,
    block_tokens,
    source_row,
    stacked_tile,
    store_tile,
    tile_for,
)

ITEM_BYTES = {zl.f32: 4, zl.f16: 2, zl.bf16: 2}
DTYPES = {"f32": zl.f32, "f16": zl.f16, "bf16": zl.bf16}
# Tokens that share a pass over the weights → UNROLL: one for all, or a token's sum would depend on its batch.
TILES = {1: 2, 4: 2}


class DenseProduct(zl.Record):
    """Parameters of matmul_dense: weights [T, K, 16], width = K. UNROLL independent sums over k hide the latency of a
    multiply-add (4 cycles)."""

    w: zl.Ptr["W", "const"]
    a: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    tokens: zl.i64
    rows: zl.i64
    width: zl.i64
    has_bias: zl.i64
    tasks: zl.Ptr[zl.i32, "const"]
    source: zl.Ptr[zl.i32, "const"]
    experts: zl.i64
    W: zl.static
    TOKENS: zl.static
    UNROLL: zl.static


@zl.kernel
def matmul_dense(p: DenseProduct):
    """A grid block is (tile, group of TOKENS_PER_BLOCK tokens)."""
    if p.TOKENS == 1 and asks_ahead():
        multiply_token(p)
    else:
        multiply_tile(p)


@zl.inline
def multiply_token(p):
    """The body of a kernel for one token at a time: a line of weights is read once, for all its registers, and asked for
    NEAR_WORDS before. Every row's sums are multiply_tile()'s, in its order."""
    lanes, UNROLL = zl.target.lanes, p.UNROLL
    tile = zl.block_index(0)
    expert, token_first, token_last = block_tokens(p)
    w_tile = p.w + stacked_tile(p, expert, tile) * p.width * TILE
    per_line = 64 // ITEM_BYTES[p.W]
    for token in range(token_first, token_last):
        a = p.a + source_row(p, token) * p.width
        acc = [[zl.f32.x(lanes)(0) for _ in range(UNROLL)] for _ in range(TILE // lanes)]
        main = p.width // UNROLL * UNROLL
        for k in range(0, main, UNROLL):
            for line in zl.static(range(0, UNROLL * TILE, per_line)):
                zl.prefetch_here(w_tile + k * TILE + (NEAR_WORDS * 4 // ITEM_BYTES[p.W] + line))
            for u in zl.static(range(UNROLL)):
                value = zl.f32.x(lanes)(a[k + u])
                for part in zl.static(range(TILE // lanes)):
                    column = zl.convert(zl.load(w_tile + (k + u) * TILE + part * lanes, lanes), zl.f32)
                    acc[part][u] = zl.fma(column, value, acc[part][u])
        for k in range(main, p.width):
            for part in zl.static(range(TILE // lanes)):
                column = zl.convert(zl.load(w_tile + k * TILE + part * lanes, lanes), zl.f32)
                acc[part][0] = zl.fma(column, zl.f32.x(lanes)(a[k]), acc[part][0])
        for part in zl.static(range(TILE // lanes)):
            total = acc[part][0]
            for u in zl.static(range(1, UNROLL)):
                total = total + acc[part][u]
            store_tile(p, token, total, tile, part, expert)


@zl.inline
def multiply_tile(p):
    """The body of a kernel."""
    lanes, TOKENS, UNROLL = zl.target.lanes, p.TOKENS, p.UNROLL
    tile = zl.block_index(0)
    expert, token_first, token_last = block_tokens(p)
    w_tile = p.w + stacked_tile(p, expert, tile) * p.width * TILE
    for part in range(TILE // lanes):
        for token in range(token_first, token_last, TOKENS):
            at = [min(token + t, token_last - 1) for t in zl.static(range(TOKENS))]
            a_rows = [p.a + source_row(p, at[t]) * p.width for t in zl.static(range(TOKENS))]
            acc = [zl.f32.x(lanes)(0) for _ in zl.static(range(UNROLL * TOKENS))]
            main = p.width // UNROLL * UNROLL
            for k in range(0, main, UNROLL):
                for u in zl.static(range(UNROLL)):
                    column = zl.convert(zl.load(w_tile + (k + u) * TILE + part * lanes, lanes), zl.f32)
                    for t in zl.static(range(TOKENS)):
                        i = u * TOKENS + t
                        acc[i] = zl.fma(column, zl.f32.x(lanes)(a_rows[t][k + u]), acc[i])
            for k in range(main, p.width):
                column = zl.convert(zl.load(w_tile + k * TILE + part * lanes, lanes), zl.f32)
                for t in zl.static(range(TOKENS)):
                    acc[t] = zl.fma(column, zl.f32.x(lanes)(a_rows[t][k]), acc[t])
            for t in zl.static(range(TOKENS)):
                if token + t < token_last:
                    total = acc[t]
                    for u in zl.static(range(1, UNROLL)):
                        total = total + acc[u * TOKENS + t]
                    store_tile(p, at[t], total, tile, part, expert)


def launch_of(weight, a, max_tokens: int) -> tuple[str, dict, int]:
    """(variant, the arguments that only these kernels take, tiles of a block) for activations a."""
    symbol = f"matmul_{weight.scheme.dtype}_t{tile_for(max_tokens, TILES)}"
    return symbol, {"w": weight.planes["w"], "a": a, "width": weight.shape[1]}, 1


def variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"matmul_{name}_t{tokens}", matmul_dense, {"W": dtype, "TOKENS": tokens, "UNROLL": unroll})
        for name, dtype in DTYPES.items()
        for tokens, unroll in TILES.items()
    ]
