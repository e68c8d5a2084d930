"""Continuous batching as a pure state machine: no device, no clock, no I/O; time and seeds are arguments.

`schedule(now)` says which tokens of which requests run next, `commit(batch, sampled)` takes what came out. Between the
two the batch is in flight: a request cancelled meanwhile leaves at once, its row and pages follow with the commit.

One batch more may be scheduled while another is in flight (a GPU is given step n + 1 before step n is read): lengths
advance when a batch is scheduled, the ids of its tokens come with the commit. What the ids decide waits for them: a
request that turns out to have ended is dropped one step late, and nothing is preempted while a batch is in flight.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from zse.cache.grouped import GroupedCacheManager
from zse.cache.groups import ONE_GROUP, PageGeometry
from zse.cache.manager import CacheManager
from zse.cache.offload import HostPool
from zse.cache.pages import PAGE, PageAllocator, pages_for
from zse.cache.prefix import PrefixCache
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, Counters, Entry, Output
from zse.scheduler.budget import ChunkBudget
from zse.scheduler.options import DEFAULT, RequestOptions, check_options
from zse.scheduler.pace import Pace
from zse.scheduler.policy import (
    LEAST_MEASURED_SHARE,
    LEAST_ROWS_TO_KEEP,
    REPLY_MEAN_STEP,
    Policy,
    age_order,
    choose_victim,
    due_time,
    is_pinned,
    prefill_budget,
)
from zse.scheduler.prompts import ComputedPrompts
from zse.scheduler.queue import WaitingQueue
from zse.scheduler.request import FINISHED, RUNNING, WAITING, Request
from zse.scheduler.waits import Waits

MAX_IN_FLIGHT = 2
FIRST_MEAN_REPLY = 64.0     # tokens, until replies have ended


class Scheduler:
    """Owns every Request, the rows 0..max_rows-1 and, through its CacheManager, the pages.

    max_tokens: tokens of one step, at least max_rows. mixed_tokens: of a step that decodes and prefills (default: a
    quarter of max_tokens). eos_ids: tokens that end a reply unless ignore_eos. prefix_cache: None computes every prompt.
    max_drafts: draft tokens that all requests of one step may verify together (Request.drafts; what is beyond is left
    out). host: slots for pages that leave the device. policy: how requests are chosen. geometry: of models whose layers
    are in groups.
    """

    def __init__(self, *, num_pages: int, max_rows: int, max_tokens: int, max_context: int, vocab_size: int,
                 eos_ids: frozenset[int] = frozenset(), max_waiting: int = 1024, mixed_tokens: int | None = None,
                 allocator: PageAllocator | None = None, prefix_cache: PrefixCache | None = None,
                 max_drafts: int = 0, host: HostPool | None = None,
                 policy: Policy | None = None, geometry: PageGeometry = ONE_GROUP):
        if max_tokens < max_rows:
            raise ValueError(f"max_tokens {max_tokens} is below max_rows {max_rows}: decode rows would not fit a step")
        allocator = allocator or PageAllocator(num_pages)
        self._grouped: GroupedCacheManager | None = None
        if geometry.windowed:
            self._grouped = GroupedCacheManager(allocator, prefix_cache, host, geometry)
        self.cache: CacheManager = self._grouped or CacheManager(allocator, prefix_cache, host)
        # Whether a request that is preempted goes to host slots, as far as there are any, instead of being recomputed.
        self.should_swap: Callable[[Request], bool] = self._swap_is_quicker
        self._prompts = ComputedPrompts(prefix_cache is not None)
        self.max_rows, self.max_tokens, self.max_context = max_rows, max_tokens, max_context
        self.max_drafts = max_drafts
        self._configured_tokens, self._mixed_tokens = max_tokens, mixed_tokens
        self.vocab_size, self.eos_ids, self.max_waiting = vocab_size, eos_ids, max_waiting
        self.policy = policy = policy or Policy()
        self.counters, self.waits = Counters(), Waits()
        self._requests: dict[int, Request] = {}
        self._queue = WaitingQueue(policy.tenant_weights, policy.fair_share)
        self._running: list[Request] = []   # by age_order
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._arrivals = 0
        self._deadlines: list[tuple[float, int]] = []   # a heap of (deadline_at, id), of those that have gone too
        self._now = 0.0                     # the latest time that was told
        self._chunks = ChunkBudget(policy.mixed_ratio) if policy.mixed_ratio else None
        self._pace = Pace(self._queue, self._chunks) if self._chunks is not None and policy.fair_share else None
        self._left_out: str | None = None       # the tenant that this step leaves out
        self._batch_left = 0                # requests that a static batch may still admit
        self._mean_reply = FIRST_MEAN_REPLY
        self._blocked: tuple = ()           # the first waiting request, and what it found too few pages with
        self._in_flight: list[Batch] = []   # oldest first
        self._retired: dict[Request, tuple[int, list[int]]] = {}   # (row, pages) of requests that left in flight
        self._borrowed: list[list[int]] = []
        self._borrower: tuple[int, int] | None = None   # (arrival, pages) of a sequence that waits for pages

    # -- requests in

    def submit(self, id: int, prompt: list[int], params: SamplingParams, *, seed: int, now: float = 0.0,
               options: RequestOptions = DEFAULT) -> Request:
        """Queue a request. Raises RequestError, and keeps nothing, when it cannot be served: see _admissible_length."""
        try:
            if id in self._requests:
                raise RequestError(f"request id {id} is in use", status=409, code="conflict")
            if len(self._queue) >= self.max_waiting:
                raise RequestError(f"{self.max_waiting} requests are waiting already; try again later", status=503,
                                   type="server_error", code="overloaded")
            if self._queue and self._queue.num_tokens + len(prompt) > self.policy.max_waiting_tokens:
                raise RequestError(f"{self._queue.num_tokens} prompt tokens are waiting already; try again later",
                                   status=503, type="server_error", code="overloaded")
            check_options(options)
            self._check_token_ids(prompt, params)
            max_len = self._admissible_length(len(prompt), params.max_tokens)
        except RequestError:
            self.counters.refused += 1
            raise
        stop_ids = frozenset(params.stop_token_ids)
        now = self._now = max(self._now, now)
        request = Request(id, prompt, params, seed=seed, max_len=max_len, arrival=self._arrivals,
                          options=options, now=now, due=due_time(options, now, self.policy.ageing_s),
                          stop_ids=stop_ids if params.ignore_eos and options.structure is None
                          else stop_ids | self.eos_ids)
        request.stepwise = options.structure is not None    # its mask depends on the last token
        self._arrivals += 1
        self._requests[id] = request
        self._queue.add(request)
        self._queue.seen(request, now)
        if options.deadline_ms is not None:
            heappush(self._deadlines, (request.deadline_at, id))
        self.counters.submitted += 1
        return request

    def fork(self, source: int, id: int, *, seed: int, length: int | None = None, append: tuple[int, ...] = (),
             params: SamplingParams | None = None, now: float = 0.0) -> Request:
        """A new request that continues request `source` from its first `length` tokens (default: all that are known) and
        `append`. It shares the full KV pages of `source`, copies the last one, and runs in the next step, or waits when
        rows or pages are short and then finds in the prefix cache what is still there.

        Of `source` what is committed is shared: while none of its batches is in flight that is all but its last token,
        which both compute. params: default those of `source`. Raises RequestError for an unknown source or a taken id,
        ValueError for a length that `source` has not, or one that leaves nothing to sample."""
        parent = self._requests.get(source)
        if parent is None or id in self._requests:
            raise RequestError(f"request {source} cannot be forked into {id}", status=409, code="conflict")
        length = len(parent.tokens) if length is None else length
        tokens = [*parent.tokens[:length], *append]
        if not parent.prompt_len <= length <= len(parent.tokens) or len(tokens) >= parent.max_len:
            raise ValueError(f"{parent} cannot be forked at {length} tokens and {len(append)} more")
        self.check_ids("append", append)
        child = Request(id, tokens, params or parent.params, seed=seed, max_len=parent.max_len, arrival=self._arrivals,
                        options=parent.options, stop_ids=parent.stop_ids, now=max(self._now, now), due=parent.due)
        child.prompt_len, child.stepwise, child.cached_len = parent.prompt_len, parent.stepwise, 0
        child.residency = 1     # it has begun: no deadline ends it
        self._arrivals += 1
        self._requests[id] = child
        self.counters.submitted += 1
        self.counters.forks += 1
        shared = min(parent.committed_len, length, len(tokens) - 1)
        if self._free_rows and parent.state is RUNNING and self.cache.fork(source, id, shared, len(tokens)):
            self._run(child, shared, shared)
        else:
            self.cache.commit(source, parent.tokens, parent.committed_len, partial=True)
            self._queue.add(child)
        return child

    def _check_token_ids(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("the prompt has no tokens", code="invalid_value", param="prompt")
        named = (("prompt", prompt), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ()))
        for param, ids in named:
            self.check_ids(param, ids)

    def check_ids(self, param: str, ids) -> None:
        """Raises RequestError for an id outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(id for id in ids if not 0 <= id < self.vocab_size)
            raise RequestError(f"token id {bad} is outside this model's vocabulary of {self.vocab_size}",
                               code="invalid_token_id", param=param)

    def _admissible_length(self, prompt_len: int, max_tokens: int | None) -> int:
        """Most tokens, prompt included, that the request may reach. RequestError when that is beyond the context
        or beyond all pages together: such a request would wait for ever."""
        if max_tokens is not None and max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", code="out_of_range", param="max_tokens")
        # The last sampled token needs no page.
        capacity = min(self.max_context, self.cache.capacity + 1)
        wanted = prompt_len + (max_tokens or 1)
        if wanted > capacity:
            why = f"this model's context is {self.max_context} tokens"
            if capacity < self.max_context:
                why = f"the KV cache of this engine holds {capacity - 1} tokens"
            asked = f"{prompt_len} prompt tokens" + (f" and max_tokens {max_tokens}" if max_tokens else "")
            raise RequestError(f"{why}; the request has {asked}", code="context_length_exceeded")
        return wanted if max_tokens is not None else capacity

    def cancel(self, id: int) -> bool:
        """Drop a request in any state and free what it holds. False for an unknown or finished id, which is counted."""
        request = self._requests.get(id)
        if request is None:
            self.counters.ignored_cancels += 1
            return False
        self.counters.cancelled += 1
        self._leave(request)
        return True

    # -- the beams of a search (engine/beams.py)

    def hold(self, id: int) -> None:
        """The request, which is stepwise, does not run until go_on()."""
        self._requests[id].held = True

    def go_on(self, id: int, token: int) -> None:
        """The request may run again, with `token` in place of its last one, which has no K and V yet."""
        request = self._requests[id]
        request.held = False
        request.tokens[-1] = token

    def give_up(self, id: int) -> bool:
        """Take the row and pages of a held request, as a preemption does; False when it has none."""
        request = self._requests.get(id)
        if request is None or request.state is not RUNNING or request.in_flight:
            return False
        self._preempt(request)
        return True

    def drop(self, id: int) -> None:
        """End a request that nobody asked for by this id: neither cancelled nor finished. An unknown one is fine."""
        request = self._requests.get(id)
        if request is not None:
            self._leave(request)

    # -- sequences that run beside the requests

    def check_sequence(self, token_ids: list[int]) -> int:
        """Raises RequestError for a sequence that can never run beside the requests. Its place among the arrivals."""
        if not token_ids:
            raise RequestError("the prompt has no tokens", code="invalid_value", param="prompt")
        self.check_ids("prompt", token_ids)
        capacity = min(self.max_context, self.cache.capacity)
        if len(token_ids) > capacity:
            raise RequestError(f"{len(token_ids)} tokens are more than the context of {capacity}",
                               code="context_length_exceeded", param="prompt")
        return self._arrivals

    def borrow_pages(self, count: int, arrival: int) -> list[int] | None:
        """`count` pages for a sequence that came at `arrival`, until return_pages(). None while too few are free:
        then requests that came later leave the pages alone, as it leaves alone what older ones wait for."""
        keep = len(self._running)
        head = self._queue.head()
        if head is not None and head.arrival < arrival:
            keep += self.cache.pages_needed(len(head.tokens))
        pages = self.cache.allocator.allocate(count) if count + keep <= self.cache.num_free else None
        if pages is None:
            self._borrower = arrival, count
            return None
        self._borrower = None
        self._borrowed.append(pages)
        return pages

    def withdraw_borrower(self, arrival: int) -> None:
        """The sequence of `arrival` no longer waits for pages."""
        if self._borrower is not None and self._borrower[0] == arrival:
            self._borrower = None

    def return_pages(self, pages: list[int]) -> None:
        self._borrowed.remove(pages)
        self.cache.release_pages(pages)

    def job_tokens(self) -> int:
        """Tokens that may run beside the requests between two steps."""
        return min(self.max_tokens, self._prefill_budget(len(self._running)))

    # -- a step

    def limit_step(self, tokens: int) -> None:
        """From now on run at most `tokens` in a step: whole pages, at least one page and one token of each row, at most
        what the scheduler was made with."""
        self.max_tokens = min(self._configured_tokens, max(tokens // PAGE * PAGE, PAGE, self.max_rows))

    @property
    def is_limited(self) -> bool:
        """Whether limit_step() is in force."""
        return self.max_tokens < self._configured_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self) -> list[Request]:
        """Requests that have a row, oldest first; the caller must not change the list."""
        return self._running

    def decoding(self) -> list[Request]:
        """Running requests whose tokens are all known and whose next step runs the last of them: those that can have
        drafts now."""
        return [request for request in self._running
                if not request.in_flight and len(request.tokens) - request.computed_len == 1
                and request.drafts is not None]

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def request(self, id: int) -> Request | None:
        return self._requests.get(id)

    def snapshot(self) -> dict[str, float]:
        """Totals since the start, of the scheduler and the cache, by name."""
        return {**self.counters.snapshot(), **self.cache.snapshot()}

    def live_ids(self) -> list[int]:
        """Ids that have been accepted and have not ended."""
        return list(self._requests)

    def expire(self, now: float) -> list[Output]:
        """End the requests whose deadline has passed before they ever ran."""
        self._now = now = max(self._now, now)
        outputs = []
        while self._deadlines and self._deadlines[0][0] < now:
            deadline_at, id = heappop(self._deadlines)
            request = self._requests.get(id)
            if request is not None and request.deadline_at == deadline_at and not request.residency:
                self.counters.timed_out += 1
                self._leave(request)
                outputs.append(Output(id, [], None, "timeout"))
        return outputs

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next batch, or None when nothing can run, or nothing before the batch in flight is committed.

        At most MAX_IN_FLIGHT batches may be scheduled and not committed; RuntimeError beyond that.
        """
        ahead = bool(self._in_flight)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError("schedule() before commit() of the batches in flight")
        if ahead and self._in_flight[0].num_drafts:
            return None     # where its requests go on is not known, and without them others would run in smaller steps
        self._now = max(self._now, now)
        self._left_out = self._pace.held() if self._pace is not None else None
        batch = self._make_batch(ahead)
        if batch is None and self._left_out is not None:
            self._left_out = None       # the others have nothing to run now
            batch = self._make_batch(ahead)
        if batch is not None:
            self._in_flight.append(batch)
            self.counters.scheduled_tokens += batch.num_tokens
        return batch

    def _make_batch(self, ahead: bool) -> Batch | None:
        preemptions = self.counters.preemptions
        decoding: tuple[list[Entry], int] | None = [], 0
        if self.policy.chunked_prefill or not self._has_prompts():
            decoding = self._decode_entries(ahead)
        if decoding is None:
            return None
        entries, num_drafts = decoding
        num_decode = len(entries)
        budget = min(self.max_tokens - num_decode - num_drafts, self._prefill_budget(num_decode + num_drafts))
        if num_decode < len(self._running):
            for request in self._queue.by_share(self._running):
                remaining = len(request.tokens) - request.computed_len
                if remaining > 1 and budget and not self._is_left_out(request):
                    count = min(remaining, budget)
                    if self._grouped is not None:
                        count = self._within_pages(request, count)
                    if count:
                        budget -= self._add(entries, request, count)
        # Pages that a preemption has just freed are for the decode rows: admitting now would take them back.
        if preemptions == self.counters.preemptions:
            while budget and (admitted := self._admit()):
                count = min(len(admitted.tokens) - admitted.computed_len, budget)
                if self._grouped is not None:
                    count = self._within_pages(admitted, count)
                budget -= self._add(entries, admitted, count)
        if not entries and not self.policy.chunked_prefill:
            entries, num_drafts = self._decode_entries(ahead) or ([], 0)    # nobody could be admitted
            num_decode = len(entries)
        if not entries:
            if self._grouped is not None and self._running and not ahead and self._left_out is None:
                # Chunks wait for windowed pages that others share and nobody else gives.
                self._preempt(choose_victim(self._running) or self._running[-1])
                return self._make_batch(ahead)
            return None
        if self._grouped is not None:
            for entry in entries:
                entry.windows = self._grouped.windows(entry.request.id)
        return Batch(entries, num_decode, self.cache.take_transfers(), num_drafts)

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
        outputs: list[Output] = []
        vocab_size, grouped, tell, has_drafts = self.vocab_size, self._grouped, outputs.append, batch.num_drafts > 0
        for entry, results in zip(batch.entries, batch.by_entry(sampled), strict=True):
            request = entry.request
            request.in_flight -= 1
            if request.state is FINISHED:
                self.counters.late_results += 1
                if not request.in_flight:
                    row, pages = self._retired.pop(request)
                    self._free_rows.append(row)
                    self.cache.release_pages(pages)
            elif has_drafts and entry.drafts:
                outputs += self._commit_run(entry, results)
            elif results is not None:
                request.pending -= 1
                token, logprob = results
                if not 0 <= token < vocab_size:
                    tell(self._fail(request))
                    continue
                tokens = request.tokens
                cached = 0
                length = request.committed_len = len(tokens)    # all that was known is computed now, and sound
                if not request.settled or not length % PAGE:
                    request.settled = True
                    is_first = length == request.prompt_len
                    cached = request.cached_len if is_first else 0
                    self._prompts.done(request)
                    self.cache.commit(request.id, tokens, length, partial=is_first)
                tokens.append(token)
                finish = None
                if length + 1 >= request.max_len or token in request.stop_ids:
                    finish = self._ended(request, token)
                tell(Output(request.id, [token], None if logprob is None else [logprob], finish, cached))
            if grouped is not None and request.state is RUNNING:
                # What is in flight of this request goes on from here.
                grouped.trim(request.id, request.committed_len if entry.drafts else entry.start + entry.count)
        return outputs

    def _within_pages(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens of a prompt there are pages for in all groups."""
        cache, start = self.cache, request.computed_len
        if cache.covered(request.id) < start + count:
            cache.reserve(request.id, 0)
        return max(0, min(count, cache.covered(request.id) - start))

    def _commit_run(self, entry: Entry, sampled: Sequence[tuple[int, object]]) -> list[Output]:
        """Take the results of an entry with drafts: line i was sampled behind draft i - 1."""
        request, drafts = entry.request, entry.drafts
        request.pending -= entry.samples
        taken: list[int] = []
        logprobs = []
        for line, (token, logprob) in enumerate(sampled):
            if not 0 <= token < self.vocab_size:
                # A draft may be the cause, also of what stands before it (a kernel multiplies what it masks by 0): the
                # request goes on from here without drafts, and the next step finds out.
                request.drafts = None
                break
            taken.append(token)
            logprobs.append(logprob)
            request.tokens.append(token)
            if self._is_last(request, token) or line < len(drafts) and token != drafts[line]:
                break
        # Behind these stand K and V of drafts that were not taken: the next step writes over them before it reads.
        request.computed_len = request.committed_len = end = entry.start + len(taken)
        if entry.start // PAGE < end // PAGE:
            self.cache.commit(request.id, request.tokens, end)
        counters = self.counters
        counters.verified_runs += 1
        counters.drafted_tokens += len(drafts)
        if not taken:
            return []
        counters.accepted_tokens += len(taken) - 1
        return [Output(request.id, taken, None if logprobs[0] is None else logprobs, self._ended(request, taken[-1]))]

    @staticmethod
    def _is_last(request: Request, token: int) -> bool:
        return token in request.stop_ids or len(request.tokens) >= request.max_len

    def _ended(self, request: Request, token: int) -> str | None:
        """Why the token, which the request has now, is its last, or None; the request has left then."""
        if not self._is_last(request, token):
            return None
        self._finished(request)
        return "stop" if token in request.stop_ids else "length"

    def _fail(self, request: Request) -> Output:
        self.counters.failed += 1
        self.cache.distrust(request.id)
        self._leave(request)
        return Output(request.id, [], None, "error")

    # -- inside a step

    def _prefill_budget(self, num_decode: int) -> int:
        mixed = self.max_tokens // 4 if self._mixed_tokens is None else min(self._mixed_tokens, self.max_tokens)
        tokens = prefill_budget(self.max_tokens, num_decode, mixed)
        if num_decode and self._chunks is not None:
            tokens = max(self._chunks.tokens(num_decode, tokens), int(self.max_tokens * LEAST_MEASURED_SHARE), 1)
        return tokens

    def prompts_share_time(self) -> bool:
        """Whether the next step computes prompts for as long as its replies may wait (Policy.mixed_ratio): then the
        time is theirs, and drafts would only make the chunks smaller."""
        return self._chunks is not None and self._has_prompts()

    def observe(self, batch: Batch, seconds: float) -> None:
        """The batch took `seconds` on the device: what chunks of prompts go by (Policy.mixed_ratio)."""
        if self._chunks is not None and not batch.num_drafts:
            self._chunks.observe(batch.num_decode, batch.num_tokens - batch.num_decode, seconds)
        if self._pace is not None:
            self._pace.observe(batch, seconds)

    def _is_left_out(self, request: Request) -> bool:
        """Whether its tenant is left out of this step."""
        return self._left_out is not None and self._queue.name_of(request) == self._left_out

    def _must_wait(self, request: Request) -> bool:
        return request.held or self._is_left_out(request) or self._prompts.must_wait(request)

    def _has_prompts(self) -> bool:
        """Whether prompts are to be computed: those of running requests, or of one that there is a row for."""
        return bool(self._queue and self._free_rows) or any(
            len(request.tokens) - request.computed_len > 1 for request in self._running)

    def _decode_entries(self, ahead: bool) -> tuple[list[Entry], int] | None:
        """An entry for each running request that has one token to run, and how many drafts they have; None when that
        needs pages that only a preemption gives, which the batch in flight forbids (`ahead`)."""
        entries: list[Entry] = []
        running, tables, left_out = self._running, self.cache.tables, self._left_out
        num_drafts = 0
        # Every running request can have its token beside the drafts.
        most_drafts = min(self.max_drafts, self.max_tokens - len(running))
        index = 0
        while index < len(running):   # preemption takes from the far end of this list, or this request itself
            request = running[index]
            if left_out is not None and self._is_left_out(request):
                index += 1
                continue
            start, pending = request.computed_len, request.pending
            length = len(request.tokens) + pending
            # The last token that a request may have is never fed back.
            if length - start == 1 and length < request.max_len and not (
                    request.stepwise and (pending or request.held)):
                # Pages hold PAGE tokens: only the first token of one can lack its page.
                if not start % PAGE and not self.cache.reserve(request.id, length):
                    if ahead:
                        for entry in entries:
                            entry.request.computed_len = entry.start
                            entry.request.in_flight -= 1
                            entry.request.pending -= entry.samples
                        return None
                    if not self._preempt_for(request, length):
                        continue
                if request.drafts:
                    num_drafts += self._add_run(entries, request, most_drafts - num_drafts)
                else:
                    entries.append(Entry(request, start, 1, tables[request.id], 1))
                    request.computed_len = length
                    request.in_flight += 1
                    request.pending = pending + 1
            index += 1
        return entries, num_drafts

    def _add_run(self, entries: list[Entry], request: Request, most: int) -> int:
        """An entry of the request's next token and its drafts behind it, at most `most` and as far as pages reach
        that nobody else needs now; how many drafts it has."""
        drafts, request.drafts = request.drafts or (), ()
        cache, length = self.cache, len(request.tokens)
        count = min(len(drafts), most, request.max_len - length - 1)
        # One page a running row stays free, as in _admit: a draft is not worth a preemption.
        if length + count > cache.covered(request.id) and (
                cache.num_free <= len(self._running) or not cache.reserve(request.id, length + count)):
            count = cache.covered(request.id) - length
        count = max(count, 0)
        entries.append(Entry(request, length - 1, 1 + count, cache.table(request.id), 1 + count, drafts[:count]))
        request.computed_len = length + count
        request.in_flight += 1
        request.pending += 1 + count
        return count

    def _add(self, entries: list[Entry], request: Request, count: int) -> int:
        start = request.computed_len
        end = request.computed_len = start + count
        samples = int(end == len(request.tokens))
        request.in_flight += 1
        request.pending += samples
        entries.append(Entry(request, start, count, self.cache.table(request.id), samples))
        return count

    def _preempt_for(self, request: Request, length: int) -> bool:
        """Pages for `length` tokens of the request, from younger ones. False when it had to yield itself."""
        while not self.cache.reserve(request.id, length):
            # This request itself at the latest: a pinned one has all its pages, this one lacks one.
            victim = choose_victim(self._running) or request
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._queue.stopped(request, request.computed_len - request.stay_start - request.stay_tokens)
        self._prompts.done(request)
        self.cache.commit(request.id, request.tokens, request.committed_len, partial=True)
        if not (self.should_swap(request) and self.cache.swap_out(request.id, request.computed_len)):
            self.cache.release(request.id)
            request.committed_len = 0
        self._free_rows.append(request.row)
        self.counters.preemptions += 1
        request.lost_len = request.computed_len
        request.row, request.computed_len, request.state = -1, 0, WAITING
        if request.drafts:
            request.drafts = ()
        request.preemptions += 1
        self._queue.add(request)

    def _swap_is_quicker(self, request: Request) -> bool:
        policy = self.policy
        if policy.preemption != "auto":
            return policy.preemption == "swap"
        token_s = self._chunks.token_s if self._chunks is not None else 0.0
        # Nothing measured: copies are taken to be quicker.
        return not token_s or 2 * policy.page_transfer_s * pages_for(request.computed_len) < token_s * request.computed_len

    def _admit(self) -> Request | None:
        """Give the request that is next a row and pages for all its tokens; None when it has to wait."""
        queue, running = self._queue, self._running
        if not queue or not self._free_rows:
            return None
        request = queue.head(self._must_wait)
        if request is None:
            return None
        if len(self._free_rows) == 1 and self.max_rows >= LEAST_ROWS_TO_KEEP and self.policy.fair_share:
            tenant = queue.tenant_of(request)
            if tenant.rows and queue.others_may_come(tenant, self._now):
                return None     # the last row is for a tenant that has none
        if self.policy.batching == "static":
            if not running:
                self._batch_left = min(len(queue), self.max_rows)
            if not self._batch_left:
                return None
        borrower = self._borrower
        held = borrower[1] if borrower is not None and borrower[0] <= request.arrival else 0
        state = request, self.cache.num_free, len(running), held
        if running and state == self._blocked:
            return None
        length = request.max_cached_len if is_pinned(request) else len(request.tokens)
        is_swapped = self.cache.is_swapped(request.id)
        cached = self.cache.admit(request.id, length, request.tokens, request.salt,
                                  spare=held + self.cache.num_groups * self._spare_pages(request, length))
        if cached is None:
            self._blocked = state
            return None
        self._batch_left -= 1
        queue.remove(request)
        # What comes back from the host is as sound as it was: of a prompt half computed nobody knows yet.
        self._run(request, cached, request.committed_len if is_swapped else cached)
        self.counters.recomputed_tokens += max(0, request.lost_len - cached)
        request.lost_len = 0
        if request.cached_len < 0:
            request.cached_len = cached
        self._prompts.begin(request)
        return request

    def _spare_pages(self, request: Request, length: int) -> int:
        """Pages that stay free when the request is admitted with pages for `length` tokens."""
        running = self._running
        if not running or not self.policy.reserve_output:
            # One page a running row: admitting into the last pages would preempt at the next page border.
            return len(running)
        # What the others and this one are going to need if their replies are as long as others were.
        spare = pages_for(max(length, self._expected_len(request))) - pages_for(length)
        for other in running:
            spare += max(pages_for(other.stay_start + other.stay_tokens) - len(self.cache.table(other.id)), 1)
        return spare

    def _expected_len(self, request: Request) -> int:
        """Tokens that are likely to have K and V in the end: the reply is as long as replies are, at most max_tokens."""
        rest = max(self._mean_reply - (len(request.tokens) - request.prompt_len), PAGE)
        return min(len(request.tokens) + int(rest), request.max_cached_len)

    def _finished(self, request: Request) -> None:
        """The request has its last token."""
        self.counters.finished += 1
        self._mean_reply += (len(request.tokens) - request.prompt_len - self._mean_reply) * REPLY_MEAN_STEP
        if request.options.deadline_ms is not None:
            if self._now <= request.deadline_at:
                self.counters.deadlines_met += 1
            else:
                self.counters.deadlines_missed += 1
        self._leave(request)

    def _run(self, request: Request, computed_len: int, committed_len: int) -> None:
        """The request has pages, with K and V of `computed_len` tokens, the first `committed_len` of which are known to be
        sound: give it a row."""
        insort(self._running, request, key=age_order)
        request.row, request.state = self._free_rows.pop(), RUNNING
        if not request.residency:
            self.counters.queue_wait_s += self._now - request.submitted_at
            self.waits.add(self._now - request.submitted_at)
        request.residency += 1
        request.computed_len = request.stay_start = computed_len
        request.committed_len = committed_len
        request.settled = False
        request.stay_tokens = self._expected_len(request) - computed_len
        self._queue.started(request, request.stay_tokens)

    def _leave(self, request: Request) -> None:
        """The one place where a request goes: out of every table, row and pages back (after its last step)."""
        del self._requests[request.id]
        if request.state is RUNNING:
            self._running.remove(request)
            self._queue.stopped(request, request.computed_len - request.stay_start - request.stay_tokens)
        else:
            self._queue.remove(request)
        self._queue.left(request)
        self._prompts.done(request)
        self.cache.commit(request.id, request.tokens, request.committed_len, partial=True)
        pages = self.cache.detach(request.id)
        self.cache.drop_swapped(request.id)
        if request.row >= 0:
            if request.in_flight:
                self._retired[request] = request.row, pages
            else:
                self._free_rows.append(request.row)
                self.cache.release_pages(pages)
        request.row, request.state = -1, FINISHED

    # -- checks

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each; empty when every invariant holds. Cheap enough for tests after every step."""
        problems = self.cache.check_integrity([*(pages for _, pages in self._retired.values()), *self._borrowed])
        waiting = list(self._queue)
        live = {*waiting, *self._running}
        if len(live) != len(waiting) + len(self._running) or live != set(self._requests.values()):
            problems.append("a request stands in two lists, or in none")
        if [age_order(r) for r in self._running] != sorted(age_order(r) for r in self._running):
            problems.append("the running list is out of order")
        problems += self._queue.check_integrity(self._running)
        for name, requests in (("waiting", waiting), ("running", self._running)):
            problems += [f"{request}: in the {name} list" for request in requests if request.state != name]
        rows = [request.row for request in self._running] + [row for row, _ in self._retired.values()] + self._free_rows
        if sorted(rows) != list(range(self.max_rows)):
            problems.append(f"rows are lost or shared: {sorted(rows)}")
        if self.cache.sequences() != {request.id for request in self._running}:
            problems.append("pages are held by a request that does not run, or a running one has none")
        for request in self._running:
            held = len(self.cache.table(request.id))
            if held < pages_for(request.computed_len) or held > pages_for(request.max_cached_len):
                problems.append(f"{request}: {held} pages")
            if self.cache.covered(request.id) < request.computed_len:
                problems.append(f"{request}: windowed pages for {self.cache.covered(request.id)} tokens")
            if not request.computed_len <= len(request.tokens) + request.pending <= request.max_len:
                problems.append(f"{request}: lengths out of order")
            if not self._in_flight and (request.pending or request.in_flight):
                problems.append(f"{request}: in flight, and nothing is")
            if not request.in_flight and request.computed_len >= len(request.tokens):
                problems.append(f"{request}: nothing left to run")
        return problems
