"""Many streams at once, slow readers, waiting readers: what they are sent, and what they cost the server."""

import asyncio
import json
import os
import signal
import socket
import time

import pytest
from harness import chat_body, request, wait_for
from test_completions import check_grammar
from test_lifecycle import Process

from zse.http.listener import Limits

CHAT = "/v1/chat/completions"
CLIENTS = 1000
# 200 is the full test, paced so that the time between tokens can be judged; it takes a minute.
TOKENS = int(os.environ.get("ZSE_TEST_STREAM_TOKENS", "8"))
PACE_MS = 0 if TOKENS < 100 else 250
SLOW = 2 if TOKENS < 100 else 100


def memory_mb(pid: int, what: str) -> float:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what)) / 1024


@pytest.fixture
def own_process():
    made = []

    def make(*options):
        made.append(Process(*options))
        return made[-1]

    yield make
    for process in made:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGTERM)
            process.popen.communicate(timeout=30)


async def read_stream(port: int, body: dict, gaps: list[float]) -> list:
    """The events of one stream; the times between those that hold text are added to gaps."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("POST", CHAT, body))
    data, last = b"", 0.0
    while not data.endswith(b"0\r\n\r\n"):
        piece = await reader.read(1 << 16)
        assert piece, data[-200:]
        now = time.monotonic()
        if last:
            gaps.append(now - last)
        last = now
        data += piece
    writer.close()
    lines = data.partition(b"\r\n\r\n")[2].split(b"\n")
    return [
        line[6:].decode() if line == b"data: [DONE]" else json.loads(line[6:])
        for line in lines
        if line.startswith(b"data: ")
    ]


@pytest.mark.timed
@pytest.mark.exhaustive("times beside a load")
def test_a_thousand_streams_and_slow_readers(own_process):
    process = own_process(
        "--max-queue",
        "4000",
        "--max-queue-tokens",
        "1000000",
        "--log-level",
        "error",
        "--engine",
        "--max-context 1000000",
    )
    idle = memory_mb(process.popen.pid, "VmRSS")
    slow = []
    for _ in range(SLOW):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", process.port))
        sock.sendall(request("POST", CHAT, chat_body("!tokens=1000000 !ms=1", stream=True)))
        slow.append(sock)
    gaps: list[float] = []

    async def all_streams() -> list[list]:
        body = chat_body(f"!tokens={TOKENS} !ms={PACE_MS}", stream=True, stream_options={"include_usage": True})
        return await asyncio.gather(*(read_stream(process.port, body, gaps) for _ in range(CLIENTS)))

    streams = asyncio.run(all_streams())
    for events in streams:
        check_grammar(events, 1, True, True)
        text = "".join(choice["delta"].get("content") or "" for event in events[:-1] for choice in event["choices"])
        assert text == "".join(chr(97 + index % 26) for index in range(TOKENS))
        assert events[-2]["usage"]["completion_tokens"] == TOKENS + 1
    # Who has read nothing for 30 s, or is 256 KiB behind, is cut off; generation stops at once in the latter case.
    wait_for(lambda: process.get("/health/ready").json["running"] == 0, 60)
    peak = memory_mb(process.popen.pid, "VmHWM")
    for sock in slow:
        sock.close()
    wait_for(lambda: process.get("/health/ready").json["requests"] == 0, 5)
    gaps.sort()
    print(
        f"{CLIENTS} streams of {TOKENS} tokens: {peak - idle:.0f} MB above {idle:.0f}; time between reads: median "
        f"{1000 * gaps[len(gaps) // 2]:.0f} ms, P99 {1000 * gaps[len(gaps) * 99 // 100]:.0f} ms"
    )
    assert peak - idle <= 300


def test_comments_while_the_model_loads_and_while_a_prompt_waits(own_server):
    server = own_server(engine="--load-ms 1300", wait=False, limits=Limits(comment_s=0.2))
    for text in ("hi", "!tokens=1 !ms=1300"):
        with server.connect() as sock:
            sock.sendall(request("POST", CHAT, chat_body(text, stream=True)))
            data = b""
            while b"[DONE]" not in data:
                data += sock.recv(1 << 16)
        before, _, after = data.partition(b"data: ")
        assert before.count(b": keep-alive\n\n") >= 1 and b"HTTP/1.1 200" in before
        assert after.count(b"[DONE]") == 1
    server.assert_quiet()


def test_an_error_after_comments_is_an_event(own_server):
    server = own_server(engine="--load-ms 1300 --die 3", wait=False, limits=Limits(comment_s=0.2))
    with server.connect() as sock:
        sock.sendall(request("POST", CHAT, chat_body("hi", stream=True)))
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(1 << 16)
    assert b"HTTP/1.1 200" in data and data.count(b'data: {"error"') == 1 and b"[DONE]" not in data
    assert b"engine_unavailable" in data


@pytest.mark.timed
def test_every_stream_is_answered_when_the_server_stops(own_process):
    """500 at SIGTERM: those that can end within the drain do, the others get one error event."""
    process = own_process("--max-queue", "4000", "--log-level", "error", "--drain-timeout", "1")

    async def stream(number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
        text = "!tokens=4 !ms=150" if number % 2 else "!tokens=10000 !ms=100"
        writer.write(request("POST", CHAT, chat_body(text, stream=True, max_tokens=4000)))
        data = await reader.readuntil(b"data: ")
        begun.append(number)
        if len(begun) == 500:
            process.popen.send_signal(signal.SIGTERM)
        try:
            return data + await reader.read()
        finally:
            writer.close()

    async def run() -> list[bytes]:
        return await asyncio.gather(*map(stream, range(500)))

    begun: list[int] = []
    replies = asyncio.run(asyncio.wait_for(run(), 30))
    code, stderr = process.finish()
    assert code == 0 and "Traceback" not in stderr
    done = sum(reply.count(b"data: [DONE]") for reply in replies)
    for reply in replies:
        errors = reply.count(b'data: {"error"')
        assert reply.count(b"data: [DONE]") + errors == 1 and reply.endswith(b"0\r\n\r\n")
        assert not errors or b"shutting_down" in reply
    assert 200 <= done <= 250
