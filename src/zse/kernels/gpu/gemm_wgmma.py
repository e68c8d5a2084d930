"""out[m, n] = sum_k a[m, k] * w[n, k] on Hopper's tensor cores: bf16 x bf16 and e4m3 x e4m3, f32 sums.

One warpgroup gives work to the copy engine (TMA), two multiply (wgmma). Activations [M, K] and weights [N, K] are both
row-major, which is what wgmma wants of both operands, so nothing is repacked. A *stage* of the ring holds BM rows of a
and BN rows of w, 128 bytes of k each, in the 128-byte swizzle; `full` counts its bytes, `empty` the two warpgroups that
have multiplied it. The grid is persistent: block b computes units b, b + grid, ... A unit is an output tile, or with
splits > 1 a part of a tile's k; the block that finishes a tile last adds the parts in their order, so a result does not
depend on which block that is. In pingpong (CUTLASS's term) a tile is one warpgroup's: while one ends its tile, the other
multiplies the next one. The ring has the stages of both in the order of their tiles.

Sources of the method: the CUTLASS documentation of warp-specialised persistent kernels, and the measurements in
benchmarks/LOG.md.
"""

from typing import NamedTuple

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import (
    ACCUMULATE,
    CONSUMERS,
    STORE,
    STORE_BF16,
    power_of,
    put_pair,
    ring_of,
    sum_parts,
    unit_place,
    units_of,
)
from zse.quant.scheme import FP8_BLOCK

THREADS = 384  # one warpgroup that copies, two that multiply
ROW_BYTES = 128  # of k in a stage: the width of the swizzle
SHARED_BYTES = 231_000  # of the 232,448 a block may have; the rest is for the barriers


def stages(bm: int, bn: int) -> int:
    """How many stages fit; more than 8 gain nothing."""
    return min(8, SHARED_BYTES // ((bm + bn) * ROW_BYTES))


class WgmmaParams(zl.Record):
    """The parameters of gemm_wgmma. cols: columns that this launch computes, of rows of out that are `stride` elements
    apart; the weights have as many rows, or twice as many when GATED (all gates first, then all ups). width = K. KIND:
    "bf16", "e4m3", or "block": e4m3 with w_scale [rows / 128, K / 128]. A tile is BM tokens x BN rows (GATED: half
    gates, half ups). PINGPONG: tiles of one warpgroup each, of whole k. early: whether the weights may be read before the
    kernels before this one are done. per_row: 1 if w_scale is [rows], 0 if [1]. mode: STORE, ACCUMULATE or STORE_BF16;
    GATED writes bf16. linear, cubic: see activated(). partial f32 [units, BM, BN] and counters i32 [tiles] (zero before
    and after) are used when splits > 1."""

    a_map: zl.TensorMap
    w_map: zl.TensorMap
    a_scale: zl.Ptr[zl.f32, "const"]
    w_scale: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.u8]
    partial: zl.Ptr[zl.f32]
    counters: zl.Ptr[zl.i32]
    tokens: zl.i32
    cols: zl.i32
    stride: zl.i32
    width: zl.i32
    splits: zl.i32
    early: zl.i32
    per_row: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    linear: zl.f32
    cubic: zl.f32
    BM: zl.static
    BN: zl.static
    STAGES: zl.static
    GATED: zl.static
    KIND: zl.static
    PINGPONG: zl.static

    @property
    def groups(self) -> int:
        """Warpgroups that multiply a tile."""
        return 1 if self.PINGPONG else 2

    @property
    def tile_cols(self) -> int:
        return self.BN // 2 if self.GATED else self.BN

    @property
    def pairs(self) -> int:
        """Of neighbouring columns of a tile that a thread has of a row."""
        return self.tile_cols // 8

    @property
    def together(self) -> int:
        """Of them, whose scales and biases a thread has in flight."""
        return 2 if self.GATED else 8

    @property
    def depth(self) -> int:
        """k of a stage."""
        return ROW_BYTES // 2 if self.KIND == "bf16" else ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return (self.BM + self.BN) * ROW_BYTES


@zl.inline
def load_tokens(ring, slot, step, m, p):
    zl.tma_load(ring.memory + slot * ring.stride, p.a_map, (step * p.depth, m * p.BM), ring.full + slot)


@zl.inline
def load_weights(ring, slot, step, n, p):
    """A gated tile is half gate rows and half up rows."""
    k, row, bar = step * p.depth, n * p.tile_cols, ring.full + slot
    to = ring.memory + (slot * ring.stride + p.BM * ROW_BYTES)
    zl.tma_load(to, p.w_map, (k, row), bar)
    if p.GATED:
        zl.tma_load(to + p.BN // 2 * ROW_BYTES, p.w_map, (k, p.cols + row), bar)


@zl.inline
def pair_of(at, p):
    """The scales of two neighbouring weight rows."""
    if p.KIND == "e4m3":
        pair = [p.w_scale[at * p.per_row], p.w_scale[(at + 1) * p.per_row]]
    else:
        pair = [1.0, 1.0]
    return pair


@zl.inline
def scaled(acc, first, scales, row_scale, KIND):
    """Two neighbouring columns of the product, with the scales of the token and of the weight rows."""
    if KIND == "e4m3":
        pair = acc[first] * (row_scale * scales[0]), acc[first + 1] * (row_scale * scales[1])
    elif KIND == "block":
        pair = acc[first] * row_scale, acc[first + 1] * row_scale
    else:
        pair = acc[first] + 0.0, acc[first + 1] + 0.0
    return pair


class Ends(NamedTuple):
    """What a thread multiplies its part of a tile with: scales of its rows, and of the first of its pairs of columns."""

    rows: list
    columns: list


@zl.inline
def columns_of(begin, col, p):
    """(pair, up's pair) of scales of some pairs of columns from the thread's `begin`th on, read at once: one after another
    they cost a tile as long as ten of its steps."""
    read = [min(col + j * 8, p.cols - 2) for j in zl.static(range(begin, min(begin + p.together, p.pairs)))]
    scales = [pair_of(at, p) for at in zl.static(read)]
    ups = [pair_of(p.cols + at, p) for at in zl.static(read)] if p.GATED else scales
    return [(scales[u], ups[u]) for u in zl.static(range(len(read)))]


@zl.inline
def ends_of(rows, col, p):
    """Read while the last products run."""
    row_scales = [p.a_scale[min(r, p.tokens - 1)] if p.KIND != "bf16" else 1.0 for r in zl.static(rows)]
    return Ends(row_scales, columns_of(0, col, p))


@zl.inline
def put_pairs(accs, j, parts, places, row_scales, scales, shift, mode, p):
    """The `j`th pair of columns of some rows of out. scales: of the columns, of their ups. All rows take each step before
    any takes the next: a warp has nothing else to do while exp2 and a reciprocal come."""
    found = [scaled(accs[i // 2], j * 4 + i % 2 * 2, scales[0], row_scales[i], p.KIND) for i in zl.static(parts)]
    if p.GATED:
        high = p.BN // 4 + j * 4
        ups = [scaled(accs[i // 2], high + i % 2 * 2, scales[1], row_scales[i], p.KIND) for i in zl.static(parts)]
        powers = [power_of(pair[0], p) for pair in found] + [power_of(pair[1], p) for pair in found]
        halves = [zl.reciprocal(power + 1.0) for power in powers]
        for u, i in enumerate(parts):
            low = found[u][0] * halves[u] * ups[u][0]
            high = found[u][1] * halves[len(parts) + u] * ups[u][1]
            zl.store(zl.cast_ptr(p.out, zl.bf16) + places[i], zl.convert(zl.make_vector(low, high), zl.bf16))
    else:
        for u, i in enumerate(parts):
            put_pair(p.out, places[i], found[u][0] + shift[0], found[u][1] + shift[1], mode)


@zl.inline
def put_tile(accs, rows, col, ends, mode, CHECKED, p):
    """A thread's part of a tile. CHECKED: rows or columns of it may be none of out's."""
    places = [zl.i64(r) * p.stride + col for r in zl.static(rows)]
    scales = ends.columns
    for begin in zl.static(range(0, p.pairs, p.together)):
        columns = [j for j in zl.static(range(begin, min(begin + p.together, p.pairs)))]
        shifts = [[zl.f32(0), zl.f32(0)] for _ in zl.static(columns)]
        if not p.GATED:
            if p.has_bias != 0:
                for u, j in enumerate(columns):
                    both = zl.load(p.bias + min(col + j * 8, p.cols - 2), 2)
                    shifts[u][0] = both[0]
                    shifts[u][1] = both[1]
        if CHECKED:
            if begin > 0:
                scales = columns_of(begin, col, p)
        else:
            following = columns_of(begin + p.together, col, p)  # before the stores, behind which they would wait
        for u, j in enumerate(columns):
            at = [place + j * 8 for place in places]
            if CHECKED:
                if col + j * 8 < p.cols:
                    for i in zl.static(range(len(rows))):
                        if rows[i] < p.tokens:
                            put_pairs(accs, j, [i], at, ends.rows, scales[u], shifts[u], mode, p)
            else:
                every = [i for i in zl.static(range(len(rows)))]
                put_pairs(accs, j, every, at, ends.rows, scales[u], shifts[u], mode, p)
        if not CHECKED:
            scales = following


@zl.inline
def store_tile(accs, rows, col, ends, whole, p):
    """Of a `whole` tile nothing is asked of each pair of columns: behind a branch each would wait for its own exp2 and
    reciprocal, 32 times in a row, with two warps a scheduler to hide it."""
    if p.KIND != "e4m3":  # of others it is not measured
        put_tile(accs, rows, col, ends, p.mode, True, p)
    elif whole:
        if p.GATED:
            put_tile(accs, rows, col, ends, STORE_BF16, False, p)
        else:
            for mode in zl.static((STORE, ACCUMULATE, STORE_BF16)):
                if p.mode == mode:
                    put_tile(accs, rows, col, ends, mode, False, p)
    else:
        put_tile(accs, rows, col, ends, p.mode, True, p)


@zl.inline
def produce(ring, units, p):
    """The thread that fills the ring."""
    slot = zl.i32(0)
    parity = zl.i32(1)
    ahead = zl.i32(0)
    # Where nobody writes the weights, the first stages' are on their way while the kernels before this one end.
    if p.early != 0 and zl.block_index(0) < units.count:
        tile, m, n, first, end = unit_place(zl.block_index(0), units)
        ahead = min(end - first, ring.stages)
        for i in range(ahead):
            zl.mbarrier_expect(ring.full + i, p.stage_bytes)
            load_weights(ring, i, first + i, n, p)
    zl.grid_wait()
    for unit in range(zl.block_index(0), units.count, zl.num_blocks(0)):
        tile, m, n, first, end = unit_place(unit, units)
        for step in range(first, end):
            if ahead > 0:
                ahead -= 1
                load_tokens(ring, slot, step, m, p)
            else:
                zl.mbarrier_wait(ring.empty + slot, parity)
                zl.mbarrier_expect(ring.full + slot, p.stage_bytes)
                load_tokens(ring, slot, step, m, p)
                load_weights(ring, slot, step, n, p)
            slot += 1
            if slot == ring.stages:
                slot = 0
                parity = parity ^ 1


@zl.inline
def multiply_blocks(accs, product, a_desc, w_desc, scales, is_first, BN):
    """k of a stage is that of a block of scales: its sums are scaled in f32 before they are added up."""
    for x, acc in enumerate(accs):
        zl.wgmma_fence()
        for k in zl.static(range(4)):
            zl.wgmma_e4m3(product, a_desc + (k * 2 + x * 512), w_desc + k * 2, BN, k > 0)
        zl.wgmma_commit()
        zl.wgmma_wait(0, product)
        if is_first:
            for i in zl.static(range(BN // 2)):
                acc[i] = product[i] * scales[i // (BN // 4)]
        else:
            for i in zl.static(range(BN // 2)):
                acc[i] = zl.fma(product[i], scales[i // (BN // 4)], acc[i])


@zl.inline
def multiply(accs, a_desc, w_desc, is_first, BN, KIND):
    """One group of products stays in flight; the stage of the one before is free then."""
    zl.wgmma_fence()
    for k in zl.static(range(4)):
        for x, acc in enumerate(accs):
            onto = True if k > 0 else not is_first
            if KIND == "e4m3":
                zl.wgmma_e4m3(acc, a_desc + (k * 2 + x * 512), w_desc + k * 2, BN, onto)
            else:
                zl.wgmma_bf16(acc, a_desc + (k * 2 + x * 512), w_desc + k * 2, BN, onto)
    zl.wgmma_commit()
    zl.wgmma_wait(1)


@zl.inline
def behind(slot, parity, steps, p):
    """The stage behind those of a tile that is the other warpgroup's."""
    at = slot + steps
    rounds = at // p.STAGES
    return at - rounds * p.STAGES, parity ^ (rounds % 2)


@zl.inline
def await_other(group, unit):
    """Until the other warpgroup waits for no stage of the tile before: a parity tells a stage's round of the ring from
    the next one, not from later ones."""
    if unit >= zl.num_blocks(0):
        zl.named_barrier(CONSUMERS + 1 + group, THREADS - 128)


@zl.inline
def wake_other(group, unit, units):
    """This warpgroup waits for no other stage of its tile."""
    if unit + zl.num_blocks(0) < units.count:
        zl.named_arrive(CONSUMERS + 2 - group, THREADS - 128)


@zl.inline
def consume(ring, units, last, p):
    """The warpgroups that multiply, each half of a tile's tokens, or every other tile."""
    BN, KIND, parts = p.BN, p.KIND, p.BM // 64 // p.groups  # blocks of 64 rows of one warpgroup
    group = zl.warp_index() // 4 - 1
    if p.PINGPONG:
        group = zl.shuffle(group, 0)  # so that the compiler knows it as the warp's
    thread = zl.thread_index() - 128
    lane = zl.lane_index()
    base = zl.smem_desc(ring.memory)
    slot = zl.i32(0)
    parity = zl.i32(0)
    accs = [[zl.f32(0) for _ in zl.static(range(BN // 2))] for x in zl.static(range(parts))]
    product = [zl.f32(0) for _ in zl.static(range(BN // 2))] if KIND == "block" else accs[0]
    begin, pitch, above = zl.block_index(0), zl.num_blocks(0), group * (parts * 64)
    if p.PINGPONG:
        begin, pitch, above = begin + group * pitch, pitch * 2, 0
        if group == 1:
            slot, parity = behind(slot, parity, units.steps, p)
    for unit in range(begin, units.count, pitch):
        tile, m, n, first, end = unit_place(unit, units)
        first_col = n * p.tile_cols
        previous = zl.i32(-1)
        if p.PINGPONG:
            await_other(group, unit)
        for step in range(first, end):
            zl.mbarrier_wait(ring.full + slot, parity)
            a_desc = base + zl.u64((slot * ring.stride + above * ROW_BYTES) // 16)
            w_desc = base + zl.u64((slot * ring.stride + p.BM * ROW_BYTES) // 16)
            if KIND == "block":
                gate = p.w_scale[first_col // FP8_BLOCK * units.steps + step]
                up = p.w_scale[(p.cols + first_col) // FP8_BLOCK * units.steps + step] if p.GATED else gate
                multiply_blocks(accs, product, a_desc, w_desc, (gate, up), step == first, BN)
            else:
                multiply(accs, a_desc, w_desc, step == first, BN, KIND)
            if previous >= 0:
                if thread % 128 == 0:
                    zl.mbarrier_arrive(ring.empty + previous)
            previous = slot
            slot += 1
            if slot == ring.stages:
                slot = 0
                parity = parity ^ 1
        if p.PINGPONG:
            wake_other(group, unit, units)
        if unit == begin:
            zl.grid_wait()
        row = m * p.BM + above + zl.warp_index() % 4 * 16 + lane // 4
        rows = [row + (x * 64 + half * 8) for x in zl.static(range(parts)) for half in zl.static(range(2))]
        ends = ends_of(rows, first_col + lane % 4 * 2, p)
        zl.wgmma_wait(0, *accs)
        if thread % 128 == 0:
            zl.mbarrier_arrive(ring.empty + previous)
        complete = units.splits <= 1
        if units.splits > 1:
            complete = sum_parts(accs, unit, tile, last, thread, THREADS - 128, p)
        if complete:
            whole = (m + 1) * p.BM <= p.tokens and first_col + p.tile_cols <= p.cols
            store_tile(accs, rows, first_col + lane % 4 * 2, ends, whole, p)
        if p.PINGPONG:
            slot, parity = behind(slot, parity, units.steps, p)


@zl.kernel
def gemm_wgmma(p: WgmmaParams):
    ring, last = ring_of(p.stage_bytes, p.STAGES, p.groups)
    splits = 1 if p.PINGPONG else p.splits
    units = units_of(p.tokens, p.cols, (p.width + (p.depth - 1)) // p.depth, splits, p.BM, p.tile_cols)
    few, many = (24, 240) if p.PINGPONG else (40, 232)  # a tile of 128 x 192 takes 192 of a thread for its sums
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", few)
        if zl.thread_index() == 0:
            produce(ring, units, p)
    else:
        zl.set_max_registers("inc", many)
        consume(ring, units, last, p)
