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

from typing import NamedTuple

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import CONSUMERS, Ends, put_column, put_gated, release, ring_of
from zse.kernels.gpu.gemm_skinny_groups import BLOCKS, Groups, close_group, first_group, fold, operands, read_words
from zse.kernels.gpu.r16 import HIGH_BYTES, q_bytes

ROW_BYTES = 128  # of k in a stage of bf16 or e4m3
SCALE_BLOCK = 128  # rows and columns that share a scale of "block"
SHARED_BYTES = 230_000
MAX_STAGES = 16
ONES = 0x3F803F80  # two bf16
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


class SkinnyForm(NamedTuple):
    """A variant: BT tokens x WG warpgroups of 64 weight rows (GATED: half gates, half ups)."""

    KIND: object
    BT: int
    WG: int
    GATED: bool

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
def load_weights(ring, slot, w_map, high_map, step, tile, cols, form):
    """Ask for one stage's weights: for every warp its 16 rows."""
    zl.mbarrier_expect(ring.full + slot, form.stage_bytes)
    at, bar = ring.memory + (slot * ring.stride + form.token_bytes), ring.full + slot
    tiles = form.WG * 4
    if form.integer:
        halves = 2 if form.GATED else 1
        count = tiles // halves
        for half in zl.static(range(halves)):
            row = tile * count + half * (cols // 16)
            place = (step * (form.q_size // 4), row)
            zl.tma_load(at + half * count * form.q_size, w_map, place, bar, None, "evict_first")
            if form.high_size > 0:
                to = at + (tiles * form.q_size + half * count * form.high_size)
                zl.tma_load(to, high_map, (step * (form.high_size // 4), row), bar, None, "evict_first")
    elif form.GATED:  # dimensions: k, 8 rows, gate or up, groups of 8 rows
        zl.tma_load(at, w_map, (step * form.depth, 0, 0, tile * tiles), bar, None, "evict_first")
    else:
        zl.tma_load(at, w_map, (step * form.depth, tile * (form.WG * 64)), bar, None, "evict_first")


@zl.inline
def load_tokens(ring, slot, a_map, step, form):
    zl.tma_load(ring.memory + slot * ring.stride, a_map, (step * form.depth, 0), ring.full + slot, None, "evict_last")


@zl.inline
def produce(a_map, w_map, high_map, ring, begin, finish, steps, cols, form):
    """The thread that fills the ring. Nobody writes weights: the first stages' are on their way while the kernels
    before this one end."""
    ahead = min(finish - begin, ring.stages)
    for i in range(ahead):
        load_weights(ring, i, w_map, high_map, (begin + i) % steps, (begin + i) // steps, cols, form)
    zl.grid_wait()
    for i in range(ahead):
        load_tokens(ring, i, a_map, (begin + i) % steps, form)
    slot = zl.i32(0)
    parity = zl.i32(0)
    for at in range(begin + ring.stages, finish):
        zl.mbarrier_wait(ring.empty + slot, parity)
        load_weights(ring, slot, w_map, high_map, at % steps, at // steps, cols, form)
        load_tokens(ring, slot, a_map, at % steps, form)
        slot += 1
        if slot == ring.stages:
            slot = 0
            parity = parity ^ 1


@zl.inline
def gather_parts(total, scratch, tile, steps, share, late, thread, threads, BT):
    """Leave this block's part of a tile; true in the block that comes last, which then has the sum of all parts in
    their order. late: this part is not the block's first piece of work (a block has at most one part of each kind).
    scratch: (partial, counters, last)."""
    partial, counters, last = scratch
    count = BT // 8
    mine = partial + (zl.i64(zl.block_index(0) * 2 + (zl.i32(1) if late else 0)) * (count * threads) + thread) * 4
    for j in zl.static(range(count)):
        zl.store(
            mine + j * (threads * 4), zl.make_vector(total[j * 4], total[j * 4 + 1], total[j * 4 + 2], total[j * 4 + 3])
        )
    first = tile * steps // share
    end = ((tile + 1) * steps - 1) // share + 1
    zl.fence()
    zl.named_barrier(CONSUMERS, threads)
    if thread == 0:
        # Counted where the tile begins: only one of a block's tiles goes on in the next block.
        before = zl.atomic_add(counters + first, 1)
        if before == end - first - 1:
            counters[first] = 0
        last[0] = before
    zl.named_barrier(CONSUMERS, threads)
    is_last = last[0] == end - first - 1
    zl.named_barrier(CONSUMERS, threads)
    if is_last:
        zl.fence()
        for i in zl.static(range(BT // 2)):
            total[i] = zl.f32(0)
        for block in range(first, end):
            part = (
                partial
                + (zl.i64(block * 2 + (zl.i32(1) if block * share < tile * steps else 0)) * (count * threads) + thread)
                * 4
            )
            for j in zl.static(range(count)):
                v = zl.load(part + j * (threads * 4), 4)
                for e in zl.static(range(4)):
                    total[j * 4 + e] += v[e]
    return is_last


@zl.inline
def store_tile(total, first_col, ends, warp, lane, form):
    """A warp's 16 rows (gated: 8 columns of out) of all tokens."""
    KIND, BT, cols, per_row = form.KIND, form.BT, ends.cols, ends.per_row
    last_token = ends.tokens - 1
    j = lane % 4
    g = lane // 4
    if form.GATED:
        col = first_col + warp * 8
        gate_scale = ends.w_scale[min(col + g, cols - 1) * per_row] if KIND == "e4m3" else 1.0
        up_scale = ends.w_scale[(cols + min(col + g, cols - 1)) * per_row] if KIND == "e4m3" else 1.0
        if KIND in ("e4m3", "block"):
            for i in zl.static(range(BT // 8)):
                for e in zl.static(range(4)):
                    token_scale = ends.a_scale[min(i * 8 + j * 2 + e % 2, last_token)]
                    total[i * 4 + e] *= token_scale * (gate_scale if e < 2 else up_scale)
        put_gated(total, col, 0, ends, j, g, BT)
    else:
        for y in zl.static(range(2)):
            col = first_col + warp * 16 + y * 8 + g
            if KIND in ("e4m3", "block"):
                row_scale = ends.w_scale[min(col, cols - 1) * per_row] if KIND == "e4m3" else 1.0
                for i in zl.static(range(BT // 8)):
                    for e in zl.static(range(2)):
                        total[i * 4 + y * 2 + e] *= row_scale * ends.a_scale[min(i * 8 + j * 2 + e, last_token)]
            put_column(total, y, col, 0, ends, j, g, BT)


@zl.inline
def multiply_integers(sums, step, here, tokens_desc, lanes, groups, ring, slot, parity, previous, form):
    """One stage of quantized weights. lanes: (operands, ones, words, high, where the lane's words stand in a stage)."""
    total, acc, ones = sums
    a, unit, words, high, place = lanes
    word, high_word, row_step, high_step, step_of_lane, pick = place
    KIND, BT = form.KIND, form.BT
    count = 4 if KIND == 8 else 2  # operands of a block
    words_at = zl.cast_ptr(here + form.token_bytes, zl.u32)
    for b in zl.static(range(BLOCKS)):
        if b == 0:
            zl.mbarrier_wait(ring.full + slot, parity)
        at, high_at = words_at + (word + b * (form.q_size // 8)), words_at + (high_word + b * (form.high_size // 8))
        read_words(words, high, at, high_at, row_step, high_step, KIND)
        operands(a[b * count : (b + 1) * count], words, high, pick, step_of_lane, KIND)
        if groups.state[0] == groups.group_blocks:
            close_group(sums, groups, step * BLOCKS + b, BT)
        zl.wgmma_fence()
        for half in zl.static(range(2)):
            k = b * 4 + half * 2
            onto = groups.state[1] == 0 if half == 0 else True
            zl.wgmma_bf16(acc, a[b * count + half], tokens_desc + k, BT, onto)
            if KIND == 8:
                zl.wgmma_bf16(acc, a[b * count + 2 + half], tokens_desc + k, BT, True)
            zl.wgmma_bf16(ones, unit, tokens_desc + k, BT, onto)
        zl.wgmma_commit()
        groups.state[1] = 0
        groups.state[0] += 1
        # Named here, the other block's operands keep their registers until the products that read them are done.
        zl.wgmma_wait(1, *a[(1 - b) * count : (2 - b) * count])
        if b == 0:
            if previous >= 0:
                release(ring.empty + previous, zl.lane_index())


@zl.inline
def multiply_rows(sums, step, first, tile, steps, tokens_desc, warp, ends, form):
    """One stage of bf16 or e4m3 weights."""
    total, acc, ones = sums
    KIND, BT = form.KIND, form.BT
    rows_desc = tokens_desc + zl.u64((form.token_bytes + warp // 4 * (64 * ROW_BYTES)) // 16)
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
        row = tile * form.tile_cols + warp // 4 * (32 if form.GATED else 64)
        second = (ends.cols if form.GATED else 0) + row
        scales = [ends.w_scale[row // SCALE_BLOCK * steps + step], ends.w_scale[second // SCALE_BLOCK * steps + step]]
        zl.wgmma_wait(0, acc)
        for i in zl.static(range(BT // 2)):
            total[i] = zl.fma(acc[i], scales[i % 4 // 2], total[i])
    else:
        zl.wgmma_wait(1)


@zl.inline
def lane_words(warp, lane, form):
    """(operands, ones, words, high, place) of a lane; place: (word, high_word, row_step, high_step, step, selector)."""
    KIND, GATED = form.KIND, form.GATED
    tiles = form.WG * 4
    row = warp % 2 * 8 + lane // 4 if GATED else lane // 4
    own = warp // 2 if GATED else warp
    row_step = tiles // 2 * form.q_size // 4 if GATED else 8
    high_step = tiles // 2 * form.high_size // 4 if GATED else 8
    word = own * (form.q_size // 4) + lane % 4 // 2 * 16 + row
    high_word = tiles * form.q_size // 4 + own * (form.high_size // 4) + row
    step_of_lane = zl.u32(lane % 4 // 2)
    pick = zl.u32(0x4140) + zl.u32(lane % 2) * 0x0202  # bytes 0, -, 1, - of a word, or 2, -, 3, -
    a = [[zl.u32(0) for _ in zl.static(range(4))] for x in zl.static(range(8 if KIND == 8 else 4))]
    unit = [zl.u32(ONES) for _ in zl.static(range(4))]
    words = [zl.u32(0) for _ in zl.static(range(8 if KIND == 8 else 4))]
    high = [zl.u32(0) for _ in zl.static(range({5: 2, 6: 4}.get(KIND, 0)))]
    return (a, unit, words, high, (word, high_word, row_step, high_step, step_of_lane, pick)), own, row


@zl.inline
def consume(ring, begin, finish, steps, share, ends, scratch, scaling, form):
    """The warpgroups that multiply. scaling: (scale, offset, has_offset, center, groups, blocks, group_blocks)."""
    integer, BT, threads = form.integer, form.BT, form.WG * 128
    thread = zl.thread_index() - 128
    warp = thread // 32
    lane = zl.lane_index()
    base = zl.smem_desc(ring.memory)
    slot = zl.i32(0)
    parity = zl.i32(0)
    at = begin + 0
    total = [zl.f32(0) for _ in zl.static(range(BT // 2))]
    acc = [zl.f32(0) for _ in zl.static(range(BT // 2))] if integer or form.KIND == "block" else total
    ones = [zl.f32(0) for _ in zl.static(range(BT // 2))] if integer else total
    if integer:
        lanes, own, row = lane_words(warp, lane, form)
        scales = [zl.f32(0) for _ in zl.static(range(2))]
        shifts = [zl.f32(0) for _ in zl.static(range(2))]
        rows_at = [zl.i64(0) for _ in zl.static(range(2))]
        state = [zl.i32(0) for _ in zl.static(range(2))]
    while at < finish:
        tile = at // steps
        first = at % steps
        end = min(steps, first + (finish - at))
        previous = zl.i32(-1)
        if integer:
            first_group(Groups(*scaling, scales, shifts, rows_at, state), tile, first, own, row, ends.cols, form)
        if integer or form.KIND == "block":
            for i in zl.static(range(BT // 2)):
                total[i] = zl.f32(0)
        for step in range(first, end):
            here = ring.memory + slot * ring.stride
            tokens_desc = base + zl.u64(slot * ring.stride // 16)
            if integer:
                multiply_integers(
                    (total, acc, ones),
                    step,
                    here,
                    tokens_desc,
                    lanes,
                    Groups(*scaling, scales, shifts, rows_at, state),
                    ring,
                    slot,
                    parity,
                    previous,
                    form,
                )
            else:
                zl.mbarrier_wait(ring.full + slot, parity)
                multiply_rows((total, acc, ones), step, first, tile, steps, tokens_desc, warp, ends, form)
                if previous >= 0:
                    release(ring.empty + previous, lane)
            previous = slot
            slot += 1
            if slot == ring.stages:
                slot = 0
                parity = parity ^ 1
        if integer:
            zl.wgmma_wait(0, acc, ones)
            fold(total, acc, ones, scales, shifts, BT)
        else:
            zl.wgmma_wait(0, total)
        release(ring.empty + previous, lane)
        if at == begin:
            zl.grid_wait()
        complete = end - first == steps
        if end - first < steps:
            complete = gather_parts(total, scratch, tile, steps, share, at > begin, thread, threads, BT)
        if complete:
            store_tile(total, tile * form.tile_cols, ends, warp, lane, form)
        at += end - first


@zl.kernel
def gemm_skinny(
    a_map: zl.TensorMap,
    w_map: zl.TensorMap,
    high_map: zl.TensorMap,
    scale: zl.Ptr[zl.f16, "const"],
    offset: zl.Ptr[zl.f16, "const"],
    a_scale: zl.Ptr[zl.f32, "const"],
    w_scale: zl.Ptr[zl.f32, "const"],
    bias: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.u8],
    partial: zl.Ptr[zl.f32],
    counters: zl.Ptr[zl.i32],
    tokens: zl.i32,
    cols: zl.i32,
    steps: zl.i32,
    blocks: zl.i32,
    groups: zl.i32,
    group_blocks: zl.i32,
    share: zl.i32,
    per_row: zl.i32,
    has_offset: zl.i32,
    has_bias: zl.i32,
    mode: zl.i32,
    center: zl.f32,
    linear: zl.f32,
    cubic: zl.f32,
    KIND: zl.static,
    BT: zl.static,
    WG: zl.static,
    STAGES: zl.static,
    GATED: zl.static,
):
    """tokens <= BT. cols: columns of out; the weights have as many rows, or twice as many when GATED. KIND: bits of an
    integer, "bf16", "e4m3", or "block": e4m3 with w_scale [rows / 128, K / 128]. steps: stages of k. blocks = K / 32,
    groups: scales of a row, group_blocks: blocks of a group (integers; groups of 32 columns and more). center: what
    multiplies the scale so that it can be added to the offset. partial f32 [2 * grid, WG * 64, BT], counters i32
    [grid], zero before and after."""
    form = SkinnyForm(KIND, BT, WG, GATED)
    ring, last = ring_of(stage_size(KIND, BT, WG), STAGES, WG * 4)
    begin = zl.block_index(0) * share
    finish = min(begin + share, (cols + (form.tile_cols - 1)) // form.tile_cols * steps)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", REGISTERS[WG][0])
        if zl.thread_index() == 0:
            produce(a_map, w_map, high_map, ring, begin, finish, steps, cols, form)
    else:
        zl.set_max_registers("inc", REGISTERS[WG][1])
        ends = Ends(out, bias, tokens, cols, has_bias, mode, linear, cubic, a_scale, w_scale, per_row)
        scaling = (scale, offset, has_offset, center, groups, blocks, group_blocks)
        consume(ring, begin, finish, steps, share, ends, (partial, counters, last), scaling, form)
