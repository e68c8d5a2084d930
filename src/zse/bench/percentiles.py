"""Percentiles of measured times."""

from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of them do not exceed, interpolated linearly between ranks (numpy.percentile's
    default; Hyndman and Fan 1996, type 7). ValueError: no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p90, p95 and p99; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        **{f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES},
    }
