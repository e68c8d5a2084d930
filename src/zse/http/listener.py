"""The listening side: what an application is, the limits, open connections, and the one timer that checks deadlines."""

import asyncio
import logging
import socket
import time
from typing import Any, Protocol

import msgspec

from zse.errors import RequestError
from zse.http.connection import Connection
from zse.http.exchange import HTTPError, HTTPRequest, Response

log = logging.getLogger("zse.server")

TICK_S = 0.5
_DATE = "%a, %d %b %Y %H:%M:%S GMT"


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


class Application(Protocol):
    """What answers. request_type: the class of its requests, HTTPRequest or one that adds what the application knows of them.
    needs_key: a connection counts against unauthenticated_per_ip until the application has set its `authenticated`."""

    @property
    def request_type(self) -> type[HTTPRequest]: ...

    @property
    def needs_key(self) -> bool: ...

    def check_head(self, request: Any) -> None:
        """Decides what can be decided before the body is read. Raises RequestError."""

    async def handle(self, request: Any) -> Response | None:
        """Answers; None: through an EventStream. Raises RequestError."""

    def error_response(self, error: RequestError) -> Response:
        """The answer that says `error`; its body is also the data of an event where a stream has begun."""

    def finished(self, request: Any | None, status: int) -> None:
        """An answer was given; status 0: the client left before it began. request None: nobody could read it."""


class Server:
    """Listeners, connections, the timer. draining: connections close after their answer. body_bytes: of all requests
    whose bodies are held."""

    def __init__(self, app: Application, limits: Limits | None = None):
        self.app = app
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.now = time.monotonic()
        self.date = time.strftime(_DATE, time.gmtime())
        self.body_bytes = 0
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

    def add(self, connection: Connection) -> HTTPError | None:
        """Register a new connection; returns the refusal when there are too many."""
        self.connections.add(connection)
        if len(self.connections) > self.limits.connections:
            return HTTPError("overloaded", "Too many connections.", close=True)
        if self.app.needs_key:
            same = sum(1 for other in self.connections if other.client == connection.client and not other.authenticated)
            if same > self.limits.unauthenticated_per_ip:
                return HTTPError("overloaded", "Too many connections without a key from this address.", close=True)
        return None

    def release_body(self, request: HTTPRequest | None) -> None:
        """The body of a request is needed no more."""
        if request is not None:
            self.body_bytes -= len(request.body)
            request.body = b""

    def finished(self, request: HTTPRequest) -> None:
        self.app.finished(request, request.status)
        log.info(
            "%s %s %s %s %.0f ms %s",
            request.method,
            request.path,
            request.status or "-",
            request.note,
            (time.monotonic() - request.started) * 1000,
            request.id,
        )

    def refused(self, connection: Connection, request: HTTPRequest | None, refusal: RequestError) -> None:
        if request is not None:
            self.finished(request)
        else:
            self.app.finished(None, refusal.status)
            log.info("refused a request from %s: %s %s", connection.client, refusal.status, refusal.code)

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
