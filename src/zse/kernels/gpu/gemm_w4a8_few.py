"""gemm_w4a8 for 9 to 64 tokens, bound by reading the weights, once: they stay in registers, where a lane's words of
layout r16, masked, are the very operand of a wgmma that it needs, and no tile has more tokens than one product.

Work is shared as gemm_skinny does. A warpgroup has MT blocks of 64 weight rows, one after the other: while it scales
one's sums, the other warpgroup multiplies. Operands are named where the products begin; else the compiler fills their
registers in between, and each product waits for the one before (ptxas C7519)."""

from zse import kernel as zl
from zse.kernels.gpu import gemm_parts as parts
from zse.kernels.gpu import gemm_skinny as skinny
from zse.kernels.gpu.gemm_w4a8 import (
    BLOCKS,
    REGISTERS,
    SUM_BYTES,
    WARPGROUPS,
    W4A8Params,
    add_scaled,
    add_shifts,
    lane_places,
    load_tokens,
    load_weights,
    mask,
    move_on,
    multiply,
    read_words,
    scales_of,
    stage_size,
)


class FewParams(W4A8Params):
    """Of W4A8Params."""

    MT: zl.static

    @property
    def tiles(self) -> int:
        """Of 16 rows."""
        return WARPGROUPS * self.MT * 4


@zl.inline
def load_all_tokens(ring, slot, step, p):
    load_tokens(ring, slot, step, 0, p)


@zl.inline
def multiply_tile(totals, acc, words, a, lane, ring, state, bounds, p):
    """totals, by blocks of 64 rows, = the products of stages bounds[0] .. bounds[1] of a tile; see multiply_unit."""
    first, end = bounds
    for total in totals:
        for i in zl.static(range(p.BT // 2)):
            total[i] = zl.f32(0)
    base = zl.smem_desc(ring.memory)
    sums_base = zl.smem_desc(ring.memory, SUM_BYTES, 8 * SUM_BYTES)
    for step in range(first, min(end, p.shift_steps)):
        zl.mbarrier_wait(ring.full + state[0], state[1])
        desc = sums_base + zl.u64(state[0] * ring.stride // 16)
        for block, total in enumerate(totals):
            add_shifts((total,), a, ring.memory + state[0] * ring.stride, desc, lane, block, p)
        parts.release(ring.empty + state[0], zl.lane_index())
        move_on(state, ring.stages)
    begin = max(first, p.shift_steps)
    if begin < end:
        zl.mbarrier_wait(ring.full + state[0], state[1])
        read_words(words, ring.memory + state[0] * ring.stride, lane, 0, p)
    for step in range(begin, end):
        slot = state[0] + 0
        stage = ring.memory + slot * ring.stride
        move_on(state, ring.stages)
        for block, total in enumerate(totals):
            mask(a, words)
            zl.wgmma_fence(*a)
            multiply(acc, a, base + zl.u64(slot * ring.stride // 16))
            zl.wgmma_wait(0, acc, *a)
            # The next words arrive while this block's sums are scaled; earlier there are no registers for them.
            if block + 1 < p.MT:
                read_words(words, stage, lane, block + 1, p)
            else:
                if step + 1 < end:
                    zl.mbarrier_wait(ring.full + state[0], state[1])
                    read_words(words, ring.memory + state[0] * ring.stride, lane, 0, p)
            add_scaled(total, acc, scales_of(stage, lane, block, p))
        parts.release(ring.empty + slot, zl.lane_index())


@zl.kernel
def gemm_w4a8_few(p: FewParams):
    """tokens <= BT."""
    ring, last = parts.ring_of(stage_size(p.BT, p.tiles * 16), p.STAGES, WARPGROUPS * 4, True)
    tiles = (p.cols + (p.tile_cols - 1)) // p.tile_cols
    begin = zl.block_index(0) * p.share
    finish = min(begin + p.share, tiles * p.steps)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", REGISTERS[0])
        if zl.thread_index() == 0:
            skinny.produce(ring, begin, finish, p, load_weights, load_all_tokens)
    else:
        zl.set_max_registers("inc", REGISTERS[1])
        thread = zl.thread_index() - 128
        lane = lane_places(thread // 32, p)
        totals = [[zl.f32(0) for _ in zl.static(range(p.BT // 2))] for x in zl.static(range(p.MT))]
        acc = [zl.f32(0) for _ in zl.static(range(p.BT // 2))]
        words = [zl.u32(0) for _ in zl.static(range(BLOCKS * 2))]
        a = [[zl.u32(0) for _ in zl.static(range(4))] for b in zl.static(range(BLOCKS))]
        state = [zl.i32(0) for _ in zl.static(range(2))]
        at = begin + 0
        while at < finish:
            tile = at // p.steps
            first = at % p.steps
            end = min(p.steps, first + (finish - at))
            multiply_tile(totals, acc, words, a, lane, ring, state, (first, end), p)
            if at == begin:
                zl.grid_wait()
            skinny.finish_tile(totals, tile, at, end - first, begin, tiles, last, thread, p)
            at += end - first
