"""One exchange: the request that was read, the response that is written, whole or as server-sent events."""

import os
import time
from typing import TYPE_CHECKING

from zse.errors import RequestError

if TYPE_CHECKING:
    from zse.http.connection import Connection

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    411: "Length Required",
    413: "Content Too Large",
    414: "URI Too Long",
    415: "Unsupported Media Type",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
# What this package itself refuses: code → status.
CODES = {
    "invalid_http": 400,
    "invalid_json": 400,
    "invalid_type": 400,
    "request_timeout": 408,
    "request_too_large": 413,
    "uri_too_long": 414,
    "header_too_large": 431,
    "internal_error": 500,
    "overloaded": 503,
}


class HTTPError(RequestError):
    """A request that this package refuses, whatever it asks for. code: of CODES. close: the connection cannot be used
    after the answer."""

    def __init__(self, code: str, message: str, *, close: bool = False):
        status = CODES[code]
        kind = "invalid_request_error" if status < 500 else "server_error"
        super().__init__(message, status=status, type=kind, code=code)
        self.close = close


class HTTPRequest:
    """A request whose head has been read.

    Args:
        method: as sent, in capitals.
        path: percent-decoded; query: as sent.
        headers: names in lower case; values of a name that comes twice are joined.
        http_10: the client speaks HTTP/1.0: no chunks, no `100 Continue`.
        keep_alive: the connection may be used again.
        connection: who reads the answer.

    body: bytes, complete when a handler sees it. status: of the answer, 0 until there is one."""

    def __init__(
        self,
        method: str,
        path: str,
        query: str,
        headers: dict[str, str],
        http_10: bool,
        keep_alive: bool,
        connection: "Connection",
    ):
        self.method, self.path, self.query, self.headers = method, path, query, headers
        self.http_10, self.keep_alive, self.connection = http_10, keep_alive, connection
        self.body: bytes | bytearray = bytearray()
        self.id = new_request_id()
        self.started = time.monotonic()
        self.more_headers: list[tuple[str, str]] = []  # of the answer, whatever it is
        self.status = 0
        self.note = ""  # what the access log says beside the status
        self.refusal: RequestError | None = None  # decided by the head; answered when its turn comes

    @property
    def has_body(self) -> bool:
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0").strip("0") != ""

    def open_stream(self) -> "EventStream":
        """The response as server-sent events. Nothing is sent until its start()."""
        self.connection.stream = EventStream(self.connection, self)
        return self.connection.stream

    @property
    def stream(self) -> "EventStream":
        """What open_stream() opened."""
        assert self.connection.stream is not None
        return self.connection.stream


class Response:
    """A whole answer. headers: pairs in lower case, without content-length and x-request-id. close: the connection
    closes after it."""

    __slots__ = ("status", "body", "headers", "close")

    def __init__(
        self,
        status: int,
        body: bytes,
        headers: list[tuple[str, str]] | None = None,
        close: bool = False,
        media_type: str = "application/json",
    ):
        self.status, self.body, self.close = status, body, close
        self.headers = [("content-type", media_type), *(headers or [])]


def new_request_id() -> str:
    return "req_" + os.urandom(12).hex()


class EventStream:
    """Server-sent events of one response: start, send…, then finish or fail, exactly one of them."""

    def __init__(self, connection: "Connection", request: HTTPRequest):
        self._connection, self._request = connection, request
        self.started = self.finished = False
        self.last_write = time.monotonic()

    def start(self) -> None:
        if self.started:
            return
        self.started = True
        headers = [
            ("content-type", "text/event-stream; charset=utf-8"),
            ("cache-control", "no-cache"),
            ("x-accel-buffering", "no"),
        ]
        if not self._request.http_10:
            headers.append(("transfer-encoding", "chunked"))
        self._connection.write_head(self._request, 200, headers)

    def send(self, data: bytes) -> None:
        """Write `data`, whole events, now; await drain() before making more."""
        self.start()
        self.last_write = time.monotonic()
        if self._request.http_10:
            self._connection.write(data)
        else:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def comment(self) -> None:
        """A line that clients ignore: shows proxies and the kernel that the connection is alive."""
        self.send(b": keep-alive\n\n")

    def is_stalled(self) -> bool:
        """Whether the peer has yet to take what was written."""
        return self._connection.is_stalled

    async def drain(self) -> None:
        """Wait until the peer has taken what was written (down to the transport's low-water mark)."""
        await self._connection.drain()

    def finish(self) -> None:
        self.start()
        self.finished = True
        if not self._request.http_10:
            self._connection.write(b"0\r\n\r\n")

    def fail(self, body: bytes) -> None:
        """One event with the body of an error, then the end of the stream; the connection closes."""
        self.send(b"data: " + body + b"\n\n")
        self._request.keep_alive = False
        self.finish()
