"""A client of OpenAI-compatible servers that takes times: one streamed request on one connection, on asyncio's streams.

The clock starts before the connection is opened: that is what a user waits for.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from urllib.parse import urlsplit

from zse.errors import ConfigError, one_line

MAX_LINE_BYTES = 1 << 20  # of a header block or an event
_ERROR_BYTES = 2000  # of a refusal's body that are read


class AnswerError(Exception):
    """What a server answered instead of a whole stream. It fails its own request only."""


@dataclass(frozen=True)
class Target:
    """A server's base URL ("http://host:8000/v1") in parts. path: without a slash at its end. key: a bearer token."""

    host: str
    port: int
    path: str
    tls: bool = False
    key: str = ""

    @classmethod
    def of(cls, url: str, key: str = "") -> "Target":
        """ConfigError: a URL that is not http(s), or holds a password or a query."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {one_line(url)}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
            raise ConfigError(f"--url {one_line(url)} is not a URL such as http://127.0.0.1:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError("--url takes no password, query or fragment; a key goes into ZSE_API_KEY")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls, key)


@dataclass
class Outcome:
    """One request. sent_s, clocks_s: perf_counter when it was sent and when each piece of text came; tokens: as the
    server counted them, else the pieces; error: why it failed, else None."""

    sent_s: float
    clocks_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return 1000 * (self.clocks_s[0] - self.sent_s) if self.clocks_s else None

    @property
    def itl_ms(self) -> list[float]:
        """Between one piece of text and the next. A piece is a token, unless the server joins several."""
        return [1000 * (after - before) for before, after in pairwise(self.clocks_s)]

    @property
    def tpot_ms(self) -> float | None:
        """Per token after the first, however they were joined."""
        if self.tokens < 2 or len(self.clocks_s) < 2:
            return None
        return 1000 * (self.clocks_s[-1] - self.clocks_s[0]) / (self.tokens - 1)

    @property
    def e2e_ms(self) -> float:
        return 1000 * (self.done_s - self.sent_s)


async def stream(target: Target, route: str, body: dict, timeout_s: float, outcome: Outcome | None = None) -> Outcome:
    """Send a body with "stream": true and read its events to the end. Never raises for what a server does.
    outcome: filled in place of a new one, so that a cancelled request leaves its times."""
    outcome = outcome or Outcome(0.0)
    outcome.sent_s = perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await _read_events(target, route, body, outcome)
    except TimeoutError:
        outcome.error = f"no end within {timeout_s:g} s"
    except asyncio.IncompleteReadError:
        outcome.error = "the connection ended inside the answer"
    except (OSError, AnswerError, ValueError, asyncio.LimitOverrunError) as error:
        outcome.error = one_line(error) or type(error).__name__
    outcome.done_s = perf_counter()
    return outcome


async def _read_events(target: Target, route: str, body: dict, outcome: Outcome) -> None:
    ended = False
    async for data in _events(target, route, body):
        if data == b"[DONE]":
            ended = True
            break
        event = json.loads(data)
        now = perf_counter()
        if not isinstance(event, dict):
            raise AnswerError("an event is no JSON object")
        if event.get("error"):
            raise AnswerError(f"the server ended the stream: {_message(event)}")
        try:
            ended = _count(event, now, outcome) or ended
        except (AttributeError, TypeError):
            raise AnswerError(f"an event has another form than OpenAI's: {one_line(data[:100])}") from None
    if not ended:
        raise AnswerError("the stream ended without [DONE] or a finish_reason")
    outcome.tokens = outcome.tokens or len(outcome.clocks_s)
    if not outcome.clocks_s:
        raise AnswerError("the answer has no text")


def _count(event: dict, now: float, outcome: Outcome) -> bool:
    """Add an event to the outcome; whether it names a finish_reason. AttributeError, TypeError: not OpenAI's form."""
    usage = event.get("usage")
    if usage:
        outcome.tokens = int(usage.get("completion_tokens") or 0)
        outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0) or None
        outcome.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    ended = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        ended = ended or bool(choice.get("finish_reason"))
        # A chat's first event only names the role; a last one may only name the reason.
        if text or not (choice.get("finish_reason") or delta.get("role")):
            outcome.clocks_s.append(now)
    return ended


async def _events(target: Target, route: str, body: dict) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    reader, writer = await _open(target)
    try:
        status, headers = await _exchange(target, reader, writer, "POST", route, json.dumps(body).encode())
        if status != 200:
            raise AnswerError(f"{status}: {_refusal(await _first_bytes(_body(reader, headers)))}")
        waiting = b""
        async for piece in _body(reader, headers):
            waiting += piece
            *lines, waiting = waiting.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()
            if len(waiting) > MAX_LINE_BYTES:
                raise AnswerError(f"an event is longer than {MAX_LINE_BYTES} bytes")
        if waiting.startswith(b"data:"):
            yield waiting[5:].strip()
    finally:
        writer.close()


async def get_json(target: Target, route: str, timeout_s: float = 30.0) -> dict:
    """The JSON object of a GET. ConfigError: no server there, or another answer."""
    where = f"{'https' if target.tls else 'http'}://{target.host}:{target.port}{target.path}{route}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _open(target)
            try:
                status, headers = await _exchange(target, reader, writer, "GET", route, b"")
                raw = await _first_bytes(_body(reader, headers), MAX_LINE_BYTES)
            finally:
                writer.close()
        if status != 200:
            raise ConfigError(f"{where} answered {status}: {_refusal(raw)}")
        answer = json.loads(raw)
    except TimeoutError:
        raise ConfigError(f"{where} did not answer within {timeout_s:g} s") from None
    except (OSError, AnswerError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ConfigError(f"{where} is no OpenAI-compatible server: {one_line(error)}") from None
    if not isinstance(answer, dict):
        raise ConfigError(f"{where} is no OpenAI-compatible server: its answer is no JSON object")
    return answer


async def _open(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(target.host, target.port, ssl=target.tls or None, limit=MAX_LINE_BYTES)


async def _exchange(target: Target, reader, writer, method: str, route: str, body: bytes) -> tuple[int, dict[str, str]]:
    """Send a request; returns the status and the headers of the answer, their names in lower case."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"{method} {target.path}{route} HTTP/1.1", f"Host: {host}:{target.port}", "Accept: */*",
             "Accept-Encoding: identity", "Connection: close", f"Content-Length: {len(body)}"]  # fmt: skip
    if body:
        lines.append("Content-Type: application/json")
    if target.key:
        lines.append(f"Authorization: Bearer {target.key}")
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    await writer.drain()
    status = 100
    while 100 <= status < 200:  # interim answers come before the real one
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = head[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise AnswerError(f"the answer is not HTTP/1.1: {one_line(head[0][:80])}")
        status = int(rest[:3])
    pairs = (line.partition(":") for line in head[1:] if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body's pieces as they come: chunked, of a known length, or to the end of the connection (RFC 9112, 6.3)."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while True:
            line = await reader.readuntil(b"\r\n")
            size = line.split(b";")[0].strip()
            if not size or size.strip(b"0123456789abcdefABCDEF"):
                raise AnswerError(f"a chunk's length is {size[:20]!r}")
            if not int(size, 16):
                return
            async for piece in _pieces(reader, int(size, 16)):
                yield piece
            await reader.readexactly(2)
    elif "content-length" in headers:
        async for piece in _pieces(reader, int(headers["content-length"])):
            yield piece
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def _pieces(reader: asyncio.StreamReader, left: int) -> AsyncIterator[bytes]:
    """`left` bytes as they come."""
    while left > 0:
        piece = await reader.read(min(left, 1 << 16))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(piece)
        yield piece


async def _first_bytes(pieces: AsyncIterator[bytes], limit: int = _ERROR_BYTES) -> bytes:
    found = b""
    async for piece in pieces:
        found += piece
        if len(found) >= limit:
            break
    return found[:limit]


def _refusal(raw: bytes) -> str:
    try:
        return _message(json.loads(raw))
    except ValueError:
        return one_line(raw.decode(errors="replace").strip()[:200])


def _message(answer) -> str:
    """The text of an OpenAI error object, else the object."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    text = error.get("message", error) if isinstance(error, dict) else error
    return one_line(text)[:200]
