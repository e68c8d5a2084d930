"""Attention of few query tokens over paged keys and values: decoding, and verification of drafted tokens.

A work item is one chunk of the keys of one tile (attention_plan.py) for one key/value head. Every warp of the block walks its own
pages of the chunk through a ring in shared memory that the copy engine fills; it runs on through the work items of the block, so
that loads are in flight while results are merged. The query rows of a tile (tokens x heads of the group) are the n = 8 columns of
S^T = K Q^T and of O^T = V^T P^T, so nothing of a small group is wasted; softmax is online (Milakov and Gimelshein 2018), in base 2.
Warps are merged in shared memory, chunks through f32 records by the block that arrives last, both in fixed order.
"""

from zse.kernel import (
    Ptr,
    Variant,
    any_thread,
    atomic_add,
    bf16,
    bitcast,
    block_index,
    cast_ptr,
    convert,
    copy_async,
    copy_commit,
    copy_wait,
    e4m3,
    exp2,
    f16,
    f32,
    fence,
    fma,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    inline,
    kernel,
    lane_index,
    ldmatrix,
    load,
    make_vector,
    mma_bf16,
    mma_f16,
    named_barrier,
    num_blocks,
    prmt,
    shared_array,
    shuffle,
    shuffle_xor,
    static,
    store,
    tanh,
    target,
    thread_index,
    u8,
    u16,
    u32,
    unroll,
    warp_barrier,
    warp_index,
)
from zse.kernels.gpu.attention_plan import HEAD_DIMS, HEADER, PAGE, TASK, decode_columns, divide

LOG2E = 1.4426950408889634
MASKED = -3.0e38        # the score of a key that must not be seen
FLOOR = -1.0e30         # the running maximum before any key
WARPS = 4               # that compute
THREADS = 32 * (WARPS + 1)
STAGES = 3              # pages of a warp's ring
MERGE = 8               # chunks whose records are in flight while they are merged
KV_TYPES = {"bf16": bf16, "f16": f16, "e4m3": e4m3}
# Variables of the loading side: the work item, its next page, pages, end, first page, place in the page table, head, first key
# that this step writes; the ring's slot; whether grid_wait() was called; the same of the item after it, and that one's row.
WORK, NEXT, COUNT, END, FIRST, TABLE, HEAD, FRESH, SLOT, WAITED, IDS, IDS2, BEGIN2, END2, ROW2, FRESH2, BEGIN3, END3, ROW3, FRESH3 = range(20)


@inline
def pack_pair(a, b, F):
    """Two f32 as one u32 of two F, the first in the low half."""
    return bitcast(convert(make_vector(a, b), F), u32)


@inline
def read_entry(state, work, plan, by_heads, capacity):
    """What the loading side needs of a work item, into the places of the third: loads that nothing waits for yet, not even
    the number of items (behind the last there is whatever an earlier step left)."""
    item = plan + (HEADER + min(divide(work, by_heads), capacity - 1) * TASK)
    who = load(item, 4)
    keys = load(item + 4, 2)
    state[ROW3] = who[2] + 0
    state[FRESH3] = who[3] + 0
    state[BEGIN3] = keys[0] + 0
    state[END3] = keys[1] + 0


@inline
def page_ids(page_table, table, count, first, W):
    """Page numbers of this warp's pages first … first + 31, one a lane."""
    mine = first + lane_index()
    return page_table[table + (mine if mine < count else 0) * W]


@inline
def shift_entry(state, page_table, max_pages, work, total, W):
    """The third work item becomes the second, whose page numbers start to come."""
    state[BEGIN2] = state[BEGIN3] + 0
    state[END2] = state[END3] + 0
    state[ROW2] = state[ROW3] + 0
    state[FRESH2] = state[FRESH3] + 0
    if work < total:
        first = state[BEGIN2] // PAGE + warp_index()
        last = (state[END2] - 1) // PAGE
        state[IDS2] = page_ids(page_table, state[ROW2] * max_pages + min(first, last), (last - first + W) // W, 0, W)


@inline
def next_item(state, plan, page_table, max_pages, kv_heads, by_heads, capacity, total, W):
    """Moves the loading side to the second work item."""
    state[WORK] += num_blocks(0)
    state[HEAD] = state[WORK] - divide(state[WORK], by_heads) * kv_heads
    state[FIRST] = state[BEGIN2] // PAGE + warp_index()
    state[END] = state[END2] + 0
    state[COUNT] = ((state[END2] + PAGE - 1) // PAGE - state[FIRST] + W - 1) // W
    state[TABLE] = state[ROW2] * max_pages + state[FIRST]
    state[FRESH] = state[FRESH2] + 0
    state[IDS] = state[IDS2] + 0
    state[NEXT] = 0
    shift_entry(state, page_table, max_pages, state[WORK] + num_blocks(0), total, W)
    read_entry(state, state[WORK] + num_blocks(0) * 2, plan, by_heads, capacity)


@inline
def load_page(state, ring, keys, values, plan, page_table, max_pages, kv_heads, by_heads, capacity, total, fresh_before, page_heads,
              by_share, D, STRIDE, ITEM, STAGES, W):
    """Starts the copy of this warp's next page, if there is one, into the ring's next slot."""
    lane = lane_index()
    while state[NEXT] >= state[COUNT] and state[WORK] < total:
        next_item(state, plan, page_table, max_pages, kv_heads, by_heads, capacity, total, W)
    if state[WORK] < total:
        if state[NEXT] % 32 == 0 and state[NEXT] > 0:
            state[IDS] = page_ids(page_table, state[TABLE], state[COUNT], state[NEXT], W)
        page = state[FIRST] + state[NEXT] * W
        if state[WAITED] == 0 and (page + 1) * PAGE > state[FRESH] - fresh_before:
            grid_wait()
            state[WAITED] = 1
        valid = state[END] - page * PAGE
        number = shuffle(state[IDS], state[NEXT] % 32)
        at = (i64(number) * page_heads + divide(state[HEAD], by_share)) * (PAGE * D * ITEM)
        slot = ring + state[SLOT] * (2 * PAGE * STRIDE)
        pieces = D * ITEM // 16                     # of a row
        for part in static(range(2)):
            source = (values if part else keys) + (at + lane * 16)
            if 32 % pieces == 0:
                place = slot + (part * PAGE * STRIDE + lane // pieces * STRIDE + lane % pieces * 16)
                for e in static(range(PAGE * pieces // 32)):
                    row = lane // pieces + e * (32 // pieces)
                    copy_async(place + e * (32 // pieces) * STRIDE, source + e * 512, 16, i32(16) if row < valid else i32(0))
            else:
                for e in static(range(PAGE * pieces // 32)):
                    row = (e * 32 + lane) // pieces
                    copy_async(slot + ((part * PAGE + row) * STRIDE + (e * 32 + lane) % pieces * 16), source + e * 512, 16,
                               i32(16) if row < valid else i32(0))
        state[NEXT] += 1
        state[SLOT] = 0 if state[SLOT] == STAGES - 1 else state[SLOT] + 1
    copy_commit()


@inline
def two_f16(word):
    """Four e4m3 as two u32 of two f16."""
    halves = bitcast(convert(convert(bitcast(word, e4m3.x(4)), f32), f16), u32.x(2))
    return halves[0], halves[1]


@inline
def key_fragments(slot, kd, STRIDE, ITEM):
    """16 keys x 16 dimensions as an A operand. 8-bit keys: k is permuted, lane j has dimensions 4j … 4j + 3."""
    lane = lane_index()
    if ITEM == 2:
        words = ldmatrix(cast_ptr(slot + lane % 16 * STRIDE + lane // 16 * 16 + kd * 32, u16), 4)
        frags = [words[0], words[1], words[2], words[3]]
    else:
        words = ldmatrix(cast_ptr(slot + lane % 16 * STRIDE + kd * 16, u16), 2)
        low0, high0 = two_f16(words[0])
        low1, high1 = two_f16(words[1])
        frags = [low0, low1, high0, high1]
    return frags


@inline
def value_fragments(slot, d, STRIDE, ITEM):
    """16 dimensions x 16 keys as an A operand. 8-bit values: rows are permuted, g and g + 8 are dimensions 2g and 2g + 1."""
    lane = lane_index()
    if ITEM == 2:
        words = ldmatrix(cast_ptr(slot + (lane % 8 + lane // 16 * 8) * STRIDE + lane // 8 % 2 * 16 + d * 32, u16), 4, True)
        frags = [words[0], words[1], words[2], words[3]]
    else:
        words = ldmatrix(cast_ptr(slot + lane % 16 * STRIDE + d * 16, u16), 2, True)
        even0, odd0 = two_f16(prmt(words[0], words[0], 0x3120))
        even1, odd1 = two_f16(prmt(words[1], words[1], 0x3120))
        frags = [even0, odd0, even1, odd1]
    return frags


@inline
def read_item(item, work, plan, by_heads, capacity):
    """The task of a work item, into eight variables."""
    place = plan + (HEADER + min(divide(work, by_heads), capacity - 1) * TASK)
    who = load(place, 4)
    keys = load(place + 4, 4)
    for i in static(range(4)):
        item[i] = who[i] + 0
        item[4 + i] = keys[i] + 0


@inline
def load_queries(q, out, item, work, kv_heads, by_heads, group, by_group, width, D, NT, ITEM):
    """Starts the loads of the queries as B operands: column g of part nt is query row 8 nt + g of the tile (tokens x heads).
    Columns that are none repeat one: nobody looks at their results."""
    lane = lane_index()
    head = work - divide(work, by_heads) * kv_heads
    for nt in static(range(NT)):
        which = min(nt * 8 + lane // 4, item[1] * group - 1)
        which_token = divide(which, by_group)
        row = q + (i64(item[0] + which_token) * width + ((head - which_token) * group + which) * D)
        for kd in static(range(D // 16)):
            if ITEM == 2:
                for u in static(range(2)):
                    out[kd][nt][u] = bitcast(load(row + (kd * 16 + u * 8 + lane % 4 * 2), 2), u32)
            else:
                both = bitcast(load(row + (kd * 16 + lane % 4 * 4), 4), u32.x(2))
                for u in static(range(2)):
                    out[kd][nt][u] = both[u] + 0


@inline
def as_f16(words):
    """Pairs of bf16 become pairs of f16, in place: nested lists of u32."""
    for row in static(words):
        for part in static(row):
            for u in static(range(2)):
                part[u] = bitcast(convert(convert(bitcast(part[u], bf16.x(2)), f32), f16), u32)


@inline
def multiply(acc, a, b, F):
    if F is bf16:
        mma_bf16(acc, a, b)
    else:
        mma_f16(acc, a, b)


@inline
def attend_page(slot, key, end, position, limits, queries, acc, high, sums, factor, scale, softcap, window, D, NT, STRIDE, ITEM, F):
    """One page: scores, online softmax, and the product with the values. factor: of scores before exp2."""
    lane = lane_index()
    g = lane // 4
    scores = [[f32(0) for u in static(range(4))] for nt in static(range(NT))]
    more = [[f32(0) for u in static(range(4))] for nt in static(range(NT))]     # two chains of products instead of one
    for kd in static(range(D // 16)):
        a = key_fragments(slot, kd, STRIDE, ITEM)
        for nt in static(range(NT)):
            multiply(more[nt] if kd % 2 else scores[nt], a, queries[kd][nt], F)
    for nt in static(range(NT)):
        for u in static(range(4)):
            scores[nt][u] += more[nt][u]
    if softcap > 0.0:
        for nt in static(range(NT)):
            for u in static(range(4)):
                scores[nt][u] = tanh(scores[nt][u] * scale / softcap) * softcap
    if key + PAGE - 1 > position or window > 0:
        for nt in static(range(NT)):
            for u in static(range(4)):
                mine = key + g + u // 2 * 8
                limit = limits[nt][u % 2]
                hidden = mine > limit or mine >= end or (window > 0 and mine <= limit - window)
                scores[nt][u] = f32(MASKED) if hidden else scores[nt][u]
    weights = [[u32(0) for u in static(range(2))] for nt in static(range(NT))]
    for nt in static(range(NT)):
        shrink = [f32(0) for u in static(range(2))]
        for u in static(range(2)):
            peak = max(scores[nt][u], scores[nt][u + 2])
            for mask in static((4, 8, 16)):
                peak = max(peak, shuffle_xor(peak, mask))
            new = max(high[nt][u], peak * factor)
            shrink[u] = exp2(high[nt][u] - new)
            high[nt][u] = new
            scores[nt][u] = exp2(fma(scores[nt][u], factor, -new))
            scores[nt][u + 2] = exp2(fma(scores[nt][u + 2], factor, -new))
            sums[nt][u] = fma(sums[nt][u], shrink[u], scores[nt][u] + scores[nt][u + 2])
        for d in static(range(D // 16)):
            for u in static(range(4)):
                acc[d][nt][u] = acc[d][nt][u] * shrink[u % 2]
        for h in static(range(2)):
            # 8 keys x 8 queries from rows (accumulator) to columns (B operand).
            pair = pack_pair(scores[nt][2 * h], scores[nt][2 * h + 1], F)
            even = shuffle(pair, lane % 4 * 8 + g // 2)
            odd = shuffle(pair, lane % 4 * 8 + 4 + g // 2)
            weights[nt][h] = (even >> 16 | (odd & 0xFFFF0000)) if g % 2 == 1 else (even & 0xFFFF | odd << 16)
    for d in static(range(D // 16)):
        a = value_fragments(slot + PAGE * STRIDE, d, STRIDE, ITEM)
        for nt in static(range(NT)):
            multiply(acc[d][nt], a, weights[nt], F)


@inline
def finish(out, at, acc, total, value_scale):
    """Four finished elements."""
    scale = value_scale / total
    store(out + at, convert(make_vector(acc[0] * scale, acc[1] * scale, acc[2] * scale, acc[3] * scale), bf16))


@inline
def is_last(counters, which, chunks):
    """By one thread, after the block's records are written: whether the other chunks of the tile were there before. If so their
    records can be read, and the counter is 0 again."""
    fence()
    last = i32(0)
    if atomic_add(counters + which, 1) == chunks - 1:
        counters[which] = 0
        fence()
        last = i32(1)
    return last


@inline
def merge_records(work, plan, records, totals, out, kv_scale, page_heads, by_share, kv_heads, by_heads, group, by_group, width, first, threads, D, KV):
    """The chunks of one tile and head, merged in their order, MERGE at a time, by `threads` threads from number `first` on."""
    task = divide(work, by_heads)
    head = work - task * kv_heads
    item = plan + (HEADER + task * TASK)
    who = load(item, 2)
    keys = load(item + 4, 4)
    chunks = keys[3] % 65536
    heads = kv_heads * group
    value_scale = f32(1)
    if KV is e4m3:
        value_scale = kv_scale[page_heads + divide(head, by_share)]
    for e in unroll(range(first, who[1] * group * (D // 4), threads), 1):
        column = e // (D // 4)
        x = e % (D // 4) * 4
        column_token = divide(column, by_group)
        query_head = (head - column_token) * group + column
        record = i64(keys[2] + column_token * chunks) * heads + query_head
        acc = [f32(0) for _ in static(range(4))]
        total = f32(0)
        high = f32(FLOOR)
        for begin in unroll(range(0, chunks, MERGE), 1):
            pairs = [load(totals + (record + (begin + u if begin + u < chunks else 0) * heads) * 2, 2) for u in static(range(MERGE))]
            parts = [load(records + ((record + (begin + u if begin + u < chunks else 0) * heads) * D + x), 4) for u in static(range(MERGE))]
            peaks = [pairs[u][0] if begin + u < chunks else f32(FLOOR) for u in static(range(MERGE))]
            new = high + 0.0
            for u in static(range(MERGE)):
                new = max(new, peaks[u])
            shrink = exp2(high - new)
            high = new + 0.0
            total = total * shrink
            for i in static(range(4)):
                acc[i] = acc[i] * shrink
            for u in static(range(MERGE)):
                weight = exp2(peaks[u] - new) if begin + u < chunks else f32(0)
                total = fma(pairs[u][1], weight, total)
                for i in static(range(4)):
                    acc[i] = fma(parts[u][i], weight, acc[i])
        finish(out, i64(who[0] + column_token) * width + query_head * D + x, acc, total, value_scale)


@kernel
def attention_decode(q: Ptr[bf16, "const"], k_pages: Ptr[u8, "const"], v_pages: Ptr[u8, "const"], kv_scale: Ptr[f32, "const"],
                     page_table: Ptr[i32, "const"], plan: Ptr[i32, "const"], counters: Ptr[i32], records: Ptr[f32],
                     totals: Ptr[f32], out: Ptr[bf16], max_pages: i32, page_heads: i32, by_share: u32, kv_heads: i32, by_heads: u32,
                     group: i32, by_group: u32, capacity: i32, fresh_before: i32, scale: f32, window: i32,
                     softcap: f32, D: static, NT: static, KV: static, STAGES: static):
    """A persistent grid over the plan's tasks x kv heads. NT: parts of 8 query rows. kv_scale: null unless the pages are e4m3.
    kv_heads, group: where a group is larger than a tile its parts count as kv heads of their own; page_heads: of the pages.
    fresh_before: tokens before a tile that this step may write."""
    ITEM = 1 if KV is e4m3 else 2
    F = bf16 if KV is bf16 else f16
    STRIDE = D * ITEM + 16                  # bytes; the padding keeps ldmatrix free of bank conflicts
    SLOT_BYTES = 2 * PAGE * STRIDE          # keys, then values
    COLUMN = D + 4                          # f32 of a column while warps are merged
    W = target.threads // target.warp - 1   # one warp more than compute
    grid_launch_dependents()
    memory = shared_array(u8, W * STAGES * SLOT_BYTES, align=128)
    peaks = shared_array(f32, W * 16)
    places = shared_array(i32, W)
    arrived = shared_array(i32, 4)
    total = plan[0] * kv_heads
    width = kv_heads * group * D
    step = num_blocks(0)
    lane = lane_index()
    warp = warp_index()
    if warp == W:
        # Tells the other chunks' blocks that this block's record is there, and merges where it was the last: fences wait for
        # everything that a warp has under way, so not in the warps that load. The block's last item is left to them.
        grid_wait()
        for work in range(block_index(0), total - step, step):
            task = divide(work, by_heads)
            chunks = plan[HEADER + task * TASK + 7]
            if chunks % 65536 > 1:
                named_barrier(2, 32 * W + 32)
                last = i32(0)
                if lane == 0:
                    last = is_last(counters, (task - chunks // 65536) * kv_heads + work - task * kv_heads, chunks % 65536)
                if any_thread(last == 1):
                    merge_records(work, plan, records, totals, out, kv_scale, page_heads, by_share, kv_heads, by_heads, group, by_group,
                                  width, lane, 32, D, KV)
        return
    g = lane // 4
    ring = memory + warp * (STAGES * SLOT_BYTES)
    state = [i32(0) for _ in static(range(20))]
    state[WORK] = block_index(0) - step
    # Pages that earlier steps wrote are read before grid_wait(): the kernel before this one (qkv_post, attention_plan) lets this
    # one start only after its own grid_wait(), so the plan and the page table are there too.
    read_entry(state, block_index(0), plan, by_heads, capacity)
    shift_entry(state, page_table, max_pages, block_index(0), total, W)
    read_entry(state, block_index(0) + step, plan, by_heads, capacity)
    for _ in static(range(STAGES - 1)):
        load_page(state, ring, k_pages, v_pages, plan, page_table, max_pages, kv_heads, by_heads, capacity, total, fresh_before, page_heads,
                  by_share, D, STRIDE, ITEM, STAGES, W)
    if state[WAITED] == 0:
        grid_wait()
        state[WAITED] = 1
    slot = i32(0)
    coming = [i32(0) for _ in static(range(TASK))]
    read_item(coming, block_index(0), plan, by_heads, capacity)
    queries = [[[u32(0) for u in static(range(2))] for nt in static(range(NT))] for kd in static(range(D // 16))]
    if block_index(0) < total:
        load_queries(q, queries, coming, block_index(0), kv_heads, by_heads, group, by_group, width, D, NT, ITEM)
    for work in range(block_index(0), total, step):
        task = divide(work, by_heads)
        head = work - task * kv_heads
        token = coming[0] + 0
        count = coming[1] + 0
        position = coming[3] + 0
        end = coming[5] + 0
        first_record = coming[6] + 0
        chunks = coming[7] % 65536
        which_chunk = coming[7] // 65536
        first_page = coming[4] // PAGE + warp
        read_item(coming, work + step, plan, by_heads, capacity)
        pages = ((end + PAGE - 1) // PAGE - first_page + W - 1) // W
        limits = [[position + divide(min(nt * 8 + lane % 4 * 2 + u, count * group - 1), by_group) for u in static(range(2))]
                  for nt in static(range(NT))]
        key_scale = f32(1)
        value_scale = f32(1)
        if KV is e4m3:
            key_scale = kv_scale[divide(head, by_share)]
            value_scale = kv_scale[page_heads + divide(head, by_share)]
        score_scale = scale * key_scale
        factor = f32(LOG2E) if softcap > 0.0 else score_scale * LOG2E
        if F is not bf16:
            as_f16(queries)
        acc = [[[f32(0) for u in static(range(4))] for nt in static(range(NT))] for d in static(range(D // 16))]
        high = [[f32(FLOOR) for u in static(range(2))] for nt in static(range(NT))]
        sums = [[f32(0) for u in static(range(2))] for nt in static(range(NT))]
        for i in unroll(range(pages), 1):
            copy_wait(STAGES - 2)
            warp_barrier()                      # the page is there for all lanes, and all have read the one before
            load_page(state, ring, k_pages, v_pages, plan, page_table, max_pages, kv_heads, by_heads, capacity, total, fresh_before,
                      page_heads, by_share, D, STRIDE, ITEM, STAGES, W)
            attend_page(ring + slot * SLOT_BYTES, (first_page + i * W) * PAGE, end, position, limits, queries, acc, high, sums,
                        factor, score_scale, softcap, window, D, NT, STRIDE, ITEM, F)
            slot = 0 if slot == STAGES - 1 else slot + 1
        if work + step < total:
            load_queries(q, queries, coming, work + step, kv_heads, by_heads, group, by_group, width, D, NT, ITEM)
        for nt in static(range(NT)):
            for u in static(range(2)):
                for mask in static((4, 8, 16)):
                    sums[nt][u] += shuffle_xor(sums[nt][u], mask)
        # The slot that was read last stays free until this warp's next load: it takes the warp's sums.
        free = (STAGES - 1 if slot == 0 else slot - 1) * SLOT_BYTES
        mine = cast_ptr(ring + free, f32)
        warp_barrier()
        for nt in static(range(NT)):
            if nt > 0:
                named_barrier(1, 32 * W)        # the part before was read
            for u in static(range(2)):
                column = lane % 4 * 2 + u
                for d in static(range(D // 16)):
                    low = d * 16 + (g if ITEM == 2 else 2 * g)
                    mine[column * COLUMN + low] = acc[d][nt][u]
                    mine[column * COLUMN + low + (8 if ITEM == 2 else 1)] = acc[d][nt][u + 2]
                if g == 0:
                    peaks[(warp * 8 + column) * 2] = high[nt][u]
                    peaks[(warp * 8 + column) * 2 + 1] = sums[nt][u]
            if lane == 0:
                places[warp] = warp * (STAGES * SLOT_BYTES) + free
            named_barrier(1, 32 * W)
            for e in unroll(range(thread_index(), min(count * group - nt * 8, 8) * (D // 4), 32 * W), 1):
                column = e // (D // 4)
                x = e % (D // 4) * 4
                peak = f32(FLOOR)
                for w in static(range(W)):
                    peak = max(peak, peaks[(w * 8 + column) * 2])
                sum_ = f32(0)
                merged = [f32(0) for _ in static(range(4))]
                for w in static(range(W)):
                    weight = exp2(peaks[(w * 8 + column) * 2] - peak)
                    sum_ = fma(peaks[(w * 8 + column) * 2 + 1], weight, sum_)
                    part = load(cast_ptr(memory + places[w], f32) + (column * COLUMN + x), 4)
                    for i in static(range(4)):
                        merged[i] = fma(part[i], weight, merged[i])
                which = nt * 8 + column
                which_token = divide(which, by_group)
                query_head = (head - which_token) * group + which
                if chunks == 1:
                    finish(out, i64(token + which_token) * width + query_head * D + x, merged, sum_, value_scale)
                else:
                    record = i64(first_record + which_token * chunks + which_chunk) * (kv_heads * group) + query_head
                    store(records + (record * D + x), make_vector(merged[0], merged[1], merged[2], merged[3]))
                    if x == 0:
                        store(totals + record * 2, make_vector(peak, sum_))
        if work + step < total:
            if chunks > 1:
                named_barrier(2, 32 * W + 32)       # with the warp that merges records
            else:
                named_barrier(1, 32 * W)
        else:
            if chunks > 1:
                named_barrier(1, 32 * W)
                if thread_index() == 0:
                    arrived[0] = is_last(counters, (task - which_chunk) * kv_heads + head, chunks)
                named_barrier(1, 32 * W)
                if arrived[0] == 1:
                    merge_records(work, plan, records, totals, out, kv_scale, page_heads, by_share, kv_heads, by_heads, group, by_group,
                                  width, thread_index(), 32 * W, D, KV)


def decode_symbol(kv: str, head_dim: int, parts: int) -> str:
    return f"attention_decode_{kv}_d{head_dim}_n{parts}"


def decode_blocks(head_dim: int) -> int:
    """Blocks of a multiprocessor: rings of 16-bit pages fill its shared memory."""
    return 1 if head_dim > 128 else 2


def decode_rings(target, stride: int, head_dim: int) -> tuple[int, int]:
    """(warps that compute, pages of a warp's ring): what a block's shared memory holds, beside 1 KiB of small arrays. The warps'
    columns of f32 take the place of the rings when they are merged."""
    for warps, stages in ((WARPS, STAGES), (WARPS, 2), (2, STAGES), (2, 2), (1, STAGES), (1, 2)):
        if warps * max(stages * 2 * PAGE * stride, 16 * (head_dim + 4) * 4) + 1024 <= target.shared_limit:
            return warps, stages
    raise ValueError(f"{target.name}: {target.shared_limit} bytes of shared memory hold no two pages of {2 * PAGE * stride} bytes")


def decode_variants(target) -> list[Variant]:
    """head_dim x dtype of the pages x parts of 8 query rows."""
    if not target.has("mma_sync"):
        return []
    made = []
    for name, dtype in KV_TYPES.items():
        for dim in HEAD_DIMS:
            warps, stages = decode_rings(target, dim * (1 if name == "e4m3" else 2) + 16, dim)
            made += [Variant(decode_symbol(name, dim, parts), attention_decode, {"D": dim, "NT": parts, "KV": dtype, "STAGES": stages},
                             threads=32 * (warps + 1), min_blocks=decode_blocks(dim))
                     for parts in range(1, decode_columns(dim) // 8 + 1)]
    return made
