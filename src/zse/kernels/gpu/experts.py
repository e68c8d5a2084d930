"""Products with stacks of experts on a GPU: those of zse.kernels.gpu.matmul_small (on HIP and Metal of matmul_simple)
whose blocks find their expert, their pairs and the rows of the activations by a task (zse.kernels.route).

A task of more than 8 pairs is computed 8 pairs at a time: an expert's weights are then read once for every 8 of its
pairs, from the L2 cache mostly. Nothing is read before the routing is there."""

from zse import kernel as zl
from zse.kernels.activation import CLAMPED
from zse.kernels.gpu import gemm, gemm_experts
from zse.kernels.gpu import matmul_forms as forms
from zse.kernels.gpu import matmul_simple as simple
from zse.kernels.gpu import matmul_small as small
from zse.kernels.gpu import matmul_tiles as tiles
from zse.kernels.gpu.r16 import table_of
from zse.kernels.matmul_tile import GATHERED, PAIRS
from zse.kernels.op import check, require
from zse.quant.scheme import FP8_BLOCK
from zse.runtime.args import Args

TOKENS = small.TOKENS
assert simple.TOKENS == TOKENS
GATES = {"silu": tiles.GATED_SILU, "gelu_tanh": tiles.GATED_GELU, CLAMPED: tiles.GATED_CLAMPED}
WAVES = 5  # of blocks, where an expert has units for more: the last one is not full


class ExpertParams(tiles.ProductParams):
    """tasks i32 [tasks, 3], source i32 [tokens]; experts: GATHERED where pair i's activations are row source[i].
    slices: of a task, of 8 pairs each. tokens: pairs; rows: of an expert; bias [experts, rows]."""

    tasks: zl.Ptr[zl.i32, "const"]
    source: zl.Ptr[zl.i32, "const"]
    experts: zl.i32
    slices: zl.i32


class Lut4ExpertParams(ExpertParams):
    """table0 .. 3: as of zse.kernels.gpu.matmul_tiles.Lut4ProductParams."""

    table0: zl.u32
    table1: zl.u32
    table2: zl.u32
    table3: zl.u32


class SimpleExpertParams(simple.SimpleProductParams):
    """Likewise."""

    tasks: zl.Ptr[zl.i32, "const"]
    source: zl.Ptr[zl.i32, "const"]
    experts: zl.i32
    slices: zl.i32


class Lut4SimpleExpertParams(simple.Lut4SimpleParams):
    """Likewise, with a table."""

    tasks: zl.Ptr[zl.i32, "const"]
    source: zl.Ptr[zl.i32, "const"]
    experts: zl.i32
    slices: zl.i32


@zl.inline
def slice_of(p):
    """(expert, first pair, pairs) of this block; no pairs where its slice of the task is empty."""
    task = p.tasks + zl.block_index(1) // p.slices * 3
    first = task[1] + zl.block_index(1) % p.slices * TOKENS
    return zl.i64(task[0]), first, max(min(task[2] - first, TOKENS), 0)


@zl.inline
def source_row(p, pair):
    """The row of the activations that a pair reads; of one that there is not, the last one's."""
    row = min(pair, p.tokens - 1)
    if p.experts == GATHERED:
        row = p.source[row]
    return zl.i64(row)


@zl.inline
def planes_of(p, expert):
    """The planes and the bias of an expert: (w, high, scale, offset, bias)."""
    rows, width = zl.i64(p.rows), p.width
    bias = p.bias + expert * rows
    if p.KIND in tiles.INTEGERS:
        q_bytes, high_bytes = tiles.block_bytes(p.KIND)
        blocks = expert * (rows // 16) * (width // 32)
        scales = expert * (rows // 16) * p.groups * 32
        return p.w + blocks * q_bytes, p.high + blocks * high_bytes, p.scale + scales, p.offset + scales, bias
    scales = expert * rows * 4
    if p.scaling == 2:
        scales = expert * (rows // FP8_BLOCK) * ((width + (FP8_BLOCK - 1)) // FP8_BLOCK) * 4
    return p.w + expert * rows * (width * tiles.ITEM[p.KIND]), p.high, p.scale + scales, p.offset, bias


@zl.kernel
def matmul_experts(params: ExpertParams):
    """Grid (blocks that share the units of an expert, slices of tasks)."""
    multiply_slice(params, None)


@zl.kernel
def matmul_experts_lut4(params: Lut4ExpertParams):
    """Likewise."""
    multiply_slice(params, table_of(params))


@zl.inline
def multiply_slice(params, table):
    """The body of a kernel."""
    WARPS = zl.target.threads // 32
    nbytes = tiles.slot_bytes(params.KIND, params.GROUP, params.CHUNK)
    ring = zl.shared_array(zl.u8, WARPS * params.STAGES * nbytes, align=128)
    sums = zl.shared_array(zl.f32, tiles.sums_bytes(WARPS, TOKENS, 1) // 4)
    zl.grid_wait()
    expert, first, here = slice_of(params)
    w, high, scale, offset, bias = planes_of(params, expert)
    lane, warp = zl.lane_index(), zl.warp_index()
    gated = zl.i32(params.mode >= tiles.GATED_SILU)
    units = params.rows // 32 if gated != 0 else (params.rows + (tiles.UNIT - 1)) // tiles.UNIT
    units = units if here > 0 else zl.i32(0)
    p = tiles.BlockProduct(
        **tiles.shifted(params, tiles.ProductParams, w=w, high=high, scale=scale, offset=offset, bias=bias),
        gated=gated,
        first_token=first,
        here=here,
        lane=lane,
        warp=warp,
        chunks=(params.width + (params.CHUNK - 1)) // params.CHUNK,
        units=units,
        ring=ring + warp * (params.STAGES * nbytes),
        sums=sums,
        WARPS=WARPS,
        TOKENS=TOKENS,
        table=table,
        BUFFERS=1,
        CLAMPS=True,
    )
    following, at = tiles.start(p)
    a_row = p.a + source_row(params, first + max(min(lane // 4, here - 1), 0)) * p.width
    b = [zl.u32(0) for _ in zl.static(range(p.CHUNK // 8))]
    tiles.stream(p, following, at, 8, (small.load_tokens, b, a_row, p), (small.multiply, b, p), (small.leave, p))


@zl.kernel
def matmul_simple_experts(params: SimpleExpertParams):
    """Grid (units of 16 rows, slices of tasks)."""
    multiply_simple_slice(params, simple.SimpleProductParams)


@zl.kernel
def matmul_simple_experts_lut4(params: Lut4SimpleExpertParams):
    """Likewise."""
    multiply_simple_slice(params, simple.Lut4SimpleParams)


@zl.inline
def multiply_simple_slice(params, kind):
    """The body of a kernel. kind: of the parameters without a task."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    expert, first, here = slice_of(params)
    w, high, scale, offset, bias = planes_of(params, expert)
    p = kind(**tiles.shifted(params, kind, w=w, high=high, scale=scale, offset=offset, bias=bias))
    a_rows = [p.a + source_row(params, first + max(min(t, here - 1), 0)) * p.width for t in zl.static(range(TOKENS))]
    simple.multiply_unit(p, first, here, a_rows)


def variants(target) -> list[zl.Variant]:
    """A kernel for each form of weights."""
    if not target.has("mma_sync"):
        return [
            zl.Variant(
                simple_symbol(kind, gated),
                matmul_simple_experts_lut4 if kind == "lut4" else matmul_simple_experts,
                {"KIND": kind, "GATED": gated},
                threads=simple.THREADS,
            )
            for kind in (*simple.BITS, *simple.DENSE)
            for gated in (False, True)
        ]
    made = gemm_experts.variants(target)
    for form, chunk in forms.FORMS.items():
        warps, stages, blocks = forms.experts_ring(form, target.arch)
        statics = {"KIND": form[0], "GROUP": form[1], "CHUNK": chunk, "STAGES": stages}
        kernel = matmul_experts_lut4 if form[0] == "lut4" else matmul_experts
        symbol = forms.symbol_of(form, "experts")
        made.append(zl.Variant(symbol, kernel, statics, threads=32 * warps, min_blocks=blocks))
    return made


def simple_symbol(kind: str, gated: bool) -> str:
    return f"matmul_simple_experts_{kind}{'_gated' if gated else ''}"


def task_pairs(device, scheme, max_tokens: int, moe) -> int:
    """The most pairs of a task of a recording of up to max_tokens tokens. scheme: of the experts; moe: the model's
    MoEConfig."""
    pays = gemm.has_wgmma(device) and gemm_experts.task_pairs(
        scheme, max_tokens, moe.experts_per_token, moe.num_experts
    )
    return pays or TOKENS


def reserve(device, weight, max_tokens: int, moe, *, gather: bool) -> None:
    """Allocate what record() and the routing before it work in. moe: the model's MoEConfig."""
    if not device.simt:
        device.scratch("route counter", 4)
        device.scratch("router logits", 4 * moe.num_experts)
    if task_pairs(device, weight.scheme, max_tokens, moe) > TOKENS:
        gemm_experts.reserve(device, weight, max_tokens * moe.experts_per_token, gather)


def blocks_of(units: int, tasks: int, slots: int) -> int:
    """Blocks that share the units of a task, each about as many: WAVES full waves of `slots` blocks, or what there
    is."""
    return -(-units // max(1, units * tasks // (WAVES * slots)))


def record(
    recorder, a, weight, out, routing, bias=None, *, gather: bool, independent: bool, max_tokens: int, gate: str | None
) -> None:
    """As zse.kernels.matmul with a routing: a bf16, out f32 [P, N]; or with `gate` out bf16 [P, N] = act(first half of
    an expert's 2N rows) * second half, N a multiple of 16."""
    (stacked, width), scheme, device = weight.shape, weight.scheme, recorder.device
    (tokens, chosen), (pairs, made) = routing.ids.shape, out.shape
    rows = 2 * made if gate else made
    unit = max(scheme.row_unit, tiles.UNIT // 2) * (2 if gate else 1)
    require(
        stacked % rows == 0 and rows % unit == 0, f"matmul: {stacked} rows of {rows} an expert; multiples of {unit}"
    )
    check("matmul out", out, "bf16" if gate else "f32", pairs, made)
    check("matmul a", a, "bf16", tokens if gather else pairs, width)
    check("matmul source", routing.source, "i32", pairs)
    check("matmul tasks", routing.tasks, "i32", None, 3)
    if bias is not None:
        check("matmul bias", bias, "f32", stacked)
    require(gate is None or gate in GATES, f"matmul: gate {gate!r}; supported: {', '.join(GATES)}")
    require(scheme.loaded("gpu") == scheme, f"matmul: a GPU has {scheme.loaded('gpu')} experts, not {scheme}")
    require(
        weight.layout == scheme.in_memory["gpu"] and scheme.fits(width), f"matmul: {scheme} in layout {weight.layout}"
    )
    if gemm_experts.takes(device, weight, rows, routing.task_pairs, gate):
        gemm_experts.launch(recorder, a, weight, out, routing, bias, gather=gather, gate=gate, max_tokens=max_tokens)
        return
    experts = stacked // rows
    slices = -(-min(routing.task_pairs, max_tokens) // TOKENS)
    args = Args(
        w=weight.planes[scheme.numbers],
        high=weight.planes.get("high"),
        scale=weight.planes.get("scale"),
        offset=weight.planes.get("offset"),
        a=a,
        bias=bias,
        out=out,
        tokens=pairs,
        rows=rows,
        width=width,
        groups=scheme.groups(width),
        symmetric=int(scheme.symmetric),
        scaling=scheme.scale_code,
        has_bias=int(bias is not None),
        mode=GATES[gate] if gate else tiles.STORE,
        tasks=routing.tasks,
        source=routing.source,
        experts=GATHERED if gather else PAIRS,
        slices=slices,
    )
    tasks = routing.tasks.shape[0]
    if device.simt:
        args["group_blocks"] = (scheme.group or width) // 32 if scheme.groups(width) else 1
        args |= scheme.table_args() if scheme.kind == "lut4" else {}
        grid = (made // simple.ROWS, tasks * slices)
        recorder.launch(simple_symbol(scheme.element, gate is not None), args, grid, independent=independent)
        return
    form = forms.form_of(scheme, width)
    args["shift"] = forms.shift_of(scheme, width, form)
    args |= scheme.table_args() if form[0] == "lut4" else {}
    slots = device.num_sms * forms.experts_ring(form, device.arch)[2]
    units = rows // 32 if gate else -(-rows // tiles.UNIT)
    # Where tokens are spread evenly, most experts have a task, and every eight more pairs another one.
    blocks = blocks_of(units, min(max_tokens * chosen, experts + max_tokens * chosen // TOKENS), slots)
    recorder.launch(forms.symbol_of(form, "experts"), args, (blocks, tasks * slices), independent=independent)
