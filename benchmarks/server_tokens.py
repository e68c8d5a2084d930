"""Processor time of the server's process for each token of streams, with the fake engine of the tests: chat answers, one token an event.

    python benchmarks/server_tokens.py [--streams 1,16,64,256] [--tokens 20000]

The engine is another process, and so is what reads the streams. User time is the server's own work; system time is what the system takes
for its sends and receives, one send a token and stream, which differs by machine more than anything else here.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zse.bench.process import free_port, stop

SERVER = Path(__file__).resolve().parents[1] / "tests" / "server" / "serve_fake.py"
OPTIONS = ["--max-queue", "4000", "--max-queue-tokens", "1000000", "--log-level", "error", "--database", "none"]


def used(pid: int) -> tuple[float, float]:
    """(user, system) seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    hertz = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / hertz, int(fields[12]) / hertz


def read_stream(port: int, tokens: int, pause_ms: int) -> int:
    """The events of one answer."""
    messages = [{"role": "user", "content": f"!tokens={tokens} !ms={pause_ms}"}]
    body = json.dumps({"model": "fake", "messages": messages, "stream": True, "max_tokens": tokens + 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    events = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while data := connection.recv(1 << 16):
            events += data.count(b"data: {")
    return events


def wait_until_ready(port: int, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"the server ended with {server.returncode}")


def measure(streams: int, tokens: int) -> None:
    port = free_port()
    command = [sys.executable, str(SERVER), "--port", str(port), *OPTIONS, "--engine", "--max-context 1000000"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(port, server)
        each, pause_ms = max(1, tokens // streams), max(1, streams // 8)
        read_stream(port, 50, 1)  # what is imported once
        before = used(server.pid)
        with ThreadPoolExecutor(streams) as pool:
            events = sum(pool.map(lambda _: read_stream(port, each, pause_ms), range(streams)))
        after = used(server.pid)
        user, system = (1e6 * (after[i] - before[i]) / events for i in range(2))
        print(f"{streams:5d} streams: {user:6.1f} us user, {system:6.1f} us system a token", flush=True)
    finally:
        stop(server, 30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--tokens", type=int, default=20_000)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for streams in args.streams.split(","):
        measure(int(streams), args.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
