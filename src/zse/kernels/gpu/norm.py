"""Residual add and RMSNorm of a row by one block; everything a thread needs is loaded before its first use."""

from zse.kernel import (
    Ptr,
    Variant,
    bf16,
    bitcast,
    block_index,
    convert,
    e4m3,
    f32,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    kernel,
    load,
    shared_array,
    static,
    store,
    target,
    thread_index,
    warp_max,
    warp_sum,
)
from zse.kernels.gpu.rows import (
    block_sum,
    fp8_scales,
    gathered,
    inverse_rms,
    largest_bits,
    magnitude_bits,
    square_sum,
    tree_sum,
)

THREADS = 512
VECTORS = (2, 4, 8)  # f32x4 per thread: rows of up to 4,096, 8,192 and 16,384 values
DELTAS = ("none", "add", "norm")
OUTS = ("none", "bf16", "fp8")


@kernel
def add_rmsnorm_row(
    x: Ptr[f32],
    delta: Ptr[f32, "const"],
    delta_weight: Ptr[f32, "const"],
    weight: Ptr[f32, "const"],
    out: Ptr[bf16],
    q: Ptr[e4m3],
    scale: Ptr[f32],
    width: i32,
    eps: f32,
    DELTA: static,
    OUT: static,
    V: static,
):
    """Grid (rows). width is a multiple of 8."""
    warps = target.threads // target.warp
    grid_launch_dependents()
    t = thread_index()
    row = i64(block_index(0))
    places = [(t + v * target.threads) * 4 for v in static(range(V))]
    xs = [f32.x(4)(0) for v in static(range(V))]
    ds = [f32.x(4)(0) for v in static(range(V))]
    ws = [f32.x(4)(0) for v in static(range(V))]
    dws = [f32.x(4)(0) for v in static(range(V))]
    # The weights of the norms are written by no kernel: they may be read before the wait, registers permitting.
    for v in static(range(V)):
        if places[v] < width:
            if OUT != "none" and V <= 4:
                ws[v] = load(weight + places[v], 4)
            if DELTA == "norm" and V <= 4:
                dws[v] = load(delta_weight + places[v], 4)
    grid_wait()
    for v in static(range(V)):
        if places[v] < width:
            xs[v] = load(x + row * width + places[v], 4)
            if DELTA != "none":
                ds[v] = load(delta + row * width + places[v], 4)

    if DELTA == "norm":
        factor = inverse_rms(block_sum(square_sum(ds), shared_array(f32, warps)), width, eps)
        for v in static(range(V)):
            if V > 4:
                if places[v] < width:
                    dws[v] = load(delta_weight + places[v], 4)
            ds[v] = ds[v] * factor * dws[v]
    if DELTA != "none":
        for v in static(range(V)):
            xs[v] = xs[v] + ds[v]
            if places[v] < width:
                store(x + row * width + places[v], xs[v])

    if OUT != "none":
        if V > 4:
            for v in static(range(V)):
                if places[v] < width:
                    ws[v] = load(weight + places[v], 4)
        sum = warp_sum(square_sum(xs))
        scratch = shared_array(f32, warps)
        if OUT == "bf16":
            inverse = inverse_rms(tree_sum(gathered(sum, scratch)), width, eps)
            for v in static(range(V)):
                if places[v] < width:
                    store(out + row * width + places[v], convert(xs[v] * inverse * ws[v], bf16))
        else:
            # The factor 1 / rms is common to the row, so both reductions share one barrier.
            top = i32(0)
            for v in static(range(V)):
                top = max(top, largest_bits(magnitude_bits(xs[v] * ws[v])))
            peaks = shared_array(i32, warps)
            top = warp_max(top)
            if t % target.warp == 0:
                peaks[t // target.warp] = top
            inverse = inverse_rms(tree_sum(gathered(sum, scratch)), width, eps)
            for w in static(range(warps)):
                top = max(top, peaks[w])
            unit, inverse_unit = fp8_scales(bitcast(top, f32) * inverse)
            for v in static(range(V)):
                if places[v] < width:
                    store(q + row * width + places[v], convert(xs[v] * inverse * ws[v] * inverse_unit, e4m3))
            if t == 0:
                scale[row] = unit


def norm_vectors(width: int) -> int:
    """The V of VECTORS for rows of `width` values; 0: they are too long."""
    return next((v for v in VECTORS if width <= v * 4 * THREADS), 0)


def norm_variants(target):
    """Every form of add_rmsnorm on a GPU."""
    return [
        Variant(
            f"add_rmsnorm_{adds}_{form}_v{vectors}",
            add_rmsnorm_row,
            {"DELTA": adds, "OUT": form, "V": vectors},
            threads=THREADS,
        )
        for adds in DELTAS
        for form in OUTS
        for vectors in VECTORS
        if not adds == form == "none"
    ]
