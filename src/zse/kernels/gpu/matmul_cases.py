"""Cases of the matrix product on a GPU, for the tests: every scheme, epilogue and form, odd sizes, split k."""

from functools import partial

from zse.kernels.host import random_weight
from zse.kernels.op import Case, Cases, HostArray, HostFp8Activation, OutputSpec, Tolerance
from zse.lazy import numpy as np
from zse.quant.pack import bf16_to_f32, f32_to_bf16
from zse.quant.scheme import FP8_SCALINGS, AffineScheme, DenseScheme, Fp8Scheme, Lut4Scheme

SCHEMES = (
    *(
        AffineScheme(bits, group, symmetric)
        for bits in (4, 5, 6, 8)
        for group in (16, 32, 64, 128, 0)
        for symmetric in (False, True)
    ),
    *(Lut4Scheme(table, "f16", group) for table, group in (("iq4", 32), ("fp4", 16), ("fp4", 32), ("iq1", 16))),
    *(DenseScheme(dtype) for dtype in ("bf16", "f16", "f32")),
    *(Fp8Scheme(scaling) for scaling in FP8_SCALINGS),
)
GATES = ("silu", "gelu_tanh")
EPILOGUES = ("store", "bf16", "accumulate", *GATES)
# tokens, rows of the weight, columns.
SMALL_SHAPES = (
    (1, 32, 128),
    (3, 40, 384),
    (8, 16, 256),
    (2, 72, 1280),
    (7, 200, 640),
    (1, 1, 2304),
    (12, 33, 128),
    (37, 64, 256),
)
# Of gemm.py. The second: many steps of k over few tiles, so that k is split.
LARGE_SHAPES = (
    (9, 96, 160),
    (16, 320, 2080),
    (33, 544, 1056),
    (64, 2144, 352),
    (65, 320, 4128),
    (127, 96, 1056),
    (129, 544, 416),
    (300, 1376, 160),
    (1030, 224, 352),
    (2200, 352, 160),
)
# Of gemm_w4a8, of one tile and more; the emulated GPU's blocks share tiles and parts of k.
W4A8_SHAPES = (
    (9, 96, 384),
    (16, 544, 2304),
    (33, 352, 256),
    (64, 96, 4608),
    (100, 544, 640),
    (130, 544, 256),
    (300, 96, 2176),
    (300, 544, 128),
)
# Of a gate: its factors grow with the width.
WIDE_GATE = (300, 1024, 3584)
# Tiles of gemm_skinny that outnumber the counters of the emulated device's multiprocessors, with parts of tiles among
# the last.
MANY_TILES = (9, 7744, 192)


def tolerance(scheme, values, largest: float, gated: bool, narrow: bool) -> Tolerance:
    """How far a product may be from float64. values: the activations; largest: of the weight's numbers; narrow: whether
    the result is bf16.

    What is not bf16 or fp8 is rounded to bf16 on the way, and so are the scales of integers: 2**-9 of each, the latter
    the same way for a whole group. The tensor cores keep about 14 bits of a sum of fp8 products (DeepSeek-V3 report,
    section 3.3.2), and what is cut off adds up as the root of the number of columns: at 18,944 the largest of 65,000
    results is off by 4.5 times 2**-9 on an H200, at 3,584 by twice."""
    rounded = scheme.element not in ("bf16", "e4m3")
    length = float(np.sqrt((values.astype(np.float64) ** 2).sum(axis=1).max()))
    cut = 2**-9 * max(1.0, values.shape[1] / 512) ** 0.5
    absolute = length * largest * (2**-7 if rounded else cut if scheme.element == "e4m3" else 2**-16)
    return Tolerance(
        absolute * (60 if gated else 1),
        (1e-5, 2**-8, 2**-7)[rounded + narrow],
        "weights rounded to bf16; f32 sums in another order; a bf16 result is rounded once more",
    )


def gated_error(got, *, wanted, near: Tolerance, factors) -> str:
    """What is wrong with act(gate) * up, bf16 as stored, where each product may be off by near.absolute. factors: gate and
    up [tokens, rows], exact. act'(gate) <= 1.13 and |act(gate)| <= |gate|: one's error counts by the size of the other."""
    gate, up = (np.abs(factor) for factor in factors)
    bound = near.absolute * (1.13 * (up + near.absolute) + gate) + near.relative * np.abs(wanted)
    excess = np.abs(bf16_to_f32(got) - wanted) / bound
    if (excess <= 1).all():
        return ""
    return f"{(~(excess <= 1)).sum()} of {excess.size} values are off by up to {excess.max():.3g} times the bound"


def case_of(name: str, weight, a, epilogue: str, near: Tolerance, rng, options: dict, error=None) -> Case:
    """A product. epilogue: of EPILOGUES; "accumulate" gets random content to add to; error: as an OutputSpec's."""
    gated = epilogue in GATES
    shape = (a.shape[0] if isinstance(a, HostFp8Activation) else len(a.array), weight.shape[0] // (2 if gated else 1))
    dtype = "bf16" if gated or epilogue == "bf16" else "float32"
    before = rng.standard_normal(shape).astype(np.float32) if epilogue == "accumulate" else None
    inputs = {"a": a, "weight": weight}
    if options.pop("bias", False):
        inputs["bias"] = rng.standard_normal(shape[1]).astype(np.float32)
    options |= {"gate": epilogue} if gated else {"accumulate": True} if before is not None else {}
    return Case(name, inputs, {"out": OutputSpec(shape, dtype, near, before, error=error)}, options)


def small_cases(rng) -> Cases:
    """Every scheme, with few and more tokens, odd sizes, and every epilogue, on matmul_small and matmul_few."""
    return Cases(partial(_small_case, rng, scheme, epilogue) for scheme in SCHEMES for epilogue in EPILOGUES)


def _small_case(rng, scheme, epilogue: str) -> Case:
    integer = scheme.numbers == "q"
    step = scheme.group or 32 if integer else 16
    tokens, rows, width = SMALL_SHAPES[int(rng.integers(len(SMALL_SHAPES)))]
    width += -width % max(step, 32) + max(step, 32 if integer else 16) * int(rng.integers(3))
    gated = epilogue in GATES
    rows = (rows + 31) // 32 * 32 if gated else rows
    weight = random_weight(rng, rows, width, scheme, scheme.in_memory["gpu"])
    a = HostArray("bf16", f32_to_bf16(rng.standard_normal((tokens, width)).astype(np.float32)))
    size = float(np.abs(a.wide()).sum(axis=1).max()) * float(np.abs(weight.dequantize()).max())
    # matmul_few rounds activations to 2**-16 of the largest of 128.
    largest = float(np.abs(a.wide()).max()) * float(np.abs(weight.dequantize()).max())
    near = Tolerance(
        (size * 2**-18 + largest * 2**-16 * width**0.5) * (8 if gated else 1),
        2**-8 if gated or epilogue == "bf16" else 1e-6,
        "f32 sums of products of 128 + q, up to 34 times the weights; a bf16 result is rounded once more",
    )
    options = {"max_tokens": tokens, "kernel": "few" if rng.integers(2) else "small"}
    options["bias"] = bool(rng.integers(2)) and not gated
    return case_of(f"{scheme} {epilogue} {tokens}x{rows}x{width}", weight, a, epilogue, near, rng, options)


def make_case(rng, scheme, epilogue: str, tokens: int, rows: int, width: int, narrow: bool = False) -> Case:
    """A product of gemm.py with random operands; rows and width become what the scheme and the epilogue need. narrow:
    activations are fp8 beside integers, too."""
    integer, fp8, gated = scheme.numbers == "q", narrow or scheme.element == "e4m3", epilogue in GATES
    width += -width % (scheme.group or 32 if integer else 16)
    rows += -rows % 128 if gated and scheme == Fp8Scheme("block") else 0 if gated else int(rng.integers(16)) * 2
    if scheme.element in ("f32", "f16"):
        tokens = max(tokens, 33)  # fewer are matmul_small's
    weight = random_weight(rng, rows, width, scheme, scheme.in_memory["gpu"])
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    a = HostFp8Activation.quantize(x) if fp8 else HostArray("bf16", f32_to_bf16(x))
    values = a.dequantize() if fp8 else a.wide()
    numbers = weight.dequantize()
    near = tolerance(scheme, values, float(np.abs(numbers).max()), False, gated or epilogue == "bf16")
    factors = np.split(values.astype(np.float64) @ numbers.T, 2, axis=1) if gated else None
    error = partial(gated_error, near=near, factors=factors) if gated else None
    options = {"max_tokens": tokens, "bias": bool(rng.integers(2)) and not gated}
    return case_of(f"gemm {scheme} {epilogue} {tokens}x{rows}x{width}", weight, a, epilogue, near, rng, options, error)


def cases(rng) -> Cases:
    """Those of few tokens; one of gemm.py per scheme and epilogue, each with a shape of its own; one of many tiles."""
    small = small_cases(rng)
    large = [
        (scheme, epilogue, *LARGE_SHAPES[int(rng.integers(len(LARGE_SHAPES)))])
        for scheme in SCHEMES
        for epilogue in EPILOGUES
    ]
    many = (DenseScheme("bf16"), "store", *MANY_TILES)
    narrow = [
        (AffineScheme(4, 128, symmetric), EPILOGUES[(number + 2 * symmetric) % len(EPILOGUES)], *shape, True)
        for number, shape in enumerate(W4A8_SHAPES)
        for symmetric in (False, True)
    ]
    return Cases(
        [partial(small.__getitem__, number) for number in range(len(small))]
        + [partial(make_case, rng, *one) for one in [*large, many, *narrow]]
    )
