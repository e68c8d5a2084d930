"""JSON-RPC with an MCP server: who waits for which answer, and what the server asks of its own accord."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from zse import __version__
from zse.errors import ZSEError, one_line

PROTOCOLS = "2025-06-18", "2025-03-26"  # the first is asked for
MAX_MESSAGE_BYTES = 4 << 20  # of one message; a longer one ends the connection
# Messages that answer nothing (notifications, pings, lines that are no JSON) within a minute; more end the connection.
MAX_UNASKED = 1000
MAX_BATCH = 64
_METHOD_NOT_FOUND = -32601
_MAX_REASON = 500  # characters of a server's own words in an error


class McpError(ZSEError):
    """What an MCP server did wrong, or what became of it: one line."""


class McpFailure(McpError):
    """An error that the server answered."""


def words_of(text: object) -> str:
    """What a server says, for a message: one line, bounded."""
    line = one_line(text)
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "…"


class McpSession:
    """One connection, from `initialize` to its end. transport: makes what has start() and send(message), which raise McpError,
    abandon(id): nobody waits for that answer, and close(): behind it nothing is left; it gives this what the server says.
    tools_changed(): the server says that its list has. lost: why it is over; "": it is not."""

    def __init__(self, transport: Callable[["McpSession"], Any], tools_changed: Callable[[], None]):
        self.transport, self._tools_changed = transport(self), tools_changed
        self._waiting: dict[int, asyncio.Future] = {}
        self._next_id, self.lost, self.protocol = 0, "", ""
        self._unasked: deque[float] = deque(maxlen=MAX_UNASKED)
        self._replies: set[asyncio.Task] = set()

    async def open(self, timeout_s: float) -> None:
        """Start the transport and agree on a protocol. Raises McpError."""
        async with asyncio.timeout(timeout_s):
            await self.transport.start()
            about = {"name": "zse", "version": __version__}
            asked = {"protocolVersion": PROTOCOLS[0], "capabilities": {}, "clientInfo": about}
            result = await self.request("initialize", asked, timeout_s)
            self.protocol = result.get("protocolVersion", "")
            if self.protocol not in PROTOCOLS:
                known = ", ".join(PROTOCOLS)
                raise McpError(f"it speaks protocol {words_of(self.protocol)!r}; this client knows {known}")
            await self.transport.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def request(self, method: str, params: dict, timeout_s: float) -> dict:
        """The result, an object. Raises McpError: an error of the server's, the connection's end, or the time's."""
        if self.lost:
            raise McpError(self.lost)
        self._next_id += 1
        id = self._next_id
        self._waiting[id] = asyncio.get_running_loop().create_future()
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                await self.transport.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
                answer = await self._waiting[id]
            is_answered = True
        except TimeoutError:
            raise McpError(f"no answer to {method} within {timeout_s:g} s") from None
        finally:
            future = self._waiting.pop(id)
            if future.done() and not future.cancelled():
                future.exception()  # looked at
            if not is_answered:
                self.transport.abandon(id)
                if not self.lost and method != "initialize":
                    given_up = {"requestId": id, "reason": "nobody waits any more"}
                    self._send_aside({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": given_up})
        if "error" in answer:
            error = answer["error"] if isinstance(answer["error"], dict) else {}
            raise McpFailure(f"{method}: {words_of(error.get('message', 'an error without words'))}")
        if not isinstance(answer.get("result"), dict):
            raise McpError(f"{method}: the answer has no result")
        return answer["result"]

    def _send_aside(self, message: dict) -> None:
        """Send without waiting; a failure is the connection's, which others see."""

        async def send() -> None:
            try:
                async with asyncio.timeout(5):
                    await self.transport.send(message)
            except (McpError, TimeoutError):
                pass

        task = asyncio.get_running_loop().create_task(send())
        self._replies.add(task)
        task.add_done_callback(self._replies.discard)

    # -- called by the transport

    def receive(self, message: Any) -> None:
        """A message of the server's, decoded."""
        for one in message[:MAX_BATCH] if isinstance(message, list) else [message]:  # 2025-03-26 has batches
            self._receive(one)

    def _receive(self, message: Any) -> None:
        if not isinstance(message, dict):
            return self.unasked()
        id, method = message.get("id"), message.get("method")
        future = self._waiting.get(id) if type(id) is int and method is None else None
        if future is not None:
            if not future.done():
                future.set_result(message)
            return
        self.unasked()
        if self.lost:
            return
        if method == "notifications/tools/list_changed":
            self._tools_changed()
        elif method is not None and type(id) in (int, str) and len(str(id)) <= 64:
            told: dict = {"result": {}}
            if method != "ping":  # roots, sampling, elicitation: not offered
                told = {"error": {"code": _METHOD_NOT_FOUND, "message": "this client does not have it"}}
            self._send_aside({"jsonrpc": "2.0", "id": id} | told)

    def unasked(self) -> None:
        """A message came that answers nothing."""
        now, times = time.monotonic(), self._unasked
        times.append(now)
        if len(times) == MAX_UNASKED and now - times[0] < 60:
            self.end(f"it sent {MAX_UNASKED} messages within a minute that nobody asked for")

    def fail(self, id: int, reason: str) -> None:
        """One request has failed; the connection goes on."""
        future = self._waiting.get(id)
        if future is not None and not future.done():
            future.set_exception(McpError(reason))

    def end(self, reason: str) -> None:
        """The connection is over; whoever waits learns why."""
        if not self.lost:
            self.lost = reason
            for id in list(self._waiting):
                self.fail(id, reason)
