"""Rules for operations that read columns of what a product gives: of joined weights, of one whose forward names its
parts (Trace.split), of queries and gates that stand head by head."""

from zse.plan.trace import READERS, Node, PlanError, Trace, Value


def place_of(value: Value, trace: Trace) -> tuple[Value, int]:
    """(the value in memory that these columns are part of, the first of them)."""
    for whole, parts in trace.split.items():
        if value in parts:
            return whole, sum(part.width for part in parts[: parts.index(value)])
    return value, 0


def read_columns(nodes: list[Node], trace: Trace) -> list[Node]:
    """Recurrent operations read their parts where the whole lies: options["columns"] says by an input's number which
    column is its first and how many there are, options["heads"] of gate_output that a gate stands behind each head's
    queries."""
    halves = {node.output: node for node in nodes if node.op == "head_half"}
    parts = {part for found in trace.split.values() for part in found}
    found = []
    for node in nodes:
        if node.op == "head_half":
            continue
        if node.op in READERS:
            inputs, columns, options = [], {}, dict(node.options)
            for number, value in enumerate(node.inputs):
                half = halves.get(value)
                if half is not None:
                    if node.op != "gate_output" or number != 1 or half.options["half"] != 1:
                        raise PlanError(f"{node}: a half of each head is read by attention and gate_output alone")
                    options["heads"], value = half.options["heads"], half.inputs[0]
                whole, first = place_of(value, trace)
                if whole is not value:
                    columns[number] = first, value.width
                inputs.append(whole)
            if columns:
                options["columns"] = columns
            node = Node(node.op, tuple(inputs), node.output, node.weights, options)
        else:
            for value in node.inputs:
                if value in halves or (value in parts and value.node is None):
                    raise PlanError(f"{node}: no launch of this device reads columns of a product here")
        found.append(node)
    return found
