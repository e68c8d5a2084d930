"""`zse bench serve --workload`, `ablation` and `report`: workloads against a server, reports, the gate and the page."""

import argparse
import json
import os
import shlex
import sys

from zse import env
from zse.bench import ablation as ablations
from zse.bench import client, load, page, reports, serving, workloads
from zse.cli.options import ENGINE_OPTIONS, locate
from zse.cli.parser import FLAG, MODEL, Amount, Group, ReadBy, arg, option
from zse.errors import ConfigError


def _rates(text: str) -> list[float]:
    """argparse type: requests a second with commas between."""
    try:
        rates = [Amount(float, above=0, high=10000)(word) for word in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates, as in 1,2,4.5") from None
    return sorted(set(rates))


_SCALE = option(
    "--scale",
    Amount(float, above=0, high=1, shown="S"),
    "multiply numbers of requests and lengths, for small machines",
    1.0,
)
_SEED = option("--seed", Amount(int, 0), "of lengths, arrivals and prompts", 42)
_GATE = (
    option("--compare", "FILE", "fail if a figure is worse than in this report"),
    option("--tolerance", Amount(float, 0, shown="PERCENT"), "how much worse --compare lets it be", 5.0),
    option("--page", "FILE", "draw the reports as one HTML page"),
)
# What `zse bench serve` takes beside MODEL and the engine's options.
WORKLOADS = Group(
    "workloads",
    (
        option(
            "--workload",
            "NAME,…",
            "send these instead of --clients: infer, zedinfer, all, qps_sweep, baseline, … "
            "(docs/benchmarks.md has the table)",
        ),
        option(
            "--url",
            "URL",
            "a running OpenAI-compatible server, as http://127.0.0.1:8000/v1, in place of MODEL; its key is read from "
            "ZSE_API_KEY",
        ),
        option("--model", "NAME", "the model's name at --url (default: its first)", dest="served_model"),
        _SCALE,
        _SEED,
        option("--qps", ReadBy(_rates, "R,R,…"), "requests a second of qps_sweep (default: 1,2,4,8,16)"),
        option(
            "--prompt-ids",
            Amount(int, 200, shown="VOCAB"),
            "prompts of random token ids below VOCAB, which have exact lengths, in place of text",
        ),
        option("--chat", FLAG, "ask /chat/completions instead of /completions"),
        option("--no-ignore-eos", FLAG, "leave ignore_eos out, for servers that refuse it"),
        option("--timeout", Amount(float, above=0, shown="SECONDS"), "of one request; longer ones have failed", 300.0),
        option(
            "--server-options",
            "WORDS",
            'options for the `zse serve` that is started, as in --server-options="--max-rows 1"',
            "",
        ),
        option("--label", "TEXT", "what the report is called on the page (default: the model's)"),
        *_GATE,
    ),
)
ABLATION = (
    "what each serving feature is worth: a workload with all of them off, then with one more switched on at a time",
    (
        MODEL,
        option(
            "--workload",
            "NAME,…",
            "what each server is sent (default: ablation; docs/benchmarks.md has the table)",
            "ablation",
        ),
        option("-o --output", "DIR", "folder for a report of each row and ablation.html, made if need be", "ablation"),
        _SCALE,
        _SEED,
        ENGINE_OPTIONS,
    ),
)
REPORT = (
    "show, compare and draw reports of `zse bench serve --workload`",
    (arg("files", nargs="+", metavar="FILE", help="reports, in the order of the page"), *_GATE),
)


def ablation(args, options: list[str]) -> int:
    """`zse bench ablation`. options: the engine's, as words."""
    chosen = workloads.select(args.workload.split(","))
    if any(each.rates for each in chosen):
        raise ConfigError("an ablation takes workloads, not a sweep over request rates")
    try:
        os.makedirs(args.output, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: {error.strerror}") from None
    locate(args.model)  # fetching must not be measured

    def tell(label: str, name: str, figures: dict) -> None:
        print(f"{label}\n{reports.text(name, figures)}", flush=True)

    settings = load.LoadSettings(args.seed, args.scale)
    found: list[dict] = []
    rows = ablations.ablation(args.model, chosen, settings, options, _command(args), tell, env.get("ZSE_API_KEY"))
    for each in rows:
        _store(os.path.join(args.output, f"{len(found)}.json"), each)
        found.append(each)
    reports.write(os.path.join(args.output, "ablation.html"), page.page(found, "zse bench ablation"))
    first = found[0]["workloads"]
    for each in found:
        gains = (
            f"{name} {run['output_tok_per_s'] / first[name]['output_tok_per_s']:.2f}×"
            for name, run in each["workloads"].items()
        )
        print(f"{each['label']:<24}{', '.join(gains)}")
    return 0


def _command(args) -> str:
    return shlex.join(["zse", *args.command_line])


_WORKLOAD_ONLY = "url served_model qps prompt_ids chat no_ignore_eos server_options label compare page".split()


def check(args) -> None:
    """ConfigError: options that do not go together."""
    if not args.workload:
        wrong = next((name for name in _WORKLOAD_ONLY if getattr(args, name)), None)
        if wrong:
            raise ConfigError(f"--{wrong.replace('served_model', 'model').replace('_', '-')} needs --workload NAME")
        if not args.model:
            raise ConfigError("MODEL is missing (see `zse bench serve --help`)")
    elif bool(args.model) == bool(args.url):
        raise ConfigError("name either a MODEL, for which a server is started, or a running server with --url")
    elif args.url and args.server_options:
        raise ConfigError("--server-options are for a server that is started here; --url names a running one")
    elif args.model and args.served_model:
        raise ConfigError("--model is the name at --url; MODEL needs none")
    elif args.chat and args.prompt_ids:
        raise ConfigError("--prompt-ids needs /completions: a chat has text only")


def run(args, options: list[str]) -> int:
    """`zse bench serve --workload`. options: the engine's, as words. Exit code 1: the gate, or no request succeeded."""
    chosen = workloads.select(args.workload.split(","))
    settings = load.LoadSettings(
        args.seed, args.scale, args.prompt_ids, args.chat, not args.no_ignore_eos, args.timeout
    )
    baseline = reports.read(args.compare) if args.compare else None
    try:
        options = [*options, *shlex.split(args.server_options)]
    except ValueError as error:
        raise ConfigError(f"--server-options: {error}") from None
    quiet = args.json == "-"

    def tell(name: str, figures: dict) -> None:
        if not quiet:
            print(reports.text(name, figures), flush=True)

    head = reports.head(_command(args), settings, args.url, options)
    if args.url:
        target = client.Target.of(args.url, env.get("ZSE_API_KEY"))
        found = load.measure(target, args.served_model, chosen, settings, args.qps, tell)
    else:
        locate(args.model)  # fetching must not be measured
        with serving.RunningServer(args.model, options) as server:
            target = client.Target.of(server.url, env.get("ZSE_API_KEY"))
            found = load.measure(target, None, chosen, settings, args.qps, tell)
        found["model"] = args.model
    report = {**head, "label": args.label or os.path.basename(found["model"].rstrip("/")), **found}
    _store(args.json, report)
    code = _finish(args, [*([baseline] if baseline else []), report], baseline, quiet)
    return code or int(all(run["failures"] == run["requests"] for run in report["workloads"].values()))


def report(args) -> int:
    """`zse bench report FILE…`: show stored reports, draw them, hold the last to a baseline."""
    found = [reports.read(path) for path in args.files]
    for each in found:
        print(f"{each['label']} ({each['model']}, {each['machine'].get('date')})")
        for name, figures in each["workloads"].items():
            print(reports.text(name, figures))
    return _finish(args, found, reports.read(args.compare) if args.compare else None, quiet=False)


def _store(where: str | None, report: dict) -> None:
    if where == "-":
        print(json.dumps(report, indent=1))
    elif where:
        reports.write(where, json.dumps(report, indent=1) + "\n")


def _finish(args, found: list[dict], baseline: dict | None, quiet: bool) -> int:
    """The page, then the gate: 1 and the lines that became worse, else 0."""
    if args.page:
        reports.write(args.page, page.page(found))
    if baseline is None:
        return 0
    if baseline["machine"].get("cpu") != found[-1]["machine"].get("cpu"):
        print("zse: the baseline is of another CPU", file=sys.stderr)
    worse = reports.compare(baseline, found[-1], args.tolerance)
    for change in worse:
        print(change.line(), file=sys.stderr)
    if not worse and not quiet:
        print(f"nothing is more than {args.tolerance:g} % worse than in {args.compare}")
    return int(bool(worse))
