"""What drafts of a model's own next-token block gain at a given acceptance, which random weights do not have: the block runs as it
does, and an oracle says what came of it.

    python benchmarks/mtp.py MODEL [--device cpu] [--acceptance 0.7 0] [--batch 1] [--tokens 200] [--rounds 5] [--draft-tokens 3]

MODEL: with a block, as of make_random_model.py --mtp. Each draft is right with the acceptance given those before it; a bias
decides what is said, for random weights have near ties, and a recurrent layer's bits depend on how its tokens are cut into runs. Each round runs
both in changing order; the figure is the median of the rounds' ratios, of decoding alone. At acceptance 0 the drafts are to be
switched off by what they cost.
"""

import argparse
import random
import statistics
import sys
import time

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.sampling.params import SamplingParams

SAID = 5


class Oracle:
    """Between the block's runner and what drafts. replies: of requests by id, prompts included."""

    def __init__(self, speculator, vocab: int, seed: int = 1):
        self.speculator, self.vocab, self.rng = speculator, vocab, random.Random(seed)
        self.acceptance, self.replies = 0.0, {}
        self._run, speculator.runner.run_pairs = speculator.runner.run_pairs, self.run_pairs

    def run_pairs(self, entries, rows, again=False):
        results = self._run(entries, rows, again)
        requests = {followed: request for request, followed in self.speculator._followed.items()}
        found = []
        for entry, (_, more) in zip([entry for entry in entries if entry.samples], results, strict=True):
            at, reply = entry.request.shift + entry.start + entry.count, self.replies[requests[entry.request].id]
            token = reply[at] if at < len(reply) else 0
            found.append(((token + (self.rng.random() >= self.acceptance)) % self.vocab, more))
        return found


def decode(engine, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds of the steps in which all rows decode, and the replies."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logit_bias={SAID: 1000.0})
    for id, prompt in enumerate(prompts):
        engine.submit(id, prompt, params)
    replies: list[list[int]] = [[] for _ in prompts]
    start = None
    while engine.has_work:
        if start is None and all(replies):
            start = time.perf_counter()
        for output in engine.step():
            if output.error is not None:
                sys.exit(str(output.error))
            replies[output.id] += output.tokens
    return time.perf_counter() - start, replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--threads", type=int)
    own = parser.parse_args()
    config = EngineConfig(
        model=own.model,
        device=own.device,
        threads=own.threads,
        max_context=2048,
        max_rows=max(own.batch),
        prefix_cache=False,
        speculation="mtp",
        draft_tokens=own.draft_tokens,
    )
    loaded = load_engine(config, Phases(lambda: 0.0))
    engine = loaded.engine
    speculator, rng = engine.feature("speculation"), random.Random(7)
    vocab = engine.scheduler.vocab_size
    oracle = Oracle(speculator, vocab)
    for _ in range(1000):  # recordings, as a server makes them
        if not engine.use_idle_time():
            break
    print(
        f"{'batch':>5} {'acceptance':>10} {'tok/s':>8} {'drafts':>8} {'ratio':>6} {'lowest':>6} {'drafted':>8} {'accepted':>8}"
    )
    for batch in own.batch:
        prompts = [[rng.randrange(vocab) for _ in range(own.prompt)] for _ in range(batch)]
        engine.use("speculation", None)
        _, told = decode(engine, prompts, own.tokens)
        oracle.replies = {id: prompt + reply for id, (prompt, reply) in enumerate(zip(prompts, told, strict=True))}
        for acceptance in own.acceptance:
            oracle.acceptance, found = acceptance, []
            counters = engine.scheduler.counters
            before = counters.drafted_tokens, counters.accepted_tokens
            for number in range(own.rounds + 1):
                seconds = {}
                for drafts in (False, True) if number % 2 else (True, False):
                    engine.use("speculation", speculator if drafts else None)
                    seconds[drafts], replies = decode(engine, prompts, own.tokens)
                    if replies != told:
                        sys.exit("the replies differ with drafts: that is a bug")
                if number:  # the first round warms up
                    found.append((seconds[False] / seconds[True], seconds[False], seconds[True]))
            ratio, plain, drafted = sorted(found)[len(found) // 2]
            said = batch * (own.tokens - 1)
            print(
                f"{batch:5} {acceptance:10.2f} {said / plain:8.1f} {said / drafted:8.1f} {ratio:6.2f} "
                f"{min(each[0] for each in found):6.2f} {counters.drafted_tokens - before[0]:8} "
                f"{counters.accepted_tokens - before[1]:8}",
                flush=True,
            )
    print(
        f"median of {own.rounds} rounds; spread of the first ratio: {statistics.pstdev(each[0] for each in found):.3f}"
    )
    engine.close()
    loaded.source.close()


if __name__ == "__main__":
    main()
