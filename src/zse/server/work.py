"""A request on its model, from its admission to its end: what it holds is given back in one place, whatever happens."""

from collections.abc import Callable
from typing import Any

from zse.engine.client import Channel
from zse.errors import RequestError
from zse.http.json_body import parse
from zse.scheduler.options import RequestOptions
from zse.server.admission import BYTES_PER_TOKEN
from zse.server.api_request import APIRequest
from zse.server.off_loop import OFF_LOOP_BYTES, maybe_in_thread
from zse.server.statistics import CANCELLED, ERROR, RequestWatch


class Work:
    """A context manager. Entering asks the first questions of admission; leaving frees the queue, the quota, the model and the
    engine, and charges what was computed. is_long: the body is parsed and its texts tokenized in a thread.

    computed: prompt tokens that the engine has computed; after a client left, those that it was given count instead, because
    nobody knows how far it came."""

    def __init__(self, app, request: APIRequest):
        self.app, self.request = app, request
        self.is_long = len(request.body) > OFF_LOOP_BYTES
        self.submitted = self.computed = self.cached = 0  # prompt tokens
        self.served: Any = None
        app.check_accepting()
        self.admitted = app.admission.enter(request)

    async def read(self, read: Callable[[dict], Any]) -> Any:
        """The body as `read` checks and types it. Raises RequestError."""
        return await self.off_loop(lambda: read(parse(bytes(self.request.body))))

    async def off_loop(self, work: Callable[[], Any]) -> Any:
        """work(), whose time grows with the body."""
        return await maybe_in_thread(self.is_long, work)

    def start(self, model: str | None, choices: int = 1, answer_tokens: int = 0) -> None:
        """Take the request into the house. choices: of the engine; answer_tokens: the most that they have together. Raises
        APIError."""
        app, request = self.app, self.request
        served = app.find_model(request, model, "model")
        self.admitted.reserve(choices, len(request.body) // BYTES_PER_TOKEN, answer_tokens)
        self.served, self.channel = served, Channel(served.engine)
        self.watch = RequestWatch(served.statistics, request.started, choices, app.tenants.usage(request.tenant))
        app.pool.enter(served)  # the engine loads while the prompt becomes tokens

    def set_prompt(self, tokens: int) -> None:
        """The true number of prompt tokens."""
        self.watch.prompt_tokens = tokens
        self.admitted.set_tokens(tokens)

    def options(self, asked: RequestOptions) -> RequestOptions:
        return self.app.request_options(self.request, asked)

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.served is None:
            self.admitted.leave(0)
            return
        failed = isinstance(error, RequestError)
        self.channel.close()
        self.admitted.leave(self.watch.completion_tokens + (self.computed if failed else self.submitted))
        self.watch.end(self.cached, ERROR if failed else CANCELLED)
        self.app.pool.leave(self.served)
