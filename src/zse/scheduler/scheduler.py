"""Continuous batching as a pure state machine: no device, no clock, no I/O; time and seeds are arguments.

`schedule(now)` says which tokens of which requests run next, `commit(batch, sampled)` takes what came out. Between the
two the batch is in flight: a request cancelled meanwhile ends at once, its row and pages follow with the commit.

More may be scheduled while batches are in flight (a GPU is given step n + 1 before step n is read, a pipeline has one for each
rank): lengths advance when a batch is scheduled, the ids of its tokens come with the commit. What the ids decide waits: a
request that turns out to have ended is dropped one step late, and nothing is preempted while a batch is in flight.

This file is what others call: requests enter, and results of a batch are taken. request.py says what a request must be,
lifecycle.py where each stands, queue.py and fairness.py who is next; batch.py says how much a step runs
and makes a batch of that.
"""

from collections.abc import Container, Sequence
from heapq import heappop, heappush

import msgspec

from zse.cache import contiguous, grouped
from zse.cache.groups import ONE_GROUP, PageGeometry
from zse.cache.manager import CacheManager
from zse.cache.pages import HostPool, PageAllocator
from zse.cache.prefix import PrefixCache
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import (
    STEP_TARGET_S,
    Batch,
    BatchBuilder,
    Entry,
    StepBudget,
    StepOutput,
    numerical_error,
    timeout_error,
    tired_error,
)
from zse.scheduler.counters import NAMES, StepTotals
from zse.scheduler.fairness import EVERYBODY, JobShare, Pace
from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.options import DEFAULT, PATIENCE_S, RequestOptions, SchedulingPolicy
from zse.scheduler.request import FINISHED, RUNNING, Request, TokenLimits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.cache.states import StateSlots

PATIENCE_LOOK_S = 0.25  # between looks at who has waited for too long: a thousand requests take 0.1 ms
MEAN_STEP = 1 / 32  # weight of the newest reply in the running mean


class Scheduler:
    """Owns every Request, the rows 0..max_rows-1 and, through its cache manager, the pages.

    Args:
        num_pages: in the pool; allocator: whose pages they are (default: a new one).
        max_rows: requests that run at once.
        max_tokens: of one step, at least max_rows; mixed_tokens: of a step that decodes and prefills (default: a quarter of them).
        max_context: tokens of one request.
        vocab_size: what token ids are below; eos_ids: those that end a reply unless ignore_eos.
        max_waiting: requests that may queue.
        prefix_cache: None computes every prompt. host: slots for pages that leave the device.
        max_drafts: draft tokens that all requests of one step may verify together (Request.drafts).
        policy: how requests are chosen. geometry: how many tokens a page has, and which groups the layers are in.
        adapter_slots: how many adapters the requests that run may have together.
        states: slots of a model with a state, at least max_rows. cache: the manager of all pages (default: one of these).
        micro_batches, feeds: as of BatchBuilder; one batch more may be in flight.

    requests: by id, that were accepted and have not ended. running: those that have a row, oldest first. queue: those
    that wait. Others must not change them. counters, totals: of requests and of steps."""

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
        adapter_slots: int = 0,
        states: "StateSlots | None" = None,
        micro_batches: int = 1,
        feeds: bool = True,
        cache: CacheManager | None = None,
    ):
        if states is not None and states.num_slots < max_rows:
            raise ValueError(f"{states.num_slots} state slots for {max_rows} rows")
        if max_tokens < max_rows:
            raise ValueError(f"max_tokens {max_tokens} is below max_rows {max_rows}: decode rows would not fit a step")
        self.max_rows, self.max_context, self.max_waiting = max_rows, max_context, max_waiting
        self.vocab_size, self.eos_ids, self.num_arrivals = vocab_size, eos_ids, 0
        self.policy = policy = policy or SchedulingPolicy()
        allocator = allocator or PageAllocator(num_pages)
        self.cache = cache = cache or cache_manager(allocator, prefix_cache, host, geometry, states)
        self.budget = budget = StepBudget(max_tokens, mixed_tokens, max_rows, policy.mixed_ratio)

        def should_swap(request: Request) -> bool:
            length = request.computed_len
            return policy.swap_is_quicker(length, cache.pages_for(length), budget.token_s)

        self.life = life = Lifecycle(cache, policy, max_rows, should_swap, adapter_slots)
        self.requests, self.running, self.queue, self.counters = life.by_id, life.running, life.queue, life.counters
        self.limits = TokenLimits(vocab_size, max_context, cache.capacity)
        self.job_share = JobShare(life.queue)
        self.pace = Pace(life, budget) if budget.ratio and policy.fair_share else None
        self.builder = BatchBuilder(life, budget, policy.chunked_prefill, max_drafts, micro_batches, feeds)
        self.totals, self.micro_batches, self.max_drafts = StepTotals(), micro_batches, self.builder.max_drafts
        self._deadlines: list[tuple[float, int]] = []  # a heap of (deadline_at, id), of those that ended too
        self._patience_seen_at = 0.0  # when max_wait_s was last looked at
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
        """Queue a request. Raises RequestError, and keeps nothing, when it cannot be served, or the queue is full.

        Its place in the queue is fixed (earliest virtual deadline first): a level of priority counts like `ageing_s`
        earlier. So it is overtaken only by those that are submitted within PATIENCE_S + ageing_s * (levels above it)
        after it: every wait is bounded."""
        life, queue, policy = self.life, self.queue, self.policy
        try:
            self.check_room(id, (), queue.num_waiting)
            if queue.num_waiting and queue.num_tokens + len(prompt) > policy.max_waiting_tokens:
                raise _overloaded(f"{queue.num_tokens} prompt tokens")
            max_len = self.limits.max_len(prompt, params)
        except RequestError:
            self.counters.refused += 1
            raise
        life.now = now = max(life.now, now)
        patience = PATIENCE_S if options.deadline_ms is None else min(options.deadline_ms / 1000, PATIENCE_S)
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
            due=now + patience - policy.ageing_s * options.priority,
            options=options,
        )
        self.num_arrivals += 1
        self.requests[id] = request
        queue.add(request)
        self.counters.submitted += 1
        if options.deadline_ms is not None:
            heappush(self._deadlines, (request.deadline_at, id))
        return request

    def check_room(self, id: int, others: Container[int], num_waiting: int) -> None:
        """Raises RequestError when the scheduler or `others` know the id, or where max_waiting wait already."""
        if id in self.requests or id in others:
            raise RequestError(f"request id {id} is in use", status=409, code="conflict")
        if num_waiting >= self.max_waiting:
            raise _overloaded(f"{self.max_waiting} requests")

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
        """A new request that continues request `source` from its first `length` tokens (default: all that are known)
        and `append`. It shares the full KV pages of `source`, copies the last one, and runs in the next step, or waits
        when rows or pages are short and then finds in the prefix cache what is still there.

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
        self.limits.check_ids("append", append)
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
        request = self.requests.get(id)
        if request is not None:
            self.life.end(request)
        return request is not None

    def expire(self, now: float) -> list[StepOutput]:
        """End the requests whose deadline or patience has passed before they ever ran."""
        self.life.now = now = max(self.life.now, now)
        late: list[StepOutput] = []
        if self.queue.num_waiting and now - self._patience_seen_at >= PATIENCE_LOOK_S:
            self._patience_seen_at = now
            late += [self._expire(request, tired_error()) for request in self._tired(now)]
        while self._deadlines and self._deadlines[0][0] < now:
            deadline_at, id = heappop(self._deadlines)
            request = self.requests.get(id)
            if request is not None and request.deadline_at == deadline_at and not request.residency:
                late.append(self._expire(request, timeout_error()))
        return late

    def _tired(self, now: float) -> list[Request]:
        """Requests that have waited for longer than their max_wait_s and never ran. Who waits for the prompt of a
        running one will begin with it."""
        return [
            request
            for request in self.queue
            if not request.residency
            and (most := request.options.max_wait_s) is not None
            and now - request.submitted_at > most
            and not self.life.prompts.must_wait(request)
        ]

    def _expire(self, request: Request, error: RequestError) -> StepOutput:
        self.counters.timed_out += 1
        self.life.end(request)
        return StepOutput(request.id, [], None, "timeout", error=error)

    def hold(self, id: int) -> None:
        """Until resume() the request, which is stepwise, samples nothing; if it never ran, its prompt does up to there."""
        self.requests[id].held = True

    def resume(self, id: int, token: int) -> None:
        """The request may run again, with `token` in place of its last one, which has no K and V yet."""
        request = self.requests[id]
        request.held = False
        request.tokens[-1] = token

    def preempt(self, id: int) -> bool:
        """Take the row and pages of a request, as when others need them; False when it has none, or is in flight."""
        request = self.requests.get(id)
        if request is None or request.state is not RUNNING or request.in_flight:
            return False
        self.life.preempt(request)
        return True

    # -- a step

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next batch, or None when nothing can run, or nothing before a batch in flight is committed. RuntimeError when too
        many are."""
        in_flight = self._in_flight
        if len(in_flight) > self.micro_batches:
            raise RuntimeError("schedule() before commit() of the batches in flight")
        if any([batch.num_drafts for batch in in_flight]):
            return None  # its requests' lengths are not known, and without them others would run in smaller steps
        self.life.now = max(self.life.now, now)
        plan = self.pace.plan() if self.pace is not None and len(self.queue.visitors) > 1 else EVERYBODY
        batch = self.builder.build(in_flight, plan)
        if batch is None and plan is not EVERYBODY:
            batch = self.builder.build(in_flight, EVERYBODY)  # the others have nothing to run now
        if batch is not None:
            in_flight.append(batch)
            self.counters.scheduled_tokens += batch.num_tokens
        return batch

    def commit(self, batch: Batch, sampled: list, seconds: float = 0.0) -> list[StepOutput]:
        """Take the results of the oldest batch in flight: (token, logprobs or None) for each entry that samples, in the
        batch's order; 1 + k of them for an entry with k drafts. Drafts are accepted while they equal what was sampled
        in their place; the first sampled token that differs is the last one taken. seconds: what the batch took on the
        device, which the next ones go by; 0: not measured.

        A token outside the vocabulary (the runner gives -1 for a row whose logits were not finite) fails that request
        alone. Results of requests that ended meanwhile are dropped and counted.
        """
        if not self._in_flight or batch is not self._in_flight[0]:
            raise RuntimeError("commit() of a batch that is not the oldest in flight")
        if len(sampled) != batch.num_samples:
            raise ValueError(f"{len(sampled)} results for {batch.num_samples} sampling rows")
        del self._in_flight[0]
        self._observe(batch, seconds)
        if batch.num_drafts or batch.num_samples != len(batch.entries):
            sampled = batch.by_entry(sampled)
        outputs: list[StepOutput] = []
        life, grouped, vocab_size = self.life, self.cache.grouped, self.vocab_size
        tell, has_drafts = outputs.append, batch.num_drafts > 0
        for entry, results in zip(batch.entries, sampled, strict=True):
            request = entry.request
            if request.state is FINISHED:
                life.counters.late_results += 1
                request.pending -= entry.samples
                request.chunks_in_flight -= not entry.samples
                if entry.kept:
                    self.cache.states.settle(request.id)  # type: ignore[union-attr]
                if not request.in_flight:
                    is_known = life.retired[request][2] >= 0 and request.computed_len == len(request.tokens)
                    if is_known and results is not None and 0 <= results[0] < vocab_size:
                        request.committed_len = request.computed_len
                    life.release(request)
            elif has_drafts and entry.drafts:
                outputs += self._take_run(entry, results)
            elif results is not None:
                request.pending -= 1
                token, logprob = results
                if not 0 <= token < vocab_size:
                    tell(self._fail(request))
                    continue
                tokens = request.tokens
                length = request.committed_len = len(tokens)  # all that was known is computed now, and sound
                tokens.append(token)
                cached, waited, finish = 0, 0.0, None
                if length >= request.checkpoint or token in request.stop_ids:
                    cached, waited, finish = self._pass_checkpoint(request, length, length, token)
                tell(StepOutput(request.id, [token], None if logprob is None else [logprob], finish, cached, waited))
            else:
                request.chunks_in_flight -= 1
            if grouped is not None and request.state is RUNNING:
                # What is in flight of this request continues from here.
                grouped.trim(request.id, request.committed_len if entry.drafts else entry.start + entry.count)
        self.totals.sampled_tokens += sum([len(output.tokens) for output in outputs])
        return outputs

    def _observe(self, batch: Batch, seconds: float) -> None:
        """The batch took `seconds`: what a step may take, and who shares something, go by it."""
        totals = self.totals
        totals.steps += 1
        totals.prompt_tokens += batch.num_tokens - batch.num_samples
        totals.step_s += seconds
        totals.longest_step_s = max(totals.longest_step_s, seconds)
        if not seconds:
            return
        self.budget.observe(batch, seconds)
        if self.queue.num_jobs:
            self.job_share.observe_step(seconds)
        if self.pace is not None and len(self.queue.visitors) > 1:
            self.pace.observe(batch, seconds)

    def _pass_checkpoint(self, request: Request, first: int, length: int, token: int) -> tuple[int, float, str | None]:
        """`length` tokens of the request are computed and sound, and those from place `first` on were sampled in this
        step, the last of them `token`: what need not be done after each. How many of the prompt were cached, and the
        seconds that it waited, when its first token is among them; and why the token is its last, or None: the request
        has ended then."""
        is_first, page_size = first == request.prompt_len, self.cache.page_size
        if request.leads:
            self.life.prompts.end(request)
        tokens = request.compared_tokens if request.options.images else request.tokens
        self.cache.commit(request.id, tokens, length, partial=is_first)
        request.checkpoint = min(length + page_size - length % page_size, request.max_len - 1)
        finish = "stop" if token in request.stop_ids else "length" if len(request.tokens) >= request.max_len else None
        if finish is not None:
            life, counters = self.life, self.counters
            counters.finished += 1
            life.mean_reply += (len(request.tokens) - request.prompt_len - life.mean_reply) * MEAN_STEP
            if request.options.deadline_ms is not None:
                if life.now <= request.deadline_at:
                    counters.deadlines_met += 1
                else:
                    counters.deadlines_missed += 1
            life.end(request)
        return (request.cached_len, request.waited_s, finish) if is_first else (0, 0.0, finish)

    def _take_run(self, entry: Entry, sampled: Sequence[tuple[int, object]]) -> list[StepOutput]:
        """Take the results of an entry with drafts: line i was sampled behind draft i - 1."""
        request, drafts = entry.request, entry.drafts
        request.pending -= entry.samples
        accepted: list[int] = []
        logprobs = []
        for line, (token, logprob) in enumerate(sampled):
            if not 0 <= token < self.vocab_size:
                # A draft may be the cause, also of what stands before it (a kernel multiplies what it masks by 0): the
                # request continues from here without drafts, and the next step finds out.
                request.drafts = None
                break
            accepted.append(token)
            logprobs.append(logprob)
            request.tokens.append(token)
            is_last = token in request.stop_ids or len(request.tokens) >= request.max_len
            if is_last or line < len(drafts) and token != drafts[line]:
                break
        counters, states = self.counters, self.cache.states
        counters.verified_runs += 1
        counters.drafted_tokens += len(drafts)
        first = entry.start + entry.count - len(drafts)  # the place of the first token
        # Behind these stand K and V of drafts that were not accepted: the next step writes over them before it reads.
        request.computed_len = end = first - 1 + len(accepted)
        if states is not None:
            states.settle(request.id, len(accepted))
            if not accepted:  # the run wrote over the state before it
                self.life.preempt(request, is_lost=True)
        if not accepted:
            return []  # what is committed stays as it is: this may be the end of a prompt that is not finite
        counters.accepted_tokens += len(accepted) - 1
        request.committed_len = request.computed_len
        cached, waited, finish = 0, 0.0, None
        if end >= request.checkpoint or accepted[-1] in request.stop_ids:
            cached, waited, finish = self._pass_checkpoint(request, first, request.computed_len, accepted[-1])
        return [StepOutput(request.id, accepted, None if logprobs[0] is None else logprobs, finish, cached, waited)]

    def _fail(self, request: Request) -> StepOutput:
        self.counters.failed += 1
        self.cache.distrust(request.id)
        self.life.end(request)
        computed = request.num_computed - request.pending + 1  # with the token that is none, without a step ahead
        return StepOutput(request.id, [], None, "error", error=numerical_error(), computed=computed)

    def observe_jobs(self, tokens: int, seconds: float) -> None:
        """A chunk of the jobs of `tokens` tokens took `seconds`."""
        if seconds > STEP_TARGET_S:
            self.budget.limit(int(tokens * STEP_TARGET_S / seconds))
        self.job_share.observe_chunk(seconds)

    # -- what others may know

    def num_computed(self, id: int) -> int:
        """Tokens computed so far for a request that has not ended (Request.num_computed); 0 for others."""
        request = self.requests.get(id)
        return 0 if request is None else request.num_computed

    def decoding(self) -> list[Request]:
        """Running requests whose tokens are all known and whose next step runs the last of them: those that can have
        drafts now."""
        return [
            request
            for request in self.running
            if not (request.pending or request.held)
            and len(request.tokens) - request.computed_len == 1
            and not request.chunks_in_flight
            and request.drafts is not None
        ]

    def snapshot(self) -> dict[str, float]:
        """Totals since the start, of the scheduler and the cache, by name."""
        waits = dict(zip(NAMES, self.life.waits, strict=True))
        return msgspec.structs.asdict(self.counters) | waits | self.cache.snapshot()

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each; empty when every invariant holds. Cheap enough for tests after every step."""
        life = self.life
        pages = [*(pages for _, pages, _ in life.retired.values()), *life.job_pages]
        return self.cache.check_integrity(pages) + life.check_integrity(is_flying=bool(self._in_flight))


def cache_manager(
    allocator: PageAllocator,
    prefix: PrefixCache | None,
    host: HostPool | None,
    geometry: PageGeometry,
    states: "StateSlots | None" = None,
) -> CacheManager:
    """The CacheManager of a geometry. prefix: not looked at where sequences have runs of pages."""
    if geometry.run:
        return contiguous.ContiguousCacheManager(allocator, host, geometry, states)
    if geometry.windowed:
        return grouped.GroupedCacheManager(allocator, prefix, host, geometry)
    return CacheManager(allocator, prefix, host, geometry, states)


def _overloaded(what: str) -> RequestError:
    return RequestError(
        f"{what} are waiting already; try again later", status=503, type="server_error", code="overloaded"
    )
