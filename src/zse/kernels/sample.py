"""From logits to tokens: penalties, temperature, min-p, top-nσ, top-k, top-p, a seeded draw, log-probabilities.

Two launches: `sample_scan` walks the vocabulary in chunks, so that several threads share even one row of 262k logits;
`sample_row` merges a row's chunks and decides. Nothing is sorted: the boundary of a kept set is found exactly by three
histograms over order-preserving bits of the logits (11, 11 and 10 bits), and the draw is an inverse distribution
function in index order. A row's result depends on nothing but its own logits and parameters.

Order of the steps, as in vLLM: bias, repetition, frequency and presence penalties, temperature, min-p, top-k, top-p.
Tokens are ordered by (logit descending, id ascending): top-k keeps exactly k, top-p the shortest prefix whose mass
reaches p.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels import gpu, sample_parts
from zse.kernels.op import Op, check, later, on_gpu, require
from zse.lazy import numpy as np
from zse.runtime.args import Args

BLOCK = 1024  # logits of one f32 sum of the standard deviation
CHUNK = 8192  # logits of one block of the scan: 32 KiB
MAX_VOCAB = 4096 * 1024  # of a row: the blocks that sample_parts.pick keeps sums of
MAX_LOGPROBS = 20  # alternatives, the API's limit
RECORD = 48  # words of a chunk's record: max, argmax, raw sum, tempered sum, top values (20), top ids (20)
TOP_VALUES, TOP_IDS = 4, 24
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


@zl.kernel
def sample_row(
    logits: zl.Ptr[zl.f32],
    temperature: zl.Ptr[zl.f32, "const"],
    top_k: zl.Ptr[zl.i32, "const"],
    top_p: zl.Ptr[zl.f32, "const"],
    min_p: zl.Ptr[zl.f32, "const"],
    top_n_sigma: zl.Ptr[zl.f32, "const"],
    repetition: zl.Ptr[zl.f32, "const"],
    presence: zl.Ptr[zl.f32, "const"],
    frequency: zl.Ptr[zl.f32, "const"],
    seed: zl.Ptr[zl.u64, "const"],
    counter: zl.Ptr[zl.i64, "const"],
    num_logprobs: zl.Ptr[zl.i32, "const"],
    bias_start: zl.Ptr[zl.i32, "const"],
    bias_ids: zl.Ptr[zl.i32, "const"],
    bias_values: zl.Ptr[zl.f32, "const"],
    bias_saved: zl.Ptr[zl.f32],
    seen_start: zl.Ptr[zl.i32, "const"],
    seen_ids: zl.Ptr[zl.i32, "const"],
    seen_counts: zl.Ptr[zl.i32, "const"],
    seen_saved: zl.Ptr[zl.f32],
    partial: zl.Ptr[zl.f32, "const"],
    tokens: zl.Ptr[zl.i32],
    status: zl.Ptr[zl.i32],
    logprob: zl.Ptr[zl.f32],
    top_ids: zl.Ptr[zl.i32],
    top_logprobs: zl.Ptr[zl.f32],
    vocab: zl.i64,
):
    """One block is one row."""
    row = zl.block_index(0)
    x = logits + row * vocab
    chunks = (vocab + CHUNK - 1) // CHUNK
    records = partial + row * chunks * RECORD
    ints = zl.cast_ptr(records, zl.i32)
    wanted = zl.i64(num_logprobs[row])
    top_ids_row = top_ids + row * MAX_LOGPROBS
    top_row = top_logprobs + row * MAX_LOGPROBS
    for k in range(MAX_LOGPROBS):
        top_ids_row[k] = -1
        top_row[k] = sample_parts.LOWEST
    logprob[row] = 0.0

    high = zl.f32(sample_parts.LOWEST)
    token = zl.i32(0)
    bad = zl.i32(0)
    for chunk in range(chunks):
        value = records[chunk * RECORD]
        if value != value:
            bad = 1
        if value > high:
            high = value
            token = ints[chunk * RECORD + 1]
    if bad != 0 or high <= sample_parts.LOWEST or high > -sample_parts.LOWEST:
        tokens[row] = 0
        status[row] = NUMERICAL
        for k in range(MAX_LOGPROBS):
            top_row[k] = 0.0
        return
    status[row] = OK

    heat = temperature[row]
    greedy = heat < 1e-5 or top_k[row] == 1
    log_total = zl.f32(0)
    if wanted >= 0:
        raw = zl.f64(0)
        for chunk in range(chunks):
            raw += zl.f64(records[chunk * RECORD + 2] * zl.exp(records[chunk * RECORD] - high))
        log_total = zl.log(zl.f32(raw))
    if wanted > 0:
        for chunk in range(chunks):
            for k in range(wanted):
                insert_top(
                    top_row,
                    top_ids_row,
                    wanted,
                    records[chunk * RECORD + TOP_VALUES + k],
                    ints[chunk * RECORD + TOP_IDS + k],
                )
    for k in range(MAX_LOGPROBS):
        top_row[k] = top_row[k] - high - log_total if top_ids_row[k] >= 0 else zl.f32(0)
    raw_high = high

    first_bias = zl.i64(bias_start[row])
    last_bias = zl.i64(bias_start[row + 1])
    first_seen = zl.i64(seen_start[row])
    last_seen = zl.i64(seen_start[row + 1])
    modified = last_bias > first_bias or last_seen > first_seen
    for j in range(first_bias, last_bias):
        place = min(max(zl.i64(bias_ids[j]), 0), vocab - 1)
        bias_saved[j] = x[place]
        x[place] = x[place] + bias_values[j]
    for j in range(first_seen, last_seen):
        place = min(max(zl.i64(seen_ids[j]), 0), vocab - 1)
        value = x[place]
        seen_saved[j] = value
        value = value / repetition[row] if value > 0.0 else value * repetition[row]
        value = value - frequency[row] * zl.f32(seen_counts[j])
        x[place] = value - presence[row] if seen_counts[j] > 0 else value
    if modified:
        best, index = best_of(x, zl.i64(0), vocab)
        high = best
        token = index

    if not greedy:
        inverse = 1.0 / heat
        threshold = zl.f32(sample_parts.LOWEST)
        tie = zl.i32(vocab)
        mass = zl.f64(-1.0)  # of the kept set; negative: not known
        if min_p[row] > 0.0:
            threshold = min(high + heat * zl.log(min_p[row]), high)
        if top_n_sigma[row] > 0.0:
            threshold = max(threshold, high - top_n_sigma[row] * deviation(x, vocab))
        if top_k[row] > 0 and zl.i64(top_k[row]) < vocab:
            count_limit = zl.i64(top_k[row])
            floor = sample_parts.choose_floor(x, vocab, threshold, high, inverse, heat, count_limit, "count")
            t, e, m = sample_parts.cut_prefix(x, vocab, floor, threshold, tie, high, inverse, count_limit, "count")
            threshold = t
            tie = e
            mass = m
        if top_p[row] < 1.0:
            if mass < 0.0 and threshold <= sample_parts.LOWEST and not modified:
                mass = zl.f64(0)
                for chunk in range(chunks):
                    mass += zl.f64(records[chunk * RECORD + 3] * zl.exp((records[chunk * RECORD] - high) * inverse))
            if mass < 0.0:
                _, all_mass = sample_parts.mass_above(x, vocab, threshold, high, inverse)
                mass = all_mass
            mass_limit = mass * zl.f64(top_p[row])
            lower = sample_parts.choose_floor(x, vocab, threshold, high, inverse, heat, mass_limit, "mass")
            t, e, m = sample_parts.cut_prefix(x, vocab, lower, threshold, tie, high, inverse, mass_limit, "mass")
            threshold = t
            tie = e
        token = sample_parts.pick(
            x, vocab, threshold, tie, high, inverse, sample_parts.uniform(seed[row], zl.u64(counter[row]))
        )

    # The logits as the model gave them again, last change first: log-probabilities are the model's.
    for j in range(first_seen, last_seen):
        back = first_seen + last_seen - 1 - j
        x[min(max(zl.i64(seen_ids[back]), 0), vocab - 1)] = seen_saved[back]
    for j in range(first_bias, last_bias):
        back = first_bias + last_bias - 1 - j
        x[min(max(zl.i64(bias_ids[back]), 0), vocab - 1)] = bias_saved[back]
    tokens[row] = min(max(token, 0), zl.i32(vocab) - 1)
    if wanted >= 0:
        logprob[row] = x[zl.i64(tokens[row])] - raw_high - log_total


@zl.kernel
def logprob_row(
    logits: zl.Ptr[zl.f32, "const"],
    targets: zl.Ptr[zl.i32, "const"],
    logprob: zl.Ptr[zl.f32],
    argmax: zl.Ptr[zl.i32],
    vocab: zl.i64,
):
    """One block is one row."""
    row = zl.block_index(0)
    x = logits + row * vocab
    high, index = best_of(x, zl.i64(0), vocab)
    total = zl.f64(0)
    for first in range(0, vocab, CHUNK):
        total += zl.f64(sum_exp(x, first, min(first + CHUNK, vocab), high, zl.f32(1.0)))
    argmax[row] = index
    logprob[row] = x[min(max(zl.i64(targets[row]), 0), vocab - 1)] - high - zl.log(zl.f32(total))


class Parameter(NamedTuple):
    """What each row of logits has one value of. A new one needs a line here and its kernels alone.

    dtype: of its values. off: the value that does nothing. cases: the values of the twelve rows of sample_cases(), or one for
    all. cuts: whether it leaves some of the likeliest tokens to draw from. floor: of one that leaves the logits from a bound
    on, the bound: (logits f64, temperature, value) → f64, the reference of the kernels."""

    dtype: str
    off: float = 0
    cases: float | tuple[float, ...] = 0
    cuts: bool = False
    floor: Callable[[Any, float, float], Any] | None = None


PARAMETERS = {
    "temperature": Parameter("f32", cases=(0, 1, 0.7, 1, 1.5, 1, 0.9, 1, 1, 2, 0, 1)),
    "top_k": Parameter("i32", cases=(0, 0, 40, 25, 0, 300, 1, 17, 9, 0, 0, 1 << 20), cuts=True),
    "top_p": Parameter("f32", 1, cases=(1, 1, 1, 1, 0.9, 0.8, 1, 0.5, 0.95, 0.99, 1, 0.7), cuts=True),
    "min_p": Parameter(
        "f32",
        cases=(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.02, 0, 0.05),
        cuts=True,
        floor=lambda x, heat, share: x.max() + heat * np.log(share),
    ),
    # Tang et al. 2024, "Top-nσ: Not All Logits Are You Need" (arXiv 2411.07641), over the finite logits.
    "top_n_sigma": Parameter(
        "f32",
        cases=(0, 1.5, 0, 3, 0, 2.5, 0, 0, 2, 1, 0, 0),
        cuts=True,
        floor=lambda x, heat, count: x.max() - count * x[np.isfinite(x)].std(),
    ),
    "repetition": Parameter("f32", 1, cases=1.3),
    "presence": Parameter("f32", cases=0.4),
    "frequency": Parameter("f32", cases=0.2),
    "seed": Parameter("u64"),
    "counter": Parameter("i64"),
    "num_logprobs": Parameter("i32", -1, cases=(20, 0, 5, 20, -1, 1, 3, 20, 20, -1, 2, 0)),
}
# On a GPU penalties read the token history on the device instead of lists, and the scan is told whether the row is cut.
GPU_PARAMETERS = {"filtered": "i32", "history_row": "i32", "history_len": "i32", "prompt_len": "i32"}
SCANNED = ("temperature", "top_k", "repetition", "presence", "frequency", "num_logprobs", *GPU_PARAMETERS)


def row_parameters(family: str = "cpu") -> dict[str, str]:
    """name → dtype of what each row has one value of."""
    own = {name: parameter.dtype for name, parameter in PARAMETERS.items()}
    return own | GPU_PARAMETERS if family == "gpu" else own


def sample_tensors(
    max_rows: int, vocab: int, max_biases: int, max_seen: int, family: str = "cpu"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor argument of sample() but the logits: name → (dtype, shape). max_seen: 0 on a GPU."""
    rows = {name: (dtype, (max_rows,)) for name, dtype in row_parameters(family).items()}
    lists = {
        "bias_start": ("i32", (max_rows + 1,)),
        "bias_ids": ("i32", (max_biases,)),
        "bias_values": ("f32", (max_biases,)),
    }
    outs = {
        "tokens": ("i32", (max_rows,)),
        "status": ("i32", (max_rows,)),
        "logprob": ("f32", (max_rows,)),
        "top_ids": ("i32", (max_rows, MAX_LOGPROBS)),
        "top_logprobs": ("f32", (max_rows, MAX_LOGPROBS)),
    }
    if family == "gpu":
        records = max_rows, -(-vocab // gpu.sample_parts.CHUNK), gpu.sample_parts.RECORD
        return rows | lists | {"records": ("u32", records)} | outs
    lists |= {
        "bias_saved": ("f32", (max_biases,)),
        "seen_start": ("i32", (max_rows + 1,)),
        "seen_ids": ("i32", (max_seen,)),
        "seen_counts": ("i32", (max_seen,)),
        "seen_saved": ("f32", (max_seen,)),
    }
    return rows | lists | {"partial": ("f32", (max_rows, -(-vocab // CHUNK), RECORD))} | outs


def sample(recorder, logits, history=None, **tensors) -> None:
    """Sample one token for each row of logits f32 [R, V]. The tensors are those of sample_tensors(), for at least R
    rows.

    In, per row: temperature (below 1e-5: greedy, ties to the lowest id), top_k (0: off), top_p (1: off), min_p and
    top_n_sigma (0: off), repetition (1: off), presence and frequency penalties (0: off), seed and counter (the draw is a function of
    both; the counter is the sampled token's position), num_logprobs (-1: none, else alternatives, up to 20). Row r's
    biases are entries bias_start[r] .. bias_start[r + 1] of bias_ids (each id once) and bias_values. Its penalized
    tokens, CPU: those of seen_start in seen_ids (each id once: prompt and output) with seen_counts (occurrences in the
    output, 0 for prompt only). GPU: the first history_len[r] tokens (0: no penalties) of line history_row[r] of
    `history`, a TokenHistory; those from position prompt_len[r] on are output.

    Out, per row: tokens, always in [0, V); status 0, or 1 where a logit is NaN or +infinity or all are -infinity (the
    token then means nothing); logprob of the token, top_ids and top_logprobs [20] best first, of the model's own
    distribution (before biases, penalties and temperature); unused places hold id -1. CPU: the logits are changed and
    restored; *_saved and partial are scratch. GPU: biases and penalties stay in the logits; records is scratch."""
    rows, vocab = logits.shape
    check("sample logits", logits, "f32", rows, vocab)
    of_gpu = on_gpu(recorder)
    most = MAX_VOCAB
    if of_gpu:
        most = gpu.sample_parts.MAX_CHUNKS * gpu.sample_parts.CHUNK
    require(0 < vocab <= most, f"sample: {vocab} logits a row, at most {most} are supported")
    expected = sample_tensors(1, vocab, 1, 1, "gpu" if of_gpu else "cpu")
    require(
        set(tensors) == set(expected), f"sample: tensors {sorted(set(tensors) ^ set(expected))} are missing or unknown"
    )
    for name, (dtype, shape) in expected.items():
        check(f"sample {name}", tensors[name], dtype, None, *shape[1:])
    if of_gpu:
        require(history is not None, "sample: a GPU needs the token history")
        _sample_gpu(recorder, logits, history, tensors)
        return
    chunks = -(-vocab // CHUNK)
    recorder.launch(
        "sample_scan",
        Args(
            logits=logits,
            vocab=vocab,
            **{name: tensors[name] for name in ("num_logprobs", "temperature", "top_p", "partial")},
        ),
        (chunks, rows),
    )
    recorder.launch("sample_row", Args(logits=logits, vocab=vocab, **tensors), (rows,))


def _sample_gpu(recorder, logits, history, tensors) -> None:
    rows, vocab = logits.shape
    check("sample history", history.tokens, "i32", None, 16)
    check("sample page_table", history.page_table, "i32", None, None)
    chunks = -(-vocab // gpu.sample_parts.CHUNK)
    scanned = {name: tensors[name] for name in (*SCANNED, "bias_start", "bias_ids", "bias_values", "records")}
    recorder.launch("sample_scan", Args(logits=logits, vocab=vocab, **history.args(), **scanned), (chunks, rows))
    args = Args(logits=logits, vocab=vocab, chunks=chunks, **history.args(), **tensors)
    recorder.launch("sample_row", args, (rows,))


def logprob_rows(recorder, logits, targets, logprob, argmax) -> None:
    """logits f32 [R, V], targets i32 [R] → logprob f32 [R] of the targets, argmax i32 [R] (ties to the lowest id)."""
    rows, vocab = logits.shape
    check("logprob_rows logits", logits, "f32", rows, vocab)
    check("logprob_rows targets", targets, "i32", rows)
    check("logprob_rows logprob", logprob, "f32", rows)
    check("logprob_rows argmax", argmax, "i32", rows)
    args = Args(logits=logits, targets=targets, logprob=logprob, argmax=argmax, vocab=vocab)
    recorder.launch("logprob_rows", args, (rows,))


SAMPLE = Op(
    "sample",
    lambda target: [zl.Variant("sample_scan", sample_scan_chunk), zl.Variant("sample_row", sample_row)],
    sample,
    later("sample_cases", "sample_reference"),
    later("sample_cases", "sample_cases"),
    later("sample_cases", "sample_cost"),
    later("gpu.sample_row", "sample_variants"),
)
LOGPROB_ROWS = Op(
    "logprob_rows",
    lambda target: [zl.Variant("logprob_rows", logprob_row)],
    logprob_rows,
    later("sample_cases", "logprob_rows_reference"),
    later("sample_cases", "logprob_rows_cases"),
    later("sample_cases", "logprob_rows_cost"),
    later("gpu.logprob", "logprob_variants"),
)
