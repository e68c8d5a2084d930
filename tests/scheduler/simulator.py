"""A seeded walk over the scheduler with a fake device that remembers what stands in every KV slot.

The device stores where a real one stores K and V what those depend on: the salt (tenant), position, and a hash of all
tokens up to there; and on every read checks that a request sees exactly its own history, or an equal one of its tenant.
It runs a batch when it is given it, one step ahead of what the scheduler knows or not. Its "model" is a hash of seed and
history, so the tokens that a request must give are known without running it: they must not depend on batching, chunking,
preemption or what was cached. What is not finite stays so: a request that reads it fails, and it must be its own.

What is held, by number:
 1 free + held + cached pages are all pages          check_integrity
 2 a page's references are those who hold it         check_integrity
 3 only pages with one reference are written         Simulation.inspect
 4 tables are as long as their tokens, in order      check_integrity, FakeDevice.run
 5 every accepted request ends, in a bounded time    drain
 6 tokens, then one end, then nothing                take
 7 a step's tokens and rows, nobody in it twice      inspect, FakeDevice.run
 8 pages and rows in flight are not given away       inspect
 9 pages are shared with equal tokens and salt only  FakeDevice.run
10 a cancelled request leaves nothing, after 2 steps cancel, check
11 an unknown id is ignored and counted              cancel
12 what never fits is refused at once                submit
13 three preemptions, then pinned; few recomputed    check, storms
   tokens; waits are bounded                         drain
14 at rest nothing is held                           drain
15 the same seed gives the same trace                test_simulator
16 the queue is bounded in requests and tokens       submit, check
17 a state is read by its own sequence, or an equal  FakeDevice.run_state
   one of its tenant, behind exactly its tokens; it  check_integrity
   has one owner
"""

import random
import zlib

import msgspec

from zse.cache.groups import ONE_GROUP, PageGeometry, rows_of
from zse.cache.pages import BLOCK, HostPool, PageAllocator
from zse.cache.prefix import PrefixCache
from zse.cache.states import StateSlots
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.lifecycle import MAX_PREEMPTIONS, MAX_RECOMPUTED
from zse.scheduler.options import RequestOptions, SchedulingPolicy
from zse.scheduler.scheduler import Scheduler

VOCAB = 50
POLICIES = (None, "lru", "lfu", "smart")
EOS = 7


def chain(token: int, before: int = 0) -> int:
    """The hash of a history that ends with `token`, from the hash of the history before it."""
    return zlib.crc32(b"%d" % token, before)


def said_after(seed: int, link: int) -> int:
    """The token that a request says after a history with this hash."""
    return zlib.crc32(b"%d" % seed, link) % VOCAB


def next_token(seed: int, history) -> int:
    link = 0
    for token in history:
        link = chain(token, link)
    return said_after(seed, link)


def expected_reply(seed: int, prompt: list[int], params: SamplingParams, capacity: int) -> tuple[list[int], str]:
    """What the request gives when it runs alone."""
    link, reply = 0, []
    for token in prompt:
        link = chain(token, link)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    limit = params.max_tokens if params.max_tokens is not None else capacity - len(prompt)
    while True:
        token = said_after(seed, link)
        link = chain(token, link)
        reply.append(token)
        if token in stops:
            return reply, "stop"
        if len(reply) >= limit:
            return reply, "length"


class FlakyAllocator(PageAllocator):
    """Says "none left" with probability `failure_rate`."""

    def __init__(self, num_pages: int, rng: random.Random):
        super().__init__(num_pages)
        self.rng, self.failure_rate, self.num_refused = rng, 0.0, 0

    def allocate(self, count):
        if count and self.rng.random() < self.failure_rate:
            self.num_refused += 1
            return None
        return super().allocate(count)

    def allocate_run(self, count):
        return None if self.rng.random() < self.failure_rate else super().allocate_run(count)


class FakeDevice:
    def __init__(self, num_pages: int, max_rows: int, geometry: PageGeometry = ONE_GROUP, num_states: int = 0):
        self.geometry, self.page_size = geometry, geometry.page_size
        # (salt, position, hash of the tokens up to there; of a windowed group: its number and these), and the arrival of the request that spoilt it, or -1
        self.slots: list[tuple | None] = [None] * (num_pages * self.page_size)
        self.spoilt = [-1] * (num_pages * self.page_size)
        self.num_spoilt = 0
        self.num_kept = 0  # states left behind tokens of runs with drafts
        # What the state in each slot is behind: (salt, position, hash) of the last token, and who spoilt it.
        self.states: list[tuple[tuple | None, int]] = [(None, -1)] * num_states
        self.host_states: dict[int, tuple[tuple | None, int]] = {}
        self.host: dict[int, tuple[list, list]] = {}  # slot of the host → content of a page
        self.chains: dict[int, tuple[list[int], list[tuple]]] = {}  # arrival → hashes, and contents with them
        self.max_rows = max_rows
        self.sampled: dict[tuple[int, int], int] = {}  # (request, position) → the token given there

    def token(self, request, position: int, drafts=()) -> int:
        """A token of the request: the host knows it, it is a draft, or this device sampled it and the host has not read
        it."""
        if position < len(request.tokens):
            return request.tokens[position]
        if drafts:
            return drafts[position - len(request.tokens)]
        return self.sampled[request.arrival, position]

    def content(self, request, end: int, drafts=()) -> list[tuple]:
        """What stands in the first slots of a sound request, as (salt, position, hash)."""
        links, contents = self.chains.setdefault(request.arrival, ([], []))
        if drafts:
            known = len(request.tokens)
            links, contents = links[:known], contents[:known]  # of this step only: they may turn out wrong
        salt = request.salt
        for position in range(len(links), end):
            links.append(chain(self.token(request, position, drafts), links[-1] if links else 0))
            contents.append((salt, position, links[-1]))
        return contents[:end]

    def transfer(self, transfers) -> None:
        size = self.page_size
        for kind, source, target in transfers:
            if kind.startswith("state"):
                state = self.host_states[source] if kind == "state in" else self.states[source]
                (self.host_states if kind == "state out" else self.states)[target] = state
                continue
            assert kind in ("in", "out", "copy")
            at = slice(source * size, (source + 1) * size)
            page, spoilt = self.host[source] if kind == "in" else (self.slots[at], self.spoilt[at])
            if kind == "out":
                self.host[target] = page, spoilt
            else:
                at = slice(target * size, (target + 1) * size)
                self.slots[at], self.spoilt[at] = page, spoilt

    def run(self, batch: Batch, poisoned: set[int] = frozenset()) -> list[tuple[int, object]]:
        self.transfer(batch.transfers)
        sampled, size = [], self.page_size
        written: list[tuple[int, tuple]] = []
        self.num_spoilt += len(poisoned)
        if self.states:
            held = [slot for entry in batch.entries for slot in (entry.slot, *entry.kept)]
            assert len(set(held)) == len(held), "two states have one slot"
        rows = [entry.request.row for entry in batch.entries]
        assert len(set(rows)) == len(rows) and all(0 <= row < self.max_rows for row in rows)
        for entry in batch.entries:
            request, end = entry.request, entry.start + entry.count
            content = self.content(request, end, entry.drafts)
            slots, spoilt = self.slots, request.arrival if request.id in poisoned else -1
            for position in range(entry.start, end):
                at = entry.pages[position // size] * size + position % size
                slots[at], self.spoilt[at] = content[position], spoilt
                written.append((at, content[position]))
            read: list[tuple | None] = []
            spoilers: set[int] = set()
            for page in entry.pages[: -(-end // size)]:
                read += slots[page * size : (page + 1) * size]
                if self.num_spoilt:
                    spoilers.update(self.spoilt[page * size : page * size + min(size, end - len(read) + size)])
            assert read[:end] == content, f"{request} reads what is not its own"
            for group, table in enumerate(entry.windows.pages if entry.windows is not None else (), 1):
                spoilers |= self.run_windowed(entry, group, table, content, spoilt, written)
            if self.states:
                spoilers.add(self.run_state(entry, content, spoilt))
            spoilers.discard(-1)
            assert spoilers <= {request.arrival}, f"{request} reads numbers of others that are not finite"
            assert entry.samples in (0, 1 + len(entry.drafts))
            assert entry.count == entry.samples or not entry.drafts, f"{request} runs tokens again"
            for line in range(end - entry.samples + 1, end + 1):
                assert end == len(request.tokens) + request.pending - 1
                token = said_after(request.seed, content[line - 1][2])
                self.sampled[request.arrival, line] = token
                sampled.append((-1 if spoilers else token, None))
        # Every read above must also hold after all writes of the step: no two requests write one slot.
        assert all(self.slots[at] == held for at, held in written), "two requests write one slot"
        return sampled

    def run_state(self, entry, content: list[tuple], spoilt: int) -> int:
        """The same in the request's state; who spoilt what it read."""
        before, spoiler = self.states[entry.slot] if entry.start else (None, -1)
        assert not entry.start or before == content[entry.start - 1], (
            f"{entry.request} reads a state that is not its own"
        )
        spoilt_too = spoilt if spoilt >= 0 else spoiler
        self.states[entry.slot] = content[-1], spoilt_too
        assert len(entry.kept) == len(entry.drafts)
        for at, slot in enumerate(entry.kept, entry.start):
            self.states[slot] = content[at], spoilt_too
        self.num_kept += len(entry.kept)
        return spoiler if spoiler >= 0 else spoilt

    def run_windowed(self, entry, group: int, table: list[int], content, spoilt: int, written) -> set[int]:
        """The same in a group whose queries see no more than the window; who spoilt what they read."""
        spoilers, end, size = set(), entry.start + entry.count, self.page_size
        for position in range(max(0, entry.start + 1 - self.geometry.window), end):
            page = table[position // size]
            assert page >= 0, f"{entry.request} reads a page that was trimmed"
            at = page * size + position % size
            held = (group, content[position])
            if position >= entry.start:
                self.slots[at], self.spoilt[at] = held, spoilt
                written.append((at, held))
            assert self.slots[at] == held, f"{entry.request} reads what is not its own"
            spoilers.add(self.spoilt[at])
        return spoilers


class Simulation:
    """One walk. checks_every: operations between two check_integrity(), which cost most of the time. grouped: layers in
    groups, of which all but one see a window. contiguous: each request has pages for a whole context in a row. storm:
    requests are preempted all the time, and nothing of them is kept. holds: some are held for a while before their first
    token. states: of a model with a state. micro_batches, feeds: the
    scheduler's."""

    nan_chance = 0.02  # that some rows of a step are not finite
    page_sizes: tuple[int, ...] = (16, 16, 16, 32, 32, 64, 128)
    always_storms = False

    def __init__(
        self,
        seed: int,
        checks_every: int = 1,
        grouped: bool = False,
        contiguous: bool = False,
        storm: bool = False,
        states: bool = False,
        micro_batches: int = 1,
        feeds: bool = True,
        holds: bool = False,
    ):
        self.holds, self.num_held, self.num_ready, self.resumed_rate = holds, 0, 0, 0.1
        self.rng = rng = random.Random(seed)
        self.checks_every, self.num_checks = checks_every, 0
        self.page_size = page_size = rng.choice(self.page_sizes)
        self.num_pages = rng.randint(2, 24 if page_size == 16 else 12)  # tight, whatever the size
        self.max_rows = rng.randint(1, 6)
        max_tokens = self.max_rows + rng.randint(0, 40)
        geometry = PageGeometry(page_size=page_size)
        if grouped:
            window = rng.choice((1, 5, page_size, page_size + 1, 40))
            most = geometry.pages_for(window - 1 + (1 + micro_batches) * max(max_tokens, BLOCK)) + 1
            geometry = PageGeometry(rng.randint(1, 3), window, most, page_size=page_size)
            self.num_pages *= geometry.num_groups
        max_context, policies = rng.choice((20, 64, 150) if page_size <= 32 else (40, 100, 200)), POLICIES
        if contiguous:
            geometry, policies = rows_of(max_context, self.num_pages, page_size), (None,)
        self.allocator = FlakyAllocator(self.num_pages, rng)
        max_waiting, max_drafts = rng.choice((3, 100)), rng.choice((0, 3, 20))
        policy, slots = rng.choice(policies), None
        if states:
            slots = StateSlots(
                self.max_rows + rng.choice((0, 1, 2, 8)),
                rng.choice((3, 16, 40)),
                HostPool(rng.choice((0, 1, 3))),
                page_size=page_size if policy else 0,
            )
            slots.least_gain = rng.choice((1, 1, 32))
        self.scheduler = Scheduler(
            num_pages=self.num_pages,
            max_rows=self.max_rows,
            max_tokens=max_tokens,
            max_context=max_context,
            vocab_size=VOCAB,
            eos_ids=frozenset((EOS,)),
            max_waiting=max_waiting,
            allocator=self.allocator,
            max_drafts=max_drafts,
            prefix_cache=PrefixCache(self.num_pages, policy, page_size) if policy else None,
            host=HostPool(rng.choice((0, 4, 40, 40))),
            geometry=geometry,
            states=slots,
            micro_batches=micro_batches,
            feeds=feeds,
            policy=SchedulingPolicy(
                reserve_output=rng.random() < 0.5,
                batching=rng.choice(("continuous", "continuous", "static")),
                fair_share=rng.random() < 0.7,
                chunked_prefill=rng.random() < 0.8,
                tenant_weights={"a": 3.0},
                ageing_s=rng.choice((0.0, 1.0, 100.0)),
                mixed_ratio=rng.choice((0.0, 3.0)),
                max_waiting_tokens=rng.choice((100, 1 << 20)),
            ),
        )
        self.storm = storm = storm or self.always_storms
        self.scheduler.life.should_swap = lambda request: not storm and rng.random() < 0.8
        self.beginnings = [[rng.randrange(VOCAB) for _ in range(max_context)] for _ in range(3)]
        self.said: list[list[int]] = []  # prompts and replies of requests that have ended
        self.num_tokens = {"prompt": 0, "cached": 0}
        self.capacity = min(self.scheduler.max_context, self.scheduler.cache.capacity + 1)
        self.device = FakeDevice(self.num_pages, self.max_rows, geometry, 0 if slots is None else slots.num_slots)
        self.flight: list[tuple[Batch, list]] = []  # submitted, not committed
        self.most_in_flight = micro_batches + feeds
        self.ahead_rate = rng.choice((0.0, 0.9, 1.0))
        self.draft_rate = rng.choice((0.0, 0.5, 1.0))
        self.num_ahead = self.num_preempted = self.num_pinned = 0
        self.deadlines: dict[int, float] = {}  # of requests that never ran
        self.prompts: dict[int, list[int]] = {}
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}  # terminal state of every accepted request
        self.next_id = 0
        self.now = 0.0
        self.trace: list = []

    def check(self) -> None:
        scheduler = self.scheduler
        self.num_checks += 1
        if self.num_checks % self.checks_every == 0:
            assert scheduler.check_integrity() == []
        assert self.flight or not scheduler.life.retired, "what was cancelled is held although nothing is in flight"
        assert len(scheduler.running) <= self.max_rows
        # A pinned request's windowed pages come as it goes on: one that is refused for no reason can cost it its row again.
        most = MAX_PREEMPTIONS + (self.allocator.num_refused if scheduler.cache.num_groups > 1 else 0)
        for request in scheduler.running:
            if request.preemptions >= MAX_PREEMPTIONS:
                assert request.preemptions <= most and request.is_pinned, (
                    f"{request} was preempted {request.preemptions} times and is not pinned"
                )
            if request.is_pinned:
                self.num_pinned += request.preemptions < MAX_PREEMPTIONS
                assert len(scheduler.cache.table(request.id)) * self.page_size >= request.max_cached_len
        # Beyond the limit, those that run unpinned may be thrown away once more: a request in each row, at most.
        counters = scheduler.counters
        once = scheduler.cache.capacity + self.max_rows * self.capacity
        assert counters.recomputed_tokens <= MAX_RECOMPUTED * counters.scheduled_tokens + once, "too much is recomputed"

    def pages_of(self, entry, first: int) -> list[int]:
        """The pages of all groups that an entry needs for its tokens from position `first` on."""
        end, first_page = -(-(entry.start + entry.count) // self.page_size), first // self.page_size
        pages = entry.pages[first_page:end]
        if entry.windows is not None:
            seen = self.device.geometry.first(entry.start)
            pages = pages + [page for table in entry.windows.pages for page in table[max(seen, first_page) : end]]
            assert -1 not in pages, f"{entry.request}: a page that its window needs was trimmed"
        return pages

    def inspect(self, batch: Batch) -> None:
        """What must be true of a batch beside what the device sees."""
        assert batch.num_tokens == sum(entry.count for entry in batch.entries) <= self.scheduler.budget.max_tokens
        assert batch.num_samples == sum(entry.samples for entry in batch.entries)
        requests = {entry.request for entry in batch.entries}
        assert len(requests) == len(batch.entries), "a request stands twice in a batch"
        written = {}
        for entry in batch.entries:
            for page in self.pages_of(entry, entry.start):
                assert self.allocator.references(page) == 1, f"{entry.request} writes a page that others hold"
                written[page] = entry.request
        for other, _ in self.flight:
            for entry in other.entries:
                for page in self.pages_of(entry, 0):
                    assert written.get(page, entry.request) is entry.request, "a page in flight was given away"
                for mine in batch.entries if entry.slot >= 0 else ():
                    shared = {entry.slot, *entry.kept} & {mine.slot, *mine.kept}
                    assert not shared or mine.request is entry.request, "a state in flight was given away"
                if entry.request not in requests:
                    assert all(entry.request.row != request.row for request in requests), (
                        "a row in flight was given away"
                    )

    def check_fed(self, entry) -> None:
        """A token in flight is one of the oldest batch, of a device that feeds it."""
        if entry.start + entry.count <= len(entry.request.tokens) + len(entry.drafts):
            return
        flying = [batch for batch, _ in self.flight if any(each.request is entry.request for each in batch.entries)]
        assert self.most_in_flight > self.scheduler.micro_batches and flying == [self.flight[0][0]], (
            "a token that nobody has"
        )
        if self.scheduler.micro_batches > 1:
            assert len(self.flight) in (1, self.scheduler.micro_batches)

    def submit(self) -> None:
        rng, chunk, page = self.rng, self.scheduler.budget.max_tokens, self.page_size
        length = rng.choice(
            (
                1,
                page - 1,
                page,
                page + 1,
                chunk - 1,
                chunk,
                chunk + 1,
                2 * chunk,
                self.capacity - 1,
                self.capacity,
                self.capacity + 1,
                rng.randint(1, 60),
            )
        )
        prompt = [rng.randrange(VOCAB) for _ in range(max(1, length))]
        if rng.random() < 0.6:  # begins as others do, within a page or at its border
            begin = rng.choice(self.said) if self.said and rng.random() < 0.5 else rng.choice(self.beginnings)
            common = min(rng.choice((1, page - 1, page, 2 * page, 2 * page + 3, 200)), len(begin), len(prompt))
            prompt[:common] = begin[:common]
        options = RequestOptions(
            tenant=rng.choice("ab"),
            cache_salt="s" if rng.random() < 0.1 else "",
            priority=rng.choice((0, 0, 0, -10, 3, 10)),
            deadline_ms=rng.choice((1.0, 2000.0, 5000.0, 20_000.0)) if rng.random() < 0.3 else None,
        )
        if self.scheduler.cache.states is not None:
            points = sorted(rng.randrange(1, len(prompt) + 2) for _ in range(rng.choice((0, 0, 1, 2))))
            options = msgspec.structs.replace(options, state_points=tuple(points))
        params = SamplingParams(
            max_tokens=rng.choice((None, 1, 2, 5, 20, 60)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(3,) if rng.random() < 0.2 else (),
        )
        id, seed = self.next_id, rng.getrandbits(32)
        self.next_id += 1
        fits = len(prompt) + (params.max_tokens or 1) <= self.capacity
        queue = self.scheduler.life.queue
        waiting = sum(1 for _ in queue)
        queue_full = waiting >= self.scheduler.max_waiting or (
            waiting > 0 and queue.num_tokens + len(prompt) > self.scheduler.policy.max_waiting_tokens
        )
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
        if options.deadline_ms is not None:
            self.deadlines[id] = self.scheduler.life.now + options.deadline_ms / 1000
        if rng.random() < 0.1:
            self.scheduler.requests.get(id).stepwise = True
        if self.holds and rng.random() < 0.4:
            self.scheduler.requests[id].stepwise = True
            self.scheduler.hold(id)

    def cancel(self) -> None:
        rng = self.rng
        live = [id for id in self.expected if id not in self.ended]
        id = rng.choice(live) if live and rng.random() < 0.7 else rng.randrange(self.next_id + 5)
        known = id in self.expected and id not in self.ended
        assert self.scheduler.cancel(id) is known
        if known:
            self.ended[id] = "cancelled"
        ignored = self.scheduler.counters.ignored_cancels
        assert self.scheduler.cancel(id) is False and self.scheduler.counters.ignored_cancels == ignored + 1
        assert self.scheduler.requests.get(id) is None and id not in self.scheduler.cache.tables

    def preempt(self) -> None:
        """As when another request needs its pages."""
        running = [request for request in self.scheduler.running if not request.is_pinned]
        if running and not self.flight:
            self.scheduler.life.preempt(self.rng.choice(running))
            self.num_preempted += 1

    def expire(self) -> None:
        """Deadlines that passed before their requests ran end these, and no others."""
        now = max(self.now, self.scheduler.life.now)
        for id in list(self.deadlines):
            request = self.scheduler.requests.get(id)
            if request is None or request.residency:
                del self.deadlines[id]
        late = {id for id, deadline_at in self.deadlines.items() if deadline_at < now}
        outputs = self.scheduler.expire(self.now)
        assert {output.id for output in outputs} == late and all(output.finish == "timeout" for output in outputs)
        for id in late:
            self.ended[id] = "timeout"

    def drafts(self, request) -> list[int]:
        """Some of what it will say, the last one perhaps wrong."""
        said = len(request.tokens) - request.prompt_len
        drafts = self.expected[request.id][0][said : said + self.rng.randint(0, 6)]
        if self.rng.random() < 0.5:
            drafts.append(self.rng.randrange(VOCAB))
        return drafts

    def fork(self) -> None:
        """Another request goes on from where one is, or from some tokens before, with other tokens."""
        rng, scheduler = self.rng, self.scheduler
        live = [id for id in self.expected if id not in self.ended]
        if not live:
            return
        request = scheduler.requests.get(rng.choice(live))
        length = rng.randint(request.prompt_len, len(request.tokens))
        append = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 2))))
        if length + len(append) >= request.max_len:
            return
        id, seed = self.next_id, rng.getrandbits(32)
        self.next_id += 1
        scheduler.fork(request.id, id, seed=seed, length=length, append=append, now=self.now)
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
        self.expire()
        batch = self.scheduler.schedule(self.now)
        self.check()
        if batch is None:
            return False
        self.inspect(batch)
        poisoned = {entry.request.id for entry in batch.entries if self.rng.random() < nan_rate}
        for entry in batch.entries:
            self.check_fed(entry)
        assert not any(entry.samples and entry.request.held for entry in batch.entries), "a held request samples"
        self.flight.append((batch, self.device.run(batch, poisoned)))
        self.trace.append([(e.request.id, e.start, e.count) for e in batch.entries])
        return True

    def resume(self) -> None:
        """Some of those that are held go on; the others make way."""
        scheduler = self.scheduler
        held = [request for request in scheduler.requests.values() if request.held]
        for request in held:
            self.num_held += 1
            self.num_ready += len(request.tokens) - request.computed_len == 1
            if self.rng.random() < self.resumed_rate:
                scheduler.resume(request.id, request.tokens[-1])
        scheduler.life.make_way([request.id for request in held if request.held])

    def step(self, mid_step_cancels: int = 0, nan_rate: float = 0.0) -> bool:
        if self.holds:
            self.resume()
        if not self.flight and not self.submit_step(nan_rate):
            return False
        for _ in range(mid_step_cancels):
            self.cancel()
            self.check()
        while len(self.flight) < self.most_in_flight and self.rng.random() < self.ahead_rate:
            if not self.submit_step(nan_rate):
                break
            self.num_ahead += 1
        batch, sampled = self.flight.pop(0)
        cached = {entry.request.id: entry.request.cached_len for entry in batch.entries}
        for output in self.scheduler.commit(batch, sampled, self.rng.random() / 10):
            self.take(output, cached[output.id])
        self.check()
        return True

    def take(self, output: StepOutput, cached: int) -> None:
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
            assert output.cached_tokens == cached < len(self.prompts[output.id])
        got += output.tokens
        assert got == reply[: len(got)], f"request {output.id} differs from its solo run"
        assert (output.finish == finish) if len(got) == len(reply) else output.finish is None
        if output.finish:
            self.ended[output.id] = output.finish
            self.said.append(self.prompts[output.id] + got)

    def run(self, operations: int) -> None:
        rng = self.rng
        for _ in range(operations):
            self.now += rng.random() if rng.random() < 0.98 else rng.choice((-3600.0, -1.0, 20.0))
            if self.storm and rng.random() < 0.5:
                self.preempt()
            action = rng.random()
            if action < 0.15:
                self.submit()
            elif action < 0.20:
                self.cancel()
            elif action < 0.22:
                self.fork()
            elif action < 0.24:
                self.preempt()
            elif action < 0.26:
                self.allocator.failure_rate = rng.choice((0.0, 0.0, 0.5, 1.0))
            else:
                self.step(mid_step_cancels=rng.random() < 0.05, nan_rate=0.2 if rng.random() < self.nan_chance else 0.0)
            self.check()
        self.drain()

    def drain(self) -> None:
        """Everything that is still live must end, within the steps that its tokens and recomputations can take."""
        self.allocator.failure_rate = 0.0
        live = len(self.expected) - len(self.ended)
        bound = 10 + live * 4 * (2 * self.capacity + 5)
        scheduler, self.resumed_rate = self.scheduler, 0.0
        while (
            self.step() or self.holds and self.step()
        ):  # those that are held make way behind a step that finds no room
            bound -= 1
            assert bound > 0, "no progress"
        if self.holds:
            assert all(request.held for request in scheduler.requests.values()), "others wait for those that are held"
            self.resumed_rate = 1.0
            while self.step():
                bound -= 1
                assert bound > 0, "no progress"
        self.checks_every = 1
        assert set(self.ended) == set(self.expected), "a request never ended"
        assert not scheduler.requests and len(scheduler.running) == scheduler.queue.num_waiting == 0
        assert self.allocator.num_free == self.num_pages and not scheduler.cache.tables
        scheduler.cache.clear()
        assert scheduler.cache.host.num_free == scheduler.cache.host.num_slots
        if (states := scheduler.cache.states) is not None:
            assert not states.on_device.count and not states.on_host.count and not states.live and not states.lent
            assert not states.kept and not states.num_saved
        self.check()
        assert scheduler.cache.prefix is None or scheduler.cache.prefix.num_nodes == 0
        counters = scheduler.counters
        ends = counters.finished + counters.cancelled + counters.failed + counters.timed_out
        assert counters.submitted == ends == len(self.expected)
