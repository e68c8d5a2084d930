"""The Metal device: the GPU of an Apple-silicon Mac through the Objective-C runtime. Host and GPU share one memory.

It has not run on hardware yet: it is tested over an Objective-C runtime written in Python
(tests/runtime/test_metal.py). Its kernels are checked by clang against a shim of Metal's library and run through it
(tests/kernel/test_metal.py). A kernel's parameters are its buffers 0, 1, …: pointers by setBuffer, numbers by setBytes
as their type (4 or 8 bytes); dynamic shared memory is threadgroup memory 0."""

import ctypes
from ctypes import byref, c_void_p

from zse.dtypes import ITEM_BYTES
from zse.errors import DeviceError, DeviceLost
from zse.runtime import cpu
from zse.runtime.bindings.objc import ObjC, Size
from zse.runtime.buffer import OwningBuffer, view_of
from zse.runtime.device import Graph, Program, Recorder, Ticket
from zse.runtime.gpu import CompiledKernels, PackedGPU
from zse.runtime.load import BackgroundLoad
from zse.runtime.symbol import Sym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from zse.runtime.load import LoadJob

STORAGE_SHARED = 0  # MTLResourceStorageModeShared
STATUS_ERROR = 5  # MTLCommandBufferStatusError
MAX_BUFFERS = 31  # of a kernel's argument table


class MetalBuffer(OwningBuffer):
    """Memory that host and GPU share. address: of its first byte on the host. What was submitted must have been waited
    for before the host looks into a view."""

    __slots__ = ("handle", "device")

    def __init__(self, device: "MetalDevice", nbytes: int, label: str):
        self.device = device
        super().__init__(nbytes, label, device._account)

    def _allocate(self) -> int:
        objc = self.device.objc
        self.handle = objc.send(self.device.handle, "newBufferWithLength:options:", max(self.nbytes, 1), STORAGE_SHARED)
        if not self.handle:
            raise DeviceError(
                f"not enough memory on metal: {self.nbytes:,} bytes for {self.label}; allocated here: "
                f"{self._account.total:,}; use a smaller context or a quantized model"
            )
        address = objc.send(self.handle, "contents")
        ctypes.memset(address, 0, self.nbytes)
        return address

    def view(self, format: str = "B") -> memoryview:
        if self.freed:
            raise DeviceError(f"{self.label}: the buffer was freed")
        return view_of(self.address, self.nbytes).cast(format)  # type: ignore[call-overload]

    def _release(self) -> None:
        self.device.objc.send(self.handle, "release")


class MetalTicket(Ticket):
    """A committed command buffer."""

    __slots__ = ("_device", "_buffer", "_graph")

    def __init__(self, device: "MetalDevice", buffer: int, graph: "MetalGraph"):
        self._device, self._buffer, self._graph = device, buffer, graph

    @property
    def done(self) -> bool:
        if self._buffer and self._device.objc.send(self._buffer, "status") >= STATUS_ERROR - 1:
            self.wait()
        return not self._buffer

    def wait(self) -> None:
        if not self._buffer:
            return
        objc = self._device.objc
        buffer, self._buffer = self._buffer, 0
        objc.send(buffer, "waitUntilCompleted")
        failed = objc.send(buffer, "status") == STATUS_ERROR
        reason = objc.text(objc.send(objc.send(buffer, "error"), "localizedDescription")) if failed else ""
        objc.send(buffer, "release")
        if failed:
            self._device.lost = DeviceLost(f"Metal: {self._graph.describe()}: {reason}")
            raise self._device.lost

    def __del__(self) -> None:
        if self._buffer:
            self._device.objc.send(self._buffer, "release")


class MetalGraph(Graph):
    """A launch list that is encoded anew at each submit: one command buffer, one serial encoder."""

    device: "MetalDevice"

    def __init__(self, device: "MetalDevice", recorder: Recorder):
        super().__init__(device, recorder)
        self._steps: list[tuple[Program, list, tuple]] = []
        for launch in self.launches:
            program = device.program(launch.symbol)
            if len(launch.args) > MAX_BUFFERS:
                raise TypeError(f"{launch.symbol}: {len(launch.args)} arguments, at most {MAX_BUFFERS} on Metal")
            syms = dict(launch.syms)
            arguments: list = []
            for place, (slot, (name, kind)) in enumerate(zip(launch.slots, launch.params or (), strict=True)):
                if kind == "tensormap":
                    raise TypeError(f"{launch.symbol}: tensor maps are for CUDA")
                if kind == "ptr":
                    arg = launch.args[name]
                    buffer = getattr(arg, "buffer", arg)
                    handle = getattr(buffer, "handle", 0)
                    if slot and not handle:
                        raise TypeError(f"{launch.symbol}: {name} is an address; on Metal its Tensor is needed")
                    arguments.append((handle, slot - buffer.address if slot else 0))
                else:
                    arguments.append((syms.get(place), slot.to_bytes(8, "little")[: ITEM_BYTES[kind.rstrip("_")]]))
            self._steps.append((program, arguments, (*launch.grid, 1, 1)[:3]))

    def submit(self, **symbols: int) -> MetalTicket:
        self.check_symbols(symbols)
        device = self.device
        if self.closed or device.closed:
            raise self.closed_error()
        if device.lost is not None:
            raise device.lost
        objc = device.objc
        with device.submit_lock, objc.pool():
            buffer = objc.send(objc.send(device.queue, "commandBuffer"), "retain")
            encoder = objc.send(buffer, "computeCommandEncoder")
            for program, arguments, grid in self._steps:
                self._encode(encoder, program, arguments, grid, symbols)
            objc.send(encoder, "endEncoding")
            objc.send(buffer, "commit")
        return MetalTicket(device, buffer, self)

    def _encode(self, encoder: int, program: Program, arguments: list, grid: tuple, symbols: dict) -> None:
        objc = self.device.objc
        size = Size(*[dim.value(symbols) if isinstance(dim, Sym) else dim for dim in grid])
        if not size.width or not size.height or not size.depth:
            return
        objc.send(encoder, "setComputePipelineState:", program.address)
        for place, (first, second) in enumerate(arguments):
            if isinstance(second, bytes):
                if first is not None:
                    second = first.value(symbols).to_bytes(8, "little", signed=True)[: len(second)]
                objc.send(encoder, "setBytes:length:atIndex:", second, len(second), place)
            else:
                objc.send(encoder, "setBuffer:offset:atIndex:", first, second, place)
        if program.shared_bytes:
            objc.send(encoder, "setThreadgroupMemoryLength:atIndex:", -(-program.shared_bytes // 16) * 16, 0)
        objc.send(encoder, "dispatchThreadgroups:threadsPerThreadgroup:", size, Size(program.threads, 1, 1))


class MetalDevice(PackedGPU):
    """The system's default GPU. objc, kernels: others (tests); default: the pack of `isa`, whose images are MSL
    source."""

    name, isa, simt, shares_memory = "metal", "metal3.1", True, True

    def __init__(self, objc: ObjC | None = None, kernels: CompiledKernels | None = None):
        super().__init__(kernels)
        self.objc = objc or ObjC()
        self.handle = self.objc.default_device()
        if not self.handle:
            raise DeviceError("there is no Metal GPU here; use --device cpu")
        self.product = self.objc.text(self.objc.send(self.handle, "name"))
        self.shared_bytes = self.objc.send(self.handle, "maxThreadgroupMemoryLength")
        self.queue = self.objc.send(self.handle, "newCommandQueue")
        self.lost: DeviceLost | None = None
        self._libraries: dict[Any, int] = {}

    def alloc(self, nbytes: int, label: str = "other") -> MetalBuffer:
        if self.closed:
            raise DeviceError("the metal device was closed")
        return MetalBuffer(self, nbytes, label)

    @property
    def memory_total(self) -> int:
        """What the system recommends one process to use at most."""
        return self.objc.send(self.handle, "recommendedMaxWorkingSetSize")

    @property
    def memory_free(self) -> int:
        return max(0, self.memory_total - self.objc.send(self.handle, "currentAllocatedSize"))

    def synchronize(self) -> None:
        if self.lost is not None:
            raise self.lost
        with self.objc.pool():
            buffer = self.objc.send(self.queue, "commandBuffer")
            self.objc.send(buffer, "commit")
            self.objc.send(buffer, "waitUntilCompleted")

    def _load_program(self, symbol: str, entry: dict) -> Program:
        self._check_shared(symbol, entry)
        with self.objc.pool():
            return Program(symbol, self._pipeline(symbol, entry["image"]), entry)

    def _pipeline(self, symbol: str, image: "Any") -> int:
        objc, error = self.objc, c_void_p()
        library = self._libraries.get(image)
        if library is None:
            source = objc.string(self.pack.image(image).decode())
            # Without fast math: it drops infinities and NaN, and rounds differently.
            options = objc.make("MTLCompileOptions")
            objc.send(options, "setFastMathEnabled:", False)
            library = objc.send(self.handle, "newLibraryWithSource:options:error:", source, options, byref(error))
            objc.send(options, "release")
            if not library:
                raise self._error(f"compiling {symbol}", error)
            self._libraries[image] = library
        function = objc.send(library, "newFunctionWithName:", objc.string(symbol))
        if not function:
            raise DeviceError(f"Metal: the library of {symbol} has no such function")
        pipeline = objc.send(self.handle, "newComputePipelineStateWithFunction:error:", function, byref(error))
        objc.send(function, "release")
        if not pipeline:
            raise self._error(f"the pipeline of {symbol}", error)
        return pipeline

    def _error(self, doing: str, error: c_void_p) -> DeviceError:
        text = self.objc.text(self.objc.send(error.value, "localizedDescription")) if error.value else "no reason given"
        return DeviceError(f"Metal: {doing}: {' '.join(text.split())}")

    def _build(self, recorder: Recorder) -> MetalGraph:
        return MetalGraph(self, recorder)

    def load(self, jobs: "Sequence[LoadJob]", threads: int | None = None, sums: bool = False) -> BackgroundLoad:
        """The CPU's loader: the memory is the host's as well."""
        if self._host is None:
            self._host = cpu.CPUDevice()
        return self._host.load(jobs, threads, sums)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for program in self._programs.values():
            self.objc.send(program.address, "release")
        for handle in (*self._libraries.values(), self.queue, self.handle):
            self.objc.send(handle, "release")
        self._programs.clear()
        if self._host is not None:
            self._host.close()


def product_name(objc: ObjC | None = None) -> str:
    """What the system's default GPU is called. DeviceError when there is none."""
    objc = objc or ObjC()
    handle = objc.default_device()
    if not handle:
        raise DeviceError("there is no Metal GPU here")
    return objc.text(objc.send(handle, "name"))
