"""What stands between the attentions of two layers as one launch, of one token and int4 weights on a Hopper GPU
(zse.kernels.gpu.chain)."""

from typing import Any, NamedTuple

from zse.kernels import gpu
from zse.kernels.op import Case, Cost, Op, cases_of, check, later, require
from zse.tensor import Tensor

GATES = ("silu", "gelu_tanh")
CHUNK, MOST_HEADS = 128, 32  # dimensions and number of heads of attention whose records are merged


class Records(NamedTuple):
    """What tasks of attention leave, and its plan (zse.kernels.gpu.attention_plan.AttentionScratch)."""

    records: Tensor
    totals: Tensor
    plan: Tensor


class Signals(NamedTuple):
    """What blocks tell each other: mid f32 [hidden], act u32 [inner / 2], after f32 [parts, hidden], one behind the other and
    zero before a launch; until the next one, whose `stale` u32 [all of them] it is, has cleared it, they hold what was said."""

    mid: Tensor
    act: Tensor
    after: Tensor
    stale: Tensor


def int4_of(device, weights) -> bool:
    """Whether these are of one scheme, int4 in groups of 128, and the device is one that has launches of this kind."""
    if device.kernels != "gpu" or device.simt or device.arch != 90 or len({weight.scheme for weight in weights}) > 1:
        return False
    scheme = weights[0].scheme
    return (scheme.kind, scheme.element, scheme.group) == ("affine", "int4", 128)


def takes(device, weights) -> bool:
    """Whether chain() takes these weights: of o, gate and up, down, and q, k and v, or behind the last layer without them."""
    if not int4_of(device, weights):
        return False
    o, gate_up, down, *qkv = weights
    (hidden, attended), inner = o.shape, down.shape[1]
    if gate_up.shape != (2 * inner, hidden) or down.shape[0] != hidden or any(w.shape[1] != hidden for w in qkv):
        return False
    return gpu.chain.fits(device.num_sms, hidden, attended, inner, sum(w.shape[0] for w in qkv))


def signals_of(device, hidden: int, inner: int) -> list[Signals]:
    """Signals of a first launch, of those after it by turns, and of the last. They belong to models of this shape: what
    the last launch of a step leaves, the first one of the next clears."""
    nbytes = gpu.chain.signal_bytes(hidden, inner)
    place = device.scratch(f"chain {hidden} {inner}", 3 * nbytes)
    shapes = ((hidden,), "f32", 0), ((inner // 2,), "u32", 4 * hidden)
    shapes += (((gpu.chain_parts.SPLIT, hidden), "f32", 4 * hidden + 2 * inner),)
    return [
        Signals(
            *(Tensor(place, shape, dtype, said * nbytes + at) for shape, dtype, at in shapes),
            Tensor(place, (nbytes // 4,), "u32", stale * nbytes),
        )
        for said, stale in ((0, 2), (1, 0), (0, 1), (2, 0), (2, 1))
    ]


def turn(found: list[Any], number: int, count: int) -> Any:
    """Of signals_of() those of launch `number` of the `count`, two at least, of a step."""
    if number == count - 1:
        return found[3 if number % 2 else 4]
    return found[0 if number == 0 else 1 if number % 2 else 2]


def signals_for(device, hidden: int, inner: int, number: int, count: int) -> Signals:
    """Likewise, of this shape."""
    return turn(signals_of(device, hidden, inner), number, count)


def check_records(records: Records | None, columns: int) -> None:
    """Those of attention whose heads are `columns` wide together."""
    if records is not None:
        check("chain records", records.records, "f32", None, columns // CHUNK, CHUNK)
        check("chain totals", records.totals, "f32", None, columns // CHUNK, 2)
        check("chain plan", records.plan, "i32", None)


def chain(
    recorder,
    x,
    attended,
    weights,
    norms,
    out,
    signals: Signals,
    bias=None,
    records: Records | None = None,
    *,
    eps: float,
    gate: str = "silu",
    follows: bool = False,
    leaves: bool = True,
) -> None:
    """x f32 [1, H] += o of attended bf16 [1, A]; += down of act(gate) * up of its RMSNorm times norms[0]; out f32 [1, N] = q, k
    and v of its RMSNorm times norms[1], + bias f32 [N], or where three weights are given out bf16 [1, H] = that norm.
    weights: as takes() wants them; norms: f32 [H] each. records: of attention with heads of 128 that has left `attended` to
    this launch where its tasks are several. follows: x is in the
    signals of the launch before, not in its place; leaves: it is put there, as it has to be unless a launch follows."""
    require(leaves or len(weights) == 4, "chain: without q, k and v the stream is left")
    require(takes(recorder.device, weights), f"chain: {', '.join(f'{w.scheme} {w.shape}' for w in weights)}")
    require(gate in GATES, f"chain: gate {gate!r}; supported: {', '.join(GATES)}")
    o, _, down, *qkv = weights
    (hidden, columns), inner = o.shape, down.shape[1]
    check("chain x", x, "f32", 1, hidden)
    check("chain attended", attended, "bf16", 1, columns)
    check("chain out", out, "f32" if qkv else "bf16", 1, qkv[0].shape[0] if qkv else hidden)
    for norm in norms:
        check("chain norm", norm, "f32", hidden)
    if bias is not None:
        check("chain bias", bias, "f32", sum(weight.shape[0] for weight in qkv))
    check("chain mid", signals.mid, "f32", hidden)
    check("chain act", signals.act, "u32", inner // 2)
    check("chain after", signals.after, "f32", gpu.chain_parts.SPLIT, hidden)
    check("chain stale", signals.stale, "u32", gpu.chain.signal_bytes(hidden, inner) // 4)
    check_records(records, columns)
    gpu.chain.launch(recorder, x, attended, weights, norms, out, signals, bias, eps, gate, records, (follows, leaves))


def _cost(case: Case) -> Cost:
    weights = case.inputs["weights"]
    numbers = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    return Cost(sum(weight.nbytes for weight in weights), 2 * numbers)


CHAIN = Op(
    "chain",
    lambda target: [],
    chain,
    later("gpu.chain_cases", "reference"),
    cases_of(cpu=lambda rng: iter(()), gpu=later("gpu.chain_cases", "cases")),
    _cost,
    later("gpu.chain", "variants"),
)
