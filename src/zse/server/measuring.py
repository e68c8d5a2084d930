"""The common part of the routes that run texts without sampling: from an admitted body to the engine's results."""

from collections.abc import Callable

import msgspec

from zse.engine.client import Channel
from zse.engine.messages import Measured
from zse.errors import RequestError
from zse.http import json_body
from zse.scheduler.options import RequestOptions
from zse.server.admission import BYTES_PER_TOKEN
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.off_loop import OFF_LOOP_BYTES, maybe_in_thread
from zse.server.relevance import Measurement
from zse.server.statistics import CANCELLED, ERROR, Watch

# Of one request: in the engine at once. A request of 2,048 texts must not stand before everybody else's.
AT_ONCE = 8


class Results(msgspec.Struct):
    """In the measurements' order. model: the name that the request gave, or the model's."""

    model: str
    results: list[Measured]
    num_tokens: int


async def measure(app, request: APIRequest, read: Callable, prepare: Callable, check: Callable | None = None):
    """(what read() made of the body, Results). prepare: (asked, model) → Measurements, in a thread when the body is
    long; check: (asked, Measured), as soon as each is there. Raises RequestError."""
    app.check_accepting()
    app.admission.check(request.tenant)
    quota = app.limiter.enter(request)
    long = len(request.body) > OFF_LOOP_BYTES
    asked = await maybe_in_thread(long, lambda: read(json_body.parse(bytes(request.body))))
    served = app.find_model(request, asked.model, "model")
    ticket = app.admission.reserve(1, len(request.body) // BYTES_PER_TOKEN, request.tenant)
    watch = Watch(served.statistics, request.started, 1, app.tenants.usage(request.tenant))
    channel = Channel(served.engine)
    failure = CANCELLED
    try:
        app.pool.enter(served)
        quota.reserve(1, ticket.tokens)
        model = await app.pool.text(served)
        measurements = await maybe_in_thread(long, lambda: prepare(asked, model))
        watch.prompt_tokens = sum(len(item.ids) for item in measurements)
        ticket.set_tokens(watch.prompt_tokens)
        info = await app.pool.ready(served)
        _check(measurements, model.vocab_size, info.max_context)
        options = app.request_options(request, asked.options)
        results = await _run(channel, measurements, options, lambda result: check and check(asked, result))
        watch.finished("measured")
        request.note = f"{watch.prompt_tokens} tokens in {len(results)} texts"
        return asked, Results(asked.model or served.name, results, watch.prompt_tokens)
    except RequestError:
        failure = ERROR
        raise
    finally:
        channel.close()
        ticket.release()
        quota.leave(0 if failure == ERROR else watch.prompt_tokens)
        watch.end(0, failure)
        app.pool.leave(served)


def _check(measurements: list[Measurement], vocab_size: int, max_context: int) -> None:
    for item in measurements:
        if len(item.ids) > max_context:
            raise APIError(
                "context_length_exceeded",
                f"'{item.source}' has {len(item.ids)} tokens; this model's context is {max_context} tokens.",
                item.source,
            )
        if max(item.ids) >= vocab_size:
            raise APIError(
                "invalid_token_id",
                f"'{item.source}' holds a token id outside the vocabulary of {vocab_size}.",
                item.source,
            )


async def _run(
    channel: Channel, measurements: list[Measurement], options: RequestOptions, check: Callable[[Measured], object]
) -> list[Measured]:
    results: dict[int, Measured] = {}
    submitted = 0
    while len(results) < len(measurements):
        while submitted < len(measurements) and submitted - len(results) < AT_ONCE:
            item = measurements[submitted]
            channel.submit_measure(submitted, item.ids, item.ask, options)
            submitted += 1
        key, result = await channel.next()
        check(result)
        results[key] = result
    return [results[key] for key in range(len(measurements))]
