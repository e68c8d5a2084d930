"""What attention gives, times the sigmoid of a gate (Qwen3-Next), which may stand behind each head's queries in the
product that gave both."""

from typing import Any

from zse import kernel as zl
from zse.kernels.columns import embed, source, wide
from zse.kernels.op import Case, Cost, HostArray, Op, OutputSpec, Tolerance, check, later, launcher, require
from zse.kernels.quantize import GROUP, int8_output, quantize_group
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args

CHUNK = 256  # columns of one block, so that the threads share the exponentials of a single row
OUTS = ("f32", "int8")


class GateParams(zl.Record):
    """x f32 [tokens, width]; gate f32, rows gate_stride apart: that of column c is number c + c // part * gap."""

    x: zl.Ptr[zl.f32, "const"]
    gate: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    q: zl.Ptr[zl.i8]
    scale: zl.Ptr[zl.f32]
    total: zl.Ptr[zl.f32]
    gate_stride: zl.index
    width: zl.index
    part: zl.index
    gap: zl.index
    OUT: zl.static


@zl.inline
def gated_at(p, x, gate, column, lanes):
    """`lanes` results from a column on, of one part."""
    z = zl.load(gate + (column + column // p.part * p.gap), lanes)
    return zl.load(x + column, lanes) / (1.0 + zl.exp(z * -1.0))


@zl.kernel
def gate_output_chunk(p: GateParams):
    """Grid (chunks of columns, tokens)."""
    L = zl.target.lanes
    token = zl.block_index(1)
    first = zl.block_index(0) * CHUNK
    last = min(first + CHUNK, p.width)
    x = p.x + token * p.width
    gate = p.gate + token * p.gate_stride
    place = token * p.width
    if p.OUT == "int8":
        for k in range(first, last, GROUP):
            group = [gated_at(p, x, gate, k + i, L) for i in zl.static(range(0, GROUP, L))]
            at = place + k
            quantize_group(group, p.q + at, p.scale + at // GROUP, p.total + at // GROUP)
    else:
        whole = first + (last - first) // L * L
        for k in range(first, whole, L):
            zl.store(p.out + place + k, gated_at(p, x, gate, k, L))
        for k in range(whole, last):
            zl.store(p.out + place + k, gated_at(p, x, gate, k, 1))


def _gate_output(recorder, x, gate, out, heads: int = 0) -> None:
    """out [M, W] = x * sigmoid(gate).

    Args:
        x: f32 [M, W]; on a GPU f32 or bf16.
        gate: f32 [M, W], a Tensor or Columns; with `heads` [M, 2 W], of each head W / heads columns that are not read,
            then its gate (W / heads a multiple of 16).
        out: f32 Tensor, or int8 Activation (W a multiple of 32); on a GPU bf16, W a multiple of 4.
    """
    tokens, width = out.shape
    args = checked(x, gate, out, heads, ("f32",))
    if out.dtype == "int8":
        require(width % GROUP == 0, f"gate_output: width {width} is not a multiple of {GROUP}")
        args |= dict(out=None, q=out.q, scale=out.scale, total=out.sum)
    else:
        check("gate_output out", out, "f32", tokens, width)
        args |= dict(out=out, q=None, scale=None, total=None)
    recorder.launch(f"gate_output_{out.dtype}", Args(**args), (-(-width // CHUNK), tokens))


def checked(x, gate, out, heads: int, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a kernel but its results. dtypes: of x."""
    tokens, width = out.shape
    check("gate_output x", x, dtypes, tokens, width)
    part, gap = width, 0
    if heads:
        require(width % (16 * heads) == 0, f"gate_output: {width} columns of {heads} heads are no multiples of 16")
        part = gap = width // heads
    gate, stride = source("gate_output gate", gate, tokens, 2 * width if heads else width)
    gate = gate._replace(offset=gate.offset + 4 * gap)
    return dict(x=x, gate=gate, gate_stride=stride, width=width, part=part, gap=gap)


gate_output = launcher(cpu=_gate_output, gpu=later("gpu.gate_output", "record"))


def _reference(x, gate, heads=0, out=None):
    gate = wide(gate)
    if heads:
        gate = gate.reshape(len(gate), heads, 2, -1)[:, :, 1].reshape(len(gate), -1)
    return {"out": (x.wide() if isinstance(x, HostArray) else x).astype(np.float64) / (1 + np.exp(-gate))}


def _cases(rng, family="cpu"):
    near = Tolerance(1e-30, 2e-5, "an exponent of up to 88 is rounded to f32 before exp: 88 * 2**-24")
    rounded = Tolerance(1e-30, 2**-8, "the result is rounded to bf16")
    for form in {"cpu": OUTS, "gpu": ("bf16",)}[family]:
        for number, (tokens, width, heads) in enumerate(
            ((1, 4096, 16), (5, 160, 2), (3, 1056, 0), (2, 576, 9), (4, 40 if family == "gpu" else 33, 0))
        ):
            if form == "int8" and width % GROUP:
                continue
            gate = (rng.standard_normal((tokens, 2 * width if heads else width)) * 3).astype(np.float32)
            gate[0, -1], gate[-1, -2] = -100.0, 100.0  # exp saturates without a NaN
            inputs = {
                "x": rng.standard_normal((tokens, width)).astype(np.float32),
                "gate": embed(rng, gate, 0, 64) if number % 2 else gate,
            }
            out = OutputSpec((tokens, width), "float32", near)
            if form != "f32":
                out = int8_output(tokens, width, 2e-5) if form == "int8" else OutputSpec(out.shape, "bf16", rounded)
            yield Case(f"{form} {tokens}x{width}, {heads} heads", inputs, {"out": out}, {"heads": heads})
            if form == "bf16":
                inputs = inputs | {"x": HostArray("bf16", pack.f32_to_bf16(inputs["x"]))}
                yield Case(f"bf16 x {tokens}x{width}, {heads} heads", inputs, {"out": out}, {"heads": heads})


def _cost(case: Case) -> Cost:
    tokens, width = case.outputs["out"].shape
    out = 1 if case.outputs["out"].int8 else 2 if case.outputs["out"].dtype == "bf16" else 4
    return Cost(tokens * width * (8 + out), tokens * width * 12)


GATE_OUTPUT = Op(
    "gate_output",
    lambda target: [zl.Variant(f"gate_output_{form}", gate_output_chunk, {"OUT": form}) for form in OUTS],
    gate_output,
    _reference,
    _cases,
    _cost,
    later("gpu.gate_output", "variants"),
)
