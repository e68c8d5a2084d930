"""Memory of a device: zero-filled, aligned, counted by label, freed explicitly; here that of the host."""

import ctypes
import mmap
import sys
from contextlib import suppress

from zse.errors import DeviceError, DeviceLost, DeviceMemoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

HUGE_PAGE = 2 << 20  # x86-64 and arm64 (4 KiB granule)
# Elsewhere the advice that frees memory at once is another, and leaves what stood there until the system takes it.
_NOT_NEEDED = mmap.MADV_DONTNEED if sys.platform == "linux" else getattr(mmap, "MADV_FREE", None)


class Account:
    """Bytes in use, by label and together."""

    def __init__(self) -> None:
        self.by_label: dict[str, int] = {}
        self.total = 0

    def add(self, label: str, nbytes: int) -> None:
        self.by_label[label] = self.by_label.get(label, 0) + nbytes
        if not self.by_label[label]:
            del self.by_label[label]
        self.total += nbytes


class DeviceBuffer:
    """Zero-filled memory, counted under its label. `free` gives it back.

    address: of its first byte; freed: whether it was given back. A device says how memory is got (`_allocate`) and
    given back (`_release`)."""

    __slots__ = ("address", "nbytes", "label", "freed", "_account", "_pins", "__weakref__")

    def __init__(self, nbytes: int, label: str, account: Account):
        self.freed = True  # first: __del__ runs even when this fails
        if nbytes < 0:
            raise ValueError(f"a buffer of {nbytes} bytes")
        self.nbytes, self.label, self._account, self._pins = nbytes, label, account, 0
        self.address = self._allocate()
        self.freed = False
        account.add(label, self.nbytes)

    def _allocate(self) -> int:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def view(self, format: str = "B") -> memoryview:
        """The content as a writable memoryview of `format` items (struct letters: "B", "f", "i", …), one dimension.
        DeviceError where the host cannot touch it."""
        raise DeviceError(f"{self.label}: GPU memory has no host view; use device.read, device.write or a Staging")

    def grow(self, nbytes: int) -> None:
        """Have at least `nbytes` at the same address; ValueError for more than there can be."""
        if nbytes > self.nbytes:
            raise ValueError(f"{self.label}: {nbytes} bytes of at most {self.nbytes}")

    def use_small_pages(self, start: int, nbytes: int) -> None:
        """Memory of the host in these bytes becomes resident by the system's own pages, not by large ones."""

    def pin(self, count: int) -> None:
        """Graphs that use the buffer: while there is one, it cannot be freed."""
        self._pins += count

    def free(self) -> None:
        """Give the memory back once the device is done with it. DeviceError while a graph or a view uses it. Freeing
        twice does nothing."""
        if self.freed:
            return
        if self._pins:
            raise DeviceError(f"{self.label}: the buffer is used by {self._pins} recorded graph(s); close them first")
        self._release()
        self.freed = True
        self._account.add(self.label, -self.nbytes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, {self.nbytes} bytes{', freed' if self.freed else ''})"


def view_of(address: int, nbytes: int) -> memoryview:
    """Memory of the host as a writable memoryview of bytes. The caller keeps it alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class OwningBuffer(DeviceBuffer):
    """Memory that goes with its last reference. What only counts has no such hook: a Ctrl+C that arrives while many are
    dropped is raised inside one, where Python prints it and goes on."""

    __slots__ = ()

    def __del__(self) -> None:
        if not self.freed:
            self._pins = 0
            with suppress(DeviceLost):  # found out while waiting
                self.free()


class Buffer(DeviceBuffer):
    """Private memory of the host, 64-byte aligned (2 MiB when large). Pages become resident when first touched."""

    __slots__ = ("_map", "_start")

    def _allocate(self) -> int:
        large = self.nbytes >= 2 * HUGE_PAGE
        try:
            # The default of mmap.mmap is a shared mapping: shared memory gets no huge pages.
            memory = mmap.mmap(
                -1, max(self.nbytes, 1) + (HUGE_PAGE if large else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise DeviceMemoryError(f"cannot allocate {self.nbytes:,} bytes for {self.label}: {error}") from None
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._start = -base % HUGE_PAGE if large else 0
        if large and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # advice: a kernel without huge pages says EINVAL
                # Whole huge pages only: the tail would make up to 2 MiB resident that nobody uses.
                memory.madvise(mmap.MADV_HUGEPAGE, self._start, self.nbytes // HUGE_PAGE * HUGE_PAGE)
        self._map = memory
        return base + self._start

    def view(self, format: str = "B") -> memoryview:
        if self.freed:
            raise DeviceError(f"{self.label}: the buffer was freed")
        return memoryview(self._map)[self._start : self._start + self.nbytes].cast(format)  # type: ignore[call-overload]

    def use_small_pages(self, start: int, nbytes: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages says EINVAL
                self._map.madvise(mmap.MADV_NOHUGEPAGE, self._start + first, start + nbytes - first)

    def discard(self, start: int, nbytes: int) -> None:
        """Nothing in these bytes is needed any more: what whole pages of the system they cover goes back to it, and is
        zero, or what it was, when it is next touched."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0 and _NOT_NEEDED is not None:
            self._map.madvise(_NOT_NEEDED, self._start + first, size)

    def _release(self) -> None:
        try:
            self._map.close()
        except BufferError:
            raise DeviceError(f"{self.label}: a view of the buffer is still in use") from None

    def __del__(self) -> None:
        if not self.freed:  # the mapping goes with its own last reference (a view may outlive us)
            self.freed = True
            self._account.add(self.label, -self.nbytes)


def buffers_of(arguments: "Iterable[Iterable[Any]]") -> "list[DeviceBuffer]":
    """The distinct buffers behind the arguments of launches."""
    found: dict[int, DeviceBuffer] = {}
    for args in arguments:
        for arg in args:
            if arg is None or arg.__class__ is int or arg.__class__ is float:
                continue
            buffer = getattr(arg, "buffer", arg)
            if id(buffer) not in found and hasattr(buffer, "pin"):
                found[id(buffer)] = buffer
    return list(found.values())


def check_write(tensor: "Any", nbytes: int) -> None:
    """ValueError unless `nbytes` are those of a Tensor or Buffer, and lie within the buffer."""
    if nbytes != tensor.nbytes:
        raise ValueError(f"{nbytes} bytes for a destination of {tensor.nbytes}")
    buffer = getattr(tensor, "buffer", tensor)
    end = getattr(tensor, "offset", 0) + nbytes
    if end > buffer.nbytes:
        raise ValueError(f"{nbytes} bytes end {end - buffer.nbytes} behind their buffer {buffer.label!r}")
