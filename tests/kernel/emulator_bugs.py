"""Kernels with one mistake each, and what the emulator says about it. The line of the mistake ends in `# here`."""

from zse.kernel import (
    Ptr,
    atomic_add,
    barrier,
    bf16,
    bitcast,
    block_index,
    bulk_copy,
    bulk_store,
    copy_async,
    copy_commit,
    copy_wait,
    f32,
    grid_launch_dependents,
    grid_wait,
    i32,
    kernel,
    lane_index,
    ldmatrix,
    load,
    load_acquire,
    mbarrier_array,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    mma_bf16,
    named_barrier,
    num_blocks,
    shared_array,
    shuffle_xor,
    smem_desc,
    static,
    store,
    target,
    thread_index,
    u32,
    warp_barrier,
    warp_index,
    warp_sum,
    wgmma_bf16,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)


@kernel
def missing_barrier(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 64)
    t = thread_index()
    tile[t] = x[t]
    out[t] = tile[63 - t]  # here


@kernel
def missing_second_barrier(x: Ptr[f32, "const"], out: Ptr[f32]):
    """The tile is written again while others still read it."""
    tile = shared_array(f32, 64)
    t = thread_index()
    for r in range(2):
        tile[t] = x[r * 64 + t]  # here
        barrier()
        out[r * 64 + t] = tile[63 - t]  # here


@kernel
def missing_warp_barrier(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 64)
    t = thread_index()
    tile[t] = x[t]
    out[t] = tile[t ^ 1]  # here


@kernel
def missing_copy_wait(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 256)
    t = thread_index()
    copy_async(tile + t * 4, x + t * 4, 16)
    copy_commit()
    barrier()
    out[t] = tile[t * 4]  # here


@kernel
def wait_for_too_few(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 512)
    t = thread_index()
    for s in static(range(2)):
        copy_async(tile + s * 256 + t * 4, x + t * 4, 16)
        copy_commit()
    copy_wait(1)
    barrier()
    out[t] = tile[256 + t * 4]  # here


@kernel
def wait_without_barrier(x: Ptr[f32, "const"], out: Ptr[f32]):
    """A thread's copies are waited for by that thread alone: the others need a barrier after it."""
    tile = shared_array(f32, 256)
    t = thread_index()
    copy_async(tile + t * 4, x + t * 4, 16)
    copy_commit()
    copy_wait(0)
    out[t] = tile[(63 - t) * 4]  # here


@kernel
def off_by_one_global(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    out[t] = x[t + 1]  # here


@kernel
def off_by_one_shared(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 64)
    other = shared_array(f32, 64)
    t = thread_index()
    tile[t + 1] = x[t]  # here
    other[t] = x[t]
    barrier()
    out[t] = tile[t] + other[t]


@kernel
def store_past_the_end(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    store(out + t * 4, load(x, 4))  # here


@kernel
def misaligned(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    out[t] = load(x + 1, 4)[0]  # here


@kernel
def uninitialised(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 64)
    t = thread_index()
    if t < 63:
        tile[t] = x[t]
    barrier()
    out[t] = tile[63 - t]  # here


@kernel
def barrier_in_a_branch(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    if t < 32:
        barrier()  # here
    out[t] = x[t]


@kernel
def named_barrier_of_too_many(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    if warp_index() == 0:
        named_barrier(1, 64)  # here
    out[t] = x[t]


@kernel
def shuffle_in_a_branch(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    v = x[t]
    if t % 32 < 16:
        v = shuffle_xor(v, 1)  # here
    out[t] = v


@kernel
def divergent_shuffles(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    v = x[t]
    if t % 32 < 16:
        v = shuffle_xor(v, 1)  # here
    else:
        v = shuffle_xor(v, 2)  # here
    out[t] = v


@kernel
def wrong_fragment(x: Ptr[bf16, "const"], out: Ptr[f32]):
    """Rows of A taken as lane % 4 instead of lane / 4: only the result shows it."""
    lane = lane_index()
    acc = [f32(0) for _ in static(range(4))]
    a = [bitcast(load(x + (lane % 4 + i % 2 * 8) * 16 + lane // 8 * 2 + i // 2 * 8, 2), u32) for i in static(range(4))]
    b = [bitcast(load(x + lane // 4 * 16 + lane % 4 * 2 + i * 8, 2), u32) for i in static(range(2))]
    mma_bf16(acc, a, b)
    for i in static(range(4)):
        out[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2] = acc[i]


@kernel
def ldmatrix_of_own_stores(x: Ptr[bf16, "const"], out: Ptr[u32]):
    tile = shared_array(bf16, 256)
    lane = lane_index()
    store(tile + lane * 8, load(x + lane * 8, 8))
    words = ldmatrix(tile + lane * 8, 4)  # here
    out[lane] = words[0]


@kernel
def mbarrier_never_completes(x: Ptr[f32, "const"], out: Ptr[f32]):
    full = mbarrier_array(1)
    t = thread_index()
    if t == 0:
        mbarrier_init(full, 2)
        mbarrier_init_fence()
    barrier()
    if t == 0:
        mbarrier_arrive(full)
    mbarrier_wait(full, 0)  # here
    out[t] = x[t]


@kernel
def mbarrier_unpublished(x: Ptr[f32, "const"], out: Ptr[f32]):
    full = mbarrier_array(1)
    t = thread_index()
    if t == 0:
        mbarrier_init(full, 64)
    warp_barrier()
    mbarrier_arrive(full)  # here
    out[t] = x[t]


@kernel
def bulk_read_early(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 64, align=128)
    full = mbarrier_array(1)
    t = thread_index()
    if t == 0:
        mbarrier_init(full, 1)
        mbarrier_init_fence()
    barrier()
    if t == 0:
        mbarrier_expect(full, 256)
        bulk_copy(tile, x, 256, full)
    barrier()
    out[t] = tile[t]  # here
    mbarrier_wait(full, 0)


@kernel
def bulk_overwrites_readers(x: Ptr[f32, "const"], out: Ptr[f32]):
    """The second copy does not wait until everybody has read the first."""
    tile = shared_array(f32, 64, align=128)
    full = mbarrier_array(1)
    t = thread_index()
    if t == 0:
        mbarrier_init(full, 1)
        mbarrier_init_fence()
    barrier()
    for r in range(2):
        if t == 0:
            mbarrier_expect(full, 256)
            bulk_copy(tile, x + r * 64, 256, full)  # here
        mbarrier_wait(full, r)
        out[r * 64 + t] = tile[63 - t]  # here


@kernel
def store_without_fence(x: Ptr[f32, "const"], out: Ptr[f32]):
    tile = shared_array(f32, 64, align=128)
    t = thread_index()
    tile[t] = x[t]
    barrier()
    if t == 0:
        bulk_store(out, tile, 256)  # here


@kernel
def wgmma_without_fence_async(x: Ptr[bf16, "const"], out: Ptr[f32]):
    a = shared_array(bf16, 64 * 64, align=1024)
    b = shared_array(bf16, 8 * 64, align=1024)
    t = thread_index()
    for i in range(t * 8, 64 * 64, 128 * 8):
        store(a + i, load(x + i, 8))
    if t < 64:
        store(b + t * 8, load(x + t * 8, 8))
    barrier()
    acc = [f32(0) for _ in static(range(4))]
    wgmma_fence(acc)
    wgmma_bf16(acc, smem_desc(a), smem_desc(b), 8)  # here
    wgmma_commit()
    wgmma_wait(0, acc)
    out[t] = acc[0]


@kernel
def accumulators_before_the_wait(x: Ptr[bf16, "const"], out: Ptr[f32]):
    """Nothing is reported: the value is NaN until the wait."""
    a = shared_array(bf16, 64 * 16, align=1024)
    t = thread_index()
    for i in range(t, 64 * 16, 128):
        a[i] = x[i]
    barrier()
    acc = [f32(0) for _ in static(range(4))]
    wgmma_fence(acc)
    wgmma_bf16(acc, [u32(0), u32(0), u32(0), u32(0)], smem_desc(a, 0, 256, 128), 8, accumulate=False)
    wgmma_commit()
    out[t] = acc[0]


@kernel
def blocks_race(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    out[t] = x[t] + f32(block_index(0))  # here


@kernel
def last_block_without_fence(x: Ptr[f32, "const"], out: Ptr[f32], parts: Ptr[f32], arrived: Ptr[u32]):
    t = thread_index()
    if t == 0:
        parts[block_index(0)] = x[block_index(0)]
        if atomic_add(arrived, 1) == u32(num_blocks(0) - 1):
            total = f32(0)
            for b in range(num_blocks(0)):
                total += parts[b]  # here
            out[0] = total


@kernel
def spins_for_ever(x: Ptr[f32, "const"], out: Ptr[f32], arrived: Ptr[u32]):
    while load_acquire(arrived) == u32(0):  # here
        pass
    out[thread_index()] = x[thread_index()]


@kernel
def no_end(x: Ptr[f32, "const"], out: Ptr[f32], n: i32):
    i = i32(0)
    while i >= n:
        i = i + i32(x[0] * 0.0)  # here
    out[0] = f32(i)


@kernel
def reads_before_grid_wait(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    v = x[t]  # here
    grid_wait()
    out[t] = v


@kernel
def writes_before_grid_wait(x: Ptr[f32, "const"], out: Ptr[f32]):
    t = thread_index()
    out[t] = f32(1)  # here
    grid_wait()


@kernel  # here
def never_waits(x: Ptr[f32, "const"], out: Ptr[f32]):
    pass


@kernel
def lets_start_early(x: Ptr[f32, "const"], out: Ptr[f32]):
    grid_launch_dependents()
    grid_wait()
    out[thread_index()] = f32(2)


@kernel
def good(x: Ptr[f32, "const"], out: Ptr[f32]):
    grid_wait()
    tile = shared_array(f32, 64)
    t = thread_index()
    tile[t] = warp_sum(x[t]) * f32(target.warp)
    barrier()
    out[t] = tile[63 - t]
