"""What speculation learns: how likely a draft token is accepted, for each kind of draft and from there for each request;
and how long a step of so many tokens takes, until it was measured from the shape of others."""

from bisect import bisect_left

import msgspec

# Length of an n-gram match up to which it counts as this kind; beyond the last one more kind. A draft model's drafts
# are a kind of their own, and tokens that a grammar leaves no choice about.
MATCHES = (3, 4, 6, 9, 15)
DRAFT_MODEL = len(MATCHES) + 1
FORCED = DRAFT_MODEL + 1
# Where nothing was seen yet.
PRIOR = (0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.7, 0.99)
PRIOR_WEIGHT = 8.0  # drafts that the prior counts as
KIND_WEIGHT = 4.0  # drafts that a kind's rate counts as beside those of the request itself
KIND_MEMORY = 0.98  # of what a kind has seen, for each run verified
KIND_FORGETS = 0.999  # for each step
REQUEST_MEMORY = 0.9  # of what a request has seen, for each run verified
IDLE_MEMORY = 0.98  # for each step without drafts: it is tried again later
# Steps are told apart by their tokens up to these numbers; kernels work in tiles of 4 and 8.
EDGES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# Seconds relative to a step of one token. CPU: SmolLM2-135M Q4_1, 2 threads of a Xeon with AVX-512. GPU: a step is bound
# by reading the weights up to some 64 tokens.
SHAPES = {
    "cpu": (
        1.0,
        1.53,
        1.65,
        1.77,
        1.92,
        3.0,
        3.2,
        4.5,
        5.9,
        8.5,
        11.0,
        16.5,
        22.0,
        33.0,
        44.0,
        66.0,
        88.0,
        132.0,
        176.0,
        352.0,
    ),
    "gpu": (1.0, 1.1, 1.12, 1.15, 1.18, 1.2, 1.25, 1.3, 1.4, 1.5, 1.7, 2.0, 2.3, 2.8, 3.3, 4.2, 5.2, 7.0, 9.0, 17.0),
}
RATE = 0.1  # weight of a new measurement
OUTLIER = 2.0  # a step this many times as long as expected was held up by something else
FORGET_STEPS = 64  # what was not measured in so many steps moves a quarter of the way back to the shape


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


class RequestAcceptance(msgspec.Struct):
    """What was seen of one request."""

    tested: float = 0.0
    accepted: float = 0.0

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


class StepCost:
    """Seconds of a step that only decodes, by its number of tokens, drafts included. family: of the device. num_steps:
    that were measured."""

    def __init__(self, family: str):
        self._shape = SHAPES[family]
        self._seconds: list[float | None] = [None] * len(EDGES)
        self._last: list[int] = [0] * len(EDGES)  # step number of the last measurement
        self.num_steps = 0
        self._reference = 0  # the edge that was measured last

    def record(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took so long."""
        edge = min(bisect_left(EDGES, tokens), len(EDGES) - 1)
        known = self._seconds[edge]
        if known is None:
            self._seconds[edge] = min(seconds, OUTLIER * self._expected(edge)) if self.num_steps else seconds
        else:
            self._seconds[edge] = known + RATE * (min(seconds, OUTLIER * known) - known)
        self.num_steps += 1
        self._last[edge], self._reference = self.num_steps, edge
        if self.num_steps % FORGET_STEPS == 0:
            for other, value in enumerate(self._seconds):
                if value is not None and self._last[other] <= self.num_steps - FORGET_STEPS:
                    self._seconds[other] = value + 0.25 * (self._expected(other) - value)

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a step of `tokens` tokens; before any measurement in units of a step of one."""
        edge = min(bisect_left(EDGES, tokens), len(EDGES) - 1)
        known = self._seconds[edge]
        return self._expected(edge) if known is None else known

    def _expected(self, edge: int) -> float:
        """From the shape and what was measured last."""
        reference = self._seconds[self._reference]
        if reference is None:
            return self._shape[edge]
        return reference * self._shape[edge] / self._shape[self._reference]
