"""How long requests waited for their first row: a histogram as counters, which the server shows as one."""

from bisect import bisect_left

# Upper bounds of the buckets, in seconds.
BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
NAMES = (*(f"queue_wait_le_{bound:g}" for bound in BOUNDS), "queue_wait_longer")


class Waits:
    """counts: waits by bucket; the last one has no bound."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * len(NAMES)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1

    def snapshot(self) -> dict[str, float]:
        """Name → waits in this bucket alone."""
        return dict(zip(NAMES, self.counts, strict=True))
