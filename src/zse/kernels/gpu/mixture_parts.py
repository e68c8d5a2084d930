"""What the warps of zse.kernels.gpu.mixture_chain have in common: a block's share of each product; the choice of experts, and
the warp that copies weights."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu import chain_parts as parts
from zse.kernels.gpu import router

O, GATE_UP, DOWN, QKV = range(4)
WARPS = parts.WARPS
CHUNK, CHUNK_BYTES = parts.CHUNK, parts.WEIGHT_BYTES + 2 * parts.SCALE_BYTES
CHUNKS = 192  # of 16 rows and CHUNK columns: room for a block's weights
MOST_OWN = 3  # chunks of o's or down's activations that a warp prepares
COLUMNS = 64  # chunks of activations that a block multiplies with: of o or down, and of the stream
# Of what is said; a block reads one. With a single one 132 blocks ask L2 for the same lines again and again: what was said
# was heard up to 1.5 us later, and logits, by 16 warps of every block, 3 us later (an H200).
REPLICAS = 8
MAX_HIDDEN = WARPS * CHUNK  # each warp that multiplies has a chunk
MAX_EXPERTS = 128  # four a lane of the warps that choose; each has a block
MAX_UNITS, MOST_CHOSEN = 5, 10  # gates of a block, and chosen experts: a lane copies a plane of one of either
BUFFERS = 2


class MixtureChainParams(parts.ChainWeights):
    """w, scale, offset 0 to 3: of o [hidden, attended], all experts' gates and ups [experts * 2 * inner, hidden] and downs
    [experts * hidden, inner], and q, k and v [qkv, hidden], int4 in groups of 128, layout r16. router bf16 [experts,
    hidden], router_bias f32 [experts]; select to factor: as of zse.kernels.gpu.one_token.ChosenParams. a: bf16 [attended];
    x: the stream, f32 [hidden], read and written; out: f32 [qkv]; bias is added to it. norm1, norm3: of the norms before
    the router and before q, k and v. REPLICAS times each: mid f32 [hidden], logit f32 [experts], act bf16 [chosen, inner] as
    pairs, after f32 [hidden]: zeros; all but `after` are left so. stale: `after` of the launch before, is cleared. mode: of
    zse.kernels.gpu.matmul_tiles. first_gate, first_qkv: of begins()."""

    router: zl.Ptr[zl.bf16, "const"]
    router_bias: zl.Ptr[zl.f32, "const"]
    select: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    x: zl.Ptr[zl.f32]
    out: zl.Ptr[zl.f32]
    mid: zl.Ptr[zl.u32]
    logit: zl.Ptr[zl.u32]
    act: zl.Ptr[zl.u32]
    after: zl.Ptr[zl.u32]
    stale: zl.Ptr[zl.u32]
    first_gate: zl.i32
    first_qkv: zl.i32
    hidden: zl.i32
    attended: zl.i32
    inner: zl.i32
    qkv: zl.i32
    experts: zl.i32
    chosen: zl.i32
    gating: zl.i32
    has_bias: zl.i32
    has_router_bias: zl.i32
    has_select: zl.i32
    normalize: zl.i32
    mode: zl.i32
    eps: zl.f32
    sum_eps: zl.f32
    factor: zl.f32
    SYMMETRIC: zl.static


class MixtureBlock(MixtureChainParams):
    """What a block works with. replica: of what is said, the one that it reads. weights [CHUNKS, CHUNK_BYTES]; columns
    [COLUMNS, 256], facts [COLUMNS, 2]: activations as of zse.kernels.gpu.matmul_few; sums [BUFFERS, WARPS, PITCH] of tiles,
    ready, free: their barriers; squares [2, 2, WARPS]: of the rows that are normalized, and the products with the router;
    logits f32 [MAX_EXPERTS], found i32 [MAX_CHOSEN]: what was heard and chosen. Barriers: full [3 + MAX_UNITS]: the weights of
    o; of q, k and v; of downs; of each gate and its up; heard [2] as the chain's; picked: the choice; spent: o's weights."""

    lane: Any
    warp: Any
    replica: Any
    weights: Any
    columns: Any
    facts: Any
    sums: Any
    squares: Any
    logits: Any
    found: Any
    full: Any
    ready: Any
    free: Any
    heard: Any
    picked: Any
    spent: Any


class Share(zl.Record):
    """What of a product is a block's: of `tiles` of 16 rows (of gates: with an up) every num_blocks-th, each of `chunks`
    chunks. begin: where in `weights` the first one is, `step` chunks before the next; barrier: of the first one in `full`."""

    tiles: Any
    chunks: Any
    begin: Any
    step: Any
    barrier: Any


@zl.inline
def share_of(product, p):
    """Without a division: every warp asks for it between two products."""
    hidden = p.hidden >> 7
    tiles, chunks, begin, barrier = p.hidden >> 4, p.attended >> 7, zl.i32(0), zl.i32(0)
    if product == GATE_UP:
        tiles, chunks, begin, barrier = p.chosen * p.inner >> 4, hidden + 0, p.first_gate + 0, zl.i32(3)
    elif product == DOWN:
        chunks, barrier = p.chosen * p.inner >> 7, zl.i32(2)
    elif product == QKV:
        tiles, chunks, begin, barrier = p.qkv >> 4, hidden + 0, p.first_qkv + 0, zl.i32(1)
    return Share(tiles, chunks, begin, chunks << 1 if product == GATE_UP else chunks + 0, barrier)


@zl.inline
def units_of(share):
    """How many of the tiles are this block's."""
    return max((share.tiles - zl.block_index(0) + (zl.num_blocks(0) - 1)) // zl.num_blocks(0), 0)


class ExpertCopy(zl.Record):
    """What a lane copies of an expert: one plane of a tile. to: bytes from the beginning of `weights`; source: expert 0's;
    step: from an expert to the next, in bytes; barrier: of `full`; j: which of the chosen experts; exists: it is one."""

    to: Any
    source: Any
    step: Any
    nbytes: Any
    barrier: Any
    j: Any
    exists: Any


@zl.inline
def copy(one, to, source, p):
    if one.exists != 0:
        mine = source + zl.i64(p.found[one.j]) * zl.i64(one.step)
        zl.bulk_copy(p.weights + to, mine, one.nbytes, p.full + one.barrier, hint="evict_first")


@zl.inline
def plane_at(plane, total, at):
    """Where, of a tile of `total` chunks, a plane's chunk `at` lies."""
    behind = 0 if plane == 0 else total * (parts.WEIGHT_BYTES - parts.SCALE_BYTES + plane * parts.SCALE_BYTES)
    return behind + (at << (10 if plane == 0 else zl.i32(5)))


@zl.inline
def gate_copy(p):
    """The lane's, of a gate or an up: a tile of each block's units has its planes beside each other in a warp."""
    PLANES = 2 if p.SYMMETRIC else 3
    share, each = share_of(GATE_UP, p), p.inner >> 4
    unit, is_up, plane = p.lane // (2 * PLANES), p.lane // PLANES % 2, p.lane % PLANES
    number, shift = zl.block_index(0) + unit * zl.num_blocks(0), 10 if plane == 0 else zl.i32(5)
    j = min(number // each, p.chosen - 1)
    to = (share.begin + unit * share.step + is_up * share.chunks) * CHUNK_BYTES + plane_at(plane, share.chunks, 0)
    tile = is_up * each + number % each
    return ExpertCopy(
        to,
        parts.source_of(GATE_UP, plane, p) + (zl.i64(tile * share.chunks) << zl.i64(shift)),
        2 * each * share.chunks << shift,
        share.chunks << shift,
        share.barrier + unit,
        j,
        zl.i32(unit < MAX_UNITS and number < share.tiles),
    )


@zl.inline
def down_copy(p):
    """The lane's, of the block's first tile of a down."""
    PLANES = 2 if p.SYMMETRIC else 3
    share, each = share_of(DOWN, p), p.inner >> 7
    j, plane = p.lane // PLANES, p.lane % PLANES
    shift = 10 if plane == 0 else zl.i32(5)
    return ExpertCopy(
        share.begin * CHUNK_BYTES + plane_at(plane, share.chunks, j * each),
        parts.source_of(DOWN, plane, p) + (zl.i64(zl.block_index(0) * each) << zl.i64(shift)),
        share.tiles * each << shift,
        each << shift,
        share.barrier + 0,
        min(j, p.chosen - 1),
        zl.i32(j < p.chosen),
    )


@zl.inline
def expect(barrier, chunks, p):
    """By one lane."""
    scales = parts.SCALE_BYTES if p.SYMMETRIC else 2 * parts.SCALE_BYTES
    zl.mbarrier_expect(p.full + barrier, chunks * (parts.WEIGHT_BYTES + scales))


@zl.inline
def expect_all(p):
    """What will be copied: of the block's gates each with its up, of everything else all tiles together."""
    for product in zl.unroll(range(4), 1):
        share = share_of(product, p)
        units = units_of(share)
        if product == GATE_UP:
            if p.lane < units:
                expect(share.barrier + p.lane, 2 * share.chunks, p)
        elif p.lane == 0 and units > 0:
            expect(share.barrier, units * share.chunks, p)
    zl.warp_barrier()


@zl.inline
def copy_rows(product, p):
    """This block's tiles of o, or of q, k and v."""
    PLANES = 2 if p.SYMMETRIC else 3
    share = share_of(product, p)
    for i in zl.unroll(range(p.lane, units_of(share) * PLANES, 32), 1):
        unit, plane = i // PLANES, i % PLANES
        shift, tile = 10 if plane == 0 else zl.i32(5), zl.block_index(0) + unit * zl.num_blocks(0)
        to = (share.begin + unit * share.step) * CHUNK_BYTES + plane_at(plane, share.chunks, 0)
        source = parts.source_of(product, plane, p) + (zl.i64(tile * share.chunks) << zl.i64(shift))
        zl.bulk_copy(p.weights + to, source, share.chunks << shift, p.full + share.barrier, hint="evict_first")


@zl.inline
def copy_all(p):
    """The warp that copies; in the end it puts back the zeros of what was said but `after`. All that asks for no choice is
    done before attention is."""
    expect_all(p)
    copy_rows(O, p)
    if zl.block_index(0) < p.hidden >> 4:  # attention waits behind what is asked of memory, and these are needed last
        zl.mbarrier_wait(p.full, 0)
    copy_rows(QKV, p)
    gates, downs = gate_copy(p), down_copy(p)
    share = share_of(DOWN, p)
    zl.grid_wait()
    if chooses(p):
        zl.mbarrier_wait(p.picked, 0)
        copy(gates, gates.to, gates.source, p)
        zl.mbarrier_wait(p.spent, 0)
        if zl.block_index(0) < p.chosen * p.inner >> 4:
            zl.mbarrier_wait(p.full + 3, 0)  # gates are needed first: downs do not stand between them
        to, source = downs.to + 0, downs.source + 0
        for _tile in zl.unroll(range(zl.block_index(0), share.tiles, zl.num_blocks(0)), 1):
            copy(downs, to, source, p)
            to += share.step * CHUNK_BYTES
            source = source + zl.num_blocks(0) * downs.nbytes
    zl.mbarrier_wait(p.heard + 1, 0)
    first, step = zl.block_index(0) * 32 + p.lane, zl.num_blocks(0) * 32
    for i in zl.unroll(range(first, REPLICAS * max(p.hidden, p.chosen * p.inner >> 1), step), 1):
        if i < REPLICAS * p.hidden:
            zl.store_relaxed(p.mid + i, 0)
        if i < REPLICAS * p.chosen * p.inner >> 1:
            zl.store_relaxed(p.act + i, 0)
        if i < REPLICAS * p.experts:
            zl.store_relaxed(p.logit + i, 0)


@zl.inline
def chooses(p):
    """Whether the block has tiles of experts."""
    return zl.block_index(0) < max(p.hidden >> 4, p.chosen * p.inner >> 4)


@zl.inline
def choose(p):
    """The chosen experts in `found`, by all warps that multiply: each counts, for eight experts, those that are better. (One
    warp that looks for the best again and again takes 1.3 us for 8 of 128, an H200.)"""
    at, EACH = min(p.lane * 4, p.experts - 4), MAX_EXPERTS // parts.WARPS
    if p.warp == 0:
        words = [zl.u32(0) for _ in zl.static(range(4))]
        while parts.missing(words):
            parts.load_words(words, p.logit + (p.replica * p.experts + at))
        if p.lane * 4 < p.experts:
            for u in zl.static(range(4)):
                p.logits[at + u] = zl.bitcast(words[u], zl.f32)
    zl.named_barrier(parts.CONSUMERS, parts.WARPS * 32)
    keys = [zl.u32(0) for _ in zl.static(range(4))]
    if p.lane * 4 < p.experts:
        for u in zl.static(range(4)):
            keys[u] = router.key_of(p, at + u)
    rank = zl.i32(MAX_EXPERTS)
    for i in zl.static(range(EACH)):
        owner = p.warp * (EACH // 4) + i // 4
        key = zl.shuffle(keys[i % 4], owner)
        better = zl.i32(0)
        for u in zl.static(range(4)):  # of equal ones the first is better
            better += zl.i32(keys[u] > key - zl.u32(p.lane < owner + (1 if u < i % 4 else 0)))
        better = zl.warp_total(better)
        rank = better if p.lane == i else rank
    if p.warp * EACH + p.lane < p.experts and rank < p.chosen:
        p.found[rank] = p.warp * EACH + p.lane
