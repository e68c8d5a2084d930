"""One file of cold pages and states (cache/files.py): records one behind the other, only ever added at the end.

A record: magic, kind, CRC-32 of the content, key, key of the page before, length of the content, and BLAKE2b of all that,
of the tokens that come next and of the place in the file, keyed by what the content depends on and the file's name; then
the tokens, then the content. So a record of another model, another file or another place is none, its tokens are those of its
content, and what a process that died left half written ends the file."""

import ctypes
import os
import struct
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from zse.runtime import native

MAGIC = b"ZSK2"
# Kinds of records: the latter has no content and says when the session of the file ends, in its key.
CONTENT, SESSION = 1, 2
KEY_BYTES = 20
TAIL_BYTES = 8  # of the hash of a state's last tokens
STATE_KEY_BYTES = KEY_BYTES + 1 + TAIL_BYTES
_HEAD = struct.Struct(f"<4sBBBxI{STATE_KEY_BYTES}s{KEY_BYTES}sxxxQ")
_DIGEST_BYTES = 16
HEAD_BYTES = _HEAD.size + _DIGEST_BYTES
MOST_TOKENS = 128  # of a page
_END = struct.Struct("<d")


class PageRecord(NamedTuple):
    """Where one begins. parent: the key of the page (or root) before; tokens: i32 bytes, behind that page. nbytes: of its
    content. expires: of SESSION."""

    kind: int
    key: bytes
    parent: bytes
    offset: int
    nbytes: int
    crc32: int
    expires: float = 0.0
    tokens: bytes = b""

    @property
    def end(self) -> int:
        return self.offset + HEAD_BYTES + len(self.tokens) + self.nbytes


class RecordFile:
    """A file. name: without its ending. nbytes: of the file. keys: of its records. tip: the key of the last page that was
    added, behind: that of the page before its first. expires: of the session that it is of, 0: of none."""

    def __init__(self, name: str):
        self.name, self.nbytes, self.expires = name, 0, 0.0
        self.keys: dict[bytes, None] = {}
        self.tip = self.behind = b""

    def add(self, record: PageRecord) -> None:
        self.nbytes = record.end
        if record.kind == SESSION:
            self.expires = record.expires
            return
        if not self.keys:
            self.behind = record.parent
        self.keys[record.key] = None
        if len(record.key) == KEY_BYTES:
            self.tip = record.key


def pack(seal: bytes, record: PageRecord) -> bytes:
    """The head of a record, and its tokens. seal: what the digest is keyed by."""
    key = _END.pack(record.expires) if record.kind == SESSION else record.key
    count = len(record.tokens) // 4
    head = _HEAD.pack(MAGIC, record.kind, len(key), count, record.crc32, key, record.parent, record.nbytes)
    return head + _digest(seal, head + record.tokens, record.offset) + record.tokens


def unpack(seal: bytes, data: bytes, offset: int) -> PageRecord | None:
    """The record whose beginning, at least its head and tokens, was read at `offset`; None where it is none."""
    if len(data) < HEAD_BYTES:
        return None
    head = data[: _HEAD.size]
    _, kind, size, count, crc, key, parent, nbytes = _HEAD.unpack(head)
    tokens = data[HEAD_BYTES : HEAD_BYTES + 4 * count]
    if data[_HEAD.size : HEAD_BYTES] != _digest(seal, head + tokens, offset):
        return None
    expires = _END.unpack(key[:size])[0] if kind == SESSION else 0.0
    return PageRecord(kind, key[:size], parent, offset, nbytes, crc, expires, tokens)


def _digest(seal: bytes, head: bytes, offset: int) -> bytes:
    return blake2b(head + offset.to_bytes(8, "little"), key=seal, digest_size=_DIGEST_BYTES).digest()


def records(descriptor: int, seal: bytes, size: int) -> Iterator[PageRecord]:
    """Those of an open file of `size` bytes, up to the first that is none or ends behind the file."""
    offset = 0
    while offset < size:
        record = unpack(seal, os.pread(descriptor, HEAD_BYTES + 4 * MOST_TOKENS, offset), offset)
        if record is None or record.end > size:
            return
        yield record
        offset = record.end


def read(descriptor: int, seal: bytes, record: PageRecord, views: tuple[memoryview, ...]) -> bool:
    """Fill `views`, one behind the other, with the content of a record. False where they do not have its length, or it is
    not sound."""
    if sum(len(view) for view in views) != record.nbytes:
        return False
    head, left, offset = bytearray(HEAD_BYTES + len(record.tokens)), record.end - record.offset, record.offset
    wanted = [memoryview(head), *views]
    while left:
        count = os.preadv(descriptor, wanted, offset)
        if count <= 0:
            return False
        left, offset = left - count, offset + count
        while wanted and count >= len(wanted[0]):
            count -= len(wanted.pop(0))
        if wanted:
            wanted[0] = wanted[0][count:]
    if unpack(seal, bytes(head), record.offset) != record:
        return False
    crc = 0
    for view in views:
        crc = crc32(view, crc)
    return crc == record.crc32


def write(descriptor: int, head: bytes, content: bytes, offset: int) -> None:
    """Add a record at the end of a file, which is as it was where this raises OSError."""
    left = [memoryview(head), memoryview(content)]
    at = offset
    try:
        while left:
            count = os.pwritev(descriptor, left, at)
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
    except OSError:
        os.ftruncate(descriptor, offset)
        raise


def crc32(data: "bytes | memoryview", crc: int = 0) -> int:
    """zlib's, by the runtime's instructions for it where the CPU has them: 20 GB/s instead of 1."""
    runtime = native.runtime()
    if not runtime.zse_crc32_is_fast():
        return zlib.crc32(data, crc)
    start = data if isinstance(data, bytes) else ctypes.addressof(ctypes.c_char.from_buffer(data))
    return runtime.zse_crc32(crc, start, len(data))
