"""The sampler's kernels on a CPU. `sample_scan_chunk` walks the vocabulary in chunks, so that several threads share
even one row of 262k logits; `sample_row` merges a row's chunks and decides; what it decides by is sample_parts.py's."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels import sample_parts
from zse.kernels.sample import CHUNK, MAX_LOGPROBS, RECORD

BLOCK = 1024  # logits of one f32 sum of the standard deviation
TOP_VALUES, TOP_IDS = 4, 24  # of a chunk's record
OK, NUMERICAL = 0, 1  # status: a row with NaN, +infinity or no finite logit is NUMERICAL


@zl.inline
def best_of(x, first, last):
    """(largest value, its lowest index) of x[first:last]; NaN is passed over."""
    L = zl.target.lanes
    high = zl.f32.x(L)(sample_parts.LOWEST)
    at = zl.i32.x(L)(zl.i32(first))
    whole = first + (last - first) // L * L
    for i in range(first, whole, L):
        value = zl.load(x + i, L)
        better = value > high
        high = zl.where(better, value, high)
        at = zl.where(better, zl.i32.x(L)(zl.i32(i)), at)
    values = zl.local_array(zl.f32, 16)
    places = zl.local_array(zl.i32, 16)
    zl.store(values, high)
    zl.store(places, at)
    best = zl.f32(sample_parts.LOWEST)
    index = zl.i32(first)
    for lane in range(L):
        id = places[lane] + zl.i32(lane)
        if values[lane] > best or (values[lane] == best and id < index and best > sample_parts.LOWEST):
            best = values[lane]
            index = id
    for j in range(whole, last):
        if x[j] > best:
            best = x[j]
            index = zl.i32(j)
    return best, index


@zl.inline
def sum_exp(x, first, last, high, inverse):
    """Sum of exp((x - high) * inverse) over x[first:last], f32; chunks keep it short enough to be accurate."""
    L = zl.target.lanes
    sums = zl.f32.x(L)(0)
    whole = first + (last - first) // L * L
    for i in range(first, whole, L):
        sums += zl.exp((zl.load(x + i, L) - high) * inverse)
    total = zl.reduce_add(sums)
    for j in range(whole, last):
        total += zl.exp((x[j] - high) * inverse)
    return total


@zl.inline
def insert_top(values, ids, count, value, id):
    """Put a value into a descending list of `count` if it beats the last; equals stay behind (ids come ascending)."""
    if value > values[count - 1]:
        place = count - 1
        while place > 0 and values[place - 1] < value:
            values[place] = values[place - 1]
            ids[place] = ids[place - 1]
            place -= 1
        values[place] = value
        ids[place] = id


@zl.kernel
def sample_scan_chunk(
    logits: zl.Ptr[zl.f32, "const"],
    num_logprobs: zl.Ptr[zl.i32, "const"],
    temperature: zl.Ptr[zl.f32, "const"],
    top_p: zl.Ptr[zl.f32, "const"],
    partial: zl.Ptr[zl.f32],
    vocab: zl.i64,
):
    """Grid (chunks, rows): a chunk's maximum, its place, its sums of exponentials (relative to the maximum) and its
    largest logits. A NaN becomes the maximum."""
    L = zl.target.lanes
    row = zl.block_index(1)
    x = logits + row * vocab
    record = partial + (row * ((vocab + CHUNK - 1) // CHUNK) + zl.block_index(0)) * RECORD
    first = zl.block_index(0) * CHUNK
    last = min(first + CHUNK, vocab)
    best, index = best_of(x, first, last)
    # NaN and +infinity have the largest bit patterns without a sign; minus infinity is a legal mask.
    broken = zl.i32.x(L)(0)
    whole = first + (last - first) // L * L
    for i in range(first, whole, L):
        value = zl.load(x + i, L)
        broken = max(broken, zl.where(value != value, zl.i32.x(L)(1), zl.i32.x(L)(0)))
    bad = zl.reduce_max(broken)
    for j in range(whole, last):
        if x[j] != x[j]:
            bad = 1
    record[0] = best if bad == 0 else zl.f32(float("nan"))
    zl.cast_ptr(record, zl.i32)[1] = index
    if num_logprobs[row] >= 0:
        record[2] = sum_exp(x, first, last, best, zl.f32(1.0))
    if temperature[row] > 0.0 and top_p[row] < 1.0:
        record[3] = sum_exp(x, first, last, best, 1.0 / temperature[row])
    wanted = zl.i64(num_logprobs[row])
    if wanted > 0:
        values = record + TOP_VALUES
        ids = zl.cast_ptr(record, zl.i32) + TOP_IDS
        for k in range(MAX_LOGPROBS):
            values[k] = sample_parts.LOWEST
            ids[k] = -1
        for i in range(first, whole, L):
            if zl.reduce_max(zl.load(x + i, L)) > values[wanted - 1]:
                for lane in range(L):
                    insert_top(values, ids, wanted, x[i + lane], zl.i32(i + lane))
        for j in range(whole, last):
            insert_top(values, ids, wanted, x[j], zl.i32(j))


@zl.inline
def deviation(x, vocab):
    """The standard deviation of the finite logits, of which there is one at least, in two passes."""
    L = zl.target.lanes
    whole = vocab // L * L
    count = zl.f64(0)
    total = zl.f64(0)
    squares = zl.f64(0)
    for first in range(0, vocab, BLOCK):
        last = min(first + BLOCK, whole)
        counts = zl.i32.x(L)(0)
        sums = zl.f32.x(L)(0)
        for i in range(first, last, L):
            value = zl.load(x + i, L)
            counts += zl.where(value >= sample_parts.LOWEST, zl.i32.x(L)(1), zl.i32.x(L)(0))
            sums += zl.where(value >= sample_parts.LOWEST, value, zl.f32.x(L)(0))
        count += zl.f64(zl.reduce_add(counts))
        total += zl.f64(zl.reduce_add(sums))
    for j in range(whole, vocab):
        if x[j] >= sample_parts.LOWEST:
            count += 1.0
            total += zl.f64(x[j])
    mean = zl.f32(total / count)
    for first in range(0, vocab, BLOCK):
        last = min(first + BLOCK, whole)
        sums = zl.f32.x(L)(0)
        for i in range(first, last, L):
            value = zl.load(x + i, L)
            away = zl.where(value >= sample_parts.LOWEST, value - mean, zl.f32.x(L)(0))
            sums += away * away
        squares += zl.f64(zl.reduce_add(sums))
    for j in range(whole, vocab):
        if x[j] >= sample_parts.LOWEST:
            squares += zl.f64((x[j] - mean) * (x[j] - mean))
    return zl.sqrt(zl.f32(squares / count))


class SampleParams(zl.Record):
    """Parameters of sample_row: what sample() says of its tensors."""

    logits: zl.Ptr[zl.f32]
    temperature: zl.Ptr[zl.f32, "const"]
    top_k: zl.Ptr[zl.i32, "const"]
    top_p: zl.Ptr[zl.f32, "const"]
    min_p: zl.Ptr[zl.f32, "const"]
    top_n_sigma: zl.Ptr[zl.f32, "const"]
    repetition: zl.Ptr[zl.f32, "const"]
    presence: zl.Ptr[zl.f32, "const"]
    frequency: zl.Ptr[zl.f32, "const"]
    seed: zl.Ptr[zl.u64, "const"]
    counter: zl.Ptr[zl.i64, "const"]
    num_logprobs: zl.Ptr[zl.i32, "const"]
    bias_start: zl.Ptr[zl.i32, "const"]
    bias_ids: zl.Ptr[zl.i32, "const"]
    bias_values: zl.Ptr[zl.f32, "const"]
    bias_saved: zl.Ptr[zl.f32]
    seen_start: zl.Ptr[zl.i32, "const"]
    seen_ids: zl.Ptr[zl.i32, "const"]
    seen_counts: zl.Ptr[zl.i32, "const"]
    seen_saved: zl.Ptr[zl.f32]
    partial: zl.Ptr[zl.f32, "const"]
    tokens: zl.Ptr[zl.i32]
    status: zl.Ptr[zl.i32]
    logprob: zl.Ptr[zl.f32]
    top_ids: zl.Ptr[zl.i32]
    top_logprobs: zl.Ptr[zl.f32]
    vocab: zl.i64


class Chunks(NamedTuple):
    """A row's records of sample_scan_chunk, as floats and as integers."""

    values: Any
    ints: Any
    count: Any


class Span(NamedTuple):
    """A row's entries of a list: first .. last - 1."""

    first: Any
    last: Any


@zl.inline
def best_chunk(chunks):
    """(largest logit, its token, whether there is a NaN)."""
    high = zl.f32(sample_parts.LOWEST)
    token = zl.i32(0)
    bad = zl.i32(0)
    for chunk in range(chunks.count):
        value = chunks.values[chunk * RECORD]
        if value != value:
            bad = 1
        if value > high:
            high = value
            token = chunks.ints[chunk * RECORD + 1]
    return high, token, bad


@zl.inline
def chunk_mass(chunks, column, high, inverse):
    """The sum of a row's exponentials, of its chunks' sums in a column of their records."""
    total = zl.f64(0)
    for chunk in range(chunks.count):
        record = chunk * RECORD
        total += zl.f64(chunks.values[record + column] * zl.exp((chunks.values[record] - high) * inverse))
    return total


@zl.inline
def merge_top(chunks, wanted, values, ids):
    """The `wanted` largest logits of all chunks."""
    if wanted > 0:
        for chunk in range(chunks.count):
            for k in range(wanted):
                record = chunk * RECORD
                value, id = chunks.values[record + TOP_VALUES + k], chunks.ints[record + TOP_IDS + k]
                insert_top(values, ids, wanted, value, id)


@zl.inline
def place_of(ids, j, p):
    """Entry j of a list of token ids, inside the vocabulary whatever it holds."""
    return min(max(zl.i64(ids[j]), 0), p.vocab - 1)


@zl.inline
def change_logits(p, x, row, biases, seen):
    """Biases and penalties onto the row x, what was there before to bias_saved and seen_saved."""
    for j in range(biases.first, biases.last):
        place = place_of(p.bias_ids, j, p)
        p.bias_saved[j] = x[place]
        x[place] = x[place] + p.bias_values[j]
    for j in range(seen.first, seen.last):
        place = place_of(p.seen_ids, j, p)
        value = x[place]
        p.seen_saved[j] = value
        value = value / p.repetition[row] if value > 0.0 else value * p.repetition[row]
        value = value - p.frequency[row] * zl.f32(p.seen_counts[j])
        x[place] = value - p.presence[row] if p.seen_counts[j] > 0 else value


@zl.inline
def restore_logits(p, x, biases, seen):
    """The logits as the model gave them again, last change first: log-probabilities are the model's."""
    for j in range(seen.first, seen.last):
        back = seen.first + seen.last - 1 - j
        x[place_of(p.seen_ids, back, p)] = p.seen_saved[back]
    for j in range(biases.first, biases.last):
        back = biases.first + biases.last - 1 - j
        x[place_of(p.bias_ids, back, p)] = p.bias_saved[back]


@zl.inline
def draw(p, x, row, chunks, high, modified):
    """A token of the kept set. high: the largest logit; modified: whether the logits are not those that the scan
    saw."""
    vocab, heat = p.vocab, p.temperature[row]
    inverse = 1.0 / heat
    threshold = zl.f32(sample_parts.LOWEST)
    tie = zl.i32(vocab)
    mass = zl.f64(-1.0)  # of the kept set; negative: not known
    if p.min_p[row] > 0.0:
        threshold = min(high + heat * zl.log(p.min_p[row]), high)
    if p.top_n_sigma[row] > 0.0:
        threshold = max(threshold, high - p.top_n_sigma[row] * deviation(x, vocab))
    if p.top_k[row] > 0 and zl.i64(p.top_k[row]) < vocab:
        limit = zl.i64(p.top_k[row])
        floor = sample_parts.choose_floor(x, vocab, threshold, high, inverse, heat, limit, "count")
        t, e, m = sample_parts.cut_prefix(x, vocab, floor, threshold, tie, high, inverse, limit, "count")
        threshold = t
        tie = e
        mass = m
    if p.top_p[row] < 1.0:
        if mass < 0.0 and threshold <= sample_parts.LOWEST and not modified:
            mass = chunk_mass(chunks, 3, high, inverse)
        if mass < 0.0:
            _, all_mass = sample_parts.mass_above(x, vocab, threshold, high, inverse)
            mass = all_mass
        mass_limit = mass * zl.f64(p.top_p[row])
        lower = sample_parts.choose_floor(x, vocab, threshold, high, inverse, heat, mass_limit, "mass")
        t, e, m = sample_parts.cut_prefix(x, vocab, lower, threshold, tie, high, inverse, mass_limit, "mass")
        threshold = t
        tie = e
    number = sample_parts.uniform(p.seed[row], zl.u64(p.counter[row]))
    return sample_parts.pick(x, vocab, threshold, tie, high, inverse, number)


@zl.kernel
def sample_row(p: SampleParams):
    """One block is one row."""
    row = zl.block_index(0)
    x = p.logits + row * p.vocab
    count = (p.vocab + CHUNK - 1) // CHUNK
    records = p.partial + row * count * RECORD
    chunks = Chunks(records, zl.cast_ptr(records, zl.i32), count)
    wanted = zl.i64(p.num_logprobs[row])
    top_ids = p.top_ids + row * MAX_LOGPROBS
    top = p.top_logprobs + row * MAX_LOGPROBS
    for k in range(MAX_LOGPROBS):
        top_ids[k] = -1
        top[k] = sample_parts.LOWEST
    p.logprob[row] = 0.0

    high, token, bad = best_chunk(chunks)
    if bad != 0 or high <= sample_parts.LOWEST or high > -sample_parts.LOWEST:
        p.tokens[row] = 0
        p.status[row] = NUMERICAL
        for k in range(MAX_LOGPROBS):
            top[k] = 0.0
        return
    p.status[row] = OK

    raw_high = high
    log_total = zl.f32(0)
    if wanted >= 0:
        log_total = zl.log(zl.f32(chunk_mass(chunks, 2, high, 1.0)))
    merge_top(chunks, wanted, top, top_ids)
    for k in range(MAX_LOGPROBS):
        top[k] = top[k] - high - log_total if top_ids[k] >= 0 else zl.f32(0)

    biases = Span(zl.i64(p.bias_start[row]), zl.i64(p.bias_start[row + 1]))
    seen = Span(zl.i64(p.seen_start[row]), zl.i64(p.seen_start[row + 1]))
    modified = biases.last > biases.first or seen.last > seen.first
    change_logits(p, x, row, biases, seen)
    if modified:
        best, index = best_of(x, zl.i64(0), p.vocab)
        high = best
        token = index
    greedy = p.temperature[row] < 1e-5 or p.top_k[row] == 1
    if not greedy:
        token = draw(p, x, row, chunks, high, modified)
    restore_logits(p, x, biases, seen)
    p.tokens[row] = min(max(token, 0), zl.i32(p.vocab) - 1)
    if wanted >= 0:
        p.logprob[row] = x[zl.i64(p.tokens[row])] - raw_high - log_total


class LogprobRows(zl.Record):
    """Parameters of logprob_rows."""

    logits: zl.Ptr[zl.f32, "const"]
    targets: zl.Ptr[zl.i32, "const"]
    logprob: zl.Ptr[zl.f32]
    argmax: zl.Ptr[zl.i32]
    vocab: zl.index


@zl.kernel
def logprob_row(p: LogprobRows):
    """One block is one row."""
    row = zl.block_index(0)
    x = p.logits + row * p.vocab
    high, index = best_of(x, zl.i64(0), p.vocab)
    total = zl.f64(0)
    for first in range(0, p.vocab, CHUNK):
        total += zl.f64(sum_exp(x, first, min(first + CHUNK, p.vocab), high, zl.f32(1.0)))
    p.argmax[row] = index
    p.logprob[row] = x[min(max(zl.i64(p.targets[row]), 0), p.vocab - 1)] - high - zl.log(zl.f32(total))


def sample_variants(target):
    return [zl.Variant("sample_scan", sample_scan_chunk), zl.Variant("sample_row", sample_row)]


def logprob_variants(target):
    return [zl.Variant("logprob_rows", logprob_row)]
