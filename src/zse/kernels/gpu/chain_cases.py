"""Cases of what stands between two attentions as one launch."""

from functools import partial

from zse.kernels import activation, host
from zse.kernels.chain import CHUNK, GATES, Records, Signals
from zse.kernels.gpu.attention_plan import HEADER
from zse.kernels.gpu.chain_parts import SPLIT
from zse.kernels.op import Case, Cases, HostArray, OutputSpec, Tolerance
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.scheme import AffineScheme

# Columns of the stream, of attention, of the feed-forward block (of which each part has 8 chunks of 128 at least), rows of
# q, k and v: whole stages of the ring and not, more units than blocks of a small device and fewer.
SHAPES = ((1024, 1280, 4096, 1536), (1152, 1024, 4608, 96), (1536, 1152, 5248, 1056), (1024, 1024, 5248, 32))
NAMES = ("o", "gate_up", "down", "qkv")


def wide(bits):
    return pack.bf16_to_f32(bits).astype(np.float64)


def normed(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight


def layer(x, attended, weights, norms, bias=None, eps=0.0, gate="silu"):
    """What is computed one after another, with the kernel's rounding to bf16, float64: (name → value)."""
    o, gate_up, down, qkv = (weight.dequantize().astype(np.float64) for weight in weights)
    found = {"mid": x.astype(np.float64) + attended.wide() @ o.T}
    found["first"] = normed(found["mid"], norms[0], eps)
    found["rows"] = found["first"] @ gate_up.T
    made = activation.GATED.reference(found["rows"], gate)["out"]
    found["act"] = wide(pack.f32_to_bf16(made.astype(np.float32)))
    found["x"] = found["mid"] + found["act"] @ down.T
    found["second"] = normed(found["x"], norms[1], eps)
    found["out"] = found["second"] @ qkv.T + (0 if bias is None else bias)
    return found


def merged(records: Records) -> HostArray:
    """What attention's tasks left, as its result."""
    sums, totals = (each.astype(np.float64) for each in records[:2])
    factors = np.exp2(totals[..., 0] - totals[..., 0].max(axis=0))
    whole = (sums * factors[..., None]).sum(axis=0) / (totals[..., 1] * factors).sum(axis=0)[:, None]
    return HostArray("bf16", pack.f32_to_bf16(whole.reshape(1, -1).astype(np.float32)))


def random_records(rng, heads: int, tasks: int) -> Records:
    sums = rng.standard_normal((tasks, heads, CHUNK)).astype(np.float32)
    totals = np.stack([rng.standard_normal((tasks, heads)) * 3, 1 + rng.random((tasks, heads))], axis=2)
    plan = np.zeros(HEADER + 8, np.int32)
    plan[HEADER + 7] = tasks | 1 << 24
    return Records(sums, totals.astype(np.float32), plan)


def reference(x, attended, weights, norms, signals=None, bias=None, records=None, eps=0.0, gate="silu", out=None):
    attended = attended if records is None else merged(records)
    found, (hidden, inner) = layer(x, attended, weights, norms, bias, eps, gate), (x.shape[1], weights[2].shape[1])
    zeros = {"signals.mid": np.zeros(hidden), "signals.act": np.zeros(inner // 2, np.uint32)}
    zeros |= {"signals.stale": np.zeros((SPLIT, hidden)), "signals.after": np.ones((SPLIT, hidden))}
    return {"x": found["x"], "out": found["out"]} | zeros


def _all_said(got, wanted) -> str:
    return "" if got.view(np.uint32).all() else "a sum was not said"


def cases(rng) -> Cases:
    """Both forms of weights and all shapes, with biases and activations among them."""
    return Cases(partial(_case, rng, number, shape) for number, shape in enumerate(SHAPES))


def weight_near_one(rng, rows: int, width: int, scheme):
    """One whose products with normal numbers are near 1."""
    weight = host.random_weight(rng, rows, width, scheme, scheme.in_memory["gpu"])
    factor = 1 / (float(weight.dequantize().std()) * width**0.5)
    for name in ("scale", "offset"):
        if name in weight.planes:
            weight.planes[name] = (weight.planes[name].astype(np.float32) * factor).astype(np.float16)
    return weight


def _case(rng, number: int, shape) -> Case:
    hidden, attended, inner, qkv = shape
    scheme, gate = AffineScheme(4, 128, bool(number % 2)), GATES[int(rng.integers(2))]
    sizes = ((hidden, attended), (2 * inner, hidden), (hidden, inner), (qkv, hidden))
    weights = tuple(weight_near_one(rng, *size, scheme) for size in sizes)
    x = (rng.standard_normal((1, hidden)) * 2).astype(np.float32)
    norms = tuple((1 + rng.standard_normal(hidden) / 4).astype(np.float32) for _ in range(2))
    a = HostArray("bf16", pack.f32_to_bf16(rng.standard_normal((1, attended)).astype(np.float32)))
    records = None
    if number % 4 != 1:
        records = random_records(rng, attended // CHUNK, int(rng.integers(2, 11)))
        a = merged(records)
    inputs = dict(attended=a, weights=weights, norms=norms)
    if rng.integers(2):
        inputs["bias"] = rng.standard_normal(qkv).astype(np.float32)
    options = dict(eps=1e-6, gate=gate)
    found = layer(x, **inputs, **options)
    if records is not None:  # what stands where the result would is not read
        nan = HostArray("bf16", np.full_like(a.array, 0x7FC0))
        inputs |= dict(attended=nan, records=records)
    exact = Tolerance(0, 0, "zeros")
    outputs = {
        "x": OutputSpec(x.shape, "float32", _tolerances(found, weights, a)[0], inout=x),
        "out": OutputSpec((1, qkv), "float32", _tolerances(found, weights, a)[1]),
        "signals.mid": OutputSpec((hidden,), "float32", exact, inout=np.zeros(hidden, np.float32)),
        "signals.act": OutputSpec((inner // 2,), "uint32", exact, inout=np.zeros(inner // 2, np.uint32)),
        "signals.after": OutputSpec(
            (SPLIT, hidden), "float32", exact, inout=np.zeros((SPLIT, hidden), np.float32), error=_all_said
        ),
        "signals.stale": OutputSpec(
            (SPLIT, hidden), "float32", exact, inout=rng.standard_normal((SPLIT, hidden)).astype(np.float32)
        ),
    }
    signals = Signals(*([None] * 4))
    name = f"{scheme} {hidden} {attended} {inner} {qkv} {gate}"
    return Case(name, inputs | {"signals": signals}, outputs, options)


def _tolerances(found, weights, attended) -> tuple[Tolerance, Tolerance]:
    """Of x and of out, six standard deviations: an activation is within 2**-16 of the largest of its 128, and what that
    moves is rounded to bf16 in another direction now and then."""
    tops = [float(np.abs(value).max()) for value in (attended.wide(), found["first"], found["act"], found["second"])]
    sizes = [float(np.sqrt((weight.dequantize() ** 2).sum(axis=1).max())) for weight in weights]
    o, rows, down, qkv = (6 * 2**-16 * top * size for top, size in zip(tops, sizes, strict=True))
    rows += o / float(np.sqrt((found["mid"] ** 2).mean())) * sizes[1]
    made = 2 * rows * float(np.sqrt((found["rows"] ** 2).mean())) * sizes[2]
    x = o + down + made + 6 * 2**-8 * tops[2] / weights[2].shape[1] ** 0.5 * sizes[2]
    out = qkv + x / float(np.sqrt((found["x"] ** 2).mean())) * sizes[3]
    cause = "activations of 16 bits, and a rounding to bf16"
    return Tolerance(x, 1e-4, cause), Tolerance(out, 1e-4, cause)
