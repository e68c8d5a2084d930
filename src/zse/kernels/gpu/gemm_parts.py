"""What the matrix products share: the order of tiles, act(gate) * up, adding to what is there, adding the parts of a
split k."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.activation import LIMIT
from zse.kernels.gpu.r16 import is_integer, stage_blocks

# tiles of tokens that share a pass over the weights: the running blocks then find both in L2
GROUP = 16
CONSUMERS = 1  # named barrier of the multiplying warpgroups
# of the copying and of the multiplying warpgroups, by how many multiply
REGISTERS = {2: (40, 232), 3: (24, 160), 4: (24, 112)}
# what becomes of a product: out f32 =, out f32 +=, out bf16 =; the same of gates and ups within LIMIT, ups plus 1
STORE, ACCUMULATE, STORE_BF16, LIFTED = range(4)
NO_LIMIT = 3.0e38
PARTIAL_BYTES = 2 * 128 * 256 * 4  # of scratch per multiprocessor: two f32 tiles of 128 tokens and 256 rows
SLICE_BYTES = 2 * 64 * 256 * 4  # of those that are their own flags: two of 64 tokens and 256 rows


class Ring(NamedTuple):
    """Stages of shared memory that one thread fills and others read."""

    memory: Any
    full: Any  # mbarriers
    empty: Any
    stride: int  # bytes between stages
    stages: int


class Units(NamedTuple):
    """What the blocks share: parts of k of tiles."""

    token_tiles: Any
    row_tiles: Any
    steps: Any  # of k
    splits: Any
    count: Any


def depth_of(kind: object, bt: int) -> int:
    """k of a stage of gemm_skinny. kind: bits of an integer, or "lut4", "bf16", "e4m3", "block"."""
    return 32 * stage_blocks(kind, bt) if is_integer(kind) else 64 if kind == "bf16" else 128


@zl.inline
def ring_of(stride, STAGES, arrivals, AT_ONCE=False, LATE=False):
    """A Ring, its barriers ready for the block. arrivals: of its readers, for a stage to be empty. AT_ONCE: sooner; large tiles
    spill a register. LATE: the next launch is let begin later."""
    memory = zl.shared_array(zl.u8, STAGES * stride, 1024)
    full = zl.mbarrier_array(STAGES)
    empty = zl.mbarrier_array(STAGES)
    last = zl.shared_array(zl.i32, 4)
    i = zl.thread_index()
    if AT_ONCE:
        if i < STAGES:
            zl.mbarrier_init(full + i, 1)
            zl.mbarrier_init(empty + i, arrivals)
            zl.mbarrier_init_fence()
    elif i == 0:
        for i in zl.static(range(STAGES)):
            zl.mbarrier_init(full + i, 1)
            zl.mbarrier_init(empty + i, arrivals)
        zl.mbarrier_init_fence()
    zl.barrier()
    if not LATE:
        zl.grid_launch_dependents()
    return Ring(memory, full, empty, stride, STAGES), last


@zl.inline
def units_of(tokens, cols, steps, splits, tile_tokens, tile_cols):
    token_tiles = (tokens + (tile_tokens - 1)) // tile_tokens
    row_tiles = (cols + (tile_cols - 1)) // tile_cols
    return Units(token_tiles, row_tiles, steps, splits, token_tiles * row_tiles * splits)


@zl.inline
def unit_place(unit, units):
    """(tile, its index among tiles of tokens, among tiles of rows, first step, the step after its last)."""
    tile, first, end = unit + 0, zl.i32(0), units.steps + 0
    if units.splits > 1:  # divisions, for which every warp of the block would wait
        tile = unit // units.splits
        part = unit - tile * units.splits
        first = part * units.steps // units.splits
        end = (part + 1) * units.steps // units.splits
    m, n = tile_place(tile, units.token_tiles, units.row_tiles)
    return tile, m, n, first, end


@zl.inline
def tile_place(tile, token_tiles, row_tiles):
    """(index among tiles of tokens, index among tiles of rows): GROUP token tiles at a time, tokens fastest."""
    group = tile // (GROUP * row_tiles)
    first = group * GROUP
    count = min(token_tiles - first, GROUP)
    inside = tile - first * row_tiles
    row = inside // count
    return first + (inside - row * count), row


@zl.inline
def release(empty, lane):
    """A warp has done with a stage: its lanes have read what they wanted of it, and its products are complete."""
    zl.warp_barrier()
    if lane == 0:
        zl.mbarrier_arrive(empty)


@zl.inline
def power_of(gate, p):
    """exp(-y) of activated()."""
    return zl.exp2(gate * zl.fma(gate * gate, p.cubic, p.linear))


@zl.inline
def activated(gate, up, linear, cubic):
    """act(gate) * up, where act(x) = x * sigmoid(y) and exp(-y) = 2 ** (linear * x + cubic * x**3): silu and
    gelu_tanh."""
    power = zl.exp2(gate * zl.fma(gate * gate, cubic, linear))
    return gate * zl.reciprocal(power + 1.0) * up


@zl.inline
def add_pair(p, a, b):
    """p[0] += a, p[1] += b in L2, without waiting for the old values. Nobody else adds to them, so the sum is as exact
    as a load and a store, and a quarter faster."""
    if zl.target.arch >= 90:
        zl.atomic_accumulate(p, zl.make_vector(a, b))
    else:
        old = zl.load(p, 2)
        zl.store(p, zl.make_vector(old[0] + a, old[1] + b))


@zl.inline
def add_one(p, value):
    """p[0] += value, see add_pair."""
    if zl.target.arch >= 80:
        zl.atomic_accumulate(p, value)
    else:
        p[0] += value


@zl.inline
def transposed(pair):
    """Two bf16 of row lane / 4, columns 2 (lane % 4) and the next, of an 8 x 8 matrix become those of its transpose."""
    return zl.transpose_8x8(pair)


@zl.inline
def put_pair(out, at, a, b, mode):
    """Two neighbouring elements of out (a pointer to u8) from element `at`."""
    if mode == STORE_BF16:
        zl.store(zl.cast_ptr(out, zl.u32) + at // 2, zl.bitcast(zl.convert(zl.make_vector(a, b), zl.bf16), zl.u32))
    else:
        p = zl.cast_ptr(out, zl.f32) + at
        if mode == ACCUMULATE:
            add_pair(p, a, b)
        else:
            zl.store(p, zl.make_vector(a, b))


@zl.inline
def put_one(out, at, value, mode):
    """One element of out."""
    if mode == STORE_BF16:
        zl.store(zl.cast_ptr(out, zl.bf16) + at, zl.convert(value, zl.bf16))
    else:
        p = zl.cast_ptr(out, zl.f32) + at
        if mode == ACCUMULATE:
            add_one(p, value)
        else:
            p[0] = value


@zl.inline
def exchanged(first, second, g):
    """Of one column's sums of tokens 2j and 2j + 1, and its neighbour's, the two columns of one token: of the first in
    lanes with an even g, of the second in the others."""
    odd = g % 2 == 1
    theirs = zl.shuffle_xor(first if odd else second, 4)
    return theirs if odd else first, second if odd else theirs


@zl.inline
def put_column(total, half, col, first_token, p, j, g, BT):
    """Of a transposed product (see gemm_r16), the weight row `half` (0, 1) of a thread: column `col` of out, all
    tokens, with the bias. It goes out in pairs of columns: bf16 by transposing the 8 x 8 elements of a warp, f32 by an
    exchange with the neighbouring column's lane."""
    shift = zl.f32(0)
    if p.has_bias != 0:
        shift = p.bias[min(col, p.cols - 1)]
    if p.mode == STORE_BF16:
        for i in zl.static(range(BT // 8)):
            pair = zl.make_vector(total[i * 4 + half * 2] + shift, total[i * 4 + half * 2 + 1] + shift)
            mine = transposed(zl.bitcast(zl.convert(pair, zl.bf16), zl.u32))
            token = first_token + i * 8 + g
            if token < p.tokens:
                at = col - g + j * 2
                if at < p.cols:
                    zl.store(zl.cast_ptr(p.out, zl.u32) + (zl.i64(token) * p.cols + at) // 2, mine)
    else:
        for i in zl.static(range(BT // 8)):
            pair = exchanged(total[i * 4 + half * 2] + shift, total[i * 4 + half * 2 + 1] + shift, g)
            token = first_token + i * 8 + j * 2 + g % 2
            if token < p.tokens:
                if col < p.cols:
                    place = zl.cast_ptr(p.out, zl.f32) + (zl.i64(token) * p.cols + (col - g % 2))
                    if p.mode == ACCUMULATE:
                        add_pair(place, pair[0], pair[1])
                    else:
                        zl.store(place, zl.make_vector(pair[0], pair[1]))


@zl.inline
def put_gated(total, col, first_token, p, j, g, BT, of_experts=False):
    """Of a transposed product, eight columns of out from `col`, all tokens: a thread has a gate's sums and its up's.
    of_experts: biases are added, and the mode may be LIFTED."""
    mine = col + j * 2
    shifts = [zl.f32(0) for _ in zl.static(range(2))]
    if of_experts:
        limit = zl.f32(LIMIT) if p.mode == LIFTED else zl.f32(NO_LIMIT)
        lift = zl.f32(1) if p.mode == LIFTED else zl.f32(0)
        if p.has_bias != 0:
            for x in zl.static(range(2)):
                shifts[x] = p.bias[x * p.cols + min(col + g, p.cols - 1)]
    for i in zl.static(range(BT // 8)):
        gates, ups = total[i * 4 : i * 4 + 2], total[i * 4 + 2 : i * 4 + 4]
        if of_experts:
            gates = [min(gate + shifts[0], limit) for gate in gates]
            ups = [min(max(up + shifts[1], limit * -1.0), limit) + lift for up in ups]
        both = zl.make_vector(*[activated(gates[x], ups[x], p.linear, p.cubic) for x in zl.static(range(2))])
        pair = transposed(zl.bitcast(zl.convert(both, zl.bf16), zl.u32))
        token = first_token + i * 8 + g
        if token < p.tokens:
            if mine < p.cols:
                zl.store(zl.cast_ptr(p.out, zl.u32) + (zl.i64(token) * p.cols + mine) // 2, pair)


@zl.inline
def leave_sums(accs, mine, threads):
    """A thread's sums, where the same thread of another block finds them, 16 bytes a lane."""
    each = len(accs[0]) // 4
    for x, acc in enumerate(accs):
        for j in zl.static(range(each)):
            four = zl.make_vector(acc[j * 4], acc[j * 4 + 1], acc[j * 4 + 2], acc[j * 4 + 3])
            zl.store(mine + (x * each + j) * (threads * 4), four)
    zl.fence()


@zl.inline
def leave_part(accs, mine, counter, number, last, thread, threads):
    """Leave this block's sums at `mine`; true in the block that comes last of the `number` parts of a tile: then it can
    read them, and the counter is 0 again. Every thread reads only what the same thread of other blocks wrote. last: i32
    [1] of the block."""
    leave_sums(accs, mine, threads)
    zl.named_barrier(CONSUMERS, threads)
    if thread == 0:
        before = zl.atomic_add(counter, 1)
        if before == number - 1:
            counter[0] = 0
        last[0] = before
    zl.named_barrier(CONSUMERS, threads)
    is_last = last[0] == number - 1
    zl.named_barrier(CONSUMERS, threads)
    return is_last


@zl.inline
def clear_sums(accs):
    zl.fence()
    for acc in accs:
        for i in zl.static(range(len(acc))):
            acc[i] = zl.f32(0)


@zl.inline
def add_part(accs, part, threads, PAUSE):
    """accs += what a block left at `part`. PAUSE: the compiler would ask for all of it at once, with registers that are
    not there."""
    each = len(accs[0]) // 4
    for x, acc in enumerate(accs):
        for j in zl.static(range(each)):
            v = zl.load(part + (x * each + j) * (threads * 4), 4)
            for e in zl.static(range(4)):
                acc[j * 4 + e] += v[e]
            if PAUSE and j % 8 == 7:
                zl.warp_barrier()


@zl.inline
def sum_parts(accs, unit, tile, last, thread, threads, p):
    """Leave this part's sums where the others of its tile find them. The block that comes last adds all parts in their
    order and returns true."""
    count = len(accs) * len(accs[0]) // 4
    mine = p.partial + (zl.i64(unit) * count * threads + thread) * 4
    is_last = leave_part(accs, mine, p.counters + tile, p.splits, last, thread, threads)
    if is_last:
        part = p.partial + (zl.i64(tile) * p.splits * count * threads + thread) * 4
        clear_sums(accs)
        for _ in range(p.splits):
            add_part(accs, part, threads, True)
            part = part + count * (threads * 4)
    return is_last
