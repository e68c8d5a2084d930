"""Cases of the products that normalize their rows: every scheme, both kernels, every epilogue, odd sizes."""

from zse.kernels.gpu.matmul import GATES, SCHEMES
from zse.kernels.op import Case, Output, Tolerance
from zse.tensor import NormedRows

# tokens, rows, columns (at least): what every architecture takes; more than 2,048, 4,096 columns in a row's vectors
SHAPES = (
    (1, 32, 128),
    (4, 40, 384),
    (2, 16, 1280),
    (3, 72, 2304),
    (4, 200, 640),
    (1, 1, 2176),
    (2, 33, 3584),
    (1, 24, 4352),
    (3, 64, 96),
)


def make_case(rng, scheme, epilogue: str, tokens: int, rows: int, width: int, kernel: str) -> Case:
    """width: rounded up to what the scheme takes."""
    import numpy as np

    from zse.kernels.host import random_weight
    from zse.kernels.matmul import MATMUL

    step = max(scheme.group, 32) if scheme.kind == "affine" else 16
    width += -width % step
    gated = epilogue in GATES
    rows = (rows + 31) // 32 * 32 if gated else rows
    weight = random_weight(rng, rows, width, scheme, "r16" if scheme.kind == "affine" else "rows")
    # Rows of different sizes: a factor of another row is not near.
    x = (rng.standard_normal((tokens, width)) * 4.0 ** rng.integers(-3, 4, (tokens, 1))).astype(np.float32)
    a = NormedRows(x, (1 + rng.standard_normal(width) / 4).astype(np.float32), 1e-5)
    inputs = {"a": a, "weight": weight}
    if rng.integers(2) and not gated:
        inputs["bias"] = rng.standard_normal(rows).astype(np.float32)
    largest = float(np.abs(weight.dequantize()).max())
    # Of every activation up to 2**-9 is rounded away: six times the deviation of the sum of such errors. And the sums.
    absolute = largest * width**0.5 * (3 * 2**-9 + width**0.5 * 2**-18)
    if gated:
        product = MATMUL.reference(a, weight)["out"]
        absolute *= 2.2 * max(1.0, float(np.abs(product).max()))
    near = Tolerance(
        absolute,
        2**-8 if gated or epilogue == "bf16" else 1e-6,
        "the normed rows are bf16; f32 sums of products of 128 + q; a bf16 result is rounded once more",
    )
    shape = (tokens, rows // 2 if gated else rows)
    out = Output(
        shape,
        "bf16" if gated or epilogue == "bf16" else "float32",
        near,
        rng.standard_normal(shape).astype(np.float32) if epilogue == "accumulate" else None,
    )
    options = {"max_tokens": tokens, "kernel": kernel} | (
        {"gate": epilogue} if gated else {"accumulate": True} if epilogue == "accumulate" else {}
    )
    return Case(f"{scheme} normed {kernel} {epilogue} {tokens}x{rows}x{width}", inputs, {"out": out}, options)


def cases(rng):
    epilogues = ("store", "bf16", "accumulate", *GATES)
    for scheme in SCHEMES:
        for kernel in ("small", "few") if scheme.kind == "affine" else ("small",):
            epilogue = epilogues[int(rng.integers(len(epilogues)))]
            yield make_case(rng, scheme, epilogue, *SHAPES[int(rng.integers(len(SHAPES)))], kernel)
