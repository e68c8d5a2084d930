"""The GPU sampler's search for the boundary of a kept set, by a whole block for one row.

A limit (a number of tokens, or a mass) falls into one bin of the row's histogram. Its tokens are put in order: those of
the chunks' lists, if these reach the limit, else those of a pass over the logits, after the bin was divided until few
enough are left. Of more equal logits than can be put in order, the first by id are kept.
"""

from typing import Any

from zse import kernel as zl
from zse.kernel.language import Record
from zse.kernels.gpu import sample_parts as parts
from zse.kernels.sample_parts import LOWEST, key_of, value_of

THREADS = 1024
CANDIDATES = 512  # tokens of a bin that are put in order; more are divided further first
PARTS = 1024  # of a bin that is divided further
GROUPS = THREADS // parts.BINS
UNROLL = 4  # 16-byte loads in flight of a lane that walks a chunk


class Row(Record):
    """What the block knows of its row: run-time values. x: logits; records: of its chunks; high: the largest logit;
    inverse: log2(e) / temperature; top_bin: high's bin; highs, bases: of the chunks; counts, masses: the histogram by
    depth; bound: all tokens of this order and larger are in the chunks' lists. The rest is scratch of the block."""

    x: Any
    records: Any
    chunks: Any
    vocab: Any
    aligned: Any
    high: Any
    highs: Any
    bases: Any
    weights: Any  # f64 [MAX_CHUNKS]
    warp_sums: Any  # f64, one a warp
    inverse: Any = None
    top_bin: Any = None
    bound: Any = None
    counts: Any = None  # f64 [BINS]
    masses: Any = None  # f64 [BINS]
    shares: Any = None  # f32 [THREADS]
    parts: Any = None  # f64 [GROUPS * (BINS + 1)]
    scratch: Any = (
        None  # u64 [2 * CANDIDATES]: what is needed in turns; all of it with `shares` keeps a block below 32 KB
    )


def with_scratch(row: Row, **fields) -> Row:
    """The row with what is known of it, and made for it, where a token is drawn."""
    return Row(**vars(row) | fields)


@zl.inline
def may_hold(row, chunk, depth):
    """Whether a chunk can have logits in the row's bin `depth`."""
    mine = depth - (row.top_bin - row.bases[chunk])
    known = row.records[chunk * parts.RECORD + parts.COUNTS + min(max(mine, 0), parts.BINS - 1)]
    return row.highs[chunk] >= LOWEST and (depth == parts.BINS - 1 or (mine >= 0 and known > 0))


@zl.inline
def bin_limits(row, depth):
    """(smallest, largest) key of the row's bin `depth`; the last bin goes down to the lowest finite logit."""
    top = parts.first_key(row.top_bin - depth + 1, row.inverse) - 1
    low = parts.first_key(row.top_bin - depth, row.inverse)
    return zl.where(depth == parts.BINS - 1, key_of(zl.f32(LOWEST)), low), top


@zl.inline
def chunk_lanes(row, start, at, count):
    """A lane's next 4 * UNROLL values of a chunk that a warp walks, all loads issued first."""
    values = []
    for u in zl.static(range(UNROLL)):
        values += parts.four_at(row.x + start, at + u * zl.target.warp * 4, count, row.aligned)
    return values


@zl.inline
def place_of(at, j):
    """Place in the chunk of value j of chunk_lanes(at)."""
    return at + j // 4 * zl.target.warp * 4 + j % 4


@zl.inline
def any_within(values, low, high):
    """Whether one of the values is in [low, high]."""
    inside = values[0] >= low and values[0] <= high
    for value in zl.static(values[1:]):
        inside = inside or (value >= low and value <= high)
    return inside


@zl.inline
def merge_histograms(row, rest_sums):
    """Fill row.counts and row.masses from the chunks'; the number of finite logits. The last bin's count stays what no
    other bin has. rest_sums: f64, one a warp."""
    t = zl.thread_index()
    lane = zl.lane_index()
    warp = zl.warp_index()
    warps = zl.target.threads // zl.target.warp
    part_counts = zl.cast_ptr(row.scratch, zl.i32)
    number = zl.i32(0)
    mass = zl.f64(0)
    finite = zl.f64(0)
    depth = t % parts.BINS
    for base in zl.unroll(range(t // parts.BINS, row.chunks, GROUPS * UNROLL), 1):
        # Loads of several chunks before the first is used.
        for u in zl.static(range(UNROLL)):
            chunk = min(base + u * GROUPS, row.chunks - 1)
            record = row.records + chunk * parts.RECORD
            place = depth - (row.top_bin - row.bases[chunk])
            within = min(max(place, 0), parts.BINS - 1)
            share = zl.f32(record[parts.MASSES + within]) * parts.power_of_two(-parts.scaling_exponent(within))
            share = share * parts.relative_mass(row.highs[chunk], row.high, row.inverse)
            if base + u * GROUPS < row.chunks and row.highs[chunk] >= LOWEST:
                finite += zl.f64(record[parts.COUNTS + depth])
                if place >= 0 and depth < parts.BINS - 1:
                    number += zl.i32(record[parts.COUNTS + within])
                    mass += zl.f64(share)
    # One more a group, so that the lanes that add a bin's groups read different banks.
    part_counts[t // parts.BINS * (parts.BINS + 1) + depth] = number
    row.parts[t // parts.BINS * (parts.BINS + 1) + depth] = mass
    finite = parts.warp_sum_f64(finite)
    if lane == 0:
        rest_sums[warp] = finite
    zl.barrier()
    for bin in zl.unroll(range(warp, parts.BINS, warps), 1):
        bin_count = zl.f64(0)
        bin_mass = zl.f64(0)
        for group in zl.unroll(range(lane, GROUPS, zl.target.warp), 1):
            bin_count += zl.f64(part_counts[group * (parts.BINS + 1) + bin])
            bin_mass += row.parts[group * (parts.BINS + 1) + bin]
        bin_count = parts.warp_sum_f64(bin_count)
        bin_mass = parts.warp_sum_f64(bin_mass)
        if lane == 0:
            row.counts[bin] = bin_count
            row.masses[bin] = bin_mass
    finite = zl.f64(0)
    for w in zl.static(range(warps)):
        finite += rest_sums[w]
    zl.barrier()
    return finite


@zl.inline
def weigh_chunks(row, kept):
    """Fill row.weights with the mass of each chunk's kept logits, relative to the row's largest."""
    lane = zl.lane_index()
    edge = value_of(zl.u32(kept >> 32))
    depth = min(row.top_bin - parts.bin_of(edge, row.inverse), parts.BINS - 1)
    top = zl.u32(0)
    if kept != 0:
        low, top_of_bin = bin_limits(row, depth)
        top = top_of_bin
    for chunk in zl.unroll(range(zl.warp_index(), row.chunks, zl.target.threads // zl.target.warp), 1):
        record = row.records + chunk * parts.RECORD
        chunk_high = row.highs[chunk]
        relative = parts.relative_mass(chunk_high, row.high, row.inverse)
        mass = zl.f64(0)
        if kept == 0:
            mass = zl.f64(zl.where(chunk_high >= LOWEST, zl.cast_ptr(record, zl.f32)[parts.MASS] * relative, zl.f32(0)))
        elif chunk_high >= LOWEST:
            # Whole bins from the record, and what the kept set has of the bin of its edge.
            for mine in zl.unroll(
                range(lane, min(depth - (row.top_bin - row.bases[chunk]), parts.BINS - 1), zl.target.warp), 1
            ):
                mass += zl.f64(zl.f32(record[parts.MASSES + mine]) * parts.power_of_two(-parts.scaling_exponent(mine)))
            mass = mass * zl.f64(relative)
            if kept >= row.bound:
                if lane < parts.LIST:
                    order = parts.order_at(record + parts.LISTED, lane)
                    if order >= kept and zl.u32(order >> 32) <= top:
                        mass += zl.f64(parts.relative_mass(value_of(zl.u32(order >> 32)), row.high, row.inverse))
            elif may_hold(row, chunk, depth):
                start = chunk * parts.CHUNK
                count = min(row.vocab - start, parts.CHUNK)
                for at in zl.unroll(range(lane * 4, count, zl.target.warp * 4 * UNROLL), 1):
                    values = chunk_lanes(row, start, at, count)
                    if any_within(values, edge, value_of(top)):
                        for j in zl.static(range(4 * UNROLL)):
                            if (
                                values[j] >= edge
                                and values[j] <= value_of(top)
                                and parts.order_of(values[j], start + place_of(at, j)) >= kept
                            ):
                                mass += zl.f64(parts.relative_mass(values[j], row.high, row.inverse))
            mass = parts.warp_sum_f64(mass)
        if lane == 0:
            row.weights[chunk] = mass
    zl.barrier()


@zl.inline
def divide(row, depth, low, top, above, limit, by_mass):
    """Divide the keys [low, top] of the row's bin `depth` into parts and take the one that the limit falls into, until
    it has at most CANDIDATES tokens or a single key: (its tokens, low, top, tokens or mass above it)."""
    t = zl.thread_index()
    lane = zl.lane_index()
    warp = zl.warp_index()
    warps = zl.target.threads // zl.target.warp
    numbers = zl.cast_ptr(row.scratch, zl.u32)
    low_words = numbers + PARTS
    high_words = zl.cast_ptr(row.shares, zl.u32)
    number = zl.i32(CANDIDATES + 1)
    low_key = low + 0
    top_key = top + 0
    before = above + 0.0
    while number > CANDIDATES and low_key < top_key:
        shift = zl.u32(0)
        while ((top_key - low_key) >> shift) >= PARTS:
            shift += 1
        numbers[t] = 0
        low_words[t] = 0
        high_words[t] = 0
        zl.barrier()
        for chunk in zl.unroll(range(warp, row.chunks, warps), 1):
            if may_hold(row, chunk, depth):
                start = chunk * parts.CHUNK
                count = min(row.vocab - start, parts.CHUNK)
                for at in zl.unroll(range(lane * 4, count, zl.target.warp * 4 * UNROLL), 1):
                    values = chunk_lanes(row, start, at, count)
                    if any_within(values, value_of(low_key), value_of(top_key)):
                        for value in zl.static(values):
                            if value >= value_of(low_key) and value <= value_of(top_key):
                                part = zl.i32((key_of(value) - low_key) >> shift)
                                zl.atomic_add(numbers + part, 1)
                                if by_mass:
                                    # A 64-bit sum of 2**-40 units as two words with a carry.
                                    units = zl.u64(parts.relative_mass(value, row.high, row.inverse) * 1099511627776.0)
                                    old = zl.atomic_add(low_words + part, zl.u32(units))
                                    carry = zl.where(old + zl.u32(units) < old, zl.u32(1), zl.u32(0))
                                    zl.atomic_add(high_words + part, zl.u32(units >> 32) + carry)
        zl.barrier()
        # From the largest part down.
        part = PARTS - 1 - t
        score = zl.f64(numbers[part])
        if by_mass:
            score = zl.f64((zl.u64(high_words[part]) << 32) | zl.u64(low_words[part])) * (2.0**-40)
        row.parts[t] = score
        score = parts.warp_sum_f64(score)
        if lane == 0:
            row.warp_sums[warp] = score
        zl.barrier()
        group, before_group, reached = parts.find(row.warp_sums, warps, before, limit, True)
        place, before_part, reached = parts.find(
            row.parts + group * zl.target.warp, zl.target.warp, before_group, limit, True
        )
        before = before_part
        part = PARTS - 1 - (group * zl.target.warp + place)
        number = zl.i32(numbers[part])
        low_key = low_key + (zl.u32(part) << shift)
        top_key = min(top_key, low_key + ((zl.u32(1) << shift) - 1))
        zl.barrier()
    return number, low_key, top_key, before


@zl.inline
def collect_listed(row, low, top, keys, number):
    """Put the orders of the chunks' lists with keys in [low, top] into keys; number counts them, those past CANDIDATES
    too. Tokens below the lists' bound are left out: there the lists are not whole."""
    for i in zl.unroll(range(zl.thread_index(), row.chunks * parts.LIST, THREADS), 1):
        order = parts.order_at(row.records + i // parts.LIST * parts.RECORD + parts.LISTED, i % parts.LIST)
        key = zl.u32(order >> 32)
        if row.highs[i // parts.LIST] >= LOWEST and order >= row.bound and key >= low and key <= top:
            slot = zl.atomic_add(number, 1)
            if slot < CANDIDATES:
                keys[slot] = order


@zl.inline
def collect_logits(row, depth, low, top, keys, number):
    """The same from the logits themselves. What is found is rare: it is read again in a loop that is not unrolled, so
    that its code need not be there sixteen times."""
    lane = zl.lane_index()
    for chunk in zl.unroll(range(zl.warp_index(), row.chunks, zl.target.threads // zl.target.warp), 1):
        if may_hold(row, chunk, depth):
            start = chunk * parts.CHUNK
            count = min(row.vocab - start, parts.CHUNK)
            for at in zl.unroll(range(lane * 4, count, zl.target.warp * 4 * UNROLL), 1):
                values = chunk_lanes(row, start, at, count)
                if any_within(values, value_of(low), value_of(top)):
                    for j in zl.unroll(range(4 * UNROLL), 1):
                        place = place_of(at, j)
                        value = parts.minus_infinity()
                        if place < count:
                            value = row.x[start + place]
                        if value >= value_of(low) and value <= value_of(top):
                            slot = zl.atomic_add(number, 1)
                            if slot < CANDIDATES:
                                keys[slot] = parts.order_of(value, start + place)


@zl.inline
def shortest_prefix(row, keys, number, above, limit, by_mass, ordered):
    """(order of the last token of the shortest prefix of the collected tokens that reaches the limit, whether one
    does); all of them where none does, 0 without any."""
    t = zl.thread_index()
    if t < number:
        order = keys[t]
        rank = zl.i32(0)
        for j in zl.unroll(range(number), 4):
            rank += zl.where(keys[j] > order, zl.i32(1), zl.i32(0))
        ordered[rank] = order
        mass = parts.relative_mass(value_of(zl.u32(order >> 32)), row.high, row.inverse)
        row.shares[rank] = zl.where(by_mass, mass, zl.f32(1))
    elif t < CANDIDATES:
        row.shares[t] = 0.0
    zl.barrier()
    if t < CANDIDATES:
        score = parts.warp_sum_f64(zl.f64(row.shares[t]))
        if zl.lane_index() == 0:
            row.warp_sums[zl.warp_index()] = score
    zl.barrier()
    group, before, reached = parts.find(row.warp_sums, CANDIDATES // zl.target.warp, above, limit, True)
    place, before, reached = parts.find(row.shares + group * zl.target.warp, zl.target.warp, before, limit, True)
    last = ordered[group * zl.target.warp + place]
    zl.barrier()
    return zl.where(number > 0, last, zl.u64(0)), reached


@zl.inline
def nth_equal(row, key, number):
    """Order of the `number`-th token, by id, of those whose logit has this key."""
    t = zl.thread_index()
    lane = zl.lane_index()
    result = zl.shared_array(zl.u64, 1)
    for chunk in zl.unroll(range(zl.warp_index(), row.chunks, zl.target.threads // zl.target.warp), 1):
        start = chunk * parts.CHUNK
        count = min(row.vocab - start, parts.CHUNK)
        equal = zl.i32(0)
        for at in zl.unroll(range(lane * 4, count, zl.target.warp * 4), 1):
            for value in zl.static(parts.four_at(row.x + start, at, count, row.aligned)):
                equal += zl.where(key_of(value) == key, zl.i32(1), zl.i32(0))
        equal = zl.warp_sum(equal)
        if lane == 0:
            row.weights[chunk] = zl.f64(equal)
    zl.barrier()
    goal = zl.f64(number) - 0.5
    chunk, before, reached = parts.find(row.weights, row.chunks, zl.f64(0), goal, True)
    start = chunk * parts.CHUNK
    values = parts.four_at(row.x + start, t * 4, min(row.vocab - start, parts.CHUNK), row.aligned)
    share = zl.f32(0)
    for value in zl.static(values):
        share += zl.where(key_of(value) == key, zl.f32(1), zl.f32(0))
    thread, before = find_thread(row, share, before, goal)
    if t == thread:
        missing = number - zl.i32(before)
        for c in zl.static(range(4)):
            if key_of(values[c]) == key:
                missing -= 1
                if missing == 0:
                    result[0] = parts.order_of(values[c], start + t * 4 + c)
    zl.barrier()
    return result[0]


@zl.inline
def find_thread(row, share, before, goal):
    """(the thread at whose share, added in the threads' order, the goal is passed, sum before it)."""
    t = zl.thread_index()
    row.shares[t] = share
    score = parts.warp_sum_f64(zl.f64(share))
    if zl.lane_index() == 0:
        row.warp_sums[zl.warp_index()] = score
    zl.barrier()
    group, before_group, reached = parts.find(row.warp_sums, zl.target.threads // zl.target.warp, before, goal, False)
    place, before_thread, reached = parts.find(
        row.shares + group * zl.target.warp, zl.target.warp, before_group, goal, False
    )
    zl.barrier()
    return group * zl.target.warp + place, before_thread


@zl.inline
def boundary(row, finite, limit, by_mass, scores, found):
    """The order of the last token of the shortest prefix of the row that reaches the limit (tokens, or a mass); 0 where
    the whole row does not. scores: f64 [BINS]; found: i32 [1]."""
    keys = row.scratch
    ordered = row.scratch + CANDIDATES
    t = zl.thread_index()
    if t < parts.BINS:
        scores[t] = zl.where(by_mass, row.masses[t], row.counts[t])
    others = zl.f64(0)
    for bin in zl.unroll(range(zl.lane_index(), parts.BINS - 1, zl.target.warp), 1):
        others += row.counts[bin]
    rest = zl.i32(finite - parts.warp_sum_f64(others))
    zl.barrier()
    depth, above, inside = parts.find(scores, parts.BINS - 1, zl.f64(0), limit, True)
    number = zl.i32(row.counts[depth])
    if inside == 0:
        above += scores[depth]
        depth = parts.BINS - 1
        number = rest + 0
    low, top = bin_limits(row, depth)
    result = zl.u64(0)
    if number > 0:
        if t == 0:
            found[0] = 0
        zl.barrier()
        collect_listed(row, low, top, keys, found)
        zl.barrier()
        collected = found[0]
        done = zl.i32(0)
        if collected > 0 and collected <= CANDIDATES:
            order, reached = shortest_prefix(row, keys, collected, above, limit, by_mass, ordered)
            # Lists that end inside the bin decide only what they reach.
            if reached != 0 or (zl.u64(low) << 32) >= row.bound:
                result = order + 0
                done = zl.i32(1)
        if done == 0:
            if number > CANDIDATES:
                number, low, top, above = divide(row, depth, low, top, above, limit, by_mass)
            if number <= CANDIDATES:
                zl.barrier()
                if t == 0:
                    found[0] = 0
                zl.barrier()
                collect_logits(row, depth, low, top, keys, found)
                zl.barrier()
                result, reached = shortest_prefix(row, keys, min(found[0], CANDIDATES), above, limit, by_mass, ordered)
            else:
                each = zl.where(by_mass, zl.f64(parts.relative_mass(value_of(low), row.high, row.inverse)), zl.f64(1))
                left = (limit - above) / each
                keep = zl.i32(left)
                keep = zl.where(zl.f64(keep) < left, keep + 1, keep)
                result = nth_equal(row, low, min(max(keep, 1), number))
    return result
