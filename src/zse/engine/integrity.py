"""Scheduler.check_integrity() while it serves: a page or a row that was lost is found, logged and counted, and nobody's
request ends for it (leak checkers that end the process have taken servers down: sglang#6888, #20010).

After about every thousandth step, and after fewer when the engine has been idle for a while; never more than a small
share of the time.
"""

import time
from typing import Any

from zse.lazy import logging

EVERY_STEPS = 1000
LEAST_STEPS, IDLE_S = 64, 1.0  # of an idle engine: whose next request is not there yet
MAX_SHARE = 0.002  # of the time; a check takes 3 ms with 17,000 pages, 10 ms when 4,000 of them are cached
MAX_LINES = 5  # of a check in the log


class IntegrityWatch:
    """due: look() when the scheduler has made so many steps. counters: integrity_checks, integrity_problems (lines that
    checks found), integrity_check_ms of the last one."""

    def __init__(self, scheduler: Any, clock=time.perf_counter):
        self._scheduler, self._clock = scheduler, clock
        self.due = EVERY_STEPS
        self._not_before = self._idle_since = 0.0
        self._idle_steps = 0  # when idle() was called last
        self.counters: dict[str, float] = {"integrity_checks": 0, "integrity_problems": 0, "integrity_check_ms": 0.0}

    def look(self) -> None:
        """Check, unless that takes more than its share of the time."""
        if self._clock() >= self._not_before:
            self._check()

    def idle(self) -> None:
        """The engine has nothing to do."""
        steps, now = self._scheduler.totals.steps, self._clock()
        if steps != self._idle_steps:
            self._idle_steps, self._idle_since = steps, now
        if steps - (self.due - EVERY_STEPS) >= LEAST_STEPS and now >= max(self._not_before, self._idle_since + IDLE_S):
            self._check()

    def _check(self) -> None:
        started = self._clock()
        problems = self._scheduler.check_integrity()
        ended = self._clock()
        self.due = self._scheduler.totals.steps + EVERY_STEPS
        self._not_before = ended + (ended - started) / MAX_SHARE
        self.counters["integrity_checks"] += 1
        self.counters["integrity_check_ms"] = 1000 * (ended - started)
        if problems:
            self.counters["integrity_problems"] += len(problems)
            more = f" (and {len(problems) - MAX_LINES} more)" if len(problems) > MAX_LINES else ""
            logging.getLogger("zse.engine").error(
                "the scheduler's books are wrong, please report it: %s%s", "; ".join(problems[:MAX_LINES]), more
            )
