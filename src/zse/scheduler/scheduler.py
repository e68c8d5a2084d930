"""Continuous batching as a pure state machine: no device, no clock, no I/O; time and seeds are arguments.

`schedule(now)` says which tokens of which requests run next, `commit(batch, sampled)` takes what came out. Between the
two the batch is in flight: a request cancelled meanwhile leaves at once, its row and pages follow with the commit.

One batch more may be scheduled while another is in flight (a GPU is given step n + 1 before step n is read): lengths
advance when a batch is scheduled, the ids of its tokens come with the commit. What the ids decide waits for them: a
request that turns out to have ended is dropped one step late, and nothing is preempted while a batch is in flight.

This file is what others call. Requests come in by intake.py; lifecycle.py says where each stands; a batch is made by
builder.py, which admits (admission.py) within what a step may run (budget.py, pace.py); results.py takes what came out.
"""

from collections.abc import Collection

from zse.cache.groups import ONE_GROUP, PageGeometry
from zse.cache.manager import cache_manager
from zse.cache.offload import HostPool
from zse.cache.pages import PageAllocator
from zse.cache.prefix import PrefixCache
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.admission import Admission
from zse.scheduler.batch import Batch, Counters, Output
from zse.scheduler.budget import StepBudget
from zse.scheduler.builder import BatchBuilder
from zse.scheduler.intake import Intake
from zse.scheduler.lifecycle import Lifecycle
from zse.scheduler.loans import PageLoans
from zse.scheduler.options import DEFAULT, RequestOptions
from zse.scheduler.pace import Pace
from zse.scheduler.policy import Policy, due_time, swap_is_quicker
from zse.scheduler.request import RUNNING, Request
from zse.scheduler.results import Results
from zse.scheduler.turns import JobTurns
from zse.scheduler.waits import Waits

MAX_IN_FLIGHT = 2


class Scheduler:
    """Owns every Request, the rows 0..max_rows-1 and, through its CacheManager, the pages.

    max_tokens: tokens of one step, at least max_rows. mixed_tokens: of a step that decodes and prefills (default: a
    quarter of max_tokens). eos_ids: tokens that end a reply unless ignore_eos. prefix_cache: None computes every prompt.
    max_drafts: draft tokens that all requests of one step may verify together (Request.drafts; what is beyond is left
    out). host: slots for pages that leave the device. policy: how requests are chosen. geometry: how many tokens a page
    has, which prefix_cache must have too, and of models whose layers are in groups what these hold.
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
        policy: Policy | None = None,
        geometry: PageGeometry = ONE_GROUP,
    ):
        if max_tokens < max_rows:
            raise ValueError(f"max_tokens {max_tokens} is below max_rows {max_rows}: decode rows would not fit a step")
        self.cache = cache_manager(allocator or PageAllocator(num_pages), prefix_cache, host, geometry)
        self.max_rows, self.max_context, self.max_drafts = max_rows, max_context, max_drafts
        self.vocab_size, self.eos_ids, self.max_waiting = vocab_size, eos_ids, max_waiting
        self.policy = policy = policy or Policy()
        self.intake = Intake(vocab_size, max_context, self.cache.capacity, max_waiting, policy.max_waiting_tokens)
        self.budget = budget = StepBudget(max_tokens, mixed_tokens, max_rows, policy.mixed_ratio)
        self.life = life = Lifecycle(
            self.cache,
            policy,
            max_rows,
            should_swap=lambda request: swap_is_quicker(
                policy, request.computed_len, self.cache.pages_for(request.computed_len), budget.token_s
            ),
        )
        self.loans = PageLoans(life)
        self.job_turns = JobTurns(life.queue)
        self._pace = Pace(life.queue, budget.chunks) if budget.chunks is not None and policy.fair_share else None
        self.builder = BatchBuilder(life, Admission(life, self.loans, policy), budget, self._pace, policy, max_drafts)
        self._results = Results(life, vocab_size)
        self._arrivals = 0
        self._in_flight: list[Batch] = []  # oldest first

    # -- requests in

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
        """Queue a request. Raises RequestError, and keeps nothing, when it cannot be served: see Intake."""
        life, intake = self.life, self.intake
        try:
            if id in life.by_id:
                raise RequestError(f"request id {id} is in use", status=409, code="conflict")
            intake.check_room(life.queue, len(prompt))
            intake.check_prompt(prompt)
            intake.check_params(params)
            max_len = intake.admissible_length(len(prompt), params.max_tokens)
        except RequestError:
            life.counters.refused += 1
            raise
        stop_ids = frozenset(params.stop_token_ids)
        now = self._tell_time(now)
        request = Request(
            id,
            prompt,
            params,
            seed=seed,
            max_len=max_len,
            arrival=self._arrivals,
            options=options,
            now=now,
            due=due_time(options, now, self.policy.ageing_s),
            stop_ids=stop_ids if params.ignore_eos and options.structure is None else stop_ids | self.eos_ids,
        )
        request.stepwise = options.structure is not None  # its mask depends on the last token
        self._arrivals += 1
        life.come(request)
        life.counters.submitted += 1
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
        self.check_ids("append", append)
        child = Request(
            id,
            tokens,
            params or parent.params,
            seed=seed,
            max_len=parent.max_len,
            arrival=self._arrivals,
            options=parent.options,
            stop_ids=parent.stop_ids,
            now=max(life.now, now),
            due=parent.due,
        )
        child.prompt_len, child.stepwise, child.cached_len = parent.prompt_len, parent.stepwise, 0
        child.residency = 1  # it has begun: no deadline ends it
        self._arrivals += 1
        life.counters.submitted += 1
        life.counters.forks += 1
        life.branch(parent, child, min(parent.committed_len, length, len(tokens) - 1))
        return child

    def cancel(self, id: int) -> bool:
        """Drop a request in any state and free what it holds. False for an unknown or finished id, which is counted."""
        request = self.life.by_id.get(id)
        if request is None:
            self.counters.ignored_cancels += 1
            return False
        self.counters.cancelled += 1
        self.life.end(request)
        return True

    def expire(self, now: float) -> list[Output]:
        """End the requests whose deadline has passed before they ever ran."""
        self._tell_time(now)
        return [Output(request.id, [], None, "timeout") for request in self.life.expire()]

    def check_ids(self, param: str, ids: Collection[int]) -> None:
        """Raises RequestError for an id outside the vocabulary."""
        self.intake.check_ids(param, ids)

    def _tell_time(self, now: float) -> float:
        """Clocks may go back; the scheduler's does not."""
        life = self.life
        life.now = now = max(life.now, now)
        return now

    # -- the beams of a search (engine/beams.py)

    def hold(self, id: int) -> None:
        """The request, which is stepwise, does not run until go_on()."""
        self.life.by_id[id].held = True

    def go_on(self, id: int, token: int) -> None:
        """The request may run again, with `token` in place of its last one, which has no K and V yet."""
        request = self.life.by_id[id]
        request.held = False
        request.tokens[-1] = token

    def give_up(self, id: int) -> bool:
        """Take the row and pages of a request, as when others need its pages; False when it has none, or is in
        flight."""
        request = self.life.by_id.get(id)
        if request is None or request.state is not RUNNING or request.in_flight:
            return False
        self.life.preempt(request)
        return True

    def drop(self, id: int) -> None:
        """End a request that nobody asked for by this id: neither cancelled nor finished. An unknown one is fine."""
        request = self.life.by_id.get(id)
        if request is not None:
            self.life.end(request)

    # -- sequences that run beside the requests (engine/jobs.py)

    def check_sequence(self, token_ids: list[int]) -> int:
        """Raises RequestError for a sequence that can never run beside the requests. Its place among the arrivals."""
        self.intake.check_sequence(token_ids)
        return self._arrivals

    def job_tokens(self) -> int:
        """Tokens that may run beside the requests between two steps."""
        return min(self.max_tokens, self.budget.prefill(self.num_running))

    # -- a step

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next batch, or None when nothing can run, or nothing before the batch in flight is committed.

        At most MAX_IN_FLIGHT batches may be scheduled and not committed; RuntimeError beyond that.
        """
        in_flight = self._in_flight
        if len(in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError("schedule() before commit() of the batches in flight")
        if in_flight and in_flight[0].num_drafts:
            return None  # where its requests go on is not known, and without them others would run in smaller steps
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
        alone. Results of requests that ended meanwhile are dropped and counted.
        """
        if not self._in_flight or batch is not self._in_flight[0]:
            raise RuntimeError("commit() of a batch that is not the oldest in flight")
        if len(sampled) != batch.num_samples:
            raise ValueError(f"{len(sampled)} results for {batch.num_samples} sampling rows")
        del self._in_flight[0]
        return self._results.take(batch, sampled)

    def observe(self, batch: Batch, seconds: float) -> None:
        """The batch took `seconds` on the device: what chunks of prompts go by (Policy.mixed_ratio)."""
        drafts = batch.num_drafts
        self.budget.observe(batch.num_decode - drafts, batch.num_tokens - batch.num_decode, seconds, drafts)
        if self._pace is not None:
            self._pace.observe(batch, seconds)

    def limit_step(self, tokens: int) -> None:
        """From now on run at most `tokens` in a step: whole blocks, at least one and one token of each row, at most
        what the scheduler was made with."""
        self.budget.limit(tokens)

    # -- what others may know

    @property
    def counters(self) -> Counters:
        return self.life.counters

    @property
    def waits(self) -> Waits:
        return self.life.waits

    @property
    def max_tokens(self) -> int:
        """Tokens of one step now."""
        return self.budget.max_tokens

    @property
    def is_limited(self) -> bool:
        """Whether limit_step() is in force."""
        return self.budget.is_limited

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
        """Whether the next step computes prompts for as long as its replies may wait (Policy.mixed_ratio): then the
        time is theirs, and drafts would only make the chunks smaller."""
        return self.budget.chunks is not None and self.builder.has_prompts()

    def request(self, id: int) -> Request | None:
        return self.life.by_id.get(id)

    def live_ids(self) -> list[int]:
        """Ids that have been accepted and have not ended."""
        return list(self.life.by_id)

    def snapshot(self) -> dict[str, float]:
        """Totals since the start, of the scheduler and the cache, by name."""
        return {**self.counters.snapshot(), **self.cache.snapshot()}

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each; empty when every invariant holds. Cheap enough for tests after every step."""
        life = self.life
        problems = self.cache.check_integrity([*(pages for _, pages in life.retired.values()), *self.loans.pages])
        return problems + life.check_integrity(is_flying=bool(self._in_flight))
