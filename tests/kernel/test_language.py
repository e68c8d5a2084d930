"""The language: staging, types, control flow, intrinsics; results against NumPy on every ISA level of this machine."""

import numpy as np
import pytest

from zse.kernel import (
    Ptr,
    Variant,
    abs_s8,
    add_i16,
    any_lane,
    bf16,
    bitcast,
    block_index,
    cast_ptr,
    concat,
    convert,
    cos,
    dot4_u8s8,
    exp,
    f16,
    f32,
    f64,
    floor,
    fma,
    i8,
    i32,
    i64,
    inline,
    kernel,
    load,
    local_array,
    log,
    narrow_s8,
    num_blocks,
    pairs_i16,
    pairs_u8s8,
    popcount,
    prefetch,
    reduce_add,
    reduce_max,
    reduce_min,
    round_even,
    sign_s8,
    sin,
    splat,
    sqrt,
    static,
    store,
    tanh,
    target,
    u8,
    u16,
    u32,
    u64,
    where,
    widen_high,
    widen_low,
)

from .compiled import Compiled, host_isas


@pytest.fixture(params=host_isas())
def isa(request):
    return request.param


@pytest.fixture
def build(isa, tmp_path):
    return lambda *variants: Compiled(list(variants), isa, tmp_path)


@inline
def twice(v):
    return v + v


@inline
def bounds(a, b):
    low = min(a, b)
    return low, max(a, b)


@kernel
def control(x: Ptr[f32, "const"], out: Ptr[f32], n: i64, limit: i32, REPEAT: static):
    total = f32(0)
    for i in range(n):
        if x[i] < 0.0:
            continue
        total += x[i]
        if total > f32(limit):
            break
    count = i32(0)
    while count < limit and count != 7:
        count += 1
    sums = [f32(u) for u in static(range(REPEAT))]
    for i in range(0, n, 2):
        for u, name in enumerate("ab"):
            if u < REPEAT and name == "ab"[u]:
                sums[u] += twice(x[i])
    low, high = bounds(x[0], x[1])
    low, high = high, low
    out[0], out[1] = total, f32(count)
    out[2], out[3] = low, high
    for u in static(range(REPEAT)):
        out[4 + u] = sums[u] if n > 2 else -sums[u]
    out[10] = f32(block_index(0) + 10 * block_index(1) + 100 * num_blocks(0))


def test_control_flow(build):
    compiled = build(Variant("control", control, {"REPEAT": 2}))
    x = np.array([5, -3, 2, 4, 90, 1], np.float32)
    out = np.full(11, np.nan, np.float32)
    compiled.call("control", x, out, 6, 9, grid=(3, 2))
    assert out[:4].tolist() == [11, 7, 5, -3]
    assert out[4:6].tolist() == [0 + 2 * 97, 1 + 2 * 97]
    assert out[10] == 2 + 10 + 300  # the last block wrote last


@kernel
def elementwise(x: Ptr[f32, "const"], y: Ptr[f32, "const"], out: Ptr[f32], n: i64, LANES: static):
    for i in range(0, n, LANES):
        a, b = load(x + i, LANES), load(y + i, LANES)
        results = [
            exp(a),
            tanh(a),
            sqrt(abs(a)),
            fma(a, b, a),
            floor(a),
            round_even(a),
            min(a, b),
            max(a, b),
            where(a > b, a, b * 2.0),
            abs(a) - b / 4.0,
            log(abs(a) + 1.0),
            sin(a),
            cos(a),
            convert(convert(a, f16), f32),
            convert(convert(a, bf16), f32),
            f32(i32(a)) if LANES == 1 else convert(convert(a, i32), f32),
        ]
        for k in static(range(len(results))):
            store(out + k * n + i, results[k])


@pytest.mark.parametrize("lanes", [1, 4, 8, 16, 32])
def test_elementwise(build, lanes):
    compiled = build(Variant("elementwise", elementwise, {"LANES": lanes}))
    rng = np.random.default_rng(lanes)
    x, y = (rng.standard_normal(64) * 8).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    out = np.full((16, 64), np.nan, np.float32)
    compiled.call("elementwise", x, y, out, 64)
    a, b = x.astype(np.float64), y.astype(np.float64)
    half = x.astype(np.float16).astype(np.float64)
    bits = x.view(np.uint32).astype(np.uint64)
    brain = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    expected = [
        np.exp(a),
        np.tanh(a),
        np.sqrt(abs(a)),
        a * b + a,
        np.floor(a),
        np.rint(a),
        np.minimum(a, b),
        np.maximum(a, b),
        np.where(a > b, a, 2 * b),
        abs(a) - b / 4,
        np.log(abs(a) + 1),
        np.sin(a),
        np.cos(a),
        half,
        brain,
        np.trunc(a),
    ]
    for row, (got, want) in enumerate(zip(out, expected, strict=True)):
        # tanh loses relative accuracy near 0 (1 - 2/(e^2x + 1)): 3e-7 absolute; the rest is f32 rounding
        np.testing.assert_allclose(got, want, rtol=4e-7, atol=4e-7, err_msg=f"row {row}")


def test_exp_accuracy(build):
    compiled = build(Variant("elementwise", elementwise, {"LANES": 8}))
    x = np.linspace(-87, 88, 1 << 16, dtype=np.float32)
    out = np.zeros((16, x.size), np.float32)
    compiled.call("elementwise", x, x, out, x.size)
    exact = np.exp(x.astype(np.float64))
    ulp = np.abs(out[0] - exact) / np.spacing(exact.astype(np.float32))
    assert ulp.max() <= 2.0


@kernel
def integers(x: Ptr[i32, "const"], out: Ptr[i32], LANES: static):
    v = load(x, LANES)
    u = bitcast(v, u32)
    rows = [
        v + 7,
        v * 3,
        (v >> 3) ^ 5,
        bitcast(u >> 3, i32),
        v & 15 | 64,
        ~v,
        min(v, 3),
        max(v, -3),
        -v,
        where(v != 3, v, 0),
    ]
    for k in static(range(len(rows))):
        store(out + k * LANES, rows[k])
    out[len(rows) * LANES] = reduce_add(v)
    out[len(rows) * LANES + 1] = reduce_max(v)
    out[len(rows) * LANES + 2] = reduce_min(v)
    out[len(rows) * LANES + 3] = i32(1) if any_lane(v == 3) else i32(0)
    out[len(rows) * LANES + 4] = i32(popcount(u64(u32(x[0]))))
    joined = concat(widen_high(v), widen_low(v))
    out[len(rows) * LANES + 5] = joined[0]


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_integers(build, lanes):
    compiled = build(Variant("integers", integers, {"LANES": lanes}))
    x = np.random.default_rng(lanes).integers(-1000, 1000, lanes).astype(np.int32)
    x[lanes // 2] = 3
    out = np.zeros(10 * lanes + 6, np.int32)
    compiled.call("integers", x, out)
    rows = [
        x + 7,
        x * 3,
        (x >> 3) ^ 5,
        (x.view(np.uint32) >> 3).view(np.int32),
        x & 15 | 64,
        ~x,
        np.minimum(x, 3),
        np.maximum(x, -3),
        -x,
        np.where(x != 3, x, 0),
    ]
    assert np.array_equal(out[: 10 * lanes].reshape(10, lanes), rows)
    assert out[10 * lanes :].tolist() == [
        x.sum(),
        x.max(),
        x.min(),
        1,
        int(x.view(np.uint32)[0]).bit_count(),
        x[lanes // 2],
    ]


@kernel
def bytes_(w: Ptr[u8, "const"], a: Ptr[i8, "const"], out: Ptr[i32], narrow: Ptr[i8], LANES: static):
    wv, av = load(cast_ptr(w, i32), LANES), load(cast_ptr(a, i32), LANES)
    if target.has("vnni"):
        store(out, dot4_u8s8(splat(i32(5), LANES), wv, av))
    else:
        store(out, pairs_i16(pairs_u8s8(wv & 0x7F7F7F7F, av)) + 5)
    store(out + LANES, pairs_i16(pairs_u8s8(abs_s8(wv), sign_s8(av, wv))))
    store(out + 2 * LANES, pairs_i16(add_i16(pairs_u8s8(wv & 0x0F0F0F0F, av), pairs_u8s8(wv & 0x0F0F0F0F, av))))
    store(narrow, narrow_s8(load(out, LANES)))
    prefetch(w)


def test_packed_bytes(build, isa):
    lanes = 16 if "v4" in isa else 8
    compiled = build(Variant("bytes_", bytes_, {"LANES": lanes}))
    rng = np.random.default_rng(1)
    w = rng.integers(0, 256, lanes * 4).astype(np.uint8)
    a = rng.integers(-127, 128, lanes * 4).astype(np.int8)
    out, narrow = np.zeros(3 * lanes, np.int32), np.zeros(lanes, np.int8)
    compiled.call("bytes_", w, a, out, narrow)

    def fours(products):
        return products.reshape(-1, 4).sum(1)

    first = w.astype(int) if "vnni" in isa else (w & 0x7F).astype(int)
    dots = fours(first * a) + 5
    assert np.array_equal(out[:lanes], dots)
    assert np.array_equal(out[lanes : 2 * lanes], fours(w.view(np.int8).astype(int) * a))
    assert np.array_equal(out[2 * lanes :], 2 * fours((w & 15).astype(int) * a))
    assert np.array_equal(narrow, np.clip(dots, -128, 127))


@kernel
def typed_pointer(x: Ptr["T", "const"], out: Ptr[f64], n: i64, T: static):
    scratch = local_array(f32, 64)
    for i in range(n):
        scratch[i] = f32(x[i])
    for i in range(n):
        out[i] = f64(scratch[i])


@pytest.mark.parametrize("dtype,numpy_type", [(f16, np.float16), (f32, np.float32), (u16, np.uint16), (i8, np.int8)])
def test_pointer_type_from_a_static(build, dtype, numpy_type):
    compiled = build(Variant("typed_pointer", typed_pointer, {"T": dtype}))
    x = np.arange(-8, 24).astype(numpy_type)
    out = np.zeros(32)
    compiled.call("typed_pointer", x, out, 32)
    assert np.array_equal(out, x.astype(np.float64))


def test_text_is_deterministic(isa, tmp_path):
    from zse.kernel.emit import emit_unit

    variants = [Variant("control", control, {"REPEAT": 2}), Variant("elementwise", elementwise, {"LANES": 8})]
    assert emit_unit(variants, isa) == emit_unit(variants, isa)
