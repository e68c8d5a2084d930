"""Each call of the driver fails once, with each code: one error that says what happened, and nothing else."""

import signal

import pytest
from faulty_driver import CODES, Faulty, sweep
from gpu_fixtures import Fake, compile_driver, kernels

from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def faulty(library, tmp_path):
    return Faulty(Fake(library, tmp_path).path, tmp_path)


LONG = [pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG * (name in ("ECC", "launch timeout"))) for name in CODES]
)
def test_every_call_of_the_driver_fails(name, faulty, monkeypatch):
    monkeypatch.setattr(CUDADriver, "libraries", (faulty.path,))
    signal.alarm(120)  # a hang ends the run
    try:
        runs = sweep(faulty, lambda: CUDADevice(kernels=kernels()), {name: CODES[name]})
    finally:
        signal.alarm(0)
    assert runs > 80
