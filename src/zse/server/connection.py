"""HTTP/1.1 over asyncio: httptools parses, a Connection bounds what a peer can make us read, hold, wait for or write.

uvicorn + starlette were measured first: 82 ms of imports on a start path that wants to be 300 ms long, and their
protocol class answers in plain text, has no time limits while reading and hides a client's FIN during a response.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

import httptools

from zse.errors import RequestError
from zse.server import errors
from zse.server.errors import APIError
from zse.server.exchange import REASONS, EventStream, Request, Response, error_response, new_request_id

if TYPE_CHECKING:
    from zse.server.listener import Server

log = logging.getLogger("zse.server")

_HELD_BYTES = 1 << 16  # bytes of a next request that are kept while one is being answered
_LINGER_BYTES, _LINGER_S = 16 << 20, 2.0  # what is read and dropped after an early answer, so that it is not lost
_UNSENT_BYTES = 1 << 16  # of an answer in the kernel, beside what is under way
IDLE, HEAD, BODY, LINGER = "idle", "head", "body", "linger"


class Connection(asyncio.Protocol):
    """One client. At most one request is handled at a time; a client that closes its side is gone (its handler is
    cancelled at once, whatever it waits for)."""

    def __init__(self, server: "Server"):
        self._server, self._limits = server, server.limits
        self.stream: EventStream | None = None
        self.client = ""
        self.authenticated = False
        self.phase, self._since = IDLE, server.now
        self._transport: asyncio.Transport  # from connection_made() on, before anything else happens
        self._parser = httptools.HttpRequestParser(self)
        self._ready: deque[Request] = deque()
        self._active: Request | None = None
        self._task: asyncio.Task | None = None
        self._held = bytearray()
        self._reading_paused = False
        self._paused_at: float | None = None
        self._writable: asyncio.Future | None = None
        self._refusal: RequestError | None = None
        self._lingered = 0
        self._new_message()

    def _new_message(self) -> None:
        self._url, self._header_bytes = b"", 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0  # raw bytes read since the head began
        self._request: Request | None = None
        self._raw_left: int | None = None  # body bytes to read past httptools (see _skip_upgrade)
        self._body_raw = 0
        self._last_body = self._server.now

    # Transport events

    def connection_made(self, transport) -> None:
        self._transport = transport
        sock = transport.get_extra_info("socket")
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if isinstance(peer, tuple) else ""
        if isinstance(peer, tuple):
            set_peer_timeouts(sock, self._limits.write_stall_s)
        self._since = self._server.now
        refusal = self._server.add(self)
        if refusal is not None:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.remove(self)
        self._leave()

    def eof_received(self) -> None:
        # A half-close counts as leaving; returning None closes the transport once its buffer is flushed.
        self._leave()

    def _leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for request in [*self._ready, self._request, self._active]:
            self._release_body(request)
        self._ready.clear()
        self._request = None
        self._held.clear()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._paused_at = time.monotonic()

    def resume_writing(self) -> None:
        self._paused_at = None
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    @property
    def is_stalled(self) -> bool:
        """Whether the peer takes what is written more slowly than it is written."""
        return self._paused_at is not None

    async def drain(self) -> None:
        if self._paused_at is not None:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    # Reading

    def data_received(self, data: bytes) -> None:
        if self.phase == LINGER:
            self._lingered += len(data)
            if self._lingered > _LINGER_BYTES:
                self._transport.abort()
        elif self._active is not None:
            self._held += data
            if len(self._held) > _HELD_BYTES and not self._reading_paused:
                self._reading_paused = True
                self._transport.pause_reading()
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        """Parse until a whole request is there; what follows it is held back until that has been answered."""
        while data and self._active is None and self.phase != LINGER:
            if self.phase == IDLE:
                self.phase, self._since = HEAD, self._server.now
            if self._raw_left is not None:
                data = self._feed_raw(data, self._raw_left)
            else:
                # Never more than a legal head at once: the verdict must not depend on how the bytes are cut.
                room = len(data)
                if self.phase == HEAD:
                    room = self._limits.uri_bytes + self._limits.header_bytes + 64 - self._head_bytes
                piece, data = data[:room], data[room:]
                data = self._parse(piece) + data
            if (
                self._refusal is None
                and self.phase == HEAD
                and self._head_bytes >= (self._limits.uri_bytes + self._limits.header_bytes + 64)
            ):
                self._refusal = self._too_many_headers()
            if self._ready:
                self._start_next()
            elif self._refusal is not None:
                self._refuse(self._refusal)
        if data and self.phase != LINGER:
            self._held += data

    def _parse(self, piece: bytes) -> bytes:
        """Feed httptools; returns what it left over after an upgrade request."""
        if self.phase == HEAD:
            self._head_bytes += len(piece)
        else:
            self._body_raw += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return piece[upgrade.args[0] :] if self._skip_upgrade() else b""
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            if self._refusal is None:
                reason = str(error).rstrip(".")
                self._refusal = APIError("invalid_http", f"The request is not valid HTTP/1.1: {reason}.", close=True)
        if self._body_raw > 2 * self._limits.body_bytes + (1 << 16):  # chunk headers and trailers count, too
            self._refusal = self._refusal or self._too_large()
        return b""

    def _skip_upgrade(self) -> bool:
        """An Upgrade offer is ignored (RFC 9110 7.8), but httptools stops there and leaves the body to us."""
        self._parser = httptools.HttpRequestParser(self)
        return self._refusal is None

    def _feed_raw(self, data: bytes, left: int) -> bytes:
        piece, rest = data[:left], data[left:]
        self._raw_left = left - len(piece) or None
        self.on_body(piece)
        self.on_message_complete()
        return rest

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self.phase == IDLE:  # a pipelined request within one read
            self.phase = HEAD

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.uri_bytes and self._refusal is None:
            self._refusal = APIError(
                "uri_too_long", f"The request target is longer than {self._limits.uri_bytes} bytes.", close=True
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._request is None:  # else a trailer: counted, otherwise ignored
            self._headers.append((name, value))
        if self._refusal is None and (
            len(self._headers) > self._limits.num_headers or self._header_bytes > self._limits.header_bytes
        ):
            self._refusal = self._too_many_headers()

    def on_headers_complete(self) -> None:
        if self._refusal is not None:
            return
        try:
            self._request = self._build_request()
            self._server.check_head(self._request)
        except APIError as error:
            request = self._request
            if error.close or request is None or request.has_body or request.http_10:
                error.close = True  # the body is not read
                self._refusal = error
                return
            request.refusal = error
        self.phase = BODY
        self._since = self._last_body = self._server.now

    def on_body(self, data: bytes) -> None:
        request = self._request
        if self._refusal is not None or request is None:
            return
        self._last_body = self._server.now
        if len(request.body) + len(data) > self._limits.body_bytes:
            self._refusal = self._too_large()
        elif self._server.body_bytes + len(data) > self._limits.all_bodies_bytes:
            self._refusal = APIError("overloaded", "The server is holding too many request bodies.", close=True)
        else:
            self._server.body_bytes += len(data)
            request.body += data

    def on_message_complete(self) -> None:
        if self._refusal is not None or self._request is None or self._raw_left is not None:
            return
        self._ready.append(self._request)
        self._new_message()
        self.phase, self._since = IDLE, self._server.now

    def _too_large(self) -> APIError:
        return APIError(
            "request_too_large", f"The request body is larger than {self._limits.body_bytes} bytes.", close=True
        )

    def _too_many_headers(self) -> APIError:
        return APIError(
            "header_too_large",
            f"More than {self._limits.num_headers} headers or {self._limits.header_bytes} bytes of them.",
            close=True,
        )

    def _build_request(self) -> Request:
        def refuse(reason: str) -> APIError:
            return APIError("invalid_http", f"The request is not valid HTTP/1.1: {reason}.", close=True)

        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise refuse("only HTTP/1.1 and HTTP/1.0 are spoken here")
        headers: dict[str, str] = {}
        for name_bytes, value_bytes in self._headers:
            name, value = name_bytes.decode("ascii").lower(), value_bytes.decode("latin-1").strip(" \t")
            if name in headers:
                if name in ("host", "authorization", "content-type", "transfer-encoding"):
                    raise refuse(f"two {name} headers")
                value = f"{headers[name]}, {value}"
            headers[name] = value
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise refuse("the only transfer coding is chunked")
        if version == "1.0" and "transfer-encoding" in headers:
            raise refuse("HTTP/1.0 has no transfer codings")
        method = self._parser.get_method().decode("ascii")
        path, query = split_target(self._url, refuse)
        request = Request(method, path, query, headers, version == "1.0", self._parser.should_keep_alive(), self)
        length = int(headers.get("content-length") or 0)
        if length > self._limits.body_bytes:
            raise self._too_large()
        if self._parser.should_upgrade():
            if "transfer-encoding" in headers or method == "CONNECT":
                raise refuse("an Upgrade offer with a chunked body")
            # should_keep_alive() is false for an upgrade; the offer is ignored, the connection goes on
            request.keep_alive = version == "1.1" and "close" not in headers.get("connection", "").lower()
            self._raw_left = length or None
        return request

    # Answering

    def expect_continue(self) -> None:
        """Tell a client that waits for it to send the body (RFC 9110 10.1.1)."""
        if self._active is None and not self._ready:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _start_next(self) -> None:
        self._active = self._ready.popleft()
        self._task = asyncio.get_running_loop().create_task(self._run(self._active))

    async def _run(self, request: Request) -> None:
        response: Response | None = None
        failure: RequestError | None = None
        request.body = bytes(request.body)
        try:
            if request.refusal is not None:
                raise request.refusal
            response = await self._server.handle(request)
        except RequestError as error:
            failure = error
        except Exception:
            log.exception("request %s failed", request.id)
            failure = errors.internal_error()
        finally:
            self._release_body(request)
            stream, self.stream = self.stream, None
            self._task = None
            if response is None and failure is None and not (stream and stream.finished):  # cancelled: client left
                request.note = request.note or "client left"
                self._server.finished(request)
                self._active = None
                self._transport.abort()
        if failure is not None and stream is not None and stream.started:
            request.note = request.note or (failure.code or "")
            stream.fail(failure)
        elif failure is not None:
            self.respond(request, error_response(failure))
        elif response is not None:
            self.respond(request, response)
        self._server.finished(request)
        self._active = None
        self._next(request)

    def _next(self, request: Request) -> None:
        """After an answer: close, or go on with what has been read meanwhile."""
        if not request.keep_alive or self._server.draining or self._transport.is_closing():
            self._close_gently()
            return
        self._since = self._server.now
        if self._ready:
            self._start_next()
        elif self._refusal is not None:
            self._refuse(self._refusal)
        elif self._held:
            held = bytes(self._held)
            self._held.clear()
            self._feed(held)
        if self._reading_paused and self._active is None:
            self._reading_paused = False
            self._transport.resume_reading()

    def write_head(self, request: Request | None, status: int, headers: list[tuple[str, str]]) -> None:
        """Write status line and headers; adds date, x-request-id and connection."""
        self.write(self._head(request, status, headers))

    def _head(self, request: Request | None, status: int, headers: list[tuple[str, str]]) -> bytes:
        lines = [
            f"HTTP/1.1 {status} {REASONS.get(status, '')}",
            f"date: {self._server.date}",
            f"x-request-id: {request.id if request else new_request_id()}",
            "x-content-type-options: nosniff",
        ]
        lines += [f"{name}: {value}" for name, value in [*headers, *(request.more_headers if request else ())]]
        if request is None or not request.keep_alive or self._server.draining:
            lines.append("connection: close")
        elif request.http_10:
            lines.append("connection: keep-alive")
        if request is not None:
            request.status = status
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def respond(self, request: Request | None, response: Response) -> None:
        if request is not None and response.close:
            request.keep_alive = False
        headers = [*response.headers, ("content-length", str(len(response.body)))]
        body = b"" if request is not None and request.method == "HEAD" else response.body
        self.write(self._head(request, response.status, headers) + body)

    def _refuse(self, refusal: RequestError) -> None:
        """Answer a request that will not be handled; nothing more is read from this connection."""
        request, self._request = self._request, None
        if request is not None:
            request.keep_alive = False
        self.respond(request, error_response(refusal))
        self._release_body(request)
        self._server.refused(self, request, refusal)
        self._close_gently()

    def _close_gently(self) -> None:
        """Flush and close our side, then drop what still arrives: an immediate close would reset the connection and
        could take the answer with it."""
        if self._transport.is_closing():
            return
        self.phase, self._since = LINGER, self._server.now
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        try:
            self._transport.write_eof()
        except OSError:
            self._transport.abort()

    def _release_body(self, request: Request | None) -> None:
        if request is not None:
            self._server.body_bytes -= len(request.body)
            request.body = b""

    # Called by the server

    def abandon(self) -> None:
        """Drop the connection now."""
        self._transport.abort()

    def close_if_idle(self) -> None:
        if self._active is None and not self._ready and self.phase == IDLE:
            self._close_gently()

    @property
    def busy(self) -> bool:
        return self._active is not None

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def check_deadlines(self, now: float) -> None:
        limits = self._limits
        waited = now - self._since
        if self._paused_at is not None and now - self._paused_at > limits.write_stall_s:
            log.info("dropped a client that has not read for %d s", limits.write_stall_s)
            self.abandon()
        elif self._active is not None:
            if self.stream is not None and now - self.stream.last_write >= limits.comment_s:
                self.stream.comment()
        elif self.phase == LINGER:
            if waited > _LINGER_S:
                self.abandon()
        elif self.phase == IDLE:
            if waited > limits.keep_alive_s:
                self._close_gently()
        elif self.phase == HEAD:
            if waited > limits.head_s:
                self._refuse(self._too_slow("headers"))
        elif (
            now - self._last_body > limits.body_idle_s
            or waited > limits.body_total_s
            or waited > limits.body_idle_s
            and self._body_received < limits.body_rate * waited
        ):
            self._refuse(self._too_slow("body"))

    @property
    def _body_received(self) -> int:
        return len(self._request.body) if self._request is not None else 0

    def _too_slow(self, what: str) -> APIError:
        return APIError("request_timeout", f"The request's {what} did not arrive in time.", close=True)


def split_target(target: bytes, refuse) -> tuple[str, str]:
    """Path (percent-decoded) and query of a request target in origin or absolute form."""
    if not target.startswith(b"/"):
        scheme, _, rest = target.partition(b"://")
        if scheme.lower() not in (b"http", b"https"):
            raise refuse("the target must be a path")
        target = b"/" + rest.partition(b"/")[2]
    if b"#" in target:
        raise refuse("the target has a fragment")
    raw_path, _, query = target.partition(b"?")
    if b"%" in raw_path:
        from urllib.parse import unquote_to_bytes

        raw_path = unquote_to_bytes(raw_path)
    try:
        return raw_path.decode("utf-8"), query.decode("ascii")
    except UnicodeDecodeError:
        raise refuse("the target is not UTF-8") from None


def set_peer_timeouts(sock: socket.socket, stall_s: float) -> None:
    """Notice a peer that vanished without a FIN: probe an idle connection, give up on unacknowledged data; and one that
    reads slowly: the kernel would take megabytes of a stream before it says so."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(stall_s * 1000)),
        ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
    ):
        option = getattr(socket, name, None)  # macOS has other names
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
