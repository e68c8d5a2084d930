"""What the engine sends to one HTTP request, and what it cost.

What the engine computes is counted for every request in the same way and to its last word, also after nobody listens
any more: a Channel is the only way to the engine, and cannot be made without saying who is told."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from zse.engine.messages import Ask, Measured, Searched, Tokens
from zse.errors import RequestError
from zse.sampling.params import BeamParams
from zse.scheduler.options import DEFAULT, RequestOptions

if TYPE_CHECKING:
    from zse.engine.client import EngineClient

# Events that a request may have waiting for a reader that has been behind for STALL_S, and for one that is behind at
# all: a step of 64 answers with log-probabilities is 30 KB, and a reader is behind for some ms now and then. The
# transport holds 64 KiB more.
STREAM_BYTES, MOST_STREAM_BYTES, STALL_S = 192 << 10, 1 << 20, 0.25


class Channel:
    """The events of one HTTP request's engine requests, in order of arrival, each under the caller's key.

    stalled_s: for how long the reader of a stream has been behind. Then not more than STREAM_BYTES (MOST_STREAM_BYTES)
    wait here: a reader that is slower than that is cut off, the engine never waits. What waits because this process is
    behind, or for an answer that is not streamed, is bounded by the answer's length.

    Args:
        settle: called once with the tokens that the engine computed for all requests: when it has said its last word of each,
            or has died, and the channel is closed."""

    def __init__(self, client: "EngineClient", settle: Callable[[int], None]):
        self._client, self._settle = client, settle
        self.owed, self._computed = 1, 0  # last words, and close(); tokens of requests that had theirs
        self._is_closed = False
        self.failure: RequestError | None = None  # of fail(): nothing more is submitted
        self._events: deque[tuple[int, Tokens | Measured | Searched | RequestError, int]] = deque()  # and bytes
        self._bytes = 0
        self._waiter: asyncio.Future | None = None
        self.ids: dict[int, int] = {}  # key → engine request id, while running
        self.stalled_s: Callable[[], float] = lambda: 0.0

    async def complete(
        self, prompts: list[list[int]], params: Sequence[Ask | BeamParams], options: RequestOptions = DEFAULT
    ) -> list[Any]:
        """The Measured or Searched of each prompt, in their order. The channel must have no other request. Raises the
        RequestError of the first that failed; close() cancels what is left, as always."""
        for key, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            self._client.submit(self, key, prompt, wanted, options)
        results = dict([await self.next() for _ in prompts])
        return [results[key] for key in range(len(prompts))]

    def cancel(self, key: int) -> None:
        """Stop one request (a stop string was found). Idempotent; events of it that are on the way are dropped."""
        request_id = self.ids.pop(key, None)
        if request_id is not None:
            self._client.cancel(request_id)

    def close(self) -> None:
        """Cancel whatever still runs; no submission may follow. Call it in a `finally`."""
        for key in list(self.ids):
            self.cancel(key)
        self._events.clear()
        if not self._is_closed:
            self._is_closed = True
            self.end(0)

    def fail(self, error: RequestError) -> None:
        """Cancel whatever runs; next() and submissions raise `error` from now on."""
        for key in list(self.ids):
            self.cancel(key)
        self._events.clear()
        self._bytes, self.failure = 0, error
        self.push(0, error)

    async def next(self) -> tuple[int, Any]:
        """The next event (Tokens, or Measured of a job) and its key. Raises the RequestError that the engine or the
        supervisor gave instead."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        key, event, size = self._events.popleft()
        self._bytes -= size
        if isinstance(event, RequestError):
            raise event
        return key, event

    # Called by the client only

    def push(self, key: int, event: Tokens | Measured | Searched | RequestError) -> None:
        """An event of one request."""
        if not isinstance(event, Tokens) or event.finish is not None:
            self.ids.pop(key, None)
        size = 0
        if isinstance(event, Tokens):
            size = 64 + 16 * len(event.tokens) + sum(64 + 64 * len(entry.top) for entry in event.logprobs or ())
            waiting = self._bytes + size
            patience_s = STALL_S if waiting <= MOST_STREAM_BYTES else 0.0
            if waiting > STREAM_BYTES and self.failure is None and self.stalled_s() > patience_s:
                self.fail(
                    RequestError(
                        "The client reads too slowly.", status=408, type="invalid_request_error", code="request_timeout"
                    )
                )
                return
        self._bytes += size
        self._events.append((key, event, size))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, computed: int) -> None:
        """The last word about a request came, which cost so many tokens."""
        self.owed -= 1
        self._computed += computed
        if not self.owed:
            self._settle(self._computed)


class Owed(msgspec.Struct, eq=False):
    """A request whose last word the engine owes. computed: tokens that it has told of: its answer's, and with the first
    of them those of the prompt that were not cached."""

    channel: Channel
    key: int
    num_prompt: int
    computed: int = 0
