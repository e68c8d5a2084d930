"""Routing on a GPU (zse.kernels.route says what is computed): a warp chooses for a token, one block sorts all pairs."""

from zse import kernel as zl
from zse.kernels.combine import CHUNKS
from zse.kernels.matmul_tile import TOKENS_PER_BLOCK as TASK_PAIRS
from zse.tensor import GATINGS, MAX_EXPERT_GROUPS, MAX_EXPERTS

LEAST = -3.0e38  # a score that is never chosen
SORT_THREADS = 1024
SUM_THREADS = CHUNKS["gpu"]


class GPURouteParams(zl.Record):
    """As zse.kernels.route.RouteParams."""

    logits: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    ids: zl.Ptr[zl.i32]
    weights: zl.Ptr[zl.f32]
    experts: zl.i32
    chosen: zl.i32
    groups: zl.i32
    groups_used: zl.i32
    group_best: zl.i32
    has_bias: zl.i32
    normalize: zl.i32
    eps: zl.f32
    scale: zl.f32
    GATING: zl.static


@zl.inline
def best_of_warp(value, index):
    """(the largest value of the lanes, its index; the smallest of equal ones), in every lane."""
    best = zl.warp_max(value)
    mine = zl.i32(MAX_EXPERTS)
    if value == best:
        mine = index
    return best, zl.warp_min(mine)


@zl.inline
def probabilities(p, row, probs, lane):
    """This lane's part of probs."""
    if p.GATING == "softmax":
        top = zl.f32(LEAST)
        for e in range(lane, p.experts, zl.target.warp):
            top = max(top, row[e])
        top = zl.warp_max(top)
        total = zl.f32(0)
        for e in range(lane, p.experts, zl.target.warp):
            part = zl.exp(row[e] - top)
            probs[e] = part
            total += part
        total = zl.warp_sum(total)
        for e in range(lane, p.experts, zl.target.warp):
            probs[e] = probs[e] / total
    else:
        for e in range(lane, p.experts, zl.target.warp):
            x = row[e]
            if p.GATING == "sigmoid":
                probs[e] = 1.0 / (1.0 + zl.exp(x * -1.0))
            elif p.GATING == "sqrt_softplus":
                probs[e] = zl.sqrt(max(x, 0.0) + zl.log(1.0 + zl.exp(max(x, x * -1.0) * -1.0)))
            else:
                probs[e] = x


@zl.inline
def keep_groups(p, scores, sums, lane):
    """Give the experts of all but the best groups the score LEAST."""
    size = p.experts // p.groups
    for g in range(lane, p.groups, zl.target.warp):
        first, second = zl.f32(LEAST), zl.f32(LEAST)
        for e in range(g * size, (g + 1) * size):
            value = scores[e]
            second = max(second, min(first, value))
            first = max(first, value)
        if size == 1 or p.group_best == 1:
            second = zl.f32(0)
        sums[g] = first + second
    zl.warp_barrier()
    for n in range(p.groups_used):
        mine, index = zl.f32(LEAST) * 2.0, zl.i32(MAX_EXPERTS)
        for g in range(lane, p.groups, zl.target.warp):
            if sums[g] > mine:
                mine = sums[g]
                index = g
        best, at = best_of_warp(mine, index)
        zl.warp_barrier()
        if lane == 0:
            if at < p.groups:
                sums[at] = zl.f32(LEAST) * 4.0  # minus infinity: kept
        zl.warp_barrier()
    for e in range(lane, p.experts, zl.target.warp):
        if sums[e // size] > LEAST * 1.1:
            scores[e] = zl.f32(LEAST)
    zl.warp_barrier()


@zl.kernel
def route_warp(p: GPURouteParams):
    """Grid (tokens,), a warp each."""
    zl.grid_launch_dependents()
    probs = zl.shared_array(zl.f32, MAX_EXPERTS)
    scores = zl.shared_array(zl.f32, MAX_EXPERTS)
    sums = zl.shared_array(zl.f32, MAX_EXPERT_GROUPS)
    zl.grid_wait()
    lane = zl.lane_index()
    token = zl.i64(zl.block_index(0))
    probabilities(p, p.logits + token * p.experts, probs, lane)
    for e in range(lane, p.experts, zl.target.warp):
        score = probs[e]
        if p.has_bias != 0:
            score = score + p.bias[e]
        scores[e] = score
    zl.warp_barrier()
    if p.groups_used < p.groups:
        keep_groups(p, scores, sums, lane)
    ids, weights = p.ids + token * p.chosen, p.weights + token * p.chosen
    total, top = zl.f32(0), zl.f32(LEAST)
    for j in range(p.chosen):
        mine, index = zl.f32(LEAST), zl.i32(MAX_EXPERTS)
        for e in range(lane, p.experts, zl.target.warp):
            if scores[e] > mine:
                mine = scores[e]
                index = e
        best, at = best_of_warp(mine, index)
        at = at if at < p.experts else zl.i32(0)  # none of them is a number
        zl.warp_barrier()
        if lane == 0:
            scores[at] = zl.f32(LEAST)
            ids[j] = at
            weights[j] = probs[at]
        zl.warp_barrier()
        total += probs[at]
        top = max(top, probs[at])
    if p.GATING == "softmax_chosen":
        total = zl.f32(0)
        for j in range(p.chosen):
            total += zl.exp(probs[ids[j]] - top)
    zl.warp_barrier()
    for j in range(lane, p.chosen, zl.target.warp):
        value = probs[ids[j]]
        if p.GATING == "softmax_chosen":
            value = zl.exp(value - top) / total
        elif p.normalize != 0:
            value = value / (total + p.eps)
        weights[j] = value * p.scale


@zl.inline
def lanes_below(votes, lane):
    """How many lanes below this one voted."""
    return zl.i32(zl.popcount(votes & ((zl.u64(1) << zl.u64(lane)) - zl.u64(1))))


@zl.kernel
def sort_pairs_gpu(
    ids: zl.Ptr[zl.i32, "const"],
    source: zl.Ptr[zl.i32],
    place: zl.Ptr[zl.i32],
    tasks: zl.Ptr[zl.i32],
    pairs: zl.i32,
    chosen: zl.i32,
    experts: zl.i32,
    num_tasks: zl.i32,
):
    """One block; a warp walks all pairs for each of its experts, twice: to count, then to place them in their order."""
    zl.grid_launch_dependents()
    starts = zl.shared_array(zl.i32, MAX_EXPERTS + 1)
    zl.grid_wait()
    lane, warp, warps = zl.lane_index(), zl.warp_index(), zl.target.threads // zl.target.warp
    for e in range(warp, experts, warps):
        count = zl.i32(0)
        for first in range(0, pairs, zl.target.warp):
            pair = first + lane
            is_mine = zl.i32(0)
            if pair < pairs:
                is_mine = zl.i32(ids[pair] == e)
            count += zl.i32(zl.popcount(zl.ballot(is_mine != 0)))
        if lane == 0:
            starts[e + 1] = count
    zl.barrier()
    if zl.thread_index() == 0:
        begin, task = zl.i32(0), zl.i32(0)
        starts[0] = 0
        for e in range(experts):
            end = begin + starts[e + 1]
            for first in range(begin, end, TASK_PAIRS):
                tasks[task * 3] = e
                tasks[task * 3 + 1] = first
                tasks[task * 3 + 2] = min(first + TASK_PAIRS, end)
                task += 1
            starts[e + 1] = end
            begin = end
        for word in range(task * 3, num_tasks * 3):
            tasks[word] = 0
    zl.barrier()
    for e in range(warp, experts, warps):
        at = starts[e]
        for first in range(0, pairs, zl.target.warp):
            pair = first + lane
            is_mine = zl.i32(0)
            if pair < pairs:
                is_mine = zl.i32(ids[pair] == e)
            votes = zl.ballot(is_mine != 0)
            if is_mine != 0:
                to = at + lanes_below(votes, lane)
                source[to] = pair // chosen
                place[pair] = to
            at += zl.i32(zl.popcount(votes))


class GPUExpertSums(zl.Record):
    """As zse.kernels.combine.ExpertSums."""

    y: zl.Ptr[zl.f32, "const"]
    weights: zl.Ptr[zl.f32, "const"]
    place: zl.Ptr[zl.i32, "const"]
    shared: zl.Ptr[zl.f32, "const"]
    gate: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    width: zl.i32
    chosen: zl.i32
    has_shared: zl.i32
    has_gate: zl.i32


@zl.kernel
def combine_gpu(p: GPUExpertSums):
    """Grid (chunks of columns, tokens)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    token = zl.i64(zl.block_index(1))
    k = zl.block_index(0) * zl.target.threads + zl.thread_index()
    if k < p.width:
        total = zl.f32(0)
        for j in range(p.chosen):
            at = token * p.chosen + j
            total = zl.fma(p.y[zl.i64(p.place[at]) * p.width + k], p.weights[at], total)
        if p.has_shared != 0:
            factor = zl.f32(1)
            if p.has_gate != 0:
                factor = 1.0 / (1.0 + zl.exp(p.gate[token] * -1.0))
            total = zl.fma(p.shared[token * p.width + k], factor, total)
        p.out[token * p.width + k] = total


def route_variants(target) -> list[zl.Variant]:
    warp = target.warp
    made = [zl.Variant(f"route_{gating}", route_warp, {"GATING": gating}, threads=warp) for gating in GATINGS]
    return [*made, zl.Variant("sort_pairs", sort_pairs_gpu, threads=SORT_THREADS)]


def combine_variants(target) -> list[zl.Variant]:
    return [zl.Variant("combine_pairs", combine_gpu, threads=SUM_THREADS)]
