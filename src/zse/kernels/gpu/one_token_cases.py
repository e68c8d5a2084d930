"""Cases of the experts of one token."""

from functools import partial

from zse.kernels import activation, host
from zse.kernels.activation import CLAMPED
from zse.kernels.gpu.expert_cases import GPU_SCHEMES
from zse.kernels.op import Case, Cases, OutputSpec, Tolerance
from zse.kernels.route import ROUTE, ROUTERS, SELECTED, num_tasks
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.scheme import DenseScheme
from zse.tensor import GATINGS, Routing

# Experts of a token, experts, columns of the stream and of an expert: as many as two at a time, one, and more.
SHAPES = ((4, 16, 192, 128), (1, 5, 64, 320), (3, 12, 256, 96), (8, 128, 128, 64), (5, 30, 1096, 32), (2, 2, 64, 576))


def _rounded(values):
    """As bf16 has them."""
    return pack.bf16_to_f32(pack.f32_to_bf16(np.ascontiguousarray(values, np.float32))).astype(np.float64)


def reference(
    x,
    norm,
    router,
    gate_up,
    down,
    chosen,
    select=None,
    tasks=None,
    norm_eps=0.0,
    gate="silu",
    normed=None,
    logits=None,
    **options,
):
    """With the roundings to bf16 that the kernels make: of the normed row, and of what an expert's first product is. normed,
    logits: what tasks were made from, the same as here."""
    (weight, router_bias), wide = router, x.astype(np.float64)
    experts = weight.shape[0]
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + norm_eps) * norm
    logits = exact @ weight.dequantize().astype(np.float64).T + (0 if router_bias is None else router_bias)
    routing = ROUTE.reference(logits, empty_routing(chosen, experts), select, **options)
    ids, weights = routing["routing.ids"][0], routing["routing.weights"][0]
    if tasks is not None:
        ids = tasks[np.argsort(np.argsort(ids)), 0]
    stacks = [stack.dequantize().astype(np.float64) for stack, _ in (gate_up, down)]
    first, second = (stack.reshape(experts, -1, stack.shape[1])[ids] for stack in stacks)
    rows = np.einsum("k,enk->en", _rounded(exact)[0], first)
    rows = rows if gate_up[1] is None else rows + gate_up[1].reshape(experts, -1)[ids]
    made = activation.GATED.reference(rows, gate)["out"] * weights[:, None]
    each = np.einsum("ek,enk->n", _rounded(made), second)
    if down[1] is not None:
        each = each + weights @ down[1].astype(np.float64).reshape(experts, -1)[ids]
    return {"x": wide + each, "normed": exact, "logits": logits, "made": made}


def empty_routing(chosen: int, experts: int) -> Routing:
    shapes = dict(ids=(1, chosen), weights=(1, chosen), source=(chosen,), place=(chosen,))
    tasks = np.zeros((num_tasks(1, 1, chosen, experts, 8), 3), np.int32)
    return Routing(**{name: np.zeros(shape, np.int32) for name, shape in shapes.items()}, tasks=tasks, task_pairs=8)


def cases(rng) -> Cases:
    """Every scheme, with all gatings, biases and activations among them."""
    return Cases(partial(_case, rng, number, scheme) for number, scheme in enumerate(GPU_SCHEMES))


def _case(rng, number: int, scheme) -> Case:
    chosen, experts, width, inner = SHAPES[int(rng.integers(len(SHAPES)))]
    unit = max(scheme.group, scheme.step, scheme.row_unit, 32)
    width, inner = width + -width % unit, inner + -inner % unit
    gating, gate = GATINGS[number % len(GATINGS)], ("silu", "gelu_tanh", CLAMPED)[int(rng.integers(3))]
    stacks = [
        host.random_weight(rng, experts * rows, columns, scheme, scheme.in_memory["gpu"])
        for rows, columns in ((2 * inner, width), (width, inner))
    ]
    biases = [rng.standard_normal(s.shape[0]).astype(np.float32) if rng.integers(2) else None for s in stacks]
    x = (rng.standard_normal((1, width)) * 3).astype(np.float32)
    norm = (rng.standard_normal(width) / width**0.5).astype(np.float32)
    inputs = dict(norm=norm, router=_router(rng, x, norm, experts, ROUTERS[number % 3]))
    inputs |= dict(gate_up=(stacks[0], biases[0]), down=(stacks[1], biases[1]))
    if gating in SELECTED and rng.integers(2):
        inputs["select"] = (rng.standard_normal(experts) * 0.3).astype(np.float32)
    if rng.integers(2):  # the experts are elsewhere in their stacks
        inputs["tasks"] = np.zeros((chosen, 3), np.int32)
        inputs["tasks"][:, 0] = rng.permutation(experts)[:chosen]
    options = dict(gating=gating, gate=gate, normalize=bool(rng.integers(2)), scale=1.5, eps=1e-20)
    options |= dict(norm_eps=1e-5, chosen=chosen)
    outputs = _outputs(x, inputs, options, [float(np.abs(stack.dequantize()).max()) for stack in stacks])
    return Case(f"{scheme} {chosen} of {experts}, {width}x{inner} {gating} {gate}", inputs, outputs, options)


def _router(rng, x, norm, experts: int, element: str):
    """(weight, bias) that give logits of about the size that they have."""
    logits = (rng.standard_normal((1, experts)) * 2).astype(np.float32)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean()) * norm
    wide = (logits.T @ normed / (normed**2).sum() + rng.standard_normal((experts, x.shape[1])) * 0.1).astype(np.float32)
    plane = pack.f32_to_bf16(wide) if element == "bf16" else wide.astype(np.float16 if element == "f16" else np.float32)
    bias = (rng.standard_normal(experts) * 0.1).astype(np.float32) if rng.integers(2) else None
    return host.HostWeight(wide.shape, DenseScheme(element), {"w": plane}, "rows"), bias


def _outputs(x, inputs, options, largest):
    """largest: magnitude of a weight of either stack."""
    found = reference(x, **inputs, **options)
    (_, width), (chosen, inner) = x.shape, found["made"].shape
    size = float(np.abs(found["normed"]).sum())
    router = float(np.abs(inputs["router"][0].dequantize()).max())
    # Sums of products of 128 + q, and some numbers of the row that are rounded to bf16 the other way.
    sums = largest[0] * (size * 34 * 2**-24 * (width / 4) ** 0.5 + 2**-7 * float(np.abs(found["normed"]).max()))
    top = float(np.abs(found["made"]).max())
    made = Tolerance(2.2 * sums * (top + 8) + 1e-5, 2**-8, "both factors' sums, and a rounding to bf16")
    rounded = largest[1] * (2**-8 * 12 * top + made.absolute * 4 * (chosen * inner) ** 0.5)
    added = rounded + largest[1] * float(np.abs(found["made"]).sum()) * 34 * 2**-24 * (chosen * inner / 4) ** 0.5
    before = {"normed": None, "logits": None}
    if "tasks" in inputs:
        before = {
            "normed": pack.f32_to_bf16(found["normed"].astype(np.float32)),
            "logits": found["logits"].astype(np.float32),
        }
    return {
        "x": OutputSpec(x.shape, "float32", Tolerance(added, 1e-6, "of roundings of what is added"), inout=x),
        "normed": OutputSpec(x.shape, "bf16", Tolerance(2e-6, 2**-8, "rounded to bf16"), inout=before["normed"]),
        "logits": OutputSpec(
            found["logits"].shape,
            "float32",
            Tolerance(size * router * 14 * 2**-24 + 1e-7, 1e-6, "f32 sums"),
            inout=before["logits"],
        ),
        "made": OutputSpec(found["made"].shape, "bf16", made),
    }
