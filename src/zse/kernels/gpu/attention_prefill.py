"""Attention of many query tokens over paged keys and values: prompts, whole or in chunks, on Hopper's matrix units.

A tile is up to 128 query rows (neighbouring tokens of one sequence x query heads of one key/value head), so keys and
values are read once for a whole group. One warp brings keys and values page by page (TMA, one box a page and 128 bytes
of its rows) into a ring; two warpgroups of 64 rows each compute. As in FlashAttention 3 (Shah et al. 2024) the scores
of the next block of keys are computed beside the product of the last one's weights with the values, and softmax
(online, base 2) runs under the latter.
"""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.gpu.attention_parts import FLOOR, LOG2E, MASKED, pack_pair, with_sink
from zse.kernels.gpu.attention_plan import HEAD_DIMS, HEADER, PREFILL_ROWS, TASK, TILE, divide
from zse.kernels.kv_pages import BLOCK

GROUPS = 2  # warpgroups that compute
THREADS = 128 * (GROUPS + 1)
STAGES = 2  # blocks of keys (and of values) in shared memory


@zl.inline
def work_of(turn):
    """This block's item of the turn that starts at item `turn`; items get shorter: every other turn runs backwards."""
    mine = zl.block_index(0)
    return turn + (mine if turn // zl.num_blocks(0) % 2 == 0 else zl.num_blocks(0) - 1 - mine)


@zl.inline
def product(acc, a, b, n, accumulate, transposed, F):
    """wgmma of the type F."""
    if F is zl.bf16:
        zl.wgmma_bf16(acc, a, b, n, accumulate, False, transposed)
    else:
        zl.wgmma_f16(acc, a, b, n, accumulate, False, transposed)


class PrefillParams(zl.Record):
    """What the prefill kernels have in common."""

    page_table: zl.Ptr[zl.i32, "const"]
    plan: zl.Ptr[zl.i32, "const"]
    out: zl.Ptr[zl.bf16]
    max_pages: zl.i32
    kv_heads: zl.i32
    by_heads: zl.u32
    group: zl.i32
    by_group: zl.u32
    tasks_room: zl.i32
    scale: zl.f32
    window: zl.i32
    softcap: zl.f32
    sinks: zl.Ptr[zl.f32, "const"]
    has_sinks: zl.i32
    sees: zl.Ptr[zl.i32, "const"]
    has_sees: zl.i32
    D: zl.static
    KV: zl.static


class TileBatch(PrefillParams):
    """The prefill tiles of a plan and the query rows that they name."""

    tiles: Any
    total: Any  # work items: tiles x kv heads
    width: Any  # of a row of q and out


@zl.inline
def batch_of(p):
    total = p.plan[1] * p.kv_heads
    tiles = p.plan + (HEADER + p.tasks_room * TASK)
    width = p.kv_heads * p.group * p.D
    return TileBatch(*vars(p).values(), tiles, total, width)


@zl.inline
def factor_of(p):
    """What scores are multiplied with before exp2."""
    return zl.f32(LOG2E) if p.softcap > 0.0 else p.scale * LOG2E


@zl.inline
def tile_at(work, batch):
    """(first token, rows, position of the first, last key that is seen, line of the page table, kv head) of a work
    item."""
    tile = zl.load(batch.tiles + divide(work, batch.by_heads) * TILE, 4)
    head = work - divide(work, batch.by_heads) * batch.kv_heads
    table = batch.page_table + zl.i64(tile[2]) * batch.max_pages
    return tile[0], tile[1] * batch.group, tile[3], last_key(tile, batch), table, head


@zl.inline
def last_key(tile, batch):
    """The last key that a tile's tokens see: the last token's, as later tokens see no less."""
    last = tile[3] + tile[1] - 1
    if batch.has_sees > 0:
        last = batch.sees[tile[0] + tile[1] - 1] + 0
    return last


@zl.inline
def sight_of(row, rows, token, position, batch):
    """What softmax() masks by: the last keys that a thread's rows `row` and `row` + 8 of a tile see, and where the rows
    stand."""
    own = own_keys(row, rows, position, batch)
    limits = [own[h] + 0 for h in zl.static(range(2))]
    if batch.has_sees > 0:
        for h in zl.static(range(2)):
            limits[h] = batch.sees[token + own[h] - position] + 0
    return limits, (row, rows, position)


@zl.inline
def own_keys(row, rows, position, batch):
    """The positions of rows `row` and `row` + 8."""
    return [position + divide(min(row + 8 * h, rows - 1), batch.by_group) for h in zl.static(range(2))]


@zl.inline
def query_place(row, token, head, batch):
    """Element of q and out where a tile's row begins."""
    its_token = divide(row, batch.by_group)
    return zl.i64(token + its_token) * batch.width + ((head - its_token) * batch.group + row) * batch.D


@zl.inline
def row_sum(sum):
    """Of the four lanes that share a row."""
    whole = sum
    for mask in zl.static((1, 2)):
        whole += zl.shuffle_xor(whole, mask)
    return whole


@zl.inline
def sum_with_sink(sum, high, row, head, batch):
    """Of a tile's row, with its query head's sink."""
    query_head = head * batch.group + (row - divide(row, batch.by_group) * batch.group)
    return with_sink(row_sum(sum), high, query_head, batch)


@zl.inline
def scores_of(scores, queries, keys, D, BN, SW, F):
    """Starts scores = Q K^T of this warpgroup's 64 rows."""
    zl.wgmma_fence(scores)
    for kd in zl.static(range(D // 16)):
        column = kd * 32 // SW
        inside = kd * 32 % SW
        product(
            scores,
            zl.smem_desc(queries + (column * PREFILL_ROWS * SW + inside), SW, 8 * SW),
            zl.smem_desc(keys + (column * BN * SW + inside), SW, 8 * SW),
            BN,
            kd > 0,
            False,
            F,
        )
    zl.wgmma_commit()


@zl.inline
def add_values(acc, weights, values, D, BN, SW, F):
    """Starts acc += P V."""
    zl.wgmma_fence(acc, *weights)
    for n in zl.static(range(BN // 16)):
        product(acc, weights[n], zl.smem_desc(values + n * 16 * SW, SW, 8 * SW, BN * SW), D, True, True, F)
    zl.wgmma_commit()


@zl.inline
def softmax(scores, sight, running, key, factor, batch, acc=()):
    """Scores become weights; sight: sight_of(), without the second where there are no windows; running: (maximum and sum of two rows a thread, factor of earlier sums). acc: what was
    summed before and shrinks at once, four numbers of the rows each."""
    BN = len(scores) * 2
    limits, where = sight
    high, sums, shrink = running
    j = zl.lane_index() % 4
    if batch.softcap > 0.0:
        for i in zl.static(range(BN // 2)):
            scores[i] = zl.tanh(scores[i] * batch.scale / batch.softcap) * batch.softcap
    if key + BN - 1 > limits[0] or batch.window > 0:
        # Computed here, as nothing is to stay in registers for it.
        first = [zl.i32(0) for h in zl.static(range(2))]
        if where is not None and batch.window > 0:
            own = own_keys(*where, batch)
            for h in zl.static(range(2)):
                first[h] = own[h] + 1 - batch.window
        for i in zl.static(range(BN // 2)):
            mine = key + i // 4 * 8 + j * 2 + i % 2
            is_seen = mine <= limits[i // 2 % 2] and mine >= first[i // 2 % 2]
            scores[i] = scores[i] if is_seen else zl.f32(MASKED)
    for h in zl.static(range(2)):
        peak = max(scores[2 * h], scores[2 * h + 1])
        for n in zl.static(range(1, BN // 8)):
            peak = max(peak, max(scores[n * 4 + 2 * h], scores[n * 4 + 2 * h + 1]))
        for lanes in zl.static((1, 2)):
            peak = max(peak, zl.shuffle_xor(peak, lanes))
        new = max(high[h], peak * factor)
        shrink[h] = zl.exp2(high[h] - new)
        high[h] = new
        total = zl.f32(0)
        for n in zl.static(range(BN // 8)):
            for u in zl.static(range(2)):
                scores[n * 4 + 2 * h + u] = zl.exp2(zl.fma(scores[n * 4 + 2 * h + u], factor, -new))
                total += scores[n * 4 + 2 * h + u]
        sums[h] = zl.fma(sums[h], shrink[h], total)
        for row in zl.static(acc):
            for u in zl.static(range(2)):
                row[2 * h + u] = row[2 * h + u] * shrink[h]


@zl.inline
def pack_weights(scores, weights, BN, F):
    """Accumulators of S as A operands of P V."""
    for n in zl.static(range(BN // 16)):
        for u in zl.static(range(4)):
            at = n * 8 + u // 2 * 4 + u % 2 * 2
            weights[n][u] = pack_pair(scores[at], scores[at + 1], F)


@zl.inline
def write_queries(q, place, token, head, rows, batch, SW):
    """This warpgroup's rows of Q into shared memory, swizzled; rows that are none become zeros. place: of its row 0."""
    thread = zl.thread_index() % 128
    first = zl.thread_index() // 128 * 64 - 64
    pieces = batch.D * 2 // 16
    for e in zl.unroll(range(thread, 64 * pieces, 128), 4):
        r = e // pieces
        x = e % pieces
        row = first + r
        which = row if row < rows else 0
        line = q + query_place(which, token, head, batch)
        words = zl.bitcast(zl.load(line + x * 8, 8), zl.u32.x(4))
        if batch.KV is zl.f16:
            words = zl.bitcast(zl.convert(zl.convert(zl.bitcast(words, zl.bf16.x(8)), zl.f32), zl.f16), zl.u32.x(4))
        if row >= rows:
            words = zl.u32.x(4)(0)
        # The pattern of the hardware: the 16-byte column is xored with the row (SW 128: rows mod 8; SW 64: rows // 2
        # mod 4).
        mixed = x % (SW // 16) ^ r % 8 // (128 // SW)
        zl.store(zl.cast_ptr(place + (x // (SW // 16) * (PREFILL_ROWS * SW) + r * SW + mixed * 16), zl.u32), words)


class BlockRing(zl.Record):
    """Blocks of keys, or of values, in shared memory, with the barriers of their stages."""

    memory: Any
    full: Any
    empty: Any


class KeyStages(NamedTuple):
    """Blocks of keys and of values in shared memory, with the barriers of their stages. late: softmax comes before the
    wait for the product with the values, as it is written; the compiler else puts the wait first, which is faster where
    nothing but the two computing warpgroups runs (6 % at 8k), and slower beside warps that convert (7 %)."""

    queries: Any
    keys: Any
    values: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    D: int
    BN: int  # keys of a block
    late: bool = False

    @property
    def block(self) -> int:
        """Bytes."""
        return self.BN * self.D * 2

    @property
    def swizzle(self) -> int:
        return prefill_swizzle(self.D)

    @property
    def columns(self) -> int:
        return self.D * 2 // self.swizzle


@zl.inline
def load_block(ring, page_map, stage, phase, row, count, present, stages):
    """Ask for a block of keys or of values, `count` pages of which this lane's begins at row `row` of the map."""
    lane, SW = zl.lane_index(), stages.swizzle
    zl.mbarrier_wait(ring.empty + stage, phase)
    if lane == 0:
        zl.mbarrier_expect(ring.full + stage, count * (BLOCK * stages.D * 2))
    if lane < stages.BN // BLOCK and present:
        for column in zl.static(range(stages.columns)):
            to = ring.memory + (stage * stages.block + column * stages.BN * SW + lane * (BLOCK * SW))
            zl.tma_load(to, page_map, [column * (SW // 2), row], ring.full + stage)


@zl.inline
def produce(k_map, v_map, batch, stages):
    """The warp that loads keys and values."""
    BN, window = stages.BN, batch.window
    keys = BlockRing(stages.keys, stages.k_full, stages.k_empty)
    values = BlockRing(stages.values, stages.v_full, stages.v_empty)
    pages = BN // BLOCK
    lane = zl.lane_index()
    stage = zl.i32(0)
    phase = zl.i32(1)  # the first wait for an empty stage returns at once
    for turn in range(0, batch.total, zl.num_blocks(0)):
        work = work_of(turn)
        if work >= batch.total:
            break
        token, rows, position, last, table, head = tile_at(work, batch)
        first = max(position + 1 - window, 0) if window > 0 else zl.i32(0)
        for block in zl.unroll(range(first // BN, last // BN + 1), 1):
            page = block * pages + lane % pages
            present = page <= last // BLOCK
            # What a window has passed may be another sequence's by now: its rows are a page that is seen.
            row = (table[max(page, first // BLOCK) if present else 0] * batch.kv_heads + head) * BLOCK
            count = min(pages, last // BLOCK + 1 - block * pages)
            load_block(keys, k_map, stage, phase, row, count, present, stages)
            load_block(values, v_map, stage, phase, row, count, present, stages)
            phase = 1 - phase if stage == STAGES - 1 else phase
            stage = 0 if stage == STAGES - 1 else stage + 1


@zl.inline
def advance(at):
    """at: [stage, phase] of the next block."""
    at[1] = 1 - at[1] if at[0] == STAGES - 1 else at[1]
    at[0] = 0 if at[0] == STAGES - 1 else at[0] + 1


@zl.inline
def clear_rows(values, first, stages):
    """Rows behind the last key are not this sequence's: they weigh 0, and become 0 so that no NaN comes of it."""
    SW = stages.swizzle
    for r in range(first + zl.thread_index() - 128, stages.BN, 128 * GROUPS):
        for column in zl.static(range(stages.columns)):
            for x in zl.static(range(0, SW, 16)):
                place = values + (column * stages.BN * SW + r * SW + x)
                zl.store(zl.cast_ptr(place, zl.u32), zl.u32.x(4)(0))


@zl.inline
def write_rows(acc, running, first, rows, token, head, batch):
    """The two rows of a thread, from row `first` on."""
    high, sums, _ = running
    for h in zl.static(range(2)):
        r = first + 8 * h
        inverse = 1.0 / sum_with_sink(sums[h], high[h], r, head, batch)
        if r < rows:
            place = batch.out + (query_place(r, token, head, batch) + zl.lane_index() % 4 * 2)
            for d in zl.static(range(batch.D // 8)):
                both = zl.make_vector(acc[d * 4 + 2 * h] * inverse, acc[d * 4 + 2 * h + 1] * inverse)
                zl.store(place + d * 8, zl.convert(both, zl.bf16))


@zl.inline
def consume(q, factor, batch, stages):
    """The warpgroups that compute, 64 rows of a tile each."""
    D, BN, KV, SW, BLOCK_BYTES = batch.D, stages.BN, batch.KV, stages.swizzle, stages.block
    lane, warp = zl.lane_index(), zl.warp_index()
    mine = (warp - 4) * 16 + lane // 4  # first row of this thread
    my_queries = stages.queries + (warp // 4 - 1) * 64 * SW
    k_at = [zl.i32(0) for _ in zl.static(range(2))]
    v_at = [zl.i32(0) for _ in zl.static(range(2))]
    for turn in range(0, batch.total, zl.num_blocks(0)):
        work = work_of(turn)
        if work >= batch.total:
            break
        token, rows, position, last, table, head = tile_at(work, batch)
        begin = (max(position + 1 - batch.window, 0) if batch.window > 0 else zl.i32(0)) // BN
        end = last // BN
        zl.named_barrier(warp // 4, 128)  # the last tile's scores were computed from Q
        write_queries(q, my_queries, token, head, rows, batch, SW)
        zl.fence_async()
        zl.named_barrier(warp // 4, 128)
        sight = sight_of(mine, rows, token, position, batch)
        acc = [zl.f32(0) for _ in zl.static(range(D // 2))]
        scores = [zl.f32(0) for _ in zl.static(range(BN // 2))]
        weights = [[zl.u32(0) for u in zl.static(range(4))] for n in zl.static(range(BN // 16))]
        high = [zl.f32(FLOOR) for h in zl.static(range(2))]
        sums = [zl.f32(0) for h in zl.static(range(2))]
        shrink = [zl.f32(0) for h in zl.static(range(2))]
        zl.mbarrier_wait(stages.k_full + k_at[0], k_at[1])
        scores_of(scores, my_queries, stages.keys + k_at[0] * BLOCK_BYTES, D, BN, SW, KV)
        zl.wgmma_wait(0, scores)
        if lane == 0:
            zl.mbarrier_arrive(stages.k_empty + k_at[0])
        advance(k_at)
        softmax(scores, sight, (high, sums, shrink), begin * BN, factor, batch)
        pack_weights(scores, weights, BN, KV)
        for block in zl.unroll(range(begin, end), 1):
            zl.mbarrier_wait(stages.k_full + k_at[0], k_at[1])
            scores_of(scores, my_queries, stages.keys + k_at[0] * BLOCK_BYTES, D, BN, SW, KV)
            zl.mbarrier_wait(stages.v_full + v_at[0], v_at[1])
            add_values(acc, weights, stages.values + v_at[0] * BLOCK_BYTES, D, BN, SW, KV)
            zl.wgmma_wait(1, scores)
            if lane == 0 and not stages.late:
                zl.mbarrier_arrive(stages.k_empty + k_at[0])
            softmax(scores, sight, (high, sums, shrink), (block + 1) * BN, factor, batch)
            if stages.late and lane == 0 and not (sums[0] < 0.0 or sums[1] < 0.0):  # always: it waits for the sums
                zl.mbarrier_arrive(stages.k_empty + k_at[0])
            zl.wgmma_wait(0, acc, *weights)
            if lane == 0:
                zl.mbarrier_arrive(stages.v_empty + v_at[0])
            for i in zl.static(range(D // 2)):
                acc[i] = acc[i] * shrink[i // 2 % 2]
            pack_weights(scores, weights, BN, KV)
            advance(k_at)
            advance(v_at)
        zl.mbarrier_wait(stages.v_full + v_at[0], v_at[1])
        values = stages.values + v_at[0] * BLOCK_BYTES
        clear_rows(values, last % BN + 1, stages)
        zl.fence_async()
        zl.named_barrier(GROUPS + 1, 128 * GROUPS)
        add_values(acc, weights, values, D, BN, SW, KV)
        zl.wgmma_wait(0, acc)
        if lane == 0:
            zl.mbarrier_arrive(stages.v_empty + v_at[0])
        advance(v_at)
        write_rows(acc, (high, sums, shrink), mine, rows, token, head, batch)


@zl.kernel
def attention_prefill_wgmma(
    q: zl.Ptr[zl.bf16, "const"], k_map: zl.TensorMap, v_map: zl.TensorMap, p: PrefillParams, BN: zl.static
):
    """A persistent grid over the plan's tiles x kv heads. k_map, v_map: pages as [blocks * kv_heads * 16, D], boxes of
    16 rows x SW bytes with that swizzle (prefill_swizzle)."""
    D, block = p.D, BN * p.D * 2  # bytes of a block of keys
    zl.grid_launch_dependents()
    queries = zl.shared_array(zl.u8, PREFILL_ROWS * D * 2, align=1024)
    keys = zl.shared_array(zl.u8, STAGES * block, align=1024)
    values = zl.shared_array(zl.u8, STAGES * block, align=1024)
    k_full = zl.mbarrier_array(STAGES)
    v_full = zl.mbarrier_array(STAGES)
    k_empty = zl.mbarrier_array(STAGES)
    v_empty = zl.mbarrier_array(STAGES)
    stages = KeyStages(queries, keys, values, k_full, v_full, k_empty, v_empty, D, BN)
    if zl.thread_index() == 0:
        for stage in zl.static(range(STAGES)):
            zl.mbarrier_init(k_full + stage, 1)
            zl.mbarrier_init(v_full + stage, 1)
            zl.mbarrier_init(k_empty + stage, GROUPS * 4)
            zl.mbarrier_init(v_empty + stage, GROUPS * 4)
        zl.mbarrier_init_fence()
    zl.barrier()
    zl.grid_wait()
    batch = batch_of(p)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", 40)
        if zl.warp_index() == 0:
            produce(k_map, v_map, batch, stages)
    else:
        zl.set_max_registers("inc", 232)
        consume(q, factor_of(p), batch, stages)


def prefill_swizzle(head_dim: int) -> int:
    """Bytes of the rows in shared memory: a head's row is cut into columns of this width."""
    return 128 if head_dim % 64 == 0 else 64


def wgmma_symbol(kv: str, head_dim: int) -> str:
    return f"attention_prefill_{kv}_d{head_dim}"


def wgmma_variants(target) -> list[zl.Variant]:
    """head_dim x dtype of the pages; pages in 8 bits are attention_packed.py's."""
    if target.arch != 90:
        return []
    return [
        zl.Variant(
            wgmma_symbol(name, dim),
            attention_prefill_wgmma,
            {"D": dim, "KV": dtype, "BN": 64 if dim > 128 else 128},
            threads=THREADS,
        )
        for name, dtype in (("bf16", zl.bf16), ("f16", zl.f16))
        for dim in HEAD_DIMS
    ]
