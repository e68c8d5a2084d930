"""First launch of the GPU sampler: biases and penalties, and a record of each chunk of the vocabulary."""

from zse import kernel as zl
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
    Penalties,
    bin_of,
    block_best,
    four_at,
    history_at,
    inverse_of,
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


@zl.inline
def index_of(i, c):
    """Place in the chunk of this thread's value c of group i: neighbouring threads read neighbouring 16 bytes."""
    return (zl.thread_index() + i * THREADS) * 4 + c


@zl.inline
def chunk_values(x, count, aligned):
    """This thread's values of the chunk, a list in ascending order of place; minus infinity from count on."""
    values = []
    for i in zl.static(range(VALUES // 4)):
        values += four_at(x, index_of(i, 0), count, aligned)
    return values


@zl.inline
def best_of(values, first):
    """Order of the best of this thread's values; all ones where one is NaN."""
    best = values[0] + 0.0
    place = zl.i32(0)
    broken = best != best
    for j in zl.static(range(1, VALUES)):
        value = values[j]
        broken = broken or value != value
        better = value > best
        best = zl.where(better, value, best)
        place = zl.where(better, zl.i32(j), place)
    id = first + (zl.thread_index() + place // 4 * THREADS) * 4 + place % 4
    return zl.where(broken, zl.u64(0xFFFFFFFFFFFFFFFF), order_of(best, id))


@zl.inline
def write_order(list, place, order):
    list[place * 2] = zl.u32(order)
    list[place * 2 + 1] = zl.u32(order >> 32)


@zl.inline
def sort_into(candidates, total, wanted, list):
    """The best `wanted` of the candidates by counting, best first; 0 after the last finite one."""
    t = zl.thread_index()
    for i in range(t, total, THREADS):
        mine = candidates[i]
        place = zl.i32(0)
        for j in zl.unroll(range(total), 4):
            place += zl.where(candidates[j] > mine, zl.i32(1), zl.i32(0))
        if place < wanted:
            write_order(list, place, zl.where(value_of(zl.u32(mine >> 32)) >= LOWEST, mine, zl.u64(0)))
    if t >= total and t < wanted:
        write_order(list, t, zl.u64(0))


@zl.inline
def write_best(values, best, first, wanted, list, bests, candidates, number):
    """The `wanted` best tokens of the chunk, at most LIST. The wanted-th best of the threads' best values bounds them from below; what
    passes it is at most VALUES a thread for `wanted` threads. number: i32 [1], bests: u64 [THREADS + 1]."""
    t = zl.thread_index()
    bests[t] = best
    if t == 0:
        number[0] = 0
    zl.barrier()
    rank = zl.i32(0)
    for j in zl.unroll(range(0, THREADS, 2), 8):
        pair = zl.load(bests + j, 2)
        rank += zl.where(pair[0] > best, zl.i32(1), zl.i32(0)) + zl.where(pair[1] > best, zl.i32(1), zl.i32(0))
    if rank == wanted - 1:
        bests[THREADS] = best
    zl.barrier()
    least = bests[THREADS]
    for j in zl.static(range(VALUES)):
        order = order_of(values[j], first + index_of(j // 4, j % 4))
        if order >= least:
            candidates[zl.atomic_add(number, 1)] = order
    zl.barrier()
    sort_into(candidates, number[0], wanted, list)


@zl.inline
def write_listed(values, best, inverse, counts, first, base, record, bests, candidates, number):
    """The LIST best tokens of the chunk and their bound: out of the first bins that hold so many together, or, where
    these are too many to put in order, as write_best finds them."""
    t = zl.thread_index()
    lane = zl.lane_index()
    if t == 0:
        number[0] = 0
    # Every warp for itself: the depth at which LIST is reached.
    cut = zl.i32(0)
    total = zl.i32(0)
    open = zl.i32(1)
    running = zl.i32(0)
    for start in zl.static(range(0, BINS, zl.target.warp)):
        here = zl.i32(0)
        if start + lane < BINS:
            here = zl.i32(counts[start + lane])
        sum = running + prefix_sum(here)
        reached = zl.ballot(sum >= LIST)
        place = zl.where(reached != 0, lowest_bit(reached), min(zl.target.warp, BINS - start) - 1)
        until = zl.shuffle(sum, place)
        if open != 0:
            cut = start + place
            total = until + 0
        open = zl.where(reached != 0, 0, open)
        running = zl.shuffle(sum, zl.target.warp - 1)
    zl.barrier()
    if total <= CANDIDATES:
        for j in zl.static(range(VALUES)):
            if values[j] >= LOWEST and min(base - bin_of(values[j], inverse), BINS - 1) <= cut:
                candidates[zl.atomic_add(number, 1)] = order_of(values[j], first + index_of(j // 4, j % 4))
        zl.barrier()
        sort_into(candidates, number[0], LIST, record + LISTED)
    else:
        write_best(values, best, first, zl.i32(LIST), record + LISTED, bests, candidates, number)


@zl.inline
def penalize(values, x, first, count, aligned, row, p):
    """Apply biases and penalties to a chunk: to `values`, and to the logits x of what was said."""
    t = zl.thread_index()
    first_bias = p.bias_start[row]
    last_bias = p.bias_start[row + 1]
    length = p.history_len[row]
    # 0: not seen, n + 1: seen, and n times in the reply.
    seen = zl.shared_array(zl.u32, CHUNK)
    for i in zl.static(range(0, VALUES, 4)):
        zl.store(seen + index_of(i // 4, 0), zl.u32.x(4)(0))
    for j in range(first_bias + t, last_bias, THREADS):
        place = min(max(p.bias_ids[j], 0), p.vocab - 1) - first
        if place >= 0 and place < count:
            x[place] = x[place] + p.bias_values[j]
    zl.barrier()
    said = p.prompt_len[row]
    line = zl.i64(p.history_row[row])
    for position in range(t * 4, length, THREADS * 4):
        ids = zl.load(history_at(p, line, position), 4)
        for c in zl.static(range(4)):
            place = ids[c] - first
            if position + c < length and place >= 0 and place < count:
                zl.atomic_max(seen + place, 1)
                if position + c >= said:
                    zl.atomic_add(seen + place, 1)
    zl.barrier()
    changed = chunk_values(x, count, aligned)
    for j in zl.static(range(VALUES)):
        place = index_of(j // 4, j % 4)
        times = seen[place]
        value = changed[j]
        if times > 0:
            value = zl.where(value > 0.0, value / p.repetition[row], value * p.repetition[row])
            value = value - p.frequency[row] * zl.f32(times - 1)
            value = zl.where(times > 1, value - p.presence[row], value)
            if place < count:
                x[place] = value
        values[j] = value


@zl.inline
def histogram(values, high, inverse, base, record):
    """(mass of the chunk relative to its largest logit, numbers of tokens by depth), with the histogram in the record."""
    t = zl.thread_index()
    mass = zl.f32(0)
    counts = zl.shared_array(zl.u32, BINS)
    masses = zl.shared_array(zl.u32, BINS)
    if t < BINS:
        counts[t] = 0
        masses[t] = 0
    zl.barrier()
    finite = zl.i32(0)
    for j in zl.static(range(VALUES)):
        each = relative_mass(values[j], high, inverse)
        mass += each
        if values[j] >= LOWEST:
            depth = min(base - bin_of(values[j], inverse), BINS - 1)
            finite += 1
            if depth < BINS - 1:
                units = min(each * power_of_two(scaling_exponent(depth)), 1048575.0)
                zl.atomic_add(counts + depth, 1)
                zl.atomic_add(masses + depth, zl.u32(units + 0.5))
    # The last bin has most of the logits; its number is what the others leave.
    finite = zl.warp_sum(finite)
    if zl.lane_index() == 0:
        zl.atomic_add(counts + BINS - 1, zl.u32(finite))
    zl.barrier()
    if zl.warp_index() == 0:
        others = zl.u32(0)
        for depth in range(t, BINS - 1, zl.target.warp):
            others += counts[depth]
        others = zl.warp_sum(others)
        if t == 0:
            counts[BINS - 1] = counts[BINS - 1] - others
    zl.barrier()
    if t < BINS:
        record[COUNTS + t] = counts[t]
        record[MASSES + t] = masses[t]
    return mass, counts


@zl.kernel
def sample_scan_gpu(
    logits: zl.Ptr[zl.f32],
    temperature: zl.Ptr[zl.f32, "const"],
    top_k: zl.Ptr[zl.i32, "const"],
    filtered: zl.Ptr[zl.i32, "const"],
    repetition: zl.Ptr[zl.f32, "const"],
    presence: zl.Ptr[zl.f32, "const"],
    frequency: zl.Ptr[zl.f32, "const"],
    num_logprobs: zl.Ptr[zl.i32, "const"],
    history_row: zl.Ptr[zl.i32, "const"],
    history_len: zl.Ptr[zl.i32, "const"],
    prompt_len: zl.Ptr[zl.i32, "const"],
    bias_start: zl.Ptr[zl.i32, "const"],
    bias_ids: zl.Ptr[zl.i32, "const"],
    bias_values: zl.Ptr[zl.f32, "const"],
    history: zl.Ptr[zl.i32, "const"],
    page_table: zl.Ptr[zl.i32, "const"],
    records: zl.Ptr[zl.u32],
    vocab: zl.i32,
    max_pages: zl.i32,
    blocks_per_page: zl.i32,
):
    """Grid (chunks, rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t = zl.thread_index()
    row = zl.block_index(1)
    first = zl.block_index(0) * CHUNK
    count = min(vocab - first, CHUNK)
    aligned = vocab % 4 == 0
    x = logits + (zl.i64(row) * vocab + first)
    record = records + (zl.i64(row) * zl.num_blocks(0) + zl.block_index(0)) * RECORD
    values = chunk_values(x, count, aligned)
    wanted = num_logprobs[row]
    heat = temperature[row]
    orders = zl.shared_array(zl.u64, THREADS // zl.target.warp)
    sums = zl.shared_array(zl.f32, THREADS // zl.target.warp)

    mine = best_of(values, first)
    best = block_best(mine, orders)
    if wanted >= 0:
        raw_high = max(value_of(zl.u32(best >> 32)), zl.f32(LOWEST))
        total = zl.f32(0)
        for value in zl.static(values):
            total += relative_mass(value, raw_high, inverse_of(zl.f32(1)))
        total = block_sum(total, sums)
        if t == 0:
            zl.cast_ptr(record, zl.f32)[RAW_HIGH] = raw_high
            zl.cast_ptr(record, zl.f32)[RAW_SUM] = total
    bests = zl.shared_array(zl.u64, THREADS + 2)
    candidates = zl.shared_array(zl.u64, CANDIDATES)
    number = zl.shared_array(zl.i32, 1)
    if wanted > 0:
        write_best(values, mine, first, wanted, record + RAW_TOP, bests, candidates, number)

    if bias_start[row + 1] > bias_start[row] or history_len[row] > 0:
        weights = (repetition, presence, frequency, history_row, history_len, prompt_len)
        biases = (bias_start, bias_ids, bias_values)
        penalties = Penalties(*weights, *biases, history, page_table, vocab, max_pages, blocks_per_page)
        penalize(values, x, first, count, aligned, row, penalties)
        mine = best_of(values, first)
        best = block_best(mine, orders)

    if t == 0:
        record[BEST] = zl.u32(best)
        record[BEST + 1] = zl.u32(best >> 32)
    if not is_greedy(heat, top_k[row]):
        high = max(value_of(zl.u32(best >> 32)), zl.f32(LOWEST))
        inverse = inverse_of(heat)
        base = bin_of(high, inverse)
        mass = zl.f32(0)
        if filtered[row] != 0:
            found, counts = histogram(values, high, inverse, base, record)
            mass += found
            write_listed(values, mine, inverse, counts, first, base, record, bests, candidates, number)
        else:
            for value in zl.static(values):
                mass += relative_mass(value, high, inverse)
        # `sums` was read before the barriers of the histogram, of the penalties or of nobody.
        zl.barrier()
        mass = block_sum(mass, sums)
        if t == 0:
            zl.cast_ptr(record, zl.i32)[BASE] = base
            zl.cast_ptr(record, zl.f32)[MASS] = mass
