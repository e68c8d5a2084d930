"""The compiled libraries: where they are, how they are opened, and their C signatures.

Libraries lie in the package's `_native` folder (or ZSE_NATIVE_DIR): `libzse_runtime.so`, and for each ISA level
`libzse_kernels_<isa>.so` with its manifest `<isa>.json`. Until a level is compiled whole, `objects/<isa>` has parts of
it: `first.so`, what a first model needs, and kernels that were asked for since, each with its manifest."""

import ctypes
import os
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from zse import env, trust
from zse.errors import ConfigError, DeviceError
from zse.runtime import isa
from zse.trust import native_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STATUS = {-1: "invalid argument", -2: "out of memory", -3: "number out of range", -4: "cannot start a thread"}

ERANGE = -3

FIRST = "first"  # the part of a level that a first model needs

NO_LIBRARY = (
    "{path} is not there: the CPU libraries were not compiled; run `python -m zse.build` "
    "(it needs a C compiler: {compiler})"
)


_TYPES = {"pointer": c_void_p, "i32": c_int32, "u32": c_uint32, "i64": c_int64, "u64": c_uint64, "grid": c_int64 * 3}


def fields(*rows: str) -> "list[tuple[str, Any]]":
    """Fields of a C structure from rows as they stand in its header: "u32 kind first_arg"."""
    return [(name, _TYPES[row.split()[0]]) for row in rows for name in row.split()[1:]]


class LaunchDesc(ctypes.Structure):
    _fields_ = fields("pointer fn", "u32 first_arg num_args", "grid grid", "i32 depends min_chunk")


class Patch(ctypes.Structure):
    _fields_ = fields("u32 symbol is_grid target reserved", "i64 divisor factor")


GPU_NOT_READY = 600  # a driver's answer about an event that is still to come
GPU_UPLOAD, GPU_DOWNLOAD, GPU_FETCH, GPU_AWAIT, GPU_HOST = 1, 2, 3, 4, 5  # kinds of a GPULaunch; 0: a kernel


class GPUDriverTable(ctypes.Structure):
    """zse_gpu_driver: the driver's functions by their role (bindings/driver.py), and what set_current takes."""

    _fields_ = fields(
        "pointer set_current launch_ex launch to_device_async to_host_async event_record event_wait event_query graph_launch",
        "pointer host_register host_unregister stream_wait_event stream_wait launch_host current",
    )


class GPULaunch(ctypes.Structure):
    _fields_ = fields(
        "pointer function", "u32 kind first_arg num_args wide", "grid grid", "u32 threads shared_bytes cluster overlaps"
    )


class LoadJobDesc(ctypes.Structure):
    _fields_ = fields(
        "pointer fn",
        "i64 offset nbytes more_offset more_nbytes",
        "i32 fd more_fd",
        "u32 first_arg num_args first_output num_outputs",
        "grid grid",
        "i64 step runs stride",
    )


class LoadStepDesc(ctypes.Structure):
    _fields_ = [("launch", GPULaunch), *fields("i64 nbytes after")]


class LoadOutput(ctypes.Structure):
    _fields_ = fields("u64 address", "i64 nbytes", "u32 slot reserved")


class LoadKept(ctypes.Structure):
    """A file that is registered before its load: what it is, how many chunks of it, and where it is mapped."""

    _fields_ = fields("u64 device inode", "i64 nbytes changed_ns num_chunks", "pointer map")


class LoadOptions(ctypes.Structure):
    _fields_ = fields(
        "i64 chunk_bytes window_bytes slot_bytes",
        "pointer pin unpin stream events",
        "i32 threads warm_percent",
        "u32 register_flags slow_us",
        "i32 sums ahead",
        "pointer kept",
        "i64 num_kept",
    )


class LoadResult(ctypes.Structure):
    _fields_ = fields("i64 job got", "i32 from_driver code mapped reserved")


_SIGNATURES = {
    "zse_pool_create": (c_void_p, [c_int32, POINTER(c_int32)]),
    "zse_pool_destroy": (None, [c_void_p]),
    "zse_graph_create": (c_void_p, [*[c_void_p, c_int64] * 4, POINTER(c_int32)]),
    "zse_graph_run": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "zse_graph_destroy": (None, [c_void_p, c_void_p]),
    "zse_cpu_features": (c_uint64, []),
    "zse_load_start": (
        c_void_p,
        [POINTER(GPUDriverTable), POINTER(LoadOptions), *[c_void_p, c_int64] * 4, POINTER(c_int32)],
    ),
    "zse_load_finished": (c_int32, [c_void_p]),
    "zse_load_tidy": (c_int32, [c_void_p]),
    "zse_load_wait": (None, [c_void_p, POINTER(LoadResult)]),
    "zse_load_cancel": (None, [c_void_p]),
    "zse_load_sums": (None, [c_void_p, POINTER(c_uint32)]),
    "zse_crc32": (c_uint32, [c_uint32, c_void_p, c_int64]),
    "zse_crc32_joined": (c_uint32, [c_uint32, c_uint32, c_int64]),
    "zse_crc32_is_fast": (c_int32, []),
    "zse_load_close": (None, [c_void_p]),
    "zse_gpu_open_start": (c_void_p, [ctypes.c_char_p, c_int32]),
    "zse_gpu_open_done": (c_int32, [c_void_p]),
    "zse_gpu_open_wait": (c_int32, [c_void_p]),
    "zse_gpu_list_create": (c_void_p, [*[c_void_p, c_int64] * 4, POINTER(c_int32)]),
    "zse_gpu_list_destroy": (None, [c_void_p]),
    "zse_gpu_list_submit": (c_int32, [POINTER(GPUDriverTable), *[c_void_p] * 7, POINTER(c_int64)]),
    "zse_gpu_wait": (c_int32, [POINTER(GPUDriverTable), c_void_p, c_int64]),
    "zse_group_bytes": (c_int64, [c_int32, c_int32, c_int64, c_int64]),
    "zse_group_open": (c_void_p, [c_void_p, c_int32, c_int32, c_int32, c_int64, c_int64, c_int64, c_int32]),
    "zse_group_link": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "zse_siphash": (c_uint64, [c_void_p, c_void_p, c_int32, c_void_p, c_int64]),
    "zse_group_watch": (None, [c_void_p, c_int32, c_int32]),
    "zse_group_wait": (c_int32, [c_void_p, c_int64]),
    "zse_group_status": (c_int32, [c_void_p, POINTER(c_int32)]),
    "zse_group_close": (None, [c_void_p]),
}

_runtime: ctypes.CDLL | None = None


def compiler_hint() -> str:
    """How to get a C compiler here."""
    if os.uname().sysname == "Darwin":
        return "`xcode-select --install`"
    return "gcc or clang, e.g. `apt install gcc libc6-dev` or `dnf install gcc`"


def open_library(path: str) -> ctypes.CDLL:
    """dlopen with a clear DeviceError, also for one that another user could have written."""
    if not os.path.exists(path):
        raise DeviceError(NO_LIBRARY.format(path=path, compiler=compiler_hint()))
    try:
        return trust.installed_library(path)
    except PermissionError as error:
        raise DeviceError(f"{error.filename or path} is not loaded: it {error.strerror}") from None
    except OSError as error:
        raise DeviceError(
            f"cannot load {path}: {error}; run `python -m zse.build --force` to compile it again"
        ) from None


def runtime() -> ctypes.CDLL:
    """libzse_runtime, opened once, with its signatures set; no part of it needs a GPU. DeviceError for one that is
    older than this file."""
    global _runtime
    if _runtime is None:
        library = open_library(os.path.join(native_dir(), "libzse_runtime.so"))
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise DeviceError(
                    f"libzse_runtime.so lacks {name}; run `python -m zse.build` to compile it again"
                ) from None
            function.restype, function.argtypes = result, arguments
        _runtime = library
    return _runtime


class GPUOpening:
    """A CUDA context that is being opened by a C thread, beside imports. wait(): whether it was retained."""

    def __init__(self, library: str, ordinal: int):
        self._runtime = runtime()
        self._handle = self._runtime.zse_gpu_open_start(library.encode(), ordinal)

    @property
    def done(self) -> bool:
        """Whether wait() would return at once."""
        return not self._handle or bool(self._runtime.zse_gpu_open_done(self._handle))

    def wait(self) -> bool:
        """Until the thread is done."""
        handle, self._handle = self._handle, None
        return bool(handle) and bool(self._runtime.zse_gpu_open_wait(handle))


def check(call: str, status: int) -> None:
    """DeviceError that names the call, unless `status` is 0."""
    if status:
        raise DeviceError(f"{call}: {STATUS.get(status, status)}")


def choose_level() -> str:
    """ZSE_ISA, or the best level that this CPU can run and that was compiled. Raises ConfigError or DeviceError."""
    bits = runtime().zse_cpu_features()
    here = isa.levels_of_machine()
    forced = env.get("ZSE_ISA")
    if forced:
        if forced not in here:
            raise ConfigError(f"ZSE_ISA={forced} is not a level of this machine; known: {', '.join(here) or 'none'}")
        missing = isa.missing_features(forced, bits)
        if missing:
            raise ConfigError(f"ZSE_ISA={forced}: this CPU lacks {', '.join(missing)}")
        return forced
    runnable = isa.runnable_levels(bits)
    if not runnable:
        raise unsupported_cpu(bits)
    found = [name for name in runnable if os.path.exists(kernel_library(name))]
    if found:
        # One without a manifest is being put in place just now, or damaged: who asks for it is told.
        return next((name for name in found if os.path.exists(manifest_path(name))), found[0])
    raise DeviceError(NO_LIBRARY.format(path=kernel_library(runnable[0]), compiler=compiler_hint()))


def unsupported_cpu(bits: int) -> DeviceError:
    """What to raise on a CPU that runs none of the levels (`bits` from zse_cpu_features())."""
    here = isa.levels_of_machine()
    if not here:
        return DeviceError(f"this CPU ({isa.machine()}) is not supported: use an x86-64 or arm64 machine")
    lacks = ", ".join(isa.missing_features(here[-1], bits))
    return DeviceError(
        f"this CPU ({isa.machine()}: {', '.join(isa.feature_names(bits)) or 'no known feature'}) cannot run the kernels: it lacks {lacks}; use one that has them (Intel from 2013, AMD from "
        "2015, arm64 from Armv8.2 on; a virtual machine has them with its host's CPU model)"
    )


def kernel_files(folder: str, level: str, part: str = "") -> tuple[str, str]:
    """Where the level's kernel library and its manifest stand: of all its kernels, or of a part."""
    if part:
        place = os.path.join(folder, "objects", level, part)
        return place + ".so", place + ".json"
    return os.path.join(folder, f"libzse_kernels_{level}.so"), os.path.join(folder, f"{level}.json")


def _installed(level: str) -> tuple[str, str]:
    """The whole library, unless only the kernels for a first model are there. A manifest comes after its library."""
    whole, first = kernel_files(native_dir(), level), kernel_files(native_dir(), level, FIRST)
    return first if not os.path.exists(whole[1]) and os.path.exists(first[1]) else whole


def is_part(level: str) -> bool:
    """Whether of the level only the kernels for a first model are there."""
    return _installed(level) != kernel_files(native_dir(), level)


def kernel_library(level: str) -> str:
    """Path of the level's kernel library."""
    return _installed(level)[0]


def manifest_path(level: str) -> str:
    """Path of the level's manifest."""
    return _installed(level)[1]
