"""Loading weights: jobs, and the C threads that do them beside Python's imports and recording (csrc/load.c)."""

import errno
import os
from ctypes import byref, c_int32, c_uint32, c_uint64
from types import SimpleNamespace
from typing import Any, NamedTuple

from zse.errors import DeviceError, FormatError
from zse.runtime import native, probe
from zse.runtime.args import encode, names_error, slots_of
from zse.runtime.buffer import buffers_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from zse.runtime.cpu import CPUDevice
    from zse.runtime.gpu import GPUDevice

MAX_STAGING = 8 << 20  # bytes of a piece that passes a kernel
READERS = 8  # threads that read for a GPU, or ahead
AHEAD_BYTES = 2 << 20  # of a piece
WHOLE = 1 << 40  # slot_bytes: a job is read at once


def reads_beside() -> bool:
    """Whether so many threads leave cores to others, within the control group's quota: who is over it is stopped with all its threads."""
    return min(len(probe.allowed_cpus()), probe.quota_cpus() or READERS) >= READERS


class LoadStep(NamedTuple):
    """A launch of a kernel of the GPU in the stream of the copies, once the jobs that name it are copied. after: so
    many of the load's steps have been launched before its jobs are copied: they read the memory that these write."""

    symbol: str
    args: dict[str, Any]
    grid: tuple[int, ...]
    after: int = 0
    place: tuple[int, int] = (0, 0)  # file descriptor and offset of its first job


class LoadJob(NamedTuple):
    """One piece of a file and the kernel that repacks it.

    fd, offset, nbytes: the piece (at most 8 MiB with a kernel). runs: (n, stride): for a kernel, the piece is n equal
    runs of the file, each `stride` bytes behind the one before. symbol, args, grid: the kernel, one of the CPU's, whose
    first parameter is the pointer to the piece (64-byte aligned, valid during the call); args are the others by name.
    more: (fd, offset, nbytes) of a second piece, whose pointer is the second parameter. For a GPU those of args that
    are Tensors in its memory are the kernel's outputs, exactly their bytes, which it makes in pinned host memory; other
    pointers are Tensors or Buffers of the host, or None. Without a symbol, the bytes go to args["destination"] as they
    are (without args either, they are read for their checksum alone); step: what a GPU makes of them. Jobs of one step
    follow each other. path and field name the piece in an error."""

    fd: int
    offset: int
    nbytes: int
    symbol: str | None
    args: dict[str, Any]
    grid: tuple[int, ...] = (1,)
    path: str = ""
    field: str = "data"
    more: tuple[int, int, int] | None = None
    step: LoadStep | None = None
    runs: tuple[int, int] = (1, 0)


class BackgroundLoad:
    """Jobs that run in the background, on threads of their own. Their buffers are kept alive until they are done.

    Raises TypeError or ValueError for a job that is wrong, DeviceError for a kernel that is not there.
    """

    _gpu: "GPUDevice | None" = None  # in whose memory the destinations lie; None: in the host's
    _handle: int | None = None
    _cancelled = _ahead = False
    sums: "Sequence[tuple[LoadJob, int]]" = ()  # after wait(), where asked for: each job and the CRC-32 of its bytes
    _result = native.LoadResult(job=-1)

    def __init__(self, device: "CPUDevice | GPUDevice", jobs: "Sequence[LoadJob]", threads: int, sums: bool = False):
        self._jobs, self._runtime, self._sums = list(jobs), device._runtime, sums
        self._result = native.LoadResult(job=-1)
        descriptions = (native.LoadJobDesc * len(self._jobs))()
        self._slots: list[int] = []
        self._outputs: list[native.LoadOutput] = []
        self._steps: list[native.LoadStepDesc] = []
        self._last_step: LoadStep | None = None
        for job, into in zip(self._jobs, descriptions, strict=True):
            self._describe(job, into, device)
        arguments = [job.args.values() for job in self._jobs]
        arguments += [job.step.args.values() for job in self._jobs if job.step is not None]
        self._buffers = buffers_of(arguments)
        error, slots, outputs, steps = c_int32(), self._slots, self._outputs, self._steps
        self._handle = self._runtime.zse_load_start(
            None if self._gpu is None else self._gpu.table,
            self._options(threads),
            descriptions,
            len(self._jobs),
            (c_uint64 * len(slots))(*slots),
            len(slots),
            (native.LoadOutput * len(outputs))(*outputs),
            len(outputs),
            (native.LoadStepDesc * len(steps))(*steps),
            len(steps),
            byref(error),
        )
        native.check("zse_load_start", error.value)
        for buffer in self._buffers:
            buffer.pin(1)

    def _options(self, threads: int) -> native.LoadOptions:
        """How it is done (csrc/zse_load.h)."""
        return native.LoadOptions(threads=threads, slot_bytes=WHOLE, sums=self._sums)

    def _describe(self, job: LoadJob, into: native.LoadJobDesc, device: "CPUDevice | GPUDevice") -> None:
        """Check a job and fill its C structure, its arguments and its outputs."""
        grid = (*job.grid, 1, 1)[:3]
        if any(not isinstance(dim, int) or dim < 0 for dim in grid) or len(job.grid) > 3:
            raise ValueError(f"load job {job.field}: grid {job.grid}")
        into.fd, into.offset, into.nbytes, into.grid[:] = job.fd, job.offset, job.nbytes, grid
        into.more_fd, into.more_offset, into.more_nbytes = job.more or (-1, 0, 0)
        into.runs, into.stride = job.runs
        into.first_arg, into.first_output = len(self._slots), len(self._outputs)
        into.step = -1 if job.step is None else self._step_of(job, job.step)
        if job.symbol is None:
            if (self._sums or self._ahead) and not job.args:
                return
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

    def _step_of(self, job: LoadJob, step: LoadStep) -> int:
        """The number of the step, which is described with the first of its jobs."""
        if self._gpu is None or job.symbol is not None:
            raise ValueError(f"load job {job.field}: a step follows bytes that are copied to a GPU")
        if step is not self._last_step:
            program, into = self._gpu.program(step.symbol), native.LoadStepDesc(after=step.after)
            slots, _ = slots_of(step.symbol, program.params or [], step.args)
            launch, self._last_step = into.launch, step
            launch.function, launch.threads, launch.shared_bytes = (
                program.address,
                program.threads,
                program.shared_bytes,
            )
            launch.grid[:] = (*step.grid, 1, 1)[:3]
            launch.first_arg, launch.num_args = len(self._slots), len(slots)
            self._slots += slots
            self._steps.append(into)
        self._steps[-1].nbytes += job.nbytes
        return len(self._steps) - 1

    def _add_kernel(self, job: LoadJob, symbol: str, into: native.LoadJobDesc, host: "CPUDevice") -> None:
        most = max(job.nbytes, job.more[2] if job.more else 0)
        if not 0 <= job.nbytes or most > MAX_STAGING:
            raise ValueError(f"load job {job.field}: {most} bytes in one piece, at most {MAX_STAGING}")
        program, pieces = host.program(symbol), 2 if job.more else 1
        params = (program.params or [])[pieces:]
        if job.args.keys() != {name for name, _ in params}:
            raise names_error(symbol, params, job.args)
        into.fn, into.num_args = program.address, len(params) + pieces
        self._slots += [0] * pieces
        for place, (name, kind) in enumerate(params, pieces):
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
            if self._sums:
                sums = (c_uint32 * len(self._jobs))()
                self._runtime.zse_load_sums(handle, sums)
                self.sums = list(zip(self._jobs, sums, strict=True))
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


class ReadAhead(BackgroundLoad):
    """Brings open files (fd, size, path) into the page cache, from their beginning on, until it is stopped or has read
    `room` bytes: the disk need not wait for a GPU. Eight threads with 2 MiB each read 1.5 GB/s of a disk of which POSIX_FADV_WILLNEED gets 1.3.
    Beside the loader they go on: a start of 4.59 GB took 2.7 to 3.2 s, 3.7 to 4.1 without (H200 host, ext4)."""

    _ahead = True

    def __init__(self, files: "Sequence[Any]", room: int):
        jobs = []
        for file in files:
            if nbytes := min(file.size, room):
                jobs.append(LoadJob(file.fd, 0, nbytes, None, {}, path=file.path))
            room -= nbytes
        if not jobs:
            return  # most often
        super().__init__(SimpleNamespace(_runtime=native.runtime()), jobs, READERS)  # type: ignore[arg-type]

    def _options(self, threads: int) -> native.LoadOptions:
        return native.LoadOptions(threads=threads, slot_bytes=AHEAD_BYTES, ahead=1)

    def stop(self) -> None:
        """No more; what is being read is not waited for."""
        self._cancelled = True
        if self._handle:
            self._runtime.zse_load_cancel(self._handle)


def path_of(fd: int) -> str:
    """The open file's name where the system tells it."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file {fd}"
