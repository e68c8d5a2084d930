"""Gated activations of the feed-forward block: silu(gate) * up and gelu_tanh(gate) * up."""

from zse import kernel as zl
from zse.dtypes import ITEM_BYTES
from zse.kernels import gpu
from zse.kernels.op import Case, Cost, HostArray, Op, OutputSpec, Tolerance, cases_of, check, later, launcher, require
from zse.kernels.quantize import GROUP, fp8_output, int8_output, quantize_group
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args

CHUNK = 256  # columns of one block, so that the threads share the exponentials of a single row
KINDS = ("silu", "gelu_tanh")


@zl.inline
def activate(gate, KIND):
    """silu(g) = g / (1 + exp(-g)); gelu_tanh(g) = g / (1 + exp(-2 u)), u = sqrt(2 / pi) * (g + 0.044715 g^3): the
    identity 1 + tanh(u) = 2 / (1 + exp(-2 u)) saves the hyperbolic tangent (Hendrycks and Gimpel 2016, tanh form)."""
    exponent = (
        gate * -1.0
        if KIND == "silu"
        else gate * (gate * gate * (-2 * 0.7978845608028654 * 0.044715) + -2 * 0.7978845608028654)
    )
    return gate / (1.0 + zl.exp(exponent))


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
):
    """Grid (chunks of columns, rows); rows of gates and ups are `width` values, `stride` apart."""
    L = zl.target.lanes
    row = zl.block_index(1)
    first = zl.block_index(0) * CHUNK
    last = min(first + CHUNK, width)
    gate = gates + row * stride
    up = ups + row * stride
    at = row * width
    if INT8:
        # Two passes: the long chains of exp and division overlap only when no reduction stands between them.
        values = zl.local_array(zl.f32, CHUNK)
        for k in range(first, last, 2 * L):
            for i in zl.static(range(0, 2 * L, L)):
                zl.store(values + (k - first) + i, activate(zl.load(gate + k + i, L), KIND) * zl.load(up + k + i, L))
        for k in range(first, last, GROUP):
            group = [zl.load(values + (k - first) + i, L) for i in zl.static(range(0, GROUP, L))]
            quantize_group(group, q + at + k, scale + (at + k) // GROUP, total + (at + k) // GROUP)
    else:
        whole = first + (last - first) // L * L
        for k in range(first, whole, L):
            zl.store(out + at + k, activate(zl.load(gate + k, L), KIND) * zl.load(up + k, L))
        for k in range(whole, last):
            out[at + k] = activate(gate[k], KIND) * up[k]


def _sources(gate_up, out, kind: str, accepted: tuple[str, ...]) -> dict:
    """The kernels' arguments for what is read: joined as [M, 2F] (gate, then up), or a tuple of two [M, F], of the accepted
    dtypes."""
    require(kind in KINDS, f"gated: kind {kind!r}, expected one of {KINDS}")
    rows, width = out.shape
    if isinstance(gate_up, tuple) and not hasattr(gate_up, "dtype"):
        gate, up = gate_up
        check("gated gate", gate, accepted, rows, width)
        check("gated up", up, gate.dtype, rows, width)
        stride = width
    else:
        check("gated gate_up", gate_up, accepted, rows, 2 * width)
        half = ITEM_BYTES[gate_up.dtype] * width
        gate, up, stride = gate_up, gate_up._replace(offset=gate_up.offset + half), 2 * width
    return {"gates": gate, "ups": up, "stride": stride, "width": width}


def _gated(recorder, gate_up, out, kind: str) -> None:
    """gate_up f32 [M, 2F] (gate, then up), or a tuple of two [M, F] → out [M, F]: f32 Tensor, or int8 Activation (F a
    multiple of 32). kind: "silu" or "gelu_tanh"."""
    source = _sources(gate_up, out, kind, ("f32",))
    rows, width = out.shape
    grid = (-(-width // CHUNK), rows)
    if out.dtype == "int8":
        require(width % GROUP == 0, f"gated: width {width} is not a multiple of {GROUP}")
        args = Args(**source, out=None, q=out.q, scale=out.scale, total=out.sum)
        recorder.launch(f"gated_{kind}_int8", args, grid)
    else:
        recorder.launch(f"gated_{kind}_f32", Args(**source, out=out, q=None, scale=None, total=None), grid)


def _gated_gpu(recorder, gate_up, out, kind: str) -> None:
    """As on a CPU, but gate_up f32 or bf16, out a bf16 Tensor or Fp8Activation, F a multiple of 8."""
    source = _sources(gate_up, out, kind, ("f32", "bf16"))
    rows, width = out.shape
    require(width % 8 == 0, f"gated: width {width} is not a multiple of 8")
    symbol = f"gated_{kind}_{source['gates'].dtype}"
    if out.dtype == "fp8":
        args = Args(**source, q=out.q, scale=out.scale)
        recorder.launch(f"{symbol}_fp8_v{gpu.activation.row_vectors(width)}", args, (rows,))
    else:
        check("gated out", out, "bf16", rows, width)
        recorder.launch(f"{symbol}_bf16", Args(**source, out=out), (-(-width // gpu.activation.CHUNK), rows))


gated = launcher(cpu=_gated, gpu=_gated_gpu)


def _reference(gate_up, kind, out=None):

    values = gate_up.wide() if isinstance(gate_up, HostArray) else gate_up
    pair = values if isinstance(values, tuple) else np.split(values, 2, axis=1)
    gate, up = (np.asarray(part, np.float64) for part in pair)
    inner = gate if kind == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        return {"out": gate / (1 + np.exp(-inner)) * up}


def _gpu_cases(rng):
    near = Tolerance(1e-30, 2**-8, "the result is rounded to bf16")
    for kind in KINDS:
        for rows, width, form in (
            (1, 18944, "bf16"),
            (5, 40, "bf16"),
            (3, 1024, "fp8"),
            (2, 18944, "fp8"),
            (2, 20488, "fp8"),
        ):
            x = (rng.standard_normal((rows, 2 * width)) * 3).astype(np.float32)
            x[0, 0], x[-1, 1] = -100.0, 100.0
            out = OutputSpec((rows, width), "bf16", near) if form == "bf16" else fp8_output(rows, width, 2e-5)
            narrow = HostArray("bf16", pack.f32_to_bf16(x))
            pair = tuple(np.ascontiguousarray(part) for part in np.split(x, 2, axis=1))
            for name, gate_up in (("f32", x), ("bf16", narrow), ("pair", pair)):
                yield Case(f"{kind} {name} {form} {rows}x{width}", {"gate_up": gate_up}, {"out": out}, {"kind": kind})


def _cpu_cases(rng):
    near = Tolerance(1e-30, 2e-5, "an exponent of up to 88 is rounded to f32 before exp: 88 * 2**-24, twice for gelu")
    for kind in KINDS:
        for rows, width in ((1, 1536), (5, 33), (3, 7)):
            x = (rng.standard_normal((rows, 2 * width)) * 3).astype(np.float32)
            x[0, 0], x[-1, 1] = -100.0, 100.0  # exp saturates without a NaN
            yield Case(
                f"{kind} f32 {rows}x{width}",
                {"gate_up": x},
                {"out": OutputSpec((rows, width), "float32", near)},
                {"kind": kind},
            )
        x = (rng.standard_normal((3, 2 * 288)) * 3).astype(np.float32)
        yield Case(f"{kind} int8", {"gate_up": x}, {"out": int8_output(3, 288, 2e-5)}, {"kind": kind})
        pair = tuple((rng.standard_normal((3, 288)) * 3).astype(np.float32) for _ in range(2))
        yield Case(f"{kind} pair", {"gate_up": pair}, {"out": int8_output(3, 288, 2e-5)}, {"kind": kind})


def _cost(case: Case) -> Cost:
    rows, width = case.outputs["out"].shape
    out = case.outputs["out"]
    wide = 1 if out.int8 or out.fp8 else 2 if out.dtype == "bf16" else 4
    read = 4 if isinstance(case.inputs["gate_up"], HostArray) else 8
    return Cost(rows * width * (read + wide), rows * width * 20)


def _variants(target):
    return [
        zl.Variant(f"gated_{kind}_{form}", gated_rows, {"KIND": kind, "INT8": form == "int8"})
        for kind in KINDS
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
