"""What the GPU devices share: programs from compiled images, memory, streams, events, synchronous reads and writes.

A device has one compute stream, in which everything that is submitted runs in order, with that of this process's other
devices on the GPU, and one copy stream for the loading of weights. The driver's context is current per thread: every
entry point makes it so (`use`).
"""

import ctypes
import sys
import threading
import weakref
from collections import OrderedDict
from ctypes import byref
from typing import Any, NamedTuple

from zse import env
from zse.errors import DeviceError, DeviceLost, DeviceMemoryError
from zse.kernel import cache
from zse.runtime import cpu, gpu_graph, gpu_load, native, probe
from zse.runtime.bindings.driver import OUT_OF_MEMORY, Driver, DriverError
from zse.runtime.buffer import check_write
from zse.runtime.device import GPUCapabilities, Program, Recorder
from zse.runtime.gpu_memory import PORTABLE, GPUBuffer, GPUStaging, GrowingBuffer, PinnedMemory, RegisteredMemory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import ClassVar

    from zse.runtime.cpu import CPUDevice
    from zse.runtime.gpu_graph import GPUGraph
    from zse.runtime.gpu_load import GPULoad
    from zse.runtime.load import LoadJob

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no hidden order with the legacy stream
EVENT_BLOCKING_SYNC, EVENT_NO_TIMING = 1, 2


class CompiledKernels(NamedTuple):
    """Kernels other than a pack's. manifest: {symbol: {"params": [[name, type], ...], "threads", "shared_bytes",
    "cluster", "image"}}; image(entry["image"]) → the bytes of that module."""

    manifest: "Mapping[str, dict]"
    image: "Callable[[Any], bytes]"


class PackedGPU(GPUCapabilities):
    """What GPUs have in common besides their drivers: kernels out of a pack, the CPU that repacks weights for them."""

    closed = False
    _host: "CPUDevice | None" = None

    def __init__(self, kernels: CompiledKernels | None):
        super().__init__()
        self._kernels: CompiledKernels | cache.Kernels | None = kernels
        # Held while something is submitted: lists patch their arguments in place. Reentrant: the garbage collector may
        # close a graph at any moment.
        self.submit_lock = threading.RLock()

    @property
    def pack(self) -> "CompiledKernels | cache.Kernels":
        """Its compiled kernels, opened when first asked for. ConfigError where there are none for its architecture."""
        if self._kernels is None:
            self._kernels = cache.open_pack(self.isa)
        return self._kernels

    @property
    def _manifest(self) -> "Mapping[str, dict]":  # type: ignore[override]
        return self.pack.manifest

    def compile_ahead(self, symbols: "Callable[[], Iterable[str]]") -> None:
        if isinstance(self.pack, cache.Kernels):
            self.pack.ahead = symbols

    def _check_shared(self, symbol: str, entry: dict) -> None:
        if entry.get("shared_bytes", 0) > self.shared_bytes:
            raise DeviceError(
                f"{symbol} needs {entry['shared_bytes']:,} bytes of shared memory; {self.product} has "
                f"{self.shared_bytes:,} a block"
            )

    @property
    def host(self) -> "CPUDevice":
        """The CPU whose kernels repack weights before they are copied."""
        if self._host is None:
            self._host = cpu.CPUDevice(1)
        return self._host


class SharedStream:
    """The stream in which all devices of this process compute on one GPU, the lock of who submits to it, and how many they are.
    Kernels whose blocks wait for each other (a layer's chain, sums of parts) need all of them on the chip at once, which
    kernels of another stream could keep from them for ever."""

    opened: "ClassVar[dict[tuple[int, int], SharedStream]]" = {}  # (driver library, ordinal) → its stream
    guard = threading.Lock()

    def __init__(self, key: tuple[int, int], stream: int):
        self.key, self.stream, self.lock, self.users = key, stream, threading.RLock(), 0

    @classmethod
    def of(cls, driver: Driver, ordinal: int) -> "SharedStream":
        """That of a GPU, whose context is the calling thread's; made where there is none."""
        key = driver.library._handle, ordinal
        with cls.guard:
            if key not in cls.opened:
                cls.opened[key] = cls(key, driver.pointer("stream_create", NON_BLOCKING))
            cls.opened[key].users += 1
            return cls.opened[key]

    def leave(self, driver: Driver) -> None:
        """One device less. The last one destroys the stream; where the GPU is lost nobody may use it again."""
        with self.guard:
            self.users -= 1
            is_open = self.opened.get(self.key) is self
            if is_open and (not self.users or driver.lost is not None):
                del self.opened[self.key]
            if not self.users and driver.lost is None:
                driver.stream_destroy(self.stream)


class GPUDevice(PackedGPU):
    """Base of the devices behind a CUDA-like driver. The subclass opens the context before it calls __init__.

    ordinal: which GPU; current: what `set_current` takes (the context).
    """

    overlaps = False  # launches carry the attribute of programmatic dependent launch
    supports_capture = shares_buffers = True
    supports_growth = False
    locks_memory = True
    can_register = True  # file mappings, read-only
    _device: int  # as the driver numbers it
    table: native.GPUDriverTable | None = None  # the driver for C, once the device is open

    def __init__(self, driver: Driver, ordinal: int, current: int, kernels: CompiledKernels | None):
        super().__init__(kernels)
        self.driver, self.ordinal, self._current = driver, ordinal, current
        self._runtime = native.runtime()
        self._local = threading.local()
        self._modules: dict[Any, int] = {}
        self._program_lock = threading.Lock()
        # Captured graphs, the one that was replayed last at the end.
        self.captured: OrderedDict[tuple[GPUGraph, tuple[int, ...]], None] = OrderedDict()
        self._events: list[int] = []
        self._loads: weakref.WeakSet[GPULoad] = weakref.WeakSet()
        self._tidying: list[tuple[int, list[int]]] = []  # loads that are done but for giving back what they used
        self._graphs: weakref.WeakSet[GPUGraph] = weakref.WeakSet()
        self.use()
        self.copy_stream = driver.pointer("stream_create", NON_BLOCKING)
        self._capture_streams: list[int] = []
        self._fetch_events: dict[int, int] = {}
        table = self._driver_table()
        self._shared: SharedStream | None = SharedStream.of(driver, ordinal)
        self.stream, self.submit_lock = self._shared.stream, self._shared.lock
        self.table = table

    def _driver_table(self) -> native.GPUDriverTable:
        """The driver's functions as the C runtime calls them."""
        table = native.GPUDriverTable(current=self._current)
        check = env.get("ZSE_GPU_CHECK") == "1"  # waits after every launch, so that a failure has a name
        self.supports_capture = self.supports_capture and not check
        unused = {"current"} if check else {"current", "stream_wait"}
        if not self.driver.has("launch_ex"):
            unused.add("launch_ex")
        for role, _ in native.GPUDriverTable._fields_:
            if role not in unused:
                setattr(table, role, self.driver.address(role))
        return table

    def _attribute(self, attribute: int) -> int:
        return self.driver.integer("device_attribute", attribute, self._device)

    # -- calls

    def use(self) -> None:
        """Make the context the calling thread's. DeviceLost after a fault, DeviceError after close()."""
        if self.driver.lost is not None:
            raise self.driver.lost
        if self.closed:
            raise DeviceError(f"the {self.name} device was closed")
        if not getattr(self._local, "ready", False):
            self.driver.set_current(self._current)
            self._local.ready = True

    def memory_error(self, error: DriverError, nbytes: int, label: str) -> DeviceError:
        """The message for an allocation that failed."""
        if error.status != OUT_OF_MEMORY:
            return error
        try:
            free, total = self._memory_info()
            room = f"{free:,} of {total:,} bytes are free"
        except DeviceError:
            room = "the driver does not say how much is free"
        ours = ", ".join(f"{name} {size:,}" for name, size in self._account.by_label.items()) or "none"
        hint = self.driver.hints.get(error.name, "")
        return DeviceMemoryError(
            f"not enough memory on {self.name}:{self.ordinal}: {nbytes:,} bytes for {label}; {room}; allocated "
            f"here: {ours}; {hint}"
        )

    # -- memory

    def alloc(self, nbytes: int, label: str = "other") -> GPUBuffer:  # type: ignore[override]
        return GPUBuffer(self, nbytes, label)

    def alloc_growing(self, nbytes: int, maximum: int, label: str = "other") -> GPUBuffer:
        return GrowingBuffer(self, nbytes, maximum, label) if self.supports_growth else GPUBuffer(self, maximum, label)

    def fill_zero(self, address: int, nbytes: int) -> None:
        """Zero device memory, in the order of the compute stream."""
        self.driver.memset_async(address, 0, nbytes, self.stream)

    def staging(self, nbytes: int, label: str = "staging") -> GPUStaging:
        return GPUStaging(self, nbytes, label)

    def alloc_pinned(self, nbytes: int, label: str) -> int:
        """Zeroed page-locked host memory: its address. DeviceError when there is not enough."""
        self.use()
        try:
            address = self.driver.pointer("host_alloc", max(nbytes, 1), PORTABLE)
        except DriverError as error:
            if error.status == OUT_OF_MEMORY:
                raise DeviceError(f"cannot pin {nbytes:,} bytes of host memory for {label}; see `ulimit -l`") from None
            raise
        ctypes.memset(address, 0, nbytes)
        return address

    def free_pinned(self, address: int) -> None:
        """Give page-locked memory back."""
        if not self.closed and self.driver.lost is None:
            self.use()
            self.driver.host_free(address)

    def _memory_info(self) -> tuple[int, int]:
        self.use()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.driver.memory_info(byref(free), byref(total))
        return free.value, total.value

    @property
    def memory_total(self) -> int:
        return self._memory_info()[1]

    @property
    def memory_free(self) -> int:
        return self._memory_info()[0]

    def read(self, tensor: "Any") -> bytes:
        host = (ctypes.c_char * tensor.nbytes)()
        if tensor.nbytes:
            self.copy_out(ctypes.addressof(host), tensor.address, tensor.nbytes)
        self.synchronize()
        return host.raw

    def write(self, tensor: "Any", data: "bytes | bytearray | memoryview") -> None:
        self.use()
        data = memoryview(data).cast("B")
        check_write(tensor, data.nbytes)
        if data.nbytes:
            raw = bytes(data)
            self.driver.to_device_async(tensor.address, raw, len(raw), self.stream)
        self.synchronize()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.use()
        self.driver.copy_async(destination, source, nbytes, self.stream)

    def host_memory(self, nbytes: int, label: str, for_copies: bool = False) -> GPUBuffer:
        return (RegisteredMemory if for_copies else PinnedMemory)(self, nbytes, label)

    def copy_out(self, host: int, source: int, nbytes: int) -> None:
        self.use()
        self.driver.to_host_async(host, source, nbytes, self.stream)

    def copy_in(self, destination: int, host: int, nbytes: int) -> None:
        self.use()
        self.driver.to_device_async(destination, host, nbytes, self.stream)

    def synchronize(self) -> None:
        self.use()
        self.driver.stream_wait(self.stream)

    # -- kernels

    def _load_program(self, symbol: str, entry: dict) -> Program:
        with self._program_lock:
            if symbol in self._programs:
                return self._programs[symbol]
            self.use()
            self._check_shared(symbol, entry)
            image = entry["image"]
            if image not in self._modules:
                self._modules[image] = self.driver.pointer("module_load", self.pack.image(image))
            function = self.driver.pointer("module_function", self._modules[image], symbol.encode())
            program = Program(symbol, function, entry)
            self._prepare_function(program)
            self._programs[symbol] = program
            return program

    def _prepare_function(self, program: Program) -> None:
        """Attributes that a function needs before its first launch."""

    def _build(self, recorder: Recorder) -> "GPUGraph":
        return gpu_graph.GPUGraph(self, recorder)

    # -- loading

    @property
    def repacks(self) -> bool:  # type: ignore[override]
        """A pack may be older than these kernels, or of a test."""
        return "repack_words4" in self._manifest

    def load(self, jobs: "Sequence[LoadJob]", threads: int | None = None, sums: bool = False) -> "GPULoad":
        self.tidy_loads(wait=False)
        if threads is None:
            most = gpu_load.READERS
            threads = min(probe.default_threads(), most) if any(job.symbol for job in jobs) else most
        return gpu_load.GPULoad(self, jobs, min(threads, 64))

    def tidy_loads(self, wait: bool = True) -> None:
        """Forget loads that have unregistered and unmapped their files; wait: until all that are done have."""
        for entry in list(self._tidying):
            handle, events = entry
            if wait or self._runtime.zse_load_tidy(handle):
                self._tidying.remove(entry)
                self._runtime.zse_load_close(handle)
                self._events += events

    def register_window(self) -> int:
        """Most bytes of file mappings that are registered at once: pages of the page cache, which stay where they
        are."""
        return max(1 << 30, probe.usable_bytes() // 2)

    # -- events

    def take_event(self) -> int:
        """An event for a ticket, from those that were given back."""
        try:
            return self._events.pop()
        except IndexError:
            self.use()
            return self.driver.pointer("event_create", EVENT_NO_TIMING | EVENT_BLOCKING_SYNC)

    def give_event(self, event: int) -> None:
        """A ticket is done with its event."""
        self._events.append(event)

    def fetch_event(self, number: int) -> int:
        """The event of fetches of this number, recorded anew by each; -1: of what a fetch waits for."""
        if number not in self._fetch_events:
            self.use()
            self._fetch_events[number] = self.driver.pointer("event_create", EVENT_NO_TIMING)
        return self._fetch_events[number]

    def capture_streams(self) -> list[int]:
        """Streams for captures, in place of the compute and the copy stream: those go on meanwhile."""
        while len(self._capture_streams) < 2:
            self._capture_streams.append(self.driver.pointer("stream_create", NON_BLOCKING))
        return self._capture_streams

    def close(self) -> None:
        """Stop; its memory, graphs and events go with it. Closing twice does nothing."""
        if self.closed:
            return
        try:
            for load in list(self._loads):
                load.cancel()
            self.tidy_loads()
            if self.driver.lost is None:
                if self.registered is not None:
                    self.registered.close()
                self.synchronize()
                for graph in list(self._graphs):
                    graph.close()
                for event in (*self._events, *self._fetch_events.values()):
                    self.driver.event_destroy(event)
                for stream in (self.copy_stream, *self._capture_streams):
                    self.driver.stream_destroy(stream)
                self._leave_stream()
                for module in self._modules.values():
                    self.driver.module_unload(module)
                self._release_context()
        except DeviceLost:
            pass  # nothing can be given back one by one: the end of the process does it
        finally:
            self.closed = True
            self._leave_stream()
            if self._host is not None:
                self._host.close()
            self._events.clear()
            self._modules.clear()
            self._programs.clear()

    def _leave_stream(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.leave(self.driver)

    def _release_context(self) -> None:
        """Where it is this object's: give the context back."""

    def __del__(self) -> None:
        # At the interpreter's end the driver gives everything back; a device dropped before is closed here.
        if self.table is not None and not self.closed and not sys.is_finalizing():
            self.close()
