"""A ZIP archive that a stranger made: names that are asked for are unpacked, within bounds; nothing is written anywhere."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO

from zse.rag.documents import DocumentError, ParseLimits

_PIECE = 1 << 16
_FREE_BYTES = 1 << 20  # unpacked before the ratio counts: a page of blanks packs well
_ENTRY_BYTES = 4 << 10  # of the directory for one entry, on average: its name and comment
_DIRECTORY_END = b"PK\x05\x06"


class Archive:
    """data: the archive. DocumentError: damaged, encrypted, with two entries of one name, or more than limits.max_entries."""

    def __init__(self, data: bytes, limits: ParseLimits):
        self._limits, self._packed, self._unpacked = limits, len(data), 0
        end = data.rfind(_DIRECTORY_END, max(0, len(data) - (1 << 16) - 22))
        if end < 0 or len(data) < end + 22:
            raise DocumentError("the file is no ZIP archive, or cut off")
        num_entries, size = struct.unpack_from("<HI", data, end + 10)
        if num_entries > limits.max_entries or size > limits.max_entries * _ENTRY_BYTES:
            raise DocumentError(f"the archive has more than {limits.max_entries} entries")
        try:
            self._file = zipfile.ZipFile(BytesIO(data))
            entries = self._file.infolist()
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            ValueError,
            OSError,
            struct.error,
            UnicodeDecodeError,
        ) as error:
            raise DocumentError(f"the archive is damaged: {error}") from None
        if len(entries) > limits.max_entries:
            raise DocumentError(f"the archive has more than {limits.max_entries} entries")
        self._entries = {entry.filename: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise DocumentError("the archive has two entries of the same name")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def stream(self, name: str) -> Iterator[bytes]:
        """What an entry holds, in pieces. DocumentError: damaged, or larger than the limits allow."""
        limits, entry = self._limits, self._entries[name]
        if entry.flag_bits & 1:
            raise DocumentError("the archive is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DocumentError("the archive is packed by another method than DEFLATE")
        size = 0
        try:
            with self._file.open(entry) as stream:
                while piece := stream.read(_PIECE):
                    size += len(piece)
                    self._unpacked += len(piece)
                    if size > limits.max_stream_bytes or self._unpacked > limits.max_text_bytes:
                        raise DocumentError("the archive unpacks to more than its limits allow", "request_too_large")
                    if size > _FREE_BYTES and size > limits.max_ratio * max(entry.compress_size, 1):
                        raise DocumentError(f"the archive unpacks to more than {limits.max_ratio} times its size")
                    yield piece
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            OSError,
            struct.error,
            NotImplementedError,
            ValueError,
            RuntimeError,
        ):
            raise DocumentError(f"the archive's {name[:80]} is damaged") from None
