"""Requests without end: memory, file descriptors and threads of the server stay where they are.

ZSE_TEST_SOAK: how many (50,000 take a minute, a million half an hour)."""

import asyncio
import os
import random
import signal
import time

from harness import chat_body, request
from test_lifecycle import Process

COUNT = int(os.environ.get("ZSE_TEST_SOAK", "8000"))
CHAT = "/v1/chat/completions"
KINDS = [
    request("POST", CHAT, chat_body("hello")),
    request("POST", CHAT, chat_body("hello", stream=True, n=2)),
    request("POST", CHAT, chat_body("!nan=0")),
    request("POST", CHAT, chat_body("x", temperature=9)),
    request("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "stop": "b"}),
    request("POST", "/v1/embeddings", {"input": ["a", "b"]}),
    request("POST", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    request("GET", "/metrics"),
    request("GET", "/v1/models"),
    request("GET", "/nope"),
    request("POST", CHAT, b"{"),
]
LEAVES = [
    request("POST", CHAT, chat_body("!tokens=1000 !ms=1", stream=True)),
    request("POST", CHAT, chat_body("!stall")),
]


def usage(pid: int) -> tuple[int, int, int]:
    """Bytes resident, file descriptors, threads."""
    with open(f"/proc/{pid}/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return resident, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


async def drive(port: int, count: int, seed: int) -> list[float]:
    """Seconds of each plain request, in order."""
    draw, latencies = random.Random(seed), []

    async def client(share: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(share):
            if draw.random() < 0.05:
                _, leaving = await asyncio.open_connection("127.0.0.1", port)
                leaving.write(draw.choice(LEAVES))
                await asyncio.sleep(0.002)
                leaving.close()
                continue
            kind = draw.choice(KINDS)
            start = time.monotonic()
            writer.write(kind)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"transfer-encoding: chunked" in head:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
            if kind is KINDS[0]:
                latencies.append(time.monotonic() - start)
            if b"connection: close" in head:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    await asyncio.gather(*(client(count // 8) for _ in range(8)))
    return latencies


def busy_s(process: Process) -> float:
    """Seconds of processor time of the server and of its engine."""
    total = 0
    for pid in (process.popen.pid, process.engine_pid):
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def costs_beside_a_new_one(process: Process) -> tuple[float, float]:
    """Seconds of processor time that a request takes this server, and one that has just started: the least of five turns each,
    for what else the machine does slows both."""
    fresh = Process("--log-level", "error")
    costs: dict[Process, list[float]] = {process: [], fresh: []}
    try:
        asyncio.run(drive(fresh.port, 1500, 1))
        for turn in range(5):
            for server, found in sorted(costs.items(), key=lambda item: (item[0] is fresh) ^ turn % 2):
                busy = busy_s(server)
                asyncio.run(drive(server.port, 2000, 10 + turn))
                found.append((busy_s(server) - busy) / 2000)
    finally:
        fresh.popen.send_signal(signal.SIGTERM)
        fresh.finish(20)
    return min(costs[process]), min(costs[fresh])


def test_memory_and_time_stay_where_they_are():
    process = Process("--log-level", "error")
    try:
        asyncio.run(drive(process.port, 1500, 1))  # caches of the interpreter and of the server fill
        before = usage(process.popen.pid)
        latencies = asyncio.run(drive(process.port, COUNT, 2))
        time.sleep(0.2)
        after = usage(process.popen.pid)
        old, new = costs_beside_a_new_one(process) if COUNT >= 20_000 else (0.0, 0.0)
    finally:
        process.popen.send_signal(signal.SIGTERM)
        _, stderr = process.finish(20)
    print(
        f"{COUNT} requests: {(after[0] - before[0]) / COUNT:.1f} bytes a request; median "
        f"{1000 * sorted(latencies)[len(latencies) // 2]:.1f} ms; processor time of a request afterwards {1e6 * old:.0f} us, "
        f"of a server that has just started {1e6 * new:.0f} us"
    )
    assert "Traceback" not in stderr
    # 20 bytes a request is the bar of the long run; the allocator's own steps are larger than a short run's share.
    assert after[0] - before[0] < max(20 * COUNT, 1 << 20)
    # An aged heap costs 5 to 10 % (240,000 requests as much as 40,000); what grew with each request would soon double it.
    assert old <= 1.25 * new
    assert after[1] <= before[1] + 2 and after[2] <= before[2] + 1
