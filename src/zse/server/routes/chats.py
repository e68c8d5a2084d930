"""The web page's chats, where the server keeps them."""

import time
from functools import partial
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.sampling.fields import Object
from zse.server import database as storage
from zse.server.api_request import APIRequest
from zse.server.database.chats import ChatCard
from zse.server.errors import APIError
from zse.server.requests import chats as fields
from zse.server.requests import queries
from zse.server.requests.completions import SESSION_ID
from zse.server.work import check_text


def _shown(card: ChatCard, **more: Any) -> dict:
    return {
        "id": card.id,
        "object": "chat",
        "title": card.title,
        "version": card.version,
        "created_at": int(card.created),
        "changed_at": int(card.changed),
        "bytes": card.size,
    } | more


async def _run(app, request: APIRequest, name: str, writes: bool = False, **values: Any) -> Any:
    """What the function of database.chats gives. Raises APIError where there is no database."""
    if app.database is None:
        raise APIError("unsupported_parameter", "Chats are kept by a server with a database (--database PATH).")
    return await app.database.run(partial(getattr(storage.chats, name), tenant=request.tenant, **values), writes)


async def listed(app, request: APIRequest) -> Response:
    """GET /v1/chats"""
    query = queries.read(request.query, fields.LIST)
    limit = query.pop("limit")
    cards = await _run(app, request, "listed", limit=limit + 1, **query)
    return Response.json(queries.listed(cards, limit, _shown))


async def retrieve(app, request: APIRequest) -> Response:
    """GET /v1/chats/{chat}"""
    queries.read(request.query, {})
    found = await _run(app, request, "find", id=request.parameters["chat"])
    if found is None:
        raise APIError("not_found", "There is no such chat.")
    card, body = found
    return Response.json(_shown(card, messages=msgspec.Raw(body)))


async def change(app, request: APIRequest) -> Response:
    """POST /v1/chats/{chat}"""
    id = request.parameters["chat"]
    SESSION_ID.check(id, "chat")
    values = await app.threads.run(request.account, partial(_read, request))
    card = await _run(app, request, "store", writes=True, id=id, now=time.time(), **values)
    return Response.json(_shown(card))


def _read(request: APIRequest) -> dict:
    """Arguments of database.chats.store. Raises RequestError."""
    values = Object(fields.CHAT).check(request.json(), "")
    messages = values.pop("messages")
    check_text(request, sum(len(image) for message in messages or () for image in message.get("images", ())))
    return values | {"body": None if messages is None else msgspec.json.encode(messages)}


async def delete(app, request: APIRequest) -> Response:
    """DELETE /v1/chats/{chat}"""
    id = request.parameters["chat"]
    if not await _run(app, request, "delete", writes=True, id=id):
        raise APIError("not_found", "There is no such chat.")
    return Response.json({"id": id, "object": "chat", "deleted": True})
