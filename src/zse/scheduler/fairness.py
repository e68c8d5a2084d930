"""How tenants share the engine: who is next, who is held back, and how much of the time jobs have.

Between tenants: start-time fair queueing (Goyal, Vin, Cheng 1996). Each has a virtual time, which an admission advances
by tokens / weight, and the one that is furthest behind goes next. A tenant that comes back starts at the present, so
that idling earns nothing. What jobs (engine/jobs.py) use counts as their tenants', like what requests use.
"""

from typing import Protocol

from zse.scheduler.budget import ChunkBudget
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.scheduler.batch import Batch

RECENT_S = 60.0  # so long a row is kept for a tenant that was there
MAX_REMEMBERED = 256  # tenants that have left, before those whose time has passed are forgotten
SHARE_GIVEN = 0.9  # of the slowdown that shares allow: the rest is for the wait before the first step
MOST_DEBT_S = 0.5  # one slow step is not made good for longer


class Claimant(Protocol):
    """A Request, or a job beside the requests."""

    options: RequestOptions
    arrival: int


class Tenant:
    """virtual: tokens had / weight. waiting: requests in age_order. rows: that its requests run in. jobs: that wait or
    run."""

    __slots__ = ("jobs", "name", "rows", "virtual", "waiting", "weight")

    def __init__(self, name: str, weight: float, virtual: float):
        self.name, self.weight, self.virtual = name, weight, virtual
        self.waiting: list[Request] = []
        self.rows = self.jobs = 0


class TenantShares(dict[str, Tenant]):
    """The tenants that have a request or job, waiting or running. weights: by tenant, 1 for others; is_fair: False treats
    all as one. num_jobs: of all of them."""

    def __init__(self, weights: dict[str, float], is_fair: bool):
        super().__init__()
        self._weights, self._is_fair = weights, is_fair
        self.num_jobs = 0
        self._virtual_now = 0.0  # of the admission last made
        self._ahead: dict[str, float] = {}  # virtual times of tenants that left ahead of it
        self._submitted_at: dict[str, float] = {}  # when a tenant's last request was submitted

    def name_of(self, claimant: Claimant) -> str:
        """The tenant that the request or job counts for."""
        return claimant.options.tenant if self._is_fair else ""

    def of(self, claimant: Claimant) -> Tenant:
        return self[self.name_of(claimant)]

    def enter(self, claimant: Claimant) -> Tenant:
        """The tenant of a request or job that begins to wait: its first, perhaps."""
        name, weight = self.name_of(claimant), claimant.options.weight
        tenant = self.get(name)
        if tenant is None:
            virtual = max(self._virtual_now, self._ahead.pop(name, 0.0))
            tenant = self[name] = Tenant(name, weight or self._weights.get(name, 1.0), virtual)
        elif weight is not None:
            tenant.weight = weight
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request or job of the tenant ended: its last, perhaps."""
        if tenant.waiting or tenant.rows or tenant.jobs:
            return
        del self[tenant.name]
        if tenant.virtual > self._virtual_now and self._is_fair:
            self._ahead[tenant.name] = tenant.virtual
            if len(self._ahead) > MAX_REMEMBERED:
                now = self._virtual_now
                self._ahead = {name: virtual for name, virtual in self._ahead.items() if virtual > now}

    # -- who is next

    def goes_first(self, first: Claimant, second: Claimant) -> bool:
        """Whether `first` goes ahead of `second`: its tenant is further behind, or the same and it was submitted before."""
        mine, other = self.of(first).virtual, self.of(second).virtual
        return first.arrival < second.arrival if mine == other else mine < other

    def by_share(self, running: list[Request]) -> list[Request]:
        """Running requests, those of tenants with the fewest rows for their weight first."""
        if len(self) < 2:
            return running
        return sorted(running, key=lambda request: (tenant := self.of(request)).rows / tenant.weight)

    def submitted(self, request: Request, now: float) -> None:
        self._submitted_at[self.name_of(request)] = now
        if len(self._submitted_at) > MAX_REMEMBERED:
            self._submitted_at = {name: at for name, at in self._submitted_at.items() if at > now - RECENT_S}

    def others_may_come(self, tenant: Tenant, now: float) -> bool:
        """Whether another tenant without a row submitted something within RECENT_S."""
        return len(self._submitted_at) > 1 and any(
            at > now - RECENT_S and name != tenant.name and (name not in self or not self[name].rows)
            for name, at in self._submitted_at.items()
        )

    # -- what they had

    def started(self, request: Request, tokens: float) -> None:
        """The request got a row, and is going to use about `tokens` tokens of the engine."""
        tenant = self.of(request)
        tenant.rows += 1
        self._virtual_now = max(self._virtual_now, tenant.virtual)
        tenant.virtual += tokens / tenant.weight

    def stopped(self, request: Request, tokens: float) -> None:
        """It gave its row back after `tokens` more tokens than started() was told (negative: fewer)."""
        tenant = self.of(request)
        tenant.rows -= 1
        tenant.virtual += tokens / tenant.weight

    def job_entered(self, job: Claimant) -> None:
        """A job waits beside the requests."""
        self.enter(job).jobs += 1
        self.num_jobs += 1

    def job_started(self, job: Claimant, tokens: int) -> None:
        """It is going to use `tokens` tokens of the engine."""
        tenant = self.of(job)
        # Jobs have rows of their own, and may start while others are further behind: the present is where those are.
        self._virtual_now = max(self._virtual_now, min(other.virtual for other in self.values()))
        tenant.virtual += tokens / tenant.weight

    def job_ended(self, job: Claimant, unused: int) -> None:
        """It ended, and left `unused` of the tokens that it was started with."""
        tenant = self.of(job)
        tenant.jobs -= 1
        self.num_jobs -= 1
        tenant.virtual -= unused / tenant.weight
        self.leave(tenant)


class JobShare:
    """Whether a chunk of the jobs runs after a step, where other tenants' requests share the machine with them.

    Tokens say who is next in a queue, but not how long a chunk takes: a decoded token may cost as much as fifty of a
    prompt. So between steps and chunks the measured time is shared, in proportion to the tenants' weights, as a credit
    of the jobs that steps raise and chunks use up."""

    def __init__(self, tenants: TenantShares):
        self._tenants = tenants
        self._credit_s = 0.0
        self._stepped = False

    def observe_step(self, seconds: float) -> None:
        """A step took `seconds`."""
        if not self._tenants.num_jobs:
            return
        self._stepped = True
        share = self._share()
        # A step is followed by one chunk at most: what jobs could not use they do not keep.
        most = seconds * share / (1 - share)
        self._credit_s = min(self._credit_s, 0.0) + most if share else 0.0

    def observe_chunk(self, seconds: float) -> None:
        """A chunk took `seconds`."""
        if self._share():
            self._credit_s -= seconds

    def may_run(self) -> bool:
        """Whether a chunk may run now; always where no step ran since this was asked last."""
        stepped, self._stepped = self._stepped, False
        return self._credit_s >= 0 or not stepped

    def _share(self) -> float:
        """Of the time, that jobs may have; 0.0: they are alone, or beside requests of their own tenants only. A tenant
        with both has half of its weight in each."""
        weights = jobs = 0.0
        others = False
        for tenant in self._tenants.values():
            has_requests = bool(tenant.rows or tenant.waiting)
            weights += tenant.weight
            others = others or has_requests and len(self._tenants) > 1
            if tenant.jobs:
                jobs += tenant.weight / 2 if has_requests else tenant.weight
        return jobs / weights if others else 0.0


class Pace:
    """Which tenant a step leaves out, so that one with few requests is not slowed by another's many.

    On a CPU a step takes longer the more rows it has, so a flood of one tenant slows the replies of all. With
    generalized processor sharing (Parekh and Gallager 1993) a tenant with half of the weights would have half of its
    speed alone. What its steps took beyond that is its debt, and while it has one, steps leave out the tenant with the
    most rows for its weight. Times are measured; throughput is the price, while two tenants are there.

    times: what a tenant's part of a step would take alone."""

    def __init__(self, tenants: TenantShares, times: ChunkBudget):
        self._tenants, self._times = tenants, times
        self._debts: dict[str, float] = {}  # tenant → seconds, while there is any

    def observe(self, batch: "Batch", seconds: float) -> None:
        """The batch took `seconds`."""
        running, heaviest = self._heaviest()
        if heaviest is None:
            self._debts.clear()
            return
        work: dict[str, list[int]] = {}  # tenant → lines decoded, prompt tokens
        for entry in batch.entries:
            counts = work.setdefault(self._tenants.name_of(entry.request), [0, 0])
            counts[entry.samples != entry.count] += entry.count
        weights = sum(tenant.weight for tenant in running)
        debts = {}
        for tenant in running:
            debt = self._debts.get(tenant.name, 0.0)
            if tenant.name in work and tenant is not heaviest:
                alone = seconds if len(work) == 1 else self._times.alone_s(*work[tenant.name])
                debt += seconds - SHARE_GIVEN * alone * weights / tenant.weight
            if debt > 0:
                debts[tenant.name] = min(debt, MOST_DEBT_S)
        self._debts = debts

    def left_out(self) -> str | None:
        """The tenant whose requests the next step leaves out."""
        if not self._debts:
            return None
        running, heaviest = self._heaviest()
        if heaviest is None or not any(tenant.name in self._debts for tenant in running if tenant is not heaviest):
            return None
        return heaviest.name

    def _heaviest(self) -> tuple[list[Tenant], Tenant | None]:
        """The tenants that run, and the one with the most rows for its weight; None when one is alone."""
        if len(self._tenants) < 2:
            return [], None
        running = [tenant for tenant in self._tenants.values() if tenant.rows]
        if len(running) < 2:
            return running, None
        return running, max(running, key=lambda tenant: tenant.rows / tenant.weight)
