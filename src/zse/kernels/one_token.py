"""What a mixture of experts adds to the stream of one token on a GPU with matrix instructions: the norm, the router, the
choice (zse.kernels.route says which), both products and their sum, in three launches (zse.kernels.gpu.one_token)."""

from typing import Any

from zse.kernels import gpu
from zse.kernels.op import Case, Cost, Op, cases_of, check, later, require
from zse.kernels.route import DEFAULTS, ROUTERS, chooses_one


def takes(device, router, scheme, chosen: int, gating: str, groups: tuple[int, int], has_select: bool) -> bool:
    """Whether one_token() takes a mixture. router: its weight; scheme: of the experts; groups: searched, and all."""
    rows = router.scheme.element in ROUTERS and router.layout == "rows" and router.shape[1] % 8 == 0
    on_device = device.kernels == "gpu" and not device.simt and scheme.loaded("gpu") == scheme
    return on_device and rows and groups[0] == groups[1] and chooses_one(chosen, router.shape[0], gating, has_select)


def one_token(
    recorder,
    x,
    norm,
    router,
    gate_up,
    down,
    normed,
    logits,
    made,
    *,
    chosen: int,
    select=None,
    tasks=None,
    norm_eps: float,
    gate: str,
    **options: Any,
) -> None:
    """x f32 [1, H] += what the `chosen` experts make of its RMSNorm times `norm` f32 [H], weighted and added. router: (weight
    [E, H], bias f32 [E] or None); gate_up, down: (stack of experts [E * 2I, H], [E * H, I], bias or None). Written as well:
    normed bf16 [1, H], logits f32 [1, E], made bf16 [chosen, I], of the experts from the best on, weighted. select f32
    [E]: added for the choice. gate: one of zse.kernels.gpu.experts.GATES; options: of zse.kernels.route.DEFAULTS. tasks i32
    [N, 3]: what route() with this norm and product left, naming places of the chosen experts in the stacks, which may have other
    numbers of experts (zse.kernels.gpu.expert_slots): normed and logits are there already."""
    options = DEFAULTS | options
    weight, router_bias = router
    experts, inner, device = weight.shape[0], made.shape[1], recorder.device
    kinds, schemes = gpu.experts.GATES, (gate_up[0].scheme, down[0].scheme)
    more = options["gating"], (options["groups_used"], options["groups"]), select is not None
    for scheme in schemes:
        found = takes(device, weight, scheme, chosen, *more)
        require(found, f"one_token: {chosen} of {experts} experts, {scheme}, {options['gating']}")
    require(gate in kinds, f"one_token: gate {gate!r}; supported: {', '.join(kinds)}")
    choice = gpu.router.choice_args(logits, select, chosen, options)
    check("one_token made", made, "bf16", chosen, inner)
    choice |= dict(experts=experts, tasks=tasks, has_tasks=int(tasks is not None))
    if tasks is None:
        gpu.router.launch_logits(recorder, x, norm, normed, *router, logits, norm_eps)
    else:
        check("one_token tasks", tasks, "i32", None, 3)
    gpu.one_token.launch_gate_up(recorder, normed, *gate_up, made, kinds[gate], choice)
    gpu.one_token.launch_down(recorder, made, *down, x, choice)


def _reference(*args: Any, **options: Any) -> dict[str, Any]:
    return later("gpu.one_token_cases", "reference")(*args, **options)


def _cost(case: Case) -> Cost:
    chosen, stacks = case.options["chosen"], (case.inputs["gate_up"][0], case.inputs["down"][0])
    router = case.inputs["router"][0]
    used = chosen / router.shape[0]
    numbers = sum(stack.shape[0] * stack.shape[1] for stack in stacks) * used
    return Cost(
        int(sum(stack.nbytes for stack in stacks) * used) + router.nbytes + router.shape[1] * 12,
        int(2 * numbers) + 2 * router.shape[0] * router.shape[1],
    )


ONE_TOKEN = Op(
    "one_token",
    lambda target: [],
    one_token,
    _reference,
    cases_of(cpu=lambda rng: iter(()), gpu=later("gpu.one_token_cases", "cases")),
    _cost,
    later("gpu.one_token", "variants"),
)
