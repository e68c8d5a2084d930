"""Requests that a feature holds back until something that it brings is there; the engine is given them again then."""

from typing import Any

from zse.errors import RequestError
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.batch import StepOutput, timeout_error
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions


class Held:
    """A request that waits. since: when it was submitted."""

    def __init__(self, prompt: list[int], params: Any, options: RequestOptions, now: float):
        self.prompt, self.params, self.options, self.since = prompt, params, options, now

    def deadline_at(self) -> float:
        most = self.options.deadline_ms
        return float("inf") if most is None else self.since + most / 1000


class HoldingFeature(Feature):
    """held: the requests that wait here, by id. A subclass says in `stop` what becomes of what one waited for. part_of: the engine's
    feature that this is a part of, None: it is one itself."""

    part_of: Feature | None = None

    def __init__(self, engine: Any):
        self._engine, self._scheduler, self._cache = engine, engine.scheduler, engine.scheduler.cache
        self._held: dict[int, Any] = {}

    def stop(self, held: Any) -> None:
        """The request is not waited for any more."""
        raise NotImplementedError

    def check_held(self, id: int, prompt: list[int], params: SamplingParams | BeamParams) -> None:
        """Raises RequestError for what the scheduler would refuse."""
        self._scheduler.check_room(id, self._held, len(self._held))
        self._scheduler.limits.check_ids("prompt", prompt)
        if isinstance(params, SamplingParams):
            self._scheduler.limits.max_len(prompt, params)

    def release(self, id: int) -> list[StepOutput]:
        """Give the engine a request again, for whoever comes behind this feature; what there is to tell of it."""
        held = self._held.pop(id)
        after = self.part_of or self
        try:
            self._engine.submit(id, held.prompt, held.params, held.options, held.since, after)
        except RequestError as error:
            return [StepOutput(id, [], None, "error", error=error)]
        return []

    def end_late(self, now: float) -> list[StepOutput]:
        """End those whose deadline has passed."""
        late = [id for id, held in self._held.items() if held.deadline_at() < now]
        for id in late:
            self.stop(self._held.pop(id))
            self._scheduler.counters.timed_out += 1
        return [StepOutput(id, [], None, "timeout", error=timeout_error()) for id in late]

    def cancel(self, id: int) -> bool:
        """Whether the request waited here."""
        if id not in self._held:
            return False
        self.stop(self._held.pop(id))
        self._scheduler.counters.cancelled += 1
        return True

    def num_computed(self, id: int) -> int | None:
        """Nothing of one that waits here."""
        return 0 if id in self._held else None
