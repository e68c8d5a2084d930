"""OpenAI's Responses API: answers, and those that are stored."""

import re
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.server import database as storage
from zse.server.answering import ReadOrAnswer, answer
from zse.server.api_request import APIRequest
from zse.server.counting import count
from zse.server.errors import APIError, unsupported
from zse.server.requests import queries
from zse.server.requests.completions import Completion
from zse.server.requests.mcp import approved
from zse.server.requests.responses import (
    ITEMS,
    REFERENCE,
    STORED,
    check_counted,
    check_items,
    check_responses,
    completion_of,
    shown_items,
)
from zse.server.routes import responses_mcp
from zse.server.routes.response_items import ResponseWriter
from zse.server.work import OFF_LOOP_BYTES, maybe_in_thread

_RESPONSE_OF = re.compile(r"^[a-z]+_(.*)_(?:in)?[0-9]+$")  # items are named after their response


def _read(app, request: APIRequest, body: dict) -> Any:
    """What answering.Reader gives. Raises RequestError."""
    values = check_responses(body)
    request.num_events = 0
    if _needs_stored(app, values):
        return _continued(app, request, values)
    return _answered(app, request, values, values["input"])


def _needs_stored(app, values: dict) -> bool:
    """Whether the conversation has parts that are stored. Raises APIError: nothing is here."""
    asked = [name for name in ("store", "previous_response_id") if values[name]]
    asked += [f"input[{index}]" for index, item in enumerate(values["input"]) if item["type"] == REFERENCE]
    if asked and app.database is None:
        raise unsupported(asked[0], "responses are stored by a server with a database (--database PATH)")
    return asked not in ([], ["store"])


def _answered(app, request: APIRequest, values: dict, items: list[dict]) -> ReadOrAnswer:
    """How a conversation of these items is answered. Raises RequestError."""
    if any(tool["type"] == "mcp" for tool in values["tools"]):
        return responses_mcp.McpAnswer(app, request, values, list(items)).answer
    if approved(items):
        message = "A call of an MCP server's was approved: name the server in 'tools' once more."
        raise APIError("missing_required_parameter", message, "tools")
    return completion_of(values, items), partial(ResponseWriter, values)


async def _continued(app, request: APIRequest, values: dict) -> ReadOrAnswer:
    """The same of a request that goes on from stored responses, or names their items."""
    items, is_long = await _whole(app, request, values)
    return await maybe_in_thread(is_long, partial(_answered, app, request, values, items))


async def _whole(app, request: APIRequest, values: dict) -> tuple[list[dict], bool]:
    """The conversation's items, and whether they are long; `input` has what it refers to then. Raises APIError, RequestError."""
    names = [_RESPONSE_OF.sub(r"resp_\1", item["id"]) for item in values["input"] if item["type"] == REFERENCE]
    size, items = 0, []
    if names:
        found, size = await _stored(app, request, storage.responses.named, "input", ids=list(dict.fromkeys(names)))
        values["input"] = await maybe_in_thread(True, partial(_resolved, values["input"], found))
    if id := values["previous_response_id"]:
        read = storage.responses.conversation
        earlier, more = await _stored(app, request, read, "previous_response_id", id=id)
        if not earlier or earlier[0].previous:
            message = "There is no such stored response, or one before it is gone; only those that were sent store: true are kept."
            raise APIError("not_found", message, "previous_response_id")
        size += more
        items = await maybe_in_thread(size > OFF_LOOP_BYTES, partial(_items_of, earlier))
    return items + values["input"], bool(names) or size > OFF_LOOP_BYTES


async def _stored(app, request: APIRequest, read: Any, param: str, **which) -> tuple[list, int]:
    """What a function of database.responses gives, and its bytes. Raises APIError: too many."""
    work = partial(read, tenant=request.tenant, now=time.time(), **which)
    found = await app.database.run(work, writes=False)
    return found, _bounded(sum(response.size for response in found), param)


def _bounded(size: int, param: str) -> int:
    """The bytes of what is stored. Raises APIError: too many."""
    if size > (most := storage.responses.CONVERSATION_BYTES):
        message = f"The stored conversation has more than {most} bytes; begin a new one."
        raise APIError("request_too_large", message, param)
    return size


def _resolved(items: list[dict], found: list) -> list[dict]:
    """The items with those of stored responses where they name one. Raises APIError and RequestError."""
    kept: dict[str, dict] = {}
    for response in found:
        asked = shown_items(msgspec.json.decode(response.items), response.id)
        kept |= {item["id"]: item for item in asked + msgspec.json.decode(response.body)["output"]}
    out, size = [], 0
    for index, item in enumerate(items):
        if item["type"] == REFERENCE:
            if item["id"] not in kept:
                message = "There is no such stored item: send store: true with what it answers, or store: false and the item itself."
                raise APIError("not_found", message, f"input[{index}].id")
            item = kept[item["id"]]
            size = _bounded(size + len(msgspec.json.encode(item)), "input")  # which may be named many times
        out.append(item)
    return check_items(out)


def _items_of(earlier: list) -> list[dict]:
    """The items of stored responses, questions and answers. Raises RequestError."""
    items: list[dict] = []
    for response in earlier:
        items += msgspec.json.decode(response.items) + msgspec.json.decode(response.body)["output"]
    return check_items(items)


async def _counted(app, request: APIRequest, values: dict) -> Completion:
    items, is_long = await _whole(app, request, values)
    return await maybe_in_thread(is_long, partial(completion_of, values, items))


async def input_tokens(app, request: APIRequest) -> Response:
    """POST /v1/responses/input_tokens"""

    def read(body: dict) -> Completion | Awaitable[Completion]:
        values = check_counted(body)
        if any(tool["type"] == "mcp" for tool in values["tools"]):
            raise unsupported("tools", "what tools of an MCP server take is not known before it is asked")
        return _counted(app, request, values) if _needs_stored(app, values) else completion_of(values, values["input"])

    return Response.json({"object": "response.input_tokens", "input_tokens": await count(app, request, read)})


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
