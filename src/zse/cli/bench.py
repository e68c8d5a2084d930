"""zse bench: figures of this machine, with what they were measured on."""

import argparse
import json
from statistics import median

from zse.bench import perplexity, process, reports, roofline, serving, speed, startup
from zse.bench.floors import Floors
from zse.cli import bench_serve
from zse.cli.options import ENGINE_OPTIONS, locate, open_llm, options_again, text_of
from zse.cli.parser import FLAG, JSON, MODEL, Amount, Kinds, ReadBy, arg, option
from zse.errors import ConfigError

EPILOG = """examples:
  zse bench decode smollm2 --context 1024
  zse bench prefill smollm2 --tokens 512 --json
  zse bench latency smollm2 --prompts 128,1024 --tokens 64
  zse bench perplexity smollm2 --kv-dtype int8
  zse bench startup smollm2
  zse bench graphs qwen.zse --device cuda
  zse bench serve smollm2 --clients 1,4,8
  zse bench serve smollm2 --workload infer --scale 0.25 --json now.json --compare before.json
  zse bench serve --url http://127.0.0.1:8000/v1 --workload chunked_prefill
  zse bench ablation smollm2 --output ablation
  zse bench report before.json now.json --page both.html

Figures are medians over --repeats, after a warm-up. Measure on a quiet machine: the load average is printed too."""

# Neither cached prompts nor drafts: random prompts make greedy replies repeat themselves, which drafts would flatter.
PLAIN = {"prefix_cache": False, "speculation": "none"}
PROMPTS = (16, 128, 1024)  # of `latency`


def _counts(text: str, most: int = 256, example: str = "1,4,8") -> list[int]:
    """argparse type: numbers from 1 to `most` with commas between."""
    counts = [int(word) for word in text.split(",") if word.isdecimal()]
    if len(counts) != text.count(",") + 1 or not all(1 <= count <= most for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to {most}, as in {example}")
    return counts


def _lengths(text: str) -> list[int]:
    return _counts(text, 1 << 24, "128,1024")


def _tokens(flag: str, default: int, text: str):
    return arg(flag, type=Amount(int, 1), default=default, help=text)


_REPEATS = option("--repeats", Amount(int, 1, 100), "runs that count", 3)
_COMMON = (MODEL, _REPEATS, JSON, ENGINE_OPTIONS)
_KINDS = {
    "decode": (
        "tokens a second of one sequence after a context",
        (*_COMMON, _tokens("--context", 16, "tokens before the first new one"), _tokens("--tokens", 128, "new tokens")),
    ),
    "prefill": ("prompt tokens a second", (*_COMMON, _tokens("--tokens", 512, "prompt tokens"))),
    "batch": (
        "tokens a second of several sequences decoded together",
        (
            *_COMMON,
            _tokens("--sequences", 8, "sequences"),
            _tokens("--context", 16, "tokens before the first new one"),
            _tokens("--tokens", 64, "new tokens of each sequence"),
        ),
    ),
    "latency": (
        "time to first token and between tokens of one sequence, in this process: p50, p95, p99",
        (
            *_COMMON,
            option(
                "--prompts",
                ReadBy(_lengths, "N,N,…"),
                "prompt tokens (default: those of 16,128,1024 that fit the context)",
            ),
            _tokens("--tokens", 64, "new tokens after the first"),
        ),
    ),
    "perplexity": (
        "how well the model predicts a text: what quantizing weights, activations or KV costs",
        (
            *_COMMON,
            _tokens("--tokens", 1024, "most tokens of the text"),
            option("--text", "FILE", "a text of your own (default: a short fixed one)"),
        ),
    ),
    "graphs": (
        "on a GPU, tokens a second of one sequence with captured graphs and launch by launch, in turns",
        (*_COMMON, _tokens("--context", 16, "tokens before the first new one"), _tokens("--tokens", 128, "new tokens")),
    ),
    "startup": (
        "from exec to the first token of `zse run` and `zse serve`, page cache warm and dropped",
        (*_COMMON, option("--warm-only", FLAG, "leave the page cache alone")),
    ),
    "serve": (
        "`zse serve`: exec to first token over HTTP, then several clients at once; or workloads, against any server",
        (
            arg("model", metavar="MODEL", nargs="?", help="a name, hf:ORG/NAME, or a path"),
            _REPEATS,
            option("--json", "FILE", "write JSON to FILE; without FILE print it", nargs="?", const="-"),
            ENGINE_OPTIONS,
            option("--clients", ReadBy(_counts, "N,N,…"), "clients at once (default: 1,4,8)", [1, 4, 8]),
            _tokens("--tokens", 64, "longest reply of a client"),
            bench_serve.WORKLOADS,
        ),
    ),
    "ablation": bench_serve.ABLATION,
    "report": bench_serve.REPORT,
}
ARGUMENTS = (Kinds(_KINDS),)


def run(args) -> int:
    if args.kind == "report":
        return bench_serve.report(args)
    if args.kind == "ablation":
        return bench_serve.ablation(args, options_again(args, ENGINE_OPTIONS))
    if args.kind == "serve":
        bench_serve.check(args)
        if args.workload:
            return bench_serve.run(args, options_again(args, ENGINE_OPTIONS))
    result = {"bench": args.kind, "model": args.model, **_measure(args), "machine": process.machine()}
    text = json.dumps(result, indent=1)
    if isinstance(args.json, str) and args.json != "-":
        reports.write(args.json, text + "\n")
    print(text if args.json is True or args.json == "-" else _text(result))
    return 0


def _measure(args) -> dict:
    if args.kind in ("startup", "serve"):
        locate(args.model)  # fetching must not be measured
        options = options_again(args, ENGINE_OPTIONS)
        if args.kind == "startup":
            return startup.startup(args.model, args.repeats, options, cold=not args.warm_only)
        return serving.serving(args.model, args.clients, args.tokens, options)
    if args.kind == "graphs":
        return _graphs(args)
    llm = open_llm(args, max_rows=args.sequences if args.kind == "batch" else 1, **PLAIN)
    try:
        result = _IN_PROCESS[args.kind](llm, args)
        roofline.check_uncached(llm.metrics())
        memory = process.memory_bytes(llm.device)  # the floors take some of their own
        if args.kind in _STEPS:
            result |= roofline.of_floor(llm, args.kind, result["tok_per_s"], *_STEPS[args.kind](args))
    finally:
        llm.close()
    return {
        **result,
        "threads": llm.config.threads,
        "activations": llm.config.activations,
        "kv_dtype": llm.config.kv_dtype,
        "kv_page_bytes": llm.config.kv_bytes // llm.config.num_pages,
        **memory,
    }


def _graphs(args) -> dict:
    """Decode with captured graphs and without, an engine each, in turns; the ratio of the medians."""
    runs: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.repeats):
        for graphs in runs:
            llm = open_llm(args, max_rows=1, graphs=graphs, **PLAIN)
            try:
                if llm.device.kernels == "cpu":
                    raise ConfigError("a CPU has one way to run a step: give a GPU with --device")
                runs[graphs] += speed.decode(llm, args.context, args.tokens, 1)["runs"]
                roofline.check_uncached(llm.metrics())
            finally:
                llm.close()
    captured, launches = (median(runs[on]) for on in runs)
    return {"context": args.context, "tokens": args.tokens, "graphs_tok_per_s": captured, "no_graphs_tok_per_s": launches,
            "graphs_ratio": captured / launches}  # fmt: skip


def _latency(llm, args) -> dict:
    fitting = [length for length in PROMPTS if length + args.tokens < llm.config.max_context]
    return {
        "tokens": args.tokens,
        "repeats": args.repeats,
        "latency": [
            speed.latency(llm, length, args.tokens, args.repeats) for length in args.prompts or fitting or PROMPTS[:1]
        ],
    }


_IN_PROCESS = {
    "decode": lambda llm, args: speed.decode(llm, args.context, args.tokens, args.repeats),
    "prefill": lambda llm, args: speed.prefill(llm, args.tokens, args.repeats),
    "batch": lambda llm, args: speed.batch(llm, args.sequences, args.context, args.tokens, args.repeats),
    "latency": _latency,
    "perplexity": lambda llm, args: perplexity.measure(llm, args.tokens, text_of(args.text) if args.text else None),
}


# Tokens and sequences of a step, and the keys that a token sees on average.
_STEPS = {
    "decode": lambda args: (1, 1, args.context + args.tokens / 2),
    "prefill": lambda args: (args.tokens, 1, args.tokens / 2),
    "batch": lambda args: (args.sequences, args.sequences, args.context + args.tokens / 2),
}


def _text(result: dict) -> str:
    lines = []
    for name, value in result.items():
        if name == "floors":
            value = Floors(**value).line()
        if name == "share_of_floor":
            value = f"{100 * value:.0f} %"
        if name in ("runs", "machine", "load", "phases_ms", "latency"):
            continue
        if name.endswith("_bytes"):
            value, name = f"{value / 2**20:.0f} MiB", name.removesuffix("_bytes")
        elif isinstance(value, float):
            value = f"{value:.4f}" if name == "perplexity" else f"{value:.1f}"
        lines.append(f"{name.replace('_', ' '):<36}{value if value is not None else 'default'}")
    for name, phases in result.get("phases_ms", {}).items():
        lines.append(f"{name + ' phases, ms':<36}" + ", ".join(f"{phase} {ms:.0f}" for phase, ms in phases.items()))
    for row in result.get("latency", ()):
        shown = (", ".join(f"{name} {ms:.2f}" for name, ms in row[times].items()) for times in ("ttft_ms", "itl_ms"))
        lines.append("{:>6} prompt tokens       TTFT {} ms; ITL {} ms".format(row["prompt_tokens"], *shown))
    for load in result.get("load", ()):
        itl = f", ITL {load['itl_ms']:.1f} ms" if load["itl_ms"] else ""
        lines.append(
            f"{load['clients']:>4} clients            {load['tok_per_s']:.1f} tok/s, TTFT {load['ttft_ms']:.0f} ms{itl}"
        )
    lines.append(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["machine"].items()))
    return "\n".join(lines)
