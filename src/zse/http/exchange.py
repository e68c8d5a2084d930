"""One exchange: the request that was read, its JSON, the response that is written, whole or as server-sent events."""

import os
import re
import time
from codecs import BOM_UTF8
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from zse.errors import RequestError

if TYPE_CHECKING:
    from zse.http.body import BodyStream
    from zse.http.listener import Connection

REASONS = {
    200: "OK",
    304: "Not Modified",
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
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
# What this package itself refuses: code → status.
CODES = {
    "invalid_http": 400,
    "invalid_json": 400,
    "invalid_multipart": 400,
    "invalid_type": 400,
    "request_timeout": 408,
    "request_too_large": 413,
    "uri_too_long": 414,
    "header_too_large": 431,
    "internal_error": 500,
    "overloaded": 503,
}

# Of a JSON body.
FILES_SHARE, FILE_BYTES = 16, 1024  # see HTTPRequest.has_files
MAX_DEPTH = 64
MAX_STRINGS = 200_000
MAX_CONTAINERS = 50_000  # the API's largest request (2,048 messages of many parts) has fewer; each costs Python time
_LONG_NUMBER = re.compile(rb"-?\d{19,}(?![\d.eE])")
_DEPTH_STEP = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"{}[]"))
_DIGITS_TO_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else ord(" ") for byte in range(256))

_decoder = msgspec.json.Decoder()


class HTTPError(RequestError):
    """A request that this package refuses, whatever it asks for. code: of CODES. close: the connection cannot be used
    after the answer."""

    def __init__(self, code: str, message: str, *, close: bool = False):
        status = CODES[code]
        kind = "invalid_request_error" if status < 500 else "server_error"
        super().__init__(message, status=status, type=kind, code=code)
        self.close = close


def new_request_id() -> str:
    return "req_" + os.urandom(12).hex()


class HTTPRequest(msgspec.Struct, eq=False):
    """A request whose head has been read.

    Args:
        method: as sent, in capitals.
        path: percent-decoded; query: as sent.
        headers: names in lower case; values of a name that comes twice are joined.
        http_10: the client speaks HTTP/1.0: no chunks, no `100 Continue`.
        keep_alive: the connection may be used again.
        connection: who reads the answer.

    body: bytes, complete when a handler sees it. upload: what the handler reads instead while it arrives, where the
    application has set it. status: of the answer, 0 until there is one. has_files: the application takes files in its JSON, as long
    strings: such a body may be FILES_SHARE times as long. text_bytes: what it may have beside them; 0: any number."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    http_10: bool
    keep_alive: bool
    connection: "Connection"
    body: bytes | bytearray = msgspec.field(default_factory=bytearray)
    upload: "BodyStream | None" = None
    has_files: bool = False
    text_bytes: int = 0
    id: str = msgspec.field(default_factory=new_request_id)
    started: float = msgspec.field(default_factory=time.monotonic)
    more_headers: list[tuple[str, str]] = []  # of the answer, whatever it is
    status: int = 0
    note: str = ""  # what the access log says beside the status
    payer: str = ""  # whose bodies are counted together: the address, unless the application knows better
    refusal: RequestError | None = None  # decided by the head; answered when its turn comes
    last_write: float | None = None  # monotonic seconds, of an answer that is a stream of events
    media_type: str = "text/event-stream; charset=utf-8"  # of such a stream
    comment: bytes = b": keep-alive\n\n"  # what shows that it lives while there are none; b"": nothing does

    def send_events(self, data: bytes, is_last: bool = False) -> None:
        """Write `data`, whole server-sent events or what `media_type` is made of, now; is_last: and the end of the
        answer. Nothing is sent before the first."""
        self.last_write, http_10, out = time.monotonic(), self.http_10, b""
        if not self.status:
            self.keep_alive = self.keep_alive and not http_10  # where the close is the end
            headers = [("content-type", self.media_type), ("cache-control", "no-cache"), ("x-accel-buffering", "no")]
            out = self.connection.head(self, 200, headers if http_10 else [*headers, ("transfer-encoding", "chunked")])
        if http_10:
            out += data
        else:
            out += b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            out += b"0\r\n\r\n" if is_last else b""
        self.connection.write(out)

    @property
    def has_body(self) -> bool:
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0").strip("0") != ""

    def json(self) -> dict:
        """The object in the body, stricter than JSON parsers are: no duplicate keys, no depth above 64, no integer
        beyond 64 bits, no NaN or Infinity, valid UTF-8. Only C-speed passes over the bytes. Raises HTTPError
        invalid_json, or invalid_type when it is JSON but no object."""
        data = bytes(self.body).removeprefix(BOM_UTF8)  # as Windows' tools begin a file
        if self.text_bytes and len(data) > self.text_bytes:
            _check_text(data, self.text_bytes)
        if not data.strip():
            raise _refuse("it is empty")
        try:
            data.decode("utf-8")
            value = _decoder.decode(data)
        except UnicodeDecodeError as error:
            raise _refuse(f"invalid UTF-8 at byte {error.start}") from None
        except RecursionError:
            raise _refuse(f"it is nested deeper than {MAX_DEPTH} levels") from None
        except msgspec.DecodeError as error:
            raise _refuse(str(error).removeprefix("JSON is malformed: ").split(" - at ")[0].rstrip(".")) from None
        if b"\\" in data:  # escapes go first, so every quote is a border
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        if data.count(b'"') > 2 * MAX_STRINGS:
            raise _refuse(f"it holds more than {MAX_STRINGS} strings")
        bare = b"".join(data.split(b'"')[::2])  # without string literals: numbers and structure
        opened = bare.count(b"{") + bare.count(b"[")
        if opened > MAX_CONTAINERS:
            raise _refuse(f"it holds more than {MAX_CONTAINERS} objects and arrays")
        if opened > MAX_DEPTH:
            _check_depth(bare)
        if b"0" * 19 in bare.translate(_DIGITS_TO_ZERO):
            _check_integers(bare)
        if bare.count(b":") != _count_members(value, opened):
            raise _refuse("a key occurs twice in one object")
        if type(value) is not dict:
            raise HTTPError("invalid_type", "The request body must be a JSON object.")
        return value


def _check_text(data: bytes, most: int) -> None:
    """Raises HTTPError request_too_large: a body has more than so many bytes beside strings of FILE_BYTES. To decode those costs no
    more than to copy them; to decode as many numbers or names would hold up the process."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > 2 * MAX_STRINGS:
        raise _refuse(f"it holds more than {MAX_STRINGS} strings")
    parts = data.split(b'"')
    if len(data) - sum(len(part) for part in parts[1::2] if len(part) >= FILE_BYTES) > most:
        message = f"The request body has more than {most} bytes beside files."
        raise HTTPError("request_too_large", message)


def _refuse(reason: str) -> HTTPError:
    return HTTPError("invalid_json", f"The request body is not valid JSON: {reason}.")


def _count_members(value: object, containers: int) -> int:
    """Object members in a value whose text has so many objects and arrays. Objects are searched first, and arrays only while some are
    missing: not the token ids of a prompt (7,000 take 0.25 ms)."""
    members, objects, arrays = 0, [value] if type(value) is dict else [], [value] if type(value) is list else []
    found = 1
    items: Iterable
    while objects or arrays and found < containers:
        if objects:
            each = objects.pop()
            members, items = members + len(each), each.values()
        else:
            items = arrays.pop()
            if {*map(type, items)}.isdisjoint((dict, list)):
                continue
        for item in items:
            if type(item) in (dict, list):
                (objects if type(item) is dict else arrays).append(item)
                found += 1
    return members


def _check_depth(bare: bytes) -> None:
    depth = 0
    for byte in bare.translate(None, _NOT_STRUCTURE):
        depth += _DEPTH_STEP[byte]
        if depth > MAX_DEPTH:
            raise _refuse(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_integers(bare: bytes) -> None:
    for match in _LONG_NUMBER.finditer(bare):
        if match.start() and bare[match.start() - 1] in b".eE+0123456789":  # the fraction of a float
            continue
        digits = match.group().lstrip(b"-").lstrip(b"0")  # compared as text: int() refuses thousands of digits
        if len(digits) > 19 or len(digits) == 19 and digits > b"9223372036854775808":
            raise _refuse("an integer is beyond 2^63")


class Response:
    """A whole answer. headers: pairs in lower case, without x-request-id, and without content-length but of a HEAD whose body
    is not made. close: the connection closes after it."""

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
