"""Models, health and version."""

import msgspec

from zse import __version__
from zse.server.errors import APIError
from zse.server.exchange import Request, Response


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(value))


def _card(app, name: str) -> dict:
    card = {"id": name, "object": "model", "created": app.created, "owned_by": "zse"}
    if app.engine.info is not None:
        card["max_model_len"] = app.engine.info.max_context
    return card


async def models(app, request: Request) -> Response:
    """GET /v1/models"""
    return json_response({"object": "list", "data": [_card(app, app.model_names[0])]})


async def model(app, request: Request) -> Response:
    """GET /v1/models/{model}"""
    app.check_model(request.parameters["model"], None)
    return json_response(_card(app, request.parameters["model"]))


async def live(app, request: Request) -> Response:
    """GET /health/live: the server process answers."""
    return json_response({"status": "ok"})


async def ready(app, request: Request) -> Response:
    """GET /health/ready: 200 when a request sent now would be answered, else 503 and why."""
    ok, reason = (False, "the server is shutting down") if app.draining else app.health()
    heartbeat = app.engine.heartbeat
    body = {"status": "ready" if ok else "not_ready", "reason": reason or None, "engine": app.engine.state,
            "restarts": app.engine.num_restarts, "requests": app.admission.choices, "running": heartbeat.running,
            "waiting": heartbeat.waiting, "free_pages": heartbeat.free_pages, "steps": heartbeat.steps,
            "last_step_age_s": round(app.engine.last_step_age_s, 3)}
    if ok:
        return json_response(body)
    code = "shutting_down" if app.draining else "engine_restarting"
    error = APIError(code, f"Not ready: {reason}.")
    return Response(503, msgspec.json.encode(
        body | {"error": {"message": error.message, "type": error.type, "param": None, "code": code}}),
        [("retry-after", "1")])


async def version(app, request: Request) -> Response:
    """GET /version"""
    return json_response({"version": __version__})
