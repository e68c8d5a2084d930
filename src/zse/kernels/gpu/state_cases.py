"""Cases of recurrent layers that only a GPU has: prompts by chunks in bf16, gates and norms in the same launch."""

from itertools import product

from zse.kernels import delta, scan
from zse.kernels.gpu import state_chunks
from zse.kernels.op import Case, OutputSpec, Tolerance
from zse.lazy import numpy as np
from zse.quant import pack

NEAR = Tolerance(5e-5, 5e-5, "f32 sums over k size and from token to token, of numbers of some units")
ROUNDED = Tolerance(2e-3, 2**-7, "the result is rounded to bf16, and what a norm divides by is as near as f32 sums are")
# What products of chunks may be off by beside the root mean square of all numbers: all together, and a single one, which
# may be off by an eighth of that beside its own size, too: of a million numbers behind a norm and a gate some are 70 times
# the mean and off by 0.4 % of themselves. Operands have 8 bits; numbers are sums of dozens of products, some of which
# nearly cancel.
ALL_OFF, ONE_OFF = 0.01, 0.25
FORGETTING = (0.01, 1.0, 1e-4)  # factors of A
BY_CHUNKS = Tolerance(0.0, 1.0, "products of bf16: off_by()")

# As zse.kernels.delta's and scan's, in shorter runs: the emulator takes 512 threads through each token.
DELTA_SHAPES: tuple = (
    ((2, 4, 128, 128), (1, 1, 1), (1,), 0),
    ((2, 4, 128, 128), (7, 1, 3), (0, 2), 64),
    ((1, 1, 16, 48), (1, 5, 4), (0, 2), 0),
    ((2, 2, 32, 16), (3, 2, 17), (1,), 32),
    ((1, 3, 64, 80), (5, 2), (1,), 5),
    ((2, 4, 64, 64), (1, 1, 6), (1,), 0),
    ((1, 1, 64, 64), (16, 2, 9), (2,), 0),
)
SCAN_SHAPES: tuple = (
    ((8, 1, 64, 128), (1, 1, 1), (1,), 0, None),
    ((8, 2, 64, 128), (7, 1, 3), (0, 2), 64, None),
    ((1, 1, 16, 48), (1, 5, 4), (0, 2), 0, (0.1, 2.0)),
    ((10, 2, 80, 16), (3, 2, 17), (1,), 32, (0.0, 1.5)),
    ((2, 1, 64, 64), (1, 6), (1,), 0, None),
    ((2, 1, 64, 64), (1, 2), (), 5, None),
    ((1, 1, 64, 64), (16, 2, 9), (2,), 0, None),
)


def off_by(got, wanted) -> str:
    """What is wrong with an output of chunks; where wanted is NaN nothing must have been written."""
    got = pack.bf16_to_f32(got) if got.dtype == np.uint16 else got
    known = ~np.isnan(wanted)
    if not np.isnan(got[~known]).all():
        return "memory beside the state was written"
    error, size = np.abs(got - wanted)[known], np.sqrt((wanted[known] ** 2).mean())
    is_far = error > ONE_OFF * (size + np.abs(wanted[known]) / 8)
    if not np.isfinite(error).all() or np.sqrt((error**2).mean()) > ALL_OFF * size or is_far.any():
        return f"off by {np.sqrt((error**2).mean()):.3g} (one {error.max():.3g}) of numbers of {size:.3g}"
    return ""


def by_chunks(case: Case, kind: str, *sizes: int) -> Case:
    """The case with memory for chunks, and heads that forget within some tokens, hundreds or none. sizes: as work_width()
    takes them."""
    tokens, width = case.outputs["out"].shape
    own = width if "gate" in case.inputs else 0
    work = np.full((tokens + 3, state_chunks.work_width(kind, *sizes) + own), np.nan, np.float32)
    outputs = {
        name: OutputSpec(spec.shape, spec.dtype, BY_CHUNKS, inout=spec.inout, error=off_by)
        for name, spec in case.outputs.items()
    }
    decays = case.inputs["A"] * np.resize(FORGETTING, len(case.inputs["A"]))
    inputs = case.inputs | {"work": work, "A": decays.astype(np.float32)}
    return Case(f"{case.name}, by chunks", inputs, outputs, case.options)


def delta_cases(rng):
    for decay, shape in product(delta.CHUNKS, DELTA_SHAPES):
        yield delta.make_case(rng, decay, *shape, NEAR)
    for number, (lengths, fresh, beside) in enumerate(
        (((17,), (0,), 0), ((3, 129, 1), (1,), 32), ((64, 200), (), 0), ((16, 16, 65), (2,), 0))
    ):
        heads = (2, 2, 128, 128) if number % 2 else (1, 3, 128, 128)
        case = delta.make_case(rng, "head", heads, lengths, fresh, beside, NEAR)
        yield by_chunks(case, "delta", heads[0], 128, heads[1])
    for activation in ("silu", "sigmoid"):
        for size, lengths in ((128, (1, 1, 1)), (64, (2, 1)), (128, (40, 5))):
            case = delta.make_case(rng, "head", (1, 2, size, size), lengths, (1,), 32, NEAR)
            case = gated(rng, case, activation)
            yield case
            if size == 128:
                yield by_chunks(case, "delta", 1, 128, 2)


def gated(rng, case: Case, activation: str) -> Case:
    """The case with the gated norm behind it."""
    shape = case.outputs["out"].shape
    z = (rng.standard_normal(shape) * 3).astype(np.float32)
    z[0, 0], z[-1, 1] = -100.0, 100.0  # exp saturates without a NaN
    norm = (1 + rng.standard_normal(shape[1] // len(case.inputs["A"])) / 4).astype(np.float32)
    gate = delta.OutputGate(z, norm, 1e-6, activation)
    outputs = case.outputs | {"out": OutputSpec(shape, "bf16", ROUNDED)}
    return Case(f"{case.name}, {activation}", case.inputs | {"gate": gate}, outputs, case.options)


def scan_cases(rng):
    for shape in SCAN_SHAPES:
        yield scan.make_case(rng, *shape, NEAR)
    for number, (lengths, fresh, beside) in enumerate(
        (((17,), (0,), 0), ((3, 129, 1), (1,), 32), ((64, 200), (), 0), ((16, 16, 65), (2,), 0))
    ):
        heads, groups = (4, 2) if number % 2 else (3, 1)
        limits = (0.05, 1.5) if number > 1 else None
        case = scan.make_case(rng, (heads, groups, 64, 128), lengths, fresh, beside, limits, NEAR)
        yield by_chunks(case, "scan", groups, 128, heads)
