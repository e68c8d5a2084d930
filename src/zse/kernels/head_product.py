"""out[m, h] = w[h] @ a[m, h]: a matrix of its own for every head, as multi-head latent attention brings queries into
the space of the latents and results out of it. Weights are dense: together they are a few hundredths of a model."""

from zse import kernel as zl
from zse.kernels import host
from zse.kernels.matmul_tile import TILE, tile_for, token_range
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, launcher, require
from zse.lazy import numpy as np
from zse.quant.scheme import DenseScheme
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div

DTYPES = {"f32": zl.f32, "f16": zl.f16, "bf16": zl.bf16}
TOKENS = (
    1,
    6,
)  # that share a pass over the weights; two sums for each, whatever the number: a token's bits do not depend on it
BLOCK_TILES = 4  # tiles of 16 rows of a grid block
TOKENS_PER_BLOCK = 64


class HeadProduct(zl.Record):
    """Parameters of head_product: weights [H * rows / 16, K, 16], on a GPU [H * rows, K]; a head's inputs are `width`
    numbers from head * step on in a line of `line`."""

    w: zl.Ptr["W", "const"]
    a: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr["T"]
    tokens: zl.index
    heads: zl.index
    rows: zl.index
    width: zl.index
    step: zl.index
    line: zl.index
    W: zl.static
    T: zl.static
    COUNT: zl.static


@zl.kernel
def head_product_tiles(p: HeadProduct):
    """Grid (heads x groups of BLOCK_TILES tiles, groups of TOKENS_PER_BLOCK tokens)."""
    L, COUNT = zl.target.lanes, p.COUNT
    tiles = p.rows // TILE
    groups = (tiles + BLOCK_TILES - 1) // BLOCK_TILES
    head = zl.block_index(0) // groups
    first_tile = zl.block_index(0) % groups * BLOCK_TILES
    token_first, token_last = token_range(p.tokens)
    for tile in range(first_tile, min(first_tile + BLOCK_TILES, tiles)):
        w_tile = p.w + (head * tiles + tile) * p.width * TILE
        for part in range(TILE // L):
            for token in range(token_first, token_last, COUNT):
                at = [min(token + t, token_last - 1) for t in zl.static(range(COUNT))]
                a = [p.a + (at[t] * p.line + head * p.step) for t in zl.static(range(COUNT))]
                sums = [zl.f32.x(L)(0) for _ in zl.static(range(2 * COUNT))]
                for k in range(0, p.width, 2):
                    for u in zl.static(range(2)):
                        column = zl.convert(zl.load(w_tile + (k + u) * TILE + part * L, L), zl.f32)
                        for t in zl.static(range(COUNT)):
                            sums[2 * t + u] = zl.fma(column, zl.splat(a[t][k + u], L), sums[2 * t + u])
                for t in zl.static(range(COUNT)):
                    if token + t < token_last:
                        place = (at[t] * p.heads + head) * p.rows + tile * TILE + part * L
                        zl.store(p.out + place, sums[2 * t] + sums[2 * t + 1])


def product_args(a, weight, out, heads: int, columns: int, dtypes: tuple[str, ...]) -> Args:
    """The kernels' arguments, checked: K a multiple of `columns`, out of one of the dtypes."""
    rows, width = weight.shape
    tokens, line = a.shape
    require(weight.scheme.kind == "dense", f"head_product: weights are {weight.scheme}, expected dense ones")
    require(rows % (heads * TILE) == 0, f"head_product: {rows} rows are not {heads} heads of whole tiles of {TILE}")
    require(width % columns == 0, f"head_product: {width} columns are not a multiple of {columns}")
    require(line % heads == 0 and line // heads >= width, f"head_product: a is {line} wide, {heads} heads of {width}")
    check("head_product a", a, "f32", tokens, line)
    check("head_product out", out, dtypes, tokens, rows)
    args = Args(w=weight.planes["w"], a=a, out=out, tokens=tokens, heads=heads, width=width, line=line)
    return Args(**args, rows=rows // heads, step=line // heads)


def _head_product(recorder, a, weight, out, heads: int, *, max_tokens: int = TOKENS_PER_BLOCK) -> None:
    """out f32 [M, H * N] = for each head, weight[head] [N, K] @ the first K numbers of its part of a f32 [M, H * S], S
    >= K.

    weight: dense, [H * N, K] in layout r16; N a multiple of 16, K even. max_tokens: as of matmul."""
    args = product_args(a, weight, out, heads, 2, ("f32",))
    groups = -(-args["rows"] // (TILE * BLOCK_TILES))
    symbol = f"head_product_{weight.scheme.dtype}_t{tile_for(max_tokens, TOKENS)}"
    recorder.launch(symbol, args, (heads * groups, ceil_div(args["tokens"], TOKENS_PER_BLOCK)))


head_product = launcher(cpu=_head_product, gpu=later("gpu.head_product", "record"))


def _reference(a, weight, heads, out=None, max_tokens=None):
    parts = np.asarray(a, np.float64).reshape(len(a), heads, -1)[..., : weight.shape[1]]
    matrices = weight.dequantize().astype(np.float64).reshape(heads, -1, weight.shape[1])
    return {"out": np.einsum("mhk,hnk->mhn", parts, matrices).reshape(len(a), -1)}


def _cases(rng, family="cpu"):
    for dtype in DTYPES:
        for tokens, heads, rows, width, step in ((1, 40, 256, 64, 96), (1, 3, 16, 512, 512), (71, 5, 80, 32, 48)):
            scheme = DenseScheme(dtype)
            weight = host.random_weight(rng, heads * rows, width, scheme, scheme.in_memory[family])
            size = float(np.abs(weight.dequantize()).max()) * width
            near, outs = Tolerance(size * 2e-6, 1e-5, "f32 sums"), ["float32"]
            if family == "gpu":
                near = Tolerance(
                    width**0.5 * 2.0**-6, 2.0**-8, "both sides rounded to 8 bits, some 2^-8 of each product"
                )
                outs.append("bf16")
            for out in outs:
                yield Case(
                    f"{dtype} {tokens} tokens, {heads} heads of {rows}x{width} to {out}",
                    {"a": rng.standard_normal((tokens, heads * step)).astype(np.float32), "weight": weight},
                    {"out": OutputSpec((tokens, heads * rows), out, near)},
                    {"heads": heads, "max_tokens": tokens},
                )


def _cost(case: Case) -> Cost:
    tokens, weight = len(case.inputs["a"]), case.inputs["weight"]
    products = weight.shape[0] * weight.shape[1]
    return Cost(weight.nbytes + 4 * tokens * (weight.shape[0] + case.inputs["a"].shape[1]), 2 * tokens * products)


def _variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"head_product_{name}_t{count}", head_product_tiles, {"W": dtype, "T": zl.f32, "COUNT": count})
        for name, dtype in DTYPES.items()
        for count in TOKENS
    ]


HEAD_PRODUCT = Op(
    "head_product", _variants, head_product, _reference, _cases, _cost, later("gpu.head_product", "variants")
)
