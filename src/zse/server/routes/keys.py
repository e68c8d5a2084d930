"""The admin's routes: keys of the database, their usage, the audit log. What they answer is on the disk."""

import time
from functools import partial
from typing import Any

from zse.http.exchange import Response
from zse.server.api_request import APIRequest
from zse.server.database import keys, usage
from zse.server.database.connection import Work
from zse.server.errors import APIError
from zse.server.key_watch import KeyWatch
from zse.server.requests import keys as fields


def _watch(app) -> KeyWatch:
    """Raises APIError where there is no database."""
    if app.key_watch is None or app.key_watch.database is None:
        raise APIError("not_found", "This server has no database of keys: start it with --database PATH.")
    return app.key_watch


async def _run(watch: KeyWatch, work: Work, writes: bool = True) -> Any:
    """Raises APIError."""
    assert watch.database is not None
    try:
        done = await watch.database.run(work, writes)
    except keys.KeyRefused as error:
        raise APIError(error.code, f"{str(error)[:1].upper()}{str(error)[1:]}.", "name") from None
    if writes:
        await watch.refresh()
    return done


def _shown(stored: keys.StoredKey, **more: object) -> Response:
    return Response.json(stored.public(time.time()) | more)


def _listed(rows: list) -> Response:
    return Response.json({"object": "list", "data": rows})


async def listed(app, request: APIRequest) -> Response:
    """GET /admin/keys"""
    watch = _watch(app)
    now = time.time()
    return _listed([key.public(now) for key in await _run(watch, keys.listed, writes=False)])


async def create(app, request: APIRequest) -> Response:
    """POST /admin/keys"""
    watch = _watch(app)
    name, settings = fields.read_settings(request.json(), fields.CREATE)
    made, text = await _run(watch, partial(keys.create, name=name, actor=request.account, **settings))
    return _shown(made, key=text)


async def update(app, request: APIRequest) -> Response:
    """POST /admin/keys/update"""
    watch = _watch(app)
    name, settings = fields.read_settings(request.json(), fields.UPDATE)
    return _shown(await _run(watch, partial(keys.change, name=name, actor=request.account, **settings)))


async def revoke(app, request: APIRequest) -> Response:
    """POST /admin/keys/revoke"""
    watch = _watch(app)
    name = fields.read(request.json(), fields.WHICH)["name"]
    return _shown(await _run(watch, partial(keys.revoke, name=name, actor=request.account)))


async def rotate(app, request: APIRequest) -> Response:
    """POST /admin/keys/rotate"""
    watch = _watch(app)
    name = fields.read(request.json(), fields.WHICH)["name"]
    made, text = await _run(watch, partial(keys.rotate, name=name, actor=request.account))
    return _shown(made, key=text)


async def used(app, request: APIRequest) -> Response:
    """POST /admin/keys/usage"""
    watch = _watch(app)
    values = fields.read(request.json(), fields.USAGE)
    return _listed(await _run(watch, partial(usage.totals, key=values.pop("name"), **values), writes=False))


async def audit(app, request: APIRequest) -> Response:
    """POST /admin/audit"""
    watch = _watch(app)
    return _listed(await _run(watch, partial(keys.audit, **fields.read(request.json(), fields.AUDIT)), writes=False))
