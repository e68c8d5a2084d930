"""A seeded walk over the scheduler with a fake device that remembers what stands in every KV slot.

The device stores where a real one stores K and V what those depend on: the salt (tenant), position, and a hash of all
tokens up to there; and on every read checks that a request sees exactly its own history, or an equal one of its tenant.
It runs a batch when it is given it, one step ahead of what the scheduler knows or not. Its "model" is a hash of seed and
history, so the tokens that a request must give are known without running it: they must not depend on batching, chunking,
preemption or what was cached. What is not finite stays so: a request that reads it fails, and it must be its own.
"""

import random
import zlib

import msgspec

from zse.cache.offload import HostPool
from zse.cache.pages import PAGE, PageAllocator
from zse.cache.prefix import PrefixCache
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions
from zse.scheduler.policy import Policy
from zse.scheduler.scheduler import Batch, Output, Scheduler

VOCAB = 50
POLICIES = (None, "lru", "lfu", "smart")
EOS = 7


def next_token(seed: int, history) -> int:
    return zlib.crc32(repr((seed, list(history))).encode()) % VOCAB


def expected_reply(seed: int, prompt: list[int], params: SamplingParams, capacity: int) -> tuple[list[int], str]:
    """What the request gives when it runs alone."""
    history, reply = list(prompt), []
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    limit = len(prompt) + params.max_tokens if params.max_tokens is not None else capacity
    while True:
        token = next_token(seed, history)
        history.append(token)
        reply.append(token)
        if token in stops:
            return reply, "stop"
        if len(history) >= limit:
            return reply, "length"


class FlakyAllocator(PageAllocator):
    """Says "none left" with probability `failure_rate`."""

    def __init__(self, num_pages: int, rng: random.Random):
        super().__init__(num_pages)
        self.rng, self.failure_rate = rng, 0.0

    def allocate(self, count):
        if count and self.rng.random() < self.failure_rate:
            return None
        return super().allocate(count)


class FakeDevice:
    def __init__(self, num_pages: int, max_rows: int):
        # (salt, position, hash of the tokens up to there, arrival of the request that spoilt it or -1)
        self.slots: list[tuple | None] = [None] * (num_pages * PAGE)
        self.host: dict[int, list] = {}                 # slot of the host → content of a page
        self.chains: dict[int, list[int]] = {}          # arrival → hashes
        self.max_rows = max_rows
        self.sampled: dict[tuple[int, int], int] = {}   # (request, position) → the token given there

    def token(self, request, position: int, drafts=()) -> int:
        """A token of the request: the host knows it, it is a draft, or this device sampled it and the host has not read
        it."""
        if position < len(request.tokens):
            return request.tokens[position]
        if drafts:
            return drafts[position - len(request.tokens)]
        return self.sampled[request.arrival, position]

    def content(self, request, end: int, drafts=()) -> list[tuple]:
        """What stands in the first slots of a sound request."""
        chain = self.chains.setdefault(request.arrival, [])
        if drafts:
            chain = chain[:len(request.tokens)]     # of this step only: they may turn out wrong
        while len(chain) < end:
            chain.append(zlib.crc32(b"%d" % self.token(request, len(chain), drafts), chain[-1] if chain else 0))
        return [(request.salt, position, chain[position]) for position in range(end)]

    def transfer(self, transfers) -> None:
        for kind, source, target in transfers:
            if kind == "out":
                self.host[target] = self.slots[source * PAGE:(source + 1) * PAGE]
                continue
            page = self.host[source] if kind == "in" else self.slots[source * PAGE:(source + 1) * PAGE]
            assert kind in ("in", "copy") and len(page) == PAGE
            self.slots[target * PAGE:(target + 1) * PAGE] = page

    def run(self, batch: Batch, poisoned: set[int] = frozenset()) -> list[tuple[int, object]]:
        self.transfer(batch.transfers)
        sampled = []
        rows = [entry.request.row for entry in batch.entries]
        assert len(set(rows)) == len(rows) and all(0 <= row < self.max_rows for row in rows)
        for entry in batch.entries:
            request, end = entry.request, entry.start + entry.count
            slot = [entry.pages[position // PAGE] * PAGE + position % PAGE for position in range(end)]
            content = self.content(request, end, entry.drafts)
            spoilt = request.arrival if request.id in poisoned else -1
            for position in range(entry.start, end):
                self.slots[slot[position]] = (*content[position], spoilt)
            read = [self.slots[at] for at in slot]
            assert [held[:3] for held in read] == content, f"{request} reads what is not its own"
            spoilers = {held[3] for held in read} - {-1}
            assert spoilers <= {request.arrival}, f"{request} reads numbers of others that are not finite"
            assert entry.samples in (0, 1 + len(entry.drafts))
            for line in range(end - entry.samples + 1, end + 1):
                assert end == len(request.tokens) + request.pending - 1
                token = next_token(request.seed, [self.token(request, position, entry.drafts)
                                                  for position in range(line)])
                self.sampled[request.arrival, line] = token
                sampled.append((-1 if spoilers else token, None))
        # Every read above must also hold after all writes of the step: no two requests write one slot.
        for entry in batch.entries:
            for position in range(entry.start, entry.start + entry.count):
                held = self.slots[entry.pages[position // PAGE] * PAGE + position % PAGE]
                assert held[:3] == self.content(entry.request, position + 1, entry.drafts)[position]
        return sampled


class Simulation:
    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.num_pages = rng.randint(2, 24)
        self.max_rows = rng.randint(1, 6)
        self.allocator = FlakyAllocator(self.num_pages, rng)
        self.scheduler = Scheduler(
            num_pages=self.num_pages, max_rows=self.max_rows, max_tokens=self.max_rows + rng.randint(0, 40),
            max_context=rng.choice((20, 64, 150)), vocab_size=VOCAB, eos_ids=frozenset((EOS,)),
            max_waiting=rng.choice((3, 100)), allocator=self.allocator, max_drafts=rng.choice((0, 3, 20)),
            prefix_cache=PrefixCache(self.num_pages, policy) if (policy := rng.choice(POLICIES)) else None,
            host=HostPool(rng.choice((0, 4, 40, 40))),
            policy=Policy(reserve_output=rng.random() < 0.5, batching=rng.choice(("continuous", "continuous", "static")),
                          fair_share=rng.random() < 0.7,
                          chunked_prefill=rng.random() < 0.8, tenant_weights={"a": 3.0}))
        self.scheduler.should_swap = lambda request: rng.random() < 0.8
        self.beginnings = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(3)]
        self.said: list[list[int]] = []         # prompts and replies of requests that have ended
        self.num_tokens = {"prompt": 0, "cached": 0}
        self.capacity = min(self.scheduler.max_context, self.num_pages * PAGE + 1)
        self.device = FakeDevice(self.num_pages, self.max_rows)
        self.flight: list[tuple[Batch, list]] = []   # submitted, not committed
        self.ahead_rate = rng.choice((0.0, 0.9, 1.0))
        self.draft_rate = rng.choice((0.0, 0.5, 1.0))
        self.num_ahead = self.num_forks = 0
        self.prompts: dict[int, list[int]] = {}
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}   # terminal state of every accepted request
        self.next_id = 0
        self.now = 0.0
        self.trace: list = []

    def check(self) -> None:
        assert self.scheduler.check_integrity() == []

    def submit(self) -> None:
        rng, chunk = self.rng, self.scheduler.max_tokens
        length = rng.choice((1, PAGE - 1, PAGE, PAGE + 1, chunk - 1, chunk, chunk + 1, 2 * chunk, self.capacity - 1,
                             self.capacity, self.capacity + 1, rng.randint(1, 60)))
        prompt = [rng.randrange(VOCAB) for _ in range(max(1, length))]
        if rng.random() < 0.6:      # begins as others do, within a page or at its border
            begin = rng.choice(self.said) if self.said and rng.random() < 0.5 else rng.choice(self.beginnings)
            common = min(rng.choice((1, PAGE - 1, PAGE, 2 * PAGE, 2 * PAGE + 3, 150)), len(begin), len(prompt))
            prompt[:common] = begin[:common]
        options = RequestOptions(tenant=rng.choice("ab"), cache_salt="s" if rng.random() < 0.1 else "")
        params = SamplingParams(max_tokens=rng.choice((None, 1, 2, 5, 20, 60)), ignore_eos=rng.random() < 0.5,
                                stop_token_ids=(3,) if rng.random() < 0.2 else ())
        id, seed = self.next_id, rng.getrandbits(32)
        self.next_id += 1
        fits = len(prompt) + (params.max_tokens or 1) <= self.capacity
        queue_full = self.scheduler.num_waiting >= self.scheduler.max_waiting
        try:
            self.scheduler.submit(id, prompt, params, seed=seed, now=self.now, options=options)
        except RequestError as error:
            assert error.code == ("overloaded" if queue_full else "context_length_exceeded")
            assert queue_full or not fits
            return
        assert fits and not queue_full
        self.prompts[id] = prompt
        self.expected[id] = expected_reply(seed, prompt, params, self.capacity)
        self.got[id] = []

    def cancel(self) -> None:
        rng = self.rng
        live = [id for id in self.expected if id not in self.ended]
        id = rng.choice(live) if live and rng.random() < 0.7 else rng.randrange(self.next_id + 5)
        known = id in self.expected and id not in self.ended
        assert self.scheduler.cancel(id) is known
        if known:
            self.ended[id] = "cancelled"
        assert self.scheduler.cancel(id) is False

    def drafts(self, request) -> list[int]:
        """Some of what it will say, the last one perhaps wrong."""
        said = len(request.tokens) - request.prompt_len
        drafts = self.expected[request.id][0][said:said + self.rng.randint(0, 6)]
        if self.rng.random() < 0.5:
            drafts.append(self.rng.randrange(VOCAB))
        return drafts

    def fork(self) -> None:
        """Another request goes on from where one is, or from some tokens before, with other tokens."""
        rng, scheduler = self.rng, self.scheduler
        live = [id for id in self.expected if id not in self.ended]
        if not live:
            return
        request = scheduler.request(rng.choice(live))
        length = rng.randint(request.prompt_len, len(request.tokens))
        append = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 2))))
        if length + len(append) >= request.max_len:
            return
        id, seed = self.next_id, rng.getrandbits(32)
        self.next_id += 1
        scheduler.fork(request.id, id, seed=seed, length=length, append=append, now=self.now)
        self.num_forks += 1
        self.prompts[id] = prompt = [*request.tokens[:length], *append]
        # Its reply may be as long as what the other one has left.
        params = msgspec.structs.replace(request.params, max_tokens=request.max_len - len(prompt))
        self.expected[id] = expected_reply(seed, prompt, params, self.capacity)
        self.got[id] = []

    def submit_step(self, nan_rate: float) -> bool:
        """Schedule a batch and give it to the device."""
        if self.scheduler.max_drafts:
            for request in self.scheduler.decoding():
                if self.rng.random() < self.draft_rate:
                    request.drafts = self.drafts(request)
        batch = self.scheduler.schedule(self.now)
        self.check()
        if batch is None:
            return False
        assert batch.num_tokens <= self.scheduler.max_tokens
        poisoned = {entry.request.id for entry in batch.entries if self.rng.random() < nan_rate}
        self.flight.append((batch, self.device.run(batch, poisoned)))
        self.trace.append([(e.request.id, e.start, e.count) for e in batch.entries])
        return True

    def step(self, mid_step_cancels: int = 0, nan_rate: float = 0.0) -> bool:
        if not self.flight and not self.submit_step(nan_rate):
            return False
        for _ in range(mid_step_cancels):
            self.cancel()
            self.check()
        if self.rng.random() < self.ahead_rate:
            self.num_ahead += self.submit_step(nan_rate)
        batch, sampled = self.flight.pop(0)
        for output in self.scheduler.commit(batch, sampled):
            self.take(output)
        self.check()
        return True

    def take(self, output: Output) -> None:
        assert output.id in self.expected and output.id not in self.ended, "output after the end"
        reply, finish = self.expected[output.id]
        if output.finish == "error":
            assert output.tokens == []
            self.ended[output.id] = "error"
            return
        got = self.got[output.id]
        if got:
            assert not output.cached_tokens, "cached tokens are told once"
        else:
            self.num_tokens["prompt"] += len(self.prompts[output.id])
            self.num_tokens["cached"] += output.cached_tokens
            assert 0 <= output.cached_tokens < len(self.prompts[output.id])
        got += output.tokens
        assert got == reply[:len(got)], f"request {output.id} differs from its solo run"
        assert (output.finish == finish) if len(got) == len(reply) else output.finish is None
        if output.finish:
            self.ended[output.id] = output.finish
            self.said.append(self.prompts[output.id] + got)

    def run(self, operations: int) -> None:
        rng = self.rng
        for _ in range(operations):
            self.now += rng.random()
            action = rng.random()
            if action < 0.15:
                self.submit()
            elif action < 0.20:
                self.cancel()
            elif action < 0.22:
                self.fork()
            elif action < 0.25:
                self.allocator.failure_rate = rng.choice((0.0, 0.0, 0.5, 1.0))
            else:
                self.step(mid_step_cancels=rng.random() < 0.05, nan_rate=0.2 if rng.random() < 0.02 else 0.0)
            self.check()
        self.drain()

    def drain(self) -> None:
        """Everything that is still live must end, within the steps that its tokens and recomputations can take."""
        self.allocator.failure_rate = 0.0
        live = len(self.expected) - len(self.ended)
        bound = 10 + live * 4 * (2 * self.capacity + 5)
        while self.step():
            bound -= 1
            assert bound > 0, "no progress"
        scheduler = self.scheduler
        assert set(self.ended) == set(self.expected), "a request never ended"
        assert not scheduler.has_work and scheduler.num_running == scheduler.num_waiting == 0
        assert self.allocator.num_free == self.num_pages and scheduler.cache.sequences() == set()
        scheduler.cache.clear()
        assert scheduler.cache.host.num_free == scheduler.cache.host.num_slots
        self.check()
        assert scheduler.cache.prefix is None or scheduler.cache.prefix.num_nodes == 0
        counters = scheduler.counters
        assert counters.submitted == counters.finished + counters.cancelled + counters.failed == len(self.expected)
