"""One exchange: the request that was read, the response that is written, whole or as server-sent events."""

import os
import time
from typing import TYPE_CHECKING

import msgspec

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
    411: "Length Required",
    413: "Content Too Large",
    414: "URI Too Long",
    415: "Unsupported Media Type",
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
        self.stream: EventStream | None = None

    @property
    def has_body(self) -> bool:
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0").strip("0") != ""


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

    @classmethod
    def json(cls, value: object, status: int = 200) -> "Response":
        """The answer that holds `value` as JSON."""
        return cls(status, msgspec.json.encode(value))


def new_request_id() -> str:
    return "req_" + os.urandom(12).hex()


class EventStream:
    """The response to a request as server-sent events: send… until is_last, or fail. Nothing is sent before the first of
    these. From its making on, a client that waits for long gets comments.

    drain: awaited before more is made, returns when the peer has taken what was written. stalled_s: for how long it has yet to.
    """

    def __init__(self, request: HTTPRequest):
        self._connection, self._request = request.connection, request
        self.drain, self.stalled_s = self._connection.drain, self._connection.stalled_s
        self.started = False
        self.last_write = time.monotonic()
        request.stream = self

    def send(self, data: bytes, is_last: bool = False) -> None:
        """Write `data`, whole events, now; is_last: and the end of the stream."""
        self.last_write = time.monotonic()
        http_10, out = self._request.http_10, b""
        if not self.started:
            self.started = True
            headers = [
                ("content-type", "text/event-stream; charset=utf-8"),
                ("cache-control", "no-cache"),
                ("x-accel-buffering", "no"),
            ]
            out = self._connection.head(
                self._request, 200, headers if http_10 else [*headers, ("transfer-encoding", "chunked")]
            )
        if http_10:
            out += data
        else:
            out += b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            out += b"0\r\n\r\n" if is_last else b""
        self._connection.write(out)

    def comment(self) -> None:
        """A line that clients ignore: shows proxies and the kernel that the connection is alive."""
        self.send(b": keep-alive\n\n")

    def fail(self, body: bytes) -> None:
        """One event with the body of an error, then the end of the stream; the connection closes."""
        self._request.keep_alive = False
        self.send(b"data: " + body + b"\n\n", is_last=True)
