"""Big metadata arrays (vocabularies) that stay in the file until somebody wants them.

A 262,144-entry vocabulary is 6 MB of strings: opening a model only finds where it ends, with a C walk over the
lengths (about 1 ms; libzse_formats, see csrc/gguf_scan.c) or, without that library, a Python loop (about 0.1 s).
"""

import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from zse import trust
from zse.formats.file import INCOMPLETE, ModelFile
from zse.lazy import ctypes

_LETTERS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?"}
_LETTERS |= {"u64": "Q", "i64": "q", "f64": "d"}
SCALARS = {name: (letter, struct.calcsize(letter)) for name, letter in _LETTERS.items()}  # struct's letter, bytes

MAX_STRINGS = 1 << 24  # 64 times the largest public vocabulary
_WINDOW_BYTES = 1 << 20

_native: Any = None  # None: not looked for; False: not there


class ScalarArray:
    """`count` numbers of `type` (a key of SCALARS), little endian. Read on demand."""

    __slots__ = ("file", "offset", "type", "count", "nbytes", "crc32")

    def __init__(self, file: ModelFile, offset: int, type: str, count: int, crc32: int | None = None):
        self.file, self.offset, self.type, self.count, self.crc32 = file, offset, type, count, crc32
        self.nbytes = count * SCALARS[type][1]

    @property
    def raw(self) -> memoryview:
        """The array's bytes as they stand in the file; read anew at every access."""
        return memoryview(read_checked(self.file, self.offset, self.nbytes, self.crc32, "array"))

    def tolist(self) -> list:
        return list(struct.unpack(f"<{self.count}{SCALARS[self.type][0]}", self.raw))

    def __len__(self) -> int:
        return self.count


class StringArray:
    """`count` byte strings, each behind its u64 little-endian length. Read on demand. Bytes need not be UTF-8."""

    __slots__ = ("file", "offset", "count", "nbytes", "crc32")
    type = "string"

    def __init__(self, file: ModelFile, offset: int, count: int, nbytes: int, crc32: int | None = None):
        self.file, self.offset, self.count, self.nbytes, self.crc32 = file, offset, count, nbytes, crc32

    @property
    def raw(self) -> memoryview:
        """The payload as in the file: `count` times (u64 length, bytes), exactly `nbytes` long. Read anew at every
        access, and walked again, so that a file changed since it was opened cannot mislead a consumer in C."""
        data = read_checked(self.file, self.offset, self.nbytes, self.crc32, "array")
        strings, consumed = scan_strings(data, self.count, self.nbytes)
        if strings != self.count or consumed != self.nbytes:
            raise self.file.wrong(self.offset, "array", f"is not {self.count} strings in {self.nbytes} bytes")
        return memoryview(data)

    def __iter__(self) -> Iterator[bytes]:
        data, at = self.raw, 0
        for _ in range(self.count):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            yield bytes(data[at + 8 : end])
            at = end

    def tolist(self) -> list[bytes]:
        return list(self)

    def __len__(self) -> int:
        return self.count


def read_checked(file: ModelFile, offset: int, nbytes: int, crc32: int | None, field: str) -> bytes:
    """The bytes at `offset`; FormatError if they do not have the checksum (None: there is none)."""
    data = file.read(offset, nbytes, field)
    if crc32 is not None:
        if zlib.crc32(data) != crc32:
            raise file.wrong(offset, field, "does not match its checksum: the file is damaged")
    return data


def scan_strings(data: bytes, count: int, limit: int) -> tuple[int, int]:
    """Walks up to `count` strings from the start of `data`: (strings walked, bytes they take).

    Stops when the next length is not wholly inside `data`, or when a string would end beyond `limit` bytes (then
    fewer are walked). The last string's own bytes may lie beyond `data`, so the bytes taken may exceed len(data).
    """
    native = _load_native()
    if native:
        consumed = ctypes.c_uint64()
        walked = native.zse_gguf_scan_strings(data, len(data), count, limit, ctypes.byref(consumed))
        return walked, consumed.value
    return _scan_strings_python(data, count, limit)


def _scan_strings_python(data: bytes, count: int, limit: int) -> tuple[int, int]:
    at, last, from_bytes = 0, len(data) - 8, int.from_bytes
    for walked in range(count):
        if at > last:
            return walked, at
        end = at + 8 + from_bytes(data[at : at + 8], "little")
        if end > limit:
            return walked, at
        at = end
    return count, at


def find_string_array(file: ModelFile, offset: int, count: int, field: str) -> StringArray:
    """The array of `count` strings that starts at `offset`. FormatError if it does not fit in the file."""
    if count > MAX_STRINGS:
        raise file.wrong(offset, field, f"{count} strings; at most {MAX_STRINGS} are read")
    file.check(offset, 8 * count, field)
    at, left = offset, count
    while left:
        data = file.read(at, min(_WINDOW_BYTES, file.size - at), field)
        walked, consumed = scan_strings(data, left, file.size - at)
        if not walked:
            raise file.wrong(at, field, f"string {count - left} of {count} does not fit in the file{INCOMPLETE}")
        at, left = at + consumed, left - walked
    return StringArray(file, offset, count, at - offset)


def _load_native():
    global _native
    if _native is None:
        try:
            _native = trust.installed_library(os.path.join(trust.native_dir(), "libzse_formats.so"))
        except OSError:
            _native = False
        else:
            function = _native.zse_gguf_scan_strings
            function.restype = ctypes.c_uint64
            function.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    return _native
