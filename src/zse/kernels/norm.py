"""Residual add and RMSNorm (Zhang and Sennrich 2019), with the post-norm of Gemma 3 on the addend."""

from zse import kernel as zl
from zse.kernels.op import Case, Cost, Op, Output, Tolerance, check, later, on_gpu, require
from zse.kernels.quantize import GROUP, fp8_output, int8_output, quantize_group

DELTAS = ("none", "add", "norm")
OUTS = ("none", "f32", "int8", "int16")


@zl.inline
def spans(L):
    """How a row is walked: (vectors a step, lanes): four vectors, one vector, single values."""
    return ((4, L), (1, L), (1, 1))


@zl.inline
def inverse_rms(x, width, eps):
    """1 / sqrt(mean(x^2) + eps) of one row."""
    L = zl.target.lanes
    sums = [zl.f32.x(L)(0) for _ in range(4)]
    tail = zl.f32(0)
    start = zl.i64(0)
    for unroll, lanes in zl.static(spans(L)):
        stop = start + (width - start) // (unroll * lanes) * (unroll * lanes)
        for i in range(start, stop, unroll * lanes):
            for u in zl.static(range(unroll)):
                value = zl.load(x + i + u * lanes, lanes)
                if lanes == 1:
                    tail += value * value
                else:
                    sums[u] = zl.fma(value, value, sums[u])
        start = stop
    total = zl.reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail
    return 1.0 / zl.sqrt(total / zl.f32(width) + eps)


@zl.kernel
def add_rmsnorm_row(
    x: zl.Ptr[zl.f32],
    delta: zl.Ptr[zl.f32, "const"],
    delta_weight: zl.Ptr[zl.f32, "const"],
    weight: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.f32],
    q: zl.Ptr[zl.i8],
    scale: zl.Ptr[zl.f32],
    total: zl.Ptr[zl.f32],
    low: zl.Ptr[zl.i8],
    width: zl.i64,
    eps: zl.f32,
    DELTA: zl.static,
    OUT: zl.static,
):
    """One block is one row. With one row in the batch one thread does it all: two passes over a row in L1."""
    L = zl.target.lanes
    row = zl.block_index(0)
    xs = x + row * width
    if DELTA != "none":
        ds = delta + row * width
        if DELTA == "norm":
            factor = inverse_rms(ds, width, eps)
        start = zl.i64(0)
        for unroll, lanes in zl.static(spans(L)):
            stop = start + (width - start) // (unroll * lanes) * (unroll * lanes)
            for i in range(start, stop, unroll * lanes):
                for u in zl.static(range(unroll)):
                    at = i + u * lanes
                    if DELTA == "norm":
                        addend = zl.load(ds + at, lanes) * factor * zl.load(delta_weight + at, lanes)
                        zl.store(xs + at, zl.load(xs + at, lanes) + addend)
                    else:
                        zl.store(xs + at, zl.load(xs + at, lanes) + zl.load(ds + at, lanes))
            start = stop
    if OUT != "none":
        inverse = inverse_rms(xs, width, eps)
    if OUT == "f32":
        outs = out + row * width
        begin = zl.i64(0)
        for unroll, lanes in zl.static(spans(L)):
            end = begin + (width - begin) // (unroll * lanes) * (unroll * lanes)
            for i in range(begin, end, unroll * lanes):
                for u in zl.static(range(unroll)):
                    at = i + u * lanes
                    zl.store(outs + at, zl.load(xs + at, lanes) * inverse * zl.load(weight + at, lanes))
            begin = end
    if OUT == "int8" or OUT == "int16":
        for k in range(0, width, GROUP):
            values = [
                zl.load(xs + k + i, L) * inverse * zl.load(weight + k + i, L) for i in zl.static(range(0, GROUP, L))
            ]
            place = row * width + k
            quantize_group(
                values,
                q + place,
                scale + place // GROUP,
                total + place // GROUP,
                low + place if OUT == "int16" else None,
            )


def add_rmsnorm(recorder, x, delta, delta_weight, weight, out, eps: float) -> None:
    """x f32 [M, H] += delta f32 [M, H] (or rmsnorm(delta) * delta_weight f32 [H]); out = rmsnorm(x) * weight f32 [H].

    delta None: nothing is added. weight and out None: no norm follows. out: f32 Tensor, int8 or int16 Activation [M, H] (H a
    multiple of 32); on a GPU bf16 Tensor or Fp8Activation (H a multiple of 16, at most 16,384)."""
    rows, width = x.shape
    check("add_rmsnorm x", x, "f32", rows, width)
    require((weight is None) == (out is None), "add_rmsnorm: weight and out go together")
    require(delta is not None or out is not None, "add_rmsnorm: nothing to do without delta and out")
    require(delta_weight is None or delta is not None, "add_rmsnorm: delta_weight without delta")
    adds, form = "none", "none"
    if delta is not None:
        check("add_rmsnorm delta", delta, "f32", rows, width)
        adds = "add"
    if delta_weight is not None:
        check("add_rmsnorm delta_weight", delta_weight, "f32", width)
        adds = "norm"
    targets = [0, 0, 0, 0, 0]
    if out is not None:
        check("add_rmsnorm weight", weight, "f32", width)
        require(tuple(out.shape) == (rows, width), f"add_rmsnorm: out has shape {tuple(out.shape)}, x {(rows, width)}")
    addends = [
        x,
        0 if delta is None else delta,
        0 if delta_weight is None else delta_weight,
        0 if weight is None else weight,
    ]
    if on_gpu(recorder):
        from zse.kernels.gpu.norm import norm_vectors

        require(
            width % 8 == 0 and norm_vectors(width) > 0,
            f"add_rmsnorm: width {width} is not a multiple of 8 up to 16,384",
        )
        targets = [0, 0, 0]
        if out is not None:
            form = "fp8" if out.dtype == "fp8" else "bf16"
            check("add_rmsnorm out", out, form, rows, width)
            targets = [0, out.q, out.scale] if form == "fp8" else [out, 0, 0]
        recorder.launch(
            f"add_rmsnorm_{adds}_{form}_v{norm_vectors(width)}", [*addends, *targets, width, float(eps)], (rows,)
        )
        return
    if out is not None:
        form = out.dtype if out.dtype in ("int8", "int16") else "f32"
        require(form == "f32" or width % GROUP == 0, f"add_rmsnorm: width {width} is not a multiple of {GROUP}")
        targets = (
            [out, 0, 0, 0, 0] if form == "f32" else [0, out.q, out.scale, out.sum, out.low if form == "int16" else 0]
        )
    recorder.launch(f"add_rmsnorm_{adds}_{form}", [*addends, *targets, width, float(eps)], (rows,))


def _reference(x, delta, delta_weight, weight, eps, out=None):
    import numpy as np

    def rms(v):
        return v / np.sqrt((v * v).mean(axis=1, keepdims=True) + eps)

    total = np.asarray(x, np.float64)
    if delta is not None:
        addend = np.asarray(delta, np.float64)
        total = total + (addend if delta_weight is None else rms(addend) * delta_weight.astype(np.float64))
    result = {"x": total}
    if weight is not None:
        result["out"] = rms(total) * weight.astype(np.float64)
    return result


CPU_SHAPES = (
    ("none", 2, 40),
    ("f32", 1, 576),
    ("f32", 3, 83),
    ("f32", 2, 5),
    ("int8", 1, 576),
    ("int8", 5, 96),
    ("int16", 3, 576),
)
GPU_SHAPES = (
    ("none", 2, 40),
    ("bf16", 1, 3584),
    ("bf16", 5, 96),
    ("bf16", 3, 5128),
    ("bf16", 2, 16384),
    ("fp8", 1, 3584),
    ("fp8", 4, 640),
    ("fp8", 2, 8192),
    ("fp8", 2, 12304),
)


def _cases(rng, family="cpu"):
    import numpy as np

    near = Tolerance(2e-6, 2e-6, "f32 sums of a row in 64 partial sums, then three roundings")
    rounded = Tolerance(2e-6, 2**-8, "the result is rounded to bf16")
    for adds in DELTAS:
        for form, rows, width in CPU_SHAPES if family == "cpu" else GPU_SHAPES:
            if adds == form == "none":
                continue
            x, delta = (rng.standard_normal((rows, width)).astype(np.float32) * 4 for _ in range(2))
            weights = [(1 + rng.standard_normal(width) / 4).astype(np.float32) for _ in range(2)]
            outputs = {"x": Output((rows, width), "float32", near, inout=x)}
            if form in ("int8", "int16"):
                outputs["out"] = int8_output(rows, width, 4e-6, dtype=form)
            elif form == "fp8":
                outputs["out"] = fp8_output(rows, width, 4e-6)
            elif form == "f32":
                outputs["out"] = Output((rows, width), "float32", near)
            elif form == "bf16":
                outputs["out"] = Output((rows, width), "bf16", rounded)
            yield Case(
                f"{adds} {form} {rows}x{width}",
                {
                    "delta": None if adds == "none" else delta,
                    "delta_weight": weights[0] if adds == "norm" else None,
                    "weight": None if form == "none" else weights[1],
                },
                outputs,
                {"eps": 1e-5} if form != "none" else {"eps": 1e-6, "out": None},
            )


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["x"].shape
    words = 2 + sum(case.inputs[name] is not None for name in ("delta",)) + ("out" in case.outputs)
    return Cost(rows * width * 4 * words, rows * width * 8)


def _variants(target):
    return [
        zl.Variant(f"add_rmsnorm_{adds}_{form}", add_rmsnorm_row, {"DELTA": adds, "OUT": form})
        for adds in DELTAS
        for form in OUTS
        if not adds == form == "none"
    ]


ADD_RMSNORM = Op("add_rmsnorm", _variants, add_rmsnorm, _reference, _cases, _cost, later("gpu.norm", "norm_variants"))
