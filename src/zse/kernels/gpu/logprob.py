"""Log-probabilities of given tokens: one block is one row of logits."""

from zse.kernel import (
    Ptr,
    Variant,
    barrier,
    block_index,
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
    static,
    target,
    thread_index,
    u32,
    u64,
    warp_index,
    where,
)
from zse.kernels.gpu.sample_parts import block_best, four_at, id_of, inverse_of, order_of, relative_mass, warp_sum_f64
from zse.kernels.sample_parts import LOWEST, value_of

THREADS = 1024
UNROLL = 4


@kernel
def logprob_row_gpu(
    logits: Ptr[f32, "const"], targets: Ptr[i32, "const"], logprob: Ptr[f32], argmax: Ptr[i32], vocab: i32
):
    """Grid (rows)."""
    grid_launch_dependents()
    grid_wait()
    t = thread_index()
    row = block_index(0)
    x = logits + i64(row) * vocab
    aligned = vocab % 4 == 0
    best = f32(LOWEST)
    index = i32(0)
    for at in range(t * 4, vocab, THREADS * 4 * UNROLL):
        values = []
        for u in static(range(UNROLL)):
            values += four_at(x, at + u * THREADS * 4, vocab, aligned)
        for j in static(range(4 * UNROLL)):
            better = values[j] > best
            best = where(better, values[j], best)
            index = where(better, at + j // 4 * THREADS * 4 + j % 4, index)
    order = block_best(order_of(best, index), shared_array(u64, THREADS // target.warp))
    high = value_of(u32(order >> 32))
    mass = f64(0)
    for at in range(t * 4, vocab, THREADS * 4 * UNROLL):
        values = []
        for u in static(range(UNROLL)):
            values += four_at(x, at + u * THREADS * 4, vocab, aligned)
        part = f32(0)
        for j in static(range(4 * UNROLL)):
            part += relative_mass(values[j], high, inverse_of(f32(1)))
        mass += f64(part)
    mass = warp_sum_f64(mass)
    masses = shared_array(f64, THREADS // target.warp)
    if lane_index() == 0:
        masses[warp_index()] = mass
    barrier()
    if t == 0:
        total = f64(0)
        for w in range(THREADS // target.warp):
            total += masses[w]
        argmax[row] = id_of(order)
        logprob[row] = x[min(max(targets[row], 0), vocab - 1)] - high - log(f32(total))


def logprob_variants(target):
    return [Variant("logprob_rows", logprob_row_gpu, threads=THREADS)]
