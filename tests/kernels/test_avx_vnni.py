"""The level of CPUs that have VNNI in registers of 256 bits and no AVX-512, on any machine with AVX2: its one instruction is
computed by others here, all else is compiled and run as it is there."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kernels import harness
from kernels.harness import check_case, run_case
from zse import build
from zse.kernels import floor
from zse.kernels.host import random_weight
from zse.kernels.matmul import MATMUL
from zse.kernels.op import Case, HostActivation, OutputSpec, Tolerance
from zse.quant.scheme import parse_scheme
from zse.runtime import native
from zse.runtime.args import Args
from zse.runtime.compiler import KERNEL_FLAGS

LEVEL = "x86-64-v3-vnni"
SCHEMES = ("int4-g32", "int8-g32-sym", "int6-g16-sym-i8", "lut4-iq4-g32-i8")
PRODUCTS = re.compile("matmul_int(8|16)_(int4a_g32|int8s_g32|int6s_g16_i8|lut4_i8_g32)_(t1|t8|many)")
EMULATED = """#include <immintrin.h>
#include <stdint.h>
static inline __attribute__((unused)) void zse_dots(int32_t *acc, const uint8_t *w, const int8_t *a, int lanes) {
    for (int i = 0; i < 4 * lanes; ++i) acc[i / 4] += w[i] * a[i];
}
static inline __attribute__((unused)) __m256i zse_dots_256(__m256i acc, __m256i w, __m256i a) {
    zse_dots((int32_t *)&acc, (const uint8_t *)&w, (const int8_t *)&a, 8);
    return acc;
}
static inline __attribute__((unused)) __m128i zse_dots_128(__m128i acc, __m128i w, __m128i a) {
    zse_dots((int32_t *)&acc, (const uint8_t *)&w, (const int8_t *)&a, 4);
    return acc;
}
#define _mm256_dpbusd_avx_epi32 zse_dots_256
#define _mm_dpbusd_avx_epi32 zse_dots_128
"""
pytestmark = pytest.mark.skipif("x86-64-v3" not in harness.host_isas(), reason="not an x86-64 CPU with AVX2")


@pytest.fixture(scope="module")
def level(tmp_path_factory):
    """The level's products, in the place of its library."""
    folder = tmp_path_factory.mktemp("level")
    (folder / "emulated.h").write_text(EMULATED)
    flags = (*KERNEL_FLAGS, "-march=x86-64-v3", "-fno-strict-aliasing", "-include", str(folder / "emulated.h"))
    symbols = [variant.symbol for variant in MATMUL.variants(build.ISAS[LEVEL]) if PRODUCTS.fullmatch(variant.symbol)]
    assert len(symbols) == 19
    symbols.append("floor_int8")
    device = harness.cpu_device("x86-64-v3")  # which stands for the level's; of that library, and kept for other tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_flags", lambda _: flags)
        build.Builder(folder, 2, quiet=True).kernel_library(LEVEL, symbols, "products")
        library, manifest = native.kernel_files(str(folder), LEVEL, "products")
        kernels = json.loads(Path(manifest).read_text())["kernels"]
        patch.setattr(harness, "library", lambda _: (library, kernels))
        patch.setattr(harness, "cpu_device", lambda _: device)
        yield LEVEL


@pytest.mark.exhaustive("kernels of lower CPU levels")
@pytest.mark.parametrize("kind", ["int8", "int16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_equal_their_reference(level, scheme, kind):
    """One token, some, and many, as tests/kernels/test_ops.py; every one alone has the bits that it has in a batch."""
    rng = np.random.default_rng()
    seed = int(rng.integers(2**32))
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, 40, 512, parse_scheme(scheme))
    x = HostActivation.quantize(rng.standard_normal((37, 512)).astype(np.float32), kind)
    results = []
    for count in (37, 9, 3, 1):
        part = HostActivation((count, 512), *(None if p is None else p[:count] for p in (x.q, x.scale, x.sum, x.low)))
        out = {"out": OutputSpec((count, 40), "float32", Tolerance(2e-5, 2e-4, "sums of f32 in another order"))}
        case = Case(scheme, {"a": part, "weight": weight, "bias": None}, out, {"max_tokens": count})
        got = run_case(MATMUL, case, level, rng)
        try:
            check_case(MATMUL, case, got)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
        results.append(got["out"])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0][: len(result)])


@pytest.mark.exhaustive("kernels of lower CPU levels")
def test_the_floor_of_products_multiplies_all(level):
    rng = np.random.default_rng()
    w, a = (rng.integers(-(2**31), 2**31, count).astype(np.int32) for count in (24, floor.WORDS))
    out = np.full(floor.OUT_BYTES // 4, -1, np.int32)
    args = Args({name: harness.to_tensor(array) for name, array in (("w", w), ("a", a), ("out", out))})
    harness.DirectRecorder(level, rng).launch("floor_int8", args, (1,))
    sums = a.view(np.int8).astype(np.int64).reshape(-1, 4).sum(0)
    passes = floor.PRODUCTS // (24 * floor.WORDS)
    wanted = (w.view(np.uint8).astype(np.int64).reshape(24, 4) @ sums * passes).astype(np.int32)
    np.testing.assert_array_equal(out[:24], wanted)
    assert (out[24:] == -1).all()
