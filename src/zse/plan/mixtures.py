"""A mixture of experts that one token passes in a few launches on a GPU (zse.kernels.one_token)."""

from typing import Any, NamedTuple

from zse.kernels import one_token, route
from zse.plan.trace import Node, Trace
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.plan.record import Run


class Mixture(NamedTuple):
    """The nodes of a mixture that read nothing but each other's results, at the end of a part."""

    norm: Node
    router: Node
    route: Node
    gate_up: Node
    down: Node
    combine: Node


def mixtures(nodes: list[Node], trace: Trace) -> list[Node]:
    """A part that ends with norm, mixture and addition to the stream: each of the nodes knows the Mixture."""
    if not nodes or nodes[-1].op != "add" or nodes[-1].options or nodes[-1].inputs[1].node is None:
        return nodes
    last = [nodes[-1].inputs[1].node]
    for number in (0, 0, 1, 0, 0):  # combine, down, gate_up, route, router, norm
        inputs = last[-1].inputs
        before = inputs[number].node if len(inputs) > number else None
        if before is None:
            return nodes
        last.append(before)
    found = Mixture(*reversed(last))
    ops = ("add_norm", "linear", "route", "experts", "experts", "combine")
    norm, ends = found.norm, nodes.index(found.norm) if found.norm in nodes else len(nodes)
    if tuple(node.op for node in found) != ops or set(nodes[ends + 1 : -1]) != set(found[1:]):
        return nodes
    is_plain = norm.options["kind"] == "rms" and len(norm.inputs) == 1 and "bias" not in norm.weights
    if is_plain and len(found.combine.inputs) == 2 and "gate" in found.gate_up.options:
        for node in found:
            node.options["mixture"] = found
    return nodes


def is_one(run: "Run", node: Node) -> bool:
    """Whether the node's mixture is what record() records, in the place of its last node."""
    mixture, model = node.options.get("mixture"), run.planner.model
    if mixture is None or run.form_tokens != 1 or "factors" in mixture.route.weights:
        return False
    if model.lazy_experts is not None or model.config.moe.own[1]:
        return False
    router, options, device = run.weight(mixture.router), mixture.route.options, run.recorder.device
    (_, chosen), groups = run.t[mixture.route.output].ids.shape, (options["groups_used"], options["groups"])
    more = options["gating"], groups, "bias" in mixture.route.weights
    schemes = [run.weight(each).scheme for each in (mixture.gate_up, mixture.down)]
    return all(one_token.takes(device, router, scheme, chosen, *more) for scheme in schemes)


def record(run: "Run", mixture: Mixture) -> None:
    """Record it: the stream is complete then."""
    norm, router, routed = mixture[:3]
    # Read until the last launch, and so not where the router's product has its place.
    logits = run.recorder.device.scratch("router logits", 4 * run.weight(router).shape[0])
    names = ("gating", "normalize", "eps", "scale")
    options: dict[str, Any] = {name: routed.options[name] for name in names}
    routing, select, x = run.t[routed.output], run.vector(routed, "bias"), run.t[norm.inputs[0]].with_rows(1)
    chosen = routing.ids.shape[1]
    weight, normed, bias = run.weight(router), run.t[norm.output].with_rows(1), run.vector(router, "bias")
    before = x, run.vector(norm, "norm"), norm.options.get("eps", run.planner.config.norm_eps)
    logits = Tensor(logits, (1, weight.shape[0]), "f32")
    places, tasks = run.planner.model.host_experts, None
    if places is not None:
        rows = dict(ids=1, weights=1, source=chosen, place=chosen, tasks=chosen)
        routing = routing._replace(**{name: getattr(routing, name).with_rows(rows[name]) for name in rows})
        tasks, more = routing.tasks, dict(product=(normed, weight, bias), norm=before, normed=normed)
        route.route(run.recorder, logits, routing, select, max_tokens=1, **more, **options)
        places.record(run.recorder, run.layer, routing)
    gate_up, down = ((run.weight(node), run.vector(node, "bias")) for node in (mixture.gate_up, mixture.down))
    one_token.one_token(
        run.recorder,
        before[0],
        before[1],
        (weight, bias),
        gate_up,
        down,
        normed,
        logits,
        run.t[mixture.gate_up.output].with_rows(chosen),
        chosen=chosen,
        select=select,
        tasks=tasks,
        norm_eps=before[2],
        gate=mixture.gate_up.options["gate"],
        **options,
    )
    run.deferred = None, None
