"""Collectives between GPUs that do not reach each other's memory: through page-locked memory of the host and what the processes
share (host.py). In a recording each is a copy out, a call of C in the stream, a copy in; always of as many rows as there can be, for
the call knows no symbols."""

import ctypes
from types import SimpleNamespace

from zse.dtypes import ITEM_BYTES
from zse.parallel.collectives import host
from zse.runtime import native
from zse.runtime.device import Copy
from zse.runtime.fetch import HostFunction
from zse.runtime.symbol import most_of, product

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from zse.parallel.group import RankGroup
    from zse.runtime.device import Recorder
    from zse.tensor import Tensor


class GroupCall(ctypes.Structure):
    """zse_group_call."""

    _fields_ = [("phases", ctypes.c_void_p * 4), ("args", ctypes.c_uint64 * 5)]


class StagedCollectives:
    """Also of GPUs on several hosts, whose collectives are calls of C that use sockets. Interface and errors as of HostCollectives."""

    def __init__(self, group: "RankGroup", device: "Any"):
        self._group, self._device, self._runtime = group, device, native.runtime()
        self._memory: Any = None

    def all_reduce(self, recorder: "Recorder", x: "Tensor", out: "Tensor") -> None:
        host.check_sum(x, out)
        count = most_of(product(x.shape), recorder.maxima)
        memory = self._room(count * ITEM_BYTES[x.dtype])
        self._record(recorder, "reduce", x, out, memory.address, memory.address, count, host.TYPES[x.dtype])

    def gather(
        self, recorder: "Recorder", x: "Tensor", out: "Tensor", widths: "Sequence[int]", every: bool = False
    ) -> None:
        rank, item = self._group.rank, ITEM_BYTES[x.dtype]
        is_read = every or not rank
        host.check_gather(x, out, widths, rank, every)
        rows = most_of(x.shape[0], recorder.maxima)
        whole = sum(widths) * item * rows
        memory = self._room(whole + widths[rank] * item * rows, max(widths) * item * rows)
        array = self._group.host.widths_of([width * item for width in widths])
        part, to = memory.address + whole, memory.address if is_read else 0
        numbers = part, to, rows, ctypes.addressof(array)
        self._record(recorder, "gather", x, out if is_read else None, *numbers)

    def broadcast(self, recorder: "Recorder", x: "Tensor") -> None:
        nbytes = most_of(product((*x.shape, ITEM_BYTES[x.dtype])), recorder.maxima)
        memory, rank = self._room(nbytes), self._group.rank
        self._record(recorder, "broadcast", None if rank else x, x if rank else None, memory.address, nbytes)

    def send(self, recorder: "Recorder", x: "Tensor") -> None:
        nbytes = most_of(product((*x.shape, ITEM_BYTES[x.dtype])), recorder.maxima)
        self._record(recorder, "send", x, None, self._room(nbytes).address, nbytes)

    def receive(self, recorder: "Recorder", x: "Tensor") -> None:
        nbytes = most_of(product((*x.shape, ITEM_BYTES[x.dtype])), recorder.maxima)
        self._record(recorder, "receive", None, x, self._room(nbytes).address, nbytes)

    def _room(self, nbytes: int, part: int | None = None) -> "Any":
        """Page-locked memory that all collectives use one after another; recordings keep what they were given."""
        host.check_part(nbytes if part is None else part)
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = self._device.host_memory(nbytes, "collectives")
        return self._memory

    def _record(self, recorder: "Recorder", name: str, x: "Any", out: "Any", *numbers: int) -> None:
        """numbers: of the kernels' arguments behind the group; the first is where x goes, the second where out comes from (of a
        broadcast, of a message the first)."""
        phases = [getattr(self._runtime, symbol) for symbol in host.symbols_of(name, self._group.nodes)]
        addresses = [ctypes.cast(phase, ctypes.c_void_p).value for phase in phases]
        args = self._group.host.handle, *numbers, *[0] * (4 - len(numbers))
        call = GroupCall((ctypes.c_void_p * 4)(*addresses), (ctypes.c_uint64 * 5)(*args))
        run = ctypes.cast(self._runtime.zse_group_run, ctypes.c_void_p).value or 0
        steps: list[Any] = [HostFunction(run, ctypes.addressof(call), (call, self._memory))]
        if x is not None:
            steps.insert(0, self._copy(recorder, "download", x, numbers[0]))
        if out is not None:
            steps.append(self._copy(recorder, "upload", out, numbers[1 if name in ("reduce", "gather") else 0]))
        recorder.launches += steps
        if self._group.host.check not in recorder.checks:
            recorder.checks.append(self._group.host.check)

    def _copy(self, recorder: "Recorder", symbol: str, tensor: "Tensor", address: int) -> Copy:
        """All of a tensor, to or from page-locked memory."""
        nbytes = most_of(product((*tensor.shape, ITEM_BYTES[tensor.dtype])), recorder.maxima)
        place: Any = SimpleNamespace(buffer=tensor, host_address=address)
        return Copy(symbol, place, 0, nbytes)

    def close(self) -> None:
        """Nothing of its own to give back: the memory goes with the recordings."""
