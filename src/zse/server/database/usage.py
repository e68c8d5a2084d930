"""What requests used, by tenant, key, model and hour; and what is left of quotas. Both outlive the server.

A request counts when it ends. What ended within GROUP_S is one commit; a death of the process loses no more than
that."""

import asyncio
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import add
from typing import Any

import msgspec

from zse.server.admission import AdmissionControl
from zse.server.database.connection import Database
from zse.server.work import RequestRun

log = logging.getLogger("zse.server")

GROUP_S, RETRY_S = 0.05, 1.0
KEPT_S = 86_400.0  # windows that nobody touched for so long are full
COUNTS = "requests failed prompt_tokens cached_tokens completion_tokens computed_tokens first_token_ms answered total_ms".split()
_OWNER = "tenant key model hour".split()
_ADD = f"""INSERT INTO usage ({", ".join(_OWNER + COUNTS)}, cost) VALUES ({", ".join("?" * (len(_OWNER + COUNTS) + 1))})
    ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in [*COUNTS, "cost"])}"""
_PRICES = "SELECT input_price, coalesce(cached_price, input_price), output_price FROM keys WHERE id = ?"
_WINDOW = """INSERT INTO windows (account, kind, level, at) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET level = excluded.level, at = excluded.at"""

Owner = tuple[str, int, str, int]  # tenant, key, model, hour
Windows = list[tuple[str, str, float, float]]  # account, kind, level, at


class UsageLog:
    """Of a server: gathers on the event loop, and writes in groups. What could not be written is tried again, and
    nothing waits for it.

    Args:
        clock: seconds since 1970."""

    def __init__(self, database: Database, admission: AdmissionControl, clock: Callable[[], float] = time.time):
        self._database, self._admission, self._clock = database, admission, clock
        self._counts: defaultdict[Owner, list[float]] = defaultdict(lambda: [0] * len(COUNTS))
        self._timer: asyncio.TimerHandle | None = None
        self._problem = ""

    def wake(self, seconds: float = GROUP_S) -> None:
        """Something has changed: write it soon."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.flush)

    def ended(self, run: RequestRun, failed: bool) -> None:
        """A request on a model has ended."""
        now, started, first = time.monotonic(), run.request.started, run.first
        first_ms = 1000 * (first - started) if first else 0.0
        tokens = run.prompt_tokens, run.cached, run.completion_tokens, 0
        self._add(run, (1, failed, *tokens, first_ms, bool(first), 1000 * (now - started)))

    def settled(self, run: RequestRun, computed: int) -> None:
        """The engine has said what it computed for a request."""
        self._add(run, (0, 0, 0, 0, 0, computed, 0, 0, 0))

    def _add(self, run: RequestRun, counts: tuple[float, ...]) -> None:
        request = run.request
        owner = request.tenant, request.key_id, run.served.name, int(self._clock() // 3600)
        self._counts[owner] = list(map(add, self._counts[owner], counts))
        self.wake()

    def flush(self) -> Future | None:
        """Hand everything to the database. Done once it is on the disk; None: there was nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, windows = dict(self._counts), self._windows()
        if not counts and not windows:
            return None
        self._counts.clear()
        future = self._database.submit(partial(write, counts=counts, windows=windows))
        asyncio.wrap_future(future).add_done_callback(partial(self._written, counts))
        return future

    def close(self) -> None:
        """Write what is left, and close the database."""
        last = self.flush()
        self._database.close()
        if last is not None and last.exception() is not None:
            log.error("the usage of the last requests is lost: %s: %s", self._database.path, last.exception())

    def _windows(self) -> Windows:
        now, at, found = self._admission.clock(), self._clock(), []
        for account in self._admission.spent:
            for kind, bucket in self._admission.tenants[account].buckets.items():
                bucket.wait_s(0, now)
                found.append((account, kind, bucket.level, at))
        self._admission.spent.clear()
        return found

    def _written(self, counts: dict[Owner, list[float]], done: asyncio.Future) -> None:
        problem = "" if done.exception() is None else getattr(done.exception(), "reason", repr(done.exception()))
        if problem:
            for owner, values in counts.items():
                self._counts[owner] = list(map(add, self._counts[owner], values))
            self.wake(RETRY_S)
            if problem != self._problem:
                log.error("usage waits until it can be written: %s: %s", self._database.path, problem)
        self._problem = problem


def write(connection: sqlite3.Connection, counts: dict[Owner, list[float]], windows: Windows) -> None:
    """Add to the usage, with the costs by the prices that the keys have now, and note what is left of quotas."""
    rows = []
    for owner, values in counts.items():
        fresh, cached, output = connection.execute(_PRICES, (owner[1],)).fetchone() or (0.0, 0.0, 0.0)
        of = dict(zip(COUNTS, values, strict=True))
        cost = (of["prompt_tokens"] - of["cached_tokens"]) * fresh + of["cached_tokens"] * cached
        rows.append((*owner, *values, (cost + of["completion_tokens"] * output) / 1e6))
    connection.executemany(_ADD, rows)
    connection.executemany(_WINDOW, windows)


def restore(
    connection: sqlite3.Connection, admission: AdmissionControl, clock: Callable[[], float] = time.time
) -> None:
    """Give quotas what was left of them, and what came back since."""
    now = clock()
    connection.execute("DELETE FROM windows WHERE at < ?", (now - KEPT_S,))
    for account, kind, level, at in connection.execute("SELECT account, kind, level, at FROM windows"):
        bucket = admission.tenants[account].buckets.get(kind) if account in admission.tenants else None
        if bucket is not None:
            bucket.level = min(bucket.level, level + max(0.0, now - at) * bucket.per_minute / 60)


class UsageTotals(msgspec.Struct, frozen=True):
    """Of a key, a model and a time. key: its name, "" of one that is not in the database. at: when the hour or day
    began, seconds since 1970; None: all of it."""

    tenant: str
    key: str
    model: str
    at: float | None
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    computed_tokens: int
    mean_first_token_ms: float | None
    mean_ms: float | None
    cost: float


PERIODS = {"all": None, "day": 24, "hour": 1}  # hours that are added up


def totals(
    connection: sqlite3.Connection,
    since: float | None = None,
    until: float | None = None,
    key: str | None = None,
    by: str = "all",
) -> list[UsageTotals]:
    """By key, model and period (of PERIODS), the oldest first. since, until: whole hours, from the one that has the
    time on and before the one that has it. key: a name."""
    hours = PERIODS[by]
    at = "NULL" if hours is None else f"hour / {hours} * {hours} * 3600.0"
    sums = ", ".join(f"sum(usage.{name})" for name in COUNTS[:6])
    where, values = ["1"], []
    for condition, value in (("hour >= ?", since), ("hour < ?", until)):
        if value is not None:
            where.append(condition)
            values.append(int(value // 3600))
    if key is not None:
        where.append("name = ?")
        values.append(key)  # type: ignore[arg-type]
    rows: Any = connection.execute(
        f"""SELECT usage.tenant, coalesce(name, ''), model, {at}, {sums},
            sum(first_token_ms) / nullif(sum(answered), 0), sum(total_ms) / nullif(sum(requests), 0), sum(cost)
        FROM usage LEFT JOIN keys ON keys.id = usage.key WHERE {" AND ".join(where)}
        GROUP BY 1, usage.key, 3, 4 ORDER BY 4, 1, 2, 3""",
        values,
    )
    return [UsageTotals(*row) for row in rows]
