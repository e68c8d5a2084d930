"""Whether a chunk of the jobs runs after a step, where other tenants' requests share the machine with them.

Tokens say who is next in a queue (queue.py), but not how long a chunk takes: a decoded token may cost as much as fifty of
a prompt. So between steps and chunks the measured time is shared, in proportion to weights, as a credit of the jobs that
steps raise and chunks use up.
"""

from zse.scheduler.queue import WaitingQueue


class JobTurns:
    """queue: whose tenants' weights are the shares."""

    def __init__(self, queue: WaitingQueue):
        self._queue = queue
        self._credit_s = 0.0
        self._stepped = False

    def requests_ran(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._stepped = True
        share = self._share()
        # What jobs could not use, since a step is followed by one chunk at most, they do not keep.
        most = seconds * share / (1 - share)
        self._credit_s = min(self._credit_s, 0.0) + most if share else 0.0

    def jobs_ran(self, seconds: float) -> None:
        """A chunk took `seconds`."""
        if self._share():
            self._credit_s -= seconds

    def may_run(self) -> bool:
        """Whether it is the jobs' turn. It is where no step ran since this was asked last."""
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
