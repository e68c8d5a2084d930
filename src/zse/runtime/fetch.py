"""What a stream does beside kernels and plain copies: calls of C, and copies to the device beside its kernels, from page-locked
memory of the host, in the stream of copies, in the order that a recording says.

    fetch(recorder, 0, destination, source)     # once everything recorded so far is done with the destination
    ...                                         # kernels run meanwhile
    await_fetch(recorder, 0)                    # what follows finds the bytes there
"""

from time import perf_counter

from zse.runtime.args import Args

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zse.runtime.device import Device, Recorder

MEASURED_BYTES, MEASURED_TIMES = 64 << 20, 3  # 1.2 ms each over PCIe 5


class Fetch:
    """A recorded copy from the host to the device, beside what follows. number: of the fetch among those that run at
    once; destination, source: Tensors."""

    __slots__ = ("args", "number", "destination", "source")

    symbol, grid = "fetch", (1,)

    def __init__(self, number: int, destination: "Any", source: "Any"):
        self.number, self.destination, self.source = number, destination, source
        self.args = Args(destination=destination.buffer, source=source.buffer)

    def __repr__(self) -> str:
        return f"Fetch({self.number}: {self.source.nbytes} bytes to {self.destination.buffer.label!r})"


class Await:
    """What follows waits for the fetch of this number."""

    __slots__ = ("args", "number")

    symbol, grid = "await", (1,)

    def __init__(self, number: int):
        self.number, self.args = number, Args()

    def __repr__(self) -> str:
        return f"Await({self.number})"


class HostFunction:
    """A call of C in the stream: what is recorded behind it waits. function: address of a C function void (*)(void *), which calls no driver; argument: what it gets. keep: what must stay."""

    __slots__ = ("function", "argument", "keep", "args")

    symbol, grid = "host function", (1,)

    def __init__(self, function: int, argument: int, keep: object):
        self.function, self.argument, self.keep, self.args = function, argument, keep, Args()


def fetch(recorder: "Recorder", number: int, destination: "Any", source: "Any") -> None:
    """Record a copy of `source`, in host_memory() of the device, to `destination`: after everything recorded before, at
    the same time as what is recorded behind it. Fetches of one number are awaited before the next one is recorded."""
    if destination.nbytes != source.nbytes:
        raise ValueError(f"a fetch of {source.nbytes} bytes into {destination.nbytes}")
    recorder.launches.append(Fetch(number, destination, source))  # type: ignore[arg-type]


def await_fetch(recorder: "Recorder", number: int) -> None:
    """Record: what follows runs when the last fetch of this number is done."""
    recorder.launches.append(Await(number))  # type: ignore[arg-type]


def link_bytes_per_s(device: "Device") -> float:
    """Measured: bytes a second from page-locked memory of the host to the device's. DeviceError as of allocations."""
    host: Any = device.host_memory(MEASURED_BYTES, "link test")
    buffer = device.alloc(MEASURED_BYTES, "link test")
    try:
        best = 0.0
        for _ in range(MEASURED_TIMES):
            device.synchronize()
            start = perf_counter()
            device.copy_in(buffer.address, host.address, MEASURED_BYTES)
            device.synchronize()
            best = max(best, MEASURED_BYTES / (perf_counter() - start))
        return best
    finally:
        buffer.free()
        host.free()
