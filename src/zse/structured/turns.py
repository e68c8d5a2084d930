"""Whose grammar is compiled next: tenants take turns, so that one tenant's slow grammars hold up nobody else's.

A grammar of 60 bytes can keep a checker busy until its clock stops it (checker.CHECK_S). A tenant has at most
OWN_CHECKS of the MAX_CHECKS that run at once, so one is free for the others; several such tenants share them in turns.
"""

import time
from collections import OrderedDict, deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.structured.compile import GrammarError

MAX_CHECKS, OWN_CHECKS = 3, 2  # at once: of all, of one tenant
MAX_WAITING = 256  # grammars of one tenant
MAX_REFUSED, REFUSED_S = 1024, 300.0  # refusals that are kept, and how long: a busy machine may have caused them


class Turns:
    """Numbers of compilations, by tenant, in the order in which they may be checked. max_running, own_running: at once, of all and
    of one tenant. Documents and images do so by the same rule (threads.py)."""

    def __init__(self, max_running: int = MAX_CHECKS, own_running: int = OWN_CHECKS) -> None:
        self._max_running, self._own_running = max_running, own_running
        self._waiting: OrderedDict[str, deque[int]] = OrderedDict()  # the tenant whose turn it is first
        self._running: dict[str, int] = {}

    def add(self, tenant: str, number: int) -> bool:
        """False when the tenant has MAX_WAITING that wait."""
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            return False
        queue.append(number)
        return True

    def remove(self, tenant: str, number: int) -> bool:
        """Take one out again. False when it does not wait: it is being checked, or was."""
        queue = self._waiting.get(tenant)
        if queue is None or number not in queue:
            return False
        queue.remove(number)
        if not queue:
            del self._waiting[tenant]
        return True

    def next(self) -> int | None:
        """The one to be checked now, which counts as running until done(); None when nobody's turn has come."""
        if sum(self._running.values()) >= self._max_running:
            return None
        for tenant, queue in self._waiting.items():
            if self._running.get(tenant, 0) < self._own_running:
                self._running[tenant] = self._running.get(tenant, 0) + 1
                number = queue.popleft()
                self._waiting.move_to_end(tenant)
                if not queue:
                    del self._waiting[tenant]
                return number
        return None

    def done(self, tenant: str) -> None:
        """A check of the tenant's ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


class Refusals:
    """Grammars that were refused lately, and why: nobody compiles them again."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple, tuple[float, GrammarError]] = OrderedDict()

    def get(self, key: tuple) -> "GrammarError | None":
        at, error = self._entries.get(key, (0.0, None))
        return error if time.monotonic() - at < REFUSED_S else None

    def put(self, key: tuple, error: "GrammarError") -> None:
        self._entries[key] = time.monotonic(), error
        self._entries.move_to_end(key)
        while len(self._entries) > MAX_REFUSED:
            self._entries.popitem(last=False)
