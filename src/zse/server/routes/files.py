"""OpenAI's files: uploaded, listed, read, deleted, by tenant."""

import asyncio
import math
import time
from functools import partial

import msgspec

from zse.http.exchange import Response
from zse.http.multipart import FormPart
from zse.sampling.fields import refused
from zse.server import database as storage
from zse.server.api_request import APIRequest
from zse.server.database.files import StoredFile
from zse.server.files import PIECE_BYTES, FileStore, Written, discard, needs_database
from zse.server.requests import files as fields
from zse.server.requests import queries
from zse.server.uploads import read_form


def _shown(file: StoredFile) -> dict:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created),
        "expires_at": int(file.expires) if file.expires < math.inf else None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _name(sent: str | None) -> str:
    """A file's name to show: without folders and control characters, whatever was sent."""
    name = (sent or "").replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in name if character.isprintable())[:255] or "upload"


async def _store(app) -> FileStore:
    if app.files is None:
        raise needs_database()
    await app.files.open()
    return app.files


async def create(app, request: APIRequest) -> Response:
    """POST /v1/files"""
    store, run = await _store(app), partial(app.threads.run, request.account)
    written: list[Written] = []

    async def take(part: FormPart) -> tuple[Written, str]:
        written.append(await store.write(request.tenant, aiter(part), run))
        return written[-1], _name(part.filename)

    is_done = False
    try:
        values = await read_form(request, fields.UPLOAD, take)
        content, filename = values["file"]
        if values["purpose"] == fields.BATCH and content.size > fields.MAX_BATCH_BYTES:
            message = f"A file of the purpose batch may have {fields.MAX_BATCH_BYTES} bytes."
            raise refused("request_too_large", message, "file")
        now, ends = time.time(), values["expires_after"]
        expires = math.inf if ends is None else now + ends["seconds"]
        digest = await run(content.keep)
        file = StoredFile(content.id, now, expires, content.size, filename, values["purpose"], digest)
        add = partial(storage.files.add, tenant=request.tenant, file=file, quota=store.quota)
        adding = asyncio.ensure_future(app.database.run(add))
        is_done = True
    finally:
        if not is_done:
            for content in written:
                discard(content)
    # A client that leaves now does not end this: its row may be there already, and the content has to stay with it.
    adding.add_done_callback(lambda done: discard(content) if done.cancelled() or done.exception() else None)
    await asyncio.shield(adding)
    return Response.json(_shown(file))


async def listed(app, request: APIRequest) -> Response:
    """GET /v1/files"""
    await _store(app)
    query = queries.read(request.query, fields.LIST)

    def work(connection) -> bytes:
        asked = query | {"limit": query["limit"] + 1}
        rows = storage.files.listed(connection, request.tenant, time.time(), **asked)
        return msgspec.json.encode(queries.listed(rows, query["limit"], _shown))

    return Response(200, await app.database.run(work, writes=False))


async def retrieve(app, request: APIRequest) -> Response:
    """GET /v1/files/{file}"""
    queries.read(request.query, {})
    store = await _store(app)
    return Response.json(_shown(await store.find(request, request.parameters["file"])))


async def content(app, request: APIRequest) -> Response | None:
    """GET /v1/files/{file}/content"""
    queries.read(request.query, {})
    store = await _store(app)
    file = await store.find(request, request.parameters["file"])
    run = partial(app.threads.run, request.account)
    opened = await run(partial(store.read, file.id))
    request.media_type, request.comment = "application/octet-stream", b""
    # Nothing of a tenant's file is run by a browser that is led here.
    request.more_headers = [
        *request.more_headers,
        ("content-disposition", "attachment"),
        ("content-security-policy", "sandbox"),
    ]
    try:
        if request.method == "HEAD" or not file.size:
            length = [("content-length", str(file.size))]
            return Response(200, b"", length, media_type=request.media_type)
        left = file.size
        while data := await run(partial(opened.read, PIECE_BYTES)):
            left -= len(data)
            request.send_events(data, is_last=left <= 0)
            await request.connection.drain()
        if left > 0:
            raise OSError("the file is shorter than its row says")
    except OSError:
        if not request.status:
            raise
        request.connection.abandon()  # a client must not take a part for the whole
    finally:
        opened.close()
    return None


async def delete(app, request: APIRequest) -> Response:
    """DELETE /v1/files/{file}"""
    store, id = await _store(app), request.parameters["file"]
    await store.delete(request, id)
    return Response.json({"id": id, "object": "file", "deleted": True})
