"""The engine: schedule → submit → collect → commit. It lives in one thread and knows neither sockets nor text.

Where the device works on its own (`runner.runs_ahead`), step n + 1 is given to it before the tokens of step n are read,
so that it never waits for the host: the host's work of a step is hidden behind the device's work of the next.
"""

import os
import time
from array import array
from typing import Any

from zse.engine.metrics import EngineMetrics
from zse.sampling.params import SamplingParams
from zse.sampling.validate import check_params
from zse.scheduler.options import DEFAULT, RequestOptions
from zse.scheduler.scheduler import Batch, Output, Scheduler

# A step of this length lets cancellations, heartbeats and other requests' tokens through often enough. Prompts of slow
# models run in chunks that last about this long.
STEP_TARGET_S = 0.5


class Engine:
    """runner: submit(batch) starts a Batch and returns what collect() takes to wait for it; collect gives (token,
    TokenLogprob | None) for each entry that samples, token -1 where the logits were not finite. runs_ahead: whether a
    second batch may be submitted before the first is collected. clock: () → seconds, for queue times only."""

    def __init__(self, scheduler: Scheduler, runner, clock=time.monotonic):
        self.scheduler, self.runner, self.metrics = scheduler, runner, EngineMetrics()
        self._clock = clock
        self._flight: tuple[Batch, Any, float] | None = None    # batch, the runner's handle, when it was submitted
        self._news: list[Output] = []                           # of steps that were finished before score()
        self._collected_at = 0.0

    def submit(self, id: int, prompt: list[int], params: SamplingParams,
               options: RequestOptions = DEFAULT) -> None:
        """Queue a request. Raises RequestError when it is refused."""
        check_params(params)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        self.scheduler.submit(id, prompt, params, seed=seed & 0xFFFFFFFFFFFFFFFF, now=self._clock(),
                              options=options)

    def cancel(self, id: int) -> bool:
        """Drop a request in any state; False for an unknown id."""
        return self.scheduler.cancel(id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._flight is not None or bool(self._news)

    def step(self) -> list[Output]:
        """Finish one batch, having started the next where that can be; news of the requests."""
        outputs, self._news = self._news, []
        flight = self._flight or self._start()
        if flight is not None:
            # Assigned before anything can fail: what is on the device is known.
            self._flight = flight
            ahead = self._start() if self.runner.runs_ahead else None
            outputs += self._finish(flight)
            self._flight = ahead
        return outputs

    def _start(self) -> tuple[Batch, Any, float] | None:
        batch = self.scheduler.schedule(self._clock())
        if batch is None:
            return None
        started = time.perf_counter()   # a CPU runs the batch in submit()
        return batch, self.runner.submit(batch), started

    def _finish(self, flight: tuple[Batch, Any, float]) -> list[Output]:
        batch, handle, submitted_at = flight
        sampled = self.runner.collect(handle)
        now = time.perf_counter()
        # What was submitted ahead began when the step before it ended.
        seconds = now - max(submitted_at, self._collected_at)
        self._collected_at = now
        self.metrics.record_step(batch.num_tokens, batch.num_samples, seconds)
        if seconds > STEP_TARGET_S or (self.scheduler.is_limited and batch.num_tokens > batch.num_samples):
            self.scheduler.limit_step(int(batch.num_tokens * STEP_TARGET_S / max(seconds, 1e-6)))
        return self.scheduler.commit(batch, sampled)

    def _settle(self) -> None:
        """Finish what is in flight; its news comes with the next step()."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._news += self._finish(flight)

    def score(self, token_ids: list[int]):
        """Teacher forcing of one sequence beside the requests: yields (start, logprobs, top1, logits) as Runner.score.

        Raises RequestError for ids outside the vocabulary, a sequence beyond the context, or pages that are taken.
        """
        self._settle()
        pages = self.scheduler.borrow_pages(token_ids)
        try:
            chunks = self.runner.score(array("i", token_ids), pages)
            while True:
                self._settle()
                chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            self.scheduler.return_pages(pages)

    def close(self) -> None:
        """Drop every request and free the device."""
        for id in self.scheduler.live_ids():
            self.scheduler.cancel(id)
        self.runner.close()
