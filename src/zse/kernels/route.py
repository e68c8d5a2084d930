"""Which experts compute which tokens of a mixture of experts, and in which order.

A token's probabilities are its logits by one of GATINGS; it is sent to the k experts with the best scores: probability
plus a bias for the selection (DeepSeek-V3, arXiv 2412.19437: weights stay unbiased), and where experts are in groups,
only to experts of the groups whose best two scores add up to most (in DeepSeek-V2: whose best one is highest). Weights
are the probabilities, perhaps divided by their sum, times a scale. A pair is a token and one of its experts; pairs are
sorted by expert, in the order of tokens, and cut into tasks of up to task_pairs for the products (kernels/matmul.py).
What a token gets does not depend on the others."""

from typing import Any

from zse import kernel as zl
from zse.kernels import host
from zse.kernels.matmul import matmul
from zse.kernels.matmul_tile import TOKENS_PER_BLOCK
from zse.kernels.norm import add_rmsnorm
from zse.kernels.op import EXACT, Case, Cost, HostArray, Op, OutputSpec, Tolerance, check, later, require
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.scheme import DenseScheme
from zse.runtime.args import Args
from zse.runtime.symbol import Size
from zse.tensor import GATINGS, MAX_EXPERT_GROUPS, MAX_EXPERTS, Routing

TASK_PAIRS = {"cpu": TOKENS_PER_BLOCK, "gpu": 8}  # most of a task
LEAST = -3.0e38  # a score that is never chosen
MAX_CHOSEN, MAX_CHOSEN_FROM = 32, 512  # of one token behind its norm: a lane each, and 16 a lane
SELECTED = ("sigmoid", "sqrt_softplus")  # gatings of each expert alone


def num_tasks(tokens: Size, max_tokens: int, chosen: int, experts: int, task_pairs: int) -> Size:
    """How many tasks the pairs of `tokens` (at most max_tokens) are cut into at most."""
    most = -(-max_tokens * chosen // task_pairs) + experts
    return most if max_tokens * chosen > most else tokens * chosen


class RouteParams(zl.Record):
    """logits f32 [tokens, experts]; bias f32 [experts], for the selection; ids i32, weights f32 [tokens, chosen]. eps
    is added to the sum that weights are divided by. groups_used of `groups` are searched, by their group_best (1, 2)
    best scores."""

    logits: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    ids: zl.Ptr[zl.i32]
    weights: zl.Ptr[zl.f32]
    experts: zl.index
    chosen: zl.index
    groups: zl.index
    groups_used: zl.index
    group_best: zl.index
    has_bias: zl.index
    normalize: zl.index
    eps: zl.f32
    scale: zl.f32
    GATING: zl.static


@zl.inline
def probabilities(p, row, probs, lane, lanes):
    """probs = what the gating makes of the logits `row`; a lane of a warp makes every lanes-th."""
    if p.GATING == "softmax":
        top = zl.f32(LEAST)
        for e in range(lane, p.experts, lanes):
            top = max(top, row[e])
        if lanes > 1:
            top = zl.warp_max(top)
        total = zl.f32(0)
        for e in range(lane, p.experts, lanes):
            part = zl.exp(row[e] - top)
            probs[e] = part
            total += part
        if lanes > 1:
            total = zl.warp_sum(total)
        for e in range(lane, p.experts, lanes):
            probs[e] = probs[e] / total
    else:
        for e in range(lane, p.experts, lanes):
            x = row[e]
            if p.GATING == "sigmoid":
                probs[e] = 1.0 / (1.0 + zl.exp(x * -1.0))
            elif p.GATING == "sqrt_softplus":
                probs[e] = zl.sqrt(max(x, 0.0) + zl.log(1.0 + zl.exp(max(x, x * -1.0) * -1.0)))
            else:
                probs[e] = x


@zl.inline
def keep_groups(p, scores, sums):
    """Give the experts of all but the best groups the score LEAST."""
    size = p.experts // p.groups
    for g in range(p.groups):
        first, second = zl.f32(LEAST), zl.f32(LEAST)
        for e in range(g * size, (g + 1) * size):
            value = scores[e]
            second = max(second, min(first, value))
            first = max(first, value)
        sums[g] = first + (second if size > 1 and p.group_best > 1 else 0.0)
    for n in range(p.groups_used):
        best, at = zl.f32(LEAST) * 2.0, zl.i64(0)
        for g in range(p.groups):
            if sums[g] > best:
                best = sums[g]
                at = g
        sums[at] = zl.f32(LEAST) * 4.0  # minus infinity: kept
    for g in range(p.groups):
        if sums[g] > LEAST * 1.1:
            for e in range(g * size, (g + 1) * size):
                scores[e] = LEAST


@zl.inline
def choose(p, scores, probs, ids, weights):
    """The k best scores in descending order, the first of equal ones; expert 0 where none is a number."""
    total = zl.f32(0)
    top = zl.f32(LEAST)
    for j in range(p.chosen):
        best, at = zl.f32(LEAST), zl.i64(0)
        for e in range(p.experts):
            if scores[e] > best:
                best = scores[e]
                at = e
        scores[at] = LEAST
        ids[j] = zl.i32(at)
        value = probs[at]
        weights[j] = value
        total += value
        top = max(top, value)
    if p.GATING == "softmax_chosen":
        total = zl.f32(0)
        for j in range(p.chosen):
            value = zl.exp(weights[j] - top)
            weights[j] = value
            total += value
    for j in range(p.chosen):
        value = weights[j]
        if p.GATING == "softmax_chosen":
            value = value / total
        elif p.normalize != 0:
            value = value / (total + p.eps)
        weights[j] = value * p.scale


@zl.kernel
def route_tokens(p: RouteParams):
    """Grid (tokens,)."""
    token = zl.block_index(0)
    probs, scores = zl.local_array(zl.f32, MAX_EXPERTS), zl.local_array(zl.f32, MAX_EXPERTS)
    sums = zl.local_array(zl.f32, MAX_EXPERT_GROUPS)
    probabilities(p, p.logits + token * p.experts, probs, 0, 1)
    for e in range(p.experts):
        score = probs[e]
        if p.has_bias != 0:
            score = score + p.bias[e]
        scores[e] = score
    if p.groups_used < p.groups:
        keep_groups(p, scores, sums)
    choose(p, scores, probs, p.ids + token * p.chosen, p.weights + token * p.chosen)


class PairSorting(zl.Record):
    """Parameters of sort_pairs: those of sorted_pairs()."""

    ids: zl.Ptr[zl.i32, "const"]
    source: zl.Ptr[zl.i32]
    place: zl.Ptr[zl.i32]
    tasks: zl.Ptr[zl.i32]
    pairs: zl.index
    chosen: zl.index
    experts: zl.index
    num_tasks: zl.index
    task_pairs: zl.index


@zl.kernel
def sort_pairs(p: PairSorting):
    """A counting sort by one block: 32,768 pairs of a prompt of 4,096 tokens are microseconds beside its products."""
    counts = zl.local_array(zl.i32, MAX_EXPERTS)
    for e in range(p.experts):
        counts[e] = 0
    for pair in range(p.pairs):
        expert = zl.i64(p.ids[pair])
        counts[expert] = counts[expert] + 1
    begin, task = zl.i64(0), zl.i64(0)
    for e in range(p.experts):
        end = begin + zl.i64(counts[e])
        counts[e] = zl.i32(begin)
        for first in range(begin, end, p.task_pairs):
            p.tasks[task * 3] = zl.i32(e)
            p.tasks[task * 3 + 1] = zl.i32(first)
            p.tasks[task * 3 + 2] = zl.i32(min(first + p.task_pairs, end))
            task += 1
        begin = end
    for word in range(task * 3, p.num_tasks * 3):
        p.tasks[word] = 0
    for pair in range(p.pairs):
        expert = zl.i64(p.ids[pair])
        at = counts[expert]
        counts[expert] = at + 1
        p.source[zl.i64(at)] = zl.i32(pair // p.chosen)
        p.place[pair] = at


def _check(logits, routing, bias, groups: int, groups_used: int, gating: str) -> tuple[Size, int, int, Size]:
    """(tokens, experts, experts of a token, pairs), of arguments that fit."""
    (tokens, experts), chosen = logits.shape, routing.ids.shape[1]
    require(gating in GATINGS, f"route: gating {gating!r}, expected one of {', '.join(GATINGS)}")
    require(
        0 < chosen <= experts <= MAX_EXPERTS,
        f"route: {chosen} of {experts} experts; up to {MAX_EXPERTS} are chosen from",
    )
    require(
        0 < groups_used <= groups <= MAX_EXPERT_GROUPS and experts % groups == 0,
        f"route: {groups_used} of {groups} groups",
    )
    require(experts // groups * groups_used >= chosen, f"route: {groups_used} groups have fewer than {chosen} experts")
    pairs = routing.source.shape[0]
    require(pairs == tokens * chosen, f"route: {pairs} pairs of {tokens} tokens and {chosen} experts each")
    check("route logits", logits, "f32", tokens, experts)
    check("route ids", routing.ids, "i32", tokens, chosen)
    check("route weights", routing.weights, "f32", tokens, chosen)
    check("route source", routing.source, "i32", pairs)
    check("route place", routing.place, "i32", pairs)
    check("route tasks", routing.tasks, "i32", None, 3)
    if bias is not None:
        check("route bias", bias, "f32", experts)
    return tokens, experts, chosen, pairs


def route_args(logits, routing, bias, options: dict[str, Any]) -> Args:
    """What the kernels of each GATING take."""
    groups, groups_used = options["groups"], options["groups_used"]
    _, experts, chosen, _ = _check(logits, routing, bias, groups, groups_used, options["gating"])
    return Args(
        logits=logits,
        bias=bias,
        ids=routing.ids,
        weights=routing.weights,
        experts=experts,
        chosen=chosen,
        groups=groups,
        groups_used=groups_used,
        group_best=options["group_best"],
        has_bias=int(bias is not None),
        normalize=int(options["normalize"]),
        eps=float(options["eps"]),
        scale=float(options["scale"]),
    )


def sort_args(logits, routing) -> Args:
    """What sort_pairs takes."""
    (_, experts), (tokens, chosen) = logits.shape, routing.ids.shape
    return Args(
        ids=routing.ids,
        source=routing.source,
        place=routing.place,
        tasks=routing.tasks,
        pairs=tokens * chosen,
        chosen=chosen,
        experts=experts,
        num_tasks=routing.tasks.shape[0],
        task_pairs=routing.task_pairs,
    )


DEFAULTS = dict(gating="softmax", normalize=False, eps=0.0, scale=1.0, groups=1, groups_used=1, group_best=2)


def route(
    recorder, logits, routing, bias=None, *, max_tokens: int, product=None, norm=None, normed=None, **options: Any
) -> None:
    """routing (all of its tensors) of logits f32 [M, E]. bias f32 [E]: added for the selection only. options: of
    DEFAULTS. normalize: weights are divided by their sum + eps (softmax_chosen: they are always), then multiplied with
    scale. max_tokens: the most tokens this recording will run with. product: the router's (a, weight, bias or None); on
    a GPU and of up to ROUTED_TOKENS tokens the launch that routes computes the logits as well (on NVIDIA's: Metal has
    no fence between blocks). norm: of one token that chooses_one(), with a product whose a is not there yet: (x f32 [1, H],
    weight f32 [H], eps), where no groups are searched; normed bf16 [1, H] = the RMSNorm of x times the weight, which is a."""
    options = DEFAULTS | options
    args = route_args(logits, routing, bias, options)
    device = recorder.device
    require(
        product is None or device.kernels == "gpu",
        "route: the product is the GPU's; on the CPU record matmul and route",
    )
    if product is not None and not device.simt:
        if norm is not None:
            require(max_tokens == 1, f"route: a norm of {max_tokens} tokens; of one")
            later("gpu.router", "launch_route")(recorder, logits, routing, bias, product, norm, normed, options)
        else:
            _launch_product(recorder, logits, routing, args, product, options["gating"], max_tokens)
        if max_tokens == 1:
            return
    else:
        require(norm is None or product is not None, "route: a norm without the product that follows it")
        if product is not None:
            a, weight, router_bias = product
            if norm is not None:
                add_rmsnorm(recorder, norm[0], None, None, norm[1], a := normed, norm[2])
            matmul(recorder, a, weight, logits, router_bias, max_tokens=max_tokens)
        recorder.launch(f"route_{options['gating']}", args, (logits.shape[0],))
    recorder.launch("sort_pairs", sort_args(logits, routing), (1,))


ROUTED_TOKENS = 8
ROUTER_ROWS = 4  # of the router, a warp each, of one block on a GPU
ROUTERS = ("bf16", "f16", "f32")  # element types of routers


def routes_product(device, weight, max_tokens: int) -> bool:
    """Whether route() takes this router's product."""
    fits = weight.scheme.element in ROUTERS and weight.layout == "rows" and weight.shape[1] % 8 == 0
    return device.kernels == "gpu" and not device.simt and max_tokens <= ROUTED_TOKENS and fits


def chooses_one(chosen: int, experts: int, gating: str, has_select: bool) -> bool:
    """Whether the kernels that choose for one token behind its norm (zse.kernels.gpu.router) take this."""
    return chosen <= MAX_CHOSEN and experts <= MAX_CHOSEN_FROM and (gating in SELECTED or not has_select)


def _launch_product(recorder, logits, routing, args: Args, product, gating: str, max_tokens: int) -> None:
    """One launch for logits and routing, of one token with its pairs sorted."""
    a, weight, bias = product
    tokens, experts = logits.shape
    require(max_tokens <= ROUTED_TOKENS, f"route: a product of {max_tokens} tokens; up to {ROUTED_TOKENS}")
    if bias is not None:
        check("route router bias", bias, "f32", experts)
    check("route a", a, "bf16", tokens, weight.shape[1])
    args |= dict(
        source=routing.source,
        place=routing.place,
        tasks=routing.tasks,
        num_tasks=routing.tasks.shape[0],
        w=weight.planes["w"],
        router_bias=bias,
        has_router_bias=int(bias is not None),
        out=logits,
        counter=recorder.device.scratch("route counter", 4),
        width=weight.shape[1],
        a=a,
        tokens=tokens,
        sorts=int(max_tokens == 1),
    )
    recorder.launch(f"route_{weight.scheme.element}_{gating}", args, (-(-experts // ROUTER_ROWS),))


def sorted_pairs(ids, experts: int, task_pairs: int = TASK_PAIRS["cpu"]) -> Routing:
    """The Routing of ids [M, k] in NumPy, without weights."""
    tokens, chosen = ids.shape
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    place = np.empty_like(order)
    place[order] = np.arange(len(order), dtype=np.int32)
    tasks: Any = np.zeros((num_tasks(tokens, tokens, chosen, experts, task_pairs), 3), np.int32)
    task = begin = 0
    for expert, count in enumerate(np.bincount(flat, minlength=experts).tolist()):
        for first in range(begin, begin + count, task_pairs):
            tasks[task] = expert, first, min(first + task_pairs, begin + count)
            task += 1
        begin += count
    return Routing(ids, None, order // chosen, place, tasks, task_pairs)


def _probabilities(logits, gating: str):
    x = np.asarray(logits, np.float64)
    if gating == "softmax":
        parts = np.exp(x - x.max(axis=1, keepdims=True))
        return parts / parts.sum(axis=1, keepdims=True)
    if gating == "sigmoid":
        return 1 / (1 + np.exp(-x))
    return np.sqrt(np.log1p(np.exp(x))) if gating == "sqrt_softplus" else x


def _reference(
    logits,
    routing,
    bias=None,
    gating="softmax",
    normalize=False,
    eps=0.0,
    scale=1.0,
    groups=1,
    groups_used=1,
    group_best=2,
    max_tokens=None,
    product=None,
    norm=None,
    normed=None,
):
    made = {}
    if product is not None:
        a, weight, router_bias = product
        if norm is not None:
            x, norm_weight, norm_eps = norm
            wide = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + norm_eps)
            wide = (wide * norm_weight).astype(np.float32)
            made["normed"], a = wide, HostArray("bf16", pack.f32_to_bf16(wide))
        logits = a.wide().astype(np.float64) @ weight.dequantize().astype(np.float64).T
        logits = logits if router_bias is None else logits + router_bias
    probs = _probabilities(logits, gating)
    scores = probs if bias is None else probs + bias.astype(np.float64)
    if groups_used < groups:
        grouped = scores.reshape(len(scores), groups, -1)
        sums = np.sort(grouped, axis=2)[:, :, -group_best:].sum(axis=2)
        kept = np.argsort(-sums, axis=1, kind="stable")[:, :groups_used]
        mask = np.full(sums.shape, -np.inf)
        np.put_along_axis(mask, kept, 0.0, axis=1)
        scores = (grouped + mask[:, :, None]).reshape(scores.shape)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, : routing.ids.shape[1]].astype(np.int32)
    weights = np.take_along_axis(probs, ids, axis=1)
    if gating == "softmax_chosen":
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights = weights / weights.sum(axis=1, keepdims=True)
    elif normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + eps)
    found = sorted_pairs(ids, logits.shape[1], routing.task_pairs)._replace(weights=weights * scale)
    return made | {f"routing.{name}": value for name, value in found._asdict().items() if name != "task_pairs"}


def _cases(rng, family="cpu"):
    """Gatings with all that goes with them, from one token to more pairs of an expert than a task takes; on a GPU, of
    few tokens, with the router's product too."""
    near = Tolerance(1e-7, 3e-6, "exp within 2 units in the last place, sums of up to 128 values in f32")
    # A logit is a sum of 264 products, whose sizes add up to less than 264: rounded by up to 2**-24 of that 9 + 5
    # times.
    summed = Tolerance(1e-7, 14 * 264 * 2**-24, "f32 sums of 264 products, through exp")
    for number, (tokens, experts, chosen, options, has_bias) in enumerate(
        (
            (1, 128, 8, dict(normalize=True), False),
            (70, 8, 2, dict(normalize=True), False),
            (5, 60, 4, dict(), False),
            (3, 32, 4, dict(gating="softmax_chosen"), False),
            (33, 64, 6, dict(gating="sigmoid", normalize=True, eps=1e-20, scale=2.5, groups=8, groups_used=4), True),
            (4, 16, 16, dict(gating="sigmoid", scale=1.5), True),
            (9, 24, 3, dict(gating="sqrt_softplus", normalize=True, scale=1.5), True),
            (2, 7, 1, dict(gating="softmax", groups=7, groups_used=3), True),
            (9, 24, 4, dict(gating="softmax", scale=16.0, groups=6, groups_used=2, group_best=1), False),
            (1, 10, 3, dict(gating="sqrt_softplus"), True),
            (150, 12, 4, dict(), False),
        )
    ):
        logits = (rng.standard_normal((tokens, experts)) * 2).astype(np.float32)
        bias = (rng.standard_normal(experts) * 0.3).astype(np.float32) if has_bias else None
        pairs, most = tokens * chosen, num_tasks(tokens, tokens, chosen, experts, TASK_PAIRS[family])
        shapes = dict(ids=(tokens, chosen), weights=(tokens, chosen), source=(pairs,), place=(pairs,), tasks=(most, 3))
        empty = Routing(**{name: np.zeros(shape, np.int32) for name, shape in shapes.items()})
        empty = empty._replace(task_pairs=TASK_PAIRS[family])
        inputs = {"logits": logits, "routing": empty, "bias": bias}
        name = f"{options.get('gating', 'softmax')} {chosen} of {experts}, {tokens} tokens"
        for product in (None, ROUTERS[number % 3]) if family == "gpu" and tokens <= ROUTED_TOKENS else (None,):
            if product:
                inputs = inputs | {"product": random_product(rng, logits, number % 2 == 0, product)}
            weights = summed if product else near
            outputs = {
                f"routing.{name}": OutputSpec(
                    shape, "float32" if name == "weights" else "int32", weights if name == "weights" else EXACT
                )
                for name, shape in shapes.items()
            }
            yield Case(f"{name} {product or ''}", inputs, outputs, options | {"max_tokens": tokens})
            if product and tokens == 1:
                yield _normed_case(rng, name, inputs, outputs, options)


def _normed_case(rng, name: str, inputs, outputs, options) -> Case:
    """With the norm of one token before the router's product; more columns than a lane has registers for."""
    logits = (rng.standard_normal(inputs["logits"].shape) * 2).astype(np.float32)
    x, weight = (rng.standard_normal((1, 2312)) * 3).astype(np.float32), rng.standard_normal(2312).astype(np.float32)
    normed = (x / np.sqrt((x**2).mean() + 1e-5) * weight).astype(np.float32)
    # Numbers of the router that give about these logits, and far fewer than would make a rounded a matter.
    wide = (logits.T @ normed / (normed**2).sum()).astype(np.float32)
    router = host.HostWeight(wide.shape, DenseScheme("f32"), {"w": wide}, "rows")
    near = Tolerance(2e-6, 2**-8, "rounded to bf16")
    loose = Tolerance(1e-5, 0.02, "logits of a that may be rounded the other way")
    outputs = outputs | {"normed": OutputSpec((1, 2312), "bf16", near)}
    outputs["routing.weights"] = OutputSpec(outputs["routing.weights"].shape, "float32", loose)
    inputs = inputs | {"logits": logits, "product": (None, router, None), "norm": (x, weight, 1e-5)}
    return Case(f"{name} f32 normed", inputs, outputs, options | {"max_tokens": 1})


def random_product(rng, logits, has_bias: bool, element: str):
    """(a, weight, bias) of a router that gives about these logits."""
    (tokens, experts), width = logits.shape, 264
    a = HostArray("bf16", pack.f32_to_bf16(rng.standard_normal((tokens, width)).astype(np.float32)))
    bias = (rng.standard_normal(experts) * 0.1).astype(np.float32) if has_bias else None
    wide = np.linalg.lstsq(a.wide().astype(np.float64), logits, rcond=None)[0].T.astype(np.float32)
    plane = pack.f32_to_bf16(wide) if element == "bf16" else wide.astype(np.float16 if element == "f16" else np.float32)
    return a, host.HostWeight(wide.shape, DenseScheme(element), {"w": plane}, "rows"), bias


def _cost(case: Case) -> Cost:
    (tokens, experts), pairs = case.inputs["logits"].shape, case.outputs["routing.source"].shape[0]
    return Cost(tokens * experts * 4 + pairs * 16, tokens * experts * 10 + pairs * experts)


def _variants(target) -> list[zl.Variant]:
    made = [zl.Variant(f"route_{gating}", route_tokens, {"GATING": gating}) for gating in GATINGS]
    return [*made, zl.Variant("sort_pairs", sort_pairs)]


ROUTE = Op("route", _variants, route, _reference, _cases, _cost, later("gpu.route", "route_variants"))
