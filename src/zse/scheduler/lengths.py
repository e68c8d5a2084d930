"""How long replies are likely to be, from those that have ended: what admission keeps free, and what shares are charged."""

from zse.scheduler.request import Request

FIRST_MEAN = 64.0  # tokens, until replies have ended
LEAST_REST = 16  # tokens that a reply is expected to have left, however long it is
MEAN_STEP = 1 / 32  # weight of the newest reply in the running mean


class ReplyLengths:
    """mean: tokens of a reply."""

    def __init__(self) -> None:
        self.mean = FIRST_MEAN

    def observe(self, tokens: int) -> None:
        """A reply ended after so many tokens."""
        self.mean += (tokens - self.mean) * MEAN_STEP

    def expected(self, request: Request) -> int:
        """Tokens that are likely to have K and V in the end: the reply is as long as replies are, at most max_tokens."""
        rest = max(self.mean - (len(request.tokens) - request.prompt_len), LEAST_REST)
        return min(len(request.tokens) + int(rest), request.max_cached_len)
