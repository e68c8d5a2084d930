"""Rows, or their RMSNorms, among the columns of a wider matrix: what a draft head reads beside each other."""

from zse import kernel as zl
from zse.kernels.norm import inverse_rms
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.lazy import numpy as np
from zse.runtime.args import Args

OUTS = {"cpu": ("f32",), "gpu": ("f32", "bf16")}


class Join(zl.Record):
    """Parameters of join: rows of `width` numbers go to columns from `place` on of rows of `stride`."""

    x: zl.Ptr[zl.f32, "const"]
    weight: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr["T"]
    width: zl.index
    place: zl.index
    stride: zl.index
    eps: zl.f32
    NORM: zl.static
    T: zl.static


@zl.kernel
def join_row(p: Join):
    """Grid (rows,)."""
    L = zl.target.lanes
    x = p.x + zl.block_index(0) * p.width
    out = p.out + (zl.block_index(0) * p.stride + p.place)
    factor = inverse_rms(x, p.width, p.eps) if p.NORM else zl.f32(1)
    whole = p.width // L * L
    for k in range(0, whole, L):
        value = zl.load(x + k, L)
        zl.store(out + k, value * factor * zl.load(p.weight + k, L) if p.NORM else value)
    for k in range(whole, p.width):
        out[k] = x[k] * factor * p.weight[k] if p.NORM else x[k]


def join(recorder, x, weight, out, first: int, eps: float) -> None:
    """out [M, S], columns `first` to first + W = x f32 [M, W], or rmsnorm(x) * weight f32 [W] where there is one. out f32, on
    a GPU also bf16."""
    rows, width = x.shape
    check("join x", x, "f32", rows, width)
    check("join out", out, OUTS[recorder.device.kernels], rows, None)
    stride = out.shape[1]
    require(0 <= first <= stride - width, f"join: columns {first} to {first + width} of {stride}")
    if weight is not None:
        check("join weight", weight, "f32", width)
    symbol = f"join_{'norm_' if weight is not None else ''}{out.dtype}"
    args = Args(x=x, weight=weight, out=out, width=width, place=first, stride=stride, eps=float(eps))
    recorder.launch(symbol, args, (rows,))


def _reference(x, weight, first, eps, out=None):
    values = np.asarray(x, np.float64)
    if weight is not None:
        values = values / np.sqrt((values * values).mean(axis=1, keepdims=True) + eps) * weight.astype(np.float64)
    if out is None:
        return {"out": values}
    result = np.asarray(out, np.float64).copy()
    result[:, first : first + x.shape[1]] = values
    return {"out": result}


def _cases(rng, family="cpu"):
    for rows, width, first, stride in ((1, 4096, 4096, 8192), (3, 83, 5, 101), (2, 96, 0, 96), (5, 37, 74, 111)):
        for dtype in OUTS[family]:
            for norm in (True, False):
                x = (rng.standard_normal((rows, width)) * 4 + 1).astype(np.float32)
                weight = (1 + rng.standard_normal(width) / 4).astype(np.float32) if norm else None
                near = Tolerance(2e-6, 4e-6, "a norm whose squares are summed in f32, then two roundings")
                before = rng.standard_normal((rows, stride)).astype(np.float32)
                output, place = OutputSpec(before.shape, "float32", near, inout=before), (first, stride)
                if dtype == "bf16":  # a case has no bf16 beside it: all columns are written
                    near, place = Tolerance(1e-5, 2.0**-8, "rounded to 8 bits"), (0, width)
                    output = OutputSpec(x.shape, dtype, near)
                yield Case(
                    f"{rows}x{width} to {place[0]} of {place[1]} {dtype}{' norm' if norm else ''}",
                    {"x": x, "weight": weight},
                    {"out": output},
                    {"first": place[0], "eps": 1e-5},
                )


def _cost(case: Case) -> Cost:
    numbers = case.inputs["x"].size
    return Cost(numbers * 8, numbers * 4)


def _variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"join_{'norm_' if norm else ''}f32", join_row, {"NORM": norm, "T": zl.f32})
        for norm in (False, True)
    ]


JOIN = Op("join", _variants, join, _reference, _cases, _cost, later("gpu.join", "variants"))
