"""Products with a stack of experts: `matmul` with a routing, its reference and cases. The kernels are those of all
products."""

from zse.kernels import activation, host
from zse.kernels.matmul import matmul
from zse.kernels.op import Case, Cost, HostActivation, Op, OutputSpec, Tolerance, cases_of, later
from zse.kernels.route import sorted_pairs
from zse.lazy import numpy as np
from zse.quant.scheme import SCHEMES


def reference(a, weight, routing, bias=None, max_tokens=None, gather=False, gate=None):
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


EXPERTS = Op(
    "experts",
    lambda target: [],
    matmul,
    reference,
    cases_of(cpu=_cpu_cases, gpu=later("gpu.expert_cases", "cases")),
    _cost,
    later("gpu.experts", "variants"),
)
