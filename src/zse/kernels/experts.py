"""Products with a stack of experts: `matmul` with a routing, its reference and cases. The kernels are those of all products."""

from zse.kernels import activation, host
from zse.kernels.matmul import matmul
from zse.kernels.op import Case, Cost, HostActivation, HostArray, Op, OutputSpec, Tolerance, cases_of, later
from zse.kernels.route import TASK_PAIRS, sorted_pairs
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.scheme import SCHEMES

GPU_SCHEMES = [scheme for scheme in SCHEMES if "gpu" in scheme.in_memory and scheme.loaded("gpu") == scheme]


def _reference(a, weight, routing, bias=None, max_tokens=None, gather=False, gate=None):
    x = np.asarray(a.dequantize() if hasattr(a, "dequantize") else a.wide() if hasattr(a, "wide") else a, np.float64)
    stack = weight.dequantize().astype(np.float64)
    sorted_ids = np.empty(len(routing.place), np.int64)
    sorted_ids[routing.place] = routing.ids.reshape(-1)
    experts = weight.shape[0] // _rows(weight, routing)
    stack = stack.reshape(experts, -1, weight.shape[1])
    rows = x[routing.source] if gather else x
    y = np.einsum("pk,pnk->pn", rows, stack[sorted_ids])
    y = y if bias is None else y + bias.astype(np.float64).reshape(experts, -1)[sorted_ids]
    return {"out": y if gate is None else activation.GATED.reference(y, gate)["out"]}


def _rows(weight, routing) -> int:
    """Of an expert: cases have as many experts as `tasks` says."""
    return weight.shape[0] // (int(routing.ids.max()) + 1)


def _cpu_cases(rng):
    schemes = [scheme for scheme in SCHEMES if scheme.forms and scheme.group in (0, 16, 32, 64)]
    shapes = [(1, 4, 16, 32, 64), (9, 2, 4, 48, 128), (3, 1, 5, 16, 192), (70, 2, 3, 80, 64), (150, 1, 2, 16, 320)]
    for number, scheme in enumerate(schemes):
        for kind in sorted(scheme.forms):
            tokens, chosen, experts, rows, width = shapes[(number + int(rng.integers(2))) % len(shapes)]
            width += -width % scheme.step
            ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
            if experts - 1 not in ids[0]:  # _rows() counts them so
                ids[0, 0] = experts - 1
            weight = host.random_weight(rng, experts * rows, width, scheme)
            gather = bool(rng.integers(2))
            a = rng.standard_normal((tokens if gather else tokens * chosen, width)).astype(np.float32)
            if kind != "f32":
                a = HostActivation.quantize(a, kind)
            bias = rng.standard_normal(experts * rows).astype(np.float32) if rng.integers(2) else None
            size = float(np.abs(weight.dequantize()).max()) * width
            near = Tolerance(size * 4e-6, 1e-5, f"f32 sums over {width} products in another order than float64")
            yield Case(
                f"{scheme} {kind} {chosen} of {experts}, {tokens}x{rows}x{width}{' gathered' if gather else ''}",
                {"a": a, "weight": weight, "bias": bias, "routing": sorted_pairs(ids, experts)},
                {"out": OutputSpec((tokens * chosen, rows), "float32", near)},
                {"max_tokens": tokens, "gather": gather},
            )


def _cost(case: Case) -> Cost:
    (pairs, rows), weight, routing = case.outputs["out"].shape, case.inputs["weight"], case.inputs["routing"]
    rows *= 2 if case.options.get("gate") else 1
    used = len(np.unique(routing.ids)) * rows / weight.shape[0]
    return Cost(
        int(weight.nbytes * used) + pairs * (weight.shape[1] * 2 + rows * 4), 2 * pairs * rows * weight.shape[1]
    )


def _gpu_cases(rng):
    """Every scheme with and without a gather, with and without a gate; a form of launches for few tokens, and for more than a task
    takes."""
    shapes = [(1, 4, 16, 32, 128), (9, 2, 4, 48, 128), (3, 1, 5, 16, 192), (70, 2, 3, 80, 64), (150, 1, 2, 16, 320)]
    for number, scheme in enumerate(GPU_SCHEMES):
        tokens, chosen, experts, rows, width = shapes[(number + int(rng.integers(2))) % len(shapes)]
        width += -width % max(scheme.group, scheme.step, 32)
        gate = (None, "silu", "gelu_tanh")[int(rng.integers(3))]
        unit = max(scheme.row_unit, 16) * (2 if gate else 1)
        rows += -rows % unit
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
        if experts - 1 not in ids[0]:
            ids[0, 0] = experts - 1
        weight = host.random_weight(rng, experts * rows, width, scheme, scheme.in_memory["gpu"])
        gather = bool(rng.integers(2))
        x = rng.standard_normal((tokens if gather else tokens * chosen, width)).astype(np.float32)
        # Gated, results are products of two: kept small, so that an activation does not hide what is wrong.
        x *= np.float32(0.05 if gate else 1)
        a = HostArray("bf16", pack.f32_to_bf16(x))
        size = float(np.abs(a.wide()).sum(axis=1).max()) * float(np.abs(weight.dequantize()).max())
        # What is added is up to 34 times the weights (128 + q), and is rounded once for each four columns.
        sums = size * 34 * 2**-24 * (width / 4) ** 0.5
        near = Tolerance(sums, 1e-6, "f32 sums of products of 128 + q")
        inputs = {"a": a, "weight": weight, "routing": sorted_pairs(ids, experts, TASK_PAIRS["gpu"])}
        if rng.integers(2):
            inputs["bias"] = rng.standard_normal(experts * rows).astype(np.float32)
        if gate:
            # act'(gate) <= 1.13 and |act(gate)| <= |gate|: both factors are off by `sums`, and the result is rounded to bf16.
            peak = float(np.abs(_reference(a, weight, inputs["routing"], inputs.get("bias"), gather=gather)["out"]).max())
            near = Tolerance(2.2 * sums * (peak + 1) + 1e-5, 2**-8, "both factors' sums, and a rounding to bf16")
        yield Case(
            f"{scheme} {chosen} of {experts}, {tokens}x{rows}x{width}{' gathered' if gather else ''} {gate or ''}",
            inputs,
            {"out": OutputSpec((tokens * chosen, rows // (2 if gate else 1)), "bf16" if gate else "float32", near)},
            {"max_tokens": tokens, "gather": gather} | ({"gate": gate} if gate else {}),
        )


EXPERTS = Op(
    "experts",
    lambda target: [],
    matmul,
    _reference,
    cases_of(cpu=_cpu_cases, gpu=_gpu_cases),
    _cost,
    later("gpu.experts", "variants"),
)
