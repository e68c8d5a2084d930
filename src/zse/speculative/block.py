"""Drafts of the model's own next-token block (zse.models.next_token).

It runs behind each step of the model, while the states of that step's tokens stand: the block sees every token of a request with
the state before it, and what it predicts behind the last one is the first draft. Further ones it makes of its own states, whose
keys and values the next step's right ones are written over.

Where that pays it drafts with the first ids of the vocabulary alone, of which less of the head is read: by how many of the tokens
that a request had of late were among them.

It has pages of its own, whose positions begin where it began to follow a request (only distances count): a prompt's cached part,
of which no states come by, is no hole in what it sees but lies before it. So with steps that it did not see while drafts did not
pay: it begins anew."""

import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, Entry, StepOutput
from zse.scheduler.request import RUNNING, Request
from zse.scheduler.scheduler import Scheduler
from zse.speculative.beside import BesideSpeculator
from zse.speculative.speculator import BLOCK, OUTLIER, Candidate, RequestAcceptance, StepCost, without_ends

WAITED, WAITS = 4, 16  # runs that are waited for to learn what a round takes: the first ones, and one in so many
LATE = 128  # tokens of a request by which the ids of its next ones are judged


class Followed(RequestAcceptance, eq=False):
    """A request as the block's runner knows it. tokens: that it has seen, the first of them the request's token `shift`. params:
    without penalties, which look at tokens that it has not seen. among: the share of its tokens of late that are among the first
    ids, where drafts may be of these alone."""

    kind: int = BLOCK
    shift: int = 0
    row: int = 0
    residency: int = 0
    seed: int = 0
    among: float = 1.0
    prompt_len: int = 0
    tokens: array = msgspec.field(default_factory=lambda: array("i"))
    params: Any = None

    @property
    def next(self) -> int:
        """The token of the request whose state it takes next."""
        return self.shift + len(self.tokens) - 1


class _Work(msgspec.Struct, eq=False):
    """What a step leaves of a request: the states in rows `place` .. place + count - 1, whose next tokens stand at the end of
    followed.tokens; is_last: they are all that there is."""

    request: Request
    followed: Followed
    place: int
    count: int
    is_last: bool


class BlockSpeculator(BesideSpeculator):
    """runner: a zse.engine.block_runner.BlockRunner. narrow_share: as `share`, of a round that drafts with the first ids alone. Else
    as BesideSpeculator."""

    looks_ahead = False
    first_steps = 4.0  # who asks for it wants it to be tried; of 200 tokens they are 2 %

    def __init__(self, scheduler: Scheduler, runner: Any, *, narrow_share: float = 0.0, **options: Any):
        super().__init__(scheduler, runner, **options)
        self._ready: dict[Request, _Work] = {}
        self.reads_tokens = self.runs_ahead
        # Of rounds with the whole head, and of narrow ones: the share of the weights, what they took.
        self._round_costs = (self._share, self._round_cost), (narrow_share, StepCost(options["family"]))
        self.is_narrow = runner.vocabulary > 0
        # Requests whose drafts the host has not read; when the run that makes them is likely to end; runs so far.
        self._unread: list[Request] = []
        self._ends_at, self._step_s, self._num_runs = 0.0, 0.0, 0
        # Running requests, and how many drafts each would have in a step of all.
        self._likely: tuple[list[Request], list[int]] = ([], [])

    # -- the engine's side

    def before_schedule(self, now: float) -> list[StepOutput]:
        return []

    def before_commit(self, batch: Batch) -> None:
        if self._unread:
            # The step behind the drafts is over, and began when they were made.
            self._step_s = time.perf_counter() - self._ends_at
            self._read_drafts(batch)

    def after_commit(self, batch: Batch, seconds: float) -> None:
        if self._step_s:
            seconds, self._step_s = max(min(seconds, self._step_s), seconds / 2), 0.0
        # A step that was given ahead has written over the states.
        stand = self.reads_tokens or not self.runs_ahead
        self._forget()
        follows = self._follows()
        self.reads_tokens = self.runs_ahead and follows
        if follows and stand:
            self._run(self._work(batch))
        # Last, for a GPU has nothing to do before the run.
        super().after_commit(batch, seconds)
        if follows:
            self._likely = self.scheduler.running[:], self._likely_counts()

    def idle(self, now: float) -> bool:
        return self.runner.record_ahead()

    def choose(self, candidates: Sequence[Candidate], rows: int, most: int, round_s: float = 0.0) -> list[int]:
        """As Speculator.choose(), of drafts of all ids or of the first alone, whichever gives more."""
        room, count = self.runner.vocabulary, len(candidates)
        value, counts = self.weigh(candidates, rows, most, self._round_s(count, False))
        if room:
            narrow = [each._replace(rate=each.rate * self._among(each.request)) for each in candidates]
            narrow_value, narrow_counts = self.weigh(narrow, rows, most, self._round_s(count, True))
            self.is_narrow = narrow_value >= value
            return narrow_counts if self.is_narrow else counts
        return counts

    # -- inside

    def _round_s(self, rows: int, is_narrow: bool | None = None) -> float:
        share, cost = self._round_costs[self.is_narrow if is_narrow is None else is_narrow]
        return cost.seconds(rows) if cost.num_steps else share * self.cost.seconds(rows)

    def _among(self, request: Request) -> float:
        """Probability that a token of the request is among the first ids."""
        known = request.drafting
        return known.among if isinstance(known, Followed) else self._share_among(request.tokens[-LATE:])

    def _share_among(self, tokens: array) -> float:
        room = self.runner.vocabulary or self.runner.num_ids
        return sum([token < room for token in tokens]) / len(tokens)

    def _tested(self, request: Request, drafts: int, accepted: int) -> int:
        """A token that is not among the first ids says nothing of a draft that had to be."""
        missed = self.is_narrow and accepted < drafts and request.tokens[-1] >= self.runner.vocabulary
        return accepted if missed else super()._tested(request, drafts, accepted)

    def _follows(self) -> bool:
        """Whether drafts would pay in steps like this one, as far as that is known."""
        running = self.scheduler.running
        if not self.cost.num_steps or not running:
            return True
        if self._likely[0] != running:
            self._likely = running[:], self._likely_counts()
        if any(self._likely[1]):
            return True
        self._likely = [], []
        for request in running:
            if request.drafting is not None:
                request.drafting.rest()
        return False

    def _likely_counts(self) -> list[int]:
        """How many drafts each running request would have in a step of all."""
        scheduler, running = self.scheduler, self.scheduler.running
        rows = len(running)
        room = self.room(rows, min(scheduler.max_drafts, scheduler.budget.max_tokens - rows)) if rows else 0
        if not room:
            return [0] * rows
        rate, known = self.acceptance.rate(BLOCK), [request.drafting for request in running]
        rates = [rate if state is None else state.rate(rate) for state in known]
        likely = [Candidate(*pair, BLOCK, 0, self.draft_tokens) for pair in zip(running, rates, strict=True)]
        return self.choose(likely, rows, room, self._round_s(rows))

    def _wanted(self) -> dict[_Work, int]:
        """How many drafts each request is to have of which the step left all there is."""
        running = self.scheduler.running
        if self._likely[0] == running == self.scheduler.decoding() and len(self._ready) == len(running):
            counts = dict(zip(*self._likely, strict=True))  # chosen while the device was at work
            most = {work: min(counts[request], self._room_of(request)) for request, work in self._ready.items()}
            return {work: count for work, count in most.items() if count > 0}
        return {
            self._ready[candidate.request]: count
            for candidate, count in zip(*self._plan(self.scheduler.decoding), strict=True)
        }

    def _candidate(self, request: Request) -> Candidate | None:
        work = self._ready.get(request)
        room = self._room_of(request)
        if work is None or room < 1:
            return None
        return Candidate(request, work.followed.rate(self.acceptance.rate(BLOCK)), BLOCK, 0, room)

    def _work(self, batch: Batch) -> list[_Work]:
        """What the block can take of the step: states of sound tokens whose next ones are known."""
        found, place = [], 0
        for entry in batch.entries:
            request, first = entry.request, place
            place += entry.count
            if request.state is not RUNNING or request.drafts is None:
                continue
            last = len(request.tokens) - 1  # has no state yet
            end = min(entry.start + entry.count, last)
            followed = self._follow(request, entry.start, end)
            if followed is None:
                continue
            at = followed.next
            new = request.tokens[at + 1 : end + 1]
            followed.tokens.extend(new)
            followed.among += min(len(new) / LATE, 1.0) * (self._share_among(new[-LATE:]) - followed.among)
            found.append(_Work(request, followed, first + at - entry.start, end - at, end == last))
        return found

    def _follow(self, request: Request, start: int, end: int) -> Followed | None:
        """The request's state, with pages up to token `end` and for its drafts; begun anew where tokens before `start` are
        missing. None: nothing to take, or no pages."""
        followed = self._followed.get(request)
        if followed is not None and not start <= followed.next < end:
            if followed.next >= end:
                return None  # tokens that ran again
            self._release(request)
            followed = None
        if followed is None:
            if end <= start:
                return None
            old = request.drafting or RequestAcceptance()
            followed = Followed(
                old.tested,
                old.accepted,
                shift=start + 1,
                row=request.row,
                residency=request.residency,
                seed=request.seed,
                among=self._share_among(request.tokens[-LATE:]),
                params=_neutral(request.params, self.runner.vocabulary or self.runner.num_ids),
            )
        length = min(end + 1 + self.draft_tokens, request.max_len, self._max_context) - followed.shift
        if not self.cache.reserve(request.id, max(length, end + 1 - followed.shift)):
            if request in self._followed:
                self._release(request)
            return None
        request.drafting = self._followed[request] = followed
        return followed

    def _run(self, works: list[_Work]) -> None:
        """Let the block see what the step left, and draft behind it."""
        self._ready = {work.request: work for work in works if work.is_last}
        wanted = self._wanted()
        self._ready = {}
        early, late = [], []
        room = self._max_tokens - len(works)
        for work in works:
            tail = int(wanted.get(work, 0) > 0)  # states that the run with drafts takes
            if tail and work.count - 1 <= min(self.draft_tokens, room):
                tail = work.count
                room -= tail - 1
            rest = work.count - tail
            early += [_Part(work, at, min(self._max_tokens, rest - at)) for at in range(0, rest, self._max_tokens)]
            if tail:
                late.append(_Part(work, rest, tail))
        group: list[_Part] = []
        for part in early:
            if sum([each.size for each in group]) + part.size > self._max_tokens:
                self._run_pairs(*self._entries(group, 0))
                group = []
            group.append(part)
        if group:
            self._run_pairs(*self._entries(group, 0))
        if late:
            self._draft(late, wanted)

    def _entries(self, parts: list["_Part"], samples: int) -> tuple[list[Entry], list[int]]:
        """What the runner takes."""
        entries: list[Entry] = []
        rows: list[int] = []
        for work, at, count in parts:
            start = len(work.followed.tokens) - work.count + at
            request: Any = work.followed  # as the block's runner knows it
            entries.append(Entry(request, start, count, self.cache.table(work.request.id), samples))
            rows += range(work.place + at, work.place + at + count)
        return entries, rows

    def _run_pairs(self, entries: list[Entry], rows: list[int], counts: Sequence[int] = ()) -> list[array]:
        """The drafts. Their time is drafts' cost; how long a round takes is learned. A run that makes a recording, or is a
        recording's first (a GPU's graph is sent to it then), says little of either."""
        recorded, started = self.runner.num_recorded, time.perf_counter()
        self.runner.start_pairs(entries, rows, counts, self.is_narrow)
        results = self.runner.read_drafts()
        seconds, rounds = time.perf_counter() - started, max(counts, default=1)
        # Else of prompts, a layer's share of their time.
        if self.runner.num_recorded == recorded and len(rows) <= len(entries) * (1 + self.draft_tokens):
            seconds = min(seconds, OUTLIER * rounds * self._round_s(len(entries)))
            self._lost_s += seconds
            if rounds > 1:
                self._round_costs[self.is_narrow][1].record(len(entries), seconds / rounds)
        return results

    def _draft(self, parts: list["_Part"], wanted: dict[_Work, int]) -> None:
        """The last states of requests, and the drafts that each is to have."""
        entries, rows = self._entries(parts, 1)
        counts, requests = [wanted[part.work] for part in parts], [part.work.request for part in parts]
        self._num_runs += 1
        if self._can_feed(requests):
            drafts = self.runner.start_pairs(entries, rows, counts, self.is_narrow)
            seconds = max(counts) * self._round_s(len(entries))
            self._lost_s += seconds
            self._unread, self._ends_at = requests, time.perf_counter() + seconds
        else:
            drafts = self._run_pairs(entries, rows, counts)
            drafts = [without_ends(*pair, self.scheduler.eos_ids) for pair in zip(requests, drafts, strict=True)]
        for request, some in zip(requests, drafts, strict=True):
            request.drafts = some

    def _can_feed(self, requests: list[Request]) -> bool:
        """Whether the next step may be given to the device before the host has read the drafts: no mask needs them, and what a round
        takes was measured of late."""
        known = self._round_costs[self.is_narrow][1].num_steps
        if not self.runner.feeds or known < WAITED or self._num_runs % WAITS == 0:
            return False
        return not any([request.options.structure is not None or request.params.rule for request in requests])

    def _read_drafts(self, batch: Batch) -> None:
        """The drafts that the batch was fed with, and those of requests that it has none of."""
        read = dict(zip(self._unread, self.runner.read_drafts(), strict=True))
        self._unread = []
        for request, drafts in read.items():
            if request.drafts:
                request.drafts = without_ends(request, drafts, self.scheduler.eos_ids)
        for entry in batch.entries:
            if entry.drafts and entry.drafts[0] < -1:
                count = len(entry.drafts)
                # Where logits were not finite a draft is none, which no token equals.
                entry.drafts = (read[entry.request] + array("i", [-1]) * count)[:count]


class _Part(NamedTuple):
    """Of the states of a _Work `size` from number `at` on."""

    work: _Work
    at: int
    size: int


def _neutral(params: SamplingParams, vocabulary: int) -> SamplingParams:
    """Without what looks at tokens that the block has not seen, without what nobody reads, and without biases of ids that may have no
    logits here."""
    biases = params.logit_bias and {id: bias for id, bias in params.logit_bias.items() if id < vocabulary}
    neutral: dict[str, Any] = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=None)
    return msgspec.structs.replace(params, logit_bias=biases or None, **neutral)
