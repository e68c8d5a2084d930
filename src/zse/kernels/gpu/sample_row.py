"""Second launch of the GPU sampler: merges a row's chunks, bounds its kept set, draws."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.gpu.rows import block_max
from zse.kernels.gpu.sample_parts import (
    BASE,
    BEST,
    BINS,
    CHUNK,
    LIST,
    LISTED,
    MAX_CHUNKS,
    MAX_LOGPROBS,
    RAW_HIGH,
    RAW_SUM,
    RAW_TOP,
    RECORD,
    Penalties,
    bin_of,
    block_best,
    find,
    four_at,
    history_at,
    id_of,
    inverse_of,
    larger,
    order_at,
    order_of,
    relative_mass,
    warp_sum_f64,
)
from zse.kernels.gpu.sample_scan import THREADS as SCAN_THREADS
from zse.kernels.gpu.sample_scan import sample_scan_gpu
from zse.kernels.gpu.sample_search import (
    CANDIDATES,
    GROUPS,
    THREADS,
    Row,
    boundary,
    find_thread,
    merge_histograms,
    weigh_chunks,
)
from zse.kernels.sample_parts import LOWEST, key_of, uniform, value_of


@zl.inline
def block_total(value, sums):
    """The sum over the block in f64, in every thread. sums: one f64 a warp."""
    part = warp_sum_f64(value)
    zl.barrier()
    if zl.lane_index() == 0:
        sums[zl.warp_index()] = part
    zl.barrier()
    total = zl.f64(0)
    for w in zl.static(range(zl.target.threads // zl.target.warp)):
        total += sums[w]
    zl.barrier()
    return total


@zl.inline
def deviation(x, vocab, aligned, sums):
    """The standard deviation of the row's finite logits, of which there is one at least, in two passes. sums: one f64 a
    warp."""
    count = zl.i32(0)
    total = zl.f64(0)
    for at in zl.unroll(range(zl.thread_index() * 4, vocab, THREADS * 4), 1):
        for value in zl.static(four_at(x, at, vocab, aligned)):
            if value >= LOWEST:
                count += 1
                total += zl.f64(value)
    number = block_total(zl.f64(count), sums)
    mean = block_total(total, sums) / number
    squares = zl.f64(0)
    for at in zl.unroll(range(zl.thread_index() * 4, vocab, THREADS * 4), 1):
        for value in zl.static(four_at(x, at, vocab, aligned)):
            if value >= LOWEST:
                squares += (zl.f64(value) - mean) * (zl.f64(value) - mean)
    return zl.sqrt(zl.f32(block_total(squares, sums) / number))


@zl.inline
def most_likely(own, mine, chunks, wanted, floats, warp_sums, found_ids, found_values):
    """(largest raw logit, log of the sum of their exponentials); the `wanted` most likely tokens and their log-probabilities
    go to found_ids and found_values."""
    t, lane, warp = zl.thread_index(), zl.lane_index(), zl.warp_index()
    lists = chunk_warps = MAX_CHUNKS // zl.target.warp
    chunk_high = zl.f32(LOWEST)
    chunk_sum = zl.f32(0)
    if t < chunks:
        chunk_high = zl.cast_ptr(own, zl.f32)[RAW_HIGH]
        chunk_sum = zl.cast_ptr(own, zl.f32)[RAW_SUM]
    raw_high = block_max(chunk_high, floats)
    share = warp_sum_f64(zl.f64(chunk_sum * relative_mass(chunk_high, raw_high, inverse_of(zl.f32(1)))))
    if lane == 0:
        warp_sums[warp] = share
    zl.barrier()
    total = zl.f64(0)
    for w in zl.static(range(chunk_warps)):
        total += warp_sums[w]
    log_total = zl.log(zl.f32(total))
    if warp == 0 and wanted > 0:
        # The chunks' lists are in order: their heads are compared, and the best one's list moves on.
        heads = [zl.u64(0) for _ in zl.static(range(lists))]
        places = [zl.i32(0) for _ in zl.static(range(lists))]
        for j in zl.static(range(lists)):
            if lane + j * zl.target.warp < chunks:
                heads[j] = order_at(mine + (lane + j * zl.target.warp) * RECORD + RAW_TOP, zl.i32(0))
        for k in zl.unroll(range(wanted), 1):
            head = heads[0] + 0
            for j in zl.static(range(1, lists)):
                head = larger(head, heads[j])
            for step in zl.static((32, 16, 8, 4, 2, 1)):
                if step < zl.target.warp:
                    head = larger(head, zl.shuffle_xor(head, step))
            if lane == 0 and head != 0:
                found_ids[k] = id_of(head)
                found_values[k] = value_of(zl.u32(head >> 32)) - raw_high - log_total
            for j in zl.static(range(lists)):
                if heads[j] == head and head != 0:
                    places[j] = places[j] + 1
                    heads[j] = 0
                    if places[j] < wanted:
                        heads[j] = order_at(mine + (lane + j * zl.target.warp) * RECORD + RAW_TOP, places[j])
    zl.barrier()
    return raw_high, log_total


class RowChoice(NamedTuple):
    """How a row is sampled."""

    heat: Any
    top_k: Any
    top_p: Any
    min_p: Any
    top_n_sigma: Any
    filtered: Any
    seed: Any
    counter: Any


@zl.inline
def draw(token, x, own, mine, chunks, vocab, high, highs, bases, weights, warp_sums, choice):
    """A token of the kept set by its probability; token: the best, where rounding leaves none."""
    t, lane, warp = zl.thread_index(), zl.lane_index(), zl.warp_index()
    warps = zl.target.threads // zl.target.warp
    chunk_warps = MAX_CHUNKS // zl.target.warp
    inverse = inverse_of(choice.heat)
    kept = zl.u64(0)  # the kept set: order >= kept
    if choice.top_n_sigma > 0.0:
        floor = high - choice.top_n_sigma * deviation(x, vocab, vocab % 4 == 0, warp_sums)
        kept = zl.u64(key_of(floor)) << 32
    bound = zl.u64(0)
    if choice.filtered != 0:
        if t < chunks:
            if highs[t] >= LOWEST:
                bound = order_at(own + LISTED, LIST - 1)
        bound = block_best(bound, zl.shared_array(zl.u64, warps))
    state = Row(
        x=x,
        records=mine,
        chunks=chunks,
        vocab=vocab,
        aligned=vocab % 4 == 0,
        high=high,
        inverse=inverse,
        top_bin=bin_of(high, inverse),
        bound=bound,
        highs=highs,
        bases=bases,
        weights=weights,
        counts=zl.shared_array(zl.f64, BINS),
        masses=zl.shared_array(zl.f64, BINS),
        shares=zl.shared_array(zl.f32, THREADS),
        parts=zl.shared_array(zl.f64, GROUPS * (BINS + 1)),
        warp_sums=warp_sums,
        scratch=zl.shared_array(zl.u64, 2 * CANDIDATES),
    )
    finite = zl.f64(0)
    if choice.filtered != 0:
        finite = merge_histograms(state, warp_sums)
        if choice.min_p > 0.0:
            kept = larger(kept, zl.u64(key_of(min(high + choice.heat * zl.log(choice.min_p), high))) << 32)
    scores = zl.shared_array(zl.f64, BINS)
    found = zl.shared_array(zl.i32, 1)
    total = zl.f64(0)
    # 0: top-k. 1: top-p of what is left. 2: the mass of each chunk for the draw.
    for stage in zl.unroll(range(3), 1):
        if stage == 2 or (stage == 1 and choice.top_p < 1.0):
            weigh_chunks(state, kept)
            total = zl.f64(0)
            if t < chunks:
                total = weights[t]
            total = warp_sum_f64(total)
            if lane == 0:
                warp_sums[warp] = total
            zl.barrier()
            total = zl.f64(0)
            for w in zl.static(range(chunk_warps)):
                total += warp_sums[w]
            zl.barrier()
        if (stage == 0 and choice.top_k > 0 and choice.top_k < vocab) or (stage == 1 and choice.top_p < 1.0):
            limit = zl.where(stage == 1, total * zl.f64(choice.top_p), zl.f64(choice.top_k))
            kept = larger(kept, boundary(state, finite, limit, stage == 1, scores, found))

    # The first token in order of ids at which the kept mass passes a random part of all of it.
    goal = uniform(choice.seed, zl.u64(choice.counter)) * total
    chunk, before, reached = find(weights, chunks, zl.f64(0), goal, False)
    start = chunk * CHUNK
    count = min(vocab - start, CHUNK)
    values = four_at(x + start, t * 4, count, state.aligned)
    share = zl.f32(0)
    for c in zl.static(range(4)):
        if values[c] >= LOWEST and order_of(values[c], start + t * 4 + c) >= kept:
            share += relative_mass(values[c], high, inverse)
    thread, before = find_thread(state, share, before, goal)
    values = four_at(x + start, thread * 4, count, state.aligned)
    open = zl.i32(1)
    for c in zl.static(range(4)):
        id = start + thread * 4 + c
        if open != 0 and values[c] >= LOWEST and order_of(values[c], id) >= kept:
            token = id
            before += zl.f64(relative_mass(values[c], high, inverse))
            if before > goal:
                open = 0
    return token


@zl.inline
def raw_logit(raw, token, row, p):
    """The token's logit before penalties and bias, from what they made of it (exact to a rounding of each)."""
    t = zl.thread_index()
    times = zl.shared_array(zl.i32, 1)
    bias = zl.shared_array(zl.f32, 1)
    if t == 0:
        times[0] = 0
        bias[0] = 0.0
    zl.barrier()
    for position in zl.unroll(range(t, p.history_len[row], THREADS), 1):
        if history_at(p, zl.i64(p.history_row[row]), position)[0] == token:
            zl.atomic_max(times, 1)
            if position >= p.prompt_len[row]:
                zl.atomic_add(times, 1)
    for j in zl.unroll(range(p.bias_start[row] + t, p.bias_start[row + 1], THREADS), 1):
        if min(max(p.bias_ids[j], 0), p.vocab - 1) == token:
            bias[0] = p.bias_values[j]
    zl.barrier()
    if times[0] > 0:
        raw = zl.where(times[0] > 1, raw + p.presence[row], raw) + p.frequency[row] * zl.f32(times[0] - 1)
        raw = zl.where(raw > 0.0, raw * p.repetition[row], raw / p.repetition[row])
    return raw - bias[0]


@zl.kernel
def sample_row_gpu(
    logits: zl.Ptr[zl.f32, "const"],
    temperature: zl.Ptr[zl.f32, "const"],
    top_k: zl.Ptr[zl.i32, "const"],
    top_p: zl.Ptr[zl.f32, "const"],
    min_p: zl.Ptr[zl.f32, "const"],
    top_n_sigma: zl.Ptr[zl.f32, "const"],
    filtered: zl.Ptr[zl.i32, "const"],
    repetition: zl.Ptr[zl.f32, "const"],
    presence: zl.Ptr[zl.f32, "const"],
    frequency: zl.Ptr[zl.f32, "const"],
    seed: zl.Ptr[zl.u64, "const"],
    counter: zl.Ptr[zl.i64, "const"],
    num_logprobs: zl.Ptr[zl.i32, "const"],
    history_row: zl.Ptr[zl.i32, "const"],
    history_len: zl.Ptr[zl.i32, "const"],
    prompt_len: zl.Ptr[zl.i32, "const"],
    bias_start: zl.Ptr[zl.i32, "const"],
    bias_ids: zl.Ptr[zl.i32, "const"],
    bias_values: zl.Ptr[zl.f32, "const"],
    history: zl.Ptr[zl.i32, "const"],
    page_table: zl.Ptr[zl.i32, "const"],
    records: zl.Ptr[zl.u32, "const"],
    tokens: zl.Ptr[zl.i32],
    status: zl.Ptr[zl.i32],
    logprob: zl.Ptr[zl.f32],
    top_ids: zl.Ptr[zl.i32],
    top_logprobs: zl.Ptr[zl.f32],
    vocab: zl.i32,
    chunks: zl.i32,
    max_pages: zl.i32,
    blocks_per_page: zl.i32,
):
    """Grid (rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t = zl.thread_index()
    row = zl.block_index(0)
    x = logits + zl.i64(row) * vocab
    mine = records + zl.i64(row) * chunks * RECORD
    wanted = num_logprobs[row]
    heat = temperature[row]
    not_greedy = heat >= 1e-5 and top_k[row] != 1

    warps = zl.target.threads // zl.target.warp
    highs = zl.shared_array(zl.f32, MAX_CHUNKS)
    bases = zl.shared_array(zl.i32, MAX_CHUNKS)
    weights = zl.shared_array(zl.f64, MAX_CHUNKS)  # mass of each chunk, relative to the row's largest logit
    warp_sums = zl.shared_array(zl.f64, warps)
    orders = zl.shared_array(zl.u64, warps)
    own = mine + t * RECORD
    best = zl.u64(0)
    if t < chunks:
        best = zl.u64(own[BEST]) | (zl.u64(own[BEST + 1]) << 32)
        highs[t] = value_of(own[BEST + 1])
        bases[t] = zl.cast_ptr(own, zl.i32)[BASE]
    best = block_best(best, orders)
    high = value_of(zl.u32(best >> 32))
    token = id_of(best)
    if (best >> 32) == 0xFFFFFFFF or high <= LOWEST or high > -LOWEST:
        if t < MAX_LOGPROBS:
            top_ids[zl.i64(row) * MAX_LOGPROBS + t] = -1
            top_logprobs[zl.i64(row) * MAX_LOGPROBS + t] = 0.0
        if t == 0:
            tokens[row] = 0
            status[row] = 1
            logprob[row] = 0.0
        return

    found_ids = zl.shared_array(zl.i32, MAX_LOGPROBS)
    found_values = zl.shared_array(zl.f32, MAX_LOGPROBS)
    floats = zl.shared_array(zl.f32, warps)
    raw_high = zl.f32(0)
    log_total = zl.f32(0)
    if t < MAX_LOGPROBS:
        found_ids[t] = -1
        found_values[t] = 0.0
    if wanted >= 0:
        found_high, found_total = most_likely(own, mine, chunks, wanted, floats, warp_sums, found_ids, found_values)
        raw_high = found_high
        log_total = found_total

    if not_greedy:
        own_sums = (highs, bases, weights, warp_sums)
        # Not a variable: each parameter is read where it is used, which saves registers.
        token = draw(
            token,
            x,
            own,
            mine,
            chunks,
            vocab,
            high,
            *own_sums,
            RowChoice(
                heat, top_k[row], top_p[row], min_p[row], top_n_sigma[row], filtered[row], seed[row], counter[row]
            ),
        )

    token = min(max(token, 0), vocab - 1)
    raw = x[token]
    if wanted >= 0 and (history_len[row] > 0 or bias_start[row + 1] > bias_start[row]):
        weigh = (repetition, presence, frequency, history_row, history_len, prompt_len)
        biases = (bias_start, bias_ids, bias_values)
        penalties = Penalties(*weigh, *biases, history, page_table, vocab, max_pages, blocks_per_page)
        raw = raw_logit(raw, token, row, penalties)
    if t < MAX_LOGPROBS:
        top_ids[zl.i64(row) * MAX_LOGPROBS + t] = found_ids[t]
        top_logprobs[zl.i64(row) * MAX_LOGPROBS + t] = found_values[t]
    if t == 0:
        tokens[row] = token
        status[row] = 0
        logprob[row] = zl.where(wanted >= 0, raw - raw_high - log_total, zl.f32(0))


def sample_variants(target):
    """Both launches of the sampler on a GPU. The second takes less than the 32 KB of shared memory that every GPU has."""
    return [
        zl.Variant("sample_scan", sample_scan_gpu, threads=SCAN_THREADS, min_blocks=4),
        zl.Variant("sample_row", sample_row_gpu, threads=THREADS),
    ]
