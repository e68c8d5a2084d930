"""What a PDF would unpack to, before pdfium sees it: objects, filters in a row, and the size of each stream that text needs.

A scan over the bytes, without the file's tables, which may lie. Images and attachments are left out: reading text unpacks neither.
Streams of an encrypted file look like noise here; for those, and for LZW, the limits of the process are all."""

import re
import zlib

from zse.rag.documents import DocumentError, ParseLimits

_STREAM = re.compile(rb"stream\r?\n")
_FILTER = re.compile(rb"/Filter\s*(\[[^\]]{0,400}\]|/[A-Za-z0-9]{1,40})")
_NAMES = re.compile(rb"/([A-Za-z0-9]{1,40})")
_OBJECT_STREAM = re.compile(rb"/N\s+(\d{1,10})")
_NOT_TEXT = (b"/Image", b"/EmbeddedFile")
_FLATE, _RUN_LENGTH = (b"FlateDecode", b"Fl"), (b"RunLengthDecode", b"RL")
MAX_CHAIN = 4
FREE_BYTES = 1 << 20
_DICTIONARY_BYTES = 4096  # before a stream, that are looked at
_PIECE = 1 << 16


def check(data: bytes, limits: ParseLimits) -> None:
    """DocumentError: the file has more objects, longer chains or larger streams than the limits allow."""
    num_objects = data.count(b" obj")
    total = 0
    for match in _STREAM.finditer(data):
        start = match.end()
        begin = data.rfind(b" obj", max(0, match.start() - _DICTIONARY_BYTES), match.start())
        dictionary = data[begin if begin >= 0 else max(0, match.start() - _DICTIONARY_BYTES) : match.start()]
        if b"ObjStm" in dictionary and (number := _OBJECT_STREAM.search(dictionary)):
            num_objects += int(number[1])
        if num_objects > limits.max_objects:
            break
        filters = _NAMES.findall(found[1]) if (found := _FILTER.search(dictionary)) else []
        if len(filters) > MAX_CHAIN:
            raise DocumentError(f"a stream of the PDF has more than {MAX_CHAIN} filters")
        if any(word in dictionary for word in _NOT_TEXT) or not filters:
            continue
        total += _unpacked(data, start, filters, limits)
        if total > limits.max_text_bytes:
            raise DocumentError(f"the PDF unpacks to more than {limits.max_text_bytes >> 20} MiB")
    if num_objects > limits.max_objects:
        raise DocumentError(f"the PDF has more than {limits.max_objects} objects")


def _unpacked(data: bytes, start: int, filters: list[bytes], limits: ParseLimits) -> int:
    """How much the stream's first filters make of it, as far as they are Flate or RunLength."""
    stages = []
    for name in filters:
        if name in _FLATE:
            stages.append(zlib.decompressobj())
        else:
            break
    if not stages:
        if filters[0] in _RUN_LENGTH:
            return _run_length(data, start, limits)
        return 0
    sizes = [0] * len(stages)
    packed = 0
    try:
        while not stages[0].eof and start + packed < len(data):
            piece = data[start + packed : start + packed + _PIECE]
            packed += len(piece)
            for _ in _through(stages, 0, piece, sizes):
                size = max(sizes)
                if size > limits.max_stream_bytes:
                    raise DocumentError(f"a stream of the PDF unpacks to more than {limits.max_stream_bytes >> 20} MiB")
                if size > FREE_BYTES and size > limits.max_ratio * packed:
                    raise DocumentError(f"a stream of the PDF unpacks to more than {limits.max_ratio} times its size")
    except zlib.error:
        pass  # damaged or encrypted: what pdfium makes of it, the process's limits bound
    return sum(sizes)


def _through(stages: list, at: int, piece: bytes, sizes: list[int]):
    """Feed a piece to stage `at` and what it gives to the next; yields after each step, so that sizes can be looked at."""
    while piece:
        out = stages[at].decompress(piece, 1 << 20)
        sizes[at] += len(out)
        yield
        if at + 1 < len(stages):
            yield from _through(stages, at + 1, out, sizes)
        piece = stages[at].unconsumed_tail
        if stages[at].eof:
            return


def _run_length(data: bytes, start: int, limits: ParseLimits) -> int:
    size, at = 0, start
    while at < len(data) and data[at] != 128 and size <= limits.max_stream_bytes:
        length = data[at]
        size += length + 1 if length < 128 else 257 - length
        at += length + 2 if length < 128 else 2
    if size > limits.max_stream_bytes:
        raise DocumentError(f"a stream of the PDF unpacks to more than {limits.max_stream_bytes >> 20} MiB")
    return size
