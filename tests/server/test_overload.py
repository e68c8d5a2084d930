"""More than the engine can do: who is refused, how soon, that nobody who was accepted is lost, and who has to wait.

ZSE_TEST_OVERLOAD_S: how long each part lasts (60 is the full test)."""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time

import pytest
from harness import request, wait_for

from zse.server.keys import Key

TEXT = "/v1/completions"
SECONDS = float(os.environ.get("ZSE_TEST_OVERLOAD_S", "1"))
TOKENS = 20  # of each answer


class Clients:
    """Closed loops of keep-alive connections: each sends its next request when the last one was answered."""

    def __init__(self, port: int):
        self._port, self._draw = port, random.Random(port)
        self.latencies: dict[str, list[float]] = {}  # name → seconds of requests that were answered
        self.refused: list[dict[str, str]] = []  # headers of refusals
        self.lost: list[bytes] = []

    async def loop(self, name: str, until: float, *, key: str = "", pause_s: float = 0.0, **fields) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        data = request("POST", TEXT, {"prompt": "x" * 24, "max_tokens": TOKENS, **fields}, headers)
        latencies = self.latencies.setdefault(name, [])
        start = 0.0
        while start == 0.0 or time.monotonic() < until:  # once at least, however late it is
            start = time.monotonic()
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
            body = await reader.readexactly(int(lines["content-length"]))
            if head.startswith(b"HTTP/1.1 200"):
                if json.loads(body)["usage"]["completion_tokens"] != TOKENS:
                    self.lost.append(body)
                latencies.append(time.monotonic() - start)
            elif head.startswith(b"HTTP/1.1 503"):
                self.refused.append(lines)
                await asyncio.sleep(self._draw.uniform(0.02, 0.18))
            else:
                self.lost.append(head + body)
            if pause_s:
                await asyncio.sleep(pause_s)
        writer.close()


def run(*loops) -> None:
    async def together() -> None:
        await asyncio.gather(*loops)

    asyncio.run(together())


class Metronome:
    """What the machine takes from everybody: another process that does as an engine does for one request, TOKENS steps of
    4 ms, again and again. What slows it slows the server, though the server has no part in it."""

    SCRIPT = (
        "import time\nwhile True:\n start = time.monotonic()\n"
        f" for _ in range({TOKENS}): time.sleep(0.004)\n"
        " print(start, time.monotonic(), flush=True)"
    )

    def __enter__(self) -> "Metronome":
        self._process = subprocess.Popen([sys.executable, "-c", self.SCRIPT], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it runs
        return self

    def __exit__(self, *exc) -> None:
        self._process.kill()
        self.beats = [
            tuple(map(float, line.split())) for line in self._process.communicate()[0].splitlines() if " " in line
        ]

    def beat(self, part: tuple[float, float]) -> float:
        """Median seconds of a beat that lay in a part of the run, by the monotonic clock."""
        return statistics.median(end - start for start, end in self.beats if part[0] <= start and end <= part[1])


def run_and_wait_ns(thread) -> tuple[int, int]:
    """Nanoseconds that a thread of this process ran, and those that it could have and had no processor."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
            ran, waited, _ = map(int, file.read().split())
    except OSError:  # not Linux
        return 1, 0
    return ran, waited


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@pytest.mark.timed
def test_ten_times_the_capacity(scheduled):
    """8 run, 16 may wait, 240 ask: the rest is refused at once, before its prompt is looked at."""
    server = scheduled("--rows 8 --pages 512 --step-ms 4", max_choices=24)
    model, tokenized, handled = server.pool.default.text.result(), [], []
    encode, finished = model.encode_text, server.app.finished

    def counted(text):
        tokenized.append(text)
        return encode(text)

    def timed(request, status):
        handled.append((status, time.monotonic() - request.started))
        finished(request, status)

    model.encode_text, server.app.finished = counted, timed
    idle, peak, burst, after = (Clients(server.port) for _ in range(4))
    parts: dict[Clients, tuple[float, float]] = {}

    def run_for(clients: Clients, name: str, count: int, seconds: float) -> None:
        start = time.monotonic()
        run(*(clients.loop(name, start + seconds) for _ in range(count)))
        parts[clients] = start, time.monotonic()
        server.assert_quiet()

    with Metronome() as metronome:
        run_for(idle, "one", 1, SECONDS / 2)
        run_for(peak, "peak", 20, SECONDS / 2)
        del handled[:], tokenized[:]
        before = run_and_wait_ns(server._thread)
        run_for(burst, "burst", 240, SECONDS)
        ran, waited = (now - then for now, then in zip(run_and_wait_ns(server._thread), before, strict=True))
        handled_in_burst = list(handled)
        run_for(after, "one", 1, SECONDS / 2)

    def slowed(part: Clients, by: Clients) -> float:
        """How much slower the machine was in a part than in another: 1 on one that nobody else uses."""
        return max(1.0, metronome.beat(parts[part]) / metronome.beat(parts[by]))

    def rate(clients: Clients, name: str) -> float:
        return len(clients.latencies[name]) / (parts[clients][1] - parts[clients][0])

    assert not burst.lost and burst.refused
    assert all(reply["retry-after"] and reply["retry-after-ms"] for reply in burst.refused)
    accepted = len(burst.latencies["burst"])
    assert sum(status == 200 for status, _ in handled_in_burst) == accepted
    assert len(tokenized) == accepted + len(after.latencies["one"])
    refusals = [seconds for status, seconds in handled_in_burst if status == 503]
    alone = percentile(idle.latencies["one"], 0.5)
    at_peak, in_burst = rate(peak, "peak"), rate(burst, "burst")
    print(
        f"idle {1000 * alone:.0f} ms, after the burst "
        f"{1000 * percentile(after.latencies['one'], 0.5):.0f} ms; requests a second: {at_peak:.0f} at peak, "
        f"{in_burst:.0f} in the burst; {len(refusals)} refused within {1000 * percentile(refusals, 0.5):.1f} ms (median), "
        f"{1000 * percentile(refusals, 0.99):.1f} ms (P99); "
        f"accepted: P99 {1000 * percentile(burst.latencies['burst'], 0.99):.0f} ms; the machine's beat, ms: "
        + ", ".join(f"{1000 * metronome.beat(part):.0f}" for part in parts.values())
        + f"; the server waited {waited / max(ran, 1):.2f} of the time that it ran"
    )
    # The bar is 20 ms; here the 240 clients take half of the interpreter's time.
    # A server that waits for a processor as long as it has one takes twice as long.
    slower = 1 + waited / max(ran, 1)
    assert percentile(refusals, 0.5) < 0.02 * slower and percentile(refusals, 0.95) < 0.08 * slower
    # A short run is mostly the clients' connecting; 0.9 where they do not take the server's processor.
    assert in_burst * slowed(burst, peak) > (0.6 if SECONDS >= 5 else 0.2) * at_peak
    # 24 requests at most stand before one: three rounds of 20 steps, of 24 with their prompts; 4 x on
    # a quiet machine.
    assert percentile(burst.latencies["burst"], 0.99) < 15 * alone * slowed(burst, idle)
    # Back to normal at once, not within 5 s only.
    assert percentile(after.latencies["one"], 0.5) < 2 * alone * slowed(after, idle)


KEYS = (Key("flood", "sk-flood"), Key("calm", "sk-calm"))


@pytest.mark.timed
@pytest.mark.exhaustive("times beside a load")
def test_a_flood_does_not_slow_others(scheduled):
    """One tenant asks all the time with 60 clients; another one's single requests take at most twice as long as alone."""
    server = scheduled("--rows 4 --pages 512 --step-ms 4", key=KEYS, max_choices=48)
    alone, crowd = Clients(server.port), Clients(server.port)
    run(alone.loop("calm", time.monotonic() + SECONDS, key="sk-calm", pause_s=0.02))
    end = time.monotonic() + 2 * SECONDS
    run(
        crowd.loop("calm", end, key="sk-calm", pause_s=0.02),
        *(crowd.loop("flood", end, key="sk-flood") for _ in range(60)),
    )
    idle, busy = alone.latencies["calm"], crowd.latencies["calm"]
    others = crowd.latencies["flood"]
    print(
        f"alone: median {1000 * percentile(idle, 0.5):.0f} ms, P99 {1000 * percentile(idle, 0.99):.0f} ms; beside the "
        f"flood: {1000 * percentile(busy, 0.5):.0f} ms, {1000 * percentile(busy, 0.99):.0f} ms; the flood's: "
        f"{1000 * percentile(others, 0.5):.0f} ms, {1000 * percentile(others, 0.99):.0f} ms ({len(crowd.refused)} refused)"
    )
    assert not crowd.lost and len(busy) >= 5 and crowd.refused
    # The bar is P99 <= 2 x; the slack is for a test machine where 61 clients share the processor with the server.
    assert percentile(busy, 0.5) < 2.5 * percentile(idle, 0.5)
    assert percentile(busy, 0.99) < 2 * percentile(idle, 0.99) + 0.1
    assert percentile(others, 0.5) > 3 * percentile(busy, 0.5)  # it is the flood that waits


def test_low_priority_goes_on(scheduled):
    """Requests of a low priority wait for the ageing time at most, while higher ones never cease."""
    server = scheduled("--rows 4 --pages 512 --step-ms 3 --ageing-ms 30", max_choices=100)
    clients, end = Clients(server.port), time.monotonic() + 2 * SECONDS
    run(
        *(clients.loop("high", end, priority=5) for _ in range(16)),
        *(clients.loop("low", end, priority=-5) for _ in range(4)),
    )
    high, low = (clients.latencies[name] for name in ("high", "low"))
    print(
        f"high: {len(high)} answers, median {1000 * percentile(high, 0.5):.0f} ms; low: {len(low)}, "
        f"{1000 * percentile(low, 0.5):.0f} ms"
    )
    assert not clients.lost and len(low) >= 0.05 * len(high)
    assert percentile(low, 0.5) > 1.2 * percentile(high, 0.5)


def test_what_does_not_begin_in_time_is_refused_after_all(scheduled):
    """Nobody is left without an answer. Of a request for several answers the first one counts."""
    server = scheduled("--rows 1 --step-ms 5")
    server.app.admission.bounds.max_wait_s = 0.3
    start, replies = time.monotonic(), {}

    async def ask(name: str, delay: float, **fields) -> None:
        await asyncio.sleep(delay)
        body = {"max_tokens": 100, "ignore_eos": True} | fields
        replies[name] = await asyncio.to_thread(server.complete, "x" * 24, **body), time.monotonic() - start

    run(ask("first", 0), ask("late", 0.1), ask("stream", 0.1, stream=True))
    assert replies["first"][0].status == 200
    for name in ("late", "stream"):
        reply, seconds = replies[name]
        assert (reply.status, reply.error["code"]) == (503, "overloaded") and seconds < 2
        assert reply.headers["retry-after"] == "1"
    run(ask("four", 0, n=4))  # three of them wait for longer than 0.3 s
    assert len(replies["four"][0].json["choices"]) == 4
    server.assert_quiet()


def test_a_deadline_that_passes_in_the_queue_is_a_504(scheduled):
    server = scheduled("--rows 1 --step-ms 5")
    clients = Clients(server.port)
    end = time.monotonic() + 1
    late = []

    async def ask() -> None:
        await asyncio.sleep(0.2)
        late.append(await asyncio.to_thread(server.complete, "x", max_tokens=5, deadline_ms=30))

    run(ask(), *(clients.loop("busy", end, max_tokens=100, ignore_eos=True) for _ in range(3)))
    assert (late[0].status, late[0].error["code"]) == (504, "timeout")
    assert late[0].headers["x-should-retry"] == "false"
    server.assert_quiet()
    # Three clients and one row: all but the first wait for two others' 100 steps, half a second each.
    answered = len(clients.latencies["busy"])
    wait_for(lambda: server.engine.heartbeat.counters["finished"] == answered)
    lines = server.get("/metrics").body.decode().splitlines()
    waits = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("zse_queue_seconds_bucket")]
    count = next(float(line.rpartition(" ")[2]) for line in lines if line.startswith("zse_queue_seconds_count"))
    assert waits == sorted(waits) and waits[-1] == count == answered
    assert any('le="0.5"' in line and float(line.rpartition(" ")[2]) < count for line in lines)
