"""A mixture of experts that one token passes in a few launches on a GPU (zse.kernels.one_token)."""

from typing import Any, NamedTuple

from zse.kernels import one_token, route
from zse.plan.trace import Node, Trace
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.plan.record import Planner, Run


OPS = ("add_norm", "linear", "route", "experts", "experts", "combine")


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
    norm, ends = found.norm, nodes.index(found.norm) if found.norm in nodes else len(nodes)
    if tuple(node.op for node in found) != OPS or set(nodes[ends + 1 : -1]) != set(found[1:]):
        return nodes
    is_plain = norm.options["kind"] == "rms" and len(norm.inputs) == 1 and "bias" not in norm.weights
    if is_plain and len(found.combine.inputs) == 2 and "gate" in found.gate_up.options:
        for node in found:
            node.options["mixture"] = found
    return nodes


def is_one(run: "Run", node: Node) -> bool:
    """Whether the node's mixture is what record() records, in the place of its last node."""
    mixture = node.options.get("mixture")
    if mixture is None or run.form_tokens != 1:
        return False
    weights = [run.weight(each) for each in (mixture.gate_up, mixture.down)]
    return takes(run.planner, mixture, run.weight(mixture.router), [weight.scheme for weight in weights])


def takes(planner: "Planner", mixture: Mixture, router: Any, schemes: list[Any]) -> bool:
    """Whether one_token() takes a mixture of these weights, all of which are on the device."""
    model, chosen = planner.model, planner.config.moe.experts_per_token
    if "factors" in mixture.route.weights or model.lazy_experts is not None or planner.config.moe.own[1]:
        return False
    more = searched(mixture.route)
    return all(one_token.takes(planner.device, router, scheme, chosen, *more) for scheme in schemes)


def searched(route: Node) -> tuple[str, tuple[int, int], bool]:
    """What decides whether kernels choose of it: the gating, groups that are searched, and all, whether something is added."""
    options = route.options
    return options["gating"], (options["groups_used"], options["groups"]), "bias" in route.weights


def choice_of(run: "Run", route: Node) -> dict[str, Any]:
    """What kernels that choose take beside logits."""
    options: dict[str, Any] = {name: route.options[name] for name in ("gating", "normalize", "eps", "scale")}
    return options | dict(select=run.vector(route, "bias"), chosen=run.planner.config.moe.experts_per_token)


def record(run: "Run", mixture: Mixture) -> None:
    """Record it: the stream is complete then."""
    norm, router, routed = mixture[:3]
    # Read until the last launch, and so not where the router's product has its place.
    logits = run.recorder.device.scratch("router logits", 4 * run.weight(router).shape[0])
    options = choice_of(run, routed)
    routing, select, x = run.t[routed.output], options.pop("select"), run.t[norm.inputs[0]].with_rows(1)
    chosen = options.pop("chosen")
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
