"""Seconds to the first token of a session that goes on: from memory, from host memory, and after a restart of the server.

    python benchmarks/session_resume.py MODEL [--tokens 8000] [--rounds 3] [--positions N] [--rest S] [-- options of zse serve]

A server with --cache-disk and a database answers a long prompt of a session; then the same session is asked for `--new` tokens more. "memory": at
once. "host" (with --cache-host-memory, and a device that has no room for two such prompts): after another long prompt; the counters of tiers are
printed, which say where the pages were. "restart": a new process of the server, its files in the system's page cache; the first request of each process is a short one of no
session, so that what a first request records is not counted, and the session's follows at once, or --rest seconds later. Prints a line for each, the least of `--rounds`, what was cached, and where the time went by the
server's own timings: before the engine had it (reading, tokenizing), waiting there (for what is read, too), its prompt.

--positions: a copy of MODEL, a GGUF, that says it has so many, in place of a longer context that it would have to be trained for: its words are no better
or worse than random, its time is that of the shape.
"""

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

TIERS = ("host", "disk", "tier")
KEY = "measures-a-session-of-its-own"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


class Server:
    def __init__(self, model: str, folder: str, options: list[str]):
        command = [sys.executable, "-m", "zse", "serve", model, "--served-model-name", "m", "--port", "0"]
        command += ["--cache-disk", f"{folder}/kv", "--database", f"{folder}/db", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"ZSE_API_KEY": KEY}
        )
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if " on http" in line), None)
        if line is None:
            raise SystemExit("the server did not start")
        self.place = urlsplit(line.split(" on ")[1].split()[0]).netloc

    def ask(self, prompt: str, session: str | None = None) -> tuple[float, int, int, dict[str, float]]:
        """(seconds to the first token, tokens of the prompt, those of them that were cached, the server's timings)."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}, "timings": True} | (
            {"session_id": session} if session else {}
        )
        connection = HTTPConnection(self.place, timeout=1800)
        begin, first, usage, timings = time.perf_counter(), 0.0, {}, {}
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status} {answer.read()!r}")
        while line := answer.readline():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begin
                event = json.loads(line[6:])
                usage, timings = event.get("usage") or usage, event.get("timings") or timings
        connection.close()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return first, usage["prompt_tokens"], cached, timings

    def tiers(self) -> dict[str, float]:
        """The counters that name a tier of the cache."""
        connection = HTTPConnection(self.place, timeout=60)
        connection.request("GET", "/metrics", headers=HEADERS)
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        rows = [line.rpartition(" ") for line in lines if not line.startswith("#") and any(t in line for t in TIERS)]
        return {name: float(value) for name, _, value in rows if float(value)}

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def with_positions(path: str, folder: str, count: int) -> str:
    """A copy of a GGUF that says it has `count` positions."""
    data = bytearray(Path(path).read_bytes())
    key = b".context_length" + struct.pack("<I", 4)  # u32
    at = data.index(key) + len(key)
    data[at : at + 4] = struct.pack("<I", count)
    made = Path(folder) / "model.gguf"
    made.write_bytes(data)
    return str(made)


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(("ba", "do", "ki", "lu", "me", "no")) for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8000, help="of the session's first prompt, about")
    parser.add_argument("--new", type=int, default=8, help="words of each later request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rest", type=float, default=0.0, help="seconds of a restarted server before the session is asked for"
    )
    parser.add_argument("--positions", type=int, help="that a copy of the model says it has")
    args, options = parser.parse_known_args()
    options = [option for option in options if option != "--"]
    found: dict[str, list[tuple[float, int, int, dict[str, float]]]] = {"memory": [], "host": [], "restart": []}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model if args.positions is None else with_positions(args.model, folder, args.positions)
        server = Server(model, folder, options)
        few, many = (server.ask(words(1, count))[1] for count in (100, 300))
        length = int(args.tokens / ((many - few) / 200))
        first = server.ask(words(2, length), "long")
        print(json.dumps({"the first prompt": first[1], "seconds": round(first[0], 3)}), flush=True)
        for number in range(args.rounds):
            found["memory"].append(server.ask(" " + words(10 + number, args.new), "long"))
        for number in range(args.rounds if "--cache-host-memory" in options else 0):
            server.ask(words(30 + number, length))
            found["host"].append(server.ask(" " + words(40 + number, args.new), "long"))
        print(json.dumps(server.tiers()), flush=True)
        for number in range(args.rounds):
            time.sleep(3)  # what is idle is written
            print(json.dumps({"before a restart": server.tiers()}), flush=True)
            server.end()
            server = Server(model, folder, options)
            server.ask(words(3, 20))
            time.sleep(args.rest)
            found["restart"].append(server.ask(" " + words(20 + number, args.new), "long"))
        server.end()
    for name, runs in ((name, runs) for name, runs in found.items() if runs):
        seconds, tokens, cached, timings = min(runs, key=lambda run: run[0])
        row = {"from": name, "first token, s": round(seconds, 3), "prompt": tokens, "computed": tokens - cached}
        parts = {part: timings[part] for part in ("before_ms", "queue_ms", "prompt_ms") if part in timings}
        every = {"all, s": [round(run[0], 3) for run in runs], "all, computed": [run[1] - run[2] for run in runs]}
        print(json.dumps(row | parts | every))


if __name__ == "__main__":
    main()
