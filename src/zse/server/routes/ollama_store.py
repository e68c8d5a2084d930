"""The routes of Ollama's API that change the store: /api/pull, /api/delete."""

import asyncio
import hashlib

import msgspec

from zse.http.exchange import Response
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.requests.ollama import DELETE, PULL, read_which
from zse.server.routes.models import follow, pulled
from zse.server.routes.ollama import LINES
from zse.server.work import RequestRun, maybe_in_thread

SUCCESS = {"status": "success"}


def _line(found) -> dict:
    """How far a pull is, as Ollama's clients show it: they take what has a `digest` for a file with a bar of its
    own."""
    if found.state == "stored":
        return SUCCESS
    if not found.total:
        return {"status": found.notice or "pulling manifest"}
    digest = hashlib.sha256(f"{found.name}\0{found.total}".encode()).hexdigest()
    status = f"pulling {digest[:12]}" if found.label == "downloading" else "verifying sha256 digest"
    return {"status": status, "digest": f"sha256:{digest}", "total": found.total, "completed": found.done}


async def pull(app, request: APIRequest) -> Response | None:
    """POST /api/pull"""
    request.media_type, request.comment = LINES, b""
    with RequestRun(app, request):
        values = read_which(PULL, request.json())
        found = app.library.pull(values["model"].removesuffix(":latest"))
        work = asyncio.ensure_future(pulled(app, found, True))
        if values["stream"]:
            await follow(request, work, lambda: _line(found), lambda line: msgspec.json.encode(line) + b"\n")
            return None
        await work
        return Response.json(SUCCESS)


async def delete(app, request: APIRequest) -> Response:
    """DELETE /api/delete"""
    with RequestRun(app, request):
        name = read_which(DELETE, request.json())["model"]
        if name not in app.pool.by_name:
            name = name.removesuffix(":latest")
        served = app.pool.by_name.get(name)
        if served is not None:
            app.pool.remove(served)
        try:
            await maybe_in_thread(True, lambda: app.library.remove(name))
        except APIError as error:
            if served is None or error.code != "model_not_found":
                raise
        return Response(200, b"")
