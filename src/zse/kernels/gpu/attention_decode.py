"""Attention of few query tokens over paged keys and values: decoding, and verification of drafted tokens.

A work item is a task (attention_plan.py) of one key/value head: a tile's keys, or a part of them. Every warp of the
block walks its own pages through a ring in shared memory that cp.async fills; loading runs on through the work items of
the block, so that pages are on their way while results are merged. The query rows of a tile (tokens x heads of the
group) are the n = 8 columns of S^T = K Q^T and of O^T = V^T P^T, so nothing of a small group is wasted; softmax is
online (Milakov and Gimelshein 2018), in base 2. After every chunk the warps' sums are merged in shared memory and
folded into the segment's, these into the result's, in order; what a task leaves of a tile that is not whole is a
record, and the block that comes last folds the records in the same order.

Heads of 512 have two warps for a page, each with half of the dimensions in its ring and its registers: they give each
other their parts of the scores, and then know the same weights. (128 threads keep 8 x 512 sums of a segment and of the
result: 30 registers of these, which are touched once a chunk, spill.)"""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu import attention_heads as heads
from zse.kernels.gpu import attention_parts as operands
from zse.kernels.gpu.attention_merge import clear, is_last, leave_results, leave_sums, merge_records, merge_warps
from zse.kernels.gpu.attention_pages import NUM_VARIABLES, first_column, load_page, read_item, start_loading
from zse.kernels.gpu.attention_plan import CHUNK, SEGMENT, TASK, decode_columns, divide, head_dims, warps_of_head
from zse.kernels.gpu.kv8 import MINUS_BIAS, UNITS, in_f16, is_packed, item_nbytes, scales_nbytes, scales_of
from zse.kernels.kv_pages import BLOCK, SCALE_BYTES

RING_BYTES = 204 << 10  # of a block's shared memory, for the rings
SMALL_BYTES = 2 << 10  # at most, of the other arrays
EXCHANGE_BYTES = 4 << 10  # at most, of scores that warps give each other


class TasksParams(zl.Record):
    """The parameters of all decode kernels. NT: parts of 8 query rows. kv_heads, group: where a group is larger than a
    tile its parts count as kv heads of their own; page_heads: of the pages. fresh_before: tokens before a tile that
    this step may write."""

    k_pages: zl.Ptr[zl.u8, "const"]
    v_pages: zl.Ptr[zl.u8, "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    plan: zl.Ptr[zl.i32, "const"]
    counters: zl.Ptr[zl.i32]
    records: zl.Ptr[zl.f32]
    totals: zl.Ptr[zl.f32]
    out: zl.Ptr[zl.bf16]
    max_pages: zl.i32
    page_heads: zl.i32
    by_share: zl.u32
    kv_heads: zl.i32
    by_heads: zl.u32
    group: zl.i32
    by_group: zl.u32
    tasks_room: zl.i32
    fresh_before: zl.i32
    scale: zl.f32
    window: zl.i32
    softcap: zl.f32
    sinks: zl.Ptr[zl.f32, "const"]
    has_sinks: zl.i32
    D: zl.static
    NT: zl.static
    KV: zl.static
    STAGES: zl.static

    @property
    def item(self) -> int:
        """Bytes of a stored number."""
        return item_nbytes(self.KV)

    @property
    def together(self) -> int:
        """Warps that share a page."""
        return warps_of_head(self.D)

    @property
    def columns(self) -> int:
        """Dimensions of a warp."""
        return self.D // self.together

    @property
    def stride(self) -> int:
        """Bytes of a row in the ring; the padding keeps ldmatrix free of bank conflicts."""
        return self.columns * self.item + 16

    @property
    def slot_bytes(self) -> int:
        """Keys, then values, then their scales."""
        return 2 * BLOCK * self.stride + scales_nbytes(self.item)

    @property
    def F(self):
        """What is multiplied."""
        return zl.bf16 if self.KV is zl.bf16 else zl.f16


class DecodeParams(TasksParams):
    """The parameters of attention_decode."""

    q: zl.Ptr[zl.bf16, "const"]


class HeadsParams(TasksParams):
    """The parameters of attention_heads: what it makes queries, keys and values of, as qkv_post takes it, and the pages that
    it writes. table f32 [tokens, D]: all of a head is turned. keeps_records: of a tile in parts, which the next launch
    merges. NORM: "plain" or "norm"."""

    k_pages: zl.Ptr[zl.u8]
    v_pages: zl.Ptr[zl.u8]
    q: zl.Ptr[zl.f32, "const"]
    k: zl.Ptr[zl.f32, "const"]
    v: zl.Ptr[zl.f32, "const"]
    q_stride: zl.i32
    k_stride: zl.i32
    v_stride: zl.i32
    q_norm: zl.Ptr[zl.f32, "const"]
    k_norm: zl.Ptr[zl.f32, "const"]
    table: zl.Ptr[zl.f32, "const"]
    eps: zl.f32
    keeps_records: zl.i32
    NORM: zl.static


class DecodeBlock(TasksParams):
    """What a block works on, and where. q: the queries, or None: heads is a HeadsParams."""

    q: Any
    heads: Any
    made: Any  # heads that the block has made
    total: Any  # work items
    width: Any  # of a row of q and out
    factor: Any  # of scores before exp2
    W: int  # warps
    mine: int  # groups of four results of a part that a thread keeps
    memory: Any  # the rings of the warps
    ring: Any  # this warp's
    peaks: Any
    places: Any
    exchange: Any  # of warps that share pages: parts of scores, of this page and of the one before

    @property
    def walkers(self) -> int:
        """Warps, or pairs of them, that walk through pages."""
        return self.W // self.together


class Sums(zl.Record):
    """A warp's part of a chunk: unnormalised values by dimension, and what is to be added to those of a column (of i8:
    minus the weights times the BIAS of values); maxima and sums of the columns."""

    acc: Any
    bias: Any
    high: Any
    sums: Any


@zl.inline
def load_queries(out, item, work, p):
    """Starts the loads of the queries as B operands: column g of part nt is query row 8 nt + g of the tile (tokens x
    heads). Columns that are none repeat one: nobody looks at their results."""
    lane, D, group = zl.lane_index(), p.D, p.group
    head = work - divide(work, p.by_heads) * p.kv_heads
    for nt in zl.static(range(p.NT)):
        which = min(nt * 8 + lane // 4, item[1] * group - 1)
        which_token = divide(which, p.by_group)
        row = first_column(p.q, p.columns, p) + (
            zl.i64(item[0] + which_token) * p.width + ((head - which_token) * group + which) * D
        )
        for kd in zl.static(range(p.columns // 16)):
            if p.item == 2:
                for u in zl.static(range(2)):
                    out[kd][nt][u] = zl.bitcast(zl.load(row + (kd * 16 + u * 8 + lane % 4 * 2), 2), zl.u32)
            else:
                both = zl.bitcast(zl.load(row + (kd * 16 + lane % 4 * 4), 4), zl.u32.x(2))
                for u in zl.static(range(2)):
                    out[kd][nt][u] = both[u] + 0


@zl.inline
def add_parts(scores, page, p):
    """Scores of the warp's dimensions become those of all: of a page whose number is odd in one place, else in another,
    so that no warp overwrites what the other still reads."""
    lane, warp, NT = zl.lane_index(), zl.warp_index(), p.NT
    odd = page // p.walkers % 2
    mine = p.exchange + ((odd * p.W + warp) * 32 + lane) * (4 * NT)
    its = p.exchange + ((odd * p.W + (warp ^ 1)) * 32 + lane) * (4 * NT)
    for nt in zl.static(range(NT)):
        zl.store(mine + nt * 4, zl.make_vector(scores[nt][0], scores[nt][1], scores[nt][2], scores[nt][3]))
    zl.named_barrier(1 + warp // 2, 64)
    for nt in zl.static(range(NT)):
        other = zl.load(its + nt * 4, 4)
        for u in zl.static(range(4)):
            scores[nt][u] += other[u]


@zl.inline
def attend_page(slot, key, item, limits, queries, bias, found, p):
    """One page: scores, online softmax, and the product with the values. bias: what scores begin with."""
    NT, STRIDE, KV, F = p.NT, p.stride, p.KV, p.F
    acc, high, sums = found.acc, found.high, found.sums
    lane = zl.lane_index()
    g = lane // 4
    scores = [
        [bias[nt][u] + 0.0 if KV is zl.i8 else zl.f32(0) for u in zl.static(range(4))] for nt in zl.static(range(NT))
    ]
    # Two chains of products instead of one.
    more = [[zl.f32(0) for u in zl.static(range(4))] for nt in zl.static(range(NT))]
    for kd in zl.static(range(p.columns // 16)):
        a = operands.key_fragments(slot, kd, STRIDE, KV)
        for nt in zl.static(range(NT)):
            operands.multiply(more[nt] if kd % 2 else scores[nt], a, queries[kd][nt], F)
    for nt in zl.static(range(NT)):
        for u in zl.static(range(4)):
            scores[nt][u] += more[nt][u]
    if p.together > 1:
        add_parts(scores, key // BLOCK, p)
    if is_packed(KV):
        key_scales = scales_of(slot + 2 * BLOCK * STRIDE, in_f16(KV, zl.target))
        value_scales = scales_of(slot + (2 * BLOCK * STRIDE + SCALE_BYTES), UNITS[KV.name])
        for nt in zl.static(range(NT)):
            for u in zl.static(range(4)):
                scores[nt][u] = scores[nt][u] * key_scales[u // 2]
    if p.softcap > 0.0:
        for nt in zl.static(range(NT)):
            for u in zl.static(range(4)):
                scores[nt][u] = zl.tanh(scores[nt][u] * p.scale / p.softcap) * p.softcap
    if key + BLOCK - 1 > item[3] or p.window > 0:
        for nt in zl.static(range(NT)):
            for u in zl.static(range(4)):
                mine = key + g + u // 2 * 8
                limit = limits[nt][u % 2]
                hidden = mine > limit or mine >= item[5] or (p.window > 0 and mine <= limit - p.window)
                scores[nt][u] = zl.f32(operands.MASKED) if hidden else scores[nt][u]
    weights = [[zl.u32(0) for u in zl.static(range(2))] for nt in zl.static(range(NT))]
    for nt in zl.static(range(NT)):
        shrink = [zl.f32(0) for u in zl.static(range(2))]
        for u in zl.static(range(2)):
            peak = max(scores[nt][u], scores[nt][u + 2])
            for lanes in zl.static((4, 8, 16)):
                peak = max(peak, zl.shuffle_xor(peak, lanes))
            new = max(high[nt][u], peak * p.factor)
            shrink[u] = zl.exp2(high[nt][u] - new)
            high[nt][u] = new
            scores[nt][u] = zl.exp2(zl.fma(scores[nt][u], p.factor, -new))
            scores[nt][u + 2] = zl.exp2(zl.fma(scores[nt][u + 2], p.factor, -new))
            sums[nt][u] = zl.fma(sums[nt][u], shrink[u], scores[nt][u] + scores[nt][u + 2])
        for d in zl.static(range(p.columns // 16)):
            for u in zl.static(range(4)):
                acc[d][nt][u] = acc[d][nt][u] * shrink[u % 2]
        if KV is zl.i8:
            for u in zl.static(range(4)):
                found.bias[nt][u] = found.bias[nt][u] * shrink[u % 2]
        for h in zl.static(range(2)):
            # 8 keys x 8 queries from rows (accumulator) to columns (B operand).
            if is_packed(KV):
                pair = operands.pack_pair(
                    scores[nt][2 * h] * value_scales[h], scores[nt][2 * h + 1] * value_scales[h], F
                )
            else:
                pair = operands.pack_pair(scores[nt][2 * h], scores[nt][2 * h + 1], F)
            even = zl.shuffle(pair, lane % 4 * 8 + g // 2)
            odd = zl.shuffle(pair, lane % 4 * 8 + 4 + g // 2)
            weights[nt][h] = (even >> 16 | (odd & 0xFFFF0000)) if g % 2 == 1 else (even & 0xFFFF | odd << 16)
    if KV is zl.i8:
        for nt in zl.static(range(NT)):
            operands.multiply(found.bias[nt], [zl.u32(MINUS_BIAS)] * 4, weights[nt], F)
    for d in zl.static(range(p.columns // 16)):
        a = operands.value_fragments(slot + BLOCK * STRIDE, d, STRIDE, KV)
        for nt in zl.static(range(NT)):
            operands.multiply(acc[d][nt], a, weights[nt], F)


@zl.inline
def attend_task(state, slot, item, queries, coming, work, into, head, fresh, p):
    """The chunks of a task. into: (segment, result); slot: [of the ring]; coming, work: the next task, whose queries
    are loaded at the end; fresh: of heads.make(). Columns are the task's query rows."""
    NT, W, parts = p.NT, p.walkers, p.columns // 16
    lane, warp = zl.lane_index(), zl.warp_index()
    columns = item[1] * p.group
    begin, end = item[4], item[5]
    limits = [
        [item[3] + divide(min(nt * 8 + lane % 4 * 2 + u, columns - 1), p.by_group) for u in zl.static(range(2))]
        for nt in zl.static(range(NT))
    ]
    BIASED = NT if p.KV is zl.i8 else 0
    bias = [[zl.f32(0) for u in zl.static(range(4))] for nt in zl.static(range(BIASED))]
    if p.KV is zl.i8:
        for kd in zl.static(range(parts)):
            for nt in zl.static(range(NT)):
                operands.multiply(bias[nt], [zl.u32(MINUS_BIAS)] * 4, queries[kd][nt], p.F)
    for chunk in zl.unroll(range(begin, end, CHUNK), 1):
        stop = min(chunk + CHUNK, end)
        acc = [
            [[zl.f32(0) for u in zl.static(range(4))] for nt in zl.static(range(NT))] for d in zl.static(range(parts))
        ]
        high = [[zl.f32(operands.FLOOR) for u in zl.static(range(2))] for nt in zl.static(range(NT))]
        sums = [[zl.f32(0) for u in zl.static(range(2))] for nt in zl.static(range(NT))]
        less = [[zl.f32(0) for u in zl.static(range(4))] for nt in zl.static(range(BIASED))]
        found = Sums(acc, less, high, sums)
        for page in zl.unroll(
            range(chunk // BLOCK + (warp if p.together == 1 else warp // p.together), (stop + BLOCK - 1) // BLOCK, W), 1
        ):
            zl.copy_wait(p.STAGES - 2)
            zl.warp_barrier()  # the page is there for all lanes, and all have read the one before
            load_page(state, p)
            if p.heads is not None:
                if page == item[3] // BLOCK:
                    heads.add_fresh(p.ring + slot[0] * p.slot_bytes, fresh, head, item, p)
            attend_page(p.ring + slot[0] * p.slot_bytes, page * BLOCK, item, limits, queries, bias, found, p)
            slot[0] = 0 if slot[0] == p.STAGES - 1 else slot[0] + 1
        if p.heads is None and stop == end and work < p.total:
            load_queries(queries, coming, work, p)
        for nt in zl.static(range(NT)):
            for u in zl.static(range(2)):
                for lanes in zl.static((4, 8, 16)):
                    sums[nt][u] += zl.shuffle_xor(sums[nt][u], lanes)
        # The slot that was read last stays free until this warp's next load: it takes the warp's sums.
        free = (p.STAGES - 1 if slot[0] == 0 else slot[0] - 1) * p.slot_bytes
        closes = stop == end or (stop - begin) % SEGMENT == 0
        zl.warp_barrier()
        for nt in zl.static(range(NT)):
            leave_sums(zl.cast_ptr(p.ring + free, zl.f32), found, nt, p)
            if lane == 0:
                p.places[warp] = warp * (p.STAGES * p.slot_bytes) + free
            zl.barrier()
            merge_warps(*into, columns, closes, nt, p)
            zl.barrier()  # the slots may be filled again


@zl.inline
def block_of(p, makes_heads=False):
    """The DecodeBlock, with its shared memory."""
    W = zl.target.threads // zl.target.warp
    memory = zl.shared_array(zl.u8, W * p.STAGES * p.slot_bytes, align=128)
    peaks = zl.shared_array(zl.f32, W * 16)
    places = zl.shared_array(zl.i32, W)
    exchange = None
    if p.together > 1:
        exchange = zl.shared_array(zl.f32, 2 * W * 32 * 4 * p.NT, align=16)
    total = p.plan[0] * p.kv_heads
    width = p.kv_heads * p.group * p.D
    ring = memory + zl.warp_index() * (p.STAGES * p.slot_bytes)
    factor = zl.f32(operands.LOG2E) if p.softcap > 0.0 else p.scale * operands.LOG2E
    mine = (8 * (p.D // 4) + zl.target.threads - 1) // zl.target.threads
    made = None
    if makes_heads:
        made = zl.shared_array(zl.bf16, heads.made_numbers(p.D), align=16)
    return DecodeBlock(
        *[getattr(p, name) for name in TasksParams._fields],
        None if makes_heads else p.q,
        p if makes_heads else None,
        made,
        total,
        width,
        factor,
        W,
        mine,
        memory,
        ring,
        peaks,
        places,
        exchange,
    )


@zl.kernel
def attention_decode(params: DecodeParams):
    """A persistent grid over the plan's tasks x kv heads."""
    zl.grid_launch_dependents()
    attend_tasks(block_of(params))


@zl.kernel
def attention_heads(params: HeadsParams):
    """The same of steps of a token each row, with the norms and the rotation of its heads and the write of its keys and
    values."""
    zl.grid_launch_dependents()
    attend_tasks(block_of(params, True))


@zl.inline
def attend_tasks(p):
    """The body of a kernel."""
    arrived = zl.shared_array(zl.i32, 4)
    begin, step = zl.block_index(0), zl.num_blocks(0)
    state = [zl.i32(0) for _ in zl.static(range(NUM_VARIABLES))]
    start_loading(state, begin, step, p)
    slot = [zl.i32(0) for _ in zl.static(range(1))]
    item = [zl.i32(0) for _ in zl.static(range(TASK))]
    coming = [zl.i32(0) for _ in zl.static(range(TASK))]
    read_item(coming, begin, p)
    queries = [
        [[zl.u32(0) for u in zl.static(range(2))] for nt in zl.static(range(p.NT))]
        for kd in zl.static(range(p.columns // 16))
    ]
    if p.heads is None and begin < p.total:
        load_queries(queries, coming, begin, p)
    for work in range(begin, p.total, step):
        head = work - divide(work, p.by_heads) * p.kv_heads
        for i in zl.static(range(TASK)):
            item[i] = coming[i] + 0
        read_item(coming, work + step, p)
        fresh = None
        if p.heads is not None:
            fresh = heads.make(item, head, p)
            heads.load_queries(queries, p)
        if p.F is not zl.bf16:
            operands.as_f16(queries)
        segment, result = [
            [
                [[zl.f32(0) for _ in zl.static(range(6))] for m in zl.static(range(p.mine))]
                for nt in zl.static(range(p.NT))
            ]
            for each in zl.static(range(2))
        ]
        for nt in zl.static(range(p.NT)):
            for m in zl.static(range(p.mine)):
                clear(segment[nt][m])
                clear(result[nt][m])
        attend_task(state, slot, item, queries, coming, work + step, (segment, result), head, fresh, p)
        leave_results(result, item, head, p)
        parts = item[7] & 4095
        if p.heads is not None:
            parts = parts if p.heads.keeps_records == 0 else zl.i32(1)
        if parts > 1:
            zl.barrier()
            if zl.thread_index() == 0:
                arrived[0] = is_last(p.counters + (item[6] * p.kv_heads + head), parts)
            zl.barrier()
            if arrived[0] == 1:
                merge_records(head, item, p)


def decode_symbol(kv: str, head_dim: int, parts: int) -> str:
    return f"attention_decode_{kv}_d{head_dim}_n{parts}"


def decode_shape(head_dim: int, item_bytes: int, shared_limit: int, more: int = 0) -> tuple[int, int]:
    """(warps, slots of a warp's ring): what fills the shared memory of a multiprocessor; three to six slots, two of
    heads that warps share. more: bytes of other arrays."""
    together = warps_of_head(head_dim)
    slot = 2 * BLOCK * (head_dim // together * item_bytes + 16) + scales_nbytes(item_bytes)
    small, least = (SMALL_BYTES, 3) if together == 1 else (SMALL_BYTES + EXCHANGE_BYTES, 2)
    room = min(RING_BYTES, shared_limit - small - more)
    warps = next((warps for warps in (8, 4) if least * warps * slot <= room), 2)
    return warps, min(6, room // (warps * slot))


def decode_variants(target) -> list[zl.Variant]:
    """head_dim x dtype of the pages x parts of 8 query rows."""
    if not target.has("mma_sync"):
        return []
    variants = []
    for name, dtype in operands.KV_TYPES.items():
        for dim in head_dims(name):
            warps, stages = decode_shape(dim, item_nbytes(dtype), target.shared_limit)
            variants += [
                zl.Variant(
                    decode_symbol(name, dim, parts),
                    attention_decode,
                    {"D": dim, "NT": parts, "KV": dtype, "STAGES": stages},
                    threads=32 * warps,
                )
                for parts in range(1, decode_columns(dim) // 8 + 1)
            ]
    return variants


def heads_variants(target) -> list[zl.Variant]:
    """head_dim x norm."""
    variants: list[zl.Variant] = []
    for dim in heads.HEAD_DIMS if target.has("mma_sync") else ():
        warps, stages = decode_shape(dim, 2, target.shared_limit, 2 * heads.made_numbers(dim))
        statics = {"D": dim, "NT": 1, "KV": zl.bf16, "STAGES": stages}
        variants += [
            zl.Variant(heads.symbol_of(dim, norm), attention_heads, statics | {"NORM": norm}, threads=32 * warps)
            for norm in heads.NORMS
        ]
    return variants
