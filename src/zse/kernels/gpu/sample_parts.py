"""Parts of the GPU sampler: the order of tokens, the chunk records between its two kernels, the histogram's bins.

Tokens are ordered by (logit descending, id ascending); `order_of` is that as one u64, so a kept set is {order >= T} for
a single T, and no two tokens are alike.

Bins halve an octave of probability: bin(v) = floor(v / temperature * 2 / ln 2). They are aligned over the whole row, so
the histograms of chunks, each relative to its own largest logit, can be added. A bin's mass is an integer (sums of
integers do not depend on the order in which threads come): exp((v - largest) / temperature) times a power of two that
leaves 20 bits, whichever the bin.
"""

from zse import kernel as zl
from zse.kernels.kv_pages import BLOCK
from zse.kernels.sample_parts import key_of, value_of

CHUNK = 4096  # logits of one block of the scan
MAX_CHUNKS = 128  # vocabularies of up to 524,288 tokens
BINS = 64  # the last one holds everything deeper than 21.8 nats below the largest logit
BITS = 20
MAX_LOGPROBS = 20

# A chunk's record, in 4-byte words.
BEST = 0  # u64: order of the largest logit, all ones where a logit is NaN
BASE = 2  # i32: bin of the largest logit
MASS = 3  # f32: sum of exp((v - largest) / temperature)
RAW_HIGH = 4  # f32: largest logit before biases and penalties
RAW_SUM = 5  # f32: sum of exp(v - raw largest)
COUNTS = 8  # u32 [BINS]
MASSES = COUNTS + BINS  # u32 [BINS]
RAW_TOP = MASSES + BINS  # u64 [MAX_LOGPROBS]: orders of the best before biases and penalties; 0: no more
LISTED = RAW_TOP + 2 * MAX_LOGPROBS  # u64 [LIST]: orders of the best; no token outside is better than the last
LIST = 32
RECORD = LISTED + 2 * LIST


@zl.inline
def minus_infinity():
    return zl.bitcast(zl.u32(0xFF800000), zl.f32)


@zl.inline
def order_of(value, id):
    """u64 that is larger for the token that comes first."""
    return (zl.u64(key_of(value)) << 32) | zl.u64(zl.u32(id) ^ 0xFFFFFFFF)


@zl.inline
def id_of(order):
    """The token of an order."""
    return zl.i32(zl.u32(order) ^ 0xFFFFFFFF)


@zl.inline
def order_at(words, place):
    """Entry of a list of orders in a record."""
    return zl.u64(words[place * 2]) | (zl.u64(words[place * 2 + 1]) << 32)


@zl.inline
def larger(a, b):
    return zl.where(a > b, a, b)


@zl.inline
def block_best(order, scratch):
    """Largest u64 of the block, in every thread. scratch: one u64 a warp."""
    best = order + 0
    for step in zl.static((32, 16, 8, 4, 2, 1)):
        if step < zl.target.warp:
            best = larger(best, zl.shuffle_xor(best, step))
    if zl.lane_index() == 0:
        scratch[zl.warp_index()] = best
    zl.barrier()
    for w in zl.static(range(zl.target.threads // zl.target.warp)):
        best = larger(best, scratch[w])
    return best


@zl.inline
def warp_sum_f64(value):
    total = value + 0.0
    for step in zl.static((32, 16, 8, 4, 2, 1)):
        if step < zl.target.warp:
            total = total + zl.shuffle_xor(total, step)
    return total


@zl.inline
def four_at(x, at, count, aligned):
    """x[at : at + 4] as a list; minus infinity from count on. aligned: x and count are multiples of 4 values."""
    values = [minus_infinity() for _ in zl.static(range(4))]
    if aligned:
        if at < count:
            four = zl.load(x + at, 4)
            for c in zl.static(range(4)):
                values[c] = four[c]
    else:
        for c in zl.static(range(4)):
            if at + c < count:
                values[c] = x[at + c]
    return values


@zl.inline
def bin_of(value, inverse):
    """The bin of a logit, for all but minus infinity a number of nats / 0.3466."""
    return zl.i32(zl.floor(min(max(value * inverse * 2.0, -1e9), 1e9)))


@zl.inline
def inverse_of(temperature):
    """log2(e) / temperature: what differences of logits are multiplied with to be powers of two."""
    return 1.4426950408889634 / temperature


@zl.inline
def scaling_exponent(depth):
    """Bits that the mass of a bin `depth` below the chunk's first is shifted by: a mass there is at most
    2**(-(depth - 1) / 2)."""
    return BITS + max(depth - 1, 0) // 2


@zl.inline
def power_of_two(exponent):
    return zl.bitcast((exponent + 127) << 23, zl.f32)


@zl.inline
def is_greedy(temperature, top_k):
    return temperature < 1e-5 or top_k == 1


@zl.inline
def lowest_bit(bits):
    """Place of the lowest set bit of a u64 that is not 0."""
    return zl.i32(zl.popcount((bits ^ (bits - 1)) >> 1))


@zl.inline
def highest_bit(bits):
    """Place of the highest set bit of a u64 that is not 0."""
    filled = bits + 0
    for shift in zl.static((1, 2, 4, 8, 16, 32)):
        filled = filled | (filled >> shift)
    return zl.i32(zl.popcount(filled)) - 1


@zl.inline
def prefix_sum(value):
    """Sum of the lanes up to and with this one."""
    sum = value + 0
    for step in zl.static((1, 2, 4, 8, 16, 32)):
        if step < zl.target.warp:
            other = zl.shuffle_up(sum, step)
            sum = zl.where(zl.lane_index() >= step, sum + other, sum)
    return sum


@zl.inline
def find(weights, count, done, goal, REACH):
    """(index, sum before it, whether there is one): the first of `count` weights at which done + weights[0] + ...
    passes the goal (REACH: reaches it). Where none does: the last that is not zero, and the sum before that. By a whole
    warp."""
    lane = zl.lane_index()
    index = zl.i32(0)
    before = done + 0.0
    running = done + 0.0
    found = zl.i32(0)
    for base in zl.unroll(range(0, count, zl.target.warp), 1):
        if found == 0:
            mine = zl.f64(0)
            if base + lane < count:
                mine = zl.f64(weights[base + lane])
            sum = running + prefix_sum(mine)
            passed = zl.ballot(mine > 0.0 and (sum >= goal if REACH else sum > goal))
            some = zl.ballot(mine > 0.0)
            if passed != 0:
                found = zl.i32(1)
            if some != 0:
                place = zl.where(passed != 0, lowest_bit(passed), highest_bit(some))
                index = base + place
                earlier = zl.shuffle(sum, max(place - 1, 0))
                before = zl.where(place > 0, earlier, running)
            running = zl.shuffle(sum, zl.target.warp - 1)
    return index, before, found


@zl.inline
def first_key(bin, inverse):
    """The smallest u32 key (key_of) of a value whose bin is at least `bin`; bins grow with values, so the key's bits
    are found from the top, five at once by the lanes of a warp."""
    lane = zl.u32(zl.lane_index() % 32)
    key = zl.u32(0)
    shift = zl.u32(27)
    for level in zl.unroll(range(7), 1):
        # 27, 22, ... 2, and the two bits that are left.
        tried = key + (lane << shift) if level < 6 else key + lane % 4
        inside = zl.ballot(bin_of(value_of(tried + ((zl.u32(1) << shift) - 1)), inverse) >= bin)
        first = zl.where(inside != 0, lowest_bit(inside), 31) % zl.where(level < 6, zl.i32(32), zl.i32(4))
        key = key + (zl.u32(first) << shift)
        shift = zl.where(shift > 2, shift - 5, zl.u32(0))
    return key


@zl.inline
def history_at(p, line, position):
    """Where the token at `position` of the sequence in this line of the page table lies in the history. p:
    parameters."""
    block = p.page_table[line * p.max_pages + position // BLOCK]
    return p.history + (block // p.blocks_per_page * BLOCK + position % BLOCK)


@zl.inline
def relative_mass(value, high, inverse):
    """exp((value - high) / temperature) as a power of two, `inverse` from inverse_of(); 0 for minus infinity. The error
    grows with the distance from the largest logit, as the mass falls: relative to the sum it stays within a few ulp."""
    return zl.exp2((value - high) * inverse)
