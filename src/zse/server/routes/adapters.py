"""The admin's routes for LoRA adapters: which there are, one more, one less."""

import os
from functools import partial

from zse.formats import adapter_store
from zse.formats.adapter_store import StoredAdapter
from zse.http.exchange import Response
from zse.sampling.fields import Object
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.requests import adapters as fields


def _card(served, adapter) -> dict:
    is_uploaded = adapter.path.startswith(adapter_store.folder() + os.sep)
    known = {"id": f"{served.name}:{adapter.name}", "object": "adapter", "model": served.name, "uploaded": is_uploaded}
    return known | served.adapters.card(adapter)


def _stored(stored: StoredAdapter) -> dict:
    """An uploaded one that requests may not name."""
    card = {"id": f"{stored.model}:{stored.name}", "object": "adapter", "model": stored.model, "uploaded": True}
    known = {"name": stored.name, "path": stored.path, "rank": stored.rank, "bytes": stored.nbytes}
    return card | known | {"state": "stored"}


async def listed(app, request: APIRequest) -> Response:
    """GET /admin/adapters"""
    models = {served.name: served for served in app.models(request)}
    found = [_card(served, each) for served in models.values() for each in served.adapters.by_name.values()]
    known = {card["id"] for card in found}
    cards = map(_stored, await app.threads.run(request.account, adapter_store.listed))
    found += [card for card in cards if card["model"] in models and card["id"] not in known]
    return Response.json({"object": "list", "data": found})


async def upload(app, request: APIRequest) -> Response:
    """POST /admin/adapters/upload"""
    return Response.json(_card(*await app.adapter_uploads.receive(request)))


async def delete(app, request: APIRequest) -> Response:
    """DELETE /admin/adapters/{adapter}"""
    id = request.parameters["adapter"]
    await app.adapter_uploads.delete(request, id)
    return Response.json({"id": id, "object": "adapter", "deleted": True})


async def load(app, request: APIRequest) -> Response:
    """POST /admin/adapters"""
    values = Object(fields.LOAD).check(request.json(), "")
    served, name, path = app.find_model(request, values["model"], "model"), values["name"], values["path"]
    if path is None:
        stored = await app.threads.run(request.account, partial(adapter_store.find, served.name, name))
        if stored is None:
            message = "'path' is required: there is no uploaded adapter of this name."
            raise APIError("missing_required_parameter", message, "path")
        path = stored.path
    app.pool.enter(served)
    try:
        await app.pool.ready(served)
        return Response.json(_card(served, await served.adapters.load(name, path)))
    finally:
        app.pool.leave(served)


async def unload(app, request: APIRequest) -> Response:
    """POST /admin/adapters/unload"""
    values = Object(fields.UNLOAD).check(request.json(), "")
    served = app.find_model(request, values["model"], "model")
    return Response.json(_card(served, served.adapters.unload(values["name"])) | {"state": "unloaded"})
