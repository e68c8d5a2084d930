"""The listening side of the server: limits, open connections, and the one ticker that checks all deadlines."""

import asyncio
import logging
import socket
import time

import msgspec

from zse.errors import RequestError
from zse.server.connection import Connection
from zse.server.errors import APIError
from zse.server.exchange import Request, Response

log = logging.getLogger("zse.server")

TICK_S = 0.5


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


class Server:
    """Listeners, connections, the ticker. `app` decides: check_head(request) raises RequestError before the body is
    read, handle(request) answers, finished(request or None, status) counts, needs_key says whether connections count as unauthenticated until a key was seen."""

    def __init__(self, app, limits: Limits | None = None):
        self._app = app
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.now = time.monotonic()
        self.date = _http_date()
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
        self.date = _http_date()
        for connection in list(self.connections):
            connection.check_deadlines(self.now)
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def add(self, connection: Connection) -> APIError | None:
        """Register a new connection; returns the refusal when there are too many."""
        self.connections.add(connection)
        if len(self.connections) > self.limits.connections:
            return APIError("overloaded", "Too many connections.", close=True)
        if self._app.needs_key:
            same = sum(1 for other in self.connections if other.client == connection.client and not other.authenticated)
            if same > self.limits.unauthenticated_per_ip:
                return APIError("overloaded", "Too many connections without a key from this address.", close=True)
        return None

    def remove(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def check_head(self, request: Request) -> None:
        self._app.check_head(request)
        if request.headers.get("expect", "").lower() == "100-continue" and not request.http_10:
            request.connection.expect_continue()

    async def handle(self, request: Request) -> Response | None:
        return await self._app.handle(request)

    def finished(self, request: Request) -> None:
        self._app.finished(request, request.status)
        log.info(
            "%s %s %s %s %.0f ms %s",
            request.method,
            request.path,
            request.status or "-",
            request.note,
            (time.monotonic() - request.started) * 1000,
            request.id,
        )

    def refused(self, connection: Connection, request: Request | None, refusal: RequestError) -> None:
        if request is not None:
            self.finished(request)
        else:
            self._app.finished(None, refusal.status)
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


def _http_date() -> str:
    now = time.gmtime()
    day = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[now.tm_wday]
    month = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")[now.tm_mon - 1]
    return f"{day}, {now.tm_mday:02} {month} {now.tm_year} {now.tm_hour:02}:{now.tm_min:02}:{now.tm_sec:02} GMT"
