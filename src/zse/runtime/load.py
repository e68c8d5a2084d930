"""What loads weights: its jobs, and what runs them."""

from typing import Any, NamedTuple


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
