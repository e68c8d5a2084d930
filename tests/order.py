"""In which order several processes run tests."""

import itertools


def dealt(items: list, workers: int) -> list:
    """The items in an order such that each worker begins with its share of those marked `long`: what comes last is short, and no
    core waits for one long test. Workers start with equal parts of the list, and take from the ends of others' (--dist worksteal)."""
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    found: list = []
    for worker in range(workers):
        first = long[worker::workers]
        size = (len(items) - len(found)) // (workers - worker)
        found += first + list(itertools.islice(others, max(0, size - len(first))))
    return found + list(others)
