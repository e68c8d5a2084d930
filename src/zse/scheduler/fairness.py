"""How tenants share the time of the engine: who is left out of a step, how long it may take, and how much of it jobs
have. Who is next is queue.py's.

Both look on only while there is somebody to share with: Scheduler.commit asks.
"""

from bisect import bisect_right
from collections.abc import Collection
from typing import NamedTuple

from zse.scheduler.queue import RECENT_S, FairQueue, Tenant
from zse.scheduler.request import Request, age_order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.scheduler.batch import Batch, StepBudget
    from zse.scheduler.lifecycle import Lifecycle

SHARE_GIVEN = 0.9  # of the slowdown that shares allow: the rest is for the wait before the first step
MOST_DEBT_S = 0.5  # one slow step is not made good for longer
# A tenant that was away comes back so far behind the others, and a prompt of its runs alone until they are even.
CREDIT_S = 0.5
# Nobody is left out for longer at a time, however many tenants come.
MOST_LEFT_OUT_S = 0.5
# Of what a tenant's prompt takes alone, that a step of others may take: with it the prompt has twice the time, and
# the rest is for what comes between.
STEP_SHARE = 0.75
# A step is not made shorter than so many steps of one row: each reads the weights, whatever its rows, and throughput is
# the price.
LEAST_STEPS = 7
# The work of a step in rows that decode: what a prompt token counts, and how much at least there is. How much fits
# follows what steps take, for rows and tokens cost what their contexts are and what else the machine does.
TOKEN_WORK, LEAST_WORK = 0.75, 4.0
NEWEST_PROMPT, NEWEST_STEP = 1 / 4, 1 / 4  # weights in running means


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


class StepPlan(NamedTuple):
    """What a step leaves to later ones. left_out: tenants of which nothing runs. resting: requests that do not decode,
    theirs among them. max_prompt: prompt tokens at most."""

    left_out: Collection[Tenant] = ()
    resting: Collection[Request] = ()
    max_prompt: int = 1 << 30


EVERYBODY = StepPlan()


class Pace:
    """What a step leaves out, so that a tenant with few requests is not slowed by another's many.

    On a CPU a step takes longer the more rows and prompt tokens it has, so a flood of one tenant slows all. Times are
    measured; throughput is the price, while two tenants are there. Three rules:

    1. A prompt of a tenant that had less of the engine's time than others, and has fewer rows, runs without these. Time is
       counted by weight, as start-time fair queueing counts tokens: a tenant that was away starts CREDIT_S behind the present.
    2. Who comes waits for the step that runs. So while a tenant that had less may come, steps of the others are not longer
       than STEP_SHARE of what its prompts take: as many of their rows decode, in turn, and as many prompt tokens run.
    3. With generalized processor sharing (Parekh and Gallager 1993) a tenant with half of the weights would have half of
       its speed alone. What its steps took beyond that is its debt, and while it has one, steps leave out the tenant with the
       most rows for its weight.

    budget: knows what a tenant's part of a step would take alone. debts: tenant → seconds, while there is any."""

    def __init__(self, life: "Lifecycle", budget: "StepBudget"):
        self._life, self._queue, self._budget = life, life.queue, budget
        self.debts: dict[str, float] = {}
        self._present_s = 0.0  # service_s of the running tenant that had least
        self._left_out_s = 0.0  # how long somebody has been left out
        self._step_s = self._work = (
            0.0  # how long a step may be, 0: as long as it is; and how much fits, 0: not measured
        )
        self._last: tuple = ()  # age_order() of the last request that decoded in its turn

    # -- before a step

    def plan(self) -> StepPlan:
        """What the next step leaves to later ones."""
        queue, running, now = self._queue, self._life.running, self._life.now
        self._step_s = 0.0
        visitors = [
            name
            for name, visitor in queue.visitors.items()
            if visitor.seen_at > now - RECENT_S or name in queue.tenants
        ]
        if len(visitors) < 2:
            queue.forget_visitors(now)
            return EVERYBODY
        present = [tenant for tenant in queue.tenants.values() if tenant.rows]
        newcomer = self._newcomer() if self._left_out_s < MOST_LEFT_OUT_S else None
        left_out = []
        if newcomer is not None:
            had_more = self._had_more(present, self._service_s(newcomer.name))
            left_out = [other for other in had_more if newcomer.rows * other.weight < other.rows * newcomer.weight]
        if not left_out and self.debts:
            _, heaviest = self._heaviest()
            if heaviest is not None and any(tenant.name in self.debts for tenant in present if tenant is not heaviest):
                left_out = [heaviest]
        if left_out:
            return StepPlan(left_out, {request for request in running if request.tenant in left_out})
        return self._shorter(present, visitors)

    def _newcomer(self) -> Tenant | None:
        """Of the tenants with a prompt to compute the one that had least."""
        life = self._life
        coming = {request.tenant for request in life.running if len(request.tokens) - request.computed_len > 1}
        coming |= {
            other for other in self._queue.tenants.values() if other.waiting and life.may_start(other.waiting[0])
        }
        return min(coming, key=lambda tenant: self._service_s(tenant.name), default=None)

    def _shorter(self, present: list[Tenant], visitors: list[str]) -> StepPlan:
        """A step of everybody that is as long as one of the visitors may wait."""
        most = max((self._service_s(tenant.name) for tenant in present), default=0.0)
        guests = [name for name in visitors if self._service_s(name) < most and self._queue.visitors[name].prompt_s]
        if not guests:
            return EVERYBODY
        prompt_s = min(self._queue.visitors[name].prompt_s for name in guests)
        self._step_s = max(STEP_SHARE * prompt_s, LEAST_STEPS * self._budget.alone_s(1, 0))
        if not self._work:
            return EVERYBODY
        decoding = [
            request
            for request in self._life.running
            if len(request.tokens) + request.pending - request.computed_len == 1
        ]
        has_prompts = len(decoding) < len(self._life.running) or bool(self._queue.num_waiting and self._life.free_rows)
        most_rows = self._work * (1 - 1 / self._budget.ratio) if has_prompts else self._work
        heavy = self._had_more(present, min(map(self._service_s, guests)))
        resting = self._resting(decoding, heavy, int(most_rows))
        left = self._work - (len(decoding) - len(resting))
        return StepPlan((), resting, max(int(left / TOKEN_WORK), 1))

    def _resting(self, decoding: list[Request], heavy: list[Tenant], most: int) -> set[Request]:
        """Requests of these tenants that leave this step to the others' `most`: they decode in turn."""
        rows = [request for request in decoding if request.tenant in heavy]
        most = max(most - (len(decoding) - len(rows)), 1)
        if len(rows) <= most:
            return set()
        first = bisect_right(rows, self._last, key=age_order) if self._last else 0
        chosen = (rows[first:] + rows[:first])[:most]
        self._last = age_order(chosen[-1])
        return set(rows).difference(chosen)

    def _had_more(self, present: list[Tenant], service_s: float) -> list[Tenant]:
        return [tenant for tenant in present if self._service_s(tenant.name) > service_s]

    def _service_s(self, name: str) -> float:
        visitor = self._queue.visitors.get(name)
        return max(self._present_s - CREDIT_S, 0.0 if visitor is None else visitor.service_s)

    # -- behind it

    def observe(self, batch: "Batch", seconds: float) -> None:
        """The batch took `seconds`."""
        work: dict[str, list[int]] = {}  # tenant → lines decoded, prompt tokens
        for place, entry in enumerate(batch.entries):
            counts = work.setdefault(entry.request.tenant.name, [0, 0])
            counts[place >= batch.num_rows and entry.samples != entry.count] += entry.count
        self._count_service(seconds, work)
        self._time_prompts(batch, seconds, len(work) == 1)
        if self._step_s:
            num_prompt = batch.num_tokens - batch.num_decode
            self._fit(batch.num_rows + TOKEN_WORK * num_prompt, seconds)
        self._count_debts(seconds, work)

    def _time_prompts(self, batch: "Batch", seconds: float, is_alone: bool) -> None:
        """What prompts take that ended in this step: what it took, where one tenant had all of it and they began in
        it."""
        for entry in batch.entries[batch.num_rows :]:
            request, visitor = entry.request, self._queue.visitors.get(entry.request.tenant.name)
            if visitor is None or entry.start + entry.count != request.prompt_len:
                continue
            known, computed = visitor.prompt_s, request.prompt_len - max(request.cached_len, 0)
            prompt_s = seconds if is_alone and entry.count == computed else self._budget.token_s * computed
            visitor.prompt_s = known + (min(prompt_s, 4 * known) - known) * NEWEST_PROMPT if known else prompt_s

    def _fit(self, work: float, seconds: float) -> None:
        """How much fits a step, by one of so much work that took `seconds`."""
        is_longer = seconds > self._step_s
        fits = max(work * min(max(self._step_s / seconds, 0.5), 2.0), LEAST_WORK)
        if not self._work:
            self._work = fits
        elif is_longer and fits < self._work or not is_longer and work > 0.8 * self._work:
            self._work += (fits - self._work) * NEWEST_STEP

    def _count_service(self, seconds: float, work: dict[str, list[int]]) -> None:
        visitors, tenants = self._queue.visitors, self._queue.tenants
        alone = {name: self._budget.alone_s(*counts) for name, counts in work.items()}
        total = sum(alone.values()) or 1.0
        for name, part in alone.items():
            if name in visitors and name in tenants:
                share = part / total if len(alone) > 1 else 1.0
                visitors[name].service_s = self._service_s(name) + seconds * share / tenants[name].weight
        present = [name for name, tenant in tenants.items() if tenant.rows]
        self._present_s = max(self._present_s, min(map(self._service_s, present), default=0.0))
        self._left_out_s = self._left_out_s + seconds if any(name not in work for name in present) else 0.0

    def _count_debts(self, seconds: float, work: dict[str, list[int]]) -> None:
        running, heaviest = self._heaviest()
        if heaviest is None:
            self.debts.clear()
            return
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

    def _heaviest(self) -> tuple[list[Tenant], Tenant | None]:
        """The tenants that run, and the one with the most rows for its weight; None when one is alone."""
        running = [tenant for tenant in self._queue.tenants.values() if tenant.rows]
        if len(running) < 2:
            return running, None
        return running, max(running, key=lambda tenant: tenant.rows / tenant.weight)
