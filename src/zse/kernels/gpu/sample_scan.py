"""First launch of the GPU sampler: biases and penalties, and a record of each chunk of the vocabulary."""

from zse.kernel import (
    Ptr,
    atomic_add,
    atomic_max,
    ballot,
    barrier,
    block_index,
    cast_ptr,
    f32,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    inline,
    kernel,
    lane_index,
    load,
    num_blocks,
    shared_array,
    shuffle,
    static,
    store,
    target,
    thread_index,
    u32,
    u64,
    unroll,
    warp_index,
    warp_sum,
    where,
)
from zse.kernels.gpu.rows import block_sum
from zse.kernels.gpu.sample_parts import (
    BASE,
    BEST,
    BINS,
    CHUNK,
    COUNTS,
    LIST,
    LISTED,
    MASS,
    MASSES,
    RAW_HIGH,
    RAW_SUM,
    RAW_TOP,
    RECORD,
    bin_of,
    block_best,
    four_at,
    history_place,
    inverse_of,
    is_filtered,
    is_greedy,
    lowest_bit,
    order_of,
    power_of_two,
    prefix_sum,
    relative_mass,
    scaling_exponent,
)
from zse.kernels.sample_parts import LOWEST, value_of

THREADS = 256
VALUES = CHUNK // THREADS
CANDIDATES = 512  # tokens that are put in order


@inline
def index_of(i, c):
    """Place in the chunk of this thread's value c of group i: neighbouring threads read neighbouring 16 bytes."""
    return (thread_index() + i * THREADS) * 4 + c


@inline
def chunk_values(x, count, aligned):
    """This thread's values of the chunk, a list in ascending order of place; minus infinity from count on."""
    values = []
    for i in static(range(VALUES // 4)):
        values += four_at(x, index_of(i, 0), count, aligned)
    return values


@inline
def best_of(values, first):
    """Order of the best of this thread's values; all ones where one is NaN."""
    best = values[0] + 0.0
    place = i32(0)
    broken = best != best
    for j in static(range(1, VALUES)):
        value = values[j]
        broken = broken or value != value
        better = value > best
        best = where(better, value, best)
        place = where(better, i32(j), place)
    id = first + (thread_index() + place // 4 * THREADS) * 4 + place % 4
    return where(broken, u64(0xFFFFFFFFFFFFFFFF), order_of(best, id))


@inline
def write_order(list, place, order):
    list[place * 2] = u32(order)
    list[place * 2 + 1] = u32(order >> 32)


@inline
def sort_into(candidates, total, wanted, list):
    """The best `wanted` of the candidates by counting, best first; 0 after the last finite one."""
    t = thread_index()
    for i in range(t, total, THREADS):
        mine = candidates[i]
        place = i32(0)
        for j in unroll(range(total), 4):
            place += where(candidates[j] > mine, i32(1), i32(0))
        if place < wanted:
            write_order(list, place, where(value_of(u32(mine >> 32)) >= LOWEST, mine, u64(0)))
    if t >= total and t < wanted:
        write_order(list, t, u64(0))


@inline
def write_best(values, best, first, wanted, list, bests, candidates, number):
    """The `wanted` best tokens of the chunk, at most LIST. The wanted-th best of the threads' best values bounds them from below; what
    passes it is at most VALUES a thread for `wanted` threads. number: i32 [1], bests: u64 [THREADS + 1]."""
    t = thread_index()
    bests[t] = best
    if t == 0:
        number[0] = 0
    barrier()
    rank = i32(0)
    for j in unroll(range(0, THREADS, 2), 8):
        pair = load(bests + j, 2)
        rank += where(pair[0] > best, i32(1), i32(0)) + where(pair[1] > best, i32(1), i32(0))
    if rank == wanted - 1:
        bests[THREADS] = best
    barrier()
    least = bests[THREADS]
    for j in static(range(VALUES)):
        order = order_of(values[j], first + index_of(j // 4, j % 4))
        if order >= least:
            candidates[atomic_add(number, 1)] = order
    barrier()
    sort_into(candidates, number[0], wanted, list)


@inline
def write_listed(values, best, inverse, counts, first, base, record, bests, candidates, number):
    """The LIST best tokens of the chunk and their bound: out of the first bins that hold so many together, or, where
    these are too many to put in order, as write_best finds them."""
    t = thread_index()
    lane = lane_index()
    if t == 0:
        number[0] = 0
    # Every warp for itself: the depth at which LIST is reached.
    cut = i32(0)
    total = i32(0)
    open = i32(1)
    running = i32(0)
    for start in static(range(0, BINS, target.warp)):
        here = i32(0)
        if start + lane < BINS:
            here = i32(counts[start + lane])
        sum = running + prefix_sum(here)
        reached = ballot(sum >= LIST)
        place = where(reached != 0, lowest_bit(reached), min(target.warp, BINS - start) - 1)
        until = shuffle(sum, place)
        if open != 0:
            cut = start + place
            total = until + 0
        open = where(reached != 0, 0, open)
        running = shuffle(sum, target.warp - 1)
    barrier()
    if total <= CANDIDATES:
        for j in static(range(VALUES)):
            if values[j] >= LOWEST and min(base - bin_of(values[j], inverse), BINS - 1) <= cut:
                candidates[atomic_add(number, 1)] = order_of(values[j], first + index_of(j // 4, j % 4))
        barrier()
        sort_into(candidates, number[0], LIST, record + LISTED)
    else:
        write_best(values, best, first, i32(LIST), record + LISTED, bests, candidates, number)


@kernel
def sample_scan_gpu(
    logits: Ptr[f32],
    temperature: Ptr[f32, "const"],
    top_k: Ptr[i32, "const"],
    top_p: Ptr[f32, "const"],
    min_p: Ptr[f32, "const"],
    repetition: Ptr[f32, "const"],
    presence: Ptr[f32, "const"],
    frequency: Ptr[f32, "const"],
    num_logprobs: Ptr[i32, "const"],
    history_row: Ptr[i32, "const"],
    history_len: Ptr[i32, "const"],
    prompt_len: Ptr[i32, "const"],
    bias_start: Ptr[i32, "const"],
    bias_ids: Ptr[i32, "const"],
    bias_values: Ptr[f32, "const"],
    history: Ptr[i32, "const"],
    page_table: Ptr[i32, "const"],
    records: Ptr[u32],
    vocab: i32,
    max_pages: i32,
    blocks_per_page: i32,
):
    """Grid (chunks, rows)."""
    grid_launch_dependents()
    grid_wait()
    t = thread_index()
    row = block_index(1)
    first = block_index(0) * CHUNK
    count = min(vocab - first, CHUNK)
    aligned = vocab % 4 == 0
    x = logits + (i64(row) * vocab + first)
    record = records + (i64(row) * num_blocks(0) + block_index(0)) * RECORD
    values = chunk_values(x, count, aligned)
    wanted = num_logprobs[row]
    heat = temperature[row]
    length = history_len[row]
    first_bias = bias_start[row]
    last_bias = bias_start[row + 1]
    orders = shared_array(u64, THREADS // target.warp)
    sums = shared_array(f32, THREADS // target.warp)

    mine = best_of(values, first)
    best = block_best(mine, orders)
    if wanted >= 0:
        raw_high = max(value_of(u32(best >> 32)), f32(LOWEST))
        total = f32(0)
        for value in static(values):
            total += relative_mass(value, raw_high, inverse_of(f32(1)))
        total = block_sum(total, sums)
        if t == 0:
            cast_ptr(record, f32)[RAW_HIGH] = raw_high
            cast_ptr(record, f32)[RAW_SUM] = total
    bests = shared_array(u64, THREADS + 2)
    candidates = shared_array(u64, CANDIDATES)
    number = shared_array(i32, 1)
    if wanted > 0:
        write_best(values, mine, first, wanted, record + RAW_TOP, bests, candidates, number)

    if last_bias > first_bias or length > 0:
        # 0: not seen, n + 1: seen, and n times in the reply.
        seen = shared_array(u32, CHUNK)
        for i in static(range(0, VALUES, 4)):
            store(seen + index_of(i // 4, 0), u32.x(4)(0))
        for j in range(first_bias + t, last_bias, THREADS):
            place = min(max(bias_ids[j], 0), vocab - 1) - first
            if place >= 0 and place < count:
                x[place] = x[place] + bias_values[j]
        barrier()
        said = prompt_len[row]
        line = i64(history_row[row])
        for position in range(t * 4, length, THREADS * 4):
            ids = load(history + history_place(page_table, line, position, max_pages, blocks_per_page), 4)
            for c in static(range(4)):
                place = ids[c] - first
                if position + c < length and place >= 0 and place < count:
                    atomic_max(seen + place, 1)
                    if position + c >= said:
                        atomic_add(seen + place, 1)
        barrier()
        changed = chunk_values(x, count, aligned)
        for j in static(range(VALUES)):
            place = index_of(j // 4, j % 4)
            times = seen[place]
            value = changed[j]
            if times > 0:
                value = where(value > 0.0, value / repetition[row], value * repetition[row])
                value = value - frequency[row] * f32(times - 1)
                value = where(times > 1, value - presence[row], value)
                if place < count:
                    x[place] = value
            values[j] = value
        mine = best_of(values, first)
        best = block_best(mine, orders)

    if t == 0:
        record[BEST] = u32(best)
        record[BEST + 1] = u32(best >> 32)
    if not is_greedy(heat, top_k[row]):
        high = max(value_of(u32(best >> 32)), f32(LOWEST))
        inverse = inverse_of(heat)
        base = bin_of(high, inverse)
        mass = f32(0)
        if is_filtered(top_k[row], top_p[row], min_p[row], vocab):
            counts = shared_array(u32, BINS)
            masses = shared_array(u32, BINS)
            if t < BINS:
                counts[t] = 0
                masses[t] = 0
            barrier()
            finite = i32(0)
            for j in static(range(VALUES)):
                each = relative_mass(values[j], high, inverse)
                mass += each
                if values[j] >= LOWEST:
                    depth = min(base - bin_of(values[j], inverse), BINS - 1)
                    finite += 1
                    if depth < BINS - 1:
                        units = min(each * power_of_two(scaling_exponent(depth)), 1048575.0)
                        atomic_add(counts + depth, 1)
                        atomic_add(masses + depth, u32(units + 0.5))
            # The last bin has most of the logits; its number is what the others leave.
            finite = warp_sum(finite)
            if lane_index() == 0:
                atomic_add(counts + BINS - 1, u32(finite))
            barrier()
            if warp_index() == 0:
                others = u32(0)
                for depth in range(t, BINS - 1, target.warp):
                    others += counts[depth]
                others = warp_sum(others)
                if t == 0:
                    counts[BINS - 1] = counts[BINS - 1] - others
            barrier()
            if t < BINS:
                record[COUNTS + t] = counts[t]
                record[MASSES + t] = masses[t]
            write_listed(values, mine, inverse, counts, first, base, record, bests, candidates, number)
        else:
            for value in static(values):
                mass += relative_mass(value, high, inverse)
        # `sums` was read before the barriers of the histogram, of the penalties or of nobody.
        barrier()
        mass = block_sum(mass, sums)
        if t == 0:
            cast_ptr(record, i32)[BASE] = base
            cast_ptr(record, f32)[MASS] = mass
