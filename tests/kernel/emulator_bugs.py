"""Kernels with one mistake each, and what the emulator says about it. The line of the mistake ends in `# here`."""

from zse import kernel as zl


@zl.kernel
def missing_barrier(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 64)
    t = zl.thread_index()
    tile[t] = x[t]
    out[t] = tile[63 - t]  # here


@zl.kernel
def missing_second_barrier(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    """The tile is written again while others still read it."""
    tile = zl.shared_array(zl.f32, 64)
    t = zl.thread_index()
    for r in range(2):
        tile[t] = x[r * 64 + t]  # here
        zl.barrier()
        out[r * 64 + t] = tile[63 - t]  # here


@zl.kernel
def missing_warp_barrier(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 64)
    t = zl.thread_index()
    tile[t] = x[t]
    out[t] = tile[t ^ 1]  # here


@zl.kernel
def missing_copy_wait(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 256)
    t = zl.thread_index()
    zl.copy_async(tile + t * 4, x + t * 4, 16)
    zl.copy_commit()
    zl.barrier()
    out[t] = tile[t * 4]  # here


@zl.kernel
def wait_for_too_few(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 512)
    t = zl.thread_index()
    for s in zl.static(range(2)):
        zl.copy_async(tile + s * 256 + t * 4, x + t * 4, 16)
        zl.copy_commit()
    zl.copy_wait(1)
    zl.barrier()
    out[t] = tile[256 + t * 4]  # here


@zl.kernel
def wait_without_barrier(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    """A thread's copies are waited for by that thread alone: the others need a barrier after it."""
    tile = zl.shared_array(zl.f32, 256)
    t = zl.thread_index()
    zl.copy_async(tile + t * 4, x + t * 4, 16)
    zl.copy_commit()
    zl.copy_wait(0)
    out[t] = tile[(63 - t) * 4]  # here


@zl.kernel
def missing_barrier_before_bytes(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    """Words are stored as words, and read as bytes."""
    bytes = zl.shared_array(zl.u8, 256)
    tile = zl.shared_array(zl.u8, 256)
    t = zl.thread_index()
    for k in zl.static(range(4)):
        bytes[t * 4 + k] = zl.u8(t)
    zl.store(tile + t * 4, zl.load(bytes + t * 4, 4))
    out[t] = zl.f32(tile[255 - t * 4])  # here


@zl.kernel
def bytes_side_by_side(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    """No mistake: four threads store and read each its byte of a word; words are stored, and after a barrier others' bytes are read."""
    bytes = zl.shared_array(zl.u8, 256)
    tile = zl.shared_array(zl.u8, 256)
    t = zl.thread_index()
    bytes[t] = zl.u8(t)
    out[t] = zl.f32(bytes[t])
    zl.barrier()
    zl.store(tile + t * 4, zl.load(bytes + t // 4 * 4, 4))
    zl.barrier()
    out[t] = out[t] + zl.f32(tile[255 - t * 4])
    tile[255 - t * 4] = zl.u8(0)


@zl.kernel
def off_by_one_global(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    out[t] = x[t + 1]  # here


@zl.kernel
def off_by_one_shared(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 64)
    other = zl.shared_array(zl.f32, 64)
    t = zl.thread_index()
    tile[t + 1] = x[t]  # here
    other[t] = x[t]
    zl.barrier()
    out[t] = tile[t] + other[t]


@zl.kernel
def store_past_the_end(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    zl.store(out + t * 4, zl.load(x, 4))  # here


@zl.kernel
def misaligned(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    out[t] = zl.load(x + 1, 4)[0]  # here


@zl.kernel
def uninitialised(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 64)
    t = zl.thread_index()
    if t < 63:
        tile[t] = x[t]
    zl.barrier()
    out[t] = tile[63 - t]  # here


@zl.kernel
def barrier_in_a_branch(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    if t < 32:
        zl.barrier()  # here
    out[t] = x[t]


@zl.kernel
def named_barrier_of_too_many(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    if zl.warp_index() == 0:
        zl.named_barrier(1, 64)  # here
    out[t] = x[t]


@zl.kernel
def shuffle_in_a_branch(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    v = x[t]
    if t % 32 < 16:
        v = zl.shuffle_xor(v, 1)  # here
    out[t] = v


@zl.kernel
def divergent_shuffles(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    v = x[t]
    if t % 32 < 16:
        v = zl.shuffle_xor(v, 1)  # here
    else:
        v = zl.shuffle_xor(v, 2)  # here
    out[t] = v


@zl.kernel
def wrong_fragment(x: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.f32]):
    """Rows of A taken as lane % 4 instead of lane / 4: only the result shows it."""
    lane = zl.lane_index()
    acc = [zl.f32(0) for _ in zl.static(range(4))]
    a = [
        zl.bitcast(zl.load(x + (lane % 4 + i % 2 * 8) * 16 + lane // 8 * 2 + i // 2 * 8, 2), zl.u32)
        for i in zl.static(range(4))
    ]
    b = [zl.bitcast(zl.load(x + lane // 4 * 16 + lane % 4 * 2 + i * 8, 2), zl.u32) for i in zl.static(range(2))]
    zl.mma_bf16(acc, a, b)
    for i in zl.static(range(4)):
        out[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2] = acc[i]


@zl.kernel
def ldmatrix_of_own_stores(x: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.u32]):
    tile = zl.shared_array(zl.bf16, 256)
    lane = zl.lane_index()
    zl.store(tile + lane * 8, zl.load(x + lane * 8, 8))
    words = zl.ldmatrix(tile + lane * 8, 4)  # here
    out[lane] = words[0]


@zl.kernel
def mbarrier_never_completes(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    full = zl.mbarrier_array(1)
    t = zl.thread_index()
    if t == 0:
        zl.mbarrier_init(full, 2)
        zl.mbarrier_init_fence()
    zl.barrier()
    if t == 0:
        zl.mbarrier_arrive(full)
    zl.mbarrier_wait(full, 0)  # here
    out[t] = x[t]


@zl.kernel
def mbarrier_unpublished(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    full = zl.mbarrier_array(1)
    t = zl.thread_index()
    if t == 0:
        zl.mbarrier_init(full, 64)
    zl.warp_barrier()
    zl.mbarrier_arrive(full)  # here
    out[t] = x[t]


@zl.kernel
def bulk_read_early(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 64, align=128)
    full = zl.mbarrier_array(1)
    t = zl.thread_index()
    if t == 0:
        zl.mbarrier_init(full, 1)
        zl.mbarrier_init_fence()
    zl.barrier()
    if t == 0:
        zl.mbarrier_expect(full, 256)
        zl.bulk_copy(tile, x, 256, full)
    zl.barrier()
    out[t] = tile[t]  # here
    zl.mbarrier_wait(full, 0)


@zl.kernel
def bulk_overwrites_readers(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    """The second copy does not wait until everybody has read the first."""
    tile = zl.shared_array(zl.f32, 64, align=128)
    full = zl.mbarrier_array(1)
    t = zl.thread_index()
    if t == 0:
        zl.mbarrier_init(full, 1)
        zl.mbarrier_init_fence()
    zl.barrier()
    for r in range(2):
        if t == 0:
            zl.mbarrier_expect(full, 256)
            zl.bulk_copy(tile, x + r * 64, 256, full)  # here
        zl.mbarrier_wait(full, r)
        out[r * 64 + t] = tile[63 - t]  # here


@zl.kernel
def store_without_fence(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 64, align=128)
    t = zl.thread_index()
    tile[t] = x[t]
    zl.barrier()
    if t == 0:
        zl.bulk_store(out, tile, 256)  # here


@zl.kernel
def wgmma_without_fence_async(x: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.f32]):
    a = zl.shared_array(zl.bf16, 64 * 64, align=1024)
    b = zl.shared_array(zl.bf16, 8 * 64, align=1024)
    t = zl.thread_index()
    for i in range(t * 8, 64 * 64, 128 * 8):
        zl.store(a + i, zl.load(x + i, 8))
    if t < 64:
        zl.store(b + t * 8, zl.load(x + t * 8, 8))
    zl.barrier()
    acc = [zl.f32(0) for _ in zl.static(range(4))]
    zl.wgmma_fence(acc)
    zl.wgmma_bf16(acc, zl.smem_desc(a), zl.smem_desc(b), 8)  # here
    zl.wgmma_commit()
    zl.wgmma_wait(0, acc)
    out[t] = acc[0]


@zl.kernel
def accumulators_before_the_wait(x: zl.Ptr[zl.bf16, "const"], out: zl.Ptr[zl.f32]):
    """Nothing is reported: the value is NaN until the wait."""
    a = zl.shared_array(zl.bf16, 64 * 16, align=1024)
    t = zl.thread_index()
    for i in range(t, 64 * 16, 128):
        a[i] = x[i]
    zl.barrier()
    acc = [zl.f32(0) for _ in zl.static(range(4))]
    zl.wgmma_fence(acc)
    zl.wgmma_bf16(acc, [zl.u32(0), zl.u32(0), zl.u32(0), zl.u32(0)], zl.smem_desc(a, 0, 256, 128), 8, accumulate=False)
    zl.wgmma_commit()
    out[t] = acc[0]


@zl.kernel
def blocks_race(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    out[t] = x[t] + zl.f32(zl.block_index(0))  # here


@zl.kernel
def last_block_without_fence(
    x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], parts: zl.Ptr[zl.f32], arrived: zl.Ptr[zl.u32]
):
    t = zl.thread_index()
    if t == 0:
        parts[zl.block_index(0)] = x[zl.block_index(0)]
        if zl.atomic_add(arrived, 1) == zl.u32(zl.num_blocks(0) - 1):
            total = zl.f32(0)
            for b in range(zl.num_blocks(0)):
                total += parts[b]  # here
            out[0] = total


@zl.kernel
def spins_for_ever(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], arrived: zl.Ptr[zl.u32]):
    while zl.load_acquire(arrived) == zl.u32(0):  # here
        pass
    out[zl.thread_index()] = x[zl.thread_index()]


@zl.kernel
def no_end(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], n: zl.i32):
    i = zl.i32(0)
    while i >= n:
        i = i + zl.i32(x[0] * 0.0)  # here
    out[0] = zl.f32(i)


@zl.kernel
def reads_before_grid_wait(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    v = x[t]  # here
    zl.grid_wait()
    out[t] = v


@zl.kernel
def writes_before_grid_wait(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    t = zl.thread_index()
    out[t] = zl.f32(1)  # here
    zl.grid_wait()


@zl.kernel  # here
def never_waits(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    pass


@zl.kernel
def lets_start_early(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    zl.grid_launch_dependents()
    zl.grid_wait()
    out[zl.thread_index()] = zl.f32(2)


@zl.kernel
def good(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32]):
    zl.grid_wait()
    tile = zl.shared_array(zl.f32, 64)
    t = zl.thread_index()
    tile[t] = zl.warp_sum(x[t]) * zl.f32(zl.target.warp)
    zl.barrier()
    out[t] = tile[63 - t]
