"""Drafts as a feature of the step: a Speculator (zse.speculative) proposes before each batch and learns from it."""

from zse.scheduler.batch import Batch, Output
from zse.scheduler.feature import Feature
from zse.scheduler.scheduler import Scheduler
from zse.speculative.speculator import Speculator


class Speculation(Feature):
    """speculator: who proposes."""

    def __init__(self, scheduler: Scheduler, speculator: Speculator):
        self._scheduler, self.speculator = scheduler, speculator

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]
        return self.speculator.waits

    def before_schedule(self, now: float) -> list[Output]:
        self.speculator.propose(self._scheduler)
        return []

    def after_commit(self, batch: Batch, seconds: float) -> None:
        self.speculator.observe(batch, self._scheduler, seconds)

    def counters(self) -> dict[str, float]:
        return self.speculator.counters(self._scheduler.counters)

    def close(self) -> None:
        self.speculator.close()
