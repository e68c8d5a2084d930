"""tests/runtime/test_driver_faults.py over the machine's own driver: `pytest tests/gpu/test_driver_faults.py`."""

import pytest
from faulty_driver import CODES, Faulty, sweep

from gpu.machine import isa
from gpu.test_runtime import append
from zse import kernel as zl
from zse.kernel.nvrtc import compile_variant
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice
from zse.runtime.gpu import CompiledKernels


@pytest.mark.parametrize("name", CODES)
def test_every_call_of_the_driver_fails(name, tmp_path, monkeypatch):
    compiled = compile_variant(zl.Variant("append", append, threads=32), isa())
    kernels = CompiledKernels({"append": compiled.manifest() | {"image": "append"}}, lambda image: compiled.cubin)
    faulty = Faulty("libcuda.so.1", tmp_path)
    monkeypatch.setattr(CUDADriver, "libraries", (faulty.path,))
    assert sweep(faulty, lambda: CUDADevice(kernels=kernels), {name: CODES[name]}) > 80
