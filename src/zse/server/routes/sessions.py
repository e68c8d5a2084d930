"""Conversations that were kept for requests with a session_id."""

import time
from functools import partial
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.server import database as storage
from zse.server.api_request import APIRequest
from zse.server.database.sessions import SessionCard
from zse.server.errors import APIError
from zse.server.requests import queries
from zse.server.requests.image_parts import as_parts
from zse.server.sessions import forget, needs_database


def _shown(card: SessionCard) -> dict:
    return {
        "id": card.id,
        "object": "session",
        "created_at": int(card.created),
        "last_used_at": int(card.used),
        "expires_at": int(card.expires),
        "turns": card.turns,
        "bytes": card.size,
    }


async def _run(app, request: APIRequest, name: str, writes: bool = False, **values: Any) -> Any:
    """What the function of database.sessions gives. Raises APIError where there is no database."""
    if app.database is None:
        raise needs_database()
    work = partial(getattr(storage.sessions, name), tenant=request.tenant, now=time.time(), **values)
    return await app.database.run(work, writes)


_NOT_FOUND = "There is no such session."


async def listed(app, request: APIRequest) -> Response:
    """GET /v1/sessions"""
    query = queries.read(request.query, queries.LAST_FIRST)
    cards = await _run(app, request, "listed", limit=query["limit"] + 1, after=query["after"])
    return Response.json(queries.listed(cards, query["limit"], _shown))


async def retrieve(app, request: APIRequest) -> Response:
    """GET /v1/sessions/{session}"""
    queries.read(request.query, {})
    found = await _run(app, request, "find", id=request.parameters["session"])
    if found is None:
        raise APIError("not_found", _NOT_FOUND)
    card, body = found
    return Response(200, await app.threads.run(request.account, partial(_whole, card, body)))


def _whole(card: SessionCard, body: bytes) -> bytes:
    """The session with its messages as requests write them, or its text."""
    said = msgspec.json.decode(body)
    if type(said) is str:
        return msgspec.json.encode(_shown(card) | {"text": said})
    for message in said:
        message["content"] = as_parts(message["content"])
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = msgspec.json.encode(call["function"]["arguments"]).decode()
    return msgspec.json.encode(_shown(card) | {"messages": said})


async def delete(app, request: APIRequest) -> Response:
    """DELETE /v1/sessions/{session}"""
    id = request.parameters["session"]
    if (request.tenant, id) in app.running_sessions:
        raise APIError("conflict", "A request of this session is running.")
    if not await _run(app, request, "delete", writes=True, id=id):
        raise APIError("not_found", _NOT_FOUND)
    await forget(app, request.tenant, id)
    return Response.json({"id": id, "object": "session", "deleted": True})
