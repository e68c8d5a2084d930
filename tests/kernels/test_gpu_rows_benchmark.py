"""benchmarks/gpu_rows.py: every launch of it is a correct one, in the emulator and small."""

import runpy
from pathlib import Path

import pytest

from zse_emulator import EmulateDevice

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_rows.py"


@pytest.fixture
def bench(monkeypatch, kept_kernels):
    names = runpy.run_path(str(SCRIPT))
    names["norms"].__globals__.update(ROWS=(1, 2, 3), SAMPLED=((1, 8), (2, 3)), sets_for=lambda nbytes: 1)
    timed = []

    def once(self, name, launch, inputs, nbytes, launches=200):
        self.device.run(lambda recorder: launch(recorder, inputs[0]))
        timed.append(name)

    monkeypatch.setattr(names["Bench"], "time", once)
    with EmulateDevice() as device:
        yield names, names["Bench"](device), timed


def test_every_launch_runs(bench):
    names, bench, timed = bench
    for part, size in (("norms", 64), ("activations", 128), ("step", 128), ("samplers", 4400)):
        before = len(timed)
        names[part](bench, size)
        assert len(timed) > before
    assert len(timed) == len(set(timed))
