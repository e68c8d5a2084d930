"""What requests took and gave, by model and by tenant: counts and histograms for /metrics, kept on the server's event loop."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zse.engine.messages import Tokens

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


class Metric(NamedTuple):
    """A field of Usage in /metrics."""

    name: str
    field: str
    help: str


METRICS = (
    Metric(
        "zse_tenant_requests_total", "requests", "Requests of a tenant, by the name of its keys, that were answered."
    ),
    Metric("zse_tenant_requests_refused_total", "refused", "Of those, the ones that the full queue refused (503)."),
    Metric("zse_tenant_requests_limited_total", "limited", "Of those, the ones beyond the quota (429)."),
    Metric("zse_tenant_prompt_tokens_total", "prompt_tokens", "Tokens of a tenant's prompts."),
    Metric(
        "zse_tenant_cached_prompt_tokens_total", "cached_tokens", "Of those, the ones that were in the prefix cache."
    ),
    Metric("zse_tenant_completion_tokens_total", "completion_tokens", "Tokens of a tenant's answers."),
)


class Tenants:
    """Usage by tenant, as each is first seen."""

    def __init__(self, most: int = MAX_TENANTS):
        self._most = most
        self.by_name: dict[str, Usage] = {}

    def usage(self, tenant: str) -> Usage | None:
        """None for "", which is nobody's key."""
        found = self.by_name.get(tenant)
        if found is None and tenant:
            name = tenant if len(self.by_name) < self._most else OTHERS
            found = self.by_name.setdefault(name, Usage())
        return found

    def answered(self, tenant: str, status: int) -> None:
        """An answer to a request of the tenant ended, 0: the client left before it began."""
        usage = self.usage(tenant)
        if usage is not None:
            usage.requests += 1
            usage.refused += status == 503
            usage.limited += status == 429


class RequestWatch:
    """One request, as it counts in its model's Statistics and its tenant's Usage. started: time.monotonic() of its head.
    end() exactly once."""

    __slots__ = (
        "_last",
        "_num_choices",
        "_outcomes",
        "_started",
        "_statistics",
        "_usage",
        "completion_tokens",
        "prompt_tokens",
    )

    def __init__(self, statistics: Statistics, started: float, num_choices: int, usage: Usage | None = None):
        self._usage = usage
        self._statistics, self._started, self._num_choices = statistics, started, num_choices
        self._last: dict[int, float] = {}  # choice → time of its last tokens
        self._outcomes: Counter[str] = Counter()
        self.prompt_tokens = 0  # once they are known
        self.completion_tokens = 0

    def tokens(self, choice: int, event: Tokens) -> None:
        """Count an event of a choice. Tokens that came together share the time since the last ones."""
        count = len(event.tokens)
        if count:
            now = time.monotonic()
            before = self._last.get(choice)
            if before is None:
                if not self._last:
                    self._statistics.first_token_s.observe(now - self._started)
                if count > 1:
                    self._statistics.between_tokens_s.observe(0.0, count - 1)
            else:
                self._statistics.between_tokens_s.observe((now - before) / count, count)
            self._last[choice] = now
            self.completion_tokens += count
            self._statistics.completion_tokens += count

    def finished(self, reason: str) -> None:
        """A choice ended."""
        self._outcomes[reason] += 1

    def end(self, cached_tokens: int, failure: str = CANCELLED) -> None:
        """The request ended; choices that did not finish count as `failure`."""
        statistics = self._statistics
        left = self._num_choices - self._outcomes.total()
        if left:
            self._outcomes[failure] += left
        statistics.finished.update(self._outcomes)
        statistics.prompt_tokens += self.prompt_tokens
        statistics.cached_tokens += cached_tokens
        statistics.request_s.observe(time.monotonic() - self._started)
        usage = self._usage
        if usage is not None:
            usage.prompt_tokens += self.prompt_tokens
            usage.cached_tokens += cached_tokens
            usage.completion_tokens += self.completion_tokens
