"""How many tokens the prompt of a conversation has; the engine is not asked."""

import inspect
from collections.abc import Awaitable, Callable

from zse.server import images
from zse.server.api_request import APIRequest
from zse.server.requests.completions import Completion
from zse.server.tools.chat import prepare
from zse.server.work import RequestRun, check_text, maybe_in_thread


async def count(app, request: APIRequest, read: Callable[[dict], Completion | Awaitable[Completion]]) -> int:
    """Of the prompt that the request's body means. read: the chat request of the body; awaited where it needs what is
    stored. Raises APIError and RequestError."""
    with RequestRun(app, request) as run:
        found = await maybe_in_thread(run.is_long, lambda: read(request.json()))
        completion = await found if inspect.isawaitable(found) else found
        served = app.find_model(request, completion.model, "model")
        model = await app.pool.text(served)
        pictures = None
        if completion.has_images:
            pictures = await images.prepare(run, served, completion.messages or [], model, reads=False)
        else:
            check_text(request, 0)

        def tokens() -> int:
            prepare(completion, model, app.tool_parser, app.reasoning_parser)  # refuses what the template cannot take
            given = completion.messages or [], completion.tools, completion.template_variables
            return len(model.encode_chat(*given) if pictures is None else pictures.encode_chat(model, *given)[0])

        return await maybe_in_thread(True, tokens)
