"""What the kernels of prompts' attention share, whatever multiplies: tiles of a plan, their rows, masks and softmax.

A tile is up to 128 query rows: neighbouring tokens of one sequence x query heads of one key/value head."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu.attention_parts import LOG2E, MASKED, with_sink
from zse.kernels.gpu.attention_plan import HEADER, TASK, TILE, divide


@zl.inline
def workers(ranks):
    """Blocks, or clusters of `ranks` blocks, that take work items."""
    return zl.num_blocks(0) // ranks


@zl.inline
def work_of(turn, ranks=1):
    """This worker's item of the turn that starts at item `turn`; items get shorter: every other turn runs backwards."""
    mine = zl.block_index(0) // ranks
    return turn + (mine if turn // workers(ranks) % 2 == 0 else workers(ranks) - 1 - mine)


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


class HalvedBatch(TileBatch):
    """A batch whose last items are halves of a tile, for one warpgroup alone."""

    whole: Any  # work items in front of the halves
    part: Any  # tokens of a thread block's part of a tile
    ranks: int  # blocks of a cluster that compute a tile: its parts


@zl.inline
def batch_of(p):
    total = p.plan[1] * p.kv_heads
    tiles = p.plan + (HEADER + p.tasks_room * TASK)
    width = p.kv_heads * p.group * p.D
    return TileBatch(*vars(p).values(), tiles, total, width)


@zl.inline
def length_of(item, batch):
    """Keys of an item, about."""
    tile = tile_of(item, batch)
    return min(tile[3], batch.window) if batch.window > 0 else tile[3] + 0


@zl.inline
def halved(batch, part, ranks):
    """What is left over for less than half of the workers is dealt to twice as many, unless it is little beside the first
    items, which come with the most keys: half of an item takes about two thirds of its time."""
    rest = batch.total % workers(ranks)
    whole = batch.total - rest
    if 2 * rest > workers(ranks):
        whole = batch.total + 0
    elif rest > 0 and whole > 0 and 2 * length_of(whole, batch) < length_of(0, batch):
        whole = batch.total + 0
    total = 2 * batch.total - whole
    return HalvedBatch(**(vars(batch) | {"total": total, "whole": whole, "part": part, "ranks": ranks}))


@zl.inline
def item_of(work, batch):
    """Tile and head, of a work item that may be half of one."""
    return work if work < batch.whole else batch.whole + (work - batch.whole) // 2


@zl.inline
def own_part(token, rows, position, batch):
    """(first token, rows, position, rows that are written) of this block's part of a tile. Where there is nothing left for
    it, it computes the tile's last token, of which the other block writes the result."""
    if batch.ranks == 1:
        own = token, rows, position, rows
    else:
        before = zl.cluster_rank() * batch.part
        written = max(min(rows - before * batch.group, batch.part * batch.group), 0)
        begin = min(before, divide(rows, batch.by_group) - 1)
        own = token + begin, max(written, batch.group), position + begin, written
    return own


@zl.inline
def factor_of(p):
    """What scores are multiplied with before exp2."""
    return zl.f32(LOG2E) if p.softcap > 0.0 else p.scale * LOG2E


@zl.inline
def tile_of(work, batch):
    """The plan's tile of a work item."""
    return zl.load(batch.tiles + divide(work, batch.by_heads) * TILE, 4)


@zl.inline
def tile_at(tile, work, batch):
    """(first token, rows, position of the first, last key that is seen, line of the page table, kv head) of a work item
    and its tile."""
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
    if key + BN - 1 > limits[0]:
        room = [limits[h] - key - j * 2 for h in zl.static(range(2))]
        for i in zl.static(range(BN // 2)):
            scores[i] = scores[i] if i // 4 * 8 + i % 2 <= room[i // 2 % 2] else zl.f32(MASKED)
    if where is not None and batch.window > 0:
        # Computed here, as nothing is to stay in registers for it.
        own = own_keys(*where, batch)
        before = [own[h] + 1 - batch.window - key - j * 2 for h in zl.static(range(2))]
        for i in zl.static(range(BN // 2)):
            scores[i] = scores[i] if i // 4 * 8 + i % 2 >= before[i // 2 % 2] else zl.f32(MASKED)
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
