"""ZSE and llama.cpp on the same GGUF, in turn in one run, with the same number of threads. Prints a table and writes JSON.

    python benchmarks/cpu_vs_llamacpp.py MODEL.gguf [MODEL.gguf ...] --llama-python OTHER_ENV/bin/python [--threads 2] [--rounds 3]

Run with the Python that has zse; OTHER_ENV has llama-cpp-python (`pip install llama-cpp-python`, compiled for this machine). llama.cpp
is measured with flash attention on, off and automatic in every round, and the best of the three counts for each figure. Figures are
medians over the rounds; each engine runs alone, without prefix cache and drafts, on random prompts that are new in every round. `--llama-cli PATH` adds a native binary to the start-up row.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from zse.bench.process import free_port

HERE = Path(__file__).resolve().parent
PROMPT = "The capital of France is"
FIGURES = ("decode_16", "decode_1024", "prefill_512", "batch_8")
LLAMA_RUN = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]), n_ctx=2048, verbose=False)
for part in llm.create_completion(sys.argv[3], max_tokens=1, temperature=0.0, stream=True):
    sys.stdout.write(part["choices"][0]["text"] or " "); sys.stdout.flush()
"""


def zse_worker(model: str, threads: int, only_memory: bool, seed: int) -> dict:
    """Runs in its own process: the figures of llamacpp_worker.py, measured through zse.LLM with the same prompts."""
    from zse import LLM, SamplingParams

    def ids(length: int, sequence: int = 0) -> list[int]:
        draw = random.Random(f"{seed} {length} {sequence}")
        return [draw.randrange(5, 4005) for _ in range(length)]

    def greedy(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)

    def decode(llm, context: int, count: int) -> float:
        times = [time.perf_counter() for _ in llm.stream(ids(context), greedy(count + 1))]
        return count / (times[-1] - times[0])

    def peak_mib() -> float:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))

    if only_memory:
        with LLM(model, threads=threads, max_context=2048, max_rows=1) as llm:
            decode(llm, 16, 16)
            return {"peak_mib": peak_mib()}
    with LLM(model, threads=threads, max_context=2048, max_rows=8, prefix_cache=False, speculation="none") as llm:
        decode(llm, 16, 8)
        result = {"decode_16": decode(llm, 16, 128), "decode_1024": decode(llm, 1024, 128)}
        start = time.perf_counter()
        next(iter(llm.stream(ids(512), greedy(1))))
        result["prefill_512"] = 512 / (time.perf_counter() - start)
        prompts, seconds = [ids(16, sequence) for sequence in range(8)], []
        for count in (1, 65):
            start = time.perf_counter()
            replies = llm.generate(prompts, greedy(count))
            assert not any(reply.cached_tokens for reply in replies)
            seconds.append(time.perf_counter() - start)
        result["batch_8"] = 8 * 64 / (seconds[1] - seconds[0])
        return result


def worker(command: list[str]) -> dict:
    """The JSON line that a measuring process prints last."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def first_output(command: list[str]) -> float:
    """Seconds from exec to the first byte on standard output."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout
    byte = os.read(process.stdout.fileno(), 1)
    seconds = time.perf_counter() - start
    process.communicate()
    if not byte:
        raise SystemExit(f"{' '.join(command)} printed nothing (exit {process.returncode})")
    return seconds


def serve_first_token(model: str, threads: int) -> float:
    """Seconds from exec of `zse serve` to the first streamed token over HTTP."""
    import http.client

    port = free_port()
    body = json.dumps({"model": "bench", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True})
    start = time.perf_counter()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "zse",
            "serve",
            model,
            "--port",
            str(port),
            "--threads",
            str(threads),
            "--model-name",
            "bench",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while time.perf_counter() - start < 30 and server.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
            except OSError:
                time.sleep(0.005)
                continue
            if response.status == 200:
                for line in response:
                    if line.startswith(b"data: {") and b'"text"' in line:
                        return time.perf_counter() - start
            time.sleep(0.005)
        raise SystemExit("zse serve gave no token")
    finally:
        server.terminate()
        server.wait(30)


def measure(model: str, args) -> dict:
    """Rounds of both engines in turn. Returns figure → (zse, llama.cpp) medians; None where there is no peer."""
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    me = [sys.executable, str(Path(__file__).resolve()), "--worker", model, "--threads", str(args.threads)]
    peer = [args.llama_python, str(HERE / "llamacpp_worker.py"), model, "--threads", str(args.threads)]

    def add(into: dict, **values: float) -> None:
        for name, value in values.items():
            into.setdefault(name, []).append(value)

    for number in range(args.rounds):
        add(ours, **{name: value for name, value in worker([*me, "--seed", str(number)]).items() if name in FIGURES})
        runs = [
            worker([*peer, "--flash", flash, "--seed", str(number)])
            for flash in (("-1", "0", "1") if number == 0 else (args.best_flash,))
        ]
        if number == 0:
            args.best_flash = max(zip(runs, ("-1", "0", "1"), strict=True), key=lambda pair: pair[0]["decode_1024"])[1]
        add(theirs, **{name: max(run[name] for run in runs) for name in FIGURES})
        add(ours, peak_mib=worker([*me, "--only-memory"])["peak_mib"])
        add(theirs, peak_mib=worker([*peer, "--only-memory"])["peak_mib"])
        add(
            ours,
            run_first_s=first_output(
                [
                    sys.executable,
                    "-m",
                    "zse",
                    "run",
                    model,
                    PROMPT,
                    "--max-tokens",
                    "1",
                    "--temperature",
                    "0",
                    "--threads",
                    str(args.threads),
                ]
            ),
        )
        add(theirs, run_first_s=first_output([args.llama_python, "-c", LLAMA_RUN, model, str(args.threads), PROMPT]))
        if args.llama_cli:
            add(
                theirs,
                native_first_s=first_output(
                    [
                        args.llama_cli,
                        "-m",
                        model,
                        "-p",
                        PROMPT,
                        "-n",
                        "1",
                        "-t",
                        str(args.threads),
                        "-no-cnv",
                        "--no-display-prompt",
                    ]
                ),
            )
        add(ours, serve_first_s=serve_first_token(model, args.threads))
    names = list(dict.fromkeys([*ours, *theirs]))
    return {
        name: tuple(statistics.median(side[name]) if name in side else None for side in (ours, theirs))
        for name in names
    } | {"runs": {"zse": ours, "llama.cpp": theirs}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--llama-cli", help="llama.cpp's own command line, for the start-up row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(zse_worker(args.worker, args.threads, args.only_memory, args.seed)))
        return
    if not args.models or not args.llama_python:
        parser.error("needs MODEL.gguf and --llama-python")
    results = {}
    for model in args.models:
        args.best_flash = "-1"
        results[Path(model).name] = figures = measure(model, args)
        print(
            f"\n{Path(model).name}, {args.threads} threads, {args.rounds} rounds (llama.cpp: best flash setting {args.best_flash})"
        )
        print(f"{'':16}{'zse':>10}{'llama.cpp':>12}{'ratio':>9}")
        for name, (our, their) in ((name, pair) for name, pair in figures.items() if name != "runs"):
            ratio = f"{our / their:8.2f}x" if our and their else "        -"
            shown = [
                f"{value:.3f}" if value and value < 10 else f"{value:.1f}" if value else "-" for value in (our, their)
            ]
            print(f"{name:16}{shown[0]:>10}{shown[1]:>12}{ratio}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
