"""The null device: records launches, checks their arguments, runs nothing. For tests of host logic.

Its memory is real, so the host writes inputs and a test's `on_run` writes outputs.
"""

from types import SimpleNamespace

from zse.kernel import archs
from zse.runtime.buffer import Buffer
from zse.runtime.device import Device, GPUCapabilities, Graph, Program, Recorder, Ticket
from zse.runtime.load import BackgroundLoad

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from zse.runtime.load import LoadJob


class NullGraph(Graph):
    """runs: the symbols of every `run`, in order."""

    def __init__(self, device: "NullDevice", recorder: Recorder):
        super().__init__(device, recorder)
        self.runs: list[dict[str, int]] = []

    def submit(self, **symbols: int) -> Ticket:
        self.check_symbols(symbols)
        self.runs.append(symbols)
        if self.device.on_run is not None:
            self.device.on_run(self, symbols)
        return Ticket()


class NullLoad(BackgroundLoad):
    """Done at once."""

    def __init__(self) -> None:
        return


class NullDevice(Device):
    """manifest: {symbol: {"params": [[name, type], ...]}}: launches are checked against it; None accepts any launch.
    on_run(graph, symbols) is called at every replay. loads: the job lists given to `load`."""

    name = "null"
    isa = "null"

    def __init__(
        self,
        threads: int = 1,
        manifest: "Mapping[str, dict] | None" = None,
        on_run: "Callable[[NullGraph, dict[str, int]], None] | None" = None,
    ):
        super().__init__()
        self.threads = threads
        self.on_run = on_run
        self.graphs: list[NullGraph] = []
        self.loads: list[list[LoadJob]] = []
        self._accepts_any, self._manifest = manifest is None, manifest or {}

    def alloc(self, nbytes: int, label: str = "other") -> Buffer:
        return Buffer(nbytes, label, self._account)

    def program(self, symbol: str) -> Program:
        return Program(symbol, 0, {}) if self._accepts_any else super().program(symbol)

    def _load_program(self, symbol: str, entry: dict) -> Program:
        return Program(symbol, 0, entry)

    def _build(self, recorder: Recorder) -> NullGraph:
        self.graphs.append(NullGraph(self, recorder))
        return self.graphs[-1]

    def load(self, jobs: "Sequence[LoadJob]", threads: int | None = None, sums: bool = False) -> NullLoad:
        self.loads.append(list(jobs))
        return NullLoad()

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()


class NullGPU(GPUCapabilities, NullDevice):
    """A NullDevice that ops record GPU kernels for: an H200 unless `like` is another architecture of zse.kernel.archs.
    Its memory is the host's, but a Staging has copies and buffers are filled with `write`, as on a GPU."""

    memory_total = memory_free = 140 << 30

    def __init__(
        self,
        like: str = "sm_90a",
        manifest: "Mapping[str, dict] | None" = None,
        on_run: "Callable[[NullGraph, dict[str, int]], None] | None" = None,
    ):
        NullDevice.__init__(self, 0, manifest, on_run)
        number, features = archs.features_of(like)
        self.simt = "simt" in features
        self.arch = 0 if self.simt else number

    def tensor_map(self, tensor: "Any", box: "Sequence[int]", **options: "Any") -> SimpleNamespace:
        """As of CUDADevice, with only the number of dimensions checked."""
        if len(box) != len(options.get("dims") or tensor.shape):
            raise ValueError(f"tensor_map: box {tuple(box)} of a tensor of shape {tensor.shape}")
        return SimpleNamespace(host_address=64, buffer=tensor.buffer)
