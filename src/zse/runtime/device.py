"""What a device is: memory, kernels by symbol, and graphs that are recorded once and replayed many times.

    device = open_device(threads=2)
    recorder = device.record()
    tokens = recorder.symbol("tokens", maximum=512)
    recorder.launch("scale_rows", Args(x=x, out=out, width=64, factor=0.5), grid=tokens)
    graph = recorder.finish()
    graph.run(tokens=5)

A Graph belongs to its device. One graph may be run from several threads; replays of a device are serialised.

A host that works while the device does uses `ticket = graph.submit(tokens=5)`, `ticket.wait()`. What host and device
exchange in each step lies in a Staging, whose copies are part of the recording:

    inputs = device.staging(4096, "step")       # inputs.host: memoryview; Tensor(inputs.buffer, ...): for kernels
    recorder.upload(inputs)                     # before the kernels that read it; recorder.download(...) after
"""

import ctypes

from zse.errors import DeviceError
from zse.kernel import cache
from zse.lazy import difflib
from zse.runtime import probe
from zse.runtime.args import MAX_ARGS, Args, slots_of
from zse.runtime.buffer import Account, Buffer, DeviceBuffer, buffers_of, check_write
from zse.runtime.symbol import Sym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from zse.runtime.load import BackgroundLoad, LoadJob

MAX_SYMBOL = (1 << 31) - 1
MAX_BLOCKS = (1 << 28) - 1  # of one launch, and of one group of independent launches (csrc/pool.c)


class Launch:
    """One recorded launch. args: by parameter name, as given; params: [[name, type], ...] of the kernel, or None when
    unknown (null device); slots, syms: of `slots_of`."""

    __slots__ = ("symbol", "args", "grid", "independent", "min_chunk", "params", "slots", "syms")

    def __init__(self, symbol: str, args: Args, grid: tuple, independent: bool, min_chunk: int, params: list | None):
        self.symbol, self.args, self.grid = symbol, args, grid
        self.independent, self.min_chunk, self.params = independent, min_chunk, params
        self.slots, self.syms = ([], []) if params is None else slots_of(symbol, params, args)

    def __repr__(self) -> str:
        return f"Launch({self.symbol}, {self.args}, grid={self.grid}{', independent' if self.independent else ''})"


class Copy:
    """A recorded copy between the host and the device memory of a Staging. symbol: "upload" or "download"."""

    __slots__ = ("symbol", "args", "staging", "offset", "nbytes")

    grid = (1,)

    def __init__(self, symbol: str, staging: "Staging", offset: int, nbytes: int):
        self.symbol, self.staging, self.offset, self.nbytes = symbol, staging, offset, nbytes
        self.args = Args(staging=staging.buffer)

    def __repr__(self) -> str:
        return f"Copy({self.symbol} {self.nbytes} bytes at {self.offset} of {self.staging.buffer.label!r})"


class Program:
    """A kernel of the device. address: of its entry point (0 on a device that runs nothing); params: [[name, type], ...],
    None: unknown (null device). On a GPU threads of a block, bytes of dynamic shared memory, blocks of a cluster."""

    __slots__ = ("symbol", "address", "params", "threads", "shared_bytes", "cluster")

    def __init__(self, symbol: str, address: int, entry: dict):
        self.symbol, self.address, self.params = symbol, address, entry.get("params")
        self.threads, self.shared_bytes = entry.get("threads", 1), entry.get("shared_bytes", 0)
        self.cluster = entry.get("cluster", 1)


class Recorder:
    """Collects launches; `finish` makes them a Graph. Checks every launch against the kernel's signature."""

    def __init__(self, device: "Device"):
        self.device = device
        self.launches: list[Launch] = []
        self.maxima: dict[str, int] = {}
        self.checks: list[Callable[[], None]] = []  # after each replay on a CPU

    def symbol(self, name: str, maximum: int = MAX_SYMBOL) -> Sym:
        """The number called `name`, given to every `Graph.run`, 0 ≤ value ≤ maximum. Asked again: the smaller maximum."""
        self.maxima[name] = min(self.maxima.get(name, MAX_SYMBOL), maximum)
        return Sym(name)

    def launch(
        self,
        symbol: str,
        args: Args,
        grid: "int | Sym | Sequence[int | Sym]",
        independent: bool = False,
        min_chunk: int = 1,
    ) -> None:
        """Record a launch, after those before it.

        Args:
            symbol: the kernel's name.
            args: one for every parameter of the kernel, by its name (see Args).
            grid: blocks, in one to three dimensions of 0 to 2^28 - 1.
            independent: may overlap with the launch just before (and with what that one overlaps with); else it waits
                for everything before.
            min_chunk: fewest blocks that a thread of a CPU takes at once.
        Raises DeviceError (no such kernel), TypeError or ValueError with the parameter's name."""
        dims = tuple(grid) if isinstance(grid, tuple | list) else (grid,)
        if not 1 <= len(dims) <= 3:
            raise ValueError(f"{symbol}: grid {grid!r} has {len(dims)} dimensions, not 1 to 3")
        for dim in dims:
            if isinstance(dim, Sym):
                self._check_symbol(symbol, dim)
            elif not isinstance(dim, int) or not 0 <= dim <= MAX_BLOCKS:
                raise ValueError(f"{symbol}: grid {grid!r}: {dim!r} is not an integer from 0 to {MAX_BLOCKS}")
        if not isinstance(args, Args):
            raise TypeError(f"{symbol}: arguments are given by name: Args(x=x, ...), not {type(args).__name__}")
        if len(args) > MAX_ARGS:
            raise TypeError(f"{symbol}: {len(args)} arguments, at most {MAX_ARGS}")
        try:
            params = self.device.program(symbol).params
            launch = Launch(symbol, args, dims, independent, max(1, min_chunk), params)
        except (DeviceError, TypeError, ValueError) as error:
            self.device.check_sources(error)
            raise
        for _, sym in launch.syms:
            self._check_symbol(symbol, sym)
        self.launches.append(launch)

    def upload(self, staging: "Staging", offset: int = 0, nbytes: int | None = None) -> None:
        """Record: what the host wrote reaches the device here. Nothing where both share one memory."""
        self._copy("upload", staging, offset, nbytes)

    def download(self, staging: "Staging", offset: int = 0, nbytes: int | None = None) -> None:
        """Record: what the kernels so far wrote reaches the host, which may read it after the ticket's wait()."""
        self._copy("download", staging, offset, nbytes)

    def _copy(self, symbol: str, staging: "Staging", offset: int, nbytes: int | None) -> None:
        nbytes = staging.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > staging.nbytes:
            raise ValueError(f"{symbol}: {nbytes} bytes at {offset} of a staging of {staging.nbytes} bytes")
        if not staging.shared:
            self.launches.append(Copy(symbol, staging, offset, nbytes))  # type: ignore[arg-type]

    def _check_symbol(self, where: str, sym: Sym) -> None:
        if sym.name not in self.maxima:
            raise ValueError(f"{where}: symbol {sym.name!r} was not declared with recorder.symbol()")

    def finish(self) -> "Graph":
        """The graph of what was recorded. It keeps the buffers alive."""
        return self.device._build(self)


class Staging:
    """Memory through which host and device exchange a step's inputs and outputs.

    host: writable memoryview of bytes; host_address: of them, for kernels that read or write them there. buffer: the same
    bytes in device memory, an argument of kernels once wrapped in a Tensor. shared: host and buffer are one memory (CPU). The host must not write what a submitted graph still has to
    upload, nor read what it still has to download: wait for its ticket, or use two in turn."""

    __slots__ = ("host", "host_address", "buffer", "nbytes", "shared")

    def __init__(self, buffer: DeviceBuffer, shared: bool = True):
        self.buffer, self.nbytes, self.shared, self.host_address = buffer, buffer.nbytes, shared, buffer.address
        self.host: memoryview = buffer.view()

    def free(self) -> None:
        """Give the memory back. DeviceError while a graph uses it; memoryviews of `host` must be gone."""
        self.host.release()
        self.buffer.free()


class Ticket:
    """A submitted replay. This one is done already: the device of it runs at once."""

    __slots__ = ()

    @property
    def done(self) -> bool:
        """Whether wait() would return at once."""
        return True

    def wait(self) -> None:
        """Until everything that was submitted has run. DeviceError or DeviceLost when it failed."""


class Graph:
    """Launches that run together. `run(**symbols)` gives every symbol a value and returns when all of them are done.

    launches: in the order in which they were recorded; symbols, maxima: what every run takes a value from 0 to its
    maximum for. Buffers of a graph cannot be freed before close(). Every replay raises TypeError for a missing or unknown
    symbol, ValueError for one out of range, DeviceError for a grid that is or after close(), DeviceLost after a fault.
    """

    device: "Any"  # a Device; each kind of graph knows more of its own
    closed = False

    def __init__(self, device: "Device", recorder: Recorder):
        self.device = device
        self.launches = recorder.launches
        self.symbols = tuple(recorder.maxima)
        self.maxima = tuple(recorder.maxima.values())
        self._values_type = ctypes.c_int64 * len(self.symbols)
        buffers = buffers_of(launch.args.values() for launch in recorder.launches)
        for buffer in buffers:
            if buffer.freed:
                raise DeviceError(f"{buffer!r} is an argument of a recorded launch")
        for buffer in buffers:
            buffer.pin(1)
        self._buffers = buffers

    def run(self, **symbols: int) -> None:
        """Replay, and wait until it is done. Returns nothing: results lie in buffers."""
        self.submit(**symbols).wait()

    def submit(self, **symbols: int) -> Ticket:
        """Start a replay, after everything submitted to the device before."""
        raise NotImplementedError

    def prepare(self, **symbols: int) -> None:
        """Do now what the first replays with these symbols would do besides replaying (capture). Runs nothing."""

    def profile(self, **symbols: int) -> "list[tuple[str, int]]":
        """Replay with every launch waiting for the one before. Returns (kernel, nanoseconds) for each of `launches`, in
        order; a copy is called "upload" or "download"."""
        raise NotImplementedError

    def grids(self, **symbols: int) -> list[tuple[int, ...]]:
        """The grid of each of `launches` in a replay with these symbols: blocks in one to three dimensions."""
        return [
            tuple(size.value(symbols) if isinstance(size, Sym) else size for size in launch.grid)
            for launch in self.launches
        ]

    def check_symbols(self, symbols: "dict[str, int]") -> None:
        """Raises what `run` does for symbols that it does not take."""
        if symbols.keys() != set(self.symbols) or not all(
            isinstance(symbols[name], int) and 0 <= symbols[name] <= maximum
            for name, maximum in zip(self.symbols, self.maxima, strict=True)
        ):
            raise self.symbol_error(symbols)

    def values_of(self, symbols: "dict[str, int]") -> "ctypes.Array[ctypes.c_int64]":
        """The symbols' values in their order, for C, which checks their range. TypeError as of `run`."""
        try:
            values = self._values_type(*[symbols[name] for name in self.symbols])
        except (KeyError, TypeError):
            raise self.symbol_error(symbols) from None
        if len(symbols) != len(self.symbols):
            raise self.symbol_error(symbols)
        return values

    def closed_error(self) -> DeviceError:
        return DeviceError("the graph or its device was closed")

    def describe(self) -> str:
        """What it is, for an error."""
        kernels = list(dict.fromkeys(launch.symbol for launch in self.launches))
        more = f", … ({len(self.launches)} launches)" if len(kernels) > 3 else ""
        return f"{', '.join(kernels[:3])}{more}"

    def symbol_error(self, symbols: "dict[str, int]") -> Exception:
        """What is wrong with these symbols: their names, or one that is out of range."""
        missing = [name for name in self.symbols if name not in symbols]
        unknown = [name for name in symbols if name not in self.symbols]
        if missing or unknown:
            return TypeError(
                f"the graph's symbols are {', '.join(self.symbols) or 'none'}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        for name, maximum in zip(self.symbols, self.maxima, strict=True):
            if not isinstance(symbols[name], int):
                return TypeError(f"symbol {name} = {symbols[name]!r} is not an integer")
            if not 0 <= symbols[name] <= maximum:
                return ValueError(f"symbol {name} = {symbols[name]} is not from 0 to {maximum}")
        return DeviceError("a grid of the graph is negative or has more than 2^28 blocks")

    def close(self) -> None:
        """Release the graph; its buffers may be freed then. Closing twice does nothing."""
        self.closed = True
        for buffer in self._buffers:
            buffer.pin(-1)
        self._buffers.clear()

    def __del__(self) -> None:
        if hasattr(self, "_buffers"):
            self.close()


class Device:
    """Memory, kernels and graphs of one processor.

    What a device can do stands here as attributes, with a CPU's values: code asks for these, never for its name or class.
    """

    _manifest: "Mapping[str, Any]"  # symbol → {"params": [[name, type], ...], ...}
    _sources: str | None = None  # cache.fingerprint() of what the kernels were compiled from; None: no matter
    name: str
    """ "cpu", "cuda", "hip", "metal", "emulate" or "null"."""
    product: str = ""
    """What the hardware calls itself; empty for a CPU (zse.runtime.probe.cpu_model)."""
    kernels: str = "cpu"
    """ "cpu" or "gpu": which launchers, layouts and settings; the key of every table that differs by kind of processor."""
    isa: str
    """The level or architecture that its kernels are compiled for: "x86-64-v3", "sm_90a", "gfx942"."""
    arch: int = 0  # an NVIDIA GPU's compute capability as one number (90 for sm_90), 0 elsewhere
    simt: bool = False
    """A GPU of whose instructions the kernel language has no matrix products and no copies (HIP, Metal)."""
    threads: int  # of the pool that runs kernels; 0 on a GPU
    num_sms: int = 1  # multiprocessors: groups of blocks that run side by side
    shared_bytes: int = 0  # most shared memory of one block
    l2_bytes: int = 0  # of the last cache before memory; 0: unknown
    shares_memory: bool = True
    """Device memory is the host's: buffers have views, and a Staging is one memory."""
    runs_ahead: bool = False
    """Works while the host does something else: the host may submit a step before it reads the last one's results."""
    inner: str = "f32"
    """The dtype between operations (the residual stream is f32 everywhere)."""
    activations: tuple[str, ...] = ("int8", "f32")
    """The forms that matrix products can take their inputs in, the default first."""
    loads_modules: bool = False
    """Each kernel of its pack is loaded into the driver, which can be done before a model asks for it (CUDA)."""
    repacks: bool = False
    """Its own kernels make weights of what files hold otherwise, while they are loaded."""
    locks_memory: bool = False
    """What it copies from and to of the host's memory is page-locked, which takes time: it is to be had before it is used."""
    allocates: bool = False
    """A GPU's: much of its memory is still to be asked for, and its driver gives none while it registers files: loads read them."""
    registered: "Any" = None  # a GPU's: the RegisteredFiles (zse.engine) that its next load has, or None
    shares_buffers: bool = False
    """Processes of other devices can be given its buffers (zse.runtime.gpu_memory.export_buffer)."""
    supports_capture: bool = False
    """Of graphs, which are replayed as such; may be set to False before any is recorded."""

    def __init__(self) -> None:
        self._account = Account()
        self._programs: dict[str, Program] = {}
        self._scratch: dict[str, DeviceBuffer] = {}

    @property
    def steps_in_flight(self) -> int:
        """Batches that are submitted and not collected, at most."""
        return 2 if self.runs_ahead else 1

    def alloc(self, nbytes: int, label: str = "other") -> DeviceBuffer:
        """`nbytes` bytes, zeroed and counted under `label`; aligned to 64 bytes, on a GPU to 256. DeviceMemoryError or
        DeviceError when there is not enough."""
        raise NotImplementedError

    def alloc_growing(self, nbytes: int, maximum: int, label: str = "other") -> "Any":
        """A buffer of `nbytes` whose `grow(nbytes)` makes it up to `maximum` bytes at the same address; of `maximum` at once where memory becomes
        resident when it is first touched (CPU) or cannot grow. Errors as of alloc, and ValueError for more than `maximum`."""
        return self.alloc(maximum, label)

    def scratch(self, name: str, nbytes: int) -> DeviceBuffer:
        """Zeroed memory called `name` that launches of this device use one after another (partial sums, their counters):
        allocated when first asked for, and anew when more is wanted; what was recorded keeps the outgrown one."""
        kept = self._scratch.get(name)
        if kept is None or kept.nbytes < nbytes:
            kept = self._scratch[name] = self.alloc(nbytes, "scratch")
        return kept

    def memory(self) -> "dict[str, int]":
        """Bytes in use by label."""
        return dict(self._account.by_label)

    @property
    def memory_total(self) -> int:
        """Bytes of memory that the device has."""
        return probe.usable_bytes()

    @property
    def memory_free(self) -> int:
        """Bytes that could be allocated now, other processes considered; at most memory_total."""
        free = probe.memory_bytes()["available"]
        return self.memory_total if free is None else min(free, self.memory_total)

    def staging(self, nbytes: int, label: str = "staging") -> Staging:
        """`nbytes` bytes, zeroed, that host and device exchange a step's data through. Errors as of alloc."""
        return Staging(self.alloc(nbytes, label), self.shares_memory)

    def synchronize(self) -> None:
        """Until everything that was submitted has run. DeviceError or DeviceLost when it failed."""

    def read(self, tensor: "Any") -> bytes:
        """The bytes of a Tensor or Buffer, after all that was submitted: synchronous. DeviceError or DeviceLost when that failed."""
        self.synchronize()
        return ctypes.string_at(tensor.address, tensor.nbytes)

    def write(self, tensor: "Any", data: "bytes | bytearray | memoryview") -> None:
        """Fill a Tensor or Buffer with `data`, after all that was submitted. Errors as of read, and ValueError unless sizes agree."""
        data = memoryview(data).cast("B")
        check_write(tensor, data.nbytes)
        self.synchronize()
        ctypes.memmove(tensor.address, data.tobytes(), data.nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` within device memory, by address, after all that was submitted and before what will be. On a GPU it may run later; the ranges must not overlap."""
        self.synchronize()
        ctypes.memmove(destination, source, nbytes)

    def host_memory(self, nbytes: int, label: str, for_copies: bool = False) -> "Any":
        """Memory of the host for copy_out and copy_in, page-locked on a GPU: `address`, `nbytes`, `free()`. DeviceError. for_copies alone:
        locked where that can be (`is_locked`); other threads' launches do not wait for pieces of some MiB."""
        return Buffer(nbytes, label, self._account if self.shares_memory else Account())

    def copy_out(self, host: int, source: int, nbytes: int) -> None:
        """Copy device memory to an address within host_memory(), in the order of copy(). The host may look once what was submitted later is done."""
        self.copy(host, source, nbytes)

    def copy_in(self, destination: int, host: int, nbytes: int) -> None:
        """The way back. The host must not change the bytes until what is submitted later is done."""
        self.copy(destination, host, nbytes)

    def program(self, symbol: str) -> Program:
        """The kernel called `symbol`. Raises DeviceError, naming near ones, when there is none."""
        found = self._programs.get(symbol)
        if found is None:
            try:
                entry = self._manifest[symbol]
            except KeyError:
                known = self.symbols()
                near = ", ".join(difflib.get_close_matches(symbol, known, 3))
                hint = f"; near: {near}" if near else f" of {len(known)} kernels"
                raise DeviceError(f"no kernel {symbol!r} for {self.isa}{hint}") from None
            found = self._programs[symbol] = self._load_program(symbol, entry)
        return found

    def _load_program(self, symbol: str, entry: dict) -> Program:
        raise NotImplementedError

    def symbols(self) -> "list[str]":
        """The kernels that this device has."""
        return sorted(self._manifest)

    def compile_ahead(self, symbols: "Callable[[], Iterable[str]]") -> None:
        """What `symbols` gives will be asked for: a device that compiles kernels when they are, compiles them side by side."""

    def check_sources(self, error: Exception | None = None) -> None:
        """DeviceError when the kernels were compiled from other sources than those that are here, which is why a launch
        does not fit (`error`). Asked when one does not, and by a start that finds newer sources: hashing takes 30 ms."""
        if self._sources is not None and self._sources != cache.fingerprint():
            old = "the compiled kernels are older than their sources: run `python -m zse.build`"
            raise DeviceError(f"{old} ({error})" if error else old) from None

    def record(self) -> Recorder:
        """A new recording."""
        return Recorder(self)

    def run(self, record: "Callable[[Recorder], None]", **symbols: int) -> None:
        """Record what `record` launches, run it once, and drop it: for tests and one-off work."""
        recorder = self.record()
        record(recorder)
        graph = recorder.finish()
        try:
            graph.run(**symbols)
        finally:
            graph.close()

    def _build(self, recorder: Recorder) -> Graph:
        raise NotImplementedError

    def load(self, jobs: "Sequence[LoadJob]", threads: int | None = None, sums: bool = False) -> "BackgroundLoad":
        """Start the jobs in the background, about in order. Keep files and destinations until `wait` returned. threads: that read; default: the
        device's way. sums: take checksums too; a device whose copies the host does not see leaves them out. Raises as Load does."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the device's threads. Its graphs and loads must be done. Closing twice does nothing."""
        raise NotImplementedError

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class GPUCapabilities(Device):
    """What all devices with GPU kernels have in common."""

    kernels = "gpu"
    threads = 0
    shares_memory = False
    runs_ahead = True
    num_sms = 132  # an H200's, where a driver does not say
    products_per_s = 0.0  # multiply-adds of 16-bit floats by the data sheet; 0: unknown
    inner = "bf16"
    activations = ("fp8", "bf16")
