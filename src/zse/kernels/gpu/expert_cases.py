"""Cases of products with stacks of experts on a GPU."""

from zse.kernels import host
from zse.kernels.activation import CLAMPED
from zse.kernels.experts import reference
from zse.kernels.gpu import gemm_experts, matmul_cases
from zse.kernels.op import Case, HostArray, OutputSpec, Tolerance
from zse.kernels.route import TASK_PAIRS, sorted_pairs
from zse.lazy import numpy as np
from zse.quant import pack
from zse.quant.scheme import SCHEMES

GPU_SCHEMES = [scheme for scheme in SCHEMES if "gpu" in scheme.in_memory and scheme.loaded("gpu") == scheme]


def cases(rng):
    """Every scheme with and without a gather, with and without a gate; of few tokens, and of so many that experts have
    tasks of 16 or 64 pairs, which on Hopper are other kernels."""
    shapes = [
        (1, 4, 16, 32, 128),
        (9, 2, 4, 48, 128),
        (3, 1, 5, 16, 192),
        (70, 2, 3, 80, 64),
        (150, 1, 2, 16, 320),
        (35, 1, 4, 48, 192),
    ]
    for scheme in GPU_SCHEMES:
        tokens, chosen, experts, rows, width = shapes[int(rng.integers(len(shapes)))]
        width += -width % max(scheme.group, scheme.step, 32)
        gate = (None, "silu", "gelu_tanh", CLAMPED)[int(rng.integers(4))]
        unit = max(scheme.row_unit, 16) * (2 if gate else 1)
        rows += -rows % unit
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
        if experts - 1 not in ids[0]:
            ids[0, 0] = experts - 1
        weight = host.random_weight(rng, experts * rows, width, scheme, scheme.in_memory["gpu"])
        gather = bool(rng.integers(2))
        each = gemm_experts.task_pairs(scheme, tokens, chosen, experts) or TASK_PAIRS["gpu"]
        many = each > TASK_PAIRS["gpu"]
        x = rng.standard_normal((tokens if gather else tokens * chosen, width)).astype(np.float32)
        if many and scheme.element == "e4m3":  # exact in fp8, so that rounding them is not what is tested
            x = pack.e4m3_to_f32(pack.f32_to_e4m3(x * 64))
            x[:, int(rng.integers(width))] = 448
        # Gated, results are products of two: kept small, so that an activation does not hide what is wrong.
        x *= np.float32(0.05 if gate and not many else 1)
        a = HostArray("bf16", pack.f32_to_bf16(x))
        size = float(np.abs(a.wide()).sum(axis=1).max()) * float(np.abs(weight.dequantize()).max())
        # What is added is up to 34 times the weights (128 + q), and is rounded once for each four columns.
        sums = size * 34 * 2**-24 * (width / 4) ** 0.5
        near = Tolerance(sums, 1e-6, "f32 sums of products of 128 + q")
        inputs = {"a": a, "weight": weight, "routing": sorted_pairs(ids, experts, each)}
        if rng.integers(2):
            inputs["bias"] = rng.standard_normal(experts * rows).astype(np.float32)
        if many:
            largest = float(np.abs(weight.dequantize()).max())
            near = matmul_cases.tolerance(scheme, a.wide(), largest, False, bool(gate))
        if gate:
            # act'(gate) <= 1.13 and |act(gate)| <= |gate|: both factors are off by what a sum is, and the result is rounded
            # to bf16.
            peak = float(
                np.abs(reference(a, weight, inputs["routing"], inputs.get("bias"), gather=gather)["out"]).max()
            )
            near = Tolerance(
                2.2 * near.absolute * (peak + (8 if gate == CLAMPED else 1)) + 1e-5,
                near.relative if many else 2**-8,
                "both factors' sums, and a rounding to bf16",
            )
        yield Case(
            f"{scheme} {chosen} of {experts}, {tokens}x{rows}x{width}{' gathered' if gather else ''} {gate or ''}",
            inputs,
            {"out": OutputSpec((tokens * chosen, rows // (2 if gate else 1)), "bf16" if gate else "float32", near)},
            {"max_tokens": tokens, "gather": gather} | ({"gate": gate} if gate else {}),
        )
