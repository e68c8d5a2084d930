"""Clients that leave: every state of a request × every way of leaving × streamed or not, drawn at random."""

import asyncio
import random
import socket
import struct
import time
from collections import Counter

from harness import request

TEXT = "/v1/completions"
STATES = ("before headers", "in body", "queued", "prefill", "first token", "mid", "last", "after DONE")
WAYS = ("fin", "rst", "half-close", "timeout")
# A client that is silent while the server owes it something is a client that waits; these it owes the server.
TIMEOUT_STATES = ("before headers", "in body", "mid", "after DONE")


def cells() -> list[tuple[str, str, bool]]:
    return [
        (state, way, stream)
        for state in STATES
        for way in WAYS
        for stream in (False, True)
        if way != "timeout" or state in TIMEOUT_STATES and (stream or state != "mid")
    ]


class Leaver:
    """Runs `count` clients, `at_once` at a time, against a Harness. sessions: client's port → [when it came, when it
    left or None] of each client that had it (time.monotonic()). outcomes: cell → clients that got there."""

    def __init__(self, port: int, count: int, seed: int, at_once: int = 24):
        self._port, self._count, self._at_once = port, count, at_once
        self._draw = random.Random(seed)
        self.sessions: dict[int, list[list[float | None]]] = {}
        self.outcomes: Counter = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        plan = cells()
        # A timeout takes a second: one in 40 clients, and each cell once at least.
        rare = [cell for cell in plan if cell[1] == "timeout"]
        often = [cell for cell in plan if cell[1] != "timeout"]
        jobs = [
            *plan,
            *(
                self._draw.choice(rare if self._draw.random() < 0.025 else often)
                for _ in range(self._count - len(plan))
            ),
        ]
        self._draw.shuffle(jobs)
        jobs = iter(jobs)

        async def worker() -> None:
            for cell in jobs:
                try:
                    await asyncio.wait_for(self._one(*cell), 20)
                except TimeoutError:
                    self.problems.append(f"{cell}: the server did not close")

        await asyncio.gather(*(worker() for _ in range(self._at_once)))

    async def _one(self, state: str, way: str, stream: bool) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        if way == "timeout":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await loop.sock_connect(sock, ("127.0.0.1", self._port))
            session = [time.monotonic(), None]
            self.sessions.setdefault(sock.getsockname()[1], []).append(session)
            reached = await self._reach(sock, state, way, stream)
            if reached:
                self.outcomes[state, way, stream] += 1
            if way == "rst":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if way in ("fin", "rst"):
                session[1] = time.monotonic()
                sock.close()
            elif way == "half-close":
                session[1] = time.monotonic()
                sock.shutdown(socket.SHUT_WR)
                await self._read_to_the_end(sock)
            elif state == "mid":
                await asyncio.sleep(1.5)  # reads nothing: dropped after write_stall_s
                await self._read_to_the_end(sock)
            else:
                await self._read_to_the_end(sock)
        except ConnectionError:
            pass
        finally:
            sock.close()

    def when_left(self, port: int, now: float) -> float | None:
        """When the client left that had this port at a time; None if it has not."""
        session = max((session for session in self.sessions.get(port, ()) if session[0] <= now), default=(0, None))
        return session[1]

    async def _read_to_the_end(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while await loop.sock_recv(sock, 1 << 16):
            pass

    async def _reach(self, sock: socket.socket, state: str, way: str, stream: bool) -> bool:
        """Bring a request into the state; False when it was over sooner."""
        loop, draw = asyncio.get_running_loop(), self._draw
        length = 400 if state == "prefill" else draw.randrange(4, 40)
        fields = {
            "prompt": f"{draw.randrange(1 << 60):020d}" + "x" * length,
            "stream": stream,
            "max_tokens": draw.randrange(2, 12) if state in ("last", "after DONE") else 60,
            "ignore_eos": True,
        }
        if draw.random() < 0.2:
            fields["n"] = 3
        if way == "timeout" and state == "mid":
            fields |= {"n": 4, "max_tokens": 1500}
        data = request("POST", TEXT, fields)
        head = data.index(b"\r\n\r\n") + 4
        if state == "before headers":
            await loop.sock_sendall(sock, data[: draw.randrange(head)])
            return True
        if state == "in body":
            await loop.sock_sendall(sock, data[: draw.randrange(head, len(data))])
            return True
        await loop.sock_sendall(sock, data)
        if state in ("queued", "prefill"):
            await asyncio.sleep(draw.random() * (0.003 if state == "queued" else 0.02))
            return True
        if not stream and state in ("first token", "mid"):
            await asyncio.sleep(draw.random() * 0.1)
            return True
        got = b""
        wanted = draw.randrange(2, 20)
        while True:
            piece = await loop.sock_recv(sock, 1 << 14)
            if not piece:
                return False
            got += piece
            if state == "first token" and b"data: " in got or state == "mid" and got.count(b"data: ") >= wanted:
                return b"[DONE]" not in got
            if state == "last" and (b'"finish_reason":"' in got or not stream):
                return True
            if state == "after DONE" and (b"[DONE]" in got if stream else b'"usage"' in got):
                return True
