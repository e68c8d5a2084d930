"""GET /admin/logs: the newest records of the server's log, whole or as they come."""

import asyncio
import logging
import time
from itertools import islice
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.log import RecentRecord, utc
from zse.server.api_request import APIRequest
from zse.server.requests import queries

TAIL_S = 0.25  # between two looks for new records


async def recent(app, request: APIRequest) -> Response | None:
    """GET /admin/logs"""
    query = queries.read(request.query, queries.LOGS)
    if not query["stream"]:
        return Response.json({"object": "list", "data": [_shown(record) for record in _found(app, query)]})
    request.last_write = time.monotonic()
    request.send_events(request.comment)  # the client sees that it has begun
    while not app.draining:
        for record in (found := _found(app, query)):
            request.send_events(b"data: " + msgspec.json.encode(_shown(record)) + b"\n\n")
        query["after"] = max([query["after"], *(record.id for record in found)])
        await request.connection.drain()
        await asyncio.sleep(TAIL_S)
        app.check_still_admin(request)
    request.send_events(b"data: [DONE]\n\n", is_last=True)
    return None


def _found(app, query: dict[str, Any]) -> list[RecentRecord]:
    """The newest that the query asks for, the oldest of them first."""
    level, wanted = getattr(logging, query["level"].upper()), query["search"].casefold()
    records = (
        record
        for record in app.logs.newest_first(query["after"])
        if record.level >= level and record.at >= query["since"] and wanted in record.message.casefold()
    )
    return list(islice(records, query["limit"]))[::-1]


def _shown(record: RecentRecord) -> dict:
    """As a line of --log-format json, with its id."""
    return record.fields | {
        "id": record.id,
        "time": utc(record.at),
        "level": logging.getLevelName(record.level).lower(),
        "logger": record.logger,
        "message": record.message,
    }
