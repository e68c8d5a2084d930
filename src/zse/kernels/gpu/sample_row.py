"""Second launch of the GPU sampler: merges a row's chunks, bounds its kept set, draws."""

from zse import kernel as zl
from zse.kernels.gpu import sample_parts as parts
from zse.kernels.gpu import sample_search as search
from zse.kernels.gpu.rows import block_max
from zse.kernels.gpu.sample_scan import THREADS as SCAN_THREADS
from zse.kernels.gpu.sample_scan import sample_scan_gpu
from zse.kernels.sample_parts import LOWEST, key_of, uniform, value_of


@zl.inline
def block_total(value, sums):
    """The sum over the block in f64, in every thread. sums: one f64 a warp."""
    part = parts.warp_sum_f64(value)
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
    for at in zl.unroll(range(zl.thread_index() * 4, vocab, search.THREADS * 4), 1):
        for value in zl.static(parts.four_at(x, at, vocab, aligned)):
            if value >= LOWEST:
                count += 1
                total += zl.f64(value)
    number = block_total(zl.f64(count), sums)
    mean = block_total(total, sums) / number
    squares = zl.f64(0)
    for at in zl.unroll(range(zl.thread_index() * 4, vocab, search.THREADS * 4), 1):
        for value in zl.static(parts.four_at(x, at, vocab, aligned)):
            if value >= LOWEST:
                squares += (zl.f64(value) - mean) * (zl.f64(value) - mean)
    return zl.sqrt(zl.f32(block_total(squares, sums) / number))


@zl.inline
def most_likely(own, mine, chunks, wanted, floats, warp_sums, found_ids, found_values):
    """(largest raw logit, log of the sum of their exponentials); the `wanted` most likely tokens and their
    log-probabilities go to found_ids and found_values."""
    t, lane, warp = zl.thread_index(), zl.lane_index(), zl.warp_index()
    lists = chunk_warps = parts.MAX_CHUNKS // zl.target.warp
    chunk_high = zl.f32(LOWEST)
    chunk_sum = zl.f32(0)
    if t < chunks:
        chunk_high = zl.cast_ptr(own, zl.f32)[parts.RAW_HIGH]
        chunk_sum = zl.cast_ptr(own, zl.f32)[parts.RAW_SUM]
    raw_high = block_max(chunk_high, floats)
    share = parts.warp_sum_f64(
        zl.f64(chunk_sum * parts.relative_mass(chunk_high, raw_high, parts.inverse_of(zl.f32(1))))
    )
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
                heads[j] = parts.order_at(mine + (lane + j * zl.target.warp) * parts.RECORD + parts.RAW_TOP, zl.i32(0))
        for k in zl.unroll(range(wanted), 1):
            head = heads[0] + 0
            for j in zl.static(range(1, lists)):
                head = parts.larger(head, heads[j])
            for step in zl.static((32, 16, 8, 4, 2, 1)):
                if step < zl.target.warp:
                    head = parts.larger(head, zl.shuffle_xor(head, step))
            if lane == 0 and head != 0:
                found_ids[k] = parts.id_of(head)
                found_values[k] = value_of(zl.u32(head >> 32)) - raw_high - log_total
            for j in zl.static(range(lists)):
                if heads[j] == head and head != 0:
                    places[j] = places[j] + 1
                    heads[j] = 0
                    if places[j] < wanted:
                        heads[j] = parts.order_at(
                            mine + (lane + j * zl.target.warp) * parts.RECORD + parts.RAW_TOP, places[j]
                        )
    zl.barrier()
    return raw_high, log_total


class RowParams(zl.Record):
    """The parameters of sample_row_gpu. The tokens of a row lie in the history by its line of the page table;
    bias_start [rows + 1]. to_host: bytes from a result to its place in memory of the host, which is written, too; or 0."""

    logits: zl.Ptr[zl.f32, "const"]
    temperature: zl.Ptr[zl.f32, "const"]
    top_k: zl.Ptr[zl.i32, "const"]
    top_p: zl.Ptr[zl.f32, "const"]
    min_p: zl.Ptr[zl.f32, "const"]
    top_n_sigma: zl.Ptr[zl.f32, "const"]
    filtered: zl.Ptr[zl.i32, "const"]
    repetition: zl.Ptr[zl.f32, "const"]
    presence: zl.Ptr[zl.f32, "const"]
    frequency: zl.Ptr[zl.f32, "const"]
    seed: zl.Ptr[zl.u64, "const"]
    counter: zl.Ptr[zl.i64, "const"]
    num_logprobs: zl.Ptr[zl.i32, "const"]
    history_row: zl.Ptr[zl.i32, "const"]
    history_len: zl.Ptr[zl.i32, "const"]
    prompt_len: zl.Ptr[zl.i32, "const"]
    bias_start: zl.Ptr[zl.i32, "const"]
    bias_ids: zl.Ptr[zl.i32, "const"]
    bias_values: zl.Ptr[zl.f32, "const"]
    history: zl.Ptr[zl.i32, "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    records: zl.Ptr[zl.u32, "const"]
    tokens: zl.Ptr[zl.i32]
    status: zl.Ptr[zl.i32]
    logprob: zl.Ptr[zl.f32]
    top_ids: zl.Ptr[zl.i32]
    top_logprobs: zl.Ptr[zl.f32]
    vocab: zl.i32
    chunks: zl.i32
    max_pages: zl.i32
    blocks_per_page: zl.i32
    to_host: zl.i64


@zl.inline
def bound_kept(kept, state, finite, row, p):
    """kept: [the kept set is {order >= kept}], after top-k and top-p. Returns the set's mass, with that of each chunk
    in state.weights."""
    t = zl.thread_index()
    scores = zl.shared_array(zl.f64, parts.BINS)
    found = zl.shared_array(zl.i32, 1)
    total = zl.f64(0)
    # 0: top-k. 1: top-p of what is left. 2: the mass of each chunk for the draw.
    for stage in zl.unroll(range(3), 1):
        if stage == 2 or (stage == 1 and p.top_p[row] < 1.0):
            search.weigh_chunks(state, kept[0])
            total = zl.f64(0)
            if t < p.chunks:
                total = state.weights[t]
            total = parts.warp_sum_f64(total)
            if zl.lane_index() == 0:
                state.warp_sums[zl.warp_index()] = total
            zl.barrier()
            total = zl.f64(0)
            for w in zl.static(range(parts.MAX_CHUNKS // zl.target.warp)):
                total += state.warp_sums[w]
            zl.barrier()
        if (stage == 0 and p.top_k[row] > 0 and p.top_k[row] < p.vocab) or (stage == 1 and p.top_p[row] < 1.0):
            limit = zl.where(stage == 1, total * zl.f64(p.top_p[row]), zl.f64(p.top_k[row]))
            kept[0] = parts.larger(kept[0], search.boundary(state, finite, limit, stage == 1, scores, found))
    return total


@zl.inline
def draw(token, state, own, heat, row, p):
    """A token of the kept set by its probability; token: the best, where rounding leaves none. Parameters are read
    where they are used, which saves registers."""
    t = zl.thread_index()
    inverse = parts.inverse_of(heat)
    kept = [zl.u64(0) for _ in zl.static(range(1))]  # the kept set: order >= kept
    if p.top_n_sigma[row] > 0.0:
        floor = state.high - p.top_n_sigma[row] * deviation(state.x, p.vocab, state.aligned, state.warp_sums)
        kept[0] = zl.u64(key_of(floor)) << 32
    bound = zl.u64(0)
    if p.filtered[row] != 0:
        if t < p.chunks:
            if state.highs[t] >= LOWEST:
                bound = parts.order_at(own + parts.LISTED, parts.LIST - 1)
        bound = parts.block_best(bound, zl.shared_array(zl.u64, zl.target.threads // zl.target.warp))
    state = search.with_scratch(
        state,
        inverse=inverse,
        top_bin=parts.bin_of(state.high, inverse),
        bound=bound,
        counts=zl.shared_array(zl.f64, parts.BINS),
        masses=zl.shared_array(zl.f64, parts.BINS),
        shares=zl.shared_array(zl.f32, search.THREADS),
        parts=zl.shared_array(zl.f64, search.GROUPS * (parts.BINS + 1)),
        scratch=zl.shared_array(zl.u64, 2 * search.CANDIDATES),
    )
    finite = zl.f64(0)
    if p.filtered[row] != 0:
        finite = search.merge_histograms(state, state.warp_sums)
        if p.min_p[row] > 0.0:
            kept[0] = parts.larger(
                kept[0], zl.u64(key_of(min(state.high + heat * zl.log(p.min_p[row]), state.high))) << 32
            )
    total = bound_kept(kept, state, finite, row, p)

    # The first token in order of ids at which the kept mass passes a random part of all of it.
    goal = uniform(p.seed[row], zl.u64(p.counter[row])) * total
    chunk, before, reached = parts.find(state.weights, p.chunks, zl.f64(0), goal, False)
    start = chunk * parts.CHUNK
    count = min(p.vocab - start, parts.CHUNK)
    values = parts.four_at(state.x + start, t * 4, count, state.aligned)
    share = zl.f32(0)
    for c in zl.static(range(4)):
        if values[c] >= LOWEST and parts.order_of(values[c], start + t * 4 + c) >= kept[0]:
            share += parts.relative_mass(values[c], state.high, inverse)
    thread, before = search.find_thread(state, share, before, goal)
    values = parts.four_at(state.x + start, thread * 4, count, state.aligned)
    open = zl.i32(1)
    for c in zl.static(range(4)):
        id = start + thread * 4 + c
        if open != 0 and values[c] >= LOWEST and parts.order_of(values[c], id) >= kept[0]:
            token = id
            before += zl.f64(parts.relative_mass(values[c], state.high, inverse))
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
    for position in zl.unroll(range(t, p.history_len[row], search.THREADS), 1):
        if parts.history_at(p, zl.i64(p.history_row[row]), position)[0] == token:
            zl.atomic_max(times, 1)
            if position >= p.prompt_len[row]:
                zl.atomic_add(times, 1)
    for j in zl.unroll(range(p.bias_start[row] + t, p.bias_start[row + 1], search.THREADS), 1):
        if min(max(p.bias_ids[j], 0), p.vocab - 1) == token:
            bias[0] = p.bias_values[j]
    zl.barrier()
    if times[0] > 0:
        raw = zl.where(times[0] > 1, raw + p.presence[row], raw) + p.frequency[row] * zl.f32(times[0] - 1)
        raw = zl.where(raw > 0.0, raw * p.repetition[row], raw / p.repetition[row])
    return raw - bias[0]


@zl.inline
def put(results, place, value, type, p):
    """A result, and once more where the host reads it."""
    results[place] = value
    if p.to_host != 0:
        there = zl.cast_ptr(zl.cast_ptr(results + place, zl.u8) + p.to_host, type)
        there[0] = value


@zl.inline
def leave(t, row, token, status, logprob, id, value, p):
    """A row's results. id, value: this thread's of the most likely."""
    if t < parts.MAX_LOGPROBS:
        put(p.top_ids, zl.i64(row) * parts.MAX_LOGPROBS + t, id, zl.i32, p)
        put(p.top_logprobs, zl.i64(row) * parts.MAX_LOGPROBS + t, value, zl.f32, p)
    if t == 0:
        put(p.tokens, row, token, zl.i32, p)
        put(p.status, row, status, zl.i32, p)
        put(p.logprob, row, logprob, zl.f32, p)


@zl.inline
def refuse(t, row, p):
    """The row has no token: a logit is NaN or infinity, or none is finite."""
    leave(t, row, zl.i32(0), zl.i32(1), zl.f32(0), zl.i32(-1), zl.f32(0), p)


@zl.kernel
def sample_row_gpu(p: RowParams):
    """Grid (rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t = zl.thread_index()
    row = zl.block_index(0)
    x = p.logits + zl.i64(row) * p.vocab
    mine = p.records + zl.i64(row) * p.chunks * parts.RECORD
    wanted = p.num_logprobs[row]
    heat = p.temperature[row]
    not_greedy = heat >= 1e-5 and p.top_k[row] != 1

    warps = zl.target.threads // zl.target.warp
    highs = zl.shared_array(zl.f32, parts.MAX_CHUNKS)
    bases = zl.shared_array(zl.i32, parts.MAX_CHUNKS)
    weights = zl.shared_array(zl.f64, parts.MAX_CHUNKS)  # mass of each chunk, relative to the row's largest logit
    warp_sums = zl.shared_array(zl.f64, warps)
    orders = zl.shared_array(zl.u64, warps)
    own = mine + t * parts.RECORD
    best = zl.u64(0)
    if t < p.chunks:
        best = zl.u64(own[parts.BEST]) | (zl.u64(own[parts.BEST + 1]) << 32)
        highs[t] = value_of(own[parts.BEST + 1])
        bases[t] = zl.cast_ptr(own, zl.i32)[parts.BASE]
    best = parts.block_best(best, orders)
    high = value_of(zl.u32(best >> 32))
    token = parts.id_of(best)
    if (best >> 32) == 0xFFFFFFFF or high <= LOWEST or high > -LOWEST:
        refuse(t, row, p)
        return

    found_ids = zl.shared_array(zl.i32, parts.MAX_LOGPROBS)
    found_values = zl.shared_array(zl.f32, parts.MAX_LOGPROBS)
    floats = zl.shared_array(zl.f32, warps)
    raw_high = zl.f32(0)
    log_total = zl.f32(0)
    if t < parts.MAX_LOGPROBS:
        found_ids[t] = -1
        found_values[t] = 0.0
    if wanted >= 0:
        found_high, found_total = most_likely(own, mine, p.chunks, wanted, floats, warp_sums, found_ids, found_values)
        raw_high = found_high
        log_total = found_total

    if not_greedy:
        state = search.Row(x, mine, p.chunks, p.vocab, p.vocab % 4 == 0, high, highs, bases, weights, warp_sums)
        token = draw(token, state, own, heat, row, p)

    token = min(max(token, 0), p.vocab - 1)
    raw = x[token]
    if wanted >= 0 and (p.history_len[row] > 0 or p.bias_start[row + 1] > p.bias_start[row]):
        raw = raw_logit(raw, token, row, p)
    logprob = zl.where(wanted >= 0, raw - raw_high - log_total, zl.f32(0))
    id, value = zl.i32(0), zl.f32(0)
    if t < parts.MAX_LOGPROBS:
        id = found_ids[t] + 0
        value = found_values[t] + 0.0
    leave(t, row, token, zl.i32(0), logprob, id, value, p)


def sample_variants(target):
    """Both launches of the sampler on a GPU. The second takes less than the 32 KB of shared memory that every GPU
    has."""
    return [
        zl.Variant("sample_scan", sample_scan_gpu, threads=SCAN_THREADS, min_blocks=4),
        zl.Variant("sample_row", sample_row_gpu, threads=search.THREADS),
    ]
