"""OpenAI's batches: made, listed, looked at, cancelled, by tenant."""

import time
from functools import partial
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.sampling.fields import Object
from zse.server import batches
from zse.server import database as storage
from zse.server.api_request import APIRequest
from zse.server.database.batches import StoredBatch
from zse.server.errors import APIError
from zse.server.requests import batches as fields
from zse.server.requests import queries

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _shown(batch: StoredBatch) -> dict[str, Any]:
    times, problems = msgspec.json.decode(batch.times), msgspec.json.decode(batch.errors)
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created),
        "expires_at": int(batch.expires),
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": msgspec.json.decode(batch.metadata),
    } | {f"{status}_at": int(times[status]) if status in times else None for status in _TIMES}


async def _work(app, request: APIRequest, name: str, writes: bool = False, **values: Any) -> Any:
    batches.of(app)
    work = partial(getattr(storage.batches, name), tenant=request.tenant, **values)
    return await app.database.run(work, writes)


def _found(batch: StoredBatch | None) -> StoredBatch:
    if batch is None:
        raise APIError("not_found", "There is no such batch.")
    return batch


async def create(app, request: APIRequest) -> Response:
    """POST /v1/batches"""
    batches.of(app)
    values = Object(fields.CREATE).check(request.json(), "")
    metadata = msgspec.json.encode(values["metadata"]).decode()
    return Response.json(_shown(await batches.create(app, request, values, metadata)))


async def listed(app, request: APIRequest) -> Response:
    """GET /v1/batches"""
    query = queries.read(request.query, queries.LAST_FIRST)
    rows = await _work(app, request, "listed", limit=query["limit"] + 1, after=query["after"])
    return Response.json(queries.listed(rows, query["limit"], _shown))


async def retrieve(app, request: APIRequest) -> Response:
    """GET /v1/batches/{batch}"""
    queries.read(request.query, {})
    return Response.json(_shown(_found(await _work(app, request, "find", id=request.parameters["batch"]))))


async def cancel(app, request: APIRequest) -> Response:
    """POST /v1/batches/{batch}/cancel"""
    id = request.parameters["batch"]
    found = _found(await _work(app, request, "cancel", writes=True, id=id, now=time.time()))
    app.batches.cancelled(request.tenant, id)
    return Response.json(_shown(found))
