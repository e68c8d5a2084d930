"""What steps with images and towers need beside other operations: rows put at chosen tokens, means of neighbouring rows,
and rotary tables of positions in three parts."""

import math

from zse import kernel as zl
from zse.kernels.op import EXACT, Case, Cost, HostArray, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.rope import LANES, TWO_PI
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args

GPU_CHUNK = 1024  # columns of one block of clamp on a GPU, four a thread


@zl.kernel
def place_rows_cpu(
    source: zl.Ptr[zl.f32, "const"], rows: zl.Ptr[zl.i32, "const"], x: zl.Ptr[zl.f32], width: zl.i64, ADD: zl.static
):
    """Grid (tokens)."""
    L = zl.target.lanes
    row = zl.i64(rows[zl.block_index(0)])
    if row < 0:
        return
    taken = source + row * width
    mine = x + zl.block_index(0) * width
    whole = width // L * L
    for k in range(0, whole, L):
        value = zl.load(taken + k, L)
        zl.store(mine + k, value + zl.load(mine + k, L) if ADD else value)
    for k in range(whole, width):
        mine[k] = taken[k] + mine[k] if ADD else taken[k]


def place_rows(recorder, source, rows, x, add: bool = False) -> None:
    """x f32 [M, K]: row m becomes (or gets added) row rows[m] of source f32 [N, K]; rows i32 [M], -1: x stays as it is.
    The caller guarantees rows < N."""
    tokens, width = x.shape
    check("place_rows x", x, "f32", tokens, width)
    check("place_rows source", source, "f32", None, width)
    check("place_rows rows", rows, "i32", tokens)
    symbol = "place_rows_add" if add else "place_rows"
    recorder.launch(symbol, Args(source=source, rows=rows, x=x, width=width), (tokens,))


def _placed(source, rows, x, add=False):
    out = x.copy()
    out[rows >= 0] = source[rows[rows >= 0]] + (x[rows >= 0] if add else 0)
    return {"x": out}


def _place_cases(rng, family="cpu"):
    for tokens, width, add in ((1, 64, False), (9, 37, False), (70, 256, True)):
        source = rng.standard_normal((5, width)).astype(np.float32)
        rows = rng.integers(-1, 5, tokens).astype(np.int32)
        x = rng.standard_normal((tokens, width)).astype(np.float32)
        yield Case(
            f"{tokens} tokens{' added' if add else ''}",
            {"source": source, "rows": rows},
            {"x": OutputSpec((tokens, width), "float32", EXACT, inout=x)},
            {"add": add},
        )


def _place_cost(case: Case) -> Cost:
    tokens, width = case.outputs["x"].shape
    return Cost(tokens * (width * 8 + 4), 0)


PLACE_ROWS = Op(
    "place_rows",
    lambda target: [
        zl.Variant("place_rows_add" if add else "place_rows", place_rows_cpu, {"ADD": add}) for add in (False, True)
    ],
    place_rows,
    _placed,
    _place_cases,
    _place_cost,
    later("gpu.images", "place_variants"),
)


@zl.kernel
def mean_rows_cpu(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], count: zl.i64, width: zl.i64):
    """Grid (rows of the result)."""
    L = zl.target.lanes
    mine = x + zl.block_index(0) * count * width
    to = out + zl.block_index(0) * width
    factor = 1.0 / zl.f32(count)
    whole = width // L * L
    for k in range(0, whole, L):
        total = zl.load(mine + k, L)
        for row in range(1, count):
            total += zl.load(mine + row * width + k, L)
        zl.store(to + k, total * factor)
    for k in range(whole, width):
        rest = mine[k]
        for row in range(1, count):
            rest += mine[row * width + k]
        to[k] = rest * factor


def mean_rows(recorder, x, out, count: int) -> None:
    """out f32 [M, K] = the mean of each `count` neighbouring rows of x f32 [at least M * count, K]."""
    rows, width = out.shape
    check("mean_rows x", x, "f32", None, width)
    check("mean_rows out", out, "f32", rows, width)
    require(count > 0, f"mean_rows: means of {count} rows")
    recorder.launch("mean_rows", Args(x=x, out=out, count=count, width=width), (rows,))


def _means(x, count, out=None):
    return {"out": x.astype(np.float64).reshape(-1, count, x.shape[1]).mean(1)}


def _mean_cases(rng, family="cpu"):
    near = Tolerance(1e-6, 1e-6, "an f32 sum of up to 16 values near 1")
    for rows, count, width in ((1, 4, 64), (9, 16, 37), (3, 9, 1152)):
        x = rng.standard_normal((rows * count, width)).astype(np.float32)
        yield Case(
            f"{rows} means of {count}", {"x": x}, {"out": OutputSpec((rows, width), "float32", near)}, {"count": count}
        )


def _mean_cost(case: Case) -> Cost:
    rows, width = case.outputs["out"].shape
    return Cost(4 * width * (rows + case.inputs["x"].shape[0]), case.inputs["x"].size)


MEAN_ROWS = Op(
    "mean_rows",
    lambda target: [zl.Variant("mean_rows", mean_rows_cpu)],
    mean_rows,
    _means,
    _mean_cases,
    _mean_cost,
    later("gpu.images", "mean_variants"),
)


class RopeSections(zl.Record):
    """Parameters of rope_sections."""

    positions: zl.Ptr[zl.i32, "const"]
    section: zl.Ptr[zl.i32, "const"]
    inv_freq: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    tokens: zl.i64
    pairs: zl.index
    mscale: zl.f32


@zl.kernel
def rope_sections_row(p: RopeSections):
    """Grid (tokens). As rope_table, each pair by the position of its part."""
    token = zl.block_index(0)
    row = p.out + token * 2 * p.pairs
    for i in range(0, p.pairs):
        angle = p.inv_freq[i] * zl.f32(p.positions[zl.i64(p.section[i]) * p.tokens + token])
        turns = zl.round_even(angle * (1 / 6.283185307179586)) * -1.0
        reduced = zl.fma(turns, TWO_PI[2], zl.fma(turns, TWO_PI[1], zl.fma(turns, TWO_PI[0], angle)))
        row[i] = zl.cos(reduced) * p.mscale
        row[p.pairs + i] = zl.sin(reduced) * p.mscale


def rope_sections(recorder, positions, section, inv_freq, out, mscale: float = 1.0) -> None:
    """positions i32 [3, N] (time, height, width: a line each, of which the first M are used), section i32 [R/2] (which
    line each pair turns by), inv_freq f32 [R/2] → out f32 [M, R]: mscale * cos, then mscale * sin (Qwen2-VL, arXiv
    2409.12191). R is a multiple of 16."""
    (half,) = inv_freq.shape
    rows = out.shape[0]
    lines, tokens = positions.shape
    check("rope_sections positions", positions, "i32", 3, None)
    check("rope_sections section", section, "i32", half)
    check("rope_sections inv_freq", inv_freq, "f32", half)
    check("rope_sections out", out, "f32", rows, 2 * half)
    require(half % LANES == 0, f"rope_sections: rotary dimension {2 * half} is not a multiple of {2 * LANES}")
    args = Args(positions=positions, section=section, inv_freq=inv_freq, out=out, tokens=tokens, pairs=half)
    recorder.launch("rope_sections", Args(**args, mscale=float(mscale)), (rows,))


def _section_reference(positions, section, inv_freq, mscale=1.0, out=None):
    taken = positions[section].T.astype(np.float32)
    angle = (taken * inv_freq.astype(np.float32)).astype(np.float64)
    return {"out": np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * mscale}


def _section_cases(rng, family="cpu"):
    near = Tolerance(5e-7, 5e-7, "one f32 rounding of the reduced angle, sin and cos within 2 ulp")
    for rotary, base in ((128, 1e6), (32, 1e4)):
        positions = rng.integers(0, 131072, (3, 9)).astype(np.int32)
        inv_freq = (base ** -(np.arange(0, rotary, 2) / rotary)).astype(np.float32)
        section = (np.arange(rotary // 2) % 3).astype(np.int32)
        yield Case(
            f"rotary {rotary}",
            {"positions": positions, "section": section, "inv_freq": inv_freq},
            {"out": OutputSpec((9, rotary), "float32", near)},
            {"mscale": 1.25 if rotary == 32 else 1.0},
        )


def _section_cost(case: Case) -> Cost:
    rows, rotary = case.outputs["out"].shape
    return Cost(rows * rotary * 4 + rotary * 4, rows * rotary * 20)


ROPE_SECTIONS = Op(
    "rope_sections",
    lambda target: [zl.Variant("rope_sections", rope_sections_row)],
    rope_sections,
    _section_reference,
    _section_cases,
    _section_cost,
    later("gpu.images", "section_variants"),
)


@zl.kernel
def clamp_rows(
    x: zl.Ptr[zl.f32, "const"], bounds: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], lower: zl.i64, width: zl.i64
):
    """Grid (rows)."""
    L = zl.target.lanes
    mine = x + zl.block_index(0) * width
    to = out + zl.block_index(0) * width
    low, high = bounds[lower], bounds[lower + 1]
    whole = width // L * L
    for k in range(0, whole, L):
        zl.store(to + k, min(max(zl.load(mine + k, L), low), high))
    for k in range(whole, width):
        to[k] = min(max(mine[k], low), high)


def clamp(recorder, x, bounds, out, first: int) -> None:
    """out [M, K] = x [M, K], at least bounds[first] and at most bounds[first + 1] of bounds f32 [N]. On a CPU both are f32;
    on a GPU each is f32 or bf16, and K a multiple of 4."""
    rows, width = x.shape
    is_gpu = recorder.device.kernels == "gpu"
    types = ("f32", "bf16") if is_gpu else ("f32",)
    check("clamp x", x, types, rows, width)
    check("clamp out", out, types, rows, width)
    check("clamp bounds", bounds, "f32", None)
    require(0 <= first < bounds.shape[0] - 1, f"clamp: bounds {first} and {first + 1} of {bounds.shape[0]}")
    args = Args(x=x, bounds=bounds, out=out, lower=first, width=width)
    if is_gpu:
        require(width % 4 == 0, f"clamp: width {width} is not a multiple of 4")
        recorder.launch(f"clamp_{x.dtype}_{out.dtype}", args, (-(-width // GPU_CHUNK), rows))
    else:
        recorder.launch("clamp_rows", args, (rows,))


def _clamp_cases(rng, family="cpu"):
    bounds = np.array([-0.5, np.inf, -np.inf, 0.25], np.float32)
    rounded = Tolerance(1e-30, 2**-8, "the result is rounded to bf16")
    forms = (
        [(source, out) for source in ("f32", "bf16") for out in ("f32", "bf16")] if family == "gpu" else [("f32",) * 2]
    )
    for rows, width, first in ((1, 64, 0), (9, 36 if family == "gpu" else 37, 2), (5, 4304, 2)):
        x = rng.standard_normal((rows, width)).astype(np.float32)
        for source, out in forms:
            inputs = {"x": HostArray("bf16", pack.f32_to_bf16(x)) if source == "bf16" else x, "bounds": bounds}
            spec = OutputSpec((rows, width), *(("float32", EXACT) if out == "f32" else ("bf16", rounded)))
            yield Case(f"{rows} of {width} {source} {out}", inputs, {"out": spec}, {"first": first})


def _clamp_reference(x, bounds, first, out=None):
    return {"out": np.clip(x.wide() if isinstance(x, HostArray) else x, bounds[first], bounds[first + 1])}


def _clamp_cost(case: Case) -> Cost:
    (rows, width), x = case.outputs["out"].shape, case.inputs["x"]
    item = (2 if isinstance(x, HostArray) else 4) + (2 if case.outputs["out"].dtype == "bf16" else 4)
    return Cost(rows * width * item, 2 * rows * width)


CLAMP = Op(
    "clamp",
    lambda target: [zl.Variant("clamp_rows", clamp_rows)],
    clamp,
    _clamp_reference,
    _clamp_cases,
    _clamp_cost,
    later("gpu.images", "clamp_variants"),
)


@zl.kernel
def standardize_rows(x: zl.Ptr[zl.f32], bias: zl.Ptr[zl.f32, "const"], scale: zl.Ptr[zl.f32, "const"], width: zl.i64):
    """Grid (rows)."""
    L = zl.target.lanes
    mine = x + zl.block_index(0) * width
    whole = width // L * L
    for k in range(0, whole, L):
        zl.store(mine + k, (zl.load(mine + k, L) - zl.load(bias + k, L)) * zl.load(scale + k, L))
    for k in range(whole, width):
        mine[k] = (mine[k] - bias[k]) * scale[k]


def standardize(recorder, x, bias, scale) -> None:
    """x f32 [M, K] = (x - bias f32 [K]) * scale f32 [K], in place."""
    rows, width = x.shape
    check("standardize x", x, "f32", rows, width)
    check("standardize bias", bias, "f32", width)
    check("standardize scale", scale, "f32", width)
    recorder.launch("standardize_rows", Args(x=x, bias=bias, scale=scale, width=width), (rows,))


def _standardize_cases(rng, family="cpu"):
    near = Tolerance(2e-6, 2e-6, "an f32 difference of values near 1 and a product")
    for rows, width in ((1, 64), (9, 37), (5, 1152)):
        x, bias, scale = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), width, width))
        out = OutputSpec((rows, width), "float32", near, inout=x)
        yield Case(f"{rows} of {width}", {"bias": bias, "scale": scale}, {"x": out})


STANDARDIZE = Op(
    "standardize",
    lambda target: [zl.Variant("standardize_rows", standardize_rows)],
    standardize,
    lambda bias, scale, x: {"x": (x.astype(np.float64) - bias) * scale},
    _standardize_cases,
    lambda case: Cost(8 * math.prod(case.outputs["x"].shape), 2 * math.prod(case.outputs["x"].shape)),
    later("gpu.images", "standardize_variants"),
)
