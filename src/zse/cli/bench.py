"""zse bench: figures of this machine, with what they were measured on."""

import argparse
import json

from zse.bench import perplexity, process, reports, speed
from zse.bench import serving as bench_serving
from zse.bench import startup as bench_startup
from zse.cli import bench_serve
from zse.cli import options as cli_options
from zse.cli import parser as cli_parser
from zse.errors import ConfigError
from zse.formats import store

EPILOG = """examples:
  zse bench decode smollm2 --context 1024
  zse bench prefill smollm2 --tokens 512 --json
  zse bench latency smollm2 --prompts 128,1024 --tokens 64
  zse bench perplexity smollm2 --kv-dtype int8
  zse bench startup smollm2
  zse bench serve smollm2 --clients 1,4,8
  zse bench serve smollm2 --workload infer --scale 0.25 --json now.json --compare before.json
  zse bench serve --url http://127.0.0.1:8000/v1 --workload chunked_prefill
  zse bench ablation smollm2 --output ablation
  zse bench report before.json now.json --page both.html

Figures are medians over --repeats, after a warm-up. Measure on a quiet machine: the load average is printed too."""


PROMPTS = (16, 128, 1024)  # of `latency`


def add_arguments(parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)

    def kind(name: str, text: str):
        sub = kinds.add_parser(name, help=text, description=text)
        optional = {"nargs": "?"} if name == "serve" else {}
        sub.add_argument("model", metavar="MODEL", help="a name, hf:ORG/NAME, or a path", **optional)
        sub.add_argument(
            "--repeats",
            type=cli_parser.number(int, 1, 100),
            default=3,
            metavar="N",
            help="runs that count (default: %(default)s)",
        )
        if name == "serve":
            sub.add_argument(
                "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE; without FILE print it"
            )
        else:
            sub.add_argument("--json", action="store_true", help="print JSON")
        cli_options.add_engine_options(sub)
        return sub

    def tokens(sub, flag: str, default: int, text: str) -> None:
        sub.add_argument(
            flag, type=cli_parser.number(int, 1), default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )

    sub = kind("decode", "tokens a second of one sequence after a context")
    tokens(sub, "--context", 16, "tokens before the first new one")
    tokens(sub, "--tokens", 128, "new tokens")
    sub = kind("prefill", "prompt tokens a second")
    tokens(sub, "--tokens", 512, "prompt tokens")
    sub = kind("batch", "tokens a second of several sequences decoded together")
    tokens(sub, "--sequences", 8, "sequences")
    tokens(sub, "--context", 16, "tokens before the first new one")
    tokens(sub, "--tokens", 64, "new tokens of each sequence")
    sub = kind("latency", "time to first token and between tokens of one sequence, in this process: p50, p95, p99")
    sub.add_argument(
        "--prompts",
        type=_lengths,
        metavar="N,N,…",
        help="prompt tokens (default: those of 16,128,1024 that fit the context)",
    )
    tokens(sub, "--tokens", 64, "new tokens after the first")
    sub = kind("perplexity", "how well the model predicts a text: what quantizing weights, activations or KV costs")
    tokens(sub, "--tokens", 1024, "most tokens of the text")
    sub.add_argument("--text", metavar="FILE", help="a text of your own (default: a short fixed one)")
    sub = kind("startup", "from exec to the first token of `zse run` and `zse serve`, page cache warm and dropped")
    sub.add_argument("--warm-only", action="store_true", help="leave the page cache alone")
    text = "`zse serve`: exec to first token over HTTP, then several clients at once; or workloads, against any server"
    sub = kind("serve", text)
    sub.add_argument(
        "--clients", type=_counts, default=[1, 4, 8], metavar="N,N,…", help="clients at once (default: 1,4,8)"
    )
    tokens(sub, "--tokens", 64, "longest reply of a client")
    bench_serve.add_workload_options(sub)
    bench_serve.add_ablation(kinds)
    text = "show, compare and draw reports of `zse bench serve --workload`"
    sub = kinds.add_parser("report", help=text, description=text)
    sub.add_argument("files", nargs="+", metavar="FILE", help="reports, in the order of the page")
    bench_serve.add_report_options(sub)


def _counts(text: str, most: int = 256, example: str = "1,4,8") -> list[int]:
    counts = [int(word) for word in text.split(",") if word.isdecimal()]
    if len(counts) != text.count(",") + 1 or not all(1 <= count <= most for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to {most}, as in {example}")
    return counts


def _lengths(text: str) -> list[int]:
    return _counts(text, 1 << 24, "128,1024")


def run(args) -> int:
    if args.kind in ("report", "ablation"):
        return bench_serve.report(args) if args.kind == "report" else bench_serve.ablation(args, _engine_words(args))
    if args.kind == "serve":
        bench_serve.check(args)
        if args.workload:
            return bench_serve.run(args, _engine_words(args))
    result = {"bench": args.kind, "model": args.model, **_measure(args), "machine": process.machine()}
    if isinstance(args.json, str) and args.json != "-":
        reports.write(args.json, json.dumps(result, indent=1) + "\n")
    if args.json is True or args.json == "-":
        print(json.dumps(result, indent=1))
    else:
        print(_text(result))
    return 0


def _measure(args) -> dict:
    if args.kind in ("startup", "serve"):
        store.ensure(args.model)  # fetching must not be measured
        options = _engine_words(args)
        if args.kind == "startup":
            return bench_startup.startup(args.model, args.repeats, options, cold=not args.warm_only)
        return bench_serving.serving(args.model, args.clients, args.tokens, options)
    llm = cli_options.open_llm(args, max_rows=args.sequences if args.kind == "batch" else 1)
    try:
        if args.kind == "decode":
            result = speed.decode(llm, args.context, args.tokens, args.repeats)
        elif args.kind == "prefill":
            result = speed.prefill(llm, args.tokens, args.repeats)
        elif args.kind == "latency":
            result = _latency(llm, args)
        elif args.kind == "perplexity":
            result = perplexity.measure(llm, args.tokens, _read(args.text) if args.text else None)
        else:
            result = speed.batch(llm, args.sequences, args.context, args.tokens, args.repeats)
    finally:
        llm.close()
    return {
        **result,
        "threads": llm.config.threads,
        "activations": llm.config.activations,
        "kv_dtype": llm.config.kv_dtype,
        "kv_page_bytes": llm.config.kv_bytes // llm.config.num_pages,
        "peak_memory_bytes": process.peak_memory_bytes(),
    }


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {error}") from None


def _latency(llm, args) -> dict:
    fitting = [length for length in PROMPTS if length + args.tokens < llm.config.max_context]
    return {
        "tokens": args.tokens,
        "repeats": args.repeats,
        "latency": [
            speed.latency(llm, length, args.tokens, args.repeats) for length in args.prompts or fitting or PROMPTS[:1]
        ],
    }


def _engine_words(args) -> list[str]:
    """The engine's options again as command-line words, for the process that is measured."""
    return [
        word
        for name, value in cli_options.engine_options(args).items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _text(result: dict) -> str:
    lines = []
    for name, value in result.items():
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
