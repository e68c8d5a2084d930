"""Activations of the feed-forward block: act(gate) * up, or act(x) alone (BERT), and gpt-oss' clamped
g * sigmoid(1.702 g) * (u + 1), g = min(gate, 7), u = up within 7 of 0 (arXiv 2508.10925)."""

import math

from zse import kernel as zl
from zse.dtypes import ITEM_BYTES
from zse.kernels import gpu
from zse.kernels.op import Case, Cost, HostArray, Op, OutputSpec, Tolerance, cases_of, check, later, launcher, require
from zse.kernels.quantize import GROUP, int8_output, quantize_group
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args

CHUNK = 256  # columns of one block, so that the threads share the exponentials of a single row
KINDS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "tanh", "quick_gelu")
CLAMPED = "clamped"
GATED_KINDS = (*KINDS[:3], CLAMPED)
ALPHA, LIMIT = 1.702, 7.0
# symbol, static arguments → of a gate and a factor, of one input.
FORMS = tuple(
    (f"{'gated' if gated else 'unary'}_{kind}", kind, gated)
    for gated in (True, False)
    for kind in (GATED_KINDS if gated else KINDS)
)


@zl.inline
def normal_tail(x):
    """P(Z > |x|) of a standard normal Z: erfc by formula 7.1.26 of Abramowitz and Stegun (1964), 0.75e-7 absolute."""
    size = max(x, x * -1.0)
    t = 1.0 / (1.0 + size * (0.3275911 * 0.7071067811865476))
    p = t * (t * (t * (t * (t * 1.061405429 + -1.453152027) + 1.421413741) + -0.284496736) + 0.254829592)
    return p * zl.exp(x * x * -0.5) * 0.5


@zl.inline
def exponent_of(gate, KIND):
    """x of silu, gelu_tanh and quick_gelu as gate / (1 + exp(x))."""
    if KIND == "silu":
        return gate * -1.0
    if KIND == "quick_gelu":
        return gate * -ALPHA
    return gate * (gate * gate * (-2 * 0.7978845608028654 * 0.044715) + -2 * 0.7978845608028654)


@zl.inline
def activate(gate, KIND):
    """silu(g) = g / (1 + exp(-g)); gelu_tanh(g) = g / (1 + exp(-2 u)), u = sqrt(2 / pi) * (g + 0.044715 g^3): the
    identity 1 + tanh(u) = 2 / (1 + exp(-2 u)) saves the hyperbolic tangent (Hendrycks and Gimpel 2016, tanh form);
    quick_gelu(g) = g / (1 + exp(-1.702 g)), the sigmoid form; gelu(g) = g * P(Z < g), for g of either sign max(g, 0) -
    |g| * P(Z > |g|)."""
    if KIND == "gelu":
        return max(gate, 0.0) - max(gate, gate * -1.0) * normal_tail(gate)
    if KIND == "relu":
        return max(gate, 0.0)
    if KIND == "relu2":
        return max(gate, 0.0) * max(gate, 0.0)
    if KIND == "tanh":
        return zl.tanh(gate)
    exponent = exponent_of(gate, KIND)
    return gate / (1.0 + zl.exp(exponent))


@zl.inline
def clamped(gate, up):
    """The result of a gate and a factor."""
    low = min(gate, LIMIT)
    high = min(max(up, -LIMIT), LIMIT)
    return low / (1.0 + zl.exp(low * -ALPHA)) * (high + 1.0)


@zl.inline
def activated_at(gate, up, k, lanes, KIND, GATED):
    """act(gate) of `lanes` columns from k on, times `up` where it is gated."""
    if KIND == CLAMPED:
        return clamped(zl.load(gate + k, lanes), zl.load(up + k, lanes))
    if GATED:
        return activate(zl.load(gate + k, lanes), KIND) * zl.load(up + k, lanes)
    return activate(zl.load(gate + k, lanes), KIND)


@zl.kernel
def gated_rows(
    gates: zl.Ptr[zl.f32, "const"],
    ups: zl.Ptr[zl.f32, "const"],
    stride: zl.i64,
    out: zl.Ptr[zl.f32],
    q: zl.Ptr[zl.i8],
    scale: zl.Ptr[zl.f32],
    total: zl.Ptr[zl.f32],
    width: zl.i64,
    KIND: zl.static,
    INT8: zl.static,
    GATED: zl.static,
):
    """Grid (chunks of columns, rows); rows of gates and ups are `width` values, `stride` apart."""
    L = zl.target.lanes
    row = zl.block_index(1)
    first = zl.block_index(0) * CHUNK
    last = min(first + CHUNK, width)
    gate = gates + row * stride
    up = ups + row * stride if GATED else ups
    at = row * width
    if INT8:
        # Two passes: the long chains of exp and division overlap only when no reduction stands between them.
        values = zl.local_array(zl.f32, CHUNK)
        for k in range(first, last, 2 * L):
            for i in zl.static(range(0, 2 * L, L)):
                zl.store(values + (k - first) + i, activated_at(gate, up, k + i, L, KIND, GATED))
        for k in range(first, last, GROUP):
            group = [zl.load(values + (k - first) + i, L) for i in zl.static(range(0, GROUP, L))]
            quantize_group(group, q + at + k, scale + (at + k) // GROUP, total + (at + k) // GROUP)
    else:
        whole = first + (last - first) // L * L
        for k in range(first, whole, L):
            zl.store(out + at + k, activated_at(gate, up, k, L, KIND, GATED))
        for k in range(whole, last):
            zl.store(out + at + k, activated_at(gate, up, k, 1, KIND, GATED))


def _sources(gate_up, out, kind: str, accepted: tuple[str, ...]) -> tuple[str, dict]:
    """(what the symbol begins with, the kernels' arguments for what is read): joined as [M, 2F] (gate, then up), or a
    tuple of two [M, F], or of one that is not gated, of the accepted dtypes."""
    rows, width = out.shape
    is_tuple = isinstance(gate_up, tuple) and not hasattr(gate_up, "dtype")
    is_gated = not is_tuple or len(gate_up) == 2
    kinds = GATED_KINDS if is_gated else KINDS
    require(kind in kinds, f"gated: kind {kind!r}, expected one of {kinds}")
    if is_tuple:
        gate, up = (*gate_up, None)[:2]
        check("gated gate", gate, accepted, rows, width)
        if up is not None:
            check("gated up", up, gate.dtype, rows, width)
        stride = width
    else:
        check("gated gate_up", gate_up, accepted, rows, 2 * width)
        half = ITEM_BYTES[gate_up.dtype] * width
        gate, up, stride = gate_up, gate_up._replace(offset=gate_up.offset + half), 2 * width
    name = f"{'gated' if is_gated else 'unary'}_{kind}"
    return name, {"gates": gate, "ups": up, "stride": stride, "width": width}


def _gated(recorder, gate_up, out, kind: str) -> None:
    """gate_up f32 [M, 2F] (gate, then up), or a tuple of two [M, F], or of one, act() of which it is then alone → out
    [M, F]: f32 Tensor, or int8 Activation (F a multiple of 32). kind: of KINDS, of a gate one of GATED_KINDS."""
    name, source = _sources(gate_up, out, kind, ("f32",))
    rows, width = out.shape
    grid = (-(-width // CHUNK), rows)
    if out.dtype == "int8":
        require(width % GROUP == 0, f"gated: width {width} is not a multiple of {GROUP}")
        args = Args(**source, out=None, q=out.q, scale=out.scale, total=out.sum)
        recorder.launch(f"{name}_int8", args, grid)
    else:
        recorder.launch(f"{name}_f32", Args(**source, out=out, q=None, scale=None, total=None), grid)


def _gated_gpu(recorder, gate_up, out, kind: str) -> None:
    """As on a CPU, but gate_up f32 or bf16, out bf16, F a multiple of 8."""
    name, source = _sources(gate_up, out, kind, ("f32", "bf16"))
    rows, width = out.shape
    require(width % 8 == 0, f"gated: width {width} is not a multiple of 8")
    symbol = f"{name}_{source['gates'].dtype}"
    check("gated out", out, "bf16", rows, width)
    recorder.launch(f"{symbol}_bf16", Args(**source, out=out), (-(-width // gpu.activation.CHUNK), rows))


gated = launcher(cpu=_gated, gpu=_gated_gpu)


def _reference(gate_up, kind, out=None):
    values = gate_up.wide() if isinstance(gate_up, HostArray) else gate_up
    pair = values if isinstance(values, tuple) else np.split(values, 2, axis=1)
    gate, *up = (np.asarray(part.wide() if isinstance(part, HostArray) else part, np.float64) for part in pair)
    if kind == CLAMPED:
        gate, high = np.minimum(gate, LIMIT), np.clip(up[0], -LIMIT, LIMIT)
        return {"out": gate / (1 + np.exp(-ALPHA * gate)) * (high + 1)}
    if kind == "gelu":
        active = gate * 0.5 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    elif kind in ("relu", "relu2", "tanh"):
        active = np.tanh(gate) if kind == "tanh" else np.maximum(gate, 0) ** (2 if kind == "relu2" else 1)
    else:
        inner = (
            gate * {"silu": 1, "quick_gelu": ALPHA}[kind]
            if kind != "gelu_tanh"
            else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        )
        with np.errstate(over="ignore"):
            active = gate / (1 + np.exp(-inner))
    return {"out": active * up[0] if up else active}


def _near(kind: str, relative: float, reason: str) -> Tolerance:
    """gelu's tail is exact to 0.75e-7, times inputs and factors of up to 13 here, tanh's to some 1e-7 near 0."""
    return Tolerance({"gelu": 2e-5, "tanh": 1e-6}.get(kind, 1e-30), relative, reason)


def _gpu_cases(rng):
    for kind in (*KINDS, CLAMPED):
        near = _near(kind, 2**-8, "the result is rounded to bf16")
        for rows, width in ((1, 18944), (5, 40)):
            x = (rng.standard_normal((rows, 2 * width)) * 3).astype(np.float32)
            x[0, 0], x[-1, 1] = -100.0, 100.0
            out = OutputSpec((rows, width), "bf16", near)
            narrow = HostArray("bf16", pack.f32_to_bf16(x))
            pair = tuple(np.ascontiguousarray(part) for part in np.split(x, 2, axis=1))
            one = (pair[0],), (HostArray("bf16", pack.f32_to_bf16(pair[0])),)
            inputs = [("f32", x), ("bf16", narrow), ("pair", pair)] if kind in GATED_KINDS else []
            inputs += [("one", one[0]), ("one bf16", one[1])] if kind != CLAMPED else []
            for name, gate_up in inputs:
                yield Case(f"{kind} {name} {rows}x{width}", {"gate_up": gate_up}, {"out": out}, {"kind": kind})


def _cpu_cases(rng):
    reason = "an exponent of up to 88 is rounded to f32 before exp: 88 * 2**-24, twice for gelu"
    for kind in (*KINDS, CLAMPED):
        near = _near(kind, 2e-5, reason)
        is_gate = kind in GATED_KINDS
        for rows, width in ((1, 1536), (5, 33), (3, 7)):
            x = (rng.standard_normal((rows, 2 * width)) * 3).astype(np.float32)
            x[0, 0], x[-1, 1] = -100.0, 100.0  # exp saturates without a NaN
            one = (np.ascontiguousarray(x[:, :width]),)
            for name, gate_up in [("f32", x)] * is_gate + [("one", one)] * (kind != CLAMPED):
                output = OutputSpec((rows, width), "float32", near)
                yield Case(f"{kind} {name} {rows}x{width}", {"gate_up": gate_up}, {"out": output}, {"kind": kind})
        x = (rng.standard_normal((3, 2 * 288)) * 3).astype(np.float32)
        pair = tuple((rng.standard_normal((3, 288)) * 3).astype(np.float32) for _ in range(2))
        for name, gate_up in (("int8", x), ("pair", pair), ("one int8", pair[:1])):
            if kind != CLAMPED if len(gate_up) == 1 else is_gate:
                yield Case(f"{kind} {name}", {"gate_up": gate_up}, {"out": int8_output(3, 288, 2e-5)}, {"kind": kind})


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["out"].shape
    out, source = case.outputs["out"], case.inputs["gate_up"]
    wide = 1 if out.int8 else 2 if out.dtype == "bf16" else 4
    parts = source if isinstance(source, tuple) else (source, source)
    read = sum(2 if isinstance(part, HostArray) else 4 for part in parts)
    return Cost(rows * width * (read + wide), rows * width * 20)


def _variants(target):
    return [
        zl.Variant(f"{name}_{form}", gated_rows, {"KIND": kind, "INT8": form == "int8", "GATED": is_gated})
        for name, kind, is_gated in FORMS
        for form in ("f32", "int8")
    ]


GATED = Op(
    "gated",
    _variants,
    gated,
    _reference,
    cases_of(cpu=_cpu_cases, gpu=_gpu_cases),
    _cost,
    later("gpu.activation", "gated_variants"),
)
