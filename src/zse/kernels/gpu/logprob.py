"""Log-probabilities of given tokens: one block is one row of logits."""

from zse import kernel as zl
from zse.kernels.gpu import sample_parts as parts
from zse.kernels.sample_kernels import LogprobRows
from zse.kernels.sample_parts import LOWEST, value_of

THREADS = 1024
UNROLL = 4


@zl.kernel
def logprob_row_gpu(p: LogprobRows):
    """Grid (rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    t = zl.thread_index()
    row = zl.block_index(0)
    x = p.logits + zl.i64(row) * p.vocab
    aligned = p.vocab % 4 == 0
    best = zl.f32(LOWEST)
    index = zl.i32(0)
    for at in range(t * 4, p.vocab, THREADS * 4 * UNROLL):
        values = []
        for u in zl.static(range(UNROLL)):
            values += parts.four_at(x, at + u * THREADS * 4, p.vocab, aligned)
        for j in zl.static(range(4 * UNROLL)):
            better = values[j] > best
            best = zl.where(better, values[j], best)
            index = zl.where(better, at + j // 4 * THREADS * 4 + j % 4, index)
    order = parts.block_best(parts.order_of(best, index), zl.shared_array(zl.u64, THREADS // zl.target.warp))
    high = value_of(zl.u32(order >> 32))
    mass = zl.f64(0)
    for at in range(t * 4, p.vocab, THREADS * 4 * UNROLL):
        values = []
        for u in zl.static(range(UNROLL)):
            values += parts.four_at(x, at + u * THREADS * 4, p.vocab, aligned)
        part = zl.f32(0)
        for j in zl.static(range(4 * UNROLL)):
            part += parts.relative_mass(values[j], high, parts.inverse_of(zl.f32(1)))
        mass += zl.f64(part)
    mass = parts.warp_sum_f64(mass)
    masses = zl.shared_array(zl.f64, THREADS // zl.target.warp)
    if zl.lane_index() == 0:
        masses[zl.warp_index()] = mass
    zl.barrier()
    if t == 0:
        total = zl.f64(0)
        for w in range(THREADS // zl.target.warp):
            total += masses[w]
        p.argmax[row] = parts.id_of(order)
        p.logprob[row] = x[min(max(p.targets[row], 0), p.vocab - 1)] - high - zl.log(zl.f32(total))


def logprob_variants(target):
    return [zl.Variant("logprob_rows", logprob_row_gpu, threads=THREADS)]
