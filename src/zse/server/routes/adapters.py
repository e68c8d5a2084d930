"""The admin's routes for LoRA adapters: which there are, one more, one less."""

from zse.http.exchange import Response
from zse.sampling.fields import Object
from zse.server.adapters import check_name
from zse.server.api_request import APIRequest
from zse.server.requests import adapters as fields


def _card(served, adapter) -> dict:
    return {"id": f"{served.name}:{adapter.name}", "object": "adapter", "model": served.name} | served.adapters.card(
        adapter
    )


async def listed(app, request: APIRequest) -> Response:
    """GET /admin/adapters"""
    found = [_card(served, each) for served in app.models(request) for each in served.adapters.by_name.values()]
    return Response.json({"object": "list", "data": found})


async def load(app, request: APIRequest) -> Response:
    """POST /admin/adapters"""
    values = Object(fields.LOAD).check(request.json(), "")
    name = check_name(values["name"], "name")
    served = app.find_model(request, values["model"], "model")
    app.pool.enter(served)
    try:
        await app.pool.ready(served)
        return Response.json(_card(served, await served.adapters.load(name, values["path"])))
    finally:
        app.pool.leave(served)


async def unload(app, request: APIRequest) -> Response:
    """POST /admin/adapters/unload"""
    values = Object(fields.UNLOAD).check(request.json(), "")
    served = app.find_model(request, values["model"], "model")
    return Response.json(_card(served, served.adapters.unload(values["name"])) | {"state": "unloaded"})
