"""Memory of a GPU: zeroed buffers counted by label, buffers that grow in place, pinned memory of the host."""

import ctypes
from ctypes import byref, c_uint64

from zse.errors import DeviceError
from zse.runtime.bindings.driver import AccessDescription, Address, AllocationProperties, DriverError, IPCHandle
from zse.runtime.buffer import Account, Buffer, OwningBuffer, view_of
from zse.runtime.device import Staging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.gpu import GPUDevice

PINNED, DEVICE_LOCATION, READ_WRITE = 1, 1, 3  # CUmemAllocationType, CUmemLocationType, CUmemAccess_flags
PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class GPUBuffer(OwningBuffer):
    """Device memory: address is a device pointer, 256-byte aligned at least. The host cannot see into it:
    `device.read`, `device.write`."""

    __slots__ = ("device",)
    _is_counted = True

    def __init__(self, device: "GPUDevice", nbytes: int, label: str):
        self.device = device
        super().__init__(nbytes, label, device._account if self._is_counted else Account())

    def _allocate(self) -> int:
        device, size = self.device, max(self.nbytes, 1)
        device.use()
        address = Address()
        try:
            device.driver.alloc(byref(address), size)
        except DriverError as error:
            raise device.memory_error(error, size, self.label) from None
        device.fill_zero(address.value, size)
        return address.value

    def _release(self) -> None:
        if not self.device.closed and self.device.driver.lost is None:  # else it went with the context
            self.device.synchronize()
            self._give_back()

    def _give_back(self) -> None:
        self.device.driver.free(self.address)


class GrowingBuffer(GPUBuffer):
    """A range of addresses for `maximum` bytes of which the first `nbytes` have memory; `grow` adds more in place, so
    that recorded graphs stay valid. In steps of the driver's granularity (2 MiB on CUDA)."""

    __slots__ = ("maximum", "_reserved", "_mapped", "_pieces", "_granularity", "_properties")

    def __init__(self, device: "GPUDevice", nbytes: int, maximum: int, label: str):
        if not 0 <= nbytes <= maximum:
            raise ValueError(f"{label}: {nbytes} bytes of at most {maximum}")
        self.maximum, self._mapped = maximum, 0
        self._pieces: list[tuple[int, int, int]] = []  # address, bytes, handle
        super().__init__(device, nbytes, label)

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._granularity) * self._granularity

    def _allocate(self) -> int:
        device = self.device
        device.use()
        self._properties = AllocationProperties(
            type=PINNED, location_type=DEVICE_LOCATION, location_id=self.device.ordinal
        )
        step, address = ctypes.c_size_t(), Address()
        device.driver.vmm_granularity(byref(step), byref(self._properties), 0)
        self._granularity = step.value
        self._reserved = self._round_up(max(self.maximum, 1))
        device.driver.vmm_reserve(byref(address), self._reserved, 0, 0, 0)
        self.address = address.value
        try:
            self._map(self.nbytes)
        except BaseException:
            self._give_back()
            raise
        return self.address

    def _map(self, nbytes: int) -> None:
        """Memory for the first `nbytes`."""
        device, driver = self.device, self.device.driver
        more = self._round_up(nbytes) - self._mapped
        if more <= 0:
            return
        handle, at = c_uint64(), self.address + self._mapped
        try:
            driver.vmm_create(byref(handle), more, byref(self._properties), 0)
        except DriverError as error:
            raise device.memory_error(error, more, self.label) from None
        try:
            driver.vmm_map(at, more, 0, handle.value, 0)
        except BaseException:
            driver.vmm_release(handle.value)
            raise
        self._pieces.append((at, more, handle.value))
        self._mapped += more
        access = AccessDescription(DEVICE_LOCATION, device.ordinal, READ_WRITE)
        driver.vmm_set_access(at, more, byref(access), 1)
        device.fill_zero(at, more)

    def grow(self, nbytes: int) -> None:
        """Have at least `nbytes`, the new ones zeroed. ValueError over the maximum, DeviceError when there is not
        enough."""
        if nbytes > self.maximum:
            raise ValueError(f"{self.label}: {nbytes} bytes of at most {self.maximum}")
        if self.freed:
            raise DeviceError(f"{self.label}: the buffer was freed")
        if nbytes > self.nbytes:
            self.device.use()
            self._map(nbytes)
            self._account.add(self.label, nbytes - self.nbytes)
            self.nbytes = nbytes

    def _give_back(self) -> None:
        driver = self.device.driver
        pieces, self._pieces = self._pieces, []
        for at, nbytes, handle in pieces:
            driver.vmm_unmap(at, nbytes)
            driver.vmm_release(handle)
        driver.vmm_unreserve(self.address, self._reserved)


class PinnedMemory(GPUBuffer):
    """Zeroed page-locked memory of the host at `address`: not the device's, so not counted there."""

    __slots__ = ()
    _is_counted = False

    def _allocate(self) -> int:
        return self.device.alloc_pinned(self.nbytes, self.label)

    def _give_back(self) -> None:
        self.device.free_pinned(self.address)


class RegisteredMemory(GPUBuffer):
    """Memory of the host that was taken as any, in large pages, and then page-locked, where the driver can: 3.3 GB/s a thread, 6 by two, where
    memory that the driver allocates comes at 1.7 and no launch does meanwhile. Copies from what it could not lock are right, too, and slower."""

    __slots__ = ("is_locked", "_memory")
    _is_counted = False

    def _allocate(self) -> int:
        self.device.use()
        self._memory = Buffer(self.nbytes, self.label, Account())
        address = self._memory.address
        ctypes.memset(address, 0, self.nbytes)  # it is there now: the driver has only to lock it
        try:
            self.device.driver.host_register(address, self.nbytes, PORTABLE)
            self.is_locked = True
        except DriverError:
            self.is_locked = False
        return address

    def _give_back(self) -> None:
        if self.is_locked:
            self.device.driver.host_unregister(self.address)
        self._memory.free()


def export_buffer(buffer: GPUBuffer) -> bytes:
    """What names the buffer to other processes of this machine, for import_buffer there. DeviceError where the driver cannot."""
    device, handle, start, size = buffer.device, IPCHandle(), Address(), ctypes.c_size_t()
    device.use()
    device.driver.address_range(byref(start), byref(size), buffer.address)
    device.driver.ipc_handle(byref(handle), buffer.address)
    return (buffer.address - start.value).to_bytes(8, "little") + bytes(handle.bytes)


class PeerMemory:
    """Another process's buffer, of this GPU or of one that this one reaches. address: for kernels. The other process must keep
    its buffer until this is closed. DeviceError where this GPU does not reach it."""

    def __init__(self, device: "GPUDevice", exported: bytes):
        self._device, self.address = device, 0
        device.use()
        start = Address()
        device.driver.ipc_open(byref(start), IPCHandle.from_buffer_copy(exported[8:]), LAZY_PEER_ACCESS)
        self._start = start.value
        self.address = self._start + int.from_bytes(exported[:8], "little")

    def close(self) -> None:
        """Give the addresses back. Closing twice does nothing."""
        start, self._start = self._start, 0
        if start and not self._device.closed and self._device.driver.lost is None:
            self._device.use()
            self._device.driver.ipc_close(start)


class GPUStaging(Staging):
    """Pinned host memory and device memory of one size."""

    __slots__ = ("_device",)

    def __init__(self, device: "GPUDevice", nbytes: int, label: str):
        self._device, self.nbytes, self.shared = device, nbytes, False
        self.buffer = GPUBuffer(device, nbytes, label)
        self.host_address = device.alloc_pinned(nbytes, label)
        self.host = view_of(self.host_address, nbytes)

    def free(self) -> None:
        if self.buffer.freed:
            return
        self.buffer.free()
        self.host.release()
        self._device.free_pinned(self.host_address)
