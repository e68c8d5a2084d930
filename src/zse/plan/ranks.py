"""What a recording does where the model is one rank's share (docs/design/0011-several-devices.md)."""

from zse.kernels import whole_norm
from zse.kernels.combine import expert_ranks
from zse.kernels.gather import gather_rows
from zse.kernels.gpu import gemm_launch
from zse.plan.trace import Node, PlanError, Trace, Value
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zse.plan.place import Placed
    from zse.plan.record import Run
    from zse.plan.rules import Part


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


def shared_apart(nodes: list[Node]) -> list[Node]:
    """Shared experts that every rank has whole: what they give is added to the stream by itself, not to the ranks' sums."""
    for combine in [node for node in nodes if node.op == "combine" and len(node.inputs) > 2]:
        pairs, routing, shared, *gate = combine.inputs
        add = next((node for node in nodes if node.op == "add" and combine.output in node.inputs[1:]), None)
        if gate or add is None or not add.output.is_stream:
            raise PlanError(f"{combine}: a shared expert that is whole on all ranks is added to the stream as it is")
        between = Value(shared.trace, shared.width, True)
        first = Node("add", (add.inputs[0], shared), between, {}, {})
        combine.inputs, add.inputs, at = (pairs, routing), (between, combine.output), nodes.index(add)
        nodes = [*nodes[:at], first, *nodes[at:]]
    return nodes


def own_stream(nodes: list[Node], dispatches: bool) -> list[Node]:
    """Each rank has the stream of tokens of its own. What ranks compute parts of is computed of all tokens: from the norm before it, whose
    rows go to all ranks, to the product, of whose sums each rank gets those of its rows. dispatches: experts are whole; a router's logits go
    to all ranks, rows to those that have one of its experts, and back from these."""
    shared: set[Node] = set()
    everywhere: dict[Value, Value] = {}
    made = [node.inputs[0].node for node in nodes if node.op == "all_reduce"]
    while made:  # from the sums back to the norms of the stream
        node = made.pop()
        if node is None or node in shared:
            continue
        shared.add(node)
        for value in node.inputs:
            if value.is_stream:
                raise PlanError(f"{node}: what ranks have parts of begins with a norm")
            is_norm = value.node is not None and value.node.op == "norm" and value.node.inputs[0].is_stream
            if is_norm or (dispatches and node.op == "route"):
                everywhere.setdefault(value, Value(value.trace, value.width))
            else:
                made.append(value.node)
    found: list[Node] = []
    for node in nodes:
        if node in shared:
            known = {each.inputs[0] for each in found if each.op == "spread_rows"}
            for value in node.inputs:
                if value in everywhere and value not in known:
                    routing = node.inputs[1:2] if dispatches and node.op == "experts" else ()
                    found.append(Node("spread_rows", (value, *routing), everywhere[value], {}, {}))
            node.inputs = tuple(everywhere.get(value, value) for value in node.inputs)
        if node.op == "all_reduce":
            maker = node.inputs[0].node
            routing = maker.inputs[1:2] if dispatches and maker is not None and maker.op == "combine" else ()
            node = Node("collect_sums", (*node.inputs, *routing), node.output, {}, {})
        found.append(node)
    return found


class DividedTokens:
    """What a recording of ranks with tokens of their own does. The symbol "own" says how many there are. form: "stream": each has the
    stream of these alone (own_stream); "attention": that of all (own_rows)."""

    def __init__(self, device: "Any", max_tokens: int, config: "Any", form: str):
        self.form, shape = form, (max_tokens + 1, config.hidden_size)
        self._tokens: Any = 0  # of all ranks in the step that is recorded
        # Of attention's results; the last row stays as it is: zeros. Or the stream.
        self._rows = Tensor(device.alloc(4 * shape[0] * shape[1], label="step"), shape, "f32")
        # Token ids, and rows of images: i32, which are copied.
        self._ids = Tensor(device.alloc(8 * max_tokens, label="step"), (max_tokens, 1), "f32")
        last = Tensor(self._rows.buffer, shape[1:], "f32", 4 * max_tokens * shape[1])
        device.write(last, bytes(4 * shape[1]))
        # Of whole experts: a bit for each rank that has one of a token's.
        self._moe, count = config.moe, max_tokens if config.moe is not None and config.moe.own[1] else 0
        self._wanted = Tensor(device.alloc(4 * count, label="step"), (count,), "i32") if count else None

    def begin(self, run: "Any") -> None:
        """From now on what `run` records is of these; or what it records of attention."""
        step, run.own = run.step, run.recorder.symbol("own", run.max_tokens)
        own = step.own
        run.positions, run.token_row = own.positions.with_rows(run.own), own.token_row.with_rows(run.own)
        run.tables = {name: table.with_rows(run.own) for name, table in run.tables.items()}
        if self.form == "stream":
            run.step = step._replace(token_ids=self._mine(run, step.token_ids, 0), positions=own.positions)
            if run.images is not None:
                run.images = run.images._replace(rows=self._mine(run, run.images.rows, self._ids.nbytes))
            self._tokens, run.tokens, run.stream = run.tokens, run.own, self._rows

    def _mine(self, run: "Any", ids: Tensor, at: int) -> Tensor:
        """Record: of ids i32 [tokens] those of this rank's tokens, at a byte of what is kept of them."""
        mine = self._ids._replace(offset=at)
        rows = run.step.own.rows.with_rows(run.own)
        gather_rows(run.recorder, ids._replace(shape=(*ids.shape, 1), dtype="f32"), rows, mine.with_rows(run.own))
        return mine._replace(shape=mine.shape[:1], dtype="i32")

    def _end(self, run: "Any") -> None:
        """Record: the stream of all tokens, which what `run` records from now on is of."""
        mine, run.tokens, run.stream = run.of(run.stream), self._tokens, run.planner.hidden
        run.planner.group.spread_rows(run.recorder, mine, run.of(run.stream), run.step.own)

    def rows_of(self, run: "Any", nodes: list[Node]) -> "dict[Value, Any]":
        """Values of a part that have other rows than the stream has → how many."""
        begins, ends = ("spread_rows", "collect_sums") if self.form == "stream" else ("own_rows", "all_rows")
        found: dict[Value, Any] = {}
        for node in nodes:
            if node.op == begins or (node.op != ends and any(value in found for value in node.inputs)):
                found[node.output] = self._tokens if self.form == "stream" else run.own
        return found

    def bind(self, run: "Any", nodes: list[Node], tensors: "dict[Any, Any]") -> None:
        """Attention's results lie before the row of zeros."""
        for node in nodes:
            if node.op == "all_rows":
                tensors[node.inputs[0]] = self._rows.with_rows(run.own)

    def record(self, run: "Any", node: Node) -> None:
        """The launches of what begins and ends with these."""
        own, out, group = run.step.own, run.t[node.output], run.planner.group
        if node.op == "own_rows":
            gather_rows(run.recorder, run.t[node.inputs[0]], own.rows.with_rows(run.own), out)
        elif node.op == "all_rows":  # zeros of the others'
            gather_rows(run.recorder, self._rows, run.of(own.place), out)
        elif node.op == "whole_stream":
            self._end(run)
        else:
            exchange, wanted = group.spread_rows if node.op == "spread_rows" else group.collect_sums, None
            if len(node.inputs) > 1 and self._wanted is not None:
                wanted, ids = self._wanted.with_rows(self._tokens), run.t[node.inputs[1]].ids
                if node.op == "spread_rows":
                    expert_ranks(run.recorder, ids, wanted, experts=self._moe.num_experts, ranks=group.size)
            exchange(run.recorder, run.t[node.inputs[0]], out, own, wanted)


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


def divided_of(device: "Any", group: "Any", buffers: "Any", config: "Any", whole_stream: str) -> DividedTokens:
    """Of ranks that have tokens of their own. whole_stream: as of Planner."""
    form = "stream" if group.spreads and whole_stream != "layers" else "attention"
    return DividedTokens(device, buffers.token_ids.shape[0], config, form)


class RankSums:
    """Of a recording whose sums of two ranks are small enough to be made by the launch of the norm that follows. A sum waits until that is
    recorded, and is a launch of its own where none follows. Parts that products push (zse.kernels.gpu.gemm_push) are added to the stream at
    any rate."""

    def __init__(self, run: "Run"):
        self._run, self._group = run, run.planner.group
        self._pushed: dict[Node, int] = {}  # products → their turn
        self._waits: tuple[Any, Tensor] | None = None  # (part, or the turn of what was pushed; sum)

    def bind(self, part: "Part", placed: "Placed", prefix: str, tensors: "dict[Any, Any]") -> None:
        """Of a part whose values have their tensors. What a sum for the next part is made of lies where the sum would: the next part's first
        launch reads it, and writes where this one's values lie."""
        run = self._run
        handed = part.pending.delta if part.pending is not None else None
        if handed is not None and handed.node is not None and handed.node.op == "all_reduce":
            tensors[handed.node.inputs[0]] = tensors[handed]
        if self._group.pushes(run.max_tokens, run.planner.config.hidden_size):
            self._pushed |= self._pushing(part, placed, prefix, tensors)

    def _pushing(self, part: "Part", placed: "Placed", prefix: str, tensors: "dict[Any, Any]") -> dict[Node, int]:
        """A layer's two products of which ranks have parts, where a norm of the layer adds the first one's to the stream and the next part the
        second one's; none of other layers, for turns follow each other."""
        nodes, run, found = placed.nodes, self._run, dict[Node, int]()
        whole = run.planner.model.share.whole
        if (
            whole.intermediate_size % 8 or whole.head_dim % 8
        ):  # then a rank's columns may be what kernels take, and another's not
            return {}
        for at, node in enumerate(nodes):
            if node.op != "all_reduce":
                continue
            maker, options = node.inputs[0].node, _added(part, nodes[at + 1 : at + 2], node.output)
            if maker is None or maker is not nodes[at - 1] or maker.op != "linear":
                return {}
            weight, a = run.planner.model.weights[prefix + maker.weights["weight"]], tensors[maker.inputs[0]]
            can = gemm_launch.can_push(run.planner.device, weight, a.dtype, run.form_tokens)
            if not can or options is None or "delta_norm" in options or (at == len(nodes) - 1) != (len(found) == 1):
                return {}
            found[maker] = len(found)
        return found if len(found) == 2 else {}

    def pushes(self, node: Node) -> bool:
        """Whether this product pushes its part; then it is recorded."""
        turn = self._pushed.get(node)
        if turn is not None:
            run = self._run
            given = run.t[node.inputs[0]], run.weight(node), run.vector(node, "bias")
            self._group.push(run.recorder, turn, *given, run.form_tokens)
        return turn is not None

    def wait(self, node: Node) -> None:
        """A sum, recorded with what follows."""
        run, (part,) = self._run, node.inputs
        turn = self._pushed.get(part.node) if part.node is not None else None
        self._waits = run.t[part] if turn is None else turn, run.t[node.output]

    def before(self, node: Node) -> None:
        """A node that is recorded now: what is no addition may read a sum that waits."""
        if self._waits is not None and node.op != "add_norm":
            self._sum()

    def norms(
        self, x: Tensor, delta: Tensor, delta_norm: "Any", kind: str, norm: "Any", out: "Any", eps: float
    ) -> bool:
        """Whether the launch of the sum that waits, if that is `delta`, makes this norm, too; then it is recorded."""
        if self._waits is None:
            return False
        part, whole = self._waits
        if (delta.buffer, delta.offset) != (whole.buffer, whole.offset):  # another sum is added first
            self._sum()
            return False
        if kind != "rms" or norm is None or out is None or delta_norm is not None:
            return False
        self._waits = None
        if isinstance(part, Tensor):
            self._group.sum_norm(self._run.recorder, x, part, norm, out, eps)
        else:
            self._group.pushed_norm(self._run.recorder, part, x, norm, out, eps)
        return True

    def left(self, x: Tensor, delta: Tensor) -> Tensor | None:
        """What is still to be added to x of `delta` where the norm is another launch."""
        if self._waits is None:
            return delta
        part, _ = self._waits
        if isinstance(part, Tensor):
            self._sum()
            return delta
        self._waits = None
        self._group.pushed_norm(self._run.recorder, part, x, None, None, self._run.planner.config.norm_eps)
        return None

    def _sum(self) -> None:
        assert self._waits is not None and isinstance(self._waits[0], Tensor)
        summed, self._waits = self._waits, None
        self._group.all_reduce(self._run.recorder, *summed)


def _added(part: "Part", behind: list[Node], value: Value) -> "dict[str, Any] | None":
    """The options with which `value` is added to the stream by the node behind it or, where there is none, by the next part."""
    if behind:
        return behind[0].options if behind[0].op == "add_norm" and behind[0].inputs[1:] == (value,) else None
    return part.pending.options if part.pending is not None and part.pending.delta is value else None


def sums_of(run: "Run") -> RankSums | None:
    """Of a recording of ranks; None where sums are launches of their own."""
    planner = run.planner
    joins = planner.group is not None and planner.divided is None
    return RankSums(run) if joins and planner.group.joins(run.max_tokens, planner.config.hidden_size) else None
