"""zse kernels bench on the emulated GPU: what it times it also checks, and a wrong kernel is called wrong."""

import numpy as np
import pytest

from zse.bench import kernels
from zse.errors import ConfigError
from zse.kernels import matmul as matmul_op
from zse.kernels.gpu import matmul_sizes
from zse.kernels.op import OutputSpec, Tolerance
from zse.kernels.table import all_ops
from zse_emulator import EmulateDevice


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(kernels, "TARGET_S", 1e-6)
    monkeypatch.setattr(kernels, "REPEATS", 1)
    monkeypatch.setattr(kernels, "CEILING_BYTES", 1 << 16)
    made = EmulateDevice("sm_90a")
    made.l2_bytes = 1 << 10
    return made


def test_lines(device):
    seen = []
    ceiling, lines = kernels.time_ops(
        device, kernels.package_ops(["gather_rows"]), lambda line, ceiling: seen.append(line)
    )
    assert ceiling > 0 and seen == lines and lines
    assert all(line.checked and line.microseconds > 0 and line.bytes > 0 and line.gigabytes > 0 for line in lines)
    assert not device.memory().get("bench"), "buffers were not given back"


def test_sizes_of_matmul_are_checked(device, monkeypatch):
    """The same cases with small matrices: all formats, the parts that are compared, and a result that is wrong."""
    monkeypatch.setattr(
        matmul_sizes, "SHAPES", {"qkv": (96, 256, "store"), "o": (64, 256, "accumulate"), "gate_up": (256, 256, "silu")}
    )
    monkeypatch.setattr(matmul_sizes, "TOKENS", (1, 8))
    seen = set()
    for case, expected in matmul_sizes.sizes(np.random.default_rng()):
        seen.add(str(case.inputs["weight"].scheme))
        wanted = expected()
        assert kernels.check(device, matmul_op.MATMUL, case, wanted), case.name
        index, array = wanted["out"]
        if case.name.endswith("qkv 1 x 96 x 256"):
            assert not kernels.check(device, matmul_op.MATMUL, case, {"out": (index, array + 1)})
    assert len(seen) == len(matmul_sizes.SCHEMES)


def test_nan_agrees_with_nan_only():
    output = OutputSpec((2,), "float32", Tolerance(0.1, 0.0, "a test"))
    nan = float("nan")
    assert not kernels.difference(np.array([1.05, nan]), np.array([1.0, nan]), output)
    assert kernels.difference(np.array([1.05, nan]), np.array([1.0, 2.0]), output)
    assert kernels.difference(np.array([1.05, 2.0]), np.array([1.0, nan]), output)


def test_unknown_operation():
    with pytest.raises(ConfigError, match="there are .*matmul"):
        kernels.package_ops(["nothing"])


def test_every_gpu_operation_can_be_timed():
    """Its cases have a cost, which the figures are divided by."""
    for op in all_ops():
        if op.gpu_variants and op.sizes is None:
            assert any(op.cost(case).bytes > 0 for case in op.cases(np.random.default_rng(), "gpu")), op.name
