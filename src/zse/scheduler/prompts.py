"""Prompts that are being computed: a request whose prompt begins like one of them waits for it and finds it cached.

So the choices of one prompt (n, best_of), and a burst of requests with one long system prompt, compute it once.
"""

from zse.scheduler.request import Request

# Fewer tokens in common are computed in the same step as fast as they are waited for.
LEAST = 32


class ComputedPrompts:
    """The running requests that compute LEAST or more tokens of their prompts, by salt and first tokens."""

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._leaders: dict[tuple, list[Request]] = {}

    def begin(self, request: Request) -> None:
        """The request was admitted."""
        if self._enabled and len(request.tokens) - request.computed_len >= LEAST:
            request.leads = True
            self._leaders.setdefault(_beginning(request), []).append(request)

    def done(self, request: Request) -> None:
        """The request's prompt is computed, or it gave up its pages."""
        if request.leads:
            request.leads = False
            key = _beginning(request)
            self._leaders[key].remove(request)
            if not self._leaders[key]:
                del self._leaders[key]

    def must_wait(self, request: Request) -> bool:
        """Whether the waiting request gains by waiting: what it would share is at least half of what its leader has
        left to compute."""
        if not self._leaders:
            return False
        leaders = self._leaders.get(_beginning(request))
        if leaders is None:
            return False
        if request.leader in leaders:
            return True
        for leader in leaders:
            shared = _common(leader, request) - leader.committed_len
            if shared >= LEAST and 2 * shared >= len(leader.tokens) - leader.computed_len:
                request.leader = leader
                return True
        request.leader = None
        return False


def _beginning(request: Request) -> tuple:
    return *request.salt, request.tokens[:LEAST].tobytes()


def _common(first: Request, second: Request) -> int:
    """Tokens that two requests have in common at their beginnings, by bisection: comparing arrays' bytes is quick."""
    a, b = first.tokens.tobytes(), second.tokens.tobytes()
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
