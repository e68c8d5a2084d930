"""A forward traced part by part: its beginning, each kind of layer, its end."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

from zse.plan.rules import JOINED, Part, Pending, fuse
from zse.plan.trace import Adapted, Trace, Value

ROPES = ("rope", "q_rope")  # options of nodes that turn


class Parts(NamedTuple):
    """again: of a block that predicts behind a model, the beginning behind its own state. layers: the part of each. ends: by whether every token has logits, and over hidden states that are there already
    (None); of an encoder none, but `finish`, what follows its layers. ropes: the rotations that are used, by name. hops: of a pipeline, what follows
    the layers, by whether the stream comes back to rank 0."""

    begin: Part
    again: Part | None
    layers: list[Part]
    ends: dict[bool | None, Part]
    finish: Part | None
    ropes: dict[str, Any]
    hops: dict[bool, Part]


def trace_forward(forward: Any, model: Any, device: Any, adapted: Adapted | None = None) -> Parts:
    """Trace the forward: its beginning, and each kind of layer behind what the one before leaves to be added. adapted:
    what adapters change of the layers' products. Where the model is one rank's share, parts of sums are added."""
    weights: dict[str, dict[str, Any]] = {"": {}}
    for name, weight in (*model.weights.items(), *model.vectors.items()):
        layer, _, suffix = name.rpartition(".")
        weights.setdefault(layer, {})[suffix] = weight
    partial_weights = model.share.partial if model.share else frozenset()
    divides = model.share is not None and model.share.divides_rows
    traced = partial(_traced, forward, device, partial_weights=partial_weights, divides=divides)
    stage = model.share is not None and model.share.is_stage
    begins = not stage or not model.share.rank
    begin, pending = traced(weights[""], lambda x: forward.begin() if begins else _receive(forward), whole=True), None
    again = traced(weights[""], lambda x: forward.begin_again(), whole=True) if model.config.follows else None
    known: dict[Hashable, Part] = {}
    layers: list[Part] = []
    for layer in range(model.config.num_layers):
        mine = weights[f"layers.{layer}"]
        gathered = model.share.gathered(layer, _orders(mine)) if partial_weights else {}
        before = None if pending is None else (*pending.options.items(),)
        kind = forward.kind(layer), before, _kind(mine), (*gathered.items(),)
        if kind not in known:
            options: dict[str, Any] = dict(layer=layer, adapted=adapted, gathered=gathered)
            known[kind] = traced(mine, partial(forward.layer, i=layer), pending, **options)
        layers.append(known[kind])
        pending = known[kind].pending
    hops: dict[bool, Part] = {}
    if stage:
        hops = {back: traced({}, partial(_hop, forward, model.share, back), pending) for back in (False, True)}
        layers.append(hops[True])
        pending = None
    ends: dict[bool | None, Part] = {
        every: traced(weights[""], forward.end, None if every is None else pending, every or False)
        for every in ((False, True, None) if model.config.causal and begins else ())
    }
    finish = None if model.config.causal or not begins else traced(weights[""], forward.finish, pending)
    used = {node.options[key] for part in known.values() for node in part.nodes for key in ROPES if key in node.options}
    return Parts(
        begin, again, layers, ends, finish, {name: rope for name, rope in forward.ropes().items() if name in used}, hops
    )


def _receive(forward: Any) -> Value:
    """The stream from the rank before."""
    return forward.trace.add("receive", (), forward.config.hidden_size, is_stream=True)


def _hop(forward: Any, share: Any, comes_back: bool, x: Value) -> Value:
    """The stream to the next rank, of the last one to rank 0, where it is to come back (StagePlanner records that)."""
    if share.rank < share.size - 1 or comes_back:
        x = forward.trace.add("send", (x,), x.width, is_stream=True)
    return x


def _traced(
    forward: Any,
    device: Any,
    weights: dict[str, Any],
    run: Callable[[Value], Value],
    before: Pending | None = None,
    all_rows: bool = False,
    layer: int = 0,
    adapted: Adapted | None = None,
    partial_weights: frozenset[str] = frozenset(),
    gathered: dict[str, tuple[int, ...]] | None = None,
    divides: bool = False,
    whole: bool = False,
) -> Part:
    """A part of the forward with these weights. before: what the part before leaves to be added; layer: a layer's
    number; whole: it leaves nothing."""
    shapes = {name: weight.shape for name, weight in weights.items()}
    for joined, names in JOINED.items():
        if joined in weights:
            for name in names:
                shapes[name] = (forward.rows(name, layer), weights[joined].shape[1])
                if f"{joined}_bias" in weights:
                    shapes[f"{name}_bias"] = shapes[name][:1]
    trace = forward.trace = Trace(shapes, all_rows, _orders(weights), adapted, partial_weights, gathered, divides)
    start = Value(trace, forward.config.hidden_size, True)
    schemes = {name: getattr(weight, "scheme", None) for name, weight in weights.items()}
    return fuse(trace, start, run(start), before, device, schemes, whole)


def _kind(weights: dict[str, Any]) -> Hashable:
    """What the launches of a layer depend on: the shapes and schemes of its weights, which vectors it has."""
    orders = _orders(weights)
    return tuple(
        (name, weight.shape, getattr(weight, "scheme", None), getattr(weight, "layout", None), orders.get(name))
        for name, weight in weights.items()
    )


def _orders(weights: dict[str, Any]) -> dict[str, str]:
    """Weights whose columns are ordered → the first weight with the same order."""
    first: dict[int, str] = {}
    found = ((name, getattr(weight, "order", None)) for name, weight in weights.items())
    return {name: first.setdefault(order.offset, name) for name, order in found if order is not None}
