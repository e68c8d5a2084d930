"""A request as the scheduler knows it. The scheduler is its only writer; the runner reads."""

from array import array
from collections.abc import Sequence
from typing import Any

from zse.sampling.params import SamplingParams
from zse.scheduler.options import DEFAULT, RequestOptions

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


class Request:
    """computed_len <= len(tokens) + pending <= max_len, where

    tokens        prompt and sampled token ids (array of i32); the last sampled one has no KV yet
    prompt_len    how many of them are the prompt
    pending       sampled tokens that submitted batches will give: their number is known, their ids are not
    computed_len  how many have their K and V in pages once all submitted batches have run (0 after a preemption)
    committed_len how many have them for sure, in pages that others may use: their batches are done, logits were finite
    cached_len    how many of the prompt were found in the prefix cache when it was first admitted
    lost_len      how many a preemption threw away, while it waits for its next stay
    is_pinned     whether it was admitted with all the pages that it can ever need: it is not preempted in this stay
    leads         whether others may wait for its prompt (scheduler/prompts.py)
    leader        the request that this one waits for
    max_len       prompt plus the most tokens that may be sampled
    chunks_in_flight  submitted batches with a part of its prompt after which nothing is sampled
    row           the slot of page table and sampler state on the device, -1 when it has none
    residency     counts admissions: (id, residency) names one stay in a row, so that a runner can tell what it wrote
    drafts        token ids that may follow `tokens`, from a proposer, for the next step; () when there are none,
                  None when there must not be any more
    drafting      what the proposer of drafts keeps of the request
    checkpoint    from how many computed tokens on the next sampled one may end it or a page; 0 at the start of a stay
    stepwise      whether the next step needs the ids of the last one (a mask or a draft is made from them): no step
                  ahead for this request
    held          whether it must not run now: the other beams of its search are not as far. Only of stepwise ones
    arrival       order of submission (not a time)
    due           with arrival: the order of requests (policy.due_time)
    submitted_at, deadline_at  seconds on schedule()'s clock; no deadline: infinity
    stay_start, stay_tokens    computed_len when this stay in a row began, and the tokens that it was expected to run
    """

    __slots__ = (
        "arrival",
        "cached_len",
        "checkpoint",
        "chunks_in_flight",
        "committed_len",
        "computed_len",
        "deadline_at",
        "drafting",
        "drafts",
        "due",
        "held",
        "id",
        "is_pinned",
        "leader",
        "leads",
        "lost_len",
        "max_len",
        "options",
        "params",
        "pending",
        "preemptions",
        "prompt_len",
        "residency",
        "row",
        "seed",
        "state",
        "stay_start",
        "stay_tokens",
        "stepwise",
        "stop_ids",
        "submitted_at",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        prompt: list[int],
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
        self.id, self.params, self.seed, self.stop_ids = id, params, seed, stop_ids
        self.options = options
        self.tokens = array("i", prompt)
        self.prompt_len = len(prompt)
        self.max_len = max_len
        self.arrival, self.due, self.submitted_at = arrival, due, now
        self.deadline_at = now + options.deadline_ms / 1000 if options.deadline_ms is not None else float("inf")
        self.stay_start = self.stay_tokens = 0
        self.stepwise = self.held = self.is_pinned = False
        self.drafts: Sequence[int] | None = ()
        self.drafting: Any = None
        self.computed_len = self.pending = self.chunks_in_flight = self.checkpoint = 0
        self.committed_len = self.lost_len = 0
        self.cached_len = -1  # not admitted yet
        self.leads = False
        self.leader: Request | None = None
        self.preemptions = 0
        self.residency = 0
        self.row = -1
        self.state = WAITING

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
        """Tokens whose KV is needed at most: the last sampled token is never fed back."""
        return max(self.max_len - 1, self.prompt_len)

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.state} row={self.row} computed={self.computed_len} "
            f"tokens={len(self.tokens)}+{self.pending} prompt={self.prompt_len} max={self.max_len}>"
        )
