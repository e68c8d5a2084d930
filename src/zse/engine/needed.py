"""Which CPU kernels a model needs to serve: its engine is built, and its steps are recorded, on a device that has none."""

from types import SimpleNamespace

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.runtime.device import Program
from zse.runtime.null import NullDevice


class AskingDevice(NullDevice):
    """A CPU of an ISA level that notes the kernels it is asked for."""

    def __init__(self, level: str, threads: int):
        super().__init__(threads)
        self.isa, self.asked = level, set[str]()

    def program(self, symbol: str) -> Program:
        self.asked.add(symbol)
        return Program(symbol, 0, {})


def kernels_of(model: str, level: str, threads: int) -> set[str]:
    """The symbols that a start of `model`, a path, and its first requests ask for, with default options; features that a
    request names come on top. Reads the file's head, no weights. Raises as load_engine()."""
    device = AskingDevice(level, threads)
    opening = SimpleNamespace(done=True, result=lambda: device)
    loaded = load_engine(EngineConfig(model=model, device="cpu"), Phases(lambda: 0.0), opening=opening)
    while loaded.engine.runner.record_ahead():
        pass
    loaded.source.close()
    return device.asked | {job.symbol for jobs in device.loads for job in jobs if job.symbol is not None}
