"""Every operation's GPU form against its float64 reference, on the CUDA device of this machine.

    PYTHONPATH=src python -m pytest tests/gpu

An operation takes part by being in kernels/table.py with `gpu_variants`.
"""

import numpy as np
import pytest

from gpu.harness import check_case, device, gpu_ops, run_case
from zse.kernels.gpu.matmul_cases import WIDE_GATE, make_case
from zse.kernels.table import all_ops
from zse.quant.scheme import AffineScheme, DenseScheme

GPU = device()


@pytest.mark.parametrize("op", gpu_ops(), ids=lambda op: op.name)
def test_reference(op):
    """Fresh inputs in every run; the seed is in the failure's message. Launched twice in one graph where nothing is
    changed in place: the second must overwrite the first with the same."""
    seed = int(np.random.default_rng().integers(2**32))
    count = 0
    for case in op.cases(np.random.default_rng(seed), "gpu"):
        repeatable = all(output.inout is None for output in case.outputs.values())
        try:
            check_case(op, case, run_case(op, case, GPU, 2 if repeatable else 1))
        except Exception as error:
            raise AssertionError(f"{op.name}, seed {seed}, {case.name}: {type(error).__name__}: {error}") from error
        count += 1
    assert count


def test_a_head_of_a_quarter_million_rows():
    """More tiles than there are counters for tiles in parts, memory beside which is not zero."""
    matmul = next(op for op in all_ops() if op.name == "matmul")
    junk = [GPU.alloc(size, label="test") for size in (4096, 8192, 65536) * 8]
    for buffer in junk:
        GPU.write(buffer, b"\x3c" * buffer.nbytes)
    for buffer in junk[::2]:
        buffer.free()
    case = make_case(np.random.default_rng(), AffineScheme(8, 32, True), "store", 16, 262_144, 640)
    check_case(matmul, case, run_case(matmul, case, GPU, 2))
    for buffer in junk[1::2]:
        assert GPU.read(buffer) == b"\x3c" * buffer.nbytes
        buffer.free()


@pytest.mark.parametrize("scheme", [AffineScheme(4, 32, True), AffineScheme(8, 32, True), DenseScheme("bf16")], ids=str)
def test_a_gate_as_wide_as_a_model(scheme):
    matmul = next(op for op in all_ops() if op.name == "matmul")
    case = make_case(np.random.default_rng(), scheme, "silu", *WIDE_GATE)
    check_case(matmul, case, run_case(matmul, case, GPU, 2))
