"""Which kernels products of many tokens get: every combination has a kernel that exists, and launches it with its
arguments."""

import pytest

from zse import kernel as zl
from zse.kernel.language import PointerType
from zse.kernel.targets.cuda import CudaTarget
from zse.kernels.gpu import gemm, gemm_launch, gemm_parts
from zse.kernels.gpu.matmul import variants
from zse.kernels.gpu.matmul_cases import SCHEMES
from zse.kernels.matmul import matmul
from zse.quant.scheme import AffineScheme, DenseScheme, Fp8Scheme
from zse.runtime.null import NullGPU
from zse.tensor import Fp8Activation, Tensor, Weight, sum_width

ROWS, WIDTH = 1024, 2048


def params_of(variant):
    """[[name, type], ...] as in a manifest."""

    def type_of(annotation):
        if isinstance(annotation, PointerType):
            return "ptr"
        return "tensormap" if annotation is zl.TensorMap else annotation.name

    return [[name, type_of(annotation)] for name, annotation in variant.kernel.params if annotation is not zl.static]


class Recording(NullGPU):
    """Checks launches against the kernels of an architecture. maps: the (shape, box) of tensor maps."""

    def __init__(self, arch: int):
        like = {80: "sm_80", 90: "sm_90a"}[arch]
        kernels = variants(CudaTarget(like))
        super().__init__(like, {variant.symbol: {"params": params_of(variant)} for variant in kernels})
        self.maps = []

    def tensor_map(self, tensor, box, *, swizzle=0, dims=None, strides=None):
        assert len(box) == len(dims or tensor.shape)
        assert all(0 < side <= 256 for side in box)
        assert swizzle in (0, 128)
        self.maps.append((tuple(dims or tensor.shape), tuple(box)))
        return FakeMap()


class FakeMap:
    host_address = 64


def new(device, shape, dtype):
    return Tensor(device.alloc(64), shape, dtype)


def weight_of(device, scheme):
    layout = "rows" if scheme.kind in ("dense", "fp8") else "r16"
    planes = {plane.name: new(device, plane.shape, plane.dtype) for plane in scheme.planes(ROWS, WIDTH, layout)}
    return Weight((ROWS, WIDTH), scheme, planes, layout)


@pytest.mark.parametrize("arch", (80, 90))
@pytest.mark.parametrize("tokens", (1, 9, 64, 65, 129, 1024))
def test_every_scheme_has_a_kernel(arch, tokens):
    device = Recording(arch)
    for scheme in SCHEMES:
        fp8 = gemm.wants_fp8(device, scheme, tokens)
        assert fp8 == (arch == 90 and tokens > 8 and scheme.kind == "fp8")
        for gate in (None, "silu"):
            recorder = device.record()
            symbol = recorder.symbol("tokens", tokens)
            a = (
                Fp8Activation(
                    new(device, (symbol, WIDTH), "e4m3"),
                    new(device, (symbol,), "f32"),
                    new(device, (symbol, sum_width(WIDTH)), "f16"),
                )
                if fp8
                else new(device, (symbol, WIDTH), "bf16")
            )
            out = new(device, (symbol, ROWS // 2 if gate else ROWS), "bf16" if gate else "f32")
            if gate:
                matmul(recorder, a, weight_of(device, scheme), out, gate=gate, max_tokens=tokens)
            else:
                matmul(recorder, a, weight_of(device, scheme), out, max_tokens=tokens, accumulate=True)
            assert recorder.launches


def test_choice_fills_the_chip():
    """A choice is never slower, by its own model, than the largest tile without splits; parts never outnumber
    processors."""
    for kind in ("bf16", "e4m3", "block", "w4a8", 4, 8):
        for tokens in (65, 128, 300, 512, 1024, 2048, 8192):
            for cols, width in ((4608, 3584), (3584, 3584), (3584, 18944), (1024, 512), (152064, 3584)):
                for gated in (False, True):
                    choice = gemm.choose(kind, gated, tokens, cols, width, 132)
                    made = choice.tile.rows // 2 if gated else choice.tile.rows
                    tiles = -(-tokens // choice.tile.tokens) * -(-cols // made)
                    assert choice.splits == 1 or tiles * choice.splits <= 132
                    size = choice.tile.tokens * choice.tile.rows * 4
                    assert choice.splits == 1 or tiles * choice.splits * size <= 132 * gemm_parts.PARTIAL_BYTES
                    assert choice.splits == 1 or tiles <= 132 * 8  # one counter each


# Microseconds on an H200 of the faster forms, (tokens x rows of the tile, parts): benchmarks/LOG.md.
MEASURED = {
    ("bf16", 128, 3584, 18944): {(128, 64, 2): 48.0, (128, 144, 5): 48.8, (128, 128, 4): 49.6, (128, 64, 1): 67.0},
    ("bf16", 256, 3584, 3584): {(128, 64, 1): 16.2, (128, 128, 2): 18.3, (128, 144, 2): 19.7, (128, 128, 1): 21.2},
    ("bf16", 256, 3584, 18944): {(128, 128, 2): 60.4, (128, 224, 4): 65.1, (128, 144, 2): 65.8, (128, 64, 1): 73.7},
    ("bf16", 1024, 3584, 18944): {(128, 224, 1): 206.4, (128, 128, 1): 221.0, (128, 256, 1): 234.7},
    ("bf16", 1024, 4608, 3584): {(256, 144, 1): 47.9, (128, 144, 1): 49.2, (128, 128, 1): 61.4, (128, 224, 1): 70.3},
    ("e4m3", 128, 3584, 18944): {(128, 64, 2): 28.6, (128, 128, 4): 34.8, (128, 64, 1): 36.9},
    ("e4m3", 1024, 3584, 3584): {(256, 112, 1): 27.3, (128, 128, 1): 31.8},
    ("w4a8", 256, 3584, 18944): {(128, 128, 2): 42.4, (256, 128, 4): 49.4},
    ("w4a8", 1024, 3584, 18944): {(256, 128, 1): 123.9, (128, 128, 1): 144.7},
    ("w4a8", 2048, 3584, 18944): {
        (152, 128, 1): 269.5,
        (256, 128, 1): 293.7,
        (192, 128, 1): 302.1,
        (128, 128, 1): 327.1,
    },
    ("w4a8", 2048, 3584, 3584): {(256, 128, 1): 66.8, (152, 128, 1): 67.3, (128, 128, 1): 73.2},
    ("w4a8", 1024, 3584, 3584): {(256, 128, 1): 32.6, (128, 128, 1): 34.9, (152, 128, 1): 37.1, (192, 128, 1): 45.6},
    ("w4a8", 2048, 4608, 3584): {(192, 128, 1): 84.0, (152, 128, 1): 86.8, (128, 128, 1): 90.6, (256, 128, 1): 93.4},
    ("w4a8", 1024, 4608, 3584): {(152, 128, 1): 42.9, (192, 128, 1): 49.7, (128, 128, 1): 51.6, (256, 128, 1): 61.2},
    (4, 128, 4608, 3584): {(128, 128, 3): 18.0, (128, 128, 1): 31.7, (256, 128, 3): 35.6},
    (4, 256, 3584, 18944): {(256, 128, 4): 65.6, (128, 128, 2): 91.7},
    (4, 512, 3584, 3584): {(256, 128, 2): 32.7, (128, 128, 1): 36.4, (256, 128, 1): 46.7},
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_choice_is_near_what_was_measured(shape):
    """The model picks a form that was at most a tenth slower than the fastest."""
    kind, tokens, cols, width = shape
    tile, splits, _ = gemm.choose(kind, False, tokens, cols, width, 132, 128)
    times = MEASURED[shape]
    assert times[tile.tokens, tile.rows, splits] <= 1.1 * min(times.values())


# Of a model's prompts: whether the warpgroups' tiles were faster each of its own (benchmarks/LOG.md).
PINGPONG = {
    ("e4m3", True, 1024, 18944, 3584): True,
    ("e4m3", True, 2048, 18944, 3584): True,
    ("e4m3", False, 2048, 4608, 3584): True,
    ("e4m3", False, 2048, 3584, 3584): True,
    ("e4m3", False, 2048, 3584, 18944): False,
    ("e4m3", False, 1024, 4608, 3584): False,
    ("bf16", True, 2048, 18944, 3584): True,
}


@pytest.mark.parametrize("shape", PINGPONG, ids=str)
def test_pingpong_where_it_was_faster(shape):
    tile, splits, _ = gemm.choose(*shape, 132)
    assert tile.pingpong == PINGPONG[shape] and splits == 1


def test_pingpong_needs_two_tiles_a_block():
    for kind in ("e4m3", "bf16"):
        for tokens in (65, 128, 256, 512, 1024, 4096):
            for cols in (512, 3584, 18944):
                for gated in (False, True):
                    tile, splits, _ = gemm.choose(kind, gated, tokens, cols, 3584, 132)
                    made = tile.rows // 2 if gated else tile.rows
                    assert not tile.pingpong or (splits == 1 and -(-tokens // tile.tokens) * -(-cols // made) > 132)


def test_skinny_scratch():
    """Two tiles per multiprocessor are the most that gemm_skinny leaves there."""
    for kind, forms in gemm.SKINNY.items():
        room = gemm_parts.PARTIAL_BYTES if isinstance(kind, int) else gemm_parts.SLICE_BYTES
        for tokens, warpgroups in forms:
            assert 2 * tokens * warpgroups * 64 * 4 <= room
        assert forms == tuple(sorted(forms))
    for tokens, blocks in gemm.W4A8_FEW:
        assert 2 * tokens * blocks * 128 * 4 <= gemm_parts.SLICE_BYTES


def test_prepared_weights_come_in_pieces():
    """f16 on Hopper: pieces of PIECE_BYTES, made and multiplied in turn; the product must not read ahead of them."""
    device = Recording(90)
    rows, width, tokens = 20000, 4096, 512
    scheme = DenseScheme("f16")
    planes = {plane.name: new(device, plane.shape, plane.dtype) for plane in scheme.planes(rows, width, "rows")}
    recorder = device.record()
    symbol = recorder.symbol("tokens", tokens)
    matmul(
        recorder,
        new(device, (symbol, width), "bf16"),
        Weight((rows, width), scheme, planes, "rows"),
        new(device, (symbol, rows), "f32"),
        max_tokens=tokens,
    )
    names = [launch.symbol for launch in recorder.launches]
    pieces = -(-rows // (gemm_launch.PIECE_BYTES // (2 * width) // 256 * 256))
    assert names[::2] == ["dequantize_f16"] * pieces
    assert all(name.startswith("gemm_bf16_") for name in names[1::2]) and len(names) == 2 * pieces


def test_takes_names_what_it_takes():
    device = Recording(90)
    weight = weight_of(device, AffineScheme(4, 128, False))
    assert not gemm.takes(device, weight, "bf16", False, 8)
    assert gemm.takes(device, weight, "bf16", True, 9)
    assert not gemm.takes(device, weight_of(device, Fp8Scheme("row")), "bf16", False, 16)
    assert gemm.takes(device, weight_of(device, Fp8Scheme("row")), "fp8", False, 16)
