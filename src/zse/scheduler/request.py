"""A request as the scheduler knows it. The scheduler is its only writer; the runner reads."""

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from zse.sampling.params import SamplingParams
from zse.scheduler.options import DEFAULT, RequestOptions

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


class Request:
    """Lengths: committed_len <= computed_len <= len(tokens) + pending <= max_len, all of them in tokens."""

    id: int
    tokens: array  # of i32: the prompt, then what was sampled; the last sampled one has no K and V yet
    prompt_len: int
    params: SamplingParams
    options: RequestOptions
    seed: int
    stop_ids: frozenset[int]
    max_len: int  # prompt plus the most tokens that may be sampled
    arrival: int  # order of submission (not a time)
    due: float  # with arrival: the order of requests, see SchedulingPolicy.due_time
    submitted_at: float  # seconds on schedule()'s clock, as deadline_at
    deadline_at: float  # infinity: none
    state: str
    row: int  # of the page table and the sampler on the device; -1: none
    residency: int  # counts admissions: (id, residency) tells a runner what it wrote into a row
    pending: int  # sampled tokens that submitted batches will give: their number is known, their ids are not
    chunks_in_flight: int  # submitted batches with a part of its prompt after which nothing is sampled
    computed_len: int  # how many have K and V in pages once all submitted batches have run
    committed_len: int  # how many have them for sure, in pages that others may use: logits were finite
    cached_len: int  # of the prompt, found in the prefix cache at the first admission; -1: not admitted yet
    lost_len: int  # how many a preemption threw away, while it waits to be admitted again
    checkpoint: int  # computed tokens from which on the next sampled one may end it or a page
    first_len: int  # computed_len when this residency began
    expected_tokens: int  # that this residency was expected to run
    preemptions: int
    is_pinned: bool  # admitted with all the pages that it can ever need: not preempted in this residency
    stepwise: bool  # the next step needs the last one's token (for a mask or draft): no step ahead for it
    held: bool  # must not run now: other beams of its search are not as far. Only of stepwise ones
    leads: bool  # others may wait for its prompt (SharedPrompts)
    leader: "Request | None"  # the request that this one waits for
    drafts: Sequence[int] | None  # ids that may follow `tokens` in the next step; None: there must be no more
    drafting: Any  # what the proposer of drafts keeps of the request
    __slots__ = tuple(__annotations__)  # a step reads thousands of them: a Struct's take twice as long

    def __init__(
        self,
        id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_len: int,
        arrival: int,
        now: float = 0.0,
        due: float = 0.0,
        options: RequestOptions = DEFAULT,
    ):
        self.id, self.params, self.options, self.seed, self.stop_ids = id, params, options, seed, stop_ids
        self.tokens = array("i", prompt)
        self.prompt_len, self.max_len = len(prompt), max_len
        self.arrival, self.due, self.submitted_at = arrival, due, now
        self.deadline_at = float("inf") if options.deadline_ms is None else now + options.deadline_ms / 1000
        self.state, self.row, self.cached_len = WAITING, -1, -1
        self.residency = self.pending = self.chunks_in_flight = self.preemptions = 0
        self.computed_len = self.committed_len = self.lost_len = self.checkpoint = 0
        self.first_len = self.expected_tokens = 0
        self.is_pinned = self.held = self.leads = False
        self.stepwise = options.structure is not None  # its mask depends on the last token
        self.leader, self.drafts, self.drafting = None, (), None

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
