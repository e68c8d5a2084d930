"""Models, health and version."""

import msgspec

from zse import __version__
from zse.http.exchange import Response
from zse.server.api_request import APIRequest
from zse.server.errors import APIError


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(value))


def _card(app, served) -> dict:
    card = {"id": served.name, "object": "model", "created": app.created, "owned_by": "zse", "state": served.state}
    if served.engine.info is not None:
        card["max_model_len"] = served.engine.info.max_context
    return card


async def models(app, request: APIRequest) -> Response:
    """GET /v1/models"""
    return json_response({"object": "list", "data": [_card(app, served) for served in app.models(request)]})


async def model(app, request: APIRequest) -> Response:
    """GET /v1/models/{model}"""
    return json_response(
        _card(app, app.find_model(request, request.parameters["model"], None)) | {"id": request.parameters["model"]}
    )


async def live(app, request: APIRequest) -> Response:
    """GET /health/live: the server process answers."""
    return json_response({"status": "ok"})


async def ready(app, request: APIRequest) -> Response:
    """GET /health/ready: 200 when a request sent now would be answered, else 503 and why."""
    ok, reason = (False, "the server is shutting down") if app.draining else app.health()
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
        return json_response(body)
    code = "shutting_down" if app.draining else "engine_restarting"
    error = APIError(code, f"Not ready: {reason}.")
    return Response(
        503,
        msgspec.json.encode(
            body | {"error": {"message": error.message, "type": error.type, "param": None, "code": code}}
        ),
        [("retry-after", "1")],
    )


async def version(app, request: APIRequest) -> Response:
    """GET /version"""
    return json_response({"version": __version__})
