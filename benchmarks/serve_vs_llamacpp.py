"""`zse serve` and llama.cpp's `llama-server` under many concurrent streams, in turn in one run, on the same GGUF.

    python benchmarks/serve_vs_llamacpp.py MODEL.gguf --llama-server PATH [--clients 64] [--threads 2] [--rounds 1]
                                           [--cases fixed,mix] [--infer SCALE] [--json FILE]

Run with the Python that has zse. Every case is a burst: all clients ask at once over HTTP, streamed, greedy, with random
token ids as prompts and replies of full length; both servers get the same requests from the same client. `fixed`: 128
tokens in and 64 out; `mix`: 32 to 256 in, 16 to 128 out. llama-server has a slot for each client; of the flags in
LLAMA_FORMS those that are fastest in a short burst are taken (`--form NAME` names them). `--zse-options WORDS` goes to
`zse serve`. --infer adds infer's five workloads (docs/benchmarks.md) at a scale, for which there is no bar. A request that
fails ends the run with exit code 1. The last lines are the ratios that count.
"""

import argparse
import asyncio
import http.client
import json
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import replace

from zse.bench import process
from zse.bench.client import Target
from zse.bench.load import LoadSettings, run_workload
from zse.bench.serving import RunningServer
from zse.bench.workloads import INFER, Workload

CASES = {
    "fixed": Workload("fixed", "burst", 0, (128, 128), (64, 64), "128 tokens in, 64 out", warm_up=1),
    "mix": Workload("mix", "burst", 0, (32, 256), (16, 128), "32 to 256 tokens in, 16 to 128 out", warm_up=1),
}
# Tokens of a slot: the longest request of a case, in llama.cpp's steps of 256.
SLOT_TOKENS = 512
TRIAL = Workload("trial", "burst", 0, (32, 32), (16, 16), "32 tokens in, 16 out", warm_up=1)
LLAMA_FORMS = {
    "default": [],
    "unified": ["--kv-unified"],
    "no-flash": ["-fa", "off"],
    "small-ubatch": ["-b", "512", "-ub", "128"],
}
VOCABULARY = 30_000  # ids below it are in every model's vocabulary
START_TIMEOUT_S = 120
UNCACHED = ("--no-prefix-cache", "--speculation", "none")


class LlamaServer:
    """A llama-server on a free port, stopped when the block is left."""

    def __init__(self, path: str, model: str, clients: int, threads: int, flags: list[str]):
        self.port = process.free_port()
        flash = [] if "-fa" in flags else ["-fa", "on"]
        self.command = [
            path,
            "-m",
            model,
            "-np",
            str(clients),
            "-c",
            str(clients * SLOT_TOKENS),
            "-t",
            str(threads),
            "-tb",
            str(threads),
            *flash,
            "--no-webui",
            "--cache-ram",
            "0",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *flags,
        ]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"{shlex.join(self.command)} ended with {self.process.returncode}; run it to see why")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                status = connection.getresponse().status
                connection.close()
                if status == 200:
                    return self
            except OSError:
                pass  # the socket is not open yet
            time.sleep(0.05)
        self.__exit__()
        raise SystemExit(f"llama-server was not ready after {START_TIMEOUT_S} s")

    def __exit__(self, *error) -> None:
        process.stop(self.process, 20)


def measure(port: int, workload: Workload, seed: int, scale: float = 1.0) -> dict:
    """Figures of one workload. SystemExit when a request fails."""
    target = Target.of(f"http://127.0.0.1:{port}/v1")
    settings = LoadSettings(seed=seed, scale=scale, vocab_size=VOCABULARY, timeout_s=600)
    figures = asyncio.run(run_workload(target, "bench", workload, settings))
    if figures["failures"]:
        raise SystemExit(
            f"{workload.name}: {figures['failures']} of {figures['requests']} requests failed: "
            f"{figures['errors'][0]['message']}"
        )
    if figures["cached_tokens"]:
        raise SystemExit(f"{workload.name}: {figures['cached_tokens']} tokens of the prompts came from a cache")
    del figures["each"]
    return figures


def line(engine: str, workload: Workload, figures: dict) -> str:
    ttft, itl = figures["ttft_ms"], figures["itl_ms"]
    return (
        f"{workload.name:<20} {engine:<13} {figures['output_tok_per_s']:8.1f} tok/s   TTFT p50 {ttft['p50']:8.0f} "
        f"p95 {ttft['p95']:8.0f} ms   ITL p50 {itl['p50']:7.1f} p95 {itl['p95']:7.1f} ms   {figures['seconds']:.1f} s"
    )


def best_form(args) -> str:
    """The form of llama-server that gives most tokens in a short burst."""
    speeds = {}
    for name, flags in LLAMA_FORMS.items():
        with LlamaServer(args.llama_server, args.model, args.clients, args.threads, flags) as server:
            trial = replace(TRIAL, requests=args.clients)
            speeds[name] = measure(server.port, trial, 7)["output_tok_per_s"]
        print(f"trial  llama-server, {name}: {speeds[name]:.1f} tok/s", flush=True)
    return max(speeds, key=lambda name: speeds[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-server", required=True, metavar="PATH")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cases", default="fixed,mix")
    parser.add_argument("--infer", type=float, default=0.0, metavar="SCALE", help="at most 0.25: a slot has 512 tokens")
    parser.add_argument("--form", choices=LLAMA_FORMS, help="llama-server's flags (default: tried out)")
    parser.add_argument("--zse-options", default="", metavar="WORDS")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    unknown = set(args.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if not 0 <= args.infer <= 0.25:
        parser.error("--infer takes at most 0.25: a slot has 512 tokens")
    workloads = [(replace(CASES[name], requests=args.clients), 1.0) for name in args.cases.split(",")]
    workloads += [(workload, args.infer) for workload in INFER if args.infer]
    form = args.form or best_form(args)
    print(f"llama-server form: {form}; {process.machine()}", flush=True)
    zse_options = [
        "--threads",
        str(args.threads),
        "--max-context",
        str(SLOT_TOKENS),
        *UNCACHED,
        *shlex.split(args.zse_options),
    ]
    found: dict[str, dict[str, list[dict]]] = {}
    for number in range(args.rounds):
        for engine in ("zse", "llama-server"):
            with (
                RunningServer(args.model, zse_options)
                if engine == "zse"
                else LlamaServer(args.llama_server, args.model, args.clients, args.threads, LLAMA_FORMS[form])
            ) as server:
                for workload, scale in workloads:
                    figures = measure(server.port, workload, 42 + number, scale)
                    print(line(engine, workload, figures), flush=True)
                    found.setdefault(workload.name, {}).setdefault(engine, []).append(figures)
    ratios = {}
    for name, engines in found.items():
        speed, wait = (
            {engine: statistics.median(value(run) for run in runs) for engine, runs in engines.items()}
            for value in (lambda run: run["output_tok_per_s"], lambda run: run["ttft_ms"]["p95"])
        )
        ratios[name] = {
            "throughput": speed["zse"] / speed["llama-server"],
            "ttft_p95": wait["zse"] / wait["llama-server"],
        }
        bars = (" (bar: 4)", " (bar: below 1)") if name in CASES else ("", "")
        print(
            f"{name}: {ratios[name]['throughput']:.2f}× the tokens a second{bars[0]}, TTFT p95 "
            f"{ratios[name]['ttft_p95']:.2f}×{bars[1]}"
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"form": form, "machine": process.machine(), "ratios": ratios, "runs": found}, file, indent=1)
    return int(any(ratios[name]["throughput"] < 4 or ratios[name]["ttft_p95"] >= 1 for name in ratios if name in CASES))


if __name__ == "__main__":
    sys.exit(main())
