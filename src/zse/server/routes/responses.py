"""OpenAI's Responses API: answers, and those that are stored."""

import time
from functools import partial
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.server import database as storage
from zse.server.answering import Choice, ChoiceDelta, CompletionRun, Read, answer
from zse.server.api_request import APIRequest
from zse.server.errors import APIError, unsupported
from zse.server.logprobs import TokenScore, chat_logprobs
from zse.server.requests import queries
from zse.server.requests.responses import check_items, check_responses, completion_of, shown, shown_items
from zse.server.tools.calls import CallPart
from zse.server.work import OFF_LOOP_BYTES, maybe_in_thread

TEXT, REASONING, CALL = "message", "reasoning", "function_call"
_PREFIXES = {TEXT: "msg_", REASONING: "rs_", CALL: "fc_"}
_DELTAS = {TEXT: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}


class _Item:
    """One item of the output. text: of a message, of reasoning, or a call's arguments."""

    def __init__(self, kind: str, index: int, request_id: str, **more: object):
        self.kind, self.index, self._more = kind, index, more
        self.id = f"{_PREFIXES[kind]}{request_id}_{index}"
        self.text, self.status = "", "in_progress"
        self.logprobs: list[dict] = []

    @property
    def place(self) -> dict:
        """Where events say that it is."""
        return {"item_id": self.id, "output_index": self.index} | ({} if self.kind == CALL else {"content_index": 0})

    @property
    def part(self) -> dict:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def shown(self, begun: bool = False) -> dict:
        """The item; begun: as it begins, without its part."""
        out: dict = {"id": self.id, "type": self.kind, "status": self.status} | self._more
        if self.kind == CALL:
            return out | {"arguments": self.text}
        out["content"] = [] if begun else [self.part]
        out["summary" if self.kind == REASONING else "role"] = [] if self.kind == REASONING else "assistant"
        return out


class _Piece(msgspec.Struct):
    """Text that goes to an item. key: its kind, and the number of the call; more: what the item has beside."""

    key: tuple[str, int]
    text: str
    more: dict = {}


def _pieces(delta: ChoiceDelta) -> list[_Piece]:
    out = [_Piece((REASONING, 0), delta.reasoning)] if delta.reasoning else []
    out += [_Piece((TEXT, 0), delta.text)] if delta.text else []
    return out + [
        _Piece((CALL, index), call.arguments, {"call_id": call.id, "name": call.name}) for index, call in delta.calls
    ]


class _Writer:
    """A response of items: reasoning, a message, an item for each call."""

    def __init__(self, values: dict, job: CompletionRun):
        self.job = job
        if values["store"]:
            job.keeps.append(self._store)
        self._values = values
        self._id, self._shown = job.work.request.id.removeprefix("req_"), shown(values)
        self._num_events = 0
        self._items: list[_Item] = []
        self._open: tuple[str, int] | None = None  # kind and number of the call of the last item, where it goes on
        self._status = "in_progress"

    # -- what there is

    def _response(self) -> dict:
        work, params = self.job.work, self.job.completion.params
        is_over = self._status != "in_progress"
        return {
            "id": "resp_" + self._id,
            "object": "response",
            "created_at": self.job.created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self.job.completion.model or work.served.name,
            "output": [item.shown() for item in self._items] if is_over else [],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": self._usage() if is_over else None,
        } | self._shown

    def _usage(self) -> dict:
        usage = self.job.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    async def _store(self) -> None:
        """Keep the answer, which is over. Raises APIError."""
        values, app, tenant = self._values, self.job.work.app, self.job.work.request.tenant
        body, items = msgspec.json.encode(self._response()), msgspec.json.encode(values["input"])
        now, previous = time.time(), values["previous_response_id"] or ""
        row = storage.responses.StoredResponse("resp_" + self._id, previous, now, body, items)
        await app.database.run(partial(storage.responses.store, tenant=tenant, response=row, now=now))

    def _begin(self, piece: _Piece) -> _Item:
        self._open = piece.key
        self._items.append(_Item(piece.key[0], len(self._items), self._id, **piece.more))
        return self._items[-1]

    def _end(self, choice: Choice) -> None:
        self._status = "incomplete" if choice.finish_reason == "length" else "completed"

    def _scores(self, scores: list[TokenScore]) -> list:
        if self.job.completion.params.logprobs is None:
            return []
        return chat_logprobs(scores, self.job.model.token_bytes)["content"]

    # -- how it is written

    def whole(self) -> bytes:
        choice = self.job.choices[0]
        self._end(choice)
        calls = [(index, CallPart(call.name, call.arguments, call.id)) for index, call in enumerate(choice.calls)]
        for piece in _pieces(ChoiceDelta(choice.text, choice.reasoning, calls)):
            item = self._begin(piece)
            item.text, item.status = piece.text, self._status
            item.logprobs = self._scores(choice.scores) if item.kind == TEXT else []
        return msgspec.json.encode(self._response())

    def _event(self, kind: str, **values: object) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events} | values
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))

    def part(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> bytes:
        out = b""
        if is_first:
            response = self._response()
            out += self._event("response.created", response=response)
            out += self._event("response.in_progress", response=response)
        for piece in _pieces(delta):
            if piece.key != self._open:
                out += self._close("completed")
                item = self._begin(piece)
                out += self._event("response.output_item.added", output_index=item.index, item=item.shown(begun=True))
                if item.kind != CALL:
                    out += self._event("response.content_part.added", part=item.part, **item.place)
            item, more = self._items[-1], {}
            item.text += piece.text
            if item.kind == TEXT:
                more = {"logprobs": self._scores(delta.scores)}
                item.logprobs += more["logprobs"]
            out += self._event(f"response.{_DELTAS[item.kind]}.delta", delta=piece.text, **item.place, **more)
        if delta.finish_reason is not None:
            self._end(choice)
            out += self._close(self._status)
        return out

    def _close(self, status: str) -> bytes:
        """The last item is over."""
        if self._open is None:
            return b""
        item, self._open = self._items[-1], None
        item.status = status
        kind, out = f"response.{_DELTAS[item.kind]}.done", b""
        if item.kind == CALL:
            out += self._event(kind, arguments=item.text, **item.place)
        else:
            more = {"logprobs": item.logprobs} if item.kind == TEXT else {}
            out += self._event(kind, text=item.text, **item.place, **more)
            out += self._event("response.content_part.done", part=item.part, **item.place)
        return out + self._event("response.output_item.done", output_index=item.index, item=item.shown())

    def last(self) -> bytes:
        return self._event(f"response.{self._status}", response=self._response())


def _read(app, request: APIRequest, body: dict) -> Any:
    """What answering.Reader gives. Raises RequestError."""
    values = check_responses(body)
    for name in ("store", "previous_response_id"):
        if values[name] and app.database is None:
            raise unsupported(name, "responses are stored by a server with a database (--database PATH)")
    if values["previous_response_id"]:
        return _continued(app, request, values)
    return completion_of(values, values["input"]), partial(_Writer, values)


async def _continued(app, request: APIRequest, values: dict) -> Read:
    """The same of a request that goes on from a stored response."""
    id = values["previous_response_id"]
    work = partial(storage.responses.conversation, tenant=request.tenant, id=id, now=time.time())
    earlier = await app.database.run(work, writes=False)
    size = sum(response.size for response in earlier)
    if size > storage.responses.CONVERSATION_BYTES:
        message = (
            f"The stored conversation has more than {storage.responses.CONVERSATION_BYTES} bytes; begin a new one."
        )
        raise APIError("request_too_large", message, "previous_response_id")
    if not earlier or earlier[0].previous:
        message = "There is no such stored response, or one before it is gone; only those that were sent store: true are kept."
        raise APIError("not_found", message, "previous_response_id")
    is_long = size > OFF_LOOP_BYTES
    items = await maybe_in_thread(is_long, partial(_items_of, earlier))
    completion = await maybe_in_thread(is_long, lambda: completion_of(values, items + values["input"]))
    return completion, partial(_Writer, values)


def _items_of(earlier: list) -> list[dict]:
    """The items of stored responses, questions and answers. Raises RequestError."""
    items: list[dict] = []
    for response in earlier:
        items += msgspec.json.decode(response.items) + msgspec.json.decode(response.body)["output"]
    return check_items(items)


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
    queries.read(request.query, {})
    return Response(200, (await _run(app, request, "find")).body)


async def delete(app, request: APIRequest) -> Response:
    """DELETE /v1/responses/{response}"""
    await _run(app, request, "delete", writes=True)
    return Response.json({"id": request.parameters["response"], "object": "response", "deleted": True})


async def input_items(app, request: APIRequest) -> Response:
    """GET /v1/responses/{response}/input_items"""
    query = queries.read(request.query, queries.PAGE)
    earlier = await _run(app, request, "conversation")
    items = []
    for response in earlier:
        items += shown_items(msgspec.json.decode(response.items), response.id)
        if response is not earlier[-1]:
            items += msgspec.json.decode(response.body)["output"]
    return Response.json(queries.page(items, query))
