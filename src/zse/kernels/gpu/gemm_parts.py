"""What the matrix products share: the order of tiles, act(gate) * up, adding to what is there, adding the parts of a split k."""

from zse.kernel import (
    asm,
    atomic_add,
    exp2,
    f32,
    fence,
    fma,
    i64,
    inline,
    load,
    make_vector,
    named_barrier,
    reciprocal,
    static,
    store,
    u32,
    warp_barrier,
)

GROUP = 16                      # tiles of tokens that share a pass over the weights: the running blocks then find both in L2
CONSUMERS = 1                   # named barrier of the multiplying warpgroups


@inline
def tile_place(tile, token_tiles, row_tiles):
    """(index among tiles of tokens, index among tiles of rows): GROUP token tiles at a time, tokens fastest."""
    group = tile // (GROUP * row_tiles)
    first = group * GROUP
    count = min(token_tiles - first, GROUP)
    inside = tile - first * row_tiles
    return first + inside % count, inside // count


@inline
def activated(gate, up, linear, cubic):
    """act(gate) * up, where act(x) = x * sigmoid(y) and exp(-y) = 2 ** (linear * x + cubic * x**3): silu and gelu_tanh."""
    power = exp2(gate * fma(gate * gate, cubic, linear))
    return gate * reciprocal(power + 1.0) * up


@inline
def add_pair(p, a, b):
    """p[0] += a, p[1] += b in L2, without waiting for the old values. Nobody else adds to them, so the sum is as exact as a load and a
    store, and a quarter faster."""
    asm("red.global.add.v2.f32 [%0], {%1, %2};", None, p, a, b)


@inline
def add_one(p, value):
    """p[0] += value, see add_pair."""
    asm("red.global.add.f32 [%0], %1;", None, p, value)


@inline
def transposed(pair):
    """Two bf16 of row lane / 4, columns 2 (lane % 4) and the next, of an 8 x 8 matrix become those of its transpose."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;", u32, pair)


@inline
def sum_parts(accs, partial, unit, tile, splits, counters, last, thread, threads, BN):
    """Leave this part's sums where the others of its tile find them. The block that comes last adds all parts in their order and returns
    true. Every thread reads only what the same thread of other blocks wrote, 16 bytes a lane."""
    count = len(accs) * BN // 8
    mine = partial + (i64(unit) * count * threads + thread) * 4
    for x, acc in enumerate(accs):
        for j in static(range(BN // 8)):
            store(mine + (x * (BN // 8) + j) * (threads * 4), make_vector(acc[j * 4], acc[j * 4 + 1], acc[j * 4 + 2], acc[j * 4 + 3]))
    fence()
    named_barrier(CONSUMERS, threads)
    if thread == 0:
        before = atomic_add(counters + tile, 1)
        if before == splits - 1:
            counters[tile] = 0
        last[0] = before
    named_barrier(CONSUMERS, threads)
    is_last = last[0] == splits - 1
    named_barrier(CONSUMERS, threads)
    if is_last:
        fence()
        part = partial + (i64(tile) * splits * count * threads + thread) * 4
        for acc in accs:
            for i in static(range(BN // 2)):
                acc[i] = f32(0)
        for p in range(splits):
            for x, acc in enumerate(accs):
                for j in static(range(BN // 8)):
                    v = load(part + (x * (BN // 8) + j) * (threads * 4), 4)
                    for e in static(range(4)):
                        acc[j * 4 + e] += v[e]
                    if j % 8 == 7:
                        warp_barrier()      # the compiler would ask for all of it at once, with registers that are not there
            part = part + count * (threads * 4)
    return is_last
