"""Work that would hold up the event loop, done in a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

OFF_LOOP_BYTES = 16 << 10  # longer bodies and prompts are parsed and tokenised in a thread (16 KB take some 3 ms)
ON_LOOP_ENTRIES = 2000  # log-probabilities: answers with more are made in a thread (some 10 µs each)

Result = TypeVar("Result")


async def maybe_in_thread(long: bool, work: Callable[[], Result]) -> Result:
    """work(), in a thread when it is long."""
    return await asyncio.get_running_loop().run_in_executor(None, work) if long else work()
