"""What stands between two attentions with a mixture of experts as one launch, of one token and int4 weights on a Hopper GPU
(zse.kernels.gpu.mixture_chain)."""

from typing import Any, NamedTuple

from zse.kernels import gpu
from zse.kernels.chain import GATES, Records, check_records, int4_of
from zse.kernels.op import Case, Cost, Op, cases_of, check, later, require
from zse.kernels.route import DEFAULTS, chooses_one
from zse.tensor import Tensor


class MixtureSignals(NamedTuple):
    """What blocks tell each other, REPLICAS times, zero between launches: mid f32 [hidden], logit f32 [experts], act u32
    [chosen * inner / 2], after f32 [hidden], which holds what was said until the next launch, whose `stale` it is, has
    cleared it."""

    mid: Tensor
    logit: Tensor
    act: Tensor
    after: Tensor
    stale: Tensor


def takes(device, weights, router, chosen: int, gating: str, groups: tuple[int, int], has_select: bool) -> bool:
    """Whether mixture_chain() takes these four weights: of o, all experts' gates and ups, their downs, and q, k and v. The
    rest: as of zse.kernels.one_token.takes()."""
    o, gate_up, down, qkv = weights
    (hidden, attended), (experts, width), inner = o.shape, router.shape, down.shape[1]
    if not int4_of(device, weights) or router.scheme.element != gpu.mixture_chain.ROUTER or router.layout != "rows":
        return False
    shapes = gate_up.shape, down.shape, qkv.shape[1], width
    if shapes != ((experts * 2 * inner, hidden), (experts * hidden, inner), hidden, hidden):
        return False
    sizes = hidden, attended, inner, qkv.shape[0]
    is_chosen = groups[0] == groups[1] and chooses_one(chosen, experts, gating, has_select)
    return is_chosen and gpu.mixture_chain.fits(device.num_sms, sizes, experts, chosen)


def signals_of(device, hidden: int, inner: int, experts: int, chosen: int) -> list[MixtureSignals]:
    """As zse.kernels.chain.signals_of()."""
    name = f"mixture chain {hidden} {inner} {experts} {chosen}"
    place = device.scratch(name, gpu.mixture_chain.signal_bytes(hidden, inner, experts, chosen))
    many, row = gpu.mixture_parts.REPLICAS, 4 * gpu.mixture_parts.REPLICAS * hidden
    mid, first, second, last = (Tensor(place, (many, hidden), "f32", number * row) for number in range(4))
    act = Tensor(place, (many, chosen * inner // 2), "u32", 4 * row)
    logit = Tensor(place, (many, experts), "f32", 4 * row + 2 * many * chosen * inner)
    turns = (first, last), (second, first), (first, second), (last, first), (last, second)
    return [MixtureSignals(mid, logit, act, after, stale) for after, stale in turns]


def mixture_chain(
    recorder,
    x,
    attended,
    weights,
    router,
    norms,
    out,
    signals: MixtureSignals,
    *,
    chosen: int,
    bias=None,
    select=None,
    records: Records | None = None,
    norm_eps: float,
    gate: str = "silu",
    **options: Any,
) -> None:
    """x f32 [1, H] += o of attended bf16 [1, A]; += what zse.kernels.one_token makes of it with norms[0]; out f32 [1, N] = q, k and
    v of its RMSNorm times norms[1], + bias f32 [N]. weights: as takes() wants them; router: (weight [E, H], bias f32 [E] or None);
    norms: f32 [H] each; select f32 [E]; records: as of chain(); options: of zse.kernels.route.DEFAULTS."""
    options = DEFAULTS | options
    weight, router_bias = router
    o, _, down, qkv = weights
    (hidden, columns), inner, experts = o.shape, down.shape[1], weight.shape[0]
    more = options["gating"], (options["groups_used"], options["groups"]), select is not None
    found = takes(recorder.device, weights, weight, chosen, *more)
    require(found, f"mixture_chain: {chosen} of {experts}, {', '.join(f'{w.scheme} {w.shape}' for w in weights)}")
    require(gate in GATES, f"mixture_chain: gate {gate!r}; supported: {', '.join(GATES)}")
    check("mixture_chain x", x, "f32", 1, hidden)
    check("mixture_chain attended", attended, "bf16", 1, columns)
    check("mixture_chain out", out, "f32", 1, qkv.shape[0])
    for norm in norms:
        check("mixture_chain norm", norm, "f32", hidden)
    for name, vector, length in (("bias", bias, qkv.shape[0]), ("router bias", router_bias, experts)):
        if vector is not None:
            check(f"mixture_chain {name}", vector, "f32", length)
    sizes = dict.fromkeys(("mid", "after", "stale"), hidden) | dict(logit=experts, act=chosen * inner // 2)
    for name, length in sizes.items():
        dtype = "u32" if name == "act" else "f32"
        check(f"mixture_chain {name}", getattr(signals, name), dtype, gpu.mixture_parts.REPLICAS, length)
    check_records(records, columns)
    logits = signals.logit.with_rows(1)
    choice = gpu.router.choice_args(logits, select, chosen, options)
    gpu.mixture_chain.launch(
        recorder, x, attended, weights, router, norms, out, signals, bias, norm_eps, gate, choice, records
    )


def _cost(case: Case) -> Cost:
    (o, gate_up, down, qkv), (router, _) = case.inputs["weights"], case.inputs["router"]
    used = case.options["chosen"] / router.shape[0]
    each = ((o, 1), (gate_up, used), (down, used), (qkv, 1), (router, 1))
    numbers = sum(weight.shape[0] * weight.shape[1] * share for weight, share in each)
    return Cost(int(sum(weight.nbytes * share for weight, share in each)), int(2 * numbers))


MIXTURE_CHAIN = Op(
    "mixture_chain",
    lambda target: [],
    mixture_chain,
    later("gpu.mixture_chain_cases", "reference"),
    cases_of(cpu=lambda rng: iter(()), gpu=later("gpu.mixture_chain_cases", "cases")),
    _cost,
    later("gpu.mixture_chain", "variants"),
)
