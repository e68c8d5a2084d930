"""A stand-in for the engine process with the real scheduler, queue and prefix cache over a device that is a clock.

The device keeps the token that was written to each KV slot, and what it says is read from there: the prompt again, token
by token, then EOS. A request that reads a slot that is not its own says what somebody else sent.

Options: --rows, --pages, --context, --step-tokens, --step-ms and --token-us (what a step takes), --log FILE (a line
"cancel ID TIME" for each cancel, time.monotonic()), --drafts N (of prompt lookup, for one request), --computed FILE (a line "TOKEN
COUNT" for each part of a step without drafts: tokens of a prompt that begins with TOKEN that were computed for the first time,
and tokens said), and EngineConfig's --fair-share, --reserve-output and --ageing-ms.
"""

import sys
import time
from types import SimpleNamespace

import numpy as np

from zse.cache.pages import BLOCK as PAGE
from zse.cache.prefix import PrefixCache
from zse.engine.core import Engine
from zse.engine.messages import Ready, TokenLogprob
from zse.scheduler.options import SchedulingPolicy
from zse.scheduler.scheduler import Scheduler
from zse.speculative.ngram import NgramSpeculator

VOCAB, EOS, WIDTH = 257, 256, 8
JOB = -1


class EchoRunner:
    """What Engine asks of a runner."""

    runs_ahead = False

    def __init__(self, num_pages: int, step_s: float, token_s: float, computed: str = ""):
        self._slots = [0] * (num_pages * PAGE)
        self._step_s, self._token_s = step_s, token_s
        self._computed = open(computed, "a", buffering=1) if computed else None
        self._reached: dict[object, int] = {}  # of prompts
        self.forwards = Measures(self)
        self.pages = SimpleNamespace(run=lambda transfers: None)

    def count(self, request, start: int, end: int, said: int) -> None:
        """Positions of a request were computed. Beams of one search have one prompt."""
        if self._computed is None:
            return
        first, key = request.tokens[0], request.id
        if key < 0:
            key = key == JOB, tuple(request.tokens[: request.prompt_len])
        fresh = max(0, min(end, request.prompt_len) - max(start, self._reached.get(key, 0)))
        self._reached[key] = max(self._reached.get(key, 0), end)
        self._computed.write(f"{first} {fresh + said}\n")

    def submit(self, batch):
        for _, source, page in batch.transfers:
            self._slots[page * PAGE : (page + 1) * PAGE] = self._slots[source * PAGE : (source + 1) * PAGE]
        sampled = []
        for entry in batch.entries:
            tokens, pages = entry.request.tokens, entry.pages
            for position in range(entry.start, entry.start + entry.count):
                known = position < len(tokens)
                token = tokens[position] if known else entry.drafts[position - len(tokens)]
                self._slots[pages[position // PAGE] * PAGE + position % PAGE] = token
            end = entry.start + entry.count
            sampled += [self._say(entry.request, pages, length) for length in range(end - entry.samples + 1, end + 1)]
            self.count(entry.request, entry.start, end, entry.samples)
        time.sleep(self._step_s + self._token_s * batch.num_tokens)
        return sampled

    def collect(self, sampled):
        return sampled

    def _say(self, request, pages, length):
        """What follows the first `length` tokens."""
        position = length - request.prompt_len
        if position >= request.prompt_len and not request.params.ignore_eos:
            token = EOS
        else:
            position %= request.prompt_len
            token = self._slots[pages[position // PAGE] * PAGE + position % PAGE]
        wanted = request.params.logprobs
        top = [((token + index) % VOCAB, -0.5 - index) for index in range(wanted or 0)]
        return token, None if wanted is None else TokenLogprob(-0.5, top)

    def record_ahead(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Measures:
    """What JobQueue asks of a runner's forwards."""

    max_lines = 64

    def __init__(self, runner: EchoRunner):
        self._runner = runner

    def run(self, pieces) -> None:
        for piece in pieces:
            sequence = SimpleNamespace(id=JOB, tokens=piece.tokens, prompt_len=len(piece.tokens))
            self._runner.count(sequence, piece.start, piece.start + piece.num_tokens, 0)

    def dense(self, pooled):
        return pooled

    def hidden(self, place: int, count: int):
        return np.ones((count, WIDTH))

    def logprobs(self, lines) -> list:
        return [TokenLogprob(-0.5, [(line.target, -0.5)][: line.top]) for line in lines]

    def logits(self, count: int):
        return np.zeros(count * VOCAB, np.float32).data


def build(arguments: list[str], phases):
    options = {
        "--rows": "4",
        "--pages": "256",
        "--context": "2048",
        "--step-tokens": "64",
        "--step-ms": "1",
        "--token-us": "0",
        "--log": "",
        "--drafts": "0",
        "--computed": "",
        "--fair-share": "True",
        "--ageing-ms": "10000",
        "--reserve-output": "True",
    } | dict(zip(arguments[::2], arguments[1::2], strict=True))
    pages, rows, context = (int(options[name]) for name in ("--pages", "--rows", "--context"))
    runner = EchoRunner(
        pages, float(options["--step-ms"]) / 1000, float(options["--token-us"]) / 1e6, options["--computed"]
    )
    scheduler = Scheduler(
        num_pages=pages,
        max_rows=rows,
        max_tokens=int(options["--step-tokens"]),
        max_context=context,
        vocab_size=VOCAB,
        eos_ids=frozenset((EOS,)),
        max_waiting=1 << 16,
        prefix_cache=PrefixCache(pages, "lru"),
        max_drafts=int(options["--drafts"]) * rows,
        policy=SchedulingPolicy(
            fair_share=options["--fair-share"] == "True",
            reserve_output=options["--reserve-output"] == "True",
            ageing_s=int(options["--ageing-ms"]) / 1000,
        ),
    )
    engine = Engine(scheduler, runner)
    if drafts := int(options["--drafts"]):
        engine.use("speculation", NgramSpeculator(scheduler, drafts, "cpu"))
    if options["--log"]:
        log, cancel = open(options["--log"], "a", buffering=1), engine.cancel

        def logged(id: int) -> bool:
            log.write(f"cancel {id} {time.monotonic()}\n")
            return cancel(id)

        engine.cancel = logged
    phases.mark("ready")
    return engine, Ready(
        model="scheduled",
        max_context=context,
        max_rows=rows,
        num_pages=pages,
        memory_bytes={"kv": 1},
        phases_ms=phases.ms,
        hidden_size=WIDTH,
    )


if __name__ == "__main__":
    from zse.engine.worker import main

    sys.exit(main(sys.argv[1:], build))
