"""The admin's routes: keys of the database, their usage, the audit log. What they answer is on the disk."""

import time
from functools import partial
from typing import Any

from zse.http.exchange import Response
from zse.server.api_request import APIRequest
from zse.server.database import keys, usage
from zse.server.database.connection import Work
from zse.server.errors import APIError
from zse.server.requests import keys as fields


async def _run(app, work: Work, writes: bool = True) -> Any:
    """Raises APIError."""
    if app.key_watch is None or app.key_watch.database is None:
        raise APIError("not_found", "This server has no database of keys: start it with --database PATH.")
    try:
        done = await app.key_watch.database.run(work, writes)
    except keys.KeyRefused as error:
        raise APIError(error.code, f"{str(error)[:1].upper()}{str(error)[1:]}.", "name") from None
    if writes:
        await app.key_watch.refresh()
    return done


def _shown(stored: keys.StoredKey, **more: object) -> Response:
    return Response.json(stored.public(time.time()) | more)


def _listed(rows: list) -> Response:
    return Response.json({"object": "list", "data": rows})


async def listed(app, request: APIRequest) -> Response:
    """GET /admin/keys"""
    now = time.time()
    return _listed([key.public(now) for key in await _run(app, keys.listed, writes=False)])


async def create(app, request: APIRequest) -> Response:
    """POST /admin/keys"""
    name, settings = fields.read_settings(request.json(), fields.CREATE)
    made, text = await _run(app, partial(keys.create, name=name, actor=request.account, **settings))
    return _shown(made, key=text)


async def update(app, request: APIRequest) -> Response:
    """POST /admin/keys/update"""
    name, settings = fields.read_settings(request.json(), fields.UPDATE)
    return _shown(await _run(app, partial(keys.change, name=name, actor=request.account, **settings)))


async def revoke(app, request: APIRequest) -> Response:
    """POST /admin/keys/revoke"""
    name = fields.read(request.json(), fields.WHICH)["name"]
    return _shown(await _run(app, partial(keys.revoke, name=name, actor=request.account)))


async def rotate(app, request: APIRequest) -> Response:
    """POST /admin/keys/rotate"""
    name = fields.read(request.json(), fields.WHICH)["name"]
    made, text = await _run(app, partial(keys.rotate, name=name, actor=request.account))
    return _shown(made, key=text)


async def used(app, request: APIRequest) -> Response:
    """POST /admin/keys/usage"""
    values = fields.read(request.json(), fields.USAGE)
    return _listed(await _run(app, partial(usage.totals, key=values.pop("name"), **values), writes=False))


async def audit(app, request: APIRequest) -> Response:
    """POST /admin/audit"""
    return _listed(await _run(app, partial(keys.audit, **fields.read(request.json(), fields.AUDIT)), writes=False))
