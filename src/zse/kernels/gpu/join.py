"""What a draft head reads beside each other, and its logits among the model's, on a GPU."""

from zse import kernel as zl
from zse.kernels.gpu import rows
from zse.kernels.join import Join

THREADS = 256


@zl.kernel
def join_gpu(p: Join):
    """Grid (rows,)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    x = p.x + zl.i64(zl.block_index(0)) * p.width
    out = p.out + (zl.i64(zl.block_index(0)) * p.stride + p.place)
    scratch = zl.shared_array(zl.f32, zl.target.threads // zl.target.warp) if p.NORM else None
    squares = zl.f32(0)
    if p.NORM:
        for k in range(zl.thread_index(), p.width, zl.target.threads):
            squares = zl.fma(x[k], x[k], squares)
    factor = rows.inverse_rms(rows.block_sum(squares, scratch), p.width, p.eps) if p.NORM else zl.f32(1)
    for k in range(zl.thread_index(), p.width, zl.target.threads):
        out[k] = zl.convert(x[k] * factor * p.weight[k] if p.NORM else x[k] + 0.0, p.T)


@zl.kernel
def spread_logits_gpu(
    x: zl.Ptr[zl.f32, "const"], ids: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.f32], width: zl.i32, vocab: zl.i32
):
    """Grid (chunks of the vocabulary, rows)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    row = zl.i64(zl.block_index(1))
    for k in range(
        zl.block_index(0) * zl.target.threads + zl.thread_index(), vocab, zl.num_blocks(0) * zl.target.threads
    ):
        own = ids[k]
        value = zl.f32(float("-inf"))
        if own >= 0:
            value = x[row * width + own]
        out[row * vocab + k] = value


def variants(target) -> list[zl.Variant]:
    types = {"f32": zl.f32, "bf16": zl.bf16}
    return [
        zl.Variant(f"join_{'norm_' if norm else ''}{out}", join_gpu, {"NORM": norm, "T": types[out]}, threads=THREADS)
        for out in types
        for norm in (False, True)
    ]


def spread_variants(target) -> list[zl.Variant]:
    return [zl.Variant("spread_logits", spread_logits_gpu, threads=THREADS)]
