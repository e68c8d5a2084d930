"""Documents are parsed in a process each, with limits of memory, time and what it reaches; this is the server's side of it.

    document = await parse_document("/data/upload-1", "report.pdf", "application/pdf", password="…", tenant="acme")

MAX_PARSES run at once, OWN_PARSES of one tenant, and tenants take turns. The process costs about 40 ms, and nothing that it imports
comes into this one."""

import contextlib
import os
import signal
import sys
import time

import msgspec

from zse import env
from zse.lazy import select, subprocess, tempfile
from zse.rag import ocr as ocr_module
from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse import messages
from zse.structured.threads import ThreadTurns

MAX_PARSES, OWN_PARSES = 3, 2
_COMMAND = ("-P", "-S", "-m", "zse.rag.parse")
_READ_BYTES = 1 << 20
_DAMAGED = "the file cannot be read: it is damaged, or needs more than {} MiB of memory"
_LIMITS = ParseLimits()


async def parse_document(
    source: str | int | bytes,
    name: str,
    media_type: str = "",
    password: str | None = None,
    limits: ParseLimits = _LIMITS,
    *,
    kind: str = "",
    tenant: str = "",
    ocr: "ocr_module.Ocr | None" = None,
) -> ParsedDocument:
    """Parse a document, when the tenant's turn has come. source: a path, a descriptor of a regular file that is open for reading (it
    stays open), or the document itself. kind: of kinds.py, "" finds it. ocr: reads pages that have no text.

    Raises DocumentError for what cannot be read, RequestError (503) when too many of the tenant's wait. A task that is cancelled
    takes its process with it."""
    process = _ParserProcess(source, _request(name, media_type, kind, password, ocr, limits))
    return await _TURNS.run(tenant, lambda: process.run(ocr), process.kill)


def parse_now(
    source: str | int | bytes,
    name: str,
    media_type: str = "",
    password: str | None = None,
    limits: ParseLimits = _LIMITS,
    *,
    kind: str = "",
    ocr: "ocr_module.Ocr | None" = None,
) -> ParsedDocument:
    """parse_document() for callers without an event loop: at once, and blocking."""
    return _ParserProcess(source, _request(name, media_type, kind, password, ocr, limits)).run(ocr)


def _request(
    name: str, media_type: str, kind: str, password: str | None, ocr: object, limits: ParseLimits
) -> messages.ParseRequest:
    return messages.ParseRequest(os.getpid(), 0, name, media_type, kind, password or "", ocr is not None, limits)


_TURNS = ThreadTurns(MAX_PARSES, OWN_PARSES, "parse", "documents of yours wait to be read")


class _ParserProcess:
    """One document's process. run() is called once, in any thread; kill() at any time, from another one."""

    def __init__(self, source: str | int | bytes, request: messages.ParseRequest):
        self._source, self._request = source, request
        self._process: subprocess.Popen | None = None
        self._killed = False

    def kill(self) -> None:
        self._killed = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def run(self, ocr: "ocr_module.Ocr | None") -> ParsedDocument:
        limits = self._request.limits
        with contextlib.ExitStack() as stack:
            images = ocr_module.PageImages(stack) if ocr is not None else None
            with self._opened() as descriptor:
                document = self._parse(descriptor, limits, images)
            if ocr is not None and images is not None and images.pages and not self._killed:
                ocr_module.read_pages(document, images, ocr, lambda: self._killed)
        if not document.blocks:
            raise DocumentError("; ".join(["the document has no text", *document.warnings]))
        return document

    @contextlib.contextmanager
    def _opened(self):
        if isinstance(self._source, int):
            yield self._source
        elif isinstance(self._source, str):
            descriptor = os.open(self._source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        else:
            with tempfile.TemporaryFile() as file:
                file.write(self._source)
                file.flush()
                yield file.fileno()

    def _parse(self, descriptor: int, limits: ParseLimits, images: "ocr_module.PageImages | None") -> ParsedDocument:
        deadline = time.monotonic() + limits.wall_s
        self._request.descriptor = descriptor
        process = self._process = subprocess.Popen(
            [sys.executable, *_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            env={"PYTHONPATH": env.python_path(), "PATH": os.defpath},
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            if self._killed:
                process.kill()
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.msgpack.encode(self._request))
            return self._collected(process.stdout.fileno(), deadline, images)
        finally:
            if process.poll() is None:
                process.kill()
            process.stdout.close()
            process.wait()

    def _collected(self, pipe: int, deadline: float, images: "ocr_module.PageImages | None") -> ParsedDocument:
        """What the process sends, until its last message. DocumentError: it says so, ends without, or its time is over."""
        limits = self._request.limits
        blocks: list[TextBlock] = []
        left = 2 * limits.max_text_bytes
        for data in self._messages(pipe, deadline):
            message = _DECODER.decode(data)
            if isinstance(message, messages.Unreadable):
                raise DocumentError(message.message, message.code)
            if isinstance(message, messages.Parsed):
                return ParsedDocument(message.kind, message.title, blocks, message.num_pages, message.warnings)
            if isinstance(message, messages.PageImage):
                if images is not None:
                    images.add(message.page, message.png)
                continue
            left -= len(data)
            if left < 0:
                raise DocumentError(
                    f"the document has more than {limits.max_text_bytes >> 20} MiB of text", "request_too_large"
                )
            blocks += message.blocks
        raise DocumentError(self._why_it_ended())

    def _why_it_ended(self) -> str:
        limits = self._request.limits
        if self._process is not None and self._process.wait() == -signal.SIGXCPU:
            return f"the file takes more than {limits.cpu_s} s to read"
        return _DAMAGED.format(limits.max_memory_bytes >> 20)

    def _messages(self, pipe: int, deadline: float):
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        data, want = bytearray(), messages.LENGTH_BYTES
        while True:
            while len(data) >= want:
                if want == messages.LENGTH_BYTES:
                    want += int.from_bytes(data[: messages.LENGTH_BYTES], "big")
                    if want > messages.MAX_MESSAGE_BYTES:
                        raise DocumentError(_DAMAGED.format(self._request.limits.max_memory_bytes >> 20))
                    continue
                message = bytes(memoryview(data)[messages.LENGTH_BYTES : want])
                del data[:want]
                want = messages.LENGTH_BYTES
                yield message
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                raise DocumentError(f"the file takes more than {self._request.limits.wall_s:g} s to read")
            more = os.read(pipe, _READ_BYTES)
            if not more:
                return
            data += more


_DECODER = msgspec.msgpack.Decoder(messages.FromParser)
