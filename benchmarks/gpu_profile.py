"""Where a step of a whole model spends its time on a GPU: every kernel of the recordings that decode and prefill use.

    python benchmarks/gpu_profile.py MODEL... [--rows 1,16] [--prompts 1024] [--context 4096]

For each recording: the time of a replay as the engine runs it (captured, overlapping), and the launches one by one with
an event between (each reads about 2 µs too long: the event), summed by kernel.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from gpu_models import greedy

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases

REPEATS = 5


def replay_us(graph, symbols: dict[str, int]) -> float:
    """Microseconds of a replay, many in a row."""
    for _ in range(3):
        graph.run(**symbols)
    count = 20
    start = time.perf_counter()
    tickets = [graph.submit(**symbols) for _ in range(count)]
    tickets[-1].wait()
    return 1e6 * (time.perf_counter() - start) / count


def show(name: str, graph, symbols: dict[str, int]) -> None:
    runs = [graph.profile(**symbols) for _ in range(REPEATS)]
    times = [sorted(ns)[REPEATS // 2] / 1e3 for ns in zip(*[[ns for _, ns in run] for run in runs], strict=True)]
    totals: dict[str, list[float]] = {}
    for (symbol, _), spent in zip(runs[0], times, strict=True):
        totals.setdefault(symbol, []).append(spent)
    serial = sum(times)
    print(f"== {name} {symbols}: replay {replay_us(graph, symbols):.0f} us, {len(times)} launches one by one "
          f"{serial:.0f} us")
    for symbol, spent in sorted(totals.items(), key=lambda item: -sum(item[1])):
        total, count = sum(spent), len(spent)
        print(f"  {total:9.1f} us {100 * total / serial:5.1f} %  {count:4} x {total / count:8.2f} us  {symbol}")
    sys.stdout.flush()


def profile(path: str, args) -> None:
    rows, prompts = ([int(word) for word in text.split(",") if word] for text in (args.rows, args.prompts))
    start = time.perf_counter()
    loaded = load_engine(EngineConfig(model=path, device="cuda", max_context=args.context, max_rows=max(rows)),
                         Phases(lambda: time.perf_counter() - start))
    engine, rng, vocab = loaded.engine, random.Random(1), loaded.model_config.vocab_size
    runner, used = engine.runner, {}
    replay = runner._replay

    def noted(kind, size, turn, tokens, lines, context):
        handle = replay(kind, size, turn, tokens, lines, context)
        graph = runner._graphs[kind, size, turn.number]
        symbols = runner.decoder.symbols(tokens, lines, context, max_tokens=size)
        used[kind, tokens] = graph, {name: symbols[name] for name in graph.symbols}
        return handle

    runner._replay = noted
    number = 0
    for count in rows:
        used.clear()
        for _ in range(count):
            engine.submit(number, [rng.randrange(vocab) for _ in range(args.prompt)], greedy(24))
            number += 1
        while engine.has_work:
            engine.step()
            if ("decode", count) in used and count:
                found = used["decode", count]
        show(f"{Path(path).name} decode", *found)
    for length in prompts:
        used.clear()
        engine.submit(number, [rng.randrange(vocab) for _ in range(length)], greedy(1))
        number += 1
        while engine.has_work:
            engine.step()
        (kind, _), found = max(used.items(), key=lambda item: item[0][1])
        show(f"{Path(path).name} {kind}", *found)
    engine.close()
    loaded.source.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--prompts", default="1024")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts before decoding")
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    for path in args.models:
        profile(path, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
