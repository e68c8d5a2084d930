"""The time from a request for a model that is not loaded to its first token, where another model holds the only place.

    python benchmarks/model_switch.py [--models smollm2 gemma3-270m] [--rounds 10] [-- serve options]

Starts `zse serve` with --max-loaded 1, loads each model once, then asks them in turn: every request ends the other model's engine
and loads its own from the page cache into a parked engine. Prints one JSON object: seconds of each switch by model, and whether each
model's token was the same every time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit
from urllib.request import urlopen

PROMPT = "The capital of France is"


def first_token(address: str, model: str) -> tuple[float, str]:
    """(seconds from before the connection to the first event, its text) of a streamed completion of one token."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    begin = time.perf_counter()
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        line = answer.readline() if answer.status == 200 else answer.read()
        seconds = time.perf_counter() - begin
        if answer.status != 200 or not line.startswith(b"data: {"):
            raise SystemExit(f"{model}: {answer.status} {line!r}")
        text = json.loads(line[6:])["choices"][0]["text"]
        answer.read()
        return seconds, text
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3-270m"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--pause", type=float, default=1.5, help="seconds between two switches: an engine is parked meanwhile"
    )
    parser.add_argument("options", nargs="*", help="of zse serve, behind --")
    args = parser.parse_args()
    command = [sys.executable, "-m", "zse", "serve", *args.models, "--max-loaded", "1", "--port", "0", *args.options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split(" on ")[1].split()[0]
        with urlopen(f"{address}/v1/models") as answer:
            first, *others = [model["id"] for model in json.load(answer)["data"]]
        models = [*others, first]  # the first is loaded now
        for model in models:
            first_token(address, model)
            time.sleep(args.pause)
        seconds: dict[str, list[float]] = {model: [] for model in models}
        texts: dict[str, set[str]] = {model: set() for model in models}
        for _ in range(args.rounds):
            for model in models:
                took, text = first_token(address, model)
                seconds[model].append(round(took, 3))
                texts[model].add(text)
                time.sleep(args.pause)
    finally:
        server.terminate()
        server.wait(30)
    every = [took for found in seconds.values() for took in found]
    summary = {
        "median_s": round(statistics.median(every), 3),
        "max_s": max(every),
        "same": all(len(found) == 1 for found in texts.values()),
    }
    print(json.dumps(summary | {"seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
