"""First launch of the GPU sampler: biases and penalties, and a record of each chunk of the vocabulary."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu import sample_parts as parts
from zse.kernels.gpu.rows import block_sum
from zse.kernels.sample_parts import LOWEST, value_of

THREADS = 256
VALUES = parts.CHUNK // THREADS
CANDIDATES = 512  # tokens that are put in order


class Ordering(zl.Record):
    """Where a block puts tokens in order: u64 [THREADS + 1], u64 [CANDIDATES], i32 [1]."""

    bests: Any
    candidates: Any
    number: Any


class ScanParams(zl.Record):
    """The parameters of sample_scan_gpu; those that sample_row_gpu has as well are the same."""

    logits: zl.Ptr[zl.f32]
    temperature: zl.Ptr[zl.f32, "const"]
    top_k: zl.Ptr[zl.i32, "const"]
    filtered: zl.Ptr[zl.i32, "const"]
    repetition: zl.Ptr[zl.f32, "const"]
    presence: zl.Ptr[zl.f32, "const"]
    frequency: zl.Ptr[zl.f32, "const"]
    num_logprobs: zl.Ptr[zl.i32, "const"]
    history_row: zl.Ptr[zl.i32, "const"]
    history_len: zl.Ptr[zl.i32, "const"]
    prompt_len: zl.Ptr[zl.i32, "const"]
    bias_start: zl.Ptr[zl.i32, "const"]
    bias_ids: zl.Ptr[zl.i32, "const"]
    bias_values: zl.Ptr[zl.f32, "const"]
    history: zl.Ptr[zl.i32, "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    records: zl.Ptr[zl.u32]
    vocab: zl.i32
    max_pages: zl.i32
    blocks_per_page: zl.i32


@zl.inline
def index_of(i, c):
    """Place in the chunk of this thread's value c of group i: neighbouring threads read neighbouring 16 bytes."""
    return (zl.thread_index() + i * THREADS) * 4 + c


@zl.inline
def chunk_values(x, count, aligned):
    """This thread's values of the chunk, a list in ascending order of place; minus infinity from count on."""
    values = []
    for i in zl.static(range(VALUES // 4)):
        values += parts.four_at(x, index_of(i, 0), count, aligned)
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
    return zl.where(broken, zl.u64(0xFFFFFFFFFFFFFFFF), parts.order_of(best, id))


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
def write_best(values, best, first, wanted, list, ordering):
    """The `wanted` best tokens of the chunk, at most LIST. The wanted-th best of the threads' best values bounds them
    from below; what passes it is at most VALUES a thread for `wanted` threads."""
    t = zl.thread_index()
    ordering.bests[t] = best
    if t == 0:
        ordering.number[0] = 0
    zl.barrier()
    rank = zl.i32(0)
    for j in zl.unroll(range(0, THREADS, 2), 8):
        pair = zl.load(ordering.bests + j, 2)
        rank += zl.where(pair[0] > best, zl.i32(1), zl.i32(0)) + zl.where(pair[1] > best, zl.i32(1), zl.i32(0))
    if rank == wanted - 1:
        ordering.bests[THREADS] = best
    zl.barrier()
    least = ordering.bests[THREADS]
    for j in zl.static(range(VALUES)):
        order = parts.order_of(values[j], first + index_of(j // 4, j % 4))
        if order >= least:
            ordering.candidates[zl.atomic_add(ordering.number, 1)] = order
    zl.barrier()
    sort_into(ordering.candidates, ordering.number[0], wanted, list)


@zl.inline
def write_listed(values, best, inverse, counts, first, base, record, ordering):
    """The LIST best tokens of the chunk and their bound: out of the first bins that hold so many together, or, where
    these are too many to put in order, as write_best finds them."""
    t = zl.thread_index()
    lane = zl.lane_index()
    if t == 0:
        ordering.number[0] = 0
    # Every warp for itself: the depth at which LIST is reached.
    cut = zl.i32(0)
    total = zl.i32(0)
    open = zl.i32(1)
    running = zl.i32(0)
    for start in zl.static(range(0, parts.BINS, zl.target.warp)):
        here = zl.i32(0)
        if start + lane < parts.BINS:
            here = zl.i32(counts[start + lane])
        sum = running + parts.prefix_sum(here)
        reached = zl.ballot(sum >= parts.LIST)
        place = zl.where(reached != 0, parts.lowest_bit(reached), min(zl.target.warp, parts.BINS - start) - 1)
        until = zl.shuffle(sum, place)
        if open != 0:
            cut = start + place
            total = until + 0
        open = zl.where(reached != 0, 0, open)
        running = zl.shuffle(sum, zl.target.warp - 1)
    zl.barrier()
    if total <= CANDIDATES:
        for j in zl.static(range(VALUES)):
            if values[j] >= LOWEST and min(base - parts.bin_of(values[j], inverse), parts.BINS - 1) <= cut:
                ordering.candidates[zl.atomic_add(ordering.number, 1)] = parts.order_of(
                    values[j], first + index_of(j // 4, j % 4)
                )
        zl.barrier()
        sort_into(ordering.candidates, ordering.number[0], parts.LIST, record + parts.LISTED)
    else:
        write_best(values, best, first, zl.i32(parts.LIST), record + parts.LISTED, ordering)


@zl.inline
def penalize(values, x, first, count, aligned, row, p):
    """Apply biases and penalties to a chunk: to `values`, and to the logits x of what was said."""
    t = zl.thread_index()
    first_bias = p.bias_start[row]
    last_bias = p.bias_start[row + 1]
    length = p.history_len[row]
    # 0: not seen, n + 1: seen, and n times in the reply.
    seen = zl.shared_array(zl.u32, parts.CHUNK)
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
        ids = zl.load(parts.history_at(p, line, position), 4)
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
    """(mass of the chunk relative to its largest logit, numbers of tokens by depth), with the histogram in the
    record."""
    t = zl.thread_index()
    mass = zl.f32(0)
    counts = zl.shared_array(zl.u32, parts.BINS)
    masses = zl.shared_array(zl.u32, parts.BINS)
    if t < parts.BINS:
        counts[t] = 0
        masses[t] = 0
    zl.barrier()
    finite = zl.i32(0)
    for j in zl.static(range(VALUES)):
        each = parts.relative_mass(values[j], high, inverse)
        mass += each
        if values[j] >= LOWEST:
            depth = min(base - parts.bin_of(values[j], inverse), parts.BINS - 1)
            finite += 1
            if depth < parts.BINS - 1:
                units = min(each * parts.power_of_two(parts.scaling_exponent(depth)), 1048575.0)
                zl.atomic_add(counts + depth, 1)
                zl.atomic_add(masses + depth, zl.u32(units + 0.5))
    # The last bin has most of the logits; its number is what the others leave.
    finite = zl.warp_sum(finite)
    if zl.lane_index() == 0:
        zl.atomic_add(counts + parts.BINS - 1, zl.u32(finite))
    zl.barrier()
    if zl.warp_index() == 0:
        others = zl.u32(0)
        for depth in range(t, parts.BINS - 1, zl.target.warp):
            others += counts[depth]
        others = zl.warp_sum(others)
        if t == 0:
            counts[parts.BINS - 1] = counts[parts.BINS - 1] - others
    zl.barrier()
    if t < parts.BINS:
        record[parts.COUNTS + t] = counts[t]
        record[parts.MASSES + t] = masses[t]
    return mass, counts


@zl.kernel
def sample_scan_gpu(p: ScanParams):
    """Grid (chunks, rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t = zl.thread_index()
    row = zl.block_index(1)
    first = zl.block_index(0) * parts.CHUNK
    count = min(p.vocab - first, parts.CHUNK)
    aligned = p.vocab % 4 == 0
    x = p.logits + (zl.i64(row) * p.vocab + first)
    record = p.records + (zl.i64(row) * zl.num_blocks(0) + zl.block_index(0)) * parts.RECORD
    values = chunk_values(x, count, aligned)
    wanted = p.num_logprobs[row]
    heat = p.temperature[row]
    orders = zl.shared_array(zl.u64, THREADS // zl.target.warp)
    sums = zl.shared_array(zl.f32, THREADS // zl.target.warp)

    mine = best_of(values, first)
    best = parts.block_best(mine, orders)
    if wanted >= 0:
        raw_high = max(value_of(zl.u32(best >> 32)), zl.f32(LOWEST))
        total = zl.f32(0)
        for value in zl.static(values):
            total += parts.relative_mass(value, raw_high, parts.inverse_of(zl.f32(1)))
        total = block_sum(total, sums)
        if t == 0:
            zl.cast_ptr(record, zl.f32)[parts.RAW_HIGH] = raw_high
            zl.cast_ptr(record, zl.f32)[parts.RAW_SUM] = total
    bests = zl.shared_array(zl.u64, THREADS + 2)
    candidates = zl.shared_array(zl.u64, CANDIDATES)
    ordering = Ordering(bests, candidates, zl.shared_array(zl.i32, 1))
    if wanted > 0:
        write_best(values, mine, first, wanted, record + parts.RAW_TOP, ordering)

    if p.bias_start[row + 1] > p.bias_start[row] or p.history_len[row] > 0:
        penalize(values, x, first, count, aligned, row, p)
        mine = best_of(values, first)
        best = parts.block_best(mine, orders)

    if t == 0:
        record[parts.BEST] = zl.u32(best)
        record[parts.BEST + 1] = zl.u32(best >> 32)
    if not parts.is_greedy(heat, p.top_k[row]):
        high = max(value_of(zl.u32(best >> 32)), zl.f32(LOWEST))
        inverse = parts.inverse_of(heat)
        base = parts.bin_of(high, inverse)
        mass = zl.f32(0)
        if p.filtered[row] != 0:
            found, counts = histogram(values, high, inverse, base, record)
            mass += found
            write_listed(values, mine, inverse, counts, first, base, record, ordering)
        else:
            for value in zl.static(values):
                mass += parts.relative_mass(value, high, inverse)
        # `sums` was read before the barriers of the histogram, of the penalties or of nobody.
        zl.barrier()
        mass = block_sum(mass, sums)
        if t == 0:
            zl.cast_ptr(record, zl.i32)[parts.BASE] = base
            zl.cast_ptr(record, zl.f32)[parts.MASS] = mass
