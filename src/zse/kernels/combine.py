"""What the experts of a token give, weighted and added, with what a shared expert gives beside them."""

from zse import kernel as zl
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.kernels.route import sorted_pairs
from zse.lazy import numpy as np
from zse.runtime.args import Args

CHUNKS = {"cpu": 1024, "gpu": 256}  # columns of one block


class ExpertSums(zl.Record):
    """y f32 [pairs, width], sorted by expert; weights f32, place i32 [tokens, chosen]; shared f32 [tokens, width] and
    gate f32 [tokens, 1], which has_shared and has_gate say there are."""

    y: zl.Ptr[zl.f32, "const"]
    weights: zl.Ptr[zl.f32, "const"]
    place: zl.Ptr[zl.i32, "const"]
    shared: zl.Ptr[zl.f32, "const"]
    gate: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    width: zl.index
    chosen: zl.index
    has_shared: zl.index
    has_gate: zl.index


@zl.inline
def weighted(p, token, k, lanes, factor):
    """`lanes` columns from k on of a token's sum, in the order of its experts. factor: of the shared expert."""
    total = zl.f32.x(lanes)(0)
    for j in range(token * p.chosen, (token + 1) * p.chosen):
        row = p.y + zl.i64(p.place[j]) * p.width
        total = zl.fma(zl.load(row + k, lanes), zl.f32.x(lanes)(p.weights[j]), total)
    if p.has_shared != 0:
        total = zl.fma(zl.load(p.shared + token * p.width + k, lanes), zl.f32.x(lanes)(factor), total)
    return total


@zl.kernel
def combine_pairs(p: ExpertSums):
    """Grid (chunks of columns, tokens)."""
    L = zl.target.lanes
    token = zl.block_index(1)
    first = zl.block_index(0) * CHUNKS["cpu"]
    last = min(first + CHUNKS["cpu"], p.width)
    whole = first + (last - first) // L * L
    factor = zl.f32(1)
    if p.has_gate != 0:
        factor = 1.0 / (1.0 + zl.exp(p.gate[token] * -1.0))
    out = p.out + token * p.width
    for k in range(first, whole, L):
        zl.store(out + k, weighted(p, token, k, L, factor))
    for k in range(whole, last):
        zl.store(out + k, weighted(p, token, k, 1, factor))


def combine(recorder, y, routing, out, shared=None, gate=None) -> None:
    """out f32 [M, H] = each token's sum of weight * y over its experts, y f32 [P, H] sorted by expert, + shared f32 [M,
    H] times sigmoid of gate f32 [M, 1], or times 1. On a GPU out may be bf16."""
    (tokens, width), (_, chosen) = out.shape, routing.ids.shape
    check("combine out", out, ("f32", "bf16") if recorder.device.kernels == "gpu" else "f32", tokens, width)
    check("combine y", y, "f32", routing.place.shape[0], width)
    check("combine weights", routing.weights, "f32", tokens, chosen)
    check("combine place", routing.place, "i32", tokens * chosen)
    require(gate is None or shared is not None, "combine: a gate without what it gates")
    if shared is not None:
        check("combine shared", shared, "f32", tokens, width)
    if gate is not None:
        check("combine gate", gate, "f32", tokens, 1)
    args = Args(
        y=y,
        weights=routing.weights,
        place=routing.place,
        shared=shared,
        gate=gate,
        out=out,
        width=width,
        chosen=chosen,
        has_shared=int(shared is not None),
        has_gate=int(gate is not None),
    )
    symbol = "combine_pairs_bf16" if out.dtype == "bf16" else "combine_pairs"
    recorder.launch(symbol, args, (-(-width // CHUNKS[recorder.device.kernels]), tokens))


def _reference(y, routing, shared=None, gate=None):
    rows = np.asarray(y, np.float64)[routing.place].reshape(*routing.weights.shape, -1)
    total = (rows * routing.weights.astype(np.float64)[:, :, None]).sum(axis=1)
    if shared is not None:
        total = total + shared.astype(np.float64) * (1 if gate is None else 1 / (1 + np.exp(-gate.astype(np.float64))))
    return {"out": total}


def _cases(rng, family="cpu"):
    near = Tolerance(1e-5, 1e-5, "f32 sums of up to 9 products")
    for tokens, chosen, experts, width, extras in (
        (1, 8, 128, 2048, 0),
        (5, 3, 7, 1064, 1),
        (4, 2, 4, 40, 2),
        (3, 1, 2, 7, 2),
    ):
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
        routing = sorted_pairs(ids, experts)._replace(weights=rng.random((tokens, chosen)).astype(np.float32))
        inputs = {"y": rng.standard_normal((tokens * chosen, width)).astype(np.float32), "routing": routing}
        if extras:
            inputs["shared"] = rng.standard_normal((tokens, width)).astype(np.float32)
        if extras > 1:
            inputs["gate"] = (rng.standard_normal((tokens, 1)) * 3).astype(np.float32)
        output = OutputSpec((tokens, width), "float32", near)
        name = f"{chosen} of {experts}, {tokens}x{width}, {extras} extras"
        yield Case(name, inputs, {"out": output})
        if family == "gpu":
            rounded = Tolerance(1e-5, 2**-8, "the result is rounded to bf16")
            yield Case(f"{name}, bf16", inputs, {"out": OutputSpec((tokens, width), "bf16", rounded)})


def _cost(case: Case) -> Cost:
    (pairs, width), (tokens, _) = case.inputs["y"].shape, case.outputs["out"].shape
    return Cost((pairs + 2 * tokens) * width * 4, 2 * pairs * width)


COMBINE = Op(
    "combine",
    lambda target: [zl.Variant("combine_pairs", combine_pairs)],
    combine,
    _reference,
    _cases,
    _cost,
    later("gpu.route", "combine_variants"),
)
