"""Parts of the GPU sampler: the order of tokens, the chunk records between its two kernels, the histogram's bins.

Tokens are ordered by (logit descending, id ascending); `order_of` is that as one u64, so a kept set is {order >= T} for
a single T, and no two tokens are alike.

Bins halve an octave of probability: bin(v) = floor(v / temperature * 2 / ln 2). They are aligned over the whole row, so
the histograms of chunks, each relative to its own largest logit, can be added. A bin's mass is an integer (sums of
integers do not depend on the order in which threads come): exp((v - largest) / temperature) times a power of two that
leaves 20 bits, whichever the bin.
"""

from zse.kernel import (
    barrier,
    bitcast,
    exp,
    f32,
    f64,
    floor,
    i32,
    inline,
    lane_index,
    load,
    shuffle_xor,
    static,
    target,
    u32,
    u64,
    warp_index,
    where,
)
from zse.kernels.sample_parts import LOWEST, key_of

CHUNK = 4096            # logits of one block of the scan
MAX_CHUNKS = 256        # vocabularies of up to a million tokens
BINS = 64               # the last one holds everything deeper than 21.8 nats below the largest logit
BITS = 20
MAX_LOGPROBS = 20
PAGE = 16

# A chunk's record, in 4-byte words.
BEST = 0                # u64: order of the largest logit, all ones where a logit is NaN
BASE = 2                # i32: bin of the largest logit
MASS = 3                # f32: sum of exp((v - largest) / temperature)
RAW_HIGH = 4            # f32: largest logit before biases and penalties
RAW_SUM = 5             # f32: sum of exp(v - raw largest)
COUNTS = 8              # u32 [BINS]
MASSES = COUNTS + BINS  # u32 [BINS]
TOP_VALUES = MASSES + BINS              # f32 [MAX_LOGPROBS], best first
TOP_IDS = TOP_VALUES + MAX_LOGPROBS     # i32 [MAX_LOGPROBS], -1: none
RECORD = TOP_IDS + MAX_LOGPROBS


@inline
def minus_infinity():
    return bitcast(u32(0xFF800000), f32)


@inline
def order_of(value, id):
    """u64 that is larger for the token that comes first."""
    return (u64(key_of(value)) << 32) | u64(u32(id) ^ 0xFFFFFFFF)


@inline
def id_of(order):
    """The token of an order."""
    return i32(u32(order) ^ 0xFFFFFFFF)


@inline
def larger(a, b):
    return where(a > b, a, b)


@inline
def block_best(order, scratch):
    """Largest u64 of the block, in every thread. scratch: one u64 a warp."""
    best = order + 0
    for step in static((32, 16, 8, 4, 2, 1)):
        if step < target.warp:
            best = larger(best, shuffle_xor(best, step))
    if lane_index() == 0:
        scratch[warp_index()] = best
    barrier()
    for w in static(range(target.threads // target.warp)):
        best = larger(best, scratch[w])
    return best


@inline
def warp_sum_f64(value):
    total = value + 0.0
    for step in static((32, 16, 8, 4, 2, 1)):
        if step < target.warp:
            total = total + shuffle_xor(total, step)
    return total


@inline
def four_at(x, at, count, aligned):
    """x[at : at + 4] as a list; minus infinity from count on. aligned: x and count are multiples of 4 values."""
    values = [minus_infinity() for _ in static(range(4))]
    if aligned:
        if at < count:
            four = load(x + at, 4)
            for c in static(range(4)):
                values[c] = four[c]
    else:
        for c in static(range(4)):
            if at + c < count:
                values[c] = x[at + c]
    return values


@inline
def bin_of(value, inverse):
    """The bin of a logit, for all but minus infinity a number of nats / 0.3466."""
    return i32(floor(min(max(value * inverse * 2.8853900817779268, -1e9), 1e9)))


@inline
def scaling_exponent(depth):
    """Bits that the mass of a bin `depth` below the chunk's first is shifted by: a mass there is at most
    2**(-(depth - 1) / 2)."""
    return BITS + max(depth - 1, 0) // 2


@inline
def power_of_two(exponent):
    return bitcast((exponent + 127) << 23, f32)


@inline
def is_greedy(temperature, top_k):
    return temperature < 1e-5 or top_k == 1


@inline
def is_filtered(top_k, top_p, min_p, vocab):
    """Whether a sampled row keeps less than its whole vocabulary."""
    return (top_k > 0 and top_k < vocab) or top_p < 1.0 or min_p > 0.0


@inline
def walk(masses, count, done, goal):
    """(index, sum before it): the first entry at which done + masses[0] + ... passes the goal, else the last that is
    not zero."""
    chosen = i32(0)
    before = done + 0.0
    sum = done + 0.0
    for i in range(count):
        mass = f64(masses[i])
        if mass > 0.0:
            chosen = i
            before = sum
            sum += mass
            if sum > goal:
                break
    return chosen, before


@inline
def history_place(page_table, line, position, max_pages, blocks_per_page):
    """Where the token at `position` of the sequence in this line of the page table lies in the history."""
    block = page_table[line * max_pages + position // PAGE]
    return block // blocks_per_page * PAGE + position % PAGE


@inline
def relative_mass(value, high, inverse):
    """exp((value - high) / temperature); 0 for minus infinity."""
    return where(value > LOWEST, exp((value - high) * inverse), f32(0))
