"""Log-probabilities as the APIs show them: of answers, and of prompts."""

import msgspec

from zse.engine.messages import Measured, TokenLogprob

MIN_LOGPROB = -9999.0  # JSON has no -Infinity


class TokenScore(msgspec.Struct):
    """Log-probability of one generated token; top: (token id, logprob), best first; offset: where its text begins in
    the answer, in characters (text that is held back for a stop string counts; behind an echo its characters, too)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int

    @classmethod
    def of(cls, token: int, entry: TokenLogprob, offset: int) -> "TokenScore":
        top = [(other, max(value, MIN_LOGPROB)) for other, value in entry.top]
        return cls(token, max(entry.logprob, MIN_LOGPROB), top, offset)

    def moved(self, num_chars: int) -> "TokenScore":
        """The same behind so much more text."""
        return TokenScore(self.token, self.logprob, self.top, self.offset + num_chars)


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


def echoed_logprobs(
    prompt: list[int], measured: Measured, pieces: list[str], text_length: int, scores: list[TokenScore], token_bytes
) -> dict:
    """`logprobs` of a text completion that repeats its prompt: the prompt's tokens, then the answer's (`scores`), whose
    text begins after text_length characters. pieces: what the prompt's tokens add to the text that is shown of it.
    Nothing stands before the first token: its entries are null."""
    before, at = [], 0
    for token, entry, piece in zip(prompt, measured.scores(), pieces, strict=True):
        before.append(TokenScore.of(token, entry or TokenLogprob(0.0, []), min(at, text_length)))
        at += len(piece)
    out = completion_logprobs(before + [score.moved(text_length) for score in scores], token_bytes)
    out["token_logprobs"][0] = out["top_logprobs"][0] = None
    return out


def prompt_logprobs(prompt: list[int], measured: Measured, token_bytes) -> list[msgspec.Raw | None]:
    """For each token None (the first), or JSON of token id → its log-probability, rank and text: the prompt's token and
    the alternatives that were asked for. rank is null for a token beyond the alternatives."""
    found: list[msgspec.Raw | None] = []
    for token, entry in zip(prompt, measured.scores(), strict=True):
        if entry is None:
            found.append(None)
            continue
        ranked: dict[int, tuple[float, int | None]] = {
            other: (value, rank) for rank, (other, value) in enumerate(entry.top, 1)
        }
        ranked.setdefault(token, (entry.logprob, None))
        shown = {
            str(other): {
                "logprob": max(value, MIN_LOGPROB),
                "rank": rank,
                "decoded_token": token_bytes(other).decode("utf-8", "replace"),
            }
            for other, (value, rank) in ranked.items()
        }
        # As text at once: all of them together would be encoded in one call, which holds the interpreter lock.
        found.append(msgspec.Raw(msgspec.json.encode(shown)))
    return found
