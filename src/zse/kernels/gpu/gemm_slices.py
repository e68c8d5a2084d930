"""Adding the parts of a tile that several blocks have: each of them whose last work it is adds a slice, where one block
alone would read all parts at the rate of one multiprocessor (o of a 7B model with 64 tokens: 25 us, and 13 in slices, on
an H200).

A sum is its own flag (add_slices): `partial` holds zeros, a block stores sums that are none (+0 as -0), and who adds one
waits until it is there and puts the zero back. Counting parts (add_counted) costs a fence, an atomic and a read more, one
after another: 1 to 3 us a launch (an H200).

The blocks of gemm_skinny wait for each other here. They can: a launch has no more blocks than there are
multiprocessors, each has one for itself, and the next launch's blocks start when all of these have.
"""

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import CONSUMERS, leave_sums

AT_ONCE = 4  # parts that a thread asks for together,
UNITS = 2  # and of how many units, where sums are their own flags


@zl.inline
def place_of(block, tile, size, p):
    """Where `block` leaves its part of a tile, of `size` sums. It has at most two: the second is of a tile that begins in it."""
    late = zl.i32(1) if block * p.share < tile * p.steps else 0
    return p.partial + zl.i64(block * 2 + late) * size


@zl.inline
def leave_flagged(totals, mine, threads, p):
    """A thread's sums of the tokens that there are, 16 bytes a lane."""
    for x, total in enumerate(totals):
        for j in zl.static(range(p.BT // 8)):
            if j * 8 < p.tokens:
                bits = [zl.bitcast(total[j * 4 + e], zl.u32) for e in zl.static(range(4))]
                words = [bits[e] if bits[e] != 0 else zl.u32(1 << 31) for e in zl.static(range(4))]
                four = zl.bitcast(zl.make_vector(words[0], words[1], words[2], words[3]), zl.u64)
                zl.store_relaxed(zl.cast_ptr(mine + (x * (p.BT // 8) + j) * (threads * 4), zl.u64), four)


@zl.inline
def take(places, wanted):
    """Four sums at each of the places, as soon as all that are `wanted` are there; their zeros are put back. One loop for
    all: this code runs once, and takes as long as it is to fetch."""
    words = [zl.make_vector(zl.u64(0), zl.u64(0)) for _ in places]
    least = zl.u32(0)
    while least == 0:
        least = zl.u32(1)
        for u, place in enumerate(places):
            words[u] = zl.load_relaxed(zl.cast_ptr(place, zl.u64), 2)
        for u in zl.static(range(len(places))):
            four = zl.bitcast(words[u], zl.u32)
            if wanted[u]:
                least = min(least, min(min(four[0], four[1]), min(four[2], four[3])))
    for u, place in enumerate(places):
        if wanted[u]:
            zl.store_relaxed(zl.cast_ptr(place, zl.u64), zl.make_vector(zl.u64(0), zl.u64(0)))
    return [zl.bitcast(four, zl.f32) for four in words]


@zl.inline
def add_slices(totals, tile, blocks, last_step, thread, p, store, store_all):
    """Add up a tile's parts, of `blocks`: first and the one after the last. Those of them whose last work the tile is add
    units of a warp's rows and eight tokens, in the blocks' order, and store them: store([4 sums], warp, first token). If
    the second and last of them goes on, the first adds everything. last_step: the end of the line of (tile, step)."""
    first, end = blocks
    threads, warps, eights = p.WG * 128, p.WG * 4, p.BT // 8
    size = len(totals) * eights * threads * 4
    goes_on = min(end * p.share, last_step) > (tile + 1) * p.steps
    adding = end - first - (zl.i32(1) if goes_on else 0)
    index = zl.block_index(0) - first
    if adding == 1:
        if index == 0:
            theirs = place_of(first + 1, tile, size, p) + thread * 4
            for x, total in enumerate(totals):
                mine = [j for j in zl.static(range(eights))]
                places = [theirs + (x * eights + j) * (threads * 4) for j in mine]
                found = take(places, [j * 8 < p.tokens for j in mine])
                for j in mine:
                    for e in zl.static(range(4)):
                        total[j * 4 + e] += found[j][e]
            store_all(totals, tile, thread, p)
    if adding > 1 or index > 0:
        leave_flagged(totals, place_of(zl.block_index(0), tile, size, p) + thread * 4, threads, p)
    if adding > 1 and index < adding:
        used = (p.tokens + 7) // 8
        pitch, units = adding * warps, warps * len(totals) * used
        for unit in range(index * warps + thread // 32, units, pitch * UNITS):
            mine = [unit + u * pitch for u in zl.static(range(UNITS))]
            rest = [min(at, units - 1) // warps for at in mine]
            places = [
                ((r // used * eights + r % used) * threads + at % warps * 32 + zl.lane_index()) * 4
                for r, at in zip(rest, mine)
            ]
            sums = [[zl.f32(0) for _ in zl.static(range(4))] for u in zl.static(range(UNITS))]
            for block in range(first, end, AT_ONCE):
                parts = [place_of(min(block + x, end - 1), tile, size, p) for x in zl.static(range(AT_ONCE))]
                found = take(
                    [part + place for place in places for part in parts],
                    [at < units and block + x < end for at in mine for x in zl.static(range(AT_ONCE))],
                )
                for x in zl.static(range(AT_ONCE)):
                    if block + x < end:
                        for u in zl.static(range(UNITS)):
                            for e in zl.static(range(4)):
                                sums[u][e] += found[u * AT_ONCE + x][e]
            for u in zl.static(range(UNITS)):
                if mine[u] < units:
                    store(sums[u], tile, mine[u] % warps + rest[u] // used * warps, rest[u] % used * 8, p)


@zl.inline
def load_part(block, tile, size, place, p):
    """Four sums of a thread of `block`, which has left at most two parts: the second is of a tile that begins in it."""
    late = zl.i32(1) if block * p.share < tile * p.steps else 0
    return zl.load(p.partial + (zl.i64(block * 2 + late) * (size * 4) + place), 4)


@zl.inline
def add_counted(totals, tile, blocks, late, last_step, thread, p, store):
    """As add_slices, with a counter: for integers, whose loop the compiler makes a twentieth slower before add_slices. Leave
    this block's part of a tile for `blocks`, first and the one after the last. Those of them whose last work
    the tile is wait for all, and each adds units of a warp's rows and eight tokens, in the blocks' order, and stores
    them: store([4 sums], warp, first token). last_step: the end of the line of (tile, step)."""
    first, end = blocks
    threads, warps = p.WG * 128, p.WG * 4
    eights = p.BT // 8
    size = len(totals) * eights * threads
    goes_on = min(end * p.share, last_step) > (tile + 1) * p.steps
    adding = end - first - (zl.i32(1) if goes_on else 0)
    index = zl.block_index(0) - first
    counter = p.counters + first
    leave_sums(totals, p.partial + (zl.i64(zl.block_index(0) * 2 + late) * size + thread) * 4, threads)
    zl.named_barrier(CONSUMERS, threads)
    if thread == 0:
        zl.atomic_add(counter, 1)
    if index < adding:
        if thread == 0:
            while zl.load_acquire(counter) < end - first:
                pass
        zl.named_barrier(CONSUMERS, threads)
        sums = [zl.f32(0) for _ in zl.static(range(4))]
        for unit in range(index * warps + thread // 32, warps * (len(totals) * eights), adding * warps):
            warp = unit % warps
            eight = unit // warps
            for e in zl.static(range(4)):
                sums[e] = zl.f32(0)
            place = (eight * threads + warp * 32 + zl.lane_index()) * 4
            for block in range(first, end, AT_ONCE):
                parts = [load_part(min(block + x, end - 1), tile, size, place, p) for x in zl.static(range(AT_ONCE))]
                for x in zl.static(range(AT_ONCE)):
                    if block + x < end:
                        for e in zl.static(range(4)):
                            sums[e] += parts[x][e]
            store(sums, tile, warp + eight // eights * warps, eight % eights * 8, p)
        zl.named_barrier(CONSUMERS, threads)
        if thread == 0:
            before = zl.atomic_add(counter, 1)
            if before == end - first + adding - 1:
                counter[0] = 0
