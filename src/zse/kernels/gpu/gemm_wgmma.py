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
from zse.kernels.gpu.gemm_parts import activated, put_pair, sum_parts, tile_place

THREADS = 384  # one warpgroup that copies, two that multiply
ROW_BYTES = 128  # of k in a stage: the width of the swizzle
SCALE_BLOCK = 128  # rows and columns that share a scale of "block"
SHARED_BYTES = 231_000  # of the 232,448 a block may have; the rest is for the barriers


def stages(bm: int, bn: int) -> int:
    """How many stages fit; more than 8 gain nothing."""
    return min(8, SHARED_BYTES // ((bm + bn) * ROW_BYTES))


@zl.inline
def load_stage(stage, bar, a_map, w_map, k, m0, n0, cols, with_a, with_w, BM, BN, GATED):
    """Ask for the boxes of one stage. A gated tile is half gate rows and half up rows."""
    if with_a:
        zl.tma_load(stage, a_map, (k, m0), bar)
    if with_w:
        if GATED:
            zl.tma_load(stage + BM * ROW_BYTES, w_map, (k, n0), bar)
            zl.tma_load(stage + (BM + BN // 2) * ROW_BYTES, w_map, (k, cols + n0), bar)
        else:
            zl.tma_load(stage + BM * ROW_BYTES, w_map, (k, n0), bar)


@zl.inline
def pair_of(w_scale, at, per_row, KIND):
    """The scales of two neighbouring weight rows."""
    if KIND == "e4m3":
        pair = [w_scale[at * per_row], w_scale[(at + 1) * per_row]]
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
def store_tile(
    accs,
    out,
    bias,
    a_scale,
    w_scale,
    row,
    col,
    tokens,
    cols,
    stride,
    per_row,
    has_bias,
    mode,
    linear,
    cubic,
    BN,
    GATED,
    KIND,
):
    """A thread's part of a tile: rows row + 64 x + 8 half, two of every eight columns. What belongs to a column is read
    once for all rows."""
    parts = [(x, half) for x in zl.static(range(len(accs))) for half in zl.static(range(2))]
    rows = [row + (x * 64 + half * 8) for x, half in zl.static(parts)]
    places = [zl.i64(r) * stride + col for r in zl.static(rows)]
    row_scales = [a_scale[min(r, tokens - 1)] if KIND != "bf16" else 1.0 for r in zl.static(rows)]
    for j in zl.static(range(BN // 16 if GATED else BN // 8)):
        at = col + j * 8
        if at < cols:
            scales = pair_of(w_scale, at, per_row, KIND)
            if GATED:
                up_scales = pair_of(w_scale, cols + at, per_row, KIND)
                for i in zl.static(range(len(parts))):
                    if rows[i] < tokens:
                        acc, first = accs[parts[i][0]], j * 4 + parts[i][1] * 2
                        gates = scaled(acc, first, scales, row_scales[i], KIND)
                        ups = scaled(acc, BN // 4 + first, up_scales, row_scales[i], KIND)
                        both = zl.make_vector(
                            activated(gates[0], ups[0], linear, cubic), activated(gates[1], ups[1], linear, cubic)
                        )
                        zl.store(zl.cast_ptr(out, zl.bf16) + (places[i] + j * 8), zl.convert(both, zl.bf16))
            else:
                shift = [zl.f32(0), zl.f32(0)]
                if has_bias != 0:
                    both = zl.load(bias + at, 2)
                    shift[0] = both[0]
                    shift[1] = both[1]
                for i in zl.static(range(len(parts))):
                    if rows[i] < tokens:
                        low, high = scaled(accs[parts[i][0]], j * 4 + parts[i][1] * 2, scales, row_scales[i], KIND)
                        put_pair(out, places[i] + j * 8, low + shift[0], high + shift[1], mode)


@zl.kernel
def gemm_wgmma(
    a_map: zl.TensorMap,
    w_map: zl.TensorMap,
    a_scale: zl.Ptr[zl.f32, "const"],
    w_scale: zl.Ptr[zl.f32, "const"],
    bias: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.u8],
    partial: zl.Ptr[zl.f32],
    counters: zl.Ptr[zl.i32],
    tokens: zl.i32,
    cols: zl.i32,
    stride: zl.i32,
    width: zl.i32,
    splits: zl.i32,
    early: zl.i32,
    per_row: zl.i32,
    has_bias: zl.i32,
    mode: zl.i32,
    linear: zl.f32,
    cubic: zl.f32,
    BM: zl.static,
    BN: zl.static,
    STAGES: zl.static,
    GATED: zl.static,
    KIND: zl.static,
):
    """cols: columns that this launch computes, of rows of out that are `stride` elements apart; the weights have as
    many rows, or twice as many when GATED (all gates first, then all ups). width = K. KIND: "bf16", "e4m3", or "block":
    e4m3 with w_scale [rows / 128, K / 128]. early: whether the weights may be read before the kernels before this one
    are done. per_row: 1 if w_scale is [rows], 0 if [1]. mode: STORE, ACCUMULATE or STORE_BF16; GATED writes bf16.
    linear, cubic: see activated(). partial f32 [units, BM, BN] and counters i32 [tiles] (zero before and after) are
    used when splits > 1."""
    stage_bytes = (BM + BN) * ROW_BYTES
    depth = ROW_BYTES // 2 if KIND == "bf16" else ROW_BYTES  # k of a stage
    tile_cols = BN // 2 if GATED else BN
    parts = BM // 128  # blocks of 64 rows of one warpgroup
    ring = zl.shared_array(zl.u8, STAGES * stage_bytes, 1024)
    full = zl.mbarrier_array(STAGES)
    empty = zl.mbarrier_array(STAGES)
    last = zl.shared_array(zl.i32, 4)
    if zl.thread_index() == 0:
        for i in zl.static(range(STAGES)):
            zl.mbarrier_init(full + i, 1)
            zl.mbarrier_init(empty + i, 2)
        zl.mbarrier_init_fence()
    zl.barrier()
    zl.grid_launch_dependents()
    steps = (width + (depth - 1)) // depth
    token_tiles = (tokens + (BM - 1)) // BM
    row_tiles = (cols + (tile_cols - 1)) // tile_cols
    units = token_tiles * row_tiles * splits
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", 40)
        if zl.thread_index() == 0:
            slot = zl.i32(0)
            parity = zl.i32(1)
            ahead = zl.i32(0)
            # Where nobody writes the weights, the first stages' are on their way while the kernels before this one end.
            if early != 0 and zl.block_index(0) < units:
                tile = zl.block_index(0) // splits
                part = zl.block_index(0) % splits
                m, n = tile_place(tile, token_tiles, row_tiles)
                first = part * steps // splits
                ahead = min((part + 1) * steps // splits - first, STAGES)
                for i in range(ahead):
                    zl.mbarrier_expect(full + i, stage_bytes)
                    load_stage(
                        ring + i * stage_bytes,
                        full + i,
                        a_map,
                        w_map,
                        (first + i) * depth,
                        0,
                        n * tile_cols,
                        cols,
                        False,
                        True,
                        BM,
                        BN,
                        GATED,
                    )
            zl.grid_wait()
            for unit in range(zl.block_index(0), units, zl.num_blocks(0)):
                tile = unit // splits
                part = unit % splits
                m, n = tile_place(tile, token_tiles, row_tiles)
                for step in range(part * steps // splits, (part + 1) * steps // splits):
                    stage = ring + slot * stage_bytes
                    if ahead > 0:
                        ahead -= 1
                        load_stage(
                            stage,
                            full + slot,
                            a_map,
                            w_map,
                            step * depth,
                            m * BM,
                            n * tile_cols,
                            cols,
                            True,
                            False,
                            BM,
                            BN,
                            GATED,
                        )
                    else:
                        zl.mbarrier_wait(empty + slot, parity)
                        zl.mbarrier_expect(full + slot, stage_bytes)
                        load_stage(
                            stage,
                            full + slot,
                            a_map,
                            w_map,
                            step * depth,
                            m * BM,
                            n * tile_cols,
                            cols,
                            True,
                            True,
                            BM,
                            BN,
                            GATED,
                        )
                    slot += 1
                    if slot == STAGES:
                        slot = 0
                        parity = parity ^ 1
    else:
        zl.set_max_registers("inc", 232)
        group = zl.warp_index() // 4 - 1
        thread = zl.thread_index() - 128
        lane = zl.lane_index()
        base = zl.smem_desc(ring)
        slot = zl.i32(0)
        parity = zl.i32(0)
        accs = [[zl.f32(0) for _ in zl.static(range(BN // 2))] for x in zl.static(range(parts))]
        product = [zl.f32(0) for _ in zl.static(range(BN // 2))] if KIND == "block" else accs[0]
        for unit in range(zl.block_index(0), units, zl.num_blocks(0)):
            tile = unit // splits
            part = unit % splits
            m, n = tile_place(tile, token_tiles, row_tiles)
            first = part * steps // splits
            previous = zl.i32(-1)
            for step in range(first, (part + 1) * steps // splits):
                zl.mbarrier_wait(full + slot, parity)
                a_desc = base + zl.u64((slot * stage_bytes + group * (parts * 64 * ROW_BYTES)) // 16)
                w_desc = base + zl.u64((slot * stage_bytes + BM * ROW_BYTES) // 16)
                if KIND == "block":
                    # k of a stage is that of a block of scales: its sums are scaled in f32 before they are added up.
                    at = n * tile_cols // SCALE_BLOCK * steps + step
                    gate_scale = w_scale[at]
                    up_scale = w_scale[(cols + n * tile_cols) // SCALE_BLOCK * steps + step] if GATED else gate_scale
                    for x in zl.static(range(parts)):
                        zl.wgmma_fence()
                        for k in zl.static(range(4)):
                            zl.wgmma_e4m3(product, a_desc + (k * 2 + x * 512), w_desc + k * 2, BN, k > 0)
                        zl.wgmma_commit()
                        zl.wgmma_wait(0, product)
                        if step == first:
                            for i in zl.static(range(BN // 2)):
                                accs[x][i] = product[i] * (gate_scale if i < BN // 4 else up_scale)
                        else:
                            for i in zl.static(range(BN // 2)):
                                accs[x][i] = zl.fma(product[i], gate_scale if i < BN // 4 else up_scale, accs[x][i])
                else:
                    zl.wgmma_fence()
                    for k in zl.static(range(4)):
                        for x in zl.static(range(parts)):
                            onto = True if k > 0 else step > first
                            if KIND == "e4m3":
                                zl.wgmma_e4m3(accs[x], a_desc + (k * 2 + x * 512), w_desc + k * 2, BN, onto)
                            else:
                                zl.wgmma_bf16(accs[x], a_desc + (k * 2 + x * 512), w_desc + k * 2, BN, onto)
                    zl.wgmma_commit()
                    # One group of products stays in flight; the stage of the one before is free.
                    zl.wgmma_wait(1)
                if previous >= 0:
                    if thread % 128 == 0:
                        zl.mbarrier_arrive(empty + previous)
                previous = slot
                slot += 1
                if slot == STAGES:
                    slot = 0
                    parity = parity ^ 1
            zl.wgmma_wait(0, *accs)
            if thread % 128 == 0:
                zl.mbarrier_arrive(empty + previous)
            if unit == zl.block_index(0):
                zl.grid_wait()
            complete = splits <= 1
            if splits > 1:
                complete = sum_parts(accs, partial, unit, tile, splits, counters, last, thread, THREADS - 128, BN)
            if complete:
                store_tile(
                    accs,
                    out,
                    bias,
                    a_scale,
                    w_scale,
                    m * BM + group * (parts * 64) + zl.warp_index() % 4 * 16 + lane // 4,
                    n * tile_cols + lane % 4 * 2,
                    tokens,
                    cols,
                    stride,
                    per_row,
                    has_bias,
                    mode,
                    linear,
                    cubic,
                    BN,
                    GATED,
                    KIND,
                )
