"""One request's place in its grammar: takes sampled tokens, gives masks of the vocabulary."""

import time

from zse.structured.compile import Vocabulary, refusal
from zse.structured.messages import FREE, MASKED
from zse.structured.options import Thinking

# A mask of so few tokens is looked behind: white space, and quotes, which names of fields follow. A token takes 5 µs,
# 20 where there is text that must follow, while the model runs. No more than MAX_FORCED_BYTES of that are told.
NARROW, MAX_FORCED_BYTES, LOOK_S = 64, 64, 0.001


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
        self.ahead_s = 0.0  # processor time of that
        self.is_alone = False  # its masks are not computed beside others
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
        """Whether the next mask is the grammar's, nothing more."""
        return self.matcher is not None and not self._reasons and (self._begun or not self._opening)

    @property
    def has_choice(self) -> bool:
        """Whether the next mask is the grammar's and has to be computed, which may be done beside those of others."""
        return self.only_matches and (self.matcher.is_stopped() or not self._next_is_forced())

    def masks(
        self,
        buffer: memoryview,
        line: int,
        nbytes: int,
        address: int,
        drafts: list[int],
        forced: dict[int, list[int]] | None = None,
    ) -> list[int]:
        """Write the masks of the next token and of those after each draft; FREE or MASKED for each. Lines behind a
        draft that its mask forbids are FREE: nothing that is sampled there is kept. forced: filled with tokens that the
        last mask allows → those that must come behind; None: nobody asks."""
        kinds = [self.write_mask(buffer, line, nbytes, address)]
        if not drafts and forced is None:
            return kinds
        matcher = self.matcher
        if self._reasons or matcher is None or self._vocabulary.eos_ids.intersection(drafts):
            return kinds + [FREE] * len(drafts)
        taken = 0
        for index, draft in enumerate(drafts):
            if matcher.is_stopped() or matcher.validate_tokens([draft]) != 1 or not matcher.consume_token(draft):
                break
            taken, self._only = taken + 1, None
            kinds.append(self.write_mask(buffer, line + index + 1, nbytes, address))
        if forced is not None and kinds[-1] == MASKED:
            self._look_behind(buffer[(line + taken) * nbytes : (line + taken + 1) * nbytes], forced)
        if taken:
            matcher.rollback(taken)
            self._only = None
        return kinds + [FREE] * (len(drafts) + 1 - len(kinds))

    def _look_behind(self, place: memoryview, forced: dict[int, list[int]]) -> None:
        matcher, vocabulary = self.matcher, self._vocabulary
        bits = int.from_bytes(place, "little")
        if matcher.is_stopped() or bits.bit_count() > NARROW:
            return
        end = time.perf_counter() + LOOK_S
        while bits and time.perf_counter() < end:
            token = bits.bit_length() - 1
            bits ^= 1 << token
            is_text = not vocabulary.tokens[token].isspace() and token not in vocabulary.eos_ids
            if is_text and matcher.try_consume_tokens([token]) == 1:
                text = matcher.compute_ff_bytes()[:MAX_FORCED_BYTES]
                if text:
                    # What ends a name of JSON is one token with the colon or comma behind it, as models write it.
                    runs = (vocabulary(text + more) for more in (b":", b",", b""))
                    forced[token] = next((run for run in runs if matcher.validate_tokens(run) == len(run)), [])
                matcher.rollback(1)

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
        if not matcher.is_stopped() and not self._may_reason:
            forced = self._next_is_forced()
            if forced:
                return _write_only(place, forced[0])
        matcher.unsafe_compute_mask_ptr(address + line * nbytes, nbytes)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if self._may_reason:
            _set(place, self._opening[0])
        return MASKED

    def _write_reasoning(self, place: memoryview) -> int:
        if self._forced:
            return _write_only(place, self._forced[0])
        if self.matcher is None:
            return FREE
        place[:] = b"\xff" * len(place)  # the sampler looks at no bit behind the vocabulary
        for id in self._vocabulary.eos_ids:
            place[id >> 3] &= ~(1 << (id & 7)) & 255
        return MASKED


def _write_only(place: memoryview, id: int) -> int:
    place[:] = bytes(len(place))
    _set(place, id)
    return MASKED


def _set(place: memoryview, id: int) -> None:
    place[id >> 3] |= 1 << (id & 7)
