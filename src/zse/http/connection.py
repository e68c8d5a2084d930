"""One client over asyncio: reads its requests, runs one at a time, writes the answers, notices when the client leaves."""

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING

from zse.errors import RequestError
from zse.http.exchange import REASONS, EventStream, HTTPError, HTTPRequest, Response, new_request_id
from zse.http.reader import IDLE, RequestReader

if TYPE_CHECKING:
    from zse.http.listener import Server

log = logging.getLogger("zse.server")

_HELD_BYTES = 1 << 16  # bytes of a next request that are kept while one is being answered
_LINGER_BYTES, _LINGER_S = 16 << 20, 2.0  # what is read and dropped after an early answer, so that it is not lost
_UNSENT_BYTES = 1 << 16  # of an answer in the kernel, beside what is under way


class Connection(asyncio.Protocol):
    """One client. At most one request is handled at a time; a client that closes its side is gone (its handler is
    cancelled at once, whatever it waits for)."""

    def __init__(self, server: "Server"):
        self._server, self._limits = server, server.limits
        self.stream: EventStream | None = None
        self.client = ""
        self.authenticated = False  # a key of the application was seen
        self._transport: asyncio.Transport  # from connection_made() on, before anything else happens
        self._reader = RequestReader(server, self)
        self._active: HTTPRequest | None = None
        self._task: asyncio.Task | None = None
        self._held = bytearray()
        self._reading_paused = False
        self._paused_at: float | None = None
        self._writable: asyncio.Future | None = None
        self._lingers_since: float | None = None  # our side is closed; what still arrives is dropped
        self._lingered = 0

    # Transport events

    def connection_made(self, transport) -> None:
        self._transport = transport
        sock = transport.get_extra_info("socket")
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if isinstance(peer, tuple) else ""
        if isinstance(peer, tuple):
            set_peer_timeouts(sock, self._limits.write_stall_s)
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
        for request in [*self._reader.take_all(), self._active]:
            self._server.release_body(request)
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
        if self._lingers_since is not None:
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
        while data and self._active is None and self._lingers_since is None:
            data = self._reader.feed(data)
            if self._reader.ready:
                self._start_next()
            elif self._reader.refusal is not None:
                self._refuse(self._reader.refusal)
        if data and self._lingers_since is None:
            self._held += data

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    # Answering

    def expect_continue(self) -> None:
        """Tell a client that waits for it to send the body (RFC 9110 10.1.1)."""
        if self._active is None and not self._reader.ready:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _start_next(self) -> None:
        self._active = self._reader.ready.popleft()
        self._task = asyncio.get_running_loop().create_task(self._run(self._active))

    async def _run(self, request: HTTPRequest) -> None:
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
            # Of a bug of ours a client sees nothing but the request id.
            message = "The server failed to answer this request. Quote the x-request-id header when you report it."
            failure = HTTPError("internal_error", message)
        finally:
            self._server.release_body(request)
            stream, self.stream = self.stream, None
            self._task = None
            if response is None and failure is None and not (stream and stream.finished):  # cancelled: client left
                request.note = request.note or "client left"
                self._server.finished(request)
                self._active = None
                self._transport.abort()
        if failure is not None:
            response = self._server.error_response(failure)
            if stream is not None and stream.started:
                request.note = request.note or (failure.code or "")
                stream.fail(response.body)
                response = None
        if response is not None:
            self.respond(request, response)
        self._server.finished(request)
        self._active = None
        self._next(request)

    def _next(self, request: HTTPRequest) -> None:
        """After an answer: close, or go on with what has been read meanwhile."""
        if not request.keep_alive or self._server.draining or self._transport.is_closing():
            self._close_gently()
            return
        self._reader.since = self._server.now
        if self._reader.ready:
            self._start_next()
        elif self._reader.refusal is not None:
            self._refuse(self._reader.refusal)
        elif self._held:
            held = bytes(self._held)
            self._held.clear()
            self._feed(held)
        if self._active is None:
            self._resume_reading()

    def write_head(self, request: HTTPRequest | None, status: int, headers: list[tuple[str, str]]) -> None:
        """Write status line and headers; adds date, x-request-id and connection."""
        self.write(self._head(request, status, headers))

    def _head(self, request: HTTPRequest | None, status: int, headers: list[tuple[str, str]]) -> bytes:
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

    def respond(self, request: HTTPRequest | None, response: Response) -> None:
        if request is not None and response.close:
            request.keep_alive = False
        headers = [*response.headers, ("content-length", str(len(response.body)))]
        body = b"" if request is not None and request.method == "HEAD" else response.body
        self.write(self._head(request, response.status, headers) + body)

    def _refuse(self, refusal: RequestError) -> None:
        """Answer a request that will not be handled; nothing more is read from this connection."""
        request, self._reader.request = self._reader.request, None
        if request is not None:
            request.keep_alive = False
        self.respond(request, self._server.error_response(refusal))
        self._server.release_body(request)
        self._server.refused(self, request, refusal)
        self._close_gently()

    def _close_gently(self) -> None:
        """Flush and close our side, then drop what still arrives: an immediate close would reset the connection and
        could take the answer with it."""
        if self._transport.is_closing():
            return
        self._lingers_since = self._server.now
        self._resume_reading()
        try:
            self._transport.write_eof()
        except OSError:
            self._transport.abort()

    # Called by the server

    def abandon(self) -> None:
        """Drop the connection now."""
        self._transport.abort()

    def close_if_idle(self) -> None:
        if self._active is None and not self._reader.ready and self._is_idle:
            self._close_gently()

    @property
    def _is_idle(self) -> bool:
        return self._lingers_since is None and self._reader.phase == IDLE

    @property
    def busy(self) -> bool:
        return self._active is not None

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def check_deadlines(self, now: float) -> None:
        limits = self._limits
        if self._paused_at is not None and now - self._paused_at > limits.write_stall_s:
            log.info("dropped a client that has not read for %d s", limits.write_stall_s)
            self.abandon()
        elif self._active is not None:
            if self.stream is not None and now - self.stream.last_write >= limits.comment_s:
                self.stream.comment()
        elif self._lingers_since is not None:
            if now - self._lingers_since > _LINGER_S:
                self.abandon()
        elif self._reader.phase == IDLE:
            if now - self._reader.since > limits.keep_alive_s:
                self._close_gently()
        else:
            self._reader.refuse_if_slow(now)
            if self._reader.refusal is not None:
                self._refuse(self._reader.refusal)


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
