"""One file opened for reading: regular files only, positioned reads only, every range checked against the real size.

JSON in such files is not trusted either: duplicate keys, deep nesting and wrong types are FormatErrors.
Untrusted files are never mapped: a file that shrinks under a mapping kills the process (SIGBUS), while a short
pread is an error message.
"""

import json
import os
import stat
import sys
from collections import Counter

from zse.errors import FormatError

# A file above 1 GiB that has disk blocks for less than 1/16 of its size is a hole, not a model: an unfinished
# download or a trap. Compressing file systems do not reach 16:1 on weights; some network ones report 0 blocks.
SPARSE_BYTES = 1 << 30
SPARSE_RATIO = 16
INCOMPLETE = "; it is incomplete or damaged: fetch it again"
WEB_PAGE = "is a web page (of a login or an error), not a model: fetch it again"
# What json still reads, repr() of a message may not.
MAX_JSON_DEPTH = 64
MAX_JSON_BYTES = 1 << 24  # parsed, JSON takes up to ten times its size


class ModelFile:
    """`path`, `fd`, `size` in bytes. Reading outside the file, or a file that shrank, is a FormatError."""

    __slots__ = ("path", "fd", "size", "_stamp")

    def __init__(self, path: str | os.PathLike):
        """Opens `path`. FormatError for anything but a regular file: devices, pipes, directories, sparse giants."""
        self.fd = -1
        self.path = os.fspath(path)
        try:
            # stat comes first because opening a device may act on it; fstat again because the name may have moved.
            _check_regular(self.path, os.stat(self.path))
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.fd)
            _check_regular(self.path, status)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            self.close()
            raise FormatError(self.path, 0, "file", f"cannot be opened: {getattr(error, 'strerror', error)}") from None
        except FormatError:
            self.close()
            raise
        self.size = status.st_size
        self._stamp = (status.st_size, status.st_mtime_ns)

    def wrong(self, offset: int, field: str, reason: str) -> FormatError:
        """What is raised for `field`, which stands at `offset`."""
        return FormatError(self.path, offset, field, reason)

    def read(self, offset: int, nbytes: int, field: str = "data") -> bytes:
        """`nbytes` bytes at `offset`."""
        self.check(offset, nbytes, field)
        data = self._pread(offset, nbytes, field)
        while len(data) < nbytes:  # Linux returns at most 0x7ffff000 bytes a call
            data += self._pread(offset + len(data), nbytes - len(data), field)
        return data

    def check(self, offset: int, nbytes: int, field: str) -> None:
        """FormatError unless [offset, offset + nbytes) lies inside the file."""
        if offset < 0 or nbytes < 0 or offset > self.size or nbytes > self.size - offset:
            raise self.wrong(offset, field, f"needs {nbytes} bytes, but the file ends at {self.size}{INCOMPLETE}")

    def check_unchanged(self) -> None:
        """FormatError if the file was written to since it was opened."""
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise self.wrong(0, "file", "changed while it was in use; load it again")

    @property
    def is_cold(self) -> bool:
        """Whether the page cache lacks some of the file: of eight places one. False where the system cannot tell."""
        page = bytearray(4096)
        try:
            for sample in range(8 if hasattr(os, "RWF_NOWAIT") else 0):
                os.preadv(self.fd, [page], self.size * sample // 8, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:  # a file system that does not know the flag
            return False
        return False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self):
        self.close()

    def _pread(self, offset: int, nbytes: int, field: str) -> bytes:
        try:
            data = os.pread(self.fd, nbytes, offset)
        except OSError as error:
            raise self.wrong(offset, field, f"cannot be read: {error.strerror}") from None
        if not data and nbytes:
            raise self.wrong(offset, field, "the file shrank while it was read")
        return data


def read_whole(path: str, field: str, most: int) -> bytes:
    """The content of a file of at most `most` bytes."""
    file = ModelFile(path)
    try:
        if file.size > most:
            raise FormatError(path, 0, field, f"{file.size} bytes; at most {most} are read")
        return file.read(0, file.size, field)
    finally:
        file.close()


def _unique(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} stands twice")
    return result


def _constant(name: str) -> float:
    if name == "Infinity":
        return sys.float_info.max
    raise ValueError(f"{name} is not JSON")


def parse_object(data: bytes, path: str, offset: int, field: str) -> dict:
    """The JSON object in `data`, which lies at `offset` of `path`. NaN is refused; Infinity, which Python writes where
    there is no limit (the time steps of Mamba-2), is the largest number."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8 and numbers of over 4,300 digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        is_page = offset == 0 and data.lstrip()[:1] == b"<"
        raise FormatError(
            path, offset, field, WEB_PAGE if is_page else f"is not valid JSON: {reason}{INCOMPLETE}"
        ) from None
    if not isinstance(value, dict):
        raise FormatError(path, offset, field, "is not a JSON object")
    level: list = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
        if not level:
            return value
    raise FormatError(path, offset, field, f"is nested more than {MAX_JSON_DEPTH} deep")


def read_object(path: str, field: str) -> dict:
    """The JSON object that is the whole file `path`."""
    return parse_object(read_whole(path, field, MAX_JSON_BYTES), path, 0, field)


def _check_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {"d": "a directory", "p": "a pipe", "c": "a device", "b": "a device", "s": "a socket"}
        kind = kinds.get(stat.filemode(status.st_mode)[0], "a special file")
        raise FormatError(path, 0, "file", f"is {kind}, not a regular file")
    allocated = getattr(status, "st_blocks", 0) * 512
    if status.st_size > SPARSE_BYTES and 0 < allocated < status.st_size // SPARSE_RATIO:
        reason = f"is sparse: {allocated} of {status.st_size} bytes are on disk; fetch it again"
        raise FormatError(path, 0, "file", reason)
