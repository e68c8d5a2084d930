"""The bounded queue: how many requests and prompt tokens may be in the house, decided before any work is done."""

from zse.server.errors import APIError

BYTES_PER_TOKEN = 3  # of text, for the estimate before tokenising; English has 4, code and CJK about 3


class Ticket:
    """A reservation. release() in a `finally`; prefilled() once the first token is there."""

    __slots__ = ("_admission", "choices", "tokens")

    def __init__(self, admission: "Admission", choices: int, tokens: int):
        self._admission, self.choices, self.tokens = admission, choices, tokens

    def set_tokens(self, tokens: int) -> None:
        """Replace the estimate by the true number of prompt tokens."""
        self._admission.queued_tokens += tokens - self.tokens
        self.tokens = tokens

    def prefilled(self) -> None:
        """Its prompt is no longer waiting."""
        self.set_tokens(0)

    def release(self) -> None:
        self.set_tokens(0)
        self._admission.choices -= self.choices
        self.choices = 0


class Admission:
    """max_choices: completions running or waiting (a request with n = 4 counts four times); max_tokens: prompt tokens
    of requests without a first token. A request alone in the house is always let in."""

    def __init__(self, max_choices: int, max_tokens: int):
        self.max_choices, self.max_tokens = max_choices, max_tokens
        self.choices = self.queued_tokens = 0

    def check(self) -> None:
        """Refuse at once when nothing more fits, before the body is even parsed."""
        self._fits(1, 0)

    def reserve(self, choices: int, tokens: int) -> Ticket:
        self._fits(choices, tokens)
        self.choices += choices
        self.queued_tokens += tokens
        return Ticket(self, choices, tokens)

    def _fits(self, choices: int, tokens: int) -> None:
        if self.choices + choices > self.max_choices:
            raise APIError("overloaded", f"The queue is full ({self.max_choices} requests).")
        if self.queued_tokens and self.queued_tokens + tokens > self.max_tokens:
            raise APIError("overloaded", f"The queue is full ({self.max_tokens} prompt tokens).")
