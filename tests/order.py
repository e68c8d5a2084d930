"""In which order several processes collect and run tests."""

import itertools
from collections.abc import Callable
from pathlib import Path


def dealt(items: list, workers: int, is_alone: Callable[[object], bool] = lambda item: False) -> list:
    """The items in an order such that each worker begins with its share of those marked `long`: what comes last is short, and no
    core waits for one long test. Workers start with equal parts of the list, and take from the ends of others' (--dist worksteal).

    Of several workers the first begins with the tests that run alone, one after the other: each of them elsewhere would wait for the
    tests that the others have begun, and those who are done with theirs for it (51 tests took 100 s of waiting). The others begin with
    a short one, for they may come first."""
    alone = [item for item in items if workers > 1 and is_alone(item)]
    others = [item for item in items if not (alone and is_alone(item))]
    long = [item for item in others if item.get_closest_marker("long")]
    short = iter([item for item in others if not item.get_closest_marker("long")])
    found: list = []
    for worker in range(workers):
        size = (len(items) - len(found)) // (workers - worker)
        part = list(itertools.islice(short, 1)) if alone and worker and size else alone if not worker else []
        part = part + long[worker::workers]
        found += part + list(itertools.islice(short, max(0, size - len(part))))
    return found + list(short)


def rotated(folder: Path, worker: int, workers: int) -> list[Path]:
    """What is in a folder of tests, by name, from where the worker begins to collect: pytest's modules with what it makes of asserts,
    13 s of processor time in a fresh clone, are then compiled once, and found by the other workers, and not by each of them."""
    entries = sorted(path for path in folder.iterdir() if path.is_dir() or path.match("test_*.py"))
    sizes = [
        sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("test_*.py"))) for path in entries
    ]
    entries = [path for path, size in zip(entries, sizes) if size]
    ends = list(itertools.accumulate(size for size in sizes if size))
    first = next((at for at, end in enumerate(ends) if end * workers > worker * ends[-1]), 0)
    return entries[first:] + entries[:first]
