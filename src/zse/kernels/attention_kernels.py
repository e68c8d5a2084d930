"""Attention over paged keys and values: one kernel for decode, prefill, chunked and mixed batches, and for encoders.

A block takes one key/value head and one *tile*: neighbouring tokens of one sequence whose positions share a multiple of
the tile length (the first token of a run leads its tile; the blocks of the others return at once). Tiles, key blocks
and segments lie at fixed positions, and every query row goes through the same instructions whatever else is in the
batch, so a row's result is bit for bit the same alone, batched, chunked or whole.

Keys are walked in segments of 256: scores (lanes are tokens), softmax, then P·V (lanes are dimensions) with the sums in
registers; segments are merged with running maxima (Milakov and Gimelshein 2018; Dao et al. 2022, and 2023 for the split
over keys). With several splits every segment is a block of its own, and attention_combine merges them in the same order
with the same arithmetic.
"""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.attention import MAX_HEAD_DIM, MAX_ROWS, SEGMENT
from zse.kernels.kv_pages import BLOCK, E4M3_IN_F16, E4M3_IN_F32, SCALE_BYTES, narrow_e4m3, widen
from zse.kernels.matmul_tile import asks_ahead
from zse.kernels.quantize import GROUP, quantize_group
from zse.kernels.softmax import weight_of

KEY_ALIGN = 64  # key blocks start at multiples of this
# Pages between the values that are read and those brought near; keys: the next key block's. Into the second cache: a core
# has few places for what misses the first (24 on Zen 4, so 14 GB/s), which what is read now needs. Where asks_by_segment() memory
# works evenly: of values every second pass over a line's half reads none (one token behind 4,096: 20.4 ms -> 15.7, of 8.3 for reading).
PAGES_AHEAD = 4
MASKED = -3.0e38  # the score of a key that must not be seen
FLOOR = -1.0e30  # the running maximum before any key
SEES = 0  # in the place of R: kernels whose tokens may see keys behind themselves, of SEEING_ROWS


class TileParams(zl.Record):
    """Parameters of attention_tile. sinks: see attention(), null where has_sinks is 0. splits: 1, or at least the number of segments. R: query rows in registers at once. SEES: `partial` is i32 [M]: the last
    key that each token sees."""

    q: zl.Ptr[zl.f32, "const"]
    k_pages: zl.Ptr[zl.u8, "const"]
    v_pages: zl.Ptr[zl.u8, "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    token_row: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    sinks: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    oq: zl.Ptr[zl.i8]
    oscale: zl.Ptr[zl.f32]
    osum: zl.Ptr[zl.f32]
    partial: zl.Ptr[zl.f32]
    has_sinks: zl.i64
    tokens: zl.i64
    max_pages: zl.i64
    max_segments: zl.i64
    splits: zl.i64
    kv_heads: zl.i64
    group: zl.i64
    head_dim: zl.i64
    scale: zl.f32
    window: zl.i64
    ahead: zl.i64
    softcap: zl.f32
    R: zl.static
    KV: zl.static
    INT8: zl.static
    SEES: zl.static


class HeadPages(NamedTuple):
    """A sequence's pages for one head: their ids (None: page i is the i-th), those that are seen (first .. last), where the
    head's keys and values begin, how far two pages are apart, and two tokens' values, the type of their numbers, how far two heads
    of a page are apart (None: there is one, or no other is read)."""

    ids: Any
    first: Any
    last: Any
    keys: Any
    values: Any
    stride: Any
    line: Any
    KV: Any
    head: Any = None


class KeySegment(NamedTuple):
    """Keys begin .. stop - 1 of the segment from `start` on; padded: up to where there are scores; value_begin: whose values
    are read first; keys: that the tile sees."""

    start: Any
    begin: Any
    stop: Any
    padded: Any
    value_begin: Any
    keys: Any


class TileWork(NamedTuple):
    """A block's memory: scores of a segment [R, SEGMENT]; of each query row the sum of P·V [head_dim], the running maximum and the
    sum of weights."""

    scores: Any
    state: Any
    maxima: Any
    totals: Any


def is_scaled(KV) -> bool:
    """Whether stored numbers have a scale for each token."""
    return KV is zl.i8 or KV is zl.e4m3


@zl.inline
def head_pages(p, head, row, first_key, num_keys):
    STORED = zl.u8 if p.KV is zl.e4m3 else p.KV
    head_size = p.head_dim * BLOCK + (SCALE_BYTES if is_scaled(p.KV) else 0)
    return HeadPages(
        p.page_table + zl.i64(row) * p.max_pages,
        first_key // BLOCK,
        (num_keys - 1) // BLOCK,
        zl.cast_ptr(p.k_pages, STORED) + head * head_size,
        zl.cast_ptr(p.v_pages, STORED) + head * head_size,
        p.kv_heads * head_size,
        p.head_dim,
        p.KV,
        head_size,
    )


@zl.inline
def page_offset(pages, index):
    """How far page `index` is from where the head's pages begin."""
    return zl.i64(index if pages.ids is None else pages.ids[index]) * pages.stride


def units_of(p, pages) -> tuple[float, float]:
    """What products with stored numbers are to be multiplied with before they are summed, and after."""
    if p.KV is not zl.e4m3:
        return 1.0, 1.0
    # In two parts: neither products nor weights times a scale leave the range of f32.
    return (E4M3_IN_F32 / 2.0**24, 2.0**24) if pages.KV is zl.e4m3 else (E4M3_IN_F16, 1.0)


@zl.inline
def convert_pages(p, pages, segment, scratch):
    """A segment's pages of e4m3 as pages of f16 in the block's memory, their scales behind them: each number is converted once
    for all rows of a tile, which takes 2 instructions instead of 3 for each R of them."""
    WIDTH = 2 * zl.target.lanes
    size = p.head_dim * BLOCK
    stride = size + SCALE_BYTES // 2
    half = SEGMENT // BLOCK * stride
    first = segment.start // BLOCK
    for page in range(segment.value_begin // BLOCK, (segment.stop + BLOCK - 1) // BLOCK):
        here = page_offset(pages, page)
        coming = page_offset(pages, min(page + 1, pages.last))
        for part in zl.static(range(2)):
            stored = pages.values if part else pages.keys
            to = scratch + (part * half + (page - first) * stride)
            for at in range(0, size, 2 * WIDTH):
                zl.prefetch_l2(stored + coming + at)
                for i in zl.static(range(0, 2 * WIDTH, WIDTH)):
                    zl.store(to + at + i, narrow_e4m3(zl.load(stored + here + at + i, WIDTH)))
            for i in zl.static(range(0, SCALE_BYTES, WIDTH)):
                scales = zl.load(stored + here + size + i, WIDTH)
                zl.store(zl.cast_ptr(to + size, zl.u8) + i, scales)
    keys = scratch - first * stride
    return HeadPages(None, pages.first, pages.last, keys, keys + half, stride, p.head_dim, zl.f16)


@zl.inline
def segment_of(index, first_key, num_keys, pages):
    start = index * SEGMENT
    stop = min(start + SEGMENT, num_keys)
    begin = max(start, first_key // KEY_ALIGN * KEY_ALIGN)
    value_begin = max(start, pages.first * BLOCK)
    padded = begin + (stop - begin + KEY_ALIGN - 1) // KEY_ALIGN * KEY_ALIGN
    return KeySegment(start, begin, stop, padded, value_begin, num_keys)


@zl.inline
def pages_at(stored, key, count, pages):
    """Pointers at `count` pages of `stored`, a head's keys or values, from `key` on; beyond those that are seen, the nearest."""
    return [
        stored + page_offset(pages, min(max(key // BLOCK + i, pages.first), pages.last))
        for i in zl.static(range(count))
    ]


@zl.inline
def asking():
    """What brings a line near: on AVX2 where it stands, one token behind 4,096 takes 20 % longer where the compiler gathers them."""
    return zl.prefetch_here if asks_ahead() else zl.prefetch_l2


@zl.inline
def asks_by_segment(pages):
    """Whether a segment's values are asked for beside its keys, and beside its values the next one's keys: a phase ahead."""
    return asks_ahead() and pages.head is not None


@zl.inline
def keys_behind(pages, segment, page):
    """Where the keys are that the phase behind this one reads instead of values of `page`: in the next segment, or in the next head's
    first."""
    behind = pages.keys + page_offset(pages, min(page + SEGMENT // BLOCK, pages.last))
    if page + SEGMENT // BLOCK > pages.last:
        place = min(pages.first + page - segment.value_begin // BLOCK, pages.last)
        behind = pages.keys + pages.head + page_offset(pages, place)
    return behind


@zl.inline
def key_block(queries, key_pages, next_pages, acc, p, KV, VECTORS):
    """acc[r][v] = q_r · K of VECTORS * lanes neighbouring keys; key_pages[i] points at [head_dim, 16] of a page.
    next_pages: what is read next, brought near meanwhile: a page is too short for the processor to foresee it."""
    L = zl.target.lanes
    per_page, ask = BLOCK // L, asking()
    LINE = 1 if KV is zl.f32 else 2 if KV is zl.f16 else 4  # dimensions in 64 bytes
    for line in range(0, p.head_dim, max(LINE, 2)):
        for page in next_pages:
            for d in zl.static(range(0, max(LINE, 2), LINE)):
                ask(page + (line + d) * BLOCK)
        for d in range(max(LINE, 2)):
            query = [zl.splat(queries[r][line + d], L) for r in range(p.R)]
            for v in zl.static(range(VECTORS)):
                keys = widen(zl.load(key_pages[v // per_page] + (line + d) * BLOCK + v % per_page * L, L), KV)
                for r in zl.static(range(p.R)):
                    acc[r][v] = zl.fma(query[r], keys, acc[r][v])


@zl.inline
def score_keys(p, pages, segment, queries, scores, VECTORS):
    """The scores of a segment's keys for R query rows."""
    L = zl.target.lanes
    KEYS = VECTORS * L
    before, after = units_of(p, pages)
    for key in range(segment.begin, segment.stop, KEYS):
        key_pages = pages_at(pages.keys, key, KEYS // BLOCK, pages)
        next_pages = pages_at(pages.keys, key + KEYS, KEYS // BLOCK, pages)
        if asks_by_segment(pages):
            next_pages = pages_at(pages.values, key, KEYS // BLOCK, pages) + next_pages
        acc = [[zl.f32.x(L)(0) for v in range(VECTORS)] for r in range(p.R)]
        key_block(queries, key_pages, next_pages, acc, p, pages.KV, VECTORS)
        scales = [zl.splat(p.scale, L) for _ in range(VECTORS)]
        if is_scaled(p.KV):
            scales = [
                zl.load(zl.cast_ptr(key_pages[v * L // BLOCK] + p.head_dim * BLOCK, zl.f32) + v * L % BLOCK, L)
                * p.scale
                for v in range(VECTORS)
            ]
        for r in zl.static(range(p.R)):
            for v in zl.static(range(VECTORS)):
                score = (acc[r][v] * before * after if p.KV is zl.e4m3 else acc[r][v]) * scales[v]
                zl.store(scores + r * SEGMENT + (key - segment.start) + v * L, score)
    if p.softcap > 0.0:
        for at in range(segment.begin - segment.start, segment.padded - segment.start, L):
            for r in zl.static(range(p.R)):
                place = scores + r * SEGMENT + at
                zl.store(place, zl.tanh(zl.load(place, L) / p.softcap) * p.softcap)


@zl.inline
def keys_of_row(p, token, position):
    """How many keys the sequence of `token` has: up to its last token in the batch, whose tokens stand together. By bisection."""
    row = p.token_row[token]
    low = zl.i64(token)
    high = zl.i64(p.tokens)
    while high - low > 1:
        middle = (low + high) // 2
        if p.token_row[middle] == row:
            low = middle + 0
        else:
            high = middle + 0
    return position + 1 + low - token


@zl.inline
def hide_keys(p, segment, limits, own, scores):
    """Keys from a row's limit on, and those before its window, which ends with its own key, are not seen."""
    for r in zl.static(range(p.R)):
        for hidden in range(max(limits[r], segment.begin), segment.padded):
            scores[r * SEGMENT + hidden - segment.start] = MASKED
        if p.window > 0:
            for gone in range(segment.begin, min(own[r] + 1 - p.window, segment.padded)):
                scores[r * SEGMENT + gone - segment.start] = MASKED


@zl.inline
def weigh_keys(p, segment, sub, work):
    """Scores become weights, of the rows from `sub` on. Returns what their states are to be multiplied with, and the segment's
    sums."""
    L = zl.target.lanes
    rescale = [zl.f32(0) for r in range(p.R)]
    factors = [zl.f32(0) for r in range(p.R)]
    for r in zl.static(range(p.R)):
        high = [zl.f32.x(L)(FLOOR) for _ in range(2)]
        mine = work.scores + r * SEGMENT - segment.start
        for key in range(segment.begin, segment.padded, 2 * L):
            for u in zl.static(range(2)):
                high[u] = max(high[u], zl.load(mine + key + u * L, L))
        peak = zl.reduce_max(max(high[0], high[1]))
        sums = [zl.f32.x(L)(0) for _ in range(2)]
        for key in range(segment.begin, segment.padded, 2 * L):
            for u in zl.static(range(2)):
                weight = weight_of(zl.load(mine + key + u * L, L) - peak)
                sums[u] += weight
                zl.store(mine + key + u * L, weight)
        old = work.maxima[sub + r]
        new = max(old, peak)
        rescale[r] = weight_of(old - new)
        factors[r] = weight_of(peak - new)
        total = zl.reduce_add(sums[0] + sums[1]) * factors[r]
        work.totals[sub + r] = zl.fma(work.totals[sub + r], rescale[r], total)
        work.maxima[sub + r] = new
    return rescale, factors


@zl.inline
def scale_weights(p, pages, segment, scores):
    """Weights times the scales of the values that they will be multiplied with."""
    L = zl.target.lanes
    before, _ = units_of(p, pages)
    for page in range(segment.value_begin // BLOCK, (segment.stop + BLOCK - 1) // BLOCK):
        lines = zl.cast_ptr(pages.values + page_offset(pages, page) + pages.line * BLOCK, zl.f32)
        for part in zl.static(range(0, BLOCK, L)):
            units = zl.load(lines + part, L) * before
            for r in zl.static(range(p.R)):
                place = scores + (r * SEGMENT + page * BLOCK - segment.start + part)
                zl.store(place, zl.load(place, L) * units)


@zl.inline
def mix_values(p, pages, segment, scores, states, rescale, factors, column, VECTORS):
    """Columns column .. column + VECTORS * lanes of state rows: state * rescale + factor * sum over keys of p * V."""
    L, KV, ask = zl.target.lanes, pages.KV, asking()
    _, after = units_of(p, pages)
    LINE = 16 if KV is zl.f32 else 32 if KV is zl.f16 else 64  # values in 64 bytes
    acc = [[zl.f32.x(L)(0) for v in range(VECTORS)] for r in range(p.R)]
    for page in range(segment.value_begin // BLOCK, (segment.stop + BLOCK - 1) // BLOCK):
        values = pages.values + page_offset(pages, page) + column
        if asks_by_segment(pages):
            coming = keys_behind(pages, segment, page) + column * BLOCK
        else:
            coming = pages.values + page_offset(pages, min(page + PAGES_AHEAD, pages.last)) + column
        weights = scores + (page * BLOCK - segment.start)
        for t in range(min(BLOCK, segment.stop - page * BLOCK)):
            for line in zl.static(range(0, VECTORS * L, LINE)):
                ask(coming + t * (VECTORS * L if asks_by_segment(pages) else pages.line) + line)
            weight = [zl.splat(weights[r * SEGMENT + t], L) for r in range(p.R)]
            for v in zl.static(range(VECTORS)):
                row = widen(zl.load(values + t * pages.line + v * L, L), KV)
                for r in zl.static(range(p.R)):
                    acc[r][v] = zl.fma(weight[r], row, acc[r][v])
    for r in zl.static(range(p.R)):
        for v in zl.static(range(VECTORS)):
            place = states[r] + column + v * L
            zl.store(place, zl.fma(zl.load(place, L), rescale[r], acc[r][v] * (factors[r] * after)))


@zl.inline
def with_sink(p, head, maximum_, total):
    """What a query row's state is to be divided by: its weights' sum and its head's sink, in units of the largest weight. A sink far
    above every score makes it infinite, the row 0."""
    if p.has_sinks > 0:
        total += zl.exp(min(p.sinks[head] - maximum_, 88.0))
    return total


@zl.inline
def write_row(p, state, total, at):
    """The finished row state / total, at element `at` of the output."""
    L = zl.target.lanes
    inverse = 1.0 / total
    if p.INT8:
        for d in range(0, p.head_dim, GROUP):
            values = [zl.load(state + d + i, L) * inverse for i in zl.static(range(0, GROUP, L))]
            quantize_group(values, p.oq + at + d, p.oscale + (at + d) // GROUP, p.osum + (at + d) // GROUP)
    else:
        for d in range(0, p.head_dim, L):
            zl.store(p.out + at + d, zl.load(state + d, L) * inverse)


@zl.inline
def add_values(p, pages, segment, sub, work, VECTORS):
    """The values of a segment, weighted by what its scores become, into the sums of query rows sub .. sub + R - 1."""
    L = zl.target.lanes
    rescale, factors = weigh_keys(p, segment, sub, work)
    if is_scaled(p.KV):
        scale_weights(p, pages, segment, work.scores)
    states = [work.state + (sub + r) * p.head_dim for r in zl.static(range(p.R))]
    first = zl.i64(0)
    for vectors in zl.static((VECTORS, 1)):
        stop = p.head_dim // (vectors * L) * (vectors * L)
        for column in range(first, stop, vectors * L):
            mix_values(p, pages, segment, work.scores, states, rescale, factors, column, vectors)
        first = stop


@zl.inline
def attend(p, pages, segment, token, head, rows, sub, work):
    """Query rows sub .. sub + R - 1 of a tile over a segment; beyond the last one the last is computed again and its copies are
    dropped."""
    L, R = zl.target.lanes, p.R
    # Sums in registers, of which AVX2 has 16, the others 32: R * VECTORS, R factors of a step, and one vector at a time.
    VECTORS = 2 if L == 8 and R == 4 else 4
    which = [min(sub + r, rows - 1) for r in zl.static(range(R))]
    queries = [
        p.q
        + (token + which[r] // p.group) * (p.kv_heads * p.group * p.head_dim)
        + (head * p.group + which[r] % p.group) * p.head_dim
        for r in zl.static(range(R))
    ]
    own = [zl.i64(p.positions[token + which[r] // p.group]) for r in zl.static(range(R))]
    if p.SEES:
        sees = zl.cast_ptr(p.partial, zl.i32)
        limits = [min(zl.i64(sees[token + which[r] // p.group]) + 1, segment.keys) for r in zl.static(range(R))]
    else:
        limits = [min(own[r] + 1 + p.ahead, segment.keys) for r in zl.static(range(R))]
    score_keys(p, pages, segment, queries, work.scores, VECTORS)
    hide_keys(p, segment, limits, own, work.scores)
    add_values(p, pages, segment, sub, work, VECTORS)


@zl.kernel
def attention_tile(p: TileParams):
    """Grid (kv heads, tokens, splits)."""
    L = zl.target.lanes
    head = zl.block_index(0)
    token = zl.block_index(1)
    row = p.token_row[token]
    position = zl.i64(p.positions[token])
    tile = MAX_ROWS // p.group
    if token > 0 and position % tile != 0:
        if p.token_row[token - 1] == row:
            return  # another token leads this tile
    count = zl.i64(1)
    room = min(tile - position % tile, p.tokens - token)
    while count < room and p.token_row[token + count] == row:
        count += 1
    num_keys = zl.i64(p.positions[token + count - 1]) + 1
    if p.ahead > 0:
        num_keys = min(num_keys + p.ahead, keys_of_row(p, token, position))
    if p.SEES:
        last_seen = zl.cast_ptr(p.partial, zl.i32) + token
        for i in range(count):
            num_keys = max(num_keys, zl.i64(last_seen[i]) + 1)
    first_key = max(position + 1 - p.window, 0) if p.window > 0 else zl.i64(0)
    first_segment = first_key // SEGMENT
    last_segment = (num_keys - 1) // SEGMENT
    if p.splits > 1:
        if zl.block_index(2) < first_segment or zl.block_index(2) > last_segment:
            return
        first_segment = zl.block_index(2)
        last_segment = zl.block_index(2)
    rows = count * p.group
    pages = head_pages(p, head, row, first_key, num_keys)
    work = TileWork(
        zl.local_array(zl.f32, 4 * SEGMENT),
        zl.local_array(zl.f32, (MAX_ROWS + 4) * MAX_HEAD_DIM),
        zl.local_array(zl.f32, MAX_ROWS + 4),
        zl.local_array(zl.f32, MAX_ROWS + 4),
    )
    if p.KV is zl.e4m3:
        scratch = zl.local_array(zl.f16, 2 * SEGMENT // BLOCK * (MAX_HEAD_DIM * BLOCK + SCALE_BYTES // 2))
    for i in range(0, (rows + p.R - 1) // p.R * p.R):
        work.maxima[i] = FLOOR
        work.totals[i] = 0.0
        for d in range(0, p.head_dim, L):
            zl.store(work.state + i * p.head_dim + d, zl.f32.x(L)(0))
    for index in range(first_segment, last_segment + 1):
        segment = segment_of(index, first_key, num_keys, pages)
        if p.KV is zl.e4m3:
            if rows > 2 * p.R:
                converted = convert_pages(p, pages, segment, scratch)
                for sub in range(0, rows, p.R):
                    attend(p, converted, segment, token, head, rows, sub, work)
            else:
                for sub in range(0, rows, p.R):
                    attend(p, pages, segment, token, head, rows, sub, work)
        else:
            for sub in range(0, rows, p.R):
                attend(p, pages, segment, token, head, rows, sub, work)

    for i in range(rows):
        place = (token + i // p.group) * p.kv_heads * p.group + head * p.group + i % p.group
        if p.splits > 1:
            record = p.partial + (place * p.max_segments + first_segment) * (p.head_dim + BLOCK)
            for d in range(0, p.head_dim, L):
                zl.store(record + d, zl.load(work.state + i * p.head_dim + d, L))
            record[p.head_dim] = work.maxima[i]
            record[p.head_dim + 1] = work.totals[i]
        else:
            divisor = with_sink(p, head * p.group + i % p.group, work.maxima[i], work.totals[i])
            write_row(p, work.state + i * p.head_dim, divisor, place * p.head_dim)
