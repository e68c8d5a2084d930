"""What drafts of a model's own next-token block, or of an EAGLE-3 head, gain at a given acceptance, which random weights do not have: the block runs as it
does, and an oracle says what came of it.

    python benchmarks/mtp.py MODEL [--device cpu] [--acceptance 0.7 0] [--batch 1] [--tokens 200] [--rounds 5] [--draft-tokens 3]
        [--draft-vocabulary 0] [--always] [--draft HEAD]

MODEL: with a block, as of make_random_model.py --mtp, or --draft an EAGLE-3 head for it (--eagle3). Each draft is right with the acceptance given those before it; a bias
decides what is said, for random weights have near ties, and a recurrent layer's bits depend on how its tokens are cut into runs. Each round runs
both in changing order; the figure is the median of the rounds' ratios, of decoding alone, of clocks and (cpu) of this process's
processor time, which others on the machine disturb less. At acceptance 0 the drafts are to be
switched off by what they cost.
"""

import argparse
import random
import statistics
import sys
import time
from array import array

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.sampling.params import SamplingParams

SAID, FREQUENT = 5, 30_000


class Oracle:
    """Between the block's runner and what drafts. replies: of requests by id, prompts included."""

    def __init__(self, speculator, vocab: int, seed: int = 1):
        self.speculator, self.vocab, self.rng = speculator, vocab, random.Random(seed)
        self.acceptance, self.replies, self.narrow_runs = 0.0, {}, 0
        runner = speculator.runner
        self._start, runner.start_pairs = runner.start_pairs, self.start_pairs
        self._read, runner.read_drafts = runner.read_drafts, self.read_drafts

    def start_pairs(self, entries, rows, counts=(), is_narrow=False):
        self._asked = entries, counts
        self.narrow_runs += bool(counts) and is_narrow
        return self._start(entries, rows, counts, is_narrow)

    def read_drafts(self):
        self._read()
        entries, counts = self._asked
        requests = {followed: request for request, followed in self.speculator._followed.items()}
        found = []
        for entry, count in zip(entries, counts, strict=bool(counts)):
            at, reply = entry.request.shift + entry.start + entry.count, self.replies[requests[entry.request].id]
            right = [reply[at + number] if at + number < len(reply) else 0 for number in range(count)]
            found.append(array("i", [(token + (self.rng.random() >= self.acceptance)) % self.vocab for token in right]))
        return found


def decode(engine, prompts: list[list[int]], tokens: int) -> tuple[tuple[float, float], list[list[int]]]:
    """Seconds of the steps in which all rows decode, of the clock and of this process, and the replies."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logit_bias={SAID: 1000.0})
    for id, prompt in enumerate(prompts):
        engine.submit(id, prompt, params)
    replies: list[list[int]] = [[] for _ in prompts]
    start, own = None, 0.0
    while engine.has_work:
        if start is None and all(replies):
            start, own = time.perf_counter(), time.process_time()
        for output in engine.step():
            if output.error is not None:
                sys.exit(str(output.error))
            replies[output.id] += output.tokens
    return (time.perf_counter() - start, time.process_time() - own), replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draft", metavar="HEAD", help="an EAGLE-3 head that drafts instead of the model's block")
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--draft-vocabulary", type=int, help="0: all ids")
    parser.add_argument("--always", action="store_true", help="most drafts whether they pay or not")
    parser.add_argument("--threads", type=int)
    own = parser.parse_args()
    config = EngineConfig(
        model=own.model,
        device=own.device,
        threads=own.threads,
        max_context=2048,
        max_rows=max(own.batch),
        prefix_cache=False,
        speculation="mtp" if own.draft is None else "eagle3",
        draft_model=own.draft,
        draft_tokens=own.draft_tokens,
        draft_vocabulary=own.draft_vocabulary,
    )
    loaded = load_engine(config, Phases(lambda: 0.0))
    engine = loaded.engine
    speculator, rng = engine.feature("speculation"), random.Random(7)
    vocab = engine.scheduler.vocab_size
    oracle = Oracle(speculator, vocab)
    if own.always:
        speculator.room = lambda rows, most: most
        speculator.choose = lambda candidates, rows, most, round_s=0.0: [
            min(speculator.draft_tokens, each.room) for each in candidates
        ]
    for _ in range(1000):  # recordings, as a server makes them
        if not engine.use_idle_time():
            break
    print(
        f"{'batch':>5} {'acceptance':>10} {'tok/s':>8} {'drafts':>8} {'ratio':>6} {'lowest':>6} {'cpu':>6} {'drafted':>8} {'accepted':>8}"
    )
    for batch in own.batch:
        # Of ids that texts are made of, since by them it is decided which drafts may be made.
        prompts = [[rng.randrange(min(vocab, FREQUENT)) for _ in range(own.prompt)] for _ in range(batch)]
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
                    (plain, its), (drafted, theirs) = seconds[False], seconds[True]
                    found.append((plain / drafted, plain, drafted, its / theirs))
            ratio, plain, drafted, _ = sorted(found)[len(found) // 2]
            own_ratio = statistics.median(each[3] for each in found)
            said = batch * (own.tokens - 1)
            print(
                f"{batch:5} {acceptance:10.2f} {said / plain:8.1f} {said / drafted:8.1f} {ratio:6.2f} "
                f"{min(each[0] for each in found):6.2f} {own_ratio:6.2f} {counters.drafted_tokens - before[0]:8} "
                f"{counters.accepted_tokens - before[1]:8}",
                flush=True,
            )
    print(f"{oracle.narrow_runs} runs of drafts of the first {speculator.runner.vocabulary} ids")
    print(
        f"median of {own.rounds} rounds; spread of the first ratio: {statistics.pstdev(each[0] for each in found):.3f}"
    )
    engine.close()
    loaded.source.close()


if __name__ == "__main__":
    main()
