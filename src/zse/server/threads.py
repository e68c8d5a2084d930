"""Threads for work that would hold up the event loop: parsing, templates, tokenizing. Tenants take turns at them."""

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")
MOST = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio's own pool has


class FairThreads:
    """Once two tenants have come, each has half of the threads at most, and whose turn was last waits behind the others.

    A tenant with fifty prompts of megabytes would otherwise hold every thread, and every other tenant's chat, for seconds."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future]] = OrderedDict()  # the tenant whose turn it is first

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """work(), in a thread. It keeps its thread until it ends, though nobody may wait for it any more."""
        loop = asyncio.get_running_loop()
        if len(self._known) < 2:
            self._known.add(tenant)
        place = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._start()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # its turn came in the same moment
                self._start(tenant)
            raise
        future = loop.run_in_executor(None, work)
        future.add_done_callback(partial(self._start, tenant))
        return await asyncio.shield(future)

    def _start(self, ended: str | None = None, done: asyncio.Future | None = None) -> None:
        """Work of the tenant `ended` is over: give the threads that are free to those whose turn it is."""
        if done is not None and not done.cancelled():
            done.exception()  # looked at, where nobody waits for it
        if ended is not None:
            self._running[ended] -= 1
            if not self._running[ended]:
                del self._running[ended]
        own = MOST if len(self._known) < 2 else MOST // 2
        while sum(self._running.values()) < MOST:
            tenant = next((name for name in self._waiting if self._running[name] < own), None)
            if tenant is None:
                return
            queue = self._waiting[tenant]
            place = queue.popleft()
            if queue:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not place.done():  # it was cancelled
                self._running[tenant] += 1
                place.set_result(None)
