"""A request on its model, from its admission to its end: what it holds is given back in one place, whatever happens;
the threads where its long work runs, in which tenants take turns; and what requests took and gave, by model and by
tenant: counts and histograms for /metrics, kept on the server's event loop."""

import asyncio
import os
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import msgspec

from zse.engine.channel import Channel
from zse.engine.client import shutting_down_error
from zse.engine.messages import Tokens
from zse.errors import RequestError
from zse.server.api_request import APIRequest
from zse.server.errors import APIError

BYTES_PER_TOKEN = 3  # of text, for the estimate before tokenising; English has 4, code and CJK about 3
OFF_LOOP_BYTES = 16 << 10  # longer bodies and prompts are parsed and tokenised in a thread (16 KB take some 3 ms)
ON_LOOP_ENTRIES = 2000  # log-probabilities: answers with more are made in a thread (some 10 µs each)
# Upper bounds of buckets, in seconds: a GPU's token takes milliseconds, a queue may hold somebody for minutes.
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)

MOST_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio's own pool has

LENGTHS = (1, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)  # tokens

CANCELLED, ERROR = "cancelled", "error"  # beside the engine's finish reasons

Result = TypeVar("Result")


class FairThreads:
    """Once two tenants have come, each has half of the threads at most, and whose turn was last waits behind the
    others.

    A tenant with fifty prompts of megabytes would otherwise hold every thread, and every other tenant's chat, for
    seconds."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future]] = OrderedDict()  # the tenant whose turn it is first

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """work(), in a thread. It keeps its thread until it ends, though nobody may wait for it any more."""
        loop = asyncio.get_running_loop()
        if len(self._known) < 2:
            self._known.add(tenant)
        place = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._start()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # its turn came in the same moment
                self._start(tenant)
            raise
        future = loop.run_in_executor(None, work)
        future.add_done_callback(partial(self._start, tenant))
        return await asyncio.shield(future)

    def _start(self, ended: str | None = None, done: asyncio.Future | None = None) -> None:
        """Work of the tenant `ended` is over: give the threads that are free to those whose turn it is."""
        if done is not None and not done.cancelled():
            done.exception()  # looked at, where nobody waits for it
        if ended is not None:
            self._running[ended] -= 1
            if not self._running[ended]:
                del self._running[ended]
        own = MOST_THREADS if len(self._known) < 2 else MOST_THREADS // 2
        while sum(self._running.values()) < MOST_THREADS:
            tenant = next((name for name in self._waiting if self._running[name] < own), None)
            if tenant is None:
                return
            queue = self._waiting[tenant]
            place = queue.popleft()
            if queue:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not place.done():  # it was cancelled
                self._running[tenant] += 1
                place.set_result(None)


# Where the work of a request runs that is too long for the event loop: its server's threads, in its tenant's turn.
_aside: ContextVar[Callable[[Callable[[], Any]], Awaitable[Any]]] = ContextVar("aside")


async def maybe_in_thread(long: bool, work: Callable[[], Result]) -> Result:
    """work() of the request that this task answers, in a thread when it is long: it would hold up the event loop."""
    return await _aside.get()(work) if long else work()


def check_text(request: APIRequest, image_bytes: int) -> None:
    """Raises APIError request_too_large: beside its images the body has more than a body may have."""
    if len(request.body) - image_bytes > request.text_bytes > 0:
        raise APIError("request_too_large", f"The request has more than {request.text_bytes} bytes beside its images.")


class RequestRun(AbstractContextManager):
    """What a request holds of the queue, its tenant's quota, its model and the engine. Leaving it gives all back and
    counts the request in its model's Statistics and its tenant's Usage; the tokens of the quota when the engine has
    said what it computed. Raises APIError shutting_down.

    is_long: the body is parsed and its texts are tokenized in a thread. choices: held of the queue, answers; queued:
    prompt tokens that wait. estimated: prompt tokens, by which the quota was asked. channel: the only way to the
    engine. prompt_tokens, cached: of the prompts. outcomes: choices by how they ended. submitted: when its first part
    went to the engine; first, last: when tokens came, 0.0 before; queued_s: of that, what the first choice waited in
    the engine's queue; prefill_s: from there to its token, what lies between the processes included. Monotonic
    seconds."""

    def __init__(self, app, request: APIRequest):
        if app.draining:
            raise shutting_down_error()
        self.app, self.request, self._control = app, request, app.admission
        if app.tracer is not None or request.identity:
            request.run = self
        _aside.set(partial(app.threads.run, request.account))
        self._tenant = self._control.tenants[request.account]
        self.is_long = len(request.body) > OFF_LOOP_BYTES
        self.choices = self.queued = self._reserved = self.estimated = 0
        self.prompt_tokens = self.cached = self.completion_tokens = 0
        self.served: Any = None
        self.outcomes: Counter[str] = Counter()
        self.submitted = self.first = self.last = self.queued_s = self.prefill_s = 0.0
        self._spans: dict[int, list] = {}  # choice → times of its first and its last tokens, their number
        self._session: tuple[str, str] | None = None  # tenant and id

    def start(
        self,
        model: str | None,
        choices: int = 1,
        answer_tokens: int = 0,
        prompt_tokens: int | None = None,
        image_bytes: int = 0,
    ) -> None:
        """Room in the queue for so many answers to a prompt, and the most tokens that they can take all together of the
        quota; then the model. Raises APIError and holds nothing then.

        Args:
            model: the name that the request gives, or None.
            choices: of the engine.
            answer_tokens: the most that they have together.
            prompt_tokens: None where the prompt is text: estimated.
            image_bytes: of the body that are images: their tokens are known when they are decoded."""
        if len(self.request.body) > self.request.text_bytes > 0:
            check_text(self.request, image_bytes)
        served = self.app.find_model(self.request, model, "model")
        control, tenant = self._control, self._tenant
        if prompt_tokens is None:
            prompt_tokens = max(0, len(self.request.body) - image_bytes) // BYTES_PER_TOKEN
        most, mine = control.bounds.most_choices, tenant.max_choices
        if choices > most or mine and choices > mine:  # no wait helps
            bound = f"this server's queue holds {most}" if choices > most else f"this key may have {mine} at once"
            message = f"The request asks for {choices} answers (n or best_of, times prompts); {bound}."
            raise APIError("invalid_value", message)
        control.check_room(self.request.account, choices, prompt_tokens)
        if mine and tenant.choices + choices > mine:
            raise control.limited("requests", f"This key may have {mine} answers at once.", 1.0)
        total = prompt_tokens + answer_tokens
        if "tokens" in tenant.buckets:
            control.spend(self.request, "tokens", total, f"use {{}} tokens a minute; this request may take {total}.")
            self._reserved = total
        self.estimated = prompt_tokens
        self.hold(choices, prompt_tokens)
        self.served, self.channel = served, Channel(served.engine, self._settle)
        self.app.running[self] = None
        self.app.pool.enter(served)  # the engine loads while the prompt becomes tokens

    def keep(self, seconds: float | None) -> None:
        """For how long the model stays loaded behind the request. One tenant could keep others' models away: an admin's
        key says so."""
        if seconds is not None and self.request.access.admin:
            self.app.pool.keep(self.served, seconds)

    def claim(self, session: str) -> None:
        """The tenant's session of this id, for this request alone. Raises APIError conflict."""
        name = (self.request.tenant, session)
        if name in self.app.running_sessions:
            raise APIError("conflict", "A request of this session is running.", "session_id")
        self.app.running_sessions.add(name)
        self._session = name

    def reserve(self, prompt_tokens: int) -> None:
        """The true number, once it is known, where it is more than the estimate by which the quota was asked: a query
        that stands with each of a thousand documents is a thousand times as much. Raises APIError."""
        bucket = self._tenant.buckets.get("tokens")
        if prompt_tokens <= self.estimated or bucket is None:
            return
        total = self._reserved + prompt_tokens - self.estimated
        bucket.level, self._reserved = min(bucket.per_minute, bucket.level + self._reserved), 0
        self._control.spend(self.request, "tokens", total, f"use {{}} tokens a minute; this request may take {total}.")
        self._reserved, self.estimated = total, prompt_tokens

    def hold(self, choices: int, queued: int) -> None:
        """Of the queue, from now on: answers, and prompt tokens that wait (0 once the first token is there)."""
        more_choices, more_queued = choices - self.choices, queued - self.queued
        self._control.choices += more_choices
        self._tenant.choices += more_choices
        self._control.queued_tokens += more_queued
        self._tenant.queued += more_queued
        if self._tenant.choices or self._tenant.queued:
            self._control.loaded[self.request.account] = self._tenant
        else:
            self._control.loaded.pop(self.request.account, None)
        self.choices, self.queued = choices, queued

    def count(self, choice: int, event: Tokens) -> None:
        """Count an event of a choice. Tokens that came together share the time since the last ones."""
        if queued := self.queued:  # the prompt waits no more
            self.hold(self.choices, 0)
            control = self._control
            control.bounds.drained(queued, self.choices, control.queued_tokens, control.clock())
        count, statistics = len(event.tokens), self.served.statistics
        if not count:
            return
        now = time.monotonic()
        span = self._spans.get(choice)
        if span is not None:
            statistics.between_tokens_s.observe((now - span[1]) / count, count)
            span[1] = now
            span[2] += count
        else:
            self._spans[choice] = [now, now, count]
            if not self.first:
                self.first, self.queued_s = now, event.waited_s
                self.prefill_s = max(0.0, now - (self.submitted or self.request.started) - event.waited_s)
                statistics.first_token_s.observe(now - self.request.started)
            if count > 1:
                statistics.between_tokens_s.observe(0.0, count - 1)
        self.last = now
        self.completion_tokens += count
        statistics.completion_tokens += count

    def __exit__(self, kind, error, traceback) -> None:
        left = self.choices - self.outcomes.total()
        self.hold(0, 0)
        if self._session is not None:
            self.app.running_sessions.discard(self._session)
        if self.served is None:
            return
        self.app.running.pop(self, None)
        self.channel.close()
        if left:
            self.outcomes[ERROR if isinstance(error, RequestError) else CANCELLED] += left
        statistics, account = self.served.statistics, self.request.account
        statistics.finished.update(self.outcomes)
        statistics.request_s.observe(time.monotonic() - self.request.started)
        if self.first:
            statistics.prefill_s.observe(self.prefill_s)
            statistics.decode_s.observe(self.last - self.first)
            statistics.prompt_length.observe(self.prompt_tokens)
        for first, last, count in self._spans.values():
            statistics.completion_length.observe(count)
            if count > 1:
                statistics.per_token_s.observe((last - first) / (count - 1))
        for totals in (statistics, self.app.tenants[account]) if account else (statistics,):
            totals.prompt_tokens += self.prompt_tokens
            totals.cached_tokens += self.cached
        if account:
            self.app.tenants[account].completion_tokens += self.completion_tokens
        if self.app.usage is not None:
            self.app.usage.ended(self, isinstance(error, RequestError))
        self.app.pool.leave(self.served)

    def _settle(self, computed: int) -> None:
        """The one place where a request is charged: with the tokens that the engine computed for it, however it
        ended."""
        if self.request.account:
            self.app.tenants[self.request.account].computed_tokens += computed
        if self.app.usage is not None:
            self.app.usage.settled(self, computed)
        bucket = self._tenant.buckets.get("tokens")
        if bucket is not None:
            bucket.wait_s(0, self._control.clock())
            # What was reserved for too long an answer comes back, but never more than fits.
            bucket.level = min(bucket.per_minute, bucket.level + self._reserved - computed)
            self._control.spent.add(self.request.account)
        self._reserved = 0


class Histogram:
    """Counts of values by bucket; bounds: upper, ascending. counts has one bucket more, without a bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class Statistics:
    """Totals of one model since the start of the server. Tokens of answers that were cut off count, too."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(REQUEST_SECONDS)  # from the request's head
        self.between_tokens_s = Histogram(TOKEN_SECONDS)
        self.request_s = Histogram(REQUEST_SECONDS)  # from head to end
        self.prefill_s, self.decode_s = Histogram(REQUEST_SECONDS), Histogram(REQUEST_SECONDS)
        self.per_token_s = Histogram(TOKEN_SECONDS)  # the mean of each answer
        self.prompt_length, self.completion_length = Histogram(LENGTHS), Histogram(LENGTHS)
        self.finished: Counter[str] = Counter()  # choices by finish reason
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0


# Tenants with figures of their own; names that come later, by new key files, are counted together.
MAX_TENANTS = 256
OTHERS = "(others)"  # no key file can name a tenant so


class Usage(msgspec.Struct):
    """Of one tenant. refused: by the full queue (503); limited: by its quota (429). computed_tokens: what was
    charged."""

    requests: int = 0
    refused: int = 0
    limited: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: int = 0


class Tenants(dict[str, Usage]):
    """Usage by tenant, as each is first asked for."""

    def __init__(self, most: int = MAX_TENANTS):
        super().__init__()
        self._most = most

    def __missing__(self, tenant: str) -> Usage:
        return self.setdefault(tenant if len(self) < self._most else OTHERS, Usage())
