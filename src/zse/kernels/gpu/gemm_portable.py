"""out[m, n] = sum_k a[m, k] * w[n, k] in bf16 with the tensor cores that every GPU since Ampere has (mma.sync): the
twin of gemm_wgmma.

A block computes 128 tokens x 128 weight rows, eight warps of 64 x 32 each. Stages of 64 columns arrive by cp.async,
three in turn; the 16-byte pieces of a row are stored at piece ^ (row % 8), so that neither copies nor ldmatrix meet
bank conflicts. A gated tile is 64 gates and 64 ups; a warp takes 16 of each, so both meet in a thread.
"""

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import activated, put_one, put_pair

THREADS = 256
TILE = 128  # tokens and weight rows of a block
DEPTH = 64  # columns of a stage
STAGES = 3
TILE_BYTES = TILE * DEPTH * 2


@zl.inline
def piece(tile, row, index):
    """Where the 16 bytes number `index` of a row lie."""
    return tile + (row * (DEPTH * 2) + ((index ^ (row % 8)) * 16))


@zl.inline
def copy_tile(tile, source, first, limit, width, k, thread):
    """128 rows from `first` of `limit`, columns k .. k + 63 of `width`; zeros outside."""
    for i in zl.static(range(TILE * 8 // THREADS)):
        row = thread // 8 + i * (THREADS // 8)
        column = k + thread % 8 * 8
        inside = first + row < limit and column < width
        at = zl.i64(min(first + row, limit - 1)) * width + min(column, width - 8)
        zl.copy_async(piece(tile, row, thread % 8), source + at, 16, 16 if inside else zl.i32(0))


class PortableParams(zl.Record):
    """The parameters of gemm_portable. cols: columns that this launch computes; stride: elements between rows of out.
    width = K, a multiple of 8. mode, linear, cubic: as in gemm_wgmma."""

    a: zl.Ptr[zl.bf16, "const"]
    w: zl.Ptr[zl.bf16, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.u8]
    tokens: zl.i32
    cols: zl.i32
    stride: zl.i32
    width: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    linear: zl.f32
    cubic: zl.f32
    GATED: zl.static


@zl.inline
def copy_stage(stage, m0, n0, k, thread, p):
    """One stage of both operands; a gated tile's rows are gates, then ups."""
    copy_tile(stage, p.a, m0, p.tokens, p.width, k, thread)
    if p.GATED:
        for i in zl.static(range(TILE * 8 // THREADS)):
            row = thread // 8 + i * (THREADS // 8)
            column = k + thread % 8 * 8
            mine = n0 + row % (TILE // 2)
            inside = mine < p.cols and column < p.width
            source = min(mine, p.cols - 1) + (p.cols if row >= TILE // 2 else 0)
            at = p.w + (zl.i64(source) * p.width + min(column, p.width - 8))
            zl.copy_async(piece(stage + TILE_BYTES, row, thread % 8), at, 16, 16 if inside else zl.i32(0))
    else:
        copy_tile(stage + TILE_BYTES, p.w, n0, p.cols, p.width, k, thread)


@zl.inline
def multiply(acc, tile, rows, part, GATED):
    """acc += a stage's products of this warp: 64 tokens from `rows` on, the `part`-th 32 weight rows."""
    lane = zl.lane_index()
    for k in zl.static(range(DEPTH // 16)):
        # Lane i gives the address of row i % 16 (a: tokens, w: weight rows) and of columns 0 .. 7 or 8 .. 15.
        fragments = []
        for n in zl.static(range(2)):
            first = n * 64 + part * 16 if GATED else part * 32 + n * 16
            row = first + lane % 8 + lane // 16 * 8
            fragments += [zl.ldmatrix(piece(tile + TILE_BYTES, row, k * 2 + lane // 8 % 2), 4)]
        for m in zl.static(range(4)):
            row = rows + m * 16 + lane % 16
            x = zl.ldmatrix(piece(tile, row, k * 2 + lane // 16), 4)
            for n in zl.static(range(4)):
                pair = fragments[n // 2]
                zl.mma_bf16(acc[m][n], [x[0], x[1], x[2], x[3]], [pair[n % 2 * 2], pair[n % 2 * 2 + 1]])


@zl.inline
def store_gated(acc, half, row, n0, part, p):
    for n in zl.static(range(2)):
        col = n0 + part * 16 + n * 8 + zl.lane_index() % 4 * 2
        if col < p.cols:
            gate, up = acc[n], acc[2 + n]
            both = zl.make_vector(
                activated(gate[half * 2], up[half * 2], p.linear, p.cubic),
                activated(gate[half * 2 + 1], up[half * 2 + 1], p.linear, p.cubic),
            )
            place = zl.cast_ptr(p.out, zl.u32) + (zl.i64(row) * p.stride + col) // 2
            zl.store(place, zl.bitcast(zl.convert(both, zl.bf16), zl.u32))


@zl.inline
def store_row(acc, half, row, n0, part, p):
    for n in zl.static(range(4)):
        col = n0 + part * 32 + n * 8 + zl.lane_index() % 4 * 2
        if col < p.cols:
            low, high = acc[n][half * 2] + 0.0, acc[n][half * 2 + 1] + 0.0
            if p.has_bias != 0:
                low += p.bias[col]
                high += p.bias[min(col + 1, p.cols - 1)]
            if p.stride % 2 == 0 and col + 1 < p.cols:
                put_pair(p.out, zl.i64(row) * p.stride + col, low, high, p.mode)
            else:
                put_one(p.out, zl.i64(row) * p.stride + col, low, p.mode)
                if col + 1 < p.cols:
                    put_one(p.out, zl.i64(row) * p.stride + col + 1, high, p.mode)


@zl.kernel
def gemm_portable(p: PortableParams):
    """Grid (tiles of tokens, tiles of columns of out)."""
    thread = zl.thread_index()
    lane = zl.lane_index()
    warp = zl.warp_index()
    ring = zl.shared_array(zl.u8, STAGES * 2 * TILE_BYTES, 128)
    m0 = zl.block_index(0) * TILE
    n0 = zl.block_index(1) * (TILE // 2 if p.GATED else TILE)
    zl.grid_launch_dependents()
    zl.grid_wait()
    steps = (p.width + (DEPTH - 1)) // DEPTH
    for stage in zl.static(range(STAGES - 1)):
        if stage < steps:
            copy_stage(ring + stage * (2 * TILE_BYTES), m0, n0, stage * DEPTH, thread, p)
        zl.copy_commit()
    rows = warp % 2 * 64
    part = warp // 2
    acc = [[[zl.f32(0) for _ in zl.static(range(4))] for n in zl.static(range(4))] for m in zl.static(range(4))]
    slot = zl.i32(0)
    fill = zl.i32(STAGES - 1)
    for step in range(steps):
        zl.copy_wait(STAGES - 2)
        zl.barrier()
        if step + (STAGES - 1) < steps:
            copy_stage(ring + fill * (2 * TILE_BYTES), m0, n0, (step + (STAGES - 1)) * DEPTH, thread, p)
        zl.copy_commit()
        multiply(acc, ring + slot * (2 * TILE_BYTES), rows, part, p.GATED)
        slot = slot + 1 if slot + 1 < STAGES else 0
        fill = fill + 1 if fill + 1 < STAGES else 0
    store = store_gated if p.GATED else store_row
    for m in zl.static(range(4)):
        for half in zl.static(range(2)):
            row = m0 + rows + m * 16 + half * 8 + lane // 4
            if row < p.tokens:
                store(acc[m], half, row, n0, part, p)
