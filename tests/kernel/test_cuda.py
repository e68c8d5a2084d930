"""CUDA text: every kernel of gpu_kernels.py compiles without spills; the text of a few is reviewed by diff
(`python -m pytest tests/kernel/test_cuda.py --update-golden` rewrites the files). What they compute: test_emulator.py, and on hardware
`python -m kernel.probe` from the folder tests."""

from pathlib import Path

import numpy as np
import pytest

from zse import kernel as zl
from zse.errors import CompileError
from zse.kernel import nvrtc
from zse.kernel.archs import features_of
from zse.kernel.emit import emit_gpu, emit_unit
from zse.kernel.targets.gpu import small_float_bits

from . import gpu_cases
from .test_errors import check
from .test_golden import without_lines

FOLDER = Path(__file__).parent / "golden"
GOLDEN = ("vector_add", "row_sum", "warp_tile_bf16", "warpgroup_bf16_8_128_r", "convert_f32_e4m3_4")


def variants(arch: str) -> dict[str, zl.Variant]:
    """One of each symbol that the architecture can have."""
    features = features_of(arch)[1]
    return {
        case.variant.symbol: case.variant
        for case in gpu_cases.all_cases(np.random.default_rng(0))
        if set(case.needs) <= features
    }


OTHERS = pytest.mark.exhaustive("kernels of a second architecture")


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=OTHERS), pytest.param("sm_100", marks=OTHERS)])
def test_everything_compiles(arch):
    if nvrtc.find_library() is None:
        pytest.skip("NVRTC is not here")
    for symbol, variant in variants(arch).items():
        compiled = nvrtc.compile_variant(variant, arch)
        assert compiled.symbol == symbol and compiled.spills == 0 and 8 <= compiled.registers <= 255


@pytest.mark.parametrize("symbol", GOLDEN)
def test_text(symbol, request):
    text = without_lines(emit_gpu(variants("sm_90a")[symbol], "sm_90a")[0])
    path = FOLDER / f"{symbol}.sm_90a.cu"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"the CUDA C++ of {symbol} changed; look at the diff, then --update-golden"
    assert emit_gpu(variants("sm_90a")[symbol], "sm_90a") == emit_gpu(variants("sm_90a")[symbol], "sm_90a")


@pytest.mark.parametrize(
    "name,value,bits",
    [
        ("bf16", 1.0, 0x3F80),
        ("bf16", 1.00390625, 0x3F80),
        ("bf16", 1.01171875, 0x3F82),
        ("f16", 1.5, 0x3E00),
        ("f16", -2.0, 0xC000),
        ("e4m3", 1.0, 0x38),
        ("e4m3", 1000.0, 0x7E),
        ("e4m3", -0.0, 0x80),
        ("e4m3", 2.0**-9, 1),
        ("e4m3", float("nan"), 0x7F),
    ],
)
def test_constants_of_small_floats(name, value, bits):
    assert small_float_bits(name, value) == bits


@zl.kernel
def in_place(x: zl.Ptr[zl.u32]):
    a, b = zl.u32(1), zl.u32(2)
    zl.asm("add.u32 %0, %0, %1;", [a], b)
    x[0] = a


def test_a_list_in_a_call_names_the_variables():
    text, _ = emit_gpu(zl.Variant("in_place", in_place), "sm_80")
    assert 'asm volatile("add.u32 %0, %0, %1;" : "+r"(a) : "r"(b)' in text


@zl.kernel
def loops(x: zl.Ptr[zl.f32], n: zl.i32):
    for i in zl.unroll(range(n), 4):
        x[i] = zl.f32(i)
    for i in zl.unroll(range(8)):
        x[i] = zl.f32(i)
    for i in zl.unroll(range(n), 1):
        x[i] = zl.f32(i)
    while zl.atomic_add(x, 1.0) < 5.0:
        x[1] = 2.0


def test_loops():
    text, _ = emit_gpu(zl.Variant("loops", loops), "sm_80")
    assert [line.strip().split("  //")[0] for line in text.splitlines() if "#pragma" in line] == [
        "#pragma unroll 4",
        "#pragma unroll",
        "#pragma unroll 1",
    ]
    assert "while (true)" in text and "break;" in text and "i64" not in text.split("extern")[1]


def skipped_effect(x: zl.Ptr[zl.f32], n: zl.i32):
    if n > 3 and zl.shuffle(n, 0) > 2:
        x[0] = 1.0


def effect_in_a_select(x: zl.Ptr[zl.f32], n: zl.i32):
    x[0] = zl.shuffle(x[0], 0) if n > 3 else 0.0


def wrong_accumulators(x: zl.Ptr[zl.f32]):
    acc = [zl.f32(0), zl.f32(0)]
    zl.mma_bf16(acc, [zl.u32(0)] * 4, [zl.u32(0)] * 2)


def global_destination(x: zl.Ptr[zl.f32], y: zl.Ptr[zl.f32, "const"]):
    zl.copy_async(x, y, 16)


def odd_table(x: zl.Ptr[zl.u32]):
    x[0] = zl.lop3(x[0], x[1], x[2], 256)


def half_atomic(x: zl.Ptr[zl.bf16]):
    zl.atomic_add(x, 1.0)


def copied_map(m: zl.TensorMap, x: zl.Ptr[zl.f32]):
    other = m
    x[0] = zl.f32(other)


def small_arithmetic(x: zl.Ptr[zl.e4m3]):
    x[0] = x[0] + x[1]


@pytest.mark.parametrize(
    "function,reason,excerpt",
    [
        (skipped_effect, "write an if statement", "if n > 3 and zl.shuffle(n, 0) > 2:"),
        (effect_in_a_select, "write an if statement", "x[0] = zl.shuffle(x[0], 0) if n > 3 else 0.0"),
        (wrong_accumulators, "a list of 4 f32 variables", "zl.mma_bf16(acc, [zl.u32(0)] * 4, [zl.u32(0)] * 2)"),
        (global_destination, "the destination needs a pointer to shared memory", "zl.copy_async(x, y, 16)"),
        (odd_table, "0 to 255", "x[0] = zl.lop3(x[0], x[1], x[2], 256)"),
        (half_atomic, "atomic_add() of bf16", "zl.atomic_add(x, 1.0)"),
        (copied_map, "used where it is declared", "other = m"),
        (small_arithmetic, "no arithmetic on e4m3", "x[0] = x[0] + x[1]"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_errors_show_the_line(function, reason, excerpt):
    with pytest.raises(CompileError) as caught:
        emit_gpu(zl.Variant("symbol", zl.kernel(function)), "sm_90a")
    check(str(caught.value), reason, excerpt, __file__)


def test_what_an_architecture_lacks_is_named():
    wgmma = variants("sm_90a")["warpgroup_plain"]
    with pytest.raises(
        CompileError, match="needs tma, which target sm_80 does not have|needs wgmma, which target sm_80"
    ):
        emit_gpu(wgmma, "sm_80")


@zl.kernel
def on_the_cpu(x: zl.Ptr[zl.f32]):
    tile = zl.shared_array(zl.f32, 4)
    zl.store(x, tile[0])


@zl.kernel
def thread_on_the_cpu(x: zl.Ptr[zl.f32]):
    x[zl.block_index(0)] = zl.f32(zl.thread_index())


@pytest.mark.parametrize("function", [on_the_cpu, thread_on_the_cpu])
def test_the_cpu_has_no_threads(function):
    with pytest.raises(CompileError, match="local_array|thread_index has no body"):
        emit_unit([zl.Variant("symbol", function)], "x86-64-v3")
