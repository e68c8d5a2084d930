"""Layout r16: pack() against a scalar reading of the plan's table, and back, for random shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zse.errors import UnsupportedError
from zse.quant.affine import AffineArrays
from zse.quant.pack import bf16_to_f32, f32_to_bf16
from zse.quant.scheme import BITS, GROUPS, LUT4_SCHEMES, SCHEME_NAMES, AffineScheme, DenseScheme, parse_scheme


def random_arrays(rng, scheme, n, k):
    groups = scheme.groups(k)
    q = rng.integers(0, 1 << scheme.bits, (n, k), dtype=np.uint8)
    scale = rng.normal(size=(n, groups)).astype(np.float16)
    offset = None if scheme.symmetric else rng.normal(size=(n, groups)).astype(np.float16)
    return AffineArrays(scheme, q, scale, offset)


def read_q(scheme, planes, row, k):
    """One q, straight from the table in docs/design/0001-cpu-engine.md."""
    t, r, b, s, c = row // 16, row % 16, k // 32, k % 32 // 4, k % 4
    if scheme.bits == 8:
        return planes["q"][t, b, s, r, c]
    byte = planes["q"][t, b, s % 4, r, c]
    q = byte & 15 if s < 4 else byte >> 4
    if scheme.bits == 5:
        q |= (planes["high"][t, b, r, c] >> s & 1) << 4
    if scheme.bits == 6:
        q |= (planes["high"][t, b, s // 4, r, c] >> 2 * (s % 4) & 3) << 4
    return q


schemes = st.builds(AffineScheme, st.sampled_from(BITS), st.sampled_from(GROUPS), st.booleans())


@settings(max_examples=60, deadline=None)
@given(schemes, st.integers(1, 50), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_pack_and_back(scheme, n, blocks, seed):
    rng = np.random.default_rng(seed)
    k = blocks * max(scheme.group, 32)
    arrays = random_arrays(rng, scheme, n, k)
    planes = arrays.pack()
    for plane in scheme.planes(n, k):
        array = planes[plane.name]
        assert (array.shape, array.nbytes) == (plane.shape, plane.nbytes)
        assert array.flags.c_contiguous
    assert set(planes) == {plane.name for plane in scheme.planes(n, k)}
    assert scheme.nbytes(n, k) == sum(array.nbytes for array in planes.values())
    for _ in range(40):
        row, column = rng.integers(n), rng.integers(k)
        assert read_q(scheme, planes, row, column) == arrays.q[row, column]
        group = column // scheme.group if scheme.group else 0
        assert planes["scale"][row // 16, group, row % 16] == arrays.scale[row, group]
        if not scheme.symmetric:
            assert planes["offset"][row // 16, group, row % 16] == arrays.offset[row, group]
    again = scheme.unpack(planes, n, k)
    assert np.array_equal(again.q, arrays.q) and np.array_equal(again.scale, arrays.scale)
    assert scheme.symmetric or np.array_equal(again.offset, arrays.offset)


def test_padding_rows_are_zero():
    arrays = random_arrays(np.random.default_rng(1), AffineScheme(5, 32, False), 3, 64)
    for array in arrays.pack().values():
        assert not array[..., 3:, :].any() if array.dtype == np.uint8 else not array[..., 3:].any()


@settings(max_examples=40, deadline=None)
@given(schemes, st.integers(0, 2**32 - 1))
def test_dequantize_is_the_formula_rounded_once(scheme, seed):
    k = max(scheme.group, 32) * 2
    arrays = random_arrays(np.random.default_rng(seed), scheme, 5, k)
    group = np.arange(k) // (scheme.group or k)
    scale = arrays.scale.astype(np.float64)[:, group]
    offset = -scale * 2 ** (scheme.bits - 1) if scheme.symmetric else arrays.offset.astype(np.float64)[:, group]
    # float64 holds the product and the sum of f16s with 8-bit factors without rounding.
    assert np.array_equal(arrays.dequantize(), (scale * arrays.q + offset).astype(np.float32))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("n,k", [(1, 1), (16, 32), (17, 40), (33, 7)])
def test_dense(dtype, n, k):
    rng = np.random.default_rng(n)
    w = rng.normal(size=(n, k)).astype(np.float32)
    w = f32_to_bf16(w) if dtype == "bf16" else w.astype({"f32": "f4", "f16": "f2"}[dtype])
    scheme = DenseScheme(dtype)
    planes = scheme.pack(w)
    assert planes["w"].shape == scheme.planes(n, k)[0].shape and planes["w"].nbytes == scheme.nbytes(n, k)
    for row in range(n):
        assert np.array_equal(planes["w"][row // 16, :, row % 16], w[row])
    assert np.array_equal(scheme.unpack(planes, n, k), w)


def test_bf16_rounds_to_nearest_even():
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, 20000, dtype=np.uint32)
    values = bits.view(np.float32)
    values[:4] = [np.inf, -np.inf, np.nan, 0.0]
    values[4:9] = np.float32(1) + np.array([1, 3, 5, 7, 6], np.float32) / 256  # ties, and one that is none
    mine, nan = f32_to_bf16(values), np.isnan(values)
    assert np.isnan(bf16_to_f32(mine[nan])).all()
    finite = values[np.isfinite(values)].astype(np.float64)
    step = 2.0 ** (np.maximum(np.frexp(finite)[1], -125) - 8)  # 8 bits of each number, fewer of the smallest
    wanted = np.rint(finite / step) * step  # NumPy rounds ties to even
    wanted[np.abs(wanted) >= 2.0**128] *= np.inf
    assert np.array_equal(bf16_to_f32(mine[np.isfinite(values)]), wanted)
    assert np.array_equal(bf16_to_f32(mine[:2]), values[:2])


def test_names_read_back():
    assert len(set(SCHEME_NAMES)) == len(SCHEME_NAMES) == 6 + len(BITS) * len(GROUPS) * 2 + len(LUT4_SCHEMES) + 3
    for name in SCHEME_NAMES:
        assert parse_scheme(name).name == name
    assert AffineScheme(4, 32, False).name == "int4-g32" and AffineScheme(8, 0, True).name == "int8-row-sym"
    with pytest.raises(UnsupportedError, match="int3-g32"):
        parse_scheme("int3-g32")


@pytest.mark.parametrize(
    "make", [lambda: AffineScheme(3, 32, False), lambda: AffineScheme(4, 48, False), lambda: DenseScheme("f64")]
)
def test_other_schemes_are_refused(make):
    with pytest.raises(UnsupportedError, match="supported:"):
        make()


@pytest.mark.parametrize("group,k", [(32, 33), (64, 96), (0, 40), (32, 0)])
def test_columns_must_fit(group, k):
    scheme = AffineScheme(4, group, False)
    assert not scheme.fits(k)
    with pytest.raises(ValueError, match="columns"):
        scheme.planes(16, k)


def test_wrong_arrays_are_refused():
    scheme = AffineScheme(4, 32, True)
    q, scale = np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.float16)
    with pytest.raises(ValueError, match="more than 4 bits"):
        AffineArrays(scheme, q + np.uint8(16), scale)
    with pytest.raises(ValueError, match="offset must be absent"):
        AffineArrays(scheme, q, scale, scale)
    with pytest.raises(ValueError, match="scale"):
        AffineArrays(scheme, q, scale[:1])
    planes = AffineArrays(scheme, q, scale).pack()
    with pytest.raises(ValueError, match="plane q is missing"):
        scheme.unpack({"scale": planes["scale"]}, 2, 32)
    with pytest.raises(ValueError, match="expected u8"):
        scheme.unpack(planes, 17, 32)
