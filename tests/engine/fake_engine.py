"""An engine whose model is arithmetic: what it says is known without running it, and does not depend on batching.

`python fake_engine.py --fd N [OPTION VALUE ...]` is a worker with that engine. Besides EngineConfig's options it takes
--fail (what goes wrong, and when), --step-seconds and --ahead 1.
"""

import os
import sys
import time

from zse.engine.core import Engine
from zse.engine.messages import Ready, TokenLogprob
from zse.errors import DeviceLost, FormatError
from zse.scheduler.scheduler import Scheduler

VOCAB, EOS = 1000, 0


def next_token(history) -> int:
    """Counts on from the last token, in a circle that leaves out EOS; after token 99 comes EOS."""
    last = history[-1]
    return EOS if last == 99 else last % (VOCAB - 1) + 1


class CountingRunner:
    """runs_ahead: like a GPU: a batch is run when it is submitted, from tokens that the host may not have read yet."""

    def __init__(self, step_seconds: float = 0.0, runs_ahead: bool = False):
        self.step_seconds, self.closed, self.batches = step_seconds, False, []
        self.poison: set[int] = set()
        self.lost = False
        self.runs_ahead, self.in_flight, self.most_in_flight = runs_ahead, 0, 0
        self._said: dict[tuple[int, int], int] = {}

    def submit(self, batch):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return self.run(batch)

    def collect(self, sampled):
        if sampled == "lost":
            raise DeviceLost("event_wait: CUDA_ERROR_ILLEGAL_ADDRESS (700) while running decode")
        self.in_flight -= 1
        return sampled

    def _history(self, entry):
        tokens = entry.request.tokens.tolist()
        while len(tokens) < entry.start + entry.count:
            tokens.append(self._said[entry.request.id, len(tokens)])
        return tokens

    def run(self, batch):
        time.sleep(self.step_seconds)
        self.batches.append([(entry.request.id, entry.start, entry.count) for entry in batch.entries])
        sampled = []
        for entry in batch.entries:
            if not entry.samples:
                continue
            request, tokens = entry.request, self._history(entry)
            self._said[request.id, len(tokens)] = 1
            if request.id in self.poison or 666 in tokens:
                sampled.append((-1, None))
                continue
            if 667 in tokens:
                raise RuntimeError("a bug: token 667")
            if 669 in tokens:  # the step fails on the device, after it was submitted
                self.lost = True
                return "lost"
            if 668 in tokens:
                os._exit(139)
            token = self._said[request.id, len(tokens)] = next_token(tokens)
            wanted = request.params.logprobs
            top = [(token + i, -0.5 - i) for i in range(wanted or 0)]
            sampled.append((token, None if wanted is None else TokenLogprob(-0.5, top)))
        return sampled

    def record_ahead(self):
        return False

    def close(self):
        if self.lost:
            time.sleep(3600)  # as a driver may that waits for a dead GPU
        self.closed = True


def make_engine(**changes) -> Engine:
    runner = CountingRunner(changes.pop("step_seconds", 0.0), changes.pop("runs_ahead", False))
    options = dict(
        num_pages=64, max_rows=4, max_tokens=32, max_context=256, vocab_size=VOCAB, eos_ids=frozenset((EOS,))
    )
    return Engine(Scheduler(**(options | changes)), runner)


def build(arguments, phases):
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    failure = options.get("--fail")
    if failure == "format":
        raise FormatError("model.gguf", 17, "version", "is 99")
    if failure == "bug":
        raise KeyError("oops")
    if failure == "memory":
        raise MemoryError
    engine = make_engine(step_seconds=float(options.get("--step-seconds", "0")), runs_ahead="--ahead" in options)
    phases.mark("ready")
    return engine, Ready(
        model="fake", max_context=256, max_rows=4, num_pages=64, memory_bytes={"kv": 1}, phases_ms=phases.ms
    )


if __name__ == "__main__":
    from zse.engine.worker import main

    sys.exit(main(sys.argv[1:], build))
