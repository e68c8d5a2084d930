"""From logits to tokens: penalties, temperature, min-p, top-k, top-p, a seeded draw, log-probabilities.

Two launches: `sample_scan` walks the vocabulary in chunks, so that several threads share even one row of 262k logits;
`sample_row` merges a row's chunks and decides. Nothing is sorted: the boundary of a kept set is found exactly by three
histograms over order-preserving bits of the logits (11, 11 and 10 bits), and the draw is an inverse distribution
function in index order. A row's result depends on nothing but its own logits and parameters.

Order of the steps, as in vLLM: bias, repetition, frequency and presence penalties, temperature, min-p, top-k, top-p. Tokens are
ordered by (logit descending, id ascending): top-k keeps exactly k, top-p the shortest prefix whose mass reaches p.
"""

from zse.kernel import (
    Ptr,
    Variant,
    bitcast,
    block_index,
    cast_ptr,
    convert,
    exp,
    f32,
    f64,
    i32,
    i64,
    inline,
    kernel,
    load,
    local_array,
    log,
    reduce_add,
    reduce_max,
    static,
    store,
    target,
    u32,
    u64,
    where,
)
from zse.kernels.op import Op, check, require
from zse.kernels.sample_cases import (
    logprob_rows_cases,
    logprob_rows_cost,
    logprob_rows_reference,
    sample_cases,
    sample_cost,
    sample_reference,
)

CHUNK = 8192            # logits of one block of the scan: 32 KiB
MAX_LOGPROBS = 20       # alternatives, the API's limit
RECORD = 48             # words of a chunk's record: max, argmax, raw sum, tempered sum, top values (20), top ids (20)
TOP_VALUES, TOP_IDS = 4, 24
PICK = 1024             # logits of a step of the draw
MAX_VOCAB = 4096 * PICK
DEPTHS = (3, 6, 9, 12, 15, 20)        # nats below the best logit, see choose_floor
LOWEST = -3.4028234663852886e38     # the smallest finite f32; minus infinity is as good as this
OK, NUMERICAL = 0, 1                # status: a row with NaN, +infinity or no finite logit is NUMERICAL


@inline
def best_of(x, first, last):
    """(largest value, its lowest index) of x[first:last]; NaN is passed over."""
    L = target.lanes
    high = f32.x(L)(LOWEST)
    at = i32.x(L)(i32(first))
    whole = first + (last - first) // L * L
    for i in range(first, whole, L):
        value = load(x + i, L)
        better = value > high
        high = where(better, value, high)
        at = where(better, i32.x(L)(i32(i)), at)
    values = local_array(f32, 16)
    places = local_array(i32, 16)
    store(values, high)
    store(places, at)
    best = f32(LOWEST)
    index = i32(first)
    for lane in range(L):
        id = places[lane] + i32(lane)
        if values[lane] > best or (values[lane] == best and id < index and best > LOWEST):
            best = values[lane]
            index = id
    for j in range(whole, last):
        if x[j] > best:
            best = x[j]
            index = i32(j)
    return best, index


@inline
def sum_exp(x, first, last, high, inverse):
    """Sum of exp((x - high) * inverse) over x[first:last], f32; chunks keep it short enough to be accurate."""
    L = target.lanes
    sums = f32.x(L)(0)
    whole = first + (last - first) // L * L
    for i in range(first, whole, L):
        sums += exp((load(x + i, L) - high) * inverse)
    total = reduce_add(sums)
    for j in range(whole, last):
        total += exp((x[j] - high) * inverse)
    return total


@inline
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


@kernel
def sample_scan_chunk(logits: Ptr[f32, "const"], num_logprobs: Ptr[i32, "const"], temperature: Ptr[f32, "const"],
                      top_p: Ptr[f32, "const"], partial: Ptr[f32], vocab: i64):
    """Grid (chunks, rows): a chunk's maximum, its place, its sums of exponentials (relative to the maximum) and its
    largest logits. A NaN becomes the maximum."""
    L = target.lanes
    row = block_index(1)
    x = logits + row * vocab
    record = partial + (row * ((vocab + CHUNK - 1) // CHUNK) + block_index(0)) * RECORD
    first = block_index(0) * CHUNK
    last = min(first + CHUNK, vocab)
    best, index = best_of(x, first, last)
    # NaN and +infinity have the largest bit patterns without a sign; minus infinity is a legal mask.
    broken = i32.x(L)(0)
    whole = first + (last - first) // L * L
    for i in range(first, whole, L):
        value = load(x + i, L)
        broken = max(broken, where(value != value, i32.x(L)(1), i32.x(L)(0)))
    bad = reduce_max(broken)
    for j in range(whole, last):
        if x[j] != x[j]:
            bad = 1
    record[0] = best if bad == 0 else f32(float("nan"))
    cast_ptr(record, i32)[1] = index
    if num_logprobs[row] >= 0:
        record[2] = sum_exp(x, first, last, best, f32(1.0))
    if temperature[row] > 0.0 and top_p[row] < 1.0:
        record[3] = sum_exp(x, first, last, best, 1.0 / temperature[row])
    wanted = i64(num_logprobs[row])
    if wanted > 0:
        values = record + TOP_VALUES
        ids = cast_ptr(record, i32) + TOP_IDS
        for k in range(MAX_LOGPROBS):
            values[k] = LOWEST
            ids[k] = -1
        for i in range(first, whole, L):
            if reduce_max(load(x + i, L)) > values[wanted - 1]:
                for lane in range(L):
                    insert_top(values, ids, wanted, x[i + lane], i32(i + lane))
        for j in range(whole, last):
            insert_top(values, ids, wanted, x[j], i32(j))


@inline
def uniform(seed, counter):
    """A number in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al. 2011), key = seed, counter = the draw's position."""
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
    """A logit >= cut above which the wanted prefix ends for sure, so that few logits enter the histograms: the shallowest of
    six depths below the best (in nats) that holds the limit, found in one pass, or else cut."""
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
                    near = reduce_max(where(value >= low, i32.x(L)(1), i32.x(L)(0)) &
                                      where(value <= top, i32.x(L)(1), i32.x(L)(0)))
                    if near != 0:
                        store(powers, exp((value - high) * inverse))
                if near != 0:
                    for j in range(i, min(i + L, vocab)):
                        element = x[j]
                        if element >= low and element <= top and \
                                (element > threshold or (element == threshold and i32(j) <= tie)):
                            place = i64((key_of(element) >> shift) & ((1 << width) - 1))
                            counts[place] = counts[place] + 1
                            if i + L <= vocab:
                                masses[place] = masses[place] + f64(powers[j - i])
                            else:
                                masses[place] = masses[place] + f64(exp((element - high) * inverse))
            bin = (1 << width) - 1
            while bin > 0 and ((count_above + i64(counts[bin]) < limit) if MODE == "count" else
                               (mass_above_ + masses[bin] < limit)):
                count_above += i64(counts[bin])
                mass_above_ += masses[bin]
                bin -= 1
            if shift == 21:
                if bin == 0 and ((count_above + i64(counts[bin]) < limit) if MODE == "count" else
                                 (mass_above_ + masses[bin] < limit)):
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
    if done + f64(blocks[chosen]) <= goal:      # rounding carried the goal past the end: the last kept token
        done = goal - f64(blocks[chosen])
    token = i32(0)
    for j in range(chosen * PICK, min(chosen * PICK + PICK, vocab)):
        if x[j] > threshold or (x[j] == threshold and i32(j) <= tie):
            token = i32(j)
            done += f64(exp((x[j] - high) * inverse))
            if done > goal:
                break
    return token


@kernel
def sample_row(logits: Ptr[f32], temperature: Ptr[f32, "const"], top_k: Ptr[i32, "const"], top_p: Ptr[f32, "const"],
               min_p: Ptr[f32, "const"], repetition: Ptr[f32, "const"], presence: Ptr[f32, "const"],
               frequency: Ptr[f32, "const"], seed: Ptr[u64, "const"], counter: Ptr[i64, "const"],
               num_logprobs: Ptr[i32, "const"], bias_start: Ptr[i32, "const"], bias_ids: Ptr[i32, "const"],
               bias_values: Ptr[f32, "const"], bias_saved: Ptr[f32], seen_start: Ptr[i32, "const"],
               seen_ids: Ptr[i32, "const"], seen_counts: Ptr[i32, "const"], seen_saved: Ptr[f32],
               partial: Ptr[f32, "const"], tokens: Ptr[i32], status: Ptr[i32], logprob: Ptr[f32], top_ids: Ptr[i32],
               top_logprobs: Ptr[f32], vocab: i64):
    """One block is one row."""
    row = block_index(0)
    x = logits + row * vocab
    chunks = (vocab + CHUNK - 1) // CHUNK
    records = partial + row * chunks * RECORD
    ints = cast_ptr(records, i32)
    wanted = i64(num_logprobs[row])
    top_ids_row = top_ids + row * MAX_LOGPROBS
    top_row = top_logprobs + row * MAX_LOGPROBS
    for k in range(MAX_LOGPROBS):
        top_ids_row[k] = -1
        top_row[k] = LOWEST
    logprob[row] = 0.0

    high = f32(LOWEST)
    token = i32(0)
    bad = i32(0)
    for chunk in range(chunks):
        value = records[chunk * RECORD]
        if value != value:
            bad = 1
        if value > high:
            high = value
            token = ints[chunk * RECORD + 1]
    if bad != 0 or high <= LOWEST or high > -LOWEST:
        tokens[row] = 0
        status[row] = NUMERICAL
        for k in range(MAX_LOGPROBS):
            top_row[k] = 0.0
        return
    status[row] = OK

    heat = temperature[row]
    greedy = heat < 1e-5 or top_k[row] == 1
    log_total = f32(0)
    if wanted >= 0:
        raw = f64(0)
        for chunk in range(chunks):
            raw += f64(records[chunk * RECORD + 2] * exp(records[chunk * RECORD] - high))
        log_total = log(f32(raw))
    if wanted > 0:
        for chunk in range(chunks):
            for k in range(wanted):
                insert_top(top_row, top_ids_row, wanted, records[chunk * RECORD + TOP_VALUES + k],
                           ints[chunk * RECORD + TOP_IDS + k])
    for k in range(MAX_LOGPROBS):
        top_row[k] = top_row[k] - high - log_total if top_ids_row[k] >= 0 else f32(0)
    raw_high = high

    first_bias = i64(bias_start[row])
    last_bias = i64(bias_start[row + 1])
    first_seen = i64(seen_start[row])
    last_seen = i64(seen_start[row + 1])
    modified = last_bias > first_bias or last_seen > first_seen
    for j in range(first_bias, last_bias):
        place = min(max(i64(bias_ids[j]), 0), vocab - 1)
        bias_saved[j] = x[place]
        x[place] = x[place] + bias_values[j]
    for j in range(first_seen, last_seen):
        place = min(max(i64(seen_ids[j]), 0), vocab - 1)
        value = x[place]
        seen_saved[j] = value
        value = value / repetition[row] if value > 0.0 else value * repetition[row]
        value = value - frequency[row] * f32(seen_counts[j])
        x[place] = value - presence[row] if seen_counts[j] > 0 else value
    if modified:
        best, index = best_of(x, i64(0), vocab)
        high = best
        token = index

    if not greedy:
        inverse = 1.0 / heat
        threshold = f32(LOWEST)
        tie = i32(vocab)
        mass = f64(-1.0)                    # of the kept set; negative: not known
        if min_p[row] > 0.0:
            threshold = min(high + heat * log(min_p[row]), high)
        if top_k[row] > 0 and i64(top_k[row]) < vocab:
            count_limit = i64(top_k[row])
            floor = choose_floor(x, vocab, threshold, high, inverse, heat, count_limit, "count")
            t, e, m = cut_prefix(x, vocab, floor, threshold, tie, high, inverse, count_limit, "count")
            threshold = t
            tie = e
            mass = m
        if top_p[row] < 1.0:
            if mass < 0.0 and threshold <= LOWEST and not modified:
                mass = f64(0)
                for chunk in range(chunks):
                    mass += f64(records[chunk * RECORD + 3] * exp((records[chunk * RECORD] - high) * inverse))
            if mass < 0.0:
                _, all_mass = mass_above(x, vocab, threshold, high, inverse)
                mass = all_mass
            mass_limit = mass * f64(top_p[row])
            lower = choose_floor(x, vocab, threshold, high, inverse, heat, mass_limit, "mass")
            t, e, m = cut_prefix(x, vocab, lower, threshold, tie, high, inverse, mass_limit, "mass")
            threshold = t
            tie = e
        token = pick(x, vocab, threshold, tie, high, inverse, uniform(seed[row], u64(counter[row])))

    # The logits as the model gave them again, last change first: log-probabilities are the model's.
    for j in range(first_seen, last_seen):
        back = first_seen + last_seen - 1 - j
        x[min(max(i64(seen_ids[back]), 0), vocab - 1)] = seen_saved[back]
    for j in range(first_bias, last_bias):
        back = first_bias + last_bias - 1 - j
        x[min(max(i64(bias_ids[back]), 0), vocab - 1)] = bias_saved[back]
    tokens[row] = min(max(token, 0), i32(vocab) - 1)
    if wanted >= 0:
        logprob[row] = x[i64(tokens[row])] - raw_high - log_total


@kernel
def logprob_row(logits: Ptr[f32, "const"], targets: Ptr[i32, "const"], logprob: Ptr[f32], argmax: Ptr[i32], vocab: i64):
    """One block is one row."""
    row = block_index(0)
    x = logits + row * vocab
    high, index = best_of(x, i64(0), vocab)
    total = f64(0)
    for first in range(0, vocab, CHUNK):
        total += f64(sum_exp(x, first, min(first + CHUNK, vocab), high, f32(1.0)))
    argmax[row] = index
    logprob[row] = x[min(max(i64(targets[row]), 0), vocab - 1)] - high - log(f32(total))


PARAMETERS = {"temperature": "f32", "top_k": "i32", "top_p": "f32", "min_p": "f32", "repetition": "f32", "presence": "f32",
              "frequency": "f32", "seed": "u64", "counter": "i64", "num_logprobs": "i32"}


def sample_tensors(max_rows: int, vocab: int, max_biases: int, max_seen: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor argument of sample() but the logits: name → (dtype, shape)."""
    rows = {name: (dtype, (max_rows,)) for name, dtype in PARAMETERS.items()}
    lists = {"bias_start": ("i32", (max_rows + 1,)), "bias_ids": ("i32", (max_biases,)), "bias_values": ("f32", (max_biases,)),
             "bias_saved": ("f32", (max_biases,)), "seen_start": ("i32", (max_rows + 1,)), "seen_ids": ("i32", (max_seen,)),
             "seen_counts": ("i32", (max_seen,)), "seen_saved": ("f32", (max_seen,))}
    outs = {"tokens": ("i32", (max_rows,)), "status": ("i32", (max_rows,)), "logprob": ("f32", (max_rows,)),
            "top_ids": ("i32", (max_rows, MAX_LOGPROBS)), "top_logprobs": ("f32", (max_rows, MAX_LOGPROBS))}
    return rows | lists | {"partial": ("f32", (max_rows, -(-vocab // CHUNK), RECORD))} | outs


def sample(recorder, logits, **tensors) -> None:
    """Sample one token for each row of logits f32 [R, V]. The tensors are those of sample_tensors(), for at least R rows.

    In, per row: temperature (below 1e-5: greedy, ties to the lowest id), top_k (0: off), top_p (1: off), min_p (0: off),
    repetition (1: off), presence and frequency penalties (0: off), seed and counter (the draw is a function of both; the counter is
    the sampled token's position), num_logprobs (-1: none, else alternatives, up to 20). Row r's biases are entries
    bias_start[r] .. bias_start[r + 1] of bias_ids and bias_values; its penalized tokens those of seen_start in seen_ids
    (each id once: prompt and output) with seen_counts (occurrences in the output, 0 for prompt only).

    Out, per row: tokens, always in [0, V); status 0, or 1 where a logit is NaN or +infinity or all are -infinity (the token then
    means nothing); logprob of the token, top_ids and top_logprobs [20] best first, of the model's own distribution (before
    biases, penalties and temperature); unused places hold id -1. The logits are changed and restored; *_saved and partial
    are scratch."""
    rows, vocab = logits.shape
    check("sample logits", logits, "f32", rows, vocab)
    require(0 < vocab <= MAX_VOCAB, f"sample: {vocab} logits a row, at most {MAX_VOCAB} are supported")
    expected = sample_tensors(1, vocab, 1, 1)
    require(set(tensors) == set(expected), f"sample: tensors {sorted(set(tensors) ^ set(expected))} are missing or unknown")
    for name, (dtype, shape) in expected.items():
        check(f"sample {name}", tensors[name], dtype, None, *shape[1:])
    chunks = -(-vocab // CHUNK)
    recorder.launch("sample_scan", [logits, tensors["num_logprobs"], tensors["temperature"], tensors["top_p"],
                                    tensors["partial"], vocab], (chunks, rows))
    names = [*PARAMETERS, "bias_start", "bias_ids", "bias_values", "bias_saved", "seen_start", "seen_ids", "seen_counts",
             "seen_saved", "partial", "tokens", "status", "logprob", "top_ids", "top_logprobs"]
    recorder.launch("sample_row", [logits, *(tensors[name] for name in names), vocab], (rows,))


def logprob_rows(recorder, logits, targets, logprob, argmax) -> None:
    """logits f32 [R, V], targets i32 [R] → logprob f32 [R] of the targets, argmax i32 [R] (ties to the lowest id)."""
    rows, vocab = logits.shape
    check("logprob_rows logits", logits, "f32", rows, vocab)
    check("logprob_rows targets", targets, "i32", rows)
    check("logprob_rows logprob", logprob, "f32", rows)
    check("logprob_rows argmax", argmax, "i32", rows)
    recorder.launch("logprob_rows", [logits, targets, logprob, argmax, vocab], (rows,))


SAMPLE = Op("sample", lambda target: [Variant("sample_scan", sample_scan_chunk), Variant("sample_row", sample_row)], sample,
            sample_reference, sample_cases, sample_cost)
LOGPROB_ROWS = Op("logprob_rows", lambda target: [Variant("logprob_rows", logprob_row)], logprob_rows, logprob_rows_reference,
                  logprob_rows_cases, logprob_rows_cost)
