"""Who gets a row and pages next, and how many pages stay free then."""

from collections.abc import Callable

from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.loans import PageLoans
from zse.scheduler.policy import LEAST_ROWS_TO_KEEP, MAX_PREEMPTIONS, Policy
from zse.scheduler.request import Request


class Admission:
    """loans: pages that requests leave to jobs which go ahead of them."""

    def __init__(self, life: Lifecycle, loans: PageLoans, policy: Policy):
        self._life, self._loans, self._policy = life, loans, policy
        self._batch_left = 0  # requests that a static batch may still admit
        self._blocked: tuple = ()  # the first waiting request, and what it found too few pages with

    def admit(self, must_wait: Callable[[Request], bool]) -> Request | None:
        """Give the request that is next, of those that need not wait for something else, a row and pages for all its
        tokens; None when it has to wait."""
        life = self._life
        queue, running, cache = life.queue, life.running, life.cache
        if not queue or not life.free_rows:
            return None
        request = queue.head(must_wait)
        if request is None:
            return None
        if len(life.free_rows) == 1 and life.max_rows >= LEAST_ROWS_TO_KEEP and self._policy.fair_share:
            tenant = queue.tenant_of(request)
            if tenant.rows and queue.others_may_come(tenant, life.now):
                return None  # the last row is for a tenant that has none
        if self._policy.batching == "static":
            if not running:
                self._batch_left = min(len(queue), life.max_rows)
            if not self._batch_left:
                return None
        awaited = self._loans.awaited(request)
        is_pinned = request.preemptions >= MAX_PREEMPTIONS or life.recomputes_too_much
        state = request, cache.num_free, len(running), awaited, is_pinned
        if running and state == self._blocked:
            return None
        length = request.max_cached_len if is_pinned else len(request.tokens)
        is_swapped = cache.is_swapped(request.id)
        cached = cache.admit(
            request.id,
            length,
            request.tokens,
            request.salt,
            spare=awaited + cache.num_groups * self._spare_pages(request, length),
        )
        if cached is None:
            self._blocked = state
            return None
        self._batch_left -= 1
        queue.remove(request)
        # What comes back from the host is as sound as it was: of a prompt half computed nobody knows yet.
        life.start(request, cached, request.committed_len if is_swapped else cached)
        request.is_pinned = is_pinned
        life.recompute(request, cached)
        if request.cached_len < 0:
            request.cached_len = cached
        life.prompts.begin(request)
        return request

    def _spare_pages(self, request: Request, length: int) -> int:
        """Pages that stay free when the request is admitted with pages for `length` tokens."""
        life = self._life
        running = life.running
        if not running or not self._policy.reserve_output:
            # One page a running row: admitting into the last pages would preempt at the next page border.
            return len(running)
        # What the others and this one are going to need if their replies are as long as others were.
        pages_for = life.cache.pages_for
        spare = pages_for(max(length, life.lengths.expected(request))) - pages_for(length)
        for other in running:
            spare += max(pages_for(other.stay_start + other.stay_tokens) - len(life.cache.table(other.id)), 1)
        return spare
