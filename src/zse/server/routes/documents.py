"""/v1/rag: documents of a tenant, passages of them, and answers that cite them."""

import time
from typing import Any

from zse.http import multipart
from zse.http.exchange import Response
from zse.rag import store
from zse.rag.documents import Passage
from zse.server import ingest, uploads
from zse.server.answering import answer
from zse.server.api_request import APIRequest
from zse.server.citations import CitedPassage
from zse.server.errors import APIError
from zse.server.requests import documents as requests
from zse.server.requests import queries
from zse.server.retrieval import cited_passage
from zse.server.routes.completions import chat_writer
from zse.server.work import RequestRun, maybe_in_thread

GENERAL_TYPES = ("application/octet-stream", "application/x-www-form-urlencoded")  # that say nothing of the file


async def add(app, request: APIRequest) -> Response:
    """POST /v1/rag/documents"""
    of = app.documents()
    with RequestRun(app, request) as run:
        if request.upload is None:
            queries.read(request.query, {})
            upload, data = await maybe_in_thread(True, lambda: requests.read_upload(request.json()))
            source = await maybe_in_thread(run.is_long, lambda: ingest.SentFile.of_bytes(data))
        else:
            kind = request.headers["content-type"].partition(";")[0].strip().lower()
            values = queries.read(request.query, requests.OPTIONS)
            if kind == "multipart/form-data":
                upload, source = await _form(of, request)
            else:
                upload = requests.read_options(values, "" if kind in GENERAL_TYPES else kind)
                source = await of.ingest.receive(request, request.upload)
        return Response.json(await of.ingest.add(request, upload, source))


async def _form(of: Any, request: APIRequest) -> tuple[requests.Upload, ingest.SentFile]:
    """What a form says, and the file in it."""
    sources: list[ingest.SentFile] = []
    about: dict[str, str] = {}

    async def take(part: multipart.FormPart) -> str:
        about.update(name=part.filename or "", media_type="" if part.media_type in GENERAL_TYPES else part.media_type)
        sources.append(await of.ingest.receive(request, part))
        return ""

    try:
        values = await uploads.read_form(request, requests.FORM, take)
        if values["name"] is None and about["name"]:
            values["name"] = requests.NAME.check(about["name"], "file")
        return requests.read_options(values, about["media_type"]), sources[0]
    except BaseException:
        for source in sources:
            of.ingest.release(request.tenant, source)
        raise


async def listed(app, request: APIRequest) -> Response:
    """GET /v1/rag/documents"""
    query, of, tenant = queries.read(request.query, requests.LISTED), app.documents(), request.tenant
    after, limit = query["after"] or "", query["limit"]
    found = await of.read(store.listed, tenant, after, limit + 1)
    rows = {document.id: ingest.shown(document, of.revision) for document in found}
    for (owner, id), pending in of.ingest.pending.items():
        if owner == tenant and id > after:
            rows[id] = _with_pending(rows.get(id), pending)
    return Response.json(queries.listed([rows[id] for id in sorted(rows)], limit))


def _with_pending(row: dict | None, pending: ingest.PendingDocument) -> dict:
    """A document whose next version is on its way says so; until then it is the one before."""
    return pending.shown if row is None else row | {"next": {"status": pending.status, "error": pending.error or None}}


async def retrieve(app, request: APIRequest) -> Response:
    """GET /v1/rag/documents/{document}"""
    queries.read(request.query, {})
    of, id = app.documents(), request.parameters["document"]
    found = await of.read(store.find, request.tenant, id)
    pending = of.ingest.pending.get((request.tenant, id))
    if found is None and pending is None:
        raise _missing()
    row = None if found is None else ingest.shown(found, of.revision)
    return Response.json(row if pending is None else _with_pending(row, pending))


async def delete(app, request: APIRequest) -> Response:
    """DELETE /v1/rag/documents/{document}"""
    of, id = app.documents(), request.parameters["document"]
    await of.opened()
    was_pending = await of.ingest.drop(request.tenant, id)
    if not await of.write(store.delete, request.tenant, id) and not was_pending:
        raise _missing()
    return Response.json({"id": id, "object": "rag.document", "deleted": True})


def _missing() -> APIError:
    return APIError("not_found", "There is no such document.")


async def search(app, request: APIRequest) -> Response:
    """POST /v1/rag/search"""
    began = time.perf_counter()
    with RequestRun(app, request) as run:
        finding, model = await maybe_in_thread(run.is_long, lambda: requests.read_search(request.json()))
        found = await app.documents().find(run, finding, model)
        if run.served is not None:
            run.outcomes["measured"] += 1
    body = {
        "object": "list",
        "query": finding.query,
        "data": [_hit(cited_passage(number, passage), passage) for number, passage in enumerate(found.passages, 1)],
        "stages": found.stages,
        "notes": found.notes,
        "took_ms": round(1000 * (time.perf_counter() - began), 3),
    }
    return Response.json(body)


def _hit(cited: CitedPassage, passage: Passage) -> dict:
    stages = {
        stage: {"rank": rank, "score": score, "part": part} for stage, (rank, score, part) in passage.stages.items()
    }
    return cited.shown | {"num_tokens": passage.chunk.num_tokens, "score": passage.score, "stages": stages}


async def ask(app, request: APIRequest) -> Response | None:
    """POST /v1/rag/ask"""
    return await answer(app, request, read=lambda body: (requests.read_ask(body), chat_writer))
