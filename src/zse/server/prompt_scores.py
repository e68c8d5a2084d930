"""Log-probabilities of a prompt's tokens: `echo` with `logprobs` as OpenAI's completions, `prompt_logprobs` as vLLM's."""

import codecs

import msgspec

from zse.engine.messages import Measured, TokenLogprob
from zse.server.generation import MIN_LOGPROB, TokenScore, completion_logprobs


def echoed_logprobs(
    prompt: list[int], measured: Measured, scores: list[TokenScore], text_length: int, token_bytes
) -> dict:
    """`logprobs` of a text completion that repeats its prompt: the prompt's tokens, then the answer's (`scores`), whose
    text begins after text_length characters. Nothing stands before the first token: its entries are null."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before, at = [], 0
    for token, entry in zip(prompt, measured.scores(), strict=True):
        before.append(TokenScore.of(token, entry or TokenLogprob(0.0, []), min(at, text_length)))
        at += len(decoder.decode(token_bytes(token)))
    after = [TokenScore(score.token, score.logprob, score.top, score.offset + text_length) for score in scores]
    out = completion_logprobs(before + after, token_bytes)
    out["token_logprobs"][0] = out["top_logprobs"][0] = None
    return out


def prompt_logprobs(prompt: list[int], measured: Measured, token_bytes) -> list[msgspec.Raw | None]:
    """For each token None (the first), or JSON of token id → its log-probability, rank and text: the prompt's token and the
    alternatives that were asked for. rank is null for a token beyond the alternatives."""
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
