"""What the scheduler counts of requests and steps."""

import msgspec

# Waits for the first row: upper bounds of the histogram's buckets, in seconds, and their names as counters. The last
# bucket has no bound.
BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
NAMES = (*(f"queue_wait_le_{bound:g}" for bound in BOUNDS), "queue_wait_longer")


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


class StepTotals(msgspec.Struct):
    """Of all steps since the start. prompt_tokens: prefilled (recomputed ones again); sampled_tokens: of replies."""

    steps: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    step_s: float = 0.0
    longest_step_s: float = 0.0
