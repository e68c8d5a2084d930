"""A token's row of a product does not depend on which other tokens are in the batch, nor on the recording's size."""

import numpy as np
import pytest

from kernels.harness import check_case, each_isa, run_case
from zse.kernels.host import random_weight
from zse.kernels.matmul import MATMUL
from zse.kernels.op import EXACT, Case, HostActivation, OutputSpec, Tolerance
from zse.kernels.route import sorted_pairs
from zse.quant.scheme import AffineScheme, DenseScheme
from zse.quant.superblock import SUPERBLOCK_SCHEMES

SCHEMES = [
    *(
        AffineScheme(bits, group, symmetric)
        for bits in (4, 5, 6, 8)
        for group, symmetric in ((16, False), (32, True), (64, False))
    ),
    *SUPERBLOCK_SCHEMES,
    *(DenseScheme(dtype) for dtype in ("f32", "f16", "bf16")),
]


@pytest.mark.parametrize("isa", each_isa())
@pytest.mark.parametrize("kind", ["f32", "int8", "int16"])
@pytest.mark.parametrize("tokens,rows,width", [(21, 40, 192), (71, 150, 576), (21, 40, 4160)])
def test_a_token_alone_and_in_a_batch(isa, kind, tokens, rows, width):
    """The second shape: more than one block of tokens and of tiles and one piece of columns, with a rest of each. The third: long rows."""
    rng = np.random.default_rng(5)
    for scheme in SCHEMES:
        if kind != "f32" and scheme.kind == "dense":
            continue
        width += -width % scheme.step
        a = rng.standard_normal((tokens, width)).astype(np.float32)
        if kind != "f32":
            a = HostActivation.quantize(a, kind)
        case = Case(
            str(scheme),
            {"a": a, "weight": random_weight(rng, rows, width, scheme), "bias": None},
            {"out": OutputSpec((tokens, rows), "float32", EXACT)},
            {"max_tokens": tokens},
        )
        whole = run_case(MATMUL, case, isa)["out"]
        assert np.isfinite(whole).all()
        # Two, up to 12 and more of a recording for few tokens; two and more of one for many.
        few = ((4, 2, 16), (1, 10, 16), (3, 14, 16), (6, 2, 256))
        for first, count, size in (*few, (0, 1, 1), (20, 1, 1), (7, 1, 16), (3, 4, 4), (5, 11, 256), (2, 3, 256)):
            some = slice(first, first + count)
            part = (
                a[some]
                if kind == "f32"
                else HostActivation(
                    (count, width), a.q[some], a.scale[some], a.sum[some], None if a.low is None else a.low[some]
                )
            )
            got = run_case(
                MATMUL,
                Case(
                    case.name,
                    case.inputs | {"a": part},
                    {"out": OutputSpec((count, rows), "float32", EXACT)},
                    {"max_tokens": size},
                ),
                isa,
            )["out"]
            np.testing.assert_array_equal(got, whole[some], err_msg=f"{scheme} {kind} {first} {count} {size}")


@pytest.mark.parametrize("isa", each_isa())
@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_a_token_alone_and_in_a_batch_with_experts(isa, kind):
    """Of each token what its experts give is the same, whatever else is sent to them: 150 tokens are more than a task takes."""
    rng = np.random.default_rng(6)
    tokens, chosen, experts, rows, width = 150, 2, 3, 32, 320
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
    for scheme in SCHEMES:
        if kind != "f32" and scheme.kind == "dense":
            continue
        width += -width % scheme.step
        a = rng.standard_normal((tokens, width)).astype(np.float32)
        weight = random_weight(rng, experts * rows, width, scheme)
        found = {}
        for some in (slice(0, tokens), slice(20, 21), slice(3, 7), slice(5, 25)):
            routing = sorted_pairs(ids[some], experts)
            some_a = a[some] if kind == "f32" else HostActivation.quantize(a[some], kind)
            case = Case(
                str(scheme),
                {"a": some_a, "weight": weight, "routing": routing},
                {"out": OutputSpec((len(routing.source), rows), "float32", EXACT)},
                {"max_tokens": len(routing.ids), "gather": True},
            )
            got = run_case(MATMUL, case, isa)["out"][routing.place].reshape(-1, chosen, rows)
            found[some.start, some.stop] = got
        whole = found.pop((0, tokens))
        assert np.isfinite(whole).all()
        for (start, stop), got in found.items():
            np.testing.assert_array_equal(got, whole[start:stop], err_msg=f"{scheme} {kind} {start}")


@pytest.mark.parametrize("isa", each_isa())
@pytest.mark.parametrize("tokens", [1, 5, 67])
@pytest.mark.parametrize("scale", [0x00, 0x7F, 0x80, 0xFF])
def test_the_largest_sums_of_integer_scales(isa, tokens, scale):
    """Every weight, scale and activation at an end of its range: sums of i16 and i32 that pass what holds them are far off."""
    rng = np.random.default_rng(7)
    signs = {"all": np.ones(256), "turns": np.tile([1, -1], 128), "mixed": rng.choice([-1, 1], 256)}
    for scheme in SUPERBLOCK_SCHEMES:
        for fill in (0x00, 0xFF):
            weight = random_weight(rng, 16, 256, scheme)
            for name, value in {"q": fill, "high": fill, "scale": scale}.items():
                if name in weight.planes:
                    weight.planes[name][:] = value
            for name, sign in signs.items():
                a = HostActivation.quantize(np.tile(127 * sign, (tokens, 1)).astype(np.float32))
                assert np.abs(a.q).min() == 127
                size = float(np.abs(weight.dequantize().astype(np.float64)).sum(axis=1).max()) * 127
                near = Tolerance(size * 1e-6, 0, "f32 sums of eight blocks")
                out = {"out": OutputSpec((tokens, 16), "float32", near)}
                case = Case(
                    f"{scheme} {fill} {name}", {"a": a, "weight": weight, "bias": None}, out, {"max_tokens": tokens}
                )
                check_case(MATMUL, case, run_case(MATMUL, case, isa))
