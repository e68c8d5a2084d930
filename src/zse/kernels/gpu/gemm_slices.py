"""Adding the parts of a tile that three blocks and more have: each of them adds a slice, where one block alone would
read all parts at the rate of one multiprocessor (o of a 7B model with 64 tokens: 25 us, and 13 in slices, on an H200).

The blocks of gemm_skinny wait for each other here. They can: a launch has no more blocks than there are
multiprocessors, each has one for itself, and the next launch's blocks start when all of these have.
"""

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import CONSUMERS, leave_sums

AT_ONCE = 4  # parts that a thread asks for together


@zl.inline
def load_part(block, tile, size, place, p):
    """Four sums of a thread of `block`, which has left at most two parts: the second is of a tile that begins in it."""
    late = zl.i32(1) if block * p.share < tile * p.steps else 0
    return zl.load(p.partial + (zl.i64(block * 2 + late) * (size * 4) + place), 4)


@zl.inline
def add_slices(totals, tile, blocks, late, last_step, thread, p, store):
    """Leave this block's part of a tile for `blocks`, first and the one after the last. Those of them whose last work
    the tile is wait for all, and each adds units of a warp's rows and eight tokens, in the blocks' order, and stores
    them: store([4 sums], warp, first token). last_step: the end of the line of (tile, step)."""
    first, end = blocks
    threads, warps = p.WG * 128, p.WG * 4
    eights = p.BT // 8
    size = len(totals) * eights * threads
    goes_on = min(end * p.share, last_step) > (tile + 1) * p.steps
    adding = end - first - (zl.i32(1) if goes_on else 0)
    index = zl.block_index(0) - first
    counter = p.counters + first
    leave_sums(totals, p.partial + (zl.i64(zl.block_index(0) * 2 + late) * size + thread) * 4, threads)
    zl.named_barrier(CONSUMERS, threads)
    if thread == 0:
        zl.atomic_add(counter, 1)
    if index < adding:
        if thread == 0:
            while zl.load_acquire(counter) < end - first:
                pass
        zl.named_barrier(CONSUMERS, threads)
        sums = [zl.f32(0) for _ in zl.static(range(4))]
        for unit in range(index * warps + thread // 32, warps * (len(totals) * eights), adding * warps):
            warp = unit % warps
            eight = unit // warps
            for e in zl.static(range(4)):
                sums[e] = zl.f32(0)
            place = (eight * threads + warp * 32 + zl.lane_index()) * 4
            for block in range(first, end, AT_ONCE):
                parts = [load_part(min(block + x, end - 1), tile, size, place, p) for x in zl.static(range(AT_ONCE))]
                for x in zl.static(range(AT_ONCE)):
                    if block + x < end:
                        for e in zl.static(range(4)):
                            sums[e] += parts[x][e]
            store(sums, tile, warp + eight // eights * warps, eight % eights * 8, p)
        zl.named_barrier(CONSUMERS, threads)
        if thread == 0:
            before = zl.atomic_add(counter, 1)
            if before == end - first + adding - 1:
                counter[0] = 0
