"""The CPU device: kernels from a compiled library, graphs replayed by a C thread pool, weights loaded by C threads."""

import ctypes
from ctypes import byref, c_int32, c_int64

from zse.errors import DeviceError
from zse.lazy import json
from zse.runtime import native, probe
from zse.runtime.buffer import Account, Buffer
from zse.runtime.device import Device, Graph, Program, Recorder
from zse.runtime.launch_list import LaunchList
from zse.runtime.load import Load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from zse.runtime.load import LoadJob


class CPUDevice(Device):
    """threads: of the pool, the caller among them (default: ZSE_THREADS or the physical cores). library, manifest: a
    kernel library and its {symbol: {"params": [[name, type], ...]}} other than the installed ones (tests)."""

    name = "cpu"

    def __init__(self, threads: int | None = None, library: str | None = None, manifest: dict | None = None):
        self._runtime = native.runtime()
        if threads is None:
            threads = probe.default_threads()
        if library is None:
            self.isa = native.choose_level()
            library = native.kernel_library(self.isa)
            path = native.manifest_path(self.isa)
        else:
            self.isa, path = "custom", ""
        self._kernels = native.open_library(library)
        if manifest is None:
            try:
                with open(path, encoding="utf-8") as file:
                    built = json.load(file)
                manifest, self._sources = built["kernels"], built.get("sources", "")
            except (OSError, ValueError, KeyError) as error:
                raise DeviceError(f"{path}: {error}; run `python -m zse.build --force` to compile it again") from None
        self._manifest: dict = manifest
        self._programs: dict[str, Program] = {}
        self._account = Account()
        status = c_int32()
        self._pool = self._runtime.zse_pool_create(threads, byref(status))
        native.check(f"zse_pool_create({threads} threads)", status.value)
        self.threads = threads

    def alloc(self, nbytes: int, label: str = "other") -> Buffer:
        return Buffer(nbytes, label, self._account)

    def program(self, symbol: str) -> Program:
        found = self._programs.get(symbol)
        if found is None:
            entry = self._manifest.get(symbol)
            if entry is None:
                raise self.no_kernel(symbol, self._manifest)
            try:
                function = getattr(self._kernels, symbol)
            except AttributeError:
                raise DeviceError(
                    f"the {self.isa} library lacks {symbol!r}; run `python -m zse.build --force`"
                ) from None
            address = ctypes.cast(function, ctypes.c_void_p).value or 0
            found = self._programs[symbol] = Program(symbol, address, entry["params"])
        return found

    def symbols(self) -> list[str]:
        return sorted(self._manifest)

    def _build(self, recorder: Recorder) -> "CPUGraph":
        return CPUGraph(self, recorder)

    def load(self, jobs: "Sequence[LoadJob]", threads: int | None = None) -> Load:
        return Load(self, jobs, threads or self.threads)

    @property
    def host(self) -> "CPUDevice":
        """Whose kernels repack weights: its own."""
        return self

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool:
            self._runtime.zse_pool_destroy(pool)

    def __del__(self) -> None:
        if getattr(self, "_pool", None):
            self.close()


class CPUGraph(Graph):
    """A launch list in C. `run` is one C call, during which other Python threads run."""

    def __init__(self, device: CPUDevice, recorder: Recorder):
        self._graph: int | None = None
        super().__init__(device, recorder)
        self._runtime = device._runtime
        self._profile: CPUGraph | None = None
        recorded = LaunchList(self, native.LaunchDesc)
        for number, launch in enumerate(self.launches):
            into = recorded.add(number, launch)
            into.fn = device.program(launch.symbol).address
            into.depends, into.min_chunk = not launch.independent, launch.min_chunk
        self._values_type = c_int64 * len(self.symbols)
        self._graph = recorded.create("zse_graph_create")
        # A replay returns 0 or the caller looks for the reason: the common path is one call.
        self._run = self._runtime.zse_graph_run

    def run(self, **symbols: int) -> None:
        try:
            values = self._values_type(*[symbols[name] for name in self.symbols])
        except (KeyError, TypeError):
            raise self.symbol_error(symbols) from None
        if len(symbols) != len(self.symbols):
            raise self.symbol_error(symbols)
        if self._graph is None or self.device._pool is None:  # type: ignore[attr-defined]
            raise DeviceError("the graph or its device was closed")
        if self._run(self.device._pool, self._graph, values, None):  # type: ignore[attr-defined]
            raise self.symbol_error(symbols)

    def profile(self, **symbols: int) -> "list[tuple[str, int]]":
        """As Graph's, through the same threads; the caller looks at the clock, so what it sleeps through on a busy
        machine counts for the launch that it slept in."""
        if symbols.keys() != set(self.symbols):
            raise self.symbol_error(symbols)
        if self._graph is None or self.device._pool is None:  # type: ignore[attr-defined]
            raise DeviceError("the graph or its device was closed")
        if self._profile is None:
            recorder = self.device.record()
            for name, maximum in zip(self.symbols, self.maxima, strict=True):
                recorder.symbol(name, maximum)
            for launch in self.launches:
                recorder.launch(launch.symbol, launch.args, launch.grid, False, launch.min_chunk)
            self._profile = CPUGraph(self.device, recorder)  # type: ignore[arg-type]
        twin = self._profile
        times = (c_int64 * len(self.launches))()
        try:
            values = twin._values_type(*[symbols[name] for name in self.symbols])
        except TypeError:
            raise self.symbol_error(symbols) from None
        if self._run(self.device._pool, twin._graph, values, times):  # type: ignore[attr-defined]
            raise self.symbol_error(symbols)
        ends = list(times)
        return [
            (launch.symbol, end - start) for launch, start, end in zip(self.launches, [0, *ends], ends, strict=False)
        ]

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph:
            self._runtime.zse_graph_destroy(self.device._pool, graph)  # type: ignore[attr-defined]
        if getattr(self, "_profile", None):
            self._profile.close()  # type: ignore[union-attr]
            self._profile = None
        super().close()

    def __del__(self) -> None:
        if hasattr(self, "_buffers"):
            self.close()
