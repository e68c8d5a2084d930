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
SHAPES = (
    (1024, 1280, 4096, 1536),
    (1152, 1024, 4608, 96),
    (1536, 1152, 5248, 1056),
    (1024, 1024, 5248, 32),
    (1152, 1024, 4096, 0),
)
NAMES = ("o", "gate_up", "down", "qkv")


def wide(bits):
    return pack.bf16_to_f32(bits).astype(np.float64)


def normed(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight


def layer(x, attended, weights, norms, bias=None, eps=0.0, gate="silu"):
    """What is computed one after another, with the kernel's rounding to bf16, float64: (name → value)."""
    o, gate_up, down, *qkv = (weight.dequantize().astype(np.float64) for weight in weights)
    found = {"mid": x.astype(np.float64) + attended.wide() @ o.T}
    found["first"] = normed(found["mid"], norms[0], eps)
    found["rows"] = found["first"] @ gate_up.T
    made = activation.GATED.reference(found["rows"], gate)["out"]
    found["act"] = wide(pack.f32_to_bf16(made.astype(np.float32)))
    found["x"] = found["mid"] + found["act"] @ down.T
    found["second"] = normed(found["x"], norms[1], eps)
    found["out"] = found["second"] @ qkv[0].T + (0 if bias is None else bias) if qkv else found["second"]
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


def stream_of(stale, hidden: int):
    """What the launch before said, f32 [1, hidden]."""
    return stale[-SPLIT * hidden :].view(np.float32).reshape(SPLIT, hidden).sum(axis=0, dtype=np.float64)[None]


def reference(
    x,
    attended,
    weights,
    norms,
    signals,
    bias=None,
    records=None,
    follows=False,
    leaves=True,
    eps=0.0,
    gate="silu",
    out=None,
):
    attended, (hidden, inner) = attended if records is None else merged(records), (x.shape[1], weights[2].shape[1])
    stream = stream_of(signals.stale, hidden) if follows else x
    found = layer(stream, attended, weights, norms, bias, eps, gate)
    said = {"mid": np.ones(hidden), "act": np.ones(inner // 2), "after": np.ones((SPLIT, hidden))}
    said["stale"] = np.zeros(hidden + inner // 2 + SPLIT * hidden, np.uint32)
    return {"x": found["x"] if leaves else x, "out": found["out"]} | {f"signals.{k}": v for k, v in said.items()}


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
    weights = tuple(weight_near_one(rng, *size, scheme) for size in sizes if size[0])
    x = (rng.standard_normal((1, hidden)) * 2).astype(np.float32)
    norms = tuple((1 + rng.standard_normal(hidden) / 4).astype(np.float32) for _ in range(2))
    a = HostArray("bf16", pack.f32_to_bf16(rng.standard_normal((1, attended)).astype(np.float32)))
    records = None
    if number % 4 != 1:
        records = random_records(rng, attended // CHUNK, int(rng.integers(2, 11)))
        a = merged(records)
    inputs = dict(attended=a, weights=weights, norms=norms)
    if qkv and rng.integers(2):
        inputs["bias"] = rng.standard_normal(qkv).astype(np.float32)
    options = dict(eps=1e-6, gate=gate)
    stale = rng.standard_normal(hidden + inner // 2 + SPLIT * hidden).astype(np.float32).view(np.uint32)
    follows, leaves = bool(rng.integers(2)), not qkv or bool(rng.integers(2))
    if follows:  # what stands in its place is not read
        x, place = stream_of(stale, hidden), np.full_like(x, np.nan)
    else:
        place = x
    found = layer(x, **inputs, **options)
    if records is not None:  # what stands where the result would is not read
        nan = HostArray("bf16", np.full_like(a.array, 0x7FC0))
        inputs |= dict(attended=nan, records=records)
    exact = Tolerance(0, 0, "zeros")
    outputs = {
        "x": OutputSpec(x.shape, "float32", _tolerances(found, weights, a)[0], inout=place),
        "out": OutputSpec((1, qkv or hidden), "float32" if qkv else "bf16", _tolerances(found, weights, a)[1]),
        **{
            f"signals.{name}": OutputSpec(shape, kind, exact, inout=np.zeros(shape, kind), error=_all_said)
            for name, shape, kind in (
                ("mid", (hidden,), "float32"),
                ("act", (inner // 2,), "uint32"),
                ("after", (SPLIT, hidden), "float32"),
            )
        },
        "signals.stale": OutputSpec(stale.shape, "uint32", exact, inout=stale),
    }
    name = f"{scheme} {hidden} {attended} {inner} {qkv} {gate}{' follows' * follows}{' leaves' * leaves}"
    options |= dict(follows=follows, leaves=leaves)
    return Case(name, inputs | {"signals": Signals(None, None, None, stale)}, outputs, options)


def _tolerances(found, weights, attended) -> tuple[Tolerance, Tolerance]:
    """Of x and of out, six standard deviations: an activation is within 2**-16 of the largest of its 128, and what that
    moves is rounded to bf16 in another direction now and then."""
    tops = [float(np.abs(value).max()) for value in (attended.wide(), found["first"], found["act"], found["second"])]
    sizes = [float(np.sqrt((weight.dequantize() ** 2).sum(axis=1).max())) for weight in weights]
    o, rows, down, *qkv = (6 * 2**-16 * top * size for top, size in zip(tops, sizes, strict=False))
    rows += o / float(np.sqrt((found["mid"] ** 2).mean())) * sizes[1]
    made = 2 * rows * float(np.sqrt((found["rows"] ** 2).mean())) * sizes[2]
    x = o + down + made + 6 * 2**-8 * tops[2] / weights[2].shape[1] ** 0.5 * sizes[2]
    cause, moved = "activations of 16 bits, and a rounding to bf16", x / float(np.sqrt((found["x"] ** 2).mean()))
    out = Tolerance(qkv[0] + moved * sizes[3], 1e-4, cause) if qkv else Tolerance(2 * moved, 2**-8, cause)
    return Tolerance(x, 1e-4, cause), out
