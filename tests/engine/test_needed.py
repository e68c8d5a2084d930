"""What a model needs is what its engine asks a CPU for."""

import pytest
import tiny_model

from zse.engine import load
from zse.engine.config import EngineConfig
from zse.engine.metrics import Phases
from zse.engine.needed import kernels_of
from zse.runtime.device import Device
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
    needed = kernels_of(path, level, 2)
    assert len(asked) > 10 and needed >= asked and len(needed - asked) <= 2
