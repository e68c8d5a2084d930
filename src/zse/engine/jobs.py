"""Jobs: forwards without sampling beside the requests: embeddings, log-probabilities of a prompt, of chosen tokens.

A chunk of the jobs at the head of the queue runs between two steps, as long as a chunk of a prompt would be, on pages
of the requests' pool. What a job uses counts as its tenant's: the tenant that is furthest behind goes first, a job and
the requests get pages in one order (scheduler/lifecycle.py), and beside other tenants' requests chunks have their
tenants' share of the time (scheduler/fairness.py).

Jobs compute all of their tokens: what they want of most of them, a hidden state or a line of logits, is in no cache.
But a prompt whose log-probabilities were all finite is left to the prefix cache, for the reply to it."""

import math
import time
from array import array
from bisect import insort
from typing import Any

from zse.engine import pooling
from zse.engine.forwards import Line, Piece
from zse.engine.messages import POOLINGS, Ask, Measured, TokenLogprob
from zse.engine.metrics import JOB_COUNTERS
from zse.engine.step import ENCODER_ROWS, JOB_ROWS
from zse.errors import RequestError
from zse.lazy import numpy as np
from zse.scheduler.batch import numerical_error, timeout_error, tired_error
from zse.scheduler.feature import Feature
from zse.scheduler.options import DEFAULT, RequestOptions
from zse.scheduler.queue import Tenant
from zse.scheduler.request import salt_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from zse.engine.core import Engine

# Jobs at once may hold this share of all pages; a single one may hold them all.
PAGE_SHARE = 0.25


class Job:
    """One sequence. computed_len: how much of it has run. result: its Measured once it ended well; error: the
    RequestError that ended it. keeps_logits: chunks yields (start, log-probabilities, likeliest tokens, logits)."""

    tenant: Tenant  # the queue's

    def __init__(
        self,
        id: int,
        tokens: list[int],
        ask: Ask,
        options: RequestOptions,
        arrival: int,
        now: float,
        keeps_logits: bool = False,
    ):
        self.id, self.tokens, self.ask, self.options, self.arrival = id, array("i", tokens), ask, options, arrival
        self.submitted_at = now
        self.keeps_logits = keeps_logits
        self.pages: list[int] = []
        self.row = -1
        self.computed_len = 0
        self.result: Measured | None = None
        self.error: RequestError | None = None
        self.logprobs: list[TokenLogprob | None] = [] if ask.first else [None]
        # Of hidden states; a classifier's are pooled as the model's files say.
        self.pool: pooling.StatePool | None = None
        self.chunk: Any = None

    @property
    def is_completed(self) -> bool:
        return self.result is not None or self.error is not None

    def order(self) -> tuple[int, int]:
        return -self.options.priority, self.arrival


def check_ask(ask: Ask, encoder: Any, tokens: list[int], max_tokens: int) -> None:
    """RequestError where the model cannot answer, or a text does not fit a step of an encoder. encoder: its
    ModelConfig, or None."""
    if ask.what == "labels" and not (encoder and encoder.num_labels):
        raise RequestError("this model is no cross-encoder: it has no classifier", code="unsupported_parameter")
    if encoder and ask.what in ("logprobs", "targets"):
        raise RequestError("this model is an encoder: it has no next token", code="unsupported_parameter")
    if encoder and len(tokens) > max_tokens:
        message = (
            f"a text of {len(tokens)} tokens: an encoder takes it in one step, of {max_tokens} (--max-tokens-per-step)"
        )
        raise RequestError(message, code="context_length_exceeded")


class JobQueue(Feature):
    """The jobs of an engine: its scheduler lends the pages, its runner's forwards run the chunks."""

    def __init__(self, engine: "Engine"):
        self._engine, self._scheduler = engine, engine.scheduler
        self._queue = engine.scheduler.queue
        self._jobs: dict[int, Job] = {}
        self._waiting: list[Job] = []
        self._active: list[Job] = []
        self._encoder = engine.encoder
        self._num_rows = JOB_ROWS if self._encoder is None else ENCODER_ROWS
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self._completed: list[Job] = []
        self._num_scores = 0
        self._counters = dict(JOB_COUNTERS)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._jobs)

    is_live = has_work

    def submit(
        self, id: int, tokens: list[int], ask: Ask, options: RequestOptions, now: float, keeps_logits: bool = False
    ) -> Job:
        """Queue a job. Raises RequestError when it can never run or the queue is full."""
        try:
            self._scheduler.check_room(id, self._jobs, len(self._waiting))
            self._scheduler.limits.check_ids("targets", ask.targets)
            self._scheduler.limits.check_job(tokens)
        except RequestError:
            self._counters["jobs_refused"] += 1
            raise
        check_ask(ask, self._encoder, tokens, self._scheduler.budget.max_tokens)
        job = self._jobs[id] = Job(id, tokens, ask, options, self._scheduler.num_arrivals, now, keeps_logits)
        kind = (self._encoder.pooling or "cls") if ask.what == "labels" else ask.what
        if kind in POOLINGS:
            job.pool = pooling.StatePool(kind)
        insort(self._waiting, job, key=Job.order)
        self._queue.enter_job(job)
        self._counters["jobs_submitted"] += 1
        return job

    def cancel(self, id: int) -> bool:
        """Drop a job in any state; False for an unknown or finished one."""
        job = self._jobs.get(id)
        if job is None:
            return False
        self._counters["jobs_cancelled"] += 1
        self._remove(job)
        return True

    def num_computed(self, id: int) -> int | None:
        job = self._jobs.get(id)
        return None if job is None else job.computed_len

    def take_completed(self) -> list[Job]:
        completed, self._completed = self._completed, []
        return completed

    def counters(self) -> dict[str, float]:
        return self._counters

    def close(self) -> None:
        for id in list(self._jobs):
            self.cancel(id)

    def score(self, token_ids: list[int]) -> "Iterator[tuple]":
        """Teacher forcing of one sequence beside the requests: yields for each chunk (start, logprobs, top1, logits).

        logprobs, top1: lists, entry i about the token after token_ids[start + i] (the last token of all has the
        log-probability of token 0: there is no next). logits: memoryview of f32 [n * vocab_size], valid until the next
        step. Requests may run between two chunks; where they need its pages, it begins anew. Raises RequestError for ids
        outside the vocabulary or a sequence beyond the context.
        """
        self._num_scores += 1
        id, told = -self._num_scores, 0
        job = self.submit(id, token_ids, Ask("logprobs"), DEFAULT, 0.0, keeps_logits=True)
        try:
            while not job.is_completed:
                if id not in self._jobs:  # see after_step
                    job = self.submit(id, token_ids, Ask("logprobs"), DEFAULT, 0.0, keeps_logits=True)
                if not self.advance(only=job):  # others hold what it waits for
                    self._engine.step_between()
                elif job.computed_len > told:
                    start, logprobs, top1, logits = job.chunk
                    old, told = max(told - start, 0), job.computed_len
                    yield start + old, logprobs[old:], top1[old:], logits[old * self._scheduler.vocab_size :]
        finally:
            if not job.is_completed:
                self.cancel(job.id)
            elif job in self._completed:
                self._completed.remove(job)

    def after_step(self, ran: bool) -> bool:
        advanced = self.advance()
        # Where nothing can run, what score() has computed makes room: who reads it may be the one that waits.
        for job in [job for job in self._active if job.keeps_logits and not (ran or advanced)]:
            self._remove(job)
        return advanced

    def advance(self, only: Job | None = None) -> bool:
        """Run one chunk; False when nothing could run (no jobs, or no pages for them). only: of this job alone."""
        if not self._jobs:
            return False
        self._drop_late(self._engine.clock())
        if only is None and not self._scheduler.job_share.may_run():
            return False
        self._admit()
        pieces = self._pieces(only)
        if not pieces:
            return False
        runner = self._engine.runner
        forwards = runner.forwards
        if transfers := self._scheduler.cache.take_transfers():
            runner.pages.run(transfers)  # of what was cached in the pages that the jobs borrowed
        started = time.perf_counter()
        forwards.run([piece for _, piece in pieces])
        self._read(forwards, pieces)
        seconds = time.perf_counter() - started
        count = sum(piece.num_tokens for _, piece in pieces)
        self._scheduler.observe_jobs(count, seconds)
        self._counters["job_tokens"] += count
        ended = []
        for job, piece in pieces:
            job.computed_len += piece.num_tokens
            if not job.is_completed and job.computed_len == len(job.tokens):
                ended.append(job)
        vectors = self._vectors([job for job in ended if job.pool is not None])
        for job in ended:
            self._finish(job, vectors.get(job.id))
        return True

    # -- inside a chunk

    def _drop_late(self, now: float) -> None:
        for job in list(self._waiting):
            options, waited_s = job.options, now - job.submitted_at
            if options.deadline_ms is not None and waited_s > options.deadline_ms / 1000:
                self._fail(job, timeout_error())
            elif options.max_wait_s is not None and waited_s > options.max_wait_s:
                self._fail(job, tired_error())

    def _admit(self) -> None:
        """Pages and a row for the jobs at the head of the queue, as far as both are there."""
        scheduler = self._scheduler
        while self._waiting and self._free_rows:
            job = self._next()
            count = scheduler.cache.pages_needed(len(job.tokens))
            held = sum(len(active.pages) for active in self._active)
            share = PAGE_SHARE if self._encoder is None else 1.0
            if self._active and held + count > share * scheduler.cache.allocator.num_pages:
                return
            pages = scheduler.life.admit_job(count, job)
            if pages is None:
                return
            job.pages, job.row = pages, self._free_rows.pop()
            self._waiting.remove(job)
            self._active.append(job)
            self._queue.start_job(job, len(job.tokens))

    def _next(self) -> Job:
        """Of the tenant that is furthest behind, its first."""
        if len(self._queue.tenants) == 1:
            return self._waiting[0]
        return min(self._waiting, key=lambda job: (job.tenant.virtual, job.order()))

    def _pieces(self, only: Job | None) -> list[tuple[Job, Piece]]:
        scheduler = self._scheduler
        budget = min(scheduler.budget.max_tokens, scheduler.budget.prefill(len(scheduler.running)))
        if only is not None:
            # Its lines are read in one pass: see score().
            budget = min(budget, self._engine.runner.forwards.max_lines)
        jobs = [job for job in self._active if (job is only if only is not None else not job.keeps_logits)]
        if self._encoder is not None:
            return self._whole(jobs)
        counts, slots = self._share_out(jobs, budget), scheduler.life.job_slots
        return [
            (job, Piece(job.tokens, job.computed_len, count, job.pages, job.row, slot=slots.get(job, 0)))
            for job, count in zip(jobs, counts, strict=True)
            if count
        ]

    def _whole(self, jobs: list[Job]) -> list[tuple[Job, Piece]]:
        """An encoder's tokens see all of their sequence: as many sequences as fit into a step, oldest first."""
        pieces, room = [], self._scheduler.budget.max_tokens
        for job in jobs:
            count = len(job.tokens)
            if count <= room:
                room -= count
                pieces.append((job, Piece(job.tokens, 0, count, job.pages, job.row, job.ask.second)))
        return pieces

    def _share_out(self, jobs: list[Job], budget: int) -> list[int]:
        """Tokens of a chunk for each job: its tenant's part, oldest first, then what others leave of theirs."""
        tenants = {job.tenant.name: job.tenant for job in jobs}
        weights = sum(tenant.weight for tenant in tenants.values())
        parts = {name: math.ceil(budget * tenant.weight / weights) for name, tenant in tenants.items()}
        counts = [0] * len(jobs)
        for is_rest in (False, True):
            for index, job in enumerate(jobs):
                name = job.tenant.name
                most = budget if is_rest else min(budget, parts[name])
                count = min(len(job.tokens) - job.computed_len - counts[index], most)
                counts[index] += count
                parts[name] -= count
                budget -= count
        return counts

    def _read(self, forwards, pieces: list[tuple[Job, Piece]]) -> None:
        """What the jobs asked of a chunk that has run."""
        place = 0
        wanted: list[tuple[Job, Line]] = []
        for job, piece in pieces:
            ask, last = job.ask, piece.start + piece.num_tokens == len(job.tokens)
            if job.pool is not None:
                first, count = job.pool.wants(piece.start, piece.num_tokens, len(job.tokens))
                if count:
                    job.pool.add(forwards.hidden(place + first, count))
            elif ask.what == "targets" and last:
                wanted.append((job, Line(place + piece.num_tokens - 1, 0)))
            elif ask.what == "logprobs":
                following = job.tokens[piece.start + 1 : piece.start + piece.num_tokens + 1]
                if last and job.keeps_logits:
                    following.append(0)
                skipped = max(0, ask.first - piece.start - 1)
                wanted += [
                    (job, Line(place + index, target, ask.top))
                    for index, target in enumerate(following)
                    if index >= skipped
                ]
            place += piece.num_tokens
        for first in range(0, len(wanted), forwards.max_lines):
            group = wanted[first : first + forwards.max_lines]
            results = forwards.logprobs([line for _, line in group])
            if group[0][0].keeps_logits:
                job, start = group[0][0], group[0][0].computed_len
                job.chunk = (
                    start,
                    [result.logprob for result in results],
                    forwards.top1(len(group)),
                    forwards.logits(len(group)),
                )
                continue
            for index, ((job, _), result) in enumerate(zip(group, results, strict=True)):
                if not math.isfinite(result.logprob) and result.logprob != -math.inf:
                    self._fail(job, numerical_error())
                elif job.ask.what == "targets":
                    self._take_targets(job, forwards.logits(len(group)), index)
                else:
                    job.logprobs.append(result)

    def _take_targets(self, job: Job, logits: "memoryview[float]", line: int) -> None:
        lines = np.asarray(logits, np.float32).reshape(-1, self._scheduler.vocab_size)
        values = lines[line].astype(np.float64)
        values -= values.max()
        values -= np.log(np.exp(values).sum())
        job.logprobs = [TokenLogprob(float(values[target]), []) for target in job.ask.targets]

    def _vectors(self, jobs: list[Job]) -> dict[int, Any]:
        """What each job's pooled states become, f64, by its id. Texts pass dense modules together: their matrices are
        read once."""
        forwards = self._engine.runner.forwards
        found = {job.id: forwards.classify(job.pool.result()) for job in jobs if job.pool and job.ask.what == "labels"}
        texts = [job for job in jobs if job.id not in found]
        if texts:
            pooled = forwards.dense(np.array([job.pool.result() for job in texts if job.pool], np.float64))
            found |= {job.id: line for job, line in zip(texts, pooled, strict=True)}
        return found

    def _finish(self, job: Job, total: Any = None) -> None:
        """total: of a job with a pool, its vector."""
        ask, vector = job.ask, None
        if total is not None:
            if ask.normalize:
                total = total / max(float(np.sqrt((total * total).sum())), 1e-12)
            if not np.isfinite(total).all():
                self._fail(job, numerical_error())
                return
            vector = total.astype("<f4").tobytes()
        if ask.what == "logprobs" and not ask.first and not job.keeps_logits:
            # Nothing was read of the last token: it is not known to be sound.
            self._scheduler.cache.adopt(job.tokens, len(job.tokens) - 1, job.pages, salt_of(job.options))
        job.result = Measured(
            job.id, len(job.tokens), vector, None if vector is not None or job.keeps_logits else job.logprobs
        )
        self._counters["jobs_finished"] += 1
        self._remove(job)
        self._completed.append(job)

    def _fail(self, job: Job, error: RequestError) -> None:
        if job.is_completed:
            return
        job.error = error
        self._counters["jobs_failed"] += 1
        self._remove(job)
        self._completed.append(job)

    def _remove(self, job: Job) -> None:
        """The one place where a job goes: pages and row back."""
        del self._jobs[job.id]
        if job.row < 0:
            self._waiting.remove(job)
        else:
            self._active.remove(job)
            self._free_rows.append(job.row)
        self._scheduler.life.release_job(job, job.pages)
        self._queue.end_job(job, 0 if job.row < 0 else len(job.tokens) - job.computed_len)
        job.row = -1

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each."""
        problems = []
        if sum(tenant.jobs for tenant in self._queue.tenants.values()) != len(self._jobs):
            problems.append("tenants have not as many jobs as there are")
        if sorted([job.row for job in self._active] + self._free_rows) != list(range(self._num_rows)):
            problems.append("a job's row is lost or shared")
        if {*self._waiting, *self._active} != set(self._jobs.values()):
            problems.append("a job stands in no list")
        for job in self._active:
            if len(job.pages) != self._scheduler.cache.pages_needed(len(job.tokens)):
                problems.append(f"job {job.id}: {len(job.pages)} pages for {len(job.tokens)} tokens")
        return problems
