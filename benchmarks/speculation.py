"""Speculation on and off in turns, on copying and free prompts: tokens a second, their ratio, acceptance.

    python benchmarks/speculation.py MODEL [--draft-model MODEL] [--rounds 5] [--tokens 200] [--batch 1 4 8] [--temperature 0 0.8]

One engine; each round runs a workload without and with drafts, in changing order, so that what else the machine does
meets both alike. Figures are of the round with the median ratio; the replies are compared, a difference ends the run.
"total" sums the medians of a batch size: what a mixture of the workloads gains.
"""

import argparse
import statistics
import sys
import time

from zse import LLM, SamplingParams

CODE = '''class Inventory:
    def __init__(self, name):
        self.name = name
        self.items = {}

    def add(self, item, count=1):
        """Put `count` pieces of `item` on the shelf."""
        if count < 1:
            raise ValueError("count must be positive")
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item, count=1):
        """Take `count` pieces of `item` from the shelf."""
        if self.items.get(item, 0) < count:
            raise KeyError(f"not enough {item}")
        self.items[item] -= count
        if not self.items[item]:
            del self.items[item]
'''
TEXT = """The harbour of Lisbon was busy on the morning of 3 May 1912. Captain Ferreira of the steamer Aurora counted forty
crates of oranges, twelve barrels of olive oil and six trunks that belonged to a lady from Porto. The customs officer, Mr
Almeida, wanted to open the trunks, but the lady refused. "They hold nothing but books," she said, "and books pay no duty."
"""
WORKLOADS = {
    "copy code": "Repeat this program word for word, without comments of your own:\n\n" + CODE,
    "edit code": "Rename the class Inventory to Store and give me the whole program again:\n\n" + CODE,
    "copy text": "Repeat this text word for word:\n\n" + TEXT,
    "extract": "Answer with quotes from the text: who wanted to open the trunks, and what did the lady say?\n\n" + TEXT,
    "story": "Write a story about a lighthouse keeper who finds a strange machine on the beach.",
    "list": "Write a JSON list of ten cities, each with name, country and population.",
    "explain": "Explain how a refrigerator works, and why it needs a compressor.",
}


def run(llm, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """(seconds of all steps that decode, the replies); prompts are prefilled first."""
    start = time.perf_counter()
    replies = llm.generate(prompts, params)
    return time.perf_counter() - start, [reply.token_ids for reply in replies]


def measure(llm, prompts, params, rounds: int):
    """(plain seconds, seconds with drafts, ratio, counters) of the round with the median ratio."""
    engine = llm._engine
    speculation, found = engine.feature("speculation"), []
    for number in range(rounds + 1):
        seconds, replies = {}, {}
        before = llm.metrics()
        for drafts in (False, True) if number % 2 else (True, False):
            engine.use("speculation", speculation if drafts else None)
            seconds[drafts], replies[drafts] = run(llm, prompts, params)
        engine.use("speculation", speculation)
        if replies[False] != replies[True]:
            sys.exit("the replies differ with drafts: that is a bug")
        after = llm.metrics()
        spent = {name: after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens", "verified_runs")}
        found.append((seconds[False] / seconds[True], seconds[False], seconds[True], spent))
    found = sorted(found[1:], key=lambda item: item[0])  # the first round warms up
    ratio, plain, drafted, spent = found[len(found) // 2]
    return plain, drafted, ratio, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    args = parser.parse_args()
    options = {} if args.draft_model is None else {"draft_model": args.draft_model}
    with LLM(
        args.model,
        device=args.device,
        threads=args.threads,
        max_context=2048,
        prefix_cache=False,
        draft_tokens=args.draft_tokens,
        speculation="ngram" if args.draft_model is None else "draft",
        **options,
    ) as llm:
        print(
            f"{'batch':>5} {'temp':>4} {'workload':10} {'tok/s':>7} {'drafts':>7} {'ratio':>6} {'drafted':>8} "
            f"{'accepted':>8} {'tokens a run':>12}"
        )
        for batch in args.batch:
            for temperature in args.temperature:
                totals, ratios = [0.0, 0.0], []
                for name in args.workload:
                    ids = llm.encode_chat([{"role": "user", "content": WORKLOADS[name]}])
                    # Other beginnings, so that the rows of a batch do not say the same.
                    prompts = [ids] + [
                        llm.encode_chat([{"role": "user", "content": f"{number}. {WORKLOADS[name]}"}])
                        for number in range(1, batch)
                    ]
                    params = SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=7, ignore_eos=True)
                    plain, drafted, ratio, spent = measure(llm, prompts, params, args.rounds)
                    totals[0] += plain
                    totals[1] += drafted
                    ratios.append(ratio)
                    tokens, runs = batch * args.tokens, spent["verified_runs"]
                    print(
                        f"{batch:5} {temperature:4} {name:10} {tokens / plain:7.1f} {tokens / drafted:7.1f} "
                        f"{ratio:6.2f} {spent['drafted_tokens']:8} {spent['accepted_tokens']:8} "
                        f"{1 + spent['accepted_tokens'] / runs if runs else 1:12.2f}",
                        flush=True,
                    )
                print(
                    f"{batch:5} {temperature:4} {'total':10} {'':7} {'':7} {totals[0] / totals[1]:6.2f}   "
                    f"lowest {min(ratios):.2f}, median {statistics.median(ratios):.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
