"""One request's place in its grammar: takes sampled tokens, gives masks of the vocabulary."""

from zse.structured.compile import Vocabulary, refusal
from zse.structured.messages import FREE, MASKED
from zse.structured.options import Thinking


class Guide:
    """matcher: an LLMatcher at its start, None: any text. A mask is one bit a token, id 0 the lowest bit of the first
    word; lines are places of `nbytes` bytes each from `address` on.

    While the answer reasons nothing is masked but its end, until the budget is used: then each mask holds the one next
    token of the closing mark. The grammar begins behind it.
    """

    def __init__(self, vocabulary: Vocabulary, matcher, thinking: Thinking | None):
        self._vocabulary, self.matcher = vocabulary, matcher
        self._budget: int | None = None
        self._closing: list[int] = []
        self._opening: list[int] = []
        self._closing_bytes = b""
        self._tail = b""
        self._forced: list[int] = []  # what is left of the closing mark
        self._reasons = False
        self._begun = False
        self._only: list[int] | None = None  # what look_ahead() found
        if thinking is not None:
            self._budget = thinking.budget
            self._closing = vocabulary.mark(thinking.closing)
            self._closing_bytes = thinking.closing.encode()
            self._opening = vocabulary.mark(thinking.opening)
            self._reasons = thinking.is_open
            self._spend(0)

    def take(self, tokens: list[int]) -> None:
        """Tokens that were sampled. Raises GrammarError when the grammar cannot go on."""
        for token in tokens:
            self._take(token)

    @property
    def only_matches(self) -> bool:
        """Whether the next mask is the grammar's, nothing more: it may be computed beside those of others."""
        return self.matcher is not None and not self._reasons and (self._begun or not self._opening)

    def masks(self, buffer: memoryview, line: int, nbytes: int, address: int, drafts: list[int]) -> list[int]:
        """Write the masks of the next token and of those after each draft; FREE or MASKED for each. Lines behind a draft
        that its mask forbids are FREE: nothing that is sampled there is kept."""
        kinds = [self.write_mask(buffer, line, nbytes, address)]
        if not drafts:
            return kinds
        matcher = self.matcher
        if self._reasons or matcher is None or self._vocabulary.eos_ids.intersection(drafts):
            return kinds + [FREE] * len(drafts)
        taken = 0
        for index, draft in enumerate(drafts):
            if matcher.is_stopped() or matcher.validate_tokens([draft]) != 1 or not matcher.consume_token(draft):
                break
            taken += 1
            kinds.append(self.write_mask(buffer, line + index + 1, nbytes, address))
        if taken:
            matcher.rollback(taken)
        return kinds + [FREE] * (len(drafts) + 1 - len(kinds))

    def take_allowed(self, drawn: list[int]) -> int:
        """Take these tokens up to the first that the next mask would forbid; how many. No mask is computed. Raises
        GrammarError."""
        for taken, token in enumerate(drawn):
            if not self._take_if_allowed(token):
                return taken
        return len(drawn)

    def look_ahead(self) -> None:
        """Find out now what the next take_allowed() would have to."""
        if self._only is None and self.only_matches:
            self._next_is_forced()

    def _next_is_forced(self) -> list[int]:
        """The tokens that must come next, empty where there is a choice. Where the text is forced, a mask allows the
        tokens that the tokenizer makes of it, while the grammar would take others with the same text."""
        if self._only is None:
            self._only = self.matcher.compute_ff_tokens()
        return self._only

    def _take_if_allowed(self, token: int) -> bool:
        matcher = self.matcher
        if self.only_matches and not matcher.is_stopped():
            forced = self._next_is_forced()
            if forced and forced[0] != token:
                return False
            # Tried and taken at once: 4 µs where a mask is 10 to 120.
            if matcher.try_consume_tokens([token]) != 1:
                if matcher.is_error():
                    raise refusal(matcher.get_error())
                return False
            self._begun, self._only = True, None
            return True
        if self._reasons:
            allowed = (
                token == self._forced[0] if self._forced else matcher is None or token not in self._vocabulary.eos_ids
            )
        elif matcher is None or (self._may_reason and token == self._opening[0]):
            allowed = True
        elif matcher.is_stopped():
            allowed = token in self._vocabulary.eos_ids
        else:
            forced = self._next_is_forced()
            allowed = token == forced[0] if forced else matcher.validate_tokens([token]) == 1
        if allowed:
            self._take(token)
        return allowed

    @property
    def _may_reason(self) -> bool:
        """Whether the answer may begin with the mark that opens the reasoning."""
        return not self._begun and len(self._opening) == 1 and self._budget != 0

    def _take(self, token: int) -> None:
        self._only = None
        if self._reasons:
            self._reason(token)
            return
        if not self._begun:
            self._begun = True
            if self._opening == [token]:
                self._reasons = True
                self._spend(0)
                return
        matcher = self.matcher
        if matcher is not None and not matcher.is_stopped() and not matcher.consume_token(token):
            raise refusal(matcher.get_error() or "a token outside the grammar")

    def _reason(self, token: int) -> None:
        data = self._vocabulary.tokens[token] if token < len(self._vocabulary.tokens) else b""
        self._tail = (self._tail + data)[-256:]
        if self._forced and self._forced[0] == token:
            del self._forced[0]
        if self._closing_bytes in self._tail:
            self._reasons, self._begun, self._tail = False, True, b""
        elif not self._forced:
            self._spend(1)

    def _spend(self, count: int) -> None:
        if self._reasons and self._budget is not None:
            self._budget -= count
            if self._budget <= 0:
                self._forced = list(self._closing)

    def write_mask(self, buffer: memoryview, line: int, nbytes: int, address: int) -> int:
        """Write the mask of the next token; FREE or MASKED. Raises GrammarError."""
        place = buffer[line * nbytes : (line + 1) * nbytes]
        if self._reasons:
            return self._write_reasoning(place)
        matcher = self.matcher
        if matcher is None:
            return FREE
        matcher.unsafe_compute_mask_ptr(address + line * nbytes, nbytes)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if self._may_reason:
            _set(place, self._opening[0])
        return MASKED

    def _write_reasoning(self, place: memoryview) -> int:
        if self._forced:
            place[:] = bytes(len(place))
            _set(place, self._forced[0])
            return MASKED
        if self.matcher is None:
            return FREE
        place[:] = b"\xff" * len(place)  # the sampler looks at no bit behind the vocabulary
        for id in self._vocabulary.eos_ids:
            place[id >> 3] &= ~(1 << (id & 7)) & 255
        return MASKED


def _set(place: memoryview, id: int) -> None:
    place[id >> 3] |= 1 << (id & 7)
