"""Streamable HTTP to an MCP server: a POST for each message, whose answer is JSON or a stream of events.

An exchange has a thread of its own, in which the standard library's client waits: a server that hangs holds nobody up,
and TLS is there for servers elsewhere that the operator allows."""

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from zse.errors import one_line
from zse.server.mcp.config import McpServerConfig
from zse.server.mcp.session import MAX_MESSAGE_BYTES, MAX_UNASKED, McpError, McpSession

CONNECT_S = 10.0
SESSION = "Mcp-Session-Id"
_STREAM_BYTES = 4 * MAX_MESSAGE_BYTES  # of one answer that is a stream


class HttpTransport:
    """The endpoint of `config`."""

    def __init__(self, config: McpServerConfig, session: McpSession):
        self._config, self._session = config, session
        self._id = ""  # of the session, as the server gave it
        self._running: dict[int, _Exchange] = {}  # by id of the request

    async def start(self) -> None:
        """A connection is made with the first message."""

    async def send(self, message: dict) -> None:
        exchange = _Exchange(self._config, self._headers(), message, asyncio.get_running_loop(), self._session.receive)
        id = message.get("id") if "method" in message else None
        if id is None:
            await self._ended(exchange)
            return
        self._running[id] = exchange
        try:
            await self._ended(exchange)
            if message["method"] == "initialize":
                self._id = exchange.session_id
            self._session.fail(id, "it ended its answer before the result")
        finally:
            self._running.pop(id, None)

    async def _ended(self, exchange: "_Exchange") -> None:
        threading.Thread(target=exchange.run, name=f"mcp {self._config.label}", daemon=True).start()
        try:
            error = await asyncio.shield(exchange.done)
        except asyncio.CancelledError:
            exchange.stop()
            raise
        if exchange.status == 404 and self._id:
            self._session.end("it has forgotten the session")
        if error:
            raise McpError(error)

    def _headers(self) -> dict[str, str]:
        own = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        own |= {SESSION: self._id} if self._id else {}
        own |= {"MCP-Protocol-Version": self._session.protocol} if self._session.protocol else {}
        return self._config.headers | own | {"Connection": "close"}

    def abandon(self, id: int) -> None:
        exchange = self._running.pop(id, None)
        if exchange is not None:
            exchange.stop()

    async def close(self) -> None:
        self._session.end("it was stopped")
        for id in list(self._running):
            self.abandon(id)
        if self._id:
            exchange = _Exchange(self._config, self._headers(), None, asyncio.get_running_loop(), lambda message: None)
            with contextlib.suppress(McpError, TimeoutError):
                async with asyncio.timeout(1):
                    await self._ended(exchange)


class _Exchange:
    """One request and its answer, in a thread. message None: DELETE, the session's end. done: "" or what went wrong.
    receive: is given messages on the loop."""

    def __init__(
        self,
        config: McpServerConfig,
        headers: dict[str, str],
        message: dict | None,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[Any], None],
    ):
        self._config, self._headers, self._message, self._loop = config, headers, message, loop
        self._receive, self._is_stopped = receive, False
        self._socket: socket.socket | None = None
        self.done: asyncio.Future[str] = loop.create_future()
        self.status, self.session_id, self._num_messages = 0, "", 0

    def stop(self) -> None:
        """From the loop: the thread ends soon."""
        self._is_stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        error = ""
        try:
            self._exchange()
        except McpError as found:
            error = str(found)
        except (OSError, http.client.HTTPException, ValueError) as found:
            error = f"HTTP failed: {one_line(found) or type(found).__name__}"
        except Exception as found:  # nothing may leave a waiter behind
            error = f"HTTP failed: {type(found).__name__}"
        with contextlib.suppress(RuntimeError):  # the loop is gone with the server
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: str) -> None:
        if not self.done.done():
            self.done.set_result(error)

    def _exchange(self) -> None:
        parts = urlsplit(self._config.url)
        host, timeout_s = parts.hostname or "", CONNECT_S
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        try:
            connection.connect()
            assert connection.sock is not None
            self._socket = connection.sock
            address = connection.sock.getpeername()[0]
            if not self._config.allow_remote and not ipaddress.ip_address(address).is_loopback:
                raise McpError(f"{host} is not this machine")
            connection.sock.settimeout(self._config.timeout_s + CONNECT_S)
            if self._is_stopped:
                return
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            if self._message is None:
                connection.request("DELETE", path, headers=self._headers)
                connection.getresponse()
                return
            connection.request("POST", path, msgspec.json.encode(self._message), self._headers)
            self._read(connection.getresponse())
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        if response.status in (202, 204):
            return
        kind = (response.headers.get_content_type() or "").lower()
        if response.status != 200:
            raise McpError(f"it answered HTTP {response.status}")
        given = response.headers.get(SESSION, "")
        if given.isascii() and given.isprintable() and len(given) <= 1024:
            self.session_id = given
        if kind == "application/json":
            data = response.read(MAX_MESSAGE_BYTES + 1)
            if data.strip() or "id" in (self._message or {}):
                self._deliver(data)
        elif kind == "text/event-stream":
            self._read_events(response)
        elif "id" in (self._message or {}):
            raise McpError(f"it answered {one_line(kind)[:64]}, not JSON or events")

    def _read_events(self, response: http.client.HTTPResponse) -> None:
        data, size, total = [], 0, 0
        while not self._is_stopped:
            line = response.readline(MAX_MESSAGE_BYTES + 1)
            size, total = size + len(line), total + len(line)
            if size > MAX_MESSAGE_BYTES or total > _STREAM_BYTES:
                raise McpError(f"it sent more than {MAX_MESSAGE_BYTES if size > MAX_MESSAGE_BYTES else total} bytes")
            text = line.rstrip(b"\r\n")
            if text.startswith(b"data:"):
                data.append(text[5:].removeprefix(b" "))
            elif not text:
                if data and self._deliver(b"\n".join(data)):
                    return
                data, size = [], 0
            if not line:
                return

    def _deliver(self, data: bytes) -> bool:
        """Give a message to the session; whether it is the answer."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise McpError(f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        self._num_messages += 1
        if self._num_messages > MAX_UNASKED:
            raise McpError(f"it sent more than {MAX_UNASKED} messages before the answer")
        try:
            message = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise McpError("it sent what is no JSON") from None
        self._loop.call_soon_threadsafe(self._receive, message)
        wanted = (self._message or {}).get("id")
        found = message if isinstance(message, list) else [message]
        return any(isinstance(one, dict) and one.get("id") == wanted and "method" not in one for one in found)
