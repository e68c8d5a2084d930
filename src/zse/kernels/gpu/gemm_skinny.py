"""out[m, n] = sum_k a[m, k] * w[n, k] for 9 to 128 tokens on Hopper: bound by reading the weights, once.

The weights are the 64-row operand of wgmma and all tokens are the columns of one tile, so the product is transposed: a
thread has two weight rows and BT / 4 tokens of each. bf16 and e4m3 weights are multiplied out of shared memory, where
the copy engine (TMA) puts them; integer weights (layout r16) through registers, where they become bf16
(gemm_integers.py).

Work is shared evenly: the (tile, step of k) pairs stand in one line, and block b takes `share` of them from b * share
on. A block that has only a part of a tile's steps leaves its sums, and of these blocks each adds a slice
(gemm_slices.py), always in the blocks' order, so a result depends neither on which block adds nor on the other tokens
(idea of "stream-K", Osama et al., 2023).

A gated tile gives rows 0 .. 7 of every 16 to gates and 8 .. 15 to the same rows' ups, so both meet in a thread.
"""

from zse import kernel as zl
from zse.kernels.gpu import gemm_integers as integers
from zse.kernels.gpu import gemm_parts as parts
from zse.kernels.gpu.gemm_slices import add_counted, add_slices
from zse.kernels.gpu.r16 import is_integer, stage_blocks
from zse.quant.scheme import FP8_BLOCK

ROW_BYTES = 128  # of k in a stage of bf16 or e4m3
SHARED_BYTES = 230_000
MAX_STAGES = 16
TOKEN_SCALES = ("e4m3", "block", "w4a8")  # kinds whose activations have a scale a token


def row_tile_bytes(kind: object, bt: int) -> int:
    """Bytes of 16 weight rows in a stage. kind: bits of an integer, or "bf16", "e4m3", "block" (e4m3 with a scale per
    128 x 128)."""
    return integers.weight_bytes(kind, bt) if is_integer(kind) else 16 * ROW_BYTES


def token_size(kind: object, bt: int) -> int:
    """Bytes of a token in a stage: bf16, or e4m3 for such weights."""
    return parts.depth_of(kind, bt) * (2 if is_integer(kind) or kind == "bf16" else 1)


def stage_size(kind: object, bt: int, wg: int) -> int:
    """Bytes of a stage, a multiple of 1024 for the swizzled tiles."""
    return -(-(bt * token_size(kind, bt) + wg * 4 * row_tile_bytes(kind, bt)) // 1024) * 1024


def stages(kind: object, bt: int, wg: int) -> int:
    return min(MAX_STAGES, SHARED_BYTES // stage_size(kind, bt, wg))


class SkinnyParams(zl.Record):
    """The parameters of gemm_skinny. tokens <= BT. cols: columns of out; the weights have as many rows, or twice as
    many when GATED. KIND: bits of an integer, "bf16", "e4m3", or "block": e4m3 with w_scale [rows / 128, K / 128]. A
    tile is BT tokens x WG warpgroups of 64 weight rows (GATED: half gates, half ups). steps: stages of k. blocks = K /
    32, groups: scales of a row, group_blocks, half_step, center: as in gemm_r16. partial f32 [2 * grid, WG * 64, BT];
    of integers counters i32 [grid], zero before and after, of others partial is."""

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
    half_step: zl.i32
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
    def of_experts(self) -> bool:
        """Whether gated products have biases, and gates and ups perhaps limits."""
        return False

    @property
    def pushes(self) -> bool:
        """Whether `push` takes sums to where ranks add them (gemm_push), instead of out."""
        return False

    @property
    def integer(self) -> bool:
        return is_integer(self.KIND)

    @property
    def BLOCKS(self) -> int:
        """Of a stage of integers."""
        return stage_blocks(self.KIND, self.BT)

    @property
    def HALVES(self) -> int:
        """Groups have 32 columns and more."""
        return 1

    @property
    def tiles(self) -> int:
        """Of 16 rows."""
        return self.WG * 4

    @property
    def token_bytes(self) -> int:
        """Of a stage; the weights follow."""
        return self.BT * token_size(self.KIND, self.BT)

    @property
    def stage_bytes(self) -> int:
        return self.token_bytes + self.WG * 4 * row_tile_bytes(self.KIND, self.BT)

    @property
    def depth(self) -> int:
        return parts.depth_of(self.KIND, self.BT)

    @property
    def tile_cols(self) -> int:
        return self.WG * 32 if self.GATED else self.WG * 64


@zl.inline
def load_weights(ring, slot, step, tile, p):
    """Ask for one stage's weights: for every warp its 16 rows."""
    zl.mbarrier_expect(ring.full + slot, p.stage_bytes)
    at, bar = ring.memory + (slot * ring.stride + p.token_bytes), ring.full + slot
    if p.integer:
        integers.load_weights(at, bar, step, tile * (p.tile_cols // 16), p)
    elif p.GATED:  # dimensions: k, 8 rows, gate or up, groups of 8 rows
        zl.tma_load(at, p.w_map, (step * p.depth, 0, 0, tile * p.tiles), bar, None, "evict_first")
    else:
        zl.tma_load(at, p.w_map, (step * p.depth, tile * (p.WG * 64)), bar, None, "evict_first")


@zl.inline
def load_tokens(ring, slot, step, p):
    if p.integer:
        integers.load_tokens(ring.memory + slot * ring.stride, ring.full + slot, step, 0, p)
    else:
        zl.tma_load(
            ring.memory + slot * ring.stride, p.a_map, (step * p.depth, 0), ring.full + slot, None, "evict_last"
        )


@zl.inline
def produce(ring, begin, finish, p, load_weights, load_tokens, LATE=False):
    """The thread that fills the ring. Nobody writes weights: the first stages' are on their way while the kernels
    before this one end. load_weights, load_tokens: those of this module, or of gemm_w4a8_few. LATE: the next launch may begin
    when what was before this one has ended."""
    ahead = min(finish - begin, ring.stages)
    for i in range(ahead):
        load_weights(ring, i, (begin + i) % p.steps, (begin + i) // p.steps, p)
    zl.grid_wait()
    if LATE:
        zl.grid_launch_dependents()
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
def gather_parts(totals, tile, blocks, late, last, thread, p):
    """Leave this block's part of a tile, a thread's sums by blocks of its warpgroup's rows; true in the block that comes
    last, which then has the sum of all parts in their order. late: 1 if this part is not the block's first piece of work
    (a block has at most one part of each kind)."""
    first, end = blocks
    threads = p.WG * 128
    size = len(totals) * (p.BT // 8) * threads
    mine = p.partial + (zl.i64(zl.block_index(0) * 2 + late) * size + thread) * 4
    # Counted where the tile begins: only one of a block's tiles goes on in the next block.
    is_last = parts.leave_part(totals, mine, p.counters + first, end - first, last, thread, threads)
    if is_last:
        parts.clear_sums(totals)
        for block in range(first, end):
            place = zl.i64(block * 2 + (zl.i32(1) if block * p.share < tile * p.steps else 0))
            parts.add_part(totals, p.partial + (place * size + thread) * 4, threads, False)
    return is_last


@zl.inline
def store_sums(total, tile, warp, first_token, p):
    """A warp's 16 rows (gated: 8 columns of out) of tokens from first_token on, two sums of each row a token pair."""
    KIND, count = p.KIND, len(total) * 2
    last_token = p.tokens - 1
    lane = zl.lane_index()
    j = lane % 4
    g = lane // 4
    if p.GATED:
        col = tile * p.tile_cols + warp * 8
        gate_scale = p.w_scale[min(col + g, p.cols - 1) * p.per_row] if KIND == "e4m3" else 1.0
        up_scale = p.w_scale[(p.cols + min(col + g, p.cols - 1)) * p.per_row] if KIND == "e4m3" else 1.0
        if KIND in TOKEN_SCALES:
            for i in zl.static(range(count // 8)):
                for e in zl.static(range(4)):
                    token_scale = p.a_scale[min(first_token + i * 8 + j * 2 + e % 2, last_token)]
                    total[i * 4 + e] *= token_scale * (gate_scale if e < 2 else up_scale)
        parts.put_gated(total, col, first_token, p, j, g, count, p.of_experts)
    elif p.pushes:
        p.push(total, tile, warp, first_token, p)
    else:
        for y in zl.static(range(2)):
            col = tile * p.tile_cols + warp * 16 + y * 8 + g
            if KIND in TOKEN_SCALES:
                row_scale = p.w_scale[min(col, p.cols - 1) * p.per_row] if KIND == "e4m3" else 1.0
                for i in zl.static(range(count // 8)):
                    for e in zl.static(range(2)):
                        token = min(first_token + i * 8 + j * 2 + e, last_token)
                        total[i * 4 + y * 2 + e] *= row_scale * p.a_scale[token]
            parts.put_column(total, y, col, first_token, p, j, g, count)


@zl.inline
def store_all(totals, tile, thread, p):
    for block, total in enumerate(totals):
        store_sums(total, tile, thread // 32 + block * (p.WG * 4), 0, p)


@zl.inline
def finish_tile(totals, tile, at, count, begin, tiles, last, thread, p):
    """`count` steps of a tile from `at` on are done: store them, or add them to what other blocks have. totals: a
    thread's sums for each of the blocks of 64 rows that its warpgroup has, p.WG * 64 apart."""
    if count == p.steps:
        store_all(totals, tile, thread, p)
    else:
        late = zl.i32(1) if at > begin else 0
        first = tile * p.steps // p.share
        end = ((tile + 1) * p.steps - 1) // p.share + 1
        if not is_integer(p.KIND):
            add_slices(totals, tile, (first, end), tiles * p.steps, thread, p, store_sums, store_all)
        elif end - first > 2:
            add_counted(totals, tile, (first, end), late, tiles * p.steps, thread, p, store_sums)
        else:
            complete = gather_parts(totals, tile, (first, end), late, last, thread, p)
            if complete:
                store_all(totals, tile, thread, p)


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
        scales = [p.w_scale[r // FP8_BLOCK * p.steps + step] for r in (row, second)]
        zl.wgmma_wait(0, acc)
        for i in zl.static(range(BT // 2)):
            total[i] = zl.fma(acc[i], scales[i % 4 // 2], total[i])
    else:
        zl.wgmma_wait(1)


@zl.inline
def multiply_tile(total, acc, tile, ring, state, first, end, warp, p):
    """total = the products of steps first .. end of a tile of bf16 or e4m3 weights. state: [slot, parity] of the ring,
    moved on."""
    base = zl.smem_desc(ring.memory)
    previous = zl.i32(-1)
    if p.KIND == "block":
        for i in zl.static(range(p.BT // 2)):
            total[i] = zl.f32(0)
    for step in range(first, end):
        zl.mbarrier_wait(ring.full + state[0], state[1])
        tokens_desc = base + zl.u64(state[0] * ring.stride // 16)
        multiply_rows(total, acc, step, first, tile, tokens_desc, warp, p)
        if previous >= 0:
            parts.release(ring.empty + previous, zl.lane_index())
        previous = state[0] + 0
        state[0] += 1
        if state[0] == ring.stages:
            state[0] = 0
            state[1] = state[1] ^ 1
    zl.wgmma_wait(0, total)
    parts.release(ring.empty + previous, zl.lane_index())


@zl.inline
def consume(ring, begin, finish, tiles, last, p):
    """The warpgroups that multiply."""
    BT, steps = p.BT, p.steps
    thread = zl.thread_index() - 128
    warp = thread // 32
    state = [zl.i32(0) for _ in zl.static(range(2))]
    total = [zl.f32(0) for _ in zl.static(range(BT // 2))]
    acc = [zl.f32(0) for _ in zl.static(range(BT // 2))] if p.KIND == "block" else total
    if p.integer:
        words = integers.lane_words(warp, p)
        scales = integers.group_scales(p)
    at = begin + 0
    while at < finish:
        tile = at // steps
        first = at % steps
        end = min(steps, first + (finish - at))
        if p.integer:
            integers.multiply_tile(total, words, scales, ring, state, tile, first, end, p)
        else:
            multiply_tile(total, acc, tile, ring, state, first, end, warp, p)
        if at == begin:
            zl.grid_wait()
        finish_tile((total,), tile, at, end - first, begin, tiles, last, thread, p)
        at += end - first


@zl.kernel
def gemm_skinny(p: SkinnyParams):
    multiply(p)


@zl.inline
def multiply(p):
    """The body of a kernel."""
    if zl.thread_index() == 32:  # while thread 0 makes the ring ready
        zl.tma_prefetch(p.w_map)
        zl.tma_prefetch(p.a_map)
    ring, last = parts.ring_of(stage_size(p.KIND, p.BT, p.WG), p.STAGES, p.WG * 4, True, p.pushes)
    tiles = (p.cols + (p.tile_cols - 1)) // p.tile_cols
    begin = zl.block_index(0) * p.share
    finish = min(begin + p.share, tiles * p.steps)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", parts.REGISTERS[p.WG][0])
        if zl.thread_index() == 0:
            produce(ring, begin, finish, p, load_weights, load_tokens, p.pushes)
    else:
        zl.set_max_registers("inc", parts.REGISTERS[p.WG][1])
        consume(ring, begin, finish, tiles, last, p)
