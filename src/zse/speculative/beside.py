"""What drafts by running something beside the model, a smaller one or its own next-token block, with pages of its own."""

from typing import Any

from zse.cache.groups import PageGeometry
from zse.cache.manager import CacheManager
from zse.cache.pages import PageAllocator
from zse.scheduler.request import RUNNING, Request
from zse.scheduler.scheduler import Scheduler
from zse.speculative.speculator import Speculator, StepCost


class BesideSpeculator(Speculator):
    """runner: what runs it, on the model's device, with as many rows as the model's, num_pages pages of page_size tokens and steps of
    max_tokens. max_context: its own. share: of the model's weights that one round reads, in bytes."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Any,
        *,
        draft_tokens: int,
        family: str,
        runs_ahead: bool,
        num_pages: int,
        page_size: int,
        max_tokens: int,
        max_context: int,
        share: float,
    ):
        super().__init__(scheduler, draft_tokens, family, runs_ahead)
        self.runner, self._share = runner, share
        self.cache = CacheManager(PageAllocator(num_pages), geometry=PageGeometry(page_size=page_size))
        self._max_tokens, self._max_context = max_tokens, max_context
        self._round_cost = StepCost(family)
        # Requests that have pages here, each as of one residency.
        self._followed: dict[Request, Any] = {}

    def close(self) -> None:
        """Drop the graphs. The device is the model's."""
        for request in list(self._followed):
            self._release(request)
        self.runner.drop_graphs()

    def _room_of(self, request: Request) -> int:
        """Tokens that may follow the last."""
        return min(request.max_len, self._max_context) - len(request.tokens) - 1

    def _round_s(self, rows: int) -> float:
        if self._round_cost.num_steps:
            return self._round_cost.seconds(rows)
        return self._share * self.cost.seconds(rows)

    def _forget(self) -> None:
        """Release what requests that ended or gave up their row had."""
        for request, followed in list(self._followed.items()):
            if request.state is not RUNNING or request.residency != followed.residency:
                self._release(request)

    def _release(self, request: Request) -> None:
        self.cache.release(request.id)
        del self._followed[request]
