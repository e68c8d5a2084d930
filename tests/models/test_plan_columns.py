"""Recurrent operations read their parts of a product where they lie: what rules make of a forward, and what they refuse."""

import pytest

from zse.models.hybrid import Hybrid
from zse.plan.rules import fuse
from zse.plan.trace import PlanError, Trace, Value
from zse.runtime.null import NullDevice, NullGPU

HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 32, 64
DEVICES = {"cpu": NullDevice(2), "gpu": NullGPU()}
VECTORS = {"A": (4,), "D": (4,), "dt_bias": (4,), "conv": (192, 4), "norm": (128,), "short": (64, 3)}


class Config:
    norm_eps, recurrent, attn_softcap, query_scale = 1e-6, None, 0.0, 1.0

    @staticmethod
    def window(layer):
        return 0

    @staticmethod
    def rope_of(layer):
        return None


def nodes_of(shapes, run, family, joined=()):
    """The launchable nodes of what `run` does with a Hybrid and a stream. joined: names of weights that lie joined."""
    forward = Hybrid(Config())
    trace = forward.trace = Trace(VECTORS | shapes | {name: (1, HIDDEN) for name in joined})
    start = Value(trace, HIDDEN, True)
    return fuse(trace, start, run(forward, start), None, DEVICES[family], {}).nodes


def found(nodes, op):
    (node,) = [node for node in nodes if node.op == op]
    return node


@pytest.mark.parametrize("family", DEVICES)
def test_parts_of_one_product(family):
    """Mamba-2: z, [x, B, C] and dt are columns of one product."""

    def layer(forward, x):
        h = forward.norm(x, "norm")
        z, xbc, dt = forward.parts(forward.linear(h, "in"), 128, 192, 4)
        y = forward.scan(forward.conv(xbc, "conv", 0), dt, 0, heads=4, groups=1, state_size=32)
        return x + forward.linear(forward.gated_norm(y, z, "norm", 0, gate_first=True), "out")

    nodes = nodes_of({"in": (324, HIDDEN), "out": (HIDDEN, 128)}, layer, family)
    conv, scan, norm = (found(nodes, op) for op in ("conv", "scan", "gated_norm"))
    product = nodes[[node.weights.get("weight") for node in nodes].index("in")].output
    assert (conv.inputs, conv.options["columns"]) == ((product,), {0: (128, 192)})
    assert (scan.inputs, scan.options["columns"]) == ((conv.output, product), {1: (320, 4)})
    assert (norm.inputs, norm.options["columns"]) == ((scan.output, product), {1: (0, 128)})
    assert norm.inputs[0].node is scan


@pytest.mark.parametrize("joined", [(), ("qkv",)])
@pytest.mark.parametrize("family", DEVICES)
def test_queries_with_gates(family, joined):
    """Qwen3-Next: the launch of heads reads queries, gate_output gates, of one product, joined with others or not."""
    width = HEADS * SIZE
    shapes = {"q": (2 * width, HIDDEN), "k": (64, HIDDEN), "v": (64, HIDDEN), "o": (HIDDEN, width)}

    def layer(forward, x):
        h = forward.norm(x, "norm")
        q, gate = forward.head_halves(forward.linear(h, "q", exact=True), HEADS)
        k, v = (forward.linear(h, name, exact=True) for name in "kv")
        attended = forward.attention(forward.rotate(q, 0, "q"), forward.rotate(k, 0, "k"), v, 0)
        return x + forward.linear(forward.gate_output(attended, gate, 0), "o")

    nodes = nodes_of(shapes, layer, family, joined)
    heads, gate = found(nodes, "heads"), found(nodes, "gate_output")
    assert heads.options["gated"] and len(heads.inputs) == (1 if joined else 3)
    assert gate.inputs == (found(nodes, "attend").output, heads.inputs[0]) and gate.options["heads"] == HEADS
    assert gate.options.get("columns") == ({1: (0, 2 * width)} if joined else None)
    assert not [node for node in nodes if node.op == "head_half"]


@pytest.mark.parametrize("family", DEVICES)
def test_what_no_launch_reads(family):
    def product_of_a_part(forward, x):
        part, _ = forward.parts(forward.linear(forward.norm(x, "norm"), "in"), 64, 260)
        return x + forward.linear(part, "small")

    def product_of_a_half(forward, x):
        _, gate = forward.head_halves(forward.linear(forward.norm(x, "norm"), "in"), 2)
        return x + forward.linear(gate, "half")

    def gated_by_queries(forward, x):
        h = forward.linear(forward.norm(x, "norm"), "in")
        q, _ = forward.head_halves(h, 2)
        return x + forward.linear(forward.gate_output(forward.linear(h, "wide"), q, 0), "half")

    shapes = {"in": (324, HIDDEN), "small": (HIDDEN, 64), "half": (HIDDEN, 162), "wide": (162, 324)}
    for layer, message in (
        (product_of_a_part, "reads columns of a product here"),
        (product_of_a_half, "reads columns of a product here"),
        (gated_by_queries, "a half of each head is read by attention and gate_output alone"),
    ):
        with pytest.raises(PlanError, match=message):
            nodes_of(shapes, layer, family)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda f, x: f.parts(x, 32, 31), r"32 \+ 31 columns of 64"),
        (lambda f, x: f.gated_conv(x, "short", 0), "64 columns are no three parts"),
        (lambda f, x: f.conv(x, "conv", 0), "for 64 channels"),
        (lambda f, x: f.delta(x, x, x, 0, k_heads=1, v_heads=2, k_size=32), "64 columns for 1 heads of 32"),
        (lambda f, x: f.scan(x, x, 0, heads=4, groups=1, state_size=16), "64 and 64 columns for 4 heads"),
        (lambda f, x: f.gated_norm(x, x, "norm", 0, groups=3), "64 and 64 columns, 3 groups"),
        (lambda f, x: f.head_halves(x, 5), "no two halves of 5 heads"),
        (lambda f, x: f.conv(x, "missing", 0), "uses 'missing', which this model does not have"),
    ],
)
def test_shapes_that_do_not_fit(call, message):
    with pytest.raises((ValueError, PlanError), match=message):
        nodes_of({}, lambda forward, x: call(forward, x), "cpu")
