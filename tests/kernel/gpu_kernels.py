"""Kernels that use every part of the GPU language, for the emulator and for hardware. Checks stand in gpu_cases.py."""

from zse import kernel as zl


@zl.kernel
def vector_add(a: zl.Ptr[zl.f32, "const"], b: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], n: zl.i32):
    zl.grid_launch_dependents()
    zl.grid_wait()
    i = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    if i < n:
        zl.prefetch_l2(a + i)
        zl.store(out + i, zl.load(a + i, 4, "readonly") + zl.load(b + i, 4, "stream"), "stream")


@zl.kernel
def row_sum(x: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.f32], width: zl.i32):
    warps = zl.target.threads // zl.target.warp
    partial = zl.shared_array(zl.f32, warps)
    row = x + zl.block_index(0) * width
    total = zl.f32(0)
    for i in zl.unroll(range(zl.thread_index() * 8, width, zl.target.threads * 8), 4):
        v = zl.convert(zl.load(row + i, 8), zl.f32)
        for k in zl.static(range(8)):
            total += v[k]
    total = zl.warp_sum(total)
    if zl.lane_index() == 0:
        partial[zl.warp_index()] = total
    zl.barrier()
    if zl.warp_index() == 0:
        value = zl.f32(0)
        if zl.lane_index() < warps:
            value = partial[zl.lane_index()]
        value = zl.warp_sum(value)
        if zl.lane_index() == 0:
            out[zl.block_index(0)] = value


@zl.kernel
def conversions(x: zl.Ptr["T", "const"], out: zl.Ptr["U"], n: zl.i32, T: zl.static, U: zl.static, LANES: zl.static):
    """Scalars where LANES is 1."""
    i = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * LANES
    if i < n:
        if LANES == 1:
            out[i] = U(x[i])
        else:
            zl.store(out + i, zl.convert(zl.load(x + i, LANES), U))


@zl.kernel
def elementwise(
    x: zl.Ptr[zl.f32, "const"], y: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], n: zl.i32, LANES: zl.static
):
    i = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * LANES
    if i < n:
        a, b = zl.load(x + i, LANES), zl.load(y + i, LANES)
        rows = [
            zl.exp(a),
            zl.exp2(a),
            zl.log(abs(a) + 0.5),
            zl.sin(a),
            zl.cos(a),
            zl.tanh(a),
            zl.sqrt(abs(a)),
            zl.rsqrt(abs(a) + 0.25),
            zl.reciprocal(b),
            zl.floor(a),
            zl.round_even(a),
            zl.fma(a, b, 1.0),
            min(a, b),
            max(a, b),
            zl.absolute(a),
            a / b,
            a - b * 2.0,
            -a,
            zl.where(a > b, a, 0.5),
        ]
        for k in zl.static(range(len(rows))):
            zl.store(out + k * n + i, rows[k])


@zl.kernel
def integers(x: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.i32], n: zl.i32):
    i = zl.thread_index() * 4
    if i < n:
        v = zl.load(x + i, 4)
        u = zl.bitcast(v, zl.u32)
        rows = [
            v + 7,
            v * 3,
            (v >> 3) ^ 5,
            zl.bitcast(u >> 3, zl.i32),
            v & 15 | 64,
            ~v,
            min(v, 3),
            max(v, -3),
            -v,
            zl.where(v != 3, v, 0),
            v // 7,
            v % 7,
        ]
        for k in zl.static(range(len(rows))):
            zl.store(out + k * n + i, rows[k])
        extra = [
            zl.reduce_add(v),
            zl.reduce_max(v),
            zl.reduce_min(v),
            zl.i32(1) if zl.any_lane(v == 3) else zl.i32(0),
            zl.i32(zl.popcount(zl.u64(u[0]))),
        ]
        zl.store(out + len(rows) * n + i, zl.concat(zl.widen_high(zl.make_vector(*extra[0:4])), zl.widen_low(v)))
        out[(len(rows) + 1) * n + i] = extra[4]
        low = zl.i16(x[i])
        tiny = zl.i8(low)
        low = low * zl.i16(3)
        tiny = tiny + zl.i8(100)
        out[(len(rows) + 1) * n + i + 1] = zl.i32(low)
        out[(len(rows) + 1) * n + i + 2] = zl.i32(tiny)
        out[(len(rows) + 1) * n + i + 3] = zl.i32(zl.i64(x[i]) * zl.i64(x[i]) >> 8)


@zl.kernel
def packed(x: zl.Ptr[zl.u32, "const"], out: zl.Ptr[zl.u32], bytes_: zl.Ptr[zl.i8], n: zl.i32):
    """Bitcasts and lanes of packed vectors; x: 4 words a thread."""
    t = zl.thread_index()
    if t < n:
        words = zl.load(x + t * 4, 4)
        halves, octets, longs = zl.bitcast(words, zl.u16), zl.bitcast(words, zl.u8), zl.bitcast(words, zl.u64)
        signed = zl.bitcast(words, zl.i8)
        out[t * 16 + 0] = zl.u32(halves[5])
        out[t * 16 + 1] = zl.u32(octets[11])
        out[t * 16 + 2] = zl.u32(longs[1] >> 20)
        out[t * 16 + 3] = zl.bitcast(zl.i32(signed[7]), zl.u32)
        zl.store(out + t * 16 + 4, zl.bitcast(zl.make_vector(halves[1], halves[0], halves[3], halves[2]), zl.u32))
        out[t * 16 + 6] = zl.bitcast(zl.make_vector(octets[3], octets[2], octets[1], octets[0]), zl.u32)
        out[t * 16 + 7] = zl.bitcast(zl.bitcast(words[0], zl.f32), zl.u32)
        out[t * 16 + 8] = zl.u32(zl.bitcast(zl.widen_high(halves), zl.u64) >> 32)
        out[t * 16 + 9] = zl.lop3(words[0], words[1], words[2], 0xE8)
        out[t * 16 + 10] = zl.prmt(words[0], words[1], 0x7531)
        out[t * 16 + 11] = zl.bitcast(zl.concat(zl.widen_low(octets), zl.widen_high(octets)), zl.u32)[3]
        zl.store(bytes_ + t * 4, zl.narrow_s8(zl.bitcast(words, zl.i32) >> 12))


@zl.kernel
def pairs(x: zl.Ptr[zl.u32, "const"], out: zl.Ptr[zl.u32], n: zl.i32):
    t = zl.thread_index()
    if t < n:
        a, b, c = x[t], x[n + t], x[2 * n + t]
        rows = [zl.fma_bf16x2(a, b, c), zl.mul_bf16x2(a, b), zl.add_bf16x2(a, b), zl.max_bf16x2(a, b)]
        halves = [zl.fma_f16x2(a, b, c), zl.mul_f16x2(a, b), zl.add_f16x2(a, b), zl.sub_f16x2(a, b)]
        for k in zl.static(range(4)):
            out[k * n + t] = rows[k]
            out[(4 + k) * n + t] = halves[k]


@zl.kernel
def warps(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], votes: zl.Ptr[zl.u64]):
    """One block of any number of whole warps; 12 rows of `threads`."""
    t, threads = zl.thread_index(), zl.target.threads
    v = x[t]
    rows = [
        zl.shuffle(v, 3),
        zl.shuffle_xor(v, 5),
        zl.shuffle_up(v, 2),
        zl.shuffle_down(v, 3),
        zl.warp_sum(v),
        zl.warp_max(v),
        zl.warp_min(v),
        zl.warp_sum(v, 4),
        zl.warp_max(v, 8),
        zl.f32(zl.lane_index()),
        zl.f32(zl.warp_index()),
        zl.f32(zl.bitcast(zl.shuffle_xor(zl.convert(v, zl.bf16), 1), zl.bf16)),
    ]
    for k in zl.static(range(len(rows))):
        out[k * threads + t] = rows[k]
    wide = zl.shuffle_xor(zl.f64(v) + 1e9, 16)
    out[len(rows) * threads + t] = zl.f32(wide - 1e9)
    bits = zl.ballot(v > 0.0)
    some, every = zl.any_thread(v > 0.9), zl.all_threads(v > -0.9)
    word = zl.bitcast(v, zl.u32)
    top = zl.warp_top(word) if zl.target.has("mma_sync") else zl.warp_max(word)
    number = zl.bitcast(word, zl.i32)
    total = zl.warp_total(number) if zl.target.has("mma_sync") else zl.warp_sum(number)
    if zl.lane_index() == 0:
        votes[zl.warp_index() * 5] = bits
        votes[zl.warp_index() * 5 + 1] = zl.u64(1) if some else zl.u64(0)
        votes[zl.warp_index() * 5 + 2] = zl.u64(1) if every else zl.u64(0)
        votes[zl.warp_index() * 5 + 3] = zl.u64(top)
        votes[zl.warp_index() * 5 + 4] = zl.u64(zl.bitcast(total, zl.u32))


@zl.kernel
def histogram(
    x: zl.Ptr[zl.i32, "const"],
    counts: zl.Ptr[zl.u32],
    extremes: zl.Ptr[zl.i32],
    sums: zl.Ptr[zl.f32],
    wide: zl.Ptr[zl.i64],
    n: zl.i32,
):
    """Atomics in shared and global memory; 16 bins."""
    bins = zl.shared_array(zl.u32, 16)
    t = zl.thread_index()
    if t < 16:
        bins[t] = zl.u32(0)
    zl.barrier()
    for i in range(zl.block_index(0) * zl.target.threads + t, n, zl.num_blocks(0) * zl.target.threads):
        value = x[i]
        zl.atomic_add(bins + (value & 15), zl.u32(1))
        zl.atomic_max(extremes, value)
        zl.atomic_min(extremes + 1, value)
        zl.atomic_accumulate(sums, zl.f32(value & 7))
        zl.atomic_accumulate(sums + 2, zl.make_vector(zl.f32(value & 7), zl.f32(1)))
        zl.atomic_add(wide, zl.i64(value))
        zl.atomic_max(wide + 1, zl.i64(value))
    zl.barrier()
    if t < 16:
        zl.atomic_add(counts + t, bins[t])


@zl.kernel
def locked(counter: zl.Ptr[zl.u32], lock: zl.Ptr[zl.u32], order: zl.Ptr[zl.u32]):
    """Every block adds to a plain counter under a lock made of atomic_cas; tickets are taken by atomic_add."""
    if zl.thread_index() == 0:
        while zl.atomic_cas(lock, 0, 1) != zl.u32(0):
            pass
        zl.fence()
        counter[0] = zl.load_acquire(counter) + zl.u32(1)
        zl.fence()
        zl.store_release(lock, 0)
        order[zl.atomic_add(counter + 1, 1)] = zl.u32(zl.block_index(0))


@zl.kernel
def last_block_sums(
    x: zl.Ptr[zl.f32, "const"], parts: zl.Ptr[zl.f32], arrived: zl.Ptr[zl.u32], out: zl.Ptr[zl.f32], n: zl.i32
):
    """Partial sums of all blocks; the block that arrives last adds them in order."""
    scratch = zl.shared_array(zl.f32, zl.target.threads // zl.target.warp)
    is_last = zl.shared_array(zl.i32, 1)
    t = zl.thread_index()
    total = zl.f32(0)
    for i in range(zl.block_index(0) * zl.target.threads + t, n, zl.num_blocks(0) * zl.target.threads):
        total += x[i]
    total = zl.warp_sum(total)
    if zl.lane_index() == 0:
        scratch[zl.warp_index()] = total
    zl.barrier()
    if t == 0:
        block = zl.f32(0)
        for w in zl.static(range(zl.target.threads // zl.target.warp)):
            block += scratch[w]
        parts[zl.block_index(0)] = block
        zl.fence()
        before = zl.atomic_add(arrived, 1)
        is_last[0] = zl.i32(1) if before == zl.u32(zl.num_blocks(0) - 1) else zl.i32(0)
    zl.barrier()
    if is_last[0] == 1 and t == 0:
        zl.fence()
        result = zl.f32(0)
        for b in range(zl.num_blocks(0)):
            result += parts[b]
        out[0] = result


@zl.kernel
def scratch_arrays(x: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.i32], n: zl.i32):
    """Memory of the thread, written and read at run-time places."""
    mine = zl.local_array(zl.i32, 8)
    t = zl.thread_index()
    for i in range(8):
        mine[i] = x[t * 8 + i]
    for i in range(8):
        out[t * 8 + i] = mine[(i + n) & 7]


@zl.kernel
def producer_consumer(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], rounds: zl.i32):
    """The first warp fills a tile, the others read it; two named barriers."""
    tile = zl.shared_array(zl.f32, 32)
    t = zl.thread_index()
    if zl.warp_index() == 0:
        for r in range(rounds):
            zl.named_barrier(2, zl.target.threads)
            tile[t] = x[r * 32 + t]
            zl.named_arrive(1, zl.target.threads)
    else:
        zl.named_arrive(2, zl.target.threads)
        for r in range(rounds):
            zl.named_barrier(1, zl.target.threads)
            if zl.warp_index() == 1:
                out[r * 32 + zl.lane_index()] = tile[31 - zl.lane_index()]
            if r < rounds - 1:
                zl.named_arrive(2, zl.target.threads)


@zl.inline
def tile_rows(lane, stride):
    """Where lane i points for ldmatrix of a 16x16 tile: row i % 16, column half i // 16."""
    return (lane % 16) * stride + lane // 16 * 8


@zl.kernel
def warp_tile(a: zl.Ptr["T", "const"], b: zl.Ptr["T", "const"], out: zl.Ptr[zl.f32], K: zl.static, T: zl.static):
    """out [16, 8] = a [16, K] b [8, K]^T by one warp; a through cp.async and ldmatrix, b from global memory."""
    tile = zl.shared_array(T, 16 * K, align=128)
    acc = [zl.f32(0) for _ in zl.static(range(4))]
    lane = zl.lane_index()
    for i in range(lane * 8, 16 * K, zl.target.warp * 8):
        zl.copy_async(tile + i, a + i, 16)
    zl.copy_commit()
    zl.copy_wait(0)
    zl.warp_barrier()
    for k in zl.static(range(0, K, 16)):
        fa = zl.ldmatrix(tile + tile_rows(lane, K) + k, 4)
        row = b + lane // 4 * K + k + lane % 4 * 2
        fb = [zl.bitcast(zl.load(row, 2), zl.u32), zl.bitcast(zl.load(row + 8, 2), zl.u32)]
        if T is zl.bf16:
            zl.mma_bf16(acc, fa, fb)
        else:
            zl.mma_f16(acc, fa, fb)
    for i in zl.static(range(4)):
        out[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2] = acc[i]


@zl.kernel
def warp_tile_e4m3(a: zl.Ptr[zl.e4m3, "const"], b: zl.Ptr[zl.e4m3, "const"], out: zl.Ptr[zl.f32], K: zl.static):
    acc = [zl.f32(0) for _ in zl.static(range(4))]
    lane = zl.lane_index()
    for k in zl.static(range(0, K, 32)):
        fa = [
            zl.bitcast(zl.load(a + (lane // 4 + i % 2 * 8) * K + k + lane % 4 * 4 + i // 2 * 16, 4), zl.u32)
            for i in zl.static(range(4))
        ]
        fb = [
            zl.bitcast(zl.load(b + lane // 4 * K + k + lane % 4 * 4 + i * 16, 4), zl.u32) for i in zl.static(range(2))
        ]
        zl.mma_e4m3(acc, fa, fb)
    for i in zl.static(range(4)):
        out[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2] = acc[i]


@zl.kernel
def transposes(x: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.bf16]):
    """ldmatrix of four 8x8 matrices plain and transposed, written back as registers hold them."""
    tile = zl.shared_array(zl.bf16, 4 * 64, align=128)
    lane = zl.lane_index()
    zl.store(tile + lane * 8, zl.load(x + lane * 8, 8))
    zl.warp_barrier()
    plain = zl.ldmatrix(tile + lane * 8, 4)
    turned = zl.ldmatrix(tile + lane * 8, 4, trans=True)
    two = zl.ldmatrix(tile + (lane % 16) * 8, 2)
    words = zl.cast_ptr(out, zl.u32)
    for i in zl.static(range(4)):
        words[lane * 4 + i] = plain[i]
        words[128 + lane * 4 + i] = turned[i]
    for i in zl.static(range(2)):
        words[256 + lane * 2 + i] = two[i]
    words[320 + lane] = zl.transpose_8x8(plain[0])


@zl.kernel
def stores_matrix(x: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.bf16]):
    tile = zl.shared_array(zl.bf16, 4 * 64, align=128)
    turned = zl.shared_array(zl.bf16, 4 * 64, align=128)
    lane = zl.lane_index()
    zl.store(tile + lane * 8, zl.load(x + lane * 8, 8))
    zl.warp_barrier()
    words = zl.ldmatrix(tile + lane * 8, 4)
    zl.stmatrix(turned + lane * 8, words, trans=True)
    zl.warp_barrier()
    zl.store(out + lane * 8, zl.load(turned + lane * 8, 8))


@zl.kernel
def async_rows(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], valid: zl.i32, rows: zl.i32, STAGES: zl.static):
    """A ring of cp.async stages; the last row is cut at `valid` bytes and filled with zeros. One warp, 128 floats a row."""
    ring = zl.shared_array(zl.f32, STAGES * 128)
    lane = zl.lane_index()
    for s in zl.static(range(STAGES - 1)):
        if s < rows:
            copy_row(ring + s * 128, x, zl.i32(s), rows, valid, lane)
        zl.copy_commit()
    for r in range(rows):
        zl.copy_wait(STAGES - 2)
        zl.warp_barrier()
        later = r + STAGES - 1
        if later < rows:
            copy_row(ring + later % STAGES * 128, x, later, rows, valid, lane)
        zl.copy_commit()
        zl.store(out + r * 128 + lane * 4, zl.load(ring + r % STAGES * 128 + (31 - lane) * 4, 4))
        zl.warp_barrier()


@zl.inline
def copy_row(stage, x, r, rows, valid, lane):
    left = zl.i32(16)
    if r == rows - 1:
        left = min(max(valid - lane * 16, 0), 16)
    zl.copy_async(stage + lane * 4, x + r * 128 + lane * 4, 16, left)


@zl.kernel
def bulk_ring(x: zl.Ptr[zl.u32, "const"], out: zl.Ptr[zl.u32], rounds: zl.i32, WORDS: zl.static):
    """A producer warp with bulk copies, consumers that answer on a second barrier; the result goes back by bulk_store."""
    ring = zl.shared_array(zl.u32, 2 * WORDS, align=128)
    result = zl.shared_array(zl.u32, WORDS, align=128)
    full, empty = zl.mbarrier_array(2), zl.mbarrier_array(2)
    t = zl.thread_index()
    consumers = zl.target.threads - 32
    if t == 0:
        for s in zl.static(range(2)):
            zl.mbarrier_init(full + s, 1)
            zl.mbarrier_init(empty + s, consumers)
        zl.mbarrier_init_fence()
    zl.barrier()
    if zl.warp_index() == 0:
        if zl.lane_index() == 0:
            for r in range(rounds):
                s = r % 2
                if r >= 2:
                    zl.mbarrier_wait(empty + s, (r // 2 - 1) % 2)
                zl.mbarrier_expect(full + s, WORDS * 4)
                zl.bulk_copy(ring + s * WORDS, x + r * WORDS, WORDS * 4, full + s, "evict_first")
    else:
        sums = [zl.u32(0) for _ in zl.static(range(WORDS // consumers))]
        for r in range(rounds):
            s = r % 2
            zl.mbarrier_wait(full + s, r // 2 % 2)
            for i in zl.static(range(WORDS // consumers)):
                sums[i] += ring[s * WORDS + i * consumers + t - 32]
            zl.mbarrier_arrive(empty + s)
        for i in zl.static(range(WORDS // consumers)):
            result[i * consumers + t - 32] = sums[i]
        zl.fence_async()
        zl.named_barrier(1, consumers)
        if t == 32:
            zl.bulk_store(out, result, WORDS * 4)
            zl.bulk_commit()
            zl.bulk_wait(0, read=False)


@zl.kernel
def arrivals(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    """cp.async that arrive at an mbarrier."""
    tile = zl.shared_array(zl.f32, zl.target.threads * 4)
    ready = zl.mbarrier_array(1)
    t = zl.thread_index()
    if t == 0:
        zl.mbarrier_init(ready, zl.target.threads)
        zl.mbarrier_init_fence()
    zl.barrier()
    zl.copy_async(tile + t * 4, x + t * 4, 16)
    zl.copy_arrive(ready)
    zl.mbarrier_wait(ready, 0)
    zl.store(out + t * 4, zl.load(tile + (zl.target.threads - 1 - t) * 4, 4))


@zl.kernel
def tensor_copy(
    src: zl.TensorMap,
    dst: zl.TensorMap,
    plain: zl.Ptr[zl.bf16],
    row: zl.i32,
    column: zl.i32,
    ROWS: zl.static,
    COLUMNS: zl.static,
    SWIZZLE: zl.static,
):
    """One box [ROWS, COLUMNS] in, as shared memory holds it to `plain`, and back out through another map."""
    tile = zl.shared_array(zl.bf16, ROWS * COLUMNS, align=1024)
    ready = zl.mbarrier_array(1)
    t = zl.thread_index()
    if t == 0:
        zl.mbarrier_init(ready, 1)
        zl.mbarrier_init_fence()
    zl.barrier()
    if t == 0:
        zl.mbarrier_expect(ready, ROWS * COLUMNS * 2)
        zl.tma_load(tile, src, (column, row), ready)
    zl.mbarrier_wait(ready, 0)
    for i in range(t, ROWS * COLUMNS, zl.target.threads):
        plain[i] = tile[i]
    zl.barrier()
    if t == 0:
        zl.tma_store(dst, (column, row), tile)
        zl.bulk_commit()
        zl.bulk_wait(0)


@zl.inline
def swizzled_place(row, chunk, SWIZZLE):
    """Index of 16-byte chunk `chunk` of a row of SWIZZLE bytes, in chunks."""
    per_row = SWIZZLE // 16
    offset = (row * per_row + chunk) * 16
    mask = {128: 7, 64: 3, 32: 1}[SWIZZLE]
    return (offset ^ ((offset >> 7 & mask) << 4)) // 16


@zl.kernel
def warpgroup_tile(
    a: zl.Ptr["T", "const"],
    b: zl.Ptr["T", "const"],
    out: zl.Ptr[zl.f32],
    N: zl.static,
    K: zl.static,
    SWIZZLE: zl.static,
    REGISTERS: zl.static,
    T: zl.static,
):
    """out [64, N] = a [64, K] b [N, K]^T by a warpgroup. Tiles of SWIZZLE bytes a row, one after the other along K.
    REGISTERS: a comes from registers."""
    size = 1 if T is zl.e4m3 else 2
    per_chunk = 16 // size
    per_tile = SWIZZLE // size  # k of one tile
    sa = zl.shared_array(T, 64 * K, align=1024)
    sb = zl.shared_array(T, N * K, align=1024)
    t = zl.thread_index()
    for tile in zl.static(range(K // per_tile)):
        for i in range(t, 64 * SWIZZLE // 16, zl.target.threads):
            row, chunk = i // (SWIZZLE // 16), i % (SWIZZLE // 16)
            zl.store(
                sa + tile * 64 * per_tile + swizzled_place(row, chunk, SWIZZLE) * per_chunk,
                zl.load(a + row * K + tile * per_tile + chunk * per_chunk, per_chunk),
            )
        for i in range(t, N * SWIZZLE // 16, zl.target.threads):
            row, chunk = i // (SWIZZLE // 16), i % (SWIZZLE // 16)
            zl.store(
                sb + tile * N * per_tile + swizzled_place(row, chunk, SWIZZLE) * per_chunk,
                zl.load(b + row * K + tile * per_tile + chunk * per_chunk, per_chunk),
            )
    zl.fence_async()
    zl.barrier()
    acc = [zl.f32(1) for _ in zl.static(range(N // 2))]
    lane = zl.lane_index()
    zl.wgmma_fence(acc)
    for tile in zl.static(range(K // per_tile)):
        for k in zl.static(range(0, per_tile, 32 // size)):
            first = tile == 0 and k == 0
            desc_b = zl.smem_desc(sb + tile * N * per_tile + k, SWIZZLE, 8 * SWIZZLE)
            if REGISTERS:
                here = a + (zl.warp_index() * 16 + lane // 4) * K + tile * per_tile + k + lane % 4 * (4 // size)
                operand = [
                    zl.bitcast(zl.load(here + i % 2 * 8 * K + i // 2 * (16 // size), 4 // size), zl.u32)
                    for i in zl.static(range(4))
                ]
            else:
                operand = zl.smem_desc(sa + tile * 64 * per_tile + k, SWIZZLE, 8 * SWIZZLE)
            if T is zl.bf16:
                zl.wgmma_bf16(acc, operand, desc_b, N, accumulate=not first)
            elif T is zl.f16:
                zl.wgmma_f16(acc, operand, desc_b, N, accumulate=not first)
            else:
                zl.wgmma_e4m3(acc, operand, desc_b, N, accumulate=not first)
    zl.wgmma_commit()
    zl.wgmma_wait(0, acc)
    for i in zl.static(range(N // 2)):
        out[(zl.warp_index() * 16 + lane // 4 + i // 2 % 2 * 8) * N + i // 4 * 8 + lane % 4 * 2 + i % 2] = acc[i]


@zl.kernel
def warpgroup_transposed(
    a: zl.Ptr[zl.bf16, "const"], b: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.f32], N: zl.static, K: zl.static
):
    """out [64, N] = a [K, 64]^T b [K, N]: both operands with k outermost, in panels [K, 64] of 128-byte rows."""
    sa = zl.shared_array(zl.bf16, 64 * K, align=1024)
    sb = zl.shared_array(zl.bf16, N * K, align=1024)
    t = zl.thread_index()
    for i in range(t, K * 8, zl.target.threads):
        zl.store(sa + swizzled_place(i // 8, i % 8, 128) * 8, zl.load(a + i * 8, 8))
    for panel in zl.static(range(N // 64)):
        for i in range(t, K * 8, zl.target.threads):
            zl.store(
                sb + panel * 64 * K + swizzled_place(i // 8, i % 8, 128) * 8,
                zl.load(b + i // 8 * N + panel * 64 + i % 8 * 8, 8),
            )
    zl.fence_async()
    zl.barrier()
    acc = [zl.f32(0) for _ in zl.static(range(N // 2))]
    lane = zl.lane_index()
    zl.wgmma_fence(acc)
    for k in zl.static(range(0, K, 16)):
        zl.wgmma_bf16(
            acc,
            zl.smem_desc(sa + k * 64, 128, 1024, 64 * K * 2),
            zl.smem_desc(sb + k * 64, 128, 1024, 64 * K * 2),
            N,
            trans_a=True,
            trans_b=True,
        )
    zl.wgmma_commit()
    zl.wgmma_wait(0, acc)
    for i in zl.static(range(N // 2)):
        out[(zl.warp_index() * 16 + lane // 4 + i // 2 % 2 * 8) * N + i // 4 * 8 + lane % 4 * 2 + i % 2] = acc[i]


@zl.kernel
def warpgroup_plain(
    a: zl.Ptr[zl.bf16, "const"], b: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.f32], N: zl.static, K: zl.static
):
    """Without a swizzle: core matrices of 8 rows x 16 bytes, 128 bytes each; along K first, then along the rows."""
    sa = zl.shared_array(zl.bf16, 64 * K, align=128)
    sb = zl.shared_array(zl.bf16, N * K, align=128)
    t = zl.thread_index()
    chunks = K // 8
    for i in range(t, 64 * chunks, zl.target.threads):
        row, chunk = i // chunks, i % chunks
        zl.store(sa + ((row // 8 * chunks + chunk) * 8 + row % 8) * 8, zl.load(a + row * K + chunk * 8, 8))
    for i in range(t, N * chunks, zl.target.threads):
        row, chunk = i // chunks, i % chunks
        zl.store(sb + ((row // 8 * chunks + chunk) * 8 + row % 8) * 8, zl.load(b + row * K + chunk * 8, 8))
    zl.fence_async()
    zl.barrier()
    acc = [zl.f32(0) for _ in zl.static(range(N // 2))]
    lane = zl.lane_index()
    zl.wgmma_fence(acc)
    for k in zl.static(range(0, K, 16)):
        zl.wgmma_bf16(
            acc, zl.smem_desc(sa + k * 8, 0, chunks * 128, 128), zl.smem_desc(sb + k * 8, 0, chunks * 128, 128), N
        )
    zl.wgmma_commit()
    zl.wgmma_wait(0, acc)
    for i in zl.static(range(N // 2)):
        out[(zl.warp_index() * 16 + lane // 4 + i // 2 % 2 * 8) * N + i // 4 * 8 + lane % 4 * 2 + i % 2] = acc[i]


@zl.kernel
def cluster_sum(src: zl.TensorMap, out: zl.Ptr[zl.f32], CLUSTER: zl.static):
    """Each block of the cluster loads one part of a tile for all of them (multicast) and sums the whole; arrivals cross blocks."""
    tile = zl.shared_array(zl.bf16, 64 * 64, align=1024)
    full, empty = zl.mbarrier_array(1), zl.mbarrier_array(1)
    t = zl.thread_index()
    rank = zl.cluster_rank()
    rows = 64 // CLUSTER
    if t == 0:
        zl.mbarrier_init(full, 1)
        zl.mbarrier_init(empty, CLUSTER)
        zl.mbarrier_init_fence()
    zl.cluster_barrier()
    total = zl.f32(0)
    for r in range(2):
        if t == 0:
            if r == 1:
                zl.mbarrier_wait(empty, 0)
            zl.mbarrier_expect(full, 64 * 64 * 2)
            zl.tma_load(tile + rank * rows * 64, src, (r * 64, rank * rows), full, multicast=(1 << CLUSTER) - 1)
        zl.mbarrier_wait(full, r)
        for i in range(t, 64 * 64, zl.target.threads):
            total += zl.f32(tile[i])
        zl.barrier()
        if t < CLUSTER:
            zl.mbarrier_arrive_remote(empty, t)
    total = zl.warp_sum(total)
    if zl.lane_index() == 0:
        zl.atomic_add(out + zl.block_index(0), total)
    zl.cluster_barrier()
