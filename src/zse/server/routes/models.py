"""The routes that administer models: what is served and stored, add, remove, load, unload."""

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from zse.errors import RequestError
from zse.http.exchange import Response
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.requests.models import ADD, LOAD, PULL, UNLOAD, read
from zse.server.work import RequestRun, maybe_in_thread

EVENT_S = 0.25  # between two events of a stream of progress


def card(app, served) -> dict:
    """What an administrator sees of a model."""
    ready, keep_s = served.engine.info, served.keep_s
    is_loaded = served.state == "loaded" and ready is not None
    return {
        "name": served.name,
        "names": served.spec.names,
        "state": served.state,
        "progress": served.reading.share if served.reading is not None else None,
        "problem": served.problem or None,
        "requests": served.users,
        "idle_s": None if served.users or not is_loaded else round(time.monotonic() - served.last_used, 1),
        "keep_alive_s": app.pool.idle_s if keep_s is None else None if keep_s == math.inf else keep_s,
        "loads": served.num_loads,
        "unloads": served.num_evictions,
        "load_ms": served.load_ms or None,
        "context": ready.max_context if is_loaded else None,
        "memory_bytes": ready.memory_bytes if is_loaded else None,
        "kept_bytes": None if app.pool.resident is None else app.pool.resident.bytes_of(served.name),
    }


async def listed(app, request: APIRequest) -> Response:
    """GET /admin/models"""
    with RequestRun(app, request):
        stored = await maybe_in_thread(True, app.library.stored)
        models, pulls = app.pool.models, app.library.pulls.values()
        body = {"models": [card(app, served) for served in models], "pulls": [pull.card() for pull in pulls]}
        return Response.json(body | {"stored": stored})


async def add(app, request: APIRequest) -> Response:
    """POST /admin/models"""
    with RequestRun(app, request):
        values = read(ADD, request.json())
        spec = await maybe_in_thread(True, lambda: app.library.spec(values["model"], values["name"]))
        return Response.json(card(app, app.pool.add(spec)))


async def remove(app, request: APIRequest) -> Response:
    """DELETE /admin/models/{model}"""
    with RequestRun(app, request):
        served = app.find_model(request, request.parameters["model"], None)
        app.pool.remove(served)
        return Response.json({"name": served.name, "removed": True, "requests": served.users})


async def load(app, request: APIRequest) -> Response | None:
    """POST /admin/models/{model}/load"""
    with RequestRun(app, request):
        values = read(LOAD, request.json())
        served = app.find_model(request, request.parameters["model"], None)
        app.pool.enter(served)
        try:
            loading = asyncio.ensure_future(_loaded(app, served, values["keep_alive"]))
            if values["stream"]:
                await follow(request, loading, lambda: card(app, served), _event)
                return None
            await loading
            return Response.json(card(app, served))
        finally:
            app.pool.leave(served)


async def _loaded(app, served, keep_s: float | None) -> None:
    """Load model and tokenizer. Raises APIError with the reason, which requests of others do not learn."""
    try:
        await app.pool.ready(served)
        await app.pool.text(served)
        if keep_s is not None:
            app.pool.keep(served, keep_s)
    except RequestError as error:
        if error.code != "engine_unavailable":
            raise
        reason = served.problem or served.engine.reason or error.message
        raise APIError("engine_unavailable", f"{served.name} could not be loaded: {reason}") from None


async def pull(app, request: APIRequest) -> Response | None:
    """POST /admin/models/{model}/pull"""
    with RequestRun(app, request):
        values = read(PULL, request.json())
        found = app.library.pull(request.parameters["model"], values["force"])
        work = asyncio.ensure_future(pulled(app, found, values["serve"]))
        if values["stream"]:
            await follow(request, work, found.card, _event)
            return None
        await work
        return Response.json(found.card())


async def pulled(app, found, serve: bool) -> None:
    """Wait for a pull, and serve the model then; that is left undone when nobody waits any more. Raises APIError."""
    await asyncio.shield(found.task)
    if found.error is not None:
        raise found.error
    if serve and found.name not in app.pool.by_name:
        app.pool.add(await maybe_in_thread(True, lambda: app.library.spec(found.name)))


async def unload(app, request: APIRequest) -> Response:
    """POST /admin/models/{model}/unload"""
    with RequestRun(app, request):
        values = read(UNLOAD, request.json())
        served = app.find_model(request, request.parameters["model"], None)
        await app.pool.unload(served, values["force"])
        return Response.json(card(app, served))


def _event(value: dict) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def follow(
    request: APIRequest, work: asyncio.Future, now: Callable[[], dict], write: Callable[[dict], bytes]
) -> None:
    """A stream that says how `work` goes: what now() gives, when it has changed, and once more at the end. Raises what
    `work` raises."""
    said = None
    try:
        while not work.done():
            if (value := now()) != said:
                said = value
                request.send_events(write(value))
                await request.connection.drain()
            await asyncio.wait([work], timeout=EVENT_S)
        work.result()
        request.send_events(write(now()), is_last=True)
    finally:
        work.cancel()
