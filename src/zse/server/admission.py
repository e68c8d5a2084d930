"""The bounded queue: how many requests and prompt tokens may be in the house, decided before any work is done."""

from collections.abc import Mapping

from zse.server.errors import APIError

BYTES_PER_TOKEN = 3  # of text, for the estimate before tokenising; English has 4, code and CJK about 3
# Of the queue: kept for tenants by their weights, even while others ask for more. The rest is first come, first served:
# a tenant that is alone may use all but what is kept for the others, one that floods cannot keep them out.
KEPT_SHARE = 0.5


class Ticket:
    """A reservation. release() in a `finally`; prefilled() once the first token is there."""

    __slots__ = ("_admission", "_tenant", "choices", "tokens")

    def __init__(self, admission: "Admission", tenant: str, choices: int, tokens: int):
        self._admission, self._tenant, self.choices, self.tokens = admission, tenant, choices, tokens

    def set_tokens(self, tokens: int) -> None:
        """Replace the estimate by the true number of prompt tokens."""
        self._admission.count(self._tenant, 0, tokens - self.tokens)
        self.tokens = tokens

    def prefilled(self) -> None:
        """Its prompt is no longer waiting."""
        if self.tokens:
            self.set_tokens(0)

    def release(self) -> None:
        self._admission.count(self._tenant, -self.choices, -self.tokens)
        self.choices = self.tokens = 0


class Admission:
    """max_choices: completions running or waiting (a request with n = 4 counts four times); max_tokens: prompt tokens
    of requests without a first token. A request that is its tenant's only one needs no room for its tokens, only that
    the bound is not reached yet: it may be longer than the bound. weights: of the tenants that share the queue."""

    def __init__(self, max_choices: int, max_tokens: int, weights: Mapping[str, float] | None = None):
        self.max_choices, self.max_tokens = max_choices, max_tokens
        self.choices = self.queued_tokens = 0
        self.num_refused = 0
        self.weights = dict(weights or {})
        self._used: dict[str, tuple[int, int]] = {}  # tenant → (choices, tokens), while there are any

    def check(self, tenant: str = "") -> None:
        """Refuse at once when nothing more fits, before the body is even parsed."""
        self._fits(tenant, 1, 0)

    def reserve(self, choices: int, tokens: int, tenant: str = "") -> Ticket:
        """Raises APIError overloaded."""
        self._fits(tenant, choices, tokens)
        self.count(tenant, choices, tokens)
        return Ticket(self, tenant, choices, tokens)

    def count(self, tenant: str, choices: int, tokens: int) -> None:
        """Called by tickets only."""
        self.choices += choices
        self.queued_tokens += tokens
        before = self._used.get(tenant, (0, 0))
        used = before[0] + choices, before[1] + tokens
        if used == (0, 0):
            self._used.pop(tenant, None)
        else:
            self._used[tenant] = used

    def _fits(self, tenant: str, choices: int, tokens: int) -> None:
        kept_choices, kept_tokens = self._kept_from(tenant)
        if self.choices + choices > self.max_choices - kept_choices:
            raise self._full(f"{self.max_choices - kept_choices} requests")
        own_tokens = self._used.get(tenant, (0, 0))[1]
        room = self.max_tokens - kept_tokens - self.queued_tokens
        if tokens > room and (own_tokens or self.queued_tokens >= self.max_tokens):
            raise self._full(f"{self.max_tokens - kept_tokens} prompt tokens")

    def _kept_from(self, tenant: str) -> tuple[int, int]:
        """Choices and tokens that are kept for the other tenants and not used by them."""
        if len(self.weights) < 2:
            return 0, 0
        share = KEPT_SHARE / sum(self.weights.values())
        kept_choices = kept_tokens = 0
        for other, weight in self.weights.items():
            if other != tenant:
                choices, tokens = self._used.get(other, (0, 0))
                kept_choices += max(0, int(self.max_choices * share * weight) - choices)
                kept_tokens += max(0, int(self.max_tokens * share * weight) - tokens)
        return kept_choices, kept_tokens

    def _full(self, bound: str) -> APIError:
        self.num_refused += 1
        return APIError("overloaded", f"The queue is full ({bound}).")
