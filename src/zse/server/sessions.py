"""Conversations that the server keeps: a request with a session_id brings its new messages, and is answered as if it had
brought those before them and their answers, too.

The answer is kept before its end is sent; one that fails or is not waited for leaves the session as it was."""

import time
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from zse.cache import files as cache_files
from zse.server import database as storage
from zse.server.errors import APIError, unsupported
from zse.server.requests import image_parts
from zse.server.requests.completions import SESSION_HEADER, SESSION_ID, Extras
from zse.server.requests.conversation import MAX_MESSAGES, has_images, name_results
from zse.server.tools.calls import load_object
from zse.server.work import OFF_LOOP_BYTES, maybe_in_thread

if TYPE_CHECKING:
    from zse.server.answering import Choice, CompletionRun

FIELD = "session_id"


async def forget(app, tenant: str, id: str) -> None:
    """What was computed for a session alone goes from memory and, with --cache-disk, from the disk."""
    name = app.salts.session(tenant, id)
    for served in app.pool.models:
        served.engine.drop_session(name)
    if app.salts.folder is not None:  # of models that are not loaded now
        with suppress(OSError):
            await app.threads.run(tenant, partial(cache_files.remove_session, app.salts.folder, name))


def needs_database() -> APIError:
    return unsupported(FIELD, "sessions are kept by a server with a database (--database PATH)")


async def resume(job: "CompletionRun") -> None:
    """Put what the session has before what the request brings, and keep both and the answer at its end; where the request
    names one. Raises RequestError."""
    completion, work = job.completion, job.work
    app, request = work.app, work.request
    header = request.headers.get(SESSION_HEADER)
    id = completion.session_id or header
    if id is None:
        if completion.session_ttl is not None:
            raise APIError("invalid_value", f"'session_ttl' needs '{FIELD}'.", "session_ttl")
        return
    SESSION_ID.check(id, SESSION_HEADER)
    if header not in (None, id):
        raise APIError("invalid_value", f"'{FIELD}' and {SESSION_HEADER} differ; give one.", SESSION_HEADER)
    if app.database is None:
        raise needs_database()
    _check(job)
    work.claim(id)
    brought = completion.prompts[0] if completion.messages is None else completion.messages
    read = partial(storage.sessions.find, tenant=request.tenant, id=id, now=time.time())
    found = await app.database.run(read, writes=False)
    if found is not None and len(found[1]) > storage.sessions.SESSION_BYTES:
        message = f"This session has {len(found[1])} bytes; from {storage.sessions.SESSION_BYTES} on begin a new one."
        raise APIError("request_too_large", message, FIELD)
    before: Any = type(brought)()
    if found is not None:
        work.is_long = work.is_long or len(found[1]) > OFF_LOOP_BYTES
        before = await maybe_in_thread(work.is_long, partial(msgspec.json.decode, found[1]))
    whole = _joined(before, brought)
    if type(whole) is list and has_images(whole):
        completion.has_images = True
        _check_images(whole)
    if completion.messages is None:
        completion.prompts = [whole]
    else:
        completion.messages = whole
    ttl_s = min(app.session_ttl_s, completion.session_ttl or app.session_ttl_s)
    name = app.salts.session(request.tenant, id)
    completion.options = msgspec.structs.replace(completion.options, session=name, session_ttl=ttl_s)
    job.keeps.append(partial(_keep, job, id, 0 if found is None else found[0].turns, whole, ttl_s))


def _check(job: "CompletionRun") -> None:
    """Raises APIError for what a session cannot go on from."""
    completion = job.completion
    if completion.n > 1:
        raise APIError("invalid_value", f"'n' must be 1 with '{FIELD}': a session goes on from one answer.", "n")
    if completion.messages is None and (len(completion.prompts) > 1 or type(completion.prompts[0]) is not str):
        raise APIError("invalid_value", f"'prompt' must be one text with '{FIELD}'.", "prompt")
    for name in ("continue_final_message", "add_generation_prompt"):
        if getattr(completion.extras, name) is not getattr(Extras(), name):
            raise APIError("invalid_value", f"'{name}' does not go with '{FIELD}', whose answers are messages.", name)


def _check_images(messages: list[dict]) -> None:
    """Raises APIError for more images than a request may go on from: the session would be at its end."""
    size, most = image_parts.num_characters(messages), storage.sessions.SESSION_BYTES
    if size > most:
        message = f"The images of this session have {size} bytes, and a session keeps {most}: send smaller ones, or no '{FIELD}'."
        raise APIError("request_too_large", message, FIELD)


def _joined(before: Any, brought: Any) -> Any:
    """The conversation. Instructions at the head of new messages take the place of those before. Raises APIError."""
    if type(before) is not type(brought):
        kind = "messages" if type(before) is list else "a text"
        raise APIError("invalid_value", f"This session holds {kind}; use another one.", FIELD)
    if type(brought) is str:
        return before + brought
    if len(before) + len(brought) > MAX_MESSAGES:
        raise APIError("array_above_max_length", f"This session has {len(before)} messages; begin a new one.", FIELD)
    old, new = _instructions(before), _instructions(brought)
    return name_results((new or old) + before[len(old) :] + brought[len(new) :])


def _instructions(messages: list[dict]) -> list[dict]:
    return list(takewhile(lambda message: message["role"] == "system", messages))


async def _keep(job: "CompletionRun", id: str, turns: int, whole: Any, ttl_s: float) -> None:
    """Write the conversation with the answer. Raises APIError."""
    work, now = job.work, time.time()
    choice = min(job.choices, key=lambda choice: choice.rank)
    whole = whole + (choice.text if type(whole) is str else [_message(choice)])
    body = await maybe_in_thread(work.is_long, partial(msgspec.json.encode, whole))
    store = partial(storage.sessions.store, tenant=work.request.tenant, id=id, body=body, turns=turns)
    await work.app.database.run(partial(store, now=now, expires=now + ttl_s))


def _message(choice: "Choice") -> dict:
    """The answer, as messages of later requests stand in a Completion."""
    out: dict = {"role": "assistant", "content": choice.text}
    if choice.calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in choice.calls
        ]
    if choice.reasoning:
        out["reasoning_content"] = choice.reasoning
    return out


def _object(arguments: str) -> dict:
    """Arguments as templates take them. A model may have written others, which no template can show."""
    try:
        return load_object(arguments)
    except ValueError:
        return {}
