"""Who gets drafts, and how many: as many as make the next step give more tokens a second, and none where none do.

A proposer is a feature of the step: it proposes before a batch is scheduled and learns when it is committed. A draft is accepted while it
equals the token that the sampler draws in its place, with the (seed, position) that this token has anyway, so the
tokens are those of a run without drafts, greedy or sampled. For a draft that is a point mass this *is* rejection
sampling (Leviathan et al. 2023; Chen et al. 2023): it is accepted with p(x), and what takes its place is drawn from p
without x.
"""

from array import array
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.request import Request
from zse.scheduler.scheduler import Scheduler
from zse.speculative.estimates import FORCED, Acceptance, StepCost

# What wrong drafts may cost: this share of all the time spent decoding, beside first_steps. Time that accepted drafts
# saved may be spent too, up to SAVED_STEPS.
LOSS_SHARE = 0.01
SAVED_STEPS = 8.0
# Drafts must promise this much more tokens a second: the estimates are not exact, and rows that are ahead of others leave
# smaller batches at the end. Where a step is bound by arithmetic, right drafts promise less (8 rows on a CPU: 1.13).
LEAST_GAIN = 1.2
# Drafts that are less likely to be accepted are not weighed.
LEAST_SURVIVAL = 0.1
# The room for drafts is computed anew after so many steps, or for another number of rows.
ROOM_STEPS = 16


class Candidate(NamedTuple):
    """A request that could have drafts. rate: probability that each is accepted, given those before it."""

    request: Request
    rate: float
    kind: int
    place: int
    room: int


def without_ends(request: Request, drafts: array, eos_ids: frozenset[int]) -> array:
    """The drafts up to where the request would end. With a mask before that: there are no masks behind an end."""
    if request.options.structure is not None:
        return next((drafts[:at] for at, token in enumerate(drafts) if token in eos_ids), drafts)
    return next((drafts[: at + 1] for at, token in enumerate(drafts) if token in request.stop_ids), drafts)


class Speculator(Feature):
    """What all proposers share: the account of time spent and saved, and the choice of how many drafts.

    draft_tokens: most of one request. family: of the device. runs_ahead: whether it is given steps ahead. reads_tokens:
    whether the next step should wait for the tokens of the one before, because there will be drafts behind them.
    """

    first_steps = 1.0  # steps that wrong drafts may cost before anything was saved
    most_requests: int | None = None  # that are weighed for one step

    def __init__(self, scheduler: Scheduler, draft_tokens: int, family: str, runs_ahead: bool = False):
        self.scheduler, self.draft_tokens, self.runs_ahead = scheduler, draft_tokens, runs_ahead
        self.cost = StepCost(family)
        self.acceptance = Acceptance()
        self._lost_s = 0.0  # by wrong drafts, less what right ones saved
        self._spent_s = 0.0  # decoding
        self._room = 0, 0, 0, 0  # of room(): rows, most, when, and what came out

    # -- the engine's side

    def before_schedule(self, now: float) -> list[StepOutput]:
        """Give drafts to requests that can have some now (Request.drafts)."""
        raise NotImplementedError

    def after_commit(self, batch: Batch, seconds: float) -> None:
        if batch.num_tokens == batch.num_samples:
            self.cost.record(batch.num_tokens, seconds)
            self._spent_s += seconds
        if batch.num_drafts:
            rows = len(batch.entries)
            extra = 0
            for entry in batch.entries:
                if entry.drafts:
                    extra += self._learn(entry)
            plain = self.cost.seconds(rows)
            self._lost_s += self.cost.seconds(rows + batch.num_drafts) - plain - extra * plain / rows
            self._lost_s = max(self._lost_s, -SAVED_STEPS * plain)
        self.acceptance.rest()
        # Only a device that is given steps ahead asks; the step ahead may have all but the last token.
        self.reads_tokens = self.runs_ahead and any(self._plan(lambda: self.scheduler.running)[1])

    def counters(self) -> dict[str, float]:
        """Beside the scheduler's totals: the share of drafts accepted, and tokens that a verified run gave; 0 before
        any."""
        totals = self.scheduler.counters
        drafted, runs = totals.drafted_tokens, totals.verified_runs
        return {
            "draft_acceptance": totals.accepted_tokens / drafted if drafted else 0.0,
            "tokens_per_verified_run": 1 + totals.accepted_tokens / runs if runs else 0.0,
        }

    # -- inside

    def _plan(self, requests: Callable[[], list[Request]]) -> tuple[list[Candidate], list[int]]:
        """Which of the requests could have drafts in the next step, and how many each gets."""
        scheduler = self.scheduler
        rows = len(scheduler.running)
        most = min(scheduler.max_drafts, scheduler.budget.max_tokens - rows)
        room = self.room(rows, most) if rows else 0
        # A step that computes prompts for as long as its replies may wait has no time for drafts: chunks would be smaller.
        if not room or scheduler.budget.ratio and scheduler.builder.has_prompts():
            return [], []
        found = (self._candidate(request) for request in requests() if request.drafts is not None)
        candidates = list(islice((candidate for candidate in found if candidate is not None), self.most_requests))
        return candidates, self.choose(candidates, rows, room, self._round_s(len(candidates))) if candidates else []

    def _candidate(self, request: Request) -> Candidate | None:
        """The request, where there is something to draft for it."""
        raise NotImplementedError

    def _round_s(self, rows: int) -> float:
        """Seconds that making one more draft of each of `rows` requests takes."""
        return 0.0

    def _learn(self, entry) -> int:
        """Note what became of an entry's drafts; how many were accepted."""
        request = entry.request
        accepted = len(request.tokens) - entry.start - 2
        tested = min(accepted + 1, len(entry.drafts))
        if accepted < 0:
            return 0  # cancelled meanwhile, or its logits were not finite
        state = request.drafting
        if state.kind != FORCED:
            state.record(tested, accepted)
        self.acceptance.record(state.kind, tested, accepted)
        return accepted

    def room(self, rows: int, most: int) -> int:
        """Drafts that a step of `rows` rows can have before even right ones would cost more than they give."""
        # The account must allow drafts that may turn out wrong.
        may_lose = self._lost_s < LOSS_SHARE * self._spent_s + self.first_steps * self.cost.seconds(1)
        if not self.cost.num_steps or not may_lose:
            return 0
        if (rows, most) == self._room[:2] and self.cost.num_steps - self._room[2] < ROOM_STEPS:
            return self._room[3]
        best, count = 0, 1
        least = LEAST_GAIN * rows / self.cost.seconds(rows)
        while count <= most:
            if (rows + count) / self.cost.seconds(rows + count) > least:
                best = count
            count = count + 1 if count < 8 else count + 8
        self._room = rows, most, self.cost.num_steps, best
        return best

    def choose(self, candidates: Sequence[Candidate], rows: int, most: int, round_s: float = 0.0) -> list[int]:
        """How many drafts each candidate gets, so that a step of `rows` rows gives the most tokens a second; all 0 when
        none pay. round_s: seconds that making one more draft of each takes."""
        counts, best_counts = [0] * len(candidates), [0] * len(candidates)
        plain = rows / self.cost.seconds(rows)
        best, expected, total, deepest = LEAST_GAIN * plain, float(rows), 0, 0
        # The draft that is likeliest to be accepted comes next; a request's own become less likely one by one.
        alive = [(-candidate.rate, number) for number, candidate in enumerate(candidates) if candidate.room]
        heapify(alive)
        while alive and total < most:
            negative, number = heappop(alive)
            survival = -negative
            if survival < LEAST_SURVIVAL:
                break
            counts[number] += 1
            total += 1
            expected += survival
            deepest = max(deepest, counts[number])
            value = expected / (self.cost.seconds(rows + total) + round_s * deepest)
            if value > best:
                best, best_counts = value, counts[:]
            if counts[number] < min(candidates[number].room, self.draft_tokens):
                heappush(alive, (negative * candidates[number].rate, number))
        return best_counts
