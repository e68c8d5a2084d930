"""The memory behind host slots and the Batch's transfers: whole KV pages between pages, and to the host and back."""

import ctypes
from typing import NamedTuple

from zse.cache.pages import BLOCK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zse.cache.layout import KVCache
    from zse.tensor import Tensor

# Of host memory at once: page-locking takes about 0.3 ms a MiB, which a step must not wait for in full.
CHUNK_BYTES = 32 << 20


class HostSlots:
    """Slots of `nbytes` each. Memory is taken by the chunk, when a slot of it is first used."""

    def __init__(self, device, nbytes: int):
        self.nbytes = nbytes
        self._device = device
        self._per_chunk = max(1, CHUNK_BYTES // nbytes)
        self._chunks: dict[int, Any] = {}

    def address(self, slot: int) -> int:
        """Where the slot is. Raises DeviceError when there is no memory for it."""
        number, place = divmod(slot, self._per_chunk)
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = self._device.host_memory(self._per_chunk * self.nbytes, "kv host")
        return chunk.address + place * self.nbytes

    def reserve(self, count: int) -> None:
        """Take the memory of the first `count` slots."""
        for slot in range(0, count, self._per_chunk):
            self.address(slot)

    def close(self) -> None:
        for chunk in self._chunks.values():
            chunk.free()
        self._chunks.clear()


class PageMover:
    """Runs transfers (scheduler.Batch.transfers) behind what was submitted to the device before.

    history: i32 [num_blocks, BLOCK], the tokens of each block on a GPU, which go with it; None on a CPU."""

    def __init__(self, device, kv: "KVCache", history: "Tensor | None" = None):
        self._device, self._kv = device, kv
        # (start, bytes of a page) of what makes up a page.
        self._parts = [(kv.buffer.address, kv.page_nbytes)]
        if history is not None:
            self._parts.append((history.address, 4 * BLOCK * kv.blocks_per_page))
        self.page_nbytes = sum(nbytes for _, nbytes in self._parts)
        self.slots = HostSlots(device, self.page_nbytes)

    def run(self, transfers: list[tuple[str, int, int]]) -> None:
        """In this order. Raises DeviceError."""
        for kind, source, target in transfers:
            if kind == "copy":
                self._kv.map_to(target)
                for start, nbytes in self._parts:
                    self._device.copy(start + target * nbytes, start + source * nbytes, nbytes)
            elif kind == "out":
                at = self.slots.address(target)
                for start, nbytes in self._parts:
                    self._device.copy_out(at, start + source * nbytes, nbytes)
                    at += nbytes
            else:
                self._kv.map_to(target)
                at = self.slots.address(source)
                for start, nbytes in self._parts:
                    self._device.copy_in(start + target * nbytes, at, nbytes)
                    at += nbytes

    def settle(self) -> None:
        """Until the transfers so far are done."""
        self._device.read(_Range(self._kv.buffer.address, 4))

    def read_page(self, page: int) -> bytes:
        """What belongs to a page, after all that was submitted."""
        return b"".join(self._device.read(_Range(start + page * nbytes, nbytes)) for start, nbytes in self._parts)

    def read_slot(self, slot: int) -> bytes:
        """What the host has in a slot: see settle()."""
        return ctypes.string_at(self.slots.address(slot), self.page_nbytes)

    def write_slot(self, slot: int, content: bytes) -> None:
        """Fill a slot that no transfer still has to read: see settle()."""
        if len(content) != self.page_nbytes:
            raise ValueError(f"{len(content)} bytes for a page of {self.page_nbytes}")
        ctypes.memmove(self.slots.address(slot), content, len(content))

    def close(self) -> None:
        self.slots.close()


class _Range(NamedTuple):
    """Device memory by address."""

    address: int
    nbytes: int
