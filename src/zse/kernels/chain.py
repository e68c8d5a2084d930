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
    """What blocks tell each other, zero between launches: mid f32 [hidden], act u32 [inner / 2], after f32 [parts,
    hidden], which holds what was said until the next launch, whose `stale` it is, has cleared it."""

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
    """Whether chain() takes these four weights: of o, gate and up, down, and q, k and v."""
    if not int4_of(device, weights):
        return False
    o, gate_up, down, qkv = weights
    (hidden, attended), inner = o.shape, down.shape[1]
    if gate_up.shape != (2 * inner, hidden) or down.shape[0] != hidden or qkv.shape[1] != hidden:
        return False
    return gpu.chain.fits(device.num_sms, hidden, attended, inner, qkv.shape[0])


def signals_of(device, hidden: int, inner: int) -> list[Signals]:
    """Signals of a first launch, of those after it by turns, and of the last. They belong to models of this shape: what
    the last launch of a step leaves, the first one of the next clears."""
    parts, place = (
        gpu.chain_parts.SPLIT,
        device.scratch(f"chain {hidden} {inner}", gpu.chain.signal_bytes(hidden, inner)),
    )
    mid = Tensor(place, (hidden,), "f32")
    act = Tensor(place, (inner // 2,), "u32", 4 * hidden)
    begin = 4 * hidden + 2 * inner
    first, second, last = (
        Tensor(place, (parts, hidden), "f32", begin + 4 * parts * hidden * number) for number in range(3)
    )
    return [
        Signals(mid, act, after, stale)
        for after, stale in ((first, last), (second, first), (first, second), (last, first), (last, second))
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
) -> None:
    """x f32 [1, H] += o of attended bf16 [1, A]; += down of act(gate) * up of its RMSNorm times norms[0]; out f32 [1, N] = q, k
    and v of its RMSNorm times norms[1], + bias f32 [N]. weights: as takes() wants them; norms: f32 [H] each. records: of
    attention with heads of 128 that has left `attended` to this launch where its tasks are several."""
    require(takes(recorder.device, weights), f"chain: {', '.join(f'{w.scheme} {w.shape}' for w in weights)}")
    require(gate in GATES, f"chain: gate {gate!r}; supported: {', '.join(GATES)}")
    o, _, down, qkv = weights
    (hidden, columns), inner = o.shape, down.shape[1]
    check("chain x", x, "f32", 1, hidden)
    check("chain attended", attended, "bf16", 1, columns)
    check("chain out", out, "f32", 1, qkv.shape[0])
    for norm in norms:
        check("chain norm", norm, "f32", hidden)
    if bias is not None:
        check("chain bias", bias, "f32", qkv.shape[0])
    check("chain mid", signals.mid, "f32", hidden)
    check("chain act", signals.act, "u32", inner // 2)
    for name in ("after", "stale"):
        check(f"chain {name}", getattr(signals, name), "f32", gpu.chain_parts.SPLIT, hidden)
    check_records(records, columns)
    gpu.chain.launch(recorder, x, attended, weights, norms, out, signals, bias, eps, gate, records)


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
