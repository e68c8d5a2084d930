"""The engine: schedule → run → commit. It lives in one thread and knows neither sockets nor text.

Where the device works on its own (`runner.runs_ahead`), step n + 1 is given to it before the tokens of step n are read,
so that it never waits for the host: the host's work of a step is hidden behind the device's work of the next. Of a pipeline a
step for each rank is under way (Scheduler.micro_batches).
"""

import os
import time
from typing import Any, NamedTuple

from zse.engine.features import FEATURES
from zse.engine.integrity import IntegrityWatch
from zse.engine.messages import Ask
from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.options import DEFAULT, RequestOptions
from zse.scheduler.request import Request
from zse.scheduler.scheduler import Scheduler


class Flight(NamedTuple):
    """A batch on the device, what runner.collect() takes to wait for it, and when it was submitted."""

    batch: Batch
    handle: Any
    submitted_at: float


class Engine:
    """A scheduler, a runner, and the features that requests have asked for (features.py).

    Args:
        scheduler: owns the requests, rows and pages.
        runner: `submit(batch[, masks])` starts a Batch and returns what `collect()` takes to wait for it; collect gives
            (token, TokenLogprob | None) for each line that is sampled, token -1 where the logits were not finite.
            `runs_ahead`: whether a second batch may be submitted before the first is collected.
        clock: () → seconds, for deadlines and waits in the queue only.
        model: path of the model, whose tokenizer grammars need; without it requests with a grammar are refused.
        warm: names of features that are made in idle time, before a request asks for them.
        encoder: the ModelConfig of an encoder, which takes Asks alone; None of what writes text.
        tower: the TowerPlan of what the model sees with; None: it takes no images.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Any,
        clock=time.monotonic,
        model: str | None = None,
        warm: tuple[str, ...] = (),
        encoder: Any = None,
        tower: Any = None,
    ):
        self.scheduler, self.runner, self.clock = scheduler, runner, clock
        self.model, self.warm = model, warm
        self.integrity = IntegrityWatch(scheduler)
        self.encoder, self.tower = encoder, tower
        self._features: dict[str, Feature] = {}  # that were made, in the table's order
        self._live: list[Feature] = []  # those that a request uses in this step
        self._flights: list[Flight] = []  # oldest first
        self._outputs: list[StepOutput] = []  # of this step
        self._kept: list[StepOutput] = []  # of steps between, for the next one to return
        self._collected_at = 0.0

    # -- requests

    def submit(
        self,
        id: int,
        prompt: list[int],
        params: Any,
        options: RequestOptions = DEFAULT,
        now: float | None = None,
        after: Feature | None = None,
    ) -> None:
        """Queue a request. Raises RequestError when it is refused.

        params: SamplingParams of a reply, which step() tells; or, of what take_completed() gives, Ask (a forward
        without sampling) or BeamParams (a beam search). now: when it was submitted, if a feature has held it. after: the
        feature that held it back: those behind it have their turn."""
        now = self.clock() if now is None else now
        features = list(self._features.values())
        for feature in features[features.index(after) + 1 :] if after is not None else features:
            if "before_submit" in feature.hooks and feature.before_submit(id, prompt, params, options):
                return
        for checking in [name for name, row in FEATURES.items() if row.checks is not None and row.checks(options)]:
            self.feature(checking).check(params, options)
        name = next((name for name, row in FEATURES.items() if row.takes(params, options)), None)
        if self.encoder is not None and not isinstance(params, Ask):
            message = "this model is an encoder and writes no text: it has /v1/embeddings, /v1/rerank and /v1/score"
            raise RequestError(message, code="unsupported_parameter", param="model")
        if name is None:
            self.queue(id, prompt, params, options, now)
        else:
            self.feature(name).submit(id, prompt, params, options, now)

    def queue(self, id: int, prompt: list[int], params: SamplingParams, options: RequestOptions, now: float) -> Request:
        """Give the scheduler a request that was submitted at `now`. Raises RequestError when it is refused."""
        for feature in self._features.values():
            if "before_queue" in feature.hooks:
                feature.before_queue(prompt, options)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        return self.scheduler.submit(id, prompt, params, seed=seed & 0xFFFFFFFFFFFFFFFF, now=now, options=options)

    def cancel(self, id: int) -> bool:
        """Drop a request in any state; False for an unknown id."""
        return any(feature.cancel(id) for feature in self._features.values()) or self.scheduler.cancel(id)

    def drop_session(self, session: str) -> None:
        """Forget what was computed for a session (RequestOptions.session) alone."""
        self.scheduler.cache.drop_session(session)
        for feature in self._features.values():
            feature.drop_session(session)

    def num_computed(self, id: int) -> int:
        """Tokens computed so far for a request that has not ended: of its prompt without what was cached, and made. 0
        for an unknown id."""
        found = [count for feature in self._features.values() if (count := feature.num_computed(id)) is not None]
        return found[0] if found else self.scheduler.num_computed(id)

    def take_completed(self) -> list[Any]:
        """The Asks and beam searches that completed since last time: each has id, and result or error."""
        return [completed for feature in self._features.values() for completed in feature.take_completed()]

    # -- a step

    @property
    def has_work(self) -> bool:
        is_running = bool(self.scheduler.requests or self._flights)
        return is_running or bool(self._kept) or any(feature.has_work for feature in self._features.values())

    def step(self) -> list[StepOutput]:
        """Finish one batch, having started the next ones where they may be under way; what became of the requests."""
        self._live = [feature for feature in self._features.values() if feature.is_live]
        flights = self._flights
        ran = bool(flights) or self._start()
        if ran:
            most = self.scheduler.micro_batches + self.runner.runs_ahead
            waits = most == 1 or any([feature.reads_tokens for feature in self._live])
            while not waits and len(flights) < most and self._start():
                pass
            self._finish(flights[0])
            del flights[0]
        outputs, self._outputs = self._outputs, []
        for feature in self._live:
            if "filter_outputs" in feature.hooks:
                outputs = feature.filter_outputs(outputs)
        if any([feature.after_step(ran) for feature in self._live if "after_step" in feature.hooks]):
            self._collected_at = time.perf_counter()
        kept, self._kept = self._kept, []
        return kept + outputs

    def step_between(self) -> None:
        """A step whose outputs the next step() returns: for features that are not done within one."""
        self._kept = self.step()

    def _start(self) -> bool:
        """Submit the next batch; False when there is none."""
        now = self.clock()
        for feature in self._live:
            if "before_schedule" in feature.hooks:
                self._outputs += feature.before_schedule(now)
        live = self._live  # with those of requests that were held until now
        self._live = [feature for feature in self._features.values() if feature.is_live or feature in live]
        self._outputs += self.scheduler.expire(now)
        batch = self.scheduler.schedule(now)
        if batch is None:
            return False
        started = time.perf_counter()  # a CPU runs the batch in submit()
        asked = [feature.before_run(batch) for feature in self._live if "before_run" in feature.hooks]
        masks = [masks for masks in asked if masks is not None]
        self._flights.append(Flight(batch, self.runner.submit(batch, *masks), started))
        return True

    def _finish(self, flight: Flight) -> None:
        batch = flight.batch
        sampled = self.runner.collect(flight.handle)
        now = time.perf_counter()
        # What was submitted ahead began when the step before it ended.
        seconds = now - max(flight.submitted_at, self._collected_at)
        self._collected_at = now
        for feature in self._live:
            if "before_commit" in feature.hooks:
                feature.before_commit(batch)
        self._outputs += self.scheduler.commit(batch, sampled, seconds)
        if self.scheduler.totals.steps >= self.integrity.due:
            self.integrity.look()
        for feature in self._live:
            if "after_commit" in feature.hooks:
                feature.after_commit(batch, seconds)

    # -- features, and beside the steps

    def feature(self, name: str) -> Any:
        """The feature of this name in FEATURES, made when it is first asked for."""
        if name not in self._features:
            make = FEATURES[name].make
            if make is None:
                raise KeyError(f"the feature {name} is not configured")
            self.use(name, make(self))
        return self._features[name]

    def use(self, name: str, feature: Feature | None) -> None:
        """Let `feature` stand for this name in FEATURES; None: nothing does."""
        found = {**self._features, name: feature}
        self._features = {name: made for name in FEATURES if (made := found.get(name)) is not None}

    @property
    def wake_fds(self) -> list[int]:
        """Of features whose threads have something to tell between steps."""
        return [feature.wake_fd for feature in self._features.values() if feature.wake_fd >= 0]

    def counters(self) -> dict[str, float]:
        """Totals since the start of everything that counts, by name, for the heartbeat."""
        totals = self.scheduler.snapshot() | self.integrity.counters
        for name, row in FEATURES.items():
            totals |= self._features[name].counters() if name in self._features else row.counters
        return totals

    def use_idle_time(self) -> bool:
        """Do something that later requests would wait for, of some milliseconds; False when there is nothing left."""
        if self.runner.record_ahead():
            return True
        for name in self.warm:
            self.feature(name)
        now = self.clock()
        if any(feature.idle(now) for feature in self._features.values()):
            return True
        self.integrity.idle()
        return False

    def close(self) -> None:
        """Drop every request and free the device."""
        for id in list(self.scheduler.requests):
            self.scheduler.cancel(id)
        for feature in self._features.values():
            feature.close()
        self.runner.close()
        if self.tower is not None:
            self.tower.source.close()
