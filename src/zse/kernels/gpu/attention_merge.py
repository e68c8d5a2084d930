"""The merging side of the decode kernel: warps' sums become a chunk's, chunks' a segment's, segments' the result, and
records of a tile's tasks its result, in the same order."""

from zse import kernel as zl
from zse.kernels.gpu.attention_parts import FLOOR, with_sink
from zse.kernels.gpu.attention_plan import CHUNK, SEGMENT, divide
from zse.kernels.gpu.kv8 import sum_of

MERGE = 8  # chunks whose records are in flight while they are merged


@zl.inline
def finish(out, at, acc, total):
    """Four finished elements."""
    scale = 1.0 / total
    zl.store(
        out + at, zl.convert(zl.make_vector(acc[0] * scale, acc[1] * scale, acc[2] * scale, acc[3] * scale), zl.bf16)
    )


@zl.inline
def is_last(counter, parts):
    """By one thread, after the block's records are written: whether the tile's other records were there before. Then
    they can be read, and the counter is 0 again."""
    zl.fence()
    last = zl.i32(0)
    if zl.atomic_add(counter, 1) == parts - 1:
        counter[0] = 0
        zl.fence()
        last = zl.i32(1)
    return last


@zl.inline
def fold(state, high, total, values):
    """state = [maximum, sum, four values] takes in sums relative to another maximum; cleared, it becomes them."""
    new = max(state[0], high)
    old_weight = zl.exp2(state[0] - new)
    weight = zl.exp2(high - new)
    state[0] = new
    state[1] = zl.fma(total, weight, state[1] * old_weight)
    for i in zl.static(range(4)):
        state[2 + i] = zl.fma(values[i], weight, state[2 + i] * old_weight)


@zl.inline
def clear(state):
    state[0] = zl.f32(FLOOR)
    for i in zl.static(range(5)):
        state[1 + i] = zl.f32(0)


@zl.inline
def merge_records(head, item, p):
    """The records of one tile and head become its result."""
    D, group = p.D, p.group
    parts = item[7] & 4095
    heads = p.kv_heads * group
    fan = zl.i32(1) if item[7] >> 24 == 1 else zl.i32(SEGMENT // CHUNK)  # records of a segment
    for e in zl.unroll(range(zl.thread_index(), item[1] * group * (D // 4), zl.target.threads), 1):
        column = e // (D // 4)
        x = e % (D // 4) * 4
        column_token = divide(column, p.by_group)
        query_head = (head - column_token) * group + column
        record = zl.i64(item[6] + column_token * parts) * heads + query_head
        segment = [zl.f32(0) for _ in zl.static(range(6))]
        result = [zl.f32(0) for _ in zl.static(range(6))]
        clear(segment)
        clear(result)
        for begin in zl.unroll(range(0, parts, MERGE), 1):
            pairs = [
                zl.load(p.totals + (record + min(begin + u, parts - 1) * heads) * 2, 2) for u in zl.static(range(MERGE))
            ]
            values = [
                zl.load(p.records + ((record + min(begin + u, parts - 1) * heads) * D + x), 4)
                for u in zl.static(range(MERGE))
            ]
            for u in zl.static(range(MERGE)):
                if begin + u < parts:
                    fold(segment, pairs[u][0], pairs[u][1], [values[u][i] for i in zl.static(range(4))])
                    if fan == 1 or u % (SEGMENT // CHUNK) == SEGMENT // CHUNK - 1 or begin + u == parts - 1:
                        fold(result, segment[0], segment[1], segment[2:])
                        clear(segment)
        total = with_sink(result[1], result[0], query_head, p)
        finish(p.out, zl.i64(item[0] + column_token) * p.width + query_head * D + x, result[2:], total)


@zl.inline
def leave_sums(mine, found, nt, p):
    """A warp's sums of part nt where the block's threads find them: [column][p.columns + 4] f32, and (maximum, sum) of
    each."""
    D, item = p.columns, p.item
    lane = zl.lane_index()
    g = lane // 4
    for u in zl.static(range(2)):
        column = lane % 4 * 2 + u
        for d in zl.static(range(D // 16)):
            low = d * 16 + (g if item == 2 else 2 * g)
            mine[column * (D + 4) + low] = sum_of(found, d, nt, u, p.KV)
            mine[column * (D + 4) + low + (8 if item == 2 else 1)] = sum_of(found, d, nt, u + 2, p.KV)
        if g == 0:
            p.peaks[(zl.warp_index() * 8 + column) * 2] = found.high[nt][u]
            p.peaks[(zl.warp_index() * 8 + column) * 2 + 1] = found.sums[nt][u]


@zl.inline
def merge_warps(segment, result, columns, closes, nt, p):
    """The warps' sums of part nt, chunk by chunk, are added to the segment's, and a complete segment to the result."""
    D, W, S = p.D, p.walkers, p.together
    for m in zl.static(range(p.mine)):
        e = zl.thread_index() + m * zl.target.threads
        column = e // (D // 4)
        if column < 8 and nt * 8 + column < columns:
            highs = [zl.load(p.peaks + (w * S * 8 + column) * 2, 2) for w in zl.static(range(W))]
            peak = highs[0][0]
            for w in zl.static(range(1, W)):
                peak = max(peak, highs[w][0])
            whole = zl.f32(0)
            merged = [zl.f32(0) for _ in zl.static(range(4))]
            for w in zl.static(range(W)):
                weight = zl.exp2(highs[w][0] - peak)
                whole = zl.fma(highs[w][1], weight, whole)
                part = zl.load(
                    zl.cast_ptr(p.memory + p.places[w if S == 1 else w * S + e // (p.columns // 4) % S], zl.f32)
                    + (column * (p.columns + 4) + e % (p.columns // 4) * 4),
                    4,
                )
                for i in zl.static(range(4)):
                    merged[i] = zl.fma(part[i], weight, merged[i])
            fold(segment[nt][m], peak, whole, merged)
            if closes:
                fold(result[nt][m], segment[nt][m][0], segment[nt][m][1], segment[nt][m][2:])
                clear(segment[nt][m])


@zl.inline
def leave_results(result, item, head, p):
    """The task's results: finished elements where it is the only one of its tile, else records."""
    D, group = p.D, p.group
    columns, parts = item[1] * group, item[7] & 4095
    for nt in zl.static(range(p.NT)):
        for m in zl.static(range(p.mine)):
            e = zl.thread_index() + m * zl.target.threads
            column = e // (D // 4)
            which = nt * 8 + column
            if column < 8 and which < columns:
                x = e % (D // 4) * 4
                which_token = divide(which, p.by_group)
                query_head = (head - which_token) * group + which
                done = result[nt][m]
                if parts == 1:
                    at = zl.i64(item[0] + which_token) * p.width + query_head * D + x
                    finish(p.out, at, done[2:], with_sink(done[1], done[0], query_head, p))
                else:
                    first = zl.i64(item[6] + which_token * parts + (item[7] >> 12 & 4095))
                    record = first * (p.kv_heads * group) + query_head
                    zl.store(p.records + (record * D + x), zl.make_vector(done[2], done[3], done[4], done[5]))
                    if x == 0:
                        zl.store(p.totals + record * 2, zl.make_vector(done[0], done[1]))
