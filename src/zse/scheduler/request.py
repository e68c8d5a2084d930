"""A request as the scheduler knows it. The scheduler is its only writer; the runner reads."""

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from zse.sampling.params import SamplingParams
from zse.scheduler.options import DEFAULT, RequestOptions

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


class Request(msgspec.Struct, eq=False):
    """Lengths: committed_len <= computed_len <= len(tokens) + pending <= max_len, all of them in tokens.

    The arguments are the fields without a default; `tokens` may be any sequence of ids.
    """

    id: int
    tokens: array  # of i32: the prompt, then what was sampled; the last sampled one has no K and V yet
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_len: int  # prompt plus the most tokens that may be sampled
    arrival: int  # order of submission (not a time)
    due: float = 0.0  # with arrival: the order of requests, see SchedulingPolicy.due_time
    submitted_at: float = 0.0  # seconds on schedule()'s clock, as deadline_at
    options: RequestOptions = DEFAULT

    deadline_at: float = float("inf")
    prompt_len: int = 0
    state: str = WAITING
    row: int = -1  # of the page table and the sampler on the device; -1: none
    residency: int = 0  # counts admissions: (id, residency) tells a runner what it wrote into a row
    pending: int = 0  # sampled tokens that submitted batches will give: their number is known, their ids are not
    chunks_in_flight: int = 0  # submitted batches with a part of its prompt after which nothing is sampled
    computed_len: int = 0  # how many have K and V in pages once all submitted batches have run
    committed_len: int = 0  # how many have them for sure, in pages that others may use: logits were finite
    cached_len: int = -1  # of the prompt, found in the prefix cache at the first admission; -1: not admitted yet
    lost_len: int = 0  # how many a preemption threw away, while it waits to be admitted again
    checkpoint: int = 0  # computed tokens from which on the next sampled one may end it or a page
    first_len: int = 0  # computed_len when this residency began
    expected_tokens: int = 0  # that this residency was expected to run
    preemptions: int = 0
    is_pinned: bool = False  # admitted with all the pages that it can ever need: not preempted in this residency
    stepwise: bool = False  # the next step needs the last one's token (for a mask or draft): no step ahead for it
    held: bool = False  # must not run now: other beams of its search are not as far. Only of stepwise ones
    leads: bool = False  # others may wait for its prompt (SharedPrompts)
    leader: "Request | None" = None  # the request that this one waits for
    drafts: Sequence[int] | None = ()  # ids that may follow `tokens` in the next step; None: there must be no more
    drafting: Any = None  # what the proposer of drafts keeps of the request

    def __post_init__(self) -> None:
        self.tokens = array("i", self.tokens)
        self.prompt_len = len(self.tokens)
        if self.options.deadline_ms is not None:
            self.deadline_at = self.submitted_at + self.options.deadline_ms / 1000

    @property
    def in_flight(self) -> bool:
        """Whether it is in a submitted batch."""
        return self.pending > 0 or self.chunks_in_flight > 0

    @property
    def salt(self) -> tuple[str, ...]:
        """What must be equal beside the tokens for two requests to share a page."""
        return self.options.salt

    @property
    def max_cached_len(self) -> int:
        """Tokens whose K and V are needed at most: the last sampled token is never fed back."""
        return max(self.max_len - 1, self.prompt_len)

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.state} row={self.row} computed={self.computed_len} "
            f"tokens={len(self.tokens)}+{self.pending} prompt={self.prompt_len} max={self.max_len}>"
        )


# Sort key: each tenant's waiting requests and the running list are kept in this order.
age_order = attrgetter("due", "arrival")
