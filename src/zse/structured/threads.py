"""Work of tenants in threads, a bounded number at once, in turns (turns.py): documents are parsed and images decoded by it."""

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from zse.errors import RequestError
from zse.structured.turns import Turns

Result = TypeVar("Result")


class ThreadTurns:
    """most, own: at once, of all and of one tenant. name: of the threads. what: is refused where too many of a tenant's wait, such as
    "images of yours wait to be decoded"."""

    def __init__(self, most: int, own: int, name: str, what: str):
        self._turns, self._most, self._name, self._what = Turns(most, own), most, name, what
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, tenant: str, work: Callable[[], Result], stop: Callable[[], object] | None = None) -> Result:
        """work() in a thread when the tenant's turn has come, which lasts as long. stop: ends it where the task is cancelled, which then
        waits for its end. Raises RequestError (503): too many of the tenant's wait; and what work raises."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        if not self._turns.add(tenant, number):
            raise busy(f"too many {self._what}")
        begun = self._waiting[number] = loop.create_future()
        self._begin_next()
        try:
            await begun
        except asyncio.CancelledError:
            self._end(tenant, number)
            raise
        self._threads = self._threads or ThreadPoolExecutor(self._most, self._name)
        working = loop.run_in_executor(self._threads, work)
        working.add_done_callback(lambda done: self._end(tenant, number))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            # Nobody looks at what it raises.
            working.add_done_callback(lambda done: done.cancelled() or done.exception())
            if stop is not None:
                stop()
                await asyncio.wait([working])
            raise

    def close(self) -> None:
        """Nothing more begins."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while (number := self._turns.next()) is not None:
            begun = self._waiting[number]
            if not begun.done():
                begun.set_result(None)

    def _end(self, tenant: str, number: int) -> None:
        self._waiting.pop(number, None)
        if not self._turns.remove(tenant, number):
            self._turns.done(tenant)
        self._begin_next()


def busy(why: str) -> RequestError:
    """The 503 of what may be tried again."""
    return RequestError(f"{why}: try again later", status=503, type="server_error", code="overloaded")
