"""Collectives through memory that the ranks' processes share.

Each rank has two slots, used by turns, and a counter. A rank writes its part to its slot, raises its counter, waits until all counters
are as high, and reads the others' slots. Two slots are enough: who has begun turn n has read what was written in turn n - 2, because all had
begun turn n - 1 before. Longer parts go in several turns."""

import ctypes
import os
import time
from functools import partial

from zse.dtypes import ITEM_BYTES
from zse.lazy import numpy as np
from zse.runtime.host_call import call_host
from zse.runtime.symbol import Sym

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from zse.parallel.group import RankGroup
    from zse.runtime.device import Recorder
    from zse.tensor import Tensor

ROOM = 4 << 20  # bytes of a slot
LINE = 64  # bytes of a counter's cache line
LOOK_S = 0.05
SPINS = 2000  # looks at the counters before the rank sleeps between them: about 1 ms


def shared_bytes(size: int) -> int:
    """Bytes of the memory that `size` ranks share; what is not written costs none."""
    return 2 * size * ROOM + size * LINE


class HostCollectives:
    """memory: shared_bytes(group.size)."""

    def __init__(self, group: "RankGroup", memory: "mmap.mmap"):
        self._group, self._memory, self._turn = group, memory, 0
        self._view = (ctypes.c_char * len(memory)).from_buffer(memory)
        base = ctypes.addressof(self._view)
        self._slots = [[base + (2 * rank + turn) * ROOM for turn in range(2)] for rank in range(group.size)]
        counters = base + 2 * group.size * ROOM
        self._counters = [ctypes.c_uint64.from_address(counters + rank * LINE) for rank in range(group.size)]

    # -- of a recording

    def all_reduce(self, recorder: "Recorder", x: "Tensor", out: "Tensor") -> None:
        """As RankGroup's."""
        call_host(recorder, partial(self._all_reduce, x, out))

    def gather(self, recorder: "Recorder", x: "Tensor", out: "Tensor", widths: "Sequence[int]") -> None:
        """As RankGroup's."""
        call_host(recorder, partial(self._gather, x, out, tuple(widths)))

    def broadcast(self, recorder: "Recorder", x: "Tensor") -> None:
        """As RankGroup's."""
        call_host(recorder, partial(self._broadcast, x))

    # -- what they do

    def _all_reduce(self, x: "Tensor", out: "Tensor", symbols: dict[str, int]) -> None:
        nbytes = _rows(x, symbols) * x.shape[1] * ITEM_BYTES[x.dtype]
        for start in range(0, nbytes, ROOM):
            count = min(ROOM, nbytes - start)
            self._sum(self._share(x.address + start, count), out.address + start, count, x.dtype)

    def _sum(self, parts: list[int], out: int, nbytes: int, dtype: str) -> None:
        """The numbers at the addresses `parts`, added in their order."""
        if dtype == "f32":
            into = _array(out, nbytes, np.float32)
            np.add(_array(parts[0], nbytes, np.float32), _array(parts[1], nbytes, np.float32), out=into)
            for part in parts[2:]:
                np.add(into, _array(part, nbytes, np.float32), out=into)
            return
        total = sum((_array(part, nbytes, np.uint16).astype(np.uint32) << 16).view(np.float32) for part in parts)
        bits = total.astype(np.float32).view(np.uint32)
        _array(out, nbytes, np.uint16)[:] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    def _gather(self, x: "Tensor", out: "Tensor", widths: tuple[int, ...], symbols: dict[str, int]) -> None:
        rows, most = _rows(x, symbols), ROOM // (4 * max(widths))
        if not most:
            raise ValueError(f"a row of {max(widths)} numbers is longer than a slot")
        mine = 4 * widths[self._group.rank]
        for start in range(0, rows, most):
            count = min(most, rows - start)
            parts = self._share(x.address + start * mine, count * mine)
            if self._group.rank:
                continue
            total, at = sum(widths), 0
            into = _array(out.address + 4 * start * total, 4 * count * total, np.float32).reshape(count, total)
            for part, width in zip(parts, widths, strict=True):
                into[:, at : at + width] = _array(part, 4 * count * width, np.float32).reshape(count, width)
                at += width

    def _broadcast(self, x: "Tensor", symbols: dict[str, int]) -> None:
        nbytes = ITEM_BYTES[x.dtype] * _rows(x, symbols)
        for size in x.shape[1:]:
            nbytes *= size
        for start in range(0, nbytes, ROOM):
            count = min(ROOM, nbytes - start)
            parts = self._share(x.address + start, 0 if self._group.rank else count)
            if self._group.rank:
                ctypes.memmove(x.address + start, parts[0], count)

    def exchange(self, data: bytes) -> list[bytes]:
        """As RankGroup's."""
        sizes = [
            int.from_bytes(size, "little")
            for size in self._exchange(len(data).to_bytes(8, "little"), [8] * self._group.size)
        ]
        return self._exchange(data, sizes)

    def _exchange(self, data: bytes, sizes: "Sequence[int]") -> list[bytes]:
        found = [b""] * self._group.size
        for start in range(0, max(sizes), ROOM):
            piece = ctypes.create_string_buffer(data[start : start + ROOM], max(1, len(data[start : start + ROOM])))
            parts = self._share(ctypes.addressof(piece), len(data[start : start + ROOM]))
            for rank, part in enumerate(parts):
                found[rank] += ctypes.string_at(part, max(0, min(ROOM, sizes[rank] - start)))
        return found

    def _share(self, source: int, nbytes: int) -> list[int]:
        """Give `nbytes` to all; where each rank's are now, until the turn after the next."""
        self._turn += 1
        turn, which = self._turn, self._turn % 2
        ctypes.memmove(self._slots[self._group.rank][which], source, nbytes)
        self._counters[self._group.rank].value = turn
        for rank, counter in enumerate(self._counters):
            if counter.value < turn and rank != self._group.rank:
                self._wait(counter, turn)
        return [slots[which] for slots in self._slots]

    def _wait(self, counter: "ctypes.c_uint64", turn: int) -> None:
        for _ in range(SPINS):
            if counter.value >= turn:
                return
            os.sched_yield()
        began = looked = time.monotonic()
        while counter.value < turn:
            time.sleep(0.0001)
            now = time.monotonic()
            if now - looked > LOOK_S:
                self._group.check(began)
                looked = now

    def close(self) -> None:
        """Give the memory back."""
        self._counters.clear()
        del self._view
        self._memory.close()


def _rows(x: "Tensor", symbols: dict[str, int]) -> int:
    rows = x.shape[0]
    return rows.value(symbols) if isinstance(rows, Sym) else rows


def _array(address: int, nbytes: int, kind):
    """NumPy's view of memory."""
    return np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"), kind)
