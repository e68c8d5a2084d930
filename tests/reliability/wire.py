"""Clients that ask any OpenAI-compatible server over raw sockets, well and badly: whole requests, mutants of them, half-sent ones,
clients that leave. They know nothing of what is inside the server."""

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import mutate

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "red dog runs over the old bridge and sees a small blue boat near our stone house while rain falls on green hills".split()
CONNECT_S = 5.0


class Answer(NamedTuple):
    """status: 0 when none came. first_s: until the first event of a stream, or the head; end_s: until the last byte. how: "whole",
    "cut" (no end of the body), "late" (nothing more within the time), "refused" (no connection)."""

    status: int
    first_s: float
    end_s: float
    body: bytes
    how: str

    @property
    def error(self) -> dict | None:
        """The error of OpenAI's form, or None."""
        try:
            error = json.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError):
            return None
        return error if isinstance(error, dict) and isinstance(error.get("message"), str) else None


def words(draw: random.Random, count: int) -> str:
    """About so many tokens that no cache has seen."""
    return " ".join(draw.choice(WORDS) for _ in range(count))


def request(path: str, body, headers: str = "", method: str = "POST") -> bytes:
    """Bytes of a request on a connection of its own; body: None, bytes, or what becomes JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if body is not None else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}{sent}\r\n".encode() + data


def completion(prompt: str, tokens: int, **fields) -> bytes:
    return request(TEXT, {"model": "fake", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields})


async def ask(port: int, data: bytes, timeout: float) -> Answer:
    """Send, and read one answer to its end. Never raises for what a server does."""
    start, first, got, how = time.monotonic(), 0.0, b"", "late"
    writer = None
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                while piece := await reader.read(1 << 16):
                    got += piece
                    head, ended, body = got.partition(b"\r\n\r\n")
                    if ended and not first and (b"data: {" in body or b"text/event-stream" not in head.lower()):
                        first = time.monotonic() - start
                    if ended and is_whole(head, body):
                        how = "whole"
                        break
                else:
                    how = "cut" if got else "closed"
            except ConnectionError:
                how = "cut" if got else "closed" if writer else "refused"
            except OSError:
                how = "refused"
    if writer is not None:
        writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    status = int(head[9:12]) if head[:5] == b"HTTP/" and head[9:12].isdigit() else 0
    return Answer(status, first, time.monotonic() - start, body, how)


def is_whole(head: bytes, body: bytes) -> bool:
    """Whether an answer's body has ended, by its length or its last chunk."""
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        return body.endswith(b"0\r\n\r\n")
    if b"content-length:" not in lower:
        return b" 204 " in head[:16]
    return len(body) >= int(lower.partition(b"content-length:")[2].partition(b"\r\n")[0])


async def closed_loop(
    port: int, make: Callable[[], bytes], clients: int, seconds: float, timeout: float = 60.0
) -> list[Answer]:
    """So many clients that ask again when they were answered."""
    found: list[Answer] = []
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            found.append(await ask(port, make(), timeout))

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def open_loop(port: int, make: Callable[[], bytes], rate: float, seconds: float, timeout: float) -> list[Answer]:
    """Requests at a rate, whatever becomes of those before."""
    start, tasks = time.monotonic(), []
    for number in range(int(rate * seconds)):
        if (wait := start + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(ask(port, make(), timeout)))
    return await asyncio.gather(*tasks)


async def periodic(port: int, make: Callable[[], bytes], pace: float, timeout: float, found: list[Answer]) -> None:
    """One request each `pace` seconds, until cancelled; the answers of those that were sent are awaited."""
    tasks = []

    async def one() -> None:
        found.append(await ask(port, make(), timeout))

    try:
        while True:
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(pace)
    finally:
        await asyncio.gather(*tasks)


# -- requests that are none


def mutants(seeds: list[bytes], count: int, seed: int) -> list[bytes]:
    draw = random.Random(seed)
    return [mutate.mutate(draw, draw.choice(seeds), "") for _ in range(count)]


async def send_mutants(port: int, sent: list[bytes], at_once: int, patience: float) -> tuple[Counter, list[bytes]]:
    """What became of each: its status; "closed" without an answer; "waits" for more for `patience` seconds, and is left then;
    "refused" where no connection could be made. The second: those that were answered by a 5xx."""
    verdicts, wrong, turns = Counter(), [], iter(sent)

    async def client() -> None:
        for data in turns:
            answer = await ask(port, data, patience)
            verdict = str(answer.status) if answer.status else "waits" if answer.how == "late" else answer.how
            verdicts[verdict] += 1
            if answer.status >= 500:
                wrong.append(data)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return verdicts, wrong


class Loris:
    """Connections that send a byte every five seconds each, half of them within their head, half within their body, and open again
    when they are closed."""

    def __init__(self, port: int, sockets: int):
        self._port, self._sockets = port, sockets
        self.num_open = self.num_closed = 0
        ask = request(TEXT, {"model": "fake", "prompt": "hello"})
        self._heads = (ask[: ask.index(b"\r\n\r\n")] + b"\r\nX-Slow: ", ask[: ask.index(b"\r\n\r\n") + 4])

    async def one(self, number: int) -> None:
        await asyncio.sleep(number / self._sockets)
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                await asyncio.sleep(1)
                continue
            self.num_open += 1
            reply = asyncio.ensure_future(reader.read(64))
            with suppress(ConnectionError):
                writer.write(self._heads[number % 2])
                while not reply.done():
                    await asyncio.wait([reply], timeout=5)
                    if not reply.done():
                        writer.write(b"x")
                await reply
            self.num_open -= 1
            self.num_closed += 1
            writer.close()

    async def __aenter__(self) -> "Loris":
        self._tasks = [asyncio.create_task(self.one(number)) for number in range(self._sockets)]
        end = time.monotonic() + 20
        while self.num_open < self._sockets and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *error) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def connect(port: int, data: bytes, receive_buffer: int = 0) -> socket.socket:
    """A client that has sent its request and reads nothing yet."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(CONNECT_S)
    sock.connect(("127.0.0.1", port))
    sock.sendall(data)
    return sock


def leave(sock: socket.socket, way: str) -> None:
    """fin: as a client whose process ends; rst: as one whose machine does."""
    if way == "rst":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
