"""Records what a pipeline's rank has of a step: the stream comes from the rank before and goes to the next; from the last it comes
back to rank 0, which has the head."""

from typing import Any

from zse.plan.record import Planner
from zse.tensor import Tensor


class StagePlanner(Planner):
    """returns: whether the stream of what is recorded next comes back to rank 0. cut: how many launches of what rank 0 recorded
    last come before that; None: it does not."""

    cut: int | None = None

    def __init__(self, *args: Any, **options: Any):
        self._returns = True
        super().__init__(*args, **options)

    @property
    def returns(self) -> bool:
        return self._returns

    @returns.setter
    def returns(self, wanted: bool) -> None:
        self._returns, self.cut = wanted, None
        self._layers[-1] = self._hops[wanted]

    def record_hidden(self, recorder: Any, **options: Any) -> Tensor:
        hidden = super().record_hidden(recorder, **options)
        if self._ends:
            self.group.receive(recorder, hidden)
        return hidden

    def _record_end(self, run: Any, logits: Any, wanted: Any, max_rows: int, every_token: bool | None) -> Any:
        if not self._ends or not self._returns:
            return logits
        if every_token is not None:
            self.cut = len(run.recorder.launches)
            self.group.receive(run.recorder, run.of(self.hidden))
        return super()._record_end(run, logits, wanted, max_rows, every_token)
