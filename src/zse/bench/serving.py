"""`zse serve` under load: exec → ready → first streamed token over HTTP, then N clients at once."""

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from time import perf_counter

from zse.bench import process
from zse.errors import EngineError

_START_TIMEOUT_SECONDS = 120
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


def stream(port: int, prompt: str, max_tokens: int) -> list[float]:
    """One streamed completion; returns perf_counter at each piece of text. EngineError for any answer but 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"model": _NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise EngineError(f"the server answered {response.status}: {response.read(500).decode(errors='replace')}")
    clocks = []
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineError(f"the server ended the stream: {event['error'].get('message')}")
            if event["choices"] and event["choices"][0]["text"]:
                clocks.append(perf_counter())
    connection.close()
    return clocks


def serving(model: str, clients: list[int], max_tokens: int, options: list[str]) -> dict:
    """exec → ready and → first streamed token (ms); then for each number of clients: output tok/s, TTFT and ITL (ms).

    A piece of text is counted as one token; a token that is no whole character is joined with the next one.
    """
    with RunningServer(model, options) as server:
        first = stream(server.port, "Hello", 4)
        result = {
            "exec_to_ready_ms": server.ready_ms,
            "exec_to_first_token_ms": 1000 * (first[0] - server.start),
            "load": [],
        }
        for count in clients:
            result["load"].append(_load(server.port, count, max_tokens))
    return result


def _load(port: int, count: int, max_tokens: int) -> dict:
    runs: list[tuple[float, list[float]]] = []
    errors: list[str] = []

    def client(number: int) -> None:
        start = perf_counter()
        try:
            runs.append(
                (
                    start,
                    stream(
                        port,
                        f"Client {number} asks: tell a long story about the number {count * 100 + number}.",
                        max_tokens,
                    ),
                )
            )
        except (EngineError, OSError, http.client.HTTPException) as error:
            errors.append(str(error))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise EngineError(f"{len(errors)} of {count} clients failed: {errors[0]}")
    seconds = perf_counter() - start
    gaps = [1000 * (after - before) for _, clocks in runs for before, after in pairwise(clocks)]
    return {
        "clients": count,
        "tok_per_s": sum(len(clocks) for _, clocks in runs) / seconds,
        "ttft_ms": statistics.median(1000 * (clocks[0] - begin) for begin, clocks in runs if clocks),
        "itl_ms": statistics.median(gaps) if gaps else None,
    }
