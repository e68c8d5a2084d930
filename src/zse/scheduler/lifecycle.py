"""Where each request stands: it waits, runs in a row with pages, or has ended. The one place where that changes.

Requests and jobs are admitted in one order: the tenant that is furthest behind its share goes first, and what was
submitted first within a tenant (FairQueue.goes_first). What a batch in flight still uses when its request ends (row,
pages) is kept apart until that batch is done.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec

from zse.cache.manager import CacheManager
from zse.scheduler import images
from zse.scheduler.counters import BOUNDS, NAMES, Counters
from zse.scheduler.options import SchedulingPolicy
from zse.scheduler.queue import LEAST_SHARED, Claimant, FairQueue, RunningAdapters, SharedPrompts, Tenant
from zse.scheduler.request import FINISHED, RUNNING, WAITING, Request, age_order, salt_of

# A request that was preempted this often is admitted again only with all the pages that it can ever need, and is
# never chosen again (it is pinned): the request finishes.
MAX_PREEMPTIONS = 3
# While preemptions have thrown away more than this share of all tokens that ran, nobody is admitted who could be
# preempted.
MAX_RECOMPUTED = 1 / 4
# With so many rows one is kept for a tenant that has none.
LEAST_ROWS_TO_KEEP = 4
FIRST_MEAN = 64.0  # tokens of a reply, until replies have ended
LEAST_REST = 16  # tokens that a reply is expected to have left, however long it is


class Lifecycle:
    """by_id: requests that have not ended. queue: those that wait. running: those that have a row and pages, in
    age_order. free_rows: of rows 0..max_rows-1. retired: (row, pages, state slot) of requests that ended in flight. num_lost:
    tokens that preemptions threw away, of requests that wait. now: the latest time that was told. waits: how many
    requests waited so long for their first row, by the buckets of counters.NAMES. mean_reply: tokens of replies, a
    running mean. job_pages: pages of the requests' pool that jobs hold now, one list a job; job_slots: their state
    slots. should_swap: whether a
    request that is preempted goes to host slots, as far as there are any, instead of being recomputed."""

    def __init__(
        self,
        cache: CacheManager,
        policy: SchedulingPolicy,
        max_rows: int,
        should_swap: Callable[[Request], bool],
        adapter_slots: int = 0,
    ):
        self.cache, self.policy, self.max_rows, self.should_swap = cache, policy, max_rows, should_swap
        self.counters, self.waits, self.mean_reply = Counters(), [0] * len(NAMES), FIRST_MEAN
        self.by_id: dict[int, Request] = {}
        self.queue, self.prompts = (
            FairQueue(policy.tenant_weights, policy.fair_share),
            SharedPrompts(cache.states is not None),
        )
        self.adapters = RunningAdapters(adapter_slots)
        self.running: list[Request] = []
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self.retired: dict[Request, tuple[int, list[int], int]] = {}
        self.now, self.num_lost = 0.0, 0
        self.job_pages: list[list[int]] = []
        self.job_slots: dict[Claimant, int] = {}
        self._next_job: tuple[Claimant, int] | None = None  # a job that waits for so many pages
        self._batch_left = 0  # requests that a static batch may still admit
        self.is_short = False  # whether in the last step somebody waited in vain
        self._blocked: tuple = ()  # the first waiting request, and what it found too few pages with

    # -- a waiting request begins

    def admit(self, left_out: Collection[Tenant] = ()) -> Request | None:
        """Give the request that is next, of those that need not wait for something else, a row and pages for all its
        tokens; None when it has to wait. What is held begins where nobody else is next. left_out: tenants whose
        requests have to."""
        queue, running, cache = self.queue, self.running, self.cache
        if not queue.num_waiting or not self.free_rows:
            return None
        request = queue.head(self.prompts, left_out, self.adapters)
        request = request or queue.head(self.prompts, left_out, self.adapters, may_be_held=True)
        is_scarce = len(self.free_rows) == 1 or self.policy.batching == "static"
        if request is None or is_scarce and not self._has_row(request):
            return None
        awaited = 0  # pages that the request must leave to a job which goes ahead of it
        if self._next_job is not None and not queue.goes_first(request, self._next_job[0]):
            awaited = self._next_job[1]
        is_pinned = (
            request.preemptions >= MAX_PREEMPTIONS or bool(self.counters.preemptions) and self.recomputes_too_much()
        )
        kept = 0  # what others have cached, while the tenant's own requests give pages back
        if cache.prefix is not None and request.tenant.rows and self.policy.fair_share:
            kept = cache.prefix.shares_of_others(request.tenant.name)
        state = request, cache.allocator.num_free, len(running), awaited + kept, is_pinned
        if running and state == self._blocked:
            return None
        length = request.max_cached_len if is_pinned else len(request.tokens)
        is_swapped = request.id in cache.swapped
        spare = awaited + kept + cache.num_groups * (self._spare_pages(request, length) if running else 0)
        tokens = request.compared_tokens if request.options.images else request.tokens
        if cache.preferred is not None and request.options.rank >= 0:
            cache.preferred[request.id] = request.options.rank
        cached = cache.admit(request.id, length, tokens, request.salt, spare, request.options.session)
        if cached is not None and request.options.images and not is_swapped:
            cached = self._end_before_image(request, length, spare, cached)
        if cached is None:
            if kept and request.tenant not in left_out:  # it alone waits: others may begin
                return self.admit((*left_out, request.tenant))
            self._blocked = state
            return None
        self._batch_left -= 1
        # What comes back from the host is as sound as it was: of a prompt half computed nobody knows yet.
        self._start(request, cached, request.committed_len if is_swapped else cached)
        request.is_pinned = is_pinned
        if request.cached_len < 0:
            request.cached_len = cached
        if cache.prefix is not None and len(request.tokens) - cached >= LEAST_SHARED:
            self.prompts.begin(request, queue)
        return request

    def _end_before_image(self, request: Request, length: int, spare: int, found: int) -> int | None:
        """The request was admitted with `found` cached tokens: again, where they end within an image that one step
        computes, with those before it. As CacheManager.admit()."""
        placed, cached = request.options.images, found
        while (end := images.uncut(placed, cached)) < cached:
            self.cache.release(request.id)
            # At least one token fewer than it is given is found.
            tokens = request.compared_tokens[: end + 1]
            again = self.cache.admit(request.id, length, tokens, request.salt, spare, request.options.session)
            if again is None:
                return None
            cached = again
        return cached

    def may_start(self, request: Request) -> bool:
        """Whether the waiting request would be admitted if it were next, as far as is known without trying."""
        is_blocked = self._blocked and self._blocked[0] is request
        is_blocked = is_blocked or self.adapters.must_wait(request)
        return bool(self.free_rows) and not (request.held or is_blocked) and self._has_row(request)

    def _has_row(self, request: Request) -> bool:
        """Whether one of the free rows is for the request: the last one is for a tenant that has none, and a static
        batch admits those that waited when it began."""
        if len(self.free_rows) == 1 and self.max_rows >= LEAST_ROWS_TO_KEEP and self.policy.fair_share:
            tenant = request.tenant
            if tenant.rows and self.queue.others_may_come(tenant, self.now):
                return False
        if self.policy.batching == "static":
            if not self.running:
                self._batch_left = min(self.queue.num_waiting, self.max_rows)
            return self._batch_left > 0
        return True

    def _spare_pages(self, request: Request, length: int) -> int:
        """Pages that stay free beside those that run when the request is admitted with pages for `length` tokens."""
        if not self.policy.reserve_output:
            # One page a running row: admitting into the last pages would preempt at the next page border.
            return len(self.running)
        # What the others and this one are going to need if their replies are as long as others were.
        pages_for = self.cache.pages_for
        spare = pages_for(max(length, self.expected_len(request))) - pages_for(length)
        for other in self.running:
            spare += max(pages_for(other.first_len + other.expected_tokens) - len(self.cache.tables[other.id]), 1)
        return spare

    def expected_len(self, request: Request) -> int:
        """Tokens that are likely to have K and V in the end: the reply is as long as replies are, at most
        max_tokens."""
        rest = max(self.mean_reply - (len(request.tokens) - request.prompt_len), LEAST_REST)
        return min(len(request.tokens) + int(rest), request.max_cached_len)

    def recomputes_too_much(self) -> bool:
        """Whether preemptions throw away too many tokens.

        Counted are those that were computed again, those that wait for it, and those that the pages in use hold, which
        could be lost next. Together they may be MAX_RECOMPUTED of the tokens that ran, and once what all pages hold."""
        free = self.cache.page_size * self.cache.allocator.num_free // self.cache.num_groups
        return self.counters.recomputed_tokens + self.num_lost > MAX_RECOMPUTED * self.counters.scheduled_tokens + free

    def fork(self, source: Request, request: Request, shared: int) -> None:
        """A new request continues another one's first `shared` tokens: on its pages where a row and pages are free,
        else it waits, and finds in the prefix cache what is still there."""
        self.by_id[request.id] = request
        self.counters.submitted += 1
        self.counters.forks += 1
        self.queue.add(request)
        can_start = self.free_rows and source.state is RUNNING and not self.recomputes_too_much()
        if self.cache.states is not None:  # which is behind all that was submitted
            can_start = can_start and source.computed_len == shared and not source.in_flight
        if can_start and self.cache.fork(source.id, request.id, shared, len(request.tokens)):
            self._start(request, shared, shared)
        else:
            self.cache.commit(source.id, source.compared_tokens, source.committed_len, partial=True)

    def _start(self, request: Request, computed_len: int, committed_len: int) -> None:
        """The waiting request has pages, with K and V of `computed_len` tokens, the first `committed_len` of which are
        known to be sound: give it a row."""
        insort(self.running, request, key=age_order)
        request.row, request.state = self.free_rows.pop(), RUNNING
        if request.options.adapter:
            self.adapters.start(request)
        if not request.residency:
            waited = request.waited_s = self.now - request.submitted_at
            self.counters.queue_wait_s += waited
            self.waits[bisect_left(BOUNDS, waited)] += 1
        request.residency += 1
        request.computed_len = request.first_len = computed_len
        request.committed_len = committed_len
        request.checkpoint = 0
        if (states := self.cache.states) is not None:
            request.places = [place for place in request.places if place >= computed_len + states.least_gain]
            request.next_place = states.next_place(request.places, request.prompt_len, computed_len)
        request.expected_tokens = self.expected_len(request) - computed_len
        self.queue.start(request, request.expected_tokens)
        # Of what it lost, if anything, the rest is computed again.
        self.counters.recomputed_tokens += max(0, request.lost_len - computed_len)
        self.num_lost -= request.lost_len
        request.lost_len = 0

    # -- a running request gives up its row

    def preempt(self, request: Request, is_lost: bool = False) -> None:
        """The running request loses its row and pages, and waits again. Nothing of it may be in flight. is_lost: it has no
        state any more, and is computed again; nobody else took its place."""
        self._stop(request)
        request.reached_len = max(request.reached_len, request.computed_len)
        self.cache.commit(request.id, request.compared_tokens, request.committed_len, partial=True)
        if is_lost or not (self.should_swap(request) and self.cache.swap_out(request.id, request.computed_len)):
            if self.cache.states is not None and not is_lost:
                self._keep_state(request)
            self.cache.release(request.id)
            request.committed_len = 0
            request.lost_len = request.computed_len
            self.num_lost += request.lost_len
        self.free_rows.append(request.row)
        if request.options.adapter:
            self.adapters.stop(request)
        self.counters.preemptions += 1
        request.row, request.computed_len, request.state = -1, 0, WAITING
        request.is_pinned = False
        if request.drafts:
            request.drafts = ()
        request.preemptions += not is_lost
        self.queue.add(request)

    def _keep_state(self, request: Request) -> None:
        """The request, of which nothing is in flight, loses its pages: others may continue where it is."""
        if request.computed_len == request.committed_len:
            self.cache.keep_state(request.id, request.compared_tokens, request.committed_len)

    def make_way(self, held: Iterable[int]) -> None:
        """These requests, which are held, lose their rows and pages where somebody else was not admitted."""
        if self.is_short and self.queue.head(self.prompts) is not None:
            for id in held:
                request = self.by_id[id]
                if request.state is RUNNING and not request.in_flight:
                    self.preempt(request)

    def make_room(self, request: Request, length: int) -> bool:
        """Pages for `length` tokens of the running request, from younger ones. False when it had to yield itself."""
        while not self.cache.reserve(request.id, length):
            # This request itself at the latest: a pinned one has all its pages, this one lacks one.
            ranks, rivals = self.cache.rank_of, self.running
            if ranks is not None:  # others' pages are of no use to it
                rivals = [other for other in rivals if ranks[other.id] == ranks[request.id]]
            victim = choose_victim(rivals) or request
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.queue.stop(request, request.computed_len - request.first_len - request.expected_tokens)
        if request.leads:
            self.prompts.end(request)

    # -- the end

    def end(self, request: Request) -> None:
        """The one place where a request ends: out of every table, row and pages back (after its last step)."""
        del self.by_id[request.id]
        self.num_lost -= request.lost_len
        if request.state is RUNNING:
            self._stop(request)
        else:
            self.queue.remove(request)
        self.queue.leave(request.tenant)
        cache, slot = self.cache, -1
        tokens = request.compared_tokens if request.options.images else request.tokens
        cache.commit(request.id, tokens, request.committed_len, partial=True)
        if cache.states is not None:
            if not request.in_flight:
                self._keep_state(request)
            slot = cache.states.detach(request.id)
        pages = cache.detach(request.id)
        if request.id in cache.swapped:
            cache.drop_swapped(request.id)
        if request.row >= 0:
            self.retired[request] = request.row, pages, slot
            if not request.in_flight:
                self.release(request)
        elif request.options.images:
            _drop_images(request)
        request.row, request.state = -1, FINISHED

    def release(self, request: Request) -> None:
        """No batch in flight has the request, which ended, any more."""
        row, pages, slot = self.retired.pop(request)
        self.free_rows.append(row)
        if request.options.adapter:
            self.adapters.stop(request)
        if slot >= 0:  # with the state behind all tokens, the last of which ended the request
            known = request.committed_len if request.committed_len == request.computed_len else 0
            self.cache.adopt(request.compared_tokens, known, pages, request.salt, slot)
        if request.options.images:
            _drop_images(request)
        self.cache.allocator.release(pages)

    # -- jobs

    def admit_job(self, count: int, job: Claimant) -> list[int] | None:
        """`count` pages for a job, until release_job(). None while too few are free: then requests that it goes ahead
        of leave the pages alone, as it leaves alone what others wait for that go ahead of it."""
        allocator, keep = self.cache.allocator, len(self.running)
        # A beam that is held goes on when the others of its search have run, which may wait for the job.
        head = self.queue.head(self.prompts, may_be_held=True)
        if head is not None and self.queue.goes_first(head, job):
            keep += self.cache.pages_needed(len(head.tokens))
        states = self.cache.states
        pages = None
        if count + keep <= allocator.num_free and (states is None or states.has_room()):
            pages = allocator.allocate(count)
        if pages is None:
            self._next_job = job, count
            return None
        self._next_job = None
        self.job_pages.append(pages)
        if states is not None:
            self.job_slots[job] = states.lend()
        if (
            self.cache.prefix is not None
        ):  # jobs hold a quarter of the pages at most (PAGE_SHARE), of their tenant's share
            self.cache.prefix.own(salt_of(job.options), pages)
        return pages

    def release_job(self, job: Claimant, pages: list[int]) -> None:
        """The job ended, with these pages, or while it waited for some."""
        if pages:
            self.job_pages.remove(pages)
            if job in self.job_slots:
                self.cache.states.give(self.job_slots.pop(job))  # type: ignore[union-attr]
            self.cache.allocator.release(pages)
        elif self._next_job is not None and self._next_job[0] is job:
            self._next_job = None

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
        rows = [request.row for request in self.running] + [row for row, _, _ in self.retired.values()] + self.free_rows
        if sorted(rows) != list(range(self.max_rows)):
            problems.append(f"rows are lost or shared: {sorted(rows)}")
        adapters = Counter(request.options.adapter for request in (*self.running, *self.retired))
        if self.adapters.rows != {name: count for name, count in adapters.items() if name}:
            problems.append(f"rows of adapters are wrong: {self.adapters.rows}")
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
    """The request that loses its pages when a decode step finds none: the last in order, unpinned; one that is held
    before its first token goes before others."""
    victims = [request for request in requests if not request.is_pinned]
    held = [request for request in victims if request.held and len(request.tokens) == request.prompt_len]
    return max(held or victims, key=age_order, default=None)


def _drop_images(request: Request) -> None:
    """Of one that ended and whose pages are given back: others may hold it for longer than the embeddings are kept."""
    request.options = msgspec.structs.replace(request.options, images=())
