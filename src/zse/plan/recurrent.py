"""Recurrent operations on a GPU: what one launch takes together."""

from zse.kernels import gpu
from zse.plan.trace import Node, Trace


def gated_delta(nodes: list[Node], trace: Trace) -> list[Node]:
    """A delta rule and the gated norm of its heads' results are one operation where its kernel for few tokens has a form
    for it."""
    for norm in [node for node in nodes if node.op == "gated_norm"]:
        rule, options = norm.inputs[0].node, norm.options
        if rule is None or rule.op != "delta" or options["gate_first"] or 0 in options.get("columns", {}):
            continue
        v_heads = trace.shape(rule.weights["A"])[0]
        size, used = norm.output.width // v_heads, sum(rule.output in node.inputs for node in nodes)
        if used > 1 or options["groups"] != v_heads or trace.shape(norm.weights["weight"]) != (size,):
            continue
        columns = rule.options.get("columns", {})
        aligned = columns.get(0, (0,))[0] % 4 == 0 and rule.inputs[0].width % 4 == 0
        by_head = trace.shape(rule.weights["dt_bias"]) == (v_heads,)
        if not aligned or not by_head or (rule.options["k_size"], size) not in gpu.delta.SIZES:
            continue
        if 1 in options.get("columns", {}):
            columns = columns | {3: options["columns"][1]}
        more = {"columns": columns, "eps": options["eps"], "activation": options["activation"]}
        weights = rule.weights | {"norm": norm.weights["weight"]}
        inputs = *rule.inputs, norm.inputs[1]
        found = Node("gated_delta", inputs, norm.output, weights, rule.options | more)
        nodes = [found if node is norm else node for node in nodes if node is not rule]
    return nodes
