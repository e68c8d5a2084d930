"""What stands between two attentions of a recording of one token as one launch (zse.kernels.chain, of a mixture
zse.kernels.mixture_chain)."""

from itertools import pairwise
from typing import Any, NamedTuple

from zse.kernels.chain import CHUNK, GATES, MOST_HEADS, Records, chain, signals_of, takes, turn
from zse.kernels.mixture_chain import mixture_chain
from zse.kernels.mixture_chain import signals_of as mixture_signals_of
from zse.kernels.mixture_chain import takes as mixture_takes
from zse.plan import mixtures
from zse.plan.mixtures import Mixture
from zse.plan.rules import Part
from zse.plan.trace import Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.plan.place import Placed
    from zse.plan.record import Planner, Run

LEAST = 2  # launches of a step: their memory is theirs by turns
# Numbers of a layer's weights. The launch costs four waits for all blocks, which fewer bytes do not hide (an H200, us of
# a layer, alone): 47 million 18.8 by six launches, 19.5 by this one; 77 million 22.9 and 22.2; 269 million 40.9 and 36.8.
LEAST_NUMBERS = 64 << 20
LEAST_MIXED = 48 << 20  # of the numbers of a mixture's layer that a token needs


ATTENDING = 32  # blocks of attention are a multiple of it: a graph is captured for each number of them
ATTENDED = 256  # keys of a task of attention, at least


def attending(planner: "Planner", context: int) -> int:
    """Of a step of one token, the symbol "attending": blocks of the attention in front of such a launch, whose own blocks
    start 2 us behind the last one of these. context: tokens of the sequence."""
    tasks = planner.config.num_kv_heads * max(-(-context // ATTENDED), 1)
    return min(-(-tasks // ATTENDING) * ATTENDING, planner.device.num_sms)


class Chained(NamedTuple):
    """The nodes of a layer that the launch behind its attention computes, o first, and the next layer's norm and product,
    behind the last layer the norm before the head. kind: what launches share signals by: "chain" or "mixture_chain", and sizes."""

    own: tuple[Node, ...]
    following: tuple[Node, ...]
    mixture: Mixture | None
    kind: tuple[Any, ...] = ()

    def weights(self, planner: "Planner", layer: int) -> list[Any]:
        """Of the four products; None: is not there."""
        o, (gate_up, down) = self.own[0], self.mixture[3:5] if self.mixture else self.own[2:]
        found = planner.model.weights
        mine = [found.get(f"layers.{layer}.{node.weights['weight']}") for node in (o, gate_up, down)]
        return [*mine, *(found.get(f"layers.{layer + 1}.{node.weights['weight']}") for node in self.following[1:])]


class Chains:
    """Those of a recording. of: by layer; parts: of the recording's layers, and what follows them, if that is known."""

    def __init__(self, parts: list[Part], of: dict[int, Chained]):
        self.of, self._parts = of, parts
        self._kept: dict[int, Records] = {}  # by layer
        self._kinds = {
            kind: [layer for layer in of if of[layer].kind == kind] for kind in {c.kind for c in of.values()}
        }

    def takes(self, run: "Run", node: Node) -> bool:
        """Whether a launch of these computes a node of the layer that is recorded, which is recorded where its first one
        stands."""
        mine, before = self.of.get(run.layer), self.of.get(run.layer - 1)
        if before is not None and node in before.following:
            return True
        if mine is None or node not in mine.own:
            return mine is not None and len(mine.following) == 1 and node is mine.following[0]
        if node is mine.own[0]:
            self._record(run, mine)
        return True

    def attending(self, run: "Run", attend: Node) -> dict[str, Any]:
        """What attention that makes its own heads is told where such a launch stands behind it: its grid, for the launch
        starts when all of attention's blocks have; and that its tasks' records are merged there."""
        mine, planner, layer = self.of.get(run.layer), run.planner, run.layer
        if mine is None:
            return {}
        head_dim, heads = planner.config.head_dim_of(layer), planner.config.num_heads
        keeps = head_dim == CHUNK and heads <= MOST_HEADS and not attend.weights
        if keeps:
            scratch = run.scratch[planner.kv.values[layer].shape[1], head_dim]
            self._kept[layer] = Records(scratch.records, scratch.totals, scratch.plans[attend.options["window"]])
        # A mixture's launch asks for weights at once, for which attention would wait (0.7 % of a step, an H200).
        blocks = None if mine.mixture else run.recorder.symbol("attending", planner.device.num_sms)
        return dict(blocks=blocks, keeps_records=keeps)

    def _record(self, run: "Run", found: Chained) -> None:
        planner, layer, (o, norm, *_) = run.planner, run.layer, found.own
        next_norm, last = found.following[0], found.following[-1]
        following = f"layers.{layer + 1}." if last is not next_norm else ""
        vectors, bias = planner.model.vectors, last.weights.get("bias")
        norms = run.vector(norm, "norm"), vectors[following + next_norm.weights["norm"]]
        launches = self._kinds[found.kind]
        part = self._parts[layer + 1]
        placed = _placed(planner, part, not following)
        # The end's logits are not known yet.
        tensors = (run.tensors_of if following else run.bind)(part, placed, following, run.tokens)
        before = run.t[o.inputs[1]].with_rows(1), run.t[o.inputs[0]].with_rows(1), found.weights(planner, layer)
        behind = norms, tensors[last.output].with_rows(1), _signals(planner, found.kind)
        signals = turn(behind[2], launches.index(layer), len(launches))
        more: dict[str, Any] = dict(
            bias=None if bias is None else vectors[following + bias], records=self._kept.get(layer)
        )
        eps = norm.options.get("eps", planner.config.norm_eps)
        if found.mixture is None:
            gate = found.own[2].options["activation"]
            follows, goes_on = (other in launches for other in (layer - 1, layer + 1))
            more |= dict(follows=follows, leaves=not goes_on)
            chain(run.recorder, *before, *behind[:2], signals, eps=eps, gate=gate, **more)
            return
        _, router, routed, gate_up, *_ = found.mixture
        product = run.weight(router), run.vector(router, "bias")
        more |= mixtures.choice_of(run, routed) | dict(gate=gate_up.options["gate"], norm_eps=eps)
        mixture_chain(run.recorder, *before, product, *behind[:2], signals, **more)


def _placed(planner: "Planner", part: Part, is_end: bool = False) -> "Placed":
    return planner._place(part, planner._room(1, planner.max_lines if is_end else planner.max_tokens))


def _signals(planner: "Planner", kind: tuple[Any, ...]) -> list[Any]:
    name, *sizes = kind
    return (signals_of if name == "chain" else mixture_signals_of)(planner.device, *sizes)


def chains_of(run: "Run", parts: list[Part], others: tuple[Any, ...], end: Part | None) -> Chains | None:
    """Of a recording whose layers are these parts; None: it is of more tokens, one of the `others` (what changes its
    layers, or looks between them) is there, or it has none. end: what follows the layers, if that is known."""
    is_plain = run.max_tokens == 1 and all(other is None for other in others)
    return _find(run.planner, parts, end) if is_plain else None


def _find(planner: "Planner", parts: list[Part], end: Part | None = None) -> Chains | None:
    if planner.group is not None or planner.pins_forms:
        return None
    placed = [_placed(planner, part) for part in parts]
    of: dict[int, Chained] = {}
    last = None
    if end is not None:
        last, parts, placed = len(parts) - 1, [*parts, end], [*placed, _placed(planner, end, True)]
    for layer, (mine, following) in enumerate(pairwise(placed)):
        found = _between(mine.nodes, following.nodes, planner.config.norm_eps, layer == last)
        if found is not None and following.forms.get(found.following[0].output) == "bf16":
            kind = _kind(planner, found, layer)
            of |= {layer: found._replace(kind=kind)} if kind else {}
    kinds = [one.kind for one in of.values()]
    of = {layer: one for layer, one in of.items() if kinds.count(one.kind) >= LEAST}
    return Chains(parts, of) if of else None


def _kind(planner: "Planner", found: Chained, layer: int) -> tuple[Any, ...]:
    """Chained.kind, where the layer's weights are such as a launch takes; else nothing."""
    device, weights = planner.device, found.weights(planner, layer)
    if None in weights:
        return ()
    hidden, inner = weights[0].shape[0], weights[2].shape[1]
    if found.mixture is None:
        numbers = sum(rows * width for rows, width in (weight.shape for weight in weights))
        return ("chain", hidden, inner) if numbers >= LEAST_NUMBERS and takes(device, weights) else ()
    model, chosen = planner.model, planner.config.moe.experts_per_token
    router, schemes = (
        model.weights[f"layers.{layer}.{found.mixture.router.weights['weight']}"],
        [w.scheme for w in weights],
    )
    active = hidden * (weights[0].shape[1] + 3 * chosen * inner) + weights[3].shape[0] * hidden
    if (
        active < LEAST_MIXED
        or model.host_experts is not None
        or not mixtures.takes(planner, found.mixture, router, schemes[1:3])
    ):
        return ()
    fits = mixture_takes(device, weights, router, chosen, *mixtures.searched(found.mixture.route))
    return ("mixture_chain", hidden, inner, router.shape[0], chosen) if fits else ()


def _between(nodes: list[Node], following: list[Node], eps: float, is_last: bool) -> Chained | None:
    """Attention's result → the stream, and the stream → the next layer's heads, of the last one the head's norm: nothing else
    than these."""
    mixture = nodes[-1].options.get("mixture") if nodes else None
    count = 4 if mixture is None else 7
    attend, *own = nodes[-count - 1 :]
    ops = ("attend", "linear", "add_norm", *(("gated_product", "linear") if mixture is None else mixtures.OPS[1:]))
    behind = ("add_norm",) if is_last else ("add_norm", "linear")
    next_nodes = tuple(following[: len(behind)])
    if tuple(node.op for node in (attend, *own)) != ops or tuple(node.op for node in next_nodes) != behind:
        return None
    if is_last and mixture is not None:
        return None
    if mixture is not None:
        mixture = Mixture(*own[1:])
    (o, norm, *_), (next_norm, *next_qkv) = own, next_nodes
    reads = o.inputs[0] is attend.output and o.options.get("accumulate", False)
    is_plain = all(
        node.options.get("kind", "rms") == "rms" and set(node.weights) == {"norm"} and not node.output.is_stream
        for node in (norm, next_norm)
    )
    carried = next_norm.options.get("carried", False) and "delta_norm" not in next_norm.options
    inputs = len(norm.inputs) == 1 and len(next_norm.inputs) == (1 if mixture is None else 2 if carried else 0)
    epsilons = {node.options.get("eps", eps) for node in (norm, next_norm)}
    products = own if mixture is None else (o, mixture.gate_up, mixture.down)
    has_bias = any("bias" in n.weights for n in products) or any(n.options.get("routes") for n in next_qkv)
    readers = [n for n in following if next_norm.output in n.inputs]
    is_read = is_last or (readers == next_qkv and next_qkv[0].inputs == (next_norm.output,))
    gate = own[2].options["activation"] if mixture is None else mixture.gate_up.options["gate"]
    fits = inputs and len(epsilons) == 1 and gate in GATES and (mixture is not None or _is_dense(own))
    return (
        Chained(tuple(own), next_nodes, mixture) if fits and reads and is_plain and is_read and not has_bias else None
    )


def _is_dense(own: list[Node]) -> bool:
    _, norm, gate_up, down = own
    return (
        down.options.get("accumulate", False) and gate_up.inputs == (norm.output,) and down.inputs[0] is gate_up.output
    )


def reserve(planner: "Planner") -> None:
    """Have the device allocate what these launches work in."""
    found = _find(planner, planner._layers, planner._ends.get(True))
    for kind in {one.kind for one in found.of.values()} if found else ():
        _signals(planner, kind)
