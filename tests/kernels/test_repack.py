"""Packing kernels against NumPy, bit for bit: on the CPU through the loader's threads, and the GPU's text in the emulator."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels import repack_cases
from kernels.repack_cases import CASES, GPU_CASES, Case
from zse.errors import FormatError
from zse.formats.opening import open_model
from zse.kernels import repack_pieces
from zse.models import repack_load
from zse.models.load import load_model, plan_model
from zse.quant import quantize
from zse.quant.scheme import AffineScheme, Fp8Scheme
from zse.runtime.cpu import CPUDevice
from zse_emulator import EmulateDevice

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cpu():
    with CPUDevice(2) as device:
        yield device


@pytest.fixture(scope="module")
def emulated():
    class Repacks(EmulateDevice):
        repacks = True

        def read(self, tensor):
            import ctypes

            return ctypes.string_at(tensor.address, tensor.nbytes)

        def write(self, tensor, data):
            import ctypes

            ctypes.memmove(tensor.address, bytes(data), len(data))

    with Repacks() as device:
        yield device


def on_cpu(device):
    return lambda jobs: device.load(jobs).wait()


def in_steps(device):
    return lambda jobs: repack_cases.run_steps(device, jobs)


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu(case, cpu, rng, tmp_path, monkeypatch):
    monkeypatch.setattr(repack_load, "PIECE_BYTES", case.step_bytes)
    monkeypatch.setattr(repack_pieces, "RUN_BYTES", 64)  # so that matrices of few rows are read in runs, too
    repack_cases.check(case, cpu, tmp_path / "w", rng, on_cpu(cpu))


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_in_the_emulator(case, emulated, rng, tmp_path, monkeypatch):
    monkeypatch.setattr(repack_load, "STEP_BYTES", case.step_bytes)
    repack_cases.check(case, emulated, tmp_path / "w", rng, in_steps(emulated))


INT4 = AffineScheme(4, 32, False)
WRONG = [
    (Case("rows", (16, 64), INT4, "F32"), "w", np.nan, "a value is NaN or infinite"),
    (Case("rows", (20, 64), AffineScheme(8, 32, True), "BF16"), "w", np.inf, "a value is NaN or infinite"),
    (Case("rows", (16, 64), INT4, "F32"), "w", -70000.0, "the value 70000(.0)? does not fit in f16"),
    (Case("awq", (16, 64), INT4, "F32"), "scale", 1e6, "a scale does not fit in f16"),
    (Case("packed", (16, 64), AffineScheme(8, 64, True), "BF16"), "scale", -np.inf, "a scale does not fit in f16"),
    (Case("gptq", (16, 64), AffineScheme(8, 32, False)), "scale", 60000.0, "an offset does not fit in f16"),
    (Case("awq", (16, 64), INT4, "F32"), "scale", np.nan, "an offset does not fit in f16"),
]
WRONG_ON_GPU = [(Case("rows", (3, 64), Fp8Scheme("row"), "F16"), "w", np.nan, "a value is NaN or infinite")]


def check_wrong(case, role, value, reason, device, run, path, rng):
    """The kernels and NumPy refuse the same, in the same words."""
    arrays = repack_cases.stored(case, rng)
    type, array = arrays[role]
    array.flat[rng.integers(array.size)] = repack_cases.as_type(np.float32([value]), type)[0]
    if role == "scale" and "zero" in arrays:
        arrays["zero"][1][:] = 0x77777777
    if value == 60000.0:
        arrays["zero"][1][:] = 0xFFFFFFFF
    with pytest.raises(FormatError, match=f"weight: cannot become {case.scheme}: {reason}"):
        repack_cases.load(case, device, path, rng, run, arrays)
    with pytest.raises(ValueError, match=reason), np.errstate(all="ignore"):
        repack_cases.reference(case, repack_cases.Source(path, arrays), None)


@pytest.mark.parametrize("case, role, value, reason", WRONG)
def test_what_cannot_be_held_on_the_cpu(case, role, value, reason, cpu, rng, tmp_path):
    check_wrong(case, role, value, reason, cpu, on_cpu(cpu), tmp_path / "w", rng)


@pytest.mark.parametrize("case, role, value, reason", WRONG + WRONG_ON_GPU)
def test_what_cannot_be_held_on_a_gpu(case, role, value, reason, emulated, rng, tmp_path):
    check_wrong(case, role, value, reason, emulated, in_steps(emulated), tmp_path / "w", rng)


def test_numpy_adds_in_the_order_of_the_columns(rng):
    """What makes the kernels' sums the same bits."""
    for size, count in ((32, 2), (128, 2), (16, 3), (4096, 2), (7, 500)):
        values = rng.standard_normal((size, count)).astype(np.float32)
        total = np.zeros(count, np.float32)
        for row in values:
            total = total + row
        assert np.array_equal(quantize._total(values), total)


@pytest.mark.parametrize("kind", ["AWQ", "GPTQ", "int4", "int8"])
def test_a_start_without_numpy(kind, tmp_path, monkeypatch):
    """A whole model, by a process of its own; every byte as with NumPy."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import make_random_model

    folder, type = str(tmp_path / "m"), f"hf-{kind.lower()}" if kind.isupper() else "hf-bf16"
    arguments = ["make_random_model.py", folder, "--shape", "tiny", "--type", type, "--threads", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert make_random_model.main() == 0
    option = None if kind.isupper() else kind
    done = subprocess.run(
        [sys.executable, "-c", LOAD, folder, option or ""], capture_output=True, text=True, check=True
    )
    monkeypatch.setattr(CPUDevice, "repacks", False)
    with CPUDevice(2) as device, open_model(folder) as source:
        model = load_model(device, plan_model(source, quantize=option))
        model.wait()
        assert done.stdout.split() == [hashlib.sha256(model.buffer.view()).hexdigest(), "False"]


LOAD = """
import hashlib, sys
from zse.formats.opening import open_model
from zse.models.load import load_model, plan_model
from zse.runtime.cpu import CPUDevice
with CPUDevice(2) as device, open_model(sys.argv[1]) as source:
    model = load_model(device, plan_model(source, quantize=sys.argv[2] or None))
    model.wait()
    print(hashlib.sha256(model.buffer.view()).hexdigest(), "numpy" in sys.modules)
"""
