"""Residual add and norm: RMSNorm (Zhang and Sennrich 2019) with the post-norm of Gemma 3 on the addend, LayerNorm
without a bias (Cohere) or with one (BERT), or no norm where a product only wants the stream in its own form (OLMo
2)."""

from itertools import product

from zse import kernel as zl
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.quantize import GROUP, MANY_ROWS, fp8_args, fp8_output, int8_output, of_rows, quantize_group
from zse.lazy import numpy as np
from zse.runtime.args import Args
from zse.tensor import Fp8Activation, Routing

DELTAS = ("none", "add", "norm")
# stream: back to x itself.
OUTS = {"cpu": ("none", "f32", "int8", "int16", "stream"), "gpu": ("none", "bf16", "fp8", "stream")}
# norm → what its symbols are called, and which DELTAS stand before it.
NORMS = {
    "rms": ("add_rmsnorm", DELTAS),
    "layer": ("add_layernorm", ("none", "add")),
    "layer_bias": ("add_layernorm_bias", ("none", "add")),
    "none": ("add_convert", DELTAS[::2]),
}
STREAM_NORMS = {
    "rms": ("none",),
    "layer": ("none", "add"),
    "layer_bias": ("none", "add"),
}  # made in place, behind which DELTAS
GPU_THREADS = 512
VECTORS = (2, 4, 8)  # f32x4 per thread of a GPU: rows of up to 4,096, 8,192 and 16,384 values


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


@zl.inline
def row_mean(x, width):
    """The mean of one row."""
    L = zl.target.lanes
    sums = zl.f32.x(L)(0)
    whole = width // L * L
    for i in range(0, whole, L):
        sums += zl.load(x + i, L)
    tail = zl.f32(0)
    for i in range(whole, width):
        tail += x[i]
    return (zl.reduce_add(sums) + tail) / zl.f32(width)


@zl.inline
def inverse_deviation(x, width, eps, mean):
    """1 / sqrt(mean((x - mean)^2) + eps) of one row."""
    L = zl.target.lanes
    sums = zl.f32.x(L)(0)
    whole = width // L * L
    for i in range(0, whole, L):
        centred = zl.load(x + i, L) - mean
        sums = zl.fma(centred, centred, sums)
    tail = zl.f32(0)
    for i in range(whole, width):
        tail += (x[i] - mean) * (x[i] - mean)
    return 1.0 / zl.sqrt((zl.reduce_add(sums) + tail) / zl.f32(width) + eps)


@zl.inline
def normed(x, at, lanes, mean, inverse, weight, bias, NORM):
    """`lanes` values of the row x from `at` on, normalized."""
    value = zl.load(x + at, lanes)
    if NORM == "none":
        return value
    if NORM == "layer":
        return (value - mean) * inverse * zl.load(weight + at, lanes)
    if NORM == "layer_bias":
        return zl.fma((value - mean) * inverse, zl.load(weight + at, lanes), zl.load(bias + at, lanes))
    return value * inverse * zl.load(weight + at, lanes)


@zl.kernel
def add_rmsnorm_row(
    x: zl.Ptr[zl.f32],
    delta: zl.Ptr[zl.f32, "const"],
    delta_weight: zl.Ptr[zl.f32, "const"],
    weight: zl.Ptr[zl.f32, "const"],
    bias: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.f32],
    q: zl.Ptr[zl.i8],
    scale: zl.Ptr[zl.f32],
    total: zl.Ptr[zl.f32],
    low: zl.Ptr[zl.i8],
    width: zl.i64,
    eps: zl.f32,
    DELTA: zl.static,
    OUT: zl.static,
    NORM: zl.static,
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
    mean = None
    inverse = None
    if OUT != "none" and NORM == "rms":
        inverse = inverse_rms(xs, width, eps)
    if NORM == "layer" or NORM == "layer_bias":
        mean = row_mean(xs, width)
        inverse = inverse_deviation(xs, width, eps, mean)
    if OUT == "f32" or OUT == "stream":
        outs = xs if OUT == "stream" else out + row * width
        begin = zl.i64(0)
        for unroll, lanes in zl.static(spans(L)):
            end = begin + (width - begin) // (unroll * lanes) * (unroll * lanes)
            for i in range(begin, end, unroll * lanes):
                for u in zl.static(range(unroll)):
                    at = i + u * lanes
                    zl.store(outs + at, normed(xs, at, lanes, mean, inverse, weight, bias, NORM))
            begin = end
    if OUT == "int8" or OUT == "int16":
        for k in range(0, width, GROUP):
            values = [normed(xs, k + i, L, mean, inverse, weight, bias, NORM) for i in zl.static(range(0, GROUP, L))]
            place = row * width + k
            quantize_group(
                values,
                q + place,
                scale + place // GROUP,
                total + place // GROUP,
                low + place if OUT == "int16" else None,
            )


def add_rmsnorm(
    recorder,
    x,
    delta,
    delta_weight,
    weight,
    out,
    eps: float,
    norm: str = "rms",
    bias=None,
    in_place=False,
    routing=None,
) -> None:
    """x f32 [M, H] += delta f32 [M, H] (or rmsnorm(delta) * delta_weight f32 [H]); out = norm(x) * weight f32 [H].

    Args:
        delta: None: nothing is added.
        weight, out: both None: no norm follows. out is an f32 Tensor, an int8 or int16 Activation [M, H] (H a multiple of
            32); on a GPU a bf16 Tensor or Fp8Activation (H a multiple of 16, at most 16,384).
        norm: "rms"; "layer": (x - mean) / deviation, delta is only added; "none": out = x in its form, weight is None.
        bias: f32 [H], added at the end; of norm "layer" alone.
        in_place: x = norm(x) * weight, of norm "layer", or "rms" without delta; out is None.
        routing: on a GPU, with norm "rms": delta f32 [P, H] is a row a pair, and x += each token's sum of weight * delta
            over its experts (zse.kernels.combine).
    """
    rows, width = x.shape
    check("add_rmsnorm x", x, "f32", rows, width)
    if bias is not None:
        require(norm == "layer" and weight is not None, "add_rmsnorm: only a LayerNorm has a bias")
        check("add_rmsnorm bias", bias, "f32", width)
        norm = "layer_bias"
    name, deltas = NORMS[norm]
    wants = in_place or out is not None
    require(not in_place or (out is None and norm in STREAM_NORMS), f"add_rmsnorm: {norm} is not made in place")
    require((weight is None) == (not wants or norm == "none"), "add_rmsnorm: weight and out go together")
    require(delta is not None or wants, "add_rmsnorm: nothing to do without delta and out")
    require(delta_weight is None or delta is not None, "add_rmsnorm: delta_weight without delta")
    adds = "none"
    if delta is not None:
        check("add_rmsnorm delta", delta, "f32", rows if routing is None else routing.place.shape[0], width)
        adds = "add" if routing is None else "experts"
    if delta_weight is not None:
        check("add_rmsnorm delta_weight", delta_weight, "f32", width)
        adds = "norm"
    if weight is not None:
        check("add_rmsnorm weight", weight, "f32", width)
    if out is not None:
        require(tuple(out.shape) == (rows, width), f"add_rmsnorm: out has shape {tuple(out.shape)}, x {(rows, width)}")
    require(
        routing is None or (norm, delta_weight) == ("rms", None), "add_rmsnorm: experts are added before an RMSNorm"
    )
    deltas = STREAM_NORMS.get(norm, ()) if in_place else deltas
    require(not wants or adds in deltas or adds == "experts", f"{name}: delta {adds}, expected {' or '.join(deltas)}")
    if not wants:
        name = "add_rmsnorm"
    args = Args(x=x, delta=delta, delta_weight=delta_weight, weight=weight, bias=bias, width=width, eps=float(eps))
    form, targets = TARGETS[recorder.device.kernels](out, rows, width, norm)
    if in_place:
        form = form.replace("none", "stream")
    if routing is not None:
        targets |= dict(weights=routing.weights, place=routing.place, chosen=routing.ids.shape[1])
    recorder.launch(of_rows(recorder, f"{name}_{adds}_{form}", rows), Args(**args, **targets), (rows,))


def _cpu_target(out, rows: int, width: int, norm: str) -> tuple[str, dict]:
    """What ends a symbol, and the arguments for the result."""
    targets = dict.fromkeys(("out", "q", "scale", "total", "low"))
    if out is None:
        return "none", targets
    form = out.dtype if out.dtype in ("int8", "int16") else "f32"
    require(form == "f32" or width % GROUP == 0, f"add_rmsnorm: width {width} is not a multiple of {GROUP}")
    require(form != "f32" or norm != "none", "add_convert: x is f32 already")
    if form == "f32":
        return form, targets | {"out": out}
    return form, targets | {"q": out.q, "scale": out.scale, "total": out.sum, "low": out.low}


def _gpu_target(out, rows: int, width: int, norm: str) -> tuple[str, dict]:
    vectors = norm_vectors(width)
    require(width % 8 == 0 and vectors > 0, f"add_rmsnorm: width {width} is not a multiple of 8 up to 16,384")
    targets = dict.fromkeys(("out", *Fp8Activation._fields)) | {"has_sums": 0}
    if out is None:
        return f"none_v{vectors}", targets
    form = "fp8" if out.dtype == "fp8" else "bf16"
    require((norm, form) != ("layer_bias", "fp8"), "add_rmsnorm: a LayerNorm with a bias is not written as fp8")
    check("add_rmsnorm out", out, form, rows, width)
    return f"{form}_v{vectors}", targets | (fp8_args(out) if form == "fp8" else {"out": out})


TARGETS = {"cpu": _cpu_target, "gpu": _gpu_target}


def norm_vectors(width: int) -> int:
    """The V of VECTORS for rows of `width` values; 0: they are too long."""
    return next((v for v in VECTORS if width <= v * 4 * GPU_THREADS), 0)


def forms(outs: tuple[str, ...]):
    """(symbol, static arguments) of every form that there is, with the results `outs` of a kind of device."""
    for norm, (name, deltas) in NORMS.items():
        if norm == "rms" and "bf16" in outs:
            deltas = (*deltas, "experts")
        for adds, form in product(deltas, outs):
            # Nothing to do; only an addition, which is one without a norm; x itself.
            if form == "none" and (adds == "none" or norm != "rms") or (norm, form) == ("none", "f32"):
                continue
            # With a bias not as fp8, whose scale is found before the row's factor is known.
            if form == "stream" and adds not in STREAM_NORMS.get(norm, ()) or (norm, form) == ("layer_bias", "fp8"):
                continue
            yield f"{name}_{adds}_{form}", {"DELTA": adds, "OUT": form, "NORM": norm}


def _reference(x, delta, delta_weight, weight, eps, norm="rms", bias=None, in_place=False, out=None, routing=None):
    def rms(v):
        return v / np.sqrt((v * v).mean(axis=1, keepdims=True) + eps)

    total = np.asarray(x, np.float64)
    if delta is not None:
        addend = np.asarray(delta, np.float64)
        if routing is not None:
            addend = addend[routing.place].reshape(*routing.weights.shape, -1)
            addend = (addend * routing.weights.astype(np.float64)[:, :, None]).sum(axis=1)
        total = total + (addend if delta_weight is None else rms(addend) * delta_weight.astype(np.float64))
    result = {"x": total}
    if norm == "none":
        result["out"] = total
    elif weight is not None:
        centred = total - (total.mean(axis=1, keepdims=True) if norm == "layer" else 0)
        result["out"] = rms(centred) * weight.astype(np.float64) + (0 if bias is None else bias)
        if in_place:
            result = {"x": result["out"]}
    return result


# By kind of device: form → (rows, width) of cases.
SHAPES = {
    "cpu": {
        "none": ((2, 40),),
        "f32": ((1, 576), (3, 83), (2, 5)),
        "stream": ((1, 384), (3, 83)),
        "int8": ((1, 576), (5, 96)),
        "int16": ((3, 576),),
    },
    "gpu": {
        "none": ((2, 40),),
        "stream": ((1, 384), (5, 96)),
        "bf16": ((1, 3584), (5, 96), (3, 5128), (2, 16384)),
        "fp8": ((1, 3584), (4, 640), (2, 8192), (2, 12304), (MANY_ROWS + 1, 144)),
    },
}


def _cases(rng, family="cpu"):
    near = Tolerance(2e-6, 2e-6, "f32 sums of a row in 64 partial sums, then three roundings")
    rounded = Tolerance(2e-6, 2**-8, "the result is rounded to bf16")
    shaped = ((fixed, shape) for _, fixed in forms(OUTS[family]) for shape in SHAPES[family][fixed["OUT"]])
    for fixed, (rows, width) in shaped:
        norm, adds, form = fixed["NORM"], fixed["DELTA"], fixed["OUT"]
        # A mean that is not near 0 shows in a LayerNorm.
        x, delta = (rng.standard_normal((rows, width)).astype(np.float32) * 4 + 1 for _ in range(2))
        weights = [(1 + rng.standard_normal(width) / 4).astype(np.float32) for _ in range(2)]
        outputs = {"x": OutputSpec((rows, width), "float32", near, inout=x)}
        if form in ("int8", "int16"):
            outputs["out"] = int8_output(rows, width, 4e-6, dtype=form)
        elif form == "fp8":
            outputs["out"] = fp8_output(rows, width, 4e-6)
        elif form not in ("none", "stream"):
            outputs["out"] = OutputSpec((rows, width), *(("float32", near) if form == "f32" else ("bf16", rounded)))
        routing = None
        if adds == "experts":
            chosen = int(rng.integers(1, 9))
            ids, place = np.zeros((rows, chosen), np.int32), rng.permutation(rows * chosen).astype(np.int32)
            routing = Routing(ids, rng.random((rows, chosen)).astype(np.float32), place, place, ids, 1)
            delta = rng.standard_normal((rows * chosen, width)).astype(np.float32)
        options = {"eps": 1e-5, "norm": "layer" if norm == "layer_bias" else norm}
        if form in ("none", "stream"):
            is_stream = form == "stream"
            options = (
                options | {"eps": 1e-6, "out": None, "in_place": True} if is_stream else {"eps": 1e-6, "out": None}
            )
        yield Case(
            f"{norm} {adds} {form} {rows}x{width}",
            {
                "delta": None if adds == "none" else delta,
                "delta_weight": weights[0] if adds == "norm" else None,
                "weight": None if "none" in (form, norm) else weights[1],
                "bias": rng.standard_normal(width).astype(np.float32) if norm == "layer_bias" else None,
                "routing": routing,
            },
            outputs,
            options,
        )


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["x"].shape
    words = 2 + sum(case.inputs[name] is not None for name in ("delta",)) + ("out" in case.outputs)
    return Cost(rows * width * 4 * words, rows * width * 8)


def _variants(target):
    return [zl.Variant(symbol, add_rmsnorm_row, fixed) for symbol, fixed in forms(OUTS["cpu"])]


ADD_RMSNORM = Op("add_rmsnorm", _variants, add_rmsnorm, _reference, _cases, _cost, later("gpu.norm", "norm_variants"))
