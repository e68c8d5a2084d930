"""Matrix products for few tokens on the emulated GPU: every scheme and epilogue against float64, and what a token may
not depend on."""

import numpy as np
import pytest

from zse.bench.kernels import check, outputs, place, read, release
from zse.kernels.gpu import gemm, matmul_cases
from zse.kernels.gpu import matmul as gpu_matmul
from zse.kernels.host import random_weight
from zse.kernels.matmul import MATMUL
from zse.kernels.op import Case, HostArray, OutputSpec, Tolerance
from zse.quant.pack import f32_to_bf16
from zse.quant.scheme import AffineScheme, DenseScheme, Fp8Scheme
from zse_emulator import EmulateDevice

SHARE = 5  # one in so many cases: all of them take 40 s


@pytest.fixture(scope="module", params=["sm_90a", "sm_80"])
def device(request):
    return EmulateDevice(request.param)


def test_reference(device):
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    cases = matmul_cases.small_cases(rng)
    chosen = [cases[number] for number in range(len(cases)) if not rng.integers(SHARE)]
    assert len(chosen) > 20
    for case in chosen:
        assert check(device, MATMUL, case), f"seed {seed}: {case.name} {case.options}"


def product(device, weight, a, kernel):
    """The kernel's result for rows of bf16 bit patterns, f32."""
    shape = (len(a), weight.shape[0])
    case = Case(
        "", {"a": HostArray("bf16", a), "weight": weight}, {"out": OutputSpec(shape, "float32", Tolerance(0, 0, ""))}
    )
    arguments, found = {name: place(device, value) for name, value in case.inputs.items()}, outputs(device, case)
    recorder = device.record()
    gpu_matmul.record(recorder, arguments["a"], arguments["weight"], found["out"], max_tokens=len(a), kernel=kernel)
    graph = recorder.finish()
    graph.run()
    result = read(device, found["out"], case.outputs["out"])
    graph.close()
    release(arguments), release(found)
    return result


@pytest.mark.parametrize(
    "scheme", [AffineScheme(4, 32, False), AffineScheme(8, 128, True), DenseScheme("bf16"), Fp8Scheme("row")], ids=str
)
@pytest.mark.parametrize("kernel", ["small", "few"])
def test_token_alone_and_in_a_batch(device, scheme, kernel):
    """The same bits, also where other tokens are not finite."""
    rng = np.random.default_rng()
    tokens = 4 if kernel == "few" else 7
    weight = random_weight(rng, 48, 384, scheme, "r16" if scheme.kind == "affine" else "rows")
    a = f32_to_bf16(rng.standard_normal((tokens, 384)).astype(np.float32))
    a[1, 5], a[2, 7] = 0x7F80, 0x7FC0  # infinity, NaN
    whole = product(device, weight, a, kernel)
    for token in (0, tokens - 1):
        np.testing.assert_array_equal(product(device, weight, a[token : token + 1], kernel)[0], whole[token])
    assert np.isfinite(whole[[0, 3]]).all() and not np.isfinite(whole[1:3]).any()


@pytest.mark.parametrize(
    "scheme", [AffineScheme(4, 128, False), AffineScheme(8, 64, True), DenseScheme("bf16")], ids=str
)
def test_a_tile_of_many_blocks(scheme):
    """All six of the emulated GPU's blocks have a part of the only tile, so each adds a slice: a token's bits depend
    neither on the batch nor on the run before, which leaves counters and sums at zero. A sum that is zero arrives, too."""
    rng, device = np.random.default_rng(), EmulateDevice("sm_90a")
    weight = random_weight(rng, 64, 1536, scheme, scheme.in_memory["gpu"])
    a = f32_to_bf16(rng.standard_normal((16, 1536)).astype(np.float32))
    a[3] = 0
    wanted = HostArray("bf16", a).wide().astype(np.float64) @ weight.dequantize().astype(np.float64).T
    output = OutputSpec((16, 64), "float32", Tolerance(0, 0, ""))
    case = Case("", {"a": HostArray("bf16", a), "weight": weight}, {"out": output})
    arguments, found = {name: place(device, value) for name, value in case.inputs.items()}, outputs(device, case)
    recorder = device.record()
    tokens = recorder.symbol("tokens", 16)
    gpu_matmul.record(
        recorder, arguments["a"].with_rows(tokens), arguments["weight"], found["out"].with_rows(tokens), max_tokens=16
    )
    graph, results = recorder.finish(), []
    for count in (16, 9, 16):
        graph.run(tokens=count)
        results.append(read(device, found["out"], output)[:count].copy())
    graph.close()
    release(arguments), release(found)
    np.testing.assert_allclose(results[0], wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(results[0][:9], results[1])
    assert not results[0][3].any()


@pytest.mark.parametrize(
    ("scheme", "gated", "tile"),
    [
        (scheme, gated, tile)
        for scheme, kind in ((Fp8Scheme("row"), "e4m3"), (DenseScheme("bf16"), "bf16"))
        for gated in (False, True)
        for tile in gemm.TILES[kind, gated]
        if tile.pingpong
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [96, 1600])
def test_pingpong(scheme, gated, tile, width, monkeypatch):
    """Tiles of one warpgroup each, on blocks with three and two of them, so that one of the two has none at the end; in
    one step of k, and in more than twice as many as the ring has stages: without the turns that the warpgroups take one
    would hold a stage of the other's for its own."""
    rng, device = np.random.default_rng(), EmulateDevice("sm_90a")
    device.num_sms = 3
    made = tile.rows // 2 if gated else tile.rows
    rows = 3 * made + (16 if gated else 2)  # 4 tiles of rows, the last one narrow, by 2 of tokens: 3, 3 and 2 a block
    epilogue = "silu" if gated else ("store", "accumulate", "bf16")[int(rng.integers(3))]
    case = matmul_cases.make_case(rng, scheme, epilogue, 129, rows * (2 if gated else 1), width)
    monkeypatch.setattr(gemm, "choose", lambda *shape: gemm.TileChoice(tile, 1, 0.0))
    launched = []
    monkeypatch.setattr(
        device, "launch", lambda symbol, *rest, of=device.launch: (launched.append(symbol), of(symbol, *rest))
    )
    assert check(device, MATMUL, case), case.name
    assert set(launched) == {gemm.wgmma_symbol("bf16" if scheme.kind == "dense" else "e4m3", tile, gated)}


@pytest.mark.parametrize(
    ("gated", "tile"), [(gated, tile) for gated in (False, True) for tile in gemm.TILES["w4a8", gated]], ids=str
)
def test_int4_tiles_with_fp8_activations(gated, tile, monkeypatch):
    """Each tile of gemm_w4a8, of one product a stage or several: two tiles of tokens by two of rows, of which the second
    ones are narrow, with more stages than a ring has; whole, or in two parts of k."""
    rng, device = np.random.default_rng(), EmulateDevice("sm_90a")
    splits = int(rng.integers(1, 3))
    device.num_sms = 3 if splits == 1 else 8
    made = tile.rows // 2 if gated else tile.rows
    rows = made + 16
    epilogue = "silu" if gated else ("store", "accumulate", "bf16")[int(rng.integers(3))]
    tokens = tile.tokens + int(rng.integers(1, 80))
    scheme = AffineScheme(4, 128, bool(rng.integers(2)))
    case = matmul_cases.make_case(rng, scheme, epilogue, tokens, rows * (2 if gated else 1), 12 * 128, True)
    monkeypatch.setattr(gemm, "choose", lambda *shape: gemm.TileChoice(tile, splits, 0.0))
    launched = []
    monkeypatch.setattr(
        device, "launch", lambda symbol, *rest, of=device.launch: (launched.append(symbol), of(symbol, *rest))
    )
    assert check(device, MATMUL, case), case.name
    assert set(launched) == {gemm.w4a8_symbol(tile.tokens, 0, gated)}


def test_tiny_and_huge_activations(device):
    """Scales of the prepared activations at the ends of the range of bf16."""
    rng = np.random.default_rng()
    weight = random_weight(rng, 32, 256, AffineScheme(4, 32, True))
    for size in (0.0, 1e-38, 1e-20, 1e30):
        a = f32_to_bf16((rng.standard_normal((2, 256)) * size).astype(np.float32))
        wanted = HostArray("bf16", a).wide().astype(np.float64) @ weight.dequantize().astype(np.float64).T
        got = product(device, weight, a, "few")
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=size * 1e-2 + 1e-28)


def test_refusals(device):
    rng = np.random.default_rng()
    weight = place(device, random_weight(rng, 40, 64, AffineScheme(4, 32, True)))
    a = place(device, HostArray("bf16", np.zeros((1, 64), np.uint16)))
    out = place(device, HostArray("bf16", np.zeros((1, 20), np.uint16)))
    with pytest.raises(ValueError, match="no two halves"):
        MATMUL.launch(device.record(), a, weight, out, gate="silu", max_tokens=1)
    with pytest.raises(ValueError, match="supported: silu, gelu_tanh"):
        MATMUL.launch(device.record(), a, weight, out, gate="relu", max_tokens=1)
    with pytest.raises(ValueError, match="layout"):
        MATMUL.launch(
            device.record(),
            a,
            weight._replace(layout="rows"),
            place(device, np.zeros((1, 40), np.float32)),
            max_tokens=1,
        )
