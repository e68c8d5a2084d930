"""Kernels of rows on a GPU, in the emulator: a row has the same bits among many, whose kernels have fewer threads."""

import numpy as np
import pytest
from gpu.harness import read_back, upload

from kernels.test_emulated_ops import Spaced
from zse.kernels.norm import add_rmsnorm
from zse.kernels.quantize import HAVE_MANY, MANY_ROWS, quantize
from zse.quant import pack
from zse.tensor import Fp8Activation, Tensor, sum_width


def fp8(device, rows, width):
    parts = ("e4m3", 1, (rows, width)), ("f32", 4, (rows,)), ("f16", 2, (rows, sum_width(width)))
    return Fp8Activation(
        *(Tensor(device.alloc(size * int(np.prod(shape))), shape, kind) for kind, size, shape in parts)
    )


def record_row(recorder, device, kind, x, weight, out):
    if kind == "norm":
        add_rmsnorm(recorder, upload(device, x), None, None, weight, out, 1e-6)
    else:
        quantize(recorder, upload(device, pack.f32_to_bf16(x), "bf16"), out)


@pytest.mark.parametrize("kind", ["norm", "quantize"])
@pytest.mark.parametrize("rows", [3, MANY_ROWS])
def test_rows_without_sums_are_the_same(kind, rows):
    """What products with fp8 weights take: nobody reads the sums."""
    rng, device = np.random.default_rng(), Spaced("sm_90a")
    x = (rng.standard_normal((rows, 272)) * 3).astype(np.float32)
    weight = upload(device, rng.standard_normal(272).astype(np.float32))
    with_sums, without = fp8(device, rows, 272), fp8(device, rows, 272)._replace(sums=None)
    for out in (with_sums, without):
        device.run(lambda recorder, out=out: record_row(recorder, device, kind, x, weight, out))
    for part, dtype in (("q", np.uint8), ("scale", np.float32)):
        found = [read_back(device, getattr(out, part), dtype) for out in (with_sums, without)]
        assert found[0].any()
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", ["norm", "quantize"])
@pytest.mark.parametrize("width", [3584, 144])
def test_a_row_is_the_same_among_many(kind, width):
    rng = np.random.default_rng()
    device, few = Spaced("sm_90a"), 3
    x = (rng.standard_normal((MANY_ROWS, width)) * 3).astype(np.float32)
    weight = upload(device, rng.standard_normal(width).astype(np.float32))
    results, symbols = [], []
    for rows in (MANY_ROWS, few):
        out = fp8(device, rows, width)

        def record(recorder, rows=rows, out=out):
            record_row(recorder, device, kind, x[:rows], weight, out)
            symbols.append(recorder.launches[0].symbol)

        device.run(record)
        kept = (width + 127) // 128  # sums behind the last are anything
        results.append(
            [
                read_back(device, part, kind)[:few, ..., :n] if n else read_back(device, part, kind)[:few]
                for part, kind, n in (
                    (out.q, np.uint8, width),
                    (out.scale, np.float32, 0),
                    (out.sums, np.float16, kept),
                )
            ]
        )
    assert symbols == [f"{symbols[1]}_many", symbols[1]] and symbols[1] in HAVE_MANY
    for many, alone in zip(*results, strict=True):
        np.testing.assert_array_equal(many, alone)
