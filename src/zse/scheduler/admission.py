"""Who may enter and who is admitted: can it ever be served, is there room in the queue, are a row and pages free now?

Requests and jobs stand in one order: the tenant that is furthest behind its share goes first, and what was submitted
first within a tenant (TenantShares.goes_first).
"""

from collections.abc import Callable, Collection, Container

from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.fairness import Claimant
from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.options import SchedulingPolicy
from zse.scheduler.request import Request

# A request that was preempted this often is admitted again only with all the pages that it can ever need, and is
# never chosen again (it is pinned): the request finishes.
MAX_PREEMPTIONS = 3
# With so many rows one is kept for a tenant that has none.
LEAST_ROWS_TO_KEEP = 4


class Admission:
    """max_context: tokens of one request. max_waiting: requests that may queue, in the scheduler and in each feature.
    job_pages: pages of the requests' pool that jobs hold now, one list a job."""

    def __init__(
        self, life: Lifecycle, policy: SchedulingPolicy, *, vocab_size: int, max_context: int, max_waiting: int
    ):
        self._life, self._policy = life, policy
        self.vocab_size, self.max_context, self.max_waiting = vocab_size, max_context, max_waiting
        self.job_pages: list[list[int]] = []
        self._next_job: tuple[Claimant, int] | None = None  # a job that waits for so many pages
        self._batch_left = 0  # requests that a static batch may still admit
        self._blocked: tuple = ()  # the first waiting request, and what it found too few pages with

    # -- can it ever be served, and is there room in the queue

    def check_request(self, id: int, prompt: list[int], params: SamplingParams) -> int:
        """Most tokens, prompt included, that the request may reach. Raises RequestError when it is refused."""
        queue = self._life.queue
        self.check_room(id, (), len(queue))
        if queue and queue.num_tokens + len(prompt) > self._policy.max_waiting_tokens:
            raise _overloaded(f"{queue.num_tokens} prompt tokens")
        self._check_prompt(prompt)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias or ())
        return self._max_len(len(prompt), params.max_tokens)

    def check_job(self, token_ids: list[int]) -> None:
        """Raises RequestError for a sequence that can never run beside the requests: nothing is sampled of it."""
        self._check_prompt(token_ids)
        capacity = min(self.max_context, self._life.cache.capacity)
        if len(token_ids) > capacity:
            raise RequestError(
                f"{len(token_ids)} tokens are more than the context of {capacity}",
                code="context_length_exceeded",
                param="prompt",
            )

    def check_room(self, id: int, others: Container[int], num_waiting: int) -> None:
        """Raises RequestError when the scheduler or `others` know the id, or where max_waiting wait already."""
        if id in self._life.by_id or id in others:
            raise RequestError(f"request id {id} is in use", status=409, code="conflict")
        if num_waiting >= self.max_waiting:
            raise _overloaded(f"{self.max_waiting} requests")

    def check_ids(self, param: str, ids: Collection[int]) -> None:
        """Raises RequestError for an id outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(id for id in ids if not 0 <= id < self.vocab_size)
            raise RequestError(
                f"token id {bad} is outside this model's vocabulary of {self.vocab_size}",
                code="invalid_token_id",
                param=param,
            )

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise RequestError("the prompt has no tokens", code="invalid_value", param="prompt")
        self.check_ids("prompt", prompt)

    def _max_len(self, prompt_len: int, max_tokens: int | None) -> int:
        """A request beyond the context, or beyond all pages together, would wait for ever."""
        # The last sampled token needs no page.
        capacity = min(self.max_context, self._life.cache.capacity + 1)
        wanted = prompt_len + (max_tokens or 1)
        if wanted > capacity:
            why = f"this model's context is {self.max_context} tokens"
            if capacity < self.max_context:
                why = f"the KV cache of this engine holds {capacity - 1} tokens"
            asked = f"{prompt_len} prompt tokens" + (f" and max_tokens {max_tokens}" if max_tokens else "")
            raise RequestError(f"{why}; the request has {asked}", code="context_length_exceeded")
        return wanted if max_tokens is not None else capacity

    # -- are a row and pages free now

    def admit(self, must_wait: Callable[[Request], bool]) -> Request | None:
        """Give the request that is next, of those that need not wait for something else, a row and pages for all its
        tokens; None when it has to wait."""
        life = self._life
        queue, running, cache = life.queue, life.running, life.cache
        if not queue or not life.free_rows:
            return None
        request = queue.head(must_wait)
        if request is None or not self._has_row(request):
            return None
        awaited = self._awaited_by_jobs(request)
        is_pinned = request.preemptions >= MAX_PREEMPTIONS or life.recomputes_too_much
        state = request, cache.allocator.num_free, len(running), awaited, is_pinned
        if running and state == self._blocked:
            return None
        length = request.max_cached_len if is_pinned else len(request.tokens)
        is_swapped = request.id in cache.swapped
        spare = awaited + cache.num_groups * self._spare_pages(request, length)
        cached = cache.admit(request.id, length, request.tokens, request.salt, spare=spare)
        if cached is None:
            self._blocked = state
            return None
        self._batch_left -= 1
        queue.remove(request)
        # What comes back from the host is as sound as it was: of a prompt half computed nobody knows yet.
        life.admit(request, cached, request.committed_len if is_swapped else cached)
        request.is_pinned = is_pinned
        if request.cached_len < 0:
            request.cached_len = cached
        life.prompts.begin(request)
        return request

    def _has_row(self, request: Request) -> bool:
        """Whether one of the free rows is for the request: the last one is for a tenant that has none, and a static
        batch admits those that waited when it began."""
        life, policy = self._life, self._policy
        if len(life.free_rows) == 1 and life.max_rows >= LEAST_ROWS_TO_KEEP and policy.fair_share:
            tenant = life.tenants.of(request)
            if tenant.rows and life.tenants.others_may_come(tenant, life.now):
                return False
        if policy.batching == "static":
            if not life.running:
                self._batch_left = min(len(life.queue), life.max_rows)
            return self._batch_left > 0
        return True

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
            spare += max(pages_for(other.first_len + other.expected_tokens) - len(life.cache.table(other.id)), 1)
        return spare

    # -- jobs

    def admit_job(self, count: int, job: Claimant) -> list[int] | None:
        """`count` pages for a job, until release_job(). None while too few are free: then requests that it goes ahead of
        leave the pages alone, as it leaves alone what others wait for that go ahead of it."""
        cache, life = self._life.cache, self._life
        keep = len(life.running)
        head = life.queue.head()
        if head is not None and life.tenants.goes_first(head, job):
            keep += cache.pages_needed(len(head.tokens))
        pages = cache.allocator.allocate(count) if count + keep <= cache.allocator.num_free else None
        if pages is None:
            self._next_job = job, count
            return None
        self._next_job = None
        self.job_pages.append(pages)
        return pages

    def release_job(self, job: Claimant, pages: list[int]) -> None:
        """The job ended, with these pages, or while it waited for some."""
        if pages:
            self.job_pages.remove(pages)
            self._life.cache.allocator.release(pages)
        elif self._next_job is not None and self._next_job[0] is job:
            self._next_job = None

    def _awaited_by_jobs(self, request: Request) -> int:
        """Pages that the request must leave to a job which goes ahead of it."""
        if self._next_job is None or self._life.tenants.goes_first(request, self._next_job[0]):
            return 0
        return self._next_job[1]


def _overloaded(what: str) -> RequestError:
    return RequestError(
        f"{what} are waiting already; try again later", status=503, type="server_error", code="overloaded"
    )
