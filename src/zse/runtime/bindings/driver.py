"""A GPU driver behind ctypes: functions by role, bound when first used, every status checked."""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_ulonglong, c_void_p

from zse.errors import DeviceError, DeviceLost, DeviceMemoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Address = c_uint64  # CUdeviceptr, hipDeviceptr_t
NOT_READY = 600
OUT_OF_MEMORY = 2

# Role → (CUDA's symbol, HIP's, arguments). The two are one interface with two spellings; "" where one has no such call.
# Calls of VMM and tensor maps may be missing from a driver.
ROLES: "dict[str, tuple[str, str, Any]]" = {
    "init": ("cuInit", "hipInit", [c_uint]),
    "driver_version": ("cuDriverGetVersion", "hipDriverGetVersion", [POINTER(c_int)]),
    "device_count": ("cuDeviceGetCount", "hipGetDeviceCount", [POINTER(c_int)]),
    "device_get": ("cuDeviceGet", "hipDeviceGet", [POINTER(c_int), c_int]),
    "device_name": ("cuDeviceGetName", "hipDeviceGetName", [c_char_p, c_int, c_int]),
    "device_attribute": ("cuDeviceGetAttribute", "hipDeviceGetAttribute", [POINTER(c_int), c_int, c_int]),
    "device_total_memory": ("cuDeviceTotalMem_v2", "hipDeviceTotalMem", [POINTER(c_size_t), c_int]),
    "context_retain": ("cuDevicePrimaryCtxRetain", "", [POINTER(c_void_p), c_int]),
    "context_release": ("cuDevicePrimaryCtxRelease_v2", "hipDeviceReset", [c_int]),
    "set_current": ("cuCtxSetCurrent", "hipSetDevice", [c_void_p]),
    "memory_info": ("cuMemGetInfo_v2", "hipMemGetInfo", [POINTER(c_size_t), POINTER(c_size_t)]),
    "alloc": ("cuMemAlloc_v2", "hipMalloc", [POINTER(Address), c_size_t]),
    "free": ("cuMemFree_v2", "hipFree", [Address]),
    "memset_async": ("cuMemsetD8Async", "hipMemsetD8Async", [Address, c_ubyte, c_size_t, c_void_p]),
    "to_device_async": ("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", [Address, c_void_p, c_size_t, c_void_p]),
    "to_host_async": ("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", [c_void_p, Address, c_size_t, c_void_p]),
    "copy_async": ("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", [Address, Address, c_size_t, c_void_p]),
    "stream_create": ("cuStreamCreate", "hipStreamCreateWithFlags", [POINTER(c_void_p), c_uint]),
    "stream_destroy": ("cuStreamDestroy_v2", "hipStreamDestroy", [c_void_p]),
    "stream_wait": ("cuStreamSynchronize", "hipStreamSynchronize", [c_void_p]),
    "stream_wait_event": ("cuStreamWaitEvent", "hipStreamWaitEvent", [c_void_p, c_void_p, c_uint]),
    "event_create": ("cuEventCreate", "hipEventCreateWithFlags", [POINTER(c_void_p), c_uint]),
    "event_destroy": ("cuEventDestroy_v2", "hipEventDestroy", [c_void_p]),
    "event_record": ("cuEventRecord", "hipEventRecord", [c_void_p, c_void_p]),
    "event_wait": ("cuEventSynchronize", "hipEventSynchronize", [c_void_p]),
    "event_query": ("cuEventQuery", "hipEventQuery", [c_void_p]),
    "event_elapsed": ("cuEventElapsedTime", "hipEventElapsedTime", [POINTER(ctypes.c_float), c_void_p, c_void_p]),
    "module_load": ("cuModuleLoadData", "hipModuleLoadData", [POINTER(c_void_p), c_void_p]),
    "module_unload": ("cuModuleUnload", "hipModuleUnload", [c_void_p]),
    "module_function": ("cuModuleGetFunction", "hipModuleGetFunction", [POINTER(c_void_p), c_void_p, c_char_p]),
    "function_set_attribute": ("cuFuncSetAttribute", "", [c_void_p, c_int, c_int]),
    "host_alloc": ("cuMemHostAlloc", "hipHostMalloc", [POINTER(c_void_p), c_size_t, c_uint]),
    "host_free": ("cuMemFreeHost", "hipHostFree", [c_void_p]),
    "host_device_address": (
        "cuMemHostGetDevicePointer_v2",
        "hipHostGetDevicePointer",
        [POINTER(Address), c_void_p, c_uint],
    ),
    "host_register": ("cuMemHostRegister_v2", "hipHostRegister", [c_void_p, c_size_t, c_uint]),
    "host_unregister": ("cuMemHostUnregister", "hipHostUnregister", [c_void_p]),
    "begin_capture": ("cuStreamBeginCapture_v2", "hipStreamBeginCapture", [c_void_p, c_int]),
    "end_capture": ("cuStreamEndCapture", "hipStreamEndCapture", [c_void_p, POINTER(c_void_p)]),
    "graph_instantiate": (
        "cuGraphInstantiateWithFlags",
        "hipGraphInstantiateWithFlags",
        [POINTER(c_void_p), c_void_p, c_ulonglong],
    ),
    "graph_destroy": ("cuGraphDestroy", "hipGraphDestroy", [c_void_p]),
    "executable_destroy": ("cuGraphExecDestroy", "hipGraphExecDestroy", [c_void_p]),
    "graph_launch": ("cuGraphLaunch", "hipGraphLaunch", [c_void_p, c_void_p]),
    "launch": ("cuLaunchKernel", "hipModuleLaunchKernel", [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]),
    "launch_ex": ("cuLaunchKernelEx", "", None),
    "tensor_map": ("cuTensorMapEncodeTiled", "", [c_void_p, c_int, c_uint32, c_uint64, *[c_void_p] * 4, *[c_int] * 4]),
    "vmm_granularity": (
        "cuMemGetAllocationGranularity",
        "hipMemGetAllocationGranularity",
        [POINTER(c_size_t), c_void_p, c_int],
    ),
    "vmm_reserve": (
        "cuMemAddressReserve",
        "hipMemAddressReserve",
        [POINTER(Address), c_size_t, c_size_t, Address, c_ulonglong],
    ),
    "vmm_unreserve": ("cuMemAddressFree", "hipMemAddressFree", [Address, c_size_t]),
    "vmm_create": ("cuMemCreate", "hipMemCreate", [POINTER(c_uint64), c_size_t, c_void_p, c_ulonglong]),
    "vmm_release": ("cuMemRelease", "hipMemRelease", [c_uint64]),
    "vmm_map": ("cuMemMap", "hipMemMap", [Address, c_size_t, c_size_t, c_uint64, c_ulonglong]),
    "vmm_unmap": ("cuMemUnmap", "hipMemUnmap", [Address, c_size_t]),
    "vmm_set_access": ("cuMemSetAccess", "hipMemSetAccess", [Address, c_size_t, c_void_p, c_size_t]),
    "device_properties": ("", "hipGetDevicePropertiesR0600", [c_void_p, c_int]),
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
    arguments: dict[str, list] = {}  # of roles that differ from ROLES
    hints: dict[str, str] = {}  # error name → what to do
    sticky: frozenset[int] = frozenset()  # errors after which every call of the process fails
    missing_hint = ""  # what to do without a library
    # Calls that return at once: the interpreter's lock is kept, which takes up to 5 ms to get back while others import.
    quick = frozenset(
        (
            "driver_version",
            "device_count",
            "device_get",
            "device_name",
            "device_attribute",
            "device_total_memory",
            "set_current",
            "memory_info",
            "stream_create",
            "event_create",
            "event_query",
            "module_function",
            "function_set_attribute",
            "vmm_granularity",
            "host_device_address",
        )
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
            found.restype, found.argtypes = c_int, self.arguments.get(role, ROLES[role][2])
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

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location_type", c_int), ("location_id", c_int), ("flags", c_int)]
