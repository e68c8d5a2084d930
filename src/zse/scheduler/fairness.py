"""How tenants share the time of the engine: who is left out of a step, and how much of it jobs have. Who is next is queue.py's.

Both look on only while there is somebody to share with: Scheduler.commit asks.
"""

from zse.scheduler.budget import StepBudget
from zse.scheduler.queue import FairQueue, Tenant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.scheduler.batch import Batch

SHARE_GIVEN = 0.9  # of the slowdown that shares allow: the rest is for the wait before the first step
MOST_DEBT_S = 0.5  # one slow step is not made good for longer


class JobShare:
    """Whether a chunk of the jobs runs after a step, where other tenants' requests share the machine with them.

    Tokens say who is next in a queue, but not how long a chunk takes: a decoded token may cost as much as fifty of a
    prompt. So between steps and chunks the measured time is shared, in proportion to the tenants' weights, as a credit
    of the jobs that steps raise and chunks use up."""

    def __init__(self, queue: FairQueue):
        self._queue = queue
        self._credit_s = 0.0
        self._stepped = False

    def observe_step(self, seconds: float) -> None:
        """A step took `seconds`, and there are jobs."""
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
        for tenant in self._queue.tenants.values():
            has_requests = bool(tenant.rows or tenant.waiting)
            weights += tenant.weight
            others = others or has_requests and len(self._queue.tenants) > 1
            if tenant.jobs:
                jobs += tenant.weight / 2 if has_requests else tenant.weight
        return jobs / weights if others else 0.0


class Pace:
    """Which tenant a step leaves out, so that one with few requests is not slowed by another's many.

    On a CPU a step takes longer the more rows it has, so a flood of one tenant slows the replies of all. With
    generalized processor sharing (Parekh and Gallager 1993) a tenant with half of the weights would have half of its
    speed alone. What its steps took beyond that is its debt, and while it has one, steps leave out the tenant with the
    most rows for its weight. Times are measured; throughput is the price, while two tenants are there.

    budget: knows what a tenant's part of a step would take alone. debts: tenant → seconds, while there is any."""

    def __init__(self, queue: FairQueue, budget: StepBudget):
        self._queue, self._budget = queue, budget
        self.debts: dict[str, float] = {}

    def observe(self, batch: "Batch", seconds: float) -> None:
        """The batch took `seconds`."""
        running, heaviest = self._heaviest()
        if heaviest is None:
            self.debts.clear()
            return
        work: dict[str, list[int]] = {}  # tenant → lines decoded, prompt tokens
        for entry in batch.entries:
            counts = work.setdefault(entry.request.tenant.name, [0, 0])
            counts[entry.samples != entry.count] += entry.count
        weights = sum(tenant.weight for tenant in running)
        debts = {}
        for tenant in running:
            debt = self.debts.get(tenant.name, 0.0)
            if tenant.name in work and tenant is not heaviest:
                alone = seconds if len(work) == 1 else self._budget.alone_s(*work[tenant.name])
                debt += seconds - SHARE_GIVEN * alone * weights / tenant.weight
            if debt > 0:
                debts[tenant.name] = min(debt, MOST_DEBT_S)
        self.debts = debts

    def left_out(self) -> Tenant | None:
        """The tenant whose requests the next step leaves out, where there are debts."""
        running, heaviest = self._heaviest()
        is_owed = any(tenant.name in self.debts for tenant in running if tenant is not heaviest)
        return heaviest if is_owed else None

    def _heaviest(self) -> tuple[list[Tenant], Tenant | None]:
        """The tenants that run, and the one with the most rows for its weight; None when one is alone."""
        running = [tenant for tenant in self._queue.tenants.values() if tenant.rows]
        if len(running) < 2:
            return running, None
        return running, max(running, key=lambda tenant: tenant.rows / tenant.weight)
