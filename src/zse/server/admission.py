"""Admission: one decision, which asks three questions. Each is asked before the work that its answer may spare.

1. The tenant's quota: requests and tokens a minute, answers at once. Refused with 429 and the time to wait.
2. The bounded queue: answers that run or wait, prompt tokens that wait for their first token. Refused with 503.
3. The engine: its own queue and its KV pages, which it knows alone. It is asked by the submission; its refusal (503
   overloaded, 400 context_length_exceeded) reaches the client as it is, and nothing is charged for it.

Tokens are reserved before any work (the prompt and the longest answer) and settled once with what the engine computed,
however the request ended: the engine counts, engine/client.py adds up, work.py: RequestRun._settle takes it."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from operator import sub
from typing import Any

from zse.server.errors import APIError, limited
from zse.server.keys import Quota

# Of the queue: kept for tenants by their weights, even while others ask for more. The rest is first come, first served:
# a tenant that is alone may use all but what is kept for the others, one that floods cannot keep them out.
KEPT_SHARE = 0.5
# Of a queue whose bounds follow the engine: tokens, and answers, of which a request may ask for 16 at once.
LEAST_TOKENS, MOST_TOKENS = 1 << 14, 1 << 22
LEAST_CHOICES, MOST_CHOICES = 16, 1 << 12
TOKENS_PER_CHOICE = 1 << 10  # until a rate is known: it holds an answer for so many of its tokens
DRAIN_S = 2.0  # over which the rate is taken


class Bucket:
    """A token bucket: it holds a minute's worth and is refilled evenly, so that a tenant may spend a minute at once and
    has its rate from then on. per_minute: its capacity. level: what is left, below 0 after more was used than
    reserved."""

    __slots__ = ("level", "per_minute", "_at")

    def __init__(self, per_minute: int, now: float):
        self.per_minute, self.level, self._at = per_minute, float(per_minute), now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there. More than the capacity asks for all of it."""
        if now > self._at:
            self.level = min(self.per_minute, self.level + (now - self._at) * self.per_minute / 60)
            self._at = now
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60 / self.per_minute)

    def resized(self, per_minute: int, now: float) -> "Bucket":
        """A bucket of another size, in which what has been used stays used."""
        self.wait_s(0, now)
        new = Bucket(per_minute, now)
        new.level = min(new.level, self.level)
        return new

    def headers(self, name: str) -> list[tuple[str, str]]:
        full_in_s = (self.per_minute - self.level) * 60 / self.per_minute
        return [
            (f"x-ratelimit-limit-{name}", str(self.per_minute)),
            (f"x-ratelimit-remaining-{name}", str(max(0, int(self.level)))),
            (f"x-ratelimit-reset-{name}", f"{full_in_s:.3f}s"),
        ]


class TenantLoad:
    """What one tenant holds of the queue, and what is left of its quota. choices: its answers that run or wait. queued:
    its prompt tokens that wait. buckets: "requests" and "tokens", where it has such a quota. max_choices: answers at
    once, 0: any number."""

    __slots__ = ("buckets", "choices", "max_choices", "queued")

    def __init__(self) -> None:
        self.choices = self.queued = self.max_choices = 0
        self.buckets: dict[str, Bucket] = {}

    def set_quota(self, quota: Quota, now: float) -> None:
        self.max_choices = quota.concurrency
        for name, per_minute in (("requests", quota.rpm), ("tokens", quota.tpm)):
            bucket = self.buckets.pop(name, None)
            if per_minute:
                self.buckets[name] = Bucket(per_minute, now) if bucket is None else bucket.resized(per_minute, now)


class QueueBounds:
    """How much may wait: what was set, or what the engine is expected to begin within timeout_s, by the rates at which
    answers and the tokens of their prompts left a queue that stood. Both are needed: many short prompts wait for rows,
    few long ones for their tokens.

    Args:
        max_queue: answers that wait; None: by the rate, from LEAST_CHOICES to MOST_CHOICES.
        max_tokens: prompt tokens that wait; None: by the rate, from LEAST_TOKENS to MOST_TOKENS.
        timeout_s: how long a request may be expected to wait.
        max_wait_s: a request that has not begun after so long is refused after all."""

    def __init__(
        self, max_queue: int | None, max_tokens: int | None, timeout_s: float = 60.0, max_wait_s: float | None = None
    ):
        self._since, self._drained_tokens, self._drained_choices = 0.0, 0, 0
        self.num_rows, self._queue_tokens = (
            64,
            MOST_TOKENS,
        )  # until the engine is known: nothing is refused while it loads
        self.limit(max_queue, max_tokens, timeout_s, max_wait_s)

    def limit(self, max_queue: int | None, max_tokens: int | None, timeout_s: float, max_wait_s: float | None) -> None:
        """Other bounds, as __init__ has them, for what comes from now on."""
        self._max_queue, self._max_tokens, self._timeout_s = max_queue, max_tokens, timeout_s
        self.max_wait_s = max_wait_s
        self.set_engine(self.num_rows, self._queue_tokens)

    def set_engine(self, num_rows: int, queue_tokens: int) -> None:
        """What an engine that is ready says of itself: answers that it runs, tokens that may wait until a rate is
        known."""
        self.num_rows, self._queue_tokens = num_rows, queue_tokens
        tokens = queue_tokens if self._max_tokens is None else self._max_tokens
        self._set(tokens, tokens // TOKENS_PER_CHOICE)
        self.most_choices = max(self.max_choices, num_rows + MOST_CHOICES if self._max_queue is None else 0)

    def _set(self, tokens: int, queued: int) -> None:
        self.max_tokens = tokens if self._max_tokens is None else self._max_tokens
        # Those that run, too.
        self.max_choices = self.num_rows + (queued if self._max_queue is None else self._max_queue)

    def drained(self, tokens: int, choices: int, left: int, now: float) -> None:
        """A prompt of so many tokens, of a request for so many answers, got its first token; others of `left` tokens
        wait still."""
        if left <= 0:
            self._since = 0.0  # the engine had nothing more to do: how fast it is shows while a queue stands
        elif not self._since:
            self._since, self._drained_tokens, self._drained_choices = now, 0, 0
        else:
            self._drained_tokens += tokens
            self._drained_choices += choices
            if now - self._since >= DRAIN_S:
                periods = self._timeout_s / (now - self._since)
                self._set(
                    min(max(int(periods * self._drained_tokens), LEAST_TOKENS), MOST_TOKENS),
                    min(max(int(periods * self._drained_choices), LEAST_CHOICES), MOST_CHOICES),
                )
                self._since, self._drained_tokens, self._drained_choices = now, 0, 0


class AdmissionControl:
    """Bounds of the queue, and quotas.

    Args:
        bounds: of answers that run or wait (a request with n = 4 counts four times) and of the prompt tokens of requests without
            a first token. A request that is its tenant's only one needs no room for its tokens and answers, only that the bound
            is not reached yet: it may be larger than the bound.
        weights: of the tenants that share the queue.
        quotas: of the tenants that have one.
        clock: monotonic seconds.

    loaded: the loads of those that hold something of the queue; RequestRun.hold() keeps it.
    """

    def __init__(
        self,
        bounds: QueueBounds,
        weights: Mapping[str, float] | None = None,
        quotas: Mapping[str, Quota] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.bounds, self.clock = bounds, clock
        self.choices = self.queued_tokens = 0
        self.num_refused = self.num_limited = 0
        self.tenants: defaultdict[str, TenantLoad] = defaultdict(TenantLoad)
        self._quotas: dict[str, Quota] = {}
        self.loaded: dict[str, TenantLoad] = {}
        self.spent: set[str] = set()  # accounts whose quota was used since somebody noted what is left
        self.replace(weights or {}, quotas or {})

    def replace(self, weights: Mapping[str, float], quotas: Mapping[str, Quota]) -> None:
        """From now on these weights and quotas hold; a tenant that left out of `quotas` has none."""
        self.weights = dict(weights)
        self._shares: dict[str, tuple[int, int]] = {}  # what is kept for each of so many choices and tokens:
        self._shares_of = (-1, -1)
        self._all_shares = (0, 0)
        before, self._quotas = self._quotas, dict(quotas)
        for name in {name for name, _ in before.items() ^ self._quotas.items()}:
            self.tenants[name].set_quota(self._quotas.get(name, Quota()), self.clock())

    def admit(self, request: Any, needs_room: bool, counts: bool = True) -> None:
        """Count a request of a tenant, before anything of its body is looked at; not counts: before a large body is
        read, only ask. needs_room: it would be an answer in the queue. Raises APIError overloaded or
        rate_limit_exceeded; the answer's x-ratelimit headers are set either way."""
        if needs_room:
            self.check_room(request.account, 1, 0)
        if "requests" in self.tenants[request.account].buckets:
            self.spend(request, "requests", 1, "send {} requests a minute.", counts)

    def spend(self, request: Any, kind: str, amount: int, may: str, counts: bool = True) -> None:
        """Take it from a bucket of the request's tenant, if it counts, and set the answer's headers to what is left of
        the quota. Raises APIError."""
        buckets = self.tenants[request.account].buckets
        bucket = buckets[kind]
        wait_s = bucket.wait_s(amount, self.clock())
        if wait_s <= 0 and counts:
            bucket.level -= amount
            self.spent.add(request.account)
        others = [pair for pair in request.more_headers if not pair[0].startswith("x-ratelimit-")]
        request.more_headers = others + [pair for name, left in buckets.items() for pair in left.headers(name)]
        if wait_s > 0:
            raise self.limited(kind, f"This key may {may.format(bucket.per_minute)}", wait_s)

    def check_room(self, name: str, choices: int, tokens: int) -> None:
        """Raises APIError overloaded. Of several tenants one that has nothing here gets in, whatever a single request
        of another holds."""
        is_one_of_many = len(self.weights) > 1
        kept_choices, kept_tokens = self._kept_from(name) if is_one_of_many else (0, 0)
        max_choices, max_tokens, mine = (
            self.bounds.max_choices - kept_choices,
            self.bounds.max_tokens,
            self.tenants[name],
        )
        gets_in = is_one_of_many and name in self.weights
        if self.choices + choices > max_choices and (mine.choices or not gets_in and self.choices >= max_choices):
            raise self._full(f"{max_choices} requests")
        room = max_tokens - kept_tokens - self.queued_tokens
        if tokens > room and (mine.queued or not gets_in and self.queued_tokens >= max_tokens):
            raise self._full(f"{max_tokens - kept_tokens} prompt tokens")

    def _kept_from(self, name: str) -> tuple[int, int]:
        """Choices and tokens that are kept for the other tenants and not used by them."""
        choices, tokens = bounds = self.bounds.max_choices, self.bounds.max_tokens
        if bounds != self._shares_of:  # every two seconds at most: with 4,096 keys it takes 4 ms
            share = KEPT_SHARE / sum(self.weights.values())
            self._shares = {
                other: (int(choices * share * weight), int(tokens * share * weight))
                for other, weight in self.weights.items()
            }
            self._all_shares = sum(of[0] for of in self._shares.values()), sum(of[1] for of in self._shares.values())
            self._shares_of = bounds
        nothing = (0, 0)
        kept_choices, kept_tokens = map(sub, self._all_shares, self._shares.get(name, nothing))
        for other, used in self.loaded.items():
            if other != name:
                of = self._shares.get(other, nothing)
                kept_choices -= min(of[0], used.choices)
                kept_tokens -= min(of[1], used.queued)
        return kept_choices, kept_tokens

    def _full(self, bound: str) -> APIError:
        self.num_refused += 1
        return APIError("overloaded", f"The queue is full ({bound}).")

    def limited(self, kind: str, message: str, wait_s: float) -> APIError:
        self.num_limited += 1
        return limited(kind, message, wait_s)
