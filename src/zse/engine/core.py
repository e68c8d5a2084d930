"""The engine: schedule → submit → collect → commit. It lives in one thread and knows neither sockets nor text.

Where the device works on its own (`runner.runs_ahead`), step n + 1 is given to it before the tokens of step n are read,
so that it never waits for the host: the host's work of a step is hidden behind the device's work of the next.
"""

import os
import time
from functools import cached_property
from typing import Any

from zse.engine.integrity import IntegrityWatch
from zse.engine.messages import Ask
from zse.engine.metrics import BEAM_COUNTERS, JOB_COUNTERS, EngineMetrics
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.batch import Batch, Output
from zse.scheduler.options import DEFAULT, RequestOptions
from zse.scheduler.scheduler import Scheduler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.beams import BeamQueue, OverSearch
    from zse.engine.grammars import GrammarQueue
    from zse.engine.jobs import Job, JobQueue

# A step of this length lets cancellations, heartbeats and other requests' tokens through often enough. Prompts of slow
# models run in chunks that last about this long.
STEP_TARGET_S = 0.5


class Engine:
    """runner: submit(batch) starts a Batch and returns what collect() takes to wait for it; collect gives (token,
    TokenLogprob | None) for each entry that samples, token -1 where the logits were not finite. runs_ahead: whether a
    second batch may be submitted before the first is collected. clock: () → seconds, for queue times only.
    speculator: a zse.speculative Speculator that proposes drafts, or None. model: path of the model, whose tokenizer
    grammars need; without it requests with a grammar are refused. disk: a DiskTier (engine/offload.py), or None.
    warm_grammars: start the process that grammars need in idle time.

    jobs, beams, grammars: what only some requests ask for is imported and made when first used; a step looks at
    those that made() has.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner,
        clock=time.monotonic,
        speculator=None,
        model: str | None = None,
        disk=None,
        warm_grammars: bool = False,
    ):
        self.disk = disk
        self._model, self._warm_grammars = model, warm_grammars
        self.speculator = speculator
        self.scheduler, self.runner, self.metrics = scheduler, runner, EngineMetrics()
        self._clock = clock
        self._flight: tuple[Batch, Any, float] | None = None  # batch, the runner's handle, when it was submitted
        self._news: list[Output] = []  # of steps that score() had to run
        self._collected_at = 0.0
        self._num_scores = 0
        self.integrity = IntegrityWatch(scheduler)

    @cached_property
    def jobs(self) -> "JobQueue":
        """Forwards without sampling."""
        from zse.engine.jobs import JobQueue

        return JobQueue(self.scheduler, self.runner, self.scheduler.max_waiting)

    @cached_property
    def beams(self) -> "BeamQueue":
        """Beam searches."""
        from zse.engine.beams import BeamQueue

        return BeamQueue(self.scheduler)

    @cached_property
    def grammars(self) -> "GrammarQueue":
        """Requests with a grammar, and their masks."""
        from zse.engine.grammars import GrammarQueue

        return GrammarQueue(self.scheduler, self._model, self.runner, warm=self._warm_grammars)

    def made(self, name: str) -> Any:
        """One of the properties above, None before it is first used."""
        return self.__dict__.get(name)

    def submit(self, id: int, prompt: list[int], params: SamplingParams, options: RequestOptions = DEFAULT) -> None:
        """Queue a request. Raises RequestError when it is refused."""
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        seed &= 0xFFFFFFFFFFFFFFFF
        if self.disk is not None:
            self.scheduler.check_ids("prompt", prompt)
            self.disk.fetch(options.salt, prompt)
        if options.structure is not None:
            self.grammars.submit(id, prompt, params, seed=seed, now=self._clock(), options=options)
        else:
            self.scheduler.submit(id, prompt, params, seed=seed, now=self._clock(), options=options)

    def cancel(self, id: int) -> bool:
        """Drop a request in any state; False for an unknown id."""
        features = filter(None, map(self.made, ("jobs", "beams", "grammars")))
        return any(feature.cancel(id) for feature in features) or self.scheduler.cancel(id)

    @property
    def has_work(self) -> bool:
        if self.scheduler.has_work or self._flight is not None or self._news:
            return True
        jobs, grammars = self.made("jobs"), self.made("grammars")
        return bool(jobs and jobs.has_work or grammars and grammars.num_waiting)

    def step(self) -> list[Output]:
        """Finish one batch, having started the next where that can be, and run a chunk of the jobs; news of the
        requests."""
        outputs = self._step_requests()
        jobs = self.made("jobs")
        if jobs is not None and jobs.has_work and jobs.advance(self._clock()):
            self._collected_at = time.perf_counter()
        return outputs

    def _step_requests(self) -> list[Output]:
        outputs, self._news = self._news, []
        grammars, beams = self._live("grammars"), self._live("beams")
        if grammars is not None:
            outputs += grammars.take_compiled(idle=not self.scheduler.has_work and self._flight is None)
        expired = self.scheduler.expire(self._clock())
        if expired and grammars is not None:
            expired = grammars.settle(expired)
        outputs += expired if beams is None else beams.settle(expired)
        flight = self._flight or self._start()
        if flight is not None:
            # Assigned before anything can fail: what is on the device is known.
            self._flight = flight
            waits = self.speculator is not None and self.speculator.waits
            ahead = self._start() if self.runner.runs_ahead and not waits else None
            outputs += self._finish(flight)
            self._flight = ahead
        elif beams is not None and beams.num_live:
            beams.unblock()
        return outputs

    def _live(self, name: str) -> Any:
        """The beams or the grammars, None while no request uses them."""
        feature = self.__dict__.get(name)
        return feature if feature is not None and feature.num_live else None

    def _start(self) -> tuple[Batch, Any, float] | None:
        if self.speculator is not None:
            self.speculator.propose(self.scheduler)
        batch = self.scheduler.schedule(self._clock())
        if batch is None:
            return None
        if self.disk is not None and batch.transfers:
            self.disk.started(batch)
        started = time.perf_counter()  # a CPU runs the batch in submit()
        grammars = self._live("grammars")
        masks = None if grammars is None else grammars.masks(batch, self.runner.lazy_masks)
        return batch, self.runner.submit(batch, masks) if masks is not None else self.runner.submit(batch), started

    def _finish(self, flight: tuple[Batch, Any, float]) -> list[Output]:
        batch, handle, submitted_at = flight
        sampled = self.runner.collect(handle)
        now = time.perf_counter()
        # What was submitted ahead began when the step before it ended.
        seconds = now - max(submitted_at, self._collected_at)
        self._collected_at = now
        num_prompt = batch.num_tokens - batch.num_samples
        if seconds > STEP_TARGET_S or (self.scheduler.is_limited and num_prompt):
            self.scheduler.limit_step(int(batch.num_tokens * STEP_TARGET_S / max(seconds, 1e-6)))
        self.scheduler.observe(batch, seconds)
        jobs, grammars, beams = self.made("jobs"), self.made("grammars"), self._live("beams")
        if jobs is not None and jobs.has_work:
            self.scheduler.job_turns.requests_ran(seconds)
        if self.disk is not None:
            self.disk.finished(batch)
        outputs = self.scheduler.commit(batch, sampled)
        self.integrity.stepped()
        if grammars is not None:
            grammars.busy()
        self.metrics.record_step(num_prompt, sum([len(output.tokens) for output in outputs]), seconds)
        if self.speculator is not None:
            self.speculator.observe(batch, self.scheduler, seconds)
        if beams is not None:
            outputs = beams.settle(outputs)
        return grammars.settle(outputs) if grammars is not None and grammars.num_live else outputs

    def counters(self) -> dict[str, float]:
        """Totals since the start of everything that counts, by name, for the heartbeat."""
        jobs, beams, grammars = self.made("jobs"), self.made("beams"), self.made("grammars")
        totals = (
            self.scheduler.snapshot()
            | self.scheduler.waits.snapshot()
            | self.integrity.counters
            | (JOB_COUNTERS if jobs is None else jobs.counters)
            | (BEAM_COUNTERS if beams is None else beams.counters)
            | ({} if grammars is None else grammars.counters())
        )
        if self.disk is not None:
            totals |= self.disk.snapshot()
        return totals if self.speculator is None else totals | self.speculator.counters(self.scheduler.counters)

    # -- forwards without sampling

    def measure(self, id: int, prompt: list[int], ask: Ask, options: RequestOptions = DEFAULT) -> None:
        """Queue a job (engine/jobs.py); it is among over_jobs() when it ended. Raises RequestError when it is
        refused."""
        self.jobs.submit(id, prompt, ask, options, now=self._clock())

    def search(self, id: int, prompt: list[int], params: BeamParams, options: RequestOptions = DEFAULT) -> None:
        """Start a beam search (engine/beams.py); it is among over_jobs() when it ended. Raises RequestError when it is
        refused."""
        self.beams.submit(id, prompt, params, options, now=self._clock())

    def over_jobs(self) -> "list[Job | OverSearch]":
        """The jobs and searches that ended since last time; each has id, and result or error."""
        return [
            over
            for feature in (self.made("jobs"), self.made("beams"))
            if feature is not None
            for over in feature.take_over()
        ]

    def score(self, token_ids: list[int]):
        """Teacher forcing of one sequence beside the requests: yields for each chunk (start, logprobs, top1, logits).

        logprobs, top1: lists, entry i about the token after token_ids[start + i] (the last token of all has the
        log-probability of token 0: there is no next). logits: memoryview of f32 [n * vocab_size], valid until the next
        step. Requests may run between two chunks. Raises RequestError for ids outside the vocabulary or a sequence
        beyond the context.
        """
        self._num_scores += 1
        job = self.jobs.submit(-self._num_scores, token_ids, Ask("logprobs"), keeps_logits=True)
        try:
            while not job.is_over:
                if self.jobs.advance(self._clock(), only=job):
                    yield job.chunk
                else:  # others hold what it waits for
                    self._news = self.step()
        finally:
            if job.is_over:
                self.jobs.forget(job)
            else:
                self.jobs.cancel(job.id)

    def use_idle_time(self) -> bool:
        """Do something that later requests would wait for, of some milliseconds; False when there is nothing left."""
        if self.runner.record_ahead() or self.disk is not None and self.disk.idle():
            return True
        self.integrity.idle()
        if self._warm_grammars or self.made("grammars") is not None:
            self.grammars.idle(self._clock())
        return False

    def close(self) -> None:
        """Drop every request and free the device."""
        jobs, beams, grammars = self.made("jobs"), self.made("beams"), self.made("grammars")
        if beams is not None:
            beams.close()
        for id in self.scheduler.live_ids():
            self.scheduler.cancel(id)
        for id in jobs.live_ids() if jobs is not None else ():
            jobs.cancel(id)
        if grammars is not None:
            grammars.close()
        if self.disk is not None:
            self.disk.close()
        if self.speculator is not None:
            self.speculator.close()
        self.runner.close()
