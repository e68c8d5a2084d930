"""What the scheduler counts and measures of requests."""

from bisect import bisect_left

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.scheduler.request import Request

# Waits for the first row: upper bounds of the histogram's buckets, in seconds, and their names as counters.
BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
NAMES = (*(f"queue_wait_le_{bound:g}" for bound in BOUNDS), "queue_wait_longer")

FIRST_MEAN = 64.0  # tokens of a reply, until replies have ended
LEAST_REST = 16  # tokens that a reply is expected to have left, however long it is
MEAN_STEP = 1 / 32  # weight of the newest reply in the running mean


class Counters(msgspec.Struct):
    """Totals since the start."""

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    timed_out: int = 0
    forks: int = 0
    ignored_cancels: int = 0
    late_results: int = 0
    deadlines_met: int = 0
    deadlines_missed: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verified_runs: int = 0
    queue_wait_s: float = 0.0

    def snapshot(self) -> dict[str, float]:
        return msgspec.structs.asdict(self)


class QueueWaits:
    """A histogram of the seconds that requests waited for their first row. The last bucket has no bound."""

    def __init__(self) -> None:
        self._counts = [0] * len(NAMES)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1

    def snapshot(self) -> dict[str, float]:
        """Name → waits in this bucket alone."""
        return dict(zip(NAMES, self._counts, strict=True))


class ReplyLengths:
    """How long replies are likely to be: what admission keeps free and what shares are charged. mean: in tokens."""

    def __init__(self) -> None:
        self.mean = FIRST_MEAN

    def observe(self, tokens: int) -> None:
        """A reply ended after so many tokens."""
        self.mean += (tokens - self.mean) * MEAN_STEP

    def expected(self, request: "Request") -> int:
        """Tokens that are likely to have K and V in the end: the reply is as long as replies are, at most max_tokens."""
        rest = max(self.mean - (len(request.tokens) - request.prompt_len), LEAST_REST)
        return min(len(request.tokens) + int(rest), request.max_cached_len)
