"""What ranks with tokens of their own exchange between GPUs that can write each other's memory (peers.py says how they meet): rows go from
their owner to all ranks, parts of sums from all ranks to the owner.

The owner adds the parts in f32 in the order of ranks, each as it was sent, the own one too: a sum is the same whoever owns it. Rows are
found by their place in the step; a block has the same rows on all ranks, so what it needs comes from blocks of its number."""

from zse import kernel as zl
from zse.kernels.gpu import peers
from zse.kernels.gpu.all_reduce import load_eight, numbers_of, sent_as, store_eight, sum_of, wide, words_of
from zse.kernels.gpu.peers import PeerParams

SMALL_THREADS, LARGE_THREADS = 256, 512
FORMS = (("f32", zl.f32), ("half", zl.bf16))  # as what parts of sums are sent
# Words at the end of a small slot, by which ranks hear from those that have nothing to send: none is two exchanges ahead.
GREETING = 2
TILES = 4  # of a thread, in flight at once


class SpreadParams(PeerParams):
    """out [count, width]: row i is row place[i] of x on the rank owner[i]; of `count` rows those from `begin` on, `most` at most. width: in
    words of 4 bytes, a multiple of 4. wanted i32 [count], where `chooses`: a bit for each rank that wants a row; others do not get it."""

    x: zl.Ptr[zl.u32, "const"]
    out: zl.Ptr[zl.u32]
    owner: zl.Ptr[zl.i32, "const"]
    place: zl.Ptr[zl.i32, "const"]
    wanted: zl.Ptr[zl.i32, "const"]
    count: zl.i32
    width: zl.i32
    begin: zl.i32
    most: zl.i32
    chooses: zl.i32


class CollectParams(SpreadParams):
    """out's row place[i] = the sum of all ranks' row i of x [count, width], where this rank is owner[i]; `wanted` are the ranks that have a
    part. M: what parts are sent as. width is a multiple of 8."""

    x: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    M: zl.static


@zl.inline
def put_words(words, to, number):
    """Two or four words (u32) with the exchange's number to a peer's small slot."""
    tag = zl.u64(number) << 32
    for k in zl.static(range(0, len(words), 2)):
        zl.store_relaxed(to + k, zl.make_vector(zl.u64(words[k]) | tag, zl.u64(words[k + 1]) | tag))


@zl.inline
def wanted_by(row, p):
    """A bit for each rank that exchanges this row with its owner."""
    found = zl.u32(0xFFFFFFFF)
    if p.chooses != 0:
        found = zl.bitcast(zl.i32(p.wanted[row]), zl.u32)
    return found


@zl.inline
def has_bit(bits, rank):
    return (bits >> zl.u32(rank)) & 1 != 0


@zl.inline
def greet(number, p):
    """Every rank hears of this exchange from every other one, by the first block."""
    other = zl.thread_index()
    if (zl.block_index(0) == 0) & (other < p.size):
        at = peers.SMALL_VALUES - GREETING
        for r, peer in zl.static(enumerate(peers.peers_of(p))):
            if (r == other) & (r != p.rank):
                put_words([zl.u32(0), zl.u32(0)], peer + (peers.small_slot(number, p.rank, p) + at), number)
        peers.receive_small(2, [other], at, number, p)


@zl.inline
def spread_small(p):
    """Four words a thread."""
    number = peers.small_number(p)
    at = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    if at < p.count * p.width:
        row = at // p.width
        source, bits = p.owner[row], wanted_by(row, p)
        if source == p.rank:
            words = zl.load(p.x + (p.place[row] * p.width + (at - row * p.width)), 4)
            zl.store(p.out + at, words)
            for r, peer in zl.static(enumerate(peers.peers_of(p))):
                if (r < p.size) & (r != p.rank) & has_bit(bits, r):
                    to = peer + (peers.small_slot(number, p.rank, p) + at)
                    put_words([words[k] for k in zl.static(range(4))], to, number)
        elif has_bit(bits, p.rank):
            found = peers.receive_small(4, [source], at, number, p)[0]
            zl.store(p.out + at, zl.make_vector(found[0], found[1], found[2], found[3]))
    greet(number, p)
    peers.end_small(number, p)


@zl.inline
def chosen_sum(own, at, bits, number, p):
    """As small_sum, of this rank and those of `bits`."""
    count = 4 if p.M is zl.f32 else 2
    ranks = list(range(p.WORLD))
    found = peers.receive_small(count, [zl.where(has_bit(bits, r), zl.i32(r), p.rank) for r in ranks], at, number, p)
    parts = [own + 0.0 for _ in zl.static(range(p.WORLD))]
    for r in zl.static(ranks):
        if r != p.rank:
            parts[r] = numbers_of(found[r], p.M)  # zeros where nothing came
    return sum_of(parts, p)


@zl.inline
def collect_small(p):
    """Four numbers a thread."""
    number = peers.small_number(p)
    at = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    if at < p.count * p.width:
        row = at // p.width
        owner, bits = p.owner[row], wanted_by(row, p)
        word = at if p.M is zl.f32 else at // 2
        mine = sent_as(zl.load(p.x + at, 4), zl.f32, p.M)
        if owner == p.rank:
            total = chosen_sum(wide(mine, p.M), word, bits, number, p)
            zl.store(p.out + (p.place[row] * p.width + (at - row * p.width)), total)
        elif has_bit(bits, p.rank):
            words = words_of(mine, p.M)
            for r, peer in zl.static(enumerate(peers.peers_of(p))):
                if r == owner:
                    put_words(words, peer + (peers.small_slot(number, p.rank, p) + word), number)
    greet(number, p)
    peers.end_small(number, p)


# -- large


@zl.inline
def tile_of(t, lanes, p):
    """The t-th piece of `lanes` numbers of this block: (its row among those of the launch, whose number is the block's modulo all blocks'; the
    first column)."""
    pieces = p.width // lanes
    row = t // pieces
    return zl.block_index(0) + row * zl.num_blocks(0), (t - row * pieces) * lanes


@zl.inline
def num_tiles(lanes, p):
    """Pieces of this block."""
    rows = min(p.most, p.count - p.begin)
    blocks = zl.num_blocks(0)
    return (rows - zl.block_index(0) + blocks - 1) // blocks * (p.width // lanes)


@zl.inline
def spread_large(p):
    number = peers.begin_large(p)
    total, step = num_tiles(4, p), zl.target.threads
    inbox = zl.cast_ptr(p.own + p.inbox, zl.u32)
    for first in range(zl.thread_index(), total, step * TILES):
        words = [zl.u32.x(4)(0) for _ in zl.static(range(TILES))]
        for t in zl.static(range(TILES)):
            if first + t * step < total:
                row, column = tile_of(first + t * step, 4, p)
                if p.owner[p.begin + row] == p.rank:
                    words[t] = zl.load(p.x + (zl.i64(p.place[p.begin + row]) * p.width + column), 4)
        for t in zl.static(range(TILES)):
            if first + t * step < total:
                row, column = tile_of(first + t * step, 4, p)
                if p.owner[p.begin + row] == p.rank:
                    zl.store(p.out + (zl.i64(p.begin + row) * p.width + column), words[t])
                    bits = wanted_by(p.begin + row, p)
                    for r, peer in zl.static(enumerate(peers.peers_of(p))):
                        if (r < p.size) & (r != p.rank) & has_bit(bits, r):
                            zl.store(zl.cast_ptr(peer + p.inbox, zl.u32) + (row * p.width + column), words[t])
    peers.meet(0, number, p)
    for first in range(zl.thread_index(), total, step * TILES):
        for t in zl.static(range(TILES)):
            if first + t * step < total:
                row, column = tile_of(first + t * step, 4, p)
                if (p.owner[p.begin + row] != p.rank) & has_bit(wanted_by(p.begin + row, p), p.rank):
                    words = zl.load(inbox + (row * p.width + column), 4)
                    zl.store(p.out + (zl.i64(p.begin + row) * p.width + column), words)
    peers.end_large(number, p)


@zl.inline
def box_place(source, owner, row, column, p):
    """Where in the owner's inbox the part of rank `source` lies."""
    box = source - zl.where(source > owner, zl.i32(1), zl.i32(0))
    return (box * p.most + row) * p.width + column


@zl.inline
def send_parts(first, total, p):
    """A thread's pieces of others' rows to their owners, all loads in flight."""
    step = zl.target.threads
    parts = [[zl.f32(0) for _ in zl.static(range(8))] for _ in zl.static(range(TILES))]
    for t in zl.static(range(TILES)):
        if first + t * step < total:
            row, column = tile_of(first + t * step, 8, p)
            if (p.owner[p.begin + row] != p.rank) & has_bit(wanted_by(p.begin + row, p), p.rank):
                loaded = load_eight(p.x + (zl.i64(p.begin + row) * p.width + column), zl.f32)
                for i in zl.static(range(8)):
                    parts[t][i] = loaded[i]
    for t in zl.static(range(TILES)):
        if first + t * step < total:
            row, column = tile_of(first + t * step, 8, p)
            owner = p.owner[p.begin + row]
            is_part = has_bit(wanted_by(p.begin + row, p), p.rank)
            for r, peer in zl.static(enumerate(peers.peers_of(p))):
                if (r == owner) & (r != p.rank) & is_part:
                    to = zl.cast_ptr(peer + p.inbox, p.M) + box_place(p.rank, owner, row, column, p)
                    store_eight(to, parts[t], p.M)


@zl.inline
def add_parts(row, column, p):
    """The sums of eight numbers of a row of this rank's."""
    total, bits = [zl.f32(0) for _ in zl.static(range(8))], wanted_by(p.begin + row, p)
    for r in zl.static(range(p.WORLD)):
        if (r < p.size) & ((r == p.rank) | has_bit(bits, r)):
            part = load_eight(p.x + (zl.i64(p.begin + row) * p.width + column), zl.f32)
            if p.M is not zl.f32:
                part = [wide(zl.convert(part[i], p.M), p.M) for i in zl.static(range(8))]
            if r != p.rank:
                came = load_eight(zl.cast_ptr(p.own + p.inbox, p.M) + box_place(zl.i32(r), p.rank, row, column, p), p.M)
                for i in zl.static(range(8)):
                    part[i] = came[i]
            for i in zl.static(range(8)):
                total[i] = total[i] + part[i]
    place = zl.i64(p.place[p.begin + row])
    store_eight(p.out + (place * p.width + column), total, zl.f32)


@zl.inline
def collect_large(p):
    number = peers.begin_large(p)
    total, step = num_tiles(8, p), zl.target.threads
    for first in range(zl.thread_index(), total, step * TILES):
        send_parts(first, total, p)
    peers.meet(0, number, p)
    for t in range(zl.thread_index(), total, step):
        row, column = tile_of(t, 8, p)
        if p.owner[p.begin + row] == p.rank:
            add_parts(row, column, p)
    peers.end_large(number, p)


@zl.kernel
def spread_rows_small(p: SpreadParams):
    """Grid (ceil(count * width / 4 / threads))."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    spread_small(p)


@zl.kernel
def collect_sums_small(p: CollectParams):
    """Grid (ceil(count * width / 4 / threads))."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    collect_small(p)


@zl.kernel
def spread_rows_large(p: SpreadParams):
    """Any grid of up to MAX_BLOCKS."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    if p.begin < p.count:
        spread_large(p)


@zl.kernel
def collect_sums_large(p: CollectParams):
    """Any grid of up to MAX_BLOCKS."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    if p.begin < p.count:
        collect_large(p)


def variants(target) -> list[zl.Variant]:
    """None for Metal, as of all_reduce."""
    if target.name.startswith(("metal", "emulate-metal")):
        return []
    made = []
    for world in peers.WORLDS:
        sizes = ("small", spread_rows_small, collect_sums_small), ("large", spread_rows_large, collect_sums_large)
        for size, spread, collect in sizes:
            threads = SMALL_THREADS if size == "small" else LARGE_THREADS
            made.append(zl.Variant(f"spread_rows_{size}_{world}", spread, {"WORLD": world}, threads=threads))
            for form, M in FORMS:
                fixed = {"WORLD": world, "M": M}
                made.append(zl.Variant(f"collect_sums_{size}_{form}_{world}", collect, fixed, threads=threads))
    return made
