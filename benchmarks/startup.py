"""From exec of `zse serve` to the first streamed token over HTTP, as a client sees it.

    python benchmarks/startup.py [MODEL] [--repeats 7] [--cold] [--json] [-- zse serve options]

The client is connected before the server reads its first request: it tries to connect every millisecond from exec on,
sends one chat (or text) request and notes when the answer's head, the first event and the first text arrive. --cold
drops the model file and the package's compiled files from the page cache before each run (posix_fadvise).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import zse
from zse.bench import startup
from zse.bench.process import free_port, machine
from zse.bench.startup import connect
from zse.formats import store


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--completions", action="store_true", help="POST /v1/completions (models without a template)")
    parser.add_argument("--key", default="", help="sent with the request, for a server with keys")
    parser.add_argument("--json", action="store_true")
    own, more = parser.parse_known_args()
    more = [option for option in more if option != "--"]
    # As installed: modules have bytecode, which costs a start 0.2 s where it must do without.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not own.cold:
        run(own, more)  # fills the page cache and the bytecode cache
    runs = []
    for _ in range(own.repeats):
        if own.cold:
            drop_page_cache(own.model)
        runs.append(run(own, more))
    report(own, runs)
    return 0


def run(own, options: list[str]) -> dict[str, float]:
    """One start: name → milliseconds since exec, then the server's own phases."""
    port = free_port()
    command = [sys.executable, "-m", "zse", "serve", own.model, "--port", str(port), *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    times: dict[str, float] = {}

    def mark(name: str) -> None:
        times.setdefault(name, round(1000 * (time.perf_counter() - start), 1))

    try:
        with connect(process, port, start + 120) as sock:
            mark("connected")
            sock.sendall(request(own.completions, own.key))
            data = b""
            while b"data: [DONE]" not in data:
                piece = sock.recv(1 << 16)
                if not piece:
                    raise SystemExit(f"the server closed the connection: {data.decode(errors='replace')}")
                data += piece
                mark("head")
                if has_text(data):
                    mark("first token")
    finally:
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
        if "first token" not in times:
            sys.stderr.buffer.write(stdout + stderr)
    phases = next((line for line in stdout.decode().splitlines() if "since exec" in line), "").partition("exec: ")[2]
    for part in filter(None, phases.split(", ")):
        name, _, value = part.rpartition(" ")
        times["server: " + name] = float(value)
    return times


def request(completions: bool, key: str = "") -> bytes:
    body: dict = {"max_tokens": 8, "temperature": 0, "stream": True}
    if completions:
        path, body["prompt"] = "/v1/completions", "Hello"
    else:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{f'Authorization: Bearer {key}' + chr(13) + chr(10) if key else ''}Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def has_text(data: bytes) -> bool:
    """Has any event a piece of text?"""
    for line in data.split(b"\n"):
        if line.startswith(b"data: {") and line.rstrip().endswith(b"}"):
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"the server answered: {event['error']['message']}")
            if any(part.get("text") or part.get("delta", {}).get("content") for part in event["choices"]):
                return True
    return False


def drop_page_cache(model: str) -> None:
    """Take the model and the package out of the page cache (clean pages only; needs no privileges)."""
    startup.drop_page_cache(os.fspath(store.resolve(model)))
    for folder, _, _ in os.walk(os.path.dirname(os.path.abspath(zse.__file__))):
        startup.drop_page_cache(folder)


def report(own, runs: list[dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for times in runs for name in times))
    medians = {name: statistics.median(times[name] for times in runs if name in times) for name in names}
    if own.json:
        print(
            json.dumps({"machine": machine(), "model": own.model, "cold": own.cold, "median_ms": medians, "runs": runs})
        )
        return
    print(
        f"{own.model}, page cache {'dropped' if own.cold else 'warm'}, {len(runs)} runs, ms since exec: "
        "median (min – max)"
    )
    for name in names:
        values = [times[name] for times in runs if name in times]
        print(f"  {name:<24}{medians[name]:8.1f}  ({min(values):.1f} – {max(values):.1f})")
    print("  " + ", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    sys.exit(main())
