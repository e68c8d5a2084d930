"""How likely a draft token is accepted: learned for each kind of draft, and from there for each request."""

# Length of an n-gram match up to which it counts as this kind; beyond the last one more kind. A draft model's drafts
# are a kind of their own.
MATCHES = (3, 4, 6, 9, 15)
DRAFT_MODEL = len(MATCHES) + 1
# Where nothing was seen yet.
PRIOR = (0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.7)
PRIOR_WEIGHT = 8.0  # drafts that the prior counts as
KIND_WEIGHT = 4.0  # drafts that a kind's rate counts as beside those of the request itself
KIND_MEMORY = 0.98  # of what a kind has seen, for each run verified
KIND_FORGETS = 0.999  # for each step
REQUEST_MEMORY = 0.9  # of what a request has seen, for each run verified
IDLE_MEMORY = 0.98  # for each step without drafts: it is tried again later


def kind_of(match: int) -> int:
    """The kind of a draft after a match of this many tokens."""
    for kind, length in enumerate(MATCHES):
        if match <= length:
            return kind
    return len(MATCHES)


class Acceptance:
    """Rates of acceptance of each kind, over all requests."""

    def __init__(self) -> None:
        self._tested = [0.0] * len(PRIOR)
        self._accepted = [0.0] * len(PRIOR)

    def rate(self, kind: int) -> float:
        return (self._accepted[kind] + PRIOR_WEIGHT * PRIOR[kind]) / (self._tested[kind] + PRIOR_WEIGHT)

    def rest(self) -> None:
        """A step: what was seen long ago counts less, so that a kind that failed is tried again."""
        for kind in range(len(PRIOR)):
            self._tested[kind] *= KIND_FORGETS
            self._accepted[kind] *= KIND_FORGETS

    def record(self, kind: int, tested: int, accepted: int) -> None:
        self._tested[kind] = KIND_MEMORY * self._tested[kind] + tested
        self._accepted[kind] = KIND_MEMORY * self._accepted[kind] + accepted


class RequestAcceptance:
    """What was seen of one request."""

    __slots__ = ("accepted", "tested")

    def __init__(self) -> None:
        self.tested = self.accepted = 0.0

    def rate(self, kind_rate: float) -> float:
        """Probability that its next draft token is accepted, where a kind's rate is the prior."""
        return (self.accepted + KIND_WEIGHT * kind_rate) / (self.tested + KIND_WEIGHT)

    def record(self, tested: int, accepted: int) -> None:
        self.tested = REQUEST_MEMORY * self.tested + tested
        self.accepted = REQUEST_MEMORY * self.accepted + accepted

    def rest(self) -> None:
        """A step without drafts."""
        self.tested *= IDLE_MEMORY
        self.accepted *= IDLE_MEMORY
