"""benchmarks/gpu_runtime.py runs: over the fake driver, whose kernels have the same names; the figures mean nothing."""

from pathlib import Path

from gpu_fixtures import Fake, compile_driver, kernels

from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice


def test_the_benchmark_of_the_runtime_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_runtime

    monkeypatch.setattr(gpu_runtime, "median_us", lambda action, count=3: [action() for _ in range(60)] and 1.0)
    (tmp_path / "copy").mkdir()
    fake = Fake(compile_driver(tmp_path), tmp_path / "copy")
    with CUDADevice(0, CUDADriver(fake.path), kernels()) as device:
        gpu_runtime.measure(device, 0.0625, str(tmp_path))
        assert device.memory().keys() <= {"staging", "bench"}
    said = capsys.readouterr().out
    for words in (
        "alloc 0.0625 GiB",
        "grow by",
        "captured in",
        "copied in and out",
        "not in the page cache",
        "giving the",
    ):
        assert words in said
    assert "WRONG" not in said and not (tmp_path / "zse-gpu-runtime.bin").exists()
