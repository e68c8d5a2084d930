"""Requests that wait: in which order, and which of them had better wait for another's prompt, or must for a slot of an
adapter.

Between tenants: start-time fair queueing (Goyal, Vin, Cheng 1996). Each has a virtual time, which an admission advances
by tokens / weight, and the one that is furthest behind goes next. A tenant that comes back starts at the present, so
that idling earns nothing. What jobs (engine/jobs.py) use counts as their tenants', like what requests use.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Protocol

import msgspec

from zse.cache.prefix import common_tokens
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import Request, age_order

RECENT_S = 60.0  # so long a row is kept for a tenant that was there
MAX_REMEMBERED = 256  # tenants that have left: each costs every step 0.1 us, and a thousand cost a request 0.7 ms
# Requests with fewer tokens in common than this do not wait for each other: computing them in one step is as fast.
LEAST_SHARED = 32
MAX_FORESEEN = 64  # waiting requests that are looked at when one begins whose state they could continue from


class Tenant(msgspec.Struct, eq=False):
    """virtual: tokens had / weight. waiting: requests in age_order. rows: that its requests run in. jobs: that wait or
    run."""

    name: str
    weight: float
    virtual: float
    waiting: list[Request] = []
    rows: int = 0
    jobs: int = 0


class Visitor(msgspec.Struct, eq=False):
    """What is kept of a tenant, by its name, for RECENT_S after its last request. seen_at: when that was submitted.
    service_s: time of the engine that it had / weight. prompt_s: what its prompts take alone, a running mean; 0: not
    known."""

    seen_at: float
    service_s: float = 0.0
    prompt_s: float = 0.0


class Claimant(Protocol):
    """A Request, or a job beside the requests. tenant: whom it counts for, as long as the queue knows it."""

    options: RequestOptions
    arrival: int
    tenant: Tenant


class RunningAdapters:
    """The adapters of requests that have rows, and of those that ended but are in a batch in flight: a step reads them
    in slots of the device.

    slots: how many there may be at once. rows: adapter → rows that have it."""

    def __init__(self, slots: int):
        self.slots = slots
        self.rows: dict[str, int] = {}

    def must_wait(self, request: Request) -> bool:
        """Whether there is no slot for the request's adapter."""
        adapter = request.options.adapter
        return adapter != "" and adapter not in self.rows and len(self.rows) >= self.slots

    def start(self, request: Request) -> None:
        """The request, which has an adapter, gets a row."""
        adapter = request.options.adapter
        self.rows[adapter] = self.rows.get(adapter, 0) + 1

    def stop(self, request: Request) -> None:
        """Its row is free, and no batch in flight has the request."""
        adapter = request.options.adapter
        self.rows[adapter] -= 1
        if not self.rows[adapter]:
            del self.rows[adapter]


class FairQueue:
    """The waiting requests of all tenants. weights: by tenant, 1 for others; is_fair: False treats all as one.

    tenants: by name, that have a request or job, waiting or running. visitors: by name, those with a request and those
    that left lately, longest unseen first. num_waiting, num_tokens: requests that wait, and the tokens that they have.
    num_jobs: of all tenants."""

    def __init__(self, weights: dict[str, float], is_fair: bool):
        self._weights, self._is_fair = weights, is_fair
        self.tenants: dict[str, Tenant] = {}
        self.num_waiting = self.num_tokens = self.num_jobs = 0
        self._virtual_now = 0.0  # of the admission last made
        self._ahead: dict[str, float] = {}  # virtual times of tenants that left ahead of it
        self.visitors: dict[str, Visitor] = {}

    def __iter__(self) -> Iterator[Request]:
        for tenant in self.tenants.values():
            yield from tenant.waiting

    # -- requests

    def add(self, request: Request) -> None:
        """A request waits, new or again."""
        tenant, now = self._enter(request), request.submitted_at
        insort(tenant.waiting, request, key=age_order)
        self.num_waiting += 1
        self.num_tokens += len(request.tokens)
        visitor = self.visitors.pop(tenant.name, None)
        self.visitors[tenant.name] = visitor = Visitor(now) if visitor is None else visitor
        visitor.seen_at = max(visitor.seen_at, now)
        if len(self.visitors) > max(MAX_REMEMBERED, 2 * len(self.tenants)):
            self.forget_visitors(now)

    def remove(self, request: Request) -> None:
        """The request waits no more."""
        waiting = request.tenant.waiting
        index = bisect_left(waiting, age_order(request), key=age_order)
        if waiting[index] is not request:
            raise ValueError(f"{request} does not wait")
        del waiting[index]
        self.num_waiting -= 1
        self.num_tokens -= len(request.tokens)

    def start(self, request: Request, tokens: float) -> None:
        """The waiting request got a row, and is going to use about `tokens` tokens of the engine."""
        self.remove(request)
        tenant = request.tenant
        tenant.rows += 1
        self._virtual_now = max(self._virtual_now, tenant.virtual)
        tenant.virtual += tokens / tenant.weight

    def stop(self, request: Request, tokens: float) -> None:
        """It gave its row back after `tokens` more tokens than start() was told (negative: fewer)."""
        tenant = request.tenant
        tenant.rows -= 1
        tenant.virtual += tokens / tenant.weight

    def leave(self, tenant: Tenant) -> None:
        """A request or job of the tenant ended: its last, perhaps."""
        if tenant.waiting or tenant.rows or tenant.jobs:
            return
        del self.tenants[tenant.name]
        if tenant.virtual > self._virtual_now and self._is_fair:
            self._ahead[tenant.name] = tenant.virtual
            if len(self._ahead) > MAX_REMEMBERED:
                now = self._virtual_now
                self._ahead = {name: virtual for name, virtual in self._ahead.items() if virtual > now}

    def forget_visitors(self, now: float) -> None:
        """Forget, of those that have nothing here, who was not seen within RECENT_S, and beyond MAX_REMEMBERED the
        longest unseen: a quarter more, so that the next ones cost nothing."""
        idle = [name for name in self.visitors if name not in self.tenants]
        beyond = len(idle) - MAX_REMEMBERED * 3 // 4
        for index, name in enumerate(idle):
            if index < beyond or self.visitors[name].seen_at <= now - RECENT_S:
                del self.visitors[name]

    def _enter(self, claimant: Claimant) -> Tenant:
        """The tenant of a request or job that begins to wait: its first, perhaps."""
        name, weight = claimant.options.tenant if self._is_fair else "", claimant.options.weight
        tenant = self.tenants.get(name)
        if tenant is None:
            virtual = max(self._virtual_now, self._ahead.pop(name, 0.0))
            tenant = self.tenants[name] = Tenant(name, weight or self._weights.get(name, 1.0), virtual)
        elif weight is not None:
            tenant.weight = weight
        claimant.tenant = tenant
        return tenant

    # -- jobs

    def enter_job(self, job: Claimant) -> None:
        """A job waits beside the requests."""
        self._enter(job).jobs += 1
        self.num_jobs += 1

    def start_job(self, job: Claimant, tokens: int) -> None:
        """It is going to use `tokens` tokens of the engine."""
        # Jobs have rows of their own, and may start while others are further behind: the present is where those are.
        self._virtual_now = max(self._virtual_now, min(other.virtual for other in self.tenants.values()))
        job.tenant.virtual += tokens / job.tenant.weight

    def end_job(self, job: Claimant, unused: int) -> None:
        """It ended, and left `unused` of the tokens that it was started with."""
        tenant = job.tenant
        tenant.jobs -= 1
        self.num_jobs -= 1
        tenant.virtual -= unused / tenant.weight
        self.leave(tenant)

    # -- who is next

    def head(
        self,
        prompts: "SharedPrompts | None" = None,
        left_out: Collection[Tenant] = (),
        adapters: RunningAdapters | None = None,
        may_be_held: bool = False,
    ) -> Request | None:
        """Who is next: of the tenant that is furthest behind, but none of `left_out`, its first. prompts: where given,
        a request that is held or gains by waiting for one of them is passed over. adapters: likewise one that waits for
        a slot, and those with an adapter behind it, so that its wait ends. may_be_held: one that is held is not passed
        over if it never ran."""
        waits_for_slot = False
        tenants: Iterable[Tenant] = self.tenants.values()
        if len(self.tenants) > 1:
            tenants = sorted(
                (tenant for tenant in tenants if tenant.waiting and tenant not in left_out),
                key=lambda tenant: (tenant.virtual, *age_order(tenant.waiting[0])),
            )
        for tenant in tenants:
            for request in tenant.waiting:
                if prompts is not None:
                    is_held = request.held and (request.residency or not may_be_held)
                    if is_held or prompts.leaders and prompts.must_wait(request):
                        continue
                if adapters is not None and request.options.adapter:
                    waits_for_slot = waits_for_slot or adapters.must_wait(request)
                    if waits_for_slot:
                        continue
                return request
        return None

    @staticmethod
    def goes_first(first: Claimant, second: Claimant) -> bool:
        """Whether `first` goes ahead of `second`: its tenant is further behind, or the same and it was submitted
        before."""
        mine, other = first.tenant.virtual, second.tenant.virtual
        return first.arrival < second.arrival if mine == other else mine < other

    def by_share(self, running: list[Request]) -> list[Request]:
        """Running requests, those of tenants with the fewest tokens for their weight first: by rows, a tenant with many
        would get nothing beside others that have a few and never none."""
        if len(self.tenants) < 2:
            return running
        return sorted(running, key=lambda request: request.tenant.virtual)

    def is_behind(self, tenant: Tenant) -> bool:
        """Whether a request waits of another tenant that has fewer rows for its weight."""
        return len(self.tenants) > 1 and any(
            other.waiting and other.rows * tenant.weight < tenant.rows * other.weight for other in self.tenants.values()
        )

    def others_may_come(self, tenant: Tenant, now: float) -> bool:
        """Whether another tenant without a row submitted something within RECENT_S."""
        return len(self.visitors) > 1 and any(
            visitor.seen_at > now - RECENT_S
            and name != tenant.name
            and (name not in self.tenants or not self.tenants[name].rows)
            for name, visitor in self.visitors.items()
        )

    def check_integrity(self, running: list[Request]) -> list[str]:
        """What is wrong, one line each."""
        problems = []
        if self.num_waiting != sum(len(tenant.waiting) for tenant in self.tenants.values()):
            problems.append("the queue's length is wrong")
        if self.num_tokens != sum(len(request.tokens) for request in self):
            problems.append("the queue's number of tokens is wrong")
        if any(self.tenants.get(request.tenant.name) is not request.tenant for request in (*running, *self)):
            problems.append("a request's tenant is not in the queue")
        for name, tenant in self.tenants.items():
            held = sum(request.tenant is tenant for request in running)
            is_idle = not (tenant.waiting or tenant.rows or tenant.jobs)
            if tenant.rows != held or is_idle or tenant.name != name:
                problems.append(f"tenant {name!r}: {tenant.rows} rows counted, {held} held")
            if tenant.waiting != sorted(tenant.waiting, key=age_order):
                problems.append(f"tenant {name!r}: waiting requests out of order")
        return problems


class SharedPrompts:
    """The running requests whose prompts others wait for, instead of computing them again: those that compute
    LEAST_SHARED or more tokens, by salt and first tokens (leaders).

    So the choices of one prompt (n, best_of), and a burst of requests with one long system prompt, compute it once.
    has_states: of a model with a state they continue only from where it is kept."""

    def __init__(self, has_states: bool = False) -> None:
        self.leaders: dict[tuple, list[Request]] = {}
        self._has_states = has_states

    def begin(self, request: Request, waiting: Iterable[Request]) -> None:
        """The request was admitted, and computes at least LEAST_SHARED tokens. waiting: those that may wait for it."""
        request.leads = True
        key = _beginning(request)
        self.leaders.setdefault(key, []).append(request)
        if self._has_states:  # the shortest first: others are content with it
            alike = [other for other in islice(waiting, MAX_FORESEEN) if _beginning(other) == key]
            for place in sorted(_shared_place(request, other) for other in alike):
                request.keep_at(place)

    def end(self, request: Request) -> None:
        """The prompt of a request that leads is computed, or it lost its pages."""
        request.leads = False
        key = _beginning(request)
        self.leaders[key].remove(request)
        if not self.leaders[key]:
            del self.leaders[key]

    def must_wait(self, request: Request) -> bool:
        """Whether the waiting request gains by waiting: it would share at least half of what its leader has left to
        compute."""
        leaders = self.leaders.get(_beginning(request))
        if leaders is None:
            return False
        if not request.held:  # it does not wait for what others are held for
            leaders = [leader for leader in leaders if not leader.held]
        if request.leader in leaders:
            return True
        tokens = request.compared_tokens.tobytes()
        for leader in leaders:
            shared = common_tokens(leader.compared_tokens.tobytes(), tokens) - leader.committed_len
            if shared >= LEAST_SHARED and 2 * shared >= len(leader.tokens) - leader.computed_len:
                if self._has_states and not leader.keep_at(_shared_place(leader, request)):
                    continue
                request.leader = leader
                return True
        request.leader = None
        return False


def _shared_place(leader: Request, request: Request) -> int:
    """How many tokens of the leader's prompt the request does not compute."""
    return min(
        common_tokens(leader.compared_tokens.tobytes(), request.compared_tokens.tobytes()), len(request.tokens) - 1
    )


def _beginning(request: Request) -> tuple:
    return *request.salt, request.compared_tokens[:LEAST_SHARED].tobytes()
