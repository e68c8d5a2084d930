"""What requests took and gave, by model and by tenant: counts and histograms for /metrics, kept on the server's event loop."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

# Upper bounds of buckets, in seconds: a GPU's token takes milliseconds, a queue may hold somebody for minutes.
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)

CANCELLED, ERROR = "cancelled", "error"  # beside the engine's finish reasons


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
        self.finished: Counter[str] = Counter()  # choices by finish reason
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0


# Tenants with figures of their own; names that come later, by new key files, are counted together.
MAX_TENANTS = 256
OTHERS = "(others)"  # no key file can name a tenant so


class Usage:
    """Of one tenant. refused: by the full queue (503); limited: by its quota (429)."""

    __slots__ = ("cached_tokens", "completion_tokens", "limited", "prompt_tokens", "refused", "requests")

    def __init__(self) -> None:
        self.requests = self.refused = self.limited = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0


class Tenants(dict[str, Usage]):
    """Usage by tenant, as each is first asked for."""

    def __init__(self, most: int = MAX_TENANTS):
        super().__init__()
        self._most = most

    def __missing__(self, tenant: str) -> Usage:
        return self.setdefault(tenant if len(self) < self._most else OTHERS, Usage())
