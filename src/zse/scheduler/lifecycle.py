"""Where each request stands: it waits, runs in a row with pages, or has ended. The one place where that changes.

What a batch in flight still uses when its request ends (row, pages) is kept apart until that batch is done.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from zse.cache.manager import CacheManager
from zse.scheduler.counters import Counters, QueueWaits, ReplyLengths
from zse.scheduler.fairness import TenantShares
from zse.scheduler.options import SchedulingPolicy
from zse.scheduler.queue import SharedPrompts, WaitingQueue
from zse.scheduler.request import FINISHED, RUNNING, WAITING, Request, age_order

# While preemptions have thrown away more than this share of all tokens that ran, nobody is admitted who could be
# preempted.
MAX_RECOMPUTED = 1 / 4


class Lifecycle:
    """by_id: requests that have not ended. queue: those that wait. running: those that have a row and pages, in
    age_order. free_rows: of rows 0..max_rows-1. retired: (row, pages) of requests that ended in flight.
    num_lost: tokens that preemptions threw away, of requests that wait. now: the latest time that was told.
    should_swap: whether a request that is preempted goes to host slots, as far as there are any, instead of being
    recomputed."""

    def __init__(
        self, cache: CacheManager, policy: SchedulingPolicy, max_rows: int, should_swap: Callable[[Request], bool]
    ):
        self.cache, self.max_rows, self.should_swap = cache, max_rows, should_swap
        self.counters, self.waits, self.lengths = Counters(), QueueWaits(), ReplyLengths()
        self.by_id: dict[int, Request] = {}
        self.tenants = TenantShares(policy.tenant_weights, policy.fair_share)
        self.queue = WaitingQueue(self.tenants)
        self.prompts = SharedPrompts(cache.prefix is not None)
        self.running: list[Request] = []
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self.retired: dict[Request, tuple[int, list[int]]] = {}
        self.now, self.num_lost = 0.0, 0
        self._deadlines: list[tuple[float, int]] = []  # a heap of (deadline_at, id), of those that ended too

    def enqueue(self, request: Request) -> None:
        """A new request waits."""
        self.by_id[request.id] = request
        self.queue.add(request)
        self.tenants.submitted(request, self.now)
        self.counters.submitted += 1
        if request.options.deadline_ms is not None:
            heappush(self._deadlines, (request.deadline_at, request.id))

    def fork(self, source: Request, request: Request, shared: int) -> None:
        """A new request continues another one's first `shared` tokens: on its pages where a row and pages are free, else
        it waits, and finds in the prefix cache what is still there."""
        self.by_id[request.id] = request
        self.counters.submitted += 1
        self.counters.forks += 1
        can_start = self.free_rows and source.state is RUNNING and not self.recomputes_too_much
        if can_start and self.cache.fork(source.id, request.id, shared, len(request.tokens)):
            self.admit(request, shared, shared)
        else:
            self.cache.commit(source.id, source.tokens, source.committed_len, partial=True)
            self.queue.add(request)

    def admit(self, request: Request, computed_len: int, committed_len: int) -> None:
        """The request has pages, with K and V of `computed_len` tokens, the first `committed_len` of which are known to
        be sound: give it a row."""
        insort(self.running, request, key=age_order)
        request.row, request.state = self.free_rows.pop(), RUNNING
        if not request.residency:
            self.counters.queue_wait_s += self.now - request.submitted_at
            self.waits.add(self.now - request.submitted_at)
        request.residency += 1
        request.computed_len = request.first_len = computed_len
        request.committed_len = committed_len
        request.checkpoint = 0
        request.expected_tokens = self.lengths.expected(request) - computed_len
        self.tenants.started(request, request.expected_tokens)
        # Of what it lost, if anything, the rest is computed again.
        self.counters.recomputed_tokens += max(0, request.lost_len - computed_len)
        self.num_lost -= request.lost_len
        request.lost_len = 0

    def preempt(self, request: Request) -> None:
        """The running request loses its row and pages, and waits again. Nothing of it may be in flight."""
        self._stop(request)
        self.prompts.end(request)
        self.cache.commit(request.id, request.tokens, request.committed_len, partial=True)
        if not (self.should_swap(request) and self.cache.swap_out(request.id, request.computed_len)):
            self.cache.release(request.id)
            request.committed_len = 0
            request.lost_len = request.computed_len
            self.num_lost += request.lost_len
        self.free_rows.append(request.row)
        self.counters.preemptions += 1
        request.row, request.computed_len, request.state = -1, 0, WAITING
        request.is_pinned = False
        if request.drafts:
            request.drafts = ()
        request.preemptions += 1
        self.queue.add(request)

    def make_room(self, request: Request, length: int) -> bool:
        """Pages for `length` tokens of the running request, from younger ones. False when it had to yield itself."""
        while not self.cache.reserve(request.id, length):
            # This request itself at the latest: a pinned one has all its pages, this one lacks one.
            victim = choose_victim(self.running) or request
            self.preempt(victim)
            if victim is request:
                return False
        return True

    @property
    def recomputes_too_much(self) -> bool:
        """Whether preemptions throw away too many tokens.

        Counted are those that were computed again, those that wait for it, and those that the pages in use hold, which
        could be lost next. Together they may be MAX_RECOMPUTED of the tokens that ran, and once what all pages hold."""
        free = self.cache.page_size * self.cache.allocator.num_free // self.cache.num_groups
        return self.counters.recomputed_tokens + self.num_lost > MAX_RECOMPUTED * self.counters.scheduled_tokens + free

    def finish(self, request: Request) -> None:
        """The request has its last token."""
        counters = self.counters
        counters.finished += 1
        self.lengths.observe(len(request.tokens) - request.prompt_len)
        if request.options.deadline_ms is not None:
            if self.now <= request.deadline_at:
                counters.deadlines_met += 1
            else:
                counters.deadlines_missed += 1
        self.end(request)

    def expire(self) -> list[Request]:
        """End the requests whose deadline has passed before they ever ran."""
        late = []
        while self._deadlines and self._deadlines[0][0] < self.now:
            deadline_at, id = heappop(self._deadlines)
            request = self.by_id.get(id)
            if request is not None and request.deadline_at == deadline_at and not request.residency:
                self.counters.timed_out += 1
                self.end(request)
                late.append(request)
        return late

    def end(self, request: Request) -> None:
        """The one place where a request ends: out of every table, row and pages back (after its last step)."""
        del self.by_id[request.id]
        self.num_lost -= request.lost_len
        tenant = self.tenants.of(request)
        if request.state is RUNNING:
            self._stop(request)
        else:
            self.queue.remove(request)
        self.tenants.leave(tenant)
        self.prompts.end(request)
        self.cache.commit(request.id, request.tokens, request.committed_len, partial=True)
        pages = self.cache.detach(request.id)
        if request.id in self.cache.swapped:
            self.cache.drop_swapped(request.id)
        if request.row >= 0:
            self.retired[request] = request.row, pages
            if not request.in_flight:
                self.release(request)
        request.row, request.state = -1, FINISHED

    def release(self, request: Request) -> None:
        """No batch in flight has the request, which ended, any more."""
        row, pages = self.retired.pop(request)
        self.free_rows.append(row)
        self.cache.allocator.release(pages)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.tenants.stopped(request, request.computed_len - request.first_len - request.expected_tokens)

    def check_integrity(self, is_flying: bool) -> list[str]:
        """What is wrong, one line each. is_flying: whether a batch is in flight."""
        problems = []
        waiting = list(self.queue)
        if self.num_lost != sum(request.lost_len for request in waiting):
            problems.append("the number of lost tokens is wrong")
        live = {*waiting, *self.running}
        if len(live) != len(waiting) + len(self.running) or live != set(self.by_id.values()):
            problems.append("a request stands in two lists, or in none")
        if self.running != sorted(self.running, key=age_order):
            problems.append("the running list is out of order")
        problems += self.queue.check_integrity(self.running)
        for name, requests in (("waiting", waiting), ("running", self.running)):
            problems += [f"{request}: in the {name} list" for request in requests if request.state != name]
        rows = [request.row for request in self.running] + [row for row, _ in self.retired.values()] + self.free_rows
        if sorted(rows) != list(range(self.max_rows)):
            problems.append(f"rows are lost or shared: {sorted(rows)}")
        if set(self.cache.tables) != {request.id for request in self.running}:
            problems.append("pages are held by a request that does not run, or a running one has none")
        for request in self.running:
            held, pages_for = len(self.cache.table(request.id)), self.cache.pages_for
            if not pages_for(request.computed_len) <= held <= pages_for(request.max_cached_len):
                problems.append(f"{request}: {held} pages")
            if self.cache.covered(request.id) < request.computed_len:
                problems.append(f"{request}: windowed pages for {self.cache.covered(request.id)} tokens")
            if not request.computed_len <= len(request.tokens) + request.pending <= request.max_len:
                problems.append(f"{request}: lengths out of order")
            if not is_flying and request.in_flight or request.pending < 0 or request.chunks_in_flight < 0:
                problems.append(f"{request}: in flight, and nothing is")
            if not request.in_flight and request.computed_len >= len(request.tokens):
                problems.append(f"{request}: nothing left to run")
        return problems


def choose_victim(requests: Iterable[Request]) -> Request | None:
    """The request that loses its pages when a decode step finds none: the last in order, unpinned."""
    return max((request for request in requests if not request.is_pinned), key=age_order, default=None)
