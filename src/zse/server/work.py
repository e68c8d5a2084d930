"""A request on its model, from its admission to its end: what it holds is given back in one place, whatever happens."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from zse.engine.client import Channel, shutting_down_error
from zse.engine.messages import Tokens
from zse.errors import RequestError
from zse.server.admission import BYTES_PER_TOKEN, Admitted
from zse.server.api_request import APIRequest
from zse.server.statistics import CANCELLED, ERROR

OFF_LOOP_BYTES = 16 << 10  # longer bodies and prompts are parsed and tokenised in a thread (16 KB take some 3 ms)
ON_LOOP_ENTRIES = 2000  # log-probabilities: answers with more are made in a thread (some 10 µs each)

Result = TypeVar("Result")


async def maybe_in_thread(long: bool, work: Callable[[], Result]) -> Result:
    """work(), in a thread when it is long: it would hold up the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work) if long else work()


class RequestRun(AbstractContextManager):
    """Making it asks the first questions of admission; leaving it frees the queue, the quota, the model and the engine, charges
    what was computed, and counts the request in its model's Statistics and its tenant's Usage.

    is_long: the body is parsed and its texts are tokenized in a thread. submitted, cached: prompt tokens. computed: those
    that the engine has computed; after a client left, those that it was given count instead, because nobody knows how far
    it came. outcomes: choices by how they ended."""

    def __init__(self, app, request: APIRequest):
        if app.draining:
            raise shutting_down_error()
        self.app, self.request = app, request
        self.is_long = len(request.body) > OFF_LOOP_BYTES
        self.submitted = self.computed = self.cached = 0
        self.prompt_tokens = self._completion_tokens = 0
        self.served: Any = None
        self.outcomes: Counter[str] = Counter()
        self._last: dict[int, float] = {}  # choice → time of its last tokens
        self.admitted = Admitted(app.admission, request)

    def start(
        self, model: str | None, choices: int = 1, answer_tokens: int = 0, prompt_tokens: int | None = None
    ) -> None:
        """Take the request into the house. Raises APIError.

        Args:
            model: the name that the request gives, or None.
            choices: of the engine.
            answer_tokens: the most that they have together.
            prompt_tokens: None where the prompt is text: estimated."""
        served = self.app.find_model(self.request, model, "model")
        if prompt_tokens is None:
            prompt_tokens = len(self.request.body) // BYTES_PER_TOKEN
        self.admitted.reserve(choices, prompt_tokens, answer_tokens)
        self.served, self.channel = served, Channel(served.engine)
        self.app.pool.enter(served)  # the engine loads while the prompt becomes tokens

    def set_prompt(self, tokens: int) -> None:
        """The true number of prompt tokens, which replaces the estimate."""
        self.prompt_tokens = tokens
        self.admitted.hold(self.admitted.choices, tokens)

    def count(self, choice: int, event: Tokens) -> None:
        """Count an event of a choice. Tokens that came together share the time since the last ones."""
        self.computed = self.submitted
        if queued := self.admitted.queued:  # the prompt waits no more
            self.admitted.hold(self.admitted.choices, 0)
            control = self.app.admission
            control.bounds.drained(queued, control.queued_tokens, control.clock())
        count, statistics = len(event.tokens), self.served.statistics
        if not count:
            return
        now = time.monotonic()
        before = self._last.get(choice)
        if before is not None:
            statistics.between_tokens_s.observe((now - before) / count, count)
        else:
            if not self._last:
                statistics.first_token_s.observe(now - self.request.started)
            if count > 1:
                statistics.between_tokens_s.observe(0.0, count - 1)
        self._last[choice] = now
        self._completion_tokens += count
        statistics.completion_tokens += count

    def __exit__(self, kind, error, traceback) -> None:
        if self.served is None:
            self.admitted.leave(0)
            return
        self.channel.close()
        failed = isinstance(error, RequestError)
        left = self.admitted.choices - self.outcomes.total()
        if left:
            self.outcomes[ERROR if failed else CANCELLED] += left
        self.admitted.leave(self._completion_tokens + (self.computed if failed else self.submitted))
        statistics, tenant = self.served.statistics, self.request.tenant
        statistics.finished.update(self.outcomes)
        statistics.request_s.observe(time.monotonic() - self.request.started)
        for totals in (statistics, self.app.tenants[tenant]) if tenant else (statistics,):
            totals.prompt_tokens += self.prompt_tokens
            totals.cached_tokens += self.cached
        if tenant:
            self.app.tenants[tenant].completion_tokens += self._completion_tokens
        self.app.pool.leave(self.served)
