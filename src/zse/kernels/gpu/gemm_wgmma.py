"""out[m, n] = sum_k a[m, k] * w[n, k] on Hopper's tensor cores: bf16 x bf16 and e4m3 x e4m3, f32 sums.

One warpgroup gives work to the copy engine (TMA), two multiply (wgmma). Activations [M, K] and weights [N, K] are both
row-major, which is what wgmma wants of both operands, so nothing is repacked. A *stage* of the ring holds BM rows of a
and BN rows of w, 128 bytes of k each, in the 128-byte swizzle; `full` counts its bytes, `empty` the two warpgroups that
have multiplied it. The grid is persistent: block b computes units b, b + grid, ... A unit is an output tile, or with
splits > 1 a part of a tile's k; the block that finishes a tile last adds the parts in their order, so a result does not
depend on which block that is.

Sources of the method: the CUTLASS documentation of warp-specialised persistent kernels, and the measurements in
benchmarks/LOG.md.
"""

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import activated, put_pair, ring_of, sum_parts, unit_place, units_of
from zse.quant.scheme import FP8_BLOCK

THREADS = 384  # one warpgroup that copies, two that multiply
TOGETHER = 8  # pairs of columns whose biases and scales a thread has in flight
ROW_BYTES = 128  # of k in a stage: the width of the swizzle
SHARED_BYTES = 231_000  # of the 232,448 a block may have; the rest is for the barriers


def stages(bm: int, bn: int) -> int:
    """How many stages fit; more than 8 gain nothing."""
    return min(8, SHARED_BYTES // ((bm + bn) * ROW_BYTES))


class WgmmaParams(zl.Record):
    """The parameters of gemm_wgmma. cols: columns that this launch computes, of rows of out that are `stride` elements
    apart; the weights have as many rows, or twice as many when GATED (all gates first, then all ups). width = K. KIND:
    "bf16", "e4m3", or "block": e4m3 with w_scale [rows / 128, K / 128]. A tile is BM tokens x BN rows (GATED: half
    gates, half ups). early: whether the weights may be read before the kernels before this one are done. per_row: 1 if
    w_scale is [rows], 0 if [1]. mode: STORE, ACCUMULATE or STORE_BF16; GATED writes bf16. linear, cubic: see
    activated(). partial f32 [units, BM, BN] and counters i32 [tiles] (zero before and after) are used when splits >
    1."""

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

    @property
    def tile_cols(self) -> int:
        return self.BN // 2 if self.GATED else self.BN

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
    low, high = acc[first] + 0.0, acc[first + 1] + 0.0
    if KIND == "block":
        low, high = low * row_scale, high * row_scale
    if KIND == "e4m3":
        low, high = low * (row_scale * scales[0]), high * (row_scale * scales[1])
    return low, high


@zl.inline
def store_tile(accs, row, col, p):
    """A thread's part of a tile: rows row + 64 x + 8 half, two of every eight columns. What belongs to a column is read
    once for all rows, of TOGETHER pairs of columns before the first is needed: one after another they cost a tile of 18
    pairs with a bias as long as ten of its steps."""
    parts = [(x, half) for x in zl.static(range(len(accs))) for half in zl.static(range(2))]
    rows = [row + (x * 64 + half * 8) for x, half in zl.static(parts)]
    places = [zl.i64(r) * p.stride + col for r in zl.static(rows)]
    row_scales = [p.a_scale[min(r, p.tokens - 1)] if p.KIND != "bf16" else 1.0 for r in zl.static(rows)]
    count = p.BN // 16 if p.GATED else p.BN // 8
    for begin in zl.static(range(0, count, TOGETHER)):
        columns = [j for j in zl.static(range(begin, min(begin + TOGETHER, count)))]
        read = [min(col + j * 8, p.cols - 2) for j in zl.static(columns)]
        scales = [pair_of(at, p) for at in zl.static(read)]
        up_scales = [pair_of(p.cols + at, p) for at in zl.static(read)] if p.GATED else scales
        shifts = [[zl.f32(0), zl.f32(0)] for _ in zl.static(columns)]
        if not p.GATED:
            if p.has_bias != 0:
                for u, at in enumerate(read):
                    both = zl.load(p.bias + at, 2)
                    shifts[u][0] = both[0]
                    shifts[u][1] = both[1]
        for u, j in enumerate(columns):
            if col + j * 8 < p.cols:
                for i in zl.static(range(len(parts))):
                    if rows[i] < p.tokens:
                        acc, first = accs[parts[i][0]], j * 4 + parts[i][1] * 2
                        low, high = scaled(acc, first, scales[u], row_scales[i], p.KIND)
                        if p.GATED:
                            ups = scaled(acc, p.BN // 4 + first, up_scales[u], row_scales[i], p.KIND)
                            both = zl.make_vector(
                                activated(low, ups[0], p.linear, p.cubic), activated(high, ups[1], p.linear, p.cubic)
                            )
                            zl.store(zl.cast_ptr(p.out, zl.bf16) + (places[i] + j * 8), zl.convert(both, zl.bf16))
                        else:
                            put_pair(p.out, places[i] + j * 8, low + shifts[u][0], high + shifts[u][1], p.mode)


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
def consume(ring, units, last, p):
    """The warpgroups that multiply, each half of a tile's tokens."""
    BN, KIND, parts = p.BN, p.KIND, p.BM // 128  # blocks of 64 rows of one warpgroup
    group = zl.warp_index() // 4 - 1
    thread = zl.thread_index() - 128
    lane = zl.lane_index()
    base = zl.smem_desc(ring.memory)
    slot = zl.i32(0)
    parity = zl.i32(0)
    accs = [[zl.f32(0) for _ in zl.static(range(BN // 2))] for x in zl.static(range(parts))]
    product = [zl.f32(0) for _ in zl.static(range(BN // 2))] if KIND == "block" else accs[0]
    for unit in range(zl.block_index(0), units.count, zl.num_blocks(0)):
        tile, m, n, first, end = unit_place(unit, units)
        first_col = n * p.tile_cols
        previous = zl.i32(-1)
        for step in range(first, end):
            zl.mbarrier_wait(ring.full + slot, parity)
            a_desc = base + zl.u64((slot * ring.stride + group * (parts * 64 * ROW_BYTES)) // 16)
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
        zl.wgmma_wait(0, *accs)
        if thread % 128 == 0:
            zl.mbarrier_arrive(ring.empty + previous)
        if unit == zl.block_index(0):
            zl.grid_wait()
        complete = units.splits <= 1
        if units.splits > 1:
            complete = sum_parts(accs, unit, tile, last, thread, THREADS - 128, p)
        if complete:
            row = m * p.BM + group * (parts * 64) + zl.warp_index() % 4 * 16 + lane // 4
            store_tile(accs, row, first_col + lane % 4 * 2, p)


@zl.kernel
def gemm_wgmma(p: WgmmaParams):
    ring, last = ring_of(p.stage_bytes, p.STAGES, 2)
    units = units_of(p.tokens, p.cols, (p.width + (p.depth - 1)) // p.depth, p.splits, p.BM, p.tile_cols)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", 40)
        if zl.thread_index() == 0:
            produce(ring, units, p)
    else:
        zl.set_max_registers("inc", 232)
        consume(ring, units, last, p)
