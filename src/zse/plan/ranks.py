"""What a recording does where the model is one rank's share (docs/design/0011-several-devices.md)."""

from zse.plan.trace import Node, Value
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def all_reduce(nodes: list[Node], partial: frozenset[str]) -> list[Node]:
    """What ranks compute with their columns of a weight of those named, or with theirs of all experts, is added before anything
    reads it; what experts give together is, at once."""
    found: list[Node] = []
    whole: dict[Value, Value] = {}
    combined = {value for node in nodes if node.op == "combine" for value in node.inputs}
    for node in nodes:
        node.inputs = tuple(whole.get(value, value) for value in node.inputs)
        found.append(node)
        is_part = node.op == "linear" and node.weights["weight"] in partial and node.output not in combined
        if node.op == "combine" or is_part:
            part = node.output
            whole[part] = Value(part.trace, part.width)
            found.append(Node("all_reduce", (part,), whole[part], {}, {}))
    return found


class SharedHead:
    """A head of which each rank has some rows of the vocabulary: logits are made here and gathered on rank 0.

    group: zse.parallel.group.RankGroup; widths: rows of each rank; lines: the most of a step."""

    def __init__(self, device: "Any", group: "Any", widths: tuple[int, ...], lines: int):
        self._group, self._widths, self._width = group, widths, widths[group.rank]
        self._buffer = device.alloc(4 * lines * self._width, label="step")

    def part(self, logits: Tensor) -> Tensor:
        """Where this rank's columns of `logits` are made: f32 [rows, widths[rank]]."""
        return Tensor(self._buffer, (logits.shape[0], self._width), "f32")

    def gather(self, recorder: "Any", logits: Tensor) -> None:
        """Record: what all ranks made of the lines of `logits` comes there, on rank 0."""
        self._group.gather(recorder, self.part(logits), logits, self._widths)


def head_of(device: "Any", group: "Any", model: "Any", lines: int) -> SharedHead | None:
    """The SharedHead of one rank's share of a decoder; None where the model has no head."""
    if not model.config.causal or not model.share.widths:
        return None
    return SharedHead(device, group, model.share.widths, lines)
