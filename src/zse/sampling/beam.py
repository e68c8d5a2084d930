"""Beam search, as transformers' `generate(num_beams=…)` does it: which continuations are kept, which are finished, and
when the search ends.

Every step the best `width` continuations of all beams together are kept; one that ends (an end token, or the last token
that is allowed) is a hypothesis if it is among the best `width` of its step. A hypothesis' score is the sum of its
log-probabilities divided by its length, end token included, to the power of length_penalty.
"""

from typing import NamedTuple

from zse.errors import RequestError
from zse.sampling.params import MAX_LOGPROBS, BeamParams


def check_beams(params: BeamParams, num_stop_ids: int) -> None:
    """Raises RequestError for a search that needs more alternatives of a token than a step gives. num_stop_ids: tokens
    that end a reply, the model's included."""
    if params.beam_width + num_stop_ids > MAX_LOGPROBS:
        raise RequestError(
            f"beam_width {params.beam_width} and {num_stop_ids} tokens that end a reply are more than "
            f"{MAX_LOGPROBS} together",
            code="out_of_range",
            param="beam_width",
        )


class Beam(NamedTuple):
    """A reply in the making: its tokens, their (log-probability, alternatives), the sum of the log-probabilities."""

    tokens: list[int]
    entries: list[tuple[float, list[tuple[int, float]]]]
    total: float


class Hypothesis(NamedTuple):
    """A finished reply. finish: "stop" (its last token ends it) or "length"."""

    tokens: list[int]
    entries: list[tuple[float, list[tuple[int, float]]]]
    total: float
    score: float
    finish: str


class BeamSearch:
    """The state of one search. stop_ids: tokens that end a reply; max_tokens: of a reply."""

    def __init__(self, params: BeamParams, stop_ids: frozenset[int], max_tokens: int):
        self.params, self._stop_ids, self.max_tokens = params, stop_ids, max_tokens
        self.beams = [Beam([], [], 0.0)]
        self.finished: list[Hypothesis] = []  # best first, at most beam_width
        self.is_completed = False

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens of every beam that advance() needs."""
        return self.params.beam_width + len(self._stop_ids)

    def advance(self, lines: list[list[tuple[int, float]]]) -> list[int]:
        """lines: for each beam its likeliest next tokens and their log-probabilities, best first, num_candidates or
        more. Sets `beams` to those that are kept, and returns which beam each of them continues. [] when the search is
        completed."""
        width = self.params.beam_width
        candidates = [
            (beam.total + logprob, -parent, -rank, token, logprob)
            for parent, (beam, line) in enumerate(zip(self.beams, lines, strict=True))
            for rank, (token, logprob) in enumerate(line)
        ]
        candidates.sort(reverse=True)  # equal ones: the first beam's first
        length = len(self.beams[0].tokens) + 1
        told = self.params.logprobs or 0
        going: list[tuple[int, Beam]] = []
        for place, (total, minus_parent, _, token, logprob) in enumerate(candidates):
            ends = "stop" if token in self._stop_ids else "length" if length >= self.max_tokens else None
            if ends is None and len(going) < width or ends is not None and place < width:
                parent = self.beams[-minus_parent]
                beam = Beam([*parent.tokens, token], [*parent.entries, (logprob, lines[-minus_parent][:told])], total)
                if ends is None:
                    going.append((-minus_parent, beam))
                else:
                    self._finish(beam, ends)
            if place >= width and (len(going) >= width or length >= self.max_tokens):
                break
        self.beams = [beam for _, beam in going]
        self.is_completed = not going or not self._can_improve(length)
        return [] if self.is_completed else [parent for parent, _ in going]

    def _finish(self, beam: Beam, ends: str) -> None:
        score = beam.total / len(beam.tokens) ** self.params.length_penalty
        self.finished.append(Hypothesis(*beam, score, ends))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.params.beam_width :]

    def _can_improve(self, length: int) -> bool:
        """Whether a beam, all of `length` tokens now, may still become a hypothesis that is kept."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        return self.beams[0].total / length**params.length_penalty > self.finished[-1].score
