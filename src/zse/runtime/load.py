"""Loading weights: jobs, and the C threads that do them beside Python's imports and recording (csrc/load.c)."""

import errno
import os
from ctypes import byref, c_int32, c_uint64
from typing import Any, NamedTuple

from zse.errors import DeviceError, FormatError
from zse.runtime import native
from zse.runtime.args import encode, names_error
from zse.runtime.buffer import buffers_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from zse.runtime.cpu import CPUDevice
    from zse.runtime.gpu import GPUDevice

MAX_STAGING = 8 << 20  # bytes of a piece that passes a kernel
WHOLE = 1 << 40  # slot_bytes: a job is read at once


class LoadJob(NamedTuple):
    """One piece of a file and the kernel that repacks it.

    fd, offset, nbytes: the piece (at most 8 MiB with a kernel). symbol, args, grid: the kernel, one of the CPU's, whose
    first parameter is the pointer to the piece (64-byte aligned, valid during the call); args are the others by name.
    For a GPU those of args that are Tensors in its memory are the kernel's outputs, exactly their bytes, which it makes
    in pinned host memory; other pointers are Tensors or Buffers of the host, or None. Without a symbol, the bytes go to
    args["destination"] as they are. path and field name the piece in an error.
    """

    fd: int
    offset: int
    nbytes: int
    symbol: str | None
    args: dict[str, Any]
    grid: tuple[int, ...] = (1,)
    path: str = ""
    field: str = "data"


class BackgroundLoad:
    """Jobs that run in the background, on threads of their own. Their buffers are kept alive until they are done.

    Raises TypeError or ValueError for a job that is wrong, DeviceError for a kernel that is not there.
    """

    _gpu: "GPUDevice | None" = None  # in whose memory the destinations lie; None: in the host's
    _handle: int | None = None
    _cancelled = False
    _result = native.LoadResult(job=-1)

    def __init__(self, device: "CPUDevice | GPUDevice", jobs: "Sequence[LoadJob]", threads: int):
        self._jobs, self._runtime = list(jobs), device._runtime
        self._result = native.LoadResult(job=-1)
        descriptions = (native.LoadJobDesc * len(self._jobs))()
        self._slots: list[int] = []
        self._outputs: list[native.LoadOutput] = []
        for job, into in zip(self._jobs, descriptions, strict=True):
            self._describe(job, into, device)
        self._buffers = buffers_of(job.args.values() for job in self._jobs)
        error, slots, outputs = c_int32(), self._slots, self._outputs
        self._handle = self._runtime.zse_load_start(
            None if self._gpu is None else self._gpu.table,
            self._options(threads),
            descriptions,
            len(self._jobs),
            (c_uint64 * len(slots))(*slots),
            len(slots),
            (native.LoadOutput * len(outputs))(*outputs),
            len(outputs),
            byref(error),
        )
        native.check("zse_load_start", error.value)
        for buffer in self._buffers:
            buffer.pin(1)

    def _options(self, threads: int) -> native.LoadOptions:
        """How it is done (csrc/zse_load.h)."""
        return native.LoadOptions(threads=threads, slot_bytes=WHOLE)

    def _describe(self, job: LoadJob, into: native.LoadJobDesc, device: "CPUDevice | GPUDevice") -> None:
        """Check a job and fill its C structure, its arguments and its outputs."""
        grid = (*job.grid, 1, 1)[:3]
        if any(not isinstance(dim, int) or dim < 0 for dim in grid) or len(job.grid) > 3:
            raise ValueError(f"load job {job.field}: grid {job.grid}")
        into.fd, into.offset, into.nbytes, into.grid[:] = job.fd, job.offset, job.nbytes, grid
        into.first_arg, into.first_output = len(self._slots), len(self._outputs)
        if job.symbol is None:
            if job.args.keys() != {"destination"}:
                raise TypeError(f"load job {job.field}: without a kernel, args is the destination alone")
            destination = job.args["destination"]
            room = getattr(destination, "nbytes", job.nbytes)
            if room < job.nbytes:
                raise ValueError(f"load job {job.field}: {job.nbytes} bytes into {room}")
            address = encode("load", "destination", "ptr", destination)
            self._outputs.append(native.LoadOutput(address, job.nbytes))
        else:
            try:
                self._add_kernel(job, job.symbol, into, device.host)
            except (DeviceError, TypeError, ValueError) as error:
                device.host.check_sources(error)
                raise
        into.num_outputs = len(self._outputs) - into.first_output

    def _add_kernel(self, job: LoadJob, symbol: str, into: native.LoadJobDesc, host: "CPUDevice") -> None:
        if not 0 <= job.nbytes <= MAX_STAGING:
            raise ValueError(f"load job {job.field}: {job.nbytes} bytes in one piece, at most {MAX_STAGING}")
        program = host.program(symbol)
        params = (program.params or [])[1:]
        if job.args.keys() != {name for name, _ in params}:
            raise names_error(symbol, params, job.args)
        into.fn, into.num_args = program.address, len(params) + 1
        self._slots.append(0)  # the piece
        for place, (name, kind) in enumerate(params, 1):
            arg = job.args[name]
            is_memory = self._gpu is not None and kind == "ptr" and arg is not None
            if is_memory and getattr(getattr(arg, "buffer", arg), "device", None) is self._gpu:
                self._outputs.append(native.LoadOutput(arg.address, arg.nbytes, place))
                self._slots.append(0)
            elif is_memory and isinstance(arg, int):
                raise TypeError(f"load job {job.field}: {name} is an address; on a GPU the memory's Tensor is needed")
            else:
                self._slots.append(encode(symbol, name, kind, arg))
        if self._gpu is not None and len(self._outputs) == into.first_output:
            raise ValueError(f"load job {job.field}: no argument of {symbol} lies in the memory of {self._gpu.name}")

    @property
    def finished(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._handle or bool(self._runtime.zse_load_finished(self._handle))

    def wait(self) -> None:
        """Until all jobs are done. Raises FormatError when a file is shorter than a job says, DeviceError when reading
        fails."""
        if self._handle:
            self._runtime.zse_load_wait(self._handle, byref(self._result))
            for buffer in self._buffers:
                buffer.pin(-1)
            self._buffers.clear()
            handle, self._handle = self._handle, None
            self._release(handle)
        if self._result.job >= 0 and not self._cancelled:
            raise self._error(self._jobs[self._result.job], self._result)

    def _release(self, handle: int) -> None:
        self._runtime.zse_load_close(handle)

    def _error(self, job: LoadJob, result: native.LoadResult) -> Exception:
        """Why a job was not done: errno, or (0) the file ends early."""
        path = job.path or path_of(job.fd)
        if result.code:
            return DeviceError(
                f"{path}: reading {job.nbytes} bytes at {job.offset} for {job.field} (load job {result.job}): "
                f"{errno.errorcode.get(result.code, result.code)}: {os.strerror(result.code)}"
            )
        missing = f"the file ends here; {job.nbytes - result.got} more bytes expected (load job {result.job})"
        return FormatError(path, job.offset + result.got, job.field, missing)

    def cancel(self) -> None:
        """Start no further job, and wait for those that run."""
        if self._handle:
            self._cancelled = True
            self._runtime.zse_load_cancel(self._handle)
            self.wait()

    def __del__(self) -> None:
        self.cancel()  # the threads write to buffers that are about to go


def path_of(fd: int) -> str:
    """The open file's name where the system tells it."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file {fd}"
