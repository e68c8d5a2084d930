"""Frames between the server process and its engine process: msgpack, typed, each behind a 4-byte little-endian length.

The tag field is `kind`: Failed has a `type` of its own.
"""

from typing import Annotated, Literal

import msgspec

from zse.sampling.fields import Array, Field, Integer
from zse.sampling.params import MAX_LOGPROBS, TOKEN_ID, BeamParams, SamplingParams
from zse.scheduler.options import DEFAULT, RequestOptions


class Submit(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine. `id` is unique for the life of the engine. prompt: token ids, at least one."""

    id: int
    prompt: list[int]
    params: SamplingParams
    options: RequestOptions = DEFAULT


_TARGETS = Array(TOKEN_ID, 1024)


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is measured of a sequence that is run without sampling (engine/jobs.py).

    "logprobs": the log-probability of each token given those before it, with `top` alternatives (0..20), of those at
    position `first` and behind. "last", "mean":
    the hidden state after the final norm, of the last token or their mean; normalize: brought to length 1. "targets":
    the log-probability of each of `targets` as the next token (at most 1,024).
    """

    what: Literal["logprobs", "last", "mean", "targets"]
    top: Annotated[int, Field(Integer(0, MAX_LOGPROBS), routes=())] = 0
    targets: Annotated[tuple[int, ...], Field(_TARGETS, routes=())] = ()
    normalize: bool = False
    first: int = 0


class Measure(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine: a forward without sampling. id: as of Submit, and from the same numbers. Answered by one
    Measured, or Failed. prompt: token ids, at least one."""

    id: int
    prompt: list[int]
    ask: Ask
    options: RequestOptions = DEFAULT


class Search(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine: a beam search. id: as of Submit, and from the same numbers. Answered by one Searched, or
    Failed."""

    id: int
    prompt: list[int]
    params: BeamParams
    options: RequestOptions = DEFAULT


class Cancel(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine. An unknown or finished id is ignored and counted."""

    id: int


class LoadModel(msgspec.Struct, tag_field="kind", tag=True):
    """server → a parked engine, once: become the engine of this model. arguments: as on a worker's command line.
    Answered by Ready or Fatal; Ready.phases_ms count from here."""

    arguments: list[str]


class Shutdown(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine: finish nothing more, free everything, exit 0."""


class Ready(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server, once: the model is loaded. num_pages: of page_size tokens. phases_ms: name → milliseconds since
    exec. queue_tokens: of prompts that may wait before it is known how fast they drain."""

    model: str
    max_context: int
    max_rows: int
    num_pages: int
    memory_bytes: dict[str, int]
    phases_ms: dict[str, float]
    page_size: int = 16
    queue_tokens: int = 1 << 18


class Parked(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server, once: started without a model, the device is open, waiting for LoadModel."""

    phases_ms: dict[str, float]


class TokenLogprob(msgspec.Struct, array_like=True):
    """One sampled token's log-probability and its alternatives [(token, logprob)], best first."""

    logprob: float
    top: list[tuple[int, float]]


class Tokens(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: newly sampled tokens of one request, in order. logprobs: one per token when asked for.
    finish: None while running, else "stop" (end-of-sequence or stop id; that token is the last one), "length"."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    cached_tokens: int = 0


PACKED_TOKENS = 256


class Measured(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the one answer to Measure. vector: f32 little-endian [hidden_size] ("last", "mean"). logprobs:
    of "logprobs" one for each token of the prompt from Ask.first on, None for the very first, which nothing stands
    before; of "targets" one for each target, in order. packed: the same as bytes, as the server gets them."""

    id: int
    num_tokens: int
    vector: bytes | None = None
    logprobs: list[TokenLogprob | None] | None = None
    packed: list[bytes] | None = None

    def to_send(self) -> "Measured":
        """The same with `logprobs` as bytes, some tokens each: of a long prompt they are 100,000 objects, which the server
        makes in a thread, and a few at a time, since it holds the interpreter lock while it does."""
        if self.logprobs is None:
            return self
        return Measured(
            self.id,
            self.num_tokens,
            self.vector,
            packed=[
                msgspec.msgpack.encode(self.logprobs[at : at + PACKED_TOKENS])
                for at in range(0, len(self.logprobs), PACKED_TOKENS)
            ],
        )

    def scores(self) -> list[TokenLogprob | None]:
        """`logprobs`, as they came or from bytes; empty when there are none."""
        if self.packed is None:
            return self.logprobs or []
        return [entry for part in self.packed for entry in _packed_scores.decode(part)]


_packed_scores = msgspec.msgpack.Decoder(list[TokenLogprob | None])


class SearchedReply(msgspec.Struct, array_like=True):
    """One reply of a beam search. logprobs: of each token; total: their sum; score: total divided by the length to the
    power of the length penalty. finish: "stop" (its last token ends it) or "length"."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    total: float
    score: float
    finish: str


class Searched(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the one answer to Search: at most beam_width replies, best first."""

    id: int
    num_tokens: int
    replies: list[SearchedReply]
    cached_tokens: int = 0


class StepTokens(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: one token each of requests that go on: ids[i] said tokens[i]. One message for a step, where
    a Tokens for each of 256 requests would cost both processes more than the step."""

    ids: list[int]
    tokens: list[int]

    def __post_init__(self):
        if len(self.ids) != len(self.tokens):
            raise ValueError(f"{len(self.ids)} ids for {len(self.tokens)} tokens")


class Failed(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the request's only and last event. Fields as in RequestError."""

    id: int
    message: str
    status: int
    type: str
    code: str | None = None
    param: str | None = None


class Fatal(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the engine cannot go on (load error, device fault); it exits after this.
    exit_code: as ZSEError's. code: "out_of_memory" when the model would fit beside less."""

    message: str
    exit_code: int = 1
    code: str = ""


class Heartbeat(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server, at least once a second while it has work and when idle: steps done, rows and pages in use, and the totals
    of the scheduler, the cache and what speculates or masks, by name (`zse_engine_NAME` in /metrics)."""

    steps: int
    running: int
    waiting: int
    free_pages: int
    counters: dict[str, float] = {}


ToEngine = Submit | Measure | Search | Cancel | LoadModel | Shutdown
FromEngine = Ready | Parked | Tokens | StepTokens | Measured | Searched | Failed | Fatal | Heartbeat
