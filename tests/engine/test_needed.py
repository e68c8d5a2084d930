"""What a model needs is what its engine asks a CPU for."""

import pytest
import tiny_model

from zse.engine import load
from zse.engine.config import EngineConfig
from zse.engine.metrics import Phases
from zse.kernel import cache
from zse.runtime.device import Device
from zse.runtime.null import NullGPU
from zse.sampling.params import SamplingParams


@pytest.fixture
def asked(monkeypatch) -> set[str]:
    """The kernels that devices are asked for."""
    found, program = set(), Device.program

    def noting(device, symbol):
        found.add(symbol)
        return program(device, symbol)

    monkeypatch.setattr(Device, "program", noting)
    return found


def test_the_kernels_of_a_model_are_those_that_its_engine_asks_for(tmp_path, asked):
    path = str(tiny_model.write(tmp_path / "tiny"))
    loaded = load.load_engine(EngineConfig(model=path, device="cpu", threads=2), Phases(lambda: 0.0))
    engine = loaded.engine
    for id, prompt in enumerate(([5, 6, 7] * 40, [5], [8] * 9)):
        engine.submit(id, prompt, SamplingParams(max_tokens=8, ignore_eos=True, seed=id, temperature=0.5 * id))
    while engine.has_work:
        engine.step()
    level = engine.runner.device.isa
    engine.close()
    loaded.source.close()
    needed = load.kernels_of(path, level, 2)
    assert len(asked) > 10 and needed >= asked and len(needed - asked) <= 2


def test_the_kernels_of_a_model_on_a_gpu(tmp_path):
    """A GPU is not needed to tell; that no more are asked for is seen on one (tests/gpu/test_engine.py)."""
    path, gpu = str(tiny_model.write(tmp_path / "tiny", head_dim=64)), NullGPU("sm_80")
    gpu.isa = "sm_80"
    needed = load.gpu_kernels_of(EngineConfig(model=path, device="cuda", quantize="int4"), gpu)
    known = cache.package_variants("sm_80")
    of_the_host = {symbol for symbol in needed if symbol not in known}
    assert len(needed) > 15 and all(symbol.startswith("repack_") for symbol in of_the_host)
    for start in ("attention_decode_bf16_d64", "attention_plan", "matmul_small_int4", "sample_", "embed_"):
        assert any(symbol.startswith(start) for symbol in needed), start
    assert not gpu.graphs and not gpu.memory()
