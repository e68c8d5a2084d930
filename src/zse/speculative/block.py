"""Drafts of the model's own next-token block (zse.models.next_token).

It runs behind each step of the model, while the states of that step's tokens stand: the block sees every token of a request with
the state before it, and what it predicts behind the last one is the first draft. Further ones it makes of its own states, whose
keys and values the next step's right ones are written over.

It has pages of its own, whose positions begin where it began to follow a request (only distances count): a prompt's cached part,
of which no states come by, is no hole in what it sees but lies before it. So with steps that it did not see while drafts did not
pay: it begins anew."""

import time
from array import array
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, Entry, StepOutput
from zse.scheduler.request import RUNNING, Request
from zse.scheduler.scheduler import Scheduler
from zse.speculative.beside import BesideSpeculator
from zse.speculative.speculator import BLOCK, OUTLIER, Candidate, RequestAcceptance, without_ends


class Followed(RequestAcceptance, eq=False):
    """A request as the block's runner knows it. tokens: that it has seen, the first of them the request's token `shift`. params:
    without penalties, which look at tokens that it has not seen."""

    kind: int = BLOCK
    shift: int = 0
    row: int = 0
    residency: int = 0
    seed: int = 0
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
    """runner: a zse.engine.block_runner.BlockRunner. Else as BesideSpeculator."""

    first_steps = 6.0  # who asks for it wants it to be tried; of 200 tokens they are 3 %

    def __init__(self, scheduler: Scheduler, runner: Any, **options: Any):
        super().__init__(scheduler, runner, **options)
        self._ready: dict[Request, _Work] = {}
        self.reads_tokens = self.runs_ahead

    # -- the engine's side

    def before_schedule(self, now: float) -> list[StepOutput]:
        return []

    def after_commit(self, batch: Batch, seconds: float) -> None:
        # A step that was given ahead has written over the states.
        stand = self.reads_tokens or not self.runs_ahead
        super().after_commit(batch, seconds)
        self._forget()
        follows = self._follows()
        self.reads_tokens = self.runs_ahead and follows
        if follows and stand:
            self._run(self._work(batch))

    def idle(self, now: float) -> bool:
        return self.runner.record_ahead()

    # -- inside

    def _follows(self) -> bool:
        """Whether drafts would pay in steps like this one, as far as that is known."""
        scheduler, running = self.scheduler, self.scheduler.running
        rows = len(running)
        if not self.cost.num_steps or not rows:
            return True
        room = self.room(rows, min(scheduler.max_drafts, scheduler.budget.max_tokens - rows))
        rate, known = self.acceptance.rate(BLOCK), [request.drafting for request in running]
        rates = [rate if state is None else state.rate(rate) for state in known]
        likely = [Candidate(*pair, BLOCK, 0, self.draft_tokens) for pair in zip(running, rates, strict=True)]
        if room and any(self.choose(likely, rows, room, self._round_s(rows))):
            return True
        for state in known:
            if state is not None:
                state.rest()
        return False

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
            followed.tokens.extend(request.tokens[at + 1 : end + 1])
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
                params=_neutral(request.params),
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
        wanted = {}
        for candidate, count in zip(*self._plan(self.scheduler.decoding), strict=True):
            wanted[self._ready[candidate.request]] = count
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
            entries.append(_entry(work, start, count, self.cache.table(work.request.id), samples))
            rows += range(work.place + at, work.place + at + count)
        return entries, rows

    def _run_pairs(self, entries: list[Entry], rows: list[int], again: bool = False) -> list[tuple[int, Any]]:
        """What the runner says. Its time is drafts' cost; how long a round of drafts behind drafts takes is learned. A run that
        makes a recording, or is a recording's first (a GPU's graph is sent to it then), says little of either."""
        recorded, started = self.runner.num_recorded, time.perf_counter()
        results = self.runner.run_pairs(entries, rows, again=again)
        seconds = time.perf_counter() - started
        if self.runner.num_recorded == recorded:
            if len(rows) <= len(entries) * (1 + self.draft_tokens):  # else of prompts, a layer's share of their time
                seconds = min(seconds, OUTLIER * self._round_s(len(entries)))
                self._lost_s += seconds
            if again:
                self._round_cost.record(len(entries), seconds)
        return results

    def _draft(self, parts: list["_Part"], wanted: dict[_Work, int]) -> None:
        """The last states of requests, and the drafts that each is to have: a round for each."""
        drafts = {part.work: array("i") for part in parts}
        entries, rows = self._entries(parts, 1)
        alive = [part.work for part in parts]
        places = [end - 1 for end in accumulate(part.size for part in parts)]
        number = 0
        while alive:
            results = self._run_pairs(entries, rows, again=number > 0)
            number += 1
            going, rows, entries = [], [], []
            for work, place, (token, _) in zip(alive, places, results, strict=True):
                if token < 0:
                    continue  # not finite
                made = drafts[work]
                made.append(token)
                if len(made) < wanted[work]:
                    table, start = self.cache.table(work.request.id), len(work.followed.tokens) + number - 1
                    entries.append(_entry(work, start, 1, table, 1, made[:]))
                    going.append(work)
                    rows.append(place)
            alive, places = going, [*range(len(going))]
        for work, made in drafts.items():
            work.request.drafts = without_ends(work.request, made, self.scheduler.eos_ids)


class _Part(NamedTuple):
    """Of the states of a _Work `size` from number `at` on."""

    work: _Work
    at: int
    size: int


def _entry(work: _Work, *rest: Any) -> Entry:
    """Of the request as the block's runner knows it."""
    request: Any = work.followed
    return Entry(request, *rest)


def _neutral(params: SamplingParams) -> SamplingParams:
    """Without what looks at tokens that the block has not seen, and without what nobody reads."""
    return msgspec.structs.replace(
        params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=None
    )
