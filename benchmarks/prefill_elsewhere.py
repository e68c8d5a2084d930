"""What long prompts do to the replies beside them, with one engine and with prompts computed by another.

    python benchmarks/prefill_elsewhere.py MODEL [--streams 4] [--prompt 7000] [--prompts 4] [--tokens 400] [--threads 1]
    python benchmarks/prefill_elsewhere.py MODEL --devices cuda:0,cuda:1    # a GPU each; the one engine has the first

Three servers of the same model, one after another: one engine with both engines' threads; a pair (--role prefill, --role decode) with half of them
each; in each, `streams` replies of random prompts run first alone, then while prompts of `prompt` random token ids arrive one after another. Prefix
cache on (the pair needs it), prompts never the same, drafts off. Prints the time between tokens alone and beside the prompts, and the prompts'
time to their first token.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit


def serve(model: str, *options: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-m", "zse", "serve", model, "--served-model-name", "m", "--port", "0"]
    command += ["--speculation", "none", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split(" on ")[1].split()[0]


def stream(address: str, prompt: list[int], tokens: int) -> list[float]:
    """Times of the events of a reply, since its request."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    begin = time.perf_counter()
    connection = HTTPConnection(urlsplit(address).netloc, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{answer.status} {answer.read()!r}")
    times = []
    while line := answer.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - begin)
    return times


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 20_000) for _ in range(count)]


def gaps_of(
    address: str, args: argparse.Namespace, rng: random.Random, prompts: int
) -> tuple[list[float], list[float]]:
    """(seconds between tokens of all replies while the prompts ran, the prompts' times to the first token)."""
    began, replies, firsts = time.perf_counter(), [], []
    window = [0.0, float("inf")]

    def reply() -> None:
        start = time.perf_counter() - began
        times = stream(address, ids(rng, 32), args.tokens if not prompts else args.most)
        replies.append([start + at for at in times])

    threads = [threading.Thread(target=reply, daemon=True) for _ in range(args.streams)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    if prompts:
        window[0] = time.perf_counter() - began
        for _ in range(prompts):
            firsts.append(stream(address, ids(rng, args.prompt), 1)[0])
        window[1] = time.perf_counter() - began
    for thread in threads:
        thread.join()
    gaps = []
    for times in replies:
        gaps += [b - a for a, b in zip(times, times[1:], strict=False) if window[0] <= a and b <= window[1]]
    return gaps, firsts


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=7000)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument(
        "--most", type=int, default=4000, help="tokens of the replies beside prompts: these must not end first"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--devices", default="cpu,cpu", help="of who decodes (and of the one engine), of who computes prompts"
    )
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(os.urandom(32))
        secret.chmod(0o600)
        link = ["--kv-secret", str(secret)]
        half = ["--threads", str(args.threads), *options]
        mine, other = (["--device", device] for device in args.devices.split(","))
        cases = {
            "one engine": [["--threads", str(2 * args.threads), *options, *mine]],
            "prompts elsewhere": [
                ["--role", "prefill", "--kv-listen", f"unix:{folder}/kv", *link, *half, *other],
                ["--role", "decode", "--kv-peers", f"unix:{folder}/kv", *link, *half, *mine],
            ],
        }
        for name, servers in cases.items():
            rng = random.Random(16)
            running = [serve(args.model, *each) for each in servers]
            try:
                time.sleep(3.0)
                address = running[-1][1]
                stream(address, ids(rng, 300), 4)  # what a first request records
                alone, _ = gaps_of(address, args, rng, 0)
                beside, firsts = gaps_of(address, args, rng, args.prompts)
                row = {"case": name}
                for label, gaps in (("alone", alone), ("beside", beside)):
                    row |= {
                        f"{label} P50, ms": round(1000 * at(gaps, 0.5), 2),
                        f"{label} P99, ms": round(1000 * at(gaps, 0.99), 2),
                    }
                row["P99 beside / alone"] = round(row["beside P99, ms"] / row["alone P99, ms"], 2)
                row["first token of a prompt, s"] = round(statistics.median(firsts), 2)
                print(json.dumps(row), flush=True)
            finally:
                for server, _ in running:
                    server.terminate()
                for server, _ in running:
                    try:
                        server.wait(20)
                    except subprocess.TimeoutExpired:
                        server.kill()


if __name__ == "__main__":
    main()
