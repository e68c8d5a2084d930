"""A request body that its handler reads while it arrives: what is held of it is bounded, whatever its length.

An application asks for one in `check_head`: `request.upload = BodyStream(max_bytes)`. The handler is called with the
head, and reads `async for data in request.upload`. While it is behind, the peer is read no further."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from zse.errors import RequestError

HELD_BYTES = 1 << 18  # and what one read of the socket brought; from then on the peer waits


class BodyStream:
    """One body, to be read once. max_bytes: a longer one is refused.

    received: bytes so far. is_whole: all of it has arrived. taken: called with the bytes that the handler took, by the
    connection."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.received, self.is_whole = max_bytes, 0, False
        self.taken: Callable[[int], Any] = lambda size: None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._error: RequestError | None = None
        self._arrived: asyncio.Future | None = None

    @property
    def is_full(self) -> bool:
        """Whether the handler is behind."""
        return self._held >= HELD_BYTES

    def __aiter__(self) -> "BodyStream":
        return self

    async def __anext__(self) -> bytes:
        """The next bytes, never empty. Raises RequestError: the body is too long, too slow or no valid HTTP."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.is_whole:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        data = self._pieces.popleft()
        self._held -= len(data)
        self.taken(len(data))
        return data

    # -- of the connection

    def add(self, data: bytes) -> None:
        self.received += len(data)
        self._held += len(data)
        self._pieces.append(data)
        self._wake()

    def end(self) -> None:
        """All of it was added."""
        self.is_whole = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Nothing more will be added: whoever reads it gets the error, behind what is there."""
        self._error = self._error or error
        self._wake()

    def drop(self) -> int:
        """Forget what is held; how many bytes that were."""
        held, self._held = self._held, 0
        self._pieces.clear()
        return held

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
