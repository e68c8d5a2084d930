"""All-reduce, gather and broadcast between GPUs that can write each other's memory (peers.py says how they meet).

Sums are made in f32 in the order of ranks, each once or by every rank from the same numbers: all ranks get the same bits."""

from zse import kernel as zl
from zse.kernels.gpu import peers
from zse.kernels.gpu.peers import TILES, PeerParams

SMALL_THREADS, LARGE_THREADS = 256, 512
GROUP = 32  # numbers that share a scale
# Of what numbers, sent as what.
FORMS = (("f32", zl.f32, zl.f32), ("bf16", zl.bf16, zl.bf16), ("half", zl.f32, zl.bf16), ("int8", zl.f32, zl.i8))


class ReduceParams(PeerParams):
    """out = the sum of all ranks' x; of `count` numbers those from `begin` on, `most` at most: what is left is another
    launch's. in_place: out is x. M: what ranks send each other: T, of f32 also bf16 (each part is rounded once), and i8 with
    scales."""

    x: zl.Ptr["T", "const"]
    out: zl.Ptr["T"]
    count: zl.i64
    begin: zl.i64
    most: zl.i32
    in_place: zl.i32
    T: zl.static
    M: zl.static


@zl.inline
def wide(value, T):
    """As f32."""
    return value if T is zl.f32 else zl.convert(value, zl.f32)


@zl.inline
def narrow(value, T):
    """f32 as T."""
    return value if T is zl.f32 else zl.convert(value, T)


@zl.inline
def sent_as(value, T, M):
    """Numbers of x as they are sent: every rank adds these, its own too, so that all have the same bits."""
    return value if T is M else zl.convert(value, M)


@zl.inline
def sum_of(parts, p):
    """The ranks' vectors, added in their order."""
    total = parts[0] + 0.0
    for r in zl.static(range(1, p.WORLD)):
        if r < p.size:
            total = total + parts[r]
    return total


@zl.inline
def words_of(value, M):
    """Four numbers as u32 words: four, of bf16 two."""
    bits = zl.bitcast(value, zl.u32)
    return [bits[i] for i in zl.static(range(4 if M is zl.f32 else 2))]


@zl.inline
def numbers_of(words, M):
    """The four f32 of a rank's words."""
    if M is zl.f32:
        return zl.bitcast(zl.make_vector(words[0], words[1], words[2], words[3]), zl.f32)
    return zl.convert(zl.bitcast(zl.make_vector(words[0], words[1]), zl.bf16), zl.f32)


@zl.inline
def small_sum(own, at, number, p):
    """The sum over ranks, in their order, of the four numbers that each sent at word `at`; own: this rank's, f32. Sums of two
    numbers are the same in either order."""
    count = 4 if p.M is zl.f32 else 2
    total = own + 0.0
    if p.WORLD == 2:
        found = peers.receive_small(count, [1 - p.rank], at, number, p)
        if p.size == 2:
            total = own + numbers_of(found[0], p.M)
    else:
        found = peers.receive_small(count, list(range(p.WORLD)), at, number, p)
        parts = [own + 0.0 for _ in zl.static(range(p.WORLD))]
        for r in zl.static(range(p.WORLD)):
            if r != p.rank:
                parts[r] = numbers_of(found[r], p.M)
        total = sum_of(parts, p)
    return total


@zl.inline
def reduce_small(p):
    """Four numbers a thread; count is a multiple of 4."""
    T, M, number = p.T, p.M, peers.small_number(p)
    at = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    if at < p.count:
        word = at if M is zl.f32 else at // 2
        mine = sent_as(zl.load(p.x + at, 4), T, M)
        peers.send_small(words_of(mine, M), word, number, p)
        zl.store(p.out + at, narrow(small_sum(wide(mine, M), word, number, p), T))
    peers.end_small(number, p)


@zl.kernel
def all_reduce_small(p: ReduceParams):
    """Grid (ceil(count / 4 / threads))."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    reduce_small(p)


# -- large


@zl.inline
def lanes_of(M):
    """Numbers of 16 bytes that are sent."""
    return 4 if M is zl.f32 else 8


@zl.inline
def tiles_of(warp, warps, section, p):
    """Where this thread's numbers of a warp's section begin: TILES of a warp's vectors, one behind the other."""
    lanes = lanes_of(p.M)
    first = (section * warps + warp) * TILES
    lane = zl.thread_index() % zl.target.warp
    return [((first + t) * zl.target.warp + lane) * lanes for t in zl.static(range(TILES))]


@zl.inline
def load_tiles(source, places, count, T, M):
    """A thread's numbers T at places below `count`, all in flight, as they are sent."""
    lanes = lanes_of(M)
    values = [zl.splat(zl.convert(zl.f32(0), M), lanes) for _ in places]
    for t in zl.static(range(TILES)):
        if places[t] < count:
            if T is M:
                values[t] = zl.load(source + places[t], lanes)
            else:
                values[t] = zl.make_vector(*[zl.convert(one, M) for one in load_eight(source + places[t], T)])
    return values


@zl.inline
def send_tiles(places, count, p):
    """A section of a warp's tiles to the only peer."""
    to = zl.cast_ptr(zl.where(p.rank == 0, p.peer1, p.peer0) + p.inbox, p.M)
    values = load_tiles(p.x + p.begin, places, count, p.T, p.M)
    for t in zl.static(range(TILES)):
        if places[t] < count:
            zl.store(to + places[t], values[t])


@zl.inline
def add_tiles(places, count, warp, number, p):
    """A section of a warp's tiles of both ranks, once the other's have come."""
    own = load_tiles(p.x + p.begin, places, count, p.T, p.M)
    peers.hear_warp(warp, number, p)
    other = load_tiles(zl.cast_ptr(p.own + p.inbox, p.M), places, count, p.M, p.M)
    out = p.out + p.begin
    for t in zl.static(range(TILES)):
        total = wide(own[t], p.M) + wide(other[t], p.M)
        if places[t] < count:
            if p.T is p.M:
                zl.store(out + places[t], narrow(total, p.T))
            else:
                store_eight(out + places[t], [total[i] for i in zl.static(range(8))], p.T)


@zl.inline
def reduce_two(p):
    """Of two ranks: half of the blocks send all that this one has, the others add what comes, so that the link never waits for
    a sum. A warp that is to write what it sent, or a lone block's, does one after the other. Warps tell warps: no block waits
    for its last one. Sums of two numbers are the same in either order."""
    number = peers.large_number(p)
    count = zl.i32(min(zl.i64(p.most), p.count - p.begin))
    blocks, block = zl.num_blocks(0), zl.block_index(0)
    apart = (blocks > 1) & (p.in_place == 0)
    senders = zl.where(apart, blocks // 2, blocks)
    of_block = zl.target.threads // zl.target.warp
    warps = senders * of_block
    warp = block % senders * of_block + zl.thread_index() // zl.target.warp
    of_section = warps * TILES * zl.target.warp * lanes_of(p.M)
    sections = (count + of_section - 1) // of_section
    if block < senders:
        peers.may_send(number, p)
        for section in range(sections):
            send_tiles(tiles_of(warp, warps, section, p), count, p)
            peers.tell_warp(warp, number + zl.u32(section), p)
    if (block >= senders) | (not apart):
        for section in range(sections):
            add_tiles(tiles_of(warp, warps, section, p), count, warp, number + zl.u32(section), p)
    peers.end_large(number, p)


@zl.inline
def load_eight(x, T):
    """Eight numbers as f32."""
    if T is zl.f32:
        low, high = zl.load(x, 4), zl.load(x + 4, 4)
        return [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    v = zl.convert(zl.load(x, 8), zl.f32)
    return [v[i] for i in zl.static(range(8))]


@zl.inline
def store_eight(out, v, T):
    low, high = zl.make_vector(v[0], v[1], v[2], v[3]), zl.make_vector(v[4], v[5], v[6], v[7])
    if T is zl.f32:
        zl.store(out, low)
        zl.store(out + 4, high)
    else:
        zl.store(out, zl.convert(low, T))
        zl.store(out + 4, zl.convert(high, T))


@zl.inline
def quantized(values):
    """Eight f32 of a thread, four threads a group: (eight i8 in two words, the group's scale)."""
    top = zl.f32(0)
    for i in zl.static(range(8)):
        top = max(top, abs(values[i]))
    top = zl.warp_max(top, GROUP // 8)
    factor = zl.where(top > 1e-30, 127.0 / top, zl.f32(0))
    q = [zl.bitcast(zl.i32(zl.round_even(values[i] * factor)), zl.u32) & 255 for i in zl.static(range(8))]
    low = q[0] | q[1] << 8 | q[2] << 16 | q[3] << 24
    high = q[4] | q[5] << 8 | q[6] << 16 | q[7] << 24
    return zl.make_vector(low, high), top * (1.0 / 127.0)


@zl.inline
def dequantized(words, scale):
    """Eight f32."""
    return [zl.f32(zl.bitcast(words[i // 4] << (24 - 8 * (i % 4)), zl.i32) >> 24) * scale for i in zl.static(range(8))]


@zl.inline
def put_eight(boxes, at, values, scales, p):
    """A thread's eight numbers, the at-th on, into each of (whether, box): returns them as they are read there. scales: where
    those of 8 bits stand, in f32."""
    if p.M is zl.i8:
        words, scale = quantized(values)
        for wanted, box in zl.static(boxes):
            if wanted:
                zl.store(zl.cast_ptr(box, zl.u32) + at // 4, words)
                if zl.thread_index() % (GROUP // 8) == 0:
                    zl.store(zl.cast_ptr(box, zl.f32) + (scales + at // GROUP), scale)
        return dequantized(words, scale)
    for wanted, box in zl.static(boxes):
        if wanted:
            store_eight(zl.cast_ptr(box, p.M) + at, values, p.M)
    return [wide(narrow(values[i], p.M), p.M) for i in zl.static(range(8))]


@zl.inline
def get_eight(box, at, scales, p):
    if p.M is zl.i8:
        scale = zl.cast_ptr(box, zl.f32)[scales + at // GROUP]
        return dequantized(zl.load(zl.cast_ptr(box, zl.u32) + at // 4, 2), scale)
    return load_eight(zl.cast_ptr(box, p.M) + at, p.M)


@zl.inline
def own_eight(at, count, p):
    """This rank's numbers; zeros behind the last one."""
    values = [zl.f32(0) for _ in zl.static(range(8))]
    if at < count:
        loaded = load_eight(p.x + p.begin + at, p.T)
        for i in zl.static(range(8)):
            values[i] = loaded[i]
    return values


@zl.inline
def reduce_shares(p):
    """Every rank sums the tiles that it owns (tile % size), and sends them to all."""
    number = peers.begin_large(p)
    tile = zl.target.threads * 8
    count = zl.i32(min(zl.i64(p.most), p.count - p.begin))
    owned = ((count + tile - 1) // tile + p.size - 1) // p.size
    scales = owned * p.size * tile // 4
    out = p.out + p.begin
    mine = zl.thread_index() * 8
    block, blocks = zl.block_index(0), zl.num_blocks(0)
    ranks = list(range(p.WORLD))
    others = [(r < p.size) & (r != p.rank) for r in ranks]
    for k in range(block, owned, blocks):
        for q, peer in zl.static(enumerate(peers.peers_of(p))):
            if others[q]:
                values = own_eight((k * p.size + q) * tile + mine, count, p)
                put_eight([(True, peer + p.inbox)], (p.rank * owned + k) * tile + mine, values, scales, p)
    peers.meet(0, number, p)
    for k in range(block, owned, blocks):
        at = (k * p.size + p.rank) * tile + mine
        total = [zl.f32(0) for _ in zl.static(range(8))]
        for r in zl.static(ranks):
            if r < p.size:
                part = own_eight(at, count, p)
                if r != p.rank:
                    got = get_eight(p.own + p.inbox, (r * owned + k) * tile + mine, scales, p)
                    for i in zl.static(range(8)):
                        part[i] = got[i]
                for i in zl.static(range(8)):
                    total[i] = part[i] if r == 0 else total[i] + part[i]
        boxes = [(others[q], peer + p.outbox) for q, peer in enumerate(peers.peers_of(p))]
        sent = put_eight(boxes, at, total, scales, p)
        if at < count:
            store_eight(out + at, sent, p.T)
    peers.meet(1, number, p)
    for k in range(block, owned, blocks):
        for q in zl.static(ranks):
            at = (k * p.size + q) * tile + mine
            if others[q] & (at < count):
                store_eight(out + at, get_eight(p.own + p.outbox, at, scales, p), p.T)
    peers.end_large(number, p)


@zl.inline
def reduce_large(p):
    if p.WORLD == 2 and p.M is not zl.i8:
        reduce_two(p)
    else:
        reduce_shares(p)


@zl.kernel
def all_reduce_large(p: ReduceParams):
    """Any grid of up to MAX_BLOCKS that runs at once; of two ranks, unless in place, 1 or an even one of up to twice as many. M
    i8: count is a multiple of GROUP, T f32; each rank's part is rounded to 1/254 of its group's largest number at most, and so
    is the sum. M bf16, T f32, of more than two ranks: the sum is rounded, too."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    if p.begin < p.count:
        reduce_large(p)


# -- gather and broadcast


class GatherParams(PeerParams):
    """Rank 0's out [rows, sum of widths], or with `every` each rank's, = the ranks' x [rows, widths[rank]] side by side, rows from
    `begin` on, `most` at most. Words of 4 bytes; widths are multiples of 4."""

    x: zl.Ptr[zl.u32, "const"]
    out: zl.Ptr[zl.u32]
    width0: zl.i32
    width1: zl.i32
    width2: zl.i32
    width3: zl.i32
    width4: zl.i32
    width5: zl.i32
    width6: zl.i32
    width7: zl.i32
    rows: zl.i32
    begin: zl.i32
    most: zl.i32
    every: zl.i32


def widths_of(p):
    return [p.width0, p.width1, p.width2, p.width3, p.width4, p.width5, p.width6, p.width7][: p.WORLD]


@zl.inline
def gather_rows(p):
    number = peers.begin_large(p)
    rows = min(p.most, p.rows - p.begin)
    step = zl.num_blocks(0) * zl.target.threads * 4
    start = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    widths = widths_of(p)
    stride = zl.i32(0)
    for r in zl.static(range(p.WORLD)):
        stride += widths[r]
    place, own = zl.i32(0), zl.i32(0)
    for r in zl.static(range(p.WORLD)):
        if r < p.rank:
            place += rows * widths[r]
        if r == p.rank:
            own = widths[r]
    x = p.x + zl.i64(p.begin) * own
    for q, peer in zl.static(enumerate(peers.peers_of(p))):
        if (q < p.size) & (q != p.rank) & ((q == 0) | (p.every != 0)):
            to = zl.cast_ptr(peer + p.inbox, zl.u32)
            for i in range(start, rows * own, step):
                zl.store(to + place + i, zl.load(x + i, 4))
    peers.meet(0, number, p)
    if (p.rank == 0) | (p.every != 0):
        offset = zl.i32(0)
        at = zl.i32(0)
        inbox = zl.cast_ptr(p.own + p.inbox, zl.u32)
        for r in zl.static(range(p.WORLD)):
            for i in range(start, rows * widths[r], step):
                row = i // widths[r]
                into = p.out + (zl.i64(p.begin + row) * stride + (offset + i - row * widths[r]))
                if r == p.rank:
                    zl.store(into, zl.load(x + i, 4))
                else:
                    zl.store(into, zl.load(inbox + at + i, 4))
            offset += widths[r]
            at += rows * widths[r]
    peers.end_large(number, p)


@zl.kernel
def gather_peers(p: GatherParams):
    """Any grid of up to MAX_BLOCKS."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    if p.begin < p.rows:
        gather_rows(p)


class BroadcastParams(PeerParams):
    """x = rank 0's x, `count` words of 4 bytes."""

    x: zl.Ptr[zl.u32]
    count: zl.i32


@zl.inline
def broadcast_words(p):
    number = peers.begin_large(p)
    step = zl.num_blocks(0) * zl.target.threads
    start = zl.block_index(0) * zl.target.threads + zl.thread_index()
    if p.rank == 0:
        for i in range(start, p.count, step):
            word = p.x[i]
            for q, peer in zl.static(enumerate(peers.peers_of(p))):
                if (q > 0) & (q < p.size):
                    zl.cast_ptr(peer + p.outbox, zl.u32)[i] = word
    peers.meet(0, number, p)
    if p.rank != 0:
        for i in range(start, p.count, step):
            p.x[i] = zl.cast_ptr(p.own + p.outbox, zl.u32)[i]
    peers.end_large(number, p)


@zl.kernel
def broadcast_peers(p: BroadcastParams):
    """Any grid of up to MAX_BLOCKS."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    broadcast_words(p)


def variants(target) -> list[zl.Variant]:
    """None for Metal, whose devices have no peers and whose language no order between blocks."""
    if target.name.startswith(("metal", "emulate-metal")):
        return []
    made = []
    for world in peers.WORLDS:
        for form, T, M in FORMS:
            fixed = {"WORLD": world, "T": T, "M": M}
            if M is not zl.i8:
                made.append(
                    zl.Variant(f"all_reduce_small_{form}_{world}", all_reduce_small, fixed, threads=SMALL_THREADS)
                )
            # Blocks that send and blocks that add run at once.
            resident = 2 if world == 2 and M is not zl.i8 else 1
            name = f"all_reduce_large_{form}_{world}"
            made.append(zl.Variant(name, all_reduce_large, fixed, threads=LARGE_THREADS, min_blocks=resident))
        for name, kernel in (("gather", gather_peers), ("broadcast", broadcast_peers)):
            made.append(zl.Variant(f"{name}_peers_{world}", kernel, {"WORLD": world}, threads=LARGE_THREADS))
    return made
