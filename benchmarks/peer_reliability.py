"""The same attacks on `zse serve` and on llama.cpp's `llama-server`, one server after the other, with the same GGUF:

    python benchmarks/peer_reliability.py MODEL.gguf [--llama-server PATH] [--parts errors,loris,…] [--json FILE]

Each part starts servers of its own (8 rows of 2,048 tokens, one model) and attacks them through sockets as a stranger
could; tests/reliability/peer_parts.py says how. Prints a table with both servers' figures, and adds them to FILE, where those of other
parts stay. Run with the Python that has zse and the test requirements."""

import argparse
import json
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [
    str(TESTS / name) for name in ("reliability", "formats", "http", "server", "structured", "tokenizer", "models")
]

import peer_parts  # noqa: E402
import peer_servers  # noqa: E402

from zse.bench.process import machine  # noqa: E402


def table(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """found: part → server → figure → text."""
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    lines = [f"| part | figure | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for part, of in found.items():
        for figure in dict.fromkeys(figure for each in of.values() for figure in each):
            cells = (of.get(name, {}).get(figure, "").replace("|", "\\|") for name in names)
            lines.append(f"| {part} | {figure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--llama-options", default="", metavar="WORDS", help="more for llama-server")
    parser.add_argument("--without-zse", action="store_true", help="only the other server")
    parser.add_argument("--parts", default=",".join(peer_parts.PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--threads", type=int, default=2, help="of each server; 1 where others use the machine (default: 2)"
    )
    for name, value in (("seconds", 60.0), ("mutants", 20_000), ("requests", 10_000), ("sockets", 1000)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = parser.parse_args()
    peer_servers.THREADS = given.threads
    peers = [] if given.without_zse else [peer_servers.zse()]
    if given.llama_server:
        peers.append(peer_servers.llama(given.llama_server, *given.llama_options.split()))
    settings = peer_parts.Settings(given.model, given.seconds, given.mutants, given.requests, given.sockets)
    found: dict = {}
    for part in given.parts.split(","):
        for peer in peers:
            start = time.monotonic()
            try:
                figures = peer_parts.PARTS[part](peer, settings)
            except peer_servers.NoStart as error:
                figures = {"start": str(error)}
            found.setdefault(part, {})[peer.name] = figures | {"this part": f"{time.monotonic() - start:.0f} s"}
            print(
                f"{part}, {peer.name}: {json.dumps(found[part][peer.name], ensure_ascii=False)}",
                file=sys.stderr,
                flush=True,
            )
            if given.json:
                kept = json.loads(given.json.read_text()) if given.json.exists() else {"parts": {}}
                kept["parts"].setdefault(part, {})[peer.name] = found[part][peer.name]
                given.json.write_text(json.dumps(kept | {"machine": machine()}, ensure_ascii=False, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
