"""Packing kernels on a GPU, through the loader: every bit as NumPy has it; whole models too."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from kernels import repack_cases
from kernels.repack_cases import GPU_CASES

from gpu.harness import device
from zse.formats.opening import open_model
from zse.models import repack_load
from zse.models.load import load_model, plan_model

GPU = device()
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_every_layout(case, mapped, tmp_path, monkeypatch):
    monkeypatch.setattr(repack_load, "STEP_BYTES", case.step_bytes)
    monkeypatch.setattr(GPU, "can_register", mapped)
    repack_cases.check(case, GPU, tmp_path / "w", np.random.default_rng(), lambda jobs: GPU.load(jobs).wait())


def loaded(path, **options) -> bytes:
    with open_model(path) as source:
        model = load_model(GPU, plan_model(source, family="gpu", **options))
        model.wait()
        return GPU.read(model.buffer)


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_a_model_that_is_quantized_on_load(dtype, quantize, tmp_path, monkeypatch):
    path = tiny.write("wide", tmp_path, dtype)
    got = loaded(path, quantize=quantize)
    monkeypatch.setattr(type(GPU), "repacks", False)
    assert got == loaded(path, quantize=quantize)


@pytest.mark.parametrize("type", ["hf-awq"])
def test_a_checkpoint_of_others(type, tmp_path, monkeypatch):
    sys.path.insert(0, str(BENCHMARKS))
    import make_random_model

    arguments = [
        "make_random_model.py",
        str(tmp_path / "m"),
        "--shape",
        "qwen2.5-0.5b",
        "--layers",
        "2",
        "--type",
        type,
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert make_random_model.main() == 0
    got = loaded(tmp_path / "m")
    monkeypatch.setattr(type_of_gpu := GPU.__class__, "repacks", False)
    assert type_of_gpu.repacks is False and got == loaded(tmp_path / "m")
