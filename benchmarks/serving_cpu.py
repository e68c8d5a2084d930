"""What the serving features are worth on a CPU, each as a ratio with its bar, measured over HTTP in one run.

    python benchmarks/serving_cpu.py MODEL.gguf [batching|chunked|prefix|ngram|structured ...] [--threads 2] [--rounds 3] [--json FILE]

Without names: all of them, about six minutes for a model of 135M parameters on two cores. Both sides of a ratio take turns, and the
median of the rounds counts; what else runs on the machine hits both. Exit code 1 when a bar is missed.

batching    tokens a second of a burst, continuous over static batching: at least 1.5. Eight rows; 42 of 48 replies have 16
            tokens, the others 384. (A step of a CPU takes about as long as its rows: what static batching loses is the time in which a
            few long replies read the weights alone. Drafts fill such steps too, so there are none here; with them it is shown beside
            it, as is infer's burst, whose replies all have 128 to 256 tokens.)
chunked     four replies run when a prompt of 4,096 tokens arrives: p99 of their times between tokens until its first token, over p99
            without it: at most 3. The prompt's time to its first token over the same on an idle server: at most 1.5. As the server
            is (replies of random prompts repeat themselves and have drafts, so their steps are long), and without drafts.
prefix      time to the first token of a prompt of 1,040 tokens, 1,024 of which are cached, over the same with nothing cached: at most
            0.1.
ngram       tokens a second with prompt lookup over without: at least 1.5 where a text is to be repeated; at least 0.97 on a story, for
            one client and for eight.
structured  time per token of a reply that a JSON schema binds over that of free text: at most 1.05.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from itertools import pairwise
from time import perf_counter

from zse.bench import process
from zse.bench.client import Outcome, Target, stream
from zse.bench.load import LoadSettings, run_workload
from zse.bench.percentiles import percentile
from zse.bench.serving import RunningServer
from zse.bench.workloads import WORDS, WORKLOADS, Workload

VOCABULARY = 30_000  # ids below it are in every model's vocabulary
TIMEOUT_S = 300
BURST = Workload("burst_long_tail", "burst", 0, (32, 64), (16, 16), "short replies and a few long ones", warm_up=1)
TEXT = " ".join(random.Random(5).choices(WORDS, k=160))
COPY = (
    f"Repeat the following text word for word.\n\n{TEXT}\n\nThe text once more, word for word:\n\n{TEXT}\n\n"
    "And again, word for word:\n\n"
)
STORY = "Write a long story about a lighthouse keeper who finds a letter in a bottle."
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "age": {"type": "integer"},
                    "city": {"type": "string", "maxLength": 20},
                },
                "required": ["name", "age", "city"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("bars", nargs="*", metavar="BAR", help=", ".join(BARS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    unknown = [name for name in args.bars if name not in BARS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(BARS)}")
    print(process.machine(), flush=True)
    results = []
    for name in args.bars or BARS:
        start = perf_counter()
        for what, value, bar in BARS[name](args):
            met = None if bar is None else value >= bar[1] if bar[0] == ">=" else value <= bar[1]
            verdict = "" if bar is None or met is None else f"  (bar {bar[0]} {bar[1]}: {'met' if met else 'MISSED'})"
            print(f"{name:<11}{what}: {value:.3f}{verdict}", flush=True)
            results.append({"bar": name, "what": what, "value": value, "bound": bar, "met": met})
        print(f"{name:<11}took {perf_counter() - start:.0f} s", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": process.machine(), "results": results}, file, indent=1)
    return int(any(result["met"] is False for result in results))


# -- asking


def serve(args, *options: str) -> RunningServer:
    return RunningServer(args.model, ["--threads", str(args.threads), *options])


async def ask(
    server: RunningServer,
    max_tokens: int,
    *,
    prompt=None,
    chat: str | None = None,
    outcome: Outcome | None = None,
    may_hit: bool = False,
    **fields,
) -> Outcome:
    """One streamed greedy request. SystemExit when it fails, and when it finds cached tokens that it may not."""
    target = Target.of(f"http://127.0.0.1:{server.port}/v1")
    body = {
        "model": "bench",
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    if chat is not None:
        body["messages"] = [{"role": "user", "content": chat}]
    else:
        body["prompt"] = prompt
    outcome = await stream(target, "/completions" if chat is None else "/chat/completions", body, TIMEOUT_S, outcome)
    if outcome.error is not None:
        raise SystemExit(f"a request failed: {outcome.error}")
    if outcome.cached_tokens and not may_hit:
        raise SystemExit(f"{outcome.cached_tokens} tokens of a prompt came from the cache")
    return outcome


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, VOCABULARY) for _ in range(count)]


def speed(outcome: Outcome) -> float:
    """Tokens a second after the first."""
    return (outcome.tokens - 1) / (outcome.clocks_s[-1] - outcome.clocks_s[0])


# -- bars: each yields (what, value, (comparison, bound) or None)


def batching(args):
    for workload, speculation, bar in (
        (BURST, "none", (">=", 1.5)),
        (BURST, "ngram", None),
        (WORKLOADS["paged_attention"], "none", None),
    ):
        rates: dict[str, list[float]] = {"continuous": [], "static": []}
        for number in range(args.rounds if bar else 1):
            for kind, found in rates.items():
                with serve(
                    args,
                    "--max-rows",
                    "8",
                    "--max-context",
                    "1024",
                    "--batching",
                    kind,
                    "--no-prefix-cache",
                    "--speculation",
                    speculation,
                ) as server:
                    found.append(asyncio.run(_burst(server, workload, number)))
        drafts = ", with drafts" if speculation == "ngram" else ""
        yield (
            f"continuous over static, {workload.name}{drafts}",
            statistics.median(rates["continuous"]) / statistics.median(rates["static"]),
            bar,
        )


async def _burst(server: RunningServer, workload: Workload, seed: int) -> float:
    """Tokens a second of a burst of 48; infer's at half its lengths, 24 requests."""
    if workload is not BURST:
        figures = await run_workload(
            Target.of(f"http://127.0.0.1:{server.port}/v1"),
            "bench",
            workload,
            LoadSettings(scale=0.5, vocab_size=VOCABULARY, timeout_s=TIMEOUT_S),
        )
        if figures["failures"] or figures["cached_tokens"]:
            raise SystemExit(f"{workload.name}: {figures['errors'] or 'cached tokens'}")
        return figures["output_tok_per_s"]
    await ask(server, 4, prompt=ids(16, 1))
    rng = random.Random(seed)
    lengths = [384] * 6 + [16] * 42
    rng.shuffle(lengths)
    start = perf_counter()
    outcomes = await asyncio.gather(
        *(
            ask(server, length, prompt=ids(rng.randint(32, 64), 100 + number), ignore_eos=True)
            for number, length in enumerate(lengths)
        )
    )
    return sum(outcome.tokens for outcome in outcomes) / (perf_counter() - start)


def chunked(args):
    for speculation in ("ngram", "none"):
        with serve(args, "--max-context", "8192", "--no-prefix-cache", "--speculation", speculation) as server:
            ratios = [asyncio.run(_chunked(server, number)) for number in range(args.rounds)]
        drafts = ", no drafts" if speculation == "none" else ""
        for index, (what, bar) in enumerate(
            (
                ("others' ITL p99 beside a prompt of 4,096 over idle", ("<=", 3)),
                ("the prompt's TTFT beside four replies over alone", ("<=", 1.5)),
            )
        ):
            yield what + drafts, statistics.median(ratio[index] for ratio in ratios), bar
        yield f"TTFT of 4,096 tokens alone, s{drafts}", statistics.median(ratio[2] for ratio in ratios), None
        yield f"others' ITL p99 idle, ms{drafts}", statistics.median(ratio[3] for ratio in ratios), None


async def _chunked(server: RunningServer, seed: int) -> tuple[float, float, float, float]:
    alone = (await ask(server, 2, prompt=ids(4096, 10 + seed), ignore_eos=True)).ttft_ms
    running = [Outcome(0.0) for _ in range(4)]
    tasks = [
        asyncio.create_task(
            ask(server, 7000, prompt=ids(64, 20 + 10 * seed + number), ignore_eos=True, outcome=outcome)
        )
        for number, outcome in enumerate(running)
    ]
    await asyncio.sleep(3.0)
    prompt = await ask(server, 2, prompt=ids(4096, 30 + seed), ignore_eos=True)
    sent, first = prompt.sent_s, prompt.clocks_s[0]
    begin = sent - 2.0  # the first second holds the prompts of the four
    for task in tasks:
        if task.done():
            raise SystemExit("chunked: a reply ended before the prompt had its first token")
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = {True: [], False: []}
    for outcome in running:
        for before, after in pairwise(outcome.clocks_s):
            if before >= begin and after <= first:
                gaps[after > sent].append(1000 * (after - before))
    idle = percentile(gaps[False], 99)
    return percentile(gaps[True], 99) / idle, prompt.ttft_ms / alone, alone / 1000, idle


def prefix(args):
    with serve(args, "--max-context", "2048") as server:
        ratios, misses = [], []
        asyncio.run(ask(server, 2, prompt=ids(64, 1)))
        for number in range(max(3, args.rounds)):
            shared = ids(1024, 40 + number)
            miss, hit = (
                asyncio.run(
                    ask(
                        server, 2, prompt=shared + ids(16, 50 + 2 * number + which), ignore_eos=True, may_hit=which == 1
                    )
                )
                for which in (0, 1)
            )
            if not hit.cached_tokens:
                raise SystemExit("prefix: the second prompt hit nothing")
            ratios.append(hit.ttft_ms / miss.ttft_ms)
            misses.append(miss.ttft_ms)
    yield "TTFT of a hit over a miss", statistics.median(ratios), ("<=", 0.1)
    yield "TTFT of a miss, ms", statistics.median(misses), None


def ngram(args):
    with (
        serve(args, "--max-context", "2048", "--no-prefix-cache", "--speculation", "none") as plain,
        serve(args, "--max-context", "2048", "--no-prefix-cache", "--speculation", "ngram") as drafting,
    ):
        for what, request, count, bar in (
            ("a text to repeat", {"prompt": COPY}, 1, 1.5),
            ("a story", {"chat": STORY}, 1, 0.97),
            ("a story, eight clients", {"chat": STORY}, 8, 0.97),
            ("random tokens", {"prompt": ids(128, 3)}, 1, 0.97),
        ):
            ratios = []
            for _ in range(args.rounds):
                without, with_drafts = (asyncio.run(_together(server, request, count)) for server in (plain, drafting))
                ratios.append(with_drafts / without)
            yield f"with prompt lookup over without, {what}", statistics.median(ratios), (">=", bar)


async def _together(server: RunningServer, request: dict, count: int) -> float:
    """Tokens a second of `count` equal requests, from the first token of the last to start."""
    outcomes = await asyncio.gather(*(ask(server, 192, ignore_eos=True, **request) for _ in range(count)))
    if count == 1:
        return speed(outcomes[0])
    return sum(outcome.tokens for outcome in outcomes) / (
        max(each.done_s for each in outcomes) - min(each.sent_s for each in outcomes)
    )


def structured(args):
    schema = {"type": "json_schema", "json_schema": {"name": "people", "strict": True, "schema": SCHEMA}}
    chat = "List forty people with name, age and city as JSON."
    with serve(args, "--max-context", "2048", "--no-prefix-cache", "--speculation", "none") as server:
        asyncio.run(ask(server, 8, chat=chat, response_format=schema))  # compiles the grammar
        for count in (1, 8):
            ratios = []
            for _ in range(args.rounds):
                free = asyncio.run(_tpot(server, count, chat=chat, ignore_eos=True))
                bound = asyncio.run(_tpot(server, count, chat=chat, response_format=schema))
                ratios.append(bound / free)
            clients = f"{count} client{'s' if count > 1 else ''}"
            yield f"time per token with a schema over without, {clients}", statistics.median(ratios), ("<=", 1.05)


async def _tpot(server: RunningServer, count: int, **request) -> float:
    outcomes = await asyncio.gather(*(ask(server, 256, **request) for _ in range(count)))
    return statistics.median(outcome.tpot_ms for outcome in outcomes)


BARS = {"batching": batching, "chunked": chunked, "prefix": prefix, "ngram": ngram, "structured": structured}


if __name__ == "__main__":
    sys.exit(main())
