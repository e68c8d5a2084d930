"""The order of tests: none is lost, and every worker begins with its share of the long ones."""

from types import SimpleNamespace

import pytest
from order import dealt


def make(number: int, is_long: bool):
    return SimpleNamespace(number=number, get_closest_marker=lambda name: is_long or None)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("count", "long"),
    [(0, ()), (1, (0,)), (20, (3, 9, 10, 11, 19)), (100, range(40, 47)), (9, range(9)), (8, range(7))],
)
def test_workers_begin_with_long_tests(count, long, workers):
    items = [make(number, number in long) for number in range(count)]
    found = dealt(items, workers)
    assert sorted(item.number for item in found) == list(range(count))
    start = 0
    for worker in range(workers):  # as xdist's worksteal cuts them
        size = (count - start) // (workers - worker)
        part = [item.number in long for item in found[start : start + size]]
        assert part == sorted(part, reverse=True), "a short test before a long one"
        if count >= workers * (len(long) // workers + 1):
            assert abs(sum(part) - len(long) / workers) < 1
        start += size
