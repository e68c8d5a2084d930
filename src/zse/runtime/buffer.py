"""Host memory of a device: zero-filled, aligned, counted by label, freed explicitly."""

import ctypes
import mmap

from zse.errors import DeviceError

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register
HUGE_PAGE = 2 << 20  # x86-64 and arm64 (4 KiB granule)


class Account:
    """Bytes in use by label, and the most that were in use at once."""

    def __init__(self) -> None:
        self.by_label: dict[str, int] = {}
        self.total = 0
        self.peak = 0

    def add(self, label: str, nbytes: int) -> None:
        self.by_label[label] = self.by_label.get(label, 0) + nbytes
        if not self.by_label[label]:
            del self.by_label[label]
        self.total += nbytes
        self.peak = max(self.peak, self.total)


class Buffer:
    """Zero-filled private memory. address: of its first byte, 64-byte aligned (2 MiB when large).

    Pages become resident when first touched. `free` gives the memory back; so does losing the last reference.
    """

    __slots__ = ("address", "nbytes", "label", "_map", "_start", "_account", "_pins", "__weakref__")

    def __init__(self, nbytes: int, label: str, account: Account):
        self._map: mmap.mmap | None = None  # set first: __del__ runs even when this fails
        if nbytes < 0:
            raise ValueError(f"a buffer of {nbytes} bytes")
        self.nbytes, self.label, self._account, self._pins = nbytes, label, account, 0
        large = nbytes >= 2 * HUGE_PAGE
        try:
            # The default of mmap.mmap is a shared mapping: shared memory gets no huge pages.
            memory = mmap.mmap(
                -1, max(nbytes, 1) + (HUGE_PAGE if large else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise DeviceError(f"cannot allocate {nbytes:,} bytes for {label}: {error}") from None
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._start = -base % HUGE_PAGE if large else 0
        if large and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                # Whole huge pages only: the tail would make up to 2 MiB resident that nobody uses.
                memory.madvise(mmap.MADV_HUGEPAGE, self._start, nbytes // HUGE_PAGE * HUGE_PAGE)
            except OSError:
                pass  # advice: a kernel without huge pages says EINVAL
        self._map = memory
        self.address = base + self._start
        account.add(label, nbytes)

    def view(self, format: str = "B") -> memoryview:
        """The content as a writable memoryview of `format` items (struct letters: "B", "f", "i", …), one dimension."""
        if self._map is None:
            raise DeviceError(f"{self.label}: the buffer was freed")
        return memoryview(self._map)[self._start : self._start + self.nbytes].cast(format)  # type: ignore[call-overload]

    @property
    def freed(self) -> bool:
        return self._map is None

    def pin(self, count: int) -> None:
        """Graphs that use the buffer: while there is one, it cannot be freed."""
        self._pins += count

    def free(self) -> None:
        """Give the memory back. DeviceError while a graph or a view still uses it. Freeing twice does nothing."""
        if self._map is None:
            return
        if self._pins:
            raise DeviceError(f"{self.label}: the buffer is used by {self._pins} recorded graph(s); close them first")
        try:
            self._map.close()
        except BufferError:
            raise DeviceError(f"{self.label}: a view of the buffer is still in use") from None
        self._map = None
        self._account.add(self.label, -self.nbytes)

    def __del__(self) -> None:
        if self._map is not None:  # the mapping goes with its own last reference (a view may outlive us)
            self._map = None
            self._account.add(self.label, -self.nbytes)

    def __repr__(self) -> str:
        return f"Buffer({self.label!r}, {self.nbytes} bytes{', freed' if self.freed else ''})"
