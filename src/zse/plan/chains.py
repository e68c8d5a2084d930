"""What stands between two attentions of a recording of one token as one launch (zse.kernels.chain)."""

from typing import Any, NamedTuple

from zse.kernels.chain import GATES, chain, signals_for, signals_of, takes
from zse.plan.rules import Part
from zse.plan.trace import Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.plan.record import Planner, Run

LEAST = 2  # launches of a step: their memory is theirs by turns
# Numbers of a layer's weights. The launch costs four waits for all blocks, which fewer bytes do not hide (an H200, us of
# a layer, alone): 47 million 18.8 by six launches, 19.5 by this one; 77 million 22.9 and 22.2; 269 million 40.9 and 36.8.
LEAST_NUMBERS = 64 << 20


class Chained(NamedTuple):
    """The nodes of a layer that the launch behind its attention computes, and of the next one."""

    o: Node
    norm: Node
    gate_up: Node
    down: Node
    next_norm: Node
    next_qkv: Node

    def products(self, layer: int) -> list[tuple[Node, str]]:
        """Each product with the prefix of its weights' names."""
        mine, following = (f"layers.{number}." for number in (layer, layer + 1))
        return [(node, mine) for node in (self.o, self.gate_up, self.down)] + [(self.next_qkv, following)]


class Chains:
    """Those of a recording. of: by layer; parts: of the recording's layers."""

    def __init__(self, parts: list[Part], of: dict[int, Chained]):
        self.of, self._parts, self._numbers = of, parts, {layer: number for number, layer in enumerate(of)}

    def takes(self, run: "Run", node: Node) -> bool:
        """Whether a launch of these computes a node of the layer that is recorded, which is recorded where its first one
        stands."""
        mine, before = self.of.get(run.layer), self.of.get(run.layer - 1)
        if before is not None and node in before[4:]:
            return True
        if mine is None or node not in mine[:4]:
            return False
        if node is mine.o:
            self._record(run, mine)
        return True

    def _record(self, run: "Run", found: Chained) -> None:
        planner, layer = run.planner, run.layer
        weights = tuple(
            planner.model.weights[prefix + node.weights["weight"]] for node, prefix in found.products(layer)
        )
        following = f"layers.{layer + 1}."
        vectors, bias = planner.model.vectors, found.next_qkv.weights.get("bias")
        norms = run.vector(found.norm, "norm"), vectors[following + found.next_norm.weights["norm"]]
        signals = signals_for(
            planner.device, weights[0].shape[0], weights[2].shape[1], self._numbers[layer], len(self.of)
        )
        part = self._parts[layer + 1]
        tensors = run.tensors_of(part, planner._place(part, _room(planner)), following, run.tokens)
        chain(
            run.recorder,
            run.t[found.o.inputs[1]].with_rows(1),
            run.t[found.o.inputs[0]].with_rows(1),
            weights,
            norms,
            tensors[found.next_qkv.output].with_rows(1),
            signals,
            None if bias is None else vectors[following + bias],
            eps=found.norm.options.get("eps", planner.config.norm_eps),
            gate=found.gate_up.options["activation"],
        )


def _room(planner: "Planner") -> int:
    return planner._room(1, planner.max_tokens)


def chains_of(run: "Run", parts: list[Part], others: tuple[Any, ...]) -> Chains | None:
    """Of a recording whose layers are these parts; None: it is of more tokens, one of the `others` (what changes its
    layers, or looks between them) is there, or it has none."""
    is_plain = run.max_tokens == 1 and all(other is None for other in others)
    return _find(run.planner, parts) if is_plain else None


def _find(planner: "Planner", parts: list[Part]) -> Chains | None:
    if planner.group is not None or planner.pins_forms:
        return None
    placed = [planner._place(part, _room(planner)) for part in parts]
    of: dict[int, Chained] = {}
    for layer in range(len(parts) - 1):
        found = _between(placed[layer].nodes, placed[layer + 1].nodes, planner.config.norm_eps)
        if found is None or placed[layer + 1].forms.get(found.next_qkv.inputs[0]) != "bf16":
            continue
        products = found.products(layer)
        weights = [planner.model.weights.get(prefix + node.weights["weight"]) for node, prefix in products]
        if (
            None not in weights
            and sum(rows * width for rows, width in (weight.shape for weight in weights)) >= LEAST_NUMBERS
        ):
            of |= {layer: found} if takes(planner.device, weights) else {}
    return Chains(parts, of) if len(of) >= LEAST else None


def _between(nodes: list[Node], following: list[Node], eps: float) -> Chained | None:
    """Attention's result → the stream, and the stream → the next layer's heads: nothing else than these."""
    ops = ("attend", "linear", "add_norm", "gated_product", "linear")
    if tuple(node.op for node in nodes[-5:]) != ops or tuple(node.op for node in following[:2]) != ops[2:0:-1]:
        return None
    attend, *last = nodes[-5:]
    found = Chained(*last, *following[:2])
    o, norm, gate_up, down, next_norm, next_qkv = found
    adds = [node.options.get("accumulate", False) for node in (o, down, next_qkv)]
    reads = o.inputs[0] is attend.output and gate_up.inputs == (norm.output,) and down.inputs[0] is gate_up.output
    is_plain = all(
        node.options.get("kind", "rms") == "rms" and len(node.inputs) == 1 and set(node.weights) == {"norm"}
        for node in (norm, next_norm)
    ) and not (norm.output.is_stream or next_norm.output.is_stream)
    epsilons = {node.options.get("eps", eps) for node in (norm, next_norm)}
    has_bias = any("bias" in node.weights for node in (o, gate_up, down)) or next_qkv.options.get("routes", False)
    is_read = next_qkv.inputs == (next_norm.output,) and sum(next_norm.output in n.inputs for n in following) == 1
    fits = adds == [True, True, False] and len(epsilons) == 1 and gate_up.options["activation"] in GATES
    return found if fits and reads and is_plain and is_read and not has_bias else None


def reserve(planner: "Planner") -> None:
    """Have the device allocate what these launches work in."""
    found = _find(planner, planner._layers)
    if found is not None:
        layer, each = next(iter(found.of.items()))
        (o, prefix), _, (down, _), _ = each.products(layer)
        weights = [planner.model.weights[prefix + node.weights["weight"]] for node in (o, down)]
        signals_of(planner.device, weights[0].shape[0], weights[1].shape[1])
