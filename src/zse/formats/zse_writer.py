"""Writing a `.zse` file so that a kill, a crash or a full disk never leaves half of one under its name.

Everything goes to OUT.part. Its size and the place of every tensor are known before the first byte, so a journal of
finished tensors (number and checksum) can stand behind the future end of the file. A writer that finds such a .part
for the same plan checks the journal's tensors against their checksums (a crash of the machine may have lost pages that
were written) and goes on with the rest. At the end: sections, header, fsync, cut off the journal, fsync, rename.
"""

import errno
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterable

from zse.errors import UnsupportedError, ZSEError
from zse.formats.zse import (
    ENTRY,
    HEADER,
    MAGIC,
    MAX_SMALL_BYTES,
    MAX_TENSORS,
    PAGE,
    SECTIONS,
    VERSION,
    pages,
    table_crc32,
    tensor_bytes,
)
from zse.quant.scheme import PLANE_ALIGN

_JOURNAL_MAGIC = b"ZSEJ"
_RECORD = struct.Struct("<III")     # tensor number, its CRC-32, CRC-32 of these two
_CHUNK_BYTES = 1 << 22


def to_json(value: object) -> bytes:
    """Compact JSON in the order of the dict; ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class PlannedTensor:
    """A tensor to be written: name, layout ("rows" or "r16"), type, shape; place and size follow from them."""

    __slots__ = ("name", "layout", "type", "shape", "nbytes", "offset", "crc32")

    def __init__(self, name: str, layout: str, type: str, shape: tuple[int, ...]):
        self.name, self.layout, self.type, self.shape = name, layout, type, tuple(shape)
        self.nbytes = tensor_bytes(layout, type, self.shape)
        self.offset = 0
        self.crc32: int | None = None


class ZseWriter:
    """Writes OUT through OUT.part. Use as a context manager; without finish() the .part stays for the next try.

    small: content of the sections that are known beforehand (config, tokenizer, template, provenance).
    vocabulary: blobs that follow one another, each at a multiple of 64 as `place_blobs` puts them.
    identity: bytes that stand for the source; a .part with another identity or plan is thrown away.
    Raises ZSEError when the disk is full or another process writes the same file.
    """

    def __init__(self, out: str, tensors: list[PlannedTensor], small: dict[str, bytes], vocabulary: list[bytes],
                 identity: bytes):
        self.out, self.part = out, out + ".part"
        self.tensors, self._small, self._vocabulary = tensors, small, vocabulary
        if len(tensors) > MAX_TENSORS:
            raise UnsupportedError(f"{out}: number of tensors", len(tensors), [f"up to {MAX_TENSORS}"])
        end = 0
        for tensor in tensors:
            tensor.offset = end + -end % PLANE_ALIGN
            end = tensor.offset + tensor.nbytes
        sizes = {name: len(data) for name, data in small.items()}
        sizes["index"] = len(self._index())
        for name, size in sizes.items():
            if size > MAX_SMALL_BYTES:
                raise UnsupportedError(f"{out}: bytes of section {name}", size, [f"up to {MAX_SMALL_BYTES}"])
        if vocabulary:
            sizes["vocabulary"] = place_blobs(vocabulary)[1]
        sizes["weights"] = end
        self._places: dict[str, tuple[int, int]] = {}
        at = PAGE
        for name in SECTIONS:           # the one order of sections, weights last
            if name in sizes:
                self._places[name] = at, sizes[name]
                at = pages(at + sizes[name])
        self.weights_offset = self._places["weights"][0]
        self.file_bytes = self.weights_offset + end
        self._journal = self.file_bytes
        self._identity = _digest(identity, self._index(), *small.values(), *vocabulary)
        self.resumed_bytes = 0
        self._fd = -1

    def __enter__(self) -> "ZseWriter":
        try:
            self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ZSEError(f"{self.part}: another process is writing it; wait for that one to end") from None
            self._resume()
        except OSError as error:
            self._close()
            raise self._explain(error) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._close()

    def pending(self) -> list[tuple[int, PlannedTensor]]:
        """(number, tensor) of those that are still to be written."""
        return [(number, tensor) for number, tensor in enumerate(self.tensors) if tensor.crc32 is None]

    def write(self, number: int, pieces: Iterable[tuple[int, "bytes | memoryview"]]) -> None:
        """Writes one tensor: pieces are (offset in the tensor, bytes). What they leave out is zero."""
        tensor = self.tensors[number]
        start = self.weights_offset + tensor.offset
        try:
            for offset, data in pieces:
                view = memoryview(data).cast("B")
                if offset < 0 or offset + len(view) > tensor.nbytes:
                    raise ValueError(f"{tensor.name}: bytes [{offset}, {offset + len(view)}) of {tensor.nbytes}")
                self._pwrite(start + offset, view)
            tensor.crc32 = self._crc32(start, tensor.nbytes)
            record = struct.pack("<II", number, tensor.crc32)
            self._pwrite(self._journal, record + struct.pack("<I", zlib.crc32(record)))
            self._journal += _RECORD.size
        except OSError as error:
            raise self._explain(error) from None

    def finish(self) -> None:
        """Writes the other sections and the header, and gives the file its name."""
        try:
            crcs = {}
            contents = dict(self._small)
            contents["index"] = self._index()
            for name, data in contents.items():
                self._pwrite(self._places[name][0], data)
                crcs[name] = zlib.crc32(data)
            if self._vocabulary:
                start = self._places["vocabulary"][0]
                for offset, blob in zip(place_blobs(self._vocabulary)[0], self._vocabulary, strict=True):
                    self._pwrite(start + offset, blob)
            head = bytearray(HEADER.pack(MAGIC, VERSION, len(self._places), self.file_bytes, 0))
            for name, (offset, nbytes) in self._places.items():
                head += ENTRY.pack(name.encode(), offset, nbytes, crcs.get(name, 0), SECTIONS[name])
            head[24:28] = struct.pack("<I", table_crc32(bytes(head)))
            # The header makes it a .zse: it comes after everything that it promises is on the disk.
            os.fsync(self._fd)
            self._pwrite(0, head)
            os.ftruncate(self._fd, self.file_bytes)
            os.fsync(self._fd)
            os.replace(self.part, self.out)
            folder = os.open(os.path.dirname(self.out) or ".", os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._explain(error) from None

    def _index(self) -> bytes:
        # Checksums have a fixed width, so that the section's size does not depend on them.
        return to_json({"tensors": [
            {"name": tensor.name, "layout": tensor.layout, "type": tensor.type, "shape": tensor.shape,
             "offset": tensor.offset, "nbytes": tensor.nbytes, "crc32": f"{tensor.crc32 or 0:08x}"}
            for tensor in self.tensors]})

    def _resume(self) -> None:
        head = os.pread(self._fd, len(_JOURNAL_MAGIC) + len(self._identity), self.file_bytes)
        self._journal = self.file_bytes + len(head)
        if head != _JOURNAL_MAGIC + self._identity:
            os.ftruncate(self._fd, 0)
            # Reserve the whole file now: a disk that is too small is found before the work, not after it.
            os.posix_fallocate(self._fd, 0, self.file_bytes + PAGE)
            self._journal = self.file_bytes + len(_JOURNAL_MAGIC) + len(self._identity)
            self._pwrite(self.file_bytes, _JOURNAL_MAGIC + self._identity)
            return
        while len(record := os.pread(self._fd, _RECORD.size, self._journal)) == _RECORD.size:
            number, crc32, check = _RECORD.unpack(record)
            if zlib.crc32(record[:8]) != check or number >= len(self.tensors):
                break
            tensor = self.tensors[number]
            if self._crc32(self.weights_offset + tensor.offset, tensor.nbytes) == crc32:
                tensor.crc32 = crc32
                self.resumed_bytes += tensor.nbytes
            self._journal += _RECORD.size

    def _crc32(self, offset: int, nbytes: int) -> int:
        """CRC-32 of what the file holds: planes are written in pieces, so the sum is taken from the page cache."""
        crc32, end = 0, offset + nbytes
        while offset < end:
            data = os.pread(self._fd, min(_CHUNK_BYTES, end - offset), offset)
            if not data:
                return crc32 ^ 0xFFFFFFFF       # shorter than planned: cannot match
            crc32 = zlib.crc32(data, crc32)
            offset += len(data)
        return crc32

    def _pwrite(self, offset: int, data) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def _explain(self, error: OSError) -> ZSEError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return ZSEError(f"{self.out}: the disk is full ({self.file_bytes} bytes are needed); nothing was replaced. "
                            "Free some space and run the same command again: it goes on where it stopped")
        return ZSEError(f"{self.part}: cannot be written: {error.strerror}")

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def place_blobs(blobs: list[bytes]) -> tuple[list[int], int]:
    """Offsets of blobs stored one after another at multiples of 64 bytes, and the bytes that they take."""
    offsets, end = [], 0
    for blob in blobs:
        offsets.append(end + -end % 64)
        end = offsets[-1] + len(blob)
    return offsets, end


def _digest(*parts: bytes) -> bytes:
    import hashlib
    digest = hashlib.blake2b(digest_size=28)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()
