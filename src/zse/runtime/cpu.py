"""The CPU device: kernels from a compiled library, graphs replayed by a C thread pool, weights loaded by C threads."""

import ctypes
from ctypes import byref, c_int32, c_int64
from time import perf_counter_ns

from zse import trust
from zse.errors import DeviceError
from zse.lazy import json
from zse.runtime import native, on_demand, probe
from zse.runtime.buffer import Buffer
from zse.runtime.device import Device, Graph, Program, Recorder, Ticket
from zse.runtime.launch_list import LaunchList
from zse.runtime.load import BackgroundLoad

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from zse.runtime.load import LoadJob


class CPUDevice(Device):
    """threads: of the pool, the caller among them (default: ZSE_THREADS or the physical cores). library, manifest: a
    kernel library and its {symbol: {"params": [[name, type], ...]}} other than the installed ones (tests)."""

    name = "cpu"
    repacks = True
    _pool: int | None = None

    def __init__(self, threads: int | None = None, library: str | None = None, manifest: dict | None = None):
        super().__init__()
        self._runtime = native.runtime()
        if threads is None:
            threads = probe.default_threads()
        self.isa = native.choose_level() if library is None else "custom"
        self._libraries: dict[str, ctypes.CDLL] = {}  # by path, those of parts
        if manifest is None and native.is_part(self.isa):
            manifest = on_demand.KernelsOnDemand(self.isa)
            self._sources = manifest.sources
        else:
            self._kernels = native.open_library(library or native.kernel_library(self.isa))
        if manifest is None:
            path = native.manifest_path(self.isa)
            try:
                with open(path, encoding="utf-8") as file:
                    built = json.load(file)
                manifest, self._sources = built["kernels"], built.get("sources", "")
            except (OSError, ValueError, KeyError) as error:
                raise DeviceError(f"{path}: {error}; run `python -m zse.build --force` to compile it again") from None
        self._manifest = manifest
        if self._sources and trust.has_newer_sources(native.manifest_path(self.isa)):
            self.check_sources()
        status = c_int32()
        self._pool = self._runtime.zse_pool_create(threads, byref(status))
        native.check(f"zse_pool_create({threads} threads)", status.value)
        self.threads = threads

    def alloc(self, nbytes: int, label: str = "other") -> Buffer:
        return Buffer(nbytes, label, self._account)

    def _load_program(self, symbol: str, entry: dict) -> Program:
        try:
            function = getattr(self._library(entry["library"]) if "library" in entry else self._kernels, symbol)
        except AttributeError:
            raise DeviceError(f"the {self.isa} library lacks {symbol!r}; run `python -m zse.build --force`") from None
        return Program(symbol, ctypes.cast(function, ctypes.c_void_p).value or 0, entry)

    def define(self, symbol: str, address: int, params: "list[list[str]]") -> None:
        """Have a kernel that is no compiled one: a C function of the runtime (zse_kernel in zse_runtime.h)."""
        self._programs[symbol] = Program(symbol, address, {"params": params})

    def _library(self, path: str) -> ctypes.CDLL:
        if path not in self._libraries:
            self._libraries[path] = native.open_library(path)
        return self._libraries[path]

    def _build(self, recorder: Recorder) -> Graph:
        has_calls = any(launch.symbol == "host call" for launch in recorder.launches)
        return CalledGraph(self, recorder) if has_calls else CPUGraph(self, recorder)

    def load(self, jobs: "Sequence[LoadJob]", threads: int | None = None, sums: bool = False) -> BackgroundLoad:
        return BackgroundLoad(self, jobs, threads or self.threads, sums)

    @property
    def host(self) -> "CPUDevice":
        """Whose kernels repack weights: its own."""
        return self

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool:
            self._runtime.zse_pool_destroy(pool)

    def __del__(self) -> None:
        self.close()


_DONE = Ticket()


class CPUGraph(Graph):
    """A launch list in C. `run` is one C call, during which other Python threads run."""

    device: CPUDevice
    _graph: int | None = None
    _in_order: int | None = None  # the same launches, each waiting for the one before: made when first profiled

    def __init__(self, device: CPUDevice, recorder: Recorder):
        super().__init__(device, recorder)
        self._run = device._runtime.zse_graph_run
        self._checks = tuple(recorder.checks)
        self._graph = self._create()

    def _create(self, in_order: bool = False) -> int:
        recorded = LaunchList(self, native.LaunchDesc)
        for number, launch in enumerate(self.launches):
            into = recorded.add(number, launch)
            into.fn = self.device.program(launch.symbol).address
            into.depends, into.min_chunk = in_order or not launch.independent, launch.min_chunk
        return recorded.create("zse_graph_create")

    def submit(self, **symbols: int) -> Ticket:
        """As Graph's; what it returns is done."""
        values = self.values_of(symbols)
        if self._graph is None or self.device._pool is None:
            raise self.closed_error()
        # It returns 0 or the caller looks for the reason: the common path is one call.
        if self._run(self.device._pool, self._graph, values, None):
            raise self.symbol_error(symbols)
        for check in self._checks:
            check()
        return _DONE

    def profile(self, **symbols: int) -> "list[tuple[str, int]]":
        """As Graph's, through the same threads: who ends a launch looks at the clock."""
        if self._graph is not None and self._in_order is None:
            self._in_order = self._create(in_order=True)
        values, times = self.values_of(symbols), (c_int64 * len(self.launches))()
        if self._in_order is None or self.device._pool is None:
            raise self.closed_error()
        if self._run(self.device._pool, self._in_order, values, times):
            raise self.symbol_error(symbols)
        return [
            (launch.symbol, end - start) for launch, start, end in zip(self.launches, [0, *times], times, strict=False)
        ]

    def close(self) -> None:
        for graph in (self._graph, self._in_order):
            if graph:
                self.device._runtime.zse_graph_destroy(self.device._pool, graph)
        self._graph = self._in_order = None
        super().close()


class CalledGraph(Graph):
    """Launches with calls of the host between them: a CPUGraph for those between two calls."""

    device: CPUDevice

    def __init__(self, device: CPUDevice, recorder: Recorder):
        super().__init__(device, recorder)
        self._pieces: list[Any] = []  # CPUGraphs and HostCalls
        at = 0
        for number, launch in enumerate([*recorder.launches, None]):
            if launch is None or launch.symbol == "host call":
                if number > at:
                    piece = device.record()
                    piece.launches, piece.maxima = recorder.launches[at:number], recorder.maxima
                    piece.checks = recorder.checks
                    self._pieces.append(CPUGraph(device, piece))
                if launch is not None:
                    self._pieces.append(launch)
                at = number + 1

    def submit(self, **symbols: int) -> Ticket:
        """As Graph's; what it returns is done. What a call of the host raises ends the replay."""
        if self.closed:
            raise self.closed_error()
        self.check_symbols(symbols)
        for piece in self._pieces:
            if isinstance(piece, CPUGraph):
                piece.submit(**symbols)
            else:
                piece.run(symbols)
        return _DONE

    def profile(self, **symbols: int) -> "list[tuple[str, int]]":
        """As Graph's."""
        times: list[tuple[str, int]] = []
        for piece in self._pieces:
            if isinstance(piece, CPUGraph):
                times += piece.profile(**symbols)
            else:
                start = perf_counter_ns()
                piece.run(symbols)
                times.append((piece.symbol, perf_counter_ns() - start))
        return times

    def close(self) -> None:
        for piece in self._pieces:
            if isinstance(piece, CPUGraph):
                piece.close()
        super().close()
