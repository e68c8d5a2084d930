"""out[m, n] = sum_k a[m, k] * w[n, k] of prompts with stacks of experts on Hopper: a grouped product over pairs sorted
by expert.

The tiles are those of gemm_skinny: up to 16 or 64 pairs of an expert by 128 or 256 of its rows, with the same copies,
products and epilogues. Blocks take (task, tile of rows) in turn, whole columns each; tiles of a task run side by side,
so that its activations come from L2, and an expert's weights from memory once for all pairs of a task. Rows of the
activations have to stand as the pairs do: where they are tokens' they are gathered first, and for fp8 weights rounded.
Weights with a table of numbers (lut4; of E2M1 fp4) have a form here that other products of many tokens lack: these make
bf16 of them first, which experts that few tokens choose would not repay."""

from zse import kernel as zl
from zse.kernels.activation import CLAMPED
from zse.kernels.gpu import gemm
from zse.kernels.gpu import gemm_integers as integers
from zse.kernels.gpu import gemm_skinny as skinny
from zse.kernels.gpu.gemm import FINE, SKINNY, has_wgmma, is_fp8, symbol_of
from zse.kernels.gpu.gemm_launch import Product
from zse.kernels.gpu.gemm_parts import LIFTED, REGISTERS, depth_of, ring_of
from zse.kernels.gpu.matmul_tiles import shifted
from zse.kernels.gpu.quantize import row_vectors
from zse.kernels.gpu.r16 import FP4, LUT4, arguments, is_integer, table_of
from zse.kernels.quantize import fp8_args
from zse.quant.scheme import FP8_BLOCK
from zse.runtime.args import Args
from zse.tensor import Fp8Activation, Tensor, Weight

TASKS = (64, 16)  # pairs of one
GATHER_THREADS = 256


class GroupedParams(skinny.SkinnyParams):
    """tokens: pairs; cols: of an expert's result; steps: of k, all of which a block computes. tasks i32 [num_tasks,
    3]."""

    tasks: zl.Ptr[zl.i32, "const"]
    num_tasks: zl.i32

    @property
    def of_experts(self) -> bool:
        return True


class Lut4GroupedParams(GroupedParams):
    """table0 .. 3: the 16 numbers (zse.quant.lut4)."""

    table0: zl.u32
    table1: zl.u32
    table2: zl.u32
    table3: zl.u32


@zl.inline
def of_expert(p, expert, end):
    """The parameters of gemm_skinny for an expert's planes, with pairs up to `end`."""
    rows = p.cols * (2 if p.GATED else 1)
    before = zl.i64(expert) * rows
    at = before * p.groups if p.integer else zl.i64(0)
    w_at = before // FP8_BLOCK * p.steps if p.KIND == "block" else before * p.per_row
    moved = shifted(
        p,
        GroupedParams,
        tokens=end,
        bias=p.bias + before,
        scale=p.scale + at,
        offset=p.offset + at,
        w_scale=p.w_scale + w_at,
    )
    return GroupedParams(**moved)


@zl.inline
def load_stage(ring, slot, step, expert, tile, first, p):
    """Ask for a stage's weights and activations."""
    at, bar = ring.memory + (slot * ring.stride + p.token_bytes), ring.full + slot
    rows = p.cols * (2 if p.GATED else 1)
    zl.mbarrier_expect(bar, p.stage_bytes)
    if p.integer:
        integers.load_weights(at, bar, step, expert * (rows // 16) + tile * (p.tile_cols // 16), p)
        integers.load_tokens(ring.memory + slot * ring.stride, bar, step, first, p)
    else:
        if p.GATED:  # dimensions: k, 8 rows, gate or up, groups of 8 rows
            zl.tma_load(at, p.w_map, (step * p.depth, 0, 0, expert * (rows // 8) + tile * p.tiles), bar)
        else:
            zl.tma_load(at, p.w_map, (step * p.depth, expert * rows + tile * (p.WG * 64)), bar)
        zl.tma_load(ring.memory + slot * ring.stride, p.a_map, (step * p.depth, first), bar, None, "evict_last")


@zl.inline
def produce(ring, row_tiles, p):
    """The thread that fills the ring."""
    # A barrier that nobody has arrived at yet passes a wait for parity 1: the ring's first round is not waited for.
    slot, parity = zl.i32(0), zl.i32(1)
    for unit in range(zl.block_index(0), p.num_tasks * row_tiles, zl.num_blocks(0)):
        task = p.tasks + unit // row_tiles * 3
        if task[2] > task[1]:
            for step in range(p.steps):
                zl.mbarrier_wait(ring.empty + slot, parity)
                load_stage(ring, slot, step, task[0], unit % row_tiles, task[1], p)
                slot += 1
                if slot == ring.stages:
                    slot = 0
                    parity = parity ^ 1


@zl.inline
def consume(ring, row_tiles, table, p):
    """The warpgroups that multiply."""
    warp = (zl.thread_index() - 128) // 32
    state = [zl.i32(0) for _ in zl.static(range(2))]
    total = [zl.f32(0) for _ in zl.static(range(p.BT // 2))]
    acc = [zl.f32(0) for _ in zl.static(range(p.BT // 2))] if p.KIND == "block" else total
    if p.integer:
        words = integers.lane_words(warp, p, table)
        scales = integers.group_scales(p)
    for unit in range(zl.block_index(0), p.num_tasks * row_tiles, zl.num_blocks(0)):
        task = p.tasks + unit // row_tiles * 3
        if task[2] > task[1]:
            tile = unit % row_tiles
            mine = of_expert(p, task[0], task[2])
            if p.integer:
                integers.multiply_tile(total, words, scales, ring, state, tile, zl.i32(0), p.steps, mine)
            else:
                skinny.multiply_tile(total, acc, tile, ring, state, zl.i32(0), p.steps, warp, mine)
            skinny.store_sums(total, tile, warp, task[1], mine)


@zl.kernel
def gemm_experts(p: GroupedParams):
    """Grid (blocks that share the tiles)."""
    multiply_tasks(p, None)


@zl.kernel
def gemm_experts_lut4(p: Lut4GroupedParams):
    """Likewise."""
    multiply_tasks(p, table_of(p))


@zl.inline
def multiply_tasks(p, table):
    """The body of a kernel."""
    ring, _ = ring_of(skinny.stage_size(p.KIND, p.BT, p.WG), p.STAGES, p.WG * 4)
    row_tiles = (p.cols + (p.tile_cols - 1)) // p.tile_cols
    zl.grid_wait()
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", REGISTERS[p.WG][0])
        if zl.thread_index() == 0:
            produce(ring, row_tiles, p)
    else:
        zl.set_max_registers("inc", REGISTERS[p.WG][1])
        consume(ring, row_tiles, table, p)


@zl.kernel
def gather_pairs(x: zl.Ptr[zl.bf16, "const"], source: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.bf16], width: zl.i32):
    """out[i] = x[source[i]]. Grid (pairs); width a multiple of 8."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    row = zl.i64(zl.block_index(0))
    place = x + zl.i64(source[row]) * width
    for k in range(zl.thread_index() * 8, width, zl.target.threads * 8):
        zl.store(out + (row * width + k), zl.load(place + k, 8))


def variants(target) -> list[zl.Variant]:
    if not target.has("wgmma"):
        return []
    made = [zl.Variant("gather_pairs", gather_pairs, threads=GATHER_THREADS)]
    forms = [(kind, pairs, form_of(kind, pairs)) for kind in (*SKINNY, LUT4, FP4) for pairs in TASKS]
    for kind, pairs, wg in forms:
        for gated in (False, True) if wg else ():
            statics = {"KIND": kind, "BT": pairs, "WG": wg, "STAGES": skinny.stages(kind, pairs, wg), "GATED": gated}
            symbol = symbol_of("gemm_experts", kind, pairs, wg * 64, gated)
            kernel = gemm_experts_lut4 if kind == LUT4 else gemm_experts
            made.append(zl.Variant(symbol, kernel, statics, threads=128 * (wg + 1)))
    return made


def kind_of(scheme) -> object:
    """As of gemm.kind_of(), and LUT4 or FP4."""
    return scheme.lookup if scheme.kind == LUT4 else gemm.kind_of(scheme)


def form_of(kind: object, pairs: int) -> int:
    """The warpgroups that multiply; 0: there is no kernel for tasks of so many pairs."""
    return dict(SKINNY[4 if kind in (LUT4, FP4) else kind]).get(pairs, 0)


def pays_from(kind: object, pairs: int) -> int:
    """The pairs of an expert, on average, from which on tasks of `pairs` pay. Measured on an H200, a step of 64 rows
    with 4 pairs an expert and of 128 with 8: int4 9.2 → 10.1 and 13.0 → 11.6 ms, fp8 11.9 → 10.3 and 16.0 → 12.0; MXFP4
    with 4 and 8: 9.6 → 11.2 and 12.7 → 11.4."""
    return 16 if pairs == 64 else 8 if is_integer(kind) else 4


def task_pairs(scheme, max_tokens: int, chosen: int, experts: int) -> int:
    """The pairs of a task that pay on Hopper; 0: an expert has too few, or such weights no kernel."""
    kind = kind_of(scheme)
    if kind is None:
        return 0
    found = (each for each in TASKS if form_of(kind, each) and max_tokens * chosen >= pays_from(kind, each) * experts)
    return next(found, 0)


def takes(device, weight: Weight, rows: int, pairs: int, gate: str | None) -> bool:
    """Whether there is a kernel for experts of `rows` rows and tasks of up to `pairs` pairs."""
    kind, width = kind_of(weight.scheme), weight.shape[1]
    if not has_wgmma(device) or kind is None or not form_of(kind, pairs):
        return False
    if is_integer(kind):
        return weight.scheme.group != FINE and rows % (32 if gate else 16) == 0
    whole = FP8_BLOCK if kind == "block" else 16
    return width % (16 if is_fp8(kind) else 8) == 0 and rows % whole == 0


def reserve(device, weight: Weight, max_pairs: int, gather: bool) -> None:
    """Allocate what launch() brings its activations to."""
    kind, width = kind_of(weight.scheme), weight.shape[1]
    if gather and kind is not None:
        device.scratch("pairs", max_pairs * width * 2)
    if is_fp8(kind):
        device.scratch("pairs in fp8", fp8_bytes(max_pairs, width))


def fp8_bytes(pairs: int, width: int) -> int:
    """Of the scales, a multiple of 16, then the numbers."""
    return -(-pairs * 4 // 16) * 16 + pairs * width


def _activations(recorder, a: Tensor, routing, gather: bool, fp8: bool, max_pairs: int):
    """Rows as the pairs stand, bf16 or Fp8Activation."""
    device, pairs, width = recorder.device, routing.source.shape[0], a.shape[1]
    if gather:
        rows = Tensor(device.scratch("pairs", max_pairs * width * 2), (pairs, width), "bf16")
        recorder.launch("gather_pairs", Args(x=a, source=routing.source, out=rows, width=width), (pairs,))
        a = rows
    if not fp8:
        return a
    place = device.scratch("pairs in fp8", fp8_bytes(max_pairs, width))
    scale = Tensor(place, (pairs,), "f32")
    begin = fp8_bytes(max_pairs, 0)
    q = Tensor(place, (pairs, width), "e4m3", begin)
    made = Fp8Activation(q, scale, None)
    recorder.launch(f"quantize_fp8_v{row_vectors(width)}", Args(x=a, **fp8_args(made), width=width), (pairs,))
    return made


def launch(recorder, a, weight: Weight, out: Tensor, routing, bias, *, gather: bool, gate: str | None, max_tokens: int):
    """As zse.kernels.gpu.experts.record, where takes() is true of the routing's tasks."""
    device, kind, gated, pairs = recorder.device, kind_of(weight.scheme), gate is not None, routing.task_pairs
    cols, width, wg = out.shape[1], weight.shape[1], form_of(kind, pairs)
    max_pairs = max_tokens * routing.ids.shape[1]
    a = _activations(recorder, a, routing, gather, is_fp8(kind), max_pairs)
    product = Product(device, a, weight, out, bias, False, gate, max_pairs, kind)
    args = Args(
        **product.common() | {"cols": cols} | ({"mode": LIFTED} if gate == CLAMPED else {}),
        **product.fp8_scales(),
        partial=None,
        counters=None,
        a_map=product.token_map(pairs),
        steps=-(-width // depth_of(kind, pairs)),
        share=0,
        tasks=routing.tasks,
        num_tasks=routing.tasks.shape[0],
    )
    if is_integer(kind):
        args["w_map"], args["high_map"] = product.integer_maps(wg * (2 if gated else 4), pairs)
        args |= arguments(weight) | (weight.scheme.table_args() if kind == LUT4 else {})
    else:
        depth, item = depth_of(kind, pairs), 1 if is_fp8(kind) else 2
        box, options = (wg * 64, depth), {}
        if gated:  # tiles of 8 gates and their 8 ups in turn
            box = (wg * 4, 2, 8, depth)
            strides = (8 * width * item, cols * width * item, width * item)
            options = dict(dims=((weight.planes["w"].shape[0] - cols) // 8, 2, 8, width), strides=strides)
        args["w_map"] = args["high_map"] = device.tensor_map(weight.planes["w"], box, swizzle=128, **options)
        args |= dict(scale=None, offset=None, blocks=0, groups=0, group_blocks=1, half_step=0, has_offset=0, center=0.0)
    recorder.launch(symbol_of("gemm_experts", kind, pairs, wg * 64, gated), args, device.num_sms)
