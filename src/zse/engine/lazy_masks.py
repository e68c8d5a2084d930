"""Masks that are computed only for tokens that need one: draw, ask the grammar, draw again where it says no.

A token is drawn from p, all of the vocabulary. With a the mass that the grammar allows, the token is allowed with
probability a and kept; else the mask is computed and another is drawn from p / a. So an allowed token t comes with p(t)
+ (1 - a) p(t) / a = p(t) / a, which is what drawing under the mask gives (rejection sampling, with the second try
exact). Of greedy requests the likeliest of all tokens is the likeliest allowed one wherever it is allowed. Penalties
and biases are in p before the mask in either order. top_k, top_p and min_p cut what is left by the mask: an allowed
token that survives the cut of all tokens would come too seldom, so such requests are masked first.

The second draw has a random number of its own, Philox of (seed, position + 2**62): a function of both alone, so a
request says the same in any batch. It is used wherever the first token is refused, also where the mask was computed
ahead (behind drafts, of requests that are refused often, with log-probabilities): how masks are computed changes no
token.

What it saves: 0.6 ms of a core in a step of 8 rows, and the second replay. A question takes the grammar process 4 µs, a
mask 10 to 120, and 1 to 11 % of SmolLM2-135M's greedy tokens are refused. What it costs: the way to that process and
back takes a step of 8 rows 0.3 ms longer (the first question takes 36 µs, because the forward has emptied the caches).
"""

from collections.abc import Callable, Sequence
from typing import Any

from zse.sampling.params import SamplingParams
from zse.structured.service import Grammars, MaskAsk

# Added to the position for the second draw. Contexts are shorter.
SECOND_DRAW = 1 << 62


def may_draw_first(params: SamplingParams) -> bool:
    """Whether a request's tokens may be drawn before they are masked, with the same distribution."""
    return params.temperature < 1e-5 or params.top_k == 1 or not params.is_filtered


class DrawnRun:
    """The lines of one request in a step, line i of them behind draft i - 1; drawn without a mask."""

    __slots__ = ("at", "drafts", "known", "line", "request")

    def __init__(self, request: Any, line: int, drafts: Sequence[int]):
        self.request, self.line, self.drafts = request, line, drafts
        self.at = 0  # lines that are settled
        self.known: list[int] = []  # their tokens, which the drafts equal

    def drawn(self, tokens: Sequence[int]) -> list[int]:
        """Of the tokens drawn in its lines those that would stand behind what is settled, as far as the drafts hold."""
        drawn: list[int] = []
        for place in range(self.at, len(self.drafts) + 1):
            token = tokens[self.line + place]
            if token < 0:
                break  # its logits were not finite
            drawn.append(token)
            if self._ends(place, token):
                break
        return drawn

    def settle(self, tokens: Sequence[int]) -> bool:
        """These are the tokens of its next lines, the last of them drawn twice. Whether lines behind them count."""
        self.known += tokens
        self.at += len(tokens)
        return bool(tokens) and tokens[-1] >= 0 and not self._ends(self.at - 1, tokens[-1])

    def _ends(self, place: int, token: int) -> bool:
        return place >= len(self.drafts) or token != self.drafts[place] or token in self.request.stop_ids


def check_masked(
    runs: list[DrawnRun],
    tokens: list[int],
    masked: frozenset[int],
    grammars: Grammars,
    draw_again: Callable[[int, int | None], int],
) -> None:
    """Hold what was drawn against masks that are there: of the lines in `masked`; others are free.

    tokens: of all lines of the step, -1 where the logits were not finite. draw_again(line, kept): mask a line and
    sample it; kept: a token that stands all the same, for its log-probability. It gives the token."""
    nbytes, memory = grammars.line_nbytes, grammars.memory
    for run in runs:
        shows = run.request.params.logprobs is not None
        goes_on = True
        while goes_on:
            line = run.line + run.at
            token = tokens[line]
            if token >= 0 and line in masked:
                allowed = bool(memory[line * nbytes + (token >> 3)] >> (token & 7) & 1)
                grammars.note(run.request.id, not allowed)
                if not allowed or shows:
                    token = draw_again(line, token if allowed else None)
            goes_on = run.settle([token])


def check_drawn(
    runs: list[DrawnRun],
    tokens: list[int],
    grammars: Grammars,
    failures: dict,
    draw_again: Callable[[int, int | None], int],
) -> None:
    """The same without masks: the grammar process takes what it allows, and gives the mask of the first that it does
    not. Behind a draft that a second draw gave it is asked again. failures: as of StepMasks."""
    while runs:
        asks = [MaskAsk(run.request, run.line + run.at, drawn=run.drawn(tokens), known=run.known) for run in runs]
        asks, runs = _with_drawn(asks, runs)
        if not asks:
            return
        grammars.begin(asks)
        found = grammars.finish()
        failures.update(found.failures)
        later = []
        for run, ask, allowed in zip(runs, asks, found.num_allowed, strict=True):
            id = ask.request.id
            if id in found.failures:
                continue
            for _ in range(allowed):
                grammars.note(id, False)
            if allowed < len(ask.drawn):
                grammars.note(id, True)
                again = draw_again(ask.line + allowed, None)
                if run.settle([*ask.drawn[:allowed], again]):
                    later.append(run)
        runs = later


def _with_drawn(asks: list, runs: list[DrawnRun]) -> tuple[list, list[DrawnRun]]:
    """Without the requests whose logits were not finite."""
    if all(ask.drawn for ask in asks):
        return asks, runs
    kept = [(ask, run) for ask, run in zip(asks, runs, strict=True) if ask.drawn]
    return [ask for ask, _ in kept], [run for _, run in kept]
