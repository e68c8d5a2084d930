"""A device that counts what would be allocated on another one: no memory, no kernels. For memory plans."""

from zse.runtime.buffer import Account, DeviceBuffer
from zse.runtime.device import Device, Recorder, Staging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Nothing(DeviceBuffer):
    """Counted, and not there: its views are empty."""

    __slots__ = ()

    def _allocate(self) -> int:
        return 0

    def _release(self) -> None:
        pass

    def view(self, format: str = "B") -> memoryview:
        return memoryview(bytearray()).cast(format)  # type: ignore[call-overload]


class NothingRecorded(Recorder):
    """What is allocated while launches are recorded."""

    def launch(self, symbol, args, grid, independent=False, min_chunk=1) -> None:
        return


class CountingDevice(Device):
    """like: the device whose allocations are counted, by label, in memory(); it can do what that one can. Buffers that
    grow count in full."""

    def __init__(self, like: Device):
        super().__init__()
        for name in Device.__annotations__:
            if name[0] != "_":
                setattr(self, name, getattr(like, name))

    def alloc(self, nbytes: int, label: str = "other") -> "Any":
        return Nothing(nbytes, label, self._account)

    def staging(self, nbytes: int, label: str = "staging") -> Staging:
        return Staging(self.alloc(nbytes, label), self.shares_memory)

    def host_memory(self, nbytes: int, label: str, for_copies: bool = False) -> "Any":
        return self.alloc(nbytes, label) if self.shares_memory else Nothing(nbytes, label, Account())

    def record(self) -> Recorder:
        return NothingRecorded(self)

    def tensor_map(self, tensor: "Any", box: "Any", **options: "Any") -> None:
        return

    def write(self, tensor: "Any", data: "bytes | bytearray | memoryview") -> None:
        pass

    def close(self) -> None:
        pass
