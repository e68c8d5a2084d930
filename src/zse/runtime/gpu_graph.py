"""Recorded launch lists on a GPU: walked in C, or replayed as a captured graph once the same numbers come again."""

import ctypes
from ctypes import byref, c_int64

from zse.errors import DeviceError
from zse.lazy import logging
from zse.runtime import native
from zse.runtime.bindings.driver import pointer_array
from zse.runtime.device import Copy, Graph, Launch, Recorder, Ticket
from zse.runtime.fetch import Await, Fetch, HostFunction
from zse.runtime.launch_list import LaunchList

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.gpu import GPUDevice

CAPTURE_RELAXED = 2  # CUstreamCaptureMode: calls of other threads do not disturb the capture
# Captured graphs of a device: 0.8 MiB of its memory each, for a decode step of 300 launches (H200). Steps of many rows,
# whose numbers vary more, last longer than their lists take to walk.
MAX_CAPTURED = 96
# A wait polls this long and then sleeps in the driver. Sleeping is seen 10 µs later than polling (H200): 1 % of a step
# of 1 ms, nothing of longer ones, where a core would be burned.
SPIN_US = 2_000
MAX_REMEMBERED = 1024  # numbers seen once
KINDS = {
    "upload": native.GPU_UPLOAD,
    "download": native.GPU_DOWNLOAD,
    "fetch": native.GPU_FETCH,
    "await": native.GPU_AWAIT,
    "host function": native.GPU_HOST,
}
CALLS = {
    "upload": "to_device_async",
    "download": "to_host_async",
    "fetch": "to_device_async",
    "await": "stream_wait_event",
    "host function": "launch_host",
}


def _check_grid(launch: Launch, cluster: int) -> None:
    for dim, size in enumerate(launch.grid):
        most = 65535 if dim else 0x7FFFFFFF
        if isinstance(size, int) and size > most:
            raise ValueError(f"{launch.symbol}: grid {launch.grid}: dimension {dim} is at most {most} on a GPU")
    if isinstance(launch.grid[0], int) and launch.grid[0] % cluster:
        raise ValueError(f"{launch.symbol}: grid {launch.grid} is no multiple of its cluster of {cluster}")


class GPUTicket(Ticket):
    """A submitted replay."""

    __slots__ = ("_device", "_event", "_graph")

    def __init__(self, device: "GPUDevice", event: int, graph: "GPUGraph"):
        self._device, self._event, self._graph = device, event, graph

    @property
    def done(self) -> bool:
        if not self._event:
            return True
        self._device.use()
        status = self._device.driver.function("event_query")(self._event)
        if status == native.GPU_NOT_READY:
            return False
        self._finish(status)
        return True

    def wait(self) -> None:
        if self._event:
            device = self._device
            if device.closed:
                raise DeviceError("the device was closed before the ticket was waited for")
            self._finish(device._runtime.zse_gpu_wait(device.table, self._event, SPIN_US))

    def _finish(self, status: int) -> None:
        event, self._event = self._event, 0
        if status:
            raise self._device.driver.error("event_wait", status, f"running {self._graph.describe()}")
        self._device.give_event(event)
        for check in self._graph.checks:
            check()

    def __del__(self) -> None:
        if self._event and not self._device.closed:
            self._device.give_event(self._event)  # recording an event again replaces what it stood for


class GPUGraph(Graph):
    """A launch list. `submit` puts it into the compute stream: by walking it in C, or, when the same symbol values were
    submitted before, as a captured graph (a device keeps MAX_CAPTURED, the least recently used goes first)."""

    device: "GPUDevice"
    _list: int | None = None

    def __init__(self, device: "GPUDevice", recorder: Recorder):
        super().__init__(device, recorder)
        self._runtime, self.checks = device._runtime, tuple(recorder.checks)
        recorded = LaunchList(self, native.GPULaunch)
        # A kernel that overlaps may read weights before the launch before has ended, and ends in an order that only
        # kernels know. Where copies run beside, the link takes the time, and what overlapping saves (1 us a launch) is
        # nothing.
        overlaps = device.overlaps and not any(isinstance(launch, Fetch) for launch in self.launches)
        for number, launch in enumerate(self.launches):
            if not isinstance(launch, Launch):
                into, slots = recorded.launches[number], recorded.slots
                into.kind, into.first_arg = KINDS[launch.symbol], len(slots)
                slots += self._slots_of(launch)
                into.num_args = len(slots) - into.first_arg
                continue
            program = device.program(launch.symbol)
            _check_grid(launch, program.cluster)
            into = recorded.add(number, launch)
            into.function, into.overlaps = program.address, overlaps
            into.threads, into.shared_bytes, into.cluster = program.threads, program.shared_bytes, program.cluster
            into.wide = sum(1 << place for place, (_, kind) in enumerate(launch.params or ()) if kind == "tensormap")
        self._where = c_int64()
        self._captured: dict[tuple[int, ...], int | None] = {}  # values → the captured graph; None: seen once
        self.can_capture = device.supports_capture and len(self.launches) > 1
        self._list = recorded.create("zse_gpu_list_create")
        device._graphs.add(self)

    def _slots_of(self, launch: Copy | Fetch | Await | HostFunction) -> list[int]:
        """As zse_gpu.h has them."""
        if isinstance(launch, Copy):
            host = launch.staging.host_address  # type: ignore[attr-defined]
            return [launch.staging.buffer.address + launch.offset, host + launch.offset, launch.nbytes]
        if isinstance(launch, HostFunction):
            return [launch.function, launch.argument]
        if isinstance(launch, Await):
            return [self.device.fetch_event(launch.number)]
        source = launch.source
        events = [self.device.fetch_event(number) for number in (-1, launch.number)]
        return [launch.destination.address, source.address, source.nbytes, *events]

    def prepare(self, **symbols: int) -> None:
        """Capture the graph for these values now (about 3 µs a launch), not at their second replay."""
        values, device = self.values_of(symbols), self.device
        with device.submit_lock:
            if self._list is None:
                raise self.closed_error()
            device.use()
            if self.can_capture:
                self._captured.setdefault(tuple(values), None)
                self._executable(values, symbols)

    def submit(self, **symbols: int) -> GPUTicket:
        values, device = self.values_of(symbols), self.device
        with device.submit_lock:  # close() takes it too
            if self._list is None:
                raise self.closed_error()
            if device.closed or device.driver.lost is not None:
                device.use()
            event = device.take_event()
            executable = self._executable(values, symbols) if self.can_capture else None
            status = self._runtime.zse_gpu_list_submit(
                device.table,
                self._list,
                device.stream,
                device.copy_stream,
                values,
                executable,
                event,
                None,
                self._where,
            )
            if status:
                where = self._where.value
                device.give_event(event)
                raise self._error(status, where, symbols)
        return GPUTicket(device, event, self)

    def _error(self, status: int, where: int, symbols: "dict[str, int]") -> Exception:
        if status == native.ERANGE:
            return (
                self.symbol_error(symbols)
                if where >= 0
                else DeviceError("a grid of the graph is negative or too large")
            )
        driver = self.device.driver
        if where >= len(self.launches):
            return driver.error("graph_launch", status, self.describe())
        launch = self.launches[where]
        role = CALLS.get(launch.symbol, "launch_ex")
        return driver.error(
            role if driver.has(role) else "launch", status, f"{launch.symbol}, launch {where}, grid {launch.grid}"
        )

    # -- captured graphs

    def _executable(self, values: "ctypes.Array[c_int64]", symbols: "dict[str, int]") -> int | None:
        """The captured graph for these values: None the first time, made the second time."""
        captured, key = self.device.captured, tuple(values)
        found = self._captured.get(key, 0)
        if found:
            captured.move_to_end((self, key))
            return found
        if found == 0:
            self._captured[key] = None
            if len(self._captured) > MAX_REMEMBERED:
                self._forget(next(iter(self._captured)))
            return None
        executable = self._capture(values, symbols)
        if executable is not None:
            if len(captured) >= MAX_CAPTURED:
                graph, oldest = next(iter(captured))
                graph._forget(oldest)
            self._captured[key] = executable
            captured[self, key] = None
        return executable

    def _forget(self, key: tuple[int, ...]) -> None:
        executable = self._captured.pop(key)
        if executable:
            del self.device.captured[self, key]
            self.device.driver.executable_destroy(executable)

    def _capture(self, values: "ctypes.Array[c_int64]", symbols: "dict[str, int]") -> int | None:
        """Walk the list into a capture. None when this driver cannot capture it: it is walked from then on."""
        device = self.device
        driver = device.driver
        device.use()
        streams = device.capture_streams()
        graph = ctypes.c_void_p()
        try:
            driver.begin_capture(streams[0], CAPTURE_RELAXED)
            status = self._runtime.zse_gpu_list_submit(
                device.table, self._list, *streams, values, None, None, None, self._where
            )
            driver.end_capture(streams[0], byref(graph))
            if status:
                raise self._error(status, self._where.value, symbols)
            return driver.pointer("graph_instantiate", graph, 0)
        except DeviceError as error:
            if driver.lost is not None:
                raise
            self.can_capture = False
            logging.getLogger("zse.runtime").warning(
                "graph of %s is not captured, its launches go one by one: %s", self.describe(), error
            )
            return None
        finally:
            if graph and driver.lost is None:
                driver.graph_destroy(graph)

    @property
    def num_captured(self) -> int:
        """Captured graphs that are kept."""
        return sum(map(bool, self._captured.values()))

    def profile(self, **symbols: int) -> "list[tuple[str, int]]":
        """As Graph's; the event's own cost of about 2 µs is in each time."""
        device = self.device
        device.use()
        driver = device.driver
        values = self.values_of(symbols)
        if self._list is None:
            raise self.closed_error()
        marks: list[int] = []
        try:
            for _ in range(len(self.launches) + 1):
                marks.append(driver.pointer("event_create", 0))
            with device.submit_lock:
                status = self._runtime.zse_gpu_list_submit(
                    device.table,
                    self._list,
                    device.stream,
                    device.copy_stream,
                    values,
                    None,
                    None,
                    pointer_array(marks),
                    self._where,
                )
                if status:
                    raise self._error(status, self._where.value, symbols)
            device.synchronize()
            times, elapsed = [], ctypes.c_float()
            for launch, start, end in zip(self.launches, marks, marks[1:], strict=False):
                driver.event_elapsed(byref(elapsed), start, end)
                times.append((launch.symbol, int(elapsed.value * 1e6)))
            return times
        finally:
            for event in marks:
                driver.event_destroy(event)

    def close(self) -> None:
        device = self.device
        with device.submit_lock:
            handle, self._list = self._list, None
            if handle:
                device._graphs.discard(self)
                alive = not device.closed and device.driver.lost is None
                if alive and self.num_captured:
                    device.synchronize()
                for key, executable in self._captured.items():
                    if executable:
                        del device.captured[self, key]
                        if alive:
                            device.driver.executable_destroy(executable)
                self._captured.clear()
                self._runtime.zse_gpu_list_destroy(handle)
        super().close()
