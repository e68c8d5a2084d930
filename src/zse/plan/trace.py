"""Symbolic tensors: a model's forward runs over them once per kind of layer and leaves the list of its operations.

A Value stands for [tokens, width] numbers, a Node for one operation. The operations of a trace:

    embed       () → stream, (x) → x + rows     weight: the table; scale; ids: "tokens", "positions", "types"; first row
    taken       () → rows of another stream     norm; the stream is one that record() is told
    join        (x, ...) → side by side         norm0, norm1, ...: of an input; eps
    norm        (x) → x normalized              weight, bias; eps, kind ("rms", "layer"); in_place: x is the stream
    linear      (x) → x @ weight.T + bias       weight, bias; exact: see `forms`
    head_norm   (q, k or v) → RMSNorm of heads  weight; eps, whole: of all together
    rotate      (q or k) → RoPE                 rope: a name of the model's tables, None: not turned
    latent      (q, kv) → turned parts of q     weight: a norm; rope, eps, heads, pairs; the latents go to the cache
    head_linear (x) → each head's matrix @ x    weight; heads
    attend      (q[, k, v]) → attention         window, softcap, scale, ahead; K and V go to the cache
    attend_latent (q, turned) → attention       heads, scale, temperature; among the latents
    gate        (gate, up) → act(gate) * up     activation
    act         (x) → act(x)                    activation
    clamp       (x) → within bounds             bounds, a vector; first: of the lower one
    route       (logits) → which experts        bias, factors of experts; what zse.kernels.route takes
    experts     (x, routing) → a row a pair     weight, bias: stacks of experts'; gather: x has a row a token
    combine     (pairs, routing[, shared[, gate]]) → a token's experts, weighted and added
    layer_inputs (product, rows)                norm; each layer's own embeddings
    gate_inputs (gate) → act(gate) * the layer's own embeddings
    scale_stream (stream) → times a number      weight
    conv, gated_conv (x) → causal convolution   weight, bias; activation; a state (zse.models.hybrid has these seven)
    delta       (qkv, b, a) → delta rule        A, dt_bias; heads, sizes, tiled; a state
    scan        (x, dt) → Mamba-2               A, D, dt_bias; heads, groups, state_size, dt_limits; a state
    gated_norm  (x, gate) → RMSNorm, gated      weight; eps, groups, gate_first, activation
    head_half   (x) → q or gate of each head    heads, half
    gate_output (x, gate) → x * sigmoid(gate)
    add         (x, y), scale (x) by factor, cap (x): cap * tanh(x / cap)
    wanted      (x) → its rows whose logits are wanted
    spread      (logits) → those of all tokens  ids: of each token its own, -1: none

`rules` makes launches of them.
"""

from typing import Any, NamedTuple

from zse.errors import ConfigError

# Operations that read columns of a wider value where they lie (zse.kernels.columns).
READERS = ("conv", "gated_conv", "delta", "scan", "gated_norm", "gate_output")


class PlanError(ConfigError):
    """A forward that no launch of this device computes."""


class Adapted(NamedTuple):
    """The products that adapters may add to, by their weights' names, and the largest rank of one."""

    members: frozenset[str]
    rank: int


class Value:
    """[tokens, width] numbers that a node gives. node: None for what comes into a trace. The stream is the residual
    stream: f32, and an addition to it is made in place. per_token: [tokens * per_token, width], a row for each expert
    of a token."""

    __slots__ = ("is_stream", "node", "per_token", "trace", "width")

    def __init__(self, trace: "Trace", width: int, is_stream: bool = False, per_token: int = 0):
        self.trace, self.width, self.is_stream, self.per_token = trace, width, is_stream, per_token
        self.node: Node | None = None

    def __add__(self, other: "Value") -> "Value":
        if self.width != other.width:
            raise PlanError(f"an addition of {self.width} and {other.width} columns")
        if other.is_stream and not self.is_stream:
            self, other = other, self
        return self.trace.add("add", (self, other), self.width, is_stream=self.is_stream)

    def __mul__(self, factor: float) -> "Value":
        return self if factor == 1.0 else self.trace.add("scale", (self,), self.width, factor=factor)


class Node:
    """One operation. weights: role ("weight", "bias", ...) → name, without the prefix of the layer. output: of an
    operation in place, what it changes."""

    __slots__ = ("inputs", "op", "options", "output", "weights")

    def __init__(
        self, op: str, inputs: tuple[Value, ...], output: Value, weights: dict[str, str], options: dict[str, Any]
    ):
        self.op, self.inputs, self.output, self.weights, self.options = op, inputs, output, weights, options
        output.node = self

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(self.weights.values())})"


class Trace:
    """The operations of one part of a forward, in order. shapes: of the part's weights and vectors by name; what is not
    in it the part does not have (a bias, say). orders: of weights whose columns stand in another order, by the name of
    one that has the same. all_rows: every token's logits are wanted. adapted: what adapters add to. partial: weights of
    which ranks have shares of the columns: what they compute with them is added. gathered: of those whose columns are ordered, how
    many inputs each rank makes. divides: what ranks have of tokens of their own: "attention", their whole "stream", or nothing. split: values of joined products, or that are read by
    parts → the values that they consist of."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        all_rows: bool = False,
        orders: dict[str, str] | None = None,
        adapted: Adapted | None = None,
        partial: frozenset[str] = frozenset(),
        gathered: dict[str, tuple[int, ...]] | None = None,
        divides: str = "",
    ):
        self.partial, self.gathered, self.divides = partial, gathered or {}, divides
        self.shapes, self.all_rows, self.orders, self.adapted = shapes, all_rows, orders or {}, adapted
        self.nodes: list[Node] = []
        self.split: dict[Value, tuple[Value, ...]] = {}
        self.named = False  # whether the forward names parts of a product itself

    def add(
        self,
        op: str,
        inputs: tuple[Value, ...],
        width: int,
        weights: dict[str, str] | None = None,
        is_stream: bool = False,
        per_token: int = 0,
        **options: Any,
    ) -> Value:
        """A node of this trace; what it gives."""
        output = Value(self, width, is_stream, per_token)
        self.nodes.append(Node(op, inputs, output, weights or {}, options))
        return output

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight that the forward needs. Raises PlanError where the model has none."""
        found = self.shapes.get(name)
        if found is None:
            raise PlanError(f"the forward uses {name!r}, which this model does not have")
        return found
