"""Garbage is collected between tests. Python does it whenever so many objects were made, as if most of them were garbage: 15 % of what
engines' tests took, whose objects are plans, texts and tokenizers."""

import gc

import psutil

GROWTH = 400 << 20  # bytes that a process of tests grows by before it collects


class Garbage:
    """Once begin() was called, Python collects nothing by itself."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._left = 0

    def begin(self) -> None:
        """What is there stays to the end: a million objects of modules and tests, which collections need not walk."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._left = self._process.memory_info().rss

    def end_test(self) -> None:
        gc.disable()  # a server or engine of this process turned it on when it was ready
        if self._process.memory_info().rss > self._left + GROWTH:
            gc.collect()
            self._left = self._process.memory_info().rss
