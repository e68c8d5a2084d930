"""Parts of the sampler: the random number, the exact boundary of a kept set, and the draw from it.

A kept set is {value > threshold, or value == threshold at an index <= tie}: a prefix of the vocabulary ordered by
(logit descending, id ascending).
"""

from typing import Any, NamedTuple

from zse import kernel as zl

PICK = 1024  # logits of a step of the draw
MAX_VOCAB = 4096 * PICK
DEPTHS = (3, 6, 9, 12, 15, 20)  # nats below the best logit, see choose_floor
LOWEST = -3.4028234663852886e38  # the smallest finite f32; minus infinity is as good as this


@zl.inline
def uniform(seed, counter):
    """A number in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al. 2011), key = seed, counter = the draw's
    position."""
    c = [zl.u32(counter), zl.u32(counter >> 32), zl.u32(0), zl.u32(0)]
    k0 = zl.u32(seed)
    k1 = zl.u32(seed >> 32)
    for _ in zl.static(range(10)):
        a = zl.u64(c[0]) * 0xD2511F53
        b = zl.u64(c[2]) * 0xCD9E8D57
        n0 = zl.u32(b >> 32) ^ c[1] ^ k0
        n2 = zl.u32(a >> 32) ^ c[3] ^ k1
        c[0] = n0
        c[1] = zl.u32(b)
        c[2] = n2
        c[3] = zl.u32(a)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    bits = (zl.u64(c[1]) << 32 | zl.u64(c[0])) >> 11
    return zl.f64(bits) * (2.0**-53)


@zl.inline
def key_of(value):
    """u32 that orders as the f32 does (both zeros alike)."""
    bits = zl.bitcast(value + 0.0, zl.i32)
    return zl.bitcast(bits ^ ((bits >> 31) & 0x7FFFFFFF), zl.u32) ^ 0x80000000


@zl.inline
def value_of(key):
    """The f32 of a key."""
    bits = zl.bitcast(key ^ 0x80000000, zl.i32)
    return zl.bitcast(bits ^ ((bits >> 31) & 0x7FFFFFFF), zl.f32)


@zl.inline
def mass_above(x, vocab, floor, high, inverse):
    """(number, mass relative to the largest) of the logits >= floor; groups of 4 registers below it cost a maximum."""
    L = zl.target.lanes
    mass = zl.f64(0)
    count = zl.i64(0)
    step = 4 * L
    whole = vocab // step * step
    for i in range(0, whole, step):
        v = [zl.load(x + i + u * L, L) for u in zl.static(range(4))]
        if zl.reduce_max(max(max(v[0], v[1]), max(v[2], v[3]))) >= floor:
            masses = zl.f32.x(L)(0)
            counts = zl.i32.x(L)(0)
            for u in zl.static(range(4)):
                kept = v[u] >= floor
                masses += zl.where(kept, zl.exp((v[u] - high) * inverse), zl.f32.x(L)(0))
                counts += zl.where(kept, zl.i32.x(L)(1), zl.i32.x(L)(0))
            mass += zl.f64(zl.reduce_add(masses))
            count += zl.i64(zl.reduce_add(counts))
    for j in range(whole, vocab):
        if x[j] >= floor:
            mass += zl.f64(zl.exp((x[j] - high) * inverse))
            count += 1
    return count, mass


@zl.inline
def choose_floor(x, vocab, cut, high, inverse, temperature, limit, MODE):
    """A logit >= cut above which the wanted prefix ends for sure, so that few logits enter the histograms: the
    shallowest of six depths below the best (in nats) that holds the limit, found in one pass, or else cut."""
    L = zl.target.lanes
    floors = [max(cut, high - temperature * depth) for depth in zl.static(DEPTHS)]
    sums = [zl.f32.x(L)(0) for _ in zl.static(DEPTHS)]
    whole = vocab // L * L
    for i in range(0, whole, L):
        value = zl.load(x + i, L)
        if zl.reduce_max(value) >= floors[-1]:
            each = zl.f32.x(L)(1.0) if MODE == "count" else zl.exp((value - high) * inverse)
            for k in zl.static(range(len(DEPTHS))):
                sums[k] += zl.where(value >= floors[k], each, zl.f32.x(L)(0))
    # f32 sums of up to 2**18 terms: a thousandth is more than they can be wrong by. The tail of the row is left out.
    wanted = zl.f32(limit) * 1.001
    floor = cut
    for k in zl.static(reversed(range(len(DEPTHS)))):
        floor = floors[k] if zl.reduce_add(sums[k]) >= wanted else floor
    return floor


class Kept(NamedTuple):
    """A kept set of a row in a kernel: {value > threshold, or == threshold at an index <= tie}."""

    threshold: Any
    tie: Any


@zl.inline
def fill_histogram(x, vocab, low, top, kept, high, inverse, shift, width, counts, masses, powers):
    """Into counts and masses [2**width]: the kept values of low .. top by `width` bits of their keys. powers: room for
    16."""
    L = zl.target.lanes
    for b in range(1 << width):
        counts[b] = 0
        masses[b] = 0.0
    for i in range(0, vocab, L):
        near = zl.i32(1)
        if i + L <= vocab:
            value = zl.load(x + i, L)
            near = zl.reduce_max(
                zl.where(value >= low, zl.i32.x(L)(1), zl.i32.x(L)(0))
                & zl.where(value <= top, zl.i32.x(L)(1), zl.i32.x(L)(0))
            )
            if near != 0:
                zl.store(powers, zl.exp((value - high) * inverse))
        if near != 0:
            for j in range(i, min(i + L, vocab)):
                element = x[j]
                if (
                    element >= low
                    and element <= top
                    and (element > kept.threshold or (element == kept.threshold and zl.i32(j) <= kept.tie))
                ):
                    place = zl.i64((key_of(element) >> shift) & ((1 << width) - 1))
                    counts[place] = counts[place] + 1
                    if i + L <= vocab:
                        masses[place] = masses[place] + zl.f64(powers[j - i])
                    else:
                        masses[place] = masses[place] + zl.f64(zl.exp((element - high) * inverse))


@zl.inline
def nth_equal(x, vocab, edge, n, otherwise):
    """The index of the nth logit that is `edge`."""
    found = otherwise
    left = n
    for j in range(vocab):
        if x[j] == edge:
            left -= 1
            if left == 0:
                found = zl.i32(j)
                break
    return found


@zl.inline
def cut_prefix(x, vocab, floor, threshold, tie, high, inverse, limit, MODE):
    """Shorten the kept set {value > threshold, or == threshold at an index <= tie} to its shortest prefix with `limit`
    tokens (MODE "count", i64) or of mass `limit` (MODE "mass", f64). Only values >= floor are looked at.
    Returns (threshold, tie, mass); everything from floor on stays if the limit is not reached."""
    counts = zl.local_array(zl.i32, 2048)
    masses = zl.local_array(zl.f64, 2048)
    powers = zl.local_array(zl.f32, 16)
    prefix = zl.u32(0)
    count_above = zl.i64(0)
    mass_above_ = zl.f64(0)
    bin = zl.i64(0)
    reached = zl.i32(1)
    kept = Kept(threshold, tie)
    for shift, width in zl.static(((21, 11), (10, 11), (0, 10))):
        if reached != 0:
            # Values that share the bits found so far lie between these two; registers without one are passed over.
            low = floor if shift == 21 else max(floor, value_of(prefix))
            top = (
                zl.f32(-LOWEST) if shift == 21 else value_of(prefix | ((1 << (shift + width if shift < 21 else 0)) - 1))
            )
            fill_histogram(x, vocab, low, top, kept, high, inverse, shift, width, counts, masses, powers)
            bin = (1 << width) - 1
            while bin > 0 and (
                (count_above + zl.i64(counts[bin]) < limit) if MODE == "count" else (mass_above_ + masses[bin] < limit)
            ):
                count_above += zl.i64(counts[bin])
                mass_above_ += masses[bin]
                bin -= 1
            if shift == 21:
                if bin == 0 and (
                    (count_above + zl.i64(counts[bin]) < limit)
                    if MODE == "count"
                    else (mass_above_ + masses[bin] < limit)
                ):
                    reached = 0
            prefix = prefix | (zl.u32(bin) << shift)
    out_threshold = max(threshold, floor)
    out_tie = tie if threshold >= floor else zl.i32(vocab)
    out_mass = mass_above_ + masses[bin]
    if reached != 0:
        edge = value_of(prefix)
        equal = zl.i64(counts[bin])
        keep = equal
        if equal > 0:
            if MODE == "count":
                keep = limit - count_above
            else:
                each = masses[bin] / zl.f64(equal)
                keep = zl.i64((limit - mass_above_) / each)
                if mass_above_ + zl.f64(keep) * each < limit:
                    keep += 1
            keep = min(max(keep, 1), equal)
            out_mass = mass_above_ + masses[bin] / zl.f64(equal) * zl.f64(keep)
        out_tie = tie if edge == threshold else zl.i32(vocab)
        out_threshold = edge
        if keep < equal:
            out_tie = nth_equal(x, vocab, edge, keep, out_tie)
    return out_threshold, out_tie, out_mass


@zl.inline
def pick(x, vocab, threshold, tie, high, inverse, u):
    """The first index, in index order, at which the kept mass passes u * (all kept mass)."""
    L = zl.target.lanes
    blocks = zl.local_array(zl.f32, MAX_VOCAB // PICK)
    number = (vocab + PICK - 1) // PICK
    total = zl.f64(0)
    for block in range(number):
        first = block * PICK
        last = min(first + PICK, vocab)
        mass = zl.f32(0)
        if zl.i64(tie) >= first and zl.i64(tie) < last - 1:
            for j in range(first, last):
                if x[j] > threshold or (x[j] == threshold and zl.i32(j) <= tie):
                    mass += zl.exp((x[j] - high) * inverse)
        else:
            equal = zl.i64(tie) >= last - 1
            sums = zl.f32.x(L)(0)
            whole = first + (last - first) // L * L
            for i in range(first, whole, L):
                value = zl.load(x + i, L)
                if zl.reduce_max(value) >= threshold:
                    kept = zl.where(value > threshold, zl.i32.x(L)(1), zl.i32.x(L)(0))
                    if equal:
                        kept = zl.where(value == threshold, zl.i32.x(L)(1), kept)
                    sums += zl.where(kept != 0, zl.exp((value - high) * inverse), zl.f32.x(L)(0))
            mass = zl.reduce_add(sums)
            for j in range(whole, last):
                if x[j] > threshold or (x[j] == threshold and equal):
                    mass += zl.exp((x[j] - high) * inverse)
        blocks[block] = mass
        total += zl.f64(mass)
    goal = u * total
    done = zl.f64(0)
    chosen = zl.i64(0)
    for block in range(number):
        if blocks[block] > 0.0:
            chosen = block
            if done + zl.f64(blocks[block]) > goal:
                break
            done += zl.f64(blocks[block])
    if done + zl.f64(blocks[chosen]) <= goal:  # rounding carried the goal past the end: the last kept token
        done = goal - zl.f64(blocks[chosen])
    token = zl.i32(0)
    for j in range(chosen * PICK, min(chosen * PICK + PICK, vocab)):
        if x[j] > threshold or (x[j] == threshold and zl.i32(j) <= tie):
            token = zl.i32(j)
            done += zl.f64(zl.exp((x[j] - high) * inverse))
            if done > goal:
                break
    return token
