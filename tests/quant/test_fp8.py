"""fp8 weights: the number format against its definition, quantizing, planes of layout rows."""

import numpy as np
import pytest

from zse.errors import UnsupportedError
from zse.kernels.host import random_weight
from zse.quant import pack
from zse.quant.scheme import DenseScheme, Fp8Scheme, memory_layout, parse_scheme, placed_planes


def nearest_e4m3(value: float) -> set[int]:
    """Every code that is as near to `value` as any, found by looking at all of them."""
    values = pack.e4m3_to_f32(np.arange(256, dtype=np.uint8)).astype(np.float64)
    distance = np.where(np.isnan(values), np.inf, np.abs(values - value))
    return set(np.flatnonzero(distance == distance.min()).tolist())


def test_every_code_survives_the_way_through_f32():
    codes = np.arange(256, dtype=np.uint8)
    back = pack.f32_to_e4m3(pack.e4m3_to_f32(codes))
    assert np.array_equal(back, codes)


def test_known_values():
    for code, value in ((0x00, 0.0), (0x01, 2.0**-9), (0x08, 2.0**-6), (0x38, 1.0), (0x7E, 448.0), (0xFE, -448.0)):
        assert pack.e4m3_to_f32(np.uint8([code]))[0] == value
    assert np.isnan(pack.e4m3_to_f32(np.uint8([0x7F, 0xFF]))).all()


def test_rounds_to_nearest_even_and_saturates():
    rng = np.random.default_rng(5)
    values = np.concatenate([rng.standard_normal(3000) * 10.0 ** rng.uniform(-4, 3, 3000), [1e9, -1e9, 0.0, 2.0**-10]])
    values = values.astype(np.float32)
    for value, code in zip(values, pack.f32_to_e4m3(values), strict=True):
        near = nearest_e4m3(float(np.clip(value, -448, 448)))
        assert int(code) in near or (value == 0 and code & 0x7F == 0)
        if len(near) > 1 and value != 0:
            assert code & 1 == 0, f"a tie at {value} must go to the even code"


@pytest.mark.parametrize("scaling", ("row", "tensor", "block"))
@pytest.mark.parametrize("n, k", [(1, 16), (130, 400), (128, 128), (257, 144)])
def test_quantize_error_is_half_a_step(scaling, n, k):
    rng = np.random.default_rng(n + k)
    w = (rng.standard_normal((n, k)) * rng.uniform(0.01, 3, (n, 1))).astype(np.float32)
    scheme = Fp8Scheme(scaling)
    planes = scheme.quantize(w)
    back = scheme.dequantize(planes, n, k)
    scale = planes["scale"]
    is_block = scaling == "block"
    wide = np.kron(scale, np.ones((128, 128)))[:n, :k] if is_block else np.broadcast_to(scale[:, None], (n, k))
    # Half a unit in the last of 3 fraction bits, or half the subnormal step, and f32's own rounding of w / scale.
    assert (np.abs(back - w) <= np.maximum(np.abs(w) / 16, wide * 2.0**-10) * 1.0001).all()
    assert np.abs(pack.e4m3_to_f32(planes["w"])).max() == 448


def test_quantize_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        Fp8Scheme("row").quantize(np.float32([[np.nan] * 16]))


def test_names_layouts_and_planes():
    for scaling in ("row", "tensor", "block"):
        scheme = Fp8Scheme(scaling)
        assert parse_scheme(scheme.name) == scheme
        placed, size = placed_planes(scheme, 200, 144)
        assert [(plane.name, plane.dtype, offset % 256) for plane, offset in placed] == [
            ("w", "e4m3", 0),
            ("scale", "f32", 0),
        ]
        assert size == placed[-1][1] + placed[-1][0].nbytes
    assert Fp8Scheme("block").planes(200, 144)[1].shape == (2, 2)
    with pytest.raises(UnsupportedError):
        Fp8Scheme("column")
    with pytest.raises(ValueError, match="layout"):
        Fp8Scheme("row").planes(16, 16, "r16")
    with pytest.raises(ValueError, match="layout"):
        parse_scheme("int4-g32").planes(16, 32, "rows")


def test_layout_of_a_family():
    assert memory_layout(parse_scheme("int4-g128"), "gpu") == "r16"
    assert memory_layout(parse_scheme("int8-g32-sym"), "cpu") == "r16"
    assert (memory_layout(DenseScheme("bf16"), "cpu"), memory_layout(DenseScheme("bf16"), "gpu")) == ("r16", "rows")
    assert memory_layout(Fp8Scheme("row"), "gpu") == "rows"
    with pytest.raises(ValueError, match="CPU"):
        memory_layout(Fp8Scheme("row"), "cpu")


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16"))
def test_dense_rows_are_the_matrix(dtype):
    weight = random_weight(np.random.default_rng(1), 20, 48, DenseScheme(dtype), "rows")
    assert weight.planes["w"].shape == (20, 48)
    tiled = weight.scheme.pack(weight.planes["w"])
    assert np.array_equal(weight.scheme.unpack(tiled, 20, 48), weight.planes["w"])
    assert weight.dequantize().shape == (20, 48)
