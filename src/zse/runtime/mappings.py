"""Files mapped for others than Python to read: a GPU's driver, or nobody (their pages stay in memory). One that shrinks meanwhile
harms nobody who does not read the mapping."""

import mmap
import os
from typing import Any

from zse.lazy import ctypes

SAMPLES = 512  # pages of a mapping that are asked for, 5 µs each
_PROT_READ, _MAP_SHARED, _MAP_FAILED = 1, 1, (1 << 64) - 1
_library: Any = None


def library() -> Any:
    """The C library, whose mmap, munmap and mlock take addresses as numbers."""
    global _library
    if _library is None:
        _library = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        _library.mmap.restype = pointer
        _library.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
        _library.mlock.argtypes = _library.munmap.argtypes = [pointer, size]
        _library.mincore.argtypes = [pointer, size, pointer]
    return _library


def failed() -> OSError:
    """Why the library's last call failed."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def map_file(fd: int, nbytes: int) -> int:
    """The address of the first `nbytes` > 0 of an open file. Raises OSError."""
    address = library().mmap(None, nbytes, _PROT_READ, _MAP_SHARED, fd, 0)
    if address in (None, _MAP_FAILED):
        raise failed()
    return address


def unmap(address: int, nbytes: int) -> None:
    library().munmap(address, nbytes)


def is_in_memory(address: int, nbytes: int, percent: int) -> bool:
    """Whether the page cache has that much of what is mapped, as far as SAMPLES of its pages tell. Of files that this user neither
    owns nor may write Linux says that it has all."""
    ask, page, state = library().mincore, mmap.PAGESIZE, ctypes.c_ubyte()
    told, step = ctypes.byref(state), max(1, nbytes // SAMPLES // page) * page
    asked = range(0, nbytes, step)
    there = sum(ask(address + at, page, told) == 0 and state.value & 1 for at in asked)
    return there * 100 >= len(asked) * percent
