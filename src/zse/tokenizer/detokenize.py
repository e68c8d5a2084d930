"""Token ids -> text, piece by piece: whole characters only, and never a part of a stop string."""

import codecs
from collections.abc import Sequence

from zse.tokenizer.base import Tokenizer


class IncrementalDetokenizer:
    """One request's text. All pieces joined are what decode() makes of all tokens, up to the first stop string.

    Args:
        stop: strings that end the text and are not part of it; one that is a control token's text also stops at that token.
        skip_special: leave control tokens out of the text, but for those whose texts are in `keep`.
        continuation: as in Tokenizer.decode().
        min_tokens: stop strings are looked for in the text of the tokens behind so many.

    The text ends before the stop string that is complete first (the longest of those that end together), however the
    tokens cut it. `stopped` is that string, else None; `num_tokens` counts the tokens used, the one that stopped
    included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        continuation: bool = True,
        keep: Sequence[str] = (),
        min_tokens: int = 0,
    ):
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strips_space = tokenizer.strips_space and not continuation
        self._stops = [_Matcher(text) for text in dict.fromkeys(stop)]
        ids = ((tokenizer.find(text), text) for text in stop)
        self._stop_ids = {id: text for id, text in ids if id is not None and tokenizer.is_special(id)}
        self._kept_ids = {tokenizer.find(text) for text in keep}
        self._held, self._min_tokens = "", min_tokens
        self.stopped: str | None = None
        self.num_tokens = 0

    @property
    def num_held(self) -> int:
        """Characters that the tokens so far have beyond the pieces given: they may begin a stop string."""
        return len(self._held)

    def push(self, id: int) -> str:
        """The text that this token makes certain; "" once stopped. An id past the vocabulary has no text: embeddings
        are padded with rows that a model hardly ever samples. IndexError for a negative id."""
        if self.stopped is not None:
            return ""
        self.num_tokens += 1
        if id >= self._tokenizer.vocab_size:
            return ""
        if id in self._stop_ids and self.num_tokens > self._min_tokens:
            text = self._end(self._decode(b"", True))
            self.stopped = self.stopped or self._stop_ids[id]
            return text
        if self._skip_special and id not in self._kept_ids and self._tokenizer.is_special(id):
            return ""
        data = self._tokenizer.token_bytes(id)
        if self._strips_space and data:
            data, self._strips_space = data.removeprefix(b" "), False
        return self._release(self._decode(data))

    def finish(self) -> str:
        """What was held back, when no more tokens come. Bytes of an unfinished character become U+FFFD."""
        return "" if self.stopped is not None else self._end(self._decode(b"", True))

    def _release(self, text: str) -> str:
        if not self._stops or not text or self.num_tokens <= self._min_tokens:
            return text
        end = self._first_stop(text)
        if end is not None:
            shown = self._held + text[:end]
            self._held = ""
            return shown[: len(shown) - len(self.stopped or "")]
        text = self._held + text
        keep = len(text) - max(matcher.matched for matcher in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def _end(self, text: str) -> str:
        shown = self._release(text) + self._held
        self._held = ""
        return shown

    def _first_stop(self, text: str) -> int | None:
        """Moves every matcher through `text`, or until one is complete: then where in `text` it ends."""
        best = None
        for matcher in self._stops:
            end = matcher.feed(text if best is None else text[:best])
            if end is not None and (best is None or end < best or len(matcher.text) > len(self.stopped or "")):
                best, self.stopped = end, matcher.text
        return best


class _Matcher:
    """Knuth, Morris, Pratt (1977): `matched` characters of `text` end what was fed so far; constant work per
    character."""

    def __init__(self, text: str):
        self.text, self.matched = text, 0
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def feed(self, piece: str) -> int | None:
        """Where in `piece` the text is first complete (the end of it), or None."""
        text, matched = self.text, self.matched
        for i, character in enumerate(piece):
            while matched and character != text[matched]:
                matched = self._fallback[matched - 1]
            if character == text[matched]:
                matched += 1
                if matched == len(text):
                    self.matched = matched
                    return i + 1
        self.matched = matched
        return None
