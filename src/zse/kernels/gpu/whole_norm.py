"""RMSNorm of q and k over all ranks' heads on a GPU (zse.kernels.whole_norm)."""

from zse import kernel as zl
from zse.kernels.whole_norm import CHUNK, SUMS, WholeNorm

THREADS = 256  # of a token's sums; a chunk is normalized by as many, four columns each


@zl.inline
def lane_squares(x, width):
    """Of the thread's columns."""
    sums = zl.f32.x(4)(0)
    for i in range(zl.thread_index() * 4, width, THREADS * 4):
        value = zl.load(x + i, 4)
        sums = zl.fma(value, value, sums)
    return zl.warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))


@zl.kernel
def head_squares_gpu(p: WholeNorm):
    """Grid (tokens)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    token = zl.i64(zl.block_index(0))
    warps = THREADS // zl.target.warp
    parts = zl.shared_array(zl.f32, 2 * warps)
    q = lane_squares(p.q + token * p.q_stride, p.q_width)
    k = lane_squares(p.k + token * p.k_stride, p.k_width)
    if zl.lane_index() == 0:
        parts[zl.warp_index()] = q
        parts[warps + zl.warp_index()] = k
    zl.barrier()
    t = zl.thread_index()
    if t < SUMS:
        total = zl.f32(0)
        if t < 2:
            for i in zl.static(range(warps)):
                total += parts[t * warps + i]
            total = total * p.share if t == 1 else total
        p.sums[token * SUMS + t] = total


@zl.inline
def scale_columns(row, weight, width, total, whole, eps):
    """The block's chunk of a row."""
    at = zl.block_index(0) * CHUNK + zl.thread_index() * 4
    if at < width:
        factor = zl.rsqrt(total / whole + eps)
        zl.store(row + at, zl.load(row + at, 4) * factor * zl.load(weight + at, 4))


@zl.kernel
def whole_norm_gpu(p: WholeNorm):
    """Grid (chunks of columns, tokens)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    token = zl.i64(zl.block_index(1))
    scale_columns(p.q + token * p.q_stride, p.q_norm, p.q_width, p.sums[token * SUMS], p.q_whole, p.eps)
    scale_columns(p.k + token * p.k_stride, p.k_norm, p.k_width, p.sums[token * SUMS + 1], p.k_whole, p.eps)


def square_variants(target) -> list[zl.Variant]:
    return [zl.Variant("head_squares", head_squares_gpu, threads=THREADS)]


def norm_variants(target) -> list[zl.Variant]:
    return [zl.Variant("whole_norm", whole_norm_gpu, threads=CHUNK // 4)]
