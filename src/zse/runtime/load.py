"""Jobs of the weight loader."""

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
