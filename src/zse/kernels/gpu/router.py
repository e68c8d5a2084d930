"""One token's way to its experts on a GPU: the norm and the router's product in one launch, and the choice.

Every block normalizes the row for itself and has the logits of a few experts. Who chooses, by zse.kernels.gpu.one_token
or here, chooses from the same logits by the same instructions, so that places of experts change no bits. The code is
kept short: a step runs it once a layer, after tens of kilobytes of other kernels, and so mostly reads it from L2."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu.rows import inverse_rms
from zse.kernels.op import check, require
from zse.kernels.route import LEAST, MAX_CHOSEN, MAX_CHOSEN_FROM, ROUTERS, chooses_one
from zse.runtime.args import Args
from zse.tensor import GATINGS

SOFTMAX, SIGMOID, SOFTMAX_CHOSEN, SQRT_SOFTPLUS = range(len(GATINGS))
NORM_ROWS = 2  # of the router, of a block, which computes the norm for all: fewer are shorter code
WARPS = 4
HELD = 3  # vectors of a row that a thread has in registers: 3,072 columns of a block
LANE_EXPERTS = MAX_CHOSEN_FROM // 32  # most of a lane
CHOICE_BYTES = (
    MAX_CHOSEN_FROM + 3 * MAX_CHOSEN
) * 4  # of shared memory of a block that chooses, with places and weights


class RouterNormParams(zl.Record):
    """x f32 [width], norm f32 [width]: normed bf16 [width] = x over its rms, times norm. w [experts, width], bias f32
    [experts]: out f32 [experts]. width a multiple of 8."""

    x: zl.Ptr[zl.f32, "const"]
    norm: zl.Ptr[zl.f32, "const"]
    normed: zl.Ptr[zl.bf16]
    w: zl.Ptr["W", "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    width: zl.i32
    experts: zl.i32
    has_bias: zl.i32
    eps: zl.f32
    W: zl.static


class RouteOneParams(RouterNormParams):
    """And the choice, as of zse.kernels.gpu.one_token.ChosenParams. ids i32, weights f32 [chosen]; source, place i32
    [chosen], tasks i32 [num_tasks, 3]: of the pairs, sorted. counter: 0 before and after."""

    logits: zl.Ptr[zl.f32, "const"]
    select: zl.Ptr[zl.f32, "const"]
    ids: zl.Ptr[zl.i32]
    weights: zl.Ptr[zl.f32]
    source: zl.Ptr[zl.i32]
    place: zl.Ptr[zl.i32]
    tasks: zl.Ptr[zl.i32]
    counter: zl.Ptr[zl.i32]
    chosen: zl.i32
    gating: zl.i32
    has_select: zl.i32
    normalize: zl.i32
    sum_eps: zl.f32
    factor: zl.f32
    num_tasks: zl.i32


@zl.inline
def sum_of_eight(v):
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))


@zl.inline
def add_columns(sums, x, weighted, rows):
    """sums[0] += x * x; sums[1 + e] += weighted * rows[e]."""
    sums[0] = zl.fma(x, x, sums[0])
    for e in zl.static(range(len(rows))):
        sums[1 + e] = zl.fma(weighted, rows[e], sums[1 + e])


@zl.inline
def sum_of_warps(at):
    halves = [at[n * (1 + NORM_ROWS)] + at[(n + 1) * (1 + NORM_ROWS)] for n in zl.static((0, 2))]
    return halves[0] + halves[1]


@zl.inline
def write_logits(p):
    """The logits of this block's experts; the first block writes the normalized row. A warp has a part of the columns, of
    all the experts' rows."""
    zl.grid_launch_dependents()
    parts = zl.shared_array(zl.f32, WARPS * (1 + NORM_ROWS))
    thread = zl.thread_index()
    lane, warp, first = thread % zl.target.warp, thread // zl.target.warp, zl.block_index(0) * NORM_ROWS
    step, start = zl.target.threads * 8, thread * 8
    rows = [p.w + zl.i64(min(first + e, p.experts - 1)) * p.width for e in zl.static(range(NORM_ROWS))]
    held = [[zl.f32.x(8)(0) for _ in zl.static(range(NORM_ROWS))] for _ in zl.static(range(HELD))]
    norms = [zl.f32.x(8)(0) for _ in zl.static(range(HELD))]
    xs = [zl.f32.x(8)(0) for _ in zl.static(range(HELD))]
    for i in zl.static(range(HELD)):
        k = i * step + start
        if k < p.width:
            norms[i] = zl.load(p.norm + k, 8)
            for e in zl.static(range(NORM_ROWS)):
                held[i][e] = zl.convert(zl.load(rows[e] + k, 8), zl.f32)
    zl.grid_wait()
    for i in zl.static(range(HELD)):
        k = i * step + start
        if k < p.width:
            xs[i] = zl.load(p.x + k, 8)
    sums = [zl.f32.x(8)(0) for _ in zl.static(range(1 + NORM_ROWS))]
    for i in zl.static(range(HELD)):
        add_columns(sums, xs[i], xs[i] * norms[i], held[i])
    for k in zl.unroll(range(HELD * step + start, p.width, step), 1):
        x = zl.load(p.x + k, 8)
        more = [zl.convert(zl.load(row + k, 8), zl.f32) for row in rows]
        add_columns(sums, x, x * zl.load(p.norm + k, 8), more)
    for n in zl.static(range(1 + NORM_ROWS)):
        total = zl.warp_sum(sum_of_eight(sums[n]))
        if lane == 0:
            parts[warp * (1 + NORM_ROWS) + n] = total
    zl.barrier()
    squares = sum_of_warps(parts)
    inverse = inverse_rms(squares, p.width, p.eps)
    if thread < NORM_ROWS and first + thread < p.experts:
        logit = sum_of_warps(parts + (1 + thread)) * inverse
        if p.has_bias != 0:
            logit = logit + p.bias[first + thread]
        p.out[first + thread] = logit
    if first == 0:
        for i in zl.static(range(HELD)):
            k = i * step + start
            if k < p.width:
                zl.store(p.normed + k, zl.convert(xs[i] * inverse * norms[i], zl.bf16))
        for k in zl.unroll(range(HELD * step + start, p.width, step), 1):
            zl.store(p.normed + k, zl.convert(zl.load(p.x + k, 8) * inverse * zl.load(p.norm + k, 8), zl.bf16))


@zl.kernel
def normed_router(p: RouterNormParams):
    """Grid (experts / NORM_ROWS)."""
    write_logits(p)


@zl.inline
def gated_logit(x, gating):
    """What a gating of each expert alone makes of its logit."""
    if gating == SIGMOID:
        x = 1.0 / (1.0 + zl.exp(x * -1.0))
    elif gating == SQRT_SOFTPLUS:
        x = zl.sqrt(max(x, 0.0) + zl.log(1.0 + zl.exp(max(x, x * -1.0) * -1.0)))
    return x


@zl.inline
def key_of(p, e):
    """An expert's score as an integer above 0, in the same order. All gatings keep the order of logits, so only what is
    added to them needs them; what is no number is worse than all numbers."""
    score = p.logits[e] + 0.0  # minus zero is zero
    if p.has_select != 0:
        score = gated_logit(score, p.gating) + p.select[e]
    bits = zl.bitcast(score if score > LEAST else zl.f32(LEAST), zl.i32)
    return zl.bitcast(bits ^ ((bits >> 31) | zl.i32(-(2**31))), zl.u32)


@zl.inline
def choose(p, places=None):
    """The token's experts, the best first, in shared memory; of equal ones the first is better. A warp chooses, of which
    each lane has neighbours: the largest key of all, as often as experts are chosen. (Each expert's rank, counted by a
    thread, takes 640 instructions of four warps for 128 experts.) places: where place_of() goes to."""
    keys = zl.shared_array(zl.u32, MAX_CHOSEN_FROM)
    found = zl.shared_array(zl.i32, MAX_CHOSEN)
    per = (p.experts + 127) // 128 * 4  # experts of a lane
    for e in zl.unroll(range(zl.thread_index(), per * 32, zl.target.threads), 1):
        key = zl.u32(0)
        if e < p.experts:
            key = key_of(p, e)
        keys[e] = key
    zl.barrier()
    if zl.warp_index() == 0:
        lane = zl.lane_index()
        mine = [zl.u32(0) for _ in zl.static(range(LANE_EXPERTS))]
        for g in zl.static(range(0, LANE_EXPERTS, 4)):
            if g < per:
                four = zl.load(keys + (lane * per + g), 4)
                for u in zl.static(range(4)):
                    mine[g + u] = four[u]
        for j in zl.unroll(range(p.chosen), 1):
            best, at = mine[0] + zl.u32(0), zl.i32(0)
            for g in zl.static(range(0, LANE_EXPERTS, 4)):
                if g < per:
                    for u in zl.static(range(4)):
                        at = zl.i32(g + u) if mine[g + u] > best else at
                        best = max(best, mine[g + u])
            is_best = best == zl.warp_top(best)
            before = zl.u32(zl.ballot(is_best)) & ((zl.u32(1) << zl.u32(lane)) - zl.u32(1))
            if is_best and before == 0:
                found[j] = lane * per + at
                for i in zl.static(range(LANE_EXPERTS)):
                    mine[i] = zl.u32(0) if at == i else mine[i]
        if places is not None:
            zl.warp_barrier()
            if lane < p.chosen:
                places[lane] = place_of(p, found, lane)
    zl.barrier()
    return found


@zl.inline
def order_of(p, found, j):
    """How many of the chosen experts stand before the j-th one of them in the model."""
    at = zl.i32(0)
    for other in zl.unroll(range(p.chosen), 1):
        at += zl.i32(found[other] < found[j])
    return at


@zl.inline
def place_of(p, found, j):
    """Where in the stack the j-th of the chosen experts is: tasks, in the order of experts, name their places."""
    place = found[j] + 0
    if p.has_tasks != 0:
        place = p.tasks[order_of(p, found, j) * 3] + 0
    return place


@zl.inline
def weight_of(p, found, lane):
    """What the results of the lane's expert (of those in `found`) are multiplied with, by a whole warp."""
    is_one = lane < p.chosen
    logit = p.logits[found[min(lane, p.chosen - 1)]]
    value = gated_logit(logit, p.gating)
    if p.gating == SOFTMAX or p.gating == SOFTMAX_CHOSEN:
        top = zl.warp_max(logit)
        value = zl.exp(logit - top)
        total = zl.f32(0)
        if p.gating == SOFTMAX:
            for e in zl.unroll(range(lane, p.experts, zl.target.warp), 1):
                total += zl.exp(p.logits[e] - top)
        else:
            total = value if is_one else zl.f32(0)
        value = value / zl.warp_sum(total)
    value = value if is_one else zl.f32(0)
    if p.normalize != 0 and p.gating != SOFTMAX_CHOSEN:
        value = value / (zl.warp_sum(value) + p.sum_eps)
    return value * p.factor


@zl.kernel
def route_one(p: RouteOneParams):
    """Grid (experts / NORM_ROWS): the block that comes last chooses and leaves the token's pairs."""
    last = zl.shared_array(zl.i32, 1)
    write_logits(p)
    zl.barrier()
    if zl.thread_index() == 0:
        zl.fence()
        before = zl.atomic_add(p.counter, 1)
        last[0] = zl.i32(before == zl.num_blocks(0) - 1)
        if before == zl.num_blocks(0) - 1:
            p.counter[0] = 0
        zl.fence()
    zl.barrier()
    if last[0] != 0:
        found = choose(p)
        if zl.warp_index() == 0:
            lane = zl.lane_index()
            weight = weight_of(p, found, lane)
            if lane < p.chosen:
                at = order_of(p, found, lane)
                p.ids[lane] = found[lane]
                p.weights[lane] = weight
                p.source[at] = 0
                p.place[lane] = at
                p.tasks[at * 3] = found[lane]
                p.tasks[at * 3 + 1] = at
                p.tasks[at * 3 + 2] = at + 1
            for word in zl.unroll(range(p.chosen * 3 + lane, p.num_tasks * 3, zl.target.warp), 1):
                p.tasks[word] = 0


def variants(target) -> list[zl.Variant]:
    if not target.has("mma_sync"):  # Metal 3.1 has no fence between blocks
        return []
    return [
        zl.Variant(f"{kernel.name}_{element}", kernel, {"W": getattr(zl, element)}, threads=WARPS * target.warp)
        for kernel in (normed_router, route_one)
        for element in ROUTERS
    ]


def router_args(x, norm, normed, weight, bias, logits, eps: float) -> Args:
    """What the launch of one token's norm and logits takes."""
    (experts, width), tokens = weight.shape, logits.shape[0]
    check("route x", x, "f32", tokens, width)
    check("route norm", norm, "f32", width)
    check("route normed", normed, "bf16", tokens, width)
    check("route logits", logits, "f32", None, experts)
    if bias is not None:
        check("route router bias", bias, "f32", experts)
    args = Args(x=x, norm=norm, normed=normed, w=weight.planes["w"], bias=bias, out=logits, width=width)
    args |= dict(experts=experts, has_bias=int(bias is not None), eps=float(eps))
    return args


def launch_logits(recorder, x, norm, normed, weight, bias, logits, eps: float) -> None:
    """Norm and logits of one token."""
    args = router_args(x, norm, normed, weight, bias, logits, eps)
    recorder.launch(f"normed_router_{weight.scheme.element}", args, (-(-weight.shape[0] // NORM_ROWS),))


def choice_args(logits, select, chosen: int, options: dict[str, Any]) -> dict[str, Any]:
    """What every kernel that chooses one token's experts takes. options: of DEFAULTS."""
    gating, experts = options["gating"], logits.shape[1]
    takes = chooses_one(chosen, experts, gating, select is not None)
    require(takes, f"route: {chosen} of {experts} experts of one token, {gating}")
    if select is not None:
        check("route bias", select, "f32", experts)
    return dict(
        logits=logits,
        select=select,
        chosen=chosen,
        gating=GATINGS.index(gating),
        has_select=int(select is not None),
        normalize=int(options["normalize"]),
        sum_eps=float(options["eps"]),
        factor=float(options["scale"]),
    )


def launch_route(recorder, logits, routing, select, product, norm, normed, options: dict[str, Any]) -> None:
    """Norm, logits, routing and sorted pairs of one token."""
    _, weight, bias = product
    args = router_args(norm[0], norm[1], normed, weight, bias, logits, norm[2])
    args |= choice_args(logits, select, routing.ids.shape[1], options)
    args |= dict(ids=routing.ids, weights=routing.weights, source=routing.source, place=routing.place)
    args |= dict(
        tasks=routing.tasks, num_tasks=routing.tasks.shape[0], counter=recorder.device.scratch("route counter", 4)
    )
    recorder.launch(f"route_one_{weight.scheme.element}", args, (-(-weight.shape[0] // NORM_ROWS),))
