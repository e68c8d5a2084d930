"""Writing a `.zse` file so that a kill, a crash or a full disk never leaves half of one under its name.

Everything goes to OUT.part. Its size and the place of every tensor are known before the first byte, so a journal of
finished tensors (number and checksum) can stand behind the future end of the file. A writer that finds such a .part
for the same plan checks the journal's tensors against their checksums (a crash of the machine may have lost pages that
were written) and goes on with the rest. At the end: sections, header, fsync, cut off the journal, fsync, rename.
"""

import errno
import fcntl
import hashlib
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from zse import trust
from zse.errors import UnsupportedError, ZSEError
from zse.formats import zse as zse_file
from zse.quant.scheme import PLANE_ALIGN

_JOURNAL_MAGIC = b"ZSEJ"
_RECORD = struct.Struct("<III")  # tensor number, its CRC-32, CRC-32 of these two
_CHUNK_BYTES = 1 << 22


def to_json(value: object) -> bytes:
    """Compact JSON in the order of the dict; ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class PlannedTensor:
    """A tensor to be written: name, layout ("rows" or "r16"), type, shape; size and places follow from them.

    group: tensors of one group follow one another in the plan, and their planes are stored so that each kind of plane
    continues from one tensor to the next: together they are the planes of the stacked matrix (q, k and v, say), as
    kernels read it. places: offsets of the planes in the weights section, or of the whole tensor when it has none.
    """

    __slots__ = ("name", "layout", "type", "shape", "group", "nbytes", "planes", "places", "crc32")

    def __init__(self, name: str, layout: str, type: str, shape: tuple[int, ...], group: str | None = None):
        self.name, self.layout, self.type, self.shape, self.group = name, layout, type, tuple(shape), group
        self.planes = zse_file.tensor_planes(layout, type, self.shape)
        self.nbytes = zse_file.tensor_bytes(layout, type, self.shape)
        self.places: list[int] = []
        self.crc32: int | None = None

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece of `places`."""
        return [plane.nbytes for plane in self.planes] or [self.nbytes]

    def entry(self) -> dict:
        """What the index says. The checksum has a fixed width, so that the section's size does not depend on it."""
        entry: dict = {name: getattr(self, name) for name in ("name", "layout", "type", "shape")}
        entry |= {"offset": self.places[0], "nbytes": self.nbytes, "crc32": f"{self.crc32 or 0:08x}"}
        return entry | ({"planes": self.places} if self.planes else {})


def place_tensors(tensors: list[PlannedTensor]) -> int:
    """Sets the places of all tensors and returns where the last one ends. A piece begins at a multiple of 256, or, in
    a group, where the same piece of the tensor before ends."""
    end, first = 0, 0
    while first < len(tensors):
        group = tensors[first].group
        last = first + 1
        while group is not None and last < len(tensors) and tensors[last].group == group:
            last += 1
        members = tensors[first:last]
        if len({(member.layout, member.type, len(member.sizes)) for member in members}) != 1:
            raise ValueError(f"group {group}: members of different types")
        for piece in range(len(members[0].sizes)):
            end += -end % PLANE_ALIGN
            for member in members:
                if end % zse_file.OFFSET_ALIGN:
                    raise ValueError(
                        f"{member.name}: the one before it does not end at a multiple of {zse_file.OFFSET_ALIGN}"
                    )
                member.places.append(end)
                end += member.sizes[piece]
        first = last
    return end


class ZseWriter:
    """Writes OUT through OUT.part. Use as a context manager; without finish() the .part stays for the next try.

    small: content of the sections that are known beforehand (config, tokenizer, template, provenance).
    vocabulary: blobs that follow one another, each at a multiple of 64 as `place_blobs` puts them.
    identity: bytes that stand for the source; a .part with another identity or plan is thrown away.
    is_durable: wait until the disk has everything before the file gets its name; False for files made in seconds.
    Raises ZSEError when the disk is full or another process writes the same file.
    """

    def __init__(
        self,
        out: str,
        tensors: list[PlannedTensor],
        small: dict[str, bytes],
        vocabulary: list[bytes],
        identity: bytes,
        is_durable: bool = True,
    ):
        self._is_durable = is_durable
        self.out, self.part = out, out + ".part"
        self.tensors, self._small, self._vocabulary = tensors, small, vocabulary
        if len(tensors) > zse_file.MAX_TENSORS:
            raise UnsupportedError(f"{out}: number of tensors", len(tensors), [f"up to {zse_file.MAX_TENSORS}"])
        end = place_tensors(tensors)
        sizes = {name: len(data) for name, data in small.items()}
        sizes["index"] = len(self._index())
        for name, size in sizes.items():
            if size > zse_file.MAX_SMALL_BYTES:
                raise UnsupportedError(f"{out}: bytes of section {name}", size, [f"up to {zse_file.MAX_SMALL_BYTES}"])
        if vocabulary:
            sizes["vocabulary"] = place_blobs(vocabulary)[1]
        sizes["weights"] = end
        self._places: dict[str, tuple[int, int]] = {}
        at = zse_file.PAGE
        for name in zse_file.SECTIONS:  # the one order of sections, weights last
            if name in sizes:
                self._places[name] = at, sizes[name]
                at = zse_file.pages(at + sizes[name])
        self.weights_offset = self._places["weights"][0]
        self.file_bytes = self.weights_offset + end
        self._journal = self.file_bytes
        self._identity = _digest(identity, self._index(), *small.values(), *vocabulary)
        self.resumed_bytes = 0
        self._fd = -1
        self._lock = threading.Lock()  # of the journal

    def __enter__(self) -> "ZseWriter":
        try:
            with self._explained():
                self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise ZSEError(f"{self.part}: another process is writing it; wait for that one to end") from None
                self._resume()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._close()

    def pending(self) -> list[tuple[int, PlannedTensor]]:
        """(number, tensor) of those that are still to be written."""
        return [(number, tensor) for number, tensor in enumerate(self.tensors) if tensor.crc32 is None]

    def write(self, number: int, pieces: Iterable[tuple[int, int, "bytes | memoryview"]]) -> None:
        """Writes one tensor: pieces are (plane number, offset in the plane, bytes). What they leave out is zero."""
        for plane, offset, data in pieces:
            self.write_piece(number, plane, offset, data)
        self.end_tensor(number)

    def write_piece(self, number: int, plane: int, offset: int, data) -> None:
        """Writes a part of a tensor's plane (0 for a tensor without planes). Any thread."""
        tensor, view = self.tensors[number], memoryview(data).cast("B")
        if offset < 0 or offset + len(view) > tensor.sizes[plane]:
            raise ValueError(f"{tensor.name}: bytes [{offset}, {offset + len(view)}) of {tensor.sizes[plane]}")
        with self._explained():
            self._pwrite(self.weights_offset + tensor.places[plane] + offset, view)

    def end_tensor(self, number: int) -> None:
        """Every piece of the tensor is written: takes its checksum and notes it in the journal. Any thread."""
        tensor = self.tensors[number]
        with self._explained():
            crc32 = self._crc32(tensor)
            record = struct.pack("<II", number, crc32)
            with self._lock:
                self._pwrite(self._journal, record + struct.pack("<I", zlib.crc32(record)))
                self._journal += _RECORD.size
                tensor.crc32 = crc32

    def finish(self, accept: Callable[[str], None] | None = None) -> None:
        """Writes the other sections and the header, and gives the file its name. accept(path) reads the complete file
        before that; where it raises, nothing is left of it."""
        with self._explained():
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
            head = bytearray(
                zse_file.HEADER.pack(zse_file.MAGIC, zse_file.VERSION, len(self._places), self.file_bytes, 0)
            )
            for name, (offset, nbytes) in self._places.items():
                head += zse_file.ENTRY.pack(name.encode(), offset, nbytes, crcs.get(name, 0), zse_file.SECTIONS[name])
            head[24:28] = struct.pack("<I", zse_file.table_crc32(bytes(head)))
            # The header makes it a .zse: it comes after everything that it promises is on the disk.
            self._sync()
            self._pwrite(0, head)
            os.ftruncate(self._fd, self.file_bytes)
            self._sync()
        if accept is not None:
            try:
                accept(self.part)
            except BaseException:
                os.unlink(self.part)
                raise
        with self._explained():
            os.replace(self.part, self.out)
            trust.sync(os.path.dirname(self.out) or ".")

    def _sync(self) -> None:
        if self._is_durable:
            os.fsync(self._fd)

    def _index(self) -> bytes:
        return to_json({"tensors": [tensor.entry() for tensor in self.tensors]})

    def _resume(self) -> None:
        head = os.pread(self._fd, len(_JOURNAL_MAGIC) + len(self._identity), self.file_bytes)
        self._journal = self.file_bytes + len(head)
        if head != _JOURNAL_MAGIC + self._identity:
            os.ftruncate(self._fd, 0)
            # Reserve the whole file now: a disk that is too small is found before the work, not after it.
            os.posix_fallocate(self._fd, 0, self.file_bytes + zse_file.PAGE)
            self._journal = self.file_bytes + len(_JOURNAL_MAGIC) + len(self._identity)
            self._pwrite(self.file_bytes, _JOURNAL_MAGIC + self._identity)
            return
        while len(record := os.pread(self._fd, _RECORD.size, self._journal)) == _RECORD.size:
            number, crc32, check = _RECORD.unpack(record)
            if zlib.crc32(record[:8]) != check or number >= len(self.tensors):
                break
            tensor = self.tensors[number]
            if self._crc32(tensor) == crc32:
                tensor.crc32 = crc32
                self.resumed_bytes += tensor.nbytes
            self._journal += _RECORD.size

    def _crc32(self, tensor: PlannedTensor) -> int:
        """CRC-32 of what the file holds: planes are written in pieces, so the sum is taken from the page cache."""
        crc32 = 0
        for place, size in zip(tensor.places, tensor.sizes, strict=True):
            offset = self.weights_offset + place
            end = offset + size
            while offset < end:
                data = os.pread(self._fd, min(_CHUNK_BYTES, end - offset), offset)
                if not data:
                    return crc32 ^ 0xFFFFFFFF  # shorter than planned: cannot match
                crc32 = zlib.crc32(data, crc32)
                offset += len(data)
        return crc32

    def _pwrite(self, offset: int, data) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """An error of the system as one line with what to do."""
        try:
            yield
        except OSError as error:
            reason = f"{self.part}: cannot be written: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                reason = (
                    f"{self.out}: the disk is full ({self.file_bytes} bytes are needed); nothing was replaced. "
                    "Free some space and run the same command again: it goes on where it stopped"
                )
            raise ZSEError(reason) from None

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
    digest = hashlib.blake2b(digest_size=28)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()
