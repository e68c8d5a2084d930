"""From tokens to text: one Choice per answer, with its detokenizer, stop strings and log-probabilities."""

from typing import TYPE_CHECKING

import msgspec

from zse.engine.messages import TokenLogprob, Tokens
from zse.sampling.params import SamplingParams
from zse.server.tools.calls import CallPart, ToolCall, fold
from zse.server.tools.reasoning import Reasoning

if TYPE_CHECKING:
    from zse.server.tools.chat import Answers

MIN_LOGPROB = -9999.0  # JSON has no -Infinity


class TokenScore(msgspec.Struct):
    """Log-probability of one generated token; top: (token id, logprob), best first; offset: where its text begins in
    the answer, in characters (text that is held back for a stop string counts)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int

    @classmethod
    def of(cls, token: int, entry: TokenLogprob, offset: int) -> "TokenScore":
        top = [(other, max(value, MIN_LOGPROB)) for other, value in entry.top]
        return cls(token, max(entry.logprob, MIN_LOGPROB), top, offset)


class ChoiceDelta(msgspec.Struct):
    """What one engine event adds to an answer. text: of its content; calls: (position among the answer's calls, a part)."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[int, CallPart]] = []
    scores: list[TokenScore] = []
    finish_reason: str | None = None


class Choice:
    """One answer in the making. feed() takes the engine's events until finish_reason is set. model: its detokenizer is
    used. answers: how reasoning and tool calls are taken out of the text; None: all of it is content."""

    def __init__(self, index: int, model, params: SamplingParams, answers: "Answers | None" = None):
        self.index = index
        self.parts: list[str] = []
        self.reasoning_parts: list[str] = []
        self.call_parts: list[CallPart] = []
        self._num_calls = 0
        self.reasoning_tokens = 0  # the marks around it included
        self._undecided = 0  # tokens that may be the opening mark of reasoning
        self.scores: list[TokenScore] = []
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self.total_logprob = 0.0
        self._num_chars = 0
        self._want_scores = params.logprobs is not None
        self._detokenizer = model.detokenizer(params.stop, () if answers is None else answers.controls)
        self._splitter = None if answers is None else answers.splitter()

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def calls(self) -> list[ToolCall]:
        """What the parts so far add up to."""
        return fold(self.call_parts)

    def feed(self, event: Tokens) -> ChoiceDelta:
        """Take an event. finish_reason of the result (and of self) is set by the last one; when a stop string ended
        the answer the engine still runs: cancel it."""
        delta = ChoiceDelta()
        self.num_tokens += len(event.tokens)
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        logprobs = event.logprobs or []
        self.total_logprob += sum(entry.logprob for entry in logprobs)
        # The token that ended generation is no part of the answer.
        visible = event.tokens[:-1] if event.finish == "stop" else event.tokens
        for position, token in enumerate(visible):
            if self._want_scores and position < len(logprobs):
                delta.scores.append(TokenScore.of(token, logprobs[position], self._num_chars + len(delta.text)))
            self._add(delta, self._detokenizer.push(token))
            if self._detokenizer.stopped or self._splitter is not None and self._splitter.done:
                self.num_tokens -= len(event.tokens) - position - 1
                delta.finish_reason = "stop"
                break
        else:
            if event.finish is not None:
                self._add(delta, self._detokenizer.finish(), of_token=False)
                delta.finish_reason = "stop" if self._detokenizer.stopped else event.finish
        if delta.finish_reason is not None and self._splitter is not None:
            self._put(delta, self._splitter.finish())
            if self._num_calls and delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"
        self._num_chars += len(delta.text)
        self.parts.append(delta.text)
        self.reasoning_parts.append(delta.reasoning)
        self.scores += delta.scores
        self.finish_reason = delta.finish_reason
        return delta

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended it."""
        return self._detokenizer.stopped

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_parts)

    def _add(self, delta: ChoiceDelta, text: str, of_token: bool = True) -> None:
        splitter = self._splitter
        if splitter is None:
            delta.text += text
            return
        was_reasoning = splitter.is_reasoning
        if text:
            self._put(delta, splitter.push(text))
        if of_token:
            self._undecided += 1
        if was_reasoning or splitter.is_reasoning:
            self.reasoning_tokens += self._undecided
        if not splitter.is_undecided:
            self._undecided = 0

    def _put(self, delta: ChoiceDelta, pieces: list[str | Reasoning | CallPart]) -> None:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                delta.reasoning += piece.text
            elif isinstance(piece, CallPart):
                self._num_calls += bool(piece.name)
                delta.calls.append((self._num_calls - 1, piece))
                self.call_parts.append(piece)
            else:
                delta.text += piece

    @property
    def rank(self) -> tuple[float, int]:
        """For best_of: higher mean log-probability first, then the earlier index."""
        return (-self.total_logprob / max(1, self.num_tokens), self.index)


def chat_logprobs(scores: list[TokenScore], token_bytes) -> dict:
    """`logprobs` of a chat choice. token_bytes: id → bytes."""

    def entry(token: int, logprob: float) -> dict:
        data = token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {**entry(score.token, score.logprob), "top_logprobs": [entry(*other) for other in score.top]}
            for score in scores
        ],
        "refusal": None,
    }


def completion_logprobs(scores: list[TokenScore], token_bytes) -> dict:
    """`logprobs` of a text completion choice. Tokens that are no valid UTF-8 alone are shown as OpenAI shows them:
    bytes:\\xe2\\x82."""

    def show(token: int) -> str:
        data = token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    tops = []
    for score in scores:
        top = {show(token): logprob for token, logprob in score.top}
        top.setdefault(show(score.token), score.logprob)  # the sampled token is always listed
        tops.append(top)
    return {
        "tokens": [show(score.token) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": [score.offset for score in scores],
    }
