"""An MCP server as a process of ours: a line of JSON-RPC each way; what it writes to stderr goes into the log."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from zse.errors import one_line
from zse.lazy import shutil
from zse.server.mcp.config import McpServerConfig
from zse.server.mcp.session import MAX_MESSAGE_BYTES, McpError, McpSession

log = logging.getLogger("zse.server")

LAUNCH = str(Path(__file__).with_name("launch.py"))
INHERITED = ("PATH", "HOME", "LANG")  # of the environment; the rest may hold secrets of others
OFF_LOOP_BYTES = 64 << 10  # longer lines are decoded in a thread
STOP_S = 1.0  # for a process that was asked to end
_LOG_LINES, _LOG_CHARACTERS = 60, 500  # of stderr: lines a minute, characters of a line


def environment_of(config: McpServerConfig) -> dict[str, str]:
    """What the process finds."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | config.env


def program_of(config: McpServerConfig) -> str | None:
    """The path of the server's program; None: there is none that this user can run."""
    return shutil.which(config.command[0], path=environment_of(config).get("PATH"))


class StdioTransport:
    """The process of `config`, in a group of its own; closing kills the group."""

    def __init__(self, config: McpServerConfig, session: McpSession):
        self._config, self._session = config, session
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task] = []

    async def start(self) -> None:
        environment, program = environment_of(self._config), program_of(self._config)
        name, *arguments = self._config.command
        if program is None:
            raise McpError(f"{one_line(name)} is no program that can be run")
        words = [sys.executable, "-I", "-S", LAUNCH, str(os.getpid()), os.path.abspath(program), *arguments]
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *words,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                cwd=self._config.cwd,
                limit=MAX_MESSAGE_BYTES,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise McpError(f"it cannot be started: {one_line(error)}") from None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read(self._process)), loop.create_task(self._log(self._process))]

    async def send(self, message: dict) -> None:
        if self._process is None or self._session.lost:
            raise McpError(self._session.lost or "it does not run")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            await asyncio.wait(self._tasks[:1], timeout=0.5)  # who reads its output says why, where it has ended
            raise McpError(self._session.lost or "it does not read any more") from None

    def abandon(self, id: int) -> None:
        pass

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        reason = "it closed its output"
        try:
            while line := await process.stdout.readline():
                if not line.strip():
                    continue
                try:
                    work = asyncio.to_thread(msgspec.json.decode, line) if len(line) > OFF_LOOP_BYTES else None
                    self._session.receive(msgspec.json.decode(line) if work is None else await work)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    self._session.unasked()  # many print what is meant for a log
                if self._session.lost:
                    break
        except ValueError:
            reason = f"it wrote a line of more than {MAX_MESSAGE_BYTES} bytes"
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):  # a process that ends closes its output first
                    await process.wait()
        if process.returncode is not None:
            reason = f"its process ended with code {process.returncode}"
        self._session.end(reason)
        self._kill(signal.SIGKILL)
        while await process.stdout.read(1 << 16):  # asyncio lets the pipe go at its end only
            pass

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        rest, begun, count = b"", time.monotonic(), 0
        while data := await process.stderr.read(4096):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > 4 * _LOG_CHARACTERS:
                lines, rest = [*lines, rest], b""
            now = time.monotonic()
            if now - begun > 60:
                if count > _LOG_LINES:
                    log.info("mcp %s: %d more lines were left out", self._config.label, count - _LOG_LINES)
                begun, count = now, 0
            for line in lines:
                count += 1
                if count <= _LOG_LINES and line.strip():
                    text = one_line(line.decode("utf-8", "replace").rstrip("\r"))
                    # From the first request on it may be what users said, which is in no log unasked.
                    level = logging.DEBUG if self._session.protocol else logging.INFO
                    log.log(level, "mcp %s: %s", self._config.label, text[:_LOG_CHARACTERS])

    def _kill(self, number: int) -> None:
        """The whole group, also what a wrapper has left behind."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def close(self) -> None:
        self._session.end("it was stopped")
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        if process is not None and process.returncode is None:
            self._kill(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        self._kill(signal.SIGKILL)
        if process is None:
            return
        await process.wait()
        # They end with the pipes, unless a process that has left the group holds one.
        _, left = await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in left:
            task.cancel()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            await process.stdin.wait_closed()
