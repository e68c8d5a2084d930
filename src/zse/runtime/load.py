"""What loads weights: its jobs, and what runs them."""

import errno
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from zse.errors import DeviceError, FormatError

MAX_STAGING = 8 << 20  # bytes of a piece that passes a kernel


class LoadJob(NamedTuple):
    """One piece of a file and the kernel that repacks it.

    fd, offset, nbytes: the piece (at most 8 MiB with a kernel). symbol, args, grid: the kernel, whose first parameter
    is the pointer to the piece (64-byte aligned, valid during the call); args are the other parameters. Without a
    symbol, args is [destination] and the bytes go there as they are. path and field name the piece in an error.
    """

    fd: int
    offset: int
    nbytes: int
    symbol: str | None
    args: list[Any]
    grid: tuple[int, ...] = (1,)
    path: str = ""
    field: str = "data"


def fill_job(job: LoadJob, into: Any, program_of: Callable[[str], Any]) -> list:
    """Check a job and fill its C structure, but for its arguments. Returns the kernel's parameters after the piece."""
    grid = (*job.grid, 1, 1)[:3]
    if any(not isinstance(dim, int) or dim < 0 for dim in grid) or len(job.grid) > 3:
        raise ValueError(f"load job {job.field}: grid {job.grid}")
    into.fd, into.offset, into.nbytes, into.grid[:] = job.fd, job.offset, job.nbytes, grid
    if job.symbol is None:
        if len(job.args) != 1:
            raise TypeError(f"load job {job.field}: without a kernel, args is [destination]")
        room = getattr(job.args[0], "nbytes", job.nbytes)
        if room < job.nbytes:
            raise ValueError(f"load job {job.field}: {job.nbytes} bytes into {room}")
        return []
    if not 0 <= job.nbytes <= MAX_STAGING:
        raise ValueError(f"load job {job.field}: {job.nbytes} bytes in one piece, at most {MAX_STAGING}")
    program = program_of(job.symbol)
    params = program.params or []
    if len(job.args) + 1 != len(params):
        names = ", ".join(name for name, _ in params[1:])
        raise TypeError(
            f"{job.symbol} takes {len(params) - 1} arguments after the piece ({names}), got {len(job.args)}"
        )
    into.fn, into.num_args = program.address, len(params)
    return params[1:]


def read_error(job: LoadJob, number: int, code: int, got: int) -> Exception:
    """Why job `number` was not read: errno `code`, or (0) the file ends after `got` of its bytes."""
    path = job.path or path_of(job.fd)
    if code:
        return DeviceError(
            f"{path}: reading {job.nbytes} bytes at {job.offset} for {job.field} (load job {number}): "
            f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
        )
    missing = f"the file ends here; {job.nbytes - got} more bytes expected (load job {number})"
    return FormatError(path, job.offset + got, job.field, missing)


def path_of(fd: int) -> str:
    """The open file's name where the system tells it."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file {fd}"


class Load:
    """Jobs that run in the background, on threads of their own."""

    total_bytes: int

    @property
    def done_bytes(self) -> int:
        """Bytes read so far, for progress."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether `wait` would return at once."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until all jobs are done. Raises FormatError when a file is shorter than a job says, DeviceError when reading
        fails."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Start no further job, and wait for those that run."""
        raise NotImplementedError


def check_write(tensor: Any, nbytes: int) -> None:
    """ValueError unless `nbytes` are those of a Tensor or Buffer, and lie within the buffer."""
    if nbytes != tensor.nbytes:
        raise ValueError(f"{nbytes} bytes for a destination of {tensor.nbytes}")
    buffer = getattr(tensor, "buffer", tensor)
    end = getattr(tensor, "offset", 0) + nbytes
    if end > buffer.nbytes:
        raise ValueError(f"{nbytes} bytes end {end - buffer.nbytes} behind their buffer {buffer.label!r}")
