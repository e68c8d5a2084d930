"""The order of tests: none is lost, every worker begins with its share of the long ones, and those that run alone follow each other."""

from types import SimpleNamespace

import pytest
from order import dealt, rotated


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


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize(("long", "alone"), [((), (5,)), (range(40, 47), (1, 2, 90)), (range(9), range(50, 60))])
def test_those_that_run_alone_come_first(long, alone, workers):
    items = [make(number, number in long) for number in range(100)]
    found = [item.number for item in dealt(items, workers, lambda item: item.number in alone)]
    assert sorted(found) == list(range(100))
    if workers == 1:
        assert found == [item.number for item in dealt(items, 1)], "of one process none waits for another"
        return
    assert found[: len(alone)] == list(alone)
    start = 100 // workers
    for worker in range(1, workers):
        first, *rest = found[start : start + (100 - start) // (workers - worker)]
        is_long = [number in long for number in rest]
        assert first not in long and is_long == sorted(is_long, reverse=True)
        start += 1 + len(rest)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_each_worker_collects_everything_and_begins_elsewhere(tmp_path, workers):
    for number in range(10):
        folder = tmp_path / f"part{number}"
        (folder / "deeper").mkdir(parents=True)
        (folder / "deeper/test_it.py").write_text("#" * 100)
        (folder / "helper.py").write_text("#" * 9000)
        (tmp_path / f"test_{number}.py").write_text("#" * 100)
    (tmp_path / "goldens").mkdir()
    orders = [rotated(tmp_path, worker, workers) for worker in range(workers)]
    expected = sorted([*tmp_path.glob("part*"), *tmp_path.glob("test_*.py")])
    assert all(sorted(order) == expected for order in orders) and orders[0] == expected
    starts = [expected.index(order[0]) for order in orders]
    assert starts == [20 * worker // workers for worker in range(workers)]
