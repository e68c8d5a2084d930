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
    inline,
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
    BOUND,
    CHUNK,
    COUNTS,
    LIST,
    LISTED,
    MASS,
    MASSES,
    MAX_CHUNKS,
    MAX_LOGPROBS,
    RAW_HIGH,
    RAW_SUM,
    RAW_TOP,
    RECORD,
    bin_of,
    block_best,
    find,
    first_key,
    four_at,
    history_place,
    id_of,
    inverse_of,
    is_filtered,
    larger,
    minus_infinity,
    order_at,
    order_of,
    power_of_two,
    relative_mass,
    scaling_exponent,
    warp_sum_f64,
)
from zse.kernels.gpu.sample_scan import THREADS as SCAN_THREADS
from zse.kernels.gpu.sample_scan import sample_scan_gpu
from zse.kernels.sample_parts import LOWEST, key_of, uniform, value_of

THREADS = 1024
CANDIDATES = 512        # tokens of a bin that are put in order; more are divided further first
PARTS = 1024            # of a bin that is divided further
GROUPS = THREADS // BINS
UNROLL = 4              # 16-byte loads in flight of a lane that walks a chunk


@inline
def may_hold(record, high, base, depth, top_bin):
    """Whether a chunk can have logits in the row's bin `depth`."""
    mine = depth - (top_bin - base)
    known = record[COUNTS + min(max(mine, 0), BINS - 1)]
    return high >= LOWEST and (depth == BINS - 1 or (mine >= 0 and known > 0))


@inline
def bin_limits(depth, top_bin, inverse):
    """(smallest, largest) key of the row's bin `depth`; the last bin goes down to the lowest finite logit."""
    top = first_key(top_bin - depth + 1, inverse) - 1
    low = first_key(top_bin - depth, inverse)
    return where(depth == BINS - 1, key_of(f32(LOWEST)), low), top


@inline
def mass_before(record, depth, top_bin, base):
    """Mass of the chunk's logits above the row's bin `depth`, relative to the chunk's largest; one lane's part."""
    mass = f64(0)
    last = min(depth - (top_bin - base), BINS - 1)
    for mine in unroll(range(lane_index(), last, target.warp), 1):
        mass += f64(f32(record[MASSES + mine]) * power_of_two(-scaling_exponent(mine)))
    return mass


@inline
def chunk_lanes(x, at, count, aligned):
    """A lane's next 4 * UNROLL values of a chunk that a warp walks, all loads issued first."""
    values = []
    for u in static(range(UNROLL)):
        values += four_at(x, at + u * target.warp * 4, count, aligned)
    return values


@inline
def place_of(at, j):
    """Place in the chunk of value j of chunk_lanes(at)."""
    return at + j // 4 * target.warp * 4 + j % 4


@inline
def value_at(x, id, end):
    """A logit again, by a loop that is not unrolled: what was found in registers is rare, and its code need not be
    sixteen times there. Minus infinity from `end` on."""
    value = minus_infinity()
    if id < end:
        value = x[id]
    return value


@inline
def any_within(values, low, high):
    """Whether one of the values is in [low, high]."""
    inside = values[0] >= low and values[0] <= high
    for value in static(values[1:]):
        inside = inside or (value >= low and value <= high)
    return inside


@kernel
def sample_row_gpu(logits: Ptr[f32, "const"], temperature: Ptr[f32, "const"], top_k: Ptr[i32, "const"],
                   top_p: Ptr[f32, "const"], min_p: Ptr[f32, "const"], repetition: Ptr[f32, "const"],
                   presence: Ptr[f32, "const"], frequency: Ptr[f32, "const"], seed: Ptr[u64, "const"],
                   counter: Ptr[i64, "const"], num_logprobs: Ptr[i32, "const"], history_row: Ptr[i32, "const"],
                   history_len: Ptr[i32, "const"], prompt_len: Ptr[i32, "const"], bias_start: Ptr[i32, "const"],
                   bias_ids: Ptr[i32, "const"], bias_values: Ptr[f32, "const"], history: Ptr[i32, "const"],
                   page_table: Ptr[i32, "const"], records: Ptr[u32, "const"], tokens: Ptr[i32], status: Ptr[i32],
                   logprob: Ptr[f32], top_ids: Ptr[i32], top_logprobs: Ptr[f32], vocab: i32, chunks: i32,
                   max_pages: i32, blocks_per_page: i32):
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
    highs = shared_array(f32, MAX_CHUNKS)
    bases = shared_array(i32, MAX_CHUNKS)
    weights = shared_array(f64, MAX_CHUNKS)         # mass of each chunk, relative to the row's largest logit
    warp_masses = shared_array(f64, warps)
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
            warp_masses[warp] = share
        barrier()
        total = f64(0)
        for w in static(range(-(-MAX_CHUNKS // target.warp))):
            total += warp_masses[w]
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
        aligned = vocab % 4 == 0
        counted = top_k[row] > 0 and top_k[row] < vocab
        limited = top_p[row] < 1.0
        filtered = is_filtered(top_k[row], top_p[row], min_p[row], vocab)
        top_bin = bin_of(high, inverse)
        kept = u64(0)                                # the kept set: order >= kept
        bound = u64(0)                               # all tokens of a larger order are in the chunks' lists
        counts = shared_array(f64, BINS)             # of the row, by depth
        masses = shared_array(f64, BINS)
        scores = shared_array(f64, BINS)
        rest = f64(0)                                # number of finite logits in the last bin
        shares = shared_array(f32, THREADS)
        part_scores = shared_array(f64, GROUPS * (BINS + 1))     # also PARTS of them
        if filtered:
            part_counts = shared_array(i32, GROUPS * (BINS + 1))
            number = i32(0)
            mass = f64(0)
            depth = t % BINS
            for base in unroll(range(t // BINS, chunks, GROUPS * UNROLL), 1):
                # Loads of several chunks before the first is used.
                for u in static(range(UNROLL)):
                    chunk = min(base + u * GROUPS, chunks - 1)
                    record = mine + chunk * RECORD
                    place = depth - (top_bin - bases[chunk])
                    within = min(max(place, 0), BINS - 1)
                    share = f32(record[MASSES + within]) * power_of_two(-scaling_exponent(within))
                    share = share * relative_mass(highs[chunk], high, inverse)
                    if base + u * GROUPS < chunks and highs[chunk] >= LOWEST:
                        rest += f64(record[COUNTS + depth])
                        if place >= 0 and depth < BINS - 1:
                            number += i32(record[COUNTS + within])
                            mass += f64(share)
            part_counts[t // BINS * (BINS + 1) + depth] = number
            part_scores[t // BINS * (BINS + 1) + depth] = mass
            rest = warp_sum_f64(rest - f64(number))
            if lane == 0:
                warp_masses[warp] = rest
            last_listed = u64(0)
            if t < chunks:
                if highs[t] >= LOWEST:
                    last_listed = order_at(own + BOUND, 0)
            bound = block_best(last_listed, orders)
            for bin in unroll(range(warp, BINS, warps), 1):
                bin_count = f64(0)
                bin_mass = f64(0)
                for group in unroll(range(lane, GROUPS, target.warp), 1):
                    bin_count += f64(part_counts[group * (BINS + 1) + bin])
                    bin_mass += part_scores[group * (BINS + 1) + bin]
                bin_count = warp_sum_f64(bin_count)
                bin_mass = warp_sum_f64(bin_mass)
                if lane == 0:
                    counts[bin] = bin_count
                    masses[bin] = bin_mass
            rest = f64(0)
            for w in static(range(warps)):
                rest += warp_masses[w]
            if min_p[row] > 0.0:
                kept = u64(key_of(min(high + heat * log(min_p[row]), high))) << 32
            barrier()

        keys = shared_array(u64, CANDIDATES)
        sorted_keys = shared_array(u64, CANDIDATES)
        part_numbers = shared_array(u32, PARTS)
        part_low = shared_array(u32, PARTS)
        part_high = shared_array(u32, PARTS)
        found_number = shared_array(i32, 1)
        result = shared_array(u64, 1)
        total = f64(0)
        # 0: top-k. 1: top-p of what is left. 2: the mass of each chunk for the draw.
        for stage in unroll(range(3), 1):
            if stage == 2 or (stage == 1 and limited):
                edge = value_of(u32(kept >> 32))
                edge_depth = min(top_bin - bin_of(edge, inverse), BINS - 1)
                low = u32(0)
                top = u32(0)
                if kept != 0:
                    low, top = bin_limits(edge_depth, top_bin, inverse)
                bin_top = value_of(top)
                for chunk in unroll(range(warp, chunks, warps), 1):
                    record = mine + chunk * RECORD
                    chunk_high = highs[chunk]
                    relative = relative_mass(chunk_high, high, inverse)
                    mass = f64(0)
                    if kept == 0:
                        mass = f64(where(chunk_high >= LOWEST, cast_ptr(record, f32)[MASS] * relative, f32(0)))
                    elif chunk_high >= LOWEST:
                        mass = mass_before(record, edge_depth, top_bin, bases[chunk]) * f64(relative)
                        if (u64(low) << 32) > bound:
                            if lane < LIST:
                                order = order_at(record + LISTED, lane)
                                if order >= kept and u32(order >> 32) <= top:
                                    mass += f64(relative_mass(value_of(u32(order >> 32)), high, inverse))
                        elif may_hold(record, chunk_high, bases[chunk], edge_depth, top_bin):
                            start = chunk * CHUNK
                            count = min(vocab - start, CHUNK)
                            for at in unroll(range(lane * 4, count, target.warp * 4 * UNROLL), 1):
                                values = chunk_lanes(x + start, at, count, aligned)
                                if any_within(values, edge, bin_top):
                                    for j in static(range(4 * UNROLL)):
                                        if values[j] >= edge and values[j] <= bin_top and \
                                                order_of(values[j], start + place_of(at, j)) >= kept:
                                            mass += f64(relative_mass(values[j], high, inverse))
                        mass = warp_sum_f64(mass)
                    if lane == 0:
                        weights[chunk] = mass
                barrier()
                mass = f64(0)
                if t < chunks:
                    mass = weights[t]
                mass = warp_sum_f64(mass)
                if lane == 0:
                    warp_masses[warp] = mass
                barrier()
                total = f64(0)
                for w in static(range(-(-MAX_CHUNKS // target.warp))):
                    total += warp_masses[w]

            if (stage == 0 and counted) or (stage == 1 and limited):
                by_mass = stage == 1
                limit = where(by_mass, total * f64(top_p[row]), f64(top_k[row]))
                # The bin that the limit falls into, then parts of it until what is left can be put in order.
                if t < BINS:
                    scores[t] = where(by_mass, masses[t], counts[t])
                barrier()
                depth, above, inside = find(scores, BINS - 1, f64(0), limit, True)
                number = i32(counts[depth])
                if inside == 0:
                    above += scores[depth]
                    depth = BINS - 1
                    number = i32(rest)
                low, top = bin_limits(depth, top_bin, inverse)
                while number > CANDIDATES and low < top:
                    shift = u32(0)
                    while ((top - low) >> shift) >= PARTS:
                        shift += 1
                    part_numbers[t] = 0
                    part_low[t] = 0
                    part_high[t] = 0
                    barrier()
                    for chunk in unroll(range(warp, chunks, warps), 1):
                        if may_hold(mine + chunk * RECORD, highs[chunk], bases[chunk], depth, top_bin):
                            start = chunk * CHUNK
                            count = min(vocab - start, CHUNK)
                            for at in unroll(range(lane * 4, count, target.warp * 4 * UNROLL), 1):
                                values = chunk_lanes(x + start, at, count, aligned)
                                if any_within(values, value_of(low), value_of(top)):
                                    for j in static(range(4 * UNROLL)):
                                        value = values[j]
                                        if value >= value_of(low) and value <= value_of(top):
                                            part = i32((key_of(value) - low) >> shift)
                                            atomic_add(part_numbers + part, 1)
                                            if by_mass:
                                                # A 64-bit sum of 2**-40 units as two words with a carry.
                                                units = u64(relative_mass(value, high, inverse) * 1099511627776.0)
                                                old = atomic_add(part_low + part, u32(units))
                                                carry = where(old + u32(units) < old, u32(1), u32(0))
                                                atomic_add(part_high + part, u32(units >> 32) + carry)
                    barrier()
                    # From the largest part down.
                    part = PARTS - 1 - t
                    score = f64(part_numbers[part])
                    if by_mass:
                        score = f64((u64(part_high[part]) << 32) | u64(part_low[part])) * (2.0**-40)
                    part_scores[t] = score
                    score = warp_sum_f64(score)
                    if lane == 0:
                        warp_masses[warp] = score
                    barrier()
                    group, before_group, reached = find(warp_masses, warps, above, limit, True)
                    place, before_part, reached = find(part_scores + group * target.warp, target.warp, before_group, limit,
                                                 True)
                    above = before_part
                    part = PARTS - 1 - (group * target.warp + place)
                    number = i32(part_numbers[part])
                    low = low + (u32(part) << shift)
                    top = min(top, low + ((u32(1) << shift) - 1))
                    barrier()

                if number > 0 and number <= CANDIDATES:
                    if t == 0:
                        found_number[0] = 0
                    barrier()
                    listed = (u64(low) << 32) > bound
                    if listed:
                        for i in unroll(range(t, chunks * LIST, THREADS), 1):
                            order = order_at(mine + i // LIST * RECORD + LISTED, i % LIST)
                            key = u32(order >> 32)
                            if highs[i // LIST] >= LOWEST and key >= low and key <= top:
                                slot = atomic_add(found_number, 1)
                                if slot < CANDIDATES:
                                    keys[slot] = order
                    for chunk in unroll(range(warp, where(listed, 0, chunks), warps), 1):
                        if may_hold(mine + chunk * RECORD, highs[chunk], bases[chunk], depth, top_bin):
                            start = chunk * CHUNK
                            count = min(vocab - start, CHUNK)
                            for at in unroll(range(lane * 4, count, target.warp * 4 * UNROLL), 1):
                                values = chunk_lanes(x + start, at, count, aligned)
                                if any_within(values, value_of(low), value_of(top)):
                                    for j in unroll(range(4 * UNROLL), 1):
                                        id = start + place_of(at, j)
                                        value = value_at(x, id, start + count)
                                        if value >= value_of(low) and value <= value_of(top):
                                            slot = atomic_add(found_number, 1)
                                            if slot < CANDIDATES:
                                                keys[slot] = order_of(value, id)
                    barrier()
                    number = min(found_number[0], CANDIDATES)
                    if t < number:
                        order = keys[t]
                        rank = i32(0)
                        for j in unroll(range(number), 4):
                            rank += where(keys[j] > order, i32(1), i32(0))
                        sorted_keys[rank] = order
                        shares[rank] = where(by_mass, relative_mass(value_of(u32(order >> 32)), high, inverse), f32(1))
                    elif t < CANDIDATES:
                        shares[t] = 0.0
                    barrier()
                    # The shortest prefix that reaches the limit.
                    if warp < CANDIDATES // target.warp:
                        score = warp_sum_f64(f64(shares[t]))
                        if lane == 0:
                            warp_masses[warp] = score
                    barrier()
                    group, before_group, reached = find(warp_masses, CANDIDATES // target.warp, above, limit, True)
                    place, past, reached = find(shares + group * target.warp, target.warp, before_group, limit, True)
                    kept = larger(kept, sorted_keys[group * target.warp + place])
                if number > CANDIDATES:
                    # More equal logits than can be ordered: the first of them by id.
                    each = where(by_mass, f64(relative_mass(value_of(low), high, inverse)), f64(1))
                    left = (limit - above) / each
                    keep = i32(left)
                    keep = where(f64(keep) < left, keep + 1, keep)
                    keep = min(max(keep, 1), number)
                    for chunk in unroll(range(warp, chunks, warps), 1):
                        start = chunk * CHUNK
                        count = min(vocab - start, CHUNK)
                        equal = f64(0)
                        for at in unroll(range(lane * 4, count, target.warp * 4), 1):
                            values = four_at(x + start, at, count, aligned)
                            for value in static(values):
                                equal += where(key_of(value) == low, f64(1), f64(0))
                        equal = warp_sum_f64(equal)
                        if lane == 0:
                            weights[chunk] = equal
                    barrier()
                    goal = f64(keep) - 0.5
                    chunk, before, reached = find(weights, chunks, f64(0), goal, True)
                    start = chunk * CHUNK
                    values = four_at(x + start, t * 4, min(vocab - start, CHUNK), aligned)
                    equal = f32(0)
                    for value in static(values):
                        equal += where(key_of(value) == low, f32(1), f32(0))
                    shares[t] = equal
                    score = warp_sum_f64(f64(equal))
                    if lane == 0:
                        warp_masses[warp] = score
                    barrier()
                    group, before_group, reached = find(warp_masses, warps, before, goal, True)
                    place, before_thread, reached = find(shares + group * target.warp, target.warp, before_group, goal, True)
                    if t == group * target.warp + place:
                        missing = keep - i32(before_thread)
                        for c in static(range(4)):
                            if key_of(values[c]) == low:
                                missing -= 1
                                if missing == 0:
                                    result[0] = order_of(values[c], start + t * 4 + c)
                    barrier()
                    kept = larger(kept, result[0])

        # The first token in order of ids at which the kept mass passes a random part of all of it.
        goal = uniform(seed[row], u64(counter[row])) * total
        chunk, before, reached = find(weights, chunks, f64(0), goal, False)
        start = chunk * CHUNK
        count = min(vocab - start, CHUNK)
        values = four_at(x + start, t * 4, count, aligned)
        share = f32(0)
        for c in static(range(4)):
            if values[c] >= LOWEST and order_of(values[c], start + t * 4 + c) >= kept:
                share += relative_mass(values[c], high, inverse)
        barrier()
        shares[t] = share
        score = warp_sum_f64(f64(share))
        if lane == 0:
            warp_masses[warp] = score
        barrier()
        group, before_group, reached = find(warp_masses, warps, before, goal, False)
        place, before_thread, reached = find(shares + group * target.warp, target.warp, before_group, goal, False)
        thread = group * target.warp + place
        values = four_at(x + start, thread * 4, count, aligned)
        sum = before_thread + 0.0
        open = i32(1)
        for c in static(range(4)):
            id = start + thread * 4 + c
            if open != 0 and values[c] >= LOWEST and order_of(values[c], id) >= kept:
                token = id
                sum += f64(relative_mass(values[c], high, inverse))
                if sum > goal:
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
    """Both launches of the sampler on a GPU."""
    return [Variant("sample_scan", sample_scan_gpu, threads=SCAN_THREADS),
            Variant("sample_row", sample_row_gpu, threads=THREADS)]
