"""Routing on a GPU (zse.kernels.route says what is computed): a warp chooses for a token, one block sorts all pairs."""

from zse import kernel as zl
from zse.kernels.combine import CHUNKS, OWN_THREADS, ExpertRanks, ExpertSums, OwnExperts, find_ranks, keep_own
from zse.kernels.gpu import router
from zse.kernels.route import LEAST, ROUTER_ROWS, ROUTERS, PairSorting, RouteParams, probabilities
from zse.tensor import GATINGS, MAX_EXPERT_GROUPS, MAX_EXPERTS

SORT_THREADS = 256
SUM_THREADS = CHUNKS["gpu"]
HELD = 8  # vectors of a router's row that a lane has in registers: 2,048 columns


@zl.inline
def best_of_warp(value, index):
    """(the largest value of the lanes, its index; the smallest of equal ones), in every lane."""
    best = zl.warp_max(value)
    mine = zl.i32(MAX_EXPERTS)
    if value == best:
        mine = index
    return best, zl.warp_min(mine)


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


@zl.inline
def route_token(p, token, probs, scores, sums, lane):
    """A warp's choice for a token. probs, scores, sums: shared memory of its own. (Each expert's rank instead, counted
    without an exchange between lanes, took half as long again: 12.2 us instead of 8.3 for 8 of 128 and 64 tokens on an
    H200.)"""
    probabilities(p, p.logits + token * p.experts, probs, lane, zl.target.warp)
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


@zl.kernel
def route_warp(p: RouteParams):
    """Grid (tokens,), a warp each."""
    zl.grid_launch_dependents()
    probs = zl.shared_array(zl.f32, MAX_EXPERTS)
    scores = zl.shared_array(zl.f32, MAX_EXPERTS)
    sums = zl.shared_array(zl.f32, MAX_EXPERT_GROUPS)
    zl.grid_wait()
    route_token(p, zl.i64(zl.block_index(0)), probs, scores, sums, zl.lane_index())


class RouterParams(RouteParams):
    """And the router's product: a bf16 [tokens, width], w [experts, width], router_bias f32 [experts]; out: logits, of
    which `logits` is the address too; width a multiple of 8. sorts: of one token, source, place and tasks as well.
    counter: 0 before and after."""

    a: zl.Ptr[zl.bf16, "const"]
    w: zl.Ptr["W", "const"]
    router_bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    source: zl.Ptr[zl.i32]
    place: zl.Ptr[zl.i32]
    tasks: zl.Ptr[zl.i32]
    counter: zl.Ptr[zl.i32]
    tokens: zl.i32
    width: zl.i32
    has_router_bias: zl.i32
    num_tasks: zl.i32
    sorts: zl.i32
    W: zl.static


@zl.inline
def write_logits(p, expert, lane):
    """An expert's logits of all tokens, by a warp. Its weights are read before anything is waited for."""
    step = zl.target.warp * 8
    row = p.w + zl.i64(expert) * p.width
    held = [zl.f32.x(8)(0) for _ in zl.static(range(HELD))]
    for i in zl.static(range(HELD)):
        k = i * step + lane * 8
        if k < p.width:
            held[i] = zl.convert(zl.load(row + k, 8), zl.f32)
    zl.grid_wait()
    for token in range(p.tokens):
        a_row = p.a + zl.i64(token) * p.width
        total = zl.f32.x(8)(0)
        for i in zl.static(range(HELD)):
            k = i * step + lane * 8
            if k < p.width:
                total = zl.fma(held[i], zl.convert(zl.load(a_row + k, 8), zl.f32), total)
        for k in range(HELD * step + lane * 8, p.width, step):
            total = zl.fma(zl.convert(zl.load(row + k, 8), zl.f32), zl.convert(zl.load(a_row + k, 8), zl.f32), total)
        mine = ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]))
        logit = zl.warp_sum(mine)
        if lane == 0:
            if p.has_router_bias != 0:
                logit = logit + p.router_bias[expert]
            p.out[zl.i64(token) * p.experts + expert] = logit


@zl.inline
def sort_token(p, lane):
    """source, place and tasks of the only token: its pairs in the order of its experts, which are all different."""
    for j in range(lane, p.chosen, zl.target.warp):
        mine, at = p.ids[j], zl.i32(0)
        for other in range(p.chosen):
            if p.ids[other] < mine:
                at += 1
        p.source[at] = 0
        p.place[j] = at
        p.tasks[at * 3] = mine
        p.tasks[at * 3 + 1] = at
        p.tasks[at * 3 + 2] = at + 1
    for word in range(p.chosen * 3 + lane, p.num_tasks * 3, zl.target.warp):
        p.tasks[word] = 0


@zl.kernel
def route_products(p: RouterParams):
    """Grid (experts / ROUTER_ROWS): a warp is an expert's row of the router; the block that comes last routes, a warp a
    token."""
    zl.grid_launch_dependents()
    probs = zl.shared_array(zl.f32, ROUTER_ROWS * MAX_EXPERTS)
    scores = zl.shared_array(zl.f32, ROUTER_ROWS * MAX_EXPERTS)
    sums = zl.shared_array(zl.f32, ROUTER_ROWS * MAX_EXPERT_GROUPS)
    last = zl.shared_array(zl.i32, 1)
    lane, warp = zl.lane_index(), zl.warp_index()
    expert = zl.block_index(0) * ROUTER_ROWS + warp
    if expert < p.experts:
        write_logits(p, expert, lane)
    else:
        zl.grid_wait()
    zl.fence()
    zl.barrier()
    if zl.thread_index() == 0:
        before = zl.atomic_add(p.counter, 1)
        last[0] = zl.i32(before == zl.num_blocks(0) - 1)
        if before == zl.num_blocks(0) - 1:
            p.counter[0] = 0
    zl.barrier()
    if last[0] != 0:
        zl.fence()
        for token in range(warp, p.tokens, ROUTER_ROWS):
            at, groups_at = warp * MAX_EXPERTS, warp * MAX_EXPERT_GROUPS
            route_token(p, zl.i64(token), probs + at, scores + at, sums + groups_at, lane)
            zl.warp_barrier()
        if p.sorts != 0:
            if warp == 0:
                sort_token(p, lane)


@zl.inline
def lanes_below(votes, lane):
    """How many lanes below this one voted."""
    return zl.i32(zl.popcount(votes & ((zl.u64(1) << zl.u64(lane)) - zl.u64(1))))


@zl.inline
def inclusive_sum(value, lane):
    """The sum of the values of this lane and all before it."""
    total = value + 0
    for step in zl.static([1 << i for i in range(zl.target.warp.bit_length() - 1)]):
        before = zl.shuffle_up(total, step)
        total += before if lane >= step else zl.i32(0)
    return total


@zl.inline
def same_expert(ids, pair, last, lane):
    """(this lane's expert, the lanes whose pairs have the same one; none where the pair is not before `last`)."""
    expert = ids[pair] if pair < last else zl.i32(0)
    lanes = zl.ballot(pair < last)
    for bit in zl.static(range(MAX_EXPERTS.bit_length() - 1)):
        is_set = (expert >> bit) & 1
        votes = zl.ballot(is_set != 0)
        lanes = lanes & (votes if is_set != 0 else votes ^ zl.u64(0xFFFFFFFFFFFFFFFF))
    return expert, lanes


@zl.kernel
def sort_pairs_gpu(p: PairSorting):
    """One block; each warp has a range of the pairs, a lane each: it counts those of each expert, and places them in
    their order when it is known where each expert's begin."""
    zl.grid_launch_dependents()
    starts = zl.shared_array(zl.i32, MAX_EXPERTS + 1)
    counts = zl.shared_array(zl.i32, zl.target.threads // zl.target.warp * MAX_EXPERTS)
    lane, warp, warps = zl.lane_index(), zl.warp_index(), zl.target.threads // zl.target.warp
    for word in range(zl.thread_index(), warps * p.experts, zl.target.threads):
        counts[word] = 0
    zl.grid_wait()
    zl.barrier()
    share = (p.pairs + (zl.target.threads - 1)) // zl.target.threads * zl.target.warp
    begin, last = warp * share, min(warp * share + share, p.pairs)
    mine = counts + warp * p.experts
    for first in range(begin, last, zl.target.warp):
        expert, lanes = same_expert(p.ids, first + lane, last, lane)
        if first + lane < last and lanes_below(lanes, lane) == 0:
            mine[expert] = mine[expert] + zl.i32(zl.popcount(lanes))
        zl.warp_barrier()
    zl.barrier()
    for e in range(zl.thread_index(), p.experts, zl.target.threads):
        before = zl.i32(0)
        for other in range(warps):
            here = counts[other * p.experts + e]
            counts[other * p.experts + e] = before
            before += here
        starts[e + 1] = before
    zl.barrier()
    if warp == 0:
        write_tasks(starts, p.tasks, p.experts, p.num_tasks, p.task_pairs, lane)
    zl.barrier()
    for first in range(begin, last, zl.target.warp):
        pair = first + lane
        expert, lanes = same_expert(p.ids, pair, last, lane)
        to = starts[expert] + mine[expert] + lanes_below(lanes, lane)
        zl.warp_barrier()
        if pair < last:
            p.source[to] = pair // p.chosen
            p.place[pair] = to
            if lanes_below(lanes, lane) == 0:
                mine[expert] = mine[expert] + zl.i32(zl.popcount(lanes))
        zl.warp_barrier()


@zl.inline
def write_tasks(starts, tasks, experts, num_tasks, task_pairs, lane):
    """starts[e + 1]: from how many pairs expert e has to where its last one ends; and the tasks. Prefix sums by a
    warp."""
    pairs_before, tasks_before = zl.i32(0), zl.i32(0)
    for first in range(0, experts, zl.target.warp):
        e = first + lane
        count = starts[e + 1] if e < experts else zl.i32(0)
        number = (count + (task_pairs - 1)) // task_pairs
        end = pairs_before + inclusive_sum(count, lane)
        task = tasks_before + inclusive_sum(number, lane)
        pairs_before = zl.shuffle(end, zl.target.warp - 1)
        tasks_before = zl.shuffle(task, zl.target.warp - 1)
        zl.warp_barrier()
        if e < experts:
            starts[e + 1] = end
        for part in range(number):
            at = (task - number + part) * 3
            tasks[at] = e
            tasks[at + 1] = end - count + part * task_pairs
            tasks[at + 2] = min(end - count + (part + 1) * task_pairs, end)
    if lane == 0:
        starts[0] = 0
    for word in range(tasks_before * 3 + lane, num_tasks * 3, zl.target.warp):
        tasks[word] = 0


class GpuSums(ExpertSums):
    """The parameters of combine_gpu."""

    out: zl.Ptr["OUT"]
    OUT: zl.static


@zl.kernel
def combine_gpu(p: GpuSums):
    """Grid (chunks of columns, tokens)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    token = zl.i64(zl.block_index(1))
    k = zl.block_index(0) * zl.target.threads + zl.thread_index()
    if k < p.width:
        total = zl.f32(0)
        for j in range(p.chosen):
            at = token * p.chosen + j
            if p.weights[at] != 0.0:  # else perhaps another rank's, which nobody wrote
                total = zl.fma(p.y[zl.i64(p.place[at]) * p.width + k], p.weights[at], total)
        if p.has_shared != 0:
            factor = zl.f32(1)
            if p.has_gate != 0:
                factor = 1.0 / (1.0 + zl.exp(p.gate[token] * -1.0))
            total = zl.fma(p.shared[token * p.width + k], factor, total)
        p.out[token * p.width + k] = zl.convert(total, p.OUT)


@zl.kernel
def own_experts_gpu(p: OwnExperts):
    """Grid (blocks that share the pairs and the tasks)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    threads = zl.target.threads
    keep_own(p, zl.block_index(0) * threads + zl.thread_index(), zl.num_blocks(0) * threads)


@zl.kernel
def expert_ranks_gpu(p: ExpertRanks):
    """Grid (blocks of tokens)."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    threads = zl.target.threads
    find_ranks(p, zl.block_index(0) * threads + zl.thread_index(), zl.num_blocks(0) * threads)


def ranks_variants(target) -> list[zl.Variant]:
    return [zl.Variant("expert_ranks", expert_ranks_gpu, threads=OWN_THREADS)]


def own_variants(target) -> list[zl.Variant]:
    return [zl.Variant("own_experts", own_experts_gpu, threads=OWN_THREADS)]


def route_variants(target) -> list[zl.Variant]:
    warp = target.warp
    made = [zl.Variant(f"route_{gating}", route_warp, {"GATING": gating}, threads=warp) for gating in GATINGS]
    if not target.has("mma_sync"):  # Metal 3.1 has no fence between blocks, and 32 KiB of shared memory
        return [*made, zl.Variant("sort_pairs", sort_pairs_gpu, threads=SORT_THREADS // 2)]
    made += [
        zl.Variant(
            f"route_{element}_{gating}",
            route_products,
            {"GATING": gating, "W": getattr(zl, element)},
            threads=ROUTER_ROWS * warp,
        )
        for element in ROUTERS
        for gating in GATINGS
    ]
    return [*made, *router.variants(target), zl.Variant("sort_pairs", sort_pairs_gpu, threads=SORT_THREADS)]


def combine_variants(target) -> list[zl.Variant]:
    return [
        zl.Variant(f"combine_pairs{name}", combine_gpu, {"OUT": out}, threads=SUM_THREADS)
        for name, out in (("", zl.f32), ("_bf16", zl.bf16))
    ]
