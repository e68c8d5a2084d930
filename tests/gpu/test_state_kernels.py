"""Recurrent layers on the CUDA device of this machine: every case of their operations against float64 references, then
real models' sizes, compared and timed.

    PYTHONPATH=src python -m pytest tests/gpu/test_state_kernels.py -s
"""

import pytest

from gpu.harness import device
from zse.bench.kernels import time_ops
from zse.kernels.table import all_ops

GPU = device()
NAMES = ("conv", "delta", "scan", "gated_norm", "gate_output")


@pytest.mark.parametrize("op", [op for op in all_ops() if op.name in NAMES], ids=lambda op: op.name)
def test_reference_and_time(op):
    def report(line, ceiling):
        share = line.gigabytes / ceiling
        teraflops = line.flops / line.microseconds / 1e6
        print(
            f"{line.op:12} {line.case:42} {line.microseconds:9.1f} us {line.gigabytes:7.0f} GB/s {share:4.0%} of "
            f"reading {teraflops:6.1f} TFLOP/s {'ok' if line.checked else 'WRONG'}",
            flush=True,
        )

    _, lines = time_ops(GPU, [op], report)
    assert lines and all(line.checked for line in lines)
