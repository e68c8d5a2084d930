"""Matrix products on a GPU: which kernel a weight and a number of tokens get. On GPUs without matrix instructions in
the language (HIP, Metal) all of them are matmul_simple's.

Up to 8 tokens matmul_small, or for integer weights and up to 4 tokens matmul_few where a multiprocessor has two units
of rows and more, of 4 and 8 bits and one token always; above, gemm.py where it takes the weight, else matmul_small, 8
tokens at a time. In each of them a token's result is the same bits alone and in a batch; between them it differs by
rounding (f32 sums in another order, and 2**-16 of the largest activation of 128 in matmul_few).
"""

from zse.kernel import Variant
from zse.kernels.gpu import experts, gemm
from zse.kernels.gpu import matmul_few as few
from zse.kernels.gpu import matmul_simple as simple
from zse.kernels.gpu import matmul_small as small
from zse.kernels.gpu.gemm import takes
from zse.kernels.gpu.gemm_launch import launch as launch_gemm
from zse.kernels.gpu.matmul_few import CHUNK, ELEMENTS
from zse.kernels.gpu.matmul_few import TOKENS as FEW_TOKENS
from zse.kernels.gpu.matmul_forms import FORMS, few_ring, form_of, shift_of, small_ring, symbol_of
from zse.kernels.gpu.matmul_small import TOKENS as SMALL_BLOCK
from zse.kernels.gpu.matmul_tiles import ACCUMULATE, GATED_GELU, GATED_SILU, STORE, STORE_BF16, UNIT
from zse.kernels.op import check, require
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div

SMALL_TOKENS = 64  # up to here the weights bound a product; above, the GEMM
GATES = {"silu": GATED_SILU, "gelu_tanh": GATED_GELU}
TOKENS = {"few": FEW_TOKENS, "small": SMALL_BLOCK}  # of a block
COLUMNS = {"bf16": 8, "f16": 8, "f32": 4}  # of the 16-byte pieces of rows: K is a multiple


def variants(target) -> list[Variant]:
    """The kernels for up to SMALL_TOKENS tokens. One block fills a multiprocessor: blocks of a small grid then spread
    over all of them (with two, a matrix of 112 units took 26 us instead of 14: some had two blocks, others none)."""
    if not target.has("mma_sync"):
        return simple.variants(target)
    made = []
    for form, chunk in FORMS.items():
        statics = {"KIND": form[0], "GROUP": form[1]}
        warps, stages = small_ring(form, target.arch)
        made.append(
            Variant(
                symbol_of(form),
                small.matmul_small_lut4 if form[0] == "lut4" else small.matmul_small,
                statics | {"CHUNK": chunk, "STAGES": stages},
                threads=32 * warps,
            )
        )
        found = few_ring(form, target.arch)
        if found:
            made.append(
                Variant(
                    symbol_of(form, "few"),
                    few.matmul_few,
                    statics | {"CHUNK": CHUNK, "STAGES": found[1]},
                    threads=32 * found[0],
                )
            )
    return made + gemm.variants(target)


def blocks_of(device, weight, gated: bool) -> tuple[int, int]:
    """(units of rows, blocks that share them)."""
    units = weight.shape[0] // UNIT if gated else -(-weight.shape[0] // UNIT)
    return units, min(units, device.num_sms)


def pick(device, weight, gated: bool, max_tokens: int, kernel: str | None = None) -> str:
    """ "few" or "small", for a weight that the GEMM does not take. kernel: as of record()."""
    form = form_of(weight.scheme, weight.shape[1])
    units, blocks = blocks_of(device, weight, gated)
    columns = -(-weight.shape[1] // CHUNK) * CHUNK
    # Preparing the activations pays from two units a block on: 4 bits, 37888 x 3584 in 18.9 us instead of 23.9, at four
    # tokens 21.4 instead of 26.1. At one token always: 4608 x 3584 in 4.6 instead of 5.6, 3584 x 18944 in 12.3 instead of
    # 13.1; 8 bits, 5120 x 2880 and 2880 x 4096 in 12.4 instead of 13.4 (H200).
    pays = units >= 2 * blocks or (weight.scheme.element in ("int4", "int8") and max_tokens == 1)
    fits = max_tokens <= FEW_TOKENS and max_tokens * columns <= ELEMENTS and weight.shape[1] >= CHUNK
    takes_few = fits and (kernel == "few" or kernel is None and pays)
    return "few" if takes_few and few_ring(form, device.arch) else "small"


def _check(a, weight, out, bias, accumulate: bool, gate: str | None, tiled: bool) -> None:
    """ValueError or TypeError for what record() does not take. tiled: the product is gemm.py's."""
    rows, width = weight.shape
    scheme, tokens, made = weight.scheme, out.shape[0], rows // 2 if gate else rows
    what = "matmul_gated" if gate else "matmul"
    if gate:
        require(gate in GATES, f"matmul_gated: kind {gate!r}; supported: {', '.join(GATES)}")
        require(
            rows % 32 == 0, f"matmul_gated: {rows} rows are no two halves of whole tiles of 16; record matmul and gated"
        )
    check(f"{what} out", out, "bf16" if gate else "f32" if accumulate else ("f32", "bf16"), tokens, made)
    check(f"{what} a", a, ("bf16", "fp8") if tiled else "bf16", tokens, width)
    if bias is not None:
        check(f"{what} bias", bias, "f32", rows)
    layout = scheme.in_memory["gpu"]
    require(weight.layout == layout, f"{what}: {scheme} weights are in layout {layout} on a GPU, not {weight.layout}")
    multiple = COLUMNS.get(scheme.element, 1)
    require(width % multiple == 0, f"{what}: {scheme} weights need a multiple of {multiple} columns, got {width}")
    require(scheme.fits(width), f"{what}: {width} columns do not fit {scheme}")


def record(
    recorder,
    a,
    weight,
    out,
    bias=None,
    *,
    independent: bool = False,
    max_tokens: int = SMALL_TOKENS,
    accumulate: bool = False,
    gate: str | None = None,
    kernel: str | None = None,
    routing=None,
    gather: bool = False,
) -> None:
    """Record out (+)= a @ weight.T + bias, or with `gate` ("silu", "gelu_tanh") out bf16 [M, N] = act(first half of the
    2N rows) * second half, N a multiple of 16; checked. a: bf16, or above 64 tokens with fp8 weights an Fp8Activation;
    out f32 or bf16, f32 where it accumulates. routing, gather: of a stack of experts, as on a CPU. max_tokens,
    independent: as on a CPU (matmul.py); launches overlap without the latter. kernel: "small" or "few" instead of the
    one that the shape would get (tests)."""
    if routing is not None:
        require(not accumulate, "matmul: experts do not add")
        options = dict(gather=gather, independent=independent, max_tokens=max_tokens, gate=gate)
        experts.record(recorder, a, weight, out, routing, bias, **options)
        return
    rows, width = weight.shape
    scheme, planes, tokens, device = weight.scheme, weight.planes, out.shape[0], recorder.device
    tiled = kernel is None and takes(device, weight, a.dtype, gate is not None, max_tokens)
    _check(a, weight, out, bias, accumulate, gate, tiled)
    if tiled:
        launch_gemm(recorder, a, weight, out, bias, accumulate=accumulate, gated=gate, max_tokens=max_tokens)
        return
    stored = STORE_BF16 if out.dtype == "bf16" else STORE
    args = Args(
        w=planes[scheme.numbers],
        high=planes.get("high"),
        scale=planes.get("scale"),
        offset=planes.get("offset"),
        a=a,
        bias=bias,
        out=out,
        tokens=tokens,
        rows=rows,
        width=width,
        groups=scheme.groups(width),
        symmetric=int(scheme.symmetric),
        scaling=scheme.scale_code,
        has_bias=int(bias is not None),
        mode=GATES[gate] if gate else ACCUMULATE if accumulate else stored,
    )
    if device.simt:
        blocks = rows // 2 // simple.ROWS if gate else -(-rows // simple.ROWS)
        args["group_blocks"] = (scheme.group or width) // 32 if scheme.groups(width) else 1
        args |= scheme.table_args() if scheme.kind == "lut4" else {}
        symbol = simple.symbol_of(scheme.element, gate is not None)
        recorder.launch(symbol, args, (blocks, ceil_div(tokens, simple.TOKENS)))
        return
    form, name = form_of(scheme, width), pick(device, weight, gate is not None, max_tokens, kernel)
    args["shift"] = shift_of(scheme, width, form)
    args |= scheme.table_args() if form[0] == "lut4" else {}
    recorder.launch(
        symbol_of(form, name), args, (blocks_of(device, weight, gate is not None)[1], ceil_div(tokens, TOKENS[name]))
    )
