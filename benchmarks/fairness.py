"""Time to first token of a tenant that sends one request a second, alone and beside the clients of another one.

    python benchmarks/fairness.py MODEL [--clients 2 16 150] [--seconds 30] [--prompt 64] [--threads 2] [--serve "OPTIONS"]

One `zse serve` with two keys. "calm" streams a prompt of --prompt random token ids and 16 tokens of reply each second;
"flood" has N clients in a process of their own, each of which sends its next request when the last one was answered:
prompts of 32 to 256 tokens, replies of 32 to 128. Everything is drawn with a fixed seed; the server has neither prefix cache nor drafts. Printed for each N: the 50th and 99th percentile
of calm's time to first token, the 99th over the 99th alone (bar: 2), and the tokens a second of both, prompts and replies,
beside what the flood had without calm. Exit code 1 when the bar is missed.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from time import perf_counter

from zse.bench import process
from zse.bench.client import Outcome, Target, stream
from zse.bench.percentiles import percentile
from zse.bench.serving import RunningServer

KEYS = {"calm": "sk-calm", "flood": "sk-flood"}
VOCABULARY = 30_000  # ids below it are in every model's vocabulary
TIMEOUT_S = 300.0
WARM_UP_S = 6.0  # of the flood, before anything counts
REPLY, BAR = 16, 2.0


def body(draw: random.Random, prompt_tokens: int, max_tokens: int) -> dict:
    return {
        "model": "bench",
        "prompt": [draw.randrange(10, VOCABULARY) for _ in range(prompt_tokens)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def calm(url: str, seconds: float, prompt_tokens: int, seed: int) -> list[Outcome]:
    """A request each second, whether the last one was answered or not."""
    target, draw, start = Target.of(url, KEYS["calm"]), random.Random(seed), perf_counter()
    sent = []
    for number in range(int(seconds)):
        await asyncio.sleep(max(0.0, start + number - perf_counter()))
        sent.append(asyncio.create_task(stream(target, "/completions", body(draw, prompt_tokens, REPLY), TIMEOUT_S)))
    outcomes = await asyncio.gather(*sent)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return outcomes


async def flood(url: str, clients: int, seconds: float) -> None:
    """Closed loops for `seconds`. Prints tokens a second, of prompts and replies, after WARM_UP_S."""
    target, outcomes = Target.of(url, KEYS["flood"]), []
    start = perf_counter()

    async def loop(seed: int) -> None:
        draw = random.Random(seed)
        while True:
            outcomes.append(outcome := Outcome(0.0))
            prompt_tokens, reply = draw.randint(32, 256), draw.randint(32, 128)
            outcome.prompt_tokens = prompt_tokens
            await stream(target, "/completions", body(draw, prompt_tokens, reply), TIMEOUT_S, outcome)
            if outcome.error:
                await asyncio.sleep(0.2)

    loops = [asyncio.create_task(loop(number)) for number in range(clients)]
    await asyncio.sleep(seconds)
    for each in loops:
        each.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    since = start + WARM_UP_S
    began = sum(
        (outcome.prompt_tokens or 0) for outcome in outcomes if outcome.clocks_s and outcome.clocks_s[0] >= since
    )
    replied = sum(clock >= since for outcome in outcomes for clock in outcome.clocks_s)
    print(json.dumps((began + replied) / (seconds - WARM_UP_S)))


def flooded(url: str, clients: int, seconds: float) -> subprocess.Popen:
    command = [sys.executable, __file__, url, "--flood", str(clients), "--seconds", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(child: subprocess.Popen) -> float:
    output, _ = child.communicate(timeout=TIMEOUT_S)
    if child.returncode:
        raise SystemExit("the flood failed")
    return json.loads(output)


def times(outcomes: list[Outcome]) -> list[float]:
    return [outcome.ttft_ms for outcome in outcomes]


def measure(args, url: str) -> bool:
    asyncio.run(calm(url, 5, args.prompt, 1))
    idle = times(asyncio.run(calm(url, args.seconds, args.prompt, 2)))
    idle_p99 = percentile(idle, 99)
    print(f"alone: TTFT p50 {percentile(idle, 50):.1f} ms, p99 {idle_p99:.1f} ms", flush=True)
    is_met = True
    for clients in args.clients:
        alone = 0.0 if args.no_alone else ended(flooded(url, clients, WARM_UP_S + args.seconds))
        child = flooded(url, clients, WARM_UP_S + args.seconds + 1)
        time.sleep(WARM_UP_S)
        outcomes = asyncio.run(calm(url, args.seconds, args.prompt, 3))
        beside, others = times(outcomes), ended(child)
        own = sum(args.prompt + outcome.tokens for outcome in outcomes) / args.seconds
        ratio = percentile(beside, 99) / idle_p99
        is_met = is_met and ratio <= BAR
        print(
            f"{clients} clients: TTFT p50 {percentile(beside, 50):.1f} ms, p99 {percentile(beside, 99):.1f} ms, {ratio:.2f} x; "
            f"tokens a second: {others + own:.0f} of both, {alone:.0f} of the flood alone",
            flush=True,
        )
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 16, 150])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", default="", help="options of `zse serve`")
    parser.add_argument("--no-alone", action="store_true", help="do not measure the flood without the other tenant")
    parser.add_argument("--flood", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.flood:
        asyncio.run(flood(args.model, args.flood, args.seconds))
        return 0
    print(process.machine(), flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        keys.flush()
        # Neither cached prompts nor drafts: both would flatter, and a seed comes again.
        plain = ["--no-prefix-cache", "--speculation", "none"]
        options = ["--api-key-file", keys.name, "--threads", str(args.threads), *plain, *args.serve.split()]
        with RunningServer(args.model, options) as server:
            return 0 if measure(args, server.url) else 1


if __name__ == "__main__":
    sys.exit(main())
