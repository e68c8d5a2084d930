"""The engine: schedule → run → commit. It lives in one thread and knows neither sockets nor text."""

import os
import time
from array import array

from zse.engine.metrics import EngineMetrics
from zse.sampling.params import SamplingParams
from zse.sampling.validate import check_params
from zse.scheduler.scheduler import Output, Scheduler

# A step of this length lets cancellations, heartbeats and other requests' tokens through often enough. Prompts of slow
# models run in chunks that last about this long.
STEP_TARGET_S = 0.5


class Engine:
    """runner: runs a Batch and returns (token, TokenLogprob | None) for each entry that samples, token -1 where the
    logits were not finite; has close(). clock: () → seconds, for queue times only."""

    def __init__(self, scheduler: Scheduler, runner, clock=time.monotonic):
        self.scheduler, self.runner, self.metrics = scheduler, runner, EngineMetrics()
        self._clock = clock

    def submit(self, id: int, prompt: list[int], params: SamplingParams) -> None:
        """Queue a request. Raises RequestError when it is refused."""
        check_params(params)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        self.scheduler.submit(id, prompt, params, seed=seed & 0xFFFFFFFFFFFFFFFF, now=self._clock())

    def cancel(self, id: int) -> bool:
        """Drop a request in any state; False for an unknown id."""
        return self.scheduler.cancel(id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """Run one batch; news of the requests in it."""
        batch = self.scheduler.schedule(self._clock())
        if batch is None:
            return []
        start = time.perf_counter()
        sampled = self.runner.run(batch)
        seconds = time.perf_counter() - start
        self.metrics.record_step(batch.num_tokens, batch.num_samples, seconds)
        if seconds > STEP_TARGET_S or (self.scheduler.is_limited and batch.num_tokens > batch.num_samples):
            self.scheduler.limit_step(int(batch.num_tokens * STEP_TARGET_S / seconds))
        return self.scheduler.commit(batch, sampled)

    def score(self, token_ids: list[int]):
        """Teacher forcing of one sequence beside the requests: yields (start, logprobs, top1, logits) as Runner.score.

        Raises RequestError for ids outside the vocabulary, a sequence beyond the context, or pages that are taken.
        """
        pages = self.scheduler.borrow_pages(token_ids)
        try:
            yield from self.runner.score(array("i", token_ids), pages)
        finally:
            self.scheduler.return_pages(pages)

    def close(self) -> None:
        """Drop every request and free the device."""
        for id in self.scheduler.live_ids():
            self.scheduler.cancel(id)
        self.runner.close()
