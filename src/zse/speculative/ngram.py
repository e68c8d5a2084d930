"""Prompt lookup: what followed the last tokens where they stood before, in the prompt or the reply.

After Saxena, "Prompt Lookup Decoding" (2023). The longest match wins, the latest among equals. Before it come the
tokens that a grammar leaves no choice about (names of fields, punctuation): they are drafts that are always accepted.
"""

from array import array

import msgspec

from zse.scheduler.batch import StepOutput
from zse.scheduler.request import Request
from zse.speculative.speculator import FORCED, Candidate, RequestAcceptance, Speculator, kind_of, without_ends

LEAST = 3  # tokens that must match: two are too often chance
MOST = 16  # longer matches are not told apart
CANDIDATES = 8  # earlier places of the same three tokens that are looked at, latest first
FIRST_SIZE = 256  # places of a new table


class NgramIndex:
    """Where each three neighbouring tokens of one sequence stand. It is brought up to date by find(), 0.3 µs a token.

    A table of hashes gives the latest place, a chain from place to place the earlier ones; a place is the number of
    tokens up to the end of the three. Strangers that share a hash are told apart by comparing tokens. Takes 8 to 12
    bytes a token."""

    __slots__ = ("_before", "_indexed", "_mask", "_table")

    def __init__(self) -> None:
        self._table = array("i", bytes(4 * FIRST_SIZE))  # 0: none
        self._mask = FIRST_SIZE - 1
        self._before = array("i", bytes(4 * LEAST))  # by place
        self._indexed = LEAST - 1

    def find(self, tokens: array) -> tuple[int, int]:
        """(length, place): the longest match of the end of `tokens` found, MOST tokens of it at most, and where it
        ends; (0, 0) without one. `tokens` may only have grown since last time."""
        size = len(tokens)
        if size <= LEAST:
            return 0, 0
        self._update(tokens, size)
        place = self._table[hash(tuple(tokens[-LEAST:])) & self._mask]
        best = found = 0
        for _ in range(CANDIDATES):
            if not place:
                break
            length = max(best + 1, LEAST)
            if length <= place and tokens[place - length : place] == tokens[size - length :]:
                while length < min(MOST, place) and tokens[place - length - 1] == tokens[size - length - 1]:
                    length += 1
                best, found = length, place
                if best == MOST:
                    break
            place = self._before[place]
        return best, found

    def _update(self, tokens: array, size: int) -> None:
        """Enter all places that a token follows: the end itself is no match of itself."""
        if size > self._mask:
            while size > self._mask:
                self._mask = 2 * self._mask + 1
            self._table = array("i", bytes(4 * (self._mask + 1)))
            self._before = array("i", bytes(4 * LEAST))
            self._indexed = LEAST - 1
        table, before, mask = self._table, self._before, self._mask
        first = self._indexed + 1
        if first >= size:
            return
        a, b = tokens[first - 3], tokens[first - 2]
        for place in range(first, size):
            c = tokens[place - 1]
            at = hash((a, b, c)) & mask  # of whole numbers: the same in every process
            before.append(table[at])
            table[at] = place
            a, b = b, c
        self._indexed = size - 1


def continuation(tokens: array, place: int, count: int) -> array:
    """`count` tokens from `place` on; at the end it goes on with its own beginning, as a repetition does."""
    some = tokens[place : place + count]
    while len(some) < count:
        some += some[: count - len(some)]
    return some


def forced_after(tokens: array, forced: tuple[int, dict[int, list[int]]] | None) -> list[int]:
    """The tokens that must come behind `tokens`, as far as that is known. forced: Request.forced."""
    return forced[1].get(tokens[-1], []) if forced is not None and forced[0] == len(tokens) - 1 else []


class _Lookup(RequestAcceptance):
    """What prompt lookup keeps of a request (Request.drafting): kind of its last drafts."""

    index: NgramIndex = msgspec.field(default_factory=NgramIndex)
    kind: int = 0


class NgramSpeculator(Speculator):
    """Drafts from prompt lookup."""

    most_requests = 64

    def before_schedule(self, now: float) -> list[StepOutput]:
        candidates, counts = self._plan(self.scheduler.decoding)
        for candidate, count in zip(candidates, counts, strict=True):
            if count:
                request = candidate.request
                request.drafting.kind = candidate.kind
                if candidate.kind == FORCED:
                    drafts = array("i", forced_after(request.tokens, request.forced)[:count])
                else:
                    drafts = continuation(request.tokens, candidate.place, count)
                request.drafts = without_ends(request, drafts, self.scheduler.eos_ids)
        return []

    def _candidate(self, request: Request) -> Candidate | None:
        state: _Lookup | None = request.drafting
        if state is None:
            state = request.drafting = _Lookup()
        tokens = request.tokens
        room = request.max_len - len(tokens) - 1
        if room < 1:
            return None
        forced = [] if request.forced is None else forced_after(tokens, request.forced)
        if forced:
            return Candidate(request, self.acceptance.rate(FORCED), FORCED, 0, min(room, len(forced)))
        match, place = state.index.find(tokens)
        if match < LEAST:
            state.rest()
            return None
        kind = kind_of(match)
        rate = state.rate(self.acceptance.rate(kind))
        return Candidate(request, rate, kind, place, room)
