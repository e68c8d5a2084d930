"""A launch for each kind of node (see zse.plan.rules), by the names of operations."""

from collections.abc import Callable

from zse.kernels import logits
from zse.kernels.activation import gated
from zse.kernels.attention import attention
from zse.kernels.embed import embed
from zse.kernels.gather import gather_rows
from zse.kernels.matmul import matmul
from zse.kernels.qkv_post import qkv_post
from zse.kernels.quantize import quantize
from zse.plan.trace import Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.plan.record import Run


def _embed(run: "Run", node: Node) -> None:
    embed(run.recorder, run.of(run.step.token_ids), run.weight(node), run.t[node.output], node.options["scale"])


def _linear(run: "Run", node: Node) -> None:
    adds = node.options.get("accumulate", False)
    out = run.t[node.inputs[1] if adds else node.output]
    matmul(
        run.recorder,
        run.t[node.inputs[0]],
        run.weight(node),
        out,
        bias=run.vector(node, "bias"),
        independent=node.options.get("independent", False),
        max_tokens=run.form_tokens,
        accumulate=adds,
    )


def _gated_product(run: "Run", node: Node) -> None:
    a, out = run.t[node.inputs[0]], run.t[node.output]
    matmul(run.recorder, a, run.weight(node), out, gate=node.options["activation"], max_tokens=run.form_tokens)


def _gated(run: "Run", node: Node) -> None:
    inputs = tuple(run.t[value] for value in node.inputs)
    gated(run.recorder, inputs if len(inputs) > 1 else inputs[0], run.t[node.output], node.options["activation"])


def _add_norm(run: "Run", node: Node) -> None:
    x, delta = run.t[node.inputs[0]], run.t[node.inputs[1]] if len(node.inputs) > 1 else None
    prefix = run.before if node.options.get("carried") else run.prefix
    out = None if node.output.is_stream else run.t[node.output]
    run.add(x, delta, prefix, node.options, run.vector(node, "norm"), out)


def _heads(run: "Run", node: Node) -> None:
    kv, layer = run.planner.kv, run.layer
    sources = tuple(run.t[value] for value in node.inputs)
    qkv_post(
        run.recorder,
        sources if len(sources) > 1 else sources[0],
        run.vector(node, "q_norm"),
        run.vector(node, "k_norm"),
        run.tables.get(node.options["rope"]),
        run.t[node.output],
        kv.keys[layer],
        kv.values[layer],
        run.page_tables[kv.group_of[layer]],
        run.token_row,
        run.positions,
        node.options.get("eps", run.planner.config.norm_eps),
        run.tables.get(node.options["q_rope"]),
    )


def _attend(run: "Run", node: Node) -> None:
    kv, layer, options = run.planner.kv, run.layer, node.options
    work = {"partial": run.t[node]} if node in run.t else {}
    attention(
        run.recorder,
        run.t[node.inputs[0]],
        kv.keys[layer],
        kv.values[layer],
        run.page_tables[kv.group_of[layer]],
        run.token_row,
        run.positions,
        run.t[node.output],
        options["scale"],
        options["window"],
        options["softcap"],
        **work,
        **run.sharing,
    )


def _wanted(run: "Run", node: Node) -> None:
    gather_rows(run.recorder, run.t[node.inputs[0]], run.wanted, run.t[node.output])


def _scale_logits(run: "Run", node: Node) -> None:
    options = node.options
    logits.scale_logits(run.recorder, run.t[node.inputs[0]], options.get("factor", 1.0), options.get("cap", 0.0))


def _convert(run: "Run", node: Node) -> None:
    quantize(run.recorder, run.t[node.inputs[0]], run.t[node.output])


LAUNCHES: dict[str, "Callable[[Run, Node], None]"] = {
    "embed": _embed,
    "linear": _linear,
    "gated_product": _gated_product,
    "gated": _gated,
    "add_norm": _add_norm,
    "heads": _heads,
    "attend": _attend,
    "wanted": _wanted,
    "scale_logits": _scale_logits,
    "convert": _convert,
}
