"""head_product on a GPU: a warp multiplies 16 rows of a head's matrix with tokens by mma m16n8k16, straight from
memory."""

from zse import kernel as zl
from zse.kernels.gpu.attention_parts import multiply, pack_pair
from zse.kernels.head_product import HeadProduct, product_args
from zse.runtime.symbol import ceil_div

THREADS = 128
ROWS = 64  # of a block
TYPES = {"bf16": zl.bf16, "f16": zl.f16, "f32": zl.f32}
OUT = {"f32": zl.f32, "bf16": zl.bf16}
TILES = (1, 4)  # of 8 tokens a block


@zl.inline
def two_of(place, F):
    """Two neighbours as one word of two F."""
    both = zl.load(place, 2)
    wide = zl.convert(both, zl.f32)
    return pack_pair(wide[0], wide[1], F)


@zl.kernel
def head_product_gpu(p: HeadProduct):
    """Grid (heads x groups of ROWS rows, groups of 8 * COUNT tokens)."""
    zl.grid_launch_dependents()
    F = zl.f16 if p.W is zl.f16 else zl.bf16
    groups = (p.rows + ROWS - 1) // ROWS
    head = zl.block_index(0) // groups
    row = zl.block_index(0) % groups * ROWS + zl.warp_index() * 16
    first = zl.block_index(1) * (8 * p.COUNT)
    g = zl.lane_index() // 4
    j = zl.lane_index() % 4
    zl.grid_wait()
    if row >= p.rows:
        return
    weights = p.w + (zl.i64(head) * p.rows + row + g) * p.width + j * 2
    inputs = [
        p.a + zl.i64(min(first + n * 8 + g, p.tokens - 1)) * p.line + (head * p.step + j * 2)
        for n in zl.static(range(p.COUNT))
    ]
    acc = [[zl.f32(0) for _ in zl.static(range(4))] for n in zl.static(range(p.COUNT))]
    for k in zl.unroll(range(0, p.width, 16), 2):
        frags = [two_of(weights + (u % 2 * 8 * p.width + k + u // 2 * 8), F) for u in zl.static(range(4))]
        for n in zl.static(range(p.COUNT)):
            multiply(acc[n], frags, [two_of(inputs[n] + (k + u * 8), F) for u in zl.static(range(2))], F)
    for n in zl.static(range(p.COUNT)):
        for u in zl.static(range(4)):
            token = first + n * 8 + j * 2 + u % 2
            if token < p.tokens:
                place = (zl.i64(token) * p.heads + head) * p.rows + (row + g + u // 2 * 8)
                p.out[place] = zl.convert(acc[n][u], p.T)


def record(recorder, a, weight, out, heads: int, *, max_tokens: int = 64) -> None:
    """head_product() on a GPU: weights in layout rows, out f32 or bf16; N and K multiples of 16."""
    args = product_args(a, weight, out, heads, 16, tuple(OUT))
    count = TILES[0] if max_tokens <= 8 else TILES[1]
    symbol = f"head_product_{weight.scheme.dtype}_{out.dtype}_t{8 * count}"
    recorder.launch(symbol, args, (heads * -(-args["rows"] // ROWS), ceil_div(args["tokens"], 8 * count)))


def variants(target) -> list[zl.Variant]:
    if not target.has("mma_sync"):
        return []
    return [
        zl.Variant(
            f"head_product_{name}_{out}_t{8 * count}",
            head_product_gpu,
            {"W": dtype, "T": OUT[out], "COUNT": count},
            threads=THREADS,
        )
        for name, dtype in TYPES.items()
        for out in OUT
        for count in TILES
    ]
