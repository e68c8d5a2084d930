"""The process that parses one document: `python -P -S -m zse.rag.parse`, started by rag/worker.py.

Its request comes on descriptor 0, what it found goes to 1. What the kind needs is imported before the process closes itself in: from
then on it opens no file, socket or process, has limits of memory and time, and reads strangers' bytes only behind them."""

import codecs
import ctypes
import os
import signal
import stat
from importlib import import_module

from zse.lazy import import_lean

import_lean("msgspec")

import msgspec  # noqa: E402

from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits  # noqa: E402
from zse.rag.parse import kinds, messages  # noqa: E402
from zse.structured import limits  # noqa: E402

_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_CODECS = ("cp1252", "latin-1", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "cp437")
_NICENESS = 5  # requests that are answered go before, and a busy machine still reads a document within its time


def _read_all(descriptor: int, most: int | None = None) -> bytes:
    parts, size = [], 0
    while data := os.read(descriptor, 1 << 20 if most is None else min(1 << 20, most - size)):
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def _send(message: messages.FromParser) -> None:
    data = msgspec.msgpack.encode(message)
    data = len(data).to_bytes(messages.LENGTH_BYTES, "big") + data
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _read_document(descriptor: int, most: int) -> bytes:
    found = os.fstat(descriptor)
    if found.st_size > most:
        raise DocumentError(f"the file has more than {most >> 20} MiB", "request_too_large")
    os.lseek(descriptor, 0, os.SEEK_SET)
    return _read_all(descriptor, found.st_size)


def _close_in(given: ParseLimits) -> None:
    os.nice(_NICENESS)
    limits.limit_memory(given.max_memory_bytes)
    limits.limit_processor(given.cpu_s)
    limits.close_in()


def _parse(request: messages.ParseRequest) -> ParsedDocument:
    if not stat.S_ISREG(os.fstat(request.descriptor).st_mode):
        raise DocumentError("the document is not a regular file")
    for name in _CODECS:
        codecs.lookup(name)  # each is a file
    head = os.pread(request.descriptor, kinds.HEAD_BYTES, 0)
    kind = request.kind and kinds.checked_kind(request.kind)
    kind = kind or kinds.kind_of(request.name, request.media_type, head)
    reader = import_module(f"zse.rag.parse.{kind}")
    given = request.limits
    if hasattr(reader, "load"):
        reader.load()
    _close_in(given)
    data = _read_document(request.descriptor, given.max_text_bytes)
    if kind == "pdf":
        send_image = (lambda page, png: _send(messages.PageImage(page, png))) if request.ocr else None
        return reader.parse(data, request.name, given, request.password, send_image)
    return reader.parse(data, request.name, given)


def _send_document(document: ParsedDocument, given: ParseLimits) -> None:
    frame, size, total = [], 0, 0
    for block in document.blocks:
        if not block.text.isascii():
            block.text = block.text.encode("utf-8", "replace").decode()  # JSON and UTF-16 have halves of surrogates
        frame.append(block)
        size += len(block.text) + 16
        if size >= messages.FRAME_CHARACTERS:
            _send(messages.Blocks(frame))
            total += size
            frame, size = [], 0
            if total > given.max_text_bytes:
                raise DocumentError(
                    f"the document has more than {given.max_text_bytes >> 20} MiB of text", "request_too_large"
                )
    _send(messages.Blocks(frame))
    title = document.title.encode("utf-8", "replace").decode()
    _send(messages.Parsed(document.kind, title, document.num_pages, document.warnings[:20]))


def main() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    request = msgspec.msgpack.decode(_read_all(0), type=messages.ParseRequest)
    if os.getppid() != request.parent:
        return  # it ended before it could be watched
    given = request.limits
    try:
        document = _parse(request)
        if len(document.blocks) > given.max_blocks:
            raise DocumentError(f"the document has more than {given.max_blocks} paragraphs", "request_too_large")
        _send_document(document, given)
    except DocumentError as error:
        _send(messages.Unreadable(" ".join(str(error).split())[:500], error.code))
    except MemoryError:
        _send(
            messages.Unreadable(
                f"the document takes more than {given.max_memory_bytes >> 20} MiB to read", "request_too_large"
            )
        )
    except RecursionError:
        _send(
            messages.Unreadable(
                f"what the file holds lies in each other more than {given.max_depth} deep", "unprocessable_file"
            )
        )


if __name__ == "__main__":
    main()
