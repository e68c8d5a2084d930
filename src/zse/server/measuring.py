"""The common part of the routes that run texts without sampling: from an admitted body to the engine's results."""

from collections.abc import Callable

import msgspec

from zse.engine.messages import Measured
from zse.scheduler.options import RequestOptions
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.relevance import Measurement
from zse.server.work import RequestRun, maybe_in_thread

# Of one request: in the engine at once. A request of 2,048 texts must not stand before everybody else's.
AT_ONCE = 8
ENCODER_AT_ONCE = 64  # which does nothing else, and takes 32 in a step


class Results(msgspec.Struct):
    """In the measurements' order. model: the name that the request gave, or the model's."""

    model: str
    results: list[Measured]
    num_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


async def measure(app, request: APIRequest, read: Callable, prepare: Callable, check: Callable | None = None):
    """(what read() made of the body, Results). prepare: (asked, model, the engine's Ready) → Measurements, in a thread when the body
    is long; check: (asked, Ready), before anything runs. Raises RequestError."""
    with RequestRun(app, request) as work:
        asked = await maybe_in_thread(work.is_long, lambda: read(request.json()))
        work.start(asked.model)
        model = await app.pool.text(work.served)
        # A question of yes_no goes through the chat template: see routes/completions.py.
        renders = model.has_chat_template
        info = await app.pool.ready(work.served)
        measurements = await maybe_in_thread(work.is_long or renders, lambda: prepare(asked, model, info))
        num_tokens = sum(len(item.ids) for item in measurements)
        work.prompt_tokens = num_tokens
        work.hold(work.choices, num_tokens)  # the true number, in place of the estimate
        _check(measurements, model.vocab_size, info.max_context)
        if check is not None:
            check(asked, info)
        options = app.request_options(request, asked.options)
        results = await _run(work, measurements, options, AT_ONCE if info.generates else ENCODER_AT_ONCE)
        work.outcomes["measured"] += 1
        request.note = f"{num_tokens} tokens in {len(results)} texts"
        return asked, Results(asked.model or work.served.name, results, num_tokens)


def _check(measurements: list[Measurement], vocab_size: int, max_context: int) -> None:
    for item in measurements:
        if len(item.ids) > max_context:
            message = (
                f"'{item.source}' has {len(item.ids)} tokens; this model's context is {max_context} tokens. "
                "Shorten it, or ask for 'truncate'."
            )
            raise APIError("context_length_exceeded", message, item.source)
        if max(item.ids) >= vocab_size:
            message = f"'{item.source}' holds a token id outside the vocabulary of {vocab_size}."
            raise APIError("invalid_token_id", message, item.source)


async def _run(
    work: RequestRun, measurements: list[Measurement], options: RequestOptions, at_once: int
) -> list[Measured]:
    channel = work.channel
    results: dict[int, Measured] = {}
    submitted = 0
    while len(results) < len(measurements):
        while submitted < len(measurements) and submitted - len(results) < at_once:
            item = measurements[submitted]
            work.served.engine.submit(channel, submitted, item.ids, item.ask, options)
            submitted += 1
        key, result = await channel.next()
        results[key] = result
    return [results[key] for key in range(len(measurements))]
