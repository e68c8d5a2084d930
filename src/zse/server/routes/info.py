"""Models, health and version."""

import msgspec

from zse import __version__
from zse.http.bind import is_loopback
from zse.http.exchange import Response
from zse.server import errors
from zse.server.api_request import APIRequest
from zse.server.errors import APIError

FORWARDED = {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"}


def _card(app, served) -> dict:
    card = {"id": served.name, "object": "model", "created": app.created, "owned_by": "zse", "state": served.state}
    if served.engine.info is not None:
        card["max_model_len"] = served.engine.info.max_context
        card["input_modalities"] = ["text", "image"] if served.engine.info.vision else ["text"]
    return card


async def preflight(app, request: APIRequest) -> Response:
    """OPTIONS of a page that another origin serves: the headers say what it may do."""
    return Response(200, b"")


async def models(app, request: APIRequest) -> Response:
    """GET /v1/models"""
    cards = [
        _card(app, served) | ({"id": f"{served.name}:{adapter}", "parent": served.name} if adapter else {})
        for served, adapter in app.usable(request)
    ]
    return Response.json({"object": "list", "data": cards})


async def model(app, request: APIRequest) -> Response:
    """GET /v1/models/{model}"""
    name = request.parameters["model"]
    served = app.find_model(request, name, None)
    return Response.json(_card(app, served) | {"id": name} | ({"parent": served.name} if request.adapter else {}))


async def live(app, request: APIRequest) -> Response:
    """GET /health/live: the server process answers."""
    return Response.json({"status": "ok"})


async def ready(app, request: APIRequest) -> Response:
    """GET /health/ready: 200 when a request sent now would be answered, else 503; why, and how much goes on, for those
    who may know."""
    ok, reason = (False, "the server is shutting down") if app.draining else app.pool.health()
    code = "shutting_down" if app.draining else "engine_restarting"
    if not _may_know(app, request):
        status = {"status": "ready" if ok else "not_ready"}
        return Response.json(status) if ok else _not_ready(status, code, "Not ready.")
    engines = [served.engine for served in app.pool.models]
    beats = [engine.heartbeat for engine in engines]
    body = {
        "status": "ready" if ok else "not_ready",
        "reason": reason or None,
        "engine": engines[0].state if engines else None,
        "restarts": sum(engine.num_restarts for engine in engines),
        "requests": app.admission.choices,
        "running": sum(beat.running for beat in beats),
        "waiting": sum(beat.waiting for beat in beats),
        "free_pages": sum(beat.free_pages for beat in beats),
        "steps": sum(beat.steps for beat in beats),
        "last_step_age_s": round(max((engine.last_step_age_s for engine in engines), default=0.0), 3),
    }
    if ok:
        return Response.json(body)
    return _not_ready(body, code, f"Not ready: {reason}.")


def _not_ready(body: dict, code: str, message: str) -> Response:
    error = errors.contents(APIError(code, message))
    return Response(503, msgspec.json.encode(body | error), [("retry-after", "1")])


def _may_know(app, request: APIRequest) -> bool:
    """Whether the activity is told: to an admin's key, or to this machine. A proxy says whom it asks for, and then the
    address is not the client's."""
    if not app.needs_key:
        return True  # as /metrics
    if is_loopback(request.connection.client.removeprefix("::ffff:")) and not FORWARDED & request.headers.keys():
        return True
    try:
        return app.identify(request).access.admin
    except APIError:
        return False  # a probe with an old key sees the status, too


async def version(app, request: APIRequest) -> Response:
    """GET /version"""
    return Response.json({"version": __version__})
