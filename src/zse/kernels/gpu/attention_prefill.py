"""Attention of many query tokens over paged keys and values: prompts, whole or in chunks, on Hopper's matrix units.

A tile is up to 128 query rows (neighbouring tokens of one sequence x query heads of one key/value head), so keys and
values are read once for a whole group. One warp brings keys and values page by page (TMA, one box a page and 128 bytes
of its rows) and the next tile's queries into rings; two warpgroups of 64 rows each compute. As in FlashAttention 3 (Shah
et al. 2024) they take turns at the matrix units: one's softmax (online, base 2) runs beside the other's products, scores
of the next block of keys and the last one's weights times its values. Two blocks of a cluster compute neighbouring
tiles (attention_plan.PAIRED): each asks for half of the pages for both, so that half as much is read from L2.
"""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.gpu import attention_tiles as tiling
from zse.kernels.gpu.attention_parts import FLOOR, pack_pair
from zse.kernels.gpu.attention_plan import HEAD_DIMS, PREFILL_ROWS, TILE, divide, prefill_ranks
from zse.kernels.kv_pages import BLOCK

GROUPS = 2  # warpgroups that compute
THREADS = 128 * (GROUPS + 1)
STAGES, VALUE_STAGES = 2, 3  # blocks of keys and of values in shared memory


@zl.inline
def product(acc, a, b, n, accumulate, transposed, F):
    """wgmma of the type F."""
    if F is zl.bf16:
        zl.wgmma_bf16(acc, a, b, n, accumulate, False, transposed)
    else:
        zl.wgmma_f16(acc, a, b, n, accumulate, False, transposed)


@zl.inline
def scores_of(scores, queries, keys, D, BN, SW, F):
    """Starts scores = Q K^T of this warpgroup's 64 rows. queries: their descriptor, whose address is in 16 bytes."""
    first = zl.smem_desc(keys, SW, 8 * SW)
    zl.wgmma_fence(scores)
    for kd in zl.static(range(D // 16)):
        column = kd * 32 // SW
        inside = kd * 32 % SW // 16
        a, b = queries + (column * PREFILL_ROWS * SW // 16 + inside), first + (column * BN * SW // 16 + inside)
        product(scores, a, b, BN, kd > 0, False, F)
    zl.wgmma_commit()


@zl.inline
def add_values(acc, weights, values, D, BN, SW, F):
    """Starts acc += P V."""
    first = zl.smem_desc(values, SW, 8 * SW, BN * SW)
    zl.wgmma_fence(acc, *weights)
    for n in zl.static(range(BN // 16)):
        product(acc, weights[n], first + n * SW, D, True, True, F)
    zl.wgmma_commit()


@zl.inline
def pack_weights(scores, weights, BN, F):
    """Accumulators of S as A operands of P V."""
    for n in zl.static(range(BN // 16)):
        for u in zl.static(range(4)):
            at = n * 8 + u // 2 * 4 + u % 2 * 2
            weights[n][u] = pack_pair(scores[at], scores[at + 1], F)


@zl.inline
def write_queries(q, place, token, head, first, rows, batch, SW):
    """64 rows of Q from `first` on into shared memory, swizzled; rows that are none become zeros. place: of the first."""
    thread = zl.thread_index() % 128
    pieces = batch.D * 2 // 16
    for e in zl.unroll(range(thread, 64 * pieces, 128), 4 if batch.D <= 128 else 2):
        r = e // pieces
        x = e % pieces
        row = first + r
        which = row if row < rows else 0
        line = q + tiling.query_place(which, token, head, batch)
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
    """Blocks of keys, of values or of queries in shared memory, with the barriers of their stages. full: None of queries
    that the computing warpgroups write."""

    memory: Any
    full: Any
    empty: Any
    count: int  # of stages
    ranks: int = 1  # blocks of the cluster, each of which fills a part of every block's stages


class KeyStages(NamedTuple):
    """What is in shared memory."""

    queries: BlockRing
    keys: BlockRing
    values: BlockRing
    D: int
    BN: int  # keys of a block

    @property
    def block(self) -> int:
        """Bytes of a block of keys."""
        return self.BN * self.D * 2

    @property
    def tile(self) -> int:
        """Bytes of a tile's queries."""
        return PREFILL_ROWS * self.D * 2

    @property
    def swizzle(self) -> int:
        return prefill_swizzle(self.D)

    @property
    def columns(self) -> int:
        return self.D * 2 // self.swizzle


@zl.inline
def advance(at, ring):
    """at: [stage, phase] of a ring's next block."""
    at[1] = 1 - at[1] if at[0] == ring.count - 1 else at[1]
    at[0] = 0 if at[0] == ring.count - 1 else at[0] + 1


@zl.inline
def release(ring, at, alone):
    """This warp has read the block; alone: for the other warpgroup's warp as well."""
    if zl.lane_index() < (zl.i32(2 * ring.ranks) if alone else ring.ranks):
        if ring.ranks == 1:
            zl.mbarrier_arrive(ring.empty + at[0])
        else:
            zl.mbarrier_arrive_remote(ring.empty + at[0], zl.lane_index() % ring.ranks, True)


@zl.inline
def load_block(ring, page_map, at, row, count, stages):
    """Ask for this thread block's part of a block of keys or of values, which has `count` pages; this lane's begins at
    row `row` of the map."""
    SW, PART = stages.swizzle, stages.BN // BLOCK // ring.ranks
    zl.mbarrier_wait(ring.empty + at[0], at[1])
    if zl.lane_index() == 0:
        zl.mbarrier_expect(ring.full + at[0], count * (BLOCK * stages.D * 2))
    which = zl.lane_index() if ring.ranks == 1 else zl.cluster_rank() * PART + zl.lane_index()
    if zl.lane_index() < PART and which < count:
        for column in zl.static(range(stages.columns)):
            to = ring.memory + (at[0] * stages.block + column * stages.BN * SW + which * (BLOCK * SW))
            if ring.ranks == 1:
                zl.tma_load(to, page_map, [column * (SW // 2), row], ring.full + at[0])
            else:
                everyone = (1 << ring.ranks) - 1
                zl.tma_load(to, page_map, [column * (SW // 2), row], ring.full + at[0], multicast=everyone)
    advance(at, ring)


@zl.inline
def load_queries(ring, q_map, at, token, head, box_rows, stages):
    """Ask for a tile's rows of Q, and for those behind them where the tile has fewer tokens than others: no result of
    theirs is written."""
    SW = stages.swizzle
    zl.mbarrier_wait(ring.empty + at[0], at[1])
    if zl.lane_index() == 0:
        zl.mbarrier_expect(ring.full + at[0], box_rows * (stages.D * 2))
        for column in zl.static(range(stages.columns)):
            to = ring.memory + (at[0] * stages.tile + column * PREFILL_ROWS * SW)
            zl.tma_load(to, q_map, [column * (SW // 2), head, token], ring.full + at[0])
    advance(at, ring)


@zl.inline
def drain(ring, at):
    """Until all blocks have been read everywhere: the other block of the cluster arrives here until then."""
    for _ in zl.static(range(ring.count)):
        zl.mbarrier_wait(ring.empty + at[0], at[1])
        advance(at, ring)


@zl.inline
def produce(q_map, k_map, v_map, box_rows, batch, stages):
    """The warp that loads, in the order in which blocks are computed with: values one block behind their keys.
    box_rows: rows of q_map's boxes."""
    BN, window, pages = stages.BN, batch.window, stages.BN // BLOCK
    # The first wait for an empty stage returns at once.
    q_at, k_at, v_at = [[zl.i32(0), zl.i32(1)] for _ in zl.static(range(3))]
    PART = pages // batch.ranks
    first_page = zl.lane_index() % PART + (zl.cluster_rank() * PART if batch.ranks > 1 else zl.i32(0))
    for turn in range(0, batch.total, tiling.workers(batch.ranks)):
        work = tiling.work_of(turn, batch.ranks)
        if work >= batch.total:
            break
        item = tiling.item_of(work, batch)
        token, rows, position, last, table, head = tiling.tile_at(tiling.tile_of(item, batch), item, batch)
        first = max(position + 1 - window, 0) if window > 0 else zl.i32(0)
        token, _, _, _ = tiling.own_part(token, rows, position, batch)
        if stages.queries.full is not None:
            load_queries(stages.queries, q_map, q_at, token, head * batch.group, box_rows, stages)
        before = [zl.i32(0), zl.i32(0)]
        for block in zl.unroll(range(first // BN, last // BN + 1), 1):
            # What a window has passed may be another sequence's by now: its rows are a page that is seen.
            page = max(min(block * pages + first_page, last // BLOCK), first // BLOCK)
            row = (table[page] * batch.kv_heads + head) * BLOCK
            count = min(pages, last // BLOCK + 1 - block * pages)
            load_block(stages.keys, k_map, k_at, row, count, stages)
            if block > first // BN:
                load_block(stages.values, v_map, v_at, before[0], before[1], stages)
            before[0] = row
            before[1] = count
        load_block(stages.values, v_map, v_at, before[0], before[1], stages)
    if batch.ranks > 1:
        drain(stages.keys, k_at)
        drain(stages.values, v_at)


@zl.inline
def clear_rows(values, first, stages):
    """Rows behind the last key are not this sequence's: they weigh 0, and become 0 so that no NaN comes of it. By one
    warpgroup."""
    SW, thread = stages.swizzle, zl.thread_index() % 128
    for at in zl.unroll(range(first * SW + thread * 16, stages.BN * SW, 128 * 16), 1):
        for column in zl.static(range(stages.columns)):
            zl.store(zl.cast_ptr(values + (column * stages.BN * SW + at), zl.u32), zl.u32.x(4)(0))


@zl.inline
def clear_tail(queries, first, count, stages):
    """Rows of Q that no box fills, of `count` tiles."""
    SW = stages.swizzle
    for place in zl.static(
        [(i * stages.columns + c) * PREFILL_ROWS * SW for i in range(count) for c in range(stages.columns)]
    ):
        for at in zl.unroll(range(first * SW + zl.thread_index() * 16, PREFILL_ROWS * SW, THREADS * 16), 1):
            zl.store(zl.cast_ptr(queries + (place + at), zl.u32), zl.u32.x(4)(0))
    zl.fence_async()


@zl.inline
def read_ahead(ahead, turn, batch):
    """The tile of the turn that starts at item `turn`, if there is one, into the list `ahead`."""
    work = tiling.work_of(turn, batch.ranks)
    if work < batch.total:
        tile = tiling.tile_of(tiling.item_of(work, batch), batch)
        for u in zl.static(range(TILE)):
            ahead[u] = tile[u] + 0


@zl.inline
def transpose(words, lane):
    """Four words of each of four lanes: lane j gets every lane's word j, in their order."""
    odd, upper = lane % 2 == 1, lane // 2 % 2 == 1
    near = [zl.shuffle_xor(words[u] if odd else words[u + 1], 1) for u in zl.static((0, 2))]
    pairs = [(near[u] if odd else words[2 * u], words[2 * u + 1] if odd else near[u]) for u in zl.static(range(2))]
    others = [zl.shuffle_xor(pairs[0][u] if upper else pairs[1][u], 2) for u in zl.static(range(2))]
    low = [others[u] if upper else pairs[0][u] for u in zl.static(range(2))]
    return low + [pairs[1][u] if upper else others[u] for u in zl.static(range(2))]


@zl.inline
def write_rows(acc, running, first, rows, token, head, batch):
    """The two rows of a thread, from row `first` on. Four lanes have two numbers each of every eight; each gets eight
    neighbours of them, to write 16 bytes."""
    high, sums, _ = running
    lane = zl.lane_index()
    for h in zl.static(range(2)):
        r = first + 8 * h
        inverse = 1.0 / tiling.sum_with_sink(sums[h], high[h], r, head, batch)
        place = batch.out + (tiling.query_place(min(r, rows - 1), token, head, batch) + lane % 4 * 8)
        for d in zl.static(range(0, batch.D // 8, 4)):
            words = [
                pack_pair(acc[(d + n) * 4 + 2 * h] * inverse, acc[(d + n) * 4 + 2 * h + 1] * inverse, zl.bf16)
                for n in zl.static((0, 1, 2, 3))
            ]
            quad = transpose(words, lane)
            if r < rows:
                zl.store(zl.cast_ptr(place + d * 8, zl.u32), zl.make_vector(quad[0], quad[1], quad[2], quad[3]))


@zl.inline
def take_turn(group, alone):
    """The two warpgroups ask for products in turn, so that one's softmax runs beside the other's products (FlashAttention
    3's pingpong): else both are often in the same phase, and the matrix units wait for both."""
    if not alone:
        zl.named_barrier(GROUPS + 1 + group, 128 * GROUPS)


@zl.inline
def pass_turn(group, alone):
    if not alone:
        zl.named_arrive(GROUPS + 2 - group, 128 * GROUPS)


@zl.inline
def await_queries(q, at, token, head, rows, part, group, batch, stages):
    """Descriptor of this warpgroup's rows of Q, half `part` of the tile's, which are in shared memory then."""
    ring = stages.queries
    place = ring.memory + (at[0] * stages.tile + part * (64 * stages.swizzle))
    if ring.full is not None:
        zl.mbarrier_wait(ring.full + at[0], at[1])
    else:
        zl.named_barrier(1 + group, 128)  # the last tile's scores were computed from Q
        write_queries(q, place, token, head, part * 64, rows, batch, stages.swizzle)
        zl.fence_async()
        zl.named_barrier(1 + group, 128)
    return zl.smem_desc(place, stages.swizzle, 8 * stages.swizzle)


@zl.inline
def add_last_values(acc, weights, at, keys, group, alone, KV, stages):
    """acc += P V of the block in which a tile ends, of which `keys` keys are there."""
    values = stages.values
    place = values.memory + at[0] * stages.block
    zl.mbarrier_wait(values.full + at[0], at[1])
    if group == 0:  # which the other one's turn comes after
        clear_rows(place, keys, stages)
        zl.fence_async()
        zl.named_barrier(1, 128)
    take_turn(group, alone)
    add_values(acc, weights, place, stages.D, stages.BN, stages.swizzle, KV)
    pass_turn(group, alone)
    zl.wgmma_wait(0, acc)
    release(values, at, alone)
    advance(at, values)


@zl.inline
def consume(q, factor, batch, stages):
    """The warpgroups that compute, 64 rows of a tile each."""
    D, BN, KV, SW, keys, values = batch.D, stages.BN, batch.KV, stages.swizzle, stages.keys, stages.values
    lane, warp = zl.lane_index(), zl.warp_index()
    group = zl.shuffle(warp // 4, 0) - 1  # so that the compiler knows it as the warp's
    q_at, k_at, v_at = [[zl.i32(0), zl.i32(0)] for _ in zl.static(range(3))]
    # The next tile, read while the last is computed; where Q is written here, there are no registers left.
    ahead = [zl.i32(0) for _ in zl.static(range(TILE))]
    if stages.queries.full is not None:
        read_ahead(ahead, 0, batch)
    if group == 1:
        pass_turn(group, False)
    for turn in range(0, batch.total, tiling.workers(batch.ranks)):
        work = tiling.work_of(turn, batch.ranks)
        alone = work >= batch.whole
        if work >= batch.total or (alone and group == 1):
            break
        if stages.queries.full is None:
            read_ahead(ahead, turn, batch)
        token, rows, position, last, _, head = tiling.tile_at(ahead, tiling.item_of(work, batch), batch)
        part = (work - batch.whole) % 2 if alone else group
        mine = part * 64 + warp % 4 * 16 + lane // 4  # first row of this thread
        begin = (max(position + 1 - batch.window, 0) if batch.window > 0 else zl.i32(0)) // BN
        end = last // BN
        token, rows, position, written = tiling.own_part(token, rows, position, batch)
        queries = await_queries(q, q_at, token, head, rows, part, group, batch, stages)
        if stages.queries.full is not None:
            read_ahead(ahead, turn + tiling.workers(batch.ranks), batch)
        sight = tiling.sight_of(mine, rows, token, position, batch)
        acc = [zl.f32(0) for _ in zl.static(range(D // 2))]
        scores = [zl.f32(0) for _ in zl.static(range(BN // 2))]
        weights = [[zl.u32(0) for u in zl.static(range(4))] for n in zl.static(range(BN // 16))]
        high = [zl.f32(FLOOR) for h in zl.static(range(2))]
        sums = [zl.f32(0) for h in zl.static(range(2))]
        shrink = [zl.f32(0) for h in zl.static(range(2))]
        zl.mbarrier_wait(keys.full + k_at[0], k_at[1])
        take_turn(group, alone)
        scores_of(scores, queries, keys.memory + k_at[0] * stages.block, D, BN, SW, KV)
        pass_turn(group, alone)
        zl.wgmma_wait(0, scores)
        release(keys, k_at, alone)
        advance(k_at, keys)
        tiling.softmax(scores, sight, (high, sums, shrink), begin * BN, factor, batch)
        pack_weights(scores, weights, BN, KV)
        for block in zl.unroll(range(begin, end), 1):
            zl.mbarrier_wait(keys.full + k_at[0], k_at[1])
            zl.mbarrier_wait(values.full + v_at[0], v_at[1])
            take_turn(group, alone)
            scores_of(scores, queries, keys.memory + k_at[0] * stages.block, D, BN, SW, KV)
            add_values(acc, weights, values.memory + v_at[0] * stages.block, D, BN, SW, KV)
            pass_turn(group, alone)
            zl.wgmma_wait(1, scores)
            release(keys, k_at, alone)
            advance(k_at, keys)
            tiling.softmax(scores, sight, (high, sums, shrink), (block + 1) * BN, factor, batch)
            zl.wgmma_wait(0, acc, *weights)
            release(values, v_at, alone)
            advance(v_at, values)
            for i in zl.static(range(D // 2)):
                acc[i] = acc[i] * shrink[i // 2 % 2]
            pack_weights(scores, weights, BN, KV)
        if stages.queries.full is not None:
            release(stages.queries, q_at, alone)
            advance(q_at, stages.queries)
        add_last_values(acc, weights, v_at, last % BN + 1, group, alone, KV, stages)
        write_rows(acc, (high, sums, shrink), mine, written, token, head, batch)
    if group == 0:
        take_turn(group, False)  # nobody is left at the barrier


@zl.kernel
def attention_prefill_wgmma(
    q: zl.Ptr[zl.bf16, "const"],
    q_map: zl.TensorMap,
    k_map: zl.TensorMap,
    v_map: zl.TensorMap,
    box_rows: zl.i32,
    p: tiling.PrefillParams,
    BN: zl.static,
    QUERIES: zl.static,
    RANKS: zl.static,
):
    """A persistent grid over the plan's tiles x kv heads. q_map: Q as [tokens, heads, D], boxes of the tokens of a tile x
    the heads of a group x SW bytes, box_rows rows (of bf16 pages; where f16 is computed the warpgroups turn Q into f16).
    k_map, v_map: pages as [blocks * kv_heads * 16, D], boxes of 16 rows x SW bytes; all with the swizzle SW
    (prefill_swizzle). QUERIES: tiles of Q in shared memory; RANKS: blocks of a cluster."""
    D, block, tile = p.D, BN * p.D * 2, PREFILL_ROWS * p.D * 2
    zl.grid_launch_dependents()
    loads_queries = p.KV is zl.bf16
    queries = zl.shared_array(zl.u8, QUERIES * tile, align=1024)
    keys = zl.shared_array(zl.u8, STAGES * block, align=1024)
    values = zl.shared_array(zl.u8, VALUE_STAGES * block, align=1024)
    full = zl.mbarrier_array(QUERIES + STAGES + VALUE_STAGES)
    empty = zl.mbarrier_array(QUERIES + STAGES + VALUE_STAGES)
    stages = KeyStages(
        BlockRing(queries, full if loads_queries else None, empty, QUERIES),
        BlockRing(keys, full + QUERIES, empty + QUERIES, STAGES, RANKS),
        BlockRing(values, full + (QUERIES + STAGES), empty + (QUERIES + STAGES), VALUE_STAGES, RANKS),
        D,
        BN,
    )
    if zl.thread_index() == 0:
        for stage in zl.static(range(QUERIES + STAGES + VALUE_STAGES)):
            zl.mbarrier_init(full + stage, 1)
            zl.mbarrier_init(empty + stage, GROUPS * 4 * (1 if stage < QUERIES else RANKS))
        zl.mbarrier_init_fence()
    if loads_queries:
        clear_tail(queries, box_rows, QUERIES, stages)
    zl.barrier()
    if RANKS > 1:
        zl.cluster_barrier(True)  # no load or arrival comes before the barriers that it is for
    zl.grid_wait()
    batch = tiling.halved(tiling.batch_of(p), divide(box_rows, p.by_group), RANKS)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", 40)
        if zl.warp_index() == 0:
            produce(q_map, k_map, v_map, box_rows, batch, stages)
    else:
        zl.set_max_registers("inc", 232)
        consume(q, tiling.factor_of(p), batch, stages)


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
            {
                "D": dim,
                "KV": dtype,
                "BN": 64 if dim > 128 else 128,
                "QUERIES": 2 if name == "bf16" and dim <= 128 else 1,
                "RANKS": prefill_ranks(target.arch, name, dim),
            },
            threads=THREADS,
            cluster=prefill_ranks(target.arch, name, dim),
        )
        for name, dtype in (("bf16", zl.bf16), ("f16", zl.f16))
        for dim in HEAD_DIMS
    ]
