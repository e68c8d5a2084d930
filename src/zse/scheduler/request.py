"""A request as the scheduler knows it, which is its only writer (the runner reads), and what it must be to be
served."""

from array import array
from collections.abc import Collection, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from zse.errors import RequestError
from zse.sampling.params import SamplingParams, ids_below
from zse.scheduler import images
from zse.scheduler.options import DEFAULT, RequestOptions

# For requests that begin as another one does its state is kept in so many places at most, no nearer than so many tokens:
# a chunk of its prompt ends at each.
MAX_PLACES, NEAR = 8, 32
WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


class Request:
    """Lengths: committed_len <= computed_len <= len(tokens) + pending <= max_len, all of them in tokens."""

    id: int
    tokens: array  # of i32: the prompt, then what was sampled; the last sampled one has no K and V yet
    prompt_len: int
    params: SamplingParams
    options: RequestOptions
    tenant: Any  # the queue's Tenant that it counts for, once it was there
    salt: tuple[str, ...]  # see salt_of()
    seed: int
    stop_ids: frozenset[int]
    max_len: int  # prompt plus the most tokens that may be sampled
    max_cached_len: int  # whose K and V are needed at most: the last sampled token is never fed back
    arrival: int  # order of submission (not a time)
    due: float  # with arrival: the order of requests, see Scheduler.submit
    submitted_at: float  # seconds on schedule()'s clock, as deadline_at
    deadline_at: float  # infinity: none
    waited_s: float  # in the queue, until its first row
    state: str
    row: int  # of the page table and the sampler on the device; -1: none
    residency: int  # counts admissions: (id, residency) tells a runner what it wrote into a row
    pending: int  # sampled tokens that submitted batches will give: their number is known, their ids are not
    chunks_in_flight: int  # submitted batches with a part of its prompt after which nothing is sampled
    computed_len: int  # how many have K and V in pages once all submitted batches have run
    committed_len: int  # how many have them for sure, in pages that others may use: logits were finite
    cached_len: int  # of the prompt, found in the prefix cache at the first admission; -1: not admitted yet
    lost_len: int  # how many a preemption threw away, while it waits to be admitted again
    reached_len: int  # the most that were computed before a preemption
    places: list[int]  # numbers of tokens behind which its state is to be kept, beside those at the interval
    next_place: int  # the next of them all, of a model with a state
    checkpoint: int  # computed tokens from which on the next sampled one may end it or a page
    first_len: int  # computed_len when this residency began
    expected_tokens: int  # that this residency was expected to run
    preemptions: int
    is_pinned: bool  # admitted with all the pages that it can ever need: not preempted in this residency
    stepwise: bool  # the next step needs the last one's token (for a mask or draft): no step ahead for it
    held: bool  # nothing is sampled for it now, but its prompt may run (Scheduler.hold). Only of stepwise ones
    leads: bool  # others may wait for its prompt (SharedPrompts)
    leader: "Request | None"  # the request that this one waits for
    drafts: Sequence[int] | None  # ids that may follow `tokens` in the next step; None: there must be no more
    drafting: Any  # what the proposer of drafts keeps of the request
    forced: (
        tuple[int, dict[int, list[int]]] | None
    )  # the place of a token; which one → those its grammar demands behind
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
        self.tenant, self.salt = None, salt_of(options)
        self.prompt_len, self.max_len, self.max_cached_len = len(prompt), max_len, max(max_len - 1, len(prompt))
        self.arrival, self.due, self.submitted_at = arrival, due, now
        self.deadline_at = float("inf") if options.deadline_ms is None else now + options.deadline_ms / 1000
        self.state, self.row, self.cached_len = WAITING, -1, -1
        self.residency = self.pending = self.chunks_in_flight = self.preemptions = 0
        self.computed_len = self.committed_len = self.lost_len = self.reached_len = self.checkpoint = 0
        self.first_len = self.expected_tokens = self.next_place = 0
        self.places = [*options.state_points]
        self.waited_s = 0.0
        self.is_pinned = self.held = self.leads = False
        structure = options.structure
        # Its mask depends on the last token.
        self.stepwise = structure is not None or any(len(word) > 1 for word in params.bad_token_ids)
        # Masks of an answer that reasons first do not look ahead.
        may_draft = options.speculation and (structure is None or structure.thinking is None)
        self.leader, self.drafts, self.drafting = None, () if may_draft else None, None
        self.forced = None

    @property
    def in_flight(self) -> bool:
        """Whether it is in a submitted batch."""
        return self.pending > 0 or self.chunks_in_flight > 0

    def keep_at(self, length: int) -> bool:
        """Its state is to be kept behind so many of its tokens, or somewhat fewer where it is kept anyway. False where
        they are computed already, or it is kept in many places."""
        if any(length - NEAR < place <= length for place in self.places):
            return True
        if length <= self.computed_len or len(self.places) >= MAX_PLACES:
            return False
        self.places.append(length)
        self.next_place = min(self.next_place, length)
        return True

    @property
    def compared_tokens(self) -> array:
        """`tokens` as prefixes are compared by: those of images replaced by what they show."""
        placed = self.options.images
        return images.compared(self.tokens, placed) if placed else self.tokens

    @property
    def num_computed(self) -> int:
        """Tokens that were computed for it, each once however often it was preempted: of the prompt without what was
        cached, and sampled ones. Those in flight count: they will be."""
        made = len(self.tokens) + self.pending - self.prompt_len
        reached = self.prompt_len if made else max(self.computed_len, self.reached_len)
        return max(0, reached - max(0, self.cached_len)) + made

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.state} row={self.row} computed={self.computed_len} "
            f"tokens={len(self.tokens)}+{self.pending} prompt={self.prompt_len} max={self.max_len}>"
        )


# Sort key: each tenant's waiting requests and the running list are kept in this order.
age_order = attrgetter("due", "arrival")


def salt_of(options: RequestOptions) -> tuple[str, ...]:
    """What must be equal beside the tokens for two requests or jobs to share a KV page."""
    salt = options.tenant, options.cache_salt
    return (*salt, options.adapter) if options.adapter else salt


class TokenLimits(NamedTuple):
    """What requests and jobs must stay within to be served at all. max_context: tokens of one request. capacity: tokens
    of the longest sequence that all KV pages together hold. vocab_size: what token ids are below."""

    vocab_size: int
    max_context: int
    capacity: int

    def max_len(self, prompt: list[int], params: SamplingParams) -> int:
        """Most tokens, prompt included, that a request may reach: one beyond the context, or beyond all pages together,
        would wait for ever. Raises RequestError when it cannot be served."""
        if not prompt:
            raise _no_tokens()
        for param, ids in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if ids:
                self.check_ids(param, ids)
        max_tokens = params.max_tokens
        if max_tokens is not None and params.min_tokens > max_tokens:
            message = f"min_tokens {params.min_tokens} is more than max_tokens {max_tokens}"
            raise RequestError(message, code="out_of_range", param="min_tokens")
        most = min(self.max_context, self.capacity + 1)  # the last sampled token needs no page
        wanted = len(prompt) + (max_tokens or 1)
        if wanted > most:
            why = f"this model's context is {self.max_context} tokens"
            if most < self.max_context:
                why = f"the KV cache of this engine holds {self.capacity} tokens"
            asked = f"{len(prompt)} prompt tokens" + (f" and max_tokens {max_tokens}" if max_tokens else "")
            raise RequestError(f"{why}; the request has {asked}", code="context_length_exceeded")
        return wanted if max_tokens is not None else most

    def check_job(self, token_ids: list[int]) -> None:
        """Raises RequestError for a sequence that can never run beside the requests: nothing is sampled of it."""
        if not token_ids:
            raise _no_tokens()
        self.check_ids("prompt", token_ids)
        most = min(self.max_context, self.capacity)
        if len(token_ids) > most:
            raise RequestError(
                f"{len(token_ids)} tokens are more than the context of {most}",
                code="context_length_exceeded",
                param="prompt",
            )

    def check_ids(self, param: str, ids: Collection[int]) -> None:
        """Raises RequestError for an id outside the vocabulary."""
        with suppress(msgspec.ValidationError):
            msgspec.convert(ids, ids_below(self.vocab_size))
            return
        for bad in ids:
            if not 0 <= bad < self.vocab_size:
                raise RequestError(
                    f"token id {bad} is outside this model's vocabulary of {self.vocab_size}",
                    code="invalid_token_id",
                    param=param,
                )


def _no_tokens() -> RequestError:
    return RequestError("the prompt has no tokens", code="invalid_value", param="prompt")
