"""out[m, n] = sum_k a[m, k] * w[n, k] + bias[n]: every weight scheme; int8, int16 or f32 activations, one token or
many.

On a CPU weights are in the r16 layout (docs/design/0001-cpu-engine.md): a register's lanes are rows, so nothing is
added across lanes, and one broadcast of activations serves all rows of a tile. A scheme names the module of its kernels
(`products`), which has

    variants(target)                    the kernels
    launch_of(weight, a, max_tokens)    the one for these activations, the arguments that only it takes, tiles of a grid block
"""

from collections.abc import Iterator
from importlib import import_module

from zse import kernel as zl
from zse.kernels import activation, host
from zse.kernels.matmul_tile import DENSE, GATHERED, PAIRS, TILE, TOKENS_PER_BLOCK
from zse.kernels.op import (
    Case,
    Cost,
    HostActivation,
    HostArray,
    HostFp8Activation,
    Op,
    OutputSpec,
    Tolerance,
    cases_of,
    check,
    later,
    launcher,
    require,
)
from zse.lazy import numpy as np
from zse.quant.scheme import BITS, DENSE_DTYPES, LUT4_SCHEMES, SCHEMES, AffineScheme, DenseScheme
from zse.quant.superblock import SUPERBLOCK_SCHEMES
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div


def _matmul(
    recorder,
    a,
    weight,
    out,
    bias=None,
    *,
    independent: bool = False,
    max_tokens: int = TOKENS_PER_BLOCK,
    accumulate: bool = False,
    gate: str | None = None,
    routing=None,
    gather: bool = False,
) -> None:
    """out [M, N] = a [M, K] @ weight [N, K].T + bias f32 [N].

    With a `routing` (zse.tensor.Routing) of M tokens and P pairs the weight is a stack of experts [E * N, K], bias [E,
    N]: out [P, N], sorted by expert, of a [P, K], sorted likewise, or with `gather` of the tokens' a [M, K].

    a: f32 Tensor, int8 or int16 Activation, as the weight's scheme takes them; out f32. max_tokens: the most tokens
    this recording will run with; it picks the kernel and how many tokens share a pass over the weights. independent:
    may overlap with the launch just before. accumulate, gate: a GPU's (kernels/gpu/matmul.py)."""
    require(not accumulate, "matmul: accumulate is the GPU's; add_rmsnorm adds on the CPU")
    require(gate is None, "matmul: gate is the GPU's; on the CPU record matmul and gated")
    (rows, width), scheme = weight.shape, weight.scheme
    tokens = out.shape[0]
    stack, sharing = Args(tasks=None, source=None, experts=DENSE), max_tokens
    if routing is not None:
        rows, stack, num_tasks, sharing = _stack(a, weight, out, routing, gather, max_tokens)
    else:
        num_tasks = ceil_div(tokens, TOKENS_PER_BLOCK)
        check("matmul a", a, ("f32", "int8", "int16"), tokens, width)
    check("matmul out", out, "f32", tokens, rows)
    if bias is not None:
        check("matmul bias", bias, "f32", weight.shape[0])
    require(scheme.fits(width), f"matmul: {width} columns do not fit {scheme}")
    require(
        a.dtype in scheme.forms,
        f"matmul: {scheme.kind} weights take {' or '.join(scheme.forms) or 'no'} activations on a CPU",
    )
    symbol, args, tiles = import_module(scheme.products).launch_of(weight, a, sharing)
    common = Args(bias=bias, out=out, tokens=tokens, rows=rows, has_bias=int(bias is not None), **stack)
    grid = (-(-rows // (TILE * tiles)), num_tasks)
    if tiles > 1:
        grid = grid[::-1]
    recorder.launch(symbol, Args(**args, **common), grid, independent=independent)


def _stack(a, weight, out, routing, gather: bool, max_tokens: int):
    """(rows of an expert, the arguments that name them, tasks, about how many tokens share one) of a product with a
    stack."""
    (tokens, chosen), (pairs, rows) = routing.ids.shape, out.shape
    experts = weight.shape[0] // rows
    require(
        rows % TILE == 0 and rows * experts == weight.shape[0], f"matmul: {weight.shape[0]} rows of {rows} an expert"
    )
    check("matmul source", routing.source, "i32", pairs)
    check("matmul tasks", routing.tasks, "i32", None, 3)
    check("matmul a", a, ("f32", "int8", "int16"), tokens if gather else pairs, weight.shape[1])
    args = Args(tasks=routing.tasks, source=routing.source, experts=GATHERED if gather else PAIRS)
    # Twice the mean: what the kernels that share weights between tokens gain is more than what they lose for few.
    sharing = min(max_tokens, 2 * -(-max_tokens * chosen // experts))
    return rows, args, routing.tasks.shape[0], sharing


matmul = launcher(cpu=_matmul, gpu=later("gpu.matmul", "record"))


def _variants(target) -> list[zl.Variant]:
    modules = dict.fromkeys(scheme.products for scheme in SCHEMES if scheme.forms)
    return [variant for module in modules for variant in import_module(module).variants(target)]


def _reference(a, weight, bias=None, out=None, gate=None, accumulate=False, max_tokens=None, kernel=None):
    x = (
        a.dequantize()
        if isinstance(a, HostActivation | HostFp8Activation)
        else np.asarray(a.wide() if isinstance(a, HostArray) else a, np.float64)
    )
    y = x @ weight.dequantize().astype(np.float64).T
    if bias is not None:
        y = y + bias.astype(np.float64)
    if gate is not None:
        return activation.GATED.reference(y, gate)
    return {"out": y + out if accumulate else y}


def _cpu_cases(rng) -> Iterator[Case]:
    schemes = [
        AffineScheme(bits, group, symmetric)
        for bits in BITS
        for group in (16, 32, 64, 0)
        for symmetric in (False, True)
    ]
    shapes = [(1, 32, 64), (3, 40, 128), (8, 16, 192), (67, 24, 64), (1, 1, 256), (5, 33, 320)]
    for scheme in [*schemes, *LUT4_SCHEMES, *SUPERBLOCK_SCHEMES, *(DenseScheme(dtype) for dtype in DENSE_DTYPES)]:
        for kind in sorted(scheme.forms):
            tokens, rows, width = shapes[int(rng.integers(len(shapes)))]
            width = -(-width // scheme.step) * scheme.step
            weight = host.random_weight(rng, rows, width, scheme)
            a = rng.standard_normal((tokens, width)).astype(np.float32)
            if kind != "f32":
                a = HostActivation.quantize(a, kind)
            bias = rng.standard_normal(rows).astype(np.float32) if rng.integers(2) else None
            size = float(np.abs(weight.dequantize()).max()) * width
            near = Tolerance(size * 4e-6, 1e-5, f"f32 sums over {width} products in another order than float64")
            yield Case(
                f"{scheme} {kind} {tokens}x{rows}x{width}",
                {"a": a, "weight": weight, "bias": bias},
                {"out": OutputSpec((tokens, rows), "float32", near)},
                {"max_tokens": tokens},
            )


def _cost(case: Case) -> Cost:
    tokens, width = case.outputs["out"].shape[0], case.inputs["weight"].shape[1]
    a, out, weight = case.inputs["a"], case.outputs["out"], case.inputs["weight"]
    moved = weight.nbytes + tokens * width * (
        2 if isinstance(a, HostArray) else 1 if isinstance(a, HostFp8Activation) else 4
    )
    moved += 0 if getattr(a, "low", None) is None else tokens * width
    moved += out.shape[0] * out.shape[1] * (2 if out.dtype == "bf16" else 8 if out.inout is not None else 4)
    return Cost(moved, 2 * tokens * weight.shape[0] * width)


MATMUL = Op(
    "matmul",
    _variants,
    matmul,
    _reference,
    cases_of(cpu=_cpu_cases, gpu=later("gpu.matmul_cases", "cases")),
    _cost,
    later("gpu.matmul", "variants"),
    later("gpu.matmul_sizes", "sizes"),
)
