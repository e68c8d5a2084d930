"""Which kernels attention records on a GPU, what it refuses, and HIP's and Metal's kernel in the emulator; no GPU is needed."""

import numpy as np
import pytest
from gpu.harness import check_cases, read_back, to_tensor, upload
from gpu.heads import same_as_two_launches

from kernels.test_emulated_ops import Spaced
from zse.errors import UnsupportedError
from zse.kernel import cache
from zse.kernels.attention import ATTENTION, attention
from zse.kernels.attention_cases import attention_reference, gpu_batch, make_gpu_cases
from zse.kernels.gpu.attention_plan import MAX_RECORDS, AttentionScratch, decode_share, plan_attention, reciprocal31
from zse.kernels.kv_pages import pages_shape
from zse.kernels.qkv_post import qkv_post
from zse.quant import pack
from zse.runtime.null import NullGPU
from zse.tensor import Tensor
from zse_emulator import EmulateDevice


def new(device, dtype, *shape):
    return Tensor(device.alloc(4), shape, dtype)


def record(
    arch=80, heads=28, kv_heads=4, head_dim=128, dtype="bf16", tokens=5, longest_run=None, change=None, **options
):
    """The symbols that attention with a scratch of its own records."""
    device = NullGPU({80: "sm_80", 90: "sm_90a"}[arch])
    recorder = device.record()
    pages = {
        name: new(device, dtype, 9, kv_heads, *pages_shape(head_dim, dtype, name == "k_pages", "gpu"))
        for name in ("k_pages", "v_pages")
    }
    arguments = {
        "q": new(device, "bf16", tokens, heads * head_dim),
        **pages,
        "page_table": new(device, "i32", 2, 8),
        "token_row": new(device, "i32", tokens),
        "positions": new(device, "i32", tokens),
        "out": new(device, "bf16", tokens, heads * head_dim),
    }
    for name, (kind, *shape) in (change or {}).items():
        arguments[name] = new(device, kind, *shape)
    attention(recorder, scale=0.1, longest_run=longest_run, **arguments, **options)
    return [launch.symbol for launch in recorder.launches]


def test_a_recording_for_one_token_a_row_has_one_launch_a_layer():
    assert record(longest_run=1) == ["attention_plan", "attention_decode_bf16_d128_n1"]
    assert record(longest_run=8) == ["attention_plan", "attention_decode_bf16_d128_n2"]
    assert record(longest_run=9)[1:] == ["attention_decode_bf16_d128_n2", "attention_mma_bf16_d128"]
    assert record(heads=32, kv_heads=2, head_dim=64, longest_run=1)[1:] == ["attention_decode_bf16_d64_n2"]
    assert record(heads=4, kv_heads=1, head_dim=256, longest_run=4)[1:] == ["attention_decode_bf16_d256_n1"]


def test_prompts_over_pages_in_8_bits_use_wgmma_on_hopper():
    assert record(arch=90, dtype="i8")[1:] == ["attention_decode_i8_d128_n2", "attention_prefill_i8_d128"]
    assert record(arch=90, dtype="e4m3", longest_run=1)[1:] == ["attention_decode_e4m3_d128_n1"]
    assert record(arch=80, dtype="e4m3")[1:] == ["attention_decode_e4m3_d128_n2", "attention_mma_e4m3_d128"]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"head_dim": 80}, UnsupportedError, "head_dim 80 is not supported; supported: 64, 96, 128, 256, 512"),
        ({"change": {"q": ("bf16", 5, 100)}}, ValueError, "q is 100 wide"),
        ({"change": {"q": ("f32", 5, 28 * 128)}}, TypeError, "attention q: dtype f32"),
        ({"change": {"k_pages": ("bf16", 9, 4, 128, 16)}}, ValueError, "k_pages"),
        ({"dtype": "f32"}, TypeError, "k_pages: dtype f32"),
        (
            {"change": {"k_pages": ("i8", 9, 4, 16, 128)}},
            ValueError,
            r"k_pages: shape \(9, 4, 16, 128\), expected \(9, 4, 2112\)",
        ),
        ({"dtype": "i8", "change": {"v_pages": ("e4m3", 9, 4, 2112)}}, TypeError, "v_pages: dtype e4m3, expected i8"),
        ({"heads": 129, "kv_heads": 1}, UnsupportedError, "129 is not supported; supported: 1 to 128"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        record(**({"heads": 28} | options))


def test_scratch_belongs_to_windows_and_heads():
    device = NullGPU("sm_80")
    scratch = AttentionScratch.make(device, 28, 4, 128, [0, 512], 64, 4096)
    recorder = device.record()
    plan_attention(recorder, scratch, new(device, "i32", 5), new(device, "i32", 5), "bf16", 1)
    assert [launch.symbol for launch in recorder.launches] == ["attention_plan"] * 2
    for options, message in (
        ({"window": 100}, "windows"),
        ({"heads": 8}, "other heads"),
        ({"kv_heads": 2}, "other heads"),
    ):
        with pytest.raises(ValueError, match=message):
            record(scratch={(4, 128): scratch}, **options)
    assert scratch.capacity == MAX_RECORDS and AttentionScratch.make(device, 28, 4, 128, [0], 2, 100).capacity == 2


def test_heads_of_512_are_shared_by_two_warps():
    for arch in (80, 90):
        wide = dict(arch=arch, heads=8, kv_heads=1, head_dim=512)
        assert record(**wide)[1:] == ["attention_decode_bf16_d512_n1", "attention_mma_bf16_d512"]
        with pytest.raises(UnsupportedError, match="head_dim 512 is not supported; supported: 64, 96, 128, 256"):
            record(**wide, dtype="i8")


@pytest.mark.parametrize(
    "like", ["gfx90a", pytest.param("metal3.1", marks=pytest.mark.exhaustive("kernels of a second architecture"))]
)
def test_sinks_and_wide_heads_without_matrix_instructions(like, kept_kernels):
    names = ("decode, sinks", "decode, wide, group", "verification, wide")
    cases = make_gpu_cases(np.random.default_rng(3), names)
    assert len(cases) > 10
    with EmulateDevice(like, cache.package_variants(like), seed=3) as device:
        check_cases(ATTENTION, device, 3, cases, 5)


@pytest.mark.parametrize("heads, kv_heads, head_dim, norm", [(14, 2, 128, True), (9, 3, 64, False)])
def test_heads_made_by_attention_have_the_bits_of_their_own_launch(heads, kv_heads, head_dim, norm, kept_kernels):
    with Spaced("sm_90a", seed=3) as device:
        same_as_two_launches(device, heads, kv_heads, head_dim, norm)


def test_groups_are_cut_into_equal_parts_that_fit_a_tile():
    assert [decode_share(group, 128) for group in (1, 7, 8, 16, 24, 32, 17)] == [1, 1, 1, 1, 2, 2, 17]
    assert [decode_share(group, 256) for group in (4, 8, 12, 16)] == [1, 1, 2, 2]


def test_division_by_multiplication_is_exact():
    for divisor in (1, 2, 3, 5, 7, 8, 12, 17, 96, 128):
        factor = reciprocal31(divisor)
        for n in (*range(300), 65535, 65536, 10**6, (2**31 - 1) // divisor - 1):
            assert n * factor >> 31 == n // divisor, (n, divisor)


@pytest.mark.parametrize(
    "dtype, shape, message",
    [
        ("e4m3", (4, 2, 16, 64), r"expected \(4, 2, 1088\)"),
        ("i8", (4, 2, 1024), "k_pages"),
        ("bf16", (4, 2, 1088), "k_pages"),
    ],
)
def test_qkv_post_wants_pages_of_the_form_of_their_type(dtype, shape, message):
    device = NullGPU("sm_80")
    tensors = {
        "qkv": new(device, "f32", 3, 12 * 64),
        "q_norm": None,
        "k_norm": None,
        "table": new(device, "f32", 3, 64),
        "q_out": new(device, "bf16", 3, 8 * 64),
        "page_table": new(device, "i32", 1, 4),
        "token_row": new(device, "i32", 3),
        "positions": new(device, "i32", 3),
    }
    values = new(device, dtype, 4, 2, *pages_shape(64, dtype, False, "gpu"))
    with pytest.raises(ValueError, match=message):
        qkv_post(device.record(), **tensors, k_pages=new(device, dtype, *shape), v_pages=values)


@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 128), ("f16", 64), ("e4m3", 96)])
def test_prompts_are_the_same_however_their_tiles_are_dealt(dtype, head_dim):
    """To few blocks and to many: whole tiles, and halves of what is left over for less than half of the blocks."""
    rng = np.random.default_rng()
    heads, kv_heads = 6, 2
    batch = gpu_batch(rng, [(int(rng.integers(250, 300)), 60), (260, 120), (9, 3)], heads, kv_heads, head_dim, dtype)
    device = Spaced("sm_90a")
    tensors = {name: to_tensor(device, value) for name, value in batch.items()}
    results = []
    for blocks in (1, 5, 11, 64):  # 12 to 14 tiles x heads, of 42 tokens
        scratch = AttentionScratch.make(device, heads, kv_heads, head_dim, [0], 183, 416)._replace(blocks=blocks)
        out = upload(device, np.full((183, heads * head_dim), 0x7FFF, np.uint16), "bf16")

        def record(recorder, scratch=scratch, out=out):
            plan_attention(recorder, scratch, tensors["token_row"], tensors["positions"], dtype)
            attention(recorder, out=out, scale=0.1, scratch={(kv_heads, head_dim): scratch}, **tensors)

        device.run(record)
        results.append(read_back(device, out, np.uint16))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    wanted = attention_reference(**batch, scale=0.1)["out"]
    np.testing.assert_allclose(pack.bf16_to_f32(results[0]), wanted, rtol=6e-3, atol=6e-3)
