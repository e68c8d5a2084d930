"""What a recording does where the model is one rank's share (docs/design/0011-several-devices.md)."""

from typing import NamedTuple

from zse.kernels import whole_norm
from zse.kernels.gather import gather_rows
from zse.plan.trace import Node, PlanError, Trace, Value
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


def whole_norms(nodes: list[Node], trace: Trace) -> list[Node]:
    """q and k that are normalized over all heads together, of which a rank has some: the ranks add up their sums of squares
    first, and what makes heads normalizes nothing."""
    found: list[Node] = []
    for node in nodes:
        if node.op == "heads" and node.options.get("whole"):
            sums, total = (Value(trace, whole_norm.SUMS) for _ in range(2))
            options = {"widths": tuple(trace.shape(node.weights[name])[0] for name in ("q_norm", "k_norm"))}
            found.append(Node("head_squares", node.inputs, sums, {}, options))
            found.append(Node("all_reduce", (sums,), total, {}, {}))
            options |= {"eps": node.options["eps"]}
            found.append(Node("whole_norm", (total, *node.inputs), Value(trace, 0), node.weights, options))
            node.weights = {}
        found.append(node)
    return found


def own_rows(nodes: list[Node]) -> list[Node]:
    """Each rank computes the attention of tokens of its own: from the norm before it to "o". What that gives, zeros for the others'
    tokens, is added."""
    last = next((node for node in nodes if node.op == "linear" and node.weights["weight"] == "o"), None)
    if last is None:
        return nodes
    before: list[Node] = []
    first, made = None, [last]
    while made:  # from the product back to the stream
        node = made.pop()
        before.append(node)
        if any(value.is_stream for value in node.inputs):
            if node.op != "norm" or first not in (None, node):
                raise PlanError(f"{node}: attention of a rank's own tokens begins with one norm")
            first = node
        else:
            made += [value.node for value in node.inputs if value.node is not None and value.node not in before]
    assert first is not None
    (x,) = first.inputs
    mine, spread, whole = (Value(x.trace, x.width) for _ in range(3))
    first.inputs = (mine,)
    found: list[Node] = []
    for node in nodes:
        if node is first:
            found.append(Node("own_rows", (x,), mine, {}, {}))
        elif node not in before:
            node.inputs = tuple(whole if value is last.output else value for value in node.inputs)
        found.append(node)
        if node is last:
            found.append(Node("all_rows", (last.output,), spread, {}, {}))
            found.append(Node("all_reduce", (spread,), whole, {}, {}))
    return found


class OwnRows(NamedTuple):
    """Of ranks that compute the attention of tokens of their own, i32: rows: which of the step's they are; positions, token_row: theirs;
    place: of each of the step's tokens where it stands among them, the largest step's size for others'."""

    rows: Tensor
    positions: Tensor
    token_row: Tensor
    place: Tensor


class DividedAttention:
    """The rows of a rank's own tokens in a step. The symbol "own" says how many there are."""

    def __init__(self, device: "Any", max_tokens: int, config: "Any"):
        shape = max_tokens + 1, config.hidden_size  # the last row stays as it is: zeros
        self._results = Tensor(device.alloc(4 * shape[0] * shape[1], label="step"), shape, "f32")
        last = Tensor(self._results.buffer, shape[1:], "f32", 4 * max_tokens * shape[1])
        device.write(last, bytes(4 * shape[1]))

    def begin(self, run: "Any") -> None:
        """From now on what `run` records of attention is of these."""
        own, run.own = run.step.own, run.recorder.symbol("own", run.max_tokens)
        run.positions, run.token_row = own.positions.with_rows(run.own), own.token_row.with_rows(run.own)
        run.tables = {name: table.with_rows(run.own) for name, table in run.tables.items()}

    def bind(self, run: "Any", nodes: list[Node], tensors: "dict[Any, Any]") -> None:
        """Give values of attention as many rows as there are."""
        mine: set[Value] = set()
        for node in nodes:
            if node.op == "all_rows":
                tensors[node.inputs[0]] = self._results.with_rows(run.own)
            elif node.op == "own_rows" or any(value in mine for value in node.inputs):
                mine.add(node.output)
                tensors[node.output] = tensors[node.output].with_rows(run.own)

    def take(self, run: "Any", stream: Tensor, out: Tensor) -> None:
        """Record: out = the rows of this rank's tokens."""
        gather_rows(run.recorder, stream, run.step.own.rows.with_rows(run.own), out)

    def spread(self, run: "Any", out: Tensor) -> None:
        """Record: out = the results of this rank's tokens, zeros of the others'."""
        gather_rows(run.recorder, self._results, run.of(run.step.own.place), out)


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
