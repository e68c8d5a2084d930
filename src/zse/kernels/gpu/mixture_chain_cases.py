"""Cases of what stands between two attentions with a mixture of experts as one launch."""

from functools import partial
from typing import Any

from zse.kernels import activation
from zse.kernels.chain import CHUNK
from zse.kernels.gpu.chain_cases import merged, normed, random_records, weight_near_one, wide
from zse.kernels.gpu.mixture_parts import REPLICAS
from zse.kernels.gpu.one_token_cases import empty_routing
from zse.kernels.host import HostWeight
from zse.kernels.mixture_chain import GATES, MixtureSignals
from zse.kernels.op import Case, Cases, HostArray, OutputSpec, Tolerance
from zse.kernels.route import ROUTE, SELECTED
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.scheme import AffineScheme, DenseScheme
from zse.tensor import GATINGS

# Columns of the stream, of attention, of an expert, rows of q, k and v; experts and those that are chosen, which six blocks
# of a small device have room for.
SHAPES = (
    (512, 768, 128, 144, 4, 2),
    (256, 512, 256, 96, 4, 1),
    (768, 256, 128, 32, 4, 2),
    (256, 1024, 256, 80, 4, 1),
    (2048, 256, 256, 16, 4, 1),
)


def layer(x, attended, weights, router, norms, chosen, bias=None, select=None, norm_eps=0.0, gate="silu", **options):
    """What is computed one after another, with the kernel's rounding to bf16, float64: (name → value)."""
    o, gate_up, down, qkv = (weight.dequantize().astype(np.float64) for weight in weights)
    (weight, router_bias), (experts, hidden) = router, router[0].shape
    found: dict[str, Any] = {"mid": x.astype(np.float64) + attended.wide() @ o.T}
    found["first"] = normed(found["mid"], norms[0], norm_eps)
    logits = found["first"] @ weight.dequantize().astype(np.float64).T + (0 if router_bias is None else router_bias)
    routing = ROUTE.reference(logits, empty_routing(chosen, experts), select, **options)
    ids, found["factors"] = routing["routing.ids"][0], routing["routing.weights"][0]
    found["rows"] = np.einsum("k,enk->en", found["first"][0], gate_up.reshape(experts, -1, hidden)[ids])
    made = activation.GATED.reference(found["rows"], gate)["out"] * found["factors"][:, None]
    found["act"] = wide(pack.f32_to_bf16(made.astype(np.float32)))
    found["x"] = found["mid"] + np.einsum("ek,enk->n", found["act"], down.reshape(experts, hidden, -1)[ids])
    found["second"] = normed(found["x"], norms[1], norm_eps)
    found["out"] = found["second"] @ qkv.T + (0 if bias is None else bias)
    return found


def reference(x, attended, weights, router, norms, signals=None, out=None, records=None, chosen=0, **options):
    attended = attended if records is None else merged(records)
    found = layer(x, attended, weights, router, norms, chosen, **options)
    (experts, hidden), inner = router[0].shape, weights[2].shape[1]
    sizes = {"mid": hidden, "logit": experts, "act": chosen * inner // 2, "stale": hidden}
    zeros = {name: np.zeros((REPLICAS, length)) for name, length in sizes.items()}
    zeros["after"] = np.ones((REPLICAS, hidden))
    return {"x": found["x"], "out": found["out"]} | {f"signals.{name}": value for name, value in zeros.items()}


def _all_said(got, wanted) -> str:
    return "" if got.view(np.uint32).all() else "a sum was not said"


def cases(rng) -> Cases:
    """Both forms of weights and all shapes, with biases, gatings and activations among them."""
    return Cases(partial(_case, rng, number, shape) for number, shape in enumerate(SHAPES))


def _router(rng, first, experts: int) -> tuple[HostWeight, Any]:
    """(weight, bias) whose logits are far enough from each other that rounding swaps none. first: the normed row."""
    logits = rng.permutation(np.linspace(-2, 2, experts))
    bias = (rng.standard_normal(experts) * 0.1).astype(np.float32) if rng.integers(2) else None
    spread = rng.standard_normal((experts, first.shape[1])) * 0.01
    spread -= np.outer(spread @ first[0], first[0]) / (first**2).sum()
    plane = np.outer(logits - (0 if bias is None else bias), first[0]) / (first**2).sum() + spread
    plane = pack.f32_to_bf16(plane.astype(np.float32))
    return HostWeight(plane.shape, DenseScheme("bf16"), {"w": plane}, "rows"), bias


def _case(rng, number: int, shape) -> Case:
    hidden, attended, inner, qkv, experts, chosen = shape
    scheme, gate, gating = AffineScheme(4, 128, bool(number % 2)), GATES[int(rng.integers(2))], GATINGS[number % 4]
    sizes = ((hidden, attended), (experts * 2 * inner, hidden), (experts * hidden, inner), (qkv, hidden))
    weights = tuple(weight_near_one(rng, *size, scheme) for size in sizes)
    x = (rng.standard_normal((1, hidden)) * 2).astype(np.float32)
    norms = tuple((1 + rng.standard_normal(hidden) / 4).astype(np.float32) for _ in range(2))
    a = HostArray("bf16", pack.f32_to_bf16(rng.standard_normal((1, attended)).astype(np.float32)))
    records = None
    if number % 2:
        records = random_records(rng, attended // CHUNK, int(rng.integers(2, 11)))
        a = merged(records)
    mid = x.astype(np.float64) + a.wide() @ weights[0].dequantize().astype(np.float64).T
    router = _router(rng, normed(mid, norms[0], 1e-6), experts)
    inputs: dict[str, Any] = dict(attended=a, weights=weights, router=router, norms=norms)
    if rng.integers(2):
        inputs["bias"] = rng.standard_normal(qkv).astype(np.float32)
    if gating in SELECTED and rng.integers(2):
        inputs["select"] = (rng.standard_normal(experts) * 0.3).astype(np.float32)
    options = dict(chosen=chosen, norm_eps=1e-6, gate=gate, gating=gating, normalize=bool(rng.integers(2)))
    options |= dict(scale=1.5, eps=1e-20)
    found = layer(x, **inputs, **options)
    if records is not None:  # what stands where the result would is not read
        inputs |= dict(attended=HostArray("bf16", np.full_like(a.array, 0x7FC0)), records=records)
    exact, (near, out) = Tolerance(0, 0, "zeros"), _tolerances(found, weights, a, chosen)
    before = {
        name: np.zeros((REPLICAS, length), np.float32)
        for name, length in (("mid", hidden), ("logit", experts), ("after", hidden))
    }
    before["stale"] = rng.standard_normal((REPLICAS, hidden)).astype(np.float32)
    outputs = {
        f"signals.{name}": OutputSpec(
            value.shape, "float32", exact, inout=value, error=_all_said if name == "after" else None
        )
        for name, value in before.items()
    }
    words = np.zeros((REPLICAS, chosen * inner // 2), np.uint32)
    outputs["signals.act"] = OutputSpec(words.shape, "uint32", exact, inout=words)
    outputs |= {"x": OutputSpec(x.shape, "float32", near, inout=x), "out": OutputSpec((1, qkv), "float32", out)}
    name = f"{scheme} {hidden} {attended} {inner} {qkv}, {chosen} of {experts} {gating} {gate}"
    return Case(name, inputs | {"signals": MixtureSignals(*([None] * 5))}, outputs, options)


def _tolerances(found, weights, attended, chosen: int) -> tuple[Tolerance, Tolerance]:
    """Of x and of out, as those of zse.kernels.gpu.chain_cases; of the experts' products the largest of any expert."""
    tops = [float(np.abs(value).max()) for value in (attended.wide(), found["first"], found["act"], found["second"])]
    sizes = [float(np.sqrt((weight.dequantize() ** 2).sum(axis=1).max())) for weight in weights]
    sizes[2] *= chosen**0.5
    o, rows, down, qkv = (6 * 2**-16 * top * size for top, size in zip(tops, sizes, strict=True))
    rows += o / float(np.sqrt((found["mid"] ** 2).mean())) * sizes[1]
    made = 2 * rows * float(np.sqrt((found["rows"] ** 2).mean())) * sizes[2] * float(np.abs(found["factors"]).max())
    x = o + down + made + 6 * 2**-8 * tops[2] / (weights[2].shape[1] * chosen) ** 0.5 * sizes[2]
    out = qkv + x / float(np.sqrt((found["x"] ** 2).mean())) * sizes[3]
    cause = "activations of 16 bits, and a rounding to bf16"
    return Tolerance(x, 1e-4, cause), Tolerance(out, 1e-4, cause)
