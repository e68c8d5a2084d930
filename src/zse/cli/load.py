"""zse load: load a model in a server that runs."""

import sys

from zse.cli.parser import FLAG, arg, option
from zse.cli.remote import KEY, SERVER, server_of
from zse.cli.terminal import ProgressBar, size

EPILOG = """examples:
  zse load smollm2
  zse load qwen3-8b --pull --keep-alive 30m
  zse load gemma3-270m --server http://10.0.0.7:8000"""

ARGUMENTS = (
    arg("model", metavar="MODEL", help="a name that the server serves, or one of its store"),
    option("--pull", FLAG, "let the server fetch it first, if it is not in its store"),
    option(
        "--keep-alive",
        "DURATION",
        "how long it stays loaded without requests, such as 30m; -1s: for ever (default: the server's --idle-timeout)",
    ),
    SERVER,
    KEY,
)


def run(args) -> int:
    server = server_of(args)
    listed = server.ask("GET", "/admin/models")
    if all(args.model not in model["names"] for model in listed["models"]):
        if args.pull and all(args.model != model["name"] for model in listed["stored"]):
            with ProgressBar(args.model) as bar:
                server.follow(f"/admin/models/{args.model}/pull", {}, lambda event: _show_pull(bar, event))
        server.ask("POST", "/admin/models", {"model": args.model})
    body = {} if args.keep_alive is None else {"keep_alive": args.keep_alive}
    with ProgressBar(args.model) as bar:
        model = server.follow(f"/admin/models/{args.model}/load", body, lambda event: _show_load(bar, event))
    took = f" in {model['load_ms'] / 1000:.2f} s" if model["load_ms"] else ""
    sys.stdout.write(
        f"{args.model} is loaded{took}: {size(sum(model['memory_bytes'].values()))}, context {model['context']}\n"
    )
    return 0


def _show_pull(bar: ProgressBar, event: dict) -> None:
    if event["doing"]:
        bar(event["doing"], event["done_bytes"], event["total_bytes"])


def _show_load(bar: ProgressBar, event: dict) -> None:
    if event["progress"] is not None:
        bar("loading", round(1000 * event["progress"]), 1000)
