"""What scheduling gives on a CPU: replies beside a long prompt, and a tenant beside a flood.

    python benchmarks/scheduling.py chunk MODEL [--rows 4] [--prompt 4096] [--mixed-ratio X]
    python benchmarks/scheduling.py fairness MODEL [--seconds 20]

chunk: four replies run; a prompt of 4,096 tokens arrives. Printed: the 50th and 99th percentile of the time between
tokens without and with it, and its time to first token alone and beside the replies. fairness: one tenant has 1,000
requests queued, another sends one each second; the latter's latency, alone and beside the flood.
"""

import argparse
import random
import time

from zse.bench.percentiles import percentile


class Load:
    """Requests of random token ids on one engine; when each token came."""

    def __init__(self, model, **options):
        from zse.engine.llm import LLM

        self.llm = LLM(model, prefix_cache=False, speculation="none", **options)
        self.engine = self.llm._engine
        self.rng = random.Random(1)
        self.times: dict[int, list[float]] = {}
        self.submitted: dict[int, float] = {}
        self.ended: set[int] = set()

    def submit(self, prompt_len: int, max_tokens: int, tenant: str = "") -> int:
        from zse.sampling.params import SamplingParams
        from zse.scheduler.options import RequestOptions

        id = len(self.times)
        prompt = [self.rng.randrange(10, self.llm.vocab_size) for _ in range(prompt_len)]
        self.times[id], self.submitted[id] = [], time.perf_counter()
        self.engine.submit(
            id,
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            RequestOptions(tenant=tenant),
        )
        return id

    def step(self) -> None:
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            self.times[output.id] += [now] * len(output.tokens)
            if output.finish:
                self.ended.add(output.id)

    def run_until(self, is_over) -> None:
        while not is_over():
            self.step()

    def gaps(self, ids, start: float, end: float) -> list[float]:
        """Times between tokens that ended within [start, end]."""
        return [
            after - before
            for id in ids
            for before, after in zip(self.times[id], self.times[id][1:], strict=False)
            if start <= after <= end
        ]

    def cancel_all(self) -> None:
        for id in self.times:
            if id not in self.ended:
                self.engine.cancel(id)
                self.ended.add(id)


def chunk(args) -> None:
    load = Load(args.model, mixed_ratio=args.mixed_ratio, max_context=args.prompt + 512)
    for _ in range(2):  # the first warms up
        long = load.submit(args.prompt, 2)
        load.run_until(lambda: load.times[long])
        alone = load.times[long][0] - load.submitted[long]
        load.cancel_all()
    ids = [load.submit(32, 100_000 if args.prompt > 100_000 else 480) for _ in range(args.rows)]
    load.run_until(lambda: all(len(load.times[id]) > 20 for id in ids))
    start = time.perf_counter()
    load.run_until(lambda: len(load.times[ids[0]]) > 150)
    idle = load.gaps(ids, start, time.perf_counter())
    long = load.submit(args.prompt, 2)
    load.run_until(lambda: load.times[long] or any(id in load.ended for id in ids))
    if not load.times[long]:
        raise SystemExit("the replies ended before the prompt was computed: fewer prompt tokens, please")
    beside = load.times[long][0] - load.submitted[long]
    busy = load.gaps(ids, load.submitted[long], load.times[long][0])
    print(
        f"between tokens, ms: idle p50 {1e3 * percentile(idle, 50):.1f} p99 {1e3 * percentile(idle, 99):.1f}; beside "
        f"the prompt p50 {1e3 * percentile(busy, 50):.1f} p99 {1e3 * percentile(busy, 99):.1f}: "
        f"p99 {percentile(busy, 99) / percentile(idle, 99):.2f}x"
    )
    print(
        f"time to first token of {args.prompt} tokens, s: alone {alone:.2f}, beside {beside:.2f}: {beside / alone:.2f}x"
    )


def fairness(args) -> None:
    load = Load(
        args.model, max_context=1024, fair_share=not args.no_fair_share, max_rows=args.rows or None, max_waiting=2000
    )

    def visits(seconds: float) -> list[float]:
        start, ids = time.perf_counter(), []
        while time.perf_counter() < start + seconds or ids[-1] not in load.ended:
            due = len(ids) < seconds and time.perf_counter() >= start + len(ids)
            if due:
                ids.append(load.submit(64, 32, "b"))
            if load.engine.has_work:
                load.step()
            else:
                time.sleep(0.001)
        return [load.times[id][-1] - load.submitted[id] for id in ids]

    visits(3)
    idle = visits(args.seconds)
    for _ in range(1000):
        load.submit(64, 128, "a")
    for _ in range(100):
        load.step()
    busy = visits(args.seconds)
    made = sum(len(times) for id, times in load.times.items())
    print(
        f"latency of b, s: alone p50 {percentile(idle, 50):.3f} p99 {percentile(idle, 99):.3f}; beside the flood "
        f"p50 {percentile(busy, 50):.3f} p99 {percentile(busy, 99):.3f}: p99 "
        f"{percentile(busy, 99) / percentile(idle, 99):.2f}x; {made} tokens in all"
    )
    load.cancel_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, run in (("chunk", chunk), ("fairness", fairness)):
        kind = kinds.add_parser(name)
        kind.add_argument("model")
        kind.add_argument("--rows", type=int, default=4 if name == "chunk" else 0)
        kind.set_defaults(run=run)
    kinds.choices["chunk"].add_argument("--prompt", type=int, default=4096)
    kinds.choices["chunk"].add_argument("--mixed-ratio", type=float)
    kinds.choices["fairness"].add_argument("--seconds", type=float, default=20)
    kinds.choices["fairness"].add_argument("--no-fair-share", action="store_true")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
