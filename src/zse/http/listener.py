"""What an application is, the limits, the listening side with the one timer that checks deadlines, and its clients: a
Connection reads requests, runs one at a time, writes the answers, notices when the client leaves."""

import asyncio
import logging
import socket
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from zse.errors import RequestError
from zse.http.exchange import REASONS, HTTPError, HTTPRequest, Response, new_request_id
from zse.http.reader import IDLE, RequestReader

if TYPE_CHECKING:
    from zse.http.body import BodyStream

log = logging.getLogger("zse.server")

TICK_S = 0.5
_DATE = "%a, %d %b %Y %H:%M:%S GMT"
_HELD_BYTES = 1 << 16  # bytes of a next request that are kept while one is being answered
# One may hold so many times what would then be left for others (dynamic thresholds; Choudhury and Hahne 1998): alone
# three quarters of all, two that flood three sevenths each, and whoever comes next finds room.
_BODY_SHARE = 3
_LINGER_BYTES, _LINGER_S = 16 << 20, 2.0  # what is read and dropped after an early answer, so that it is not lost
# Notice a peer that vanished without a FIN: probe an idle connection, give up on unacknowledged data (None: after
# Limits.write_stall_s); and one that reads slowly: the kernel would take megabytes of a stream before it says so.
_PEER_OPTIONS = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": None,
    "TCP_NOTSENT_LOWAT": 1 << 16,
}


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one server; sizes in bytes, times in seconds."""

    body_bytes: int = 2 << 20
    all_bodies_bytes: int = 64 << 20
    header_bytes: int = 16 << 10
    num_headers: int = 100
    uri_bytes: int = 8 << 10
    connections: int = 4096
    unauthenticated_per_ip: int = 64
    head_s: float = 10.0
    body_idle_s: float = 10.0
    body_total_s: float = 60.0
    body_rate: int = 1024  # bytes a second, averaged, once body_idle_s have passed
    keep_alive_s: float = 75.0
    write_stall_s: float = 30.0
    comment_s: float = 15.0


class Bodies:
    """Bytes of the request bodies that a server holds, shared by those who send them. most: of all together. held: by
    payer."""

    def __init__(self, most: int):
        self._most = most
        self.total = 0
        self.held: Counter[str] = Counter()

    def add(self, payer: str, size: int) -> bool:
        """Whether `payer` may hold `size` bytes more, which count from now on."""
        left = self._most - self.total - size
        if self.held[payer] + size > _BODY_SHARE * left:
            return False
        self.held[payer] += size
        self.total += size
        return True

    def remove(self, payer: str, size: int) -> None:
        self.total -= size
        self.held[payer] -= size
        if not self.held[payer]:
            del self.held[payer]


class Application(Protocol):
    """What answers. request_type: the class of its requests, HTTPRequest or one that adds what the application knows of
    them. needs_key: a connection counts against unauthenticated_per_ip until the application has set its
    `authenticated`."""

    @property
    def request_type(self) -> type[HTTPRequest]: ...

    @property
    def needs_key(self) -> bool: ...

    def check_head(self, request: Any) -> None:
        """Decides what can be decided before the body is read. Raises RequestError."""

    async def handle(self, request: Any) -> Response | None:
        """Answers; None: through send_events(). Raises RequestError."""

    def error_response(self, error: RequestError, request: Any | None) -> Response:
        """The answer that says `error`. request None: nobody could read it."""

    def error_event(self, error: RequestError, request: Any) -> bytes:
        """What ends a stream that has begun."""

    def finished(self, request: Any | None, status: int) -> None:
        """An answer was given, which the access log tells; status 0: the client left before it began. request None:
        nobody could read it."""


class Connection(asyncio.Protocol):
    """One client. At most one request is handled at a time; a client that closes its side is gone (its handler is
    cancelled at once, whatever it waits for)."""

    def __init__(self, server: "Server"):
        self._server, self._limits = server, server.limits
        self.client = ""
        self.authenticated = False  # a key of the application was seen
        self._transport: asyncio.Transport  # from connection_made() on, before anything else happens
        self._reader = RequestReader(server, self)
        self._active: HTTPRequest | None = None
        self._task: asyncio.Task | None = None
        self._held = b""  # received and not parsed yet
        self.is_behind = False  # the peer is behind what is written
        self._paused_at = 0.0  # since when
        self._writable: asyncio.Future | None = None
        self._lingers_since: float | None = None  # our side is closed; what still arrives is dropped
        self._lingered = 0

    # Transport events

    def connection_made(self, transport) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.client = peer[0]
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PEER_OPTIONS.items():
                option = getattr(socket, name, None)  # macOS has other names
                if option is not None:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value or int(self._limits.write_stall_s * 1000))
        connections = self._server.connections
        connections.add(self)
        if len(connections) > self._limits.connections:
            self._refuse(HTTPError("overloaded", "Too many connections.", close=True))
        elif self._server.app.needs_key:
            same = sum(1 for other in connections if other.client == self.client and not other.authenticated)
            if same > self._limits.unauthenticated_per_ip:
                message = "Too many connections without a key from this address."
                self._refuse(HTTPError("overloaded", message, close=True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self.eof_received()

    def eof_received(self) -> None:
        """The client has left: a half-close counts as that. None closes the transport once its buffer is flushed."""
        if self._task is not None:
            self._task.cancel()
        for request in (*self._reader.ready, self._reader.request, self._active):
            self._server.release_body(request)
        self._held = b""

    def pause_writing(self) -> None:
        self.is_behind, self._paused_at = True, time.monotonic()

    def resume_writing(self) -> None:
        self.is_behind = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def stalled_s(self) -> float:
        """Seconds for which the peer has been behind what is written, 0 when it is not."""
        return time.monotonic() - self._paused_at if self.is_behind else 0.0

    async def drain(self) -> None:
        """Wait until the peer has taken what was written (down to the transport's low-water mark)."""
        if self.is_behind:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._lingers_since is None:
            self._held += data
            self._go_on()
            return
        self._lingered += len(data)
        if self._lingered > _LINGER_BYTES:
            self._transport.abort()

    def _go_on(self) -> None:
        """Without a request to answer, parse what was received until there is one; what follows it waits for its
        answer."""
        while self._lingers_since is None:
            if self._active is not None:
                if self._active.upload is None or not self._feed_upload(self._active.upload):
                    break
            elif self._reader.ready:
                self._active = self._reader.ready.popleft()
                if self._active.upload is not None:
                    self._active.upload.taken = partial(self._upload_taken, self._active)
                    self._reader.restart_clock()
                self._task = asyncio.get_running_loop().create_task(self._run(self._active))
            elif self._reader.refusal is not None:
                self._refuse(self._reader.refusal)
                return
            elif self._held:
                self._held = self._reader.feed(self._held)
            else:
                break
        if len(self._held) > _HELD_BYTES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _feed_upload(self, upload: "BodyStream") -> bool:
        """Parse some of what was received for a body that is read while it arrives; whether there may be more to do."""
        if upload.is_whole or upload.is_full or not self._held or self._reader.refusal is not None:
            return False
        self._held = self._reader.feed(self._held)
        if self._reader.refusal is not None and not upload.is_whole:
            upload.fail(self._reader.refusal)
        return True

    def _upload_taken(self, request: HTTPRequest, size: int) -> None:
        self._server.bodies.remove(request.payer, size)
        self._go_on()

    def expect_continue(self) -> None:
        """Tell a client that waits for it to send the body (RFC 9110 10.1.1)."""
        if self._active is None and not self._reader.ready:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Answering

    async def _run(self, request: HTTPRequest) -> None:
        response: Response | None = None
        request.body = bytes(request.body)
        try:
            if request.refusal is not None:
                raise request.refusal
            response = await self._server.app.handle(request)
        except RequestError as error:
            response = self._failed(request, error)
        except asyncio.CancelledError:
            request.note = request.note or "client left"
            self._transport.abort()
            raise
        except Exception:
            log.exception("request %s failed", request.id)
            # Of a bug of ours a client sees nothing but the request id.
            message = "The server failed to answer this request. Quote the x-request-id header when you report it."
            response = self._failed(request, HTTPError("internal_error", message))
        finally:
            self._server.release_body(request)
            if request.upload is not None and not request.upload.is_whole:
                request.keep_alive = False  # nobody reads the rest
            if response is not None:
                self.respond(request, response)
            self._task = self._active = None
            self._server.app.finished(request, request.status)
        if not request.keep_alive or self._server.draining or self._transport.is_closing():
            self._close_gently()
            return
        self._reader.since = self._server.now
        self._go_on()

    def _failed(self, request: HTTPRequest, error: RequestError) -> Response | None:
        """The answer that says `error`; None where it became the last event of a stream."""
        if not request.status:
            return self._server.app.error_response(error, request)
        request.note = request.note or (error.code or "")
        if error.status == 408 or isinstance(error, HTTPError):
            request.keep_alive = False  # else it is whole, and the client may have sent its next request already
        request.send_events(self._server.app.error_event(error, request), is_last=True)
        return None

    def head(self, request: HTTPRequest | None, status: int, headers: list[tuple[str, str]]) -> bytes:
        """Status line and headers; adds date, x-request-id and connection."""
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
        headers = list(response.headers)
        # Of a 304 it would be the length of the body that is not sent (RFC 9110 8.6); a HEAD's may say that itself.
        if response.status != 304 and "content-length" not in dict(headers):
            headers.append(("content-length", str(len(response.body))))
        body = b"" if request is not None and request.method == "HEAD" else response.body
        self.write(self.head(request, response.status, headers) + body)

    def _refuse(self, refusal: RequestError) -> None:
        """Answer a request that will not be handled; nothing more is read from this connection."""
        request, self._reader.request = self._reader.request, None
        if request is not None:
            request.keep_alive = False
        self.respond(request, self._server.app.error_response(refusal, request))
        self._server.release_body(request)
        self._server.app.finished(request, refusal.status)
        if request is None:
            log.info("refused a request from %s: %s %s", self.client, refusal.status, refusal.code)
        self._close_gently()

    def _close_gently(self) -> None:
        """Flush and close our side, then drop what still arrives: an immediate close would reset the connection and
        could take the answer with it."""
        if self._transport.is_closing():
            return
        self._lingers_since, self._held = self._server.now, b""
        self._transport.resume_reading()
        try:
            self._transport.write_eof()
        except OSError:
            self._transport.abort()

    # Called by the server

    def abandon(self) -> None:
        """Drop the connection now."""
        self._transport.abort()

    def close_if_idle(self) -> None:
        if self._active is None and self._lingers_since is None and self._reader.phase == IDLE:
            self._close_gently()

    @property
    def busy(self) -> bool:
        return self._active is not None

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def check_deadlines(self, now: float) -> None:
        limits = self._limits
        if self.is_behind and now - self._paused_at > limits.write_stall_s:
            log.info("dropped a client that has not read for %d s", limits.write_stall_s)
            self.abandon()
        elif self._active is not None:
            since = self._active.last_write
            if since is not None and now - since >= limits.comment_s and self._active.comment:
                # A line that clients ignore shows proxies and the kernel that the connection is alive.
                self._active.send_events(self._active.comment)
            self._check_upload(self._active.upload, now)
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

    def _check_upload(self, upload: "BodyStream | None", now: float) -> None:
        if upload is None or upload.is_whole:
            return
        if upload.is_full:
            self._reader.restart_clock()
            return
        self._reader.refuse_if_slow(now)
        if self._reader.refusal is not None:
            upload.fail(self._reader.refusal)


class Server:
    """Listeners, connections, the timer. draining: connections close after their answer. bodies: those that are
    held."""

    def __init__(self, app: Application, limits: Limits | None = None):
        self.app = app
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.now = time.monotonic()
        self.date = time.strftime(_DATE, time.gmtime())
        self.bodies = Bodies(self.limits.all_bodies_bytes)
        self.draining = False
        self._listeners: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections of a bound socket, backlog included."""
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_server(lambda: Connection(self), sock=sock, backlog=2048))
        if self._timer is None:
            self._tick()

    def _tick(self) -> None:
        self.now = time.monotonic()
        self.date = time.strftime(_DATE, time.gmtime())
        for connection in list(self.connections):
            connection.check_deadlines(self.now)
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def release_body(self, request: HTTPRequest | None) -> None:
        """The body of a request is needed no more."""
        if request is not None:
            streamed = 0 if request.upload is None else request.upload.drop()
            self.bodies.remove(request.payer, len(request.body) + streamed)
            request.body = b""

    def stop_listening(self) -> None:
        """Close the listeners and the idle connections; running requests go on, their connections close after."""
        self.draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    def close(self) -> None:
        self.stop_listening()
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.connections):
            connection.abandon()
