"""Residual add and RMSNorm of a row by one block; everything a thread needs is loaded before its first use."""

from zse import kernel as zl
from zse.kernels.gpu import rows
from zse.kernels.norm import GPU_THREADS, OUTS, VECTORS, forms
from zse.kernels.quantize import HAVE_MANY

TOGETHER = 4  # experts' rows that a thread has in flight


class NormParams(zl.Record):
    """The parameters of add_rmsnorm_row. width is a multiple of 8. PARTS: threads of GPU_THREADS that one stands for, whose
    sums it keeps apart, so that the bits are the same."""

    x: zl.Ptr[zl.f32]
    delta: zl.Ptr[zl.f32, "const"]
    delta_weight: zl.Ptr[zl.f32, "const"]
    weight: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.bf16]
    q: zl.Ptr[zl.e4m3]
    scale: zl.Ptr[zl.f32]
    sums: zl.Ptr[zl.f16]
    has_sums: zl.i32
    width: zl.i32
    eps: zl.f32
    DELTA: zl.static
    OUT: zl.static
    V: zl.static
    NORM: zl.static
    PARTS: zl.static


@zl.inline
def shifted(normed, place, p):
    """Four values with their bias."""
    if p.NORM == "layer_bias":
        return normed + zl.load(p.bias + place, 4)
    return normed


@zl.inline
def write_row(xs, ws, places, row, p):
    """The normed row as bf16, as f32 back to the stream, or as fp8 with its scale."""
    t = zl.thread_index()
    NORM, V, PARTS = p.NORM, p.V, p.PARTS
    warps = zl.target.threads // zl.target.warp
    parts = range(0 if NORM == "none" else PARTS)
    sums = [zl.warp_sum(rows.square_sum([xs[v] for v in zl.static(range(i, V, PARTS))])) for i in zl.static(parts)]
    scratch = None if NORM == "none" else zl.shared_array(zl.f32, warps * PARTS)
    if p.OUT == "bf16" or p.OUT == "stream":
        inverse = (
            None if NORM == "none" else rows.inverse_rms(rows.tree_sum(rows.gathered(sums, scratch)), p.width, p.eps)
        )
        for v in zl.static(range(V)):
            if places[v] < p.width:
                normed = shifted(xs[v] if NORM == "none" else xs[v] * inverse * ws[v], places[v], p)
                if p.OUT == "stream":
                    zl.store(p.x + row * p.width + places[v], normed)
                else:
                    zl.store(p.out + row * p.width + places[v], zl.convert(normed, zl.bf16))
    else:
        # The factor 1 / rms is common to the row, so both reductions share one barrier.
        top = zl.i32(0)
        for v in zl.static(range(V)):
            top = max(top, rows.largest_bits(rows.magnitude_bits(xs[v] if NORM == "none" else xs[v] * ws[v])))
        peaks = zl.shared_array(zl.i32, warps)
        top = zl.warp_max(top)
        if t % zl.target.warp == 0:
            peaks[t // zl.target.warp] = top
        if NORM == "none":
            zl.barrier()
            inverse = zl.f32(1)
        else:
            inverse = rows.inverse_rms(rows.tree_sum(rows.gathered(sums, scratch)), p.width, p.eps)
        for w in zl.static(range(warps)):
            top = max(top, peaks[w])
        unit, inverse_unit = rows.fp8_scales(zl.bitcast(top, zl.f32) * inverse)
        for v in zl.static(range(V)):
            normed = xs[v] if NORM == "none" else xs[v] * inverse * ws[v]
            rows.store_fp8(normed * inverse_unit, p.q, p.sums, p.has_sums, row, places[v], p.width)
        if t == 0:
            p.scale[row] = unit


class ExpertsNormParams(NormParams):
    """delta f32 [pairs, width], of which a row adds `chosen`: place[j] times weights[j]."""

    weights: zl.Ptr[zl.f32, "const"]
    place: zl.Ptr[zl.i32, "const"]
    chosen: zl.i32


@zl.inline
def add_experts(ds, places, row, p):
    """What a row adds of its experts, in their order."""
    for first in range(0, p.chosen, TOGETHER):
        at = [row * p.chosen + min(first + u, p.chosen - 1) for u in zl.static(range(TOGETHER))]
        factors = [p.weights[i] + 0.0 for i in at]
        starts = [zl.i64(p.place[i]) * p.width for i in at]
        for v in zl.static(range(p.V)):
            if places[v] < p.width:
                parts = [zl.load(p.delta + start + places[v], 4) for start in starts]
                for u in zl.static(range(TOGETHER)):
                    if first + u < p.chosen:
                        ds[v] = zl.fma(parts[u], zl.f32.x(4)(factors[u]), ds[v])


@zl.kernel
def add_rmsnorm_row(p: NormParams):
    """Grid (rows)."""
    add_and_norm(p)


@zl.kernel
def add_experts_row(p: ExpertsNormParams):
    """Likewise."""
    add_and_norm(p)


@zl.inline
def add_and_norm(p):
    """The body of a kernel."""
    DELTA, OUT, V, NORM = p.DELTA, p.OUT, p.V, p.NORM
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
        if places[v] < p.width:
            if OUT != "none" and NORM != "none" and V <= 4:
                ws[v] = zl.load(p.weight + places[v], 4)
            if DELTA == "norm" and V <= 4:
                dws[v] = zl.load(p.delta_weight + places[v], 4)
    zl.grid_wait()
    for v in zl.static(range(V)):
        if places[v] < p.width:
            xs[v] = zl.load(p.x + row * p.width + places[v], 4)
            if DELTA in ("add", "norm"):
                ds[v] = zl.load(p.delta + row * p.width + places[v], 4)

    if DELTA == "experts":
        add_experts(ds, places, row, p)
    if DELTA == "norm":
        factor = rows.inverse_rms(rows.block_sum(rows.square_sum(ds), zl.shared_array(zl.f32, warps)), p.width, p.eps)
        for v in zl.static(range(V)):
            if V > 4:
                if places[v] < p.width:
                    dws[v] = zl.load(p.delta_weight + places[v], 4)
            ds[v] = ds[v] * factor * dws[v]
    if DELTA != "none":
        for v in zl.static(range(V)):
            xs[v] = xs[v] + ds[v]
            if places[v] < p.width:
                zl.store(p.x + row * p.width + places[v], xs[v])

    if OUT != "none":
        if V > 4 and NORM != "none":
            for v in zl.static(range(V)):
                if places[v] < p.width:
                    ws[v] = zl.load(p.weight + places[v], 4)
        if NORM == "layer" or NORM == "layer_bias":
            mean = rows.block_sum(rows.value_sum(xs), zl.shared_array(zl.f32, warps)) / zl.f32(p.width)
            for v in zl.static(range(V)):
                if places[v] < p.width:
                    xs[v] = xs[v] - mean
        write_row(xs, ws, places, row, p)


def norm_variants(target):
    """Every form of add_rmsnorm on a GPU."""
    variants = [
        zl.Variant(
            f"{symbol}_v{vectors}",
            add_experts_row if fixed["DELTA"] == "experts" else add_rmsnorm_row,
            fixed | {"V": vectors, "PARTS": 1},
            threads=GPU_THREADS,
        )
        for symbol, fixed in forms(OUTS["gpu"])
        for vectors in VECTORS
    ]
    # Half of the threads have a quarter of the instructions less, and four rows are on a multiprocessor instead of two.
    many = next(variant for variant in variants if variant.symbol in HAVE_MANY)
    fixed = many.statics | {"V": 4, "PARTS": 2}
    return [*variants, zl.Variant(f"{many.symbol}_many", many.kernel, fixed, threads=GPU_THREADS // 2, min_blocks=4)]
