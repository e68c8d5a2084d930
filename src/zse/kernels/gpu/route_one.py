"""Routing of one token on a GPU with the router's product and the norm before it, in one launch.

Every block normalizes the row for itself and has the logits of a few experts; the one that comes last chooses. The code
is kept short: a step runs it once a layer, after tens of kilobytes of other kernels, and so mostly reads it from L2."""

from zse import kernel as zl
from zse.kernels.gpu.rows import inverse_rms
from zse.kernels.route import LEAST, ROUTER_ROWS, ROUTERS, RouteParams, probabilities
from zse.tensor import GATINGS, MAX_EXPERTS

WARPS = 4
HELD = 3  # vectors of a row that a thread has in registers: 3,072 columns of a block


class RouteOneParams(RouteParams):
    """x f32 [width], norm f32 [width]: normed bf16 [width] = x over its rms, times norm. w [experts, width],
    router_bias f32 [experts], and what `logits` is the address of as out; width a multiple of 8. source, place, tasks:
    of the token's pairs, sorted. counter: 0 before and after."""

    x: zl.Ptr[zl.f32, "const"]
    norm: zl.Ptr[zl.f32, "const"]
    normed: zl.Ptr[zl.bf16]
    w: zl.Ptr["W", "const"]
    router_bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    source: zl.Ptr[zl.i32]
    place: zl.Ptr[zl.i32]
    tasks: zl.Ptr[zl.i32]
    counter: zl.Ptr[zl.i32]
    width: zl.i32
    has_router_bias: zl.i32
    num_tasks: zl.i32
    norm_eps: zl.f32
    W: zl.static


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
def write_logits(p, parts, thread):
    """The logits of this block's experts; the first block writes the normalized row. A warp has a part of the columns, of
    all the experts' rows. parts: shared f32 [WARPS][1 + ROUTER_ROWS]."""
    lane, warp, first = thread % zl.target.warp, thread // zl.target.warp, zl.block_index(0) * ROUTER_ROWS
    step, start = zl.target.threads * 8, thread * 8
    rows = [p.w + zl.i64(min(first + e, p.experts - 1)) * p.width for e in zl.static(range(ROUTER_ROWS))]
    held = [[zl.f32.x(8)(0) for _ in zl.static(range(ROUTER_ROWS))] for _ in zl.static(range(HELD))]
    norms = [zl.f32.x(8)(0) for _ in zl.static(range(HELD))]
    xs = [zl.f32.x(8)(0) for _ in zl.static(range(HELD))]
    for i in zl.static(range(HELD)):
        k = i * step + start
        if k < p.width:
            norms[i] = zl.load(p.norm + k, 8)
            for e in zl.static(range(ROUTER_ROWS)):
                held[i][e] = zl.convert(zl.load(rows[e] + k, 8), zl.f32)
    zl.grid_wait()
    for i in zl.static(range(HELD)):
        k = i * step + start
        if k < p.width:
            xs[i] = zl.load(p.x + k, 8)
    sums = [zl.f32.x(8)(0) for _ in zl.static(range(1 + ROUTER_ROWS))]
    for i in zl.static(range(HELD)):
        add_columns(sums, xs[i], xs[i] * norms[i], held[i])
    for k in zl.unroll(range(HELD * step + start, p.width, step), 1):
        x = zl.load(p.x + k, 8)
        more = [zl.convert(zl.load(row + k, 8), zl.f32) for row in rows]
        add_columns(sums, x, x * zl.load(p.norm + k, 8), more)
    for n in zl.static(range(1 + ROUTER_ROWS)):
        total = zl.warp_sum(sum_of_eight(sums[n]))
        if lane == 0:
            parts[warp * (1 + ROUTER_ROWS) + n] = total
    zl.barrier()
    squares = (parts[0] + parts[5]) + (parts[10] + parts[15])
    inverse = inverse_rms(squares, p.width, p.norm_eps)
    if thread < ROUTER_ROWS and first + thread < p.experts:
        at = parts + (1 + thread)
        logit = ((at[0] + at[5]) + (at[10] + at[15])) * inverse
        if p.has_router_bias != 0:
            logit = logit + p.router_bias[first + thread]
        p.out[first + thread] = logit
    if first == 0:
        for i in zl.static(range(HELD)):
            k = i * step + start
            if k < p.width:
                zl.store(p.normed + k, zl.convert(xs[i] * inverse * norms[i], zl.bf16))
        for k in zl.unroll(range(HELD * step + start, p.width, step), 1):
            zl.store(p.normed + k, zl.convert(zl.load(p.x + k, 8) * inverse * zl.load(p.norm + k, 8), zl.bf16))


@zl.inline
def choose(p, probs, scores, found, thread):
    """found: the token's experts, the best first; an expert's place is how many are better. probs: of all experts;
    scores: shared memory for them and up to three more."""
    for e in zl.unroll(range(thread, (p.experts + 3) // 4 * 4, zl.target.threads), 1):
        score = zl.f32(LEAST)
        if e < p.experts:
            score = probs[e] + 0.0
            if p.has_bias != 0:
                score = score + p.bias[e]
            score = score if score > LEAST else zl.f32(LEAST)  # what is no number is worse than all numbers
        scores[e] = score
    zl.barrier()
    for e in zl.unroll(range(thread, p.experts, zl.target.threads), 1):
        mine, rank = scores[e] + 0.0, zl.i32(0)
        for f in zl.unroll(range(0, p.experts, 4), 4):
            others = zl.load(scores + f, 4)
            for u in zl.static(range(4)):
                # Of equal ones the first is better.
                rank += zl.i32(others[u] > mine) + (zl.i32(others[u] == mine) & zl.i32(f + u < e))
        if rank < p.chosen:
            found[rank] = e
    zl.barrier()


@zl.inline
def leave_choice(p, probs, found, lane):
    """The token's experts, their weights and their pairs, by a warp."""
    total, top = zl.f32(0), zl.f32(LEAST)
    for j in zl.unroll(range(p.chosen), 1):
        value = probs[found[j]]
        total += value
        top = max(top, value)
    if p.GATING == "softmax_chosen":
        total = zl.f32(0)
        for j in zl.unroll(range(p.chosen), 1):
            total += zl.exp(probs[found[j]] - top)
    for j in zl.unroll(range(lane, p.chosen, zl.target.warp), 1):
        mine, at = found[j] + 0, zl.i32(0)
        for other in zl.unroll(range(p.chosen), 1):
            at += zl.i32(found[other] < mine)
        value = probs[mine]
        if p.GATING == "softmax_chosen":
            value = zl.exp(value - top) / total
        elif p.normalize != 0:
            value = value / (total + p.eps)
        p.ids[j] = mine
        p.weights[j] = value * p.scale
        p.source[at] = 0
        p.place[j] = at
        p.tasks[at * 3] = mine
        p.tasks[at * 3 + 1] = at
        p.tasks[at * 3 + 2] = at + 1
    for word in zl.unroll(range(p.chosen * 3 + lane, p.num_tasks * 3, zl.target.warp), 1):
        p.tasks[word] = 0


@zl.kernel
def route_one(p: RouteOneParams):
    """Grid (experts / ROUTER_ROWS)."""
    zl.grid_launch_dependents()
    probs, scores = zl.shared_array(zl.f32, MAX_EXPERTS), zl.shared_array(zl.f32, MAX_EXPERTS)
    found, last = zl.shared_array(zl.i32, MAX_EXPERTS), zl.shared_array(zl.i32, 1)
    parts = zl.shared_array(zl.f32, WARPS * (1 + ROUTER_ROWS))
    thread = zl.thread_index()
    write_logits(p, parts, thread)
    zl.barrier()
    if thread == 0:
        zl.fence()
        before = zl.atomic_add(p.counter, 1)
        last[0] = zl.i32(before == zl.num_blocks(0) - 1)
        if before == zl.num_blocks(0) - 1:
            p.counter[0] = 0
        zl.fence()
    zl.barrier()
    if last[0] != 0:
        if zl.warp_index() == 0:
            probabilities(p, p.logits, probs, thread, zl.target.warp)
        zl.barrier()
        choose(p, probs, scores, found, thread)
        if zl.warp_index() == 0:
            leave_choice(p, probs, found, thread)


def variants(target) -> list[zl.Variant]:
    if not target.has("mma_sync"):  # Metal 3.1 has no fence between blocks
        return []
    return [
        zl.Variant(
            f"route_one_{element}_{gating}",
            route_one,
            {"GATING": gating, "W": getattr(zl, element)},
            threads=WARPS * target.warp,
        )
        for element in ROUTERS
        for gating in GATINGS
    ]
