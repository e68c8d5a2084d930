"""Quotas of tenants: requests and tokens a minute, answers at once. Past them a request is answered 429 and told when.

Token buckets that hold a minute's worth and are refilled evenly: a tenant may spend a minute at once and has its rate
from then on. Tokens are reserved before any work (prompt and longest answer) and settled with what was used.
"""

import time
from collections.abc import Callable, Mapping

from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.keys import Quota

# Reserved for an answer that has no max_tokens: what it may become is the rest of the context, what it becomes is less.
UNBOUNDED_TOKENS = 512


class Bucket:
    """per_minute: capacity, and refill in 60 s. level: what is left; below 0 after more was used than was reserved."""

    __slots__ = ("level", "per_minute", "_at")

    def __init__(self, per_minute: int, now: float):
        self.per_minute, self.level, self._at = per_minute, float(per_minute), now

    def refill(self, now: float) -> None:
        if now > self._at:
            self.level = min(self.per_minute, self.level + (now - self._at) * self.per_minute / 60)
            self._at = now

    def wait_s(self, amount: float) -> float:
        """Until `amount` is there; at once when it is. More than the capacity asks for all of it."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60 / self.per_minute)

    @property
    def full_in_s(self) -> float:
        return (self.per_minute - self.level) * 60 / self.per_minute


class _Account:
    def __init__(self, quota: Quota, now: float):
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.at_once = 0
        self.set(quota, now)

    def set(self, quota: Quota, now: float) -> None:
        """A new quota; what has been used of the old one stays used."""
        self.requests = _resized(self.requests, quota.rpm, now)
        self.tokens = _resized(self.tokens, quota.tpm, now)
        self.max_at_once = quota.concurrency


def _resized(bucket: Bucket | None, per_minute: int, now: float) -> Bucket | None:
    if not per_minute:
        return None
    new = Bucket(per_minute, now)
    if bucket is not None:
        bucket.refill(now)
        new.level = min(new.level, bucket.level)
    return new


class Limiter:
    """quotas: tenant → Quota; others are not limited. clock: monotonic seconds."""

    def __init__(self, quotas: Mapping[str, Quota] | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self.num_limited = 0
        self.replace(quotas or {})

    def replace(self, quotas: Mapping[str, Quota]) -> None:
        """From now on these quotas hold."""
        now, known, self._accounts = self._clock(), self._accounts, {}
        for tenant, quota in quotas.items():
            account = self._accounts[tenant] = known.get(tenant) or _Account(quota, now)
            account.set(quota, now)

    def enter(self, request: APIRequest) -> "Pass":
        """Count a request. Raises APIError rate_limit_exceeded; the answer's x-ratelimit headers are set either way."""
        account = self._accounts.get(request.tenant)
        entered = Pass(self, account, request)
        if account is not None and account.requests is not None:
            account.requests.refill(self._clock())
            wait_s = account.requests.wait_s(1)
            if wait_s <= 0:
                account.requests.level -= 1
            entered.tell()
            if wait_s > 0:
                raise self._limited(
                    "requests", f"This key may send {account.requests.per_minute} requests a minute.", wait_s
                )
        return entered

    def _limited(self, kind: str, message: str, wait_s: float) -> APIError:
        self.num_limited += 1
        wait_ms = max(1, round(1000 * wait_s))
        return APIError(
            "rate_limit_exceeded",
            message,
            kind=kind,
            headers=(("retry-after", str(-(-wait_ms // 1000))), ("retry-after-ms", str(wait_ms))),
        )


class Pass:
    """What one request has of its tenant's quota. leave() in a `finally`."""

    __slots__ = ("_account", "_choices", "_limiter", "_request", "_reserved")

    def __init__(self, limiter: Limiter, account: _Account | None, request: APIRequest):
        self._limiter, self._account, self._request = limiter, account, request
        self._choices = 0
        self._reserved = 0.0

    def reserve(self, choices: int, tokens: int) -> None:
        """`choices` answers at once, and the most tokens that the request can take. Raises APIError."""
        account, limiter = self._account, self._limiter
        if account is None:
            return
        if account.max_at_once and account.at_once + choices > account.max_at_once:
            raise limiter._limited("requests", f"This key may have {account.max_at_once} answers at once.", 1.0)
        if account.tokens is not None:
            account.tokens.refill(limiter._clock())
            wait_s = account.tokens.wait_s(tokens)
            if wait_s > 0:
                self.tell()
                raise limiter._limited(
                    "tokens",
                    f"This key may use {account.tokens.per_minute} tokens a minute; this request may take {tokens}.",
                    wait_s,
                )
            account.tokens.level -= tokens
            self._reserved = tokens
        self._choices = choices
        account.at_once += choices
        self.tell()

    def leave(self, tokens: int) -> None:
        """The request ended and took so many tokens."""
        if self._account is not None:
            self._account.at_once -= self._choices
            if self._account.tokens is not None:
                self._account.tokens.refill(self._limiter._clock())
                # What was reserved for too long an answer comes back, but never more than fits.
                self._account.tokens.level = min(
                    self._account.tokens.per_minute, self._account.tokens.level + self._reserved - tokens
                )
            self._choices, self._reserved = 0, 0.0

    def tell(self) -> None:
        """Set the answer's headers to what is left."""
        if self._account is None:
            return
        headers = []
        for name, bucket in (("requests", self._account.requests), ("tokens", self._account.tokens)):
            if bucket is not None:
                headers += [
                    (f"x-ratelimit-limit-{name}", str(bucket.per_minute)),
                    (f"x-ratelimit-remaining-{name}", str(max(0, int(bucket.level)))),
                    (f"x-ratelimit-reset-{name}", f"{bucket.full_in_s:.3f}s"),
                ]
        self._request.more_headers = headers
