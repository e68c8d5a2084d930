"""Cases of the matrix product with more tokens than matmul_small takes, for the tests: every form of gemm.py, odd
sizes, split k."""

from zse.kernels.op import Case, HostArray, HostFp8Activation, Output, Tolerance
from zse.quant.scheme import AffineScheme, DenseScheme, Fp8Scheme

SCHEMES = (
    *(
        AffineScheme(bits, group, symmetric)
        for bits in (4, 5, 6, 8)
        for group in (16, 32, 64, 0)
        for symmetric in (False, True)
    ),
    *(DenseScheme(dtype) for dtype in ("bf16", "f16", "f32")),
    *(Fp8Scheme(scaling) for scaling in ("row", "tensor", "block")),
)
# tokens, rows of the weight, columns. The second: many steps of k over few tiles, so that k is split.
SHAPES = (
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
# Tiles of gemm_skinny that outnumber the counters of the emulated device's multiprocessors, with parts of tiles among the last.
MANY_TILES = (9, 7744, 192)
EPILOGUES = ("store", "bf16", "accumulate", "silu", "gelu_tanh")


def tolerance(scheme, values, largest: float, gated: bool, narrow: bool) -> Tolerance:
    """How far a product may be from float64. values: the activations; largest: of the weight's numbers; narrow: whether
    the result is bf16.

    What is not bf16 or fp8 is rounded to bf16 on the way, and so are the scales of integers: 2**-9 of each, the latter the
    same way for a whole group. The tensor cores keep about 14 bits of a sum of fp8 products (DeepSeek-V3 report, section
    3.3.2), and what is cut off adds up as the root of the number of columns: at 18,944 the largest of 65,000 results is off
    by 4.5 times 2**-9 on an H200, at 3,584 by twice."""
    import numpy as np

    rounded = scheme.kind == "affine" or scheme.kind == "dense" and scheme.dtype != "bf16"
    length = float(np.sqrt((values.astype(np.float64) ** 2).sum(axis=1).max()))
    cut = 2**-9 * max(1.0, values.shape[1] / 512) ** 0.5
    absolute = length * largest * (2**-7 if rounded else cut if scheme.kind == "fp8" else 2**-16)
    return Tolerance(
        absolute * (60 if gated else 1),
        (1e-5, 2**-8, 2**-7)[rounded + narrow],
        "weights rounded to bf16; f32 sums in another order; a bf16 result is rounded once more",
    )


def make_case(rng, scheme, epilogue: str, tokens: int, rows: int, width: int) -> Case:
    """A product with random operands; rows and width become what the scheme and the epilogue need."""
    import numpy as np

    from zse.kernels.host import random_weight
    from zse.quant.pack import f32_to_bf16

    integer, gated = scheme.kind == "affine", epilogue in EPILOGUES[3:]
    width += -width % (scheme.group or 32 if integer else 16)
    rows += -rows % 128 if gated and scheme == Fp8Scheme("block") else 0 if gated else int(rng.integers(16)) * 2
    if scheme.kind == "dense" and scheme.dtype != "bf16":
        tokens = max(tokens, 33)  # fewer are matmul_small's
    weight = random_weight(rng, rows, width, scheme, "r16" if integer else "rows")
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    a = HostFp8Activation.quantize(x) if scheme.kind == "fp8" else HostArray("bf16", f32_to_bf16(x))
    values = a.dequantize() if scheme.kind == "fp8" else a.wide()
    inputs = {"a": a, "weight": weight}
    if rng.integers(2) and not gated:
        inputs["bias"] = rng.standard_normal(rows).astype(np.float32)
    largest = float(np.abs(weight.dequantize()).max())
    near = tolerance(scheme, values, largest, gated, gated or epilogue == "bf16")
    shape = (tokens, rows // 2 if gated else rows)
    out = Output(
        shape,
        "bf16" if gated or epilogue == "bf16" else "float32",
        near,
        rng.standard_normal(shape).astype(np.float32) if epilogue == "accumulate" else None,
    )
    options = {"max_tokens": tokens} | (
        {"gate": epilogue} if gated else {"accumulate": True} if epilogue == "accumulate" else {}
    )
    return Case(f"gemm {scheme} {epilogue} {tokens}x{rows}x{width}", inputs, {"out": out}, options)


def cases(rng):
    """One case per scheme and epilogue, each with a shape of its own, and one of many tiles."""
    for scheme in SCHEMES:
        for epilogue in EPILOGUES:
            yield make_case(rng, scheme, epilogue, *SHAPES[int(rng.integers(len(SHAPES)))])
    yield make_case(rng, DenseScheme("bf16"), "store", *MANY_TILES)
