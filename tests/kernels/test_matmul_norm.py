"""Products that normalize their rows, on the emulated GPU: bit for bit what add_rmsnorm and the product give."""

import numpy as np
import pytest

from zse.bench.kernels import check, outputs, place, read, release
from zse.kernel import (
    Ptr,
    Variant,
    barrier,
    block_index,
    cache,
    f32,
    grid_wait,
    i32,
    kernel,
    shared_array,
    static,
    target,
    thread_index,
)
from zse.kernels.gpu import matmul as gpu_matmul
from zse.kernels.gpu import matmul_norm_cases, norm_prologue
from zse.kernels.matmul import MATMUL
from zse.kernels.norm import add_rmsnorm
from zse.quant.scheme import AffineScheme, DenseScheme, Fp8Scheme
from zse.runtime.emulate import EmulateDevice
from zse.tensor import NormedRows, Tensor

KERNELS = [
    ("sm_90a", AffineScheme(4, 16, False), "few"),  # 12 warps
    ("sm_90a", AffineScheme(4, 128, True), "few"),  # 16
    ("sm_80", AffineScheme(8, 32, True), "few"),  # 8
    ("sm_90a", AffineScheme(4, 32, False), "small"),
    ("sm_90a", DenseScheme("bf16"), "small"),
    ("sm_80", Fp8Scheme("row"), "small"),  # 8 warps
]


@kernel
def inverses(x: Ptr[f32], out: Ptr[f32], tokens: i32, width: i32, eps: f32):
    """out[m] = 1 / rms of row m, as a product's block has it. Grid (blocks of `tokens` rows)."""
    grid_wait()
    x = x + block_index(0) * tokens * width
    scratch = shared_array(f32, 64)
    rounds = norm_prologue.rounds_of(target.threads // 32)
    if width <= 4096:
        xs = [f32.x(4)(0) for _ in static(range(4 * rounds * 2))]
        norm_prologue.load_rows(xs, x, scratch, tokens, width, 4, 2)
    else:
        xs = [f32.x(4)(0) for _ in static(range(2 * rounds * 4))]
        norm_prologue.load_rows(xs, x, scratch, tokens, width, 2, 4)
    barrier()
    for m in static(range(4)):
        if m < tokens and thread_index() == target.threads - 1:
            out[block_index(0) * tokens + m] = norm_prologue.row_inverse(scratch, m, width, eps)


@pytest.fixture(scope="module", params=["sm_90a", "sm_80"])
def device(request):
    probes = {f"inverses_{warps}": Variant(f"inverses_{warps}", inverses, threads=32 * warps) for warps in (8, 12, 16)}
    return EmulateDevice(request.param, cache.package_variants(request.param) | probes)


@pytest.mark.parametrize("tokens, width", [(4, 1904), (3, 4096), (2, 4504), (1, 160)])
def test_the_norm_itself_is_add_rmsnorms(device, tokens, width):
    """1 / rms to the last bit, which bf16 rows would hide: add_rmsnorm shows its own in the rows that it adds. In one of ten
    rows another order of the sums changes it."""
    rng = np.random.default_rng()
    count = 16 * tokens
    rows = rng.standard_normal((count, width)).astype(np.float32)
    rows[:, 0] = 1
    ones, zeros = np.ones(width, np.float32), np.zeros((count, width), np.float32)
    x, delta, weight = (place(device, array) for array in (zeros, rows, ones))
    outs = [place(device, np.full(count, np.nan, np.float32)) for _ in range(3)]
    recorder = device.record()
    add_rmsnorm(recorder, x, delta, weight, None, None, 1e-5)
    for out, warps in zip(outs, (8, 12, 16), strict=True):
        recorder.launch(f"inverses_{warps}", [delta, out, tokens, width, 1e-5], (16,))
    graph = recorder.finish()
    graph.run()
    wanted = np.frombuffer(device.read(x), np.float32).reshape(count, width)[:, 0]
    for out in outs:
        np.testing.assert_array_equal(np.frombuffer(device.read(out), np.float32), wanted)
    np.testing.assert_allclose(wanted, (rows.astype(np.float64) ** 2).mean(axis=1) ** -0.5, rtol=1e-5)
    graph.close()
    release((x, delta, weight, outs))


def test_reference(device):
    """One of the cases; tests/kernels/test_emulated_ops.py takes others, tests/gpu all."""
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    cases = list(matmul_norm_cases.cases(rng))
    case = cases[int(rng.integers(len(cases)))]
    assert check(device, MATMUL, case), f"seed {seed}: {case.name}"


def both(device, case):
    """The results as stored, with the norm in front and with a launch of its own."""
    results = []
    for apart in (False, True):
        arguments = {name: place(device, value) for name, value in case.inputs.items()}
        found, a = outputs(device, case), arguments["a"]
        recorder = device.record()
        if apart:
            normed = Tensor(device.alloc(2 * a.shape[0] * a.shape[1], label="test"), a.shape, "bf16")
            add_rmsnorm(recorder, a.x, None, None, a.weight, normed, a.eps)
            arguments["a"] = normed
        MATMUL.launch(recorder, **arguments, **found, **case.options)
        graph = recorder.finish()
        graph.run()
        results.append(read(device, found["out"], case.outputs["out"]))
        graph.close()
        release((arguments, found, a))
    return results


@pytest.mark.parametrize("device, scheme, kernel", KERNELS, ids=str, indirect=["device"])
def test_the_same_bits_as_two_launches(device, scheme, kernel):
    """Also for rows of more than 4,096 columns, and such that are not finite."""
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    for epilogue, tokens, width in (("store", 4, 1900), ("silu", 3, 160), ("accumulate", 1, 4500)):
        case = matmul_norm_cases.make_case(rng, scheme, epilogue, tokens, 40, width, kernel)
        if tokens == 3:
            case.inputs["a"].x[1, 5] = np.inf
        ours, theirs = both(device, case)
        np.testing.assert_array_equal(ours, theirs, err_msg=f"seed {seed}: {case.name}")


def test_refusals(device):
    """Where no kernel takes it, the message says what to record instead; takes_norm() knows before."""
    rng = np.random.default_rng()
    case = matmul_norm_cases.make_case(rng, DenseScheme("bf16"), "store", 5, 32, 128, None)
    arguments, found = {name: place(device, value) for name, value in case.inputs.items()}, outputs(device, case)
    assert not gpu_matmul.takes_norm(device, arguments["weight"], False, 5)
    with pytest.raises(ValueError, match="no kernel with a norm in front: record add_rmsnorm"):
        MATMUL.launch(device.record(), **arguments, **found, max_tokens=5)
    a = arguments["a"]
    square = place(
        device, matmul_norm_cases.make_case(rng, DenseScheme("bf16"), "store", 1, 128, 128, None).inputs["weight"]
    )
    with pytest.raises(ValueError, match="out is the rows that are read"):
        MATMUL.launch(device.record(), a, square, a.x, max_tokens=4, accumulate=True)
    with pytest.raises(TypeError, match="norm's weight: dtype bf16"):
        MATMUL.launch(
            device.record(),
            NormedRows(a.x, a.weight._replace(dtype="bf16"), a.eps),
            square,
            place(device, np.zeros((5, 128), np.float32)),
            max_tokens=4,
        )


def test_limits():
    assert norm_prologue.fits(4096, 4) and not norm_prologue.fits(4104, 3) and not norm_prologue.fits(4096, 5)
    assert norm_prologue.fits(8192, 2) and not norm_prologue.fits(8200, 1) and not norm_prologue.fits(100, 1)
