"""Servers of this project and of others as processes that are looked at from the outside: answers, processor time, memory."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import wire

from zse.bench import process as processes

ROWS, CONTEXT, THREADS = 8, 2048, 2
START_S = 60.0
MEMORY_LIMIT = 4 << 30  # bytes of its own that a server may take until it is ready


class Peer(NamedTuple):
    """command(model, port, key): how it is started. ready: the path that answers 200 when it is. grammar(source): the field of a
    request that asks for a text of a GBNF grammar."""

    name: str
    command: Callable[[str, int, str], list[str]]
    ready: str
    grammar: Callable[[str], dict]


def zse(*options: str) -> Peer:
    def command(model: str, port: int, key: str) -> list[str]:
        words = (
            f"-m zse serve {shlex.quote(model)} --model-name fake --port {port} --threads {THREADS} --max-rows {ROWS} "
        )
        words += f"--max-context {CONTEXT} --num-pages {ROWS * CONTEXT // 16} --log-level error"
        return [sys.executable, *shlex.split(words), *(["--api-key", key] if key else []), *options]

    return Peer("zse", command, "/health/ready", lambda source: {"structured_outputs": {"grammar": source}})


def llama(path: str, *options: str) -> Peer:
    """llama.cpp's server, without the cache of prompts in host memory: it would count as growth."""

    def command(model: str, port: int, key: str) -> list[str]:
        words = (
            f"-m {shlex.quote(model)} -a fake --port {port} -t {THREADS} -tb {THREADS} -np {ROWS} -c {ROWS * CONTEXT} "
        )
        words += "--jinja --no-webui --cache-ram 0"
        return [path, *shlex.split(words), *(["--api-key", key] if key else []), *options]

    return Peer("llama-server", command, "/health", lambda source: {"grammar": source})


class NoStart(Exception):
    """Why a server was not ready."""


class Running:
    """A server and the processes below it, ended when the block is left. Raises NoStart."""

    def __init__(self, peer: Peer, model: str, key: str = "", start_s: float = START_S):
        self.peer, self._model, self._key, self._start_s = peer, model, key, start_s
        self.port = processes.free_port()

    def __enter__(self) -> "Running":
        self._log = tempfile.TemporaryFile()
        command = self.peer.command(self._model, self.port, self._key)
        self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        end = time.monotonic() + self._start_s
        while self.popen.poll() is None:
            if self.ask(wire.request(self.peer.ready, None, method="GET"), 2).status == 200:
                return
            if (held := self.memory()) > MEMORY_LIMIT:
                raise NoStart(f"{held / 2**30:.1f} GiB and not ready")
            if time.monotonic() > end:
                raise NoStart(f"not ready in {self._start_s:.0f} s, {held >> 20} MiB")
            time.sleep(0.05)
        raise NoStart(f"ended with {self.popen.returncode}: {self.last_line()}")

    def __exit__(self, *error) -> None:
        for pid in reversed(self.tree()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        self._log.close()

    def last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line[:200] for line in reversed(lines) if line.strip()), "")

    def tree(self) -> list[int]:
        """The server's processes."""
        found = [self.popen.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
        return found

    def memory(self) -> int:
        """Bytes that the processes hold for themselves, not of files and libraries."""
        total = 0
        for pid in self.tree():
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                total += 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
        return total

    def descriptors(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.tree())

    def busy_s(self) -> float:
        """Seconds of processor time of the threads that there are."""
        total = 0
        for pid in self.tree():
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(OSError):
                    total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def until_idle(self, limit: float) -> float:
        """Seconds until the server computes for less than a tenth of 0.2 s; `limit` where it goes on."""
        start = time.monotonic()
        while (since := time.monotonic() - start) < limit:
            before = self.busy_s()
            time.sleep(0.2)
            if self.busy_s() - before < 0.02:
                return since
        return limit

    def ask(self, data: bytes, timeout: float = 30.0) -> wire.Answer:
        return asyncio.run(wire.ask(self.port, data, timeout))

    def state(self) -> str:
        """Whether it is there and generates."""
        if self.popen.poll() is not None:
            return f"dead ({self.popen.returncode})"
        return "answers" if self.ask(wire.completion("hello", 1)).status == 200 else "does not answer"
