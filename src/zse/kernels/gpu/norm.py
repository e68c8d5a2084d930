"""Residual add and RMSNorm of a row by one block; everything a thread needs is loaded before its first use."""

from zse import kernel as zl
from zse.kernels.gpu.rows import (
    block_sum,
    fp8_scales,
    gathered,
    inverse_rms,
    largest_bits,
    magnitude_bits,
    square_sum,
    tree_sum,
    value_sum,
)
from zse.kernels.norm import GPU_THREADS, OUTS, VECTORS, forms


@zl.kernel
def add_rmsnorm_row(
    x: zl.Ptr[zl.f32],
    delta: zl.Ptr[zl.f32, "const"],
    delta_weight: zl.Ptr[zl.f32, "const"],
    weight: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.bf16],
    q: zl.Ptr[zl.e4m3],
    scale: zl.Ptr[zl.f32],
    width: zl.i32,
    eps: zl.f32,
    DELTA: zl.static,
    OUT: zl.static,
    V: zl.static,
    NORM: zl.static,
):
    """Grid (rows). width is a multiple of 8."""
    warps = zl.target.threads // zl.target.warp
    zl.grid_launch_dependents()
    t = zl.thread_index()
    row = zl.i64(zl.block_index(0))
    places = [(t + v * zl.target.threads) * 4 for v in zl.static(range(V))]
    xs = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    ds = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    ws = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    dws = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    # The weights of the norms are written by no kernel: they may be read before the wait, registers permitting.
    for v in zl.static(range(V)):
        if places[v] < width:
            if OUT != "none" and NORM != "none" and V <= 4:
                ws[v] = zl.load(weight + places[v], 4)
            if DELTA == "norm" and V <= 4:
                dws[v] = zl.load(delta_weight + places[v], 4)
    zl.grid_wait()
    for v in zl.static(range(V)):
        if places[v] < width:
            xs[v] = zl.load(x + row * width + places[v], 4)
            if DELTA != "none":
                ds[v] = zl.load(delta + row * width + places[v], 4)

    if DELTA == "norm":
        factor = inverse_rms(block_sum(square_sum(ds), zl.shared_array(zl.f32, warps)), width, eps)
        for v in zl.static(range(V)):
            if V > 4:
                if places[v] < width:
                    dws[v] = zl.load(delta_weight + places[v], 4)
            ds[v] = ds[v] * factor * dws[v]
    if DELTA != "none":
        for v in zl.static(range(V)):
            xs[v] = xs[v] + ds[v]
            if places[v] < width:
                zl.store(x + row * width + places[v], xs[v])

    if OUT != "none":
        if V > 4 and NORM != "none":
            for v in zl.static(range(V)):
                if places[v] < width:
                    ws[v] = zl.load(weight + places[v], 4)
        if NORM == "layer":
            mean = block_sum(value_sum(xs), zl.shared_array(zl.f32, warps)) / zl.f32(width)
            for v in zl.static(range(V)):
                if places[v] < width:
                    xs[v] = xs[v] - mean
        sum = None if NORM == "none" else zl.warp_sum(square_sum(xs))
        scratch = None if NORM == "none" else zl.shared_array(zl.f32, warps)
        if OUT == "bf16":
            inverse = None if NORM == "none" else inverse_rms(tree_sum(gathered(sum, scratch)), width, eps)
            for v in zl.static(range(V)):
                if places[v] < width:
                    normed = xs[v] if NORM == "none" else xs[v] * inverse * ws[v]
                    zl.store(out + row * width + places[v], zl.convert(normed, zl.bf16))
        else:
            # The factor 1 / rms is common to the row, so both reductions share one barrier.
            top = zl.i32(0)
            for v in zl.static(range(V)):
                top = max(top, largest_bits(magnitude_bits(xs[v] if NORM == "none" else xs[v] * ws[v])))
            peaks = zl.shared_array(zl.i32, warps)
            top = zl.warp_max(top)
            if t % zl.target.warp == 0:
                peaks[t // zl.target.warp] = top
            if NORM == "none":
                zl.barrier()
                inverse = zl.f32(1)
            else:
                inverse = inverse_rms(tree_sum(gathered(sum, scratch)), width, eps)
            for w in zl.static(range(warps)):
                top = max(top, peaks[w])
            unit, inverse_unit = fp8_scales(zl.bitcast(top, zl.f32) * inverse)
            for v in zl.static(range(V)):
                if places[v] < width:
                    normed = xs[v] if NORM == "none" else xs[v] * inverse * ws[v]
                    zl.store(q + row * width + places[v], zl.convert(normed * inverse_unit, zl.e4m3))
            if t == 0:
                scale[row] = unit


def norm_variants(target):
    """Every form of add_rmsnorm on a GPU."""
    return [
        zl.Variant(f"{symbol}_v{vectors}", add_rmsnorm_row, fixed | {"V": vectors}, threads=GPU_THREADS)
        for symbol, fixed in forms(OUTS["gpu"])
        for vectors in VECTORS
    ]
