"""kernels/dense_search.py on a GPU: a warp has a row."""

from zse import kernel as zl
from zse.kernels.dense_search import GPU_THREADS, DenseSearch


@zl.kernel
def dense_search_gpu(p: DenseSearch):
    """Grid (groups of rows, a warp each; queries)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    warps = zl.target.threads // zl.target.warp
    row = zl.i64(zl.block_index(0)) * warps + zl.warp_index()
    total = zl.i32(0)
    if row < p.count:
        mine = p.rows + row * p.width
        query = p.queries + zl.i64(zl.block_index(1)) * p.width
        for k in range(zl.lane_index() * 16, zl.i32(p.width), zl.target.warp * 16):
            a = zl.load(mine + k, 16)
            b = zl.load(query + k, 16)
            for i in zl.static(range(16)):
                total += zl.i32(a[i]) * zl.i32(b[i])
    total = zl.warp_sum(total)
    if row < p.count and zl.lane_index() == 0:
        at = zl.block_index(1)
        p.out[zl.i64(at) * p.count + row] = zl.f32(total) * (p.scales[row] * p.factors[at])


def variants(target) -> list[zl.Variant]:
    return [zl.Variant("dense_search", dense_search_gpu, threads=GPU_THREADS)]
