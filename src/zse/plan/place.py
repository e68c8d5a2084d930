"""Where values lie in a piece of memory: two share a place where one is done with before the other begins."""

from math import prod
from typing import Any, NamedTuple

from zse.dtypes import ITEM_BYTES
from zse.kernels import gpu, heads_attention
from zse.plan import chains
from zse.plan.forms import PRODUCTS, choose_forms, routing_of, row_bytes, tensor_of
from zse.plan.rules import Part
from zse.plan.trace import Node, PlanError, Value
from zse.tensor import SHORT_RUN, Tensor

SPLIT = ("attend", "attend_latent")  # may leave parts of their sums for one another
CHUNKED = ("delta", "gated_delta", "scan")  # take prompts by chunks on a GPU
ALIGN = 256  # bytes; tensor maps and 16-byte copies want less


class Life(NamedTuple):
    """nbytes are used from launch number `first` to `last`, both included."""

    nbytes: int
    first: int
    last: int


def place(lives: list[Life]) -> tuple[list[int], int]:
    """(the offset of each, bytes of all). The largest are placed first, each as low as those that live beside it
    allow."""
    offsets = [0] * len(lives)
    placed: list[tuple[int, int, Life]] = []  # (offset, end, life), by offset
    total = 0
    for index in sorted(range(len(lives)), key=lambda index: (-lives[index].nbytes, index)):
        life, at = lives[index], 0
        for offset, end, other in placed:
            if other.first <= life.last and life.first <= other.last:
                if at + life.nbytes <= offset:
                    break
                at = max(at, end)
        offsets[index], end = at, aligned(at + life.nbytes)
        placed.append((at, end, life))
        placed.sort(key=lambda one: one[0])
        total = max(total, end)
    return offsets, total


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Placed(NamedTuple):
    """A part for steps of up to `room` tokens (or rows of logits): its launches, each value's (form, offset), the
    offsets of what launches need beside values, bytes of all."""

    nodes: list[Node]
    places: dict[Value, tuple[str, int]]
    forms: dict[Value, str]
    work: dict[Node, int]
    nbytes: int
    room: int


def place_part(part: Part, device: Any, activations: str, room: int, work_bytes: int) -> Placed:
    """Forms and places for steps of up to `room` tokens. activations: what products take; work_bytes: what attention's
    splits leave for each other, 0 where it is not split."""
    nodes, forms = choose_forms(part.nodes, device, activations, part.schemes, room)
    elsewhere = (part.carried, part.end, part.pending and part.pending.delta, *part.rows)
    lives: dict[Value, list[int]] = {}
    sizes: dict[Value, int] = {}
    work: dict[Node, Value] = {}
    at, written = 0, set[Value]()
    kinds = dict.fromkeys(("heads", "attend", "add_norm", "gated", "act"), device.inner) | {"route": "routing"}
    for node in nodes:
        if not node.options.get("independent", False):  # those that may overlap are one moment
            at, written = at + 1, set()
        elif not written.isdisjoint(node.inputs[:1] if node.op == "adapt" else node.inputs):  # its first launch, of two
            raise PlanError(f"{node.op} {node.weights.get('weight', '')} reads what is written beside it")
        written.add(node.output)
        for value in (*node.inputs, *_read_by_attend(node, device, room), node.output):
            if value.is_stream or value in elsewhere:
                continue
            if value not in lives:
                kind = kinds.get(node.op) if value is node.output else None
                forms.setdefault(value, kind or "f32")
                lives[value], sizes[value] = (
                    [at, at],
                    room * (value.per_token or 1) * row_bytes(forms[value], value.width),
                )
            lives[value][1] = at
        # Who reads a sum of ranks may read the parts (zse.plan.ranks.RankSums).
        for value in node.inputs if device.kernels == "gpu" else ():
            made = value.node
            if made is not None and made.op == "all_reduce" and made.inputs[0] in lives:
                lives[made.inputs[0]][1] = at
        if node.op in SPLIT and work_bytes:
            work[node] = value = Value(node.output.trace, 0)
            lives[value], sizes[value] = [at, at], work_bytes
        elif (shape := work_shape(node, device, room)) is not None:
            work[node] = value = Value(node.output.trace, 0)
            lives[value], sizes[value] = [at, at], 4 * prod(shape)
    offsets, total = place([Life(sizes[value], *life) for value, life in lives.items()])
    at_of = dict(zip(lives, offsets, strict=True))
    places = {value: (form, at_of[value]) for value, form in forms.items() if value in at_of}
    return Placed(nodes, places, forms, {node: at_of[value] for node, value in work.items()}, total, room)


def _read_by_attend(node: Node, device: Any, room: int) -> tuple[Value, ...]:
    """What attention perhaps makes its heads of (zse.kernels.heads_attention)."""
    heads = node.options.get("heads") if node.op == "attend" else None
    if heads is None or device.kernels != "gpu" or room > heads_attention.FEW_TOKENS:
        return ()
    return heads.inputs


def reserve(planner: Any) -> None:
    """Have the device allocate what the kernels of products work in, of the largest steps."""
    found = {part: f"layers.{layer}." for layer, part in enumerate(planner._adapted_layers)}
    found |= {part: f"layers.{layer}." for layer, part in enumerate(planner._layers)}
    found |= dict.fromkeys(planner._last or (), f"layers.{planner.config.num_layers - 1}.")
    rooms = [(part, prefix, planner.max_tokens) for part, prefix in found.items()]
    if None in planner._ends:
        rooms.append((planner._ends[None], "", planner.max_lines))
    for part, prefix, room in rooms:
        placed = planner._place(part, room)
        for node in placed.nodes:
            if node.op not in PRODUCTS:
                continue
            weight = planner.model.weights[prefix + node.weights["weight"]]
            if node.op == "experts":
                gpu.experts.reserve(planner.device, weight, room, planner.config.moe, gather=node.options["gather"])
            else:
                form = placed.forms.get(node.inputs[0], "f32")
                gpu.gemm_launch.reserve(planner.device, weight, form, node.op == "gated_product", room)
    if planner.device.arch == 90:
        chains.reserve(planner)


def tensors_at(run: Any, placed: Placed, rows: Any, prefix: str) -> "dict[Value | Node, Any]":
    """The tensors of a part's own values, and of what its launches work in, in a recording (zse.plan.record.Run). rows: of values that are not
    the stream; prefix: of the names of a layer's weights."""
    planner, scratch, first = run.planner, run.planner.scratch, run.planner._scratch_at
    tensors: dict[Value | Node, Any] = {}
    others = planner.divided.rows_of(run, placed.nodes) if planner.divided else {}
    for value, (form, offset) in placed.places.items():
        count = others.get(value, rows)
        if form == "routing":
            room, sizes = (scratch, first + offset, placed.room), (run.max_tokens, run.form_tokens)
            experts = next(node for node in placed.nodes if node.op == "experts").weights["weight"]
            scheme = planner.model.weights[prefix + experts].scheme
            tensors[value] = routing_of(planner.device, room, count, planner.config.moe, scheme, sizes)
        else:
            many = value.per_token or 1
            where = scratch, first + offset, placed.room * many, count * many if many > 1 else count
            tensors[value] = tensor_of(form, *where, value.width)
    for node, offset in placed.work.items():
        head_dim = node.output.width // planner.config.num_heads
        shape = work_shape(node, planner.device, placed.room) or planner._partial_shape(placed.room, head_dim)
        tensors[node] = Tensor(scratch, shape, "f32", first + offset)
    return tensors


def work_shape(node: Node, device: Any, room: int) -> tuple[int, int] | None:
    """f32 numbers that the launches of an operation leave for one another in steps of up to `room` tokens; None: none."""
    if node.op not in CHUNKED or device.kernels != "gpu" or device.simt or room <= SHORT_RUN:
        return None
    options = node.options
    if node.op == "scan":
        heads, keys = options["heads"], (options["groups"], options["state_size"])
        sizes = "scan", options["state_size"], node.output.width // heads
    else:
        heads, keys = options["v_heads"], (options["k_heads"], options["k_size"])
        sizes = "delta", options["k_size"], node.output.width // heads
    if not gpu.state_chunks.takes(*sizes):
        return None
    own = node.output.width if node.op == "gated_delta" else 0  # the results before their norm
    return room, gpu.state_chunks.work_width(sizes[0], *keys, heads) + own


def new_tensor(device: Any, label: str, dtype: str, *shape: int) -> Tensor:
    """Device memory of its own."""
    return Tensor(device.alloc(prod(shape) * ITEM_BYTES[dtype], label=label), shape, dtype)
