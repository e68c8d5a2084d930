"""Devices without kernels, that note which ones an engine asks them for (zse.engine.load: kernels_of)."""

from zse.runtime.buffer import Buffer, DeviceBuffer
from zse.runtime.device import Program, Staging
from zse.runtime.null import NullDevice, NullGPU


class AskingDevice(NullDevice):
    """A CPU of an ISA level that notes the kernels it is asked for."""

    def __init__(self, level: str, threads: int):
        super().__init__(threads)
        self.isa, self.asked = level, set[str]()

    def program(self, symbol: str) -> Program:
        self.asked.add(symbol)
        return Program(symbol, 0, {})


class NoMemory(DeviceBuffer):
    """Room that nobody writes to."""

    __slots__ = ()

    def _allocate(self) -> int:
        return 1 << 20

    def _release(self) -> None:
        return


class AskingGPU(NullGPU):
    """A GPU like another one, of its memory only the size, that notes the kernels it is asked for."""

    def __init__(self, device):
        super().__init__(device.isa)
        self.asked = set[str]()
        self.num_sms, self.shared_bytes, self.l2_bytes = device.num_sms, device.shared_bytes, device.l2_bytes
        self.memory_total, self.memory_free = device.memory_total, device.memory_free
        self.repacks = True

    def program(self, symbol: str) -> Program:
        self.asked.add(symbol)
        return Program(symbol, 0, {})

    def alloc(self, nbytes: int, label: str = "other"):
        return NoMemory(nbytes, label, self._account)

    def staging(self, nbytes: int, label: str = "staging") -> Staging:
        return Staging(Buffer(nbytes, label, self._account), self.shares_memory)

    def read(self, tensor) -> bytes:
        return bytes(tensor.nbytes)

    def write(self, tensor, data) -> None:
        return

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        return
