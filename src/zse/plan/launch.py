"""A launch for each kind of node (see zse.plan.rules), by the names of operations."""

from collections.abc import Callable
from typing import Any

from zse.kernels import (
    adapter,
    columns,
    combine,
    conv,
    delta,
    gate_output,
    gated_norm,
    head_product,
    heads_attention,
    images,
    join,
    latent_attention,
    latent_post,
    layer_inputs,
    logits,
    reorder,
    route,
    scan,
    whole_norm,
)
from zse.kernels.activation import gated
from zse.kernels.attention import attention
from zse.kernels.embed import embed
from zse.kernels.gather import gather_rows
from zse.kernels.matmul import matmul
from zse.kernels.norm import add_rmsnorm
from zse.kernels.qkv_post import qkv_post
from zse.kernels.quantize import quantize
from zse.plan import mixtures
from zse.plan.forward import words_of
from zse.plan.trace import Node
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.plan.record import Run


def _embed(run: "Run", node: Node) -> None:
    step, options = run.step, node.options
    ids: Any = {"tokens": step.token_ids, "positions": step.positions, "types": run.types}[options.get("ids", "tokens")]
    rows = run.of(ids), run.weight(node), run.t[node.output]
    embed(run.recorder, *rows, options["scale"], bool(node.inputs), options.get("first", 0))
    if run.images is not None and node.output.is_stream:
        run.images.place(run)


def _taken(run: "Run", node: Node) -> None:
    out, taken, norm = run.t[node.output], run.taken, run.vector(node, "norm")
    gather_rows(run.recorder, taken.stream, run.of(taken.rows), out)
    if norm is not None:
        add_rmsnorm(run.recorder, out, None, None, norm, None, run.planner.config.norm_eps, in_place=True)


def _join(run: "Run", node: Node) -> None:
    out, first = run.t[node.output], 0
    for number, value in enumerate(node.inputs):
        join.join(run.recorder, run.t[value], run.vector(node, f"norm{number}"), out, first, node.options["eps"])
        first += value.width


def _spread(run: "Run", node: Node) -> None:
    logits.spread_logits(run.recorder, run.t[node.inputs[0]], run.vector(node, "ids"), run.t[node.output])


def _layer_inputs(run: "Run", node: Node) -> None:
    product, rows = (run.t[value] for value in node.inputs)
    norm = run.vector(node, "norm")
    layer_inputs.layer_inputs(run.recorder, product, rows, norm, run.planner.layer_inputs, node.options["eps"])


def _gate_inputs(run: "Run", node: Node) -> None:
    whole = run.planner.layer_inputs
    _, most, width = whole.shape
    own = Tensor(whole.buffer, (run.tokens, width), "f32", whole.offset + 4 * run.layer * most * width)
    sources = run.t[node.inputs[0]], own
    gated(run.recorder, sources, run.t[node.output], node.options["activation"])


def _norm_sum(run: "Run", node: Node) -> None:
    a, b = (run.t[value] for value in node.inputs)
    weights = run.vector(node, "norm"), run.vector(node, "other")
    layer_inputs.norm_sum(run.recorder, a, b, *weights, run.t[node.output], node.options["eps"])


def _clamp(run: "Run", node: Node) -> None:
    images.clamp(
        run.recorder, run.t[node.inputs[0]], run.vector(node, "bounds"), run.t[node.output], node.options["first"]
    )


def _scale_stream(run: "Run", node: Node) -> None:
    layer_inputs.scale_rows(run.recorder, run.t[node.inputs[0]], run.vector(node, "weight"))


def _linear(run: "Run", node: Node) -> None:
    if (node.options.get("routes") and _routes(run, node)) or mixtures.is_one(run, node):
        return  # the launch that routes computes it
    if run.sums is not None and run.sums.pushes(node):
        return
    adds = node.options.get("accumulate", False)
    out = run.t[node.inputs[1] if adds else node.output]
    matmul(
        run.recorder,
        run.t[node.inputs[0]],
        run.weight(node),
        out,
        bias=run.vector(node, "bias"),
        independent=node.options.get("independent", False),
        max_tokens=run.form_tokens,
        accumulate=adds,
    )


def _adapt(run: "Run", node: Node) -> None:
    adapters = run.planner.adapters
    x, *results = (run.t[value] for value in node.inputs)
    place = adapters.place(run.layer, node.options["members"])
    low, most = run.t[node.output], run.max_tokens
    adapter.adapt(run.recorder, x, low, run.adapters, place, run.token_row, *results, max_tokens=most)


def _route(run: "Run", node: Node) -> None:
    if mixtures.is_one(run, node):
        return
    router, product = node.inputs[0].node, None
    if router is not None and router.options.get("routes") and _routes(run, router):
        product = run.t[router.inputs[0]], run.weight(router), run.vector(router, "bias")
    logits, routing, bias = run.t[node.inputs[0]], run.t[node.output], run.vector(node, "bias")
    options = {name: value for name, value in node.options.items() if name != "mixture"}
    before = router.inputs[0].node if product is not None and router is not None else None
    if before is not None and _norms(run, before):
        eps = before.options.get("eps", run.planner.config.norm_eps)
        options |= dict(norm=(run.t[before.inputs[0]], run.vector(before, "norm"), eps), normed=run.t[before.output])
    route.route(run.recorder, logits, routing, bias, max_tokens=run.form_tokens, product=product, **options)
    factors = run.vector(node, "factors")
    if factors is not None:
        layer_inputs.scale_choices(run.recorder, routing.ids, routing.weights, factors)
    model = run.planner.model
    first, count = model.config.moe.own
    if count:
        combine.own_experts(run.recorder, routing.ids, routing.weights, routing.tasks, first=first, count=count)
    for waiting in (model.lazy_experts, model.host_experts):
        if waiting is not None:
            waiting.record(run.recorder, run.layer, routing)


def _norms(run: "Run", norm: Node) -> bool:
    """Whether the launch that routes computes this norm."""
    router = norm.options.get("router")
    if router is None or run.form_tokens != 1 or len(norm.inputs) > 1 or "bias" in norm.weights:
        return False
    return run.t[norm.output].dtype == "bf16" and _routes(run, router)


def _routes(run: "Run", router: Node) -> bool:
    return route.routes_product(run.recorder.device, run.weight(router), run.form_tokens)


def _experts(run: "Run", node: Node) -> None:
    if mixtures.is_one(run, node):
        return
    matmul(
        run.recorder,
        run.t[node.inputs[0]],
        run.weight(node),
        run.t[node.output],
        bias=run.vector(node, "bias"),
        independent=node.options.get("independent", False),
        max_tokens=run.form_tokens,
        routing=run.t[node.inputs[1]],
        gather=node.options["gather"],
        gate=node.options.get("gate"),
    )


def _combine(run: "Run", node: Node) -> None:
    if mixtures.is_one(run, node):
        mixtures.record(run, node.options["mixture"])
        return
    y, routing, *shared = (run.t[value] for value in node.inputs)
    if not shared and run.defers(node):
        run.deferred = y, routing
        return
    combine.combine(run.recorder, y, routing, run.t[node.output], *shared)


def _gated_product(run: "Run", node: Node) -> None:
    a, out = run.t[node.inputs[0]], run.t[node.output]
    matmul(run.recorder, a, run.weight(node), out, gate=node.options["activation"], max_tokens=run.form_tokens)


def _gated(run: "Run", node: Node) -> None:
    inputs = tuple(run.t[value] for value in node.inputs)
    gated(run.recorder, inputs if len(inputs) > 1 else inputs[0], run.t[node.output], node.options["activation"])


def _act(run: "Run", node: Node) -> None:
    gated(run.recorder, (run.t[node.inputs[0]],), run.t[node.output], node.options["activation"])


def _add_norm(run: "Run", node: Node) -> None:
    if mixtures.is_one(run, node) or _norms(run, node):
        return
    x, delta = run.t[node.inputs[0]], run.t[node.inputs[1]] if len(node.inputs) > 1 else None
    prefix = run.before if node.options.get("carried") else run.prefix
    out = None if node.output.is_stream else run.t[node.output]
    run.add(x, delta, prefix, node.options, run.vector(node, "norm"), out, run.vector(node, "bias"))


def _maker(run: "Run", heads: Node) -> Any:
    """What computes these heads in attention's launch, or None; asked once a recording, for names of lazy modules cost 2 us."""
    if heads not in run.makers:
        run.makers[heads] = heads_attention.heads_attention if _attends(run, heads) else None
    return run.makers[heads]


def _attends(run: "Run", heads: Node) -> bool:
    planner, options = run.planner, heads.options
    one_each = run.sharing.get("longest_run") == 1
    if not one_each or planner.divided is not None or options["shared"] or options["gated"] or options["v_norm"]:
        return False
    table, values = run.tables.get(options["rope"]), planner.kv.values[run.layer]
    if table is None or options["q_rope"] != options["rope"]:
        return False
    group = planner.config.num_heads // values.shape[1]
    heads_of = values, group, table.shape[1], run.vector(heads, "q_norm")
    return heads_attention.takes(planner.device, run.max_tokens, *heads_of)


def _heads(run: "Run", node: Node) -> None:
    if _maker(run, node) is not None:
        return
    kv, layer = run.planner.kv, run.layer
    sources = tuple(run.t[value] for value in node.inputs)
    if node.options["shared"]:
        sources = (sources[0], None, None)
    qkv_post(
        run.recorder,
        sources if len(sources) > 1 else sources[0],
        run.vector(node, "q_norm"),
        run.vector(node, "k_norm"),
        run.tables.get(node.options["rope"]),
        run.t[node.output],
        kv.keys[layer],
        kv.values[layer],
        run.page_tables[kv.group_of[layer]],
        run.token_row,
        run.positions,
        node.options.get("eps", run.planner.config.norm_eps),
        run.tables.get(node.options["q_rope"]),
        node.options["v_norm"],
        node.options["gated"],
    )


def _head_squares(run: "Run", node: Node) -> None:
    qkv = tuple(run.t[value] for value in node.inputs)
    _, share = run.planner.model.share.whole_norm(run.layer)
    widths, sums = node.options["widths"], run.t[node.output]
    whole_norm.head_squares(run.recorder, qkv if len(qkv) > 1 else qkv[0], widths, sums, share)


def _whole_norm(run: "Run", node: Node) -> None:
    sums, *qkv = (run.t[value] for value in node.inputs)
    whole, _ = run.planner.model.share.whole_norm(run.layer)
    whole_norm.whole_norm(
        run.recorder,
        tuple(qkv) if len(qkv) > 1 else qkv[0],
        node.options["widths"],
        sums,
        whole,
        run.vector(node, "q_norm"),
        run.vector(node, "k_norm"),
        node.options["eps"],
    )


def _attend(run: "Run", node: Node) -> None:
    kv, layer, options = run.planner.kv, run.layer, node.options
    work = ({"partial": run.t[node]} if node in run.t else {}) | run.sharing
    if options.get("ahead"):
        work["ahead"] = options["ahead"]
    if run.images is not None and run.images.windowed and not options["window"]:
        work.pop("sees", None)
    if node.weights:
        work["sinks"] = run.vector(node, "sinks")
    pages = kv.keys[layer], kv.values[layer], run.page_tables[kv.group_of[layer]], run.token_row, run.positions
    how = options["scale"], options["window"], options["softcap"]
    heads = options.get("heads")
    if heads is None or (maker := _maker(run, heads)) is None:
        attention(run.recorder, run.t[node.inputs[0]], *pages, run.t[node.output], *how, **work)
        return
    sources = tuple(run.t[value] for value in heads.inputs)
    del work["longest_run"]
    if run.chains is not None:
        work |= run.chains.attending(run, node)
    maker(
        run.recorder,
        sources if len(sources) > 1 else sources[0],
        run.vector(heads, "q_norm"),
        run.vector(heads, "k_norm"),
        run.tables[heads.options["rope"]],
        *pages,
        run.t[node.output],
        *how,
        heads.options.get("eps", run.planner.config.norm_eps),
        **work,
    )


def _latent(run: "Run", node: Node) -> None:
    kv, layer, options = run.planner.kv, run.layer, node.options
    q, new = (run.t[value] for value in node.inputs)
    latent_post.latent_post(
        run.recorder,
        q,
        new,
        run.vector(node, "norm"),
        run.tables[options["rope"]],
        run.t[node.output],
        kv.keys[layer],
        run.page_tables[kv.group_of[layer]],
        run.token_row,
        run.positions,
        options["heads"],
        options["eps"],
        options["pairs"],
    )


def _head_linear(run: "Run", node: Node) -> None:
    a, out = run.t[node.inputs[0]], run.t[node.output]
    head_product.head_product(run.recorder, a, run.weight(node), out, node.options["heads"], max_tokens=run.form_tokens)


def _attend_latent(run: "Run", node: Node) -> None:
    kv, layer, options = run.planner.kv, run.layer, node.options
    work = {"partial": run.t[node]} if node in run.t else {}
    q, turned = (run.t[value] for value in node.inputs)
    latent_attention.latent_attention(
        run.recorder,
        q,
        turned,
        kv.keys[layer],
        run.page_tables[kv.group_of[layer]],
        run.token_row,
        run.positions,
        run.t[node.output],
        options["heads"],
        options["scale"],
        temperature=options["temperature"],
        **work,
        **run.sharing,
    )


def _columns(run: "Run", node: Node, number: int) -> Any:
    """Input `number` of an operation that reads columns where they lie."""
    tensor, found = run.t[node.inputs[number]], node.options.get("columns", {}).get(number)
    return tensor if found is None else columns.Columns(tensor, *found)


def _conv(run: "Run", node: Node) -> None:
    x, out, gated = _columns(run, node, 0), run.t[node.output], node.op == "gated_conv"
    vectors = run.vector(node, "weight"), run.vector(node, "bias")
    form = node.options.get("activation", ""), gated, run.longest_run
    conv.conv(run.recorder, x, *vectors, run.state("conv"), run.runs, out, *form)


def _of_runs(run: "Run", node: Node) -> dict[str, Any]:
    """What operations whose kernels differ by the length of runs take."""
    return {"longest_run": run.longest_run} | ({"work": run.t[node]} if node in run.t else {})


def _delta(run: "Run", node: Node) -> None:
    qkv, b, a = (_columns(run, node, number) for number in range(3))
    options = {name: node.options[name] for name in ("k_heads", "k_size", "tiled")} | _of_runs(run, node)
    vectors, state = (run.vector(node, "A"), run.vector(node, "dt_bias")), run.state("delta")
    if node.op == "gated_delta":
        gate = _columns(run, node, 3), run.vector(node, "norm"), node.options["eps"], node.options["activation"]
        options["gate"] = delta.OutputGate(*gate)
    delta.delta(run.recorder, qkv, b, a, *vectors, state, run.runs, run.t[node.output], **options)


def _scan(run: "Run", node: Node) -> None:
    x, dt = (_columns(run, node, number) for number in range(2))
    A, D, dt_bias = (run.vector(node, name) for name in ("A", "D", "dt_bias"))
    options = {name: node.options[name] for name in ("groups", "state_size", "dt_limits")} | _of_runs(run, node)
    scan.scan(run.recorder, x, dt, A, D, dt_bias, run.state("ssm"), run.runs, run.t[node.output], **options)


def _gated_norm(run: "Run", node: Node) -> None:
    x, z = (_columns(run, node, number) for number in range(2))
    options = {name: value for name, value in node.options.items() if name != "columns"}
    gated_norm.gated_norm(run.recorder, x, z, run.vector(node, "weight"), run.t[node.output], **options)


def _gate_output(run: "Run", node: Node) -> None:
    x, gate, heads = run.t[node.inputs[0]], _columns(run, node, 1), node.options.get("heads", 0)
    gate_output.gate_output(run.recorder, x, gate, run.t[node.output], heads)


def _wanted(run: "Run", node: Node) -> None:
    x, out = (words_of(run.t[value]) for value in (node.inputs[0], node.output))
    gather_rows(run.recorder, x, run.wanted, out)


def _scale_logits(run: "Run", node: Node) -> None:
    options = node.options
    logits.scale_logits(run.recorder, run.t[node.inputs[0]], options.get("factor", 1.0), options.get("cap", 0.0))


def _reorder(run: "Run", node: Node) -> None:
    reorder.reorder(run.recorder, run.t[node.inputs[0]], run.weight(node).order, run.t[node.output])


def _all_reduce(run: "Run", node: Node) -> None:
    if run.sums is not None:
        run.sums.wait(node)
        return
    run.planner.group.all_reduce(run.recorder, run.t[node.inputs[0]], run.t[node.output])


def _all_gather(run: "Run", node: Node) -> None:
    x, out = run.t[node.inputs[0]], run.t[node.output]
    run.planner.group.all_gather(run.recorder, x, out, node.options["widths"])


def _divide(run: "Run", node: Node) -> None:
    run.planner.divided.record(run, node)


def _send(run: "Run", node: Node) -> None:
    run.planner.group.send(run.recorder, run.of(run.planner.hidden))


def _receive(run: "Run", node: Node) -> None:
    run.planner.group.receive(run.recorder, run.of(run.planner.hidden))


def _convert(run: "Run", node: Node) -> None:
    x, out = run.t[node.inputs[0]], run.t[node.output]
    if out.dtype == "int16":
        add_rmsnorm(run.recorder, x, None, None, None, out, 0.0, "none")
    else:
        quantize(run.recorder, x, out)


LAUNCHES: dict[str, "Callable[[Run, Node], None]"] = {
    "embed": _embed,
    "linear": _linear,
    "gated_product": _gated_product,
    "route": _route,
    "experts": _experts,
    "combine": _combine,
    "gated": _gated,
    "act": _act,
    "add_norm": _add_norm,
    "heads": _heads,
    "attend": _attend,
    "latent": _latent,
    "head_linear": _head_linear,
    "attend_latent": _attend_latent,
    "conv": _conv,
    "gated_conv": _conv,
    "delta": _delta,
    "scan": _scan,
    "gated_delta": _delta,
    "gated_norm": _gated_norm,
    "gate_output": _gate_output,
    "wanted": _wanted,
    "scale_logits": _scale_logits,
    "reorder": _reorder,
    "convert": _convert,
    "adapt": _adapt,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "head_squares": _head_squares,
    "whole_norm": _whole_norm,
    **dict.fromkeys(("own_rows", "all_rows", "spread_rows", "collect_sums", "whole_stream"), _divide),
    "send": _send,
    "receive": _receive,
    "layer_inputs": _layer_inputs,
    "gate_inputs": _gate_inputs,
    "scale_stream": _scale_stream,
    "norm_sum": _norm_sum,
    "clamp": _clamp,
    "taken": _taken,
    "join": _join,
    "spread": _spread,
}
