"""The emulated GPU: runs the kernels of the GPU family on the host, thread by thread in a random order, and checks what
they do.

Kernels are printed as C++ (target.py), compiled when they are first used and kept (compiling.py); the emulator itself is
csrc/emulate_*.cpp. Memory of the device lies between zones that nobody may touch. A launch that breaks a rule of the
language (csrc/emulate.h) raises DeviceError with the kernel's source line and the seed of the order."""

import ctypes
import os
import threading
import time
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint64, c_void_p

from zse.errors import DeviceError
from zse.kernel import cache
from zse.kernel.archs import features_of
from zse.runtime.buffer import Account, Buffer
from zse.runtime.device import Copy, GPUCapabilities, Graph, Program, Recorder, Staging
from zse.runtime.fetch import Await, Fetch
from zse.runtime.symbol import Sym
from zse_emulator.compiling import (
    CORE,
    CSRC,
    KERNEL_OPTIMIZATION,
    MORE_OPTIMIZATION,
    SOON,
    compiled,
    emitted,
    library_path,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from zse.kernel.language import Variant

RED_ZONE = 4096  # bytes before and after every allocation

_core_lock = threading.Lock()
_core: "ctypes.CDLL | None" = None


def core() -> ctypes.CDLL:
    """The emulator, one for the process: kernels' libraries find its functions by name."""
    global _core
    with _core_lock:
        if _core is None:
            library = ctypes.CDLL(
                str(compiled([CSRC / name for name in CORE], "", "core", "-O3")), mode=ctypes.RTLD_GLOBAL
            )
            library.zse_emulate_allocate.argtypes = [c_uint64, c_uint64, c_char_p]
            library.zse_emulate_allocate.restype = None
            library.zse_emulate_release.argtypes = [c_uint64]
            library.zse_emulate_release.restype = None
            library.zse_emulate_synchronize.argtypes = []
            library.zse_emulate_synchronize.restype = None
            library.zse_emulate_launch.argtypes = [c_void_p, c_void_p, c_void_p, c_uint64, c_int32, c_void_p, c_int32]
            library.zse_emulate_launch.restype = c_int
            _core = library
    return _core


_seconds: "dict[str, float]" = {}  # of the processor, that launches of this text took


class EmulatedBuffer:
    """Zero-filled memory that kernels may touch, between two zones that they may not."""

    _is_counted = True

    def __init__(self, device: "EmulateDevice", nbytes: int, label: str):
        self._memory: Buffer | None = None
        if nbytes < 0:
            raise ValueError(f"a buffer of {nbytes} bytes")
        self.nbytes, self.label, self._device, self._pins = nbytes, label, device, 0
        self._memory = Buffer(nbytes + 2 * RED_ZONE, label, device._account if self._is_counted else Account())
        self.address = -(-(self._memory.address + RED_ZONE) // 256) * 256
        core().zse_emulate_allocate(self.address, nbytes, label.encode())

    def view(self, format: str = "B") -> memoryview:
        """Device memory is no host memory."""
        raise DeviceError(f"{self.label}: device memory has no view; use device.read and device.write")

    @property
    def freed(self) -> bool:
        return self._memory is None

    def pin(self, count: int) -> None:
        self._pins += count

    def grow(self, nbytes: int) -> None:
        """All of it is there from the start."""
        if nbytes > self.nbytes:
            raise ValueError(f"{self.label}: {nbytes} bytes of at most {self.nbytes}")

    def free(self) -> None:
        """Give the memory back. DeviceError while a graph uses it. Freeing twice does nothing."""
        if self._memory is None:
            return
        if self._pins:
            raise DeviceError(f"{self.label}: the buffer is used by {self._pins} recorded graph(s); close them first")
        core().zse_emulate_release(self.address)
        self._memory.free()
        self._memory = None

    def __del__(self) -> None:
        if self._memory is not None and _core is not None:
            _core.zse_emulate_release(self.address)

    def __repr__(self) -> str:
        return f"EmulatedBuffer({self.label!r}, {self.nbytes} bytes{', freed' if self.freed else ''})"


class EmulatedHostMemory(EmulatedBuffer):
    """Memory of the host that kernels may read and write, as page-locked memory is: not the device's, so not counted
    there."""

    _is_counted = False

    def view(self, format: str = "B") -> memoryview:
        """The bytes, as elements of `format`."""
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B").cast(format)  # type: ignore[call-overload]


class EmulatedStaging(Staging):
    """Host memory and device memory of one size."""

    __slots__ = ("_host",)

    def __init__(self, device: "EmulateDevice", nbytes: int, label: str):
        self.nbytes, self.shared = nbytes, False
        self.buffer = EmulatedBuffer(device, nbytes, label)  # type: ignore[assignment]
        self._host = EmulatedHostMemory(device, nbytes, label)
        self.host, self.host_address = self._host.view(), self._host.address


class EmulatedMap:
    """A tensor map as csrc/emulate.h reads it."""

    class _Fields(ctypes.Structure):
        _fields_ = [
            ("base", c_uint64),
            ("rank", ctypes.c_uint32),
            ("element", ctypes.c_uint32),
            ("dims", c_uint64 * 5),
            ("strides", c_uint64 * 4),
            ("box", ctypes.c_uint32 * 5),
            ("swizzle", ctypes.c_uint32),
        ]

    def __init__(self, buffer: "Any", fields: "EmulatedMap._Fields"):
        self.buffer, self._fields = buffer, fields
        self.host_address = ctypes.addressof(fields)


class EmulatedProgram(Program):
    """address: of the kernel's description in its library. text: that may be compiled once more, or ""."""

    __slots__ = ("library", "text")

    def __init__(self, symbol: str, library: ctypes.CDLL, entry: dict, text: str = ""):
        super().__init__(symbol, ctypes.addressof(c_int.in_dll(library, "zse_kernel")), entry)
        self.library, self.text = library, text


class EmulatedGraph(Graph):
    """Launches that run one after the other when the graph is run."""

    def run(self, **symbols: int) -> None:
        self._replay(symbols)
        core().zse_emulate_synchronize()

    def submit(self, **symbols: int) -> "Any":
        from zse.runtime.device import Ticket

        self._replay(symbols)
        return Ticket()

    def profile(self, **symbols: int) -> "list[tuple[str, int]]":
        """As Graph's; the times are the emulator's."""
        from time import perf_counter_ns

        clocks = [perf_counter_ns()]

        def finish() -> None:
            core().zse_emulate_synchronize()
            clocks.append(perf_counter_ns())

        self._replay(symbols, finish)
        return [
            (launch.symbol, end - start) for launch, start, end in zip(self.launches, clocks, clocks[1:], strict=False)
        ]

    def _replay(self, symbols: dict[str, int], after: "Callable[[], object]" = lambda: None) -> None:
        self.check_symbols(symbols)
        device: EmulateDevice = self.device  # type: ignore[assignment]
        fetched: dict[int, Fetch] = {}
        for launch in self.launches:
            if isinstance(launch, Copy):
                self._copy(launch)
            elif isinstance(launch, Fetch):
                ctypes.memset(launch.destination.address, 0xFF, launch.source.nbytes)  # NaN until it is awaited
                fetched[launch.number] = launch
            elif isinstance(launch, Await):
                done = fetched.pop(launch.number)
                ctypes.memmove(done.destination.address, done.source.address, done.source.nbytes)
            else:
                slots = list(launch.slots)
                for place, sym in launch.syms:
                    slots[place] = sym.value(symbols) & 0xFFFFFFFFFFFFFFFF
                grid = [size.value(symbols) if isinstance(size, Sym) else size for size in (*launch.grid, 1, 1)[:3]]
                if all(grid):
                    device.launch(launch.symbol, slots, grid)
            after()

    def _copy(self, copy: Copy) -> None:
        staging = copy.staging
        place = staging.buffer.address + copy.offset
        if copy.symbol == "upload":
            ctypes.memmove(place, bytes(staging.host[copy.offset : copy.offset + copy.nbytes]), copy.nbytes)
        else:
            staging.host[copy.offset : copy.offset + copy.nbytes] = ctypes.string_at(place, copy.nbytes)


class EmulateDevice(GPUCapabilities):
    """like: the GPU architecture whose features the kernels find. variants: other kernels than the package's, by symbol
    (tests).

    seed: of the order in which threads run, another one for each launch; None: a fresh one, which errors name.
    dependent: hold kernels to the rule of PDL: nothing of another kernel's before grid_wait(), and every kernel calls
    it. initialised: shared memory is not read before it is written; without it such a read gives NaN."""

    name = "emulate"
    num_sms = 6
    shared_bytes = 232448
    l2_bytes = 50 << 20

    def __init__(
        self,
        like: str = "sm_90a",
        variants: "Mapping[str, Variant] | None" = None,
        seed: int | None = None,
        dependent: bool = True,
        initialised: bool = True,
    ):
        super().__init__()
        core()
        self.like, self.isa, self.rules = like, f"emulate-{like}", dependent + 2 * initialised
        self.arch, features = features_of(like)
        self.simt = "simt" in features
        self.product = f"emulated {like}"
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        self._manifest = variants if variants is not None else cache.package_variants(like)
        self._lock = threading.Lock()
        self.closed = False

    def alloc(self, nbytes: int, label: str = "other") -> EmulatedBuffer:  # type: ignore[override]
        return EmulatedBuffer(self, nbytes, label)

    def alloc_growing(self, nbytes: int, maximum: int, label: str = "other") -> EmulatedBuffer:
        """`maximum` bytes."""
        return EmulatedBuffer(self, maximum, label)

    def staging(self, nbytes: int, label: str = "staging") -> EmulatedStaging:
        return EmulatedStaging(self, nbytes, label)

    def host_memory(self, nbytes: int, label: str, for_copies: bool = False) -> EmulatedHostMemory:
        return EmulatedHostMemory(self, nbytes, label)

    def _load_program(self, symbol: str, variant: "Variant") -> EmulatedProgram:  # type: ignore[override]
        text, entry = emitted(variant, self.like)
        if _seconds.get(text, 0.0) > SOON or library_path([], text, symbol, MORE_OPTIMIZATION).exists():
            return EmulatedProgram(symbol, ctypes.CDLL(str(compiled([], text, symbol, MORE_OPTIMIZATION))), entry)
        return EmulatedProgram(symbol, ctypes.CDLL(str(compiled([], text, symbol, KERNEL_OPTIMIZATION))), entry, text)

    def launch(self, symbol: str, slots: "list[int]", grid: "list[int]") -> None:
        """Run a kernel. DeviceError for a broken rule."""
        if self.closed:
            raise DeviceError("the emulated device was closed")
        program: EmulatedProgram = self.program(symbol)  # type: ignore[assignment]
        if program.text and _seconds.get(program.text, 0.0) > SOON:
            self._programs[symbol] = program = self._load_program(symbol, self._manifest[symbol])
        message = ctypes.create_string_buffer(4096)
        with self._lock:
            self.seed += 1
            started = time.thread_time()
            if core().zse_emulate_launch(
                program.address,
                (c_uint64 * max(1, len(slots)))(*slots),
                (c_int64 * 3)(*grid),
                self.seed,
                self.rules,
                message,
                len(message),
            ):
                raise DeviceError(f"{message.value.decode(errors='replace')}, seed {self.seed - 1}")
            _seconds[program.text] = _seconds.get(program.text, 0.0) + time.thread_time() - started

    def tensor_map(
        self,
        tensor: "Any",
        box: "Any",
        *,
        swizzle: int = 0,
        l2_promotion: int = 128,
        dims: "Any" = None,
        strides: "Any" = None,
    ) -> EmulatedMap:
        """As of CUDADevice."""
        from zse.dtypes import ITEM_BYTES

        size = ITEM_BYTES[tensor.dtype]
        shape = tuple(dims if dims is not None else tensor.shape)
        if strides is None:
            strides, row = [], size
            for length in reversed(shape[1:]):
                row *= length
                strides.insert(0, row)
        if len(box) != len(shape) or not 1 <= len(shape) <= 5 or any(not 1 <= edge <= 256 for edge in box):
            raise ValueError(
                f"tensor_map: shape {shape} and box {tuple(box)} must have the same 1 to 5 dimensions, edges of 1 to 256"
            )
        inner = box[-1] * size
        if inner % 16 or (swizzle and inner > swizzle) or swizzle not in (0, 32, 64, 128):
            raise ValueError(f"tensor_map: the box's rows are {inner} bytes, with a swizzle of {swizzle}")
        if any(stride % 16 for stride in strides) or tensor.address % 16:
            raise ValueError(f"tensor_map: strides {tuple(strides)} and the address are multiples of 16 bytes")
        fields = EmulatedMap._Fields(tensor.address, len(shape), size, swizzle=swizzle)
        fields.dims[: len(shape)] = shape[::-1]
        fields.strides[: len(shape) - 1] = list(strides)[::-1]
        fields.box[: len(shape)] = list(box)[::-1]
        return EmulatedMap(getattr(tensor, "buffer", tensor), fields)

    def synchronize(self) -> None:
        core().zse_emulate_synchronize()

    def _build(self, recorder: Recorder) -> EmulatedGraph:
        return EmulatedGraph(self, recorder)

    def close(self) -> None:
        self.closed = True
