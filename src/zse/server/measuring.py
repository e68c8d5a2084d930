"""The common part of the routes that run texts without sampling: from an admitted body to the engine's results."""

import time
from collections.abc import Callable, Iterable

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
# Of all texts of a request: a body of 2 MiB in tokens of a byte. A query counts with each of its documents.
MOST_TOKENS = 1 << 21


class Results(msgspec.Struct):
    """In the measurements' order. model: the name that the request gave, or the model's."""

    model: str
    results: list[Measured]
    num_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


async def measure(app, request: APIRequest, read: Callable, prepare: Callable, check: Callable | None = None):
    """(what read() made of the body, Results). prepare: (asked, model, the engine's Ready) → Measurements one by one,
    in a thread: a query of 10 KB with a thousand documents is a short body, and 10 MB to tokenize. check: (asked,
    Ready), before anything runs. Raises RequestError."""
    with RequestRun(app, request) as work:
        asked = await maybe_in_thread(work.is_long, lambda: read(request.json()))
        work.start(asked.model)
        if request.adapter:
            message = "Adapters write answers: vectors and scores are the base model's."
            raise APIError("unsupported_parameter", message, "model")
        work.keep(asked.keep_alive)
        model = await app.pool.text(work.served)
        info = await app.pool.ready(work.served)
        if check is not None:
            check(asked, info)
        measurements = await maybe_in_thread(
            True, lambda: _gather(prepare(asked, model, info), model.vocab_size, info.max_context)
        )
        num_tokens = sum(len(item.ids) for item in measurements)
        work.prompt_tokens = num_tokens
        work.reserve(num_tokens)
        options = app.request_options(request, asked.options)
        work.submitted = time.monotonic()
        results = await run_all(work, measurements, options, AT_ONCE if info.generates else ENCODER_AT_ONCE)
        work.outcomes["measured"] += 1
        request.note = f"{num_tokens} tokens in {len(results)} texts"
        return asked, Results(asked.model or work.served.name, results, num_tokens)


def _gather(items: Iterable[Measurement], vocab_size: int, max_context: int) -> list[Measurement]:
    """All of them, each checked when it is made: the first that is wrong ends the work. Raises APIError."""
    found, total = [], 0
    for item in items:
        _check(item, vocab_size, max_context)
        total += len(item.ids)
        if total > MOST_TOKENS:
            message = f"The texts have more than {MOST_TOKENS} tokens, a query counted with each of its documents: send fewer at once."
            raise APIError("request_too_large", message, item.source)
        found.append(item)
    return found


def _check(item: Measurement, vocab_size: int, max_context: int) -> None:
    if not item.ids:
        raise APIError("invalid_value", f"'{item.source}' is empty: it has no tokens.", item.source)
    if len(item.ids) > max_context:
        message = (
            f"'{item.source}' has {len(item.ids)} tokens; this model's context is {max_context} tokens. "
            "Shorten it, or ask for 'truncate'."
        )
        raise APIError("context_length_exceeded", message, item.source)
    if max(item.ids) >= vocab_size:
        message = f"'{item.source}' holds a token id outside the vocabulary of {vocab_size}."
        raise APIError("invalid_token_id", message, item.source)


async def run_all(
    work: RequestRun, measurements: list[Measurement], options: RequestOptions, at_once: int
) -> list[Measured]:
    """The results of all, of which at most so many are in the engine at once. The channel must have no other request."""
    channel = work.channel
    results: dict[int, Measured] = {}
    submitted = waiting = 0
    while len(results) < len(measurements):
        while submitted < len(measurements) and submitted - len(results) < at_once:
            item = measurements[submitted]
            work.served.engine.submit(channel, submitted, item.ids, item.ask, options)
            submitted += 1
            waiting += len(item.ids)
        work.hold(work.choices, waiting)  # what is not given to the engine yet keeps nobody out of the queue
        key, result = await channel.next()
        results[key] = result
        waiting -= len(measurements[key].ids)
    return [results[key] for key in range(len(measurements))]
