"""What the experts of a token give, weighted and added, with what a shared expert gives beside them; which of them one rank
computes, where ranks have whole experts, and which ranks compute for a token (docs/design/0011-several-devices.md)."""

from zse import kernel as zl
from zse.kernels.op import EXACT, Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.route import sorted_pairs
from zse.lazy import numpy as np
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div

CHUNKS = {"cpu": 1024, "gpu": 256}  # columns of one block
OWN_THREADS = 256  # of a block on a GPU


class ExpertSums(zl.Record):
    """y f32 [pairs, width], sorted by expert; weights f32, place i32 [tokens, chosen], rows of a weight of 0 are not read; shared f32 [tokens, width] and
    gate f32 [tokens, 1], which has_shared and has_gate say there are."""

    y: zl.Ptr[zl.f32, "const"]
    weights: zl.Ptr[zl.f32, "const"]
    place: zl.Ptr[zl.i32, "const"]
    shared: zl.Ptr[zl.f32, "const"]
    gate: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    width: zl.index
    chosen: zl.index
    has_shared: zl.index
    has_gate: zl.index


@zl.inline
def weighted(p, token, k, lanes, factor):
    """`lanes` columns from k on of a token's sum, in the order of its experts. factor: of the shared expert."""
    total = zl.f32.x(lanes)(0)
    for j in range(token * p.chosen, (token + 1) * p.chosen):
        if p.weights[j] != 0.0:  # else perhaps another rank's, which nobody wrote
            row = p.y + zl.i64(p.place[j]) * p.width
            total = zl.fma(zl.load(row + k, lanes), zl.f32.x(lanes)(p.weights[j]), total)
    if p.has_shared != 0:
        total = zl.fma(zl.load(p.shared + token * p.width + k, lanes), zl.f32.x(lanes)(factor), total)
    return total


@zl.kernel
def combine_pairs(p: ExpertSums):
    """Grid (chunks of columns, tokens)."""
    L = zl.target.lanes
    token = zl.block_index(1)
    first = zl.block_index(0) * CHUNKS["cpu"]
    last = min(first + CHUNKS["cpu"], p.width)
    whole = first + (last - first) // L * L
    factor = zl.f32(1)
    if p.has_gate != 0:
        factor = 1.0 / (1.0 + zl.exp(p.gate[token] * -1.0))
    out = p.out + token * p.width
    for k in range(first, whole, L):
        zl.store(out + k, weighted(p, token, k, L, factor))
    for k in range(whole, last):
        zl.store(out + k, weighted(p, token, k, 1, factor))


def combine(recorder, y, routing, out, shared=None, gate=None) -> None:
    """out f32 [M, H] = each token's sum of weight * y over its experts, y f32 [P, H] sorted by expert, + shared f32 [M,
    H] times sigmoid of gate f32 [M, 1], or times 1. On a GPU out may be bf16."""
    (tokens, width), (_, chosen) = out.shape, routing.ids.shape
    check("combine out", out, ("f32", "bf16") if recorder.device.kernels == "gpu" else "f32", tokens, width)
    check("combine y", y, "f32", routing.place.shape[0], width)
    check("combine weights", routing.weights, "f32", tokens, chosen)
    check("combine place", routing.place, "i32", tokens * chosen)
    require(gate is None or shared is not None, "combine: a gate without what it gates")
    if shared is not None:
        check("combine shared", shared, "f32", tokens, width)
    if gate is not None:
        check("combine gate", gate, "f32", tokens, 1)
    args = Args(
        y=y,
        weights=routing.weights,
        place=routing.place,
        shared=shared,
        gate=gate,
        out=out,
        width=width,
        chosen=chosen,
        has_shared=int(shared is not None),
        has_gate=int(gate is not None),
    )
    symbol = "combine_pairs_bf16" if out.dtype == "bf16" else "combine_pairs"
    recorder.launch(symbol, args, (-(-width // CHUNKS[recorder.device.kernels]), tokens))


def _reference(y, routing, shared=None, gate=None):
    rows = np.asarray(y, np.float64)[routing.place].reshape(*routing.weights.shape, -1)
    weights = routing.weights.astype(np.float64)[:, :, None]
    total = np.where(weights == 0, 0, rows * weights).sum(axis=1)
    if shared is not None:
        total = total + shared.astype(np.float64) * (1 if gate is None else 1 / (1 + np.exp(-gate.astype(np.float64))))
    return {"out": total}


def _cases(rng, family="cpu"):
    near = Tolerance(1e-5, 1e-5, "f32 sums of up to 9 products")
    for tokens, chosen, experts, width, extras in (
        (1, 8, 128, 2048, 0),
        (5, 3, 7, 1064, 1),
        (4, 2, 4, 40, 2),
        (3, 1, 2, 7, 2),
    ):
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
        weights = rng.random((tokens, chosen)).astype(np.float32)
        weights[rng.random(weights.shape) < 0.2] = 0
        routing = sorted_pairs(ids, experts)._replace(weights=weights)
        y = rng.standard_normal((tokens * chosen, width)).astype(np.float32)
        y[routing.place[weights.reshape(-1) == 0]] = np.nan
        inputs = {"y": y, "routing": routing}
        if extras:
            inputs["shared"] = rng.standard_normal((tokens, width)).astype(np.float32)
        if extras > 1:
            inputs["gate"] = (rng.standard_normal((tokens, 1)) * 3).astype(np.float32)
        output = OutputSpec((tokens, width), "float32", near)
        name = f"{chosen} of {experts}, {tokens}x{width}, {extras} extras"
        yield Case(name, inputs, {"out": output})
        if family == "gpu":
            rounded = Tolerance(1e-5, 2**-8, "the result is rounded to bf16")
            yield Case(f"{name}, bf16", inputs, {"out": OutputSpec((tokens, width), "bf16", rounded)})


def _cost(case: Case) -> Cost:
    (pairs, width), (tokens, _) = case.inputs["y"].shape, case.outputs["out"].shape
    return Cost((pairs + 2 * tokens) * width * 4, 2 * pairs * width)


COMBINE = Op(
    "combine",
    lambda target: [zl.Variant("combine_pairs", combine_pairs)],
    combine,
    _reference,
    _cases,
    _cost,
    later("gpu.route", "combine_variants"),
)


class OwnExperts(zl.Record):
    """ids i32, weights f32 [pairs]; tasks i32 [num_tasks, 3]. lowest, count: the experts that are here."""

    ids: zl.Ptr[zl.i32, "const"]
    weights: zl.Ptr[zl.f32]
    tasks: zl.Ptr[zl.i32]
    pairs: zl.index
    num_tasks: zl.index
    lowest: zl.index
    count: zl.index


@zl.inline
def keep_own(p, begin, step):
    """Every step-th pair and task from `begin` on."""
    for pair in range(begin, p.pairs, step):
        expert = p.ids[pair] - zl.i32(p.lowest)
        if expert < 0 or expert >= zl.i32(p.count):
            p.weights[pair] = zl.f32(0)
    for number in range(begin, p.num_tasks, step):
        task = p.tasks + number * 3
        expert = task[0] - zl.i32(p.lowest)
        if expert < 0 or expert >= zl.i32(p.count):
            task[0] = zl.i32(0)
            task[1] = zl.i32(0)
            task[2] = zl.i32(0)
        else:
            task[0] = expert


@zl.kernel
def own_experts_cpu(p: OwnExperts):
    """One block."""
    keep_own(p, zl.i64(0), 1)


def own_experts(recorder, ids, weights, tasks, *, first: int, count: int) -> None:
    """weights f32 [M, k] of pairs whose expert (ids i32 [M, k]) is none of first .. first + count - 1 become 0; tasks i32 [N, 3]
    (zse.tensor.Routing) of such experts become empty, those of others count experts from `first` on. In place."""
    tokens, chosen = ids.shape
    check("own_experts ids", ids, "i32", tokens, chosen)
    check("own_experts weights", weights, "f32", tokens, chosen)
    check("own_experts tasks", tasks, "i32", None, 3)
    require(first >= 0 and count > 0, f"own_experts: {count} experts from {first} on")
    pairs = tokens * chosen
    args = Args(ids=ids, weights=weights, tasks=tasks, pairs=pairs, num_tasks=tasks.shape[0], lowest=first, count=count)
    recorder.launch("own_experts", args, (ceil_div(tokens, 32) if recorder.device.kernels == "gpu" else 1,))


def _own_reference(ids, weights, tasks, first, count):
    own = (ids >= first) & (ids < first + count)
    kept = (tasks[:, 0] >= first) & (tasks[:, 0] < first + count)
    return {"weights": np.where(own, weights, 0), "tasks": np.where(kept[:, None], tasks - [first, 0, 0], 0)}


def _own_cases(rng, family="cpu"):
    for tokens, chosen, experts, first, count in (
        (1, 8, 128, 0, 64),
        (5, 3, 7, 4, 3),
        (300, 2, 5, 1, 2),
        (2, 1, 4, 2, 1),
    ):
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
        weights = rng.random((tokens, chosen)).astype(np.float32) + np.float32(0.1)
        tasks = sorted_pairs(ids, experts, 8).tasks
        outputs = {"weights": OutputSpec(weights.shape, "float32", EXACT, inout=weights)}
        outputs["tasks"] = OutputSpec(tasks.shape, "int32", EXACT, inout=tasks)
        name = f"{tokens} tokens, {chosen} of {experts}, {count} from {first} on"
        yield Case(name, {"ids": ids}, outputs, {"first": first, "count": count})


def _own_cost(case: Case) -> Cost:
    return Cost(case.inputs["ids"].size * 12 + case.outputs["tasks"].inout.size * 8, case.inputs["ids"].size)


OWN_EXPERTS = Op(
    "own_experts",
    lambda target: [zl.Variant("own_experts", own_experts_cpu)],
    own_experts,
    _own_reference,
    _own_cases,
    _own_cost,
    later("gpu.route", "own_variants"),
)


class ExpertRanks(zl.Record):
    """ids i32 [tokens, chosen]; out i32 [tokens]: a bit for each of `ranks` that has one of a token's experts."""

    ids: zl.Ptr[zl.i32, "const"]
    out: zl.Ptr[zl.i32]
    tokens: zl.index
    chosen: zl.index
    experts: zl.index
    ranks: zl.index


@zl.inline
def find_ranks(p, begin, step):
    """Every step-th token from `begin` on. A rank's experts begin at experts * rank // ranks (zse.models.spans.spread)."""
    for token in range(begin, p.tokens, step):
        found = zl.u32(0)
        for j in range(p.chosen):
            expert = zl.i32(p.ids[token * p.chosen + j])
            found = found | zl.u32(1) << zl.u32(((expert + 1) * zl.i32(p.ranks) - 1) // zl.i32(p.experts))
        p.out[token] = zl.bitcast(found, zl.i32)


@zl.kernel
def expert_ranks_cpu(p: ExpertRanks):
    """One block."""
    find_ranks(p, zl.i64(0), 1)


def expert_ranks(recorder, ids, out, *, experts: int, ranks: int) -> None:
    """out i32 [M]: of each token a bit for every rank that has one of its experts, ids i32 [M, k] of `experts`, of which each of up to 32
    ranks has as many as the others, or one more."""
    tokens, chosen = ids.shape
    check("expert_ranks ids", ids, "i32", tokens, chosen)
    check("expert_ranks out", out, "i32", tokens)
    require(0 < ranks <= min(32, experts), f"expert_ranks: {experts} experts of {ranks} ranks")
    args = Args(ids=ids, out=out, tokens=tokens, chosen=chosen, experts=experts, ranks=ranks)
    recorder.launch("expert_ranks", args, (ceil_div(tokens, OWN_THREADS) if recorder.device.kernels == "gpu" else 1,))


def _ranks_reference(ids, experts, ranks):
    firsts = [experts * rank // ranks for rank in range(ranks)]
    of = np.searchsorted(firsts, ids, side="right") - 1
    return {"out": np.bitwise_or.reduce(np.uint32(1) << of.astype(np.uint32), axis=1).view(np.int32)}


def _ranks_cases(rng, family="cpu"):
    for tokens, chosen, experts, ranks in (
        (1, 8, 128, 8),
        (5, 3, 7, 3),
        (300, 2, 5, 2),
        (700, 4, 61, 32),
        (3, 1, 32, 32),
    ):
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
        outputs = {"out": OutputSpec((tokens,), "int32", EXACT)}
        options = {"experts": experts, "ranks": ranks}
        yield Case(f"{tokens} tokens, {chosen} of {experts} on {ranks} ranks", {"ids": ids}, outputs, options)


def _ranks_cost(case: Case) -> Cost:
    return Cost(case.inputs["ids"].size * 4 + case.outputs["out"].shape[0] * 4, 4 * case.inputs["ids"].size)


EXPERT_RANKS = Op(
    "expert_ranks",
    lambda target: [zl.Variant("expert_ranks", expert_ranks_cpu)],
    expert_ranks,
    _ranks_reference,
    _ranks_cases,
    _ranks_cost,
    later("gpu.route", "ranks_variants"),
)
