"""What the warps of zse.kernels.gpu.chain have in common: a block's share of each product, the ring of weights, and the
activations that are multiplied with."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu import matmul_few as few
from zse.kernels.gpu import matmul_tiles as tiles
from zse.kernels.gpu.attention_parts import FLOOR
from zse.kernels.gpu.attention_plan import HEADER

CHUNK = 128  # columns, and of a group of weights
PER_STAGE = 8  # chunks of a unit of 32 rows in a stage of the ring
WARPS = 16  # that multiply; the one after them copies, the last one adds up
BUFFERS = 4  # units whose sums wait to be added up
CONSUMERS = 1  # named barrier of the warps that multiply
SPLIT = 4
TOGETHER = 4  # records of attention's tasks that are on their way
MOST_CHUNKS = 56  # of a product's columns that one block multiplies: 7,168, of down's 28,672
STAGES = 11
FLIGHT = 4  # stages on their way at a time
# At most FIRST_FLIGHT of the FIRST stages, which fill the ring and then o's place in it, for attention and the stream wait
# behind them (an H200, ms a step: none 1.335, the first 11 1.324, 15 1.297 for 1.304; 1 on its way 1.397).
FIRST, FIRST_FLIGHT = 15, 2
O, GATE_UP, DOWN, QKV = range(4)
NEGATIVE_ZERO = 1 << 31
WEIGHT_BYTES, SCALE_BYTES = 1024, 32  # of a chunk of 16 rows: shifts 10 and 5
STAGE_BYTES = PER_STAGE * 2 * (WEIGHT_BYTES + 2 * SCALE_BYTES)
SCALES_AT = PER_STAGE * 2 * WEIGHT_BYTES  # in a stage; offsets behind them
TILE_SCALES = PER_STAGE * SCALE_BYTES


class ChainWeights(zl.Record):
    """The first parameters of launches between two attentions. has_records: attention's heads are of 128, and where its plan
    has several tasks, their records and totals [tasks, heads, 128 and 2] stand for `a`."""

    w0: zl.Ptr[zl.u8, "const"]
    w1: zl.Ptr[zl.u8, "const"]
    w2: zl.Ptr[zl.u8, "const"]
    w3: zl.Ptr[zl.u8, "const"]
    scale0: zl.Ptr[zl.u8, "const"]
    scale1: zl.Ptr[zl.u8, "const"]
    scale2: zl.Ptr[zl.u8, "const"]
    scale3: zl.Ptr[zl.u8, "const"]
    offset0: zl.Ptr[zl.u8, "const"]
    offset1: zl.Ptr[zl.u8, "const"]
    offset2: zl.Ptr[zl.u8, "const"]
    offset3: zl.Ptr[zl.u8, "const"]
    a: zl.Ptr[zl.bf16, "const"]
    norm1: zl.Ptr[zl.f32, "const"]
    norm3: zl.Ptr[zl.f32, "const"]
    records: zl.Ptr[zl.f32, "const"]
    totals: zl.Ptr[zl.f32, "const"]
    plan: zl.Ptr[zl.i32, "const"]
    has_records: zl.i32


class ChainParams(ChainWeights):
    """w, scale, offset 0 to 3: of o [hidden, attended], gates and ups [2 * inner, hidden], down [hidden, inner] and q, k
    and v [qkv, hidden], int4 in groups of 128, layout r16. a: bf16 [attended]; x: the stream, f32 [hidden], read and
    written; out: f32 [qkv], or where qkv is 0, and the stream is left, the normed row, bf16 [hidden]. norm1, norm3: of the norms before the second and the fourth product. mid f32 [hidden], act
    bf16 [inner] as pairs, after f32 [SPLIT, hidden], one behind the other: zeros. stale: the same of the launch before, is
    cleared; follows: the stream is the sum of its parts of `after`, not `x`. LEAVES: the stream is written to `x`. mode: of zse.kernels.gpu.matmul_tiles."""

    bias: zl.Ptr[zl.f32, "const"]
    x: zl.Ptr[zl.f32]
    out: zl.Ptr[zl.f32]
    mid: zl.Ptr[zl.u32]
    act: zl.Ptr[zl.u32]
    after: zl.Ptr[zl.u32]
    stale: zl.Ptr[zl.u32]
    hidden: zl.i32
    attended: zl.i32
    inner: zl.i32
    qkv: zl.i32
    has_bias: zl.i32
    follows: zl.i32
    mode: zl.i32
    eps: zl.f32
    SYMMETRIC: zl.static
    LEAVES: zl.static
    STAGES: zl.static
    FLIGHT: zl.static


class ChainBlock(ChainParams):
    """What a block works with. ring: the stages; full, empty: their barriers; sums [BUFFERS, WARPS, PITCH] of units,
    ready, free: their barriers; heard [2]: all warps have what the other blocks said before gate and up, and before q, k and v; squares [2, WARPS]: of the rows
    that are normalized; columns [2, MOST_CHUNKS, 256], facts [2, MOST_CHUNKS, 2]: activations as of
    zse.kernels.gpu.matmul_few, of every other product; shares: the block's, of each product; piece: where in a stage the
    lane's weights of a chunk are."""

    lane: Any
    warp: Any
    ring: Any
    full: Any
    empty: Any
    sums: Any
    ready: Any
    free: Any
    heard: Any
    squares: Any
    columns: Any
    facts: Any
    piece: Any
    here: Any
    shares: Any


class ChainShare(zl.Record):
    """What of a product is this block's: `chunks` of a row, of which it has `count` from `begin` on; `units`, every
    `step`-th from `first` on. Of its unit number `half` it has one tile alone, `tile`."""

    chunks: Any
    begin: Any
    count: Any
    first: Any
    step: Any
    units: Any
    half: Any
    tile: Any


@zl.inline
def share_of(product, p):
    """Whole units for every block; of down a part of the columns of more of them, and of those that not all have a tile for
    each, where these suffice. Blocks that have least to do with o and down come first with q, k and v."""
    blocks, block = zl.num_blocks(0), zl.block_index(0)
    chunks = (p.attended if product == O else p.inner if product == DOWN else p.hidden) // CHUNK
    units = p.inner // 16 if product == GATE_UP else p.qkv // 32 if product == QKV else p.hidden // 32
    late = block - p.hidden // 32 % blocks
    late = late + blocks if late < 0 else late
    first, step = late if product == QKV else block + 0, blocks + 0
    begin, count = zl.i32(0), chunks + 0
    if product == DOWN:
        step = blocks // SPLIT
        first = block // SPLIT if block // SPLIT < step else units + 0
        count = (chunks + (SPLIT - 1)) // SPLIT
        begin = block % SPLIT * count
        count = min(count, chunks - begin)
    mine, half, tile = (units - 1 - first) // step + 1 if first < units else zl.i32(0), zl.i32(-1), zl.i32(0)
    if product == DOWN and first < step:
        whole = units // step
        rest = (units - whole * step) * 2
        if rest <= step:
            mine, half, tile = whole + zl.i32(first < rest), whole + 0, whole * step * 2 + first
    return ChainShare(chunks, begin, count, first, step, mine, half, tile)


@zl.inline
def keep_shares(p):
    """All four, by one warp: between products nothing is divided."""
    if p.lane < 4:
        share = share_of(p.lane, p)
        for i in zl.static(range(len(ChainShare._fields))):
            p.shares[p.lane * len(ChainShare._fields) + i] = getattr(share, ChainShare._fields[i])


@zl.inline
def kept_share(product, p):
    at = p.shares + product * len(ChainShare._fields)
    return ChainShare(*[at[i] + 0 for i in zl.static(range(len(ChainShare._fields)))])


@zl.inline
def tile_of(share, u, per_unit):
    """The first of the tiles of the block's unit u."""
    return share.tile + 0 if u == share.half else (share.first + u * share.step) * per_unit


@zl.inline
def move(place, steps, count):
    """place: [slot, parity] of `count` barriers."""
    place[0] += steps
    if place[0] >= count:
        place[0] -= count
        place[1] = place[1] ^ 1


@zl.inline
def source_of(product, plane, p):
    """The product's weights, scales or offsets."""
    found = p.w0 + 0
    if product == O:
        found = p.w0 if plane == 0 else p.scale0 if plane == 1 else p.offset0
    elif product == GATE_UP:
        found = p.w1 if plane == 0 else p.scale1 if plane == 1 else p.offset1
    elif product == DOWN:
        found = p.w2 if plane == 0 else p.scale2 if plane == 1 else p.offset2
    else:
        found = p.w3 if plane == 0 else p.scale3 if plane == 1 else p.offset3
    return found


@zl.inline
def copy_weights(p):
    """The warp that copies: the chunks of all units of all products, in order, PER_STAGE at a time. A stage has the end of
    one unit and the beginning of the next; each of 12 lanes copies one plane of one tile of one of them. They pass L2 once,
    which keeps what blocks tell each other instead (1.1 % of a step, an H200)."""
    PLANES = 2 if p.SYMMETRIC else 3
    state, landed = [zl.i32(0), zl.i32(0)], [zl.i32(0), zl.i32(0)]
    flying, asked = zl.i32(0), zl.i32(0)
    second, tile, plane = p.lane // 6, p.lane % 6 // 3, p.lane % 3
    shift = 10 if plane == 0 else zl.i32(5)
    to = tile * (SCALES_AT // 2) if plane == 0 else SCALES_AT + (plane * 2 - 2 + tile) * TILE_SCALES
    for product in zl.unroll(range(4), 1):
        source = source_of(product, plane, p)
        # Of a unit's two tiles: neighbours, or a gate's and its up's.
        tiles_a_unit = zl.i32(1) if product == GATE_UP else zl.i32(2)
        second_tile = p.inner // 16 if product == GATE_UP else zl.i32(1)
        share = kept_share(product, p)
        unit, chunk, total = zl.i32(0), zl.i32(0), share.units * share.count
        for at in zl.unroll(range(0, total, PER_STAGE), 1):
            here = min(total - at, PER_STAGE)
            rest = min(here, share.count - chunk)
            zl.mbarrier_wait(p.empty + state[0], state[1] ^ 1)
            while flying >= (zl.i32(FIRST_FLIGHT) if asked < FIRST else zl.i32(p.FLIGHT)):
                zl.mbarrier_wait(p.full + landed[0], landed[1])
                move(landed, 1, p.STAGES)
                flying -= 1
            if p.lane == 0:
                tiles = here * 2 - (
                    rest if unit == share.half else here - rest if unit + 1 == share.half else zl.i32(0)
                )
                zl.mbarrier_expect(p.full + state[0], tiles * (WEIGHT_BYTES + (PLANES - 1) * SCALE_BYTES))
            zl.warp_barrier()
            mine = rest if second == 0 else here - rest
            if unit + second == share.half and tile == 1:
                mine = zl.i32(0)
            row = tile_of(share, unit + second, tiles_a_unit) + tile * second_tile
            block = zl.i64(row * share.chunks + (share.begin + (chunk if second == 0 else 0)))
            if p.lane < 12 and mine > 0 and plane < PLANES:
                slot = p.ring + (state[0] * STAGE_BYTES + to + ((rest << shift) if second == 1 else 0))
                zl.bulk_copy(slot, source + (block << shift), mine << shift, p.full + state[0], "evict_first")
            chunk += here
            if chunk >= share.count:
                chunk -= share.count
                unit += 1
            flying += 1
            asked += 1
            move(state, 1, p.STAGES)


@zl.inline
def own(first, i, chunks):
    """Chunk first + i * WARPS, or `first` once more where there is none."""
    return first + i * WARPS if first + i * WARPS < chunks else first + 0


@zl.inline
def load_words(words, pointer):
    """Four flagged words."""
    four = zl.bitcast(zl.load_relaxed(zl.cast_ptr(pointer, zl.u64), 2), zl.u32)
    for i in zl.static(range(4)):
        words[i] = four[i]


@zl.inline
def ask(words, product, chunk, p):
    """Start the loads of the lane's four columns of a chunk: two words of bf16 pairs, or four f32."""
    at = chunk * CHUNK + p.lane * 4
    if product == GATE_UP:
        load_words(words, p.mid + at)
    else:
        pair = zl.make_vector(zl.u32(1), zl.u32(1))
        if product == O:
            pair = zl.bitcast(zl.load(p.a + at, 4), zl.u32)
        else:
            pair = zl.load_relaxed(p.act + at // 2, 2)
        words[0], words[1] = pair[0], pair[1]
        words[2], words[3] = zl.u32(1), zl.u32(1)


@zl.inline
def missing(words):
    least = words[0] + 0
    for word in zl.static(words[1:]):
        least = min(least, word)
    return least == 0


@zl.inline
def take_after(words, mine, p):
    """Of two chunks the four columns of `after`, once all parts are there, added up."""
    parts = [[zl.u32(0) for _ in zl.static(range(4 * SPLIT))] for _ in zl.static(range(2))]
    while missing(parts[0]) or missing(parts[1]):
        for i in zl.static(range(2)):
            for s in zl.static(range(SPLIT)):
                if missing(parts[i][4 * s : 4 * s + 4]):
                    load_words(parts[i][4 * s : 4 * s + 4], p.after + (s * p.hidden + mine[i] * CHUNK + p.lane * 4))
    for i in zl.static(range(2)):
        for e in zl.static(range(4)):
            total = zl.bitcast(parts[i][e], zl.f32)
            for s in zl.static(range(1, SPLIT)):
                total = total + zl.bitcast(parts[i][4 * s + e], zl.f32)
            words[4 * i + e] = zl.bitcast(total, zl.u32)


@zl.inline
def tasks_of(p):
    """Of attention, whose records are still to be merged; 0: `a` has its result. Read before grid_wait(), as attention
    reads its plan."""
    found = zl.i32(0)
    if p.has_records != 0:
        found = p.plan[HEADER + 7] & 4095
    return found if found > 1 else zl.i32(0)


@zl.inline
def merge_records(words, mine, tasks, p):
    """Of two chunks, heads of attention, the four columns as pairs of bf16, merged of the records of its tasks. (The last of
    them to merge is 0.9 us later, an H200: a fence, a counter, a fence, and only then what is merged.)"""
    heads = p.attended // CHUNK
    peak = [zl.f32(FLOOR) for _ in mine]
    total = [zl.f32(0) for _ in mine]
    sums = [[zl.f32(0) for _ in zl.static(range(4))] for _ in mine]
    for begin in zl.unroll(range(0, tasks, TOGETHER), 1):
        which = [min(begin + u, tasks - 1) * heads for u in zl.static(range(TOGETHER))]
        pairs = [[zl.load(p.totals + (w + m) * 2, 2) for w in which] for m in mine]
        fours = [[zl.load(p.records + ((w + m) * CHUNK + p.lane * 4), 4) for w in which] for m in mine]
        for i in zl.static(range(2)):
            new = peak[i] + 0.0
            for u in zl.static(range(TOGETHER)):
                new = max(new, pairs[i][u][0])
            factor = zl.exp2(peak[i] - new)
            peak[i] = new
            total[i] = total[i] * factor
            for e in zl.static(range(4)):
                sums[i][e] = sums[i][e] * factor
            for u in zl.static(range(TOGETHER)):
                weight = zl.exp2(pairs[i][u][0] - new) if begin + u < tasks else zl.f32(0)
                total[i] = zl.fma(pairs[i][u][1], weight, total[i])
                for e in zl.static(range(4)):
                    sums[i][e] = zl.fma(fours[i][u][e], weight, sums[i][e])
    for i in zl.static(range(2)):
        scale = zl.reciprocal(total[i])
        four = zl.make_vector(*[value * scale for value in sums[i]])
        pair = zl.bitcast(zl.convert(four, zl.bf16), zl.u32)
        words[2 * i], words[2 * i + 1] = pair[0], pair[1]


@zl.inline
def hear_attended(tasks, p):
    """Of the warp's first two chunks of what attention gave the lane's four columns, as pairs of bf16. Before the loop over
    products: within it these 2 KB of code, jumped over, cost 0.7 us of a layer (an H200)."""
    words, chunks = [zl.u32(1) for _ in zl.static(range(4))], p.attended // CHUNK
    if p.warp < chunks:
        mine = [own(p.warp, i, chunks) for i in zl.static(range(2))]
        if tasks == 0:
            for i in zl.static(range(2)):
                pair = zl.bitcast(zl.load(p.a + (mine[i] * CHUNK + p.lane * 4), 4), zl.u32)
                words[2 * i], words[2 * i + 1] = pair[0], pair[1]
        else:
            merge_records(words, mine, tasks, p)
    return words


@zl.inline
def load_norms(norms, product, first, p):
    """The norm's weights of the lane's columns of two chunks."""
    chunks = p.hidden // CHUNK
    if first < chunks:
        for i in zl.static(range(2)):
            at = own(first, i, chunks) * CHUNK + p.lane * 4
            four = zl.load((p.norm1 if product == GATE_UP else p.norm3) + at, 4)
            for e in zl.static(range(4)):
                norms[4 * i + e] = four[e]


@zl.inline
def prepare(product, share, attended, norms, columns, facts, p):
    """This warp's chunks of the block's columns → columns, facts. norms: of load_norms() for the first two chunks. Returns
    the lane's share of the sum of the squares of a row that is normalized."""
    squares = zl.f32(0)
    ahead = [zl.u32(1) for _ in zl.static(range(8))]
    if product == O:
        for i in zl.static(range(2)):
            ahead[4 * i], ahead[4 * i + 1] = attended[2 * i] + 0, attended[2 * i + 1] + 0
    elif p.warp < share.count and product != QKV:
        for i in zl.static(range(2)):
            ask(ahead[4 * i : 4 * i + 4], product, share.begin + own(p.warp, i, share.count), p)
    for first in zl.unroll(range(p.warp, share.count, 2 * WARPS), 1):
        words = [word + 0 for word in ahead]
        mine = [own(first, i, share.count) for i in zl.static(range(2))]
        following = first + 2 * WARPS
        if following < share.count and product != QKV:
            for i in zl.static(range(2)):
                ask(ahead[4 * i : 4 * i + 4], product, share.begin + own(following, i, share.count), p)
        if product == QKV:
            take_after(words, mine, p)
        else:
            while missing(words) and product != O:
                for i in zl.static(range(2)):
                    ask(words[4 * i : 4 * i + 4], product, share.begin + mine[i], p)
        if product == GATE_UP or product == QKV:
            for i in zl.static(range(2)):
                for e in zl.static(range(4)):
                    value = zl.bitcast(words[4 * i + e], zl.f32)
                    counts = value if i == 0 or mine[1] != mine[0] else zl.f32(0)
                    squares = zl.fma(counts, counts, squares)
                    words[4 * i + e] = zl.bitcast(value * norms[4 * i + e], zl.u32)
            load_norms(norms, product, following, p)
        else:
            for i in zl.static(range(2)):
                pair = [words[4 * i] + 0, words[4 * i + 1] + 0]
                for e in zl.static(range(4)):
                    words[4 * i + e] = pair[e // 2] & 0xFFFF0000 if e % 2 else pair[e // 2] << 16
        at, kept = [columns + m * 256 for m in mine], [facts + m * 2 for m in mine]
        few.prepare_bits([words[0:4], words[4:8]], at, kept, p.lane, 0, True)
    return squares


@zl.inline
def multiply_chunk(acc, weights, piece, scales, scale, to_offsets, columns, facts, chunk, column, fact, SYMMETRIC):
    """acc += a chunk of this lane's four rows, as matmul_few.multiply. Its weights begin at weights + piece, their scales at
    scales + scale, offsets to_offsets behind those; what they are multiplied with is `chunk` of `columns` and `facts`, or
    as many further on as `column` and `fact` say."""
    words = [zl.load(zl.cast_ptr(weights + (piece + i * 256), zl.u32), 4) for i in zl.static(range(4))]
    at = columns + (chunk + column) * 256
    halves = [zl.load(zl.cast_ptr(at + h * 128, zl.u32), 4) for h in zl.static(range(2))]
    part = few.nibble_sums(words, halves, 0, CHUNK)
    at_scale = scales + scale
    factors = zl.convert(zl.load(zl.cast_ptr(at_scale, zl.f16), 4), zl.f32)
    offsets = factors * -tiles.MIDDLE["int4"]
    if not SYMMETRIC:
        offsets = zl.convert(zl.load(zl.cast_ptr(at_scale + to_offsets, zl.f16), 4), zl.f32)
    s, total = facts[(chunk + fact) * 2] * (1 / 16), facts[(chunk + fact) * 2 + 1]
    for i in zl.static(range(4)):
        dot = zl.f32(part[2 * i] * 256 + part[2 * i + 1]) * s
        acc[i] = zl.fma(factors[i], dot, acc[i])
        acc[i] = zl.fma(offsets[i], total, acc[i])
