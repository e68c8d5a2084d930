"""The null device: records launches, checks their arguments, runs nothing. For tests of host logic.

Its memory is real, so the host writes inputs and a test's `on_run` writes outputs.
"""

from zse.errors import DeviceError
from zse.runtime.buffer import Account, Buffer
from zse.runtime.device import Device, Graph, Load, Program, Recorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zse.runtime.load import LoadJob


class NullGraph(Graph):
    """runs: the symbols of every `run`, in order."""

    def __init__(self, device: "NullDevice", recorder: Recorder):
        super().__init__(device, recorder)
        self.runs: list[dict[str, int]] = []

    def run(self, **symbols: int) -> None:
        bounds = dict(zip(self.symbols, self.maxima, strict=True))
        if symbols.keys() != bounds.keys() or any(
            not isinstance(value, int) or not 0 <= value <= bounds[name] for name, value in symbols.items()
        ):
            raise self.symbol_error(symbols)
        self.runs.append(symbols)
        device: NullDevice = self.device  # type: ignore[assignment]
        if device.on_run is not None:
            device.on_run(self, symbols)


class NullLoad(Load):
    """Done at once."""

    def __init__(self, jobs: "Sequence[LoadJob]"):
        self.total_bytes = self._bytes = sum(job.nbytes for job in jobs)

    @property
    def done_bytes(self) -> int:
        return self._bytes

    @property
    def finished(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def cancel(self) -> None:
        return


class NullDevice(Device):
    """manifest: {symbol: {"params": [[name, type], ...]}}: launches are checked against it; None accepts any launch.
    on_run(graph, symbols) is called at every replay. loads: the job lists given to `load`. family, arch: whose kernels
    ops shall record; the memory stays the host's."""

    name = "null"
    isa = "null"

    def __init__(
        self,
        threads: int = 1,
        manifest: dict | None = None,
        on_run: "Callable[[NullGraph, dict[str, int]], None] | None" = None,
        family: str = "cpu",
        arch: int = 0,
    ):
        self.threads = threads
        self.family, self.arch = family, arch
        self.on_run = on_run
        self.graphs: list[NullGraph] = []
        self.loads: list[list[LoadJob]] = []
        self._manifest = manifest
        self._account = Account()

    def alloc(self, nbytes: int, label: str = "other") -> Buffer:
        return Buffer(nbytes, label, self._account)

    def memory(self) -> dict[str, int]:
        return dict(self._account.by_label)

    def program(self, symbol: str) -> Program:
        if self._manifest is None:
            return Program(symbol, 0, None)
        if symbol not in self._manifest:
            raise DeviceError(f"no kernel {symbol!r} in the null device's manifest")
        return Program(symbol, 0, self._manifest[symbol]["params"])

    def symbols(self) -> list[str]:
        return sorted(self._manifest or ())

    def _build(self, recorder: Recorder) -> NullGraph:
        self.graphs.append(NullGraph(self, recorder))
        return self.graphs[-1]

    def load(self, jobs: "Sequence[LoadJob]", threads: int | None = None) -> NullLoad:
        self.loads.append(list(jobs))
        return NullLoad(jobs)

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()
