"""A forward traced part by part: its beginning, each kind of layer, its end.

Where few tokens have logits, as in a prompt's step, the last layer is two parts (`LastLayer`): behind its last operation that reads
other tokens only the rows that are wanted are computed. What of them is still read, the stream and what attention gave, is gathered
before."""

from collections.abc import Callable, Hashable
from functools import partial
from math import prod
from typing import Any, NamedTuple

from zse.plan.place import aligned
from zse.plan.rules import JOINED, Part, Pending, fuse
from zse.plan.trace import Adapted, Node, Trace, Value
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.plan.record import Run

ROPES = ("rope", "q_rope")  # options of nodes that turn
# Operations whose rows depend on nothing but the same rows of what they read.
BY_ROW = frozenset(
    ("linear", "norm", "add", "scale", "gate", "act", "clamp", "route", "experts", "combine", "scale_stream")
)
# Those whose results are gathered: they are written in the device's `inner` form where no product reads them.
GATHERED = ("attend", "gate_output", "gated_norm", "gated_conv", "head_linear")


class LastLayer(NamedTuple):
    """first: up to the first product behind the last operation that reads other tokens, of all tokens; rest: of the rows."""

    first: Part
    rest: Part

    def nbytes(self, lines: int) -> int:
        """What the rows take in between."""
        return sum(aligned(4 * lines * value.width) for value in self.first.rows)

    def begin(self, run: "Run", layers: list[Part]) -> list[Part]:
        """The parts to record of these, the first part of the last one for the rows that are wanted."""
        most = min(run.max_tokens, run.planner.max_lines)
        run.wanted = run.step.logit_rows.with_rows(run.recorder.symbol("rows", most))
        return [*layers[:-1], self.first]

    def record(self, run: "Run", rows: Any, most: int) -> "Run":
        """Record the rest behind `first`, of `rows` rows, at most so many: the Run of these rows, for what follows."""
        planner = run.planner
        # Two at least: kernels for exactly one row would run where none is wanted.
        found = type(run)(planner, run.recorder, run.step, rows, max(most, 2))
        found.layer, found.wanted = run.layer, run.wanted
        # The stream of all tokens is read no more: what is left to be added has its place.
        found.stream, found.carry = planner.wanted_rows, planner.hidden
        found.play(self.rest, planner._place(self.rest, planner._room(most, planner.max_tokens)), run.prefix, rows)
        return found


class Parts(NamedTuple):
    """again: of a block that predicts behind a model, the beginning behind its own state. layers: the part of each. ends: by whether every token has logits, and over hidden states that are there already
    (None); of an encoder none, but `finish`, what follows its layers. ropes: the rotations that are used, by name. hops: of a pipeline, what follows
    the layers, by whether the stream comes back to rank 0; where ranks have streams of their own, what makes one of them is the last layer. last: the last layer in two parts, where that is possible."""

    begin: Part
    again: Part | None
    layers: list[Part]
    ends: dict[bool | None, Part]
    finish: Part | None
    ropes: dict[str, Any]
    hops: dict[bool, Part]
    last: LastLayer | None


def trace_forward(forward: Any, model: Any, device: Any, adapted: Adapted | None = None, divided: Any = None) -> Parts:
    """Trace the forward: its beginning, and each kind of layer behind what the one before leaves to be added. adapted:
    what adapters change of the layers' products. Where the model is one rank's share, parts of sums are added. divided: a zse.plan.ranks.DividedTokens."""
    weights: dict[str, dict[str, Any]] = {"": {}}
    for name, weight in (*model.weights.items(), *model.vectors.items()):
        layer, _, suffix = name.rpartition(".")
        weights.setdefault(layer, {})[suffix] = weight
    partial_weights = model.share.partial if model.share else frozenset()
    divides = "" if divided is None else divided.form
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
        options: dict[str, Any] = dict(layer=layer, adapted=adapted, gathered=gathered)
        given = mine, partial(forward.layer, i=layer), pending
        if kind not in known:
            known[kind] = traced(*given, **options)
        layers.append(known[kind])
        pending = known[kind].pending
    # Tokens of ranks' own, and rows of adapters, are found by a token's place; a block reads the stream of all.
    cuts = model.config.causal and layers and not (stage or divides or adapted or model.config.follows)
    last = traced(*given, **options, in_two=True) if cuts else None
    hops: dict[bool, Part] = {}
    if stage:
        hops = {back: traced({}, partial(_hop, forward, model.share, back), pending) for back in (False, True)}
        layers.append(hops[True])
        pending = None
    if divides == "stream":
        layers.append(traced({}, partial(_collect, forward), pending))
        pending = None
    ends: dict[bool | None, Part] = {
        every: traced(weights[""], forward.end, None if every is None else pending, every or False)
        for every in ((False, True, None) if model.config.causal and begins else ())
    }
    finish = None if model.config.causal or not begins else traced(weights[""], forward.finish, pending)
    used = {node.options[key] for part in known.values() for node in part.nodes for key in ROPES if key in node.options}
    return Parts(
        *(begin, again, layers, ends, finish),
        *({name: rope for name, rope in forward.ropes().items() if name in used}, hops, last),
    )


def _receive(forward: Any) -> Value:
    """The stream from the rank before."""
    return forward.trace.add("receive", (), forward.config.hidden_size, is_stream=True)


def _collect(forward: Any, x: Value) -> Value:
    """The stream of all ranks' tokens."""
    return forward.trace.add("whole_stream", (x,), x.width, is_stream=True)


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
    divides: str = "",
    whole: bool = False,
    in_two: bool = False,
) -> Any:
    """A part of the forward with these weights. before: what the part before leaves to be added; layer: a layer's
    number; whole: it leaves nothing; in_two: a LastLayer is made of it."""
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
    made_of = partial(fuse, trace, device=device, schemes=schemes)
    end = run(start)
    return cut(made_of, trace, start, end, before) if in_two else made_of(start, end, before, whole=whole)


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


# -- the last layer in two parts


def last_layer_of(planner: Any, images: Any) -> LastLayer | None:
    """Of a step with images (StepImages or None); None where what is behind the last layer is read of every token."""
    is_changed = images is not None and len(images.more) >= planner.config.num_layers
    return None if is_changed or planner.kept is not None else planner._last


def place_rows(last: LastLayer | None, lines: int, carry: tuple[int, int], at: int) -> tuple[int, int]:
    """Where the rows lie between the two parts, and where what follows `at` begins: in what was carried to the layer (from, to),
    which its first launch has read, where there is room for them."""
    nbytes = 0 if last is None else last.nbytes(lines)
    return (carry[0], at) if nbytes <= carry[1] - carry[0] else (at, at + nbytes)


def bind_rows(run: "Run", part: Part, tensors: dict[Any, Any]) -> None:
    """Give values that lie between the two parts their places, the stream first."""
    planner, stream = run.planner, run.planner.wanted_rows
    at, form = stream.offset, stream.dtype
    for value in part.rows:
        tensors[value] = Tensor(stream.buffer, (run.wanted.shape[0], value.width), form, at)
        at, form = at + aligned(4 * planner.max_lines * value.width), planner.device.inner


def words_of(tensor: Tensor) -> Tensor:
    """Its rows as f32, which are 4 bytes that a copy does not look into."""
    narrow = 2 if tensor.dtype == "bf16" else 1
    return tensor._replace(shape=(tensor.shape[0], prod(tensor.shape[1:]) // narrow), dtype="f32")


def cut(
    made_of: Callable[..., Part], trace: Trace, start: Value, end: Value, before: Pending | None
) -> LastLayer | None:
    """A layer from the stream `start` to `end` in two parts, each by `made_of`, which is `fuse` of this trace. None where the stream is added to before other tokens are read for the last time, or where
    something is read behind that which is not gathered."""
    nodes = trace.nodes
    at = max((number for number, node in enumerate(nodes, 1) if node.op not in BY_ROW), default=0)
    while 0 < at < len(nodes) and nodes[at].op != "linear":  # norms and gates of what attention gave
        at += 1
    first, rest = nodes[:at], nodes[at:]
    if not rest or any(node.output.is_stream for node in first):
        return None
    made = {node.output: node for node in first}
    again: list[Node] = []
    of_rows: dict[Value, Value] = {}
    gathered: list[Value] = [start]
    for value in dict.fromkeys(value for node in rest for value in node.inputs if value in made):
        of_rows[value], maker = Value(trace, value.width), made[value]
        if maker.op == "norm" and maker.inputs == (start,):  # attention and MLP may read the same one
            again.append(Node("norm", (start,), of_rows[value], maker.weights, dict(maker.options)))
        elif maker.op in GATHERED and value.width % 2 == 0:
            gathered.append(value)
        else:
            return None
    arrived = (start, *(of_rows[value] for value in gathered[1:]))
    for node in rest:
        node.inputs = tuple(of_rows.get(value, value) for value in node.inputs)
    copies = [Node("wanted", (value,), Value(trace, value.width), {}, {}) for value in gathered]
    trace.nodes = [*first, *copies]
    beginning = made_of(start, start, before, whole=True)
    beginning.rows = tuple(node.output for node in copies)
    trace.nodes = [*again, *rest]
    ending = made_of(start, end, None)
    ending.rows = arrived
    return LastLayer(beginning, ending)
