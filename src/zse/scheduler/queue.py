"""Requests that wait: in which order, and which of them had better wait for another's prompt."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from zse.cache.prefix import common_tokens
from zse.scheduler.fairness import Tenant, TenantShares
from zse.scheduler.request import Request, age_order

# Requests with fewer tokens in common than this do not wait for each other: computing them in one step is as fast.
LEAST_SHARED = 32


class WaitingQueue:
    """The waiting requests of all tenants, which keep them in age_order. num_tokens: that they have."""

    def __init__(self, tenants: TenantShares):
        self._tenants = tenants
        self._length = self.num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.waiting

    def add(self, request: Request) -> None:
        """A request waits, new or again."""
        insort(self._tenants.enter(request).waiting, request, key=age_order)
        self._length += 1
        self.num_tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        """The request waits no more."""
        waiting = self._tenants.of(request).waiting
        index = bisect_left(waiting, age_order(request), key=age_order)
        if waiting[index] is not request:
            raise ValueError(f"{request} does not wait")
        del waiting[index]
        self._length -= 1
        self.num_tokens -= len(request.tokens)

    def head(self, must_wait: Callable[[Request], bool] = lambda request: False) -> Request | None:
        """Who is next: of the tenant that is furthest behind, its first that need not wait for something else."""
        tenants: Iterable[Tenant] = self._tenants.values()
        if len(self._tenants) > 1:
            tenants = sorted(
                (tenant for tenant in tenants if tenant.waiting),
                key=lambda tenant: (tenant.virtual, *age_order(tenant.waiting[0])),
            )
        for tenant in tenants:
            for request in tenant.waiting:
                if not must_wait(request):
                    return request
        return None

    def check_integrity(self, running: list[Request]) -> list[str]:
        """What is wrong, one line each."""
        problems = []
        if self._length != sum(len(tenant.waiting) for tenant in self._tenants.values()):
            problems.append("the queue's length is wrong")
        if self.num_tokens != sum(len(request.tokens) for request in self):
            problems.append("the queue's number of tokens is wrong")
        rows: dict[str, int] = {}
        for request in running:
            name = self._tenants.of(request).name
            rows[name] = rows.get(name, 0) + 1
        for name, tenant in self._tenants.items():
            is_idle = not (tenant.waiting or tenant.rows or tenant.jobs)
            if tenant.rows != rows.get(name, 0) or is_idle or tenant.name != name:
                problems.append(f"tenant {name!r}: {tenant.rows} rows counted, {rows.get(name, 0)} held")
            if tenant.waiting != sorted(tenant.waiting, key=age_order):
                problems.append(f"tenant {name!r}: waiting requests out of order")
        return problems


class SharedPrompts:
    """The running requests whose prompts others wait for, instead of computing them again: those that compute
    LEAST_SHARED or more tokens, by salt and first tokens.

    So the choices of one prompt (n, best_of), and a burst of requests with one long system prompt, compute it once."""

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._leaders: dict[tuple, list[Request]] = {}

    def begin(self, request: Request) -> None:
        """The request was admitted."""
        if self._enabled and len(request.tokens) - request.computed_len >= LEAST_SHARED:
            request.leads = True
            self._leaders.setdefault(_beginning(request), []).append(request)

    def end(self, request: Request) -> None:
        """The request's prompt is computed, or it lost its pages."""
        if request.leads:
            request.leads = False
            key = _beginning(request)
            self._leaders[key].remove(request)
            if not self._leaders[key]:
                del self._leaders[key]

    def must_wait(self, request: Request) -> bool:
        """Whether the waiting request gains by waiting: it would share at least half of what its leader has left to
        compute."""
        if not self._leaders:
            return False
        leaders = self._leaders.get(_beginning(request))
        if leaders is None:
            return False
        if request.leader in leaders:
            return True
        tokens = request.tokens.tobytes()
        for leader in leaders:
            shared = common_tokens(leader.tokens.tobytes(), tokens) - leader.committed_len
            if shared >= LEAST_SHARED and 2 * shared >= len(leader.tokens) - leader.computed_len:
                request.leader = leader
                return True
        request.leader = None
        return False


def _beginning(request: Request) -> tuple:
    return *request.salt, request.tokens[:LEAST_SHARED].tobytes()
