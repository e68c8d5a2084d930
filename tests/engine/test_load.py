"""Loading that fails: what was started is stopped, and the error says why."""

import threading
from types import SimpleNamespace

import pytest
import tiny_model

from zse.engine import load
from zse.engine.config import EngineConfig
from zse.engine.metrics import Phases
from zse.errors import ConfigError, FormatError


def test_a_failure_after_reading_began_stops_the_readers(tmp_path):
    path = tiny_model.write(tmp_path / "tiny")
    sources = []
    before = threading.active_count()
    with pytest.raises(ConfigError, match="more than this model's context of 256"):
        load.load_engine(EngineConfig(model=str(path), max_context=300), Phases(lambda: 0.0), sources.append)
    assert threading.active_count() == before
    with pytest.raises(OSError):  # closed
        import os

        os.fstat(sources[0].files[0].fd)


def test_a_truncated_file_is_a_format_error(tmp_path):
    path = tiny_model.write(tmp_path / "tiny")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(FormatError, match="model.safetensors: offset"):
        load.load_engine(EngineConfig(model=str(path)), Phases(lambda: 0.0))


def test_graphs_are_switched_off_before_any_is_recorded(tmp_path, monkeypatch):
    from zse.runtime.cpu import CPUDevice

    monkeypatch.setattr(CPUDevice, "supports_capture", True)
    found = []
    for graphs in (True, False):
        config = EngineConfig(model=str(tiny_model.write(tmp_path / f"tiny{graphs}")), device="cpu", graphs=graphs)
        loaded = load.load_engine(config, Phases(lambda: 0.0))
        found.append(loaded.device.supports_capture)
        loaded.engine.close()
        loaded.source.close()
    assert found == [True, False]


def test_phases_come_in_order(tmp_path):
    times = iter(range(100))
    phases = Phases(lambda: next(times))
    loaded = load.load_engine(EngineConfig(model=str(tiny_model.write(tmp_path / "tiny"))), phases)
    assert list(phases.ms) == [
        "file open",
        "device open",
        "weights reading",
        "engine built",
        "prefill recorded",
        "weights loaded",
    ]
    assert loaded.memory_bytes["kv cache"] == loaded.config.kv_bytes == loaded.engine.runner.kv.nbytes
    loaded.engine.close()
    loaded.source.close()


def test_a_wrong_option_closes_the_device_that_opens_already():
    closed = []

    class Opening:
        def result(self):
            return self

        def close(self):
            closed.append(True)

    with pytest.raises(ConfigError, match="unknown engine option --nothing"):
        load.build_from_arguments(["--model", "m", "--nothing", "1"], Phases(lambda: 0.0), Opening())
    assert closed


@pytest.mark.parametrize(
    "available, limit, room", [(8 << 30, None, 4 << 30), (2 << 30, 3 << 30, 1 << 30), (0, 2 << 30, 0), (None, None, 0)]
)
def test_no_more_is_read_ahead_than_memory_keeps(monkeypatch, available, limit, room):
    """A page that went before the loader came would be read twice."""
    asked = []
    monkeypatch.setattr(load.loads, "ReadAhead", lambda files, room: asked.append((files, room)))
    monkeypatch.setattr(load.probe, "memory_bytes", lambda: {"available": available, "total": 1 << 40, "limit": limit})
    cold, warm = SimpleNamespace(is_cold=True), SimpleNamespace(is_cold=False)
    load._read_ahead("cuda:0", [cold, warm])
    load._read_ahead("cpu", [cold])
    assert asked == [([cold], room), ([], 0)]


@pytest.mark.parametrize("room, sizes", [(99, [8, 3]), (10, [8, 2]), (8, [8]), (3, [3]), (0, None)])
def test_reading_ahead_ends_where_its_room_does(monkeypatch, room, sizes):
    asked = []
    monkeypatch.setattr(load.loads.BackgroundLoad, "__init__", lambda ahead, device, jobs, threads: asked.append(jobs))
    load.loads.ReadAhead([SimpleNamespace(fd=3, size=8, path="a"), SimpleNamespace(fd=4, size=3, path="b")], room)
    assert [[job.nbytes for job in jobs] for jobs in asked] == ([sizes] if sizes else [])


def test_what_reads_ahead_goes_on_beside_a_gpus_loader(tmp_path, monkeypatch):
    """Of a cold disk both read more than the loader alone; when the weights are there, no more is read."""
    from zse.models.load import Model
    from zse.runtime.cpu import CPUDevice

    happened = []

    class Ahead:
        def __getattr__(self, name):
            return lambda: happened.append(f"ahead {name}")

    def noted(name, call):
        def wrapper(self, *args):
            happened.append(name)
            return call(self, *args)

        return wrapper

    for name in ("start", "wait"):
        monkeypatch.setattr(Model, name, noted(f"weights {name}", getattr(Model, name)))
    monkeypatch.setattr(load, "_read_ahead", lambda device, files: Ahead())
    # A device that is asked before its memory is planned has none: the weights are read after the engine is built, as a GPU's.
    room = iter([0])
    total = CPUDevice.memory_total
    monkeypatch.setattr(CPUDevice, "memory_total", property(lambda device: next(room, total.__get__(device))))
    loaded = load.load_engine(EngineConfig(model=str(tiny_model.write(tmp_path / "tiny"))), Phases(lambda: 0.0))
    loaded.engine.close()
    loaded.source.close()
    wait = ["weights wait", "weights start"]  # it starts what was not
    assert happened == ["weights start", *wait, "ahead stop", "ahead wait"]


def order_of_a_start(config: EngineConfig, device, happened: list[str]) -> list[str]:
    """What a GPU is asked for by a start: the weights' memory, their load, other memory."""
    happened.clear()
    opening = SimpleNamespace(done=True, result=lambda: device)
    loaded = load.load_engine(config, Phases(lambda: 0.0), opening=opening)
    loaded.engine.close()
    loaded.source.close()
    return happened


def test_a_gpu_s_weights_are_read_while_the_engine_is_built(tmp_path, monkeypatch):
    """Where the memory's plan cannot want them elsewhere, the disk is not waited for and there are cores enough. Files are not registered:
    the driver gives no memory while it does."""
    from zse.engine.needed import AskingGPU
    from zse.runtime.null import NullGPU

    happened: list[str] = []

    class Noting(AskingGPU):
        def alloc(self, nbytes, label="other"):
            happened.append("weights" if label == "weights" else "memory")
            return super().alloc(nbytes, label)

        def load(self, *args, **options):
            happened.append("reading" if self.allocates else "loading")
            return super().load(*args, **options)

    def phases(**options) -> list[str]:
        config = EngineConfig(model=path, device="cuda", **options)
        order = order_of_a_start(config, Noting(gpu), happened)
        return [what for number, what in enumerate(order) if order[number - 1] != what or not number]

    path, gpu = str(tiny_model.write(tmp_path / "tiny", head_dim=64)), NullGPU("sm_90a")
    gpu.isa = "sm_90a"
    late = ["weights", "memory", "loading"]
    monkeypatch.setattr(load.loads, "reads_beside", lambda: True)
    assert phases() == ["weights", "reading", "memory"]
    assert phases(resident_layers=1) == ["memory", *late]  # what is asked for how quick the way there is
    with monkeypatch.context() as patch:
        patch.setattr(load.loads, "reads_beside", lambda: False)
        assert phases()[:3] == late
    with monkeypatch.context() as patch:
        patch.setattr("zse.formats.file.ModelFile.is_cold", True)
        patch.setattr(load.loads.ReadAhead, "finished", False)
        assert phases()[:3] == late
    with monkeypatch.context() as patch:
        patch.setattr(Noting, "registered", SimpleNamespace(hold=lambda files: True))
        patch.setattr(load.loads, "reads_beside", lambda: False)
        assert phases() == ["weights", "loading", "memory"]


def test_weights_that_were_read_for_nothing_leave_the_gpu(tmp_path, monkeypatch):
    """The context, with which its memory goes, stays where another engine of the process has the GPU."""
    from zse.engine.needed import AskingGPU
    from zse.runtime.null import NullGPU

    monkeypatch.setattr(load.loads, "reads_beside", lambda: True)
    path, gpu = str(tiny_model.write(tmp_path / "tiny", head_dim=64)), NullGPU("sm_90a")
    gpu.isa = "sm_90a"
    asked = AskingGPU(gpu)
    opening = SimpleNamespace(done=True, result=lambda: asked)
    with pytest.raises(ConfigError, match="more than this model's context of 256"):
        load.load_engine(EngineConfig(model=path, device="cuda", max_context=300), Phases(lambda: 0.0), opening=opening)
    assert asked.loads and not any(asked.memory().values())
