import pytest
from simulator import Simulation

SEEDS, OPERATIONS = 300, 500


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_invariants_hold_on_random_walks(first):
    for seed in range(first, first + 20):
        try:
            Simulation(seed).run(OPERATIONS)
        except AssertionError as error:
            raise AssertionError(f"simulation seed {seed}: {error}") from error


def test_walks_reach_every_state():
    """The walk is worth its time only if it preempts, refuses, cancels in flight and fails rows."""
    totals: dict[str, float] = {"ahead": 0}
    for seed in range(40):
        simulation = Simulation(seed)
        simulation.run(OPERATIONS)
        totals["ahead"] += simulation.num_ahead
        for name, value in simulation.scheduler.snapshot().items():
            totals[name] = totals.get(name, 0) + value
    for name in ("ahead", "finished", "cancelled", "failed", "refused", "preemptions", "late_results",
                 "ignored_cancels", "recomputed_tokens", "queue_wait_s", "prefix_hits", "prefix_hit_tokens",
                 "prefix_evicted_pages", "prefix_copied_pages", "forks", "swapped_out_pages", "swapped_in_pages",
                 "drafted_tokens", "accepted_tokens"):
        assert totals[name] > 20, name


def test_the_same_seed_gives_the_same_trace():
    first, second = Simulation(5), Simulation(5)
    first.run(OPERATIONS)
    second.run(OPERATIONS)
    assert first.trace == second.trace and first.trace
