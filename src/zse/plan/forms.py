"""The form in which each product takes its inputs, chosen from its weight's scheme and the number of tokens, and what a
form takes in memory.

int8: 8 bits with a scale and a sum for each 32; int16: twice 8 bits; fp8: e4m3 with a scale for each row; fp8_sums: and
a sum for each 128 columns, which int4 weights want. The softmax
amplifies what int8 loses before it: with f32 inputs of q, k and v the perplexity of Gemma 3 270M is 0.04 % above the
reference instead of 0.66 %, the mean KL of SmolLM2 0.0020 instead of 0.0028 (benchmarks/LOG.md). 16 bits are as good as
f32 and cost half, so "exact" products take int16 for int8."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from zse.dtypes import ITEM_BYTES
from zse.kernels import gpu, route
from zse.plan.trace import Node, PlanError, Value
from zse.tensor import Activation, Fp8Activation, Routing, Tensor, sum_width


class Traits(NamedTuple):
    """What recordings depend on beside the device's own attributes. sizes: of recordings, in tokens; the step's largest
    comes on top; one that fits closely picks kernels for few tokens. split_tokens: batches up to this size may split a
    sequence's keys between threads. rounds_by_form: results depend on which form a recording's size picks. own_scratch:
    attention's tasks and the partial sums of products have memory of their own."""

    sizes: tuple[int, ...]
    split_tokens: int
    rounds_by_form: bool
    own_scratch: bool


TRAITS = {
    "cpu": Traits((1, 16), 16, False, False),
    "gpu": Traits((1, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096), 0, True, True),
}
# Numbers of tokens up to which a recording's forms and launches are alike; the step's largest comes on top. CPU: the
# tokens for which attention may split a sequence's keys between threads. GPU: up to 8 tokens fp8 weights take bf16.
BREAKS = {"cpu": (16,), "gpu": (8,)}
FP8 = ("fp8", "fp8_sums")
# What an operation can write; all others' results, and what is not a product's input, are f32 or the device's `inner`.
EMITS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "add_norm": ("f32", "int8", "int16"),
        "attend": ("f32", "int8"),
        "gated": ("f32", "int8"),
        "act": ("f32", "int8"),
        "reorder": ("f32", "int8", "int16"),
        "gated_norm": ("f32", "int8"),
        "gate_output": ("f32", "int8"),
    },
    "gpu": {
        "add_norm": ("bf16", *FP8),
        "attend": ("bf16",),
        "gated": ("bf16",),
        "act": ("bf16",),
        "gated_product": ("bf16",),
        "reorder": ("bf16",),
        "head_linear": ("bf16",),
        "combine": ("bf16",),
        "gated_norm": ("bf16",),
        "gated_delta": ("bf16",),
        "gate_output": ("bf16",),
        "gated_conv": ("bf16",),
        "clamp": ("bf16",),
    },
}
PRODUCTS = ("linear", "gated_product", "experts")


def form_of(device: Any, activations: str, weights: Iterable[tuple[Any, int]], tokens: int, exact: bool) -> str:
    """The form of the inputs that weights, of a scheme and so many rows each, are all multiplied with, in steps of up to
    `tokens` tokens."""
    schemes, rows = zip(*weights, strict=True)
    if activations == "int8":
        wanted = "int16" if exact else "int8"
        return wanted if all(wanted in scheme.forms for scheme in schemes) else "f32"  # dense weights take f32
    if device.kernels == "gpu":
        # Few tokens: weights are converted exactly, in registers. Many: Hopper's tensor cores take both as fp8, of int4
        # weights if that is asked for. An odd number of rows (a head of 50,257 tokens) is multiplied by others.
        narrow = activations == "fp8"
        if any(count % 2 for count in rows):
            return "bf16"
        if not all(gpu.gemm.wants_fp8(device, scheme, tokens, narrow) for scheme in schemes):
            return "bf16"
        return "fp8" if all(scheme.element == "e4m3" for scheme in schemes) else "fp8_sums"
    return activations


def choose_forms(
    nodes: list[Node], device: Any, activations: str, schemes: dict[str, Any], tokens: int
) -> tuple[list[Node], dict[Value, str]]:
    """The nodes with conversions where a producer cannot write what its products take, and every value's form."""
    emits = EMITS[device.kernels]
    users: dict[Value, list[Node]] = {}
    routed = [node.inputs[0].node for node in nodes if node.op == "route"]
    wide = {node.inputs[0] for node in routed if node}  # such a product reads what no other has rounded
    for node in nodes:
        if node.op in PRODUCTS and node not in routed:
            users.setdefault(node.inputs[0], []).append(node)
    for value, products in users.items():  # dense weights beside quantized ones take f32 alone
        dense = [
            node for node in products if activations == "int8" and "int8" not in schemes[node.weights["weight"]].forms
        ]
        if 0 < len(dense) < len(products):
            wide.add(value)
            routed += dense
            users[value] = [node for node in products if node not in dense]
    # What is reordered or gathered first is taken as it is, and so are the inputs of other products that read it.
    copied = ("reorder", "all_gather", "spread_rows", "wanted")
    copies = [node.inputs[0] for node in nodes if node.op in copied]  # but for a router's logits
    forms: dict[Value, str] = {value: device.inner for value in copies if not value.node or value.node.op != "linear"}
    changed: dict[Node, Value] = {}
    before: dict[Node, Node] = {}
    for value, products in users.items():
        if value in forms:
            continue
        exact = any(node.options.get("exact") for node in products)
        if device.inner == "bf16" and any(node.op == "experts" for node in products):
            forms[value] = "bf16"  # a GPU's products with stacks of experts take no other
            continue
        weights = [(schemes[node.weights["weight"]], node.output.width) for node in products]
        form = form_of(device, activations, weights, tokens, exact)
        able = emits.get(value.node.op if value.node and value not in wide else "", ())
        if form in able:
            forms[value] = form
            continue
        forms[value] = device.inner
        if form == device.inner:
            continue
        forms[converted := Value(value.trace, value.width, per_token=value.per_token)] = form
        before[products[0]] = Node("convert", (value,), converted, {}, {})
        changed |= {node: converted for node in products}
    found = []
    for node in nodes:
        if node in before:
            found.append(before[node])
        if node.op == "add_norm" and node.options["kind"] == "none" and forms.get(node.output) == "f32":
            # The products take the stream as it is, or what it is converted to.
            stream, readers = node.inputs[0], [*users[node.output], *(user for user in routed if user)]
            readers += [user for user in nodes if user.op == "adapt"]
            changed = {user: stream for user in readers if user.inputs[0] is node.output} | changed
            for convert in before.values():
                if convert.inputs[0] is node.output:
                    convert.inputs = (stream,)
            if len(node.inputs) > 1:
                found.append(Node("add_norm", node.inputs, node.inputs[0], {}, node.options))
            continue
        if node in changed:
            producer = node.output.node
            # What is converted just before it does not run beside it.
            options = node.options | {"independent": False} if node in before else node.options
            node = Node(node.op, (changed[node], *node.inputs[1:]), node.output, node.weights, options)
            node.output.node = producer
        found.append(node)
    return found, forms


def row_bytes(form: str, width: int) -> int:
    """Bytes of one row."""
    if form == "routing":
        return 28 * width  # four numbers a pair, and three of a task, of which there are fewer
    if form in ("int8", "int16"):
        return width * (2 if form == "int16" else 1) + width // 32 * 8
    return width + 4 + _sum_bytes(form, width) if form in FP8 else width * ITEM_BYTES[form]


def _sum_bytes(form: str, width: int) -> int:
    """Of a row's sums."""
    return 2 * sum_width(width) if form == "fp8_sums" else 0


def routing_of(
    device: Any, where: tuple[Any, int, int], tokens: Any, moe: Any, scheme: Any, sizes: tuple[int, int]
) -> Routing:
    """A Routing of `tokens` tokens. where: buffer, offset, for how many tokens there is room; scheme: of the experts;
    sizes: the most tokens of the recording, and what kernels of products are chosen for."""
    buffer, offset, room = where
    chosen, experts = moe.experts_per_token, moe.num_experts
    task_pairs = route.TASK_PAIRS[device.kernels]
    if device.kernels == "gpu":
        task_pairs = gpu.experts.task_pairs(device, scheme, sizes[1], moe)
    tasks = route.num_tasks(tokens, sizes[0], chosen, experts, task_pairs)

    def part(dtype: str, number: int, *shape: Any) -> Tensor:
        return Tensor(buffer, shape, dtype, offset + number * 4 * room * chosen)

    pairs = tokens * chosen
    ids, weights = part("i32", 0, tokens, chosen), part("f32", 1, tokens, chosen)
    return Routing(ids, weights, part("i32", 2, pairs), part("i32", 3, pairs), part("i32", 4, tasks, 3), task_pairs)


def tensor_of(form: str, buffer: Any, offset: int, room: int, rows: Any, width: int) -> Any:
    """[rows, width] in `form` at `offset`, where there is room for `room` rows: a Tensor, Activation or
    Fp8Activation."""

    def part(dtype: str, columns: int, start: int) -> Tensor:
        return Tensor(buffer, (rows, columns), dtype, offset + room * start)

    if form in ("int8", "int16"):
        low = part("i8", width, width + width // 4) if form == "int16" else None
        return Activation(
            part("i8", width, 0), part("f32", width // 32, width), part("f32", width // 32, width + width // 8), low
        )
    if form in FP8:
        scale = Tensor(buffer, (rows,), "f32", offset + room * (width + _sum_bytes(form, width)))
        sums = part("f16", sum_width(width), width) if form == "fp8_sums" else None
        return Fp8Activation(part("e4m3", width, 0), scale, sums)
    if form not in ITEM_BYTES:
        raise PlanError(f"no tensor is of form {form!r}")
    return part(form, width, 0)
