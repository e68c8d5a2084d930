"""out[m, n] = sum_k a[m, k] * w[n, k] for 9 to 128 tokens on Hopper: bound by reading the weights, once.

The weights are the 64-row operand of wgmma and all tokens are the columns of one tile, so the product is transposed: a
thread has two weight rows and BT / 4 tokens of each. bf16 and e4m3 weights are multiplied out of shared memory, where
the copy engine (TMA) puts them. Integer weights (layout r16) go through registers as 128 + q, which is exact in bf16:
4, 5 and 6 bits in one operand, 8 bits in two, 128 + low nibble and 2048 + 16 * high nibble. A group's sums are scaled
when the group is complete, and a product with ones gives what the offset multiplies: sum w a = scale * sum (MAGIC + q)
a + (offset - MAGIC * scale) * sum a. That takes a third of the instructions of dequantizing every weight, which pays as
long as there are few columns to scale.

Work is shared evenly: the (tile, step of k) pairs stand in one line, and block b takes `share` of them from b * share
on. A block that has only a part of a tile's steps leaves its sums; the one that comes last adds the parts in their
order, so a result depends neither on which block that is nor on the other tokens (idea of "stream-K", Osama et al.,
2023).

A gated tile gives rows 0 .. 7 of every 16 to gates and 8 .. 15 to the same rows' ups, so both meet in a thread.
"""

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import add_part, clear_sums, leave_part, put_column, put_gated, release, ring_of
from zse.kernels.gpu.gemm_skinny_groups import (
    BLOCKS,
    close_group,
    first_group,
    fold,
    operands,
    read_words,
    sums_of,
    words_of,
)
from zse.kernels.gpu.r16 import HIGH_BYTES, q_bytes

ROW_BYTES = 128  # of k in a stage of bf16 or e4m3
SCALE_BLOCK = 128  # rows and columns that share a scale of "block"
SHARED_BYTES = 230_000
MAX_STAGES = 16
# of the copying and of the multiplying warpgroups, by how many multiply
REGISTERS = {2: (40, 232), 3: (24, 160), 4: (24, 112)}


def magic(bits: int) -> float:
    """What the operands exceed q by."""
    return 2048.0 + 128.0 if bits == 8 else 128.0


def row_tile_bytes(kind: object) -> int:
    """Bytes of 16 weight rows in a stage. kind: bits of an integer, or "bf16", "e4m3", "block" (e4m3 with a scale per
    128 x 128)."""
    return BLOCKS * (q_bytes(kind) + HIGH_BYTES[kind]) if isinstance(kind, int) else 16 * ROW_BYTES


def stage_size(kind: object, bt: int, wg: int) -> int:
    """Bytes of a stage, a multiple of 1024 for the swizzled tiles."""
    return -(-(bt * ROW_BYTES + wg * 4 * row_tile_bytes(kind)) // 1024) * 1024


def stages(kind: object, bt: int, wg: int) -> int:
    return min(MAX_STAGES, SHARED_BYTES // stage_size(kind, bt, wg))


class SkinnyParams(zl.Record):
    """The parameters of gemm_skinny. tokens <= BT. cols: columns of out; the weights have as many rows, or twice as many when
    GATED. KIND: bits of an integer, "bf16", "e4m3", or "block": e4m3 with w_scale [rows / 128, K / 128]. A tile is BT tokens x
    WG warpgroups of 64 weight rows (GATED: half gates, half ups). steps: stages of k. blocks = K / 32, groups: scales of a
    row, group_blocks: blocks of a group (integers; groups of 32 columns and more). center: what multiplies the scale so that
    it can be added to the offset. partial f32 [2 * grid, WG * 64, BT], counters i32 [grid], zero before and after."""

    a_map: zl.TensorMap
    w_map: zl.TensorMap
    high_map: zl.TensorMap
    scale: zl.Ptr[zl.f16, "const"]
    offset: zl.Ptr[zl.f16, "const"]
    a_scale: zl.Ptr[zl.f32, "const"]
    w_scale: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.u8]
    partial: zl.Ptr[zl.f32]
    counters: zl.Ptr[zl.i32]
    tokens: zl.i32
    cols: zl.i32
    steps: zl.i32
    blocks: zl.i32
    groups: zl.i32
    group_blocks: zl.i32
    share: zl.i32
    per_row: zl.i32
    has_offset: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    center: zl.f32
    linear: zl.f32
    cubic: zl.f32
    KIND: zl.static
    BT: zl.static
    WG: zl.static
    STAGES: zl.static
    GATED: zl.static

    @property
    def integer(self) -> bool:
        return isinstance(self.KIND, int)

    @property
    def token_bytes(self) -> int:
        """Of a stage; the weights follow."""
        return self.BT * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.token_bytes + self.WG * 4 * row_tile_bytes(self.KIND)

    @property
    def depth(self) -> int:
        """k of a stage."""
        return 64 if self.integer or self.KIND == "bf16" else 128

    @property
    def tile_cols(self) -> int:
        return self.WG * 32 if self.GATED else self.WG * 64

    @property
    def q_size(self) -> int:
        """Bytes of 16 rows in a stage."""
        return BLOCKS * q_bytes(self.KIND)

    @property
    def high_size(self) -> int:
        return BLOCKS * HIGH_BYTES[self.KIND]


@zl.inline
def load_weights(ring, slot, step, tile, p):
    """Ask for one stage's weights: for every warp its 16 rows."""
    zl.mbarrier_expect(ring.full + slot, p.stage_bytes)
    at, bar = ring.memory + (slot * ring.stride + p.token_bytes), ring.full + slot
    tiles = p.WG * 4
    if p.integer:
        halves = 2 if p.GATED else 1
        count = tiles // halves
        for half in zl.static(range(halves)):
            row = tile * count + half * (p.cols // 16)
            place = (step * (p.q_size // 4), row)
            zl.tma_load(at + half * count * p.q_size, p.w_map, place, bar, None, "evict_first")
            if p.high_size > 0:
                to = at + (tiles * p.q_size + half * count * p.high_size)
                zl.tma_load(to, p.high_map, (step * (p.high_size // 4), row), bar, None, "evict_first")
    elif p.GATED:  # dimensions: k, 8 rows, gate or up, groups of 8 rows
        zl.tma_load(at, p.w_map, (step * p.depth, 0, 0, tile * tiles), bar, None, "evict_first")
    else:
        zl.tma_load(at, p.w_map, (step * p.depth, tile * (p.WG * 64)), bar, None, "evict_first")


@zl.inline
def load_tokens(ring, slot, step, p):
    zl.tma_load(ring.memory + slot * ring.stride, p.a_map, (step * p.depth, 0), ring.full + slot, None, "evict_last")


@zl.inline
def produce(ring, begin, finish, p):
    """The thread that fills the ring. Nobody writes weights: the first stages' are on their way while the kernels
    before this one end."""
    ahead = min(finish - begin, ring.stages)
    for i in range(ahead):
        load_weights(ring, i, (begin + i) % p.steps, (begin + i) // p.steps, p)
    zl.grid_wait()
    for i in range(ahead):
        load_tokens(ring, i, (begin + i) % p.steps, p)
    slot = zl.i32(0)
    parity = zl.i32(0)
    for at in range(begin + ring.stages, finish):
        zl.mbarrier_wait(ring.empty + slot, parity)
        load_weights(ring, slot, at % p.steps, at // p.steps, p)
        load_tokens(ring, slot, at % p.steps, p)
        slot += 1
        if slot == ring.stages:
            slot = 0
            parity = parity ^ 1


@zl.inline
def gather_parts(total, tile, late, last, thread, p):
    """Leave this block's part of a tile; true in the block that comes last, which then has the sum of all parts in
    their order. late: this part is not the block's first piece of work (a block has at most one part of each kind)."""
    threads = p.WG * 128
    size = p.BT // 8 * threads
    mine = p.partial + (zl.i64(zl.block_index(0) * 2 + (zl.i32(1) if late else 0)) * size + thread) * 4
    first = tile * p.steps // p.share
    end = ((tile + 1) * p.steps - 1) // p.share + 1
    # Counted where the tile begins: only one of a block's tiles goes on in the next block.
    is_last = leave_part((total,), mine, p.counters + first, end - first, last, thread, threads)
    if is_last:
        clear_sums((total,))
        for block in range(first, end):
            place = zl.i64(block * 2 + (zl.i32(1) if block * p.share < tile * p.steps else 0))
            add_part((total,), p.partial + (place * size + thread) * 4, threads, False)
    return is_last


@zl.inline
def store_tile(total, first_col, warp, lane, p):
    """A warp's 16 rows (gated: 8 columns of out) of all tokens."""
    KIND, BT = p.KIND, p.BT
    last_token = p.tokens - 1
    j = lane % 4
    g = lane // 4
    if p.GATED:
        col = first_col + warp * 8
        gate_scale = p.w_scale[min(col + g, p.cols - 1) * p.per_row] if KIND == "e4m3" else 1.0
        up_scale = p.w_scale[(p.cols + min(col + g, p.cols - 1)) * p.per_row] if KIND == "e4m3" else 1.0
        if KIND in ("e4m3", "block"):
            for i in zl.static(range(BT // 8)):
                for e in zl.static(range(4)):
                    token_scale = p.a_scale[min(i * 8 + j * 2 + e % 2, last_token)]
                    total[i * 4 + e] *= token_scale * (gate_scale if e < 2 else up_scale)
        put_gated(total, col, 0, p, j, g, BT)
    else:
        for y in zl.static(range(2)):
            col = first_col + warp * 16 + y * 8 + g
            if KIND in ("e4m3", "block"):
                row_scale = p.w_scale[min(col, p.cols - 1) * p.per_row] if KIND == "e4m3" else 1.0
                for i in zl.static(range(BT // 8)):
                    for e in zl.static(range(2)):
                        total[i * 4 + y * 2 + e] *= row_scale * p.a_scale[min(i * 8 + j * 2 + e, last_token)]
            put_column(total, y, col, 0, p, j, g, BT)


@zl.inline
def multiply_integers(sums, step, lane, here, tokens_desc, ring, previous, p):
    """One stage of quantized weights, which begins at `here`. sums: GroupSums; lane: LaneWords."""
    count = 4 if p.KIND == 8 else 2  # operands of a block
    words_at = zl.cast_ptr(here + p.token_bytes, zl.u32)
    for b in zl.static(range(BLOCKS)):
        at = words_at + (lane.word + b * (p.q_size // 8))
        high_at = words_at + (lane.high_word + b * (p.high_size // 8))
        read_words(lane.words, lane.high, at, high_at, lane.row_step, lane.high_step, p.KIND)
        operands(lane.a[b * count : (b + 1) * count], lane.words, lane.high, lane.pick, lane.step, p.KIND)
        if sums.state[0] == p.group_blocks:
            close_group(sums, step * BLOCKS + b, p)
        zl.wgmma_fence()
        for half in zl.static(range(2)):
            k = b * 4 + half * 2
            onto = sums.state[1] == 0 if half == 0 else True
            zl.wgmma_bf16(sums.acc, lane.a[b * count + half], tokens_desc + k, p.BT, onto)
            if p.KIND == 8:
                zl.wgmma_bf16(sums.acc, lane.a[b * count + 2 + half], tokens_desc + k, p.BT, True)
            zl.wgmma_bf16(sums.ones, lane.unit, tokens_desc + k, p.BT, onto)
        zl.wgmma_commit()
        sums.state[1] = 0
        sums.state[0] += 1
        # Named here, the other block's operands keep their registers until the products that read them are done.
        zl.wgmma_wait(1, *lane.a[(1 - b) * count : (2 - b) * count])
        if b == 0:
            if previous >= 0:
                release(ring.empty + previous, zl.lane_index())


@zl.inline
def multiply_rows(total, acc, step, first, tile, tokens_desc, warp, p):
    """One stage of bf16 or e4m3 weights."""
    KIND, BT = p.KIND, p.BT
    rows_desc = tokens_desc + zl.u64((p.token_bytes + warp // 4 * (64 * ROW_BYTES)) // 16)
    zl.wgmma_fence()
    for k in zl.static(range(4)):
        onto = k > 0 if KIND == "block" else True if k > 0 else step > first
        if KIND == "bf16":
            zl.wgmma_bf16(acc, rows_desc + k * 2, tokens_desc + k * 2, BT, onto)
        else:
            zl.wgmma_e4m3(acc, rows_desc + k * 2, tokens_desc + k * 2, BT, onto)
    zl.wgmma_commit()
    if KIND == "block":
        # k of a stage is that of a block of scales; a warpgroup's rows are within one, or two if gated.
        row = tile * p.tile_cols + warp // 4 * (32 if p.GATED else 64)
        second = (p.cols if p.GATED else 0) + row
        scales = [p.w_scale[r // SCALE_BLOCK * p.steps + step] for r in (row, second)]
        zl.wgmma_wait(0, acc)
        for i in zl.static(range(BT // 2)):
            total[i] = zl.fma(acc[i], scales[i % 4 // 2], total[i])
    else:
        zl.wgmma_wait(1)


@zl.inline
def consume(ring, begin, finish, last, p):
    """The warpgroups that multiply."""
    integer, BT, steps = p.integer, p.BT, p.steps
    thread = zl.thread_index() - 128
    warp = thread // 32
    lane = zl.lane_index()
    base = zl.smem_desc(ring.memory)
    slot = zl.i32(0)
    parity = zl.i32(0)
    at = begin + 0
    total = [zl.f32(0) for _ in zl.static(range(BT // 2))]
    acc = [zl.f32(0) for _ in zl.static(range(BT // 2))] if integer or p.KIND == "block" else total
    ones = [zl.f32(0) for _ in zl.static(range(BT // 2))] if integer else total
    if integer:
        words = words_of(warp, lane, p)
        sums = sums_of(total, acc, ones)
    while at < finish:
        tile = at // steps
        first = at % steps
        end = min(steps, first + (finish - at))
        previous = zl.i32(-1)
        if integer:
            first_group(sums, tile, first, words, p)
        if integer or p.KIND == "block":
            for i in zl.static(range(BT // 2)):
                total[i] = zl.f32(0)
        for step in range(first, end):
            here = ring.memory + slot * ring.stride
            tokens_desc = base + zl.u64(slot * ring.stride // 16)
            zl.mbarrier_wait(ring.full + slot, parity)
            if integer:
                multiply_integers(sums, step, words, here, tokens_desc, ring, previous, p)
            else:
                multiply_rows(total, acc, step, first, tile, tokens_desc, warp, p)
                if previous >= 0:
                    release(ring.empty + previous, lane)
            previous = slot
            slot += 1
            if slot == ring.stages:
                slot = 0
                parity = parity ^ 1
        if integer:
            zl.wgmma_wait(0, acc, ones)
            fold(sums)
        else:
            zl.wgmma_wait(0, total)
        release(ring.empty + previous, lane)
        if at == begin:
            zl.grid_wait()
        complete = end - first == steps
        if end - first < steps:
            complete = gather_parts(total, tile, at > begin, last, thread, p)
        if complete:
            store_tile(total, tile * p.tile_cols, warp, lane, p)
        at += end - first


@zl.kernel
def gemm_skinny(p: SkinnyParams):
    ring, last = ring_of(stage_size(p.KIND, p.BT, p.WG), p.STAGES, p.WG * 4)
    begin = zl.block_index(0) * p.share
    finish = min(begin + p.share, (p.cols + (p.tile_cols - 1)) // p.tile_cols * p.steps)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", REGISTERS[p.WG][0])
        if zl.thread_index() == 0:
            produce(ring, begin, finish, p)
    else:
        zl.set_max_registers("inc", REGISTERS[p.WG][1])
        consume(ring, begin, finish, last, p)
