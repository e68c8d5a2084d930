"""Second launch of the GPU sampler: merges a row's chunks, bounds its kept set, draws."""

from zse.kernel import (
    Ptr,
    Variant,
    atomic_add,
    atomic_max,
    barrier,
    block_index,
    cast_ptr,
    f32,
    f64,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    kernel,
    lane_index,
    log,
    shared_array,
    shuffle_xor,
    static,
    target,
    thread_index,
    u32,
    u64,
    unroll,
    warp_index,
    where,
)
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
    bin_of,
    block_best,
    find,
    four_at,
    history_place,
    id_of,
    inverse_of,
    is_filtered,
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


@kernel
def sample_row_gpu(
    logits: Ptr[f32, "const"],
    temperature: Ptr[f32, "const"],
    top_k: Ptr[i32, "const"],
    top_p: Ptr[f32, "const"],
    min_p: Ptr[f32, "const"],
    repetition: Ptr[f32, "const"],
    presence: Ptr[f32, "const"],
    frequency: Ptr[f32, "const"],
    seed: Ptr[u64, "const"],
    counter: Ptr[i64, "const"],
    num_logprobs: Ptr[i32, "const"],
    history_row: Ptr[i32, "const"],
    history_len: Ptr[i32, "const"],
    prompt_len: Ptr[i32, "const"],
    bias_start: Ptr[i32, "const"],
    bias_ids: Ptr[i32, "const"],
    bias_values: Ptr[f32, "const"],
    history: Ptr[i32, "const"],
    page_table: Ptr[i32, "const"],
    records: Ptr[u32, "const"],
    tokens: Ptr[i32],
    status: Ptr[i32],
    logprob: Ptr[f32],
    top_ids: Ptr[i32],
    top_logprobs: Ptr[f32],
    vocab: i32,
    chunks: i32,
    max_pages: i32,
    blocks_per_page: i32,
):
    """Grid (rows)."""
    grid_launch_dependents()
    grid_wait()
    t = thread_index()
    lane = lane_index()
    warp = warp_index()
    row = block_index(0)
    x = logits + i64(row) * vocab
    mine = records + i64(row) * chunks * RECORD
    wanted = num_logprobs[row]
    heat = temperature[row]
    not_greedy = heat >= 1e-5 and top_k[row] != 1

    warps = target.threads // target.warp
    lists = MAX_CHUNKS // target.warp
    chunk_warps = MAX_CHUNKS // target.warp
    highs = shared_array(f32, MAX_CHUNKS)
    bases = shared_array(i32, MAX_CHUNKS)
    weights = shared_array(f64, MAX_CHUNKS)  # mass of each chunk, relative to the row's largest logit
    warp_sums = shared_array(f64, warps)
    orders = shared_array(u64, warps)
    own = mine + t * RECORD
    best = u64(0)
    if t < chunks:
        best = u64(own[BEST]) | (u64(own[BEST + 1]) << 32)
        highs[t] = value_of(own[BEST + 1])
        bases[t] = cast_ptr(own, i32)[BASE]
    best = block_best(best, orders)
    high = value_of(u32(best >> 32))
    token = id_of(best)
    if (best >> 32) == 0xFFFFFFFF or high <= LOWEST or high > -LOWEST:
        if t < MAX_LOGPROBS:
            top_ids[i64(row) * MAX_LOGPROBS + t] = -1
            top_logprobs[i64(row) * MAX_LOGPROBS + t] = 0.0
        if t == 0:
            tokens[row] = 0
            status[row] = 1
            logprob[row] = 0.0
        return

    found_ids = shared_array(i32, MAX_LOGPROBS)
    found_values = shared_array(f32, MAX_LOGPROBS)
    floats = shared_array(f32, warps)
    raw_high = f32(0)
    log_total = f32(0)
    if t < MAX_LOGPROBS:
        found_ids[t] = -1
        found_values[t] = 0.0
    if wanted >= 0:
        chunk_high = f32(LOWEST)
        chunk_sum = f32(0)
        if t < chunks:
            chunk_high = cast_ptr(own, f32)[RAW_HIGH]
            chunk_sum = cast_ptr(own, f32)[RAW_SUM]
        raw_high = block_max(chunk_high, floats)
        share = warp_sum_f64(f64(chunk_sum * relative_mass(chunk_high, raw_high, inverse_of(f32(1)))))
        if lane == 0:
            warp_sums[warp] = share
        barrier()
        total = f64(0)
        for w in static(range(chunk_warps)):
            total += warp_sums[w]
        log_total = log(f32(total))
        if warp == 0 and wanted > 0:
            # The chunks' lists are in order: their heads are compared, and the best one's list moves on.
            heads = [u64(0) for _ in static(range(lists))]
            places = [i32(0) for _ in static(range(lists))]
            for j in static(range(lists)):
                if lane + j * target.warp < chunks:
                    heads[j] = order_at(mine + (lane + j * target.warp) * RECORD + RAW_TOP, i32(0))
            for k in unroll(range(wanted), 1):
                head = heads[0] + 0
                for j in static(range(1, lists)):
                    head = larger(head, heads[j])
                for step in static((32, 16, 8, 4, 2, 1)):
                    if step < target.warp:
                        head = larger(head, shuffle_xor(head, step))
                if lane == 0 and head != 0:
                    found_ids[k] = id_of(head)
                    found_values[k] = value_of(u32(head >> 32)) - raw_high - log_total
                for j in static(range(lists)):
                    if heads[j] == head and head != 0:
                        places[j] = places[j] + 1
                        heads[j] = 0
                        if places[j] < wanted:
                            heads[j] = order_at(mine + (lane + j * target.warp) * RECORD + RAW_TOP, places[j])
        barrier()

    if not_greedy:
        inverse = inverse_of(heat)
        filtered = is_filtered(top_k[row], top_p[row], min_p[row], vocab)
        bound = u64(0)
        if filtered:
            if t < chunks:
                if highs[t] >= LOWEST:
                    bound = order_at(own + LISTED, LIST - 1)
            bound = block_best(bound, shared_array(u64, warps))
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
            counts=shared_array(f64, BINS),
            masses=shared_array(f64, BINS),
            shares=shared_array(f32, THREADS),
            parts=shared_array(f64, GROUPS * (BINS + 1)),
            warp_sums=warp_sums,
            scratch=shared_array(u64, 2 * CANDIDATES),
        )
        kept = u64(0)  # the kept set: order >= kept
        finite = f64(0)
        if filtered:
            finite = merge_histograms(state, warp_sums)
            if min_p[row] > 0.0:
                kept = u64(key_of(min(high + heat * log(min_p[row]), high))) << 32
        scores = shared_array(f64, BINS)
        found = shared_array(i32, 1)
        total = f64(0)
        # 0: top-k. 1: top-p of what is left. 2: the mass of each chunk for the draw.
        for stage in unroll(range(3), 1):
            if stage == 2 or (stage == 1 and top_p[row] < 1.0):
                weigh_chunks(state, kept)
                total = f64(0)
                if t < chunks:
                    total = weights[t]
                total = warp_sum_f64(total)
                if lane == 0:
                    warp_sums[warp] = total
                barrier()
                total = f64(0)
                for w in static(range(chunk_warps)):
                    total += warp_sums[w]
                barrier()
            if (stage == 0 and top_k[row] > 0 and top_k[row] < vocab) or (stage == 1 and top_p[row] < 1.0):
                limit = where(stage == 1, total * f64(top_p[row]), f64(top_k[row]))
                kept = larger(kept, boundary(state, finite, limit, stage == 1, scores, found))

        # The first token in order of ids at which the kept mass passes a random part of all of it.
        goal = uniform(seed[row], u64(counter[row])) * total
        chunk, before, reached = find(weights, chunks, f64(0), goal, False)
        start = chunk * CHUNK
        count = min(vocab - start, CHUNK)
        values = four_at(x + start, t * 4, count, state.aligned)
        share = f32(0)
        for c in static(range(4)):
            if values[c] >= LOWEST and order_of(values[c], start + t * 4 + c) >= kept:
                share += relative_mass(values[c], high, inverse)
        thread, before = find_thread(state, share, before, goal)
        values = four_at(x + start, thread * 4, count, state.aligned)
        open = i32(1)
        for c in static(range(4)):
            id = start + thread * 4 + c
            if open != 0 and values[c] >= LOWEST and order_of(values[c], id) >= kept:
                token = id
                before += f64(relative_mass(values[c], high, inverse))
                if before > goal:
                    open = 0

    token = min(max(token, 0), vocab - 1)
    raw = x[token]
    if wanted >= 0 and (history_len[row] > 0 or bias_start[row + 1] > bias_start[row]):
        # The token's logit before penalties and bias, from what they made of it (exact to a rounding of each).
        times = shared_array(i32, 1)
        bias = shared_array(f32, 1)
        if t == 0:
            times[0] = 0
            bias[0] = 0.0
        barrier()
        for position in unroll(range(t, history_len[row], THREADS), 1):
            if history[history_place(page_table, i64(history_row[row]), position, max_pages, blocks_per_page)] == token:
                atomic_max(times, 1)
                if position >= prompt_len[row]:
                    atomic_add(times, 1)
        for j in unroll(range(bias_start[row] + t, bias_start[row + 1], THREADS), 1):
            if min(max(bias_ids[j], 0), vocab - 1) == token:
                bias[0] = bias_values[j]
        barrier()
        if times[0] > 0:
            raw = where(times[0] > 1, raw + presence[row], raw) + frequency[row] * f32(times[0] - 1)
            raw = where(raw > 0.0, raw * repetition[row], raw / repetition[row])
        raw = raw - bias[0]
    if t < MAX_LOGPROBS:
        top_ids[i64(row) * MAX_LOGPROBS + t] = found_ids[t]
        top_logprobs[i64(row) * MAX_LOGPROBS + t] = found_values[t]
    if t == 0:
        tokens[row] = token
        status[row] = 0
        logprob[row] = where(wanted >= 0, raw - raw_high - log_total, f32(0))


def sample_variants(target):
    """Both launches of the sampler on a GPU. The second takes less than the 32 KB of shared memory that every GPU has."""
    return [
        Variant("sample_scan", sample_scan_gpu, threads=SCAN_THREADS, min_blocks=4),
        Variant("sample_row", sample_row_gpu, threads=THREADS),
    ]
