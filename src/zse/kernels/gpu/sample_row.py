"""Second launch of the GPU sampler: merges a row's chunks, bounds its kept set, draws."""

from zse.kernel import (
    Ptr,
    Variant,
    atomic_add,
    atomic_max,
    atomic_min,
    barrier,
    block_index,
    cast_ptr,
    exp,
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
    static,
    target,
    thread_index,
    u32,
    u64,
    warp_index,
    warp_sum,
    where,
)
from zse.kernels.gpu.sample_parts import (
    BASE,
    BEST,
    BINS,
    CHUNK,
    COUNTS,
    MASS,
    MASSES,
    MAX_CHUNKS,
    MAX_LOGPROBS,
    RAW_HIGH,
    RAW_SUM,
    RECORD,
    TOP_IDS,
    TOP_VALUES,
    bin_of,
    block_best,
    four_at,
    history_place,
    id_of,
    is_filtered,
    is_greedy,
    larger,
    order_of,
    power_of_two,
    relative_mass,
    scaling_exponent,
    walk,
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
def depth_of(value, top_bin, inverse):
    """The row's bin of a logit, counted from the largest logit's."""
    return min(top_bin - bin_of(value, inverse), BINS - 1)


@inline
def may_hold(record, high, base, depth, top_bin):
    """Whether a chunk can have logits in the row's bin `depth`."""
    mine = depth - (top_bin - base)
    known = record[COUNTS + min(max(mine, 0), BINS - 1)]
    return high > LOWEST and (depth == BINS - 1 or (mine >= 0 and known > 0))


@inline
def mass_before(record, depth, top_bin, base):
    """Mass of the chunk's logits above the row's bin `depth`, relative to the chunk's largest; one lane's part."""
    mass = f64(0)
    last = min(depth - (top_bin - base), BINS - 1)
    for mine in range(lane_index(), last, target.warp):
        mass += f64(f32(record[MASSES + mine]) * power_of_two(-scaling_exponent(mine)))
    return mass


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
    greedy = is_greedy(heat, top_k[row])

    highs = shared_array(f32, MAX_CHUNKS)
    bases = shared_array(i32, MAX_CHUNKS)
    weights = shared_array(f64, MAX_CHUNKS)         # mass of each chunk, relative to the row's largest logit
    orders = shared_array(u64, THREADS // target.warp)
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
    raw_high = f32(0)
    log_total = f32(0)
    if t < MAX_LOGPROBS:
        found_ids[t] = -1
        found_values[t] = 0.0
    if wanted >= 0:
        raw_best = f32(LOWEST)
        for chunk in range(chunks):
            raw_best = max(raw_best, cast_ptr(mine + chunk * RECORD, f32)[RAW_HIGH])
        raw_high = raw_best
        if t < chunks:
            weights[t] = f64(cast_ptr(own, f32)[RAW_SUM] * exp(cast_ptr(own, f32)[RAW_HIGH] - raw_high))
        barrier()
        total = f64(0)
        for chunk in range(chunks):
            total += weights[chunk]
        log_total = log(f32(total))
        # A chunk's list is in order: how many of it are better is found from its front.
        for i in range(t, chunks * wanted, THREADS):
            entry = mine + i // wanted * RECORD
            id = cast_ptr(entry, i32)[TOP_IDS + i % wanted]
            value = cast_ptr(entry, f32)[TOP_VALUES + i % wanted]
            if id >= 0:
                order = order_of(value, id)
                rank = i32(0)
                for chunk in range(chunks):
                    other = mine + chunk * RECORD
                    for k in range(wanted):
                        if order_of(cast_ptr(other, f32)[TOP_VALUES + k],
                                    cast_ptr(other, i32)[TOP_IDS + k]) <= order:
                            break
                        rank += 1
                if rank < wanted:
                    found_ids[rank] = id
                    found_values[rank] = value - raw_high - log_total
        barrier()

    if not greedy:
        inverse = 1.0 / heat
        aligned = vocab % 4 == 0
        counted = top_k[row] > 0 and top_k[row] < vocab
        limited = top_p[row] < 1.0
        filtered = is_filtered(top_k[row], top_p[row], min_p[row], vocab)
        top_bin = bin_of(high, inverse)
        kept = u64(0)                                # the kept set: order >= kept
        counts = shared_array(i32, BINS)             # of the row, by depth
        masses = shared_array(f64, BINS)
        if filtered:
            part_counts = shared_array(i32, THREADS)
            part_masses = shared_array(f64, THREADS)
            number = i32(0)
            mass = f64(0)
            depth = t % BINS
            for chunk in range(t // BINS, chunks, GROUPS):
                place = depth - (top_bin - bases[chunk])
                if highs[chunk] > LOWEST and place >= 0 and depth < BINS - 1:
                    record = mine + chunk * RECORD
                    number += i32(record[COUNTS + place])
                    share = f32(record[MASSES + place]) * power_of_two(-scaling_exponent(place))
                    mass += f64(share * exp((highs[chunk] - high) * inverse))
            part_counts[t] = number
            part_masses[t] = mass
            barrier()
            if t < BINS:
                for g in static(range(1, GROUPS)):
                    number += part_counts[t + g * BINS]
                    mass += part_masses[t + g * BINS]
                counts[t] = number
                masses[t] = mass
            if min_p[row] > 0.0:
                kept = u64(key_of(min(high + heat * log(min_p[row]), high))) << 32

        keys = shared_array(u64, CANDIDATES)
        sorted_keys = shared_array(u64, CANDIDATES)
        sorted_masses = shared_array(f32, THREADS)
        warp_masses = shared_array(f64, THREADS // target.warp)
        part_numbers = shared_array(u32, PARTS)
        part_low = shared_array(u32, PARTS)
        part_high = shared_array(u32, PARTS)
        words = shared_array(u32, 4)                 # number found, smallest and largest key, result
        result = shared_array(u64, 1)
        total = f64(0)
        # 0: top-k. 1: top-p of what is left. 2: the mass of each chunk for the draw.
        for stage in range(3):
            if stage == 2 or (stage == 1 and limited):
                edge = value_of(u32(kept >> 32))
                edge_depth = depth_of(edge, top_bin, inverse)
                barrier()
                for chunk in range(warp, chunks, THREADS // target.warp):
                    record = mine + chunk * RECORD
                    chunk_high = highs[chunk]
                    relative = exp((max(chunk_high, f32(LOWEST)) - high) * inverse)
                    mass = f64(0)
                    if kept == 0:
                        mass = f64(where(chunk_high > LOWEST, cast_ptr(record, f32)[MASS] * relative, f32(0)))
                    else:
                        if chunk_high > LOWEST:
                            mass = mass_before(record, edge_depth, top_bin, bases[chunk]) * f64(relative)
                            if may_hold(record, chunk_high, bases[chunk], edge_depth, top_bin):
                                start = chunk * CHUNK
                                count = min(vocab - start, CHUNK)
                                for at in range(lane * 4, count, target.warp * 4 * UNROLL):
                                    values = []
                                    for u in static(range(UNROLL)):
                                        values += four_at(x + start, at + u * target.warp * 4, count, aligned)
                                    for j in static(range(4 * UNROLL)):
                                        if values[j] > LOWEST:
                                            id = start + at + j // 4 * target.warp * 4 + j % 4
                                            if depth_of(values[j], top_bin, inverse) == edge_depth and \
                                                    order_of(values[j], id) >= kept:
                                                mass += f64(relative_mass(values[j], high, inverse))
                        mass = warp_sum_f64(mass)
                    if lane == 0:
                        weights[chunk] = mass
                barrier()
                total = f64(0)
                for chunk in range(chunks):
                    total += weights[chunk]

            if (stage == 0 and counted) or (stage == 1 and limited):
                by_mass = stage == 1
                count_limit = top_k[row]
                mass_limit = total * f64(top_p[row])
                # The bin that the limit falls into.
                above = i32(0)
                above_mass = f64(0)
                depth = i32(0)
                barrier()
                while depth < BINS - 1:
                    if by_mass and above_mass + masses[depth] >= mass_limit:
                        break
                    if not by_mass and above + counts[depth] >= count_limit:
                        break
                    above += counts[depth]
                    above_mass += masses[depth]
                    depth += 1
                low = u32(0)
                top = u32(0xFFFFFFFF)
                number = i32(0)
                searching = i32(1)
                while searching != 0:
                    barrier()
                    if t == 0:
                        words[0] = 0
                        words[1] = 0xFFFFFFFF
                        words[2] = 0
                    barrier()
                    for chunk in range(warp, chunks, THREADS // target.warp):
                        if may_hold(mine + chunk * RECORD, highs[chunk], bases[chunk], depth, top_bin):
                            start = chunk * CHUNK
                            count = min(vocab - start, CHUNK)
                            for at in range(lane * 4, count, target.warp * 4 * UNROLL):
                                values = []
                                for u in static(range(UNROLL)):
                                    values += four_at(x + start, at + u * target.warp * 4, count, aligned)
                                for j in static(range(4 * UNROLL)):
                                    key = key_of(values[j])
                                    if values[j] > LOWEST and key >= low and key <= top and \
                                            depth_of(values[j], top_bin, inverse) == depth:
                                        id = start + at + j // 4 * target.warp * 4 + j % 4
                                        slot = i32(atomic_add(words, 1))
                                        if slot < CANDIDATES:
                                            keys[slot] = order_of(values[j], id)
                                        atomic_min(words + 1, key)
                                        atomic_max(words + 2, key)
                    barrier()
                    number = i32(words[0])
                    low = words[1]
                    top = words[2]
                    if number <= CANDIDATES or low == top:
                        searching = 0
                    else:
                        shift = u32(0)
                        while ((top - low) >> shift) >= PARTS:
                            shift += 1
                        part_numbers[t] = 0
                        part_low[t] = 0
                        part_high[t] = 0
                        barrier()
                        for chunk in range(warp, chunks, THREADS // target.warp):
                            if may_hold(mine + chunk * RECORD, highs[chunk], bases[chunk], depth, top_bin):
                                start = chunk * CHUNK
                                count = min(vocab - start, CHUNK)
                                for at in range(lane * 4, count, target.warp * 4 * UNROLL):
                                    values = []
                                    for u in static(range(UNROLL)):
                                        values += four_at(x + start, at + u * target.warp * 4, count, aligned)
                                    for j in static(range(4 * UNROLL)):
                                        key = key_of(values[j])
                                        if values[j] > LOWEST and key >= low and key <= top and \
                                                depth_of(values[j], top_bin, inverse) == depth:
                                            part = i32((key - low) >> shift)
                                            atomic_add(part_numbers + part, 1)
                                            # A 64-bit sum of 2**-40 units as two words with a carry.
                                            units = u64(relative_mass(values[j], high, inverse) * 1099511627776.0)
                                            old = atomic_add(part_low + part, u32(units))
                                            carry = where(old + u32(units) < old, u32(1), u32(0))
                                            atomic_add(part_high + part, u32(units >> 32) + carry)
                        barrier()
                        # From the largest part down: which group of 32, then which part of it.
                        part = PARTS - 1 - t
                        part_mass = f64((u64(part_high[part]) << 32) | u64(part_low[part])) * (2.0**-40)
                        group_mass = warp_sum_f64(part_mass)
                        group_count = warp_sum(i32(part_numbers[part]))
                        if lane == 0:
                            warp_masses[warp] = group_mass
                            sorted_masses[warp] = f32(group_count)
                        barrier()
                        group = i32(0)
                        while group < THREADS // target.warp - 1:
                            if by_mass and above_mass + warp_masses[group] >= mass_limit:
                                break
                            if not by_mass and above + i32(sorted_masses[group]) >= count_limit:
                                break
                            above_mass += warp_masses[group]
                            above += i32(sorted_masses[group])
                            group += 1
                        part = PARTS - 1 - group * target.warp
                        last = part - target.warp + 1
                        while part > last:
                            part_mass = f64((u64(part_high[part]) << 32) | u64(part_low[part])) * (2.0**-40)
                            if by_mass and above_mass + part_mass >= mass_limit:
                                break
                            if not by_mass and above + i32(part_numbers[part]) >= count_limit:
                                break
                            above_mass += part_mass
                            above += i32(part_numbers[part])
                            part -= 1
                        low = low + (u32(part) << shift)
                        top = min(top, low + ((u32(1) << shift) - 1))

                if number <= CANDIDATES:
                    if t < number:
                        order = keys[t]
                        rank = i32(0)
                        for j in range(number):
                            rank += where(keys[j] > order, i32(1), i32(0))
                        sorted_keys[rank] = order
                        sorted_masses[rank] = relative_mass(value_of(u32(order >> 32)), high, inverse)
                    elif t < CANDIDATES:
                        sorted_masses[t] = 0.0
                    barrier()
                    # The shortest prefix that reaches the limit.
                    last = min(count_limit - above - 1, number - 1)
                    if by_mass:
                        if warp < CANDIDATES // target.warp:
                            share = warp_sum(sorted_masses[t])
                            if lane == 0:
                                warp_masses[warp] = f64(share)
                        barrier()
                        group = i32(0)
                        while group < CANDIDATES // target.warp - 1:
                            if above_mass + warp_masses[group] >= mass_limit:
                                break
                            above_mass += warp_masses[group]
                            group += 1
                        last = group * target.warp
                        stop = min(last + target.warp, number) - 1
                        while last < stop:
                            above_mass += f64(sorted_masses[last])
                            if above_mass >= mass_limit:
                                break
                            last += 1
                        last = min(last, number - 1)
                    if number > 0:
                        kept = larger(kept, sorted_keys[max(last, 0)])
                else:
                    # More equal logits than can be ordered: the first `keep` by id.
                    keep = count_limit - above
                    if by_mass:
                        each = f64(relative_mass(value_of(low), high, inverse))
                        left = (mass_limit - above_mass) / each
                        keep = i32(left)
                        keep = where(f64(keep) < left, keep + 1, keep)
                    keep = min(max(keep, 1), number)
                    for chunk in range(warp, chunks, THREADS // target.warp):
                        start = chunk * CHUNK
                        count = min(vocab - start, CHUNK)
                        equal = i32(0)
                        for at in range(lane * 4, count, target.warp * 4):
                            values = four_at(x + start, at, count, aligned)
                            for value in static(values):
                                equal += where(key_of(value) == low, i32(1), i32(0))
                        equal = warp_sum(equal)
                        if lane == 0:
                            weights[chunk] = f64(equal)
                    barrier()
                    goal = f64(keep) - 0.5
                    chunk, before = walk(weights, chunks, f64(0), goal)
                    start = chunk * CHUNK
                    values = four_at(x + start, t * 4, min(vocab - start, CHUNK), aligned)
                    equal = f32(0)
                    for value in static(values):
                        equal += where(key_of(value) == low, f32(1), f32(0))
                    sorted_masses[t] = equal
                    equal = warp_sum(equal)
                    if lane == 0:
                        warp_masses[warp] = f64(equal)
                    barrier()
                    group, before_group = walk(warp_masses, THREADS // target.warp, before, goal)
                    thread, before_thread = walk(sorted_masses + group * target.warp, target.warp, before_group, goal)
                    thread = group * target.warp + thread
                    if t == thread:
                        left = keep - i32(before_thread)
                        for c in static(range(4)):
                            if key_of(values[c]) == low:
                                left -= 1
                                if left == 0:
                                    result[0] = order_of(values[c], start + t * 4 + c)
                    barrier()
                    kept = larger(kept, result[0])

        # The first token in order of ids at which the kept mass passes a random part of all of it.
        goal = uniform(seed[row], u64(counter[row])) * total
        chunk, before = walk(weights, chunks, f64(0), goal)
        start = chunk * CHUNK
        count = min(vocab - start, CHUNK)
        values = four_at(x + start, t * 4, count, aligned)
        share = f32(0)
        for c in static(range(4)):
            if values[c] > LOWEST and order_of(values[c], start + t * 4 + c) >= kept:
                share += relative_mass(values[c], high, inverse)
        barrier()
        sorted_masses[t] = share
        share = warp_sum(share)
        if lane == 0:
            warp_masses[warp] = f64(share)
        barrier()
        group, before_group = walk(warp_masses, THREADS // target.warp, before, goal)
        thread, before_thread = walk(sorted_masses + group * target.warp, target.warp, before_group, goal)
        thread = group * target.warp + thread
        values = four_at(x + start, thread * 4, count, aligned)
        sum = before_thread + 0.0
        open = i32(1)
        for c in static(range(4)):
            id = start + thread * 4 + c
            if open != 0 and values[c] > LOWEST and order_of(values[c], id) >= kept:
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
        for position in range(t, history_len[row], THREADS):
            if history[history_place(page_table, i64(history_row[row]), position, max_pages, blocks_per_page)] == token:
                atomic_max(times, 1)
                if position >= prompt_len[row]:
                    atomic_add(times, 1)
        for j in range(bias_start[row] + t, bias_start[row + 1], THREADS):
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
