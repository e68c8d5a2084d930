"""The header Idempotency-Key: the answer of a request is given again, and is not made again, to one with the same key
and body.

As draft-ietf-httpapi-idempotency-key-header has it: 409 while the first runs, 422 for another body."""

import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from zse.http.exchange import Response
from zse.server import database as storage
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.requests.completions import SESSION_HEADER

HEADER = "Idempotency-Key"
MOST_CHARACTERS = 255


def refused(reason: str) -> APIError:
    """The 400 of a request whose answer cannot be kept."""
    return APIError("unsupported_parameter", f"{HEADER}: {reason}.", HEADER)


def of_a_stream() -> APIError:
    return refused("a streamed answer is not kept; send stream: false with it")


async def once(
    app: Any, request: APIRequest, handler: Callable[[Any, APIRequest], Awaitable[Response | None]]
) -> Response | None:
    """The kept answer, or the handler's, which is on the disk before it is given. What fails is not kept. Raises
    APIError."""
    key = request.headers["idempotency-key"]
    if not (0 < len(key) <= MOST_CHARACTERS and key.isascii() and key.isprintable()):
        message = f"{HEADER} must be 1 to {MOST_CHARACTERS} printable ASCII characters."
        raise APIError("invalid_value", message, HEADER)
    if app.database is None:
        raise refused("answers are kept by a server with a database (--database PATH)")
    session = request.headers.get(SESSION_HEADER)  # it says what the body goes on from
    route = request.route.path if session is None else f"{request.route.path}\0{session}"
    digest = hashlib.sha256(route.encode() + b"\0" + request.body).digest()
    name = (request.tenant, key)
    if name in app.running_keys:
        raise APIError("idempotency_key_in_use", f"A request with this {HEADER} is running.", HEADER)
    app.running_keys.add(name)
    try:
        work = partial(storage.answers.find, tenant=request.tenant, id=key, now=time.time())
        found = await app.database.run(work, writes=False)
        if found is not None and found.digest != digest:
            message = f"This {HEADER} was used for another request, whose answer is kept for a day."
            raise APIError("idempotency_key_reused", message, HEADER)
        if found is not None:
            request.note = "kept answer"
            return Response(200, found.body, [("idempotent-replayed", "true")], media_type=found.media_type)
        response = await handler(app, request)
        assert response is not None  # a stream is refused before it begins
        answer = storage.answers.KeptAnswer(digest, dict(response.headers)["content-type"], response.body)
        if response.status == 200:
            keep = partial(storage.answers.keep, tenant=request.tenant, key=key, answer=answer, now=time.time())
            await app.database.run(keep)
        return response
    finally:
        app.running_keys.discard(name)
