"""Bytes of a connection → requests. httptools parses; what a peer may send is bounded here, before it is kept."""

import re
from collections import deque
from typing import TYPE_CHECKING

import httptools

from zse.errors import RequestError
from zse.http.exchange import FILES_SHARE, HTTPError, HTTPRequest

if TYPE_CHECKING:
    from zse.http.listener import Connection, Server

IDLE, HEAD, BODY = "idle", "head", "body"
_ESCAPE = re.compile(rb"%([0-9a-fA-F]{2})")


class RequestReader:
    """The requests of one connection. feed() adds bytes; whole requests stand in `ready`, oldest first. `refusal` is
    set when the bytes cannot go on: nothing is read after it. A request with an `upload` is ready with its head. phase: what is being read (IDLE, HEAD, BODY), `since`
    when (seconds of the server's clock). request: whose body is being read."""

    def __init__(self, server: "Server", connection: "Connection"):
        self._server, self._limits, self._connection = server, server.limits, connection
        self._parser = httptools.HttpRequestParser(self)
        self.ready: deque[HTTPRequest] = deque()
        self.refusal: RequestError | None = None
        self.request: HTTPRequest | None = None
        self._head_bytes = self._body_raw = 0  # raw bytes read since the head, the body began
        self._max_body = server.limits.body_bytes  # of the body that is being read
        self._raw_left: int | None = None  # body bytes to read past httptools (see _skip_upgrade)
        self.on_message_begin()
        self.phase, self.since = IDLE, server.now

    def feed(self, data: bytes) -> bytes:
        """Parse some of `data`; returns what is left to parse."""
        if self.phase == IDLE:
            self.phase, self.since = HEAD, self._server.now
        if self._raw_left is not None:
            return self._feed_raw(data, self._raw_left)
        # Never more than a legal head at once: the verdict must not depend on how the bytes are cut.
        most = self._limits.uri_bytes + self._limits.header_bytes + 64
        room = most - self._head_bytes if self.phase == HEAD else len(data)
        piece, data = data[:room], data[room:]
        if self.phase == HEAD:
            self._head_bytes += len(piece)
        else:
            self._body_raw += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return piece[upgrade.args[0] :] + data if self._skip_upgrade() else data
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self.refusal = self.refusal or _invalid(str(error).rstrip("."))
        if self._body_raw > 2 * self._max_body + (1 << 16):  # chunk headers and trailers count, too
            self.refusal = self.refusal or self._too_large()
        if self.phase == HEAD and self._head_bytes >= most:
            self.refusal = self.refusal or self._too_many_headers()
        return data

    def _skip_upgrade(self) -> bool:
        """An Upgrade offer is ignored (RFC 9110 7.8), but httptools stops there and leaves the body to us."""
        self._parser = httptools.HttpRequestParser(self)
        return self.refusal is None

    def _feed_raw(self, data: bytes, left: int) -> bytes:
        piece, rest = data[:left], data[left:]
        self._raw_left = left - len(piece) or None
        self.on_body(piece)
        self.on_message_complete()
        return rest

    def refuse_if_slow(self, now: float) -> None:
        """Sets `refusal` when the head or the body that is being read has taken too long."""
        limits, waited = self._limits, now - self.since
        upload = None if self.request is None else self.request.upload
        received = len(self.request.body) if self.request is not None else 0
        received = received if upload is None else upload.received
        if self.phase == HEAD and waited > limits.head_s:
            self.refusal = _too_slow("headers")
        elif self.phase == BODY and (
            now - self._last_body > limits.body_idle_s
            or upload is None
            and waited > limits.body_total_s
            or waited > limits.body_idle_s
            and received < limits.body_rate * waited
        ):
            self.refusal = _too_slow("body")

    # httptools callbacks

    def on_message_begin(self) -> None:
        self.phase = HEAD  # also of a pipelined request within one read
        self._url, self._num_headers, self._header_bytes = b"", 0, 0
        self._headers: dict[str, str] = {}

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.uri_bytes and self.refusal is None:
            message = f"The request target is longer than {self._limits.uri_bytes} bytes."
            self.refusal = HTTPError("uri_too_long", message, close=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Names in lower case; values of a name that comes again are joined, except where two would be an attack."""
        self._header_bytes += len(name) + len(value) + 4
        if self.request is None:  # else a trailer: counted, otherwise ignored
            self._num_headers += 1
            key, text = name.decode("ascii").lower(), value.decode("latin-1").strip(" \t")
            if key in self._headers:
                if (
                    key in ("host", "authorization", "x-api-key", "content-type", "transfer-encoding")
                    and self.refusal is None
                ):
                    self.refusal = _invalid(f"two {key} headers")
                text = f"{self._headers[key]}, {text}"
            self._headers[key] = text
        if self.refusal is None and (
            self._num_headers > self._limits.num_headers or self._header_bytes > self._limits.header_bytes
        ):
            self.refusal = self._too_many_headers()

    def on_headers_complete(self) -> None:
        if self.refusal is not None:
            return
        request = None
        try:
            request = self.request = self._build_request()
            self._server.app.check_head(request)
            self._max_body = self._limits.body_bytes if request.upload is None else request.upload.max_bytes
            if request.has_files and request.upload is None:
                request.text_bytes, self._max_body = self._max_body, FILES_SHARE * self._max_body
            if int(request.headers.get("content-length") or 0) > self._max_body:
                raise self._too_large()
            if request.headers.get("expect", "").lower() == "100-continue" and not request.http_10:
                self._connection.expect_continue()
        except RequestError as error:
            if error.close or request is None or request.has_body or request.http_10:
                error.close = True  # the body is not read
                self.refusal = error
                return
            request.refusal, request.upload = error, None
        self.phase = BODY
        self.since = self._last_body = self._server.now
        if request is not None and request.upload is not None:
            self.ready.append(request)

    def restart_clock(self) -> None:
        """It was not the peer that was slow until now."""
        self.since = self._last_body = self._server.now

    def on_body(self, data: bytes) -> None:
        request = self.request
        if self.refusal is not None or request is None:
            return
        self._last_body = self._server.now
        upload = request.upload
        if (len(request.body) if upload is None else upload.received) + len(data) > self._max_body:
            self.refusal = self._too_large()
        elif self._server.bodies.add(request.payer, len(data)):
            if upload is None:
                request.body += data
            else:
                upload.add(data)
        else:
            self.refusal = HTTPError("overloaded", "The server is holding too many request bodies.", close=True)

    def on_message_complete(self) -> None:
        if self.refusal is not None or self.request is None or self._raw_left is not None:
            return
        if self.request.upload is None:
            self.ready.append(self.request)
        else:
            self.request.upload.end()
        self.request, self._head_bytes, self._body_raw = None, 0, 0
        self.phase, self.since = IDLE, self._server.now

    def _too_large(self) -> HTTPError:
        message = f"The request body is larger than {self._max_body} bytes."
        return HTTPError("request_too_large", message, close=True)

    def _too_many_headers(self) -> HTTPError:
        message = f"More than {self._limits.num_headers} headers or {self._limits.header_bytes} bytes of them."
        return HTTPError("header_too_large", message, close=True)

    def _build_request(self) -> HTTPRequest:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _invalid("only HTTP/1.1 and HTTP/1.0 are spoken here")
        headers = self._headers
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _invalid("the only transfer coding is chunked")
        if version == "1.0" and "transfer-encoding" in headers:
            raise _invalid("HTTP/1.0 has no transfer codings")
        method = self._parser.get_method().decode("ascii")
        path, query = split_target(self._url)
        keep_alive = self._parser.should_keep_alive()
        request = self._server.app.request_type(
            method, path, query, headers, version == "1.0", keep_alive, self._connection
        )
        request.payer = self._connection.client
        length = int(headers.get("content-length") or 0)
        if self._parser.should_upgrade():
            if "transfer-encoding" in headers or method == "CONNECT":
                raise _invalid("an Upgrade offer with a chunked body")
            # should_keep_alive() is false for an upgrade; the offer is ignored, the connection goes on
            request.keep_alive = version == "1.1" and "close" not in headers.get("connection", "").lower()
            self._raw_left = length or None
        return request


def _invalid(reason: str) -> HTTPError:
    return HTTPError("invalid_http", f"The request is not valid HTTP/1.1: {reason}.", close=True)


def _too_slow(what: str) -> HTTPError:
    return HTTPError("request_timeout", f"The request's {what} did not arrive in time.", close=True)


def split_target(target: bytes) -> tuple[str, str]:
    """Path (percent-decoded) and query of a request target in origin or absolute form. HTTPError invalid_http."""
    if not target.startswith(b"/"):
        scheme, _, rest = target.partition(b"://")
        if scheme.lower() not in (b"http", b"https"):
            raise _invalid("the target must be a path")
        target = b"/" + rest.partition(b"/")[2]
    if b"#" in target:
        raise _invalid("the target has a fragment")
    raw_path, _, query = target.partition(b"?")
    path = _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), raw_path)
    try:
        return path.decode("utf-8"), query.decode("ascii")
    except UnicodeDecodeError:
        raise _invalid("the target is not UTF-8") from None
