"""`zse serve` under load: exec → ready → first streamed token over HTTP, then N clients at once."""

import asyncio
import http.client
import statistics
import subprocess
import sys
import time
from time import perf_counter

from zse.bench import process
from zse.bench.client import Outcome, Target, stream
from zse.errors import EngineError

_START_TIMEOUT_SECONDS = 120
_TIMEOUT_S = 300.0  # of a request
_NAME = "bench"


class RunningServer:
    """A `zse serve` of our own on a free port of 127.0.0.1, stopped when the block is left."""

    def __init__(self, model: str, options: list[str]):
        self.port = process.free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        serve = ["serve", model, "--model-name", _NAME, "--port", str(self.port), *options]
        self._command = [sys.executable, "-m", "zse", *serve]

    def __enter__(self):
        self.start = perf_counter()
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait_until_ready(self) -> None:
        while perf_counter() - self.start < _START_TIMEOUT_SECONDS:
            if self.process.poll() is not None:
                raise EngineError(
                    f"`{' '.join(self._command[2:])}` ended with exit code {self.process.returncode}; run it to see why"
                )
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health/ready")
                status = connection.getresponse().status
                connection.close()
                if status == 200:
                    self.ready_ms = 1000 * (perf_counter() - self.start)
                    return
            except OSError:
                pass  # the socket is not open yet
            time.sleep(0.005)
        raise EngineError(f"the server was not ready after {_START_TIMEOUT_SECONDS} s")

    def __exit__(self, kind, error, traceback) -> None:
        process.stop(self.process, 30)


def ask(url: str, prompts: list[str], max_tokens: int) -> list[Outcome]:
    """A streamed completion of each prompt, all at once. EngineError: one has failed."""

    async def send() -> list[Outcome]:
        target = Target.of(url)
        bodies = (
            {"model": _NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
            for prompt in prompts
        )
        return await asyncio.gather(*(stream(target, "/completions", body, _TIMEOUT_S) for body in bodies))

    outcomes = asyncio.run(send())
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise EngineError(f"{len(errors)} of {len(prompts)} clients failed: {errors[0]}")
    return outcomes


def serving(model: str, clients: list[int], max_tokens: int, options: list[str]) -> dict:
    """exec → ready and → first streamed token (ms); then for each number of clients: output tok/s, TTFT and ITL (ms).

    A piece of text is counted as one token; a token that is no whole character is joined with the next one.
    """
    with RunningServer(model, options) as server:
        (first,) = ask(server.url, ["Hello"], 4)
        return {
            "exec_to_ready_ms": server.ready_ms,
            "exec_to_first_token_ms": 1000 * (first.clocks_s[0] - server.start),
            "load": [load(server.url, count, max_tokens) for count in clients],
        }


def load(url: str, count: int, max_tokens: int) -> dict:
    """What so many clients see that ask at once."""
    story = "Client {} asks: tell a long story about the number {}."
    start = perf_counter()
    outcomes = ask(url, [story.format(number, count * 100 + number) for number in range(count)], max_tokens)
    seconds = perf_counter() - start
    gaps = [gap for outcome in outcomes for gap in outcome.itl_ms]
    return {
        "clients": count,
        "tok_per_s": sum(len(outcome.clocks_s) for outcome in outcomes) / seconds,
        "ttft_ms": statistics.median(1000 * (outcome.clocks_s[0] - outcome.sent_s) for outcome in outcomes),
        "itl_ms": statistics.median(gaps) if gaps else None,
    }
