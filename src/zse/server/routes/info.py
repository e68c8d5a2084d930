"""Models, health and version."""

import msgspec

from zse import __version__
from zse.http.exchange import Response
from zse.server import errors
from zse.server.api_request import APIRequest
from zse.server.errors import APIError


def _card(app, served) -> dict:
    card = {"id": served.name, "object": "model", "created": app.created, "owned_by": "zse", "state": served.state}
    if served.engine.info is not None:
        card["max_model_len"] = served.engine.info.max_context
    return card


async def models(app, request: APIRequest) -> Response:
    """GET /v1/models"""
    return Response.json({"object": "list", "data": [_card(app, served) for served in app.models(request)]})


async def model(app, request: APIRequest) -> Response:
    """GET /v1/models/{model}"""
    name = request.parameters["model"]
    return Response.json(_card(app, app.find_model(request, name, None)) | {"id": name})


async def live(app, request: APIRequest) -> Response:
    """GET /health/live: the server process answers."""
    return Response.json({"status": "ok"})


async def ready(app, request: APIRequest) -> Response:
    """GET /health/ready: 200 when a request sent now would be answered, else 503 and why."""
    ok, reason = (False, "the server is shutting down") if app.draining else app.pool.health()
    engines = [served.engine for served in app.pool.models]
    beats = [engine.heartbeat for engine in engines]
    body = {
        "status": "ready" if ok else "not_ready",
        "reason": reason or None,
        "engine": engines[0].state,
        "restarts": sum(engine.num_restarts for engine in engines),
        "requests": app.admission.choices,
        "running": sum(beat.running for beat in beats),
        "waiting": sum(beat.waiting for beat in beats),
        "free_pages": sum(beat.free_pages for beat in beats),
        "steps": sum(beat.steps for beat in beats),
        "last_step_age_s": round(max(engine.last_step_age_s for engine in engines), 3),
    }
    if ok:
        return Response.json(body)
    code = "shutting_down" if app.draining else "engine_restarting"
    error = errors.contents(APIError(code, f"Not ready: {reason}."))
    return Response(503, msgspec.json.encode(body | error), [("retry-after", "1")])


async def version(app, request: APIRequest) -> Response:
    """GET /version"""
    return Response.json({"version": __version__})
