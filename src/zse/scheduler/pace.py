"""Steps by shares: a tenant with few requests is not slowed by another's many beyond its share of the machine.

On a CPU a step takes longer the more rows it has, so a flood of one tenant slows the replies of all. With generalized
processor sharing (Parekh and Gallager 1993) a tenant with half of the weights would go on at half of its speed alone. So
what its steps took beyond that is its debt, and while it has one, the tenant with the most rows for its weight is held
back: steps run without it until the debt is gone. Times are measured; throughput is the price, while two are there.
"""

from zse.scheduler.budget import ChunkBudget
from zse.scheduler.queue import Tenant, WaitingQueue

SHARE_GIVEN = 0.9  # of the slowdown that shares allow: the rest is for the wait before the first step
MOST_DEBT_S = 0.5  # one slow step is not made good for longer


class Pace:
    """queue: whose tenants share the steps. times: what a tenant's part of a step would take alone."""

    def __init__(self, queue: WaitingQueue, times: ChunkBudget):
        self._queue, self._times = queue, times
        self._debts: dict[str, float] = {}  # tenant → seconds, while there is any

    def _heaviest(self) -> tuple[list[Tenant], Tenant | None]:
        """The tenants that run, and the one with the most rows for its weight; None when one is alone."""
        tenants = [tenant for tenant in self._queue.tenants.values() if tenant.rows]
        if len(tenants) < 2:
            return tenants, None
        return tenants, max(tenants, key=lambda tenant: tenant.rows / tenant.weight)

    def observe(self, batch, seconds: float) -> None:
        """The batch took `seconds`."""
        if len(self._queue.tenants) < 2:
            self._debts.clear()
            return
        tenants, heaviest = self._heaviest()
        if heaviest is None:
            self._debts.clear()
            return
        work: dict[str, list[int]] = {}  # tenant → lines decoded, prompt tokens
        for entry in batch.entries:
            lines, prompt = work.setdefault(self._queue.name_of(entry.request), [0, 0])
            decodes = entry.samples == entry.count
            work[self._queue.name_of(entry.request)] = [
                lines + entry.count * decodes,
                prompt + entry.count * (not decodes),
            ]
        weights = sum(tenant.weight for tenant in tenants)
        debts = {}
        for tenant in tenants:
            debt = self._debts.get(tenant.name, 0.0)
            if tenant.name in work and tenant is not heaviest:
                alone = seconds if len(work) == 1 else self._times.alone_s(*work[tenant.name])
                debt += seconds - SHARE_GIVEN * alone * weights / tenant.weight
            if debt > 0:
                debts[tenant.name] = min(debt, MOST_DEBT_S)
        self._debts = debts

    def held(self) -> str | None:
        """The tenant whose requests the next step leaves out."""
        if not self._debts:
            return None
        tenants, heaviest = self._heaviest()
        if heaviest is None or not any(tenant.name in self._debts for tenant in tenants if tenant is not heaviest):
            return None
        return heaviest.name
