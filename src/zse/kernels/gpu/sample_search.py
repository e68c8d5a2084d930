"""The GPU sampler's search for the boundary of a kept set, by a whole block for one row.

A limit (a number of tokens, or a mass) falls into one bin of the row's histogram. Its tokens are put in order: those of
the chunks' lists, if these reach the limit, else those of a pass over the logits, after the bin was divided until few
enough are left. Of more equal logits than can be put in order, the first by id are kept.
"""

from typing import Any

from zse.kernel import (
    atomic_add,
    barrier,
    cast_ptr,
    f32,
    f64,
    i32,
    inline,
    lane_index,
    shared_array,
    static,
    target,
    thread_index,
    u32,
    u64,
    unroll,
    warp_index,
    warp_sum,
    where,
)
from zse.kernel.record import Record
from zse.kernels.gpu.sample_parts import (
    BINS,
    CHUNK,
    COUNTS,
    LIST,
    LISTED,
    MASS,
    MASSES,
    RECORD,
    bin_of,
    find,
    first_key,
    four_at,
    minus_infinity,
    order_at,
    order_of,
    power_of_two,
    relative_mass,
    scaling_exponent,
    warp_sum_f64,
)
from zse.kernels.sample_parts import LOWEST, key_of, value_of

THREADS = 1024
CANDIDATES = 512  # tokens of a bin that are put in order; more are divided further first
PARTS = 1024  # of a bin that is divided further
GROUPS = THREADS // BINS
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
    inverse: Any
    top_bin: Any
    bound: Any
    highs: Any
    bases: Any
    weights: Any  # f64 [MAX_CHUNKS]
    counts: Any  # f64 [BINS]
    masses: Any  # f64 [BINS]
    shares: Any  # f32 [THREADS]
    parts: Any  # f64 [GROUPS * (BINS + 1)]
    warp_sums: Any  # f64, one a warp
    scratch: Any  # u64 [2 * CANDIDATES]: what is needed in turns; all of it with `shares` keeps a block below 32 KB


@inline
def may_hold(row, chunk, depth):
    """Whether a chunk can have logits in the row's bin `depth`."""
    mine = depth - (row.top_bin - row.bases[chunk])
    known = row.records[chunk * RECORD + COUNTS + min(max(mine, 0), BINS - 1)]
    return row.highs[chunk] >= LOWEST and (depth == BINS - 1 or (mine >= 0 and known > 0))


@inline
def bin_limits(row, depth):
    """(smallest, largest) key of the row's bin `depth`; the last bin goes down to the lowest finite logit."""
    top = first_key(row.top_bin - depth + 1, row.inverse) - 1
    low = first_key(row.top_bin - depth, row.inverse)
    return where(depth == BINS - 1, key_of(f32(LOWEST)), low), top


@inline
def chunk_lanes(row, start, at, count):
    """A lane's next 4 * UNROLL values of a chunk that a warp walks, all loads issued first."""
    values = []
    for u in static(range(UNROLL)):
        values += four_at(row.x + start, at + u * target.warp * 4, count, row.aligned)
    return values


@inline
def place_of(at, j):
    """Place in the chunk of value j of chunk_lanes(at)."""
    return at + j // 4 * target.warp * 4 + j % 4


@inline
def any_within(values, low, high):
    """Whether one of the values is in [low, high]."""
    inside = values[0] >= low and values[0] <= high
    for value in static(values[1:]):
        inside = inside or (value >= low and value <= high)
    return inside


@inline
def merge_histograms(row, rest_sums):
    """Fill row.counts and row.masses from the chunks'; the number of finite logits. The last bin's count stays what no
    other bin has. rest_sums: f64, one a warp."""
    t = thread_index()
    lane = lane_index()
    warp = warp_index()
    warps = target.threads // target.warp
    part_counts = cast_ptr(row.scratch, i32)
    number = i32(0)
    mass = f64(0)
    finite = f64(0)
    depth = t % BINS
    for base in unroll(range(t // BINS, row.chunks, GROUPS * UNROLL), 1):
        # Loads of several chunks before the first is used.
        for u in static(range(UNROLL)):
            chunk = min(base + u * GROUPS, row.chunks - 1)
            record = row.records + chunk * RECORD
            place = depth - (row.top_bin - row.bases[chunk])
            within = min(max(place, 0), BINS - 1)
            share = f32(record[MASSES + within]) * power_of_two(-scaling_exponent(within))
            share = share * relative_mass(row.highs[chunk], row.high, row.inverse)
            if base + u * GROUPS < row.chunks and row.highs[chunk] >= LOWEST:
                finite += f64(record[COUNTS + depth])
                if place >= 0 and depth < BINS - 1:
                    number += i32(record[COUNTS + within])
                    mass += f64(share)
    # One more a group, so that the lanes that add a bin's groups read different banks.
    part_counts[t // BINS * (BINS + 1) + depth] = number
    row.parts[t // BINS * (BINS + 1) + depth] = mass
    finite = warp_sum_f64(finite)
    if lane == 0:
        rest_sums[warp] = finite
    barrier()
    for bin in unroll(range(warp, BINS, warps), 1):
        bin_count = f64(0)
        bin_mass = f64(0)
        for group in unroll(range(lane, GROUPS, target.warp), 1):
            bin_count += f64(part_counts[group * (BINS + 1) + bin])
            bin_mass += row.parts[group * (BINS + 1) + bin]
        bin_count = warp_sum_f64(bin_count)
        bin_mass = warp_sum_f64(bin_mass)
        if lane == 0:
            row.counts[bin] = bin_count
            row.masses[bin] = bin_mass
    finite = f64(0)
    for w in static(range(warps)):
        finite += rest_sums[w]
    barrier()
    return finite


@inline
def weigh_chunks(row, kept):
    """Fill row.weights with the mass of each chunk's kept logits, relative to the row's largest."""
    lane = lane_index()
    edge = value_of(u32(kept >> 32))
    depth = min(row.top_bin - bin_of(edge, row.inverse), BINS - 1)
    top = u32(0)
    if kept != 0:
        low, top_of_bin = bin_limits(row, depth)
        top = top_of_bin
    for chunk in unroll(range(warp_index(), row.chunks, target.threads // target.warp), 1):
        record = row.records + chunk * RECORD
        chunk_high = row.highs[chunk]
        relative = relative_mass(chunk_high, row.high, row.inverse)
        mass = f64(0)
        if kept == 0:
            mass = f64(where(chunk_high >= LOWEST, cast_ptr(record, f32)[MASS] * relative, f32(0)))
        elif chunk_high >= LOWEST:
            # Whole bins from the record, and what the kept set has of the bin of its edge.
            for mine in unroll(range(lane, min(depth - (row.top_bin - row.bases[chunk]), BINS - 1), target.warp), 1):
                mass += f64(f32(record[MASSES + mine]) * power_of_two(-scaling_exponent(mine)))
            mass = mass * f64(relative)
            if kept >= row.bound:
                if lane < LIST:
                    order = order_at(record + LISTED, lane)
                    if order >= kept and u32(order >> 32) <= top:
                        mass += f64(relative_mass(value_of(u32(order >> 32)), row.high, row.inverse))
            elif may_hold(row, chunk, depth):
                start = chunk * CHUNK
                count = min(row.vocab - start, CHUNK)
                for at in unroll(range(lane * 4, count, target.warp * 4 * UNROLL), 1):
                    values = chunk_lanes(row, start, at, count)
                    if any_within(values, edge, value_of(top)):
                        for j in static(range(4 * UNROLL)):
                            if (
                                values[j] >= edge
                                and values[j] <= value_of(top)
                                and order_of(values[j], start + place_of(at, j)) >= kept
                            ):
                                mass += f64(relative_mass(values[j], row.high, row.inverse))
            mass = warp_sum_f64(mass)
        if lane == 0:
            row.weights[chunk] = mass
    barrier()


@inline
def divide(row, depth, low, top, above, limit, by_mass):
    """Divide the keys [low, top] of the row's bin `depth` into parts and take the one that the limit falls into, until it
    has at most CANDIDATES tokens or a single key: (its tokens, low, top, tokens or mass above it)."""
    t = thread_index()
    lane = lane_index()
    warp = warp_index()
    warps = target.threads // target.warp
    numbers = cast_ptr(row.scratch, u32)
    low_words = numbers + PARTS
    high_words = cast_ptr(row.shares, u32)
    number = i32(CANDIDATES + 1)
    low_key = low + 0
    top_key = top + 0
    before = above + 0.0
    while number > CANDIDATES and low_key < top_key:
        shift = u32(0)
        while ((top_key - low_key) >> shift) >= PARTS:
            shift += 1
        numbers[t] = 0
        low_words[t] = 0
        high_words[t] = 0
        barrier()
        for chunk in unroll(range(warp, row.chunks, warps), 1):
            if may_hold(row, chunk, depth):
                start = chunk * CHUNK
                count = min(row.vocab - start, CHUNK)
                for at in unroll(range(lane * 4, count, target.warp * 4 * UNROLL), 1):
                    values = chunk_lanes(row, start, at, count)
                    if any_within(values, value_of(low_key), value_of(top_key)):
                        for value in static(values):
                            if value >= value_of(low_key) and value <= value_of(top_key):
                                part = i32((key_of(value) - low_key) >> shift)
                                atomic_add(numbers + part, 1)
                                if by_mass:
                                    # A 64-bit sum of 2**-40 units as two words with a carry.
                                    units = u64(relative_mass(value, row.high, row.inverse) * 1099511627776.0)
                                    old = atomic_add(low_words + part, u32(units))
                                    carry = where(old + u32(units) < old, u32(1), u32(0))
                                    atomic_add(high_words + part, u32(units >> 32) + carry)
        barrier()
        # From the largest part down.
        part = PARTS - 1 - t
        score = f64(numbers[part])
        if by_mass:
            score = f64((u64(high_words[part]) << 32) | u64(low_words[part])) * (2.0**-40)
        row.parts[t] = score
        score = warp_sum_f64(score)
        if lane == 0:
            row.warp_sums[warp] = score
        barrier()
        group, before_group, reached = find(row.warp_sums, warps, before, limit, True)
        place, before_part, reached = find(row.parts + group * target.warp, target.warp, before_group, limit, True)
        before = before_part
        part = PARTS - 1 - (group * target.warp + place)
        number = i32(numbers[part])
        low_key = low_key + (u32(part) << shift)
        top_key = min(top_key, low_key + ((u32(1) << shift) - 1))
        barrier()
    return number, low_key, top_key, before


@inline
def collect_listed(row, low, top, keys, number):
    """Put the orders of the chunks' lists with keys in [low, top] into keys; number counts them, those past CANDIDATES
    too. Tokens below the lists' bound are left out: there the lists are not whole."""
    for i in unroll(range(thread_index(), row.chunks * LIST, THREADS), 1):
        order = order_at(row.records + i // LIST * RECORD + LISTED, i % LIST)
        key = u32(order >> 32)
        if row.highs[i // LIST] >= LOWEST and order >= row.bound and key >= low and key <= top:
            slot = atomic_add(number, 1)
            if slot < CANDIDATES:
                keys[slot] = order


@inline
def collect_logits(row, depth, low, top, keys, number):
    """The same from the logits themselves. What is found is rare: it is read again in a loop that is not unrolled, so
    that its code need not be there sixteen times."""
    lane = lane_index()
    for chunk in unroll(range(warp_index(), row.chunks, target.threads // target.warp), 1):
        if may_hold(row, chunk, depth):
            start = chunk * CHUNK
            count = min(row.vocab - start, CHUNK)
            for at in unroll(range(lane * 4, count, target.warp * 4 * UNROLL), 1):
                values = chunk_lanes(row, start, at, count)
                if any_within(values, value_of(low), value_of(top)):
                    for j in unroll(range(4 * UNROLL), 1):
                        place = place_of(at, j)
                        value = minus_infinity()
                        if place < count:
                            value = row.x[start + place]
                        if value >= value_of(low) and value <= value_of(top):
                            slot = atomic_add(number, 1)
                            if slot < CANDIDATES:
                                keys[slot] = order_of(value, start + place)


@inline
def shortest_prefix(row, keys, number, above, limit, by_mass, ordered):
    """(order of the last token of the shortest prefix of the collected tokens that reaches the limit, whether one does);
    all of them where none does, 0 without any."""
    t = thread_index()
    if t < number:
        order = keys[t]
        rank = i32(0)
        for j in unroll(range(number), 4):
            rank += where(keys[j] > order, i32(1), i32(0))
        ordered[rank] = order
        mass = relative_mass(value_of(u32(order >> 32)), row.high, row.inverse)
        row.shares[rank] = where(by_mass, mass, f32(1))
    elif t < CANDIDATES:
        row.shares[t] = 0.0
    barrier()
    if t < CANDIDATES:
        score = warp_sum_f64(f64(row.shares[t]))
        if lane_index() == 0:
            row.warp_sums[warp_index()] = score
    barrier()
    group, before, reached = find(row.warp_sums, CANDIDATES // target.warp, above, limit, True)
    place, before, reached = find(row.shares + group * target.warp, target.warp, before, limit, True)
    last = ordered[group * target.warp + place]
    barrier()
    return where(number > 0, last, u64(0)), reached


@inline
def nth_equal(row, key, number):
    """Order of the `number`-th token, by id, of those whose logit has this key."""
    t = thread_index()
    lane = lane_index()
    result = shared_array(u64, 1)
    for chunk in unroll(range(warp_index(), row.chunks, target.threads // target.warp), 1):
        start = chunk * CHUNK
        count = min(row.vocab - start, CHUNK)
        equal = i32(0)
        for at in unroll(range(lane * 4, count, target.warp * 4), 1):
            for value in static(four_at(row.x + start, at, count, row.aligned)):
                equal += where(key_of(value) == key, i32(1), i32(0))
        equal = warp_sum(equal)
        if lane == 0:
            row.weights[chunk] = f64(equal)
    barrier()
    goal = f64(number) - 0.5
    chunk, before, reached = find(row.weights, row.chunks, f64(0), goal, True)
    start = chunk * CHUNK
    values = four_at(row.x + start, t * 4, min(row.vocab - start, CHUNK), row.aligned)
    share = f32(0)
    for value in static(values):
        share += where(key_of(value) == key, f32(1), f32(0))
    thread, before = find_thread(row, share, before, goal)
    if t == thread:
        missing = number - i32(before)
        for c in static(range(4)):
            if key_of(values[c]) == key:
                missing -= 1
                if missing == 0:
                    result[0] = order_of(values[c], start + t * 4 + c)
    barrier()
    return result[0]


@inline
def find_thread(row, share, before, goal):
    """(the thread at whose share, added in the threads' order, the goal is passed, sum before it)."""
    t = thread_index()
    row.shares[t] = share
    score = warp_sum_f64(f64(share))
    if lane_index() == 0:
        row.warp_sums[warp_index()] = score
    barrier()
    group, before_group, reached = find(row.warp_sums, target.threads // target.warp, before, goal, False)
    place, before_thread, reached = find(row.shares + group * target.warp, target.warp, before_group, goal, False)
    barrier()
    return group * target.warp + place, before_thread


@inline
def boundary(row, finite, limit, by_mass, scores, found):
    """The order of the last token of the shortest prefix of the row that reaches the limit (tokens, or a mass); 0 where
    the whole row does not. scores: f64 [BINS]; found: i32 [1]."""
    keys = row.scratch
    ordered = row.scratch + CANDIDATES
    t = thread_index()
    if t < BINS:
        scores[t] = where(by_mass, row.masses[t], row.counts[t])
    others = f64(0)
    for bin in unroll(range(lane_index(), BINS - 1, target.warp), 1):
        others += row.counts[bin]
    rest = i32(finite - warp_sum_f64(others))
    barrier()
    depth, above, inside = find(scores, BINS - 1, f64(0), limit, True)
    number = i32(row.counts[depth])
    if inside == 0:
        above += scores[depth]
        depth = BINS - 1
        number = rest + 0
    low, top = bin_limits(row, depth)
    result = u64(0)
    if number > 0:
        if t == 0:
            found[0] = 0
        barrier()
        collect_listed(row, low, top, keys, found)
        barrier()
        collected = found[0]
        done = i32(0)
        if collected > 0 and collected <= CANDIDATES:
            order, reached = shortest_prefix(row, keys, collected, above, limit, by_mass, ordered)
            # Lists that end inside the bin decide only what they reach.
            if reached != 0 or (u64(low) << 32) >= row.bound:
                result = order + 0
                done = i32(1)
        if done == 0:
            if number > CANDIDATES:
                number, low, top, above = divide(row, depth, low, top, above, limit, by_mass)
            if number <= CANDIDATES:
                barrier()
                if t == 0:
                    found[0] = 0
                barrier()
                collect_logits(row, depth, low, top, keys, found)
                barrier()
                result, reached = shortest_prefix(row, keys, min(found[0], CANDIDATES), above, limit, by_mass, ordered)
            else:
                each = where(by_mass, f64(relative_mass(value_of(low), row.high, row.inverse)), f64(1))
                left = (limit - above) / each
                keep = i32(left)
                keep = where(f64(keep) < left, keep + 1, keep)
                result = nth_equal(row, low, min(max(keep, 1), number))
    return result
