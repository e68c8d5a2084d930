"""ZSE and llama.cpp on the same GGUF, in turn in one run, with the same number of threads. Prints a table and writes JSON.

    python benchmarks/cpu_vs_llamacpp.py MODEL.gguf [MODEL.gguf ...] --llama-python OTHER_ENV/bin/python [--threads 2] [--rounds 3]

Run with the Python that has zse; OTHER_ENV has llama-cpp-python (`pip install llama-cpp-python`, compiled for this machine;
docs/benchmarks.md says with which flags). llama.cpp is measured with flash attention on, off and automatic in the first round, and goes
on with the setting that decodes fastest after 1,024 tokens. Figures are medians over the rounds; each engine runs alone, without prefix
cache and drafts, on random prompts that are new in every round; drafts have a row of their own. `--llama-cli PATH` adds a native
binary to the start-up row.

"floor" is the share of what this machine allows, by the floors that are measured before and after every figure (zse.bench.floors):
reading as much memory as a step reads, int8 and f32 multiply-adds. A figure above its floor, a cached token or a draft ends the run.

Memory is the peak of a process that filled a context of 2,048 tokens; needs_mib is what it cannot do without: the weights as the engine
stores them (of llama.cpp the file's size) and keys and values of those tokens in f16. Each run's figures go to standard error as JSON.
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

from zse.bench import floors, roofline
from zse.bench.process import free_port, machine

HERE = Path(__file__).resolve().parent
PROMPT = "The capital of France is"
DECODES, PREFILL, SEQUENCES = (16, 1024, 4096), 512, 8
MEMORY_CONTEXT = 2048
FLASH = ("-1", "0", "1")  # as llama.cpp numbers its settings of flash attention
FIGURES = (*(f"decode_{context}" for context in DECODES), f"prefill_{PREFILL}", f"batch_{SEQUENCES}")
LLAMA_RUN = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]), n_ctx=2048, verbose=False)
for part in llm.create_completion(sys.argv[3], max_tokens=1, temperature=0.0, stream=True):
    sys.stdout.write(part["choices"][0]["text"] or " "); sys.stdout.flush()
"""


def zse_worker(args) -> dict:
    """Runs in its own process: the figures of llamacpp_worker.py, measured through zse.LLM with the same prompts. Beside each, as
    "NAME floor", its share of the machine's."""
    from zse import LLM, SamplingParams

    def ids(length: int, sequence: int = 0) -> list[int]:
        draw = random.Random(f"{args.seed} {length} {sequence}")
        return [draw.randrange(5, 2005) for _ in range(length)]

    def greedy(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)

    def decode(llm, context: int, count: int = args.tokens) -> float:
        times = [time.perf_counter() for _ in llm.stream(ids(context), greedy(count + 1))]
        return count / (times[-1] - times[0])

    def prefill(llm) -> float:
        start = time.perf_counter()
        next(iter(llm.stream(ids(PREFILL), greedy(1))))
        return PREFILL / (time.perf_counter() - start)

    def batch(llm) -> float:
        seconds = []
        for count, first in ((2, 2 * SEQUENCES), (1, 0), (args.tokens + 1, SEQUENCES)):  # the first makes recordings
            prompts = [ids(16, first + sequence) for sequence in range(SEQUENCES)]
            start = time.perf_counter()
            assert not any(reply.cached_tokens for reply in llm.generate(prompts, greedy(count)))
            seconds.append(time.perf_counter() - start)
        return SEQUENCES * args.tokens / (seconds[2] - seconds[1])

    def peak_mib() -> float:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))

    def opened(context: int, rows: int, speculation: str = "none"):
        options = dict(max_context=context, max_rows=rows, prefix_cache=False, speculation=speculation)
        return LLM(args.worker, device="cpu", threads=args.threads, **options)

    if args.only_memory:
        with opened(MEMORY_CONTEXT, 1) as llm:
            decode(llm, MEMORY_CONTEXT - 17, 16)
            runner, peak = llm._engine.runner, peak_mib()
            tokens = llm.config.num_pages * llm.config.page_size
            kv_mib = llm.config.kv_bytes / tokens * MEMORY_CONTEXT / 2**20
            weights = sum(w.scheme.nbytes(*w.shape, w.layout) for w in runner.model.weights.values())
            return {"peak_mib": peak, "needs_mib": weights / 2**20 + kv_mib, "kv_mib": kv_mib}
    result = {}
    context = DECODES[-1] + args.tokens + 16
    with opened(context, SEQUENCES) as llm:
        runner = llm._engine.runner
        meter = floors.FloorMeter(llm.device, roofline.weights_bytes(runner.model))
        half = args.tokens / 2
        # Figure → what measures it, tokens of a step, sequences of a step, keys that a token sees.
        figures = {f"decode_{known}": (lambda known=known: decode(llm, known), 1, 1, known + half) for known in DECODES}
        figures[f"prefill_{PREFILL}"] = (lambda: prefill(llm), PREFILL, 1, PREFILL / 2)
        figures[f"batch_{SEQUENCES}"] = (lambda: batch(llm), SEQUENCES, SEQUENCES, 16 + half)
        decode(llm, 16, 8)
        judge = roofline.FloorJudge(runner, meter)
        for name, (measure, tokens, rows, seen) in figures.items():
            result[name] = measure()
            result[f"{name} floor"] = judge.share(name, result[name], tokens, rows, seen)
        result |= {f"floor {part}": value for part, value in floors.medians(judge.floors)._asdict().items()}
        roofline.check_uncached(llm.metrics())
        meter.close()
    with opened(2048, 1, "auto") as llm:
        decode(llm, 16, 8)
        result["drafts_16"] = decode(llm, 16)
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
    me += ["--tokens", str(args.tokens)]
    peer = [args.llama_python, str(HERE / "llamacpp_worker.py"), model, "--threads", str(args.threads)]
    peer += ["--tokens", str(args.tokens)]

    def add(into: dict, **values: float) -> None:
        print("zse" if into is ours else "llama.cpp", json.dumps(values), file=sys.stderr, flush=True)
        for name, value in values.items():
            into.setdefault(name, []).append(value)

    for number in range(args.rounds):
        if number == 0:
            # The other two are only asked for what the choice depends on.
            speed = {
                flash: worker([*peer, "--flash", flash, "--only", "decode_1024"])["decode_1024"] for flash in FLASH
            }
            args.best_flash = max(FLASH, key=lambda flash: speed[flash])
        add(ours, **worker([*me, "--seed", str(number)]))
        add(theirs, **worker([*peer, "--flash", args.best_flash, "--seed", str(number)]))
        memory = worker([*me, "--only-memory"])
        file_mib = os.path.getsize(model) / 2**20
        add(ours, peak_mib=memory["peak_mib"], needs_mib=memory["needs_mib"])
        add(theirs, **worker([*peer, "--only-memory"]), needs_mib=file_mib + memory["kv_mib"])
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


def print_table(name: str, figures: dict, args) -> None:
    flash = {"-1": "automatic", "0": "off", "1": "on"}[args.best_flash]
    print(f"\n{name}, {args.threads} threads, {args.rounds} rounds (llama.cpp: flash attention {flash})")
    floor = floors.Floors(*(figures[f"floor {part}"][0] for part in floors.Floors._fields))
    print(f"floors: {floor.line()}")
    print(f"{'':16}{'zse':>10}{'llama.cpp':>12}{'ratio':>9}{'floor':>9}")
    for row, (our, their) in ((row, pair) for row, pair in figures.items() if row != "runs" and "floor" not in row):
        ratio = f"{our / their:8.2f}x" if our and their else "        -"
        shown = [f"{value:.3f}" if value and value < 10 else f"{value:.1f}" if value else "-" for value in (our, their)]
        share = figures.get(f"{row} floor")
        of_floor = f"{100 * share[0]:7.0f} %" if share else ""
        print(f"{row:16}{shown[0]:>10}{shown[1]:>12}{ratio}{of_floor:>9}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--llama-cli", help="llama.cpp's own command line, for the start-up row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="decoded for a figure")
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(zse_worker(args)))
        return
    if not args.models or not args.llama_python:
        parser.error("needs MODEL.gguf and --llama-python")
    results = {"machine": machine()}
    for model in args.models:
        args.best_flash = "-1"
        results[Path(model).name] = figures = measure(model, args)
        print_table(Path(model).name, figures, args)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
