"""The MCP servers of a file, while this server runs: started when they are first needed, and again when they have died."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from zse.engine.client import shutting_down_error
from zse.errors import ConfigError
from zse.server.mcp import http, stdio
from zse.server.mcp.config import EVERY, McpServerConfig, read_file
from zse.server.mcp.results import MAX_PAGES, MAX_TOOLS, CallResult, McpTool, bounded, read_result, read_tools
from zse.server.mcp.session import McpError, McpFailure, McpSession

log = logging.getLogger("zse.server")

START_S = 30.0  # from the program's start to its list of tools
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # before the next start of one that failed twice
CALLS_AT_ONCE = 8  # of one server; others wait, within their time
CALLS_OF_TENANT = 4  # of one server; more are refused
ALIVE_S = 2.0  # for a process to answer a ping when a call was given up; else it is ended
FRESH_S = 60.0  # a list over HTTP is asked for again after so long: changes are told on the pipe only


class McpServer:
    """One server and its connection. clock: monotonic seconds."""

    def __init__(self, config: McpServerConfig, clock: Callable[[], float] = time.monotonic):
        self.config, self._clock = config, clock
        self._session: McpSession | None = None
        self._connecting: asyncio.Task[dict[str, McpTool]] | None = None
        self._tools: dict[str, McpTool] | None = None  # None: they have to be asked for
        self._listed_at, self._failures, self._not_before = 0.0, 0, 0.0
        self.error = ""  # why it does not run, after a failure
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._checking: asyncio.Task | None = None

    @property
    def state(self) -> str:
        """For lists: stopped, running or failed."""
        return (
            "running" if self._session is not None and not self._session.lost else "failed" if self.error else "stopped"
        )

    def may_run(self, name: str) -> bool:
        """Whether the operator lets the tool run without a question."""
        return name in self.config.allow or EVERY in self.config.allow

    async def tools(self) -> dict[str, McpTool]:
        """By name, without those that are denied; the server is started if it does not run. Raises McpError."""
        if self._session is not None and self._session.lost:
            await self._drop(self._session.lost)
        is_old = bool(self.config.url) and self._clock() - self._listed_at > FRESH_S
        if self._session is not None and self._tools is not None and not is_old:
            return self._tools
        if self._connecting is None or self._connecting.done():
            if self._session is None and self._clock() < self._not_before:
                wait_s = self._not_before - self._clock()
                raise McpError(f"{self.config.label}: {self.error}; it is tried again in {wait_s:.0f} s")
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # looked at
        return await asyncio.shield(self._connecting)  # others may wait for it when this caller leaves

    async def _connect(self) -> dict[str, McpTool]:
        try:
            async with asyncio.timeout(START_S):
                if self._session is None:
                    kind = http.HttpTransport if self.config.url else stdio.StdioTransport
                    self._session = McpSession(lambda session: kind(self.config, session), self._forget_tools)
                    await self._session.open(START_S)
                self._tools = await self._list(self._session)
        except (McpError, TimeoutError) as error:
            reason = str(error) or f"it was not ready within {START_S:g} s"
            await self._drop(reason)
            raise McpError(f"{self.config.label}: {reason}") from None
        except BaseException:
            await self._drop("it was stopped")
            raise
        self._listed_at, self.error = self._clock(), ""
        return self._tools

    async def _list(self, session: McpSession) -> dict[str, McpTool]:
        listed: list = []
        cursors: set[str] = set()
        asked: dict = {}
        for _ in range(MAX_PAGES):
            page = await session.request("tools/list", asked, START_S)
            entries, cursor = page.get("tools"), page.get("nextCursor")
            if not isinstance(entries, list):
                raise McpError("tools/list: the answer has no tools")
            listed += entries
            if not isinstance(cursor, str) or not cursor or cursor in cursors or len(listed) >= MAX_TOOLS:
                break
            cursors.add(cursor)
            asked = {"cursor": cursor}
        found, left = read_tools(self.config.label, listed[:MAX_TOOLS])
        for line in left[:8]:
            log.warning("mcp %s: a tool is left out: %s", self.config.label, line)
        denied = self.config.deny
        return {name: tool for name, tool in found.items() if name not in denied and EVERY not in denied}

    def _forget_tools(self) -> None:
        self._tools = None

    async def _drop(self, reason: str) -> None:
        """The connection is over because something failed: the next one waits for longer each time."""
        session, self._session, self._tools, self.error = self._session, None, None, reason
        # Once at once: a crash is often the request's.
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1)) if self._failures else 0.0
        self._failures = min(self._failures + 1, 16)
        self._not_before = self._clock() + pause_s
        if session is not None:
            log.warning("mcp %s: %s", self.config.label, reason)
            await session.transport.close()

    async def call(self, name: str, arguments: dict, most_s: float) -> CallResult:
        """The tool's answer; what fails is a result too, with is_error. most_s: of its time at most."""
        timeout_s = min(self.config.timeout_s, most_s)
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                if self._checking is not None:
                    await asyncio.shield(self._checking)
                if name not in await self.tools():
                    raise McpError(f"{self.config.label} has no tool {name!r}")
                result = await self._ask(name, arguments, timeout_s)
            found = read_result(result, self.config.max_result_bytes)
        except TimeoutError:
            return CallResult(f"no answer within {timeout_s:g} s", is_error=True)
        except McpError as error:
            return bounded(str(error), self.config.max_result_bytes, is_error=True)
        self._failures = 0
        return found

    async def _ask(self, name: str, arguments: dict, timeout_s: float) -> dict:
        """The result as the server gives it. A process that is silent once a call was given up is ended: calls that come
        would wait behind that one."""
        session, is_over = self._session, False
        assert session is not None
        try:
            result = await session.request("tools/call", {"name": name, "arguments": arguments}, timeout_s)
            is_over = True
            return result
        except McpFailure:
            is_over = True  # the server's own words
            raise
        finally:
            if not is_over and self.config.command and not session.lost and self._checking is None:
                self._checking = asyncio.get_running_loop().create_task(self._check(session))

    async def _check(self, session: McpSession) -> None:
        try:
            await session.request("ping", {}, ALIVE_S)
        except McpError:
            session.end(f"it was silent for {ALIVE_S:g} s after a call that was given up")
            await session.transport.close()
        finally:
            self._checking = None

    async def close(self) -> None:
        """Its process is gone when this returns."""
        if self._checking is not None:
            self._checking.cancel()
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.transport.close()


class McpServers:
    """All of a file; none is started yet. by_label: in its order. counts: calls by (server, how they ended: ok, error).
    Raises ConfigError."""

    def __init__(self, path: str):
        self._path = path
        self.by_label = {config.label: McpServer(config) for config in read_file(path)}
        self.counts: Counter[tuple[str, str]] = Counter()
        self._running: Counter[tuple[str, str]] = Counter()  # (server, tenant) → calls
        self._closing: set[asyncio.Task] = set()
        self._calls: set[asyncio.Task] = set()
        self._is_ending = False

    def read_again(self) -> None:
        """SIGHUP: take the file as it is now. A server whose lines are the same goes on; calls of others end. A file that
        is wrong changes nothing, and the log says why."""
        try:
            configs = read_file(self._path)
        except ConfigError as error:
            log.error("the MCP servers stay as they were: %s", error)
            return
        before = self.by_label
        kept = {label: server for label, server in before.items() if server.config in configs}
        self.by_label = {config.label: kept.get(config.label) or McpServer(config) for config in configs}
        for label, server in before.items():
            if label not in kept:
                task = asyncio.get_running_loop().create_task(server.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        log.warning("read %s again: %s", self._path, ", ".join(self.by_label) or "no MCP server")

    async def call(self, tool: McpTool, arguments: dict, tenant: str, most_s: float = float("inf")) -> CallResult:
        """Call a tool for a tenant; a line of the log says so, without arguments and result. Raises RequestError
        shutting_down."""
        server, began, is_error = self.by_label.get(tool.label), time.monotonic(), True
        place = tool.label, tenant
        self._running[place] += 1
        try:
            if server is None:
                return CallResult(f"the server {tool.label} is there no more", is_error=True)
            if self._running[place] > CALLS_OF_TENANT:
                return CallResult(f"{tool.label} has {CALLS_OF_TENANT} calls of yours already at once", is_error=True)
            task = asyncio.create_task(server.call(tool.name, arguments, most_s))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            result = await task
            is_error = result.is_error
            return result
        except asyncio.CancelledError:
            if self._is_ending:
                raise shutting_down_error() from None
            raise
        finally:  # also when who asked has left
            self._running[place] -= 1
            if not self._running[place]:
                del self._running[place]
            self.counts[tool.label, "error" if is_error else "ok"] += 1
            took_ms = 1000 * (time.monotonic() - began)
            outcome = "failed" if is_error else "ok"
            log.info("mcp %s: %s for tenant %s: %s, %.0f ms", tool.label, tool.name, tenant or "-", outcome, took_ms)

    def end_calls(self) -> None:
        """Those that run fail with shutting_down."""
        self._is_ending = True
        for task in self._calls:
            task.cancel()

    async def close(self) -> None:
        """All processes are gone when this returns."""
        await asyncio.gather(*(server.close() for server in self.by_label.values()), *self._closing)
