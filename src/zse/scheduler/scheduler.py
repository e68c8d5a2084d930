"""Continuous batching as a pure state machine: no device, no clock, no I/O; time and seeds are arguments.

`schedule(now)` says which tokens of which requests run next, `commit(batch, sampled)` takes what came out. Between the
two the batch is in flight: a request cancelled meanwhile ends at once, its row and pages follow with the commit.

One batch more may be scheduled while another is in flight (a GPU is given step n + 1 before step n is read): lengths
advance when a batch is scheduled, the ids of its tokens come with the commit. What the ids decide waits for them: a
request that turns out to have ended is dropped one step late, and nothing is preempted while a batch is in flight.

This file is what others call. admission.py says who may enter and who is admitted, lifecycle.py where each request
stands, queue.py and fairness.py who is next, budget.py how much a step runs; batch.py makes a batch of that, and
results.py takes what came out.
"""

from zse.cache import contiguous, grouped
from zse.cache.groups import ONE_GROUP, PageGeometry
from zse.cache.manager import CacheManager
from zse.cache.pages import HostPool, PageAllocator
from zse.cache.prefix import PrefixCache
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.admission import Admission
from zse.scheduler.batch import Batch, BatchBuilder, Output, timeout_error
from zse.scheduler.budget import STEP_TARGET_S, StepBudget
from zse.scheduler.counters import Counters
from zse.scheduler.fairness import JobShare, Pace
from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.options import DEFAULT, RequestOptions, SchedulingPolicy
from zse.scheduler.request import RUNNING, Request
from zse.scheduler.results import BatchResults

MAX_IN_FLIGHT = 2


class Scheduler:
    """Owns every Request, the rows 0..max_rows-1 and, through its cache manager, the pages.

    Args:
        num_pages: in the pool; allocator: whose pages they are (default: a new one).
        max_rows: requests that run at once.
        max_tokens: of one step, at least max_rows; mixed_tokens: of a step that decodes and prefills (default: a
            quarter of max_tokens).
        max_context: tokens of one request.
        vocab_size: what token ids are below; eos_ids: those that end a reply unless ignore_eos.
        max_waiting: requests that may queue.
        prefix_cache: None computes every prompt. host: slots for pages that leave the device.
        max_drafts: draft tokens that all requests of one step may verify together (Request.drafts).
        policy: how requests are chosen.
        geometry: how many tokens a page has, as prefix_cache's, and which groups the layers are in.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        max_rows: int,
        max_tokens: int,
        max_context: int,
        vocab_size: int,
        eos_ids: frozenset[int] = frozenset(),
        max_waiting: int = 1024,
        mixed_tokens: int | None = None,
        allocator: PageAllocator | None = None,
        prefix_cache: PrefixCache | None = None,
        max_drafts: int = 0,
        host: HostPool | None = None,
        policy: SchedulingPolicy | None = None,
        geometry: PageGeometry = ONE_GROUP,
    ):
        if max_tokens < max_rows:
            raise ValueError(f"max_tokens {max_tokens} is below max_rows {max_rows}: decode rows would not fit a step")
        self.max_rows, self.max_context, self.max_drafts = max_rows, max_context, max_drafts
        self.vocab_size, self.eos_ids, self.max_waiting = vocab_size, eos_ids, max_waiting
        self.policy = policy = policy or SchedulingPolicy()
        self.cache = cache = cache_manager(allocator or PageAllocator(num_pages), prefix_cache, host, geometry)
        self.budget = budget = StepBudget(max_tokens, mixed_tokens, max_rows, policy.mixed_ratio)

        def should_swap(request: Request) -> bool:
            length = request.computed_len
            return policy.swap_is_quicker(length, cache.pages_for(length), budget.token_s)

        self.life = life = Lifecycle(cache, policy, max_rows, should_swap)
        self.admission = Admission(
            life, policy, vocab_size=vocab_size, max_context=max_context, max_waiting=max_waiting
        )
        self.job_share = JobShare(life.tenants)
        self._pace = Pace(life.tenants, budget.chunks) if budget.chunks is not None and policy.fair_share else None
        self.builder = BatchBuilder(life, self.admission, budget, self._pace, policy.chunked_prefill, max_drafts)
        self._results = BatchResults(life, vocab_size)
        self.num_arrivals = 0
        self._in_flight: list[Batch] = []  # oldest first

    # -- requests

    def submit(
        self,
        id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int,
        now: float = 0.0,
        options: RequestOptions = DEFAULT,
    ) -> Request:
        """Queue a request. Raises RequestError, and keeps nothing, when it cannot be served: see Admission."""
        try:
            max_len = self.admission.check_request(id, prompt, params)
        except RequestError:
            self.counters.refused += 1
            raise
        now = self._tell_time(now)
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            id,
            prompt,
            params,
            seed=seed,
            stop_ids=stop_ids if params.ignore_eos and options.structure is None else stop_ids | self.eos_ids,
            max_len=max_len,
            arrival=self.num_arrivals,
            now=now,
            due=self.policy.due_time(options, now),
            options=options,
        )
        self.num_arrivals += 1
        self.life.enqueue(request)
        return request

    def fork(
        self,
        source: int,
        id: int,
        *,
        seed: int,
        length: int | None = None,
        append: tuple[int, ...] = (),
        params: SamplingParams | None = None,
        now: float = 0.0,
    ) -> Request:
        """A new request that continues request `source` from its first `length` tokens (default: all that are known) and
        `append`. It shares the full KV pages of `source`, copies the last one, and runs in the next step, or waits when
        rows or pages are short and then finds in the prefix cache what is still there.

        Of `source` what is committed is shared: while none of its batches is in flight that is all but its last token,
        which both compute. params: default those of `source`. Raises RequestError for an unknown source or a taken id,
        ValueError for a length that `source` has not, or one that leaves nothing to sample."""
        life = self.life
        parent = life.by_id.get(source)
        if parent is None or id in life.by_id:
            raise RequestError(f"request {source} cannot be forked into {id}", status=409, code="conflict")
        length = len(parent.tokens) if length is None else length
        tokens = [*parent.tokens[:length], *append]
        if not parent.prompt_len <= length <= len(parent.tokens) or len(tokens) >= parent.max_len:
            raise ValueError(f"{parent} cannot be forked at {length} tokens and {len(append)} more")
        self.admission.check_ids("append", append)
        child = Request(
            id,
            tokens,
            params or parent.params,
            seed=seed,
            stop_ids=parent.stop_ids,
            max_len=parent.max_len,
            arrival=self.num_arrivals,
            now=max(life.now, now),
            due=parent.due,
            options=parent.options,
        )
        child.prompt_len, child.stepwise, child.cached_len = parent.prompt_len, parent.stepwise, 0
        child.residency = 1  # it has begun: no deadline ends it
        self.num_arrivals += 1
        life.fork(parent, child, min(parent.committed_len, length, len(tokens) - 1))
        return child

    def cancel(self, id: int) -> bool:
        """End a request in any state and free what it holds. False for an unknown or finished id, which is counted."""
        if not self.drop(id):
            self.counters.ignored_cancels += 1
            return False
        self.counters.cancelled += 1
        return True

    def drop(self, id: int) -> bool:
        """cancel() of a request that nobody asked for by this id: it does not count."""
        request = self.life.by_id.get(id)
        if request is not None:
            self.life.end(request)
        return request is not None

    def expire(self, now: float) -> list[Output]:
        """End the requests whose deadline has passed before they ever ran."""
        self._tell_time(now)
        return [Output(request.id, [], None, "timeout", error=timeout_error()) for request in self.life.expire()]

    def hold(self, id: int) -> None:
        """The request, which is stepwise, does not run until resume()."""
        self.life.by_id[id].held = True

    def resume(self, id: int, token: int) -> None:
        """The request may run again, with `token` in place of its last one, which has no K and V yet."""
        request = self.life.by_id[id]
        request.held = False
        request.tokens[-1] = token

    def preempt(self, id: int) -> bool:
        """Take the row and pages of a request, as when others need them; False when it has none, or is in flight."""
        request = self.life.by_id.get(id)
        if request is None or request.state is not RUNNING or request.in_flight:
            return False
        self.life.preempt(request)
        return True

    def _tell_time(self, now: float) -> float:
        """Clocks may go back; the scheduler's does not."""
        self.life.now = now = max(self.life.now, now)
        return now

    # -- a step

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next batch, or None when nothing can run, or nothing before the batch in flight is committed.

        At most MAX_IN_FLIGHT batches may be scheduled and not committed; RuntimeError beyond that.
        """
        in_flight = self._in_flight
        if len(in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError("schedule() before commit() of the batches in flight")
        if in_flight and in_flight[0].num_drafts:
            return None  # its requests' lengths are not known, and without them others would run in smaller steps
        self._tell_time(now)
        batch = self.builder.build(ahead=bool(in_flight))
        if batch is not None:
            in_flight.append(batch)
            self.counters.scheduled_tokens += batch.num_tokens
        return batch

    def commit(self, batch: Batch, sampled: list[tuple[int, object]]) -> list[Output]:
        """Take the results of the oldest batch in flight: (token, logprobs or None) for each entry that samples, in
        the batch's order; 1 + k of them for an entry with k drafts. Drafts are accepted while they equal what was
        sampled in their place; the first sampled token that differs is the last one taken.

        A token outside the vocabulary (the runner gives -1 for a row whose logits were not finite) fails that request
        alone. BatchResults of requests that ended meanwhile are dropped and counted.
        """
        if not self._in_flight or batch is not self._in_flight[0]:
            raise RuntimeError("commit() of a batch that is not the oldest in flight")
        if len(sampled) != batch.num_samples:
            raise ValueError(f"{len(sampled)} results for {batch.num_samples} sampling rows")
        del self._in_flight[0]
        return self._results.take(batch, sampled)

    def observe(self, batch: Batch, seconds: float) -> None:
        """The batch, which is not committed yet, took `seconds` on the device: what the next ones go by."""
        self.budget.observe(batch, seconds)
        self.job_share.observe_step(seconds)
        if self._pace is not None:
            self._pace.observe(batch, seconds)

    def observe_jobs(self, tokens: int, seconds: float) -> None:
        """A chunk of the jobs of `tokens` tokens took `seconds`."""
        if seconds > STEP_TARGET_S:
            self.budget.limit(int(tokens * STEP_TARGET_S / seconds))
        self.job_share.observe_chunk(seconds)

    # -- what others may know

    @property
    def counters(self) -> Counters:
        return self.life.counters

    @property
    def max_tokens(self) -> int:
        """Tokens of one step now."""
        return self.budget.max_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.life.running or self.life.queue)

    @property
    def num_running(self) -> int:
        return len(self.life.running)

    @property
    def num_waiting(self) -> int:
        return len(self.life.queue)

    def running(self) -> list[Request]:
        """Requests that have a row, oldest first; the caller must not change the list."""
        return self.life.running

    def decoding(self) -> list[Request]:
        """Running requests whose tokens are all known and whose next step runs the last of them: those that can have
        drafts now."""
        return [
            request
            for request in self.life.running
            if not request.pending
            and len(request.tokens) - request.computed_len == 1
            and not request.in_flight
            and request.drafts is not None
        ]

    def prompts_share_time(self) -> bool:
        """Whether the next step computes prompts for as long as its replies may wait (SchedulingSchedulingPolicy.mixed_ratio): then the
        time is theirs, and drafts would only make the chunks smaller."""
        return self.budget.chunks is not None and self.builder.has_prompts()

    def request(self, id: int) -> Request | None:
        return self.life.by_id.get(id)

    def live_ids(self) -> list[int]:
        """Ids that have been accepted and have not ended."""
        return list(self.life.by_id)

    def snapshot(self) -> dict[str, float]:
        """Totals since the start, of the scheduler and the cache, by name."""
        return self.counters.snapshot() | self.life.waits.snapshot() | self.cache.snapshot()

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each; empty when every invariant holds. Cheap enough for tests after every step."""
        life = self.life
        pages = [*(pages for _, pages in life.retired.values()), *self.admission.job_pages]
        return self.cache.check_integrity(pages) + life.check_integrity(is_flying=bool(self._in_flight))


def cache_manager(
    allocator: PageAllocator, prefix: PrefixCache | None, host: HostPool | None, geometry: PageGeometry
) -> CacheManager:
    """The CacheManager of a geometry. prefix: not looked at where sequences have runs of pages."""
    if geometry.run:
        return contiguous.ContiguousCacheManager(allocator, host, geometry)
    if geometry.windowed:
        return grouped.GroupedCacheManager(allocator, prefix, host, geometry)
    return CacheManager(allocator, prefix, host, geometry)
