"""Parts of the sampler: the random number, the exact boundary of a kept set, and the draw from it.

A kept set is {value > threshold, or value == threshold at an index <= tie}: a prefix of the vocabulary ordered by
(logit descending, id ascending).
"""

from zse.kernel import (
    bitcast,
    exp,
    f32,
    f64,
    i32,
    i64,
    inline,
    load,
    local_array,
    reduce_add,
    reduce_max,
    static,
    store,
    target,
    u32,
    u64,
    where,
)

PICK = 1024  # logits of a step of the draw
MAX_VOCAB = 4096 * PICK
DEPTHS = (3, 6, 9, 12, 15, 20)  # nats below the best logit, see choose_floor
LOWEST = -3.4028234663852886e38  # the smallest finite f32; minus infinity is as good as this


@inline
def uniform(seed, counter):
    """A number in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al. 2011), key = seed, counter = the draw's
    position."""
    c = [u32(counter), u32(counter >> 32), u32(0), u32(0)]
    k0 = u32(seed)
    k1 = u32(seed >> 32)
    for _ in static(range(10)):
        a = u64(c[0]) * 0xD2511F53
        b = u64(c[2]) * 0xCD9E8D57
        n0 = u32(b >> 32) ^ c[1] ^ k0
        n2 = u32(a >> 32) ^ c[3] ^ k1
        c[0] = n0
        c[1] = u32(b)
        c[2] = n2
        c[3] = u32(a)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    bits = (u64(c[1]) << 32 | u64(c[0])) >> 11
    return f64(bits) * (2.0**-53)


@inline
def key_of(value):
    """u32 that orders as the f32 does (both zeros alike)."""
    bits = bitcast(value + 0.0, i32)
    return bitcast(bits ^ ((bits >> 31) & 0x7FFFFFFF), u32) ^ 0x80000000


@inline
def value_of(key):
    """The f32 of a key."""
    bits = bitcast(key ^ 0x80000000, i32)
    return bitcast(bits ^ ((bits >> 31) & 0x7FFFFFFF), f32)


@inline
def mass_above(x, vocab, floor, high, inverse):
    """(number, mass relative to the largest) of the logits >= floor; groups of 4 registers below it cost a maximum."""
    L = target.lanes
    mass = f64(0)
    count = i64(0)
    step = 4 * L
    whole = vocab // step * step
    for i in range(0, whole, step):
        v = [load(x + i + u * L, L) for u in static(range(4))]
        if reduce_max(max(max(v[0], v[1]), max(v[2], v[3]))) >= floor:
            masses = f32.x(L)(0)
            counts = i32.x(L)(0)
            for u in static(range(4)):
                kept = v[u] >= floor
                masses += where(kept, exp((v[u] - high) * inverse), f32.x(L)(0))
                counts += where(kept, i32.x(L)(1), i32.x(L)(0))
            mass += f64(reduce_add(masses))
            count += i64(reduce_add(counts))
    for j in range(whole, vocab):
        if x[j] >= floor:
            mass += f64(exp((x[j] - high) * inverse))
            count += 1
    return count, mass


@inline
def choose_floor(x, vocab, cut, high, inverse, temperature, limit, MODE):
    """A logit >= cut above which the wanted prefix ends for sure, so that few logits enter the histograms: the
    shallowest of six depths below the best (in nats) that holds the limit, found in one pass, or else cut."""
    L = target.lanes
    floors = [max(cut, high - temperature * depth) for depth in static(DEPTHS)]
    sums = [f32.x(L)(0) for _ in static(DEPTHS)]
    whole = vocab // L * L
    for i in range(0, whole, L):
        value = load(x + i, L)
        if reduce_max(value) >= floors[-1]:
            each = f32.x(L)(1.0) if MODE == "count" else exp((value - high) * inverse)
            for k in static(range(len(DEPTHS))):
                sums[k] += where(value >= floors[k], each, f32.x(L)(0))
    # f32 sums of up to 2**18 terms: a thousandth is more than they can be wrong by. The tail of the row is left out.
    wanted = f32(limit) * 1.001
    floor = cut
    for k in static(reversed(range(len(DEPTHS)))):
        floor = floors[k] if reduce_add(sums[k]) >= wanted else floor
    return floor


@inline
def cut_prefix(x, vocab, floor, threshold, tie, high, inverse, limit, MODE):
    """Shorten the kept set {value > threshold, or == threshold at an index <= tie} to its shortest prefix with `limit`
    tokens (MODE "count", i64) or of mass `limit` (MODE "mass", f64). Only values >= floor are looked at.
    Returns (threshold, tie, mass); everything from floor on stays if the limit is not reached."""
    L = target.lanes
    counts = local_array(i32, 2048)
    masses = local_array(f64, 2048)
    powers = local_array(f32, 16)
    prefix = u32(0)
    count_above = i64(0)
    mass_above_ = f64(0)
    bin = i64(0)
    reached = i32(1)
    for shift, width in static(((21, 11), (10, 11), (0, 10))):
        if reached != 0:
            for b in range(1 << width):
                counts[b] = 0
                masses[b] = 0.0
            # Values that share the bits found so far lie between these two; registers without one are passed over.
            low = floor if shift == 21 else max(floor, value_of(prefix))
            top = f32(-LOWEST) if shift == 21 else value_of(prefix | ((1 << (shift + width if shift < 21 else 0)) - 1))
            for i in range(0, vocab, L):
                near = i32(1)
                if i + L <= vocab:
                    value = load(x + i, L)
                    near = reduce_max(
                        where(value >= low, i32.x(L)(1), i32.x(L)(0)) & where(value <= top, i32.x(L)(1), i32.x(L)(0))
                    )
                    if near != 0:
                        store(powers, exp((value - high) * inverse))
                if near != 0:
                    for j in range(i, min(i + L, vocab)):
                        element = x[j]
                        if (
                            element >= low
                            and element <= top
                            and (element > threshold or (element == threshold and i32(j) <= tie))
                        ):
                            place = i64((key_of(element) >> shift) & ((1 << width) - 1))
                            counts[place] = counts[place] + 1
                            if i + L <= vocab:
                                masses[place] = masses[place] + f64(powers[j - i])
                            else:
                                masses[place] = masses[place] + f64(exp((element - high) * inverse))
            bin = (1 << width) - 1
            while bin > 0 and (
                (count_above + i64(counts[bin]) < limit) if MODE == "count" else (mass_above_ + masses[bin] < limit)
            ):
                count_above += i64(counts[bin])
                mass_above_ += masses[bin]
                bin -= 1
            if shift == 21:
                if bin == 0 and (
                    (count_above + i64(counts[bin]) < limit) if MODE == "count" else (mass_above_ + masses[bin] < limit)
                ):
                    reached = 0
            prefix = prefix | (u32(bin) << shift)
    out_threshold = max(threshold, floor)
    out_tie = tie if threshold >= floor else i32(vocab)
    out_mass = mass_above_ + masses[bin]
    if reached != 0:
        edge = value_of(prefix)
        equal = i64(counts[bin])
        keep = equal
        if equal > 0:
            if MODE == "count":
                keep = limit - count_above
            else:
                each = masses[bin] / f64(equal)
                keep = i64((limit - mass_above_) / each)
                if mass_above_ + f64(keep) * each < limit:
                    keep += 1
            keep = min(max(keep, 1), equal)
            out_mass = mass_above_ + masses[bin] / f64(equal) * f64(keep)
        out_tie = tie if edge == threshold else i32(vocab)
        out_threshold = edge
        if keep < equal:
            left = keep
            for j in range(vocab):
                if x[j] == edge:
                    left -= 1
                    if left == 0:
                        out_tie = i32(j)
                        break
    return out_threshold, out_tie, out_mass


@inline
def pick(x, vocab, threshold, tie, high, inverse, u):
    """The first index, in index order, at which the kept mass passes u * (all kept mass)."""
    L = target.lanes
    blocks = local_array(f32, MAX_VOCAB // PICK)
    number = (vocab + PICK - 1) // PICK
    total = f64(0)
    for block in range(number):
        first = block * PICK
        last = min(first + PICK, vocab)
        mass = f32(0)
        if i64(tie) >= first and i64(tie) < last - 1:
            for j in range(first, last):
                if x[j] > threshold or (x[j] == threshold and i32(j) <= tie):
                    mass += exp((x[j] - high) * inverse)
        else:
            equal = i64(tie) >= last - 1
            sums = f32.x(L)(0)
            whole = first + (last - first) // L * L
            for i in range(first, whole, L):
                value = load(x + i, L)
                if reduce_max(value) >= threshold:
                    kept = where(value > threshold, i32.x(L)(1), i32.x(L)(0))
                    if equal:
                        kept = where(value == threshold, i32.x(L)(1), kept)
                    sums += where(kept != 0, exp((value - high) * inverse), f32.x(L)(0))
            mass = reduce_add(sums)
            for j in range(whole, last):
                if x[j] > threshold or (x[j] == threshold and equal):
                    mass += exp((x[j] - high) * inverse)
        blocks[block] = mass
        total += f64(mass)
    goal = u * total
    done = f64(0)
    chosen = i64(0)
    for block in range(number):
        if blocks[block] > 0.0:
            chosen = block
            if done + f64(blocks[block]) > goal:
                break
            done += f64(blocks[block])
    if done + f64(blocks[chosen]) <= goal:  # rounding carried the goal past the end: the last kept token
        done = goal - f64(blocks[chosen])
    token = i32(0)
    for j in range(chosen * PICK, min(chosen * PICK + PICK, vocab)):
        if x[j] > threshold or (x[j] == threshold and i32(j) <= tie):
            token = i32(j)
            done += f64(exp((x[j] - high) * inverse))
            if done > goal:
                break
    return token
