"""From exec to the first token, watched from outside: `zse run`, and `zse serve` over HTTP, each in a fresh process.

Warm: the model's file is in the page cache. Cold: it has been dropped from there, so that the disk is in the figure.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from http.client import HTTPConnection
from time import perf_counter

from zse.bench.process import free_port, stop
from zse.errors import EngineError
from zse.formats import store
from zse.runtime import probe

_TIMEOUT_S = 300.0
_METRICS = {"server": "zse_start_phase_seconds{", "engine": "zse_engine_phase_seconds{"}


def startup(model: str, repeats: int, options: list[str], cold: bool = True) -> dict:
    """Medians in milliseconds from exec: of `zse run` to the first byte of its reply and to its end, of `zse serve` to
    the open socket and to the first streamed token, asked for when the socket opens; the same with the page cache
    dropped. phases_ms: of one warm start of the server and its engine. The first start is not counted: it brings the
    model's file into the page cache. modules_without_bytecode: those of zse that each start had to compile (`python -m
    zse.build` does it for good). Raises EngineError when a process fails."""
    path = os.fspath(store.resolve(model))
    runs = [_run(model, options) for _ in range(repeats + 1)][1:]
    starts = [_serve(model, options) for _ in range(repeats)]
    result: dict = {
        "exec_to_first_token_ms": statistics.median(run[0] for run in runs),
        "exec_to_exit_ms": statistics.median(run[1] for run in runs),
        "serve_exec_to_socket_ms": statistics.median(start["socket"] for start in starts),
        "serve_exec_to_first_token_ms": statistics.median(start["first token"] for start in starts),
    }
    if cold:
        cold_runs, cold_starts = [], []
        for _ in range(min(repeats, 3)):
            if not drop_page_cache(path):
                break
            cold_runs.append(_run(model, options)[0])
            drop_page_cache(path)
            cold_starts.append(_serve(model, options)["first token"])
        if cold_runs:
            result["cold_exec_to_first_token_ms"] = statistics.median(cold_runs)
            result["cold_serve_exec_to_first_token_ms"] = statistics.median(cold_starts)
    result["modules_without_bytecode"] = len(probe.modules_without_bytecode())
    return {**result, "phases_ms": starts[-1]["phases"], "runs": [run[0] for run in runs]}


def drop_page_cache(path: str) -> bool:
    """Take a model's files out of the page cache; False where the system has no call for it. Needs no privileges."""
    if not hasattr(os, "posix_fadvise"):
        return False
    files = [path] if os.path.isfile(path) else [entry.path for entry in os.scandir(path) if entry.is_file()]
    for name in files:
        fd = os.open(name, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not on the disk yet stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return True


def _run(model: str, options: list[str]) -> tuple[float, float]:
    command = [sys.executable, "-m", "zse", "run", model, "Hello", "--max-tokens", "4", "--temperature", "0", *options]
    start = perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    byte = os.read(process.stdout.fileno(), 1)
    first = 1000 * (perf_counter() - start)
    _, stderr = process.communicate()
    if process.returncode or not byte:
        raise EngineError(f"zse run failed with exit code {process.returncode}: {_last_line(stderr)}")
    return first, 1000 * (perf_counter() - start)


def _serve(model: str, options: list[str]) -> dict:
    """One start of `zse serve`: milliseconds to "socket" and to "first token", and the phases that it tells."""
    port = free_port()
    command = [sys.executable, "-m", "zse", "serve", model, "--port", str(port), *options]
    start = perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        sock = connect(process, port, start + _TIMEOUT_S)
        opened = 1000 * (perf_counter() - start)
        with sock:
            try:
                _ask(sock)
            except EngineError as error:
                try:
                    process.wait(2)  # a server that could not load the model ends, and says why
                except subprocess.TimeoutExpired:
                    raise error from None
                raise _ended(process) from None
        first = 1000 * (perf_counter() - start)
        return {"socket": opened, "first token": first, "phases": _phases(port)}
    finally:
        stop(process, 30)


def connect(process: subprocess.Popen, port: int, deadline: float) -> socket.socket:
    """A connection as soon as `zse serve` has opened its socket. EngineError: it ended, or it is `deadline`."""
    while process.poll() is None and perf_counter() < deadline:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        except OSError:
            time.sleep(0.001)
    if process.poll() is None:
        raise EngineError(f"zse serve did not open its socket within {_TIMEOUT_S:.0f} s")
    raise _ended(process)


def _ended(process: subprocess.Popen) -> EngineError:
    assert process.stderr is not None
    return EngineError(f"zse serve failed with exit code {process.returncode}: {_last_line(process.stderr.read())}")


def _ask(sock: socket.socket) -> None:
    """Send a streamed completion and wait for its first event."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "temperature": 0, "stream": True}).encode()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    answer = b""
    while b"data: {" not in answer:
        piece = sock.recv(1 << 16)
        answer += piece
        if not piece or b'{"error"' in answer:
            raise EngineError(f"zse serve answered: {answer[-200:].decode(errors='replace')}")


def _phases(port: int) -> dict[str, dict[str, float]]:
    """What /metrics says of the start: milliseconds by process and phase."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found: dict[str, dict[str, float]] = {name: {} for name in _METRICS}
    for line in text.splitlines():
        for name, start in _METRICS.items():
            if line.startswith(start):
                labels, _, value = line.rpartition(" ")
                found[name][labels.rpartition('phase="')[2].removesuffix('"}')] = round(1000 * float(value), 1)
    return found


def _last_line(stderr: bytes) -> str:
    """The error that a command ended with, among what it logged."""
    lines = stderr.decode(errors="replace").strip().splitlines() or ["no reply"]
    told = [line for line in lines if line.startswith("zse: error: ")]
    return (told or lines)[-1].removeprefix("zse: error: ")
