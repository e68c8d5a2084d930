"""Kernels that use every part of the GPU language, for the emulator and for hardware. Checks stand in gpu_cases.py."""

from zse.kernel import (
    Ptr,
    TensorMap,
    absolute,
    add_bf16x2,
    add_f16x2,
    all_threads,
    any_lane,
    any_thread,
    atomic_accumulate,
    atomic_add,
    atomic_cas,
    atomic_max,
    atomic_min,
    ballot,
    barrier,
    bf16,
    bitcast,
    block_index,
    bulk_commit,
    bulk_copy,
    bulk_store,
    bulk_wait,
    cast_ptr,
    cluster_barrier,
    cluster_rank,
    concat,
    convert,
    copy_arrive,
    copy_async,
    copy_commit,
    copy_wait,
    cos,
    e4m3,
    exp,
    exp2,
    f16,
    f32,
    f64,
    fence,
    fence_async,
    floor,
    fma,
    fma_bf16x2,
    fma_f16x2,
    grid_launch_dependents,
    grid_wait,
    i8,
    i16,
    i32,
    i64,
    inline,
    kernel,
    lane_index,
    ldmatrix,
    load,
    load_acquire,
    local_array,
    log,
    lop3,
    make_vector,
    max_bf16x2,
    mbarrier_array,
    mbarrier_arrive,
    mbarrier_arrive_remote,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    mma_bf16,
    mma_e4m3,
    mma_f16,
    mul_bf16x2,
    mul_f16x2,
    named_arrive,
    named_barrier,
    narrow_s8,
    num_blocks,
    popcount,
    prefetch_l2,
    prmt,
    reciprocal,
    reduce_add,
    reduce_max,
    reduce_min,
    round_even,
    rsqrt,
    shared_array,
    shuffle,
    shuffle_down,
    shuffle_up,
    shuffle_xor,
    sin,
    smem_desc,
    sqrt,
    static,
    stmatrix,
    store,
    store_release,
    sub_f16x2,
    tanh,
    target,
    thread_index,
    tma_load,
    tma_store,
    transpose_8x8,
    u8,
    u16,
    u32,
    u64,
    unroll,
    warp_barrier,
    warp_index,
    warp_max,
    warp_min,
    warp_sum,
    wgmma_bf16,
    wgmma_commit,
    wgmma_e4m3,
    wgmma_f16,
    wgmma_fence,
    wgmma_wait,
    where,
    widen_high,
    widen_low,
)


@kernel
def vector_add(a: Ptr[f32, "const"], b: Ptr[f32, "const"], out: Ptr[f32], n: i32):
    grid_launch_dependents()
    grid_wait()
    i = (block_index(0) * target.threads + thread_index()) * 4
    if i < n:
        prefetch_l2(a + i)
        store(out + i, load(a + i, 4, "readonly") + load(b + i, 4, "stream"), "stream")


@kernel
def row_sum(x: Ptr[bf16, "const"], out: Ptr[f32], width: i32):
    warps = target.threads // target.warp
    partial = shared_array(f32, warps)
    row = x + block_index(0) * width
    total = f32(0)
    for i in unroll(range(thread_index() * 8, width, target.threads * 8), 4):
        v = convert(load(row + i, 8), f32)
        for k in static(range(8)):
            total += v[k]
    total = warp_sum(total)
    if lane_index() == 0:
        partial[warp_index()] = total
    barrier()
    if warp_index() == 0:
        value = f32(0)
        if lane_index() < warps:
            value = partial[lane_index()]
        value = warp_sum(value)
        if lane_index() == 0:
            out[block_index(0)] = value


@kernel
def conversions(x: Ptr["T", "const"], out: Ptr["U"], n: i32, T: static, U: static, LANES: static):
    """Scalars where LANES is 1."""
    i = (block_index(0) * target.threads + thread_index()) * LANES
    if i < n:
        if LANES == 1:
            out[i] = U(x[i])
        else:
            store(out + i, convert(load(x + i, LANES), U))


@kernel
def elementwise(x: Ptr[f32, "const"], y: Ptr[f32, "const"], out: Ptr[f32], n: i32, LANES: static):
    i = (block_index(0) * target.threads + thread_index()) * LANES
    if i < n:
        a, b = load(x + i, LANES), load(y + i, LANES)
        rows = [
            exp(a),
            exp2(a),
            log(abs(a) + 0.5),
            sin(a),
            cos(a),
            tanh(a),
            sqrt(abs(a)),
            rsqrt(abs(a) + 0.25),
            reciprocal(b),
            floor(a),
            round_even(a),
            fma(a, b, 1.0),
            min(a, b),
            max(a, b),
            absolute(a),
            a / b,
            a - b * 2.0,
            -a,
            where(a > b, a, 0.5),
        ]
        for k in static(range(len(rows))):
            store(out + k * n + i, rows[k])


@kernel
def integers(x: Ptr[i32, "const"], out: Ptr[i32], n: i32):
    i = thread_index() * 4
    if i < n:
        v = load(x + i, 4)
        u = bitcast(v, u32)
        rows = [
            v + 7,
            v * 3,
            (v >> 3) ^ 5,
            bitcast(u >> 3, i32),
            v & 15 | 64,
            ~v,
            min(v, 3),
            max(v, -3),
            -v,
            where(v != 3, v, 0),
            v // 7,
            v % 7,
        ]
        for k in static(range(len(rows))):
            store(out + k * n + i, rows[k])
        extra = [
            reduce_add(v),
            reduce_max(v),
            reduce_min(v),
            i32(1) if any_lane(v == 3) else i32(0),
            i32(popcount(u64(u[0]))),
        ]
        store(out + len(rows) * n + i, concat(widen_high(make_vector(*extra[0:4])), widen_low(v)))
        out[(len(rows) + 1) * n + i] = extra[4]
        low = i16(x[i])
        tiny = i8(low)
        low = low * i16(3)
        tiny = tiny + i8(100)
        out[(len(rows) + 1) * n + i + 1] = i32(low)
        out[(len(rows) + 1) * n + i + 2] = i32(tiny)
        out[(len(rows) + 1) * n + i + 3] = i32(i64(x[i]) * i64(x[i]) >> 8)


@kernel
def packed(x: Ptr[u32, "const"], out: Ptr[u32], bytes_: Ptr[i8], n: i32):
    """Bitcasts and lanes of packed vectors; x: 4 words a thread."""
    t = thread_index()
    if t < n:
        words = load(x + t * 4, 4)
        halves, octets, longs = bitcast(words, u16), bitcast(words, u8), bitcast(words, u64)
        signed = bitcast(words, i8)
        out[t * 16 + 0] = u32(halves[5])
        out[t * 16 + 1] = u32(octets[11])
        out[t * 16 + 2] = u32(longs[1] >> 20)
        out[t * 16 + 3] = bitcast(i32(signed[7]), u32)
        store(out + t * 16 + 4, bitcast(make_vector(halves[1], halves[0], halves[3], halves[2]), u32))
        out[t * 16 + 6] = bitcast(make_vector(octets[3], octets[2], octets[1], octets[0]), u32)
        out[t * 16 + 7] = bitcast(bitcast(words[0], f32), u32)
        out[t * 16 + 8] = u32(bitcast(widen_high(halves), u64) >> 32)
        out[t * 16 + 9] = lop3(words[0], words[1], words[2], 0xE8)
        out[t * 16 + 10] = prmt(words[0], words[1], 0x7531)
        out[t * 16 + 11] = bitcast(concat(widen_low(octets), widen_high(octets)), u32)[3]
        store(bytes_ + t * 4, narrow_s8(bitcast(words, i32) >> 12))


@kernel
def pairs(x: Ptr[u32, "const"], out: Ptr[u32], n: i32):
    t = thread_index()
    if t < n:
        a, b, c = x[t], x[n + t], x[2 * n + t]
        rows = [fma_bf16x2(a, b, c), mul_bf16x2(a, b), add_bf16x2(a, b), max_bf16x2(a, b)]
        halves = [fma_f16x2(a, b, c), mul_f16x2(a, b), add_f16x2(a, b), sub_f16x2(a, b)]
        for k in static(range(4)):
            out[k * n + t] = rows[k]
            out[(4 + k) * n + t] = halves[k]


@kernel
def warps(x: Ptr[f32, "const"], out: Ptr[f32], votes: Ptr[u64]):
    """One block of any number of whole warps; 12 rows of `threads`."""
    t, threads = thread_index(), target.threads
    v = x[t]
    rows = [
        shuffle(v, 3),
        shuffle_xor(v, 5),
        shuffle_up(v, 2),
        shuffle_down(v, 3),
        warp_sum(v),
        warp_max(v),
        warp_min(v),
        warp_sum(v, 4),
        warp_max(v, 8),
        f32(lane_index()),
        f32(warp_index()),
        f32(bitcast(shuffle_xor(convert(v, bf16), 1), bf16)),
    ]
    for k in static(range(len(rows))):
        out[k * threads + t] = rows[k]
    wide = shuffle_xor(f64(v) + 1e9, 16)
    out[len(rows) * threads + t] = f32(wide - 1e9)
    bits = ballot(v > 0.0)
    some, every = any_thread(v > 0.9), all_threads(v > -0.9)
    if lane_index() == 0:
        votes[warp_index() * 3] = bits
        votes[warp_index() * 3 + 1] = u64(1) if some else u64(0)
        votes[warp_index() * 3 + 2] = u64(1) if every else u64(0)


@kernel
def histogram(x: Ptr[i32, "const"], counts: Ptr[u32], extremes: Ptr[i32], sums: Ptr[f32], wide: Ptr[i64], n: i32):
    """Atomics in shared and global memory; 16 bins."""
    bins = shared_array(u32, 16)
    t = thread_index()
    if t < 16:
        bins[t] = u32(0)
    barrier()
    for i in range(block_index(0) * target.threads + t, n, num_blocks(0) * target.threads):
        value = x[i]
        atomic_add(bins + (value & 15), u32(1))
        atomic_max(extremes, value)
        atomic_min(extremes + 1, value)
        atomic_accumulate(sums, f32(value & 7))
        atomic_accumulate(sums + 2, make_vector(f32(value & 7), f32(1)))
        atomic_add(wide, i64(value))
        atomic_max(wide + 1, i64(value))
    barrier()
    if t < 16:
        atomic_add(counts + t, bins[t])


@kernel
def locked(counter: Ptr[u32], lock: Ptr[u32], order: Ptr[u32]):
    """Every block adds to a plain counter under a lock made of atomic_cas; tickets are taken by atomic_add."""
    if thread_index() == 0:
        while atomic_cas(lock, 0, 1) != u32(0):
            pass
        fence()
        counter[0] = load_acquire(counter) + u32(1)
        fence()
        store_release(lock, 0)
        order[atomic_add(counter + 1, 1)] = u32(block_index(0))


@kernel
def last_block_sums(x: Ptr[f32, "const"], parts: Ptr[f32], arrived: Ptr[u32], out: Ptr[f32], n: i32):
    """Partial sums of all blocks; the block that arrives last adds them in order."""
    scratch = shared_array(f32, target.threads // target.warp)
    is_last = shared_array(i32, 1)
    t = thread_index()
    total = f32(0)
    for i in range(block_index(0) * target.threads + t, n, num_blocks(0) * target.threads):
        total += x[i]
    total = warp_sum(total)
    if lane_index() == 0:
        scratch[warp_index()] = total
    barrier()
    if t == 0:
        block = f32(0)
        for w in static(range(target.threads // target.warp)):
            block += scratch[w]
        parts[block_index(0)] = block
        fence()
        before = atomic_add(arrived, 1)
        is_last[0] = i32(1) if before == u32(num_blocks(0) - 1) else i32(0)
    barrier()
    if is_last[0] == 1 and t == 0:
        fence()
        result = f32(0)
        for b in range(num_blocks(0)):
            result += parts[b]
        out[0] = result


@kernel
def scratch_arrays(x: Ptr[i32, "const"], out: Ptr[i32], n: i32):
    """Memory of the thread, written and read at run-time places."""
    mine = local_array(i32, 8)
    t = thread_index()
    for i in range(8):
        mine[i] = x[t * 8 + i]
    for i in range(8):
        out[t * 8 + i] = mine[(i + n) & 7]


@kernel
def producer_consumer(x: Ptr[f32, "const"], out: Ptr[f32], rounds: i32):
    """The first warp fills a tile, the others read it; two named barriers."""
    tile = shared_array(f32, 32)
    t = thread_index()
    if warp_index() == 0:
        for r in range(rounds):
            named_barrier(2, target.threads)
            tile[t] = x[r * 32 + t]
            named_arrive(1, target.threads)
    else:
        named_arrive(2, target.threads)
        for r in range(rounds):
            named_barrier(1, target.threads)
            if warp_index() == 1:
                out[r * 32 + lane_index()] = tile[31 - lane_index()]
            if r < rounds - 1:
                named_arrive(2, target.threads)


@inline
def tile_rows(lane, stride):
    """Where lane i points for ldmatrix of a 16x16 tile: row i % 16, column half i // 16."""
    return (lane % 16) * stride + lane // 16 * 8


@kernel
def warp_tile(a: Ptr["T", "const"], b: Ptr["T", "const"], out: Ptr[f32], K: static, T: static):
    """out [16, 8] = a [16, K] b [8, K]^T by one warp; a through cp.async and ldmatrix, b from global memory."""
    tile = shared_array(T, 16 * K, align=128)
    acc = [f32(0) for _ in static(range(4))]
    lane = lane_index()
    for i in range(lane * 8, 16 * K, target.warp * 8):
        copy_async(tile + i, a + i, 16)
    copy_commit()
    copy_wait(0)
    warp_barrier()
    for k in static(range(0, K, 16)):
        fa = ldmatrix(tile + tile_rows(lane, K) + k, 4)
        row = b + lane // 4 * K + k + lane % 4 * 2
        fb = [bitcast(load(row, 2), u32), bitcast(load(row + 8, 2), u32)]
        if T is bf16:
            mma_bf16(acc, fa, fb)
        else:
            mma_f16(acc, fa, fb)
    for i in static(range(4)):
        out[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2] = acc[i]


@kernel
def warp_tile_e4m3(a: Ptr[e4m3, "const"], b: Ptr[e4m3, "const"], out: Ptr[f32], K: static):
    acc = [f32(0) for _ in static(range(4))]
    lane = lane_index()
    for k in static(range(0, K, 32)):
        fa = [
            bitcast(load(a + (lane // 4 + i % 2 * 8) * K + k + lane % 4 * 4 + i // 2 * 16, 4), u32)
            for i in static(range(4))
        ]
        fb = [bitcast(load(b + lane // 4 * K + k + lane % 4 * 4 + i * 16, 4), u32) for i in static(range(2))]
        mma_e4m3(acc, fa, fb)
    for i in static(range(4)):
        out[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2] = acc[i]


@kernel
def transposes(x: Ptr[bf16, "const"], out: Ptr[bf16]):
    """ldmatrix of four 8x8 matrices plain and transposed, written back as registers hold them."""
    tile = shared_array(bf16, 4 * 64, align=128)
    lane = lane_index()
    store(tile + lane * 8, load(x + lane * 8, 8))
    warp_barrier()
    plain = ldmatrix(tile + lane * 8, 4)
    turned = ldmatrix(tile + lane * 8, 4, trans=True)
    two = ldmatrix(tile + (lane % 16) * 8, 2)
    words = cast_ptr(out, u32)
    for i in static(range(4)):
        words[lane * 4 + i] = plain[i]
        words[128 + lane * 4 + i] = turned[i]
    for i in static(range(2)):
        words[256 + lane * 2 + i] = two[i]
    words[320 + lane] = transpose_8x8(plain[0])


@kernel
def stores_matrix(x: Ptr[bf16, "const"], out: Ptr[bf16]):
    tile = shared_array(bf16, 4 * 64, align=128)
    turned = shared_array(bf16, 4 * 64, align=128)
    lane = lane_index()
    store(tile + lane * 8, load(x + lane * 8, 8))
    warp_barrier()
    words = ldmatrix(tile + lane * 8, 4)
    stmatrix(turned + lane * 8, words, trans=True)
    warp_barrier()
    store(out + lane * 8, load(turned + lane * 8, 8))


@kernel
def async_rows(x: Ptr[f32, "const"], out: Ptr[f32], valid: i32, rows: i32, STAGES: static):
    """A ring of cp.async stages; the last row is cut at `valid` bytes and filled with zeros. One warp, 128 floats a row."""
    ring = shared_array(f32, STAGES * 128)
    lane = lane_index()
    for s in static(range(STAGES - 1)):
        if s < rows:
            copy_row(ring + s * 128, x, i32(s), rows, valid, lane)
        copy_commit()
    for r in range(rows):
        copy_wait(STAGES - 2)
        warp_barrier()
        later = r + STAGES - 1
        if later < rows:
            copy_row(ring + later % STAGES * 128, x, later, rows, valid, lane)
        copy_commit()
        store(out + r * 128 + lane * 4, load(ring + r % STAGES * 128 + (31 - lane) * 4, 4))
        warp_barrier()


@inline
def copy_row(stage, x, r, rows, valid, lane):
    left = i32(16)
    if r == rows - 1:
        left = min(max(valid - lane * 16, 0), 16)
    copy_async(stage + lane * 4, x + r * 128 + lane * 4, 16, left)


@kernel
def bulk_ring(x: Ptr[u32, "const"], out: Ptr[u32], rounds: i32, WORDS: static):
    """A producer warp with bulk copies, consumers that answer on a second barrier; the result goes back by bulk_store."""
    ring = shared_array(u32, 2 * WORDS, align=128)
    result = shared_array(u32, WORDS, align=128)
    full, empty = mbarrier_array(2), mbarrier_array(2)
    t = thread_index()
    consumers = target.threads - 32
    if t == 0:
        for s in static(range(2)):
            mbarrier_init(full + s, 1)
            mbarrier_init(empty + s, consumers)
        mbarrier_init_fence()
    barrier()
    if warp_index() == 0:
        if lane_index() == 0:
            for r in range(rounds):
                s = r % 2
                if r >= 2:
                    mbarrier_wait(empty + s, (r // 2 - 1) % 2)
                mbarrier_expect(full + s, WORDS * 4)
                bulk_copy(ring + s * WORDS, x + r * WORDS, WORDS * 4, full + s, "evict_first")
    else:
        sums = [u32(0) for _ in static(range(WORDS // consumers))]
        for r in range(rounds):
            s = r % 2
            mbarrier_wait(full + s, r // 2 % 2)
            for i in static(range(WORDS // consumers)):
                sums[i] += ring[s * WORDS + i * consumers + t - 32]
            mbarrier_arrive(empty + s)
        for i in static(range(WORDS // consumers)):
            result[i * consumers + t - 32] = sums[i]
        fence_async()
        named_barrier(1, consumers)
        if t == 32:
            bulk_store(out, result, WORDS * 4)
            bulk_commit()
            bulk_wait(0, read=False)


@kernel
def arrivals(x: Ptr[f32, "const"], out: Ptr[f32]):
    """cp.async that arrive at an mbarrier."""
    tile = shared_array(f32, target.threads * 4)
    ready = mbarrier_array(1)
    t = thread_index()
    if t == 0:
        mbarrier_init(ready, target.threads)
        mbarrier_init_fence()
    barrier()
    copy_async(tile + t * 4, x + t * 4, 16)
    copy_arrive(ready)
    mbarrier_wait(ready, 0)
    store(out + t * 4, load(tile + (target.threads - 1 - t) * 4, 4))


@kernel
def tensor_copy(
    src: TensorMap,
    dst: TensorMap,
    plain: Ptr[bf16],
    row: i32,
    column: i32,
    ROWS: static,
    COLUMNS: static,
    SWIZZLE: static,
):
    """One box [ROWS, COLUMNS] in, as shared memory holds it to `plain`, and back out through another map."""
    tile = shared_array(bf16, ROWS * COLUMNS, align=1024)
    ready = mbarrier_array(1)
    t = thread_index()
    if t == 0:
        mbarrier_init(ready, 1)
        mbarrier_init_fence()
    barrier()
    if t == 0:
        mbarrier_expect(ready, ROWS * COLUMNS * 2)
        tma_load(tile, src, (column, row), ready)
    mbarrier_wait(ready, 0)
    for i in range(t, ROWS * COLUMNS, target.threads):
        plain[i] = tile[i]
    barrier()
    if t == 0:
        tma_store(dst, (column, row), tile)
        bulk_commit()
        bulk_wait(0)


@inline
def swizzled_place(row, chunk, SWIZZLE):
    """Index of 16-byte chunk `chunk` of a row of SWIZZLE bytes, in chunks."""
    per_row = SWIZZLE // 16
    offset = (row * per_row + chunk) * 16
    mask = {128: 7, 64: 3, 32: 1}[SWIZZLE]
    return (offset ^ ((offset >> 7 & mask) << 4)) // 16


@kernel
def warpgroup_tile(
    a: Ptr["T", "const"],
    b: Ptr["T", "const"],
    out: Ptr[f32],
    N: static,
    K: static,
    SWIZZLE: static,
    REGISTERS: static,
    T: static,
):
    """out [64, N] = a [64, K] b [N, K]^T by a warpgroup. Tiles of SWIZZLE bytes a row, one after the other along K.
    REGISTERS: a comes from registers."""
    size = 1 if T is e4m3 else 2
    per_chunk = 16 // size
    per_tile = SWIZZLE // size  # k of one tile
    sa = shared_array(T, 64 * K, align=1024)
    sb = shared_array(T, N * K, align=1024)
    t = thread_index()
    for tile in static(range(K // per_tile)):
        for i in range(t, 64 * SWIZZLE // 16, target.threads):
            row, chunk = i // (SWIZZLE // 16), i % (SWIZZLE // 16)
            store(
                sa + tile * 64 * per_tile + swizzled_place(row, chunk, SWIZZLE) * per_chunk,
                load(a + row * K + tile * per_tile + chunk * per_chunk, per_chunk),
            )
        for i in range(t, N * SWIZZLE // 16, target.threads):
            row, chunk = i // (SWIZZLE // 16), i % (SWIZZLE // 16)
            store(
                sb + tile * N * per_tile + swizzled_place(row, chunk, SWIZZLE) * per_chunk,
                load(b + row * K + tile * per_tile + chunk * per_chunk, per_chunk),
            )
    fence_async()
    barrier()
    acc = [f32(1) for _ in static(range(N // 2))]
    lane = lane_index()
    wgmma_fence(acc)
    for tile in static(range(K // per_tile)):
        for k in static(range(0, per_tile, 32 // size)):
            first = tile == 0 and k == 0
            desc_b = smem_desc(sb + tile * N * per_tile + k, SWIZZLE, 8 * SWIZZLE)
            if REGISTERS:
                here = a + (warp_index() * 16 + lane // 4) * K + tile * per_tile + k + lane % 4 * (4 // size)
                operand = [
                    bitcast(load(here + i % 2 * 8 * K + i // 2 * (16 // size), 4 // size), u32)
                    for i in static(range(4))
                ]
            else:
                operand = smem_desc(sa + tile * 64 * per_tile + k, SWIZZLE, 8 * SWIZZLE)
            if T is bf16:
                wgmma_bf16(acc, operand, desc_b, N, accumulate=not first)
            elif T is f16:
                wgmma_f16(acc, operand, desc_b, N, accumulate=not first)
            else:
                wgmma_e4m3(acc, operand, desc_b, N, accumulate=not first)
    wgmma_commit()
    wgmma_wait(0, acc)
    for i in static(range(N // 2)):
        out[(warp_index() * 16 + lane // 4 + i // 2 % 2 * 8) * N + i // 4 * 8 + lane % 4 * 2 + i % 2] = acc[i]


@kernel
def warpgroup_transposed(a: Ptr[bf16, "const"], b: Ptr[bf16, "const"], out: Ptr[f32], N: static, K: static):
    """out [64, N] = a [K, 64]^T b [K, N]: both operands with k outermost, in panels [K, 64] of 128-byte rows."""
    sa = shared_array(bf16, 64 * K, align=1024)
    sb = shared_array(bf16, N * K, align=1024)
    t = thread_index()
    for i in range(t, K * 8, target.threads):
        store(sa + swizzled_place(i // 8, i % 8, 128) * 8, load(a + i * 8, 8))
    for panel in static(range(N // 64)):
        for i in range(t, K * 8, target.threads):
            store(
                sb + panel * 64 * K + swizzled_place(i // 8, i % 8, 128) * 8,
                load(b + i // 8 * N + panel * 64 + i % 8 * 8, 8),
            )
    fence_async()
    barrier()
    acc = [f32(0) for _ in static(range(N // 2))]
    lane = lane_index()
    wgmma_fence(acc)
    for k in static(range(0, K, 16)):
        wgmma_bf16(
            acc,
            smem_desc(sa + k * 64, 128, 1024, 64 * K * 2),
            smem_desc(sb + k * 64, 128, 1024, 64 * K * 2),
            N,
            trans_a=True,
            trans_b=True,
        )
    wgmma_commit()
    wgmma_wait(0, acc)
    for i in static(range(N // 2)):
        out[(warp_index() * 16 + lane // 4 + i // 2 % 2 * 8) * N + i // 4 * 8 + lane % 4 * 2 + i % 2] = acc[i]


@kernel
def warpgroup_plain(a: Ptr[bf16, "const"], b: Ptr[bf16, "const"], out: Ptr[f32], N: static, K: static):
    """Without a swizzle: core matrices of 8 rows x 16 bytes, 128 bytes each; along K first, then along the rows."""
    sa = shared_array(bf16, 64 * K, align=128)
    sb = shared_array(bf16, N * K, align=128)
    t = thread_index()
    chunks = K // 8
    for i in range(t, 64 * chunks, target.threads):
        row, chunk = i // chunks, i % chunks
        store(sa + ((row // 8 * chunks + chunk) * 8 + row % 8) * 8, load(a + row * K + chunk * 8, 8))
    for i in range(t, N * chunks, target.threads):
        row, chunk = i // chunks, i % chunks
        store(sb + ((row // 8 * chunks + chunk) * 8 + row % 8) * 8, load(b + row * K + chunk * 8, 8))
    fence_async()
    barrier()
    acc = [f32(0) for _ in static(range(N // 2))]
    lane = lane_index()
    wgmma_fence(acc)
    for k in static(range(0, K, 16)):
        wgmma_bf16(acc, smem_desc(sa + k * 8, 0, chunks * 128, 128), smem_desc(sb + k * 8, 0, chunks * 128, 128), N)
    wgmma_commit()
    wgmma_wait(0, acc)
    for i in static(range(N // 2)):
        out[(warp_index() * 16 + lane // 4 + i // 2 % 2 * 8) * N + i // 4 * 8 + lane % 4 * 2 + i % 2] = acc[i]


@kernel
def cluster_sum(src: TensorMap, out: Ptr[f32], CLUSTER: static):
    """Each block of the cluster loads one part of a tile for all of them (multicast) and sums the whole; arrivals cross blocks."""
    tile = shared_array(bf16, 64 * 64, align=1024)
    full, empty = mbarrier_array(1), mbarrier_array(1)
    t = thread_index()
    rank = cluster_rank()
    rows = 64 // CLUSTER
    if t == 0:
        mbarrier_init(full, 1)
        mbarrier_init(empty, CLUSTER)
        mbarrier_init_fence()
    cluster_barrier()
    total = f32(0)
    for r in range(2):
        if t == 0:
            if r == 1:
                mbarrier_wait(empty, 0)
            mbarrier_expect(full, 64 * 64 * 2)
            tma_load(tile + rank * rows * 64, src, (r * 64, rank * rows), full, multicast=(1 << CLUSTER) - 1)
        mbarrier_wait(full, r)
        for i in range(t, 64 * 64, target.threads):
            total += f32(tile[i])
        barrier()
        if t < CLUSTER:
            mbarrier_arrive_remote(empty, t)
    total = warp_sum(total)
    if lane_index() == 0:
        atomic_add(out + block_index(0), total)
    cluster_barrier()
