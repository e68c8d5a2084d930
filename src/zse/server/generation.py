"""From tokens to text: one Choice per answer, with its detokenizer, stop strings and log-probabilities."""

import msgspec

from zse.engine.messages import TokenLogprob, Tokens

MIN_LOGPROB = -9999.0  # JSON has no -Infinity


class TokenScore(msgspec.Struct):
    """Log-probability of one generated token; top: (token id, logprob), best first; offset: where its text begins in
    the answer, in characters (text that is held back for a stop string counts)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int


class Delta(msgspec.Struct):
    """What one engine event adds to an answer."""

    text: str = ""
    scores: list[TokenScore] = []
    finish_reason: str | None = None


class Choice:
    """One answer in the making. feed() takes the engine's events until finish_reason is set."""

    def __init__(self, index: int, detokenizer, want_scores: bool):
        self.index = index
        self.parts: list[str] = []
        self.scores: list[TokenScore] = []
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self.total_logprob = 0.0
        self._detokenizer, self._want_scores = detokenizer, want_scores
        self._num_chars = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def feed(self, event: Tokens) -> Delta:
        """Take an event. finish_reason of the result (and of self) is set by the last one; when a stop string ended
        the answer the engine still runs: cancel it."""
        delta = Delta()
        self.num_tokens += len(event.tokens)
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        logprobs = event.logprobs or []
        self.total_logprob += sum(entry.logprob for entry in logprobs)
        # The token that ended generation is no part of the answer.
        visible = event.tokens[:-1] if event.finish == "stop" else event.tokens
        for position, token in enumerate(visible):
            if self._want_scores and position < len(logprobs):
                delta.scores.append(_score(token, logprobs[position], self._num_chars + len(delta.text)))
            delta.text += self._detokenizer.push(token)
            if self._detokenizer.stopped:
                self.num_tokens -= len(event.tokens) - position - 1
                delta.finish_reason = "stop"
                break
        else:
            if event.finish is not None:
                delta.text += self._detokenizer.finish()
                delta.finish_reason = "stop" if self._detokenizer.stopped else event.finish
        self._num_chars += len(delta.text)
        self.parts.append(delta.text)
        self.scores += delta.scores
        self.finish_reason = delta.finish_reason
        return delta

    @property
    def rank(self) -> tuple[float, int]:
        """For best_of: higher mean log-probability first, then the earlier index."""
        return (-self.total_logprob / max(1, self.num_tokens), self.index)


def _score(token: int, entry: TokenLogprob, offset: int) -> TokenScore:
    return TokenScore(token, max(entry.logprob, MIN_LOGPROB),
                      [(other, max(value, MIN_LOGPROB)) for other, value in entry.top], offset)


def chat_logprobs(scores: list[TokenScore], token_bytes) -> dict:
    """`logprobs` of a chat choice. token_bytes: id → bytes."""
    def entry(token: int, logprob: float) -> dict:
        data = token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return {"content": [{**entry(score.token, score.logprob), "top_logprobs": [entry(*other) for other in score.top]}
                        for score in scores], "refusal": None}


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
    return {"tokens": [show(score.token) for score in scores], "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": tops, "text_offset": [score.offset for score in scores]}
