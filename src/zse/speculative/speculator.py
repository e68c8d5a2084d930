"""Who gets drafts, and how many: as many as make the next step give more tokens a second, and none where none do.

A proposer is a feature of the step: it proposes before a batch is scheduled and learns when it is committed. A draft is
accepted while it equals the token that the sampler draws in its place, with the (seed, position) that this token has
anyway, so the tokens are those of a run without drafts, greedy or sampled. For a draft that is a point mass this *is*
rejection sampling (Leviathan et al. 2023; Chen et al. 2023): it is accepted with p(x), and what takes its place is
drawn from p without x.

It learns how likely a draft token is accepted, for each kind of draft and from there for each request; and how long a
step of so many tokens takes, until it was measured from the shape of others."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

import msgspec

from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.request import Request
from zse.scheduler.scheduler import Scheduler

# What wrong drafts may cost: this share of all the time spent decoding, beside first_steps. Time that accepted drafts
# saved may be spent too, up to SAVED_STEPS.
LOSS_SHARE = 0.01
SAVED_STEPS = 8.0
# Drafts must promise this much more tokens a second: the estimates are not exact, and rows that are ahead of others
# leave smaller batches at the end. Where a step is bound by arithmetic, right drafts promise less (8 rows on a CPU:
# 1.13).
LEAST_GAIN = 1.2
# Drafts that are less likely to be accepted are not weighed.
LEAST_SURVIVAL = 0.1
# The room for drafts is computed anew after so many steps, or for another number of rows.
ROOM_STEPS = 16
# Length of an n-gram match up to which it counts as this kind; beyond the last one more kind. A draft model's drafts
# are a kind of their own, those of a model's own block, and tokens that a grammar leaves no choice about.
MATCHES = (3, 4, 6, 9, 15)
DRAFT_MODEL = len(MATCHES) + 1
FORCED = DRAFT_MODEL + 1
BLOCK = FORCED + 1
# Where nothing was seen yet.
PRIOR = (0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.7, 0.99, 0.7)
PRIOR_WEIGHT = 8.0  # drafts that the prior counts as
KIND_WEIGHT = 4.0  # drafts that a kind's rate counts as beside those of the request itself
KIND_MEMORY = 0.98  # of what a kind has seen, for each run verified
KIND_FORGETS = 0.999  # for each step
REQUEST_MEMORY = 0.9  # of what a request has seen, for each run verified
IDLE_MEMORY = 0.98  # for each step without drafts: it is tried again later
# Steps are told apart by their tokens up to these numbers; kernels work in tiles of 4 and 8.
EDGES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# Seconds relative to a step of one token. CPU: SmolLM2-135M Q4_1, 2 threads of a Xeon with AVX-512. GPU: a step is
# bound by reading the weights up to some 64 tokens.
SHAPES = {
    "cpu": (1, 1.53, 1.65, 1.77, 1.92, 3, 3.2, 4.5, 5.9, 8.5, 11, 16.5, 22, 33, 44, 66, 88, 132, 176, 352),
    "gpu": (1, 1.1, 1.12, 1.15, 1.18, 1.2, 1.25, 1.3, 1.4, 1.5, 1.7, 2, 2.3, 2.8, 3.3, 4.2, 5.2, 7, 9, 17),
}
RATE = 0.1  # weight of a new measurement
FIRST = 0.25  # of the first one for so many tokens, beside what was expected
OUTLIER = 2.0  # a step this many times as long as expected was held up by something else
FORGET_STEPS = 64  # what was not measured in so many steps moves a quarter of the way back to the shape


def kind_of(match: int) -> int:
    """The kind of a draft after a match of this many tokens."""
    for kind, length in enumerate(MATCHES):
        if match <= length:
            return kind
    return len(MATCHES)


class Acceptance:
    """Rates of acceptance of each kind, over all requests."""

    def __init__(self) -> None:
        self._tested = [0.0] * len(PRIOR)
        self._accepted = [0.0] * len(PRIOR)

    def rate(self, kind: int) -> float:
        return (self._accepted[kind] + PRIOR_WEIGHT * PRIOR[kind]) / (self._tested[kind] + PRIOR_WEIGHT)

    def rest(self) -> None:
        """A step: what was seen long ago counts less, so that a kind that failed is tried again."""
        for kind in range(len(PRIOR)):
            self._tested[kind] *= KIND_FORGETS
            self._accepted[kind] *= KIND_FORGETS

    def record(self, kind: int, tested: int, accepted: int) -> None:
        self._tested[kind] = KIND_MEMORY * self._tested[kind] + tested
        self._accepted[kind] = KIND_MEMORY * self._accepted[kind] + accepted


class RequestAcceptance(msgspec.Struct):
    """What was seen of one request."""

    tested: float = 0.0
    accepted: float = 0.0

    def rate(self, kind_rate: float) -> float:
        """Probability that its next draft token is accepted, where a kind's rate is the prior."""
        return (self.accepted + KIND_WEIGHT * kind_rate) / (self.tested + KIND_WEIGHT)

    def record(self, tested: int, accepted: int) -> None:
        self.tested = REQUEST_MEMORY * self.tested + tested
        self.accepted = REQUEST_MEMORY * self.accepted + accepted

    def rest(self) -> None:
        """A step without drafts."""
        self.tested *= IDLE_MEMORY
        self.accepted *= IDLE_MEMORY


class StepCost:
    """Seconds of a step that only decodes, by its number of tokens, drafts included. family: of the device. num_steps:
    that were measured."""

    def __init__(self, family: str):
        self._shape = SHAPES[family]
        self._seconds: list[float | None] = [None] * len(EDGES)
        self._last: list[int] = [0] * len(EDGES)  # step number of the last measurement
        self.num_steps = 0
        self._reference = 0  # the edge that was measured last

    def record(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took so long."""
        edge = min(bisect_left(EDGES, tokens), len(EDGES) - 1)
        known = self._seconds[edge]
        if known is None:
            # The first of a recording is slow on a GPU, which gets the graph then.
            expected = self._expected(edge)
            first = expected + FIRST * (min(seconds, OUTLIER * expected) - expected)
            self._seconds[edge] = first if self.num_steps else seconds
        else:
            self._seconds[edge] = known + RATE * (min(seconds, OUTLIER * known) - known)
        self.num_steps += 1
        self._last[edge], self._reference = self.num_steps, edge
        if self.num_steps % FORGET_STEPS == 0:
            for other, value in enumerate(self._seconds):
                if value is not None and self._last[other] <= self.num_steps - FORGET_STEPS:
                    self._seconds[other] = value + 0.25 * (self._expected(other) - value)

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a step of `tokens` tokens; before any measurement in units of a step of one."""
        edge = min(bisect_left(EDGES, tokens), len(EDGES) - 1)
        known = self._seconds[edge]
        return self._expected(edge) if known is None else known

    def _expected(self, edge: int) -> float:
        """From the shape and what was measured last."""
        reference = self._seconds[self._reference]
        if reference is None:
            return self._shape[edge]
        return reference * self._shape[edge] / self._shape[self._reference]


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
    looks_ahead = True  # whether reads_tokens is what would be drafted for the tokens in flight

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
        only_decodes = batch.num_tokens == batch.num_samples
        if only_decodes:
            self.cost.record(batch.num_tokens, seconds)
            self._spent_s += seconds
        rows = len(batch.entries)
        if batch.num_drafts:
            extra = 0
            for entry in batch.entries:
                if entry.drafts:
                    extra += self._learn(entry)
            plain = self.cost.seconds(rows)
            self._lost_s += self.cost.seconds(rows + batch.num_drafts) - plain - extra * plain / rows
            self._lost_s = max(self._lost_s, -SAVED_STEPS * plain)
        self.acceptance.rest()
        # Only a device that is given steps ahead asks; the step ahead may have all but the last token.
        if self.looks_ahead:
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
        room = self.room(rows, min(scheduler.max_drafts, scheduler.budget.max_tokens - rows)) if rows else 0
        # A step that computes prompts for as long as its replies may wait has no time for drafts: chunks would be
        # smaller.
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
        accepted = len(request.tokens) - (entry.start + entry.count - len(entry.drafts)) - 1
        if accepted < 0:
            return 0  # cancelled meanwhile, or its logits were not finite
        state, tested = request.drafting, self._tested(request, len(entry.drafts), accepted)
        if state.kind != FORCED:
            state.record(tested, accepted)
        self.acceptance.record(state.kind, tested, accepted)
        return accepted

    def _tested(self, request: Request, drafts: int, accepted: int) -> int:
        """How many of a step's drafts say something: those behind a wrong one do not."""
        return min(accepted + 1, drafts)

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
        return self.weigh(candidates, rows, most, round_s)[1]

    def weigh(
        self, candidates: Sequence[Candidate], rows: int, most: int, round_s: float = 0.0
    ) -> tuple[float, list[int]]:
        """(tokens a second, what choose() gives)."""
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
        return best, best_counts
