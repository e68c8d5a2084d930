"""A token's row of a product does not depend on which other tokens are in the batch, nor on the recording's size."""

import numpy as np
import pytest

from kernels.harness import host_isas, run_case
from zse.kernels.host import random_weight
from zse.kernels.matmul import MATMUL
from zse.kernels.op import EXACT, Case, HostActivation, OutputSpec
from zse.quant.scheme import AffineScheme, DenseScheme

SCHEMES = [
    *(
        AffineScheme(bits, group, symmetric)
        for bits in (4, 5, 6, 8)
        for group, symmetric in ((16, False), (32, True), (64, False))
    ),
    *(DenseScheme(dtype) for dtype in ("f32", "f16", "bf16")),
]


@pytest.mark.parametrize("isa", host_isas())
@pytest.mark.parametrize("kind", ["f32", "int8", "int16"])
def test_a_token_alone_and_in_a_batch(isa, kind):
    rng = np.random.default_rng(5)
    tokens, rows, width = 21, 40, 192
    for scheme in SCHEMES:
        if kind != "f32" and scheme.kind == "dense":
            continue
        a = rng.standard_normal((tokens, width)).astype(np.float32)
        if kind != "f32":
            a = HostActivation.quantize(a, kind)
        case = Case(
            str(scheme),
            {"a": a, "weight": random_weight(rng, rows, width, scheme), "bias": None},
            {"out": OutputSpec((tokens, rows), "float32", EXACT)},
            {"max_tokens": tokens},
        )
        whole = run_case(MATMUL, case, isa)["out"]
        assert np.isfinite(whole).all()
        for first, count, size in ((0, 1, 1), (20, 1, 1), (7, 1, 16), (3, 4, 4), (5, 11, 256)):
            some = slice(first, first + count)
            part = (
                a[some]
                if kind == "f32"
                else HostActivation(
                    (count, width), a.q[some], a.scale[some], a.sum[some], None if a.low is None else a.low[some]
                )
            )
            got = run_case(
                MATMUL,
                Case(
                    case.name,
                    case.inputs | {"a": part},
                    {"out": OutputSpec((count, rows), "float32", EXACT)},
                    {"max_tokens": size},
                ),
                isa,
            )["out"]
            np.testing.assert_array_equal(got, whole[some], err_msg=f"{scheme} {kind} {first} {count} {size}")
