"""Drafts of a smaller model that runs beside, with pages of its own.

It samples with the parameters, the seed and the positions of the request itself: where both models think alike they
draw the same token from the same random number, so that sampled requests accept drafts nearly as often as greedy ones.
"""

import time
from array import array
from typing import Any

from zse.scheduler.batch import Batch, Entry, StepOutput
from zse.scheduler.request import Request
from zse.scheduler.scheduler import Scheduler
from zse.speculative.beside import BesideSpeculator
from zse.speculative.speculator import DRAFT_MODEL, Candidate, RequestAcceptance, without_ends

# A request that lacks more tokens than this is brought up to date before it has drafts; less where a step is shorter.
LAG = 32


class _Followed(RequestAcceptance):
    """What the draft model knows of a request (Request.drafting) in one residency. computed: tokens whose K and V stand
    in its pages; fed: drafts behind `base` tokens that were computed too, right or not."""

    residency: int = 0
    kind: int = DRAFT_MODEL
    computed: int = 0
    base: int = 0
    fed: Any = ()


class DraftModelSpeculator(BesideSpeculator):
    """runner: an engine's Runner of the draft model; share: of the target's weights that the draft model has. Else as
    BesideSpeculator. vocab_size: of the draft model. target_vocab: of the model that verifies; the vocabularies are the
    same but for unused ids at the end."""

    first_steps = 16.0  # who names a draft model wants it to be tried

    def __init__(self, scheduler: Scheduler, runner: Any, *, vocab_size: int, target_vocab: int, **options: Any):
        super().__init__(scheduler, runner, **options)
        self._lag = min(LAG, self._max_tokens - 1)
        self._vocab_size, self._target_vocab = vocab_size, target_vocab

    # -- the engine's side

    def before_schedule(self, now: float) -> list[StepOutput]:
        self._forget()
        candidates, counts = self._plan(self.scheduler.decoding)
        wanted = {candidate.request: count for candidate, count in zip(candidates, counts, strict=True) if count}
        if not wanted:
            return []
        ready = self._catch_up(list(wanted))
        started = time.perf_counter()
        for request, drafts in self._draft({request: wanted[request] for request in ready}).items():
            request.drafts = without_ends(request, drafts, self.scheduler.eos_ids)
        self._lost_s += time.perf_counter() - started
        return []

    # -- inside

    def _candidate(self, request: Request) -> Candidate | None:
        room = self._room_of(request)
        if room < 1:
            return None
        rate, followed = self.acceptance.rate(DRAFT_MODEL), request.drafting
        return Candidate(request, rate if followed is None else followed.rate(rate), DRAFT_MODEL, 0, room)

    def _catch_up(self, requests: list[Request]) -> list[Request]:
        """Compute what the draft model has not seen of them, all but the last tokens, one chunk at most; the requests
        that can have drafts now. What was drafted and not accepted is forgotten."""
        entries, ready, budget = [], [], self._max_tokens
        for request in requests:
            followed = self._follow(request)
            if followed is None:
                continue
            missing = len(request.tokens) - 1 - followed.computed
            if missing > self._lag and budget > 0:
                count = min(missing, budget)
                entries.append(Entry(request, followed.computed, count, self.cache.table(request.id), 0))
                followed.computed += count
                budget -= count
                missing -= count
            if missing <= self._lag:
                ready.append(request)
        if entries:
            self._run(entries)
        return ready

    def _follow(self, request: Request) -> _Followed | None:
        """The request's state, brought in line with its tokens, with pages for its drafts; None when it cannot be."""
        followed = self._followed.get(request)
        tokens = request.tokens
        if followed is None:
            old = request.drafting or RequestAcceptance()
            followed = _Followed(old.tested, old.accepted, request.residency)
        else:
            new = tokens[followed.base :]
            agreed = 0
            for token, draft in zip(new, followed.fed, strict=False):
                if token != draft:
                    break
                agreed += 1
            followed.computed = min(followed.computed, followed.base + agreed, len(tokens) - 1)
        length = min(len(tokens) + self.draft_tokens, request.max_len, self._max_context)
        if not self.cache.reserve(request.id, length):
            return None
        # Ids that the draft model does not have are padding of the other's head: nobody says them.
        if max(tokens[followed.computed :]) >= self._vocab_size:
            return None
        request.drafting = self._followed[request] = followed
        followed.base, followed.fed = len(tokens), array("i")
        return followed

    def _draft(self, wanted: dict[Request, int]) -> dict[Request, array]:
        """So many drafts of each request, one round of the draft model for each."""
        drafts: dict[Request, array] = {request: array("i") for request in wanted}
        alive = list(wanted)
        for number in range(max(wanted.values(), default=0)):
            alive = [request for request in alive if wanted[request] > number]
            if not alive:
                break
            entries = []
            for request in alive:
                followed = request.drafting
                end = len(request.tokens) + number
                entries.append(
                    Entry(
                        request,
                        followed.computed,
                        end - followed.computed,
                        self.cache.table(request.id),
                        1,
                        drafts[request][:],
                    )
                )
                followed.computed = end
            entries = self._within_a_step(entries, alive)
            going = []
            for request, (token, _) in zip(alive, self._run(entries), strict=True):
                followed = request.drafting
                followed.fed = drafts[request][:number]
                if 0 <= token < self._target_vocab:
                    drafts[request].append(token)
                    going.append(request)
            alive = going
        return drafts

    def _within_a_step(self, entries: list[Entry], alive: list[Request]) -> list[Entry]:
        """Entries that fit a step of the draft model; requests beyond are taken out of `alive`."""
        total = 0
        for index, entry in enumerate(entries):
            total += entry.count
            if total > self._max_tokens:
                for late in entries[index:]:
                    late.request.drafting.computed = late.start
                del alive[index:]
                return entries[:index]
        return entries

    def _run(self, entries: list[Entry]) -> list:
        batch = Batch(entries, 0, [])
        started = time.perf_counter()
        results = self.runner.run(batch)
        if batch.num_tokens == batch.num_samples:
            self._round_cost.record(batch.num_tokens, time.perf_counter() - started)
        return results
