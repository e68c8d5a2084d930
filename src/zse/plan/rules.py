"""What a device's launches take together: rules that make launchable nodes of a trace's.

Launchable (zse.plan.record has a launch for each):

    embed, linear, wanted, attend, LATENTS, READERS  as traced; linear with accumulate: added to the stream
    layer_inputs, gate_inputs, scale_stream        as traced
    gated_delta     (qkv, b, a, z) → gated norm of the delta rule's results
    norm_sum        (a, b) → norm of a + norm of b
    add_norm        (x[, delta]) → norm of x       x += delta, or x += norm(delta); then normalized (in_place: x itself),
                                                   converted or neither
    gated_product   (x) → act(gate) * up           of joined weights
    gated           (gate, up) → act(gate) * up    of one joined value or two
    act             (x) → act(x)
    heads           (q, k, v) → q                  norms, RoPE, K and V to the cache; of one joined value or three, or of q alone;
                                                   of few tokens on a GPU attend's launch computes it
    reorder         (x) → x, columns reordered     by the order of a weight's columns, of a rank's those that it has
    all_gather      (x) → all ranks' x side by side  before that, where columns are shared
    route, experts, combine                        as traced; weights of gate and up perhaps joined, experts with gate: act(gate) * up
    all_reduce      (x) → the sum of all ranks' x  of products whose columns are shared
    head_squares    (q, k, v) → sums of squares    of q and k over a rank's heads, for norms over all heads together
    whole_norm      (sums, q, k, v)                q and k, in place, by the sums of all ranks
    own_rows        (stream) → this rank's tokens  whose attention it computes
    all_rows        (x) → all tokens               the others' are zeros
    spread_rows     (x[, routing]) → all ranks' rows  of ranks that have the stream of their own tokens; those that
                                                   experts here are chosen for
    collect_sums    (x[, routing]) → the sums of all ranks' x  at this rank's rows
    whole_stream    (stream) → that of all tokens
    send, receive   (x) → x                        to the next rank of a pipeline, from the one before
    adapt           (x, y[, y, y]) → A x           y += B (A x) of the row's adapter, of products that share an input
    convert         (x) → x in another form        zse.plan.forms
    scale_logits    (x) → factor, soft cap         in place
    join, spread                                   as traced
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from zse.kernels import route
from zse.plan import columns, ranks, recurrent
from zse.plan.mixtures import mixtures
from zse.plan.trace import READERS, Node, PlanError, Trace, Value

# Weights that may lie joined by rows → their parts.
JOINED: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "gate_up_exps": ("gate_exps", "up_exps"),
    "mix_qkvz": ("mix_qkv", "mix_z"),
    "mix_ba": ("mix_b", "mix_a"),
}
GATED_PRODUCTS = ("silu", "gelu_tanh")  # activations that products compute
GATED_EXPERTS = (*GATED_PRODUCTS, "clamped")  # those with stacks of experts
# What add_norm's kernels add before they normalize, by kind of norm; "none" converts.
ADDS = {"rms": ("none", "add", "norm"), "layer": ("none", "add"), "none": ("none", "norm")}
LATENTS = ("latent", "head_linear", "attend_latent")
LAUNCHES = (
    *("embed", "linear", "wanted", "attend", "add_norm", "gated_product", "gated", "heads", "scale_logits", "reorder"),
    *(
        "route",
        "experts",
        "combine",
        "act",
        "adapt",
        "all_reduce",
        "all_gather",
        "head_squares",
        "whole_norm",
        "own_rows",
        "all_rows",
        "spread_rows",
        "collect_sums",
        "whole_stream",
        "send",
        "receive",
    ),
    *("taken", "join", "spread"),
    *(*LATENTS, *READERS, "gated_delta"),
    *("layer_inputs", "gate_inputs", "scale_stream", "norm_sum", "clamp"),
)


class Pending(NamedTuple):
    """What a part leaves for the next one to add to the stream. options: delta_norm, the name of the vector that it is
    normalized by first, and eps; or nothing."""

    delta: Value
    options: dict[str, Any]


class Part:
    """A part of a forward as launchable nodes. carried: the value that the part before left to be added, or None; end:
    what the part gives, the stream or logits; pending: what it leaves itself; schemes: of its weights by name; rows: what lies
    between the two parts of a last layer (zse.plan.forward.LastLayer); placed: room → what zse.plan.record made of it."""

    def __init__(
        self, nodes: list[Node], carried: Value | None, end: Value, pending: Pending | None, schemes: dict[str, Any]
    ):
        self.nodes, self.carried, self.end, self.pending, self.schemes = nodes, carried, end, pending, schemes
        self.rows: tuple[Value, ...] = ()
        self.placed: dict[int, Any] = {}


def fuse(
    trace: Trace,
    start: Value,
    end: Value,
    before: Pending | None,
    device: Any,
    schemes: dict[str, Any],
    whole: bool = False,
) -> Part:
    """The part of a forward that was traced from the stream `start` to `end`. before: what the part before left. whole:
    this one leaves nothing."""
    nodes, carried = ranks.own_rows(trace.nodes) if trace.divides == "attention" else trace.nodes, None
    dispatches = trace.partial and "shared_down" not in trace.partial
    nodes = ranks.shared_apart(nodes) if dispatches else nodes
    nodes = ranks.all_reduce(nodes, trace.partial) if trace.partial else nodes
    nodes = ranks.own_stream(nodes, bool(dispatches)) if trace.divides == "stream" else nodes
    if before is not None:
        carried, x = Value(trace, before.delta.width), Value(trace, start.width, True)
        nodes = [Node("add", (x, carried), start, {}, before.options | {"carried": True}), *nodes]
    for rule in RULES[device.kernels]:
        nodes = rule(nodes, trace)
    nodes = ranks.whole_norms(nodes, trace) if trace.partial else nodes
    pending = None
    is_added = nodes and nodes[-1].op == "add" and nodes[-1].output is end
    if is_added and not whole and not nodes[-1].options.get("carried"):
        last = nodes.pop()
        pending, end = Pending(last.inputs[1], last.options), last.inputs[0]
    if nodes and nodes[-1].op == "scale_logits" and nodes[-1].output is end:
        nodes[-1].output = end = nodes[-1].inputs[0]
    nodes = [_plain_add(node) if node.op == "add" else node for node in nodes]
    for node in nodes:
        if node.op not in LAUNCHES or (node.op == "scale_logits" and node.output is not end):
            raise PlanError(f"{node}: no launch of this device computes it here")
    _check_stream(nodes)
    return Part(nodes, carried, end, pending, schemes)


# -- the rules: (nodes, trace) → nodes


def join_products(nodes: list[Node], trace: Trace) -> list[Node]:
    """Products that share an input are one where their weights lie joined; else they may overlap."""
    for joined, names in JOINED.items():
        if joined not in trace.shapes:
            continue
        parts = [node for node in nodes if node.op in ("linear", "experts") and node.weights["weight"] in names]
        for at in range(0, len(parts), len(names)):
            group = parts[at : at + len(names)]
            if len({node.inputs for node in group}) > 1 or tuple(node.weights["weight"] for node in group) != names:
                raise PlanError(f"{joined}: the weights of {', '.join(names)} lie joined, but are not used together")
            weights = {"weight": joined} | ({"bias": f"{joined}_bias"} if "bias" in group[0].weights else {})
            whole = Value(trace, sum(node.output.width for node in group), per_token=group[0].output.per_token)
            found = Node(group[0].op, group[0].inputs, whole, weights, group[0].options)
            nodes = [found if node is group[0] else node for node in nodes if node not in group[1:]]
            trace.split[whole] = tuple(node.output for node in group)
    last = None
    for node in nodes:
        if last is not None and node.op == last.op in ("linear", "experts") and node.inputs == last.inputs:
            node.options["independent"] = True
        last = node
    return nodes


def _sources(inputs: tuple[Value, ...], trace: Trace) -> tuple[Value, ...]:
    """What `inputs` are read from: one joined value where they are its parts in order."""
    return next(((whole,) for whole, parts in trace.split.items() if parts == inputs), inputs)


def heads(nodes: list[Node], trace: Trace) -> list[Node]:
    """Norms of heads, rotation and the write to the cache are one launch before attention."""
    for attend in [node for node in nodes if node.op == "attend"]:
        q, *written = attend.inputs
        weights, sources, ropes, gone, eps, gated = {}, [], [], [], {}, False
        for name, value in zip("qk", (q, *written[:1]), strict=False):
            node = _made_by(value, "rotate")
            ropes.append(node.options["rope"])
            gone.append(node)
            value = node.inputs[0]
            if value.node is not None and value.node.op == "head_norm":
                gone.append(value.node)
                weights[f"{name}_norm"], eps = value.node.weights["weight"], value.node.options
                value = value.node.inputs[0]
            if name == "q" and value.node is not None and value.node.op == "head_half":
                value, gated = value.node.inputs[0], True
            sources.append(value)
        v_norm = False
        for value in written[1:]:
            if value.node is not None and value.node.op == "head_norm":
                v_norm = True
                gone.append(value.node)
                value = value.node.inputs[0]
            sources.append(value)
        turned = Value(trace, q.width)
        options = eps | {"rope": ropes[-1], "q_rope": ropes[0], "v_norm": v_norm, "shared": not written, "gated": gated}
        found = Node("heads", _sources(tuple(sources), trace), turned, weights, options)
        replaced = Node("attend", (turned,), attend.output, attend.weights, attend.options | {"heads": found})
        at = nodes.index(attend)
        nodes = [*(node for node in nodes[:at] if node not in gone), found, replaced, *nodes[at + 1 :]]
    return nodes


def _made_by(value: Value, op: str) -> Node:
    if value.node is None or value.node.op != op:
        raise PlanError(f"attention takes what {op} gives, not {value.node}")
    return value.node


def read_columns(nodes: list[Node], trace: Trace) -> list[Node]:
    """Recurrent operations read their parts of a product where they lie."""
    return columns.read_columns(nodes, trace) if trace.named or any(node.op in READERS for node in nodes) else nodes


def gated_delta(nodes: list[Node], trace: Trace) -> list[Node]:
    """A delta rule and the norm of its results are one launch."""
    return recurrent.gated_delta(nodes, trace) if any(node.op == "delta" for node in nodes) else nodes


def gated_product(nodes: list[Node], trace: Trace) -> list[Node]:
    """Joined gate and up weights of whole tiles of 16 rows: the product computes act(gate) * up itself."""
    for gate in [node for node in nodes if node.op == "gate"]:
        (whole, *others) = _sources(gate.inputs, trace)
        product = whole.node
        if (
            others
            or product is None
            or product.op not in ("linear", "experts")
            or whole.width % 32
            or _uses(nodes, trace.split[whole]) != 2
        ):
            continue
        known = GATED_EXPERTS if product.op == "experts" else GATED_PRODUCTS
        if gate.options["activation"] not in known or _adapted(trace, product):
            continue
        if product.op == "linear" and "bias" in product.weights:
            continue  # its kernels add none
        if product.op == "linear":
            found = Node("gated_product", product.inputs, gate.output, product.weights, gate.options)
        else:
            options = product.options | {"gate": gate.options["activation"]}
            found = Node("experts", product.inputs, gate.output, product.weights, options)
        nodes = [found if node is product else node for node in nodes if node is not gate]
    return nodes


def routers(nodes: list[Node], trace: Trace) -> list[Node]:
    """The product that a routing alone reads: of few tokens the launch that routes computes it, of one token the norm
    before it as well, where nothing reads that earlier."""
    for node in nodes:
        if node.op == "route":
            router = node.inputs[0].node
            if router is not None and router.op == "linear" and _uses(nodes, (router.output,)) == 1:
                router.options["routes"] = True
                norm = router.inputs[0].node
                searched = node.options.get("groups_used", 1) < node.options.get("groups", 1)
                sizes = node.output.width, node.inputs[0].width
                fits = route.chooses_one(*sizes, node.options["gating"], "bias" in node.weights) and not searched
                if norm is not None and norm.op == "norm" and norm.options["kind"] == "rms" and fits:
                    between = nodes[nodes.index(norm) + 1 : nodes.index(node)]
                    # It is made where the routing is: nothing reads it before, and what it reads is still there.
                    others = [other for other in between if other is not router]
                    if not any(norm.output in other.inputs or other.output.is_stream for other in others):
                        norm.options["router"] = router
    return nodes


def gated(nodes: list[Node], trace: Trace) -> list[Node]:
    """act(gate) * up as a launch."""
    return [
        Node("gated", _sources(node.inputs, trace), node.output, {}, node.options) if node.op == "gate" else node
        for node in nodes
    ]


def accumulate(nodes: list[Node], trace: Trace) -> list[Node]:
    """stream + product: the product adds to the stream."""
    for add in [node for node in nodes if node.op == "add"]:
        stream, addend = add.inputs
        product = addend.node
        if product is None or product.op != "linear" or not stream.is_stream or _uses(nodes, (addend,)) != 1:
            continue
        options = product.options | {"accumulate": True}
        found = Node("linear", (*product.inputs, stream), add.output, product.weights, options)
        nodes = [found if node is product else node for node in nodes if node is not add]
    return nodes


def norm_sum(nodes: list[Node], trace: Trace) -> list[Node]:
    """norm(a) + norm(b) of two results is a launch."""
    for add in [node for node in nodes if node.op == "add" and not node.output.is_stream]:
        norms = [value.node for value in add.inputs]
        if any(n is None or n.op != "norm" or n.options["kind"] != "rms" or n.inputs[0].is_stream for n in norms):
            continue
        a, b = (norm for norm in norms if norm)
        weights = {"norm": a.weights["weight"], "other": b.weights["weight"]}
        found = Node("norm_sum", (*a.inputs, *b.inputs), add.output, weights, {"eps": a.options["eps"]})
        nodes = [found if node is add else node for node in nodes if node not in (a, b)]
    return nodes


def adapters(nodes: list[Node], trace: Trace) -> list[Node]:
    """Products that adapters add to are followed by the launches that do, once for those that share an input."""
    if trace.adapted is None:
        return nodes
    found, at = [], 0
    while at < len(nodes):
        members, products = _products_at(nodes, at)
        found += products
        at += len(products)
        if any(_adapted(trace, node) for node in products):
            low = Value(trace, len(members) * trace.adapted.rank)
            results = [node.output for node in products]
            # Its first launch reads what the products read, and may run beside them.
            options = {"members": members, "independent": True}
            found.append(Node("adapt", (products[0].inputs[0], *results), low, {}, options))
    return found


def _products_at(nodes: list[Node], at: int) -> tuple[tuple[str, ...], list[Node]]:
    """(weights' names as the forward says them, nodes) of the node, or of the products from there on that could lie
    joined."""
    name = nodes[at].weights.get("weight", "") if nodes[at].op == "linear" else ""
    for names in JOINED.values():
        some = nodes[at : at + len(names)]
        if (
            all(node.op == "linear" for node in some)
            and tuple(node.weights["weight"] for node in some) == names
            and len({node.inputs[0] for node in some}) == 1
        ):
            return names, some
    return JOINED.get(name, (name,)), [nodes[at]]


def _adapted(trace: Trace, node: Node) -> bool:
    """Whether adapters add to what this node gives."""
    if trace.adapted is None or node.op != "linear":
        return False
    name = node.weights["weight"]
    return not trace.adapted.members.isdisjoint(JOINED.get(name, (name,)))


def post_norm(nodes: list[Node], trace: Trace) -> list[Node]:
    """stream + norm(addend): the addition normalizes."""
    for add in [node for node in nodes if node.op == "add"]:
        norm = add.inputs[1].node
        if norm is None or norm.op != "norm" or norm.options["kind"] != "rms" or norm.inputs[0].is_stream:
            continue
        if _uses(nodes, (add.inputs[1],)) == 1:
            options = {"delta_norm": norm.weights["weight"], "eps": norm.options["eps"]}
            found = Node("add", (add.inputs[0], norm.inputs[0]), add.output, {}, options)
            nodes = [found if node is add else node for node in nodes if node is not norm]
    return nodes


def reorder(nodes: list[Node], trace: Trace) -> list[Node]:
    """Products with weights whose columns are ordered: their input is brought into that order, once for all that share
    both. Of a rank's columns any rank may have the input: it has all of them first."""
    made: dict[tuple[Value, str], Value] = {}
    found = []
    for node in nodes:
        order = trace.orders.get(node.weights["weight"]) if node.op in ("linear", "gated_product") else None
        if order is not None:
            x, widths = node.inputs[0], trace.gathered.get(node.weights["weight"])
            if (x, order) not in made:
                made[x, order] = ordered = Value(trace, x.width)
                if widths:
                    part, whole = x, Value(trace, sum(widths))
                    found.append(Node("all_gather", (part,), whole, {}, {"widths": widths}))
                    x = whole
                found.append(Node("reorder", (x,), ordered, {"weight": order}, {}))
                node.options = node.options | {"independent": False}  # of what comes just before it now
            node.inputs = (made[node.inputs[0], order], *node.inputs[1:])
        found.append(node)
    return found


def convert_stream(nodes: list[Node], trace: Trace) -> list[Node]:
    """Products that read the stream as it is: it is brought into their form once."""
    made: dict[Value, Value] = {}
    found = []
    for node in nodes:
        if node.op in ("linear", "gated_product", "experts", "adapt") and node.inputs[0].is_stream:
            x = node.inputs[0]
            if x not in made:
                made[x] = Value(trace, x.width)
                found.append(Node("norm", (x,), made[x], {}, {"kind": "none"}))
            node.inputs = (made[x], *node.inputs[1:])
        found.append(node)
    return found


def add_norm(nodes: list[Node], trace: Trace) -> list[Node]:
    """A norm, with the addition just before it where its kernels add."""
    found: list[Node] = []
    for node in nodes:
        if node.op != "norm":
            found.append(node)
            continue
        options, weights = dict(node.options), {}
        if node.weights:
            weights = {"norm": node.weights["weight"]}
        if "bias" in node.weights:
            weights["bias"] = node.weights["bias"]
        inputs, add = node.inputs, node.inputs[0].node
        if found and add is not None and add is found[-1] and add.op == "add":
            deltas = "norm" if "delta_norm" in add.options else "add"
            one_eps = len({each["eps"] for each in (options, add.options) if "eps" in each}) < 2
            if one_eps and deltas in ADDS[options["kind"]]:
                found.pop()
                inputs, options = add.inputs, add.options | options
        found.append(Node("add_norm", inputs, node.output, weights, options))
    return found


def scale_logits(nodes: list[Node], trace: Trace) -> list[Node]:
    """A factor and a soft cap on the last product are one launch."""
    found: list[Node] = []
    for node in nodes:
        if node.op not in ("scale", "cap"):
            found.append(node)
        elif node.op == "cap" and found and found[-1].op == "scale_logits" and found[-1].output is node.inputs[0]:
            found[-1] = Node("scale_logits", found[-1].inputs, node.output, {}, found[-1].options | node.options)
        else:
            found.append(Node("scale_logits", node.inputs, node.output, {}, node.options))
    return found


def _uses(nodes: list[Node], values: tuple[Value, ...]) -> int:
    return sum(value in values for node in nodes for value in node.inputs)


def _plain_add(add: Node) -> Node:
    if not add.output.is_stream:
        raise PlanError("an addition to what is not the residual stream: no launch adds two results")
    return Node("add_norm", add.inputs, add.output, {}, {"kind": "rms"} | add.options)


def _check_stream(nodes: list[Node]) -> None:
    """An addition to the stream is made in place: nobody reads it as it was before."""
    old: set[Value] = set()
    for node in nodes:
        for value in node.inputs:
            if value in old:
                raise PlanError(f"{node} reads the stream as it was before an addition; use what `+` gave")
        changes = len(node.inputs) > 1 or node.options.get("in_place")
        if node.op == "add_norm" and changes or node.options.get("accumulate"):
            old.add(node.inputs[0] if node.op == "add_norm" else node.inputs[1])
        elif node.op == "scale_stream":
            old.add(node.inputs[0])


Rule = Callable[[list[Node], Trace], list[Node]]
# In this order. A device with `fuses` adds and gates in its products.
RULES: dict[str, tuple[Rule, ...]] = {
    "cpu": (
        join_products,
        heads,
        read_columns,
        gated,
        norm_sum,
        post_norm,
        adapters,
        reorder,
        convert_stream,
        add_norm,
        scale_logits,
    ),
    "gpu": (
        *(join_products, heads, read_columns, gated_delta, gated_product, gated, routers, accumulate, norm_sum),
        *(post_norm, adapters, reorder, convert_stream, add_norm, scale_logits, mixtures),
    ),
}
