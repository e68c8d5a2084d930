"""OpenAI's Responses API: answers, and those that are stored."""

import time
from functools import partial
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.server import database as storage
from zse.server.answering import ReadOrAnswer, answer
from zse.server.api_request import APIRequest
from zse.server.errors import APIError, unsupported
from zse.server.requests import queries
from zse.server.requests.mcp import approved
from zse.server.requests.responses import ITEMS, STORED, check_items, check_responses, completion_of, shown_items
from zse.server.routes import responses_mcp
from zse.server.routes.response_items import ResponseWriter
from zse.server.work import OFF_LOOP_BYTES, maybe_in_thread


def _read(app, request: APIRequest, body: dict) -> Any:
    """What answering.Reader gives. Raises RequestError."""
    values = check_responses(body)
    request.num_events = 0
    for name in ("store", "previous_response_id"):
        if values[name] and app.database is None:
            raise unsupported(name, "responses are stored by a server with a database (--database PATH)")
    if values["previous_response_id"]:
        return _continued(app, request, values)
    return _answered(app, request, values, values["input"])


def _answered(app, request: APIRequest, values: dict, items: list[dict]) -> ReadOrAnswer:
    """How a conversation of these items is answered. Raises RequestError."""
    if any(tool["type"] == "mcp" for tool in values["tools"]):
        return responses_mcp.McpAnswer(app, request, values, list(items)).answer
    if approved(items):
        message = "A call of an MCP server's was approved: name the server in 'tools' once more."
        raise APIError("missing_required_parameter", message, "tools")
    return completion_of(values, items), partial(ResponseWriter, values)


async def _continued(app, request: APIRequest, values: dict) -> ReadOrAnswer:
    """The same of a request that goes on from a stored response."""
    id = values["previous_response_id"]
    work = partial(storage.responses.conversation, tenant=request.tenant, id=id, now=time.time())
    earlier = await app.database.run(work, writes=False)
    size = sum(response.size for response in earlier)
    if size > storage.responses.CONVERSATION_BYTES:
        message = (
            f"The stored conversation has more than {storage.responses.CONVERSATION_BYTES} bytes; begin a new one."
        )
        raise APIError("request_too_large", message, "previous_response_id")
    if not earlier or earlier[0].previous:
        message = "There is no such stored response, or one before it is gone; only those that were sent store: true are kept."
        raise APIError("not_found", message, "previous_response_id")
    is_long = size > OFF_LOOP_BYTES
    items = await maybe_in_thread(is_long, partial(_items_of, earlier))
    return await maybe_in_thread(is_long, partial(_answered, app, request, values, items + values["input"]))


def _items_of(earlier: list) -> list[dict]:
    """The items of stored responses, questions and answers. Raises RequestError."""
    items: list[dict] = []
    for response in earlier:
        items += msgspec.json.decode(response.items) + msgspec.json.decode(response.body)["output"]
    return check_items(items)


async def responses(app, request: APIRequest) -> Response | None:
    """POST /v1/responses"""
    return await answer(app, request, read=partial(_read, app, request))


# -- those that are stored


async def _run(app, request: APIRequest, name: str, writes: bool = False) -> Any:
    """What the function of database.responses gives for the response that the path names. Raises APIError: there is
    none."""
    found = None
    if app.database is not None:
        work, id = getattr(storage.responses, name), request.parameters["response"]
        found = await app.database.run(partial(work, tenant=request.tenant, id=id, now=time.time()), writes)
    if not found:
        raise APIError("not_found", "There is no such stored response.")
    return found


async def retrieve(app, request: APIRequest) -> Response:
    """GET /v1/responses/{response}"""
    queries.read(request.query, STORED)
    return Response(200, (await _run(app, request, "find")).body)


async def delete(app, request: APIRequest) -> Response:
    """DELETE /v1/responses/{response}"""
    await _run(app, request, "delete", writes=True)
    return Response.json({"id": request.parameters["response"], "object": "response", "deleted": True})


async def cancel(app, request: APIRequest) -> Response:
    """POST /v1/responses/{response}/cancel"""
    await _run(app, request, "find")
    raise APIError("invalid_value", "This response is over: none is made in the background, which could be cancelled.")


async def input_items(app, request: APIRequest) -> Response:
    """GET /v1/responses/{response}/input_items"""
    query = queries.read(request.query, ITEMS)
    earlier = await _run(app, request, "conversation")
    items = []
    for response in earlier:
        items += shown_items(msgspec.json.decode(response.items), response.id)
        if response is not earlier[-1]:
            items += msgspec.json.decode(response.body)["output"]
    return Response.json(queries.page(items, query))
