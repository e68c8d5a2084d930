"""A GPU driver behind ctypes: functions by role, bound when first used, every status checked."""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p

from zse.errors import DeviceError, DeviceLost, DeviceMemoryError
from zse.runtime.native import fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Address = c_uint64  # CUdeviceptr, hipDeviceptr_t
OUT_OF_MEMORY = 2


class IPCHandle(ctypes.Structure):
    """CUipcMemHandle, hipIpcMemHandle_t: names memory of a device to another process of the machine."""

    _fields_ = [("bytes", c_ubyte * 64)]


_TYPES: "dict[str, Any]" = {
    "address": Address,
    "byte": c_ubyte,
    "float": c_float,
    "int": c_int,
    "ipc": IPCHandle,
    "pointer": c_void_p,
    "size": c_size_t,
    "text": c_char_p,
    "u32": c_uint32,
    "u64": c_uint64,
    "uint": c_uint,
}
# Role → (CUDA's symbol, HIP's, arguments: words of _TYPES, "*word" where the call writes one). The two are one
# interface with two spellings; "" where one has no such call. Calls of VMM and tensor maps may be missing from a
# driver.
ROLES = {
    "init": ("cuInit", "hipInit", "uint"),
    "driver_version": ("cuDriverGetVersion", "hipDriverGetVersion", "*int"),
    "device_count": ("cuDeviceGetCount", "hipGetDeviceCount", "*int"),
    "device_get": ("cuDeviceGet", "hipDeviceGet", "*int int"),
    "device_name": ("cuDeviceGetName", "hipDeviceGetName", "text int int"),
    "device_attribute": ("cuDeviceGetAttribute", "hipDeviceGetAttribute", "*int int int"),
    "device_total_memory": ("cuDeviceTotalMem_v2", "hipDeviceTotalMem", "*size int"),
    "context_retain": ("cuDevicePrimaryCtxRetain", "", "*pointer int"),
    "context_release": ("cuDevicePrimaryCtxRelease_v2", "hipDeviceReset", "int"),
    "set_current": ("cuCtxSetCurrent", "hipSetDevice", "pointer"),
    "memory_info": ("cuMemGetInfo_v2", "hipMemGetInfo", "*size *size"),
    "alloc": ("cuMemAlloc_v2", "hipMalloc", "*address size"),
    "free": ("cuMemFree_v2", "hipFree", "address"),
    "memset_async": ("cuMemsetD8Async", "hipMemsetD8Async", "address byte size pointer"),
    "to_device_async": ("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", "address pointer size pointer"),
    "to_host_async": ("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", "pointer address size pointer"),
    "copy_async": ("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", "address address size pointer"),
    "stream_create": ("cuStreamCreate", "hipStreamCreateWithFlags", "*pointer uint"),
    "stream_destroy": ("cuStreamDestroy_v2", "hipStreamDestroy", "pointer"),
    "stream_wait": ("cuStreamSynchronize", "hipStreamSynchronize", "pointer"),
    "stream_wait_event": ("cuStreamWaitEvent", "hipStreamWaitEvent", "pointer pointer uint"),
    "event_create": ("cuEventCreate", "hipEventCreateWithFlags", "*pointer uint"),
    "event_destroy": ("cuEventDestroy_v2", "hipEventDestroy", "pointer"),
    "event_record": ("cuEventRecord", "hipEventRecord", "pointer pointer"),
    "event_wait": ("cuEventSynchronize", "hipEventSynchronize", "pointer"),
    "event_query": ("cuEventQuery", "hipEventQuery", "pointer"),
    "event_elapsed": ("cuEventElapsedTime", "hipEventElapsedTime", "*float pointer pointer"),
    "module_load": ("cuModuleLoadData", "hipModuleLoadData", "*pointer pointer"),
    "module_unload": ("cuModuleUnload", "hipModuleUnload", "pointer"),
    "module_function": ("cuModuleGetFunction", "hipModuleGetFunction", "*pointer pointer text"),
    "function_set_attribute": ("cuFuncSetAttribute", "", "pointer int int"),
    "host_alloc": ("cuMemHostAlloc", "hipHostMalloc", "*pointer size uint"),
    "host_free": ("cuMemFreeHost", "hipHostFree", "pointer"),
    "host_register": ("cuMemHostRegister_v2", "hipHostRegister", "pointer size uint"),
    "host_unregister": ("cuMemHostUnregister", "hipHostUnregister", "pointer"),
    "begin_capture": ("cuStreamBeginCapture_v2", "hipStreamBeginCapture", "pointer int"),
    "end_capture": ("cuStreamEndCapture", "hipStreamEndCapture", "pointer *pointer"),
    "graph_instantiate": ("cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags", "*pointer pointer u64"),
    "graph_destroy": ("cuGraphDestroy", "hipGraphDestroy", "pointer"),
    "executable_destroy": ("cuGraphExecDestroy", "hipGraphExecDestroy", "pointer"),
    "graph_launch": ("cuGraphLaunch", "hipGraphLaunch", "pointer pointer"),
    "launch": ("cuLaunchKernel", "hipModuleLaunchKernel", "pointer" + 7 * " uint" + 3 * " pointer"),
    "launch_ex": ("cuLaunchKernelEx", "", ""),
    "launch_host": ("cuLaunchHostFunc", "hipLaunchHostFunc", "pointer pointer pointer"),
    "tensor_map": ("cuTensorMapEncodeTiled", "", "pointer int u32 u64 pointer pointer pointer pointer int int int int"),
    "vmm_granularity": ("cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity", "*size pointer int"),
    "vmm_reserve": ("cuMemAddressReserve", "hipMemAddressReserve", "*address size size address u64"),
    "vmm_unreserve": ("cuMemAddressFree", "hipMemAddressFree", "address size"),
    "vmm_create": ("cuMemCreate", "hipMemCreate", "*u64 size pointer u64"),
    "vmm_release": ("cuMemRelease", "hipMemRelease", "u64"),
    "vmm_map": ("cuMemMap", "hipMemMap", "address size size u64 u64"),
    "vmm_unmap": ("cuMemUnmap", "hipMemUnmap", "address size"),
    "vmm_set_access": ("cuMemSetAccess", "hipMemSetAccess", "address size pointer size"),
    "address_range": ("cuMemGetAddressRange_v2", "hipMemGetAddressRange", "*address *size address"),
    "ipc_handle": ("cuIpcGetMemHandle", "hipIpcGetMemHandle", "*ipc address"),
    "ipc_open": ("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle", "*address ipc uint"),
    "ipc_close": ("cuIpcCloseMemHandle", "hipIpcCloseMemHandle", "address"),
    "device_properties": ("", "hipGetDevicePropertiesR0600", "pointer int"),
}
CUDA, HIP = 0, 1  # columns of ROLES


class DriverError(DeviceError):
    """A driver call that failed. call: the driver's function; status, name: of its error."""

    def __init__(self, call: str, status: int, name: str, message: str):
        super().__init__(message)
        self.call, self.status, self.name = call, status, name
        if status == OUT_OF_MEMORY:
            self.code = DeviceMemoryError.code


class Driver:
    """One driver library. `driver.alloc(...)` calls the role's function and raises unless it returns 0.

    path: another library than the system's (tests). Raises DeviceError when there is none.
    """

    vendor = ""  # as it stands in messages
    libraries: tuple[str, ...] = ()  # names for dlopen, in order
    column: int  # of ROLES
    arguments: dict[str, str] = {}  # of roles that differ from ROLES
    hints: dict[str, str] = {}  # error name → what to do
    sticky: frozenset[int] = frozenset()  # errors after which every call of the process fails
    missing_hint = ""  # what to do without a library
    # Calls that return at once: the interpreter's lock is kept, which takes up to 5 ms to get back while others import.
    quick = frozenset(
        "driver_version device_count device_get device_name device_attribute device_total_memory set_current memory_info "
        "stream_create event_create event_query module_function function_set_attribute vmm_granularity".split()
    )

    def __init__(self, path: str | None = None):
        self.symbols: dict[str, str] = {role: str(row[self.column]) for role, row in ROLES.items() if row[self.column]}
        reasons = []
        for name in (path,) if path else self.libraries:
            try:
                self.library = ctypes.CDLL(name)
                self._quick_library = ctypes.PyDLL(name, handle=self.library._handle)
                break
            except OSError as error:
                reasons.append(str(error))
        else:
            raise DeviceError(f"no {self.vendor} driver: {'; '.join(reasons)}; {self.missing_hint}")
        self.lost: DeviceLost | None = None
        self._functions: dict[str, Any] = {}

    def function(self, role: str) -> "Any":
        """The driver's function itself: its status is not checked. DeviceError when this driver is too old to have
        it."""
        found = self._functions.get(role)
        if found is None:
            symbol = self.symbols[role]
            try:
                found = getattr(self._quick_library if role in self.quick else self.library, symbol)
            except AttributeError:
                raise DeviceError(
                    f"the {self.vendor} driver lacks {symbol}: it is too old; {self.missing_hint}"
                ) from None
            words = self.arguments.get(role, ROLES[role][2]).split()
            found.argtypes = [POINTER(_TYPES[word[1:]]) if word[0] == "*" else _TYPES[word] for word in words]
            found.restype = c_int
            self._functions[role] = found
        return found

    def has(self, role: str) -> bool:
        """Whether this driver exports the role's function."""
        return role in self.symbols and hasattr(self.library, self.symbols[role])

    def address(self, role: str) -> int:
        """The function's address, for C."""
        return ctypes.cast(self.function(role), c_void_p).value or 0

    def __getattr__(self, role: str) -> "Callable[..., None]":
        if role.startswith("_") or role not in self.symbols:
            raise AttributeError(role)
        function = self.function(role)

        def checked(*args: object) -> None:
            status = function(*args)
            if status:
                raise self.error(role, status)

        self.__dict__[role] = checked
        return checked

    def error(self, role: str, code: int, doing: str = "") -> DeviceError:
        """The exception for a status: DeviceLost after an error that the process cannot recover from."""
        call = self.symbols.get(role, role)
        name, text = self.describe(code)
        hint = self.hints.get(name, "")
        doing, text, hint = f" ({doing})" if doing else "", f": {text}" if text else "", f"; {hint}" if hint else ""
        message = f"{call}{doing}: {name} ({code}){text}{hint}"
        if code in self.sticky or self.lost is not None:
            if self.lost is None:
                self.lost = DeviceLost(message)
            return self.lost
        return DriverError(call, code, name, message)

    def describe(self, code: int) -> tuple[str, str]:
        """(name, sentence) of an error code."""
        raise NotImplementedError

    def identify(self, device: int) -> "dict[str, Any]":
        """ "name" of a device as the driver numbers it, and its "arch" (CUDA: 90 for sm_90) or "isa" (HIP:
        "gfx942")."""
        raise NotImplementedError

    def list_devices(self) -> "list[dict[str, Any]]":
        """The GPUs that could be opened: ordinal, what `identify` says, memory_bytes, driver_version. Makes no
        context."""
        self.init(0)
        version, found = self.integer("driver_version"), []
        for ordinal in range(self.integer("device_count")):
            device, total = self.integer("device_get", ordinal), c_size_t()
            self.device_total_memory(ctypes.byref(total), device)
            facts = {"memory_bytes": total.value, "driver_version": version}
            found.append({"ordinal": ordinal, **self.identify(device), **facts})
        return found

    def integer(self, role: str, *args: object) -> int:
        """The int that the role writes to its first argument."""
        value = c_int()
        getattr(self, role)(ctypes.byref(value), *args)
        return value.value

    def pointer(self, role: str, *args: object) -> int:
        """The handle that the role writes to its first argument."""
        value = c_void_p()
        getattr(self, role)(ctypes.byref(value), *args)
        return value.value or 0


def pointer_array(values: list[int]) -> "ctypes.Array[c_void_p]":
    """A C array of pointers."""
    return (c_void_p * max(len(values), 1))(*values)


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp; hipMemAllocationProp is laid out the same."""

    _fields_ = [*fields("i32 type handle_types location_type location_id", "pointer win32"), ("flags", c_ubyte * 8)]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = fields("i32 location_type location_id flags")
