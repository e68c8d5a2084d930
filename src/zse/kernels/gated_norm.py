"""The norm behind a recurrent layer, with its gate: RMSNorm(x) * silu(z) (Gated DeltaNet, arXiv 2412.06464) or
RMSNorm(x * silu(z)) (Mamba-2, arXiv 2405.21060), over equal parts of a row."""

from itertools import product
from typing import Any

from zse import kernel as zl
from zse.kernels.columns import embed, source, wide
from zse.kernels.norm import inverse_rms
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, cases_of, check, later, launcher, require
from zse.kernels.quantize import GROUP, int8_output, quantize_group
from zse.kernels.runs import whole
from zse.lazy import numpy as np
from zse.runtime.args import Args

MAX_PART = 16384  # numbers that are normalized together
ACTIVATIONS = ("silu", "sigmoid")
ORDERS = {"norm_first": False, "gate_first": True}
OUTS = ("f32", "int8")


class GatedNormParams(zl.Record):
    """x, z f32, rows x_stride and z_stride apart, of parts * part numbers. weight f32 [part], or one for each part
    (weight_step = part, else 0)."""

    x: zl.Ptr[zl.f32, "const"]
    z: zl.Ptr[zl.f32, "const"]
    weight: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    q: zl.Ptr[zl.i8]
    scale: zl.Ptr[zl.f32]
    total: zl.Ptr[zl.f32]
    x_stride: zl.index
    z_stride: zl.index
    part: zl.index
    weight_step: zl.index
    eps: zl.f32
    ACTIVATION: zl.static
    GATE_FIRST: zl.static
    OUT: zl.static


@zl.inline
def gate_of(z, ACTIVATION):
    """silu(z) or sigmoid(z)."""
    if ACTIVATION == "silu":
        return z / (1.0 + zl.exp(z * -1.0))
    return 1.0 / (1.0 + zl.exp(z * -1.0))


@zl.inline
def result(p, values, z, weight, at, lanes, inverse):
    """`lanes` numbers of a part from `at` on."""
    normed = zl.load(values + at, lanes) * inverse * zl.load(weight + at, lanes)
    if p.GATE_FIRST:
        return normed
    return normed * gate_of(zl.load(z + at, lanes), p.ACTIVATION)


@zl.kernel
def gated_norm_part(p: GatedNormParams):
    """Grid (parts, tokens)."""
    L = zl.target.lanes
    index = zl.block_index(0)
    token = zl.block_index(1)
    x = p.x + token * p.x_stride + index * p.part
    z = p.z + token * p.z_stride + index * p.part
    weight = p.weight + index * p.weight_step
    place = (token * zl.num_blocks(0) + index) * p.part
    whole = p.part // L * L
    values = x
    if p.GATE_FIRST:
        gated = zl.local_array(zl.f32, MAX_PART)
        for i in range(0, whole, L):
            zl.store(gated + i, zl.load(x + i, L) * gate_of(zl.load(z + i, L), p.ACTIVATION))
        for i in range(whole, p.part):
            gated[i] = x[i] * gate_of(z[i], p.ACTIVATION)
        values = gated
    inverse = inverse_rms(values, p.part, p.eps)
    if p.OUT == "int8":
        for k in range(0, p.part, GROUP):
            group = [result(p, values, z, weight, k + i, L, inverse) for i in zl.static(range(0, GROUP, L))]
            at = place + k
            quantize_group(group, p.q + at, p.scale + at // GROUP, p.total + at // GROUP)
    else:
        for k in range(0, whole, L):
            zl.store(p.out + place + k, result(p, values, z, weight, k, L, inverse))
        for k in range(whole, p.part):
            zl.store(p.out + place + k, result(p, values, z, weight, k, 1, inverse))


def _gated_norm(
    recorder, x, z, weight, out, eps: float, groups: int = 1, gate_first: bool = False, activation: str = "silu"
) -> None:
    """out [M, W] = RMSNorm(x) * weight * activation(z), or with gate_first RMSNorm(x * activation(z)) * weight, over each
    of `groups` equal parts of a row.

    Args:
        x, z: f32 [M, W], Tensors or Columns.
        weight: f32 [W], or [W / groups] of every part.
        out: f32 Tensor, or int8 Activation (parts of a multiple of 32); on a GPU bf16. A part has at most MAX_PART numbers.
        activation: of ACTIVATIONS.
    """
    tokens, width = out.shape
    name, args = checked(x, z, weight, out, eps, groups, gate_first, activation)
    if out.dtype == "int8":
        require(args["part"] % GROUP == 0, f"gated_norm: parts of {args['part']} numbers are no multiple of {GROUP}")
        args |= dict(out=None, q=out.q, scale=out.scale, total=out.sum)
    else:
        check("gated_norm out", out, "f32", tokens, width)
        args |= dict(out=out, q=None, scale=None, total=None)
    recorder.launch(f"{name}_{out.dtype}", Args(**args), (groups, tokens))


def checked(x, z, weight, out, eps, groups, gate_first, activation) -> tuple[str, dict[str, Any]]:
    """(what a symbol begins with, the arguments of a kernel but its results)."""
    tokens, width = out.shape
    require(groups > 0 and width % groups == 0, f"gated_norm: {width} columns are no {groups} equal parts")
    part = width // groups
    require(part <= MAX_PART, f"gated_norm: parts of {part} numbers, at most {MAX_PART}")
    require(activation in ACTIVATIONS, f"gated_norm: activation {activation!r}, expected one of {ACTIVATIONS}")
    check("gated_norm weight", weight, "f32", width if weight.shape == (width,) else part)
    (x, x_stride), (z, z_stride) = (source(f"gated_norm {n}", v, tokens, width) for n, v in (("x", x), ("z", z)))
    args = dict(x=x, z=z, weight=weight, x_stride=x_stride, z_stride=z_stride, part=part, eps=float(eps))
    order = "gate_first" if gate_first else "norm_first"
    return f"gated_norm_{order}_{activation}", args | dict(weight_step=part if weight.shape == (width,) else 0)


gated_norm = launcher(cpu=_gated_norm, gpu=later("gpu.gated_norm", "record"))


def _reference(x, z, weight, eps, groups=1, gate_first=False, activation="silu", out=None):
    x, z = wide(x), wide(z)
    gate = 1 / (1 + np.exp(-z)) * (z if activation == "silu" else 1)
    parts = (x * gate if gate_first else x).reshape(len(x), groups, -1)
    parts = parts / np.sqrt((parts * parts).mean(axis=2, keepdims=True) + eps)
    normed = (parts * weight.astype(np.float64).reshape(-1, parts.shape[2])).reshape(x.shape)
    return {"out": normed if gate_first else normed * gate}


# (tokens, groups, numbers of a part, whether each part has a weight of its own)
SHAPES = ((1, 32, 128, False), (5, 8, 512, True), (2, 1, 3072, True), (3, 3, 40, False), (1, 2, 1056, True))


def _case(rng, order: str, activation: str, form: str, shape: tuple, beside: int = 0) -> Case:
    """beside: a number of a case; some have inputs that are columns."""
    near = Tolerance(1e-6, 2e-5, "f32 sums of a row in partial sums; an exponent of some units rounded before exp")
    tokens, groups, part, own = shape
    width = groups * part
    x, z = ((rng.standard_normal((tokens, width)) * 3).astype(np.float32) for _ in range(2))
    z[0, 0], z[-1, 1] = -100.0, 100.0  # exp saturates without a NaN
    inputs = {
        "x": embed(rng, x, 32, 16) if beside % 3 == 1 else x,
        "z": embed(rng, z, 0, 6 * beside) if beside % 2 else z,
        "weight": (1 + rng.standard_normal(width if own else part) / 4).astype(np.float32),
    }
    out = OutputSpec((tokens, width), "float32", near)
    if form == "int8":
        out = int8_output(tokens, width, 2e-5)
    elif form == "bf16":
        out = OutputSpec((tokens, width), "bf16", Tolerance(1e-6, 2**-8, "the result is rounded to bf16"))
    options = {"eps": 1e-5, "groups": groups, "gate_first": ORDERS[order], "activation": activation}
    return Case(f"{order} {activation} {form} {tokens}x{groups}x{part}", inputs, {"out": out}, options)


def _cases(rng, family="cpu"):
    for order, activation, form in product(ORDERS, ACTIVATIONS, {"cpu": OUTS, "gpu": ("bf16",)}[family]):
        odd = ((4, 2, 7, True),) if form == "f32" else ()
        for number, shape in enumerate((*SHAPES, *odd)):
            if form != "int8" or shape[2] % GROUP == 0:
                yield _case(rng, order, activation, form, shape, number)


def _sizes(rng):
    """Qwen3.5-9B's and Nemotron 3 Nano's on a CPU."""
    for tokens in (1, 512):
        for order, shape in (("norm_first", (tokens, 32, 128, False)), ("gate_first", (tokens, 8, 512, True))):
            case = _case(rng, order, "silu", "f32", shape)
            yield case, whole(_reference, case)


def _cost(case: Case) -> Cost:
    tokens, width = case.outputs["out"].shape
    out = 1 if case.outputs["out"].int8 else 2 if case.outputs["out"].dtype == "bf16" else 4
    return Cost(tokens * width * (8 + out), tokens * width * 20)


def forms():
    """(what a symbol begins with, static arguments) of every order and activation."""
    for (order, first), activation in product(ORDERS.items(), ACTIVATIONS):
        yield f"gated_norm_{order}_{activation}", {"ACTIVATION": activation, "GATE_FIRST": first}


def _variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"{name}_{out}", gated_norm_part, fixed | {"OUT": out}) for name, fixed in forms() for out in OUTS
    ]


GATED_NORM = Op(
    "gated_norm",
    _variants,
    gated_norm,
    _reference,
    _cases,
    _cost,
    later("gpu.gated_norm", "variants"),
    cases_of(cpu=_sizes, gpu=later("gpu.state_sizes", "gated_norm_sizes")),
)
