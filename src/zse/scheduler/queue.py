"""Requests that wait, and what tenants have had: who is admitted next.

Start-time fair queueing (Goyal, Vin, Cheng 1996) between tenants: each has a virtual time, which admissions advance by
tokens / weight, and the one that is furthest behind goes next. A tenant that comes back starts at the present, so that
idling earns nothing. Within a tenant: policy.due_time. Jobs (engine/jobs.py) queue elsewhere; what they use counts here.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from zse.scheduler.options import RequestOptions
from zse.scheduler.policy import age_order
from zse.scheduler.request import Request

RECENT_S = 60.0  # so long a row is kept for a tenant that was there
MAX_REMEMBERED = 256  # tenants that have gone, before those whose time has passed are forgotten


class Claimant(Protocol):
    """A Request, or a job beside the requests."""

    options: RequestOptions
    arrival: int


class Tenant:
    """virtual: tokens had / weight. waiting: in age_order. rows: of the engine, held by running requests. jobs: that wait
    or run."""

    __slots__ = ("jobs", "name", "rows", "virtual", "waiting", "weight")

    def __init__(self, name: str, weight: float, virtual: float):
        self.name, self.weight, self.virtual = name, weight, virtual
        self.waiting: list[Request] = []
        self.rows = self.jobs = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.rows and not self.jobs


class WaitingQueue:
    """The waiting requests of all tenants. weights: by tenant, 1 for others; is_fair: False treats all as one tenant."""

    def __init__(self, weights: dict[str, float], is_fair: bool):
        self._weights, self._is_fair = weights, is_fair
        self.tenants: dict[str, Tenant] = {}  # those that have a request or job, waiting or running
        self._virtual_now = 0.0  # of the admission last made
        self._ahead: dict[str, float] = {}  # virtual times of tenants that left ahead of it
        self._seen: dict[str, float] = {}  # when a tenant's request was submitted last
        self._length = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for tenant in self.tenants.values():
            yield from tenant.waiting

    def name_of(self, claimant: Claimant) -> str:
        """The tenant that the request or job counts for."""
        return claimant.options.tenant if self._is_fair else ""

    def seen(self, request: Request, now: float) -> None:
        """The request was submitted now."""
        self._seen[self.name_of(request)] = now
        if len(self._seen) > MAX_REMEMBERED:
            self._seen = {name: at for name, at in self._seen.items() if at > now - RECENT_S}

    def others_may_come(self, tenant: Tenant, now: float) -> bool:
        """Whether a tenant that has no row now was there lately."""
        return len(self._seen) > 1 and any(
            at > now - RECENT_S and name != tenant.name and (name not in self.tenants or not self.tenants[name].rows)
            for name, at in self._seen.items()
        )

    def by_share(self, running: list[Request]) -> list[Request]:
        """Running requests, those of tenants with the fewest rows for their weight first."""
        if len(self.tenants) < 2:
            return running
        return sorted(running, key=lambda request: (tenant := self.tenant_of(request)).rows / tenant.weight)

    def tenant_of(self, claimant: Claimant) -> Tenant:
        return self.tenants[self.name_of(claimant)]

    def goes_first(self, first: Claimant, second: Claimant) -> bool:
        """Whether `first` goes ahead of `second`: its tenant is further behind, or the same and it came before."""
        mine, other = self.tenant_of(first).virtual, self.tenant_of(second).virtual
        return first.arrival < second.arrival if mine == other else mine < other

    def _come(self, claimant: Claimant) -> Tenant:
        """The tenant of what has come, which may be its first."""
        name = self.name_of(claimant)
        tenant = self.tenants.get(name)
        weight = claimant.options.weight
        if tenant is None:
            virtual = max(self._virtual_now, self._ahead.pop(name, 0.0))
            tenant = self.tenants[name] = Tenant(name, weight or self._weights.get(name, 1.0), virtual)
        elif weight is not None:
            tenant.weight = weight
        return tenant

    def add(self, request: Request) -> None:
        """A request that waits, new or again."""
        tenant = self._come(request)
        insort(tenant.waiting, request, key=age_order)
        self._length += 1
        self.num_tokens += len(request.tokens)

    def head(self, must_wait: Callable[[Request], bool] = lambda request: False) -> Request | None:
        """Who is next: of the tenant that is furthest behind, its first that need not wait for something else."""
        tenants: Iterable[Tenant] = self.tenants.values()
        if len(self.tenants) > 1:
            tenants = sorted(
                (tenant for tenant in tenants if tenant.waiting),
                key=lambda tenant: (tenant.virtual, *age_order(tenant.waiting[0])),
            )
        for tenant in tenants:
            for request in tenant.waiting:
                if not must_wait(request):
                    return request
        return None

    def remove(self, request: Request) -> None:
        """It waits no more: it is admitted (see started) or gone (see left)."""
        waiting = self.tenant_of(request).waiting
        index = bisect_left(waiting, age_order(request), key=age_order)
        if waiting[index] is not request:
            raise ValueError(f"{request} does not wait")
        del waiting[index]
        self._length -= 1
        self.num_tokens -= len(request.tokens)

    def started(self, request: Request, tokens: float) -> None:
        """It has a row now, and is going to use about `tokens` tokens of the engine."""
        tenant = self.tenant_of(request)
        tenant.rows += 1
        self._virtual_now = max(self._virtual_now, tenant.virtual)
        tenant.virtual += tokens / tenant.weight

    def stopped(self, request: Request, tokens: float) -> None:
        """It gave its row back after `tokens` more tokens than started() was told (negative: fewer)."""
        tenant = self.tenant_of(request)
        tenant.rows -= 1
        tenant.virtual += tokens / tenant.weight

    def left(self, request: Request) -> None:
        """It waits no more and runs no more."""
        self._forget_idle(self.tenant_of(request))

    def job_came(self, job: Claimant) -> None:
        """A job waits beside the requests."""
        self._come(job).jobs += 1

    def job_started(self, job: Claimant, tokens: int) -> None:
        """It is going to use `tokens` tokens of the engine."""
        tenant = self.tenant_of(job)
        # Jobs have rows of their own, and may start while others are further behind: the present is where those are.
        self._virtual_now = max(self._virtual_now, min(other.virtual for other in self.tenants.values()))
        tenant.virtual += tokens / tenant.weight

    def job_left(self, job: Claimant, unused: int) -> None:
        """It has gone, and left `unused` of the tokens that it was started with."""
        tenant = self.tenant_of(job)
        tenant.jobs -= 1
        tenant.virtual -= unused / tenant.weight
        self._forget_idle(tenant)

    def _forget_idle(self, tenant: Tenant) -> None:
        if tenant.is_idle:
            del self.tenants[tenant.name]
            if tenant.virtual > self._virtual_now and self._is_fair:
                self._ahead[tenant.name] = tenant.virtual
                if len(self._ahead) > MAX_REMEMBERED:
                    now = self._virtual_now
                    self._ahead = {name: virtual for name, virtual in self._ahead.items() if virtual > now}

    def check_integrity(self, running: list[Request]) -> list[str]:
        """What is wrong, one line each."""
        problems = []
        if self._length != sum(len(tenant.waiting) for tenant in self.tenants.values()):
            problems.append("the queue's length is wrong")
        if self.num_tokens != sum(len(request.tokens) for request in self):
            problems.append("the queue's number of tokens is wrong")
        rows: dict[str, int] = {}
        for request in running:
            name = self.tenant_of(request).name
            rows[name] = rows.get(name, 0) + 1
        for name, tenant in self.tenants.items():
            if tenant.rows != rows.get(name, 0) or tenant.is_idle or tenant.name != name:
                problems.append(f"tenant {name!r}: {tenant.rows} rows counted, {rows.get(name, 0)} held")
            if [age_order(r) for r in tenant.waiting] != sorted(age_order(r) for r in tenant.waiting):
                problems.append(f"tenant {name!r}: waiting requests out of order")
        return problems
